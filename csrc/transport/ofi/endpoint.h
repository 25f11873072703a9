// One NIC of libfabric: an endpoint for reliable datagrams, its queue and table of addresses, and the memory that it
// may read and write.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/ofi/address.h"
#include "transport/ofi/library.h"
#include "transport/ofi/provider.h"
#include "transport/transport.h"

namespace uccl_ep::ofi {

// No piece is longer: some NICs refuse to register more at once.
constexpr uint64_t kMaxPieceBytes = uint64_t{1} << 30;

// The distance between the starts of pieces. A write of up to `largest_write_bytes` then lies in one piece, wherever it
// starts. 0: this is impossible.
constexpr uint64_t piece_stride_bytes(uint64_t bytes, uint64_t largest_write_bytes,
                                      uint64_t piece_bytes = kMaxPieceBytes) {
  if (bytes <= piece_bytes) return bytes;
  return largest_write_bytes < piece_bytes ? (piece_bytes - largest_write_bytes) / 4096 * 4096 : 0;
}

// Registered with one endpoint.
class RegisteredMemory {
 public:
  uint64_t bytes() const { return bytes_; }
  const RemoteMemory& remote() const { return remote_; }  // what the peers are told
  void* desc(uint64_t offset) const { return bytes_ == 0 ? nullptr : descs_[offset / remote_.stride_bytes]; }
  uint8_t* at(uint64_t offset) const { return base_ + offset; }

 private:
  friend class Endpoint;
  uint8_t* base_ = nullptr;
  uint64_t bytes_ = 0;
  RemoteMemory remote_;
  std::vector<Fid<fid_mr>> pieces_;
  std::vector<void*> descs_;
};

class Endpoint {
 public:
  // `num_arrivals`: arrivals that the queue holds besides posted writes. Throws CommunicationFailure(kTransport).
  Endpoint(Offer offer, int rank, uint32_t num_arrivals);
  ~Endpoint();
  Endpoint(Endpoint&&) = delete;

  const Offer& offer() const { return offer_; }
  std::string name() const;  // for the peers
  fi_addr_t insert(const std::string& name, int peer);  // a peer's name()
  // The endpoint keeps what it registers until it is closed. These functions throw CommunicationFailure(kTransport).
  RegisteredMemory& add_host(const RegisteredRegion& region, uint64_t largest_write_bytes);
  RegisteredMemory& add_device(const RegisteredRegion& region, uint64_t largest_write_bytes);
  // For local messages: no peer can write to it.
  RegisteredMemory& add_private(void* base, uint64_t bytes);

  // As libfabric's own functions: 0 or a count, or an error < 0.
  ssize_t write(const fi_msg_rma& message, uint64_t flags) const {
    return fi_writemsg(endpoint_.get(), &message, flags);
  }
  ssize_t send(const fi_msg& message, uint64_t flags) const { return fi_sendmsg(endpoint_.get(), &message, flags); }
  ssize_t receive(const fi_msg& message) const { return fi_recvmsg(endpoint_.get(), &message, kFiCompletion); }
  ssize_t read(fi_cq_data_entry* entries, size_t count, fi_addr_t* sources) const {
    return fi_cq_readfrom(queue_.get(), entries, count, sources);
  }
  ssize_t read_error(fi_cq_err_entry& entry) const { return fi_cq_readerr(queue_.get(), &entry, 0); }
  std::string failure_text(const fi_cq_err_entry& entry) const;

 private:
  enum class Use : uint32_t { kHost, kDevice, kPrivate };
  RegisteredMemory& add(const RegisteredRegion& region, uint64_t largest_write_bytes, Use use);
  Fid<fid_mr> register_piece(void* base, uint64_t bytes, const RegisteredRegion& region, Use use) const;
  int try_register(fi_mr_attr& attr, uint64_t flags, fid_mr*& piece) const;
  bool asks(int mode) const { return (offer_.info->domain_attr->mr_mode & mode) != 0; }
  void check(int result, const std::string& what) const;

  Offer offer_;
  int rank_;
  // Closed in reverse order, except the memory: see ~Endpoint().
  Fid<fid_fabric> fabric_;
  Fid<fid_domain> domain_;
  Fid<fid_av> table_;
  Fid<fid_cq> queue_;
  std::vector<std::unique_ptr<RegisteredMemory>> memories_;
  Fid<fid_ep> endpoint_;
};

}  // namespace uccl_ep::ofi
