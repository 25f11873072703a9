// Events between proxies and the poller: the product's writer and its kernel's reader, on the stand-in for GPUs, with
// nothing else of an engine.
#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>

#include "backend/gpu/poll.cuh"
#include "claims.h"
#include "gpu_on_cpu/lanes.h"
#include "proxy/board.h"

using namespace uccl_ep;
using gpu::kWarp;

namespace {

// Packets of one length, to domains of any size.
const DeviceRings kRings = [] {
  DeviceRings rings{{}, 2048, 4, 1024, 3, {}};
  for (int size = 1; size <= 128; ++size) rings.packet_bytes[size] = 4096;
  return rings;
}();

// The host of a rank, with the part of its proxy that publishes.
struct Host {
  RegionLayout layout;
  Channels channels;
  std::unique_ptr<uint8_t, decltype(&std::free)> region{nullptr, &std::free};
  ProxyContext context;
  std::unique_ptr<Board> board;
  std::vector<uint64_t> counts;  // of the words of the board, as its writer knows them

  Host(const Topology& topo, int rank)
      : layout(make_device_layout(topo, kRings, rank)), channels(make_device_channels(topo, kRings, rank)) {
    region.reset(static_cast<uint8_t*>(std::aligned_alloc(kPageBytes, round_up(layout.total_bytes, kPageBytes))));
    std::fill_n(region.get(), layout.total_bytes, uint8_t{0});
    context.channels = &channels;
    context.layout = &layout;
    context.region = region.get();
    board = std::make_unique<Board>(context);
    counts.resize(channels.in.size() + channels.out.size());
  }
  const uint64_t* word(size_t idx) const {
    return reinterpret_cast<const uint64_t*>(region.get() + layout.board_offset) + idx;
  }
  void come(size_t idx, uint64_t chunks) { board->publish(idx, counts[idx] += chunks); }
  const RegionLayout::Events& events(EventRing ring) const { return layout.events[static_cast<uint32_t>(ring)]; }
};

// The hosts of the members of domain 0.
struct Domain {
  Topology topo;
  std::vector<Host> hosts;

  explicit Domain(const std::vector<int>& labels) : topo(Topology::from_labels(labels)) {
    for (int member : topo.members[0]) hosts.emplace_back(topo, member);
  }
  // Chunks of random channels.
  void come(std::mt19937_64& random, uint64_t num_events) {
    for (uint64_t i = 0; i < num_events; ++i) {
      Host& host = hosts[random() % hosts.size()];
      host.come(random() % host.counts.size(), 1 + random() % 3);
    }
  }
};

// A GPU of the domain, and its poller between kernels.
class Reader {
 public:
  Reader(const Domain& domain, size_t member) {
    for (const Host& host : domain.hosts) follow(host, EventRing::kDomain);
    follow(domain.hosts[member], EventRing::kOwn);
    flags_.resize(words_.size());
    also_.resize(words_.size());
    seen_.resize(rings_.size());
    for (size_t i = 0; i < words_.size(); ++i) {
      words_[i].flag = &flags_[i];
      if (i % 2 != 0) words_[i].also = &also_[i];
    }
    followed_.rings = rings_.data();
    followed_.seen = seen_.data();
    followed_.words = words_.data();
    followed_.num_rings = static_cast<uint32_t>(rings_.size());
  }
  size_t num_words() const { return words_.size(); }
  std::vector<uint64_t>& seen() { return seen_; }
  uint64_t flag(size_t i) const { return __atomic_load_n(&flags_[i], __ATOMIC_ACQUIRE); }
  bool has_all() const {
    for (size_t i = 0; i < words_.size(); ++i)
      if (flag(i) != __atomic_load_n(words_[i].word, __ATOMIC_ACQUIRE)) return false;
    return true;
  }
  // A kernel that runs until `done` and has all that there is then, while the flags are watched.
  void run(const std::function<bool()>& done = [] { return true; }) {
    gpu::Group g{};
    std::vector<uint64_t> before(flags_);
    std::string wrong;
    const auto watch = [&] {
      for (size_t i = 0; i < words_.size(); ++i) {
        const uint64_t flag = this->flag(i), word = __atomic_load_n(words_[i].word, __ATOMIC_ACQUIRE);
        if (flag < before[i]) wrong = "a flag went back";
        if (flag > word) wrong = "a flag was ahead of its word";
        before[i] = flag;
      }
    };
    gpu_on_cpu::run_grid({1, 2 * kWarp}, [&] {
      __shared__ uint32_t ends;
      if (threadIdx.x == 0) ends = 0;
      __syncthreads();
      if (threadIdx.x < kWarp) return gpu::follow_events(g, followed_, &ends);
      if (threadIdx.x != kWarp) return;
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (wrong.empty()) {
        const bool is_done = done();
        watch();
        if (is_done && has_all()) break;
        if (std::chrono::steady_clock::now() > deadline) wrong = "events were lost";
        gpu_on_cpu::look();
      }
      gpu::count_shared(&ends);
    });
    watch();
    if (!wrong.empty()) throw std::logic_error(wrong);
    for (size_t i = 0; i < words_.size(); ++i) EXPECT_EQ(also_[i], words_[i].also == nullptr ? uint64_t{0} : flag(i));
  }

