// Ranks that have messages for each other and nothing else, on a network and a clock that a test makes up.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "claims.h"
#include "proxy/messages.h"

namespace uccl_ep {

using DatagramBytes = std::vector<uint8_t>;

// What may happen to a datagram.
struct Weather {
  double loss = 0, duplicates = 0;
  uint64_t most_delay_usec = 0;
  bool loses_acknowledgements = false;  // all of them
  size_t room = SIZE_MAX;  // datagrams that a rank may send between two ticks
};

class MessageNet {
 public:
  static constexpr uint64_t kNonce = 77;

  // A rank's end: datagrams alone.
  class End final : public Transport {
   public:
    End(MessageNet& net, int rank) : net_(net), rank_(rank) {}
    const char* name() const override { return "message net"; }
    void register_device(const RegisteredRegion&) override {}
    std::string address() const override { return {}; }
    void connect(const std::vector<std::string>&) override {}
    void attach_device(DeviceRegions) override {}
    void sealed() override {}
    bool has_room(uint64_t) const override { return true; }
    PostResult post_write(const WriteRequest&) override { throw std::logic_error("a message is no write"); }
    void flush() override {}
    size_t poll(std::span<Completion>) override { return 0; }
    uint64_t idle_usec() const override { return UINT64_MAX; }
    bool peer_alive(int) const override { return true; }
    PostResult send_datagram(int peer, std::span<const uint8_t> bytes) override {
      return net_.send(rank_, peer, bytes);
    }
    size_t receive_datagram(std::span<uint8_t> out) override {
      if (inbox.empty()) return 0;
      const DatagramBytes next = inbox.front();
      inbox.pop_front();
      std::copy_n(next.begin(), std::min(next.size(), out.size()), out.begin());
      return std::min(next.size(), out.size());
    }
    void wake(int peer) override { net_.woken.push_back(peer); }
    std::deque<DatagramBytes> inbox;
    size_t num_sent = 0;  // in this tick

   private:
    MessageNet& net_;
    const int rank_;
  };

  struct Taken {
    int receiver, sender;
    MessageKind kind;
    uint64_t when_usec;
    DatagramBytes payload;
  };

  MessageNet(int num_ranks, const Weather& weather, uint64_t seed = 1) : weather_(weather), random_(seed) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      std::vector<int> peers;
      for (int peer = 0; peer < num_ranks; ++peer)
        if (peer != rank) peers.push_back(peer);
      ends.push_back(std::make_unique<End>(*this, rank));
      ranks.push_back(std::make_unique<Messages>(
          *ends.back(), DatagramEnds{kNonce, static_cast<uint32_t>(rank), static_cast<uint32_t>(num_ranks)}, peers));
    }
  }

  // A millisecond passes: every rank takes what has come and sends what is due, as a proxy does.
  void tick(uint64_t usec = 1000) {
    now_usec += usec;
    std::erase_if(flights_, [&](const Flight& flight) {
      if (flight.when_usec > now_usec) return false;
      ends[static_cast<size_t>(flight.to)]->inbox.push_back(flight.bytes);
      return true;
    });
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (static_cast<int>(rank) == stopped) continue;
      ends[rank]->num_sent = 0;
      while (const Datagram* const message = ranks[rank]->receive([](int) {})) {
        const auto payload = std::span(message->payload).first(message->num_payload_bytes());
        taken.push_back({static_cast<int>(rank),
                         static_cast<int>(message->header.sender),
                         message->kind(),
                         now_usec,
                         {payload.begin(), payload.end()}});
      }
      ranks[rank]->send(now_usec);
    }
  }
  // False: the condition does not hold by then.
  bool run_until(const std::function<bool()>& holds, uint64_t limit_usec) {
    for (const uint64_t end_usec = now_usec + limit_usec; !holds(); tick())
      if (now_usec > end_usec) return false;
    return true;
  }
  // To all others.
  void tell(int rank, MessageKind kind, const DatagramBytes& payload) {
    ranks[static_cast<size_t>(rank)]->compose(kind, payload);
    for (int peer = 0; peer < static_cast<int>(ranks.size()); ++peer)
      if (peer != rank) ranks[static_cast<size_t>(rank)]->owe(peer, kind);
  }
  uint32_t num_owed(MessageKind kind) const {
    uint32_t sum = 0;
    for (auto& rank : ranks) sum += rank->num_owed(kind);
    return sum;
  }

  uint64_t now_usec = 1'000'000;
  int stopped = -1;  // this rank neither takes nor sends
  std::vector<std::unique_ptr<End>> ends;
  std::vector<std::unique_ptr<Messages>> ranks;
  std::vector<Taken> taken;
  std::vector<int> woken;
  size_t num_datagrams = 0;

 private:
  struct Flight {
    uint64_t when_usec;
    int to;
    DatagramBytes bytes;
  };

  bool chance(double rate) { return rate > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < rate; }
  PostResult send(int from, int to, std::span<const uint8_t> bytes) {
    EXPECT(to != from && to >= 0 && to < static_cast<int>(ranks.size()) && bytes.size() <= kMaxDatagramBytes);
    if (ends[static_cast<size_t>(from)]->num_sent == weather_.room) return PostResult::kAgain;
    ++ends[static_cast<size_t>(from)]->num_sent;
    ++num_datagrams;
    DatagramHeader header;
    std::memcpy(&header, bytes.data(), sizeof(header));
    if (weather_.loses_acknowledgements && header.acknowledges != 0) return PostResult::kPosted;
    for (int copies = chance(weather_.duplicates) ? 2 : 1; copies > 0; --copies) {
      if (chance(weather_.loss)) continue;
      const uint64_t delay = weather_.most_delay_usec == 0 ? 0 : random_() % weather_.most_delay_usec;
      flights_.push_back({now_usec + delay, to, {bytes.begin(), bytes.end()}});
    }
    return PostResult::kPosted;
  }

  const Weather weather_;
  std::mt19937_64 random_;
  std::vector<Flight> flights_;
};

inline DatagramBytes error_payload(int rank) {
  ErrorRecord record;
  record.kind = ErrorKind::kPeerFailed;
  record.rank = rank;
  record.set_message("rank " + std::to_string(rank) + " found it");
  const auto* const bytes = reinterpret_cast<const uint8_t*>(&record);
  return {bytes, bytes + sizeof(record)};
}
inline DatagramBytes heartbeat_payload(uint64_t moved_usec, uint64_t num_refused = 0) {
  const Heartbeat said{moved_usec, num_refused};
  const auto* const bytes = reinterpret_cast<const uint8_t*>(&said);
  return {bytes, bytes + sizeof(said)};
}

}  // namespace uccl_ep
