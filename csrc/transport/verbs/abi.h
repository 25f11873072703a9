// The parts of libibverbs' binary interface that we use, under their documented names, so that a build needs none of
// its headers. tests/native/test_abi.py compares every field and value with the real headers where they are installed.
// Fields named `unused` take the place of what we do not touch. The interface is stable: structures grow only at their
// ends (verbs_context at its beginning). A size or a mask says how much of a growing structure is there.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace uccl_ep::verbs {

enum ibv_gid_type : int { IBV_GID_TYPE_ROCE_V1 = 1, IBV_GID_TYPE_ROCE_V2 = 2 };
enum ibv_mtu : int { IBV_MTU_1024 = 3, IBV_MTU_4096 = 5 };
enum ibv_port_state : int { IBV_PORT_DOWN = 1, IBV_PORT_ACTIVE = 4 };
enum ibv_link_layer : uint8_t { IBV_LINK_LAYER_UNSPECIFIED = 0, IBV_LINK_LAYER_ETHERNET = 2 };
enum ibv_event_type : int {
  IBV_EVENT_CQ_ERR = 0,
  IBV_EVENT_DEVICE_FATAL = 8,
  IBV_EVENT_PORT_ACTIVE = 9,
  IBV_EVENT_PORT_ERR = 10,
  IBV_EVENT_SRQ_ERR = 14,
  IBV_EVENT_GID_CHANGE = 18,
};
enum ibv_wc_status : int {
  IBV_WC_SUCCESS = 0,
  IBV_WC_WR_FLUSH_ERR = 5,
  IBV_WC_REM_ACCESS_ERR = 10,
  IBV_WC_RETRY_EXC_ERR = 12,
};
enum ibv_wc_opcode : int {
  IBV_WC_SEND = 0,
  IBV_WC_RDMA_WRITE = 1,
  IBV_WC_RECV = 1 << 7,
  IBV_WC_RECV_RDMA_WITH_IMM = 129
};
enum ibv_wc_flags : unsigned int { IBV_WC_WITH_IMM = 1 << 1 };
enum ibv_access_flags : unsigned int {
  IBV_ACCESS_LOCAL_WRITE = 1 << 0,
  IBV_ACCESS_REMOTE_WRITE = 1 << 1,
  IBV_ACCESS_RELAXED_ORDERING = 1 << 20,
};
enum ibv_qp_type : int { IBV_QPT_RC = 2, IBV_QPT_UD = 4, IBV_QPT_DRIVER = 0xff };
enum ibv_qp_state : int {
  IBV_QPS_RESET = 0,
  IBV_QPS_INIT = 1,
  IBV_QPS_RTR = 2,
  IBV_QPS_RTS = 3,
  IBV_QPS_ERR = 6,
};
enum ibv_qp_init_attr_mask : uint32_t { IBV_QP_INIT_ATTR_PD = 1 << 0, IBV_QP_INIT_ATTR_SEND_OPS_FLAGS = 1 << 6 };
enum ibv_qp_create_send_ops_flags : uint64_t {
  IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM = 1 << 1,
  IBV_QP_EX_WITH_SEND = 1 << 2,
};
enum ibv_qp_attr_mask : int {
  IBV_QP_STATE = 1 << 0,
  IBV_QP_ACCESS_FLAGS = 1 << 3,
  IBV_QP_PKEY_INDEX = 1 << 4,
  IBV_QP_PORT = 1 << 5,
  IBV_QP_QKEY = 1 << 6,
  IBV_QP_AV = 1 << 7,
  IBV_QP_PATH_MTU = 1 << 8,
  IBV_QP_TIMEOUT = 1 << 9,
  IBV_QP_RETRY_CNT = 1 << 10,
  IBV_QP_RNR_RETRY = 1 << 11,
  IBV_QP_RQ_PSN = 1 << 12,
  IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
  IBV_QP_MIN_RNR_TIMER = 1 << 15,
  IBV_QP_SQ_PSN = 1 << 16,
  IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
  IBV_QP_DEST_QPN = 1 << 20,
};
enum ibv_send_flags : unsigned int { IBV_SEND_SIGNALED = 1 << 1 };

