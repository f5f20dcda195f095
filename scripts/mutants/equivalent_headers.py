"""Changes of compiled headers that leave the behaviour as it is, and why.

`OF_GROWTH`: (header, line, change) of trees/blended/growth, drafts stay as they are. `OF_FILTERS`: by header of
stand/laws, (line, change[, nth such line]), laws stay as they are.
"""

from __future__ import annotations

_UNREAD = "an item that expands a node has no token and no product: both are unread"
_NEXT_DRAW = (
    "if (weight > 0.0f) offer(family(index), 0, OVERLAP * mass + (1.0f - OVERLAP) * shared / weight, Action::sample);"
)
_REPLACED = "the token of a draw is put in when it is drawn, and of one node's items only one draws"
_EQUAL = "differs where two floats are equal by accident: either answer is right there"
_PLACE_0 = "place 0 holds the first root, which is popped before all others: then no list has it"
_ORDER = "a heap and a radix queue give items out in the same order"
_WINDOW = "rows begin at their oldest token, which lies within the reach"
_WHEN = "contexts are the same whether they are fetched when a node is revealed or when it is expanded"

_ROOT = (
    "if (std::min(request.max_depth, request.max_nodes) > 0 && room_ > 0) push(1.0f, 1.0f, 0, index, Action::expand);"
)
_CHILD = "push(thresholds_.patience * path, 0.0f, 0, index, Action::expand);"
_LIST = "return (bits > lowest ? bits - lowest : 0) >> 17;"
_BIT = "words_[word] &= ~(static_cast<uint64_t>(heads_[list] < 0) << (list & 63));"
_CHAIN = "if (settings_.width == 1 && blender_.size > 0) {"
_AGES = "for (int32_t age = lookup_->reach() - 1; age >= 0; --age)"
_LAST = "const float last = PRICE * rows / std::max(1, budget);"

_WINNER = "for (int32_t i = 1; i < size(set); ++i) winner = entries[i].arrival < entries[winner].arrival ? i : winner;"
_ARRIVAL = "entries[i].arrival = entries[i].weight > 0.0f ? arrival(entries[i].weight, uniform(key, node, i)) : NEVER;"

