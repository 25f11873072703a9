#include "transport/verbs/library.h"

#include <dlfcn.h>

#include "common/error.h"

namespace uccl_ep::verbs {
namespace {

// A library stays loaded for good: its providers do not survive being unloaded.
struct Library {
  void* handle;
  std::string failure;
  explicit Library(const char* name) : handle(dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
    if (handle == nullptr) failure = dlerror();
  }
};

const Library& ibverbs() {
  static const Library library("libibverbs.so.1");
  return library;
}

void* symbol(const char* name) {
  // Functions of the first release have two versions; ours are the second ones.
  void* found = ibverbs().handle == nullptr ? nullptr : dlvsym(ibverbs().handle, name, "IBVERBS_1.1");
  if (found == nullptr && ibverbs().handle != nullptr) found = dlsym(ibverbs().handle, name);
  if (found == nullptr)
    throw UsageFailure(UsageKind::kConfig, std::string("libibverbs.so.1 has no ") + name +
                                               ": rdma-core 34 or later is needed; " + kVerbsPackages);
  return found;
}

}  // namespace

std::string load_library() {
  // A process that loads data forks. On kernels before 5.12 the first write after a fork would leave the memory of a
  // NIC's queues to the child. Later kernels need no protection, and there the call does nothing.
  static const int fork_is_safe = ibverbs().handle == nullptr ? 0 : ibv_fork_init();
  static_cast<void>(fork_is_safe);
  return ibverbs().failure;
}

void* efa_symbol(const char* name) {
  static const Library library("libefa.so.1");
  if (library.handle == nullptr)
    throw UsageFailure(UsageKind::kConfig,
                       "verbs: libefa cannot be loaded (" + library.failure + "): " + kVerbsPackages);
  void* const found = dlsym(library.handle, name);
  if (found == nullptr)
    throw UsageFailure(UsageKind::kConfig, std::string("verbs: libefa.so.1 has no ") + name +
                                               ": install the rdma-core of the EFA installer, or a newer "
                                               "ibverbs-providers");
  return found;
}

// Each of these functions looks up the library's function once.
#define UCCL_EP_CALL(type, name, parameters, arguments)                           \
  type name parameters {                                                          \
    using Function = type parameters;                                             \
    static Function* const function = reinterpret_cast<Function*>(symbol(#name)); \
    return function arguments;                                                    \
  }

UCCL_EP_CALL(ibv_device**, ibv_get_device_list, (int* count), (count))
UCCL_EP_CALL(void, ibv_free_device_list, (ibv_device * *list), (list))
UCCL_EP_CALL(const char*, ibv_get_device_name, (ibv_device * device), (device))
UCCL_EP_CALL(ibv_context*, ibv_open_device, (ibv_device * device), (device))
UCCL_EP_CALL(int, ibv_close_device, (ibv_context * context), (context))
UCCL_EP_CALL(int, ibv_query_device, (ibv_context * context, ibv_device_attr* attr), (context, attr))
UCCL_EP_CALL(ibv_pd*, ibv_alloc_pd, (ibv_context * context), (context))
UCCL_EP_CALL(int, ibv_dealloc_pd, (ibv_pd * pd), (pd))
UCCL_EP_CALL(ibv_mr*, ibv_reg_mr_iova2,
             (ibv_pd * pd, void* address, size_t num_bytes, uint64_t iova, unsigned int access),
             (pd, address, num_bytes, iova, access))
UCCL_EP_CALL(ibv_mr*, ibv_reg_dmabuf_mr,
             (ibv_pd * pd, uint64_t offset, size_t num_bytes, uint64_t iova, int fd, int access),
             (pd, offset, num_bytes, iova, fd, access))
UCCL_EP_CALL(int, ibv_dereg_mr, (ibv_mr * mr), (mr))
UCCL_EP_CALL(ibv_cq*, ibv_create_cq,
             (ibv_context * context, int cqe, void* cookie, ibv_comp_channel* channel, int vector),
             (context, cqe, cookie, channel, vector))
UCCL_EP_CALL(int, ibv_destroy_cq, (ibv_cq * cq), (cq))
UCCL_EP_CALL(ibv_srq*, ibv_create_srq, (ibv_pd * pd, ibv_srq_init_attr* attr), (pd, attr))
UCCL_EP_CALL(int, ibv_destroy_srq, (ibv_srq * srq), (srq))
UCCL_EP_CALL(ibv_qp_ex*, ibv_qp_to_qp_ex, (ibv_qp * qp), (qp))
UCCL_EP_CALL(int, ibv_modify_qp, (ibv_qp * qp, ibv_qp_attr* attr, int mask), (qp, attr, mask))
UCCL_EP_CALL(int, ibv_destroy_qp, (ibv_qp * qp), (qp))
UCCL_EP_CALL(ibv_ah*, ibv_create_ah, (ibv_pd * pd, ibv_ah_attr* attr), (pd, attr))
UCCL_EP_CALL(int, ibv_destroy_ah, (ibv_ah * ah), (ah))
UCCL_EP_CALL(int, ibv_get_async_event, (ibv_context * context, ibv_async_event* event), (context, event))
UCCL_EP_CALL(void, ibv_ack_async_event, (ibv_async_event * event), (event))
UCCL_EP_CALL(int, ibv_fork_init, (), ())
UCCL_EP_CALL(const char*, ibv_wc_status_str, (ibv_wc_status status), (status))

// The library's own function of this name fills only the fields that the first release had.
int ibv_query_port(ibv_context* context, uint8_t port, ibv_port_attr* attr) {
  verbs_context* const extended = extension_with(context, offsetof(verbs_context, query_port));
  if (extended != nullptr && extended->query_port != nullptr)
    return extended->query_port(context, port, attr, sizeof(*attr));
  using Function = int(ibv_context*, uint8_t, ibv_port_attr*);
  static Function* const function = reinterpret_cast<Function*>(symbol("ibv_query_port"));
  *attr = {};
  return function(context, port, attr);
}

ssize_t ibv_query_gid_table(ibv_context* context, ibv_gid_entry* entries, size_t most, uint32_t flags) {
  using Function = ssize_t(ibv_context*, ibv_gid_entry*, size_t, uint32_t, size_t);
  static Function* const function = reinterpret_cast<Function*>(symbol("_ibv_query_gid_table"));
  return function(context, entries, most, flags, sizeof(*entries));
}

}  // namespace uccl_ep::verbs
