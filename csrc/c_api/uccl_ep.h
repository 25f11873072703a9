/* Dispatch and combine for programs in C, and for languages that call C.

   Every rank makes a group, collectively; its ranks meet over an all-gather that the program brings along. A plan holds
   a routing: dispatch sends the rows of tokens to the ranks of their experts, combine brings them back and sums them.
   Operations run in the order of the calls, which is the same on all ranks.

   Structs: set them to UCCL_EP_INIT(type) first, then the fields that you need. 0 means the default everywhere. Later
   versions append fields only; a program works with every library of its version or a later one.

   Threads: calls about one group, its plans and operations come one at a time; groups are independent. Waits hold no
   lock of other groups. uccl_ep_error_text() is about the calling thread.

   Errors: nothing is thrown. A status from 16 to 31 means that an argument is wrong and nothing was queued; the group
   stays usable, but a rank that refuses a call counts it, and ranks which did not refuse it get an error that says so.
   A plan that is NULL names no group, so that call is not counted. From 32 on the group is broken on all ranks:
   destroy it. */
#ifndef UCCL_EP_H
#define UCCL_EP_H

#include <stddef.h>
#include <stdint.h>

#define UCCL_EP_VERSION 1
#define UCCL_EP_MAGIC 0x75457031u
#define UCCL_EP_API __attribute__((visibility("default")))

