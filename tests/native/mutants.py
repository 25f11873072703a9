"""Mutants of the backends: one mistake each, by the program that finds it.

A mutant is (a claim that does not hold, a file by its path from csrc/backend/gpu, what it says, what it says
instead)."""

from __future__ import annotations

from tests.native.mask_mutants import AGREEMENT_MUTANTS, MASK_MUTANTS, SLOT_ENGINE_MUTANTS
from tests.native.rank_mutants import RANK_MUTANTS, TIME_MUTANTS

TWO_DOMAINS = "2 domains of a rank have the host's bits"
ONE_DOMAIN = "2 ranks of a domain have the host's bits, BF16"
ONE_DOMAIN_IN_WINDOWS = "2 ranks of a domain have the host's bits in windows"
TWO_DOMAINS_IN_WINDOWS = "2 domains of a rank have the host's bits in windows, FP32"
IDLE = "a rank without rows, which gives no address for weights, reads tails like the others"
TAILS = "packets of which the slot holds the tables alone have the host's bits"
FEW_ROWS = (
    "where token blocks have few rows for a domain, windows of a combine are longer, with the host's bits"
)
WEIGHT_WINDOWS = (
    "weights' gradients of more pairs than slots hold go in several windows, with the host's bits"
)
ENGINE_MUTANTS = {
    "a row is placed before it has come": (
        TWO_DOMAINS, "place.cuh", "if (!ready) look(k, arrivals);",
        "if (!ready) look(k, arrivals), ready = true;",
    ),
    "a row is placed before its list is there": (
        ONE_DOMAIN, "sources.cuh", "good &= wait_peer(", "good &= k.g.map.num_ranks > 0 || wait_peer(",
    ),
    "some rows that others place are not planned": (
        "rows that some warps plan and others place have the host's bits", "plan.cuh",
        "n < rows; n += step) plan_row", "n < rows; n += 2 * step) plan_row",
    ),
    "pieces of later windows lie behind their memory": (
        ONE_DOMAIN_IN_WINDOWS, "fold.cuh", "piece : piece % args.piece_slots;", "piece : piece;",
    ),
    "token blocks of a group have the rows of the first half only": (
        ONE_DOMAIN_IN_WINDOWS, "words.h", "before + sum_of_bytes(lower) + sum_of_bytes(higher)",
        "before + sum_of_bytes(lower) + 0 * sum_of_bytes(higher)",
    ),
    "a window's domains are those of the next one": (
        TWO_DOMAINS_IN_WINDOWS, "merge.cuh", "window % kHalves * domain_table_bytes(g.map)",
        "0 * domain_table_bytes(g.map)",
    ),
    "windows have room as if each token went to every domain": (
        FEW_ROWS, "sources.cuh", "out.most_rows = most.rows();", "out.most_rows = kTokenBlock;",
    ),
    "counts are told of before they are there": (
        ONE_DOMAIN, "roles/serve.cuh", "wait_shared(k.g, &staged.totals)", "staged.totals < 2",
    ),
    "a sum is merged before it has come": (
        TWO_DOMAINS, "merge.cuh",
        "if (token_block < arrived || (kRehearses && token_block == kRehearsal)) return true;",
        "return true;",
    ),
    "both crews that fold take the same rows": (
        ONE_DOMAIN, "sum.cuh", "turn_of(by.first + by.crew.warp(), workers(g))",
        "turn_of(by.crew.warp(), workers(g))",
    ),
    "a warp of a block has another's rows": (
        ONE_DOMAIN, "shares.cuh", "(blockIdx.x + warp) % blocks", "(blockIdx.x + warp / 2) % (blocks - 1)",
    ),
    "every token gets the bias of the first": (
        ONE_DOMAIN, "merge.cuh", "bias + (to - args.out)", "bias + 0 * (to - args.out)",
    ),
    "a part of a row counts as the row": (
        "rows of which the first are summed in parts have the host's bits", "merge.cuh",
        "parted.num_parts_of(is_part)", "parted.num_parts_of(!is_part)",
    ),
    "a hurried row is told of before the rest of its chunk is there": (
        "2 domains of 2 ranks have the host's bits, FP8", "fold.cuh",
        "if (count(tag, is_part) != parts_of(tag)) return;", "if (count(tag, is_part) == 0) return;",
    ),
    "a row that is last and in parts is another one": (
        TWO_DOMAINS, "shares.cuh", "return first + (n - first) / parts;", "return (n - first) / parts;",
    ),
    "a folded row lies in the ring where another window's does": (
        TWO_DOMAINS, "fold.cuh", "ring_offset(g, range.of(g, s).slot,", "ring_offset(g, 0,",
    ),
    "a half is staged before it has been read": (
        ONE_DOMAIN_IN_WINDOWS, "roles/stage.cuh", "k.g.map.read, k.op.free_after(w))", "k.g.map.read, 0)",
    ),
    "weights of all windows lie in one half": (
        WEIGHT_WINDOWS, "fold.cuh", "half = g.map.weight_halves == 1 ? 0 : window % kHalves;",
        "half = 0 * window;",
    ),
    "weights are relayed before they are folded": (
        WEIGHT_WINDOWS, "merge_weights.cuh", "if (!wait_all_folded(k, range.window)) return false;", "",
    ),
    "each window of weights begins with the first pair": (
        WEIGHT_WINDOWS, "fold.cuh", "(window - k.args.first_weight_window) * k.g.map.weight_pairs;",
        "0 * (window - k.args.first_weight_window) * k.g.map.weight_pairs;",
    ),
    "a window of weights goes behind the rows alone": (
        WEIGHT_WINDOWS, "roles/returns.cuh", "before += earlier < w ?", "before += earlier + 99 < w ?",
    ),
    "blocks in different windows count for one": (
        WEIGHT_WINDOWS, "merge_weights.cuh", "? Phase::kEvenRelayed : Phase::kOddRelayed;",
        "? Phase::kEvenRelayed : Phase::kEvenRelayed;",
    ),
    "pieces are folded into a half before it has been merged": (
        ONE_DOMAIN_IN_WINDOWS, "roles/fold.cuh", "k.op.window(w) - kHalves)", "0)",
    ),
    "pieces are folded into memory before those of the last operation have been merged": (
        "combines without a dispatch between them have the host's bits", "roles/fold.cuh",
        "k.op.window(0) - 1)", "0)",
    ),
    "pieces are merged before another rank's have come": (
        "a domain has the host's bits in every form of a combine", "fold.cuh",
        "r = k.g.first + i % members, its", "r = k.g.rank, its",
    ),
    "the first block that has folded says that all have": (
        ONE_DOMAIN_IN_WINDOWS, "fold.cuh", "last_block(k, phase, workers(k.g)) && going(k)",
        "going(k) && phase < Phase::kThrough",
    ),
    "a window's rows lie in the ring where the first window's do": (
        TWO_DOMAINS_IN_WINDOWS, "stage.cuh", "sent[to] + its.chunks) %", "sent[to] + 0 * its.chunks) %",
    ),
    "chunks of a window are counted from the first window's": (
        TWO_DOMAINS_IN_WINDOWS, "place.cuh", ": its.chunks + part_of(", ": its.chunks + 0 * part_of(",
    ),
    "a row that was dropped is not counted": (
        "rows that an output has no room for are left out of the sums, and nobody waits for them", "fold.cuh",
        "count_in_ring(sum.tag, sum.part > 0);", "return;",
    ),
    "metadata lies where scales are": (
        "codes and scales that the caller gave, and metadata, have the host's bits", "write_row.cuh",
        "outs, row.metadata_begin(), lane", "outs, row.code_bytes, lane",
    ),
    "what lies behind a row counts in its last scale": (
        "rows whose last block is short have the host's bits", "write_row.cuh",
        "next[u] = i < end ? device::load_once(from + i) : make_uint4(0, 0, 0, 0);",
        "next[u] = device::load_once(from + (i < 2 * end ? i : 0));",
    ),
    "padding begins a row late": (
        "what no row came for becomes padding where that is asked for, and is not touched otherwise",
        "pad.cu", "first = rows_of(g, plan),", "first = rows_of(g, plan) + 1,",
    ),
    "the warp that tells leaves before the last row": (
        TWO_DOMAINS, "fold.cuh", "read_shared(&boxes.ended) == folding",
        "read_shared(&boxes.ended) > 0 * folding",
    ),
    "weights of a known plan lie on those for a higher domain": (
        "4 domains of a rank have the host's bits in windows, a map", "device.cuh",
        "k.plan.pair_begin[first_of(k.g, to)] : 0", "k.plan.pair_begin[first_of(k.g, 0)] : 0",
    ),
    "a chunk of a packet's tail is lent before it is read": (
        TAILS, "unpack.cuh", "publish_flag(from.tails_consumed, read + c + 1)",
        "publish_flag(from.tails_consumed, read + c + 2)",
    ),
    "a rank without an address for weights reads no tail of them": (
        IDLE, "roles/serve.cuh", "if (k.args.signature.with_weights != 0) unpack_weights(k);",
        "if (k.args.row_weights != nullptr) unpack_weights(k);",
    ),
    "chunks of a tail lie where the first does": (
        TAILS, "unpack.cuh", "tails + (read + c) %", "tails + 0 * (read + c) %",
    ),
    "a pair of a tail has the row behind its own": (
        TAILS, "unpack.cuh", "k.plan.row_pair_begin[middle] <= p", "k.plan.row_pair_begin[middle] <= p + 1",
    ),
    "a warp plans rows whose routing is in a tail": (
        TAILS, "plan_reader.cuh", "first(!kFresh || !has_tails(g))",
        "first(kFresh || has_tails(g))",
    ),
    "a lane leaves a collective": (
        TWO_DOMAINS, "stage.cuh", "__syncwarp();\n  if (crew.lane() == 0) count_shared",
        "if (crew.lane() != 0) __syncwarp();\n  if (crew.lane() == 0) count_shared",
    ),
}  # fmt: skip


