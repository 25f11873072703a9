// A peer is killed, a peer is frozen, the link is cut.
#include <cstdlib>
#include <utility>

#include "crew.h"
#include "ranks.h"
#include "suite.h"
#include "worlds.h"

using namespace conformance;

namespace {

constexpr uint64_t kBytes = 4096;

// ---- killed ---------------------------------------------------------------------------------------------------------
constexpr uint64_t kServed = 600;  // writes to the rank that lives
uint64_t place(uint64_t number) { return kData + number * kBytes; }

// What the parent tells.
constexpr uint64_t kToBeKilled = 1, kKilled = 2;

// Rank 0: writes to the rank that dies (1) and to the one that lives (2) until both matters are settled.
void send_to_both(Member& m) {
  Book dying(0, 1), living(0, 2);
  uint64_t num_dying = 0, num_living = 0, after_kill = 0;
  bool known = false;
  const Deadline deadline(2 * kPatientUsec);
  while (!(known && living.num_ended() == kServed)) {
    if (deadline.over())
      throw std::logic_error(std::to_string(living.num_ended()) + " writes to the living rank are done, the death is " +
                             (known ? "known" : "not known"));
    const bool killed = m.board.parent.read() == kKilled;
    // The last third is for after the kill.
    const uint64_t most = killed ? kServed : kServed * 2 / 3;
    if (num_living < most && num_living - living.num_ended() < 16 &&
        m.transport.post_write(write_of(num_living, 2, place(num_living), place(num_living), kBytes)) ==
            PostResult::kPosted) {
      living.posted(num_living++, kBytes);
      after_kill += killed;
    }
    if (num_dying - dying.num_ended() < 16 &&
        m.transport.post_write(write_of(num_dying, 1, kData, kData, kBytes)) == PostResult::kPosted)
      dying.posted(num_dying++, kBytes);
    m.transport.flush();
    for (auto& c : poll_once(m.transport))
      if (c.kind != Completion::Kind::kArrival) (c.peer == 1 ? dying : living).at_sender(c);
    if (dying.num_ended() >= 20) m.own().progress.publish(1);
    if (dying.num_failed() != 0 && m.board.parent.read() == 0)
      throw std::logic_error("a write to a living rank failed");
    known = killed && (dying.num_failed() != 0 || !m.transport.peer_alive(1));
  }
  EXPECT(after_kill >= kServed / 3);
  EXPECT_EQ(living.num_failed(), size_t{0});
}

CLAIM("the death of a peer is known within the transport's patience, and the others are served meanwhile") {
  RanksOptions options;
  options.num_ranks = 3;
  options.region_bytes = kData + kServed * kBytes;
  options.progress_timeout_usec = 2'000'000;
  Crew crew(options, [](Member& m) {
    if (m.rank == 0) {
      for (uint64_t number = 0; number < kServed; ++number) fill(m.at(place(number)), kBytes, number);
      return send_to_both(m);
    }
    uint64_t num_arrived = 0;
    std::vector<bool> seen(kServed, false);
    while (m.rank == 1 || num_arrived < kServed)
      for (auto& c : poll_once(m.transport)) {
        const uint64_t number = number_of(c.immediate);
        if (m.rank == 1 || c.kind != Completion::Kind::kArrival || seen[number]) continue;
        EXPECT(intact(m.at(place(number)), kBytes, number));
        seen[number] = true;
        ++num_arrived;
      }
    while (m.board.ranks[0].over.read() == 0) poll_once(m.transport);  // it may need us for its last reports
  });
  crew.wait([&] { return crew.board().ranks[0].progress.read() != 0; }, "the first writes");
  crew.board().parent.publish(kToBeKilled);  // it may be seen dead before we are back
  crew.send(1, SIGKILL);
  crew.board().parent.publish(kKilled);
  crew.wait_over(0);
  crew.wait_over(2);
}

// ---- frozen ---------------------------------------------------------------------------------------------------------
constexpr uint64_t kFrozenWrites = 800;
constexpr uint64_t kFrozenUsec = 1'000'000;

void send_to_frozen(Member& m) {
  Book book(0, 1);
  auto poll = [&] {
    for (auto& c : poll_once(m.transport)) book.at_sender(c);
  };
  for (uint64_t number = 0; number < kFrozenWrites; ++number) {
    fill(m.at(place(number)), kBytes, number);
    // Half of them before the freeze.
    const Deadline frozen;
    while (number > kFrozenWrites / 2 && m.board.parent.read() == 0 && !frozen.over()) poll();
    book.posted(number, kBytes);
    EXPECT(post_patiently(m.transport, write_of(number, 1, place(number), place(number), kBytes), poll));
  }
  for (const Deadline deadline; book.num_ended() < kFrozenWrites && !deadline.over();) {
    poll();
    EXPECT(m.transport.peer_alive(1));
  }
  EXPECT_EQ(book.num_ended(), size_t{kFrozenWrites});
  EXPECT_EQ(book.num_failed(), size_t{0});
}

void receive_all(Member& m) {
  std::vector<bool> seen(kFrozenWrites, false);
  uint64_t num_arrived = 0;
  for (const Deadline deadline(2 * kPatientUsec); num_arrived < kFrozenWrites;) {
    EXPECT(!deadline.over());
    for (auto& c : poll_once(m.transport)) {
      const uint64_t number = number_of(c.immediate);
      EXPECT(c.kind == Completion::Kind::kArrival && number < kFrozenWrites);
      EXPECT(intact(m.at(place(number)), kBytes, number));
      num_arrived += !seen[number];
      seen[number] = true;
    }
    m.own().progress.publish(num_arrived);
  }
  for (const Deadline deadline; m.board.ranks[0].over.read() == 0 && !deadline.over();) poll_once(m.transport);
}

CLAIM("a peer that is frozen and continued gets everything, bit for bit, and nobody takes it for dead") {
  RanksOptions options;
  options.region_bytes = kData + kFrozenWrites * kBytes;
  Crew crew(options, [](Member& m) { m.rank == 0 ? send_to_frozen(m) : receive_all(m); });
  CrewBoard& board = crew.board();
  crew.wait([&] { return board.ranks[1].progress.read() >= kFrozenWrites / 4; }, "the first arrivals");
  crew.send(1, SIGSTOP);
  board.parent.publish(1);  // the second half is for a frozen peer
  usleep(kFrozenUsec);
  EXPECT(board.ranks[1].over.read() == 0);  // it was frozen: there was something to miss
  EXPECT(board.ranks[1].progress.read() < kFrozenWrites);
  crew.send(1, SIGCONT);
  crew.wait_over(0);
  crew.wait_over(1);
}

// ---- the link -------------------------------------------------------------------------------------------------------
// Cuts the link between the ranks, and heals it at the latest when it goes.
class Link {
 public:
  Link() {
    if (suite().kind != "loop" && suite().cut_command.empty())
      throw Skipped("no command that cuts the link was given (--cut, --heal)");
  }
  ~Link() {
    if (state_.own() % 2 != 0 && !suite().heal_command.empty()) std::system(suite().heal_command.c_str());
  }
  void cut() { turn(suite().cut_command); }
  void heal() { turn(suite().heal_command); }
  const Flag* state() const { return &state_; }

