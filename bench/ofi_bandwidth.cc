// Writes from one process to another over libfabric's tcp provider: by our transport, by fi_writedata alone, and by
// fi_writedata that waits for delivery as ours does. They take turns; each prints "turn system GB/s", from its first
// post to the moment when the receiver has seen the last arrival.
//
//   ofi_bandwidth BYTES WINDOW COUNT TURNS
#include <poll.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/clock.h"
#include "transport/ofi/ofi.h"
#include "transport/registry.h"

using namespace uccl_ep;
using namespace uccl_ep::ofi;

namespace {

constexpr uint64_t kPatienceUsec = 60'000'000;

struct Load {
  uint64_t bytes, window, count;
  uint64_t region_bytes() const { return bytes * window; }
};

// One end of the line; every function returns what has newly happened.
struct End {
  std::string address;
  std::function<void(const std::string& peer)> connect;
  std::function<bool(uint64_t number)> post;  // false: not now
  std::function<void()> flush;
  std::function<uint64_t()> done;      // writes
  std::function<uint64_t()> arrivals;
};

void put(int fd, const std::string& text) {
  const uint64_t size = text.size();
  if (write(fd, &size, sizeof(size)) != sizeof(size) || write(fd, text.data(), size) != static_cast<ssize_t>(size))
    throw std::runtime_error("the other process is gone");
}
std::string get(int fd) {
  uint64_t size = 0;
  if (read(fd, &size, sizeof(size)) != sizeof(size)) throw std::runtime_error("the other process is gone");
  std::string text(size, 0);
  if (read(fd, text.data(), size) != static_cast<ssize_t>(size)) throw std::runtime_error("the other process is gone");
  return text;
}

End ours(int rank, const Load& load, uint8_t* memory) {
  TransportSetup setup;
  setup.rank = rank;
  setup.num_ranks = 2;
  setup.rails = setup.all = {1 - rank};
  setup.region = {memory, load.region_bytes(), "", -1};
  setup.generation = 1;
  setup.largest_write_bytes = load.bytes;
  TransportOptions options;
  options.nic.provider = "tcp";
  std::shared_ptr<Transport> transport = transport_named("ofi").make(setup, options);
  auto completions = std::make_shared<std::vector<Completion>>(64);
  auto poll = [=] {
    const uint64_t count = transport->poll(*completions);
    for (uint64_t i = 0; i < count; ++i)
      if ((*completions)[i].kind == Completion::Kind::kFailure) throw std::runtime_error((*completions)[i].reason);
    return count;
  };
  auto post = [=](uint64_t number) {
    const uint64_t offset = number % load.window * load.bytes;
    return transport->post_write({1 - rank, offset, offset, load.bytes, 0, 0, Memory::kHost, false}) ==
           PostResult::kPosted;
  };
  auto connect = [=](const std::string& peer) {
    transport->connect(rank == 0 ? std::vector{transport->address(), peer} : std::vector{peer, transport->address()});
  };
  return {transport->address(), connect, post, [=] { transport->flush(); }, poll, poll};
}

// libfabric as a program that knows nothing of us would use it.
struct Raw {
  ofi::Info info;
  fid_fabric* fabric;
  fid_domain* domain;
  fid_av* table;
  fid_cq* queue;
  fid_ep* endpoint;
  fid_mr* memory;
  fi_addr_t peer = 0;
  uint64_t peer_key = 0;
};

void must(ssize_t result, const char* what) {
  if (result < 0) throw std::runtime_error(std::string(what) + ": " + ofi::error_text(result));
}

std::shared_ptr<Raw> open_raw(const Load& load, uint8_t* memory, uint64_t op_flags) {
  auto raw = std::make_shared<Raw>();
  NicOptions options;
  options.provider = "tcp";
  raw->info = std::move(ofi::choose_offers({&options, false, "", 0})[0].info);
  raw->info->tx_attr->op_flags = op_flags;
  must(fi_fabric(raw->info->fabric_attr, &raw->fabric, nullptr), "fi_fabric");
  must(fi_domain(raw->fabric, raw->info.get(), &raw->domain, nullptr), "fi_domain");
  fi_av_attr table = {};
  table.type = kFiAvTable;
  must(fi_av_open(raw->domain, &table, &raw->table, nullptr), "fi_av_open");
  fi_cq_attr queue = {};
  queue.size = 4096;
  queue.format = kFiCqFormatData;
  must(fi_cq_open(raw->domain, &queue, &raw->queue, nullptr), "fi_cq_open");
  must(fi_endpoint(raw->domain, raw->info.get(), &raw->endpoint, nullptr), "fi_endpoint");
  must(fi_ep_bind(raw->endpoint, &raw->table->fid, 0), "fi_ep_bind");
  must(fi_ep_bind(raw->endpoint, &raw->queue->fid, kFiTransmit | kFiRecv), "fi_ep_bind");
  must(fi_enable(raw->endpoint), "fi_enable");
  must(raw->domain->mr->reg(&raw->domain->fid, memory, load.region_bytes(), kFiWrite | kFiRemoteWrite, 0, 4711, 0,
                            &raw->memory, nullptr),
       "fi_mr_reg");
  return raw;
}

End raw(const Load& load, uint8_t* memory, uint64_t op_flags) {
  std::shared_ptr<Raw> raw = open_raw(load, memory, op_flags);
  std::string name(ofi::kMaxNameBytes, 0);
  size_t name_bytes = name.size();
  must(fi_getname(&raw->endpoint->fid, name.data(), &name_bytes), "fi_getname");
  name.resize(name_bytes);
  const uint64_t key = fi_mr_key(raw->memory);
  name.append(reinterpret_cast<const char*>(&key), sizeof(key));
  auto connect = [=](const std::string& peer) {
    std::memcpy(&raw->peer_key, peer.data() + peer.size() - sizeof(key), sizeof(key));
    if (fi_av_insert(raw->table, peer.data(), 1, &raw->peer, 0, nullptr) != 1) throw std::runtime_error("fi_av_insert");
  };
  auto poll = [=] {
    fi_cq_data_entry entries[64];
    const ssize_t count = raw->queue->ops->read(raw->queue, entries, 64);
    if (count != -EAGAIN) must(count, "fi_cq_read");
    return count > 0 ? static_cast<uint64_t>(count) : 0;
  };
  auto post = [=](uint64_t number) {
    const uint64_t offset = number % load.window * load.bytes;
    const ssize_t result =
        raw->endpoint->rma->writedata(raw->endpoint, memory + offset, load.bytes, fi_mr_desc(raw->memory), number,
                                      raw->peer, offset, raw->peer_key, nullptr);
    if (result != -EAGAIN) must(result, "fi_writedata");
    return result == 0;
  };
  return {name, connect, post, [] {}, poll, poll};
}

// Who has nothing to do lets the other process run, as a proxy does.
uint64_t or_yield(uint64_t count) {
  if (count == 0) sched_yield();
  return count;
}

// From the first post to the last arrival.
double send(const End& end, const Load& load, uint64_t count, int from_receiver, int to_receiver) {
  const uint64_t started = now_nsec();
  for (uint64_t posted = 0, done = 0; done < count;) {
    while (posted < count && posted - done < load.window && end.post(posted)) ++posted;
    end.flush();
    done += or_yield(end.done());
    if (now_nsec() - started > 1000 * kPatienceUsec) throw std::runtime_error("nothing moves");
  }
  if (get(from_receiver) != "arrived") throw std::runtime_error("not all arrived");
  const double nsec = static_cast<double>(now_nsec() - started);
  put(to_receiver, "next");
  return nsec;
}

void receive(const End& end, uint64_t count, int from_sender, int to_sender) {
  const uint64_t deadline = now_usec() + kPatienceUsec;
  for (uint64_t arrived = 0; arrived < count && now_usec() < deadline;) arrived += or_yield(end.arrivals());
  put(to_sender, "arrived");
  pollfd next{from_sender, POLLIN, 0};
  while (::poll(&next, 1, 0) == 0 && now_usec() < deadline) or_yield(end.arrivals());  // acknowledgements go out
  get(from_sender);
}

int run(const Load& load, uint64_t turns) {
  int to_receiver[2], to_sender[2];
  if (pipe(to_receiver) != 0 || pipe(to_sender) != 0) return 1;
  const pid_t receiver = fork();
  const int rank = receiver == 0 ? 1 : 0;
  const int in = rank == 0 ? to_sender[0] : to_receiver[0], out = rank == 0 ? to_receiver[1] : to_sender[1];
  const char* const names[] = {"ours", "raw", "raw_delivered"};
  std::vector<uint8_t> memory(load.region_bytes(), static_cast<uint8_t>(rank + 1));
  const End ends[] = {ours(rank, load, memory.data()), raw(load, memory.data(), 0),
                      raw(load, memory.data(), kFiDeliveryComplete)};
  for (const End& end : ends) {
    put(out, end.address);
    end.connect(get(in));
  }
  for (uint64_t turn = 0; turn <= turns; ++turn)  // the first makes connections
    for (size_t i = 0; i < std::size(ends); ++i) {
      const size_t system = (turn + i) % std::size(ends);
      if (rank == 1) {
        receive(ends[system], load.count, in, out);
        continue;
      }
      const double nsec = send(ends[system], load, load.count, in, out);
      if (turn != 0)
        std::printf("%d %s %.4f\n", static_cast<int>(turn), names[system],
                    static_cast<double>(load.bytes * load.count) / nsec);
    }
  if (rank == 0) waitpid(receiver, nullptr, 0);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  auto number = [&](int i) { return std::strtoull(argv[i], nullptr, 10); };
  try {
    return run({number(1), number(2), number(3)}, number(4));
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}
