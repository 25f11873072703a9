#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>

#include "transport/verbs/library.h"
#include "transport/verbs/queue_pairs.h"

// What Debian's efadv.h lacks, from rdma-core's documentation: manuals efadv_create_qp_ex, efadv_query_device,
// efadv_query_ah of version 52.
namespace uccl_ep::verbs {
namespace {

constexpr uint32_t kDriverTypeSrd = 0;
constexpr uint16_t kUnsolicitedWriteReceive = 1 << 0;  // a flag of the queue pair
constexpr uint32_t kCanWrite = 1 << 3;                 // capabilities of the device
constexpr uint32_t kCanReceiveUnsolicited = 1 << 4;

struct EfaQueuePairInit {
  uint64_t comp_mask = 0;
  uint32_t driver_qp_type = kDriverTypeSrd;
  uint16_t flags = 0;
  uint8_t sl = 0;
  uint8_t reserved = 0;
};
static_assert(sizeof(EfaQueuePairInit) == 16);

struct EfaDeviceLimits {
  uint64_t comp_mask = 0;
  uint32_t max_sq_wr = 0, max_rq_wr = 0;
  uint16_t max_sq_sge = 0, max_rq_sge = 0, inline_buf_size = 0;
  uint8_t reserved[2] = {};
  uint32_t device_caps = 0, max_rdma_size = 0;
};
static_assert(sizeof(EfaDeviceLimits) == 32);

struct EfaRoute {
  uint64_t comp_mask = 0;
  uint16_t ahn = 0;
  uint8_t reserved[6] = {};
};
static_assert(sizeof(EfaRoute) == 16);

using CreateQp = ibv_qp*(ibv_context*, ibv_qp_init_attr_ex*, EfaQueuePairInit*, uint32_t);
using QueryDevice = int(ibv_context*, EfaDeviceLimits*, uint32_t);
using QueryRoute = int(ibv_ah*, EfaRoute*, uint32_t);

template <typename Function>
Function* efa(const char* name) {
  void* const found = efa_symbol(name);
  if (found == nullptr)
    throw UsageFailure(UsageKind::kConfig,
                       std::string("verbs: libefa.so.1 has no ") + name + ": install the EFA driver's rdma-core");
  return reinterpret_cast<Function*>(found);
}

class ScalableReliableDatagrams final : public QueuePairs {
 public:
  ScalableReliableDatagrams(Nic& nic, const QueuePairOptions& options)
      : nic_(nic), options_(*options.nic), setup_(*options.setup), routes_(static_cast<size_t>(setup_.num_ranks)) {
    EfaDeviceLimits limits;
    if (efa<QueryDevice>("efadv_query_device")(nic.context(), &limits, sizeof(limits)) != 0)
      fail(nic.rank(), -1, "NIC " + nic.name() + " does not say what it can do");
    if ((limits.device_caps & kCanWrite) == 0)
      throw UsageFailure(UsageKind::kConfig, "verbs: EFA device " + nic.name() +
                                                 " has no RDMA write: p5 instances and later have it; use transport = "
                                                 "'ofi' here");
    if (setup_.largest_write_bytes > limits.max_rdma_size)
      throw UsageFailure(UsageKind::kConfig, "verbs: EFA device " + nic.name() + " writes at most " +
                                                 std::to_string(limits.max_rdma_size) + " bytes, chunks have " +
                                                 std::to_string(setup_.largest_write_bytes));
    unsolicited_ = (limits.device_caps & kCanReceiveUnsolicited) != 0;
    create(options, limits);
    if (!unsolicited_) give_back(std::min(options.sizes.arrivals, limits.max_rq_wr));
  }

  bool completes_in_order() const override { return false; }
  uint32_t most_writes() const override { return most_writes_; }

  void describe(NicAddress& address) const override {
    address.queue_pairs.assign(routes_.size(), qp_->qp_num);
    address.first_psn.assign(routes_.size(), 0);
  }

  Outlet connect(int peer, const NicAddress& remote) override {
    const size_t own = static_cast<size_t>(nic_.rank());
    if (own >= remote.queue_pairs.size())
      fail(nic_.rank(), peer, "rank " + std::to_string(peer) + " has no queue pair for rank " + std::to_string(own));
    ibv_ah_attr route = route_to(nic_.port(), remote, options_);
    auto& ah = routes_[static_cast<size_t>(peer)];
    ah.reset(ibv_create_ah(nic_.pd(), &route));
    if (!ah)
      fail(nic_.rank(), peer,
           "NIC " + nic_.name() + " finds no way to rank " + std::to_string(peer) + ": " + std::strerror(errno));
    EfaRoute number;
    if (efa<QueryRoute>("efadv_query_ah")(ah.get(), &number, sizeof(number)) != 0)
      fail(nic_.rank(), peer, "NIC " + nic_.name() + " does not say the number of an address handle");
    senders_[{number.ahn, remote.queue_pairs[own]}] = peer;
    return {ibv_qp_to_qp_ex(qp_.get()), ah.get(), remote.queue_pairs[own]};
  }

  // The device says by which of our routes it came.
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

  // The queue pair is everybody's: what was posted to one peer cannot be taken back, its completions say when it is
  // over.
  void cut(int) override {}

 private:
  void create(const QueuePairOptions& options, const EfaDeviceLimits& limits) {
    ibv_qp_init_attr_ex init{};
    init.qp_type = IBV_QPT_DRIVER;
    init.send_cq = init.recv_cq = options.completions;
    most_writes_ = std::min(limits.max_sq_wr, options.sizes.writes * static_cast<uint32_t>(setup_.peers.size()));
    init.cap.max_send_wr = most_writes_;
    init.cap.max_recv_wr = unsolicited_ ? 0 : std::min(options.sizes.arrivals, limits.max_rq_wr);
    init.cap.max_send_sge = init.cap.max_recv_sge = 1;
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.pd = nic_.pd();
    init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    init.sq_sig_all = 1;
    EfaQueuePairInit its;
    its.flags = unsolicited_ ? kUnsolicitedWriteReceive : 0;
    its.sl = static_cast<uint8_t>(std::max(options_.service_level, 0));
    qp_.reset(efa<CreateQp>("efadv_create_qp_ex")(nic_.context(), &init, &its, sizeof(its)));
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
