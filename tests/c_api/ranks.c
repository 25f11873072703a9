/* Ranks on the CPU that know the C interface alone: ranks [RANKS] [DOMAINS] [TOKENS] [LEAVER]. Every rank is a
   process. They dispatch and combine, twice with one plan, and look at every value. LEAVER dies at once, which has to be
   an error of the others. Exits with 0 if all is right. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "uccl_ep.h"

enum { HIDDEN = 256, BLOCKS = HIDDEN / 128, NAMES = 1000, EXPERTS_PER_RANK = 3, TOPK = 2, MOST_RANKS = 8, MOST_BYTES = 1 << 20 };
static const uint64_t SECONDS = 60 * 1000 * 1000ull;

/* ---- an all-gather between processes ---------------------------------------------------------------------------- */
struct room {
  pthread_barrier_t barrier;
  char bytes[MOST_RANKS][MOST_BYTES];
};
struct seat {
  struct room* room;
  uint32_t rank, num_ranks, leaver;
  const uint32_t* names; /* of its tokens: (rank + 1) * NAMES + token */
};

static int all_gather(void* context, const void* mine, size_t num_bytes, void* all, const char* step) {
  struct seat* seat = context;
  (void)step;
  if (num_bytes > MOST_BYTES) return 1;
  memcpy(seat->room->bytes[seat->rank], mine, num_bytes);
  pthread_barrier_wait(&seat->room->barrier);
  for (uint32_t r = 0; r < seat->num_ranks; ++r)
    memcpy((char*)all + r * num_bytes, seat->room->bytes[r], num_bytes);
  pthread_barrier_wait(&seat->room->barrier);
  return 0;
}

/* ---- what is right ------------------------------------------------------------------------------------------------ */
static int64_t expert_of(uint32_t rank, uint64_t token, uint32_t k, uint32_t num_experts) {
  const uint64_t first = (token * 7 + rank * 5) % num_experts;
  if ((token + rank) % 6 == 5 && k == 1) return -1; /* of this token one expert only */
  return (int64_t)((first + k * (num_experts / 2)) % num_experts);
}
static float value_of(uint32_t rank, uint64_t token, uint32_t h) { /* sums of these are exact */
  return (float)((rank * 31 + token * 17 + h * 3) % 64);
}

