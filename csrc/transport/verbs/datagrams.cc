#include "transport/verbs/datagrams.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "common/units.h"
#include "transport/verbs/queue_pairs.h"

namespace uccl_ep::verbs {
namespace {

constexpr int kCompletionsPerPoll = 16;

}  // namespace

uint64_t datagram_buffer_bytes(const DatagramSizes& sizes) {
  return round_up(uint64_t{sizes.sends + sizes.receives} * Datagrams::kSlotBytes, kPageBytes);
}

void Datagrams::Free::operator()(uint8_t* memory) const { std::free(memory); }

void Datagrams::refuse(int peer, const std::string& text) const {
  fail(nic_.rank(), peer, "datagrams of NIC " + nic_.name() + ": " + text);
}

Datagrams::Datagrams(Nic& nic, const NicOptions& options, const TransportSetup& setup, size_t num_nics)
    : nic_(nic),
      options_(options),
      sizes_(datagram_sizes(setup.all.size(), num_nics)),
      ways_(static_cast<size_t>(setup.num_ranks)) {
  constexpr uint32_t kMtuBytes = 128;  // of the first ibv_mtu, 1; each has twice the bytes of the one before
  if (kMtuBytes << nic.port().mtu < kMaxDatagramBytes)
    throw UsageFailure(UsageKind::kConfig, "verbs: packets of NIC " + nic.name() + " hold " +
                                               std::to_string(kMtuBytes << nic.port().mtu) +
                                               " bytes, allowed are MTUs of 1024 and more");
  const uint32_t most = static_cast<uint32_t>(nic.limits().max_qp_wr);
  sizes_ = {std::min(sizes_.sends, most), std::min(sizes_.receives, most)};
  const uint64_t num_bytes = datagram_buffer_bytes(sizes_);
  buffers_.reset(static_cast<uint8_t*>(std::aligned_alloc(kPageBytes, num_bytes)));
  if (!buffers_) throw std::bad_alloc();
  std::memset(buffers_.get(), 0, num_bytes);
  memory_.reset(ibv_reg_mr_iova2(nic.pd(), buffers_.get(), num_bytes, reinterpret_cast<uint64_t>(buffers_.get()),
                                 IBV_ACCESS_LOCAL_WRITE));
  if (!memory_) refuse(-1, std::string("their buffers cannot be registered: ") + std::strerror(errno));
  create();
  for (uint32_t slot = 0; slot < sizes_.receives; ++slot) post_receive(slot);
  for (uint32_t slot = 0; slot < sizes_.sends; ++slot) free_.push_back(sizes_.receives + slot);
  received_.reserve(sizes_.receives);
}

void Datagrams::create() {
  completions_.reset(
      ibv_create_cq(nic_.context(), static_cast<int>(sizes_.sends + sizes_.receives), nullptr, nullptr, 0));
  if (!completions_) refuse(-1, std::string("no completion queue: ") + std::strerror(errno));
  ibv_qp_init_attr_ex init{};
  init.qp_type = IBV_QPT_UD;
  init.send_cq = init.recv_cq = completions_.get();
  init.cap.max_send_wr = sizes_.sends;
  init.cap.max_recv_wr = sizes_.receives;
  init.cap.max_send_sge = init.cap.max_recv_sge = 1;
  init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  init.pd = nic_.pd();
  init.send_ops_flags = IBV_QP_EX_WITH_SEND;
  init.sq_sig_all = 1;
  qp_.reset(ibv_create_qp_ex(nic_.context(), &init));
  if (!qp_) refuse(-1, std::string("no queue pair: ") + std::strerror(errno));
  modify(IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
  modify(IBV_QPS_RTR, IBV_QP_STATE);
  modify(IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN);
}

void Datagrams::modify(ibv_qp_state state, int mask) {
  ibv_qp_attr attr{};
  attr.qp_state = state;
  attr.port_num = nic_.port().number;
  attr.qkey = kQueueKey;
  if (const int error = ibv_modify_qp(qp_.get(), &attr, mask); error != 0)
    refuse(-1, std::string("their queue pair changes no state: ") + std::strerror(error));
}

void Datagrams::connect(int peer, const NicAddress& remote) {
  ibv_ah_attr route = route_to(nic_.port(), remote, options_);
  Way& way = ways_[static_cast<size_t>(peer)];
  way.ah.reset(ibv_create_ah(nic_.pd(), &route));
  if (!way.ah) refuse(peer, "no way to rank " + std::to_string(peer) + ": " + std::strerror(errno));
  way.remote_qp = remote.datagram_pair;
}

void Datagrams::post_receive(uint32_t slot) {
  ibv_sge to{reinterpret_cast<uint64_t>(slot_at(slot)), kSlotBytes, memory_->lkey};
  ibv_recv_wr receive{slot, nullptr, &to, 1}, *bad = nullptr;
  if (const int error = ibv_post_recv(qp_.get(), &receive, &bad); error != 0)
    refuse(-1, std::string("no receives are taken: ") + std::strerror(error));
}

bool Datagrams::send(int peer, std::span<const uint8_t> bytes) {
  const bool known = peer >= 0 && static_cast<size_t>(peer) < ways_.size() && ways_[static_cast<size_t>(peer)].ah;
  if (!known) refuse(peer, "rank " + std::to_string(peer) + " is not connected");
  if (free_.empty()) poll();
  if (free_.empty() || !failure_.empty()) return false;
  const Way& way = ways_[static_cast<size_t>(peer)];
  const uint32_t slot = free_.back();
  std::memcpy(slot_at(slot), bytes.data(), bytes.size());
  ibv_qp_ex* const qp = ibv_qp_to_qp_ex(qp_.get());
  ibv_wr_start(qp);
  qp->wr_id = slot;
  qp->wr_flags = IBV_SEND_SIGNALED;
  ibv_wr_send(qp);
  ibv_wr_set_ud_addr(qp, way.ah.get(), way.remote_qp, kQueueKey);
  ibv_wr_set_sge(qp, memory_->lkey, reinterpret_cast<uint64_t>(slot_at(slot)), static_cast<uint32_t>(bytes.size()));
  if (ibv_wr_complete(qp) != 0) return false;  // nothing was posted
  free_.pop_back();
  return true;
}

size_t Datagrams::receive(std::span<uint8_t> out) {
  if (first_received_ == received_.size()) poll();
  while (first_received_ != received_.size()) {
    const Received datagram = received_[first_received_++];
    const size_t num_bytes = datagram.num_bytes > kRouteBytes ? datagram.num_bytes - kRouteBytes : 0;
    const bool fits = num_bytes != 0 && num_bytes <= kMaxDatagramBytes;  // else no rank of a group has sent it
    if (fits) std::memcpy(out.data(), slot_at(datagram.slot) + kRouteBytes, num_bytes);
    post_receive(datagram.slot);
    if (fits) return num_bytes;
  }
  return 0;
}

void Datagrams::poll() {
  if (first_received_ == received_.size()) {
    received_.clear();
    first_received_ = 0;
  }
  ibv_wc completions[kCompletionsPerPoll];
  const int count = ibv_poll_cq(completions_.get(), kCompletionsPerPoll, completions);
  if (count < 0) refuse(-1, "their completion queue cannot be polled");
  for (int i = 0; i < count; ++i) {
    const ibv_wc& completion = completions[i];
    const uint32_t slot = static_cast<uint32_t>(completion.wr_id);
    if (slot >= sizes_.receives) free_.push_back(slot);
    if (completion.status != IBV_WC_SUCCESS)  // no network is to blame: a datagram that is lost completes
      failure_ = std::string("they failed: ") + ibv_wc_status_str(completion.status);
    else if (slot < sizes_.receives)
      received_.push_back({slot, completion.byte_len});
  }
}

}  // namespace uccl_ep::verbs
