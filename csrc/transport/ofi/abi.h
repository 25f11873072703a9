// The parts of libfabric's binary interface that we use, under their documented names, so that a build needs none of
// its headers. Constants begin with kFi, because most of libfabric's are macros. tests/native/test_abi.py compares
// every field and value with the real headers where they are installed. Fields named `unused` take the place of what we
// do not touch. Structures that the library allocates grow only at their ends. Structures that we allocate, and that it
// reads or fills by its version, are as large as in kDeclaredVersion.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace uccl_ep::ofi {

constexpr uint32_t fi_version_of(uint32_t major, uint32_t minor) { return major << 16 | minor; }
constexpr uint32_t kDeclaredVersion = fi_version_of(1, 20);

// Capabilities, flags of operations, and mode bits.
constexpr uint64_t kFiMsg = uint64_t{1} << 1;
constexpr uint64_t kFiRma = uint64_t{1} << 2;
constexpr uint64_t kFiWrite = uint64_t{1} << 9;
constexpr uint64_t kFiRecv = uint64_t{1} << 10;
constexpr uint64_t kFiSend = uint64_t{1} << 11;
constexpr uint64_t kFiTransmit = uint64_t{1} << 11;
constexpr uint64_t kFiRemoteWrite = uint64_t{1} << 13;
constexpr uint64_t kFiRemoteCqData = uint64_t{1} << 17;
constexpr uint64_t kFiMore = uint64_t{1} << 18;
constexpr uint64_t kFiCompletion = uint64_t{1} << 24;
constexpr uint64_t kFiDeliveryComplete = uint64_t{1} << 28;
constexpr uint64_t kFiMrDmabuf = uint64_t{1} << 40;  // since 1.20
constexpr uint64_t kFiHmem = uint64_t{1} << 47;
constexpr uint64_t kFiSource = uint64_t{1} << 57;
constexpr uint64_t kFiContext2 = uint64_t{1} << 52;
constexpr uint64_t kFiContext = uint64_t{1} << 59;

constexpr int kFiMrLocal = 1 << 2;
constexpr int kFiMrVirtAddr = 1 << 4;
constexpr int kFiMrAllocated = 1 << 5;
constexpr int kFiMrProvKey = 1 << 6;
constexpr int kFiMrEndpoint = 1 << 9;
constexpr int kFiMrHmem = 1 << 10;

constexpr int kFiAvTable = 2;
constexpr int kFiBusPci = 1;
constexpr int kFiCqFormatData = 3;
constexpr int kFiEnable = 6;
constexpr int kFiEpRdm = 3;
constexpr int kFiHmemSystem = 0;
constexpr int kFiHmemCuda = 1;
constexpr int kFiProgressManual = 2;
constexpr int kFiRmEnabled = 2;
constexpr uint32_t kFiSockaddrIn6 = 3;
constexpr int kFiThreadDomain = 3;

// Errors beyond errno's; libfabric uses errno's for the rest.
constexpr int kFiEavail = 259;

using fi_addr_t = uint64_t;
constexpr fi_addr_t kFiAddrUnspec = UINT64_MAX;
constexpr fi_addr_t kFiAddrNotavail = UINT64_MAX;

struct fid_fabric;
struct fid_domain;
struct fid_av;
struct fid_cq;
struct fid_ep;
struct fid_mr;
struct fi_cq_err_entry;

// ---------------------------------------------------------------------------- what the library allocates

struct fi_tx_attr {
  uint64_t caps;
  uint64_t mode;
  uint64_t op_flags;
  uint64_t msg_order;
  uint64_t comp_order;
  size_t inject_size;
  size_t size;
};

struct fi_ep_attr {
  int type;
  uint32_t protocol;
  uint32_t protocol_version;
  size_t max_msg_size;
};

struct fi_domain_attr {
  fid_domain* domain;
  char* name;
  int threading;
  int control_progress;
  int data_progress;
  int resource_mgmt;
  int av_type;
  int mr_mode;
  size_t mr_key_size;
  size_t cq_data_size;
};

struct fi_fabric_attr {
  fid_fabric* fabric;
  char* name;
  char* prov_name;
  uint32_t prov_version;
  uint32_t api_version;
};

struct fi_pci_attr {
  uint16_t domain_id;
  uint8_t bus_id;
  uint8_t device_id;
  uint8_t function_id;
};

struct fi_bus_attr {
  int bus_type;
  union {
    fi_pci_attr pci;
  } attr;
};

struct fid;
struct fi_ops {
  size_t size;
  int (*close)(fid* object);
  int (*bind)(fid* object, fid* other, uint64_t flags);
  int (*control)(fid* object, int command, void* argument);
};

struct fid {
  size_t fclass;
  void* context;
  fi_ops* ops;
};

struct fid_nic {
  struct fid fid;
  void* unused_device_attr;
  fi_bus_attr* bus_attr;
};

struct fi_info {
  fi_info* next;
  uint64_t caps;
  uint64_t mode;
  uint32_t addr_format;
  size_t src_addrlen;
  size_t dest_addrlen;
  void* src_addr;
  void* dest_addr;
  struct fid* handle;
  fi_tx_attr* tx_attr;
  void* unused_rx_attr;
  fi_ep_attr* ep_attr;
  fi_domain_attr* domain_attr;
  fi_fabric_attr* fabric_attr;
  fid_nic* nic;
};

// ---------------------------------------------------------------------------- what we allocate

struct fi_context2 {
  void* internal[8];
};

struct fi_av_attr {
  int type;
  int rx_ctx_bits;
  size_t count;
  size_t ep_per_node;
  const char* name;
  void* map_addr;
  uint64_t flags;
};

struct fi_cq_attr {
  size_t size;
  uint64_t flags;
  int format;
  int wait_obj;
  int signaling_vector;
  int wait_cond;
  void* wait_set;
};

struct fi_cq_data_entry {
  void* op_context;
  uint64_t flags;
  size_t len;
  void* buf;
  uint64_t data;
};

struct fi_cq_err_entry {
  void* op_context;
  uint64_t flags;
  size_t len;
  void* buf;
  uint64_t data;
  uint64_t tag;
  size_t olen;
  int err;
  int prov_errno;
  void* err_data;
  size_t err_data_size;
  fi_addr_t src_addr;  // since 1.20
};

struct fi_mr_dmabuf {  // since 1.20
  int fd;
  uint64_t offset;
  size_t len;
  void* base_addr;
};

struct fi_mr_attr {
  union {
    const iovec* mr_iov;
    const fi_mr_dmabuf* dmabuf;  // since 1.20
  };
  size_t iov_count;
  uint64_t access;
  uint64_t offset;
  uint64_t requested_key;
  void* context;
  size_t auth_key_size;
  uint8_t* auth_key;
  int iface;
  union {
    uint64_t reserved;
    int cuda;
  } device;
  void* unused_since_1_18[4];
};

struct fi_msg {
  const iovec* msg_iov;
  void** desc;
  size_t iov_count;
  fi_addr_t addr;
  void* context;
  uint64_t data;
};

struct fi_rma_iov {
  uint64_t addr;
  size_t len;
  uint64_t key;
};

struct fi_msg_rma {
  const iovec* msg_iov;
  void** desc;
  size_t iov_count;
  fi_addr_t addr;
  const fi_rma_iov* rma_iov;
  size_t rma_iov_count;
  void* context;
  uint64_t data;
};

}  // namespace uccl_ep::ofi
