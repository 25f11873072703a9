// The parts of libefa's binary interface that we use; see abi.h. Each call says the size of the structure that it
// passes. Versions are rdma-core's.
#pragma once

#include "transport/verbs/abi.h"

namespace uccl_ep::verbs {

enum efadv_qp_driver_type : uint32_t { EFADV_QP_DRIVER_TYPE_SRD = 0 };
enum efadv_qp_flags : uint16_t { EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV = 1 << 0 };  // since 52 at the latest
enum efadv_device_caps : uint32_t {
  EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE = 1 << 3,  // since 52 at the latest
  EFADV_DEVICE_ATTR_CAPS_UNSOLICITED_WRITE_RECV = 1 << 4,  // since 52 at the latest
};

struct efadv_qp_init_attr {
  uint64_t comp_mask;
  uint32_t driver_qp_type;
  uint16_t flags;  // since 52 at the latest; reserved before
  uint8_t sl;  // since 52 at the latest
  uint8_t unused;
};

struct efadv_device_attr {
  uint64_t comp_mask;
  uint32_t max_sq_wr;
  uint32_t max_rq_wr;
  uint16_t max_sq_sge;
  uint16_t max_rq_sge;
  uint16_t inline_buf_size;
  uint8_t unused[2];
  uint32_t device_caps;
  uint32_t max_rdma_size;
};

struct efadv_ah_attr {
  uint64_t comp_mask;
  uint16_t ahn;
  uint8_t unused[6];
};

using efadv_create_qp_ex = ibv_qp*(ibv_context*, ibv_qp_init_attr_ex*, efadv_qp_init_attr*, uint32_t);
using efadv_query_device = int(ibv_context*, efadv_device_attr*, uint32_t);
using efadv_query_ah = int(ibv_ah*, efadv_ah_attr*, uint32_t);

}  // namespace uccl_ep::verbs
