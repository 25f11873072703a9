#include "transport/ofi/library.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <csignal>

#include "transport/failure.h"

namespace uccl_ep::ofi {
namespace {

// Restores the program's signal handlers. Libraries that libfabric loads replace them: libinfinipath when it is loaded,
// the shm provider when it is initialised. libinfinipath takes SIGINT, SIGTERM and others, and ends the process by
// exit(1). A trainer that saves on SIGTERM would never see the signal.
class KeptSignals {
 public:
  KeptSignals() {
    for (int number = 1; number < kNumSignals; ++number)
      known_[at(number)] = sigaction(number, nullptr, &before_[at(number)]) == 0;
  }
  ~KeptSignals() {
    for (int number = 1; number < kNumSignals; ++number)
      if (known_[at(number)]) sigaction(number, &before_[at(number)], nullptr);
  }
  KeptSignals(const KeptSignals&) = delete;
  KeptSignals& operator=(const KeptSignals&) = delete;

 private:
  static constexpr int kNumSignals = 32;  // those that are not real-time signals
  static size_t at(int number) { return static_cast<size_t>(number); }

  std::array<struct sigaction, kNumSignals> before_{};
  std::array<bool, kNumSignals> known_{};
};

constexpr uint32_t kOldest = fi_version_of(1, 14);
constexpr const char* kPackage =
    "install libfabric (Debian, Ubuntu: apt-get install libfabric1), or the one of the fabric's vendor";

std::string text_of(uint32_t version) {
  return "libfabric " + std::to_string(version >> 16) + '.' + std::to_string(version & 0xffff);
}

// The newest version of each symbol is taken: the library itself allocates the structures that it reads, and they grow
// at their ends only.
struct Library {
  Library() {
    void* handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* text = dlerror();
      problem =
          std::string("libfabric cannot be loaded (") + (text != nullptr ? text : "libfabric.so.1") + "): " + kPackage;
      // The EFA installer puts the library here.
      for (const char* path : {"/opt/amazon/efa/lib/libfabric.so.1", "/opt/amazon/efa/lib64/libfabric.so.1"})
        if (handle == nullptr) handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    if (handle == nullptr) return;
    problem.clear();
    load(handle, "fi_getinfo", getinfo);
    load(handle, "fi_freeinfo", freeinfo);
    load(handle, "fi_dupinfo", dupinfo);
    load(handle, "fi_fabric", fabric);
    load(handle, "fi_strerror", strerror);
    load(handle, "fi_version", version);
    if (problem.empty() && version() < kOldest)
      problem = text_of(version()) + " is too old, " + text_of(kOldest) + " is needed: " + kPackage;
  }

  template <typename Function>
  void load(void* handle, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(handle, name));
    if (function == nullptr) problem.assign("libfabric.so.1 has no ").append(name).append(": ").append(kPackage);
  }

  std::string problem;
  decltype(fi_getinfo)* getinfo = nullptr;
  decltype(fi_freeinfo)* freeinfo = nullptr;
  decltype(fi_dupinfo)* dupinfo = nullptr;
  decltype(fi_fabric)* fabric = nullptr;
  decltype(fi_strerror)* strerror = nullptr;
  decltype(fi_version)* version = nullptr;
};

// Never unloaded: providers keep threads and handlers.
const Library& library() {
  static const Library* const loaded = [] {
    const KeptSignals kept;
    return new Library;
  }();
  return *loaded;
}

}  // namespace

const std::string& library_problem() { return library().problem; }

std::string library_text() { return text_of(fi_version()); }

uint32_t api_version() { return std::min<uint32_t>(fi_version(), kDeclaredVersion); }

std::string error_text(ssize_t result) { return fi_strerror(static_cast<int>(-result)); }

void fail(int rank, int peer, const std::string& text) { fail_transport("ofi", rank, peer, text); }

int fi_getinfo(uint32_t version, const char* node, const char* service, uint64_t flags, const fi_info* hints,
               fi_info** info) {
  const KeptSignals kept;  // the first call initialises the providers
  return library().getinfo(version, node, service, flags, hints, info);
}
void fi_freeinfo(fi_info* info) { library().freeinfo(info); }
fi_info* fi_dupinfo(const fi_info* info) { return library().dupinfo(info); }
int fi_fabric(fi_fabric_attr* attr, fid_fabric** fabric, void* context) {
  return library().fabric(attr, fabric, context);
}
const char* fi_strerror(int number) { return library().strerror(number); }
uint32_t fi_version() { return library().version(); }

}  // namespace uccl_ep::ofi
