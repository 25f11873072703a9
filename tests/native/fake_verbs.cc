// A stand-in for libibverbs.so.1 and libefa.so.1: NICs of one process whose wire is memcpy. It does what the manuals
// promise and nothing more: datagrams in any order, lost or twice, completions only where asked for, receives that are
// used up. Longer than 400 lines because a library is one file here, and half of it are the library's functions.
#include "fake_verbs.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "transport/verbs/efa_abi.h"
#include "transport/verbs/extended.h"

extern "C" {
__attribute__((visibility("default"))) uccl_ep::FakeVerbs fake_verbs_state;
}

namespace {

using namespace uccl_ep::verbs;
using uccl_ep::FakeVerbs;
FakeVerbs& state = fake_verbs_state;

struct Device {
  ibv_device base{};
};
struct Context {
  verbs_context extended{};
  int device = 0;
  int told = -1;  // the last event
};
struct Cq {
  ibv_cq base{};
  size_t capacity = 0;
  std::deque<ibv_wc> entries;
};
struct Srq {
  ibv_srq base{};
  uint32_t receives = 0;
  uint64_t wr_id = 0;
  uint64_t bytes = 0;
};
struct Ah {
  ibv_ah base{};
  ibv_gid to{};
  uint16_t number = 0;
};
struct Mr {
  ibv_mr base{};
  uint64_t start = 0;
  bool remote = false;
};
struct Post {
  uint64_t wr_id = 0, remote = 0, local = 0;
  uint32_t rkey = 0, immediate = 0, num_bytes = 0, lkey = 0;
  uint32_t to_qp = 0;
  ibv_gid to{};
  uint32_t key = 0;  // of a queue
  bool signalled = false;
};
struct Receive {
  uint64_t wr_id, address;
  uint32_t num_bytes, lkey;
};
struct Qp {
  ibv_qp_ex ex{};
  bool datagrams = false, unsolicited = false;
  bool all_signalled = false;
  bool unreliable = false;
  uint64_t bytes = 0;
  uint32_t key = 0;
  std::deque<Receive> buffers;  // of an unreliable one
  Srq* srq = nullptr;
  uint32_t receives = 0;
  uint64_t receive_id = 0;
  ibv_gid own{};
  uint32_t remote_qp = 0;
  std::vector<Post> building;
  std::deque<Post> sent;
  ibv_qp_state now = IBV_QPS_RESET;
};

struct World {
  std::vector<Device> devices = std::vector<Device>(8);
  std::map<uint32_t, Qp*> qps;
  std::map<uint32_t, Mr*> mrs;
  std::map<std::pair<uint64_t, uint64_t>, uint16_t> routes;  // by GID
  uint32_t next_qp = 17, next_key = 100;
  std::mt19937_64 random{1};
};
World& world() {
  static World w;
  return w;
}
// Each rank's thread polls, and moves everybody's writes.
std::recursive_mutex& mutex() {
  static std::recursive_mutex m;
  return m;
}
using Lock = std::lock_guard<std::recursive_mutex>;

ibv_gid gid_of(int device, int index) {
  ibv_gid gid{};
  if (index > 0) gid.raw[10] = gid.raw[11] = 0xFF;
  gid.raw[12] = 10;
  gid.raw[14] = static_cast<uint8_t>(index);
  gid.raw[15] = static_cast<uint8_t>(device + 1);
  return gid;
}
constexpr int kUsedGid = 2;
constexpr uint64_t kEntryBytes = 64, kReceiveBytes = 32;
uint16_t route_number(const ibv_gid& gid) {
  auto [it, added] = world().routes.try_emplace({gid.global.subnet_prefix, gid.global.interface_id}, 0);
  if (added) it->second = static_cast<uint16_t>(world().routes.size());
  return it->second;
}
Qp* qp_of(ibv_qp_ex* ex) { return reinterpret_cast<Qp*>(ex); }

void complete(ibv_cq* cq, const ibv_wc& wc) {
  Cq* const its = reinterpret_cast<Cq*>(cq);
  if (its->entries.size() >= its->capacity) ++state.outside;  // an overrun loses completions
  its->entries.push_back(wc);
}

void finish(Qp& qp, const Post& post, ibv_wc_status status) {
  if (!post.signalled && status == IBV_WC_SUCCESS) return;
  ibv_wc wc{};
  wc.wr_id = post.wr_id;
  wc.status = status;
  wc.opcode = IBV_WC_RDMA_WRITE;
  wc.qp_num = qp.ex.qp_base.qp_num;
  complete(qp.ex.qp_base.send_cq, wc);
}

void break_off(Qp& qp) {
  qp.now = IBV_QPS_ERR;
  for (const Post& post : qp.sent) finish(qp, post, IBV_WC_WR_FLUSH_ERR);
  qp.sent.clear();
}

bool is_registered(uint32_t key, uint64_t at, uint64_t num_bytes) {
  const auto mr = world().mrs.find(key);
  return mr != world().mrs.end() && at >= mr->second->start &&
         at + num_bytes <= mr->second->start + mr->second->base.length;
}

bool chance(double rate) { return rate > 0 && std::uniform_real_distribution<double>(0, 1)(world().random) < rate; }

// A datagram is over, whether anybody gets it or not.
void deliver_datagram(Qp& from, const Post& post) {
  finish(from, post, IBV_WC_SUCCESS);
  const auto found = world().qps.find(post.to_qp);
  for (int copies = chance(state.datagram_duplicates) ? 2 : 1; copies > 0; --copies) {
    const bool lost = found == world().qps.end() || !found->second->unreliable || found->second->key != post.key ||
                      found->second->buffers.empty() || chance(state.datagram_loss);
    state.lost_datagrams += lost;
    if (lost) continue;
    Qp& to = *found->second;
    const Receive receive = to.buffers.front();
    to.buffers.pop_front();
    constexpr uint32_t kRouteBytes = 40;
    if (receive.num_bytes < kRouteBytes + post.num_bytes || !is_registered(post.lkey, post.local, post.num_bytes) ||
        !is_registered(receive.lkey, receive.address, receive.num_bytes)) {
      ++state.outside;
      continue;
    }
    std::memset(reinterpret_cast<void*>(receive.address), 0xEE, kRouteBytes);
    std::memcpy(reinterpret_cast<void*>(receive.address + kRouteBytes), reinterpret_cast<void*>(post.local),
                post.num_bytes);
    ibv_wc wc{};
    wc.wr_id = receive.wr_id;
    wc.status = IBV_WC_SUCCESS;
    wc.opcode = IBV_WC_RECV;
    wc.byte_len = kRouteBytes + post.num_bytes;
    wc.qp_num = to.ex.qp_base.qp_num;
    wc.src_qp = from.ex.qp_base.qp_num;
    complete(to.ex.qp_base.recv_cq, wc);
  }
}

// False: the receiver is not ready.
bool deliver(Qp& from, const Post& post) {
  const auto found = world().qps.find(from.datagrams ? post.to_qp : from.remote_qp);
  if (found == world().qps.end()) return false;
  Qp& to = *found->second;
  uint32_t* const receives = to.srq != nullptr ? &to.srq->receives : &to.receives;
  if (!to.unsolicited && *receives == 0) return false;
  if (post.num_bytes != 0) {
    if (!is_registered(post.rkey, post.remote, post.num_bytes) ||
        !is_registered(post.lkey, post.local, post.num_bytes)) {
      ++state.outside;
      finish(from, post, IBV_WC_REM_ACCESS_ERR);
      return true;
    }
    std::memcpy(reinterpret_cast<void*>(post.remote), reinterpret_cast<void*>(post.local), post.num_bytes);
  }
  if (from.now == IBV_QPS_ERR) ++state.to_cut_ones;
  ibv_wc wc{};
  wc.status = IBV_WC_SUCCESS;
  wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
  wc.imm_data = post.immediate;
  wc.wc_flags = IBV_WC_WITH_IMM;
  wc.byte_len = post.num_bytes;
  wc.qp_num = to.ex.qp_base.qp_num;
  wc.src_qp = from.ex.qp_base.qp_num;
  wc.slid = from.datagrams ? route_number(from.own) : uint16_t{0};
  if (!to.unsolicited) {
    --*receives;
    wc.wr_id = to.srq != nullptr ? to.srq->wr_id : to.receive_id;
  }
  complete(to.ex.qp_base.recv_cq, wc);
  finish(from, post, IBV_WC_SUCCESS);
  return true;
}

void move(Qp& qp) {
  if (qp.ex.qp_base.qp_num == state.cut_qp) {
    if (qp.sent.empty()) return;
    const Post first = qp.sent.front();
    qp.sent.pop_front();
    finish(qp, first, IBV_WC_RETRY_EXC_ERR);
    if (!qp.datagrams) break_off(qp);
    return;
  }
  size_t stuck = 0;
  while (stuck < qp.sent.size()) {
    const size_t which = (qp.datagrams || qp.unreliable) && state.seed != 0 ? world().random() % qp.sent.size() : stuck;
    const Post post = qp.sent[which];
    if (qp.unreliable) {
      deliver_datagram(qp, post);
    } else if (!deliver(qp, post)) {
      if (!qp.datagrams) return;
      ++stuck;
      continue;
    }
    qp.sent.erase(qp.sent.begin() + static_cast<std::ptrdiff_t>(which));
    if ((qp.datagrams || qp.unreliable) && state.seed != 0 && world().random() % 3 == 0) return;  // the rest later
  }
}

int poll_cq(ibv_cq* cq, int most, ibv_wc* out) {
  const Lock lock(mutex());
  if (!state.holds) {
    std::vector<Qp*> order;
    for (auto& [number, qp] : world().qps) order.push_back(qp);
    if (state.seed != 0) std::shuffle(order.begin(), order.end(), world().random);
    for (Qp* qp : order) move(*qp);
  }
  auto& entries = reinterpret_cast<Cq*>(cq)->entries;
  int count = 0;
  for (; count < most && !entries.empty(); ++count) {
    out[count] = entries.front();
    entries.pop_front();
  }
  return count;
}

void start(ibv_qp_ex* ex) { qp_of(ex)->building.clear(); }
void write_imm(ibv_qp_ex* ex, uint32_t rkey, uint64_t remote, uint32_t immediate) {
  Post post;
  post.wr_id = ex->wr_id;
  post.signalled = qp_of(ex)->all_signalled || (ex->wr_flags & IBV_SEND_SIGNALED) != 0;
  post.rkey = rkey;
  post.remote = remote;
  post.immediate = immediate;
  qp_of(ex)->building.push_back(post);
}
void send(ibv_qp_ex* ex) { write_imm(ex, 0, 0, 0); }
void set_address(ibv_qp_ex* ex, ibv_ah* ah, uint32_t qp, uint32_t key) {
  qp_of(ex)->building.back().key = key;
  qp_of(ex)->building.back().to = reinterpret_cast<Ah*>(ah)->to;
  qp_of(ex)->building.back().to_qp = qp;
}
void set_sge(ibv_qp_ex* ex, uint32_t lkey, uint64_t address, uint32_t num_bytes) {
  Post& post = qp_of(ex)->building.back();
  post.lkey = lkey;
  post.local = address;
  post.num_bytes = num_bytes;
}
void set_sge_list(ibv_qp_ex*, size_t, const ibv_sge*) {}
int complete_posts(ibv_qp_ex* ex) {
  const Lock lock(mutex());
  Qp& qp = *qp_of(ex);
  state.doorbells += !qp.unreliable;
  for (const Post& post : qp.building) {
    ++(qp.unreliable ? state.datagrams : state.writes);
    state.signalled += post.signalled && !qp.unreliable;
    if (qp.now == IBV_QPS_ERR)
      finish(qp, post, IBV_WC_WR_FLUSH_ERR);
    else
      qp.sent.push_back(post);
  }
  qp.building.clear();
  return 0;
}

int post_srq_recv(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr**) {
  const Lock lock(mutex());
  Srq* const its = reinterpret_cast<Srq*>(srq);
  for (; wr != nullptr; wr = wr->next, ++its->receives, ++state.receives) its->wr_id = wr->wr_id;
  return 0;
}
int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr**) {
  const Lock lock(mutex());
  Qp* const its = reinterpret_cast<Qp*>(qp);
  if (its->unreliable) {
    for (; wr != nullptr; wr = wr->next)
      its->buffers.push_back({wr->wr_id, wr->sg_list->addr, wr->sg_list->length, wr->sg_list->lkey});
    return 0;
  }
  for (; wr != nullptr; wr = wr->next, ++its->receives, ++state.receives) its->receive_id = wr->wr_id;
  return 0;
}