#ifdef __cplusplus
/* C++ before C++20 has no designated initialisers, and later ones warn of the fields that these leave out. */
template <typename T>
inline T uccl_ep_init() {
  T made = T();
  made.size = sizeof(T);
  made.magic = UCCL_EP_MAGIC;
  return made;
}
#define UCCL_EP_INIT(type) uccl_ep_init<type>()
extern "C" {
#else
#define UCCL_EP_INIT(type) {.size = sizeof(type), .magic = UCCL_EP_MAGIC}
#endif

typedef enum uccl_ep_status {
  UCCL_EP_OK = 0,
  UCCL_EP_PENDING = 1, /* not over within the timeout */
  UCCL_EP_CONFIG_ERROR = 16,
  UCCL_EP_MEMORY_BUDGET_ERROR = 17,
  UCCL_EP_INPUT_ERROR = 18,
  UCCL_EP_DTYPE_ERROR = 19,
  UCCL_EP_SHAPE_ERROR = 20,
  UCCL_EP_ROUTING_ERROR = 21,
  UCCL_EP_CLOSED_ERROR = 22,
  UCCL_EP_TOPOLOGY_ERROR = 23,
  UCCL_EP_ARRIVAL_TIMEOUT = 33,
  UCCL_EP_PROGRESS_TIMEOUT = 34,
  UCCL_EP_PEER_DIED = 35,
  UCCL_EP_TRANSPORT_ERROR = 36,
  UCCL_EP_RANK_MISMATCH = 37,
  UCCL_EP_PLAN_MISMATCH = 38,
  UCCL_EP_PEER_FAILED = 39,
  UCCL_EP_INTERNAL_ERROR = 64
} uccl_ep_status;

typedef enum uccl_ep_dtype { /* of tensors, and of rows between ranks */
                             UCCL_EP_BF16 = 1,
                             UCCL_EP_FP32 = 2,
                             UCCL_EP_FP8_POW2 = 3, /* e4m3 codes, a scale for 128 of them or the last: a power of two */
                             UCCL_EP_FP8_FP32 = 4, /* the same with any scale */
                             UCCL_EP_MXFP8 = 5 /* the same, four exponents for 128 codes; only given codes */
} uccl_ep_dtype;

typedef struct uccl_ep_group uccl_ep_group;
typedef struct uccl_ep_plan uccl_ep_plan;
typedef struct uccl_ep_op uccl_ep_op;

/* Gathers `num_bytes` of each rank, the same number on all, into `all`, by rank. Collective; `step` names in errors
   what it is for. It bounds its waits; anything but 0 ends the creation. Called by the thread that creates the group.
 */
typedef int (*uccl_ep_all_gather)(void* context, const void* mine, size_t num_bytes, void* all, const char* step);

typedef struct uccl_ep_group_config {
  size_t size;
  uint32_t magic;
  uint32_t rank, num_ranks;
  uint32_t num_experts; /* of the group; rank r has those from r * num_experts / num_ranks on */
  uint32_t hidden; /* elements of the widest row, a multiple of 32 */
  uccl_ep_dtype widest; /* of its elements: UCCL_EP_BF16 | UCCL_EP_FP32 (default) */
  int32_t on_gpu; /* 1: tensors lie on GPU `device`; 0: in memory of the host */
  int32_t device;
  uint32_t num_sms; /* of a GPU, that kernels may take; default 24 */
  uint64_t budget_bytes; /* of each rank's memory; default 512 MiB */
  uint32_t window_tokens; /* of the budget, what so many tokens need; default: all */
  double arrival_timeout_s; /* default 300, at most 10^6 */
  double progress_timeout_s; /* default 20, at most 10^6 */
  const char* transport; /* "auto" (default) | "loop" | "verbs" | "ofi" */
  const int32_t* domain_of; /* [num_ranks] or NULL: found. Ranks of a domain share memory */
  uccl_ep_all_gather all_gather;
  void* all_gather_context;
} uccl_ep_group_config;

/* What the router chose for the tokens of this rank. Its memory is read by every dispatch of the plan until one has
   returned UCCL_EP_OK; that of the weights by every dispatch. */
typedef struct uccl_ep_routing {
  size_t size;
  uint32_t magic;
  uint32_t width; /* columns: top-k, or all experts of a map */
  const void* data; /* int64 [num_tokens, width] of distinct experts, -1: none; of a map uint8, 0 or 1 */
  const float* weights; /* [num_tokens, width], or NULL: none travel */
  uint64_t num_tokens;
  int32_t is_map;
  uint32_t expert_alignment; /* rows of an expert are padded to a multiple of it; default 1 */
  int32_t compact; /* 1: a row for each received token; 0: a row for each pair of token and expert */
  int32_t has_capacity; /* GPU: the output has `capacity` rows, and the host never waits for counts */
  uint64_t capacity;
  uint64_t max_tokens; /* with a capacity: what no rank has more tokens than, equal on all; 0: as few as go at once, or
                          equally many on all ranks */
} uccl_ep_routing;

typedef struct uccl_ep_dispatch_args {
  size_t size;
  uint32_t magic;
  uint32_t hidden;
  const void* x; /* [num_tokens, hidden] */
  uccl_ep_dtype dtype; /* of x. FP8: codes with `scales`, which come out as they are */
  uccl_ep_dtype wire; /* default: that of x */
  void* stream; /* of the GPU; its queued work runs first */
  const float* scales; /* [num_tokens, ceil(hidden / 128)] of FP8 rows; else NULL */
  const uint32_t* metadata; /* [num_tokens, num_metadata]: travels with the rows, unchanged */
  uint32_t num_metadata; /* words of a row, on all ranks; 0: none travel. Row and words have to fit the widest row */
  uint32_t reserved;
} uccl_ep_dispatch_args;

typedef struct uccl_ep_sizes {
  size_t size;
  uint32_t magic;
  uint32_t num_local_experts;
  uint64_t num_rows; /* of the output, padding included */
  uint64_t plan_bytes; /* GPU: memory that uccl_ep_complete() needs for the plan */
  /* [num_local_experts], of the plan's: as long as it lives. NULL with a capacity. */
  const uint64_t* tokens_per_expert; /* padded to the alignment */
  const uint64_t* tokens_per_expert_exact;
} uccl_ep_sizes;

typedef struct uccl_ep_output {
  size_t size;
  uint32_t magic;
  uint32_t reserved;
  void* rows; /* [num_rows, hidden] of x's dtype, or codes where there are scales */
  float* scales; /* [num_rows, ceil(hidden / 128)]: rows stay as on an FP8 wire; NULL: they are dequantised */
  float* weights; /* [num_rows], of compact rows [num_rows, W]; NULL: none travel */
  int64_t* row_experts; /* [num_rows, W] of compact rows: local experts, -1: none; NULL: not wanted.
                           W = min(width, num_local_experts) */
  void* plan; /* GPU: plan_bytes, as long as the plan lives */
  void* stream; /* GPU: where this memory may still be in use */
  uint32_t* metadata; /* [num_rows, num_metadata]; NULL: none travel */
} uccl_ep_output;

typedef struct uccl_ep_combine_args {
  size_t size;
  uint32_t magic;
  uint32_t hidden;
  const void* rows; /* [num_rows, hidden] */
  uccl_ep_dtype dtype; /* of rows and out */
  uccl_ep_dtype wire; /* of sums between ranks: UCCL_EP_BF16 | UCCL_EP_FP32; default: dtype */
  const float* weights; /* as in uccl_ep_output; NULL: none travel. They come back to where they came from */
  void* out; /* [num_tokens, hidden]: the sum of each token's rows */
  float* weights_out; /* [num_tokens, width], zeroed */
  void* stream;
} uccl_ep_combine_args;

typedef struct uccl_ep_stat {
  char name[56]; /* as Buffer.stats() in Python documents it */
  double value;
} uccl_ep_stat;

/* Of the library: UCCL_EP_VERSION when it was built. */
UCCL_EP_API uint32_t uccl_ep_version(void);
/* What the calling thread's last status of 16 or more is about; never NULL. Valid until its next call. */
UCCL_EP_API const char* uccl_ep_error_text(void);

/* Collective. */
UCCL_EP_API uccl_ep_status uccl_ep_group_create(const uccl_ep_group_config* config, uccl_ep_group** group);
/* Waits for the others to do the same, for at most the progress timeout, unless `abort`. Frees the group in any case,
   after all operations have ended; plans and operations of it must be destroyed before. NULL is allowed. */
UCCL_EP_API uccl_ep_status uccl_ep_group_destroy(uccl_ep_group* group, int abort);
/* The error that has reached this rank, if any. */
UCCL_EP_API uccl_ep_status uccl_ep_group_check(const uccl_ep_group* group);
/* Writes up to `capacity` of them, and how many there are. */
UCCL_EP_API uccl_ep_status uccl_ep_group_stats(const uccl_ep_group* group, uccl_ep_stat* stats, size_t capacity,
                                               size_t* num_stats);

/* Local. The routing's memory is used until the first dispatch of the plan is over. */
UCCL_EP_API uccl_ep_status uccl_ep_plan_create(uccl_ep_group* group, const uccl_ep_routing* routing,
                                               uccl_ep_plan** plan);
/* Gives it another routing: its next dispatch makes it anew. Combines of the old one must have been called. */
UCCL_EP_API uccl_ep_status uccl_ep_plan_update(uccl_ep_plan* plan, const uccl_ep_routing* routing);
UCCL_EP_API void uccl_ep_plan_destroy(uccl_ep_plan* plan);

/* Collective; queues. Then come uccl_ep_counts(), uccl_ep_complete() and uccl_ep_wait(), in this order. The first
   dispatch of a plan sends its routing, too; the others use it again. `x` is used until the operation is over. */
UCCL_EP_API uccl_ep_status uccl_ep_dispatch(uccl_ep_plan* plan, const uccl_ep_dispatch_args* args, uccl_ep_op** op);
/* The sizes of its results, when they are known. timeout_us: UCCL_EP_PENDING after it, or after 11 days. */
UCCL_EP_API uccl_ep_status uccl_ep_counts(uccl_ep_op* op, uint64_t timeout_us, uccl_ep_sizes* sizes);
/* Gives it memory for its results, which is used until it is over. */
UCCL_EP_API uccl_ep_status uccl_ep_complete(uccl_ep_op* op, const uccl_ep_output* output);
/* Collective; queues. After the plan's first dispatch has been completed. */
UCCL_EP_API uccl_ep_status uccl_ep_combine(uccl_ep_plan* plan, const uccl_ep_combine_args* args, uccl_ep_op** op);
/* Host: returns when it is over. GPU: at once; what is queued on `stream` from now on runs after it. */
UCCL_EP_API uccl_ep_status uccl_ep_wait(uccl_ep_op* op, void* stream, uint64_t timeout_us);
/* 1: its memory is no longer in use. */
UCCL_EP_API int uccl_ep_is_done(const uccl_ep_op* op);
/* Any time; it does not end the operation. NULL is allowed. */
UCCL_EP_API void uccl_ep_op_destroy(uccl_ep_op* op);

#ifdef __cplusplus
}
#endif

#endif