 private:
  void turn(const std::string& command) {
    state_.publish(state_.own() + 1);
    if (!command.empty() && std::system(command.c_str()) != 0) throw std::logic_error("failed: " + command);
  }
  Flag state_;  // odd: cut
};

CLAIM("a link that is cut and healed within the deadline loses nothing: the stream goes on bit for bit") {
  constexpr uint64_t kWrites = 600;
  Link link;
  RanksOptions options;
  options.region_bytes = kData + kWrites * kBytes;
  options.loop.cut = link.state();
  Ranks ranks(options);
  Book book(0, 1);
  auto poll = [&] { poll_both(book, ranks[0], ranks[1]); };
  auto send = [&](uint64_t number) {
    fill(ranks.at(0, place(number)), kBytes, number);
    post(book, ranks[0], ranks[1], write_of(number, 1, place(number), place(number), kBytes));
  };
  for (uint64_t number = 0; number < kWrites / 2; ++number) send(number);
  settle(book, ranks[0], ranks[1]);
  book.expect_complete();
  link.cut();
  for (uint64_t number = kWrites / 2; number < kWrites / 2 + 32; ++number) send(number);
  const Deadline pause(700'000);
  while (!pause.over()) poll();
  EXPECT_EQ(book.num_ended(), size_t{kWrites / 2});  // it was cut: no acknowledgement came through
  link.heal();
  for (uint64_t number = kWrites / 2 + 32; number < kWrites; ++number) send(number);
  settle(book, ranks[0], ranks[1], 2 * kPatientUsec);
  book.expect_complete();
  for (uint64_t number = 0; number < kWrites; ++number) EXPECT(intact(ranks.at(1, place(number)), kBytes, number));
}

CLAIM("a port that goes down is named until it is back, and then the NIC serves new transports") {
  if (suite().down_command.empty()) throw Skipped("no command that takes a port down was given (--down, --up)");
  // The claim's process ends with the port up, whatever happens.
  struct Up {
    ~Up() { run(); }
    void run() {
      if (!std::exchange(done, true) && std::system(suite().up_command.c_str()) != 0) std::abort();
    }
    bool done = false;
  } up;
  {
    Ranks ranks;
    auto trouble = [&] {
      for (size_t rank : {0, 1}) poll_once(ranks[rank]);
      return ranks[1].trouble();
    };
    EXPECT(trouble().empty());
    EXPECT_EQ(std::system(suite().down_command.c_str()), 0);
    EXPECT(eventually([&] { return !trouble().empty(); }, suite().patient_usec(kPatientUsec)));
    const std::string text = ranks[1].trouble(), device = suite().devices_of(1).at(0);
    EXPECT(text.substr(0, text.find(" went down ")) == "port 1 of NIC " + device);
    up.run();
    EXPECT(eventually([&] { return trouble().empty(); }, suite().patient_usec(kPatientUsec)));
  }
  Ranks ranks;
  Book book(0, 1);
  fill(ranks.at(0, kData), kBytes, 1);
  post(book, ranks[0], ranks[1], write_of(1, 1, kData, kData, kBytes));
  settle(book, ranks[0], ranks[1]);
  book.expect_complete();
  EXPECT(intact(ranks.at(1, kData), kBytes, 1));
}

CLAIM("a link that stays cut beyond the deadline is a typed error at all ranks") {
  Link link;
  WorldOptions options = world_options();
  options.loop.cut = link.state();
  options.progress_timeout_usec = suite().patient_usec(1'500'000);
  World world(options);
  world.start();
  Source source(world.nodes[0], out_channel(world.nodes[0], RingKind::kRows, 1));
  EXPECT(source.try_send(1024));
  EXPECT(eventually([&] { return source.flushed(0); }, suite().patient_usec(kPatientUsec)));
  for (auto& node : world.nodes) EXPECT(!node.has_error());
  link.cut();
  EXPECT(source.try_send(1024));
  for (auto& node : world.nodes) {
    EXPECT(eventually([&] { return node.has_error(); }, suite().patient_usec(kPatientUsec)));
    EXPECT(node.control().error.kind == ErrorKind::kTransport);
    EXPECT(node.control().error.message[0] != 0);
  }
}

}  // namespace