OF_MAPS = "few ranks: so they do with maps, of few experts a token, of more than 32, and of all"
OF_TOPK = "few ranks: tables and masks leave the oracle's bytes for any number of tokens and experts a token"
OF_600 = "600 ranks have masks, which leave the oracle's bytes"
OF_SOURCES = "warps share sources: each element is one lane's, and no warp has more turns than its share"
OF_TILES = "blocks that keep several tiles, or read each twice, leave the oracle's bytes"
OF_SPANS = "headers tell the most rows of spans of token blocks, or nothing where nobody asks"
ROUTING_MUTANTS = {
    "a span goes on in the next one": (
        OF_SPANS, "most.cuh", "(begin + u + 1) * kBlocks % SpanRows::blocks(i) == 0",
        "(begin + u + 1) * kBlocks % SpanRows::blocks(i) == 1",
    ),
    "headers tell the spans of a warp's domains only": (
        OF_SPANS, "exchange.cuh", "k.args.tells_spans && k.crew.lane() < k.crew.warps();",
        "k.args.tells_spans && k.crew.lane() < 1;",
    ),
    "warps of a source leave some of its elements out": (
        OF_SOURCES, "shares.cuh", "visit(u / parts, u % parts * kWarp + threadIdx.x % kWarp, parts * kWarp);",
        "visit(u / parts, u % parts * kWarp + threadIdx.x % kWarp, 2 * parts * kWarp);",
    ),
    "sources beyond a warp's lanes begin where the first ones do": (
        OF_SOURCES, "shares.cuh", "before = __shfl_sync(kFullWarp, end, kWarp - 1);",
        "before = 0 * __shfl_sync(kFullWarp, end, kWarp - 1);",
    ),
    "a token counts its own pieces as earlier ones": (
        OF_TOPK, "mask_tile.cuh", "pieces += __popcll(destination[r] & before);",
        "pieces += __popcll(destination[r] & (before << 1 | 1));",
    ),
    "pairs with higher experts of the rank are not counted": (
        OF_TOPK, "mask_tile.cuh", "pairs += pairs_with(e, token);", "pairs = pairs_with(e, token);",
    ),
    "our own domain counts as another one": (
        OF_TOPK, "mask_tile.cuh", "if (to != own_domain(g)) or_shared", "or_shared",
    ),
    "domains beyond a word share its bits": (
        OF_600, "mask_tile.cuh", "domain_words(g.map) + to / 32]", "domain_words(g.map)]",
    ),
    "a tile's addends begin where the first tile's do": (
        OF_TILES, "mask_tile.cuh", "tile.addends_before[token] += base,", "tile.addends_before[token],",
    ),
    "a map's expert is among the lower ones of its rank": (
        OF_MAPS, "mask_tile.cuh", "pair.same_lower += e < number &&", "pair.same_lower += e <= number &&",
    ),
    "pairs of a map beyond a warp's lanes are forgotten": (
        OF_MAPS, "mask_tile.cuh", "for (uint32_t begin = 0; begin < total; begin += kWarp)",
        "for (uint32_t begin = 0; begin < min(total, kWarp); begin += kWarp)",
    ),
    "ranks beyond a warp's lanes begin at the first pair": (
        OF_600, "exchange.cuh", "before = __shfl_sync(kFullWarp, end, kWarp - 1);", "before = 0;",
    ),
    "packets for other domains lie on each other": (
        OF_TOPK, "exchange.cuh", "behind = units + warp_prefix(its, lane);", "behind = 0 * units + its;",
    ),
    "packets for domains beyond a warp's lanes lie on those of the first": (
        OF_600, "exchange.cuh", "units = __shfl_sync(kFullWarp, behind, kWarp - 1);", "units = 0;",
    ),
    "rows of the own domain are among the most that go to another": (
        OF_TOPK, "tile.cuh", "to == own_domain(g) ? 0 : max(low_rows",
        "to > g.map.num_domains ? 0 : max(low_rows",
    ),
    "a token that does not go to a domain is in its stream": (
        OF_TOPK, "table_tile.cuh", "if ((tile.stream[to] & bit) == 0) continue;",
        "if (tile.stream[to] == 0) continue;",
    ),
}  # fmt: skip

