#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <unordered_map>

#include "common/units.h"
#include "transport/verbs/queue_pairs.h"

namespace uccl_ep::verbs {
namespace {

constexpr int kRetries = 6;         // the field can hold 7, but soft-RoCE takes 7 as no limit
constexpr int kReceiverRetries = 7;  // without limit: a receiver that lags behind is no error of the link
constexpr uint8_t kReceiverPause = 1;  // 10 us
constexpr uint32_t kPsnMask = (1u << 24) - 1;

// The exponent n of the acknowledgement timeout, 4.096 us * 2^n. With it the retries outlast `usec`, so that a link
// that heals by then loses nothing.
uint8_t timeout_for(uint64_t usec) {
  uint8_t exponent = 10;
  while (exponent < 31 && static_cast<uint64_t>(4.096 * (kRetries + 1)) << exponent < usec) ++exponent;
  return exponent;
}

class ReliableConnections final : public QueuePairs {
 public:
  ReliableConnections(Nic& nic, const QueuePairOptions& options)
      : nic_(nic), options_(*options.nic), setup_(*options.setup), qps_(static_cast<size_t>(setup_.num_ranks)) {
    ibv_srq_init_attr srq{};
    srq.attr.max_wr = options.sizes.arrivals;
    srq.attr.max_sge = 1;
    srq_.reset(ibv_create_srq(nic.pd(), &srq));
    if (!srq_) fail(nic.rank(), -1, "NIC " + nic.name() + " gives no shared receive queue: " + std::strerror(errno));
    std::random_device random;
    for (int peer : setup_.rails) {
      create(peer, options);
      psn_.push_back(random() & kPsnMask);
    }
    give_back(options.sizes.arrivals);
  }

  bool completes_in_order() const override { return true; }
  uint32_t most_writes() const override { return UINT32_MAX; }

  void describe(NicAddress& address) const override {
    for (size_t i = 0; i < setup_.rails.size(); ++i) {
      const uint32_t rail = static_cast<uint32_t>(setup_.rails[i]);
      address.pairs.push_back({rail, qps_[rail]->qp_num, psn_[i]});
    }
  }

  Outlet connect(int peer, const NicAddress& remote) override {
    const PairAddress* const theirs = remote.pair_of(nic_.rank());
    if (theirs == nullptr)
      fail(nic_.rank(), peer,
           "rank " + std::to_string(peer) + " has no queue pair for rank " + std::to_string(nic_.rank()));
    ibv_qp* const qp = qps_[static_cast<size_t>(peer)].get();
    make_ready_to_receive(qp, peer, *theirs, remote);
    make_ready_to_send(qp, peer);
    senders_[qp->qp_num] = peer;
    return {ibv_qp_to_qp_ex(qp)};
  }

  int sender_of(const ibv_wc& arrival) const override {
    const auto its = senders_.find(arrival.qp_num);
    return its == senders_.end() ? -1 : its->second;
  }

  // A receive has no buffer: a write brings its own address.
  void give_back(uint32_t count) override {
    constexpr uint32_t kBatch = 64;
    ibv_recv_wr receives[kBatch];
    while (count != 0) {
      const uint32_t size = std::min(count, kBatch);
      for (uint32_t i = 0; i < size; ++i) {
        receives[i] = {};
        receives[i].wr_id = kReceive;
        receives[i].next = i + 1 < size ? &receives[i + 1] : nullptr;
      }
      ibv_recv_wr* bad = nullptr;
      if (const int error = ibv_post_srq_recv(srq_.get(), receives, &bad); error != 0)
        fail(nic_.rank(), -1, "NIC " + nic_.name() + " takes no receives: " + std::strerror(error));
      count -= size;
    }
  }

  void cut(int peer) override {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_ERR;
    ibv_modify_qp(qps_[static_cast<size_t>(peer)].get(), &attr, IBV_QP_STATE);
  }

