// Datagrams of the loop transport: what a queue holds, loses, and does not believe.
#include <cstring>
#include <vector>

#include "claims.h"
#include "common/units.h"
#include "transport/loop/mail.h"

using namespace uccl_ep;

namespace {

CLAIM("a queue of datagrams holds thirty heartbeats and three errors in order, and loses what it has no room for") {
  std::vector<uint8_t> memory(sizeof(loop::MailQueue) + kLineBytes);
  auto* const queue = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uint64_t>(memory.data()), kLineBytes));
  loop::MailWriter writer(queue);
  loop::MailReader reader(queue);
  std::vector<uint8_t> out(kMaxDatagramBytes);
  const auto bytes_of = [](size_t number) {
    return std::vector<uint8_t>(number % 11 == 10 ? 552 : 49 + number % 8, static_cast<uint8_t>(number));
  };
  size_t taken = 0;
  for (size_t lap = 0, put = 0; lap < 200; ++lap) {  // ends and wraps at all places
    for (size_t room = 33; room != 0; --room) EXPECT(writer.put(bytes_of(put++)));
    while (lap % 3 == 0 && writer.put(bytes_of(put))) ++put;
    for (; taken < put; ++taken) {
      const size_t num_bytes = reader.take(out);
      EXPECT((std::vector<uint8_t>(out.begin(), out.begin() + static_cast<ptrdiff_t>(num_bytes)) == bytes_of(taken)));
    }
    EXPECT_EQ(reader.take(out), size_t{0});
  }
}

CLAIM("a queue of datagrams that no sender can have written is emptied, and works again") {
  for (uint64_t length : {uint64_t{0}, uint64_t{kMaxDatagramBytes + 1}, uint64_t{200}, UINT64_MAX, UINT64_MAX - 7}) {
    std::vector<uint8_t> memory(sizeof(loop::MailQueue) + kLineBytes);
    auto* const queue = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uint64_t>(memory.data()), kLineBytes));
    loop::MailWriter writer(queue);
    loop::MailReader reader(queue);
    std::vector<uint8_t> out(kMaxDatagramBytes);
    EXPECT(writer.put(std::vector<uint8_t>(16, 1)));
    std::memcpy(reinterpret_cast<loop::MailQueue*>(queue)->bytes, &length, sizeof(length));
    EXPECT_EQ(reader.take(out), size_t{0});
    EXPECT(writer.put(std::vector<uint8_t>(17, 2)));
    EXPECT_EQ(reader.take(out), size_t{17});
  }
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
