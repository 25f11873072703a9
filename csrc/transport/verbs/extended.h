// What libibverbs' documentation calls extended: functions stored before a context, and calls that go through tables
// instead of into the library.
#pragma once

#include "transport/verbs/abi.h"

namespace uccl_ep::verbs {

// The structure grows at its beginning: offsets count from `context`, and `sz` says how much of it the driver filled.
struct verbs_context {
  int (*query_port)(ibv_context* context, uint8_t port_num, ibv_port_attr* port_attr, size_t port_attr_len);
  void* unused_functions[32];
  ibv_qp* (*create_qp_ex)(ibv_context* context, ibv_qp_init_attr_ex* qp_init_attr_ex);
  void* unused_domains[5];
  size_t sz;
  ibv_context context;
};

constexpr uintptr_t kExtendedAbi = UINTPTR_MAX;  // in ibv_context::abi_compat

// nullptr: the context is too old to have an extension.
inline verbs_context* verbs_get_ctx(ibv_context* context) {
  if (reinterpret_cast<uintptr_t>(context->abi_compat) != kExtendedAbi) return nullptr;
  return reinterpret_cast<verbs_context*>(reinterpret_cast<uint8_t*>(context) - offsetof(verbs_context, context));
}

// The context's extension, if the driver has filled the function at `offset` in our verbs_context; else nullptr.
inline verbs_context* extension_with(ibv_context* context, size_t offset) {
  verbs_context* const extended = verbs_get_ctx(context);
  return extended != nullptr && extended->sz >= sizeof(verbs_context) - offset ? extended : nullptr;
}

// On failure nullptr and errno: EOPNOTSUPP if the driver knows no ibv_wr_*.
inline ibv_qp* ibv_create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex* init) {
  verbs_context* const extended = extension_with(context, offsetof(verbs_context, create_qp_ex));
  if (extended != nullptr && extended->create_qp_ex != nullptr) return extended->create_qp_ex(context, init);
  errno = EOPNOTSUPP;
  return nullptr;
}

inline int ibv_poll_cq(ibv_cq* cq, int count, ibv_wc* completions) {
  return cq->context->ops.poll_cq(cq, count, completions);
}
inline int ibv_post_srq_recv(ibv_srq* srq, ibv_recv_wr* receives, ibv_recv_wr** bad) {
  return srq->context->ops.post_srq_recv(srq, receives, bad);
}
inline int ibv_post_recv(ibv_qp* qp, ibv_recv_wr* receives, ibv_recv_wr** bad) {
  return qp->context->ops.post_recv(qp, receives, bad);
}

inline void ibv_wr_start(ibv_qp_ex* qp) { qp->wr_start(qp); }
inline int ibv_wr_complete(ibv_qp_ex* qp) { return qp->wr_complete(qp); }
inline void ibv_wr_rdma_write_imm(ibv_qp_ex* qp, uint32_t rkey, uint64_t remote, uint32_t immediate) {
  qp->wr_rdma_write_imm(qp, rkey, remote, immediate);
}
inline void ibv_wr_send(ibv_qp_ex* qp) { qp->wr_send(qp); }
inline void ibv_wr_set_ud_addr(ibv_qp_ex* qp, ibv_ah* ah, uint32_t remote_qpn, uint32_t remote_qkey) {
  qp->wr_set_ud_addr(qp, ah, remote_qpn, remote_qkey);
}
inline void ibv_wr_set_sge(ibv_qp_ex* qp, uint32_t lkey, uint64_t address, uint32_t num_bytes) {
  qp->wr_set_sge(qp, lkey, address, num_bytes);
}
inline void ibv_wr_set_sge_list(ibv_qp_ex* qp, size_t count, const ibv_sge* list) {
  qp->wr_set_sge_list(qp, count, list);
}

}  // namespace uccl_ep::verbs
