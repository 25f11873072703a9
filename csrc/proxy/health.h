// Life and errors of ranks: heartbeats, process watching, errors and byes, probes of the connections to rails.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/patience.h"
#include "common/process.h"
#include "proxy/messages.h"
#include "proxy/post.h"
#include "proxy/proxy.h"
#include "proxy/votes.h"

namespace uccl_ep {

class Health {
 public:
  explicit Health(const ProxyContext& context);

  // Takes messages of other domains and sends those that are due. True if there were any.
  bool exchange(uint64_t now_usec);
  // Every kHeartbeatUsec: sends heartbeats and checks processes. `moved_bytes`: of chunks, so far.
  void housekeeping(uint64_t now_usec, uint64_t moved_bytes);
  // When exchange() or housekeeping() has work that nobody rings for.
  uint64_t next_usec() const { return std::min(next_housekeeping_usec_, messages_.next_usec()); }
  // Whether the transport refused a message.
  bool refused() const { return messages_.refused(); }

  // Anything of `peer` arrived.
  void heard(int peer, uint64_t now_usec) {
    if (RemoteSigns* const its = own_signs_[static_cast<size_t>(peer)]) its->heard.publish(now_usec);
  }
  // A probe has completed.
  void probed(const Cookie& cookie);
  // This rank found an error: send it to all ranks directly.
  void spread(const ErrorRecord& record);

  // ---- any thread
  void announce_close();
  bool closed(int rank) const {
    const RemoteSigns* const signs = signs_[static_cast<size_t>(rank)];
    return closed_[static_cast<size_t>(rank)].read() != 0 || (signs != nullptr && signs->ended.read() != 0) ||
           domain_closing(rank);
  }
  bool all_closed() const;
  bool error_delivered() const;
  uint64_t last_heard_usec(int rank) const;
  uint64_t silent_usec(int rank) const {
    const uint64_t heard = heard_patient_[static_cast<size_t>(rank)].read();  // read first: it may grow meanwhile
    return patient_.read() - heard;
  }
  uint64_t last_moved_usec(int rank) const;
  uint64_t num_refused(int rank) const;
  void add_stats(ProxyStats& stats) const;

 private:
  // A rank of another domain.
  struct Remote {
    int rank;
    bool is_rail;
    bool lands_our_rows;  // so its domain hears of us by it
    bool probe_in_flight = false;
    bool dead = false;
    uint64_t told_moved_usec = 0;  // of its last heartbeat
  };
  struct Watched {
    int rank;
    bool suspected = false;  // looked dead once
    ProcessWatch process;    // domain peers; the transport knows rails
  };

  bool domain_closing(int rank) const {
    const ControlBlock* control = context_.domain_controls[static_cast<size_t>(rank)];
    return control != nullptr && control->closing.read() != 0;
  }
  void owe_what_changed();
  void take(const Datagram& message, uint64_t now_usec);
  void take_heartbeat(Remote& remote, const Datagram& message, uint64_t now_usec);
  void take_error(int peer, const Datagram& message);
  void tell_votes();
  void publish_settled();
  void send_heartbeats();
  void probe_rails();
  void listen();
  void find_signs();
  void part_from_ended();
  void watch_processes();
  void found_dead(const Watched& watched);
  void start_shipping(const ErrorRecord& record);
  Remote& remote_of(int rank) { return remotes_[static_cast<size_t>(remote_idx_[static_cast<size_t>(rank)])]; }

  const ProxyContext& context_;
  const uint64_t created_usec_;
  std::vector<Remote> remotes_;
  std::vector<int> remote_idx_;   // [rank] in remotes_, -1: own domain
  Messages messages_;
  VoteBox votes_;
  std::vector<Watched> watched_;
  uint64_t next_housekeeping_usec_ = 0;
  uint64_t period_ = 0;
  bool byes_owed_ = false;        // byes were requested, and are due in remotes_
  bool error_owed_ = false;       // likewise, of our error
  PatienceClock patience_;
  uint64_t moved_bytes_ = 0;
  std::vector<uint64_t> heard_before_;  // [rank] last_heard_usec() at the last housekeeping
  // [rank] of other domains: what the rank of ours knows that lands its rows; and where this rank is that one.
  std::vector<RemoteSigns*> signs_, own_signs_;
  std::vector<int> tellers_;  // [rank] that one; a domain peer itself

  // Writer: the proxy; readers: any thread of this process; never reset.
  std::vector<Flag> heard_patient_;  // [rank] patience_ when the last sign of life was noticed
  Flag patient_;  // patience_ at the last housekeeping; published after heard_patient_
  std::vector<Flag> closed_;  // [rank] 1: its bye arrived here, or this rank found it dead
  Flag shipping_error_;  // 1: an error that we found is on its way to the other domains
  Flag error_settled_;  // 1: it has reached all live ranks
  Flag byes_settled_;  // likewise, the byes
  Flag bye_requested_;  // writer: the closing thread; reader: the proxy
};

}  // namespace uccl_ep
