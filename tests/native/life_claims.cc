// Proxies: who lives, who died, who said goodbye; waking and stopping.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "claims.h"
#include "common/clock.h"
#include "faulty.h"
#include "proxy_world.h"
#include "victim.h"

using namespace uccl_ep;

namespace {

CLAIM("the death of a domain peer becomes an error of all ranks within two seconds") {
  Victim victim;
  WorldOptions options;
  options.labels = {0, 0, 1};
  // Rank 1 pretends to be the victim: the others see its pid when their proxies are made.
  const auto world = std::make_unique<World>(options);
  world->nodes[1].control().pid = victim.pid();
  ProxyContext context;
  Node& node = world->nodes[0];
  context.rank = 0;
  context.topo = &world->topo;
  context.channels = &node.channels;
  context.layout = &node.layout;
  context.region = node.region->base();
  context.control = &node.control();
  context.domain_controls = {&world->nodes[0].control(), &world->nodes[1].control(), nullptr};
  context.commands = node.commands.get();
  context.transport = node.transport.get();
  node.proxy = std::make_unique<Proxy>(context);
  node.proxy->start();
  world->nodes[2].proxy->start();
  usleep(250'000);
  EXPECT(!node.has_error() && !node.proxy->remote_closed(1));
  victim.end();
  EXPECT(eventually([&] { return node.has_error() && world->nodes[2].has_error(); }, 2'000'000));
  for (size_t rank : {0, 1, 2}) {
    EXPECT(eventually([&] { return world->nodes[rank].has_error(); }));
    const ErrorRecord& seen = world->nodes[rank].control().error;
    EXPECT(seen.kind == ErrorKind::kPeerDied && seen.rank == 0 && seen.peer == 1);
    EXPECT(std::string(seen.message).find("rank 1 (pid " + std::to_string(victim.pid()) + ") died") !=
           std::string::npos);
  }
  EXPECT(node.proxy->remote_closed(1));
}

CLAIM("the death of a rank of another domain becomes an error of all ranks") {
  WorldOptions options;
  options.labels = {0, 1, 2};
  FaultyWorld f(options);
  f.world->start();
  f.faulty[0]->dead.publish(1 + 1);  // rank 0 sees that rank 1 is gone
  EXPECT(eventually([&] { return f.world->nodes[0].has_error() && f.world->nodes[2].has_error(); }, 2'000'000));
  EXPECT(f.world->nodes[2].control().error.kind == ErrorKind::kPeerDied);
  EXPECT_EQ(f.world->nodes[2].control().error.rank, 0);
  EXPECT_EQ(f.world->nodes[2].control().error.peer, 1);
}

CLAIM("a rank that said bye may go without an error") {
  FaultyWorld f;
  f.world->start();
  f.world->nodes[1].proxy->announce_close();
  EXPECT(eventually([&] { return f.world->nodes[0].proxy->remote_closed(1); }));
  f.faulty[0]->dead.publish(1 + 1);
  usleep(400'000);
  EXPECT(!f.world->nodes[0].has_error());
}

CLAIM("a rank that said bye and waits for the others learns of an error that one of them finds then") {
  WorldOptions options;
  options.labels = {0, 1, 0};
  options.loop.loss_rate = 0.4;
  FaultyWorld f(options);
  f.world->start();
  Node &waits = f.world->nodes[1], &fails = f.world->nodes[2];
  waits.proxy->announce_close();
  EXPECT(eventually([&] { return fails.proxy->remote_closed(1); }));
  ErrorRecord record;
  record.kind = ErrorKind::kPeerFailed;
  record.rank = record.peer = 2;
  post_error(fails.control(), record);
  EXPECT(eventually([&] { return fails.proxy->error_delivered(); }, 3'000'000));
  EXPECT(waits.has_error() && waits.control().error.rank == 2);
}

CLAIM("a rank is closed only when every other one has announced it, and its byes are flushed") {
  WorldOptions options;
  options.labels = {0, 1, 0};
  options.loop.seed = 2;
  options.loop.refuse_rate = 0.5;
  World world(options);
  world.start();
  for (auto& node : world.nodes) EXPECT(!node.proxy->all_closed());
  world.nodes[0].proxy->announce_close();
  world.nodes[1].proxy->announce_close();
  EXPECT(eventually([&] { return world.nodes[2].proxy->remote_closed(0) && world.nodes[2].proxy->remote_closed(1); }));
  usleep(50'000);
  for (auto& node : world.nodes) EXPECT(!node.proxy->all_closed());
  EXPECT(!world.nodes[0].proxy->remote_closed(2) && !world.nodes[1].proxy->remote_closed(2));
  world.nodes[2].proxy->announce_close();
  for (auto& node : world.nodes) EXPECT(eventually([&] { return node.proxy->all_closed(); }));
  for (auto& node : world.nodes) EXPECT(!node.has_error());
}

CLAIM("ranks that leave need no more than the byes that come through, though the last acknowledgement may be lost") {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    WorldOptions options;
    options.labels = {0, 1, 2, 3};
    options.loop.seed = seed;
    options.loop.loss_rate = 0.4;
    World world(options);
    world.start();
    for (auto& node : world.nodes) node.proxy->announce_close();
    // Who is done goes at once, as close() does: nobody acknowledges for it any more.
    std::vector<bool> gone(world.nodes.size());
    EXPECT(eventually(
        [&] {
          for (size_t rank = 0; rank < gone.size(); ++rank) {
            if (gone[rank] || !world.nodes[rank].proxy->all_closed()) continue;
            world.nodes[rank].proxy->stop();
            gone[rank] = true;
          }
          return std::count(gone.begin(), gone.end(), true) == 4;
        },
        6'000'000));
    for (auto& node : world.nodes) EXPECT(!node.has_error());
  }
}

CLAIM("a bye that is lost keeps both ranks waiting") {
  WorldOptions options;
  options.loop.drop_peer = 1;
  World world(options);
  world.start();
  for (auto& node : world.nodes) node.proxy->announce_close();
  usleep(200'000);
  for (auto& node : world.nodes) EXPECT(!node.proxy->all_closed());
}

CLAIM("heartbeats tell domain peers and ranks of other domains that a rank lives, and stop when it does") {
  WorldOptions options;
  options.labels = {0, 0, 1};
  World world(options);
  world.start();
  const uint64_t started = now_usec();
  for (int peer : {1, 2})
    EXPECT(eventually([&] { return world.nodes[0].proxy->last_heard_usec(peer) > started + 600'000; }, 5'000'000));
  EXPECT(world.nodes[0].proxy->stats().messages.sent >= 2);
  world.nodes[1].proxy->stop();
  world.nodes[2].proxy->stop();
  usleep(200'000);  // a heartbeat wakes nobody: one may wait for up to kHeartbeatUsec
  const uint64_t last[] = {world.nodes[0].proxy->last_heard_usec(1), world.nodes[0].proxy->last_heard_usec(2)};
  usleep(700'000);
  EXPECT_EQ(world.nodes[0].proxy->last_heard_usec(1), last[0]);
  EXPECT_EQ(world.nodes[0].proxy->last_heard_usec(2), last[1]);
}

CLAIM("a movement of the operation is told to the other domains once, also to one that missed a heartbeat") {
  WorldOptions options;
  options.loop.refuse_rate = 0.5;
  options.labels = {0, 0, 1, 2};
  World world(options);
  world.start();
  const uint64_t started = now_usec();
  world.nodes[0].control().progress.publish(started);
  for (size_t rank : {2, 3}) EXPECT(eventually([&] { return world.nodes[rank].proxy->last_moved_usec(0) >= started; }));
  EXPECT_EQ(world.nodes[1].proxy->last_moved_usec(0), started);
  const uint64_t seen = world.nodes[2].proxy->last_moved_usec(0);
  usleep(1'200'000);
  EXPECT_EQ(world.nodes[2].proxy->last_moved_usec(0), seen);
  EXPECT_EQ(world.nodes[2].proxy->last_moved_usec(3), uint64_t{0});
}

CLAIM("a rank gets heartbeats from one rank of each other domain") {
  WorldOptions options;
  options.labels = {0, 0, 1, 1, 2, 2};
  World world(options);
  world.start();
  usleep(1'800'000);  // four beats of each
  for (const Node& node : world.nodes) {
    const uint64_t taken = node.proxy->stats().messages.taken;
    EXPECT(taken >= 2 && taken <= 10);  // of all four: 16
  }
}

CLAIM("what a rank hears of one whose rows it lands its domain knows") {
  WorldOptions options;
  options.labels = {0, 0, 1, 1};
  options.loop.loss_rate = 0.2;
  World world(options);
  const uint64_t started = now_usec();
  world.start();
  Node& other = world.nodes[1];  // rank 0 lands the rows of rank 2
  world.nodes[2].control().progress.publish(started);
  world.nodes[2].control().num_refused.publish(3);
  EXPECT(eventually([&] { return other.proxy->last_moved_usec(2) >= started && other.proxy->num_refused(2) == 3; }));
  EXPECT(eventually([&] { return other.proxy->last_heard_usec(2) > started + 600'000; }, 5'000'000));
  EXPECT_EQ(other.proxy->last_moved_usec(3), uint64_t{0});
  EXPECT(!other.proxy->remote_closed(2));
  world.nodes[2].proxy->announce_close();
  EXPECT(eventually([&] { return other.proxy->remote_closed(2); }));
  EXPECT(!other.proxy->remote_closed(3));
}

CLAIM("a rank is not silent because the one that would tell of it is") {
  WorldOptions options;
  options.labels = {0, 0, 1};
  World world(options);
  Node& asks = world.nodes[1];  // of rank 2 it knows what rank 0 tells
  world.start();
  world.nodes[0].proxy->stop();
  usleep(1'500'000);
  EXPECT(asks.proxy->silent_usec(0) > 1'200'000);
  EXPECT(asks.proxy->silent_usec(2) < 400'000);
  World second(options);
  second.start();
  second.nodes[2].proxy->stop();
  usleep(1'500'000);
  EXPECT(second.nodes[1].proxy->silent_usec(0) < 400'000);
  EXPECT(second.nodes[1].proxy->silent_usec(2) > 900'000);
}

CLAIM("an error needs not reach a rank that has left or died, though only another rank of the domain knows") {
  for (bool dies : {false, true}) {
    WorldOptions options;
    options.labels = {0, 0, 1, 1};
    FaultyWorld f(options);
    f.world->start();
    Node& finds = f.world->nodes[1];
    if (!dies) {
      f.world->nodes[2].proxy->announce_close();
      EXPECT(eventually([&] { return finds.proxy->remote_closed(2); }));
    }
    f.world->nodes[2].proxy->stop();
    ErrorRecord record;
    record.kind = ErrorKind::kPeerFailed;
    record.rank = 1;
    post_error(finds.control(), record);
    EXPECT(eventually([&] { return f.world->nodes[3].has_error(); }));
    if (dies) {
      usleep(1'500'000);
      EXPECT(!finds.proxy->error_delivered());  // rank 2 may only be slow
      f.faulty[0]->dead.publish(2 + 1);
    }
    EXPECT(eventually([&] { return finds.proxy->error_delivered(); }, 3'000'000));
  }
}

CLAIM("stop returns in less than 200 ms with operations pending, and can be called twice") {
  WorldOptions options;
  options.loop.gbytes_per_s = 0.000001;
  uint64_t best = UINT64_MAX;
  for (int attempt = 0; attempt < 5 && best >= 200'000; ++attempt) {  // others may have the processors
    World world(options);
    world.start();
    Source source(world.nodes[0], out_channel(world.nodes[0], RingKind::kRows, 1));
    while (source.try_send(2048)) continue;
    EXPECT(eventually([&] { return world.nodes[0].proxy->stats().peak_in_flight_ops == 2; }));
    const uint64_t started = now_usec();
    world.nodes[0].proxy->stop();
    best = std::min(best, now_usec() - started);
    world.nodes[0].proxy->stop();
  }
  EXPECT(best < 200'000);
}

uint64_t cpu_usec() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000 +
         static_cast<uint64_t>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

void expect_idle_is_cheap(World& world) {
  world.start();
  usleep(200'000);
  const uint64_t before = cpu_usec(), started = now_usec();
  usleep(1'000'000);
  const uint64_t used = cpu_usec() - before;
  if (used > (now_usec() - started) * world.nodes.size() / 50)
    throw std::logic_error("idle proxies used " + std::to_string(used) + " us in a second");
}

CLAIM("an idle proxy costs less than 2 percent of a core") {
  WorldOptions options;
  options.labels = {0, 0, 1, 1};
  World world(options);
  expect_idle_is_cheap(world);
}

WorldOptions device_options() {
  WorldOptions options;
  options.device = DeviceRings{{{1, 4096}, {2, 4096}}, 2048, 4, 1024, 4, {}};
  return options;
}

CLAIM("an idle proxy of a GPU buffer, which nobody rings, costs less than 2 percent of a core") {
  World world(device_options());
  expect_idle_is_cheap(world);
  const ProxyStats before = world.nodes[0].proxy->stats();
  EXPECT(before.busy_usec < 300'000);  // its naps are no work
  usleep(300'000);
  const ProxyStats stats = world.nodes[0].proxy->stats();
  EXPECT(stats.passes - before.passes < 5 * (stats.wakeups - before.wakeups));  // one look after most naps
}

CLAIM("commands that nobody announced or rang for are shipped after a nap") {
  World world(device_options());
  world.start();
  Source source(world.nodes[0], out_channel(world.nodes[0], RingKind::kRows, 1));
  Sink sink(world.nodes[1], world.nodes[0].channels.out[out_channel(world.nodes[0], RingKind::kRows, 1)].peer_channel,
            0);
  uint64_t slow = 0;
  for (int i = 0; i < 30; ++i) {
    usleep(5'000);
    const uint64_t started = now_usec();
    EXPECT(source.try_send(64));
    EXPECT(eventually([&] { return sink.ready(); }));
    EXPECT(eventually([&] { return source.flushed(source.serial() - 1); }));
    sink.release();
    slow += now_usec() - started > 20'000;  // without naps it waits for the next heartbeat, 50 ms on average
  }
  EXPECT(slow < 10);
}

CLAIM("while an operation runs on the GPU its proxy does not sleep, unless there is an error") {
  World world(device_options());
  Node& node = world.nodes[0];
  node.launched->publish(7);
  node.ended().publish(6);
  world.start();
  usleep(50'000);
  const ProxyStats before = node.proxy->stats();
  usleep(200'000);
  const ProxyStats busy = node.proxy->stats();
  EXPECT_EQ(busy.wakeups, before.wakeups);
  EXPECT(busy.passes > before.passes + 1000);
  EXPECT(busy.busy_usec > before.busy_usec + 100'000);
  node.ended().publish(7);
  EXPECT(eventually([&] { return node.proxy->stats().wakeups > busy.wakeups + 10; }, 5'000'000));
  node.launched->publish(8);
  usleep(50'000);
  const uint64_t awake = node.proxy->stats().wakeups;
  usleep(100'000);
  EXPECT_EQ(node.proxy->stats().wakeups, awake);
  post_error(node.control(), ErrorRecord{});
  EXPECT(eventually([&] { return node.proxy->stats().wakeups > awake + 10; }, 5'000'000));
}

CLAIM("a proxy is awake for a replay that somebody told it of, and for the next one, and then sleeps again") {
  World world(device_options());
  Node& node = world.nodes[0];
  world.start();
  usleep(50'000);  // asleep, and never awake for a replay yet
  const auto awake_usec = [&] {
    const uint64_t naps = node.proxy->stats().wakeups;
    node.awaited->publish(node.awaited->own() + 1);
    node.control().proxy_bell.ring();
    EXPECT(eventually([&] { return node.proxy->stats().wakeups > naps; }));
    const uint64_t since = now_usec(), woken = node.proxy->stats().wakeups;
    EXPECT(eventually([&] { return node.proxy->stats().wakeups > woken; }));
    return now_usec() - since;
  };
  uint64_t longest = 0;
  for (int i = 0; i < 5; ++i) longest = std::max(longest, awake_usec());
  EXPECT(longest >= 8'000);  // naps are shorter
  const ProxyStats before = node.proxy->stats();
  EXPECT(eventually([&] { return node.proxy->stats().wakeups > before.wakeups + 10; }, 5'000'000));
}

CLAIM("a sleeping proxy is woken by a command, by an arrival and by a credit") {
  World world{WorldOptions{}};
  world.start();
  const uint32_t channel = out_channel(world.nodes[0], RingKind::kRows, 1);
  Source source(world.nodes[0], channel);
  Sink sink(world.nodes[1], world.nodes[0].channels.out[channel].peer_channel, 0);
  uint64_t slow = 0;
  for (int i = 0; i < 30; ++i) {
    usleep(5'000);  // both are asleep
    const uint64_t started = now_usec();
    EXPECT(eventually([&] { return source.try_send(64); }));
    EXPECT(eventually([&] { return sink.ready(); }));
    sink.release();
    slow += now_usec() - started > 40'000;  // a lost wake-up waits for the next heartbeat, 50 ms on average
  }
  EXPECT(slow < 10);
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