SEVERAL_DOMAINS = "ranks of several domains get every row in its slot, and every sum"
FOLD_OR_NOT = "sums have the same bits whether a rank adds what its experts give before it sends or not"
SLOT_MUTANTS = {
    "a row is placed before its chunk has come": (
        SEVERAL_DOMAINS, "low_latency_place.cuh", "streams.rings[source].arrived(k.map(), its)", "0",
    ),
    "a pair is summed before it has come": (
        "2 ranks get every row in its slot, and every sum", "low_latency_combine.cu",
        "if (!Combine::kNet) good = good && "
        "wait_pairs(k, entered, folds(k) && k.args.routed == nullptr);", "",
    ),
    "a rank sums before it has the weights of the token's rank": (
        FOLD_OR_NOT, "low_latency_fold.cuh", "      if (knows || note_entered(k, entered)) continue;",
        "      entered.blocks[k.crew.thread % 4] = k.workers();\n      k.crew.sync();\n      continue;",
    ),
    "a rank's sum is at the place of another pair than where it is read": (
        "2 ranks get every row in its slot, and every sum", "low_latency_fold_bulk.cuh",
        "now_.column, lowest_lane(adds))", "now_.column, now_.count - 1)",
    ),
    "who receives pairs does not round their rank's sum": (
        FOLD_OR_NOT, "low_latency_add.cuh", "if (!exact) round_values(of_rank);", "",
    ),
    "a rank that does not fold does not tell its weights": (
        FOLD_OR_NOT, "low_latency_fold.cuh",
        "!may_fold(k.g, k.args) || k.args.routed", "!folds(k) || k.args.routed",
    ),
    "a pair is summed for another domain before it has come": (
        "a rank that sums for another domain waits for the others of its own", "low_latency_combine.cu",
        "!open_rings(k, relayed.rings) || "
        "!k.crew.all(wait_sent(k, k.map().pairs_entered, k.map().pairs_full))",
        "!open_rings(k, relayed.rings)",
    ),
    "a sum of another domain is added before it has come": (
        SEVERAL_DOMAINS, "low_latency_sum.cuh",
        "ring.arrived(k.map(), row)", "0 * ring.arrived(k.map(), row)",
    ),
    "memory is given back that has not been read": (
        "between domains chunks come in any order, late, twice, or are refused", "low_latency_dispatch.cu",
        "received = streams.rings[s].after(k.map(), streams.masks.count(s));",
        "received = streams.rings[s].after(k.map(), streams.masks.count(s)) + k.map().chunks;",
    ),
    "a domain gets a row twice": (
        SEVERAL_DOMAINS, "low_latency_dispatch.cu", "|| domain != target.domain;",
        "|| ~domain != target.domain;",
    ),
}  # fmt: skip