 private:
  void follow(const Host& host, EventRing which) {
    const RegionLayout::Events& events = host.events(which);
    if (events.capacity == 0) return;
    const uint32_t first = static_cast<uint32_t>(words_.size());
    for (uint32_t idx : host.channels.board_of(which)) words_.push_back({host.word(idx), nullptr, nullptr});
    rings_.push_back({reinterpret_cast<const uint64_t*>(host.region.get() + events.offset),
                      static_cast<uint32_t>(std::countr_zero(events.capacity)), first,
                      static_cast<uint32_t>(words_.size())});
  }

  std::vector<gpu::Followed::Ring> rings_;
  std::vector<gpu::Followed::Word> words_;
  std::vector<uint64_t> flags_, also_, seen_;
  gpu::Followed followed_;
};

std::vector<int> labels_of(const std::vector<int>& sizes) {
  std::vector<int> labels;
  for (size_t domain = 0; domain < sizes.size(); ++domain)
    labels.insert(labels.end(), static_cast<size_t>(sizes[domain]), static_cast<int>(domain));
  return labels;
}
// Two domains; uneven ones, of which some ranks are no rail; more words than lanes; more rings than lanes.
std::vector<std::vector<int>> groups() {
  return {{1, 1}, {2, 2}, {3, 1}, {1, 3}, {8, 8, 8}, std::vector<int>(40, 1), {70, 72}};
}

CLAIM("flags get every count while proxies publish, in one kernel after the other, and never go back") {
  uint64_t seed = 0;
  for (const std::vector<int>& sizes : groups()) {
    Domain domain(labels_of(sizes));
    Reader reader(domain, domain.hosts.size() - 1);
    for (int kernel = 0; kernel < 3; ++kernel) {
      std::mt19937_64 random(++seed);
      gpu_on_cpu::disturb(seed);
      std::atomic<bool> done{false};
      std::jthread proxies([&] {
        for (int i = 0; i < 30; ++i) {
          domain.come(random, 1 + random() % 40);
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        }
        done = true;
      });
      reader.run([&] { return done.load(); });
      proxies.join();
    }
    gpu_on_cpu::disturb(0);
  }
}

CLAIM("a reader that was idle has every count, however many events it has missed") {
  uint64_t seed = 0;
  for (const std::vector<int>& sizes : groups()) {
    Domain domain(labels_of(sizes));
    Reader reader(domain, 0);
    Host& host = domain.hosts[0];
    const std::vector<uint32_t> words = host.channels.board_of(EventRing::kOwn);
    const uint64_t capacity = host.events(EventRing::kOwn).capacity;
    // Every channel once, then one of them until so many have been missed: those of others are on the board alone.
    for (uint64_t missed :
         {3 + 0 * capacity, capacity - 1, capacity, capacity + 1, 3 + 0 * capacity, 2 * capacity, 3 * capacity + 7}) {
      gpu_on_cpu::disturb(++seed);
      for (size_t i = 0; i < missed; ++i) host.come(words[i < words.size() ? i : seed % words.size()], 1);
      reader.run();
    }
    gpu_on_cpu::disturb(0);
  }
}

CLAIM("a reader that is overtaken while it looks has every count") {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    Domain domain(labels_of({1, 1}));
    Reader reader(domain, 0);
    std::mt19937_64 random(seed);
    gpu_on_cpu::disturb(seed);
    std::atomic<bool> done{false};
    std::jthread proxy([&] {
      for (int i = 0; i < 20; ++i) {
        domain.come(random, 10'000);
        sched_yield();
      }
      done = true;
    });
    reader.run([&] { return done.load(); });
    proxy.join();
    gpu_on_cpu::disturb(0);
  }
}

CLAIM("readers of a domain do not know of each other, and one that begins late misses nothing") {
  Domain domain(labels_of({3, 2, 2}));
  std::vector<Reader> readers;
  for (size_t member = 0; member < 3; ++member) readers.emplace_back(domain, member);
  std::mt19937_64 random(1);
  for (int round = 0; round < 20; ++round) {
    domain.come(random, 30);
    readers[0].run();
    if (round % 5 == 0) readers[1].run();
  }
  for (Reader& reader : readers) reader.run();
}

CLAIM("a position is kept from kernel to kernel: no event is read twice") {
  Domain domain(labels_of({2, 2}));
  Reader reader(domain, 0);
  std::mt19937_64 random(1);
  uint64_t events = 0;
  for (int round = 0; round < 50; ++round) {
    for (size_t m = 0; m < 2; ++m)
      for (uint32_t idx : domain.hosts[m].channels.board_of(EventRing::kDomain)) domain.hosts[m].come(idx, 1);
    events += domain.hosts[0].channels.board_of(EventRing::kDomain).size();
    reader.run();
    EXPECT_EQ(reader.seen()[0], events);
    EXPECT_EQ(reader.seen()[1], events);
    EXPECT_EQ(reader.seen()[2], uint64_t{0});
  }
}

CLAIM("a word says which event it is, at the limits of its fields, and an earlier lap never passes for a later one") {
  static_assert((EventCount::kMask ^ EventNumber::kMask ^ EventLap::kMask) == ~uint64_t{0});
  static_assert(EventCount::get(EventCount::put(EventCount::kMost)) == EventCount::kMost);
  for (uint32_t bits : {6u, 15u}) {
    const uint64_t capacity = uint64_t{1} << bits, laps = EventLap::kMost + 1;
    EXPECT_EQ(event_ahead(0, 5, bits), kNoEvent);  // never written
    for (uint64_t position : {uint64_t{0}, capacity - 1, capacity, (laps - 2) * capacity + 3, (laps - 1) * capacity,
                              laps * capacity + 1, 5 * laps * capacity - 1}) {
      const uint64_t word = encode_event(position, bits, EventNumber::kMost, UINT64_MAX - 1);
      EXPECT_EQ(event_ahead(word, position, bits), uint64_t{0});
      EXPECT_EQ(event_ahead(word, position + capacity, bits), kNoEvent);
      for (uint64_t ahead : {uint64_t{1}, uint64_t{2}, laps / 2}) {
        const uint64_t later = encode_event(position + ahead * capacity, bits, 0, 0);
        EXPECT_EQ(event_ahead(later, position, bits), ahead);
      }
      EXPECT_EQ(EventNumber::get(word), EventNumber::kMost);
    }
  }
  // Negative control: a reader that misses as many laps as there are sees none.
  EXPECT_EQ(event_ahead(encode_event((EventLap::kMost + 1) << 6, 6, 0, 0), 0, 6), uint64_t{0});
}

CLAIM("a count is known in full from its low bits, before and after what is known already") {
  const uint64_t most = uint64_t{event_capacity(2 * kMaxChannels)} * kMaxRingSlots;
  for (uint64_t near : {uint64_t{0}, most, uint64_t{UINT32_MAX}, uint64_t{UINT32_MAX} * 7 + 5})
    for (uint64_t distance : {uint64_t{0}, uint64_t{1}, most}) {
      EXPECT_EQ(event_count(encode_event(0, 6, 1, near + distance), near), near + distance);
      if (near >= distance) EXPECT_EQ(event_count(encode_event(0, 6, 1, near - distance), near), near - distance);
    }
  // Negative control.
  EXPECT(event_count(encode_event(0, 6, 1, uint64_t{1} << 32), 0) == 0);
}

CLAIM("a ring has two slots a channel, as many as a warp looks at, and a power of two") {
  EXPECT_EQ(event_capacity(0), 0u);
  for (uint32_t channels : {1u, 31u, 32u, 33u, 510u, 4096u}) {
    const uint32_t capacity = event_capacity(channels);
    EXPECT(std::has_single_bit(capacity) && capacity >= 2 * channels && capacity >= kWarp);
    EXPECT(capacity < 4 * channels || capacity == 64);
  }
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
