"""Changes of stand/laws/*.h that leave every law as it is, by header: (line, change[, nth such line]) and why."""

from __future__ import annotations

_BUCKETS = "where buckets end decides how many tokens are sorted, not which ones go"
_ONE_BUCKET = "all tokens lie in one bucket, which is sorted"
_TWO_WAYS = "either way gives the same"
_OVERWRITTEN = "it is written before it is read"
_MORE_ROOM = "more room than is used"
_DIFFERENT = "is asked where the two differ"
_EVERY_SET = "all instruction sets give equal bits"
_FEW_OR_ALL = "if (has_top_k && filters_.top_k <= static_cast<int64_t>(cells_.size()))"
_REACH = "const double reach = std::log(static_cast<double>(size_) / (1.0 - filters_.top_p)) + 1.0;"
_ROOM = "buckets_(filters.top_p < 1.0 ? num_blocks_ * BLOCK : 0),"
_FAR = "if (found.num_far < BLOCK / 4) {"
_WORSE = "return a.score != b.score ? a.score < b.score : a.token < b.token;"
_BETTER = "return a.score != b.score ? a.score > b.score : a.token < b.token;"

OF_FILTERS: dict[str, dict[tuple[str | int, ...], str]] = {
    "filters.h": {
        ("num_blocks_((size + BLOCK - 1) / BLOCK),", "1 -> 0"): "behind a row of whole blocks one more of no scores",
        (_ROOM, "0 -> 1"): _MORE_ROOM,
        (_ROOM, "< -> <="): _MORE_ROOM,
        (
            "const bool has_top_k = 0 < filters_.top_k && filters_.top_k < size_;",
            "< -> <= #2",
        ): "top_k of all takes none",
        (_FEW_OR_ALL, "<= -> <"): _TWO_WAYS,
        (_FEW_OR_ALL, "<= -> >"): _TWO_WAYS,
        (_WORSE, "< -> <="): _DIFFERENT,
        (_WORSE, "< -> <= #2"): "no two entries have one token",
        ("if (!(cells_[cell] >= lowest)) continue;", "drop continue"): "its tokens are looked at again",
        ("if (count > static_cast<int64_t>(cells_.size())) return gather(LOWEST);", "> -> >="): _TWO_WAYS,
        (
            "if (filters_.top_p < 1.0) drop_worst(0.0, (1.0 - filters_.top_p) * total, true);",
            "< -> <=",
        ): "a budget of 0 takes out what weighs nothing",
        (
            "for (; border > 0 && gone + masses_[border] <= budget; --border) gone += masses_[border];",
            "<= -> <",
        ): "a bucket that uses the budget up is then taken out token by token",
        (_REACH, "1.0 -> 0.0"): _ONE_BUCKET,
        (_REACH, "1.0 -> 0.0 #2"): _BUCKETS,
        (_REACH, "- -> +"): _BUCKETS,
        ("const float buckets_per_unit = static_cast<float>(LAST_BUCKET / reach);", "/ -> *"): _BUCKETS,
        ("for (int64_t i = 0; i < num_blocks_; ++i) {", "< -> >=", 3): _ONE_BUCKET,
        (_FAR, "< -> >="): _TWO_WAYS,
        (_FAR, "< -> <="): _TWO_WAYS,
        (_FAR, "/ -> *"): _TWO_WAYS,
        ("if (law[a.token] != law[b.token]) return law[a.token] > law[b.token];", "> -> >="): _DIFFERENT,
        (_BETTER, "> -> >="): _DIFFERENT,
        (_BETTER, "< -> <="): "no two entries have one token",
        ("int64_t row = next.fetch_add(1);", "1 -> 0"): "the first row is filtered twice",
        ("if (row >= num_rows) return;", ">= -> >"): "memory for no row",
    },
    "block_passes.h": {
        (
            "static STAND_INLINE float join(float a, float b) { return a > b ? a : b; }",
            "> -> >=",
        ): "both are equal then",
        ("float folded[BLOCK / 2];", "/ -> *"): _MORE_ROOM,
        ("fold<Sum, BLOCK, 1>(values, folded);", "1 -> 0"): "a fold of one number changes nothing",
        ("float sum = 0.0f;", "0.0f -> 1.0f"): _OVERWRITTEN,
        ("int32_t num_far = 0;", "0 -> 1"): _OVERWRITTEN,
        ("float far_sum = 0.0f;", "0.0f -> 1.0f"): _OVERWRITTEN,
        ("int32_t count = 0;", "0 -> 1"): _TWO_WAYS,
        ("count += is_far;", "+= -> -="): _TWO_WAYS,
        ("const float place = (best - scores[i] / temperature) * buckets_per_unit;", "* -> /"): _BUCKETS,
        ("const bool is_far = place >= LAST_BUCKET;", ">= -> >"): "its bucket is the last one either way",
        ("for (int32_t i = 0; i < BLOCK; ++i) {", "< -> >=", 2): _ONE_BUCKET,
        ("uint16_t found = 0;", "0 -> 1"): "tokens are compared again",
        ("if (!found) continue;", "drop continue"): "tokens are compared again",
        ("if (vectors == Vectors::avx512) return run_avx512(pass);", "== -> !="): _EVERY_SET,
        ("if (vectors == Vectors::avx2) return run_avx2(pass);", "== -> !="): _EVERY_SET,
    },
}
