// libibverbs and libefa, found at run time: a machine without them has no verbs transport and misses nothing else. The
// functions below are the library's own, by their documented names; load_library() comes first. A call throws
// UsageFailure(kConfig) if the library is missing or lacks the function.
#pragma once

#include <string>

#include "transport/verbs/abi.h"
#include "transport/verbs/extended.h"

namespace uccl_ep::verbs {

// The packages with the libraries and the drivers' parts of them, in the words of an error.
constexpr const char* kVerbsPackages =
    "install rdma-core's libraries (Debian, Ubuntu: apt-get install libibverbs1 ibverbs-providers)";

// Loads libibverbs. Returns why it cannot be loaded; empty: it is loaded.
std::string load_library();
// A function of libefa. Throws UsageFailure(kConfig) without the library or without the function.
void* efa_symbol(const char* name);

ibv_device** ibv_get_device_list(int* count);
void ibv_free_device_list(ibv_device** list);
const char* ibv_get_device_name(ibv_device* device);
ibv_context* ibv_open_device(ibv_device* device);
int ibv_close_device(ibv_context* context);
int ibv_query_device(ibv_context* context, ibv_device_attr* attr);
int ibv_query_port(ibv_context* context, uint8_t port, ibv_port_attr* attr);
ssize_t ibv_query_gid_table(ibv_context* context, ibv_gid_entry* entries, size_t most, uint32_t flags);
ibv_pd* ibv_alloc_pd(ibv_context* context);
int ibv_dealloc_pd(ibv_pd* pd);
ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, size_t num_bytes, uint64_t iova, unsigned int access);
ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, uint64_t offset, size_t num_bytes, uint64_t iova, int fd, int access);
int ibv_dereg_mr(ibv_mr* mr);
ibv_cq* ibv_create_cq(ibv_context* context, int cqe, void* cookie, ibv_comp_channel* channel, int vector);
int ibv_destroy_cq(ibv_cq* cq);
ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr* attr);
int ibv_destroy_srq(ibv_srq* srq);
ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp);
int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask);
int ibv_destroy_qp(ibv_qp* qp);
ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* attr);
int ibv_destroy_ah(ibv_ah* ah);
int ibv_get_async_event(ibv_context* context, ibv_async_event* event);
void ibv_ack_async_event(ibv_async_event* event);
int ibv_fork_init();
const char* ibv_wc_status_str(ibv_wc_status status);

}  // namespace uccl_ep::verbs