OF_GROWTH: dict[tuple[str, str, str], str] = {
    (
        "candidates.h",
        "entries_.push_back(Entry{0.0, found.token, found.probability, weight});",
        "0.0 -> 1.0",
    ): "`start` sets arrivals before any is read",
    ("candidates.h", _WINNER, "1 -> 0"): "the first entry is compared with itself",
    ("candidates.h", _WINNER, "< -> <= #2"): _EQUAL,
    ("candidates.h", _ARRIVAL, "> -> >="): "divided by a weight of 0 an arrival is infinite, as NEVER is",
    (
        "masks.h",
        "for (int32_t word = 0; word < size && found < enough; ++word) found += __builtin_popcount(words[word]);",
        "< -> <= #2",
    ): "it goes on counting where it need not",
    ("frontier.h", "num_places_ = 0;", "0 -> 1"): "one place stays unused",
    ("frontier.h", "size_t num_places_ = 0;", "0 -> 1"): "`clear` sets it",
    ("frontier.h", "return mine != its ? mine < its : token > other.token;", "> -> >="): "no two items are alike",
    ("frontier.h", "return mine != its ? mine < its : token > other.token;", "< -> <="): "asked where they differ",
    ("frontier.h", _LIST, "> -> >="): "0 either way",
    (
        "frontier.h",
        "constexpr uint32_t lowest = (127u - OCTAVES) << 23;",
        "- -> +",
    ): "all items in one list: looking for the best takes longer, and finds the same one",
    (
        "frontier.h",
        "for (int32_t* next = &places_[*best].next; *next >= 0; next = &places_[*next].next)",
        "0 -> 1",
    ): "the first root is expanded after the other roots, but all of them before anything is revealed",
    (
        "frontier.h",
        "for (int32_t* next = &places_[*best].next; *next >= 0; next = &places_[*next].next)",
        ">= -> >",
    ): "the first root is expanded after the other roots, but all of them before anything is revealed",
    ("frontier.h", _LIST, "0 -> 1"): "shifted out",
    ("frontier.h", _BIT, "< -> <="): _PLACE_0,
    ("frontier.h", _BIT, "0 -> 1"): _PLACE_0,
    ("growth.h", "int32_t room_ = 0;  // nodes that may still be revealed", "0 -> 1"): "`grow` sets it",
    (
        "growth.h",
        "float expected_ = 0.0f;  // tokens that the step yields by estimate: "
        "one per row and the nodes' path probabilities",
        "0.0f -> 1.0f",
    ): "`grow` sets it",
    ("growth.h", "frontier_.clear(num_rows > CROWD);", "> -> >="): _ORDER,
    ("growth.h", "frontier_.clear(num_rows > CROWD);", "> -> <="): _ORDER,
    ("growth.h", "if (best < bar()) {", "< -> <="): _EQUAL,
    (
        "growth.h",
        "if (key >= (action == Action::expand ? thresholds_.hopeless : "
        "std::max(thresholds_.hopeless, settings_.floor)))",
        ">= -> >",
    ): _EQUAL,
    ("growth.h", "if (!(OVERLAP * path * tail >= worth)) return -1;", ">= -> >"): _EQUAL,
    ("growth.h", "if (item.key < std::max(settings_.floor, bar())) return -1;", "< -> <="): _EQUAL,
    (
        "growth.h",
        "while (num_sure < most_sure && path * entries[num_sure].probability >= worth) ++num_sure;",
        ">= -> >",
    ): _EQUAL,
    ("growth.h", "if (item.key < thresholds_.patience * bar()) break;", "< -> <="): _EQUAL,
    (
        "growth.h",
        "if (item.key < thresholds_.patience * bar()) break;",
        "drop break",
    ): "nothing is revealed any more, so the bar stays, and all items that are left lie below it",
    ("growth.h", "while (item.key < thresholds_.least) thresholds_.least *= thresholds_.lowering;", "< -> <="): _EQUAL,
    ("growth.h", _AGES, "- -> +"): _WINDOW,
    ("growth.h", _AGES, "1 -> 0"): _WINDOW,
    ("growth.h", _ROOT, "> -> >= #2"): "without room nothing grows",
    ("growth.h", _ROOT, "min -> its argument 1"): "a row that may have no node is passed over when its root is popped",
    ("growth.h", _ROOT, "1.0f -> 0.0f #2"): _UNREAD,
    ("growth.h", _ROOT, "0 -> 1 #3"): _UNREAD,
    ("growth.h", "if (thresholds_.patience * path >= thresholds_.least) locate(node);", ">= -> >"): _WHEN,
    ("growth.h", "if (thresholds_.patience * path >= thresholds_.least) locate(node);", ">= -> <"): _WHEN,
    ("growth.h", "if (thresholds_.patience * path >= thresholds_.least) locate(node);", "* -> /"): _WHEN,
    ("growth.h", _CHILD, "0.0f -> 1.0f"): _UNREAD,
    ("growth.h", _CHILD, "0 -> 1"): _UNREAD,
    ("growth.h", _CHAIN, "1 -> 0"): "the best of one is the first: `first` is only quicker",
    ("growth.h", _CHAIN, "0 -> 1"): "the best of one candidate is that candidate",
    (
        "growth.h",
        "} else if (settings_.width < blender_.size) {",
        "< -> <=",
    ): "all candidates either way; the queue sorts",
    (
        "growth.h",
        "const Item item = child(children, 0, children.product * OVERLAP * tail, Action::sample);",
        "0 -> 1",
    ): _REPLACED,
    (
        "growth.h",
        "const int32_t most_sure = std::min(size, settings_.width - 1);",
        "min -> its argument 2",
    ): "reads behind the last candidate, which only a build with bounds checks notices (make test-debug)",
    ("growth.h", _NEXT_DRAW, "> -> >="): "0 / 0 is not a number, and what is none is not queued",
    ("growth.h", _NEXT_DRAW, "0 -> 1"): _REPLACED,
    (
        "outcome.h",
        "if (fates[node] == Fate::accepted) continue;",
        "drop continue",
    ): "an accepted node's parent is accepted and not the last one, so that neither branch takes it",
    ("thresholds.h", _LAST, "max -> its argument 2"): "without a budget nothing grows",
    ("thresholds.h", _LAST, "1 -> 0"): "without a budget nothing grows",
    (
        "outcome.h",
        "for (int64_t node = 1; node < num_nodes; ++node) {",
        "1 -> 0",
    ): "the root is accepted, and passed over",
    (
        "outcome.h",
        "if (node < 1 || node >= num_nodes || outcome.parents[first + node] != above) return row;",
        "1 -> 0",
    ): "a root has no parent, so its parent is not the node above either",
}

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