 private:
  void create(int peer, const QueuePairOptions& options) {
    ibv_qp_init_attr_ex init{};
    init.qp_type = IBV_QPT_RC;
    init.send_cq = init.recv_cq = options.completions;
    init.srq = srq_.get();
    init.cap.max_send_wr = options.sizes.writes;
    init.cap.max_send_sge = 1;
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.pd = nic_.pd();
    init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    auto& qp = qps_[static_cast<size_t>(peer)];
    qp.reset(ibv_create_qp_ex(nic_.context(), &init));
    if (!qp)
      fail(nic_.rank(), peer,
           "NIC " + nic_.name() + " gives no queue pair: " + std::strerror(errno) +
               (errno == EOPNOTSUPP ? ", its driver knows no ibv_wr_*: use a newer rdma-core or transport = 'ofi'"
                                    : ""));
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = nic_.port().number;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    modify(qp.get(), peer, attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
  }

  void make_ready_to_receive(ibv_qp* qp, int peer, const PairAddress& theirs, const NicAddress& remote) {
    const Port& port = nic_.port();
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = std::min(port.mtu, static_cast<ibv_mtu>(remote.mtu));
    attr.dest_qp_num = theirs.number;
    attr.rq_psn = theirs.first_psn;
    attr.max_dest_rd_atomic = 0;
    attr.min_rnr_timer = kReceiverPause;
    attr.ah_attr = route_to(port, remote, options_);
    modify(qp, peer, attr,
           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
               IBV_QP_MIN_RNR_TIMER,
           "RTR");
  }

  void make_ready_to_send(ibv_qp* qp, int peer) {
    const auto its = std::find(setup_.rails.begin(), setup_.rails.end(), peer);
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = timeout_for(setup_.progress_timeout_usec);
    attr.retry_cnt = kRetries;
    attr.rnr_retry = kReceiverRetries;
    attr.sq_psn = psn_[static_cast<size_t>(its - setup_.rails.begin())];
    attr.max_rd_atomic = 0;
    modify(
        qp, peer, attr,
        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
        "RTS");
  }

  void modify(ibv_qp* qp, int peer, ibv_qp_attr& attr, int mask, const char* state) const {
    if (const int error = ibv_modify_qp(qp, &attr, mask); error != 0)
      fail(nic_.rank(), peer,
           "the queue pair of NIC " + nic_.name() + " for rank " + std::to_string(peer) + " does not become " + state +
               ": " + std::strerror(error) + (error == EINVAL || error == ENETUNREACH ? " (GID index, route?)" : ""));
  }

  Nic& nic_;
  const NicOptions& options_;
  const TransportSetup& setup_;
  Owned<ibv_srq> srq_;
  std::vector<Owned<ibv_qp>> qps_;  // by rank
  std::vector<uint32_t> psn_;       // as in setup_.rails
  std::unordered_map<uint32_t, int> senders_;  // by our queue pair's number
};

}  // namespace

ibv_ah_attr route_to(const Port& port, const NicAddress& remote, const NicOptions& options) {
  ibv_ah_attr route{};
  route.port_num = port.number;
  route.sl = static_cast<uint8_t>(std::max(options.service_level, 0));
  route.dlid = static_cast<uint16_t>(remote.lid);
  // InfiniBand routes by the LID.
  route.is_global = port.is_ethernet || port.is_efa || remote.lid == 0;
  route.grh.dgid.global.subnet_prefix = htobe64(remote.gid_high);
  route.grh.dgid.global.interface_id = htobe64(remote.gid_low);
  route.grh.sgid_index = port.gid_index;
  route.grh.hop_limit = 255;
  route.grh.traffic_class = static_cast<uint8_t>(std::max(options.traffic_class, 0));
  return route;
}

std::unique_ptr<QueuePairs> make_rc(Nic& nic, const QueuePairOptions& options) {
  return std::make_unique<ReliableConnections>(nic, options);
}

}  // namespace uccl_ep::verbs
