// libfabric, loaded on first use: a machine without it lacks only the ofi transport. The library exports only a few
// functions, which library.cc calls. Everything else goes through the objects' own tables (calls.h).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "transport/ofi/abi.h"
#include "transport/ofi/calls.h"

namespace uccl_ep::ofi {

// Empty, or why libfabric cannot be used.
const std::string& library_problem();
// "libfabric 1.17"; only if the library was loaded.
std::string library_text();
// The interface version to request: the library's or that of the declarations, whichever is older.
uint32_t api_version();
// The text of a result < 0.
std::string error_text(ssize_t result);

// The library's own functions. Called only if library_problem() is empty.
int fi_getinfo(uint32_t version, const char* node, const char* service, uint64_t flags, const fi_info* hints,
               fi_info** info);
void fi_freeinfo(fi_info* info);
fi_info* fi_dupinfo(const fi_info* info);
int fi_fabric(fi_fabric_attr* attr, fid_fabric** fabric, void* context);
const char* fi_strerror(int number);
uint32_t fi_version();
inline fi_info* fi_allocinfo() { return fi_dupinfo(nullptr); }

struct FreeInfo {
  void operator()(fi_info* info) const { fi_freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

// Closes on destruction; its parent object must live longer.
template <typename T>
struct CloseFid {
  void operator()(T* object) const { fi_close(&object->fid); }
};
template <typename T>
using Fid = std::unique_ptr<T, CloseFid<T>>;

// Throws CommunicationFailure(kTransport).
[[noreturn]] void fail(int rank, int peer, const std::string& text);

}  // namespace uccl_ep::ofi
