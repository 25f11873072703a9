#include "transport/ofi/endpoint.h"

#include <algorithm>
#include <random>

#include "common/limits.h"

namespace uccl_ep::ofi {
namespace {

constexpr uint32_t kDmabufVersion = fi_version_of(1, 20);
constexpr int kKeyAttempts = 16;

uint64_t random_bits() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

}  // namespace

void Endpoint::check(int result, const std::string& what) const {
  if (result == 0) return;
  const std::string text = offer_.provider() + ", domain " + offer_.domain() + ": " + what + ": " + error_text(result);
  if (lacks_descriptors(-result)) throw LimitFailure(HostLimit::kDescriptors, "ofi: " + text);
  fail(rank_, -1, text);
}

Endpoint::Endpoint(Offer offer, int rank, uint32_t num_arrivals) : offer_(std::move(offer)), rank_(rank) {
  fi_info* info = offer_.info.get();
  fid_fabric* fabric = nullptr;
  check(fi_fabric(info->fabric_attr, &fabric, nullptr), "the fabric cannot be opened");
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  check(fi_domain(fabric, info, &domain, nullptr), "the domain cannot be opened");
  domain_.reset(domain);
  fi_av_attr table_attr = {};
  table_attr.type = kFiAvTable;
  fid_av* table = nullptr;
  check(fi_av_open(domain, &table_attr, &table, nullptr), "no table of addresses");
  table_.reset(table);
  fi_cq_attr queue_attr = {};
  queue_attr.size = info->tx_attr->size + num_arrivals;
  queue_attr.format = kFiCqFormatData;
  fid_cq* queue = nullptr;
  check(fi_cq_open(domain, &queue_attr, &queue, nullptr),
        "no completion queue of " + std::to_string(queue_attr.size) + " entries");
  queue_.reset(queue);
  fid_ep* endpoint = nullptr;
  check(fi_endpoint(domain, info, &endpoint, nullptr), "no endpoint");
  endpoint_.reset(endpoint);
  check(fi_ep_bind(endpoint, &queue->fid, kFiTransmit | kFiRecv), "the queue cannot be bound");
  check(fi_ep_bind(endpoint, &table->fid, 0), "the table of addresses cannot be bound");
  check(fi_enable(endpoint), "the endpoint cannot be enabled");
}

// Memory stays registered until nothing can write to it any more. But an endpoint that owns its registrations is busy
// until they are gone.
Endpoint::~Endpoint() {
  if (endpoint_ != nullptr && fi_close(&endpoint_->fid) == -EBUSY) {
    memories_.clear();
    fi_close(&endpoint_->fid);
  }
  static_cast<void>(endpoint_.release());
  memories_.clear();
}

std::string Endpoint::name() const {
  size_t bytes = kMaxNameBytes;
  std::string name(bytes, 0);
  check(fi_getname(&endpoint_->fid, name.data(), &bytes), "the endpoint has no name");
  name.resize(bytes);
  return name;
}

fi_addr_t Endpoint::insert(const std::string& name, int peer) {
  // The provider reads as many bytes of `name` as its own addresses have.
  if (name.size() != this->name().size())
    fail(rank_, peer,
         "rank " + std::to_string(peer) + " has an endpoint name of " + std::to_string(name.size()) +
             " bytes, ours has " + std::to_string(this->name().size()));
  fi_addr_t address = kFiAddrNotavail;
  const int inserted = fi_av_insert(table_.get(), name.data(), 1, &address, 0, nullptr);
  if (inserted != 1)
    fail(rank_, peer,
         offer_.provider() + ": the endpoint name of rank " + std::to_string(peer) + " is refused" +
             (inserted < 0 ? ": " + error_text(inserted) : ""));
  return address;
}

RegisteredMemory& Endpoint::add_host(const RegisteredRegion& region, uint64_t largest_write_bytes) {
  return add(region, largest_write_bytes, Use::kHost);
}

RegisteredMemory& Endpoint::add_private(void* base, uint64_t bytes) {
  return add({base, bytes, "", -1}, 0, Use::kPrivate);
}

RegisteredMemory& Endpoint::add_device(const RegisteredRegion& region, uint64_t largest_write_bytes) {
  if (!offer_.has_device_memory())
    fail(rank_, -1,
         "provider " + offer_.provider() + ", domain " + offer_.domain() + ", " + library_text() +
             ": it does not reach device memory (it offers no FI_HMEM)");
  return add(region, largest_write_bytes, Use::kDevice);
}

RegisteredMemory& Endpoint::add(const RegisteredRegion& region, uint64_t largest_write_bytes, Use use) {
  auto memory = std::make_unique<RegisteredMemory>();
  memory->base_ = static_cast<uint8_t*>(region.base);
  memory->bytes_ = memory->remote_.bytes = region.bytes;
  const uint64_t stride = piece_stride_bytes(region.bytes, largest_write_bytes);
  if (stride == 0 && region.bytes != 0)
    fail(rank_, -1,
         "writes of " + std::to_string(largest_write_bytes) + " bytes: memory is registered in pieces of " +
             std::to_string(kMaxPieceBytes));
  memory->remote_.stride_bytes = stride;
  for (uint64_t start = 0; start < region.bytes; start += stride) {
    uint8_t* base = memory->base_ + start;
    Fid<fid_mr> piece = register_piece(base, std::min(kMaxPieceBytes, region.bytes - start), region, use);
    memory->remote_.pieces.push_back(
        {fi_mr_key(piece.get()), asks(kFiMrVirtAddr) ? reinterpret_cast<uint64_t>(base) : 0});
    memory->descs_.push_back(fi_mr_desc(piece.get()));
    memory->pieces_.push_back(std::move(piece));
  }
  memories_.push_back(std::move(memory));
  return *memories_.back();
}

Fid<fid_mr> Endpoint::register_piece(void* base, uint64_t bytes, const RegisteredRegion& region, Use use) const {
  const bool device = use == Use::kDevice;
  const iovec range = {base, bytes};
  fi_mr_attr attr = {};
  attr.mr_iov = &range;
  attr.iov_count = 1;
  attr.access = use == Use::kPrivate ? kFiSend | kFiRecv : kFiWrite | kFiRemoteWrite;
  attr.iface = device ? kFiHmemCuda : kFiHmemSystem;
  fid_mr* piece = nullptr;
  int result = -ENOSYS;
  fi_mr_dmabuf dmabuf = {};
  if (device && region.dmabuf_fd >= 0 && api_version() >= kDmabufVersion) {
    const uint64_t offset = static_cast<uint64_t>(static_cast<uint8_t*>(base) - static_cast<uint8_t*>(region.base));
    dmabuf = {region.dmabuf_fd, offset, bytes, region.base};
    attr.dmabuf = &dmabuf;
    result = try_register(attr, kFiMrDmabuf, piece);
    attr.mr_iov = &range;
  }
  if (result != 0) result = try_register(attr, 0, piece);
  check(result, "cannot register " + std::to_string(bytes) + " bytes of " +
                    (device ? "device memory (FI_HMEM_CUDA)" : "host memory"));
  Fid<fid_mr> owned(piece);
  if (asks(kFiMrEndpoint)) {
    check(fi_mr_bind(piece, &endpoint_->fid, 0), "memory cannot be bound to the endpoint");
    check(fi_mr_enable(piece), "memory cannot be enabled");
  }
  return owned;
}

// Keys that this side chooses are random, so only ranks that were told a key can write.
int Endpoint::try_register(fi_mr_attr& attr, uint64_t flags, fid_mr*& piece) const {
  const size_t key_bytes = std::min<size_t>(offer_.info->domain_attr->mr_key_size, 8);
  int result = -ENOKEY;
  for (int attempt = 0; attempt < kKeyAttempts && result == -ENOKEY; ++attempt) {
    attr.requested_key =
        asks(kFiMrProvKey) || key_bytes == 0 ? 0 : random_bits() >> (64 - 8 * static_cast<int>(key_bytes));
    result = fi_mr_regattr(domain_.get(), &attr, flags, &piece);
  }
  return result;
}

std::string Endpoint::failure_text(const fi_cq_err_entry& entry) const {
  char detail[128] = {};
  const char* text = fi_cq_strerror(queue_.get(), entry.prov_errno, entry.err_data, detail, sizeof(detail));
  std::string all = offer_.provider() + ", domain " + offer_.domain() + ": " + error_text(-entry.err);
  if (text != nullptr && text[0] != 0) all += std::string(" (") + text + ')';
  return all;
}

}  // namespace uccl_ep::ofi