KNOWN = "weights that came with the routing give the same sums, by bulk copies, plain loads, or pairs"
KNOWN_BETWEEN = "between domains known weights give the same sums, whatever the network does"
WEIGHT_MUTANTS = {
    "what only sends waits for others, though it knows their weights": (
        "what only sends, with known weights, is done before another rank begins", "low_latency_fold.cuh",
        "      if (knows || note_entered(k, entered)) continue;",
        "      if (note_entered(k, entered)) continue;",
    ),
    "weights that others told last count": (
        "a rank sums with the weights of the dispatch, not with what its memory for others' weights holds",
        "low_latency_fold_bulk.cuh", "if (k.args.routed != nullptr) return", "if (false) return",
    ),
    "weights are not kept": (
        KNOWN, "low_latency_place.cuh", "if (knows) k.args.routed[pair]", "if (false) k.args.routed[pair]",
    ),
    "behind a rank's tokens there are pairs": (
        KNOWN, "low_latency_place.cuh", "if (names) k.args.pairs[pair] = kNoSlot;", "",
    ),
    "weights of other domains' ranks are not copied": (
        KNOWN_BETWEEN, "low_latency_net.cuh",
        "if (k.args.weights != nullptr) weights[p] = ", "if (false) weights[p] = ",
    ),
    "ranks of other domains count as entered before their headers have come": (
        KNOWN_BETWEEN, "low_latency_combine.cu",
        "if (!adopts_first && !adopt_packets(k, k.map().pairs_entered)) return false;",
        "if (!adopts_first)\n      for (uint32_t s = 0; s < k.g.map.num_ranks; ++s)\n"
        "        if (!k.is_near(s)) publish(own_part(k.g, k.map().pairs_entered) + s, k.number);",
    ),
}  # fmt: skip