int query_port(ibv_context*, uint8_t, ibv_port_attr* attr, size_t num_bytes) {
  std::memset(attr, 0, num_bytes);
  attr->state = state.port_active ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
  attr->active_mtu = IBV_MTU_4096;
  attr->link_layer = state.is_efa ? IBV_LINK_LAYER_UNSPECIFIED : IBV_LINK_LAYER_ETHERNET;
  return 0;
}

ibv_qp* create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex* init) {
  const Lock lock(mutex());
  Qp* const qp = new Qp;
  qp->ex.qp_base.context = context;
  qp->ex.qp_base.qp_num = world().next_qp++;
  qp->ex.qp_base.send_cq = init->send_cq;
  qp->ex.qp_base.recv_cq = init->recv_cq;
  qp->srq = reinterpret_cast<Srq*>(init->srq);
  qp->all_signalled = init->sq_sig_all != 0;
  qp->own = gid_of(reinterpret_cast<Context*>(verbs_get_ctx(context))->device, kUsedGid);
  qp->ex.wr_start = start;
  qp->ex.wr_rdma_write_imm = write_imm;
  qp->ex.wr_send = send;
  qp->ex.wr_set_ud_addr = set_address;
  qp->ex.wr_set_sge = set_sge;
  qp->ex.wr_set_sge_list = set_sge_list;
  qp->ex.wr_complete = complete_posts;
  world().qps[qp->ex.qp_base.qp_num] = qp;
  qp->unreliable = init->qp_type == IBV_QPT_UD;
  qp->bytes = init->cap.max_send_wr * kEntryBytes + init->cap.max_recv_wr * kReceiveBytes;
  state.queue_bytes += qp->bytes;
  ++state.queue_pairs;
  state.datagram_pairs += qp->unreliable;
  return &qp->ex.qp_base;
}

