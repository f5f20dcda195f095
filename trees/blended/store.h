// The context store: what followed every context of 1..depth tokens, as a trie of blocks in bounded memory.
//
// The entry for token x in the block of context c leads to the block of context c x, so all contexts that end one
// token later are found without hashing. Order-1 blocks hang on a paged table indexed by token.
//
// Half of the tokens that a large draft misses never followed the newest token before. Two kinds of contexts that do
// not know the newest token stand in for order 1 there, with none longer below them: the token before it (SKIP, in the
// same table), and the empty context (order 0), which knows what lately came where nothing else expected it.

#pragma once

#include <mutex>

#include "calibration.h"
#include "odds.h"
#include "end_cache.h"

namespace stand {

constexpr int32_t NUM_KINDS = 3;  // of drafts

struct StoreSettings {
    int32_t depth = 12;
    int64_t max_bytes = int64_t{256} << 20;
    float fade = 0.95f;  // of a context's weights at every new observation
    float rate = 0.05f;  // of the odds' gradient steps
    bool learns_odds = true;
};

class ContextStore {
   public:
    static constexpr uint32_t PAGE_SHIFT = 8, PAGE_SIZE = 1u << PAGE_SHIFT;
    static constexpr int64_t MIN_BYTES = int64_t{1} << 20;

    const StoreSettings settings;
    Arena arena;
    Odds odds;
    Calibration calibrations[NUM_KINDS];  // by kind of draft
    Clock clock;
    mutable std::mutex mutex;  // held by every public verb of the Python class

    explicit ContextStore(const StoreSettings& settings)
        : settings(settings),
          arena(slabs_within(settings.max_bytes)),
          fades_{{fade_factor(1.0f), fade_factor(SOFT)}, {fade_factor(SLOW), fade_factor(SLOW * SOFT)}},
          ends_(settings.depth) {}

    // Successors kept: short contexts have many, long ones few.
    static int32_t max_entries(int32_t order) {
        return order == 0 ? 64 : order == 1 ? 32 : order == 2 || order == SKIP ? 16 : 8;
    }

    int32_t depth() const { return settings.depth; }
    // Tokens that contexts look back: the one before the newest counts even where longer ones do not.
    int32_t reach() const { return std::max(2, settings.depth); }
    int64_t num_contexts() const { return arena.num_blocks(); }
    int64_t num_evicted() const { return num_evicted_; }

    // Bytes held, exactly; never above max_bytes.
    int64_t nbytes() const {
        return static_cast<int64_t>(sizeof *this + pages_.capacity() * sizeof(Page)) + arena.nbytes() +
               num_pages_ * PAGE_BYTES;
    }

    // The context of order 1 or SKIP that is this token.
    uint32_t root(uint32_t token, int32_t order = 1) const {
        const size_t page = token >> PAGE_SHIFT;
        return page < pages_.size() && pages_[page] ? pages_[page][place_in_page(token, order)] : 0;
    }
    uint32_t empty_context() const { return empty_; }
    uint32_t num_root_slots() const { return static_cast<uint32_t>(pages_.size()) << PAGE_SHIFT; }

    // The contexts that end one token later.
    void advance(const Cursor& from, uint32_t token, Cursor& to) const {
        to.token = token;
        to.token_before = from.token;
        to.blocks[0] = empty_;
        to.blocks[SKIP] = root(from.token, SKIP);
        to.blocks[1] = root(token);
        to.parents[1] = 0;
        for (int32_t order = 1; order < depth(); ++order) {
            to.blocks[order + 1] = to.parents[order + 1] = 0;
            if (from.blocks[order] == 0) continue;
            const Block* block = arena.at(from.blocks[order]);
            const int32_t position = find_entry(block, token);
            if (position < 0) continue;
            to.blocks[order + 1] = children_of(block)[position];
            if (to.blocks[order + 1] == 0) to.parents[order + 1] = from.blocks[order];
        }
    }