#define NEEDED(truth)                                                               \
  do {                                                                              \
    if (!(truth)) {                                                                 \
      fprintf(stderr, "rank %u, line %d: %s is not so: %s\n", seat->rank, __LINE__, #truth, uccl_ep_error_text()); \
      exit(1);                                                                      \
    }                                                                               \
  } while (0)

/* Rows are sorted by expert, source and token. */
static void check_rows(const struct seat* seat, const uccl_ep_sizes* sizes, const float* rows, const float* weights,
                       uint64_t tokens) {
  const uint32_t num_experts = EXPERTS_PER_RANK * seat->num_ranks;
  uint64_t row = 0;
  for (uint32_t e = 0; e < sizes->num_local_experts; ++e) {
    uint64_t of_expert = 0;
    for (uint32_t source = 0; source < seat->num_ranks; ++source)
      for (uint64_t t = 0; t < tokens; ++t)
        for (uint32_t k = 0; k < TOPK; ++k) {
          if (expert_of(source, t, k, num_experts) != (int64_t)(seat->rank * EXPERTS_PER_RANK + e)) continue;
          for (uint32_t h = 0; h < HIDDEN; ++h) NEEDED(rows[row * HIDDEN + h] == value_of(source, t, h));
          NEEDED(weights[row] == (float)(t + k));
          ++row, ++of_expert;
        }
    NEEDED(sizes->tokens_per_expert_exact[e] == of_expert);
    for (; of_expert < sizes->tokens_per_expert[e]; ++of_expert, ++row)
      for (uint32_t h = 0; h < HIDDEN; ++h) NEEDED(rows[row * HIDDEN + h] == 0.0f);
  }
  NEEDED(row == sizes->num_rows);
}

static void check_sums(const struct seat* seat, const float* out, const float* weights, uint64_t tokens) {
  for (uint64_t t = 0; t < tokens; ++t) {
    float experts = 0;
    for (uint32_t k = 0; k < TOPK; ++k) {
      const int there = expert_of(seat->rank, t, k, EXPERTS_PER_RANK * seat->num_ranks) >= 0;
      experts += (float)there;
      NEEDED(weights[t * TOPK + k] == (there ? (float)(t + k) : 0.0f));
    }
    for (uint32_t h = 0; h < HIDDEN; ++h) NEEDED(out[t * HIDDEN + h] == experts * value_of(seat->rank, t, h));
  }
}

/* A row's metadata names its token. */
static void check_names(const struct seat* seat, const uccl_ep_sizes* sizes, const float* rows, const uint32_t* names) {
  uint64_t row = 0;
  for (uint32_t e = 0; e < sizes->num_local_experts; ++e)
    for (uint64_t i = 0; i < sizes->tokens_per_expert[e]; ++i, ++row) {
      const uint32_t name = names[row];
      const int is_padding = i >= sizes->tokens_per_expert_exact[e];
      NEEDED((name == 0) == is_padding);
      NEEDED(is_padding || rows[row * HIDDEN] == value_of(name / NAMES - 1, name % NAMES, 0));
    }
}

static uccl_ep_dispatch_args named_rows(const struct seat* seat, const void* x, uccl_ep_dtype dtype) {
  uccl_ep_dispatch_args dispatch = UCCL_EP_INIT(uccl_ep_dispatch_args);
  dispatch.x = x;
  dispatch.hidden = HIDDEN;
  dispatch.dtype = dtype;
  dispatch.metadata = seat->names;
  dispatch.num_metadata = 1;
  return dispatch;
}

static void round_of(const struct seat* seat, uccl_ep_plan* plan, const float* x, uint64_t tokens) {
  const uccl_ep_dispatch_args dispatch = named_rows(seat, x, UCCL_EP_FP32);
  uccl_ep_op* op = NULL;
  NEEDED(uccl_ep_dispatch(plan, &dispatch, &op) == UCCL_EP_OK);
  uccl_ep_sizes sizes = UCCL_EP_INIT(uccl_ep_sizes);
  NEEDED(uccl_ep_wait(op, NULL, SECONDS) == UCCL_EP_INPUT_ERROR); /* it has no memory yet */
  NEEDED(uccl_ep_counts(op, UINT64_MAX, &sizes) == UCCL_EP_OK);
  float* const rows = malloc((sizes.num_rows + 1) * HIDDEN * sizeof(float));
  float* const row_weights = malloc((sizes.num_rows + 1) * sizeof(float));
  uccl_ep_output output = UCCL_EP_INIT(uccl_ep_output);
  output.weights = row_weights;
  NEEDED(sizes.num_rows == 0 || uccl_ep_complete(op, &output) == UCCL_EP_INPUT_ERROR); /* no rows */
  output.rows = rows;
  output.weights = NULL;
  NEEDED(sizes.num_rows == 0 || uccl_ep_complete(op, &output) == UCCL_EP_INPUT_ERROR);
  output.weights = output.scales = row_weights;
  NEEDED(uccl_ep_complete(op, &output) == UCCL_EP_INPUT_ERROR); /* no FP8 rows travel */
  output.scales = NULL;
  NEEDED(sizes.num_rows == 0 || uccl_ep_complete(op, &output) == UCCL_EP_INPUT_ERROR); /* no room for metadata */
  uint32_t* const names = malloc((sizes.num_rows + 1) * sizeof(uint32_t));
  output.metadata = names;
  NEEDED(uccl_ep_complete(op, &output) == UCCL_EP_OK);
  NEEDED(uccl_ep_complete(op, &output) == UCCL_EP_INPUT_ERROR);
  NEEDED(uccl_ep_wait(op, NULL, SECONDS) == UCCL_EP_OK && uccl_ep_is_done(op));
  uccl_ep_op_destroy(op);
  check_rows(seat, &sizes, rows, row_weights, tokens);
  check_names(seat, &sizes, rows, names);

  uccl_ep_combine_args combine = UCCL_EP_INIT(uccl_ep_combine_args);
  combine.rows = rows;
  combine.hidden = HIDDEN;
  combine.dtype = UCCL_EP_FP32;
  combine.weights = row_weights;
  combine.out = malloc((tokens + 1) * HIDDEN * sizeof(float));
  combine.weights_out = calloc(tokens * TOPK + 1, sizeof(float));
  NEEDED(uccl_ep_combine(plan, &combine, &op) == UCCL_EP_OK);
  NEEDED(uccl_ep_counts(op, SECONDS, &sizes) == UCCL_EP_INPUT_ERROR);
  NEEDED(uccl_ep_complete(op, &output) == UCCL_EP_INPUT_ERROR);
  NEEDED(uccl_ep_wait(op, NULL, UINT64_MAX) == UCCL_EP_OK);
  uccl_ep_op_destroy(op);
  check_sums(seat, combine.out, combine.weights_out, tokens);
  free(rows), free(row_weights), free(names), free(combine.out), free(combine.weights_out);
}

/* Codes and scales that the program made: any bytes, any floats. */
static uint8_t code_of(uint32_t name, uint32_t h) { return (uint8_t)(name * 7 + h * 13); }

static void codes_of(const struct seat* seat, uccl_ep_plan* plan, uint64_t tokens) {
  uint8_t* const x = malloc((tokens + 1) * HIDDEN);
  float* const scales = malloc((tokens + 1) * BLOCKS * sizeof(float));
  for (uint64_t t = 0; t < tokens; ++t) {
    for (uint32_t h = 0; h < HIDDEN; ++h) x[t * HIDDEN + h] = code_of(seat->names[t], h);
    for (uint32_t b = 0; b < BLOCKS; ++b) scales[t * BLOCKS + b] = (float)seat->names[t] + (float)b / 4;
  }
  uccl_ep_dispatch_args dispatch = named_rows(seat, x, UCCL_EP_FP8_FP32);
  uccl_ep_op* op = NULL;
  NEEDED(uccl_ep_dispatch(plan, &dispatch, &op) == UCCL_EP_INPUT_ERROR); /* no scales: on all ranks, so one call */
  dispatch.scales = scales;
  NEEDED(uccl_ep_dispatch(plan, &dispatch, &op) == UCCL_EP_OK);
  uccl_ep_sizes sizes = UCCL_EP_INIT(uccl_ep_sizes);
  NEEDED(uccl_ep_counts(op, UINT64_MAX, &sizes) == UCCL_EP_OK);
  uccl_ep_output output = UCCL_EP_INIT(uccl_ep_output);
  uint8_t* const rows = malloc((sizes.num_rows + 1) * HIDDEN);
  float* const weights = malloc((sizes.num_rows + 1) * sizeof(float));
  uint32_t* const names = malloc((sizes.num_rows + 1) * sizeof(uint32_t));
  float* const row_scales = malloc((sizes.num_rows + 1) * BLOCKS * sizeof(float));
  output.rows = rows;
  output.weights = weights;
  output.metadata = names;
  NEEDED(sizes.num_rows == 0 || uccl_ep_complete(op, &output) == UCCL_EP_INPUT_ERROR); /* no scales */
  output.scales = row_scales;
  NEEDED(uccl_ep_complete(op, &output) == UCCL_EP_OK);
  NEEDED(uccl_ep_wait(op, NULL, SECONDS) == UCCL_EP_OK);
  uccl_ep_op_destroy(op);
  uint64_t row = 0;
  for (uint32_t e = 0; e < sizes.num_local_experts; ++e) {
    for (uint64_t i = 0; i < sizes.tokens_per_expert[e]; ++i, ++row) {
      const int is_padding = i >= sizes.tokens_per_expert_exact[e];
      NEEDED((names[row] == 0) == is_padding);
      for (uint32_t h = 0; h < HIDDEN; ++h)
        NEEDED(rows[row * HIDDEN + h] == (is_padding ? 0 : code_of(names[row], h)));
      for (uint32_t b = 0; b < BLOCKS; ++b)
        NEEDED(row_scales[row * BLOCKS + b] == (is_padding ? 1.0f : (float)names[row] + (float)b / 4));
    }
  }
  NEEDED(row == sizes.num_rows);
  free(x), free(scales), free(rows), free(weights), free(names), free(row_scales);
}

static void refusals(const struct seat* seat, uccl_ep_group* group) {
  uccl_ep_plan* plan = NULL;
  uccl_ep_routing forgotten;
  memset(&forgotten, 0, sizeof(forgotten));
  NEEDED(uccl_ep_plan_create(group, &forgotten, &plan) == UCCL_EP_INPUT_ERROR && plan == NULL);
  NEEDED(strstr(uccl_ep_error_text(), "UCCL_EP_INIT") != NULL);
  NEEDED(uccl_ep_plan_create(group, NULL, &plan) == UCCL_EP_INPUT_ERROR);
  static const int64_t none[2] = {-1, -1};
  uccl_ep_routing wrong = UCCL_EP_INIT(uccl_ep_routing);
  NEEDED(uccl_ep_plan_create(group, &wrong, &plan) == UCCL_EP_SHAPE_ERROR); /* width 0 */
  wrong.width = EXPERTS_PER_RANK * seat->num_ranks + 1;
  wrong.is_map = 1;
  NEEDED(uccl_ep_plan_create(group, &wrong, &plan) == UCCL_EP_SHAPE_ERROR);
  NEEDED(strstr(uccl_ep_error_text(), "of a map: allowed is") != NULL);
  wrong.is_map = 0;
  wrong.width = TOPK;
  wrong.num_tokens = 1;
  NEEDED(uccl_ep_plan_create(group, &wrong, &plan) == UCCL_EP_INPUT_ERROR); /* no data */
  wrong.data = none;
  wrong.has_capacity = 1;
  NEEDED(uccl_ep_plan_create(group, &wrong, &plan) == UCCL_EP_INPUT_ERROR);
  wrong.has_capacity = 0;
  wrong.max_tokens = 1;
  NEEDED(uccl_ep_plan_create(group, &wrong, &plan) == UCCL_EP_INPUT_ERROR);
  NEEDED(strstr(uccl_ep_error_text(), "max_tokens = 1 without a capacity") != NULL);
  wrong.max_tokens = 0;
  wrong.size = (size_t)1 << 60;
  NEEDED(uccl_ep_plan_create(group, &wrong, &plan) == UCCL_EP_INPUT_ERROR);
  size_t num_stats = 0;
  NEEDED(uccl_ep_group_stats(group, NULL, 1, &num_stats) == UCCL_EP_INPUT_ERROR);
  NEEDED(uccl_ep_group_stats(group, NULL, 0, &num_stats) == UCCL_EP_OK && num_stats > 0);
  struct {
    uccl_ep_routing known;
    uint64_t later;
  } newer = {UCCL_EP_INIT(uccl_ep_routing), 0};
  newer.known.width = TOPK;
  newer.known.size = sizeof(newer);
  NEEDED(uccl_ep_plan_create(group, &newer.known, &plan) == UCCL_EP_OK);
  uccl_ep_plan_destroy(plan);
  newer.later = 1;
  NEEDED(uccl_ep_plan_create(group, &newer.known, &plan) == UCCL_EP_INPUT_ERROR);
  NEEDED(strstr(uccl_ep_error_text(), "later version") != NULL);
}

static void meet_death(const struct seat* seat, uccl_ep_group* group, uccl_ep_plan* plan, const float* x) {
  uccl_ep_dispatch_args dispatch = UCCL_EP_INIT(uccl_ep_dispatch_args);
  dispatch.x = x;
  dispatch.hidden = HIDDEN;
  dispatch.dtype = UCCL_EP_FP32;
  uccl_ep_op* op = NULL;
  uccl_ep_sizes sizes = UCCL_EP_INIT(uccl_ep_sizes);
  uccl_ep_status status = uccl_ep_dispatch(plan, &dispatch, &op);
  if (status == UCCL_EP_OK) status = uccl_ep_counts(op, SECONDS, &sizes);
  NEEDED(status == UCCL_EP_PEER_DIED);
  char text[16];
  snprintf(text, sizeof(text), "rank %u", seat->leaver);
  NEEDED(strstr(uccl_ep_error_text(), text) != NULL);
  NEEDED(uccl_ep_group_check(group) == UCCL_EP_PEER_DIED);
  uccl_ep_op_destroy(op);
  uccl_ep_plan_destroy(plan);
  NEEDED(uccl_ep_group_destroy(group, 0) == UCCL_EP_PEER_DIED);
}

static void rank_main(struct seat* seat, uint32_t num_domains, uint64_t tokens) {
  int32_t domain_of[MOST_RANKS];
  for (uint32_t r = 0; r < seat->num_ranks; ++r) domain_of[r] = (int32_t)(r * num_domains / seat->num_ranks);
  uccl_ep_group_config config = UCCL_EP_INIT(uccl_ep_group_config);
  config.rank = seat->rank;
  config.num_ranks = seat->num_ranks;
  config.num_experts = EXPERTS_PER_RANK * seat->num_ranks;
  config.hidden = 2 * HIDDEN; /* room for metadata */
  config.budget_bytes = 64 << 20;
  config.progress_timeout_s = 30;
  config.domain_of = num_domains == 0 ? NULL : domain_of;
  config.all_gather = all_gather;
  config.all_gather_context = seat;
  uccl_ep_group* group = NULL;
  NEEDED(uccl_ep_version() == UCCL_EP_VERSION);
  NEEDED(uccl_ep_group_create(&config, &group) == UCCL_EP_OK);
  refusals(seat, group);

  float* const x = malloc((tokens + 1) * HIDDEN * sizeof(float));
  int64_t* const idx = malloc((tokens + 1) * TOPK * sizeof(int64_t));
  float* const weights = malloc((tokens + 1) * TOPK * sizeof(float));
  for (uint64_t t = 0; t < tokens; ++t) {
    for (uint32_t h = 0; h < HIDDEN; ++h) x[t * HIDDEN + h] = value_of(seat->rank, t, h);
    for (uint32_t k = 0; k < TOPK; ++k) {
      idx[t * TOPK + k] = expert_of(seat->rank, t, k, config.num_experts);
      weights[t * TOPK + k] = (float)(t + k);
    }
  }
  uint32_t* const names = malloc((tokens + 1) * sizeof(uint32_t));
  for (uint64_t t = 0; t < tokens; ++t) names[t] = (seat->rank + 1) * NAMES + (uint32_t)t;
  seat->names = names;
  uccl_ep_routing routing = UCCL_EP_INIT(uccl_ep_routing);
  routing.data = idx;
  routing.weights = weights;
  routing.width = TOPK;
  routing.num_tokens = tokens;
  routing.expert_alignment = 4;
  uccl_ep_plan* plan = NULL;
  NEEDED(uccl_ep_plan_create(group, &routing, &plan) == UCCL_EP_OK);
  if (seat->leaver == seat->rank) _exit(0);
  if (seat->leaver < seat->num_ranks) {
    meet_death(seat, group, plan, x);
    return;
  }
  /* All ranks refuse it, so it is one call of each. */
  uccl_ep_combine_args early = UCCL_EP_INIT(uccl_ep_combine_args);
  uccl_ep_op* none = NULL;
  NEEDED(uccl_ep_combine(plan, &early, &none) == UCCL_EP_INPUT_ERROR && none == NULL);
  NEEDED(strstr(uccl_ep_error_text(), "first dispatch has to be completed") != NULL);
  NEEDED(uccl_ep_dispatch(plan, NULL, &none) == UCCL_EP_INPUT_ERROR);
  round_of(seat, plan, x, tokens);
  round_of(seat, plan, x, tokens); /* its routing is known */
  NEEDED(uccl_ep_plan_update(plan, &routing) == UCCL_EP_OK);
  round_of(seat, plan, x, tokens);
  codes_of(seat, plan, tokens);
  uccl_ep_stat stats[128];
  size_t num_stats = 0;
  NEEDED(uccl_ep_group_stats(group, stats, 128, &num_stats) == UCCL_EP_OK);
  int found = 0;
  for (size_t i = 0; i < num_stats && i < 128; ++i)
    if (strcmp(stats[i].name, "dispatch.calls") == 0) found = stats[i].value == 4;
  NEEDED(found);

  /* One rank alone sends rows of another width: all get an error that names both calls. It may come to a rank that still
     waits for the operation before, so all are through with that. */
  pthread_barrier_wait(&seat->room->barrier);
  uccl_ep_dispatch_args other = UCCL_EP_INIT(uccl_ep_dispatch_args);
  other.x = x;
  other.hidden = seat->rank == 0 ? HIDDEN / 2 : HIDDEN;
  other.dtype = UCCL_EP_FP32;
  uccl_ep_op* op = NULL;
  uccl_ep_status status = uccl_ep_dispatch(plan, &other, &op);
  uccl_ep_sizes sizes = UCCL_EP_INIT(uccl_ep_sizes);
  float* const rows = malloc(MOST_BYTES * 16);
  uccl_ep_output output = UCCL_EP_INIT(uccl_ep_output);
  output.rows = rows;
  output.weights = rows;
  if (status == UCCL_EP_OK) status = uccl_ep_counts(op, SECONDS, &sizes);
  if (status == UCCL_EP_OK) status = uccl_ep_complete(op, &output);
  if (status == UCCL_EP_OK) status = uccl_ep_wait(op, NULL, SECONDS);
  NEEDED(seat->num_ranks == 1 || status == UCCL_EP_RANK_MISMATCH);
  NEEDED(seat->num_ranks == 1 || strstr(uccl_ep_error_text(), "H=128") != NULL);
  uccl_ep_op_destroy(op);
  uccl_ep_plan_destroy(plan);
  status = uccl_ep_group_destroy(group, 0);
  NEEDED(seat->num_ranks == 1 || status == UCCL_EP_RANK_MISMATCH);
  free(x), free(idx), free(weights), free(rows);
}

int main(int argc, char** argv) {
  const uint32_t num_ranks = argc > 1 ? (uint32_t)atoi(argv[1]) : 2;
  const uint32_t num_domains = argc > 2 ? (uint32_t)atoi(argv[2]) : 0;
  const uint64_t tokens = argc > 3 ? (uint64_t)atoi(argv[3]) : 50;
  const uint32_t leaver = argc > 4 ? (uint32_t)atoi(argv[4]) : num_ranks;
  if (num_ranks == 0 || num_ranks > MOST_RANKS) return 2;
  struct room* const room =
      mmap(NULL, sizeof(struct room), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pthread_barrierattr_t shared;
  pthread_barrierattr_init(&shared);
  pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&room->barrier, &shared, num_ranks);
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    if (fork() != 0) continue;
    struct seat seat = {room, rank, num_ranks, leaver, NULL};
    rank_main(&seat, num_domains, tokens);
    exit(0);
  }
  int failed = 0, status = 0;
  while (wait(&status) > 0) failed |= status != 0;
  printf(failed ? "a rank failed\n" : "%u ranks, all values are right\n", num_ranks);
  return failed;
}
