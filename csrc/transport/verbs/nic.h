// An opened NIC: its port, its completion queue, and the memory that it may read and write.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sync/flag.h"
#include "transport/transport.h"
#include "transport/verbs/address.h"
#include "transport/verbs/library.h"

namespace uccl_ep::verbs {

[[noreturn]] void fail(int rank, int peer, const std::string& text);

// Destroys objects of libibverbs. Their order matters: a class destroys its members from last to first.
struct Destroy {
  void operator()(ibv_context* p) const { ibv_close_device(p); }
  void operator()(ibv_pd* p) const { ibv_dealloc_pd(p); }
  void operator()(ibv_cq* p) const { ibv_destroy_cq(p); }
  void operator()(ibv_srq* p) const { ibv_destroy_srq(p); }
  void operator()(ibv_mr* p) const { ibv_dereg_mr(p); }
  void operator()(ibv_qp* p) const { ibv_destroy_qp(p); }
  void operator()(ibv_ah* p) const { ibv_destroy_ah(p); }
};
template <typename T>
using Owned = std::unique_ptr<T, Destroy>;

// Memory is registered in pieces of at most this size, because some drivers refuse more at once. Each piece but the
// last overlaps the next one by the largest write, so that no write is ever split.
constexpr uint64_t kMostPieceBytes = uint64_t{1} << 30;

class RegisteredMemory {
 public:
  RegisteredMemory() = default;
  // Throws CommunicationFailure(kTransport) that says what is missing.
  RegisteredMemory(ibv_pd* pd, Memory kind, const RegisteredRegion& region, uint64_t largest_write_bytes, int rank,
                   uint64_t most_piece_bytes = kMostPieceBytes);

  MemoryAddress address() const;
  uint64_t num_bytes() const { return num_bytes_; }
  uint8_t* at(uint64_t offset) const { return base_ + offset; }
  uint32_t local_key_of(uint64_t offset) const {
    const uint64_t piece = offset / stride_;
    return pieces_[piece < pieces_.size() ? piece : pieces_.size() - 1]->lkey;
  }

 private:
  uint8_t* base_ = nullptr;
  uint64_t num_bytes_ = 0;
  uint64_t stride_ = 1;
  std::vector<Owned<ibv_mr>> pieces_;
};

struct Port {
  uint8_t number = 1;
  uint8_t gid_index = 0;
  ibv_gid gid{};
  uint16_t lid = 0;
  ibv_mtu mtu = IBV_MTU_1024;
  bool is_ethernet = false;
  bool is_efa = false;
};

// The names of the devices that libibverbs offers; none on a host without NICs. Throws UsageFailure if libibverbs
// cannot be loaded, or if it offers none of the NICs that sysfs shows.
std::vector<std::string> device_names();

class Nic {
 public:
  // Throws UsageFailure(kConfig) for a device that is not there or a port that is down.
  Nic(const std::string& name, const NicOptions& options, const TransportSetup& setup, uint32_t port = 1);

  const std::string& name() const { return name_; }
  ibv_context* context() const { return context_.get(); }
  ibv_pd* pd() const { return pd_.get(); }
  const ibv_device_attr& limits() const { return limits_; }
  const Port& port() const { return port_; }
  int rank() const { return rank_; }

  void register_memory(Memory kind, const RegisteredRegion& region, uint64_t largest_write_bytes);
  const RegisteredMemory& memory(Memory which) const { return which == Memory::kHost ? host_ : device_; }
  NicAddress address() const;

  // Reads the NIC's asynchronous events. The proxy's thread calls it now and then; it never blocks. Throws
  // CommunicationFailure(kTransport) for a fault from which the NIC does not recover.
  void read_events();
  // As Transport::trouble(). Any thread.
  std::string trouble() const;

 private:
  void choose_gid(int wanted);
  void take_event(const ibv_async_event& event);

  const std::string name_;
  const int rank_;
  Owned<ibv_context> context_;
  ibv_device_attr limits_{};
  Port port_;
  Owned<ibv_pd> pd_;
  RegisteredMemory host_, device_;
  // Writer: the proxy's thread; readers: any thread that writes the text of an error; never reset. port_events_ counts
  // how often the port went down or came back, and is odd while it is down. down_since_usec_ says when the port last
  // went down; it is published before port_events_.
  Flag port_events_, down_since_usec_;
};

}  // namespace uccl_ep::verbs