    // The same where nothing will be learned. What was found is fetched.
    void advance(const Contexts& from, uint32_t token, Contexts& to) const {
        to.token = token;
        to.skip = root(from.token, SKIP);
        to.blocks[1] = root(token);
        to.longest = 1;
        arena.fetch(to.skip);
        arena.fetch(to.blocks[1]);
        const int32_t longest = std::min(from.longest, depth() - 1);
        for (int32_t order = 1; order <= longest; ++order) {
            to.blocks[order + 1] = 0;
            if (from.blocks[order] == 0) continue;
            const Block* block = arena.at(from.blocks[order]);
            const int32_t position = find_entry(block, token);
            if (position < 0) continue;
            const uint32_t child = children_of(block)[position];
            to.blocks[order + 1] = child;
            if (child == 0) continue;
            to.longest = order + 1;
            arena.fetch(child);
        }
    }

    // The contexts that end with `window`, newest token first.
    template <typename Place>
    Place locate(const uint32_t* window, int32_t available) const {
        const Contexts* end = recent_end(window, available);
        if (end == nullptr) return walk<Place>(window, available);
        Place place;
        advance(Place(*end), window[0], place);
        return place;
    }

    // The contexts of fewer than depth() tokens that end before the newest token of a window, where a run that was
    // learned lately ended there; else null. They stay until something is learned.
    const Contexts* recent_end(const uint32_t* window, int32_t available) const {
        return ends_.size() > 0 && available > ends_.size() ? ends_.find(window + 1) : nullptr;
    }

    // A run of one or more tokens that was observed after a window.
    void learn_run(const uint32_t* window, int32_t available, const int32_t* tokens, int64_t num_tokens);

    // The law of the next token after the cursor, as ids (negative: padding) and probabilities. Teaches no contexts
    // beyond those that end at the cursor.
    void learn_row(Cursor& cursor, const int32_t* ids, const float* probs, int32_t width);

    // Forgets everything; settings stay.
    void clear() {
        arena = Arena(slabs_within(settings.max_bytes));
        odds = Odds();
        std::fill(calibrations, calibrations + NUM_KINDS, Calibration());
        clock = Clock();
        pages_ = std::vector<Page>();
        num_pages_ = num_evicted_ = 0;
        empty_ = 0;
        num_orphans_ = 0;
        ends_.forget();
    }

    // What is not sound, or null.
    const char* find_fault() const;

    uint32_t add_block(int32_t order, uint32_t parent, int32_t position, uint32_t token, int32_t size);

   private:
    using Page = std::unique_ptr<uint32_t[]>;
    static constexpr uint32_t PAGE_SLOTS = 2 * PAGE_SIZE;  // order 1 and SKIP
    static constexpr int64_t PAGE_BYTES = PAGE_SLOTS * sizeof(uint32_t);
    static constexpr float SOFT = 0.05f;       // weight of what a longer context already knew
    static constexpr float SLOW = 0.1f;        // fading of the empty context, which sees every token, to that of others
    static constexpr float LEAST_NEW = 1.0f / 64;  // probability that a row's token needs for an entry of its own
    static constexpr int32_t MAX_ORPHANS = 1024;   // waiting at a time
    static constexpr int32_t FREED_PER_TOKEN = 4;  // orphans
    static constexpr int32_t MAX_TRIES = 512;  // blocks looked at to make room for one
    static constexpr uint8_t FULL_CREDIT = 3;

    uint32_t fades_[2][2];  // of 65536: [is the empty context][did a longer one know the token]
    std::vector<Page> pages_;
    uint32_t empty_ = 0;
    int64_t num_pages_ = 0;
    int64_t num_evicted_ = 0;
    uint32_t orphans_[MAX_ORPHANS];
    int32_t num_orphans_ = 0;
    RecentEnds ends_;
    Cursor* cursors_[2] = {nullptr, nullptr};  // in use: their blocks stay, and follow when they move

    uint32_t fade_factor(float speed) const {
        return static_cast<uint32_t>(65536.0f * (1.0f - speed * (1.0f - settings.fade)));
    }

    static size_t place_in_page(uint32_t token, int32_t order) {
        return 2 * (token & (PAGE_SIZE - 1)) + (order == SKIP ? 1 : 0);
    }
    uint32_t& slot(uint32_t token, int32_t order) { return pages_[token >> PAGE_SHIFT][place_in_page(token, order)]; }

    // A 32nd is left to the table of contexts that are one token.
    static int64_t slabs_within(int64_t max_bytes) {
        const int64_t room = max_bytes - max_bytes / 32 - static_cast<int64_t>(sizeof(ContextStore));
        return std::clamp<int64_t>(room / (SLAB_BYTES + Arena::overhead(1)), NUM_CLASSES, MAX_SLABS);
    }