Mr* new_mr(ibv_pd* pd, void* address, size_t num_bytes, uint64_t iova) {
  const Lock lock(mutex());
  if (state.registration_error != 0) {
    errno = state.registration_error;
    return nullptr;
  }
  Mr* const mr = new Mr;
  mr->base.pd = pd;
  mr->base.addr = address;
  mr->base.length = num_bytes;
  mr->start = iova;
  mr->base.lkey = mr->base.rkey = world().next_key++;
  world().mrs[mr->base.rkey] = mr;
  ++state.registrations;
  state.largest_registration_bytes = std::max<uint64_t>(state.largest_registration_bytes, num_bytes);
  return mr;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED ibv_device** ibv_get_device_list(int* count) {
  auto** list = new ibv_device*[9]();
  for (int d = 0; d < state.num_devices; ++d) {
    list[d] = &world().devices[static_cast<size_t>(d)].base;
    std::strcpy(list[d]->name, ("fake" + std::to_string(d)).c_str());
  }
  *count = state.num_devices;
  return list;
}
EXPORTED void ibv_free_device_list(ibv_device** list) { delete[] list; }
EXPORTED const char* ibv_get_device_name(ibv_device* device) { return device->name; }
EXPORTED ibv_context* ibv_open_device(ibv_device* device) {
  Context* const context = new Context;
  context->device = device->name[4] - '0';
  context->extended.sz = sizeof(verbs_context);
  context->extended.create_qp_ex = create_qp_ex;
  context->extended.query_port = query_port;
  ibv_context& base = context->extended.context;
  base.device = device;
  base.abi_compat = reinterpret_cast<void*>(kExtendedAbi);
  base.async_fd = eventfd(0, 0);
  base.ops.poll_cq = poll_cq;
  base.ops.post_srq_recv = post_srq_recv;
  base.ops.post_recv = post_recv;
  return &base;
}
EXPORTED int ibv_close_device(ibv_context* context) {
  close(context->async_fd);
  delete reinterpret_cast<Context*>(verbs_get_ctx(context));
  return 0;
}
EXPORTED int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  const Lock lock(mutex());
  Context* const its = reinterpret_cast<Context*>(verbs_get_ctx(context));
  if (its->device != state.event_device || its->told == state.event) {
    if ((fcntl(context->async_fd, F_GETFL) & O_NONBLOCK) == 0) ++state.blocked;
    errno = EAGAIN;
    return -1;
  }
  its->told = state.event;
  event->event_type = static_cast<ibv_event_type>(state.event);
  event->element.port_num = state.event_port;
  ++state.events_read;
  return 0;
}
EXPORTED void ibv_ack_async_event(ibv_async_event*) {
  const Lock lock(mutex());
  ++state.events_acknowledged;
}
EXPORTED int ibv_query_device(ibv_context*, ibv_device_attr* attr) {
  std::memset(attr, 0, sizeof(*attr));
  attr->max_cqe = 32767;
  attr->max_qp_wr = 1024;
  attr->max_srq_wr = state.is_efa ? 0 : 8192;
  attr->vendor_id = state.is_efa ? 0x1d0f : 0x15b3;
  return 0;
}
EXPORTED int ibv_query_port(ibv_context*, uint8_t, ibv_port_attr*) { return ENOSYS; }
EXPORTED ssize_t _ibv_query_gid_table(ibv_context* context, ibv_gid_entry* entries, size_t most, uint32_t, size_t) {
  const int device = reinterpret_cast<Context*>(verbs_get_ctx(context))->device;
  size_t i = 0;
  for (; i < most && static_cast<int>(i) < state.num_gids; ++i) {
    entries[i] = {};
    entries[i].gid = gid_of(device, static_cast<int>(i));
    entries[i].gid_index = static_cast<uint32_t>(i);
    entries[i].port_num = 1;
    entries[i].gid_type = i == kUsedGid ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1;
  }
  return static_cast<ssize_t>(i);
}
EXPORTED ibv_pd* ibv_alloc_pd(ibv_context* context) {
  auto* const pd = new ibv_pd{};
  pd->context = context;
  return pd;
}
EXPORTED int ibv_dealloc_pd(ibv_pd* pd) {
  const Lock lock(mutex());
  for (auto& [key, mr] : world().mrs) state.wrong_order += mr->base.pd == pd;
  delete pd;
  return 0;
}
EXPORTED ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, size_t num_bytes, uint64_t iova, unsigned int access) {
  Mr* const mr = new_mr(pd, address, num_bytes, iova);
  if (mr != nullptr) mr->remote = (access & IBV_ACCESS_REMOTE_WRITE) != 0;
  return mr == nullptr ? nullptr : &mr->base;
}
EXPORTED ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, uint64_t, size_t num_bytes, uint64_t iova, int, int) {
  Mr* const mr = new_mr(pd, reinterpret_cast<void*>(iova), num_bytes, iova);
  if (mr == nullptr) return nullptr;
  mr->remote = true;
  ++state.dmabuf_registrations;
  return &mr->base;
}
EXPORTED int ibv_dereg_mr(ibv_mr* mr) {
  const Lock lock(mutex());
  // Somebody may still write to it.
  for (auto& [number, qp] : world().qps)
    state.wrong_order +=
        qp->ex.qp_base.context == mr->pd->context && reinterpret_cast<Mr*>(mr)->remote != qp->unreliable;
  world().mrs.erase(mr->rkey);
  --state.registrations;
  delete reinterpret_cast<Mr*>(mr);
  return 0;
}
EXPORTED ibv_cq* ibv_create_cq(ibv_context* context, int entries, void*, ibv_comp_channel*, int) {
  Cq* const cq = new Cq;
  cq->base.context = context;
  cq->capacity = static_cast<size_t>(entries);
  state.queue_bytes += cq->capacity * kEntryBytes;
  return &cq->base;
}
EXPORTED int ibv_destroy_cq(ibv_cq* cq) {
  const Lock lock(mutex());
  for (auto& [number, qp] : world().qps) state.wrong_order += qp->ex.qp_base.send_cq == cq;
  state.queue_bytes -= reinterpret_cast<Cq*>(cq)->capacity * kEntryBytes;
  delete reinterpret_cast<Cq*>(cq);
  return 0;
}
EXPORTED ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr* init) {
  Srq* const srq = new Srq;
  srq->bytes = init->attr.max_wr * kReceiveBytes;
  state.queue_bytes += srq->bytes;
  srq->base.context = pd->context;
  return &srq->base;
}
EXPORTED int ibv_destroy_srq(ibv_srq* srq) {
  const Lock lock(mutex());
  for (auto& [number, qp] : world().qps) state.wrong_order += &qp->srq->base == srq;
  state.queue_bytes -= reinterpret_cast<Srq*>(srq)->bytes;
  delete reinterpret_cast<Srq*>(srq);
  return 0;
}
EXPORTED ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp) { return &reinterpret_cast<Qp*>(qp)->ex; }
EXPORTED int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
  const Lock lock(mutex());
  Qp& its = *reinterpret_cast<Qp*>(qp);
  if ((mask & IBV_QP_QKEY) != 0) its.key = attr->qkey;
  if ((mask & IBV_QP_DEST_QPN) != 0) its.remote_qp = attr->dest_qp_num;
  if ((mask & IBV_QP_AV) != 0) {
    state.service_level = attr->ah_attr.sl;
    state.traffic_class = attr->ah_attr.grh.traffic_class;
  }
  if ((mask & IBV_QP_TIMEOUT) != 0) state.timeout = attr->timeout;
  if (attr->qp_state == IBV_QPS_ERR) break_off(its);
  its.now = attr->qp_state;
  return 0;
}
EXPORTED int ibv_destroy_qp(ibv_qp* qp) {
  const Lock lock(mutex());
  world().qps.erase(qp->qp_num);
  --state.queue_pairs;
  state.datagram_pairs -= reinterpret_cast<Qp*>(qp)->unreliable;
  state.queue_bytes -= reinterpret_cast<Qp*>(qp)->bytes;
  delete reinterpret_cast<Qp*>(qp);
  return 0;
}
EXPORTED ibv_ah* ibv_create_ah(ibv_pd*, ibv_ah_attr* attr) {
  const Lock lock(mutex());
  Ah* const ah = new Ah;
  ah->to = attr->grh.dgid;
  ah->number = route_number(ah->to);
  return &ah->base;
}
EXPORTED int ibv_destroy_ah(ibv_ah* ah) {
  delete reinterpret_cast<Ah*>(ah);
  return 0;
}
EXPORTED int ibv_fork_init() { return 0; }
EXPORTED const char* ibv_wc_status_str(ibv_wc_status status) {
  return status == IBV_WC_RETRY_EXC_ERR ? "transport retry counter exceeded" : "another error";
}

// ---- libefa
EXPORTED ibv_qp* efadv_create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex* init, efadv_qp_init_attr* its,
                                    uint32_t) {
  ibv_qp* const qp = create_qp_ex(context, init);
  reinterpret_cast<Qp*>(qp)->datagrams = true;
  reinterpret_cast<Qp*>(qp)->unsolicited = (its->flags & EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV) != 0;
  state.service_level = its->sl;
  return qp;
}
EXPORTED int efadv_query_device(ibv_context*, efadv_device_attr* limits, uint32_t num_bytes) {
  std::memset(limits, 0, num_bytes);
  limits->max_sq_wr = limits->max_rq_wr = 4096;
  if (state.can_write) limits->device_caps |= EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE;
  if (state.can_receive_unsolicited) limits->device_caps |= EFADV_DEVICE_ATTR_CAPS_UNSOLICITED_WRITE_RECV;
  limits->max_rdma_size = 1u << 30;
  return 0;
}
EXPORTED int efadv_query_ah(ibv_ah* ah, efadv_ah_attr* route, uint32_t) {
  route->ahn = reinterpret_cast<Ah*>(ah)->number;
  return 0;
}
