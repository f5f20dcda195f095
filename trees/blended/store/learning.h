// How a blended lookup learns: contexts that are made, weights that fade and grow, odds that are trained.

#pragma once

#include "../../include/window.h"
#include "memory.h"

namespace stand {

inline void BlendedLookup::learn_run(const uint32_t* window, int32_t available, const int32_t* tokens,
                                    int64_t num_tokens) {
    Cursor cursor = locate<Cursor>(window, available);
    ends_.begin_run();
    for (int64_t i = 0; i < num_tokens - 1; ++i) {
        if (num_tokens - i == MAX_DEPTH) ends_.begin_run();  // contexts before the last token are found from here on
        cursor = learn(cursor, static_cast<uint32_t>(tokens[i]));
    }
    learn(cursor, static_cast<uint32_t>(tokens[num_tokens - 1]));
    uint32_t end[MAX_DEPTH];  // newest first, without the last token
    std::fill(end, end + MAX_DEPTH, NO_NEWEST);
    int32_t size = 0;
    for (int64_t i = num_tokens - 2; i >= 0 && size < ends_.size(); --i) end[size++] = static_cast<uint32_t>(tokens[i]);
    for (int32_t age = 0; age < available && size < ends_.size(); ++age) end[size++] = window[age];
    if (size == ends_.size()) ends_.put(end, cursor);
}

// One observed token. Returns the contexts that end with it; the cursor has all contexts before it, made where missing.
inline Cursor BlendedLookup::learn(Cursor& cursor, uint32_t token) {
    for (int32_t order = 1; order < NUM_ORDERS; ++order) arena.fetch(cursor.blocks[order]);
    if (settings.learns_odds) train(cursor, token, 1.0f);
    Cursor next;
    next.token = token;
    next.token_before = cursor.token;
    cursors_[0] = &cursor;
    cursors_[1] = &next;
    bool is_soft = false;
    for (int32_t order = depth(); order >= 0; order = next_order(order)) {
        free_spare_orphan(order);
        if (context(cursor, order) == 0) continue;
        int32_t position = find_entry(arena.at(cursor.blocks[order]), token);
        const bool was_known = position >= 0;
        if (!was_known) position = add_entry(cursor, order, token);
        Block* block = arena.at(cursor.blocks[order]);
        fade(block, is_soft);
        observe(block, position, is_soft && was_known, 1.0f);
        if (order >= 1 && order < depth()) {
            next.blocks[order + 1] = children_of(block)[0];
            if (next.blocks[order + 1] == 0) next.parents[order + 1] = cursor.blocks[order];
        }
        is_soft |= was_known;
    }
    next.blocks[0] = empty_;
    next.blocks[SKIP] = root(cursor.token, SKIP);
    next.blocks[1] = root(token);
    cursors_[0] = cursors_[1] = nullptr;
    ++clock.now;
    return next;
}

inline void BlendedLookup::learn_law(Cursor& cursor, const int32_t* ids, const float* probs, int32_t width) {
    if (settings.learns_odds)
        for (int32_t i = 0; i < width; ++i)
            if (ids[i] >= 0 && probs[i] >= LEAST_TAUGHT) train(cursor, static_cast<uint32_t>(ids[i]), probs[i]);
    Cursor none;
    cursors_[0] = &cursor;
    cursors_[1] = &none;
    bool is_soft = false;
    for (int32_t order = depth(); order >= 0; order = next_order(order)) {
        free_spare_orphan(order);
        if (context(cursor, order) == 0) continue;
        fade(arena.at(cursor.blocks[order]), is_soft);
        float known = 0.0f;
        for (int32_t i = width - 1; i >= 0; --i) {  // the likeliest last, so that it ends in front
            if (ids[i] < 0 || probs[i] * WEIGHT_ONE < 1.0f) continue;
            const uint32_t token = static_cast<uint32_t>(ids[i]);
            int32_t position = find_entry(arena.at(cursor.blocks[order]), token);
            const bool was_known = position >= 0;
            if (!was_known && probs[i] < LEAST_NEW) continue;
            if (!was_known) position = add_entry(cursor, order, token);
            observe(arena.at(cursor.blocks[order]), position, is_soft && was_known, probs[i]);
            if (was_known) known += probs[i];
        }
        is_soft |= known >= 0.5f;
    }
    cursors_[0] = cursors_[1] = nullptr;
    ++clock.now;
}

// One gradient step on mass * log P(token), from the longest context down; `duty` is the share of P that the orders
// from here on are responsible for. The empty context, by far the widest, is spared where another one knows the token.
inline void BlendedLookup::train(const Cursor& cursor, uint32_t token, float mass) {
    struct Level {
        uint16_t entries[MAX_ENTRIES];  // buckets
        int32_t escape;                // bucket
        int32_t size, position;
        float total, own;
    };
    Level levels[NUM_ORDERS];
    int32_t num_levels = 0;
    bool is_known = false;
    for (int32_t order = depth(); order >= 0; order = next_order(order)) {
        if (cursor.blocks[order] == 0 || (order == 0 && is_known)) continue;
        const Block* block = arena.at(cursor.blocks[order]);
        if (block->size == 0) continue;
        Level& level = levels[num_levels++];
        level.escape = read_buckets(block, clock, level.entries);
        level.size = block->size;
        level.position = find_entry(block, token);
        if (level.position >= 0) arena.fetch(children_of(block)[level.position]);  // learned next
        is_known |= level.position >= 0;
    }
    float probability = UNSEEN;
    for (int32_t at = num_levels - 1; at >= 0; --at) {
        Level& level = levels[at];
        const float escape = odds.escape[level.escape];
        level.total = escape;
        for (int32_t i = 0; i < level.size; ++i) level.total += odds.entry[level.entries[i]];
        const float found = level.position < 0 ? 0.0f : odds.entry[level.entries[level.position]];
        level.own = found / (found + escape * probability);
        probability = std::max((found + escape * probability) / level.total, LEAST_CHANCE);
    }
    float duty = mass;
    for (int32_t at = 0; at < num_levels && settings.rate * duty > 1e-4f; ++at) {
        const Level& level = levels[at];
        const float rate = settings.rate * duty, share = duty / level.size;
        odds.move_escape(level.escape, duty, rate * (1.0f - level.own - odds.escape[level.escape] / level.total));
        for (int32_t i = 0; i < level.size; ++i) {
            const float gained = i == level.position ? level.own : 0.0f;
            const int32_t bucket = level.entries[i];
            odds.move_entry(bucket, share, rate * (gained - odds.entry[bucket] / level.total));
        }
        duty *= 1.0f - level.own;
    }
}

// What the contexts at the cursor give a token, from the end of the chain up.
inline float BlendedLookup::chance(const Cursor& cursor, uint32_t token) const {
    float probability = UNSEEN;
    const auto ask = [&](int32_t order) {
        const Block* block = arena.at(cursor.blocks[order]);
        if (cursor.blocks[order] == 0 || block->size == 0) return;
        uint16_t buckets[MAX_ENTRIES];
        const float escape = odds.escape[read_buckets(block, clock, buckets)];
        const int32_t position = find_entry(block, token);
        float total = escape;
        for (int32_t i = 0; i < block->size; ++i) total += odds.entry[buckets[i]];
        const float found = position < 0 ? 0.0f : odds.entry[buckets[position]];
        probability = std::max((found + escape * probability) / total, LEAST_CHANCE);
    };
    ask(0);
    ask(SKIP);
    for (int32_t order = 1; order <= depth(); ++order) ask(order);
    return probability;
}

inline void BlendedLookup::compare_law(const Cursor& cursor, const OutsideLaw& law, const int32_t* ids,
                                       const float* probs, int32_t width, OutsideOdds& outside_odds) const {
    OutsideLesson lesson(outside_odds, law, longest_known(arena, cursor.blocks, depth()));
    for (int32_t i = 0; i < width; ++i) {
        if (ids[i] < 0 || probs[i] < LEAST_TAUGHT) continue;
        const uint32_t token = static_cast<uint32_t>(ids[i]);
        lesson.observe(token, probs[i], chance(cursor, token));
    }
    lesson.finish(settings.rate);
}

// The block of the cursor's context of an order, made where it can be; 0 where it cannot.
inline uint32_t BlendedLookup::context(Cursor& cursor, int32_t order) {
    if (order == 0) return cursor.blocks[0] = make_empty();
    if (order == 1 && cursor.blocks[1] == 0) cursor.blocks[1] = make_root(cursor.token, 1);
    if (order == SKIP && cursor.blocks[SKIP] == 0) cursor.blocks[SKIP] = make_root(cursor.token_before, SKIP);
    if (cursor.blocks[order] != 0 || cursor.parents[order] == 0) return cursor.blocks[order];
    const uint32_t reference = allocate(0);
    if (reference == 0) return 0;
    const uint32_t parent = cursor.parents[order];
    const int32_t position = find_entry(arena.at(parent), cursor.token);
    if (position < 0) {  // replaced meanwhile
        arena.give(reference);
        return 0;
    }
    *arena.at(reference) = Block{parent, 0, static_cast<uint8_t>(order << 4), 0, 0};
    children_of(arena.at(parent))[position] = reference;
    cursor.parents[order] = 0;
    return cursor.blocks[order] = reference;
}

// A new entry in the cursor's block of an order; it may move the block or replace the lightest entry (of equals the
// one seen longest ago). Returns its position.
inline int32_t BlendedLookup::add_entry(Cursor& cursor, int32_t order, uint32_t token) {
    Block* block = arena.at(cursor.blocks[order]);
    int32_t position;
    const int32_t limit = max_entries(order);
    if (block->size == capacity_of(block) && block->size < limit && grow(cursor, order))
        block = arena.at(cursor.blocks[order]);
    if (block->size < capacity_of(block) && block->size < limit) {
        position = block->size++;
    } else {
        position = block->size - 1;
        for (int32_t i = block->size - 1; i >= 0; --i)
            if (weights_of(block)[i] < weights_of(block)[position]) position = i;
        if (children_of(block)[position] != 0) ends_.lose(cursor.token, tokens_of(block)[position]);
        abandon(children_of(block)[position]);
    }
    tokens_of(block)[position] = token;
    children_of(block)[position] = 0;
    weights_of(block)[position] = 0;
    return position;
}

inline void BlendedLookup::fade(Block* block, bool is_soft) {
    const uint32_t factor = fades_[order_of(block) == 0][is_soft];
    uint16_t* weights = weights_of(block);
    for (int32_t i = 0; i < block->size; ++i) weights[i] = static_cast<uint16_t>(weights[i] * factor >> 16);
    block->visits = static_cast<uint8_t>(std::min(255, block->visits + 1));
    block->credit = static_cast<uint8_t>(std::min<int32_t>(FULL_CREDIT, block->credit + 1));
}

inline void BlendedLookup::observe(Block* block, int32_t position, bool is_soft, float mass) {
    const int32_t added = static_cast<int32_t>((is_soft ? SOFT : 1.0f) * mass * WEIGHT_ONE);
    weights_of(block)[position] = static_cast<uint16_t>(std::min(65535, weights_of(block)[position] + added));
    stamps_of(block)[position] = clock.stamp();
    scopes_of(block)[position] = clock.scope;
    move_to_front(block, position);
}

// The verbs. Each takes the lock.

constexpr int64_t TURN_TOKENS = 256;  // of a lesson, before others have the lookup: none waits for a whole prompt

// The `size` tokens before `end`, newest first.
inline void reversed_copy(const int32_t* end, int32_t size, uint32_t* window) {
    for (int32_t age = 0; age < size; ++age) window[age] = static_cast<uint32_t>(end[-1 - age]);
}

// A run that was observed after a window, in parts.
inline void teach(BlendedLookup& lookup, Turn& turn, uint8_t scope, const uint32_t* window, int32_t available,
                  const int32_t* tokens, int64_t num_tokens) {
    uint32_t moved[MAX_DEPTH];
    for (int64_t done = 0; done < num_tokens;) {
        const int64_t size = std::min(turn.room(), num_tokens - done);
        lookup.clock.scope = scope;  // another verb may have had its turn
        lookup.learn_run(window, available, tokens + done, size);
        done += size;
        if (done < num_tokens) {
            const int32_t fresh = static_cast<int32_t>(std::min<int64_t>(size, lookup.reach()));
            const int32_t kept = std::min(available, lookup.reach() - fresh);
            std::copy_backward(window, window + kept, moved + fresh + kept);
            reversed_copy(tokens + done, fresh, moved);
            window = moved;
            available = fresh + kept;
        }
        turn.count(size);
    }
}

// A run of one or more tokens that was observed after a window.
inline void learn_tokens(BlendedLookup& lookup, uint8_t scope, const uint32_t* window, int32_t available,
                         const int32_t* tokens, int64_t num_tokens) {
    Turn turn(lookup.mutex, TURN_TOKENS);
    teach(lookup, turn, scope, window, available, tokens, num_tokens);
}

// The newest tokens of texts that lie in rows of one array.
struct TextRows {
    const int32_t* tokens;   // text t begins at tokens + rows[t] * stride
    int64_t stride;
    const int64_t* rows;     // [B]
    const int64_t* lengths;  // [B] the new tokens included
    const int64_t* num_new;  // [B]
    const uint8_t* scopes;   // [B]
    int64_t num_texts;
};

inline void learn_texts(BlendedLookup& lookup, const TextRows& texts) {
    Turn turn(lookup.mutex, TURN_TOKENS);
    uint32_t window[MAX_DEPTH];
    for (int64_t text = 0; text < texts.num_texts; ++text) {
        const int64_t num_before = texts.lengths[text] - texts.num_new[text];
        const int32_t* next = texts.tokens + texts.rows[text] * texts.stride + num_before;
        const int32_t available = static_cast<int32_t>(std::min<int64_t>(num_before, lookup.reach()));
        reversed_copy(next, available, window);
        teach(lookup, turn, texts.scopes[text], window, available, next, texts.num_new[text]);
    }
}

// The law of each of those tokens: `width` ids and probabilities per token. The window moves along.
inline void learn_laws(BlendedLookup& lookup, uint8_t scope, uint32_t* window, int32_t available,
                       const int32_t* tokens, int64_t num_tokens, const int32_t* ids, const float* probs,
                       int32_t width) {
    const std::lock_guard guard(lookup.mutex);
    lookup.clock.scope = scope;
    for (int64_t i = 0; i < num_tokens; ++i) {
        Cursor cursor = lookup.locate<Cursor>(window, available);
        lookup.learn_law(cursor, ids + i * width, probs + i * width, width);
        available = std::min(available + 1, lookup.reach());
        std::move_backward(window, window + available - 1, window + available);
        window[0] = static_cast<uint32_t>(tokens[i]);
    }
}

// By node of a step's drafts, the node with its law from outside, or NOWHERE.
inline std::vector<int32_t> places_of(const StepView& step, const OutsideLaws& outside) {
    std::vector<int32_t> places(step.offsets[step.num_rows], NOWHERE);
    for (int64_t row = 0; row < step.num_rows; ++row) {
        const int32_t first = step.offsets[row];
        places[first] = outside.root(row);
        for (int32_t node = first + 1; node < step.offsets[row + 1]; ++node) {
            const int32_t above = places[first + step.parents[node]];
            if (above != NOWHERE) places[node] = outside.child(above, static_cast<uint32_t>(step.token_ids[node]));
        }
    }
    return places;
}

// Teaches law i of `ids` and `probs` to the context that ends in node i, for the given nodes in their order. `scopes`
// are the rows'. Where the drafts had laws from outside, `odds` learns first what these were worth: rows that share a
// context would else find it taught by each other, and the contexts would look better than they were.
inline void learn_nodes(BlendedLookup& lookup, const StepView& step, const uint8_t* scopes, const int64_t* nodes,
                        int64_t num_nodes, const int32_t* ids, const float* probs, int32_t width,
                        const OutsideLaws* outside, OutsideOdds* odds) {
    const std::lock_guard guard(lookup.mutex);
    if (outside != nullptr && lookup.settings.learns_odds) {
        const std::vector<int32_t> places = places_of(step, *outside);
        const auto compare = [&](int64_t node, int64_t row, const uint32_t* window, int32_t available) {
            if (places[node] == NOWHERE) return;
            lookup.clock.scope = scopes[row];
            const Cursor cursor = lookup.locate<Cursor>(window, available);
            const OutsideLaw law = outside->at(places[node]);
            lookup.compare_law(cursor, law, ids + node * width, probs + node * width, width, *odds);
        };
        for_each_window<uint32_t, MAX_DEPTH>(step, nodes, num_nodes, compare);
    }
    const auto learn = [&](int64_t node, int64_t row, const uint32_t* window, int32_t available) {
        lookup.clock.scope = scopes[row];
        Cursor cursor = lookup.locate<Cursor>(window, available);
        lookup.learn_law(cursor, ids + node * width, probs + node * width, width);
    };
    for_each_window<uint32_t, MAX_DEPTH>(step, nodes, num_nodes, learn);
}

}  // namespace stand
