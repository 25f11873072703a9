// What NICs tell beside completions: ports that go down and come back, devices that stop working. Against the stand-in
// for libibverbs; a port of a real device goes down in tests/conformance.
#include <string>
#include <utility>

#include "claims.h"
#include "transport/verbs/abi.h"
#include "transport/verbs/address.h"
#include "verbs_net.h"

using namespace uccl_ep;

namespace {

// Long enough for both ranks to read their NICs' events.
void let_events_pass(Net& net) {
  const uint64_t until = now_usec() + 200'000;
  while (now_usec() < until)
    for (size_t r = 0; r < net.transports.size(); ++r) net.poll(r);
}

CLAIM("a port that goes down is named by errors until it comes back") {
  NicOptions nic;
  nic.devices = {"fake0", "fake1"};
  Net net(2, nic);
  fake_verbs().event_device = 1;
  let_events_pass(net);
  EXPECT(net[0].trouble().empty());
  fake_verbs().event = verbs::IBV_EVENT_PORT_ERR;
  fake_verbs().event_port = 2;
  let_events_pass(net);
  EXPECT(net[0].trouble().empty());  // another port
  fake_verbs().event = verbs::IBV_EVENT_GID_CHANGE;
  let_events_pass(net);
  fake_verbs().event = verbs::IBV_EVENT_PORT_ERR;
  fake_verbs().event_port = 1;
  let_events_pass(net);
  for (size_t r : {0, 1}) EXPECT(says(net[r].trouble(), "port 1 of NIC fake1 went down 0."));
  fake_verbs().event = verbs::IBV_EVENT_PORT_ACTIVE;
  let_events_pass(net);
  EXPECT(net[0].trouble().empty());
  EXPECT_EQ(fake_verbs().events_read, uint64_t{8});  // two ranks, four events
  EXPECT_EQ(fake_verbs().events_acknowledged, fake_verbs().events_read);
  EXPECT_EQ(fake_verbs().blocked, uint64_t{0});
}

CLAIM("a write that is given up names the port if it is down") {
  for (const bool down : {false, true}) {
    Net net(2);
    fake_verbs().cut_qp = verbs::decode_address(net.addresses[0]).nics[0].pair_of(1)->number;
    fake_verbs().event = down ? verbs::IBV_EVENT_PORT_ERR : -1;
    let_events_pass(net);
    EXPECT(net[0].post_write(small(1, 1)) == PostResult::kPosted);
    net[0].flush();
    const auto ended = net.poll(0);
    EXPECT(ended.size() == 1 && ended[0].kind == Completion::Kind::kFailure);
    EXPECT(says(ended[0].reason, down ? "port 1 of NIC fake0 went down" : "its link is cut"));
    EXPECT_EQ(std::string(ended[0].reason).find("its link is cut") == std::string::npos, down);
  }
}

CLAIM("a NIC that stops working, or loses a queue, is a typed error that names it") {
  for (const auto& [event, what] : {std::pair{verbs::IBV_EVENT_DEVICE_FATAL, "NIC fake0 has stopped working"},
                                    {verbs::IBV_EVENT_CQ_ERR, "NIC fake0 has lost a queue"},
                                    {verbs::IBV_EVENT_SRQ_ERR, "NIC fake0 has lost a queue"}}) {
    Net net(2);
    fake_verbs().event = event;
    EXPECT(says(message_of<CommunicationFailure>([&] { let_events_pass(net); }), what));
    fake_verbs().event = -1;
  }
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
