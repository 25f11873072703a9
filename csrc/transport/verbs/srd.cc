#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>

#include "transport/verbs/efa_abi.h"
#include "transport/verbs/queue_pairs.h"

namespace uccl_ep::verbs {
namespace {

template <typename Function>
Function* efa(const char* name) {
  return reinterpret_cast<Function*>(efa_symbol(name));
}

class ScalableReliableDatagrams final : public QueuePairs {
 public:
  ScalableReliableDatagrams(Nic& nic, const QueuePairOptions& options)
      : nic_(nic), options_(*options.nic), setup_(*options.setup), routes_(static_cast<size_t>(setup_.num_ranks)) {
    efadv_device_attr limits{};
    if (efa<efadv_query_device>("efadv_query_device")(nic.context(), &limits, sizeof(limits)) != 0)
      fail(nic.rank(), -1, "NIC " + nic.name() + " does not say what it can do");
    if ((limits.device_caps & EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE) == 0)
      throw UsageFailure(UsageKind::kConfig, "verbs: EFA device " + nic.name() +
                                                 " has no RDMA write: p5 instances and later have it; use transport = "
                                                 "'ofi' here");
    if (setup_.largest_write_bytes > limits.max_rdma_size)
      throw UsageFailure(UsageKind::kConfig, "verbs: EFA device " + nic.name() + " writes at most " +
                                                 std::to_string(limits.max_rdma_size) + " bytes, chunks have " +
                                                 std::to_string(setup_.largest_write_bytes));
    unsolicited_ = (limits.device_caps & EFADV_DEVICE_ATTR_CAPS_UNSOLICITED_WRITE_RECV) != 0;
    create(options, limits);
    if (!unsolicited_) give_back(std::min(options.sizes.arrivals, limits.max_rq_wr));
  }

  bool completes_in_order() const override { return false; }
  uint32_t most_writes() const override { return most_writes_; }

  void describe(NicAddress& address) const override {
    for (int rail : setup_.rails) address.pairs.push_back({static_cast<uint32_t>(rail), qp_->qp_num, 0});
  }

  Outlet connect(int peer, const NicAddress& remote) override {
    const PairAddress* const theirs = remote.pair_of(nic_.rank());
    if (theirs == nullptr)
      fail(nic_.rank(), peer,
           "rank " + std::to_string(peer) + " has no queue pair for rank " + std::to_string(nic_.rank()));
    ibv_ah_attr route = route_to(nic_.port(), remote, options_);
    auto& ah = routes_[static_cast<size_t>(peer)];
    ah.reset(ibv_create_ah(nic_.pd(), &route));
    if (!ah)
      fail(nic_.rank(), peer,
           "NIC " + nic_.name() + " finds no way to rank " + std::to_string(peer) + ": " + std::strerror(errno));
    efadv_ah_attr number{};
    if (efa<efadv_query_ah>("efadv_query_ah")(ah.get(), &number, sizeof(number)) != 0)
      fail(nic_.rank(), peer, "NIC " + nic_.name() + " does not say the number of an address handle");
    senders_[{number.ahn, theirs->number}] = peer;
    return {ibv_qp_to_qp_ex(qp_.get()), ah.get(), theirs->number};
  }

  // The device says by which of our routes the write came.
  int sender_of(const ibv_wc& arrival) const override {
    const auto its = senders_.find({arrival.slid, arrival.src_qp});
    return its == senders_.end() ? -1 : its->second;
  }

  void give_back(uint32_t count) override {
    if (unsolicited_) return;
    for (uint32_t i = 0; i < count; ++i) {
      ibv_recv_wr receive{}, *bad = nullptr;
      receive.wr_id = kReceive;
      if (const int error = ibv_post_recv(qp_.get(), &receive, &bad); error != 0)
        fail(nic_.rank(), -1, "NIC " + nic_.name() + " takes no receives: " + std::strerror(error));
    }
  }

  // All peers share the queue pair, so posts to one peer cannot be taken back. Their completions say when they are
  // over.
  void cut(int) override {}

 private:
  void create(const QueuePairOptions& options, const efadv_device_attr& limits) {
    ibv_qp_init_attr_ex init{};
    init.qp_type = IBV_QPT_DRIVER;
    init.send_cq = init.recv_cq = options.completions;
    most_writes_ = std::min(limits.max_sq_wr, options.sizes.writes * static_cast<uint32_t>(setup_.rails.size()));
    init.cap.max_send_wr = most_writes_;
    init.cap.max_recv_wr = unsolicited_ ? 0 : std::min(options.sizes.arrivals, limits.max_rq_wr);
    init.cap.max_send_sge = init.cap.max_recv_sge = 1;
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.pd = nic_.pd();
    init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    init.sq_sig_all = 1;
    efadv_qp_init_attr its{};
    its.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD;
    its.flags = unsolicited_ ? uint16_t{EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV} : uint16_t{0};
    its.sl = static_cast<uint8_t>(std::max(options_.service_level, 0));
    qp_.reset(efa<efadv_create_qp_ex>("efadv_create_qp_ex")(nic_.context(), &init, &its, sizeof(its)));
    if (!qp_) fail(nic_.rank(), -1, "NIC " + nic_.name() + " gives no SRD queue pair: " + std::strerror(errno));
    ibv_qp_attr attr{};
    attr.port_num = nic_.port().number;
    attr.qkey = kQueueKey;
    const int first = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
    for (auto [state, mask] : {std::pair{IBV_QPS_INIT, first},
                               {IBV_QPS_RTR, int{IBV_QP_STATE}},
                               {IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN}}) {
      attr.qp_state = state;
      if (const int error = ibv_modify_qp(qp_.get(), &attr, mask); error != 0)
        fail(nic_.rank(), -1, "the queue pair of NIC " + nic_.name() + " changes no state: " + std::strerror(error));
    }
  }

  Nic& nic_;
  const NicOptions& options_;
  const TransportSetup& setup_;
  bool unsolicited_ = false;
  uint32_t most_writes_ = 0;
  std::vector<Owned<ibv_ah>> routes_;  // by rank
  Owned<ibv_qp> qp_;
  std::map<std::pair<uint32_t, uint32_t>, int> senders_;  // by route and queue pair
};

}  // namespace

std::unique_ptr<QueuePairs> make_srd(Nic& nic, const QueuePairOptions& options) {
  return std::make_unique<ScalableReliableDatagrams>(nic, options);
}

}  // namespace uccl_ep::verbs