FOLLOWED = "flags get every count while proxies publish, in one kernel after the other, and never go back"
WAS_IDLE = "a reader that was idle has every count, however many events it has missed"
KEPT = "a position is kept from kernel to kernel: no event is read twice"
EVENT_MUTANTS = {
    "a reader that was overtaken waits": (
        WAS_IDLE, "poll.cuh", "i == 0 && ahead != 0 && ahead != kNoEvent", "i == 0 && ahead > kNoEvent",
    ),
    "a reader that was overtaken skips an event": (
        WAS_IDLE, "poll.cuh", "(laps << ring.capacity_bits) + 1;", "(laps << ring.capacity_bits) + 2;",
    ),
    "a lap is one bit": (
        WAS_IDLE, "poll.cuh", "= has ? event_ahead(word, position, ring.capacity_bits) : kNoEvent;",
        "= has && event_ahead(word, position, ring.capacity_bits) % 2 == 0 ? 0 : kNoEvent;",
    ),
    "a position does not advance": (FOLLOWED, "poll.cuh", "next += run;", "next += 0 * run;"),
    "a position is not kept": (KEPT, "poll.cuh", "of.seen[place] = next;", "of.seen[place] = 0 * next;"),
    "a position of a ring beyond the lanes is not kept": (
        FOLLOWED, "poll.cuh", "of.seen[r] = seen;", "of.seen[r] = 0 * seen;",
    ),
    "an event counts after a later one of its channel": (
        FOLLOWED, "poll.cuh", "if (!is_outdated(number, i, lanes) && mine)",
        "if ((is_outdated(number, i, lanes) || true) && mine)",
    ),
    "an event is there before its lap": (
        KEPT, "poll.cuh", "come = ballot(ahead == 0)", "come = ballot(has)",
    ),
}  # fmt: skip

NAMED_TWICE = "a token counts once for each of its ranks, nodes and experts, however often it names them"
THERE_AND_BACK = (
    "metadata holds where a row came from, its experts and weights, and gives back what is this rank's"
)
TOPK_MUTANTS = {
    "a token counts for a rank as often as for its experts": (
        NAMED_TWICE, "topk.cu", "if (!in_rank[rank]) add(rank);", "if (is_new) add(rank);",
    ),
    "a token counts for a node as often as for its experts": (
        NAMED_TWICE, "topk.cu", "to_new_node = to_new_node && other / of_node",
        "to_new_node = is_new || other / of_node",
    ),
    "an expert has one word": (THERE_AND_BACK, "topk.cu", "uint64_t{row[3 + 2 * k]} << 32 |", ""),
    "experts are read as if no weights had travelled": (
        THERE_AND_BACK, "topk.cu", "args.words + i / width * args.row_words",
        "args.words + i / width * topk_words(width, args.weights != nullptr)",
    ),
    "weights of others' experts are kept": (
        THERE_AND_BACK, "topk.cu", "is_local ? row[2 + 2 * width + k] : 0", "row[2 + 2 * width + k]",
    ),
}  # fmt: skip

MUTANTS = {
    "agreement": AGREEMENT_MUTANTS,
    "slot_engine": SLOT_ENGINE_MUTANTS,
    "events": EVENT_MUTANTS,
    "gpu_routing": ROUTING_MUTANTS,
    "gpu_engine": ENGINE_MUTANTS,
    "gpu_ranks": RANK_MUTANTS,
    "low_latency": SLOT_MUTANTS,
    "low_latency_masks": MASK_MUTANTS,
    "slot_weights": WEIGHT_MUTANTS,
    "topk": TOPK_MUTANTS,
    "gpu_time": TIME_MUTANTS,
}
