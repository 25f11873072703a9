// libfabric, loaded when it is first needed: this build works where it is not installed. Its headers call a handful of
// exported functions; library.cc defines those as forwarders, everything else goes through the objects' own tables.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

namespace uccl_ep::ofi {

// Empty, or why libfabric cannot be used.
const std::string& library_problem();
// "libfabric 1.17"; only of a library that was loaded.
std::string library_text();
// What to ask it for: its version or that of our headers, whichever is older.
uint32_t api_version();
// Of a result < 0.
std::string error_text(ssize_t result);

struct FreeInfo {
  void operator()(fi_info* info) const { fi_freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

// Closes on destruction; what it belongs to must live longer.
template <typename T>
struct CloseFid {
  void operator()(T* object) const { fi_close(&object->fid); }
};
template <typename T>
using Fid = std::unique_ptr<T, CloseFid<T>>;

// Throws CommunicationFailure(kTransport).
[[noreturn]] void fail(int rank, int peer, const std::string& text);

}  // namespace uccl_ep::ofi