struct ibv_comp_channel;
struct ibv_context;
struct ibv_qp_ex;
struct ibv_xrcd;

// Big-endian.
union ibv_gid {
  uint8_t raw[16];
  struct {
    uint64_t subnet_prefix;
    uint64_t interface_id;
  } global;
};

struct ibv_gid_entry {
  ibv_gid gid;
  uint32_t gid_index;
  uint32_t port_num;
  uint32_t gid_type;
  uint32_t ndev_ifindex;
};

struct ibv_device {
  void* unused_ops[2];
  int node_type;
  int transport_type;
  char name[64];
  char dev_name[64];
  char dev_path[256];
  char ibdev_path[256];
};

struct ibv_device_attr {
  char fw_ver[64];
  uint64_t node_guid;
  uint64_t sys_image_guid;
  uint64_t max_mr_size;
  uint64_t page_size_cap;
  uint32_t vendor_id;
  uint32_t vendor_part_id;
  uint32_t hw_ver;
  int max_qp;
  int max_qp_wr;
  unsigned int device_cap_flags;
  int max_sge;
  int max_sge_rd;
  int max_cq;
  int max_cqe;
  int unused_limits[19];
  int max_srq;
  int max_srq_wr;
  int max_srq_sge;
  uint16_t max_pkeys;
  uint8_t local_ca_ack_delay;
  uint8_t phys_port_cnt;
};

struct ibv_port_attr {
  ibv_port_state state;
  ibv_mtu max_mtu;
  ibv_mtu active_mtu;
  int gid_tbl_len;
  uint32_t port_cap_flags;
  uint32_t max_msg_sz;
  uint32_t bad_pkey_cntr;
  uint32_t qkey_viol_cntr;
  uint16_t pkey_tbl_len;
  uint16_t lid;
  uint16_t sm_lid;
  uint8_t lmc;
  uint8_t max_vl_num;
  uint8_t sm_sl;
  uint8_t subnet_timeout;
  uint8_t init_type_reply;
  uint8_t active_width;
  uint8_t active_speed;
  uint8_t phys_state;
  uint8_t link_layer;
  uint8_t flags;
  uint16_t port_cap_flags2;
};

struct ibv_pd {
  ibv_context* context;
  uint32_t handle;
};

struct ibv_mr {
  ibv_context* context;
  ibv_pd* pd;
  void* addr;
  size_t length;
  uint32_t handle;
  uint32_t lkey;
  uint32_t rkey;
};

struct ibv_ah {
  ibv_context* context;
  ibv_pd* pd;
  uint32_t handle;
};

struct ibv_global_route {
  ibv_gid dgid;
  uint32_t flow_label;
  uint8_t sgid_index;
  uint8_t hop_limit;
  uint8_t traffic_class;
};

struct ibv_ah_attr {
  ibv_global_route grh;
  uint16_t dlid;
  uint8_t sl;
  uint8_t src_path_bits;
  uint8_t static_rate;
  uint8_t is_global;
  uint8_t port_num;
};

struct ibv_cq {
  ibv_context* context;
  ibv_comp_channel* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t comp_events_completed;
  uint32_t async_events_completed;
};

struct ibv_srq {
  ibv_context* context;
  void* srq_context;
  ibv_pd* pd;
  uint32_t handle;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t events_completed;
};

struct ibv_srq_attr {
  uint32_t max_wr;
  uint32_t max_sge;
  uint32_t srq_limit;
};

struct ibv_srq_init_attr {
  void* srq_context;
  ibv_srq_attr attr;
};

struct ibv_qp {
  ibv_context* context;
  void* qp_context;
  ibv_pd* pd;
  ibv_cq* send_cq;
  ibv_cq* recv_cq;
  ibv_srq* srq;
  uint32_t handle;
  uint32_t qp_num;
  ibv_qp_state state;
  ibv_qp_type qp_type;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t events_completed;
};

struct ibv_qp_cap {
  uint32_t max_send_wr;
  uint32_t max_recv_wr;
  uint32_t max_send_sge;
  uint32_t max_recv_sge;
  uint32_t max_inline_data;
};