    // The contexts that end with a window, from its oldest token on.
    template <typename Place>
    Place walk(const uint32_t* window, int32_t available) const {
        Place now, before;
        for (int32_t age = std::min(available, reach()) - 1; age >= 0; --age) {
            before = now;
            advance(before, window[age], now);
        }
        return now;
    }

    Cursor learn(Cursor& cursor, uint32_t token);
    void train(const Cursor& cursor, uint32_t token, float mass);
    uint32_t context(Cursor& cursor, int32_t order);
    int32_t add_entry(Cursor& cursor, int32_t order, uint32_t token);
    void observe(Block* block, int32_t position, bool is_soft, float mass);
    void fade(Block* block, bool is_soft);
    uint32_t make_root(uint32_t token, int32_t order);
    uint32_t make_empty();
    bool reserve_page(size_t page);
    bool grow(const Cursor& cursor, int32_t order);
    void link(uint32_t from, uint32_t to);
    uint32_t allocate(int32_t size_class);
    bool reclaim(uint32_t reference);
    void abandon(uint32_t reference);
    void free_orphans();
    bool is_held(uint32_t reference) const;
    bool ends_are_sound() const;
    const char* find_fault_below(uint32_t reference, int32_t order, int64_t& num_reached) const;
};

inline void ContextStore::learn_run(const uint32_t* window, int32_t available, const int32_t* tokens,
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
inline Cursor ContextStore::learn(Cursor& cursor, uint32_t token) {
    for (int32_t order = 1; order < NUM_ORDERS; ++order) arena.fetch(cursor.blocks[order]);
    if (settings.learns_odds) train(cursor, token, 1.0f);
    Cursor next;
    next.token = token;
    next.token_before = cursor.token;
    cursors_[0] = &cursor;
    cursors_[1] = &next;
    free_orphans();
    bool is_soft = false;
    for (int32_t order = depth(); order >= 0; order = next_order(order)) {
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

inline void ContextStore::learn_row(Cursor& cursor, const int32_t* ids, const float* probs, int32_t width) {
    if (settings.learns_odds)
        for (int32_t i = 0; i < width; ++i)
            if (ids[i] >= 0 && probs[i] >= 0.1f) train(cursor, static_cast<uint32_t>(ids[i]), probs[i]);
    Cursor none;
    cursors_[0] = &cursor;
    cursors_[1] = &none;
    free_orphans();
    bool is_soft = false;
    for (int32_t order = depth(); order >= 0; order = next_order(order)) {
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
inline void ContextStore::train(const Cursor& cursor, uint32_t token, float mass) {
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
        probability = (found + escape * probability) / level.total;
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

// The block of the cursor's context of an order, made where it can be; 0 where it cannot.
inline uint32_t ContextStore::context(Cursor& cursor, int32_t order) {
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
inline int32_t ContextStore::add_entry(Cursor& cursor, int32_t order, uint32_t token) {
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

inline void ContextStore::fade(Block* block, bool is_soft) {
    const uint32_t factor = fades_[order_of(block) == 0][is_soft];
    uint16_t* weights = weights_of(block);
    for (int32_t i = 0; i < block->size; ++i) weights[i] = static_cast<uint16_t>(weights[i] * factor >> 16);
    block->visits = static_cast<uint8_t>(std::min(255, block->visits + 1));
    block->credit = static_cast<uint8_t>(std::min<int32_t>(FULL_CREDIT, block->credit + 1));
}

inline void ContextStore::observe(Block* block, int32_t position, bool is_soft, float mass) {
    const int32_t added = static_cast<int32_t>((is_soft ? SOFT : 1.0f) * mass * WEIGHT_ONE);
    weights_of(block)[position] = static_cast<uint16_t>(std::min(65535, weights_of(block)[position] + added));
    stamps_of(block)[position] = clock.stamp();
    scopes_of(block)[position] = clock.scope;
    move_to_front(block, position);
}

inline uint32_t ContextStore::make_root(uint32_t token, int32_t order) {
    if (token == NO_NEWEST || !reserve_page(token >> PAGE_SHIFT)) return 0;
    const uint32_t reference = allocate(0);
    if (reference == 0) return 0;
    *arena.at(reference) = Block{token, 0, static_cast<uint8_t>(order << 4), 0, 0};
    return slot(token, order) = reference;
}

inline uint32_t ContextStore::make_empty() {
    if (empty_ == 0 && (empty_ = allocate(0)) != 0) *arena.at(empty_) = Block{0, 0, 0, 0, 0};
    return empty_;
}

// False where the page would pass the cap.
inline bool ContextStore::reserve_page(size_t page) {
    if (page < pages_.size() && pages_[page]) return true;
    const size_t added_slots = page < pages_.capacity() ? 0 : page + 1 - pages_.capacity();
    if (nbytes() + PAGE_BYTES + static_cast<int64_t>(added_slots * sizeof(Page)) > settings.max_bytes) return false;
    if (page >= pages_.size()) {
        pages_.reserve(page + 1);
        pages_.resize(page + 1);
    }
    pages_[page].reset(new uint32_t[PAGE_SLOTS]());
    ++num_pages_;
    return true;
}

// Moves the block of the cursor's context of an order to the next size class, and all that remember it follow. False
// where memory is short or nothing leads to it.
inline bool ContextStore::grow(const Cursor& cursor, int32_t order) {
    const uint32_t reference = cursor.blocks[order];
    if (arena.at(reference)->parent >= LOST) return false;  // listed where it is
    const int32_t size_class = class_of(arena.at(reference)) + 1;
    const uint32_t larger = allocate(size_class);
    if (larger == 0) return false;
    Block* block = arena.at(larger);
    copy_block(arena.at(reference), block, size_class);
    for (int32_t i = 0; i < block->size; ++i)
        if (children_of(block)[i] != 0) arena.at(children_of(block)[i])->parent = larger;
    link(reference, larger);
    for (Cursor* held : cursors_)
        for (int32_t place = 0; place < NUM_ORDERS; ++place) {
            if (held->blocks[place] == reference) held->blocks[place] = larger;
            if (held->parents[place] == reference) held->parents[place] = larger;
        }
    ends_.move(cursor.token, order, reference, larger);
    arena.give(reference);
    return true;
}

// Points whatever leads to block `from` at `to`.
inline void ContextStore::link(uint32_t from, uint32_t to) {
    const Block* block = arena.at(from);
    if (block->parent >= LOST) return;
    const int32_t order = order_of(block);
    if (order == 0) empty_ = to;
    if (is_one_token(order)) slot(block->parent, order) = to;
    if (order == 0 || is_one_token(order)) return;
    Block* parent = arena.at(block->parent);
    for (int32_t i = 0; i < parent->size; ++i)
        if (children_of(parent)[i] == from) children_of(parent)[i] = to;
}

// A block of a class, from free memory or from a context that is not used; 0 where none was found in bounded time.
inline uint32_t ContextStore::allocate(int32_t size_class) {
    uint32_t reference = arena.take(size_class, nbytes() + SLAB_BYTES <= settings.max_bytes);
    for (int32_t tries = 0; reference == 0 && tries < MAX_TRIES; ++tries)
        if (reclaim(arena.next_in_clock(size_class))) reference = arena.take(size_class, false);
    return reference;
}

// Frees a context without longer ones whose credit is used up, or takes one unit of its credit; frees what is lost.
inline bool ContextStore::reclaim(uint32_t reference) {
    Block* block = arena.at(reference);
    if (order_of(block) == 0 || block->parent == ORPHAN || is_held(reference)) return false;
    if (block->parent != LOST) {
        if (block->credit > 0) {
            --block->credit;
            return false;
        }
        for (int32_t i = 0; i < block->size; ++i)
            if (children_of(block)[i] != 0) return false;
        link(reference, 0);
    }
    for (int32_t i = 0; i < block->size; ++i) abandon(children_of(block)[i]);
    arena.give(reference);
    ++num_evicted_;
    ends_.forget();
    return true;
}

// Nothing leads to this context any more: it is freed later, with all that hangs on it.
inline void ContextStore::abandon(uint32_t reference) {
    if (reference == 0) return;
    const bool has_place = num_orphans_ < MAX_ORPHANS;
    arena.at(reference)->parent = has_place ? ORPHAN : LOST;
    if (has_place) orphans_[num_orphans_++] = reference;
}

// A few at a time, so that no token waits for a whole branch.
inline void ContextStore::free_orphans() {
    for (int32_t freed = 0; freed < FREED_PER_TOKEN && num_orphans_ > 0; ++freed) {
        const uint32_t reference = orphans_[num_orphans_ - 1];
        if (is_held(reference)) return;
        --num_orphans_;
        const Block* block = arena.at(reference);
        for (int32_t i = 0; i < block->size; ++i) abandon(children_of(block)[i]);
        arena.give(reference);
    }
}

// For loading: a block with room for `size` entries, below the entry at `position` of `parent` (orders 1 and SKIP:
// below the table, `token` its place; order 0: below nothing). 0 at the cap.
inline uint32_t ContextStore::add_block(int32_t order, uint32_t parent, int32_t position, uint32_t token,
                                        int32_t size) {
    int32_t size_class = 0;
    while (1 << size_class < size) ++size_class;
    const bool is_root = is_one_token(order);
    if (is_root && !reserve_page(token >> PAGE_SHIFT)) return 0;
    const uint32_t reference = arena.take(size_class, nbytes() + SLAB_BYTES <= settings.max_bytes);
    if (reference == 0) return 0;
    *arena.at(reference) = Block{is_root ? token : parent, 0, static_cast<uint8_t>(order << 4 | size_class), 0, 0};
    if (order == 0)
        empty_ = reference;
    else if (is_root)
        slot(token, order) = reference;
    else
        children_of(arena.at(parent))[position] = reference;
    return reference;
}

inline const char* ContextStore::find_fault() const {
    if (nbytes() > settings.max_bytes) return "more bytes than max_bytes";
    int64_t num_reached = 0;
    const char* fault = empty_ == 0 ? nullptr : find_fault_below(empty_, 0, num_reached);
    for (uint32_t token = 0; token < num_root_slots() && fault == nullptr; ++token)
        for (const int32_t order : ONE_TOKEN_ORDERS) {
            const uint32_t reference = root(token, order);
            if (reference == 0) continue;
            if (arena.at(reference)->parent != token) return "a context of one token that is another one";
            fault = find_fault_below(reference, order, num_reached);
            if (fault != nullptr) break;
        }
    if (fault != nullptr) return fault;
    if (!ends_are_sound()) return "a recent end whose contexts are elsewhere";
    return num_reached > num_contexts() ? "contexts that are free memory" : nullptr;
}

inline const char* ContextStore::find_fault_below(uint32_t reference, int32_t order, int64_t& num_reached) const {
    const Block* block = arena.at(reference);
    ++num_reached;
    if (order_of(block) != order || (order > depth() && order != SKIP)) return "a context of the wrong order";
    if (block->size > capacity_of(block) || block->size > max_entries(order)) return "a context with too many entries";
    for (int32_t i = 0; i < block->size; ++i) {
        if (find_entry(block, tokens_of(block)[i]) != i) return "a token twice in one context";
        const uint32_t child = children_of(block)[i];
        if (child == 0) continue;
        if (!may_have_longer(order)) return "a longer context where none may be";
        if (arena.at(child)->parent != reference) return "a context whose parent is another one";
        const char* fault = find_fault_below(child, order + 1, num_reached);
        if (fault != nullptr) return fault;
    }
    return nullptr;
}

inline bool ContextStore::ends_are_sound() const {
    for (int32_t place = 0; place < RecentEnds::NUM_ENDS; ++place) {
        const uint32_t* window = ends_.window_at(place);
        if (window == nullptr) continue;
        const Contexts& end = ends_.contexts_at(place);
        const Contexts found = walk<Contexts>(window, ends_.size());
        if (end.token != found.token || end.longest != found.longest ||
            !std::equal(found.blocks + 1, found.blocks + 1 + found.longest, end.blocks + 1))
            return false;
    }
    return true;
}

inline bool ContextStore::is_held(uint32_t reference) const {
    for (const Cursor* cursor : cursors_)
        for (int32_t order = 1; cursor != nullptr && order < NUM_ORDERS; ++order)
            if (cursor->blocks[order] == reference || cursor->parents[order] == reference) return true;
    return false;
}

}  // namespace stand
