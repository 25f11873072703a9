#include "transport/verbs/library.h"

#include <dlfcn.h>
#include <infiniband/verbs.h>

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
    throw UsageFailure(UsageKind::kConfig,
                       std::string("libibverbs.so.1 has no ") + name + ": rdma-core 34 or later is needed");
  return found;
}

}  // namespace

std::string load_library() {
  // A process that loads data forks. On kernels before 5.12 the queues of a NIC would go to the child at its first
  // write; later ones need nothing, and this does nothing there.
  static const int fork_is_safe = ibverbs().handle == nullptr ? 0 : ibv_fork_init();
  static_cast<void>(fork_is_safe);
  return ibverbs().failure;
}

void* efa_symbol(const char* name) {
  static const Library library("libefa.so.1");
  return library.handle == nullptr ? nullptr : dlsym(library.handle, name);
}

}  // namespace uccl_ep::verbs

// The functions that the inline ones of verbs.h and we call. Ours forward to the library's; they are hidden, so that
// nobody else in the process meets them.
#undef ibv_query_port
#define UCCL_EP_FORWARD(type, name, parameters, arguments)                                        \
  extern "C" __attribute__((visibility("hidden"))) type name parameters {                         \
    using Function = type parameters;                                                             \
    static Function* const function = reinterpret_cast<Function*>(uccl_ep::verbs::symbol(#name)); \
    return function arguments;                                                                    \
  }

UCCL_EP_FORWARD(ibv_device**, ibv_get_device_list, (int* count), (count))
UCCL_EP_FORWARD(void, ibv_free_device_list, (ibv_device * *list), (list))
UCCL_EP_FORWARD(const char*, ibv_get_device_name, (ibv_device * device), (device))
UCCL_EP_FORWARD(ibv_context*, ibv_open_device, (ibv_device * device), (device))
UCCL_EP_FORWARD(int, ibv_close_device, (ibv_context * context), (context))
UCCL_EP_FORWARD(int, ibv_query_device, (ibv_context * context, ibv_device_attr* attr), (context, attr))
UCCL_EP_FORWARD(int, ibv_query_port, (ibv_context * context, uint8_t port, _compat_ibv_port_attr* attr),
                (context, port, attr))
UCCL_EP_FORWARD(int, ibv_query_gid, (ibv_context * context, uint8_t port, int index, ibv_gid* gid),
                (context, port, index, gid))
UCCL_EP_FORWARD(ssize_t, _ibv_query_gid_table,
                (ibv_context * context, ibv_gid_entry* entries, size_t most, uint32_t flags, size_t entry_bytes),
                (context, entries, most, flags, entry_bytes))
UCCL_EP_FORWARD(ibv_pd*, ibv_alloc_pd, (ibv_context * context), (context))
UCCL_EP_FORWARD(int, ibv_dealloc_pd, (ibv_pd * pd), (pd))
UCCL_EP_FORWARD(ibv_mr*, ibv_reg_mr_iova2,
                (ibv_pd * pd, void* address, size_t num_bytes, uint64_t iova, unsigned int access),
                (pd, address, num_bytes, iova, access))
UCCL_EP_FORWARD(ibv_mr*, ibv_reg_dmabuf_mr,
                (ibv_pd * pd, uint64_t offset, size_t num_bytes, uint64_t iova, int fd, int access),
                (pd, offset, num_bytes, iova, fd, access))
UCCL_EP_FORWARD(int, ibv_dereg_mr, (ibv_mr * mr), (mr))
UCCL_EP_FORWARD(ibv_cq*, ibv_create_cq,
                (ibv_context * context, int cqe, void* cookie, ibv_comp_channel* channel, int vector),
                (context, cqe, cookie, channel, vector))
UCCL_EP_FORWARD(int, ibv_destroy_cq, (ibv_cq * cq), (cq))
UCCL_EP_FORWARD(ibv_srq*, ibv_create_srq, (ibv_pd * pd, ibv_srq_init_attr* attr), (pd, attr))
UCCL_EP_FORWARD(int, ibv_destroy_srq, (ibv_srq * srq), (srq))
UCCL_EP_FORWARD(ibv_qp*, ibv_create_qp, (ibv_pd * pd, ibv_qp_init_attr* attr), (pd, attr))
UCCL_EP_FORWARD(ibv_qp_ex*, ibv_qp_to_qp_ex, (ibv_qp * qp), (qp))
UCCL_EP_FORWARD(int, ibv_modify_qp, (ibv_qp * qp, ibv_qp_attr* attr, int mask), (qp, attr, mask))
UCCL_EP_FORWARD(int, ibv_destroy_qp, (ibv_qp * qp), (qp))
UCCL_EP_FORWARD(ibv_ah*, ibv_create_ah, (ibv_pd * pd, ibv_ah_attr* attr), (pd, attr))
UCCL_EP_FORWARD(int, ibv_destroy_ah, (ibv_ah * ah), (ah))
UCCL_EP_FORWARD(int, ibv_get_async_event, (ibv_context * context, ibv_async_event* event), (context, event))
UCCL_EP_FORWARD(void, ibv_ack_async_event, (ibv_async_event * event), (event))
UCCL_EP_FORWARD(int, ibv_fork_init, (), ())
UCCL_EP_FORWARD(const char*, ibv_wc_status_str, (ibv_wc_status status), (status))