// comp_mask says how much of it is read.
struct ibv_qp_init_attr_ex {
  void* qp_context;
  ibv_cq* send_cq;
  ibv_cq* recv_cq;
  ibv_srq* srq;
  ibv_qp_cap cap;
  ibv_qp_type qp_type;
  int sq_sig_all;
  uint32_t comp_mask;
  ibv_pd* pd;
  ibv_xrcd* xrcd;
  uint32_t create_flags;
  uint16_t max_tso_header;
  void* rwq_ind_tbl;
  uint64_t unused_rx_hash_conf[3];
  uint32_t source_qpn;
  uint64_t send_ops_flags;
};

struct ibv_qp_attr {
  ibv_qp_state qp_state;
  ibv_qp_state cur_qp_state;
  ibv_mtu path_mtu;
  int path_mig_state;
  uint32_t qkey;
  uint32_t rq_psn;
  uint32_t sq_psn;
  uint32_t dest_qp_num;
  unsigned int qp_access_flags;
  ibv_qp_cap cap;
  ibv_ah_attr ah_attr;
  ibv_ah_attr alt_ah_attr;
  uint16_t pkey_index;
  uint16_t alt_pkey_index;
  uint8_t en_sqd_async_notify;
  uint8_t sq_draining;
  uint8_t max_rd_atomic;
  uint8_t max_dest_rd_atomic;
  uint8_t min_rnr_timer;
  uint8_t port_num;
  uint8_t timeout;
  uint8_t retry_cnt;
  uint8_t rnr_retry;
  uint8_t alt_port_num;
  uint8_t alt_timeout;
  uint32_t rate_limit;
};

struct ibv_async_event {
  union {
    ibv_cq* cq;
    ibv_qp* qp;
    ibv_srq* srq;
    int port_num;
  } element;
  ibv_event_type event_type;
};

struct ibv_wc {
  uint64_t wr_id;
  ibv_wc_status status;
  ibv_wc_opcode opcode;
  uint32_t vendor_err;
  uint32_t byte_len;
  uint32_t imm_data;  // big-endian
  uint32_t qp_num;
  uint32_t src_qp;
  unsigned int wc_flags;
  uint16_t pkey_index;
  uint16_t slid;
  uint8_t sl;
  uint8_t dlid_path_bits;
};

struct ibv_sge {
  uint64_t addr;
  uint32_t length;
  uint32_t lkey;
};

struct ibv_recv_wr {
  uint64_t wr_id;
  ibv_recv_wr* next;
  ibv_sge* sg_list;
  int num_sge;
};

// The driver's functions, which need no call into libibverbs.
struct ibv_context_ops {
  void* unused_compat[11];
  int (*poll_cq)(ibv_cq* cq, int num_entries, ibv_wc* wc);
  void* unused_queues[8];
  int (*post_srq_recv)(ibv_srq* srq, ibv_recv_wr* recv_wr, ibv_recv_wr** bad_recv_wr);
  void* unused_pairs[5];
  int (*post_recv)(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad_wr);
  void* unused_rest[5];
};

struct ibv_context {
  ibv_device* device;
  ibv_context_ops ops;
  int cmd_fd;
  int async_fd;
  int num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;
};

struct ibv_qp_ex {
  ibv_qp qp_base;
  uint64_t comp_mask;
  uint64_t wr_id;
  unsigned int wr_flags;
  void* unused_operations[6];
  void (*wr_rdma_write_imm)(ibv_qp_ex* qp, uint32_t rkey, uint64_t remote_addr, uint32_t imm_data);
  void (*wr_send)(ibv_qp_ex* qp);
  void* unused_sends[3];
  void (*wr_set_ud_addr)(ibv_qp_ex* qp, ibv_ah* ah, uint32_t remote_qpn, uint32_t remote_qkey);
  void* unused_setters[3];
  void (*wr_set_sge)(ibv_qp_ex* qp, uint32_t lkey, uint64_t addr, uint32_t length);
  void (*wr_set_sge_list)(ibv_qp_ex* qp, size_t num_sge, const ibv_sge* sg_list);
  void (*wr_start)(ibv_qp_ex* qp);
  int (*wr_complete)(ibv_qp_ex* qp);
  void (*wr_abort)(ibv_qp_ex* qp);
};

}  // namespace uccl_ep::verbs
