// libfabric's objects, their tables of functions, and the calls that go through them. See abi.h.
#pragma once

#include "transport/ofi/abi.h"

namespace uccl_ep::ofi {

struct fi_ops_fabric {
  size_t size;
  int (*domain)(fid_fabric* fabric, fi_info* info, fid_domain** dom, void* context);
};

struct fid_fabric {
  struct fid fid;
  fi_ops_fabric* ops;
};

struct fi_ops_domain {
  size_t size;
  int (*av_open)(fid_domain* domain, fi_av_attr* attr, fid_av** av, void* context);
  int (*cq_open)(fid_domain* domain, fi_cq_attr* attr, fid_cq** cq, void* context);
  int (*endpoint)(fid_domain* domain, fi_info* info, fid_ep** ep, void* context);
};

struct fi_ops_mr {
  size_t size;
  int (*reg)(struct fid* fid, const void* buf, size_t len, uint64_t access, uint64_t offset, uint64_t requested_key,
             uint64_t flags, fid_mr** mr, void* context);
  void* unused_regv;
  int (*regattr)(struct fid* fid, const fi_mr_attr* attr, uint64_t flags, fid_mr** mr);
};

struct fid_domain {
  struct fid fid;
  fi_ops_domain* ops;
  fi_ops_mr* mr;
};

struct fi_ops_av {
  size_t size;
  int (*insert)(fid_av* av, const void* addr, size_t count, fi_addr_t* fi_addr, uint64_t flags, void* context);
};

struct fid_av {
  struct fid fid;
  fi_ops_av* ops;
};

struct fid_mr {
  struct fid fid;
  void* mem_desc;
  uint64_t key;
};

struct fi_ops_cq {
  size_t size;
  ssize_t (*read)(fid_cq* cq, void* buf, size_t count);
  ssize_t (*readfrom)(fid_cq* cq, void* buf, size_t count, fi_addr_t* src_addr);
  ssize_t (*readerr)(fid_cq* cq, fi_cq_err_entry* buf, uint64_t flags);
  void* unused_waits[3];
  const char* (*strerror)(fid_cq* cq, int prov_errno, const void* err_data, char* buf, size_t len);
};

struct fid_cq {
  struct fid fid;
  fi_ops_cq* ops;
};

struct fi_ops_cm {
  size_t size;
  void* unused_setname;
  int (*getname)(struct fid* fid, void* addr, size_t* addrlen);
};

struct fi_ops_msg {
  size_t size;
  void* unused_recvs[2];
  ssize_t (*recvmsg)(fid_ep* ep, const fi_msg* msg, uint64_t flags);
  void* unused_sends[2];
  ssize_t (*sendmsg)(fid_ep* ep, const fi_msg* msg, uint64_t flags);
};

struct fi_ops_rma {
  size_t size;
  void* unused_reads_writes[5];
  ssize_t (*writemsg)(fid_ep* ep, const fi_msg_rma* msg, uint64_t flags);
  void* unused_inject;
  ssize_t (*writedata)(fid_ep* ep, const void* buf, size_t len, void* desc, uint64_t data, fi_addr_t dest_addr,
                       uint64_t addr, uint64_t key, void* context);
};

struct fid_ep {
  struct fid fid;
  void* unused_ops;
  fi_ops_cm* cm;
  fi_ops_msg* msg;
  fi_ops_rma* rma;
};

inline int fi_close(struct fid* object) { return object->ops->close(object); }

inline int fi_domain(fid_fabric* fabric, fi_info* info, fid_domain** domain, void* context) {
  return fabric->ops->domain(fabric, info, domain, context);
}
inline int fi_av_open(fid_domain* domain, fi_av_attr* attr, fid_av** table, void* context) {
  return domain->ops->av_open(domain, attr, table, context);
}
inline int fi_cq_open(fid_domain* domain, fi_cq_attr* attr, fid_cq** queue, void* context) {
  return domain->ops->cq_open(domain, attr, queue, context);
}
inline int fi_endpoint(fid_domain* domain, fi_info* info, fid_ep** endpoint, void* context) {
  return domain->ops->endpoint(domain, info, endpoint, context);
}

inline int fi_ep_bind(fid_ep* endpoint, struct fid* other, uint64_t flags) {
  return endpoint->fid.ops->bind(&endpoint->fid, other, flags);
}
inline int fi_enable(fid_ep* endpoint) { return endpoint->fid.ops->control(&endpoint->fid, kFiEnable, nullptr); }
// `object` is an endpoint.
inline int fi_getname(struct fid* object, void* name, size_t* num_bytes) {
  return reinterpret_cast<fid_ep*>(object)->cm->getname(object, name, num_bytes);
}
inline int fi_av_insert(fid_av* table, const void* names, size_t count, fi_addr_t* addresses, uint64_t flags,
                        void* context) {
  return table->ops->insert(table, names, count, addresses, flags, context);
}

inline int fi_mr_regattr(fid_domain* domain, const fi_mr_attr* attr, uint64_t flags, fid_mr** memory) {
  return domain->mr->regattr(&domain->fid, attr, flags, memory);
}
inline int fi_mr_bind(fid_mr* memory, struct fid* other, uint64_t flags) {
  return memory->fid.ops->bind(&memory->fid, other, flags);
}
inline int fi_mr_enable(fid_mr* memory) { return memory->fid.ops->control(&memory->fid, kFiEnable, nullptr); }
inline void* fi_mr_desc(fid_mr* memory) { return memory->mem_desc; }
inline uint64_t fi_mr_key(fid_mr* memory) { return memory->key; }

inline ssize_t fi_writemsg(fid_ep* endpoint, const fi_msg_rma* message, uint64_t flags) {
  return endpoint->rma->writemsg(endpoint, message, flags);
}
inline ssize_t fi_sendmsg(fid_ep* endpoint, const fi_msg* message, uint64_t flags) {
  return endpoint->msg->sendmsg(endpoint, message, flags);
}
inline ssize_t fi_recvmsg(fid_ep* endpoint, const fi_msg* message, uint64_t flags) {
  return endpoint->msg->recvmsg(endpoint, message, flags);
}
inline ssize_t fi_cq_readfrom(fid_cq* queue, void* entries, size_t count, fi_addr_t* sources) {
  return queue->ops->readfrom(queue, entries, count, sources);
}
inline ssize_t fi_cq_readerr(fid_cq* queue, fi_cq_err_entry* entry, uint64_t flags) {
  entry->src_addr = kFiAddrNotavail;  // providers older than 1.20 do not fill it
  return queue->ops->readerr(queue, entry, flags);
}
inline const char* fi_cq_strerror(fid_cq* queue, int error, const void* data, char* text, size_t num_bytes) {
  return queue->ops->strerror(queue, error, data, text, num_bytes);
}

}  // namespace uccl_ep::ofi
