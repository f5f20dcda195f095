// A blended lookup: what followed every context of 1 to `depth` tokens, as a trie of blocks in bounded memory.
//
// The entry for token x in the block of context c leads to the block of context c x, so all contexts that end one
// token later are found without hashing. A paged table by token holds the contexts of one token (order 1).
//
// Half of the tokens that a large draft misses never followed the newest token before. Two kinds of contexts that do
// not know the newest token answer there instead of order 1: the token before it (SKIP, in the same table), and the
// empty context (order 0), which knows the tokens that came lately and that no other context expected. Neither has
// longer contexts below it.

#pragma once

#include "../../include/sampling.h"
#include "calibration.h"
#include "end_cache.h"
#include "fair_mutex.h"
#include "odds.h"
#include "outside_odds.h"

namespace stand {

struct LookupSettings {
    int32_t depth = 12;
    int64_t max_bytes = int64_t{256} << 20;
    float fade = 0.95f;  // of a context's weights at every new observation
    float rate = 0.05f;  // of the odds' gradient steps
    bool learns_odds = true;
};

struct Figures {
    int64_t num_contexts, num_evicted, nbytes;
};

class BlendedLookup {
   public:
    static constexpr uint32_t PAGE_SHIFT = 8, PAGE_SIZE = 1u << PAGE_SHIFT;
    static constexpr int64_t MIN_BYTES = int64_t{1} << 20;

    const LookupSettings settings;
    Arena arena;
    Odds odds;
    Calibration calibrations[NUM_GROWN_KINDS];  // by kind of draft
    Clock clock;
    mutable FairMutex mutex;  // held by every verb of the Python class, since they run without the interpreter's lock

    explicit BlendedLookup(const LookupSettings& settings)
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
    // Takes the lock.
    Figures figures() const {
        const std::lock_guard guard(mutex);
        return Figures{arena.num_blocks(), num_evicted_, nbytes()};
    }

    // Bytes held, exactly; never above max_bytes.
    int64_t nbytes() const {
        return static_cast<int64_t>(sizeof *this + pages_.capacity() * sizeof(Page)) + arena.nbytes() +
               num_pages_ * PAGE_BYTES;
    }

    // The context of order 1 or SKIP that is this token.
    uint32_t root(uint32_t token, int32_t order = 1) const {
        const size_t page = token >> PAGE_SHIFT;
        return page < pages_.size() && pages_[page] ? pages_[page][index_in_page(token, order)] : 0;
    }
    uint32_t empty_context() const { return empty_; }
    uint32_t num_root_slots() const { return static_cast<uint32_t>(pages_.size()) << PAGE_SHIFT; }
    // The first token from this one on that has a page, or num_root_slots(): ids far apart leave millions of pages out.
    uint32_t paged_token(uint32_t token) const {
        size_t page = token >> PAGE_SHIFT;
        if (page >= pages_.size() || pages_[page]) return token;
        while (page < pages_.size() && !pages_[page]) ++page;
        return static_cast<uint32_t>(page) << PAGE_SHIFT;
    }

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
    template <typename Found>
    Found locate(const uint32_t* window, int32_t available) const {
        const Contexts* end = cached_end(window, available);
        if (end == nullptr) return walk<Found>(window, available);
        Found found;
        advance(Found(*end), window[0], found);
        return found;
    }

    // The contexts of fewer than depth() tokens that end before a window's newest token; null unless a run that was
    // learned lately ended there. Valid until something is learned.
    const Contexts* cached_end(const uint32_t* window, int32_t available) const {
        return ends_.size() > 0 && available > ends_.size() ? ends_.find(window + 1) : nullptr;
    }

    // A run of one or more tokens that was observed after a window.
    void learn_run(const uint32_t* window, int32_t available, const int32_t* tokens, int64_t num_tokens);

    // The law of the next token after the cursor, as ids (negative: padding) and probabilities. Teaches no contexts
    // beyond those that end at the cursor.
    void learn_law(Cursor& cursor, const int32_t* ids, const float* probs, int32_t width);

    // Teaches `odds` what a law from outside was worth beside the contexts at the cursor, which learn nothing here.
    void compare_law(const Cursor& cursor, const OutsideLaw& law, const int32_t* ids, const float* probs, int32_t width,
                     OutsideOdds& odds) const;

    // Forgets everything; settings stay. Takes the lock.
    void clear() {
        const std::lock_guard guard(mutex);
        arena = Arena(slabs_within(settings.max_bytes));
        odds = Odds();
        std::fill(calibrations, calibrations + NUM_GROWN_KINDS, Calibration());
        clock = Clock();
        pages_ = std::vector<Page>();
        num_pages_ = num_evicted_ = 0;
        empty_ = 0;
        first_orphan_ = 0;
        num_orphans_ = 0;
        unlisted_orphan_ = 0;
        ends_.forget();
    }

    // The broken invariant, or null. Takes the lock.
    const char* find_fault() const;

    uint32_t add_block(int32_t order, uint32_t parent, int32_t position, uint32_t token, int32_t size);

   private:
    using Page = std::unique_ptr<uint32_t[]>;
    static constexpr uint32_t PAGE_SLOTS = 2 * PAGE_SIZE;  // order 1 and SKIP
    static constexpr int64_t PAGE_BYTES = PAGE_SLOTS * sizeof(uint32_t);
    static constexpr int64_t COMMON_IDS = 1 << 18;  // few vocabularies are larger
    static constexpr float SOFT = 0.05f;       // weight of what a longer context already knew
    static constexpr float SLOW = 0.1f;        // fading of the empty context, which sees every token, to that of others
    static constexpr float LEAST_NEW = 1.0f / 64;  // probability that a token of a law needs for an entry of its own
    static constexpr float LEAST_TAUGHT = 0.1f;  // probability that a token of a law needs to move odds
    static constexpr int32_t MAX_TRIES = 512;  // blocks looked at to make room for one
    static constexpr uint8_t FULL_CREDIT = 3;

    uint32_t fades_[2][2];  // of 65536: [is the empty context][did a longer one know the token]
    std::vector<Page> pages_;
    uint32_t empty_ = 0;
    int64_t num_pages_ = 0;
    int64_t num_evicted_ = 0;
    static constexpr int32_t ORPHANS_KEPT = 8;
    uint32_t first_orphan_ = 0, last_orphan_ = 0;  // of a list through their blocks
    int32_t num_orphans_ = 0;
    uint32_t unlisted_orphan_ = 0;  // not marked as one yet
    EndCache ends_;
    Cursor* cursors_[2] = {nullptr, nullptr};  // in use: their blocks stay, and follow when they move

    uint32_t fade_factor(float speed) const {
        return static_cast<uint32_t>(65536.0f * (1.0f - speed * (1.0f - settings.fade)));
    }

    static size_t index_in_page(uint32_t token, int32_t order) {
        return 2 * (token & (PAGE_SIZE - 1)) + (order == SKIP ? 1 : 0);
    }
    uint32_t& slot(uint32_t token, int32_t order) { return pages_[token >> PAGE_SHIFT][index_in_page(token, order)]; }

    // What is left to the table of contexts that are one token, 8 bytes per id: a 32nd, of small caps up to an eighth.
    // Its pages are never given back, and a slab neither: a token that comes late would find no room for good.
    static int64_t table_room(int64_t max_bytes) {
        return std::max(max_bytes / 32, std::min<int64_t>(max_bytes / 8, (PAGE_BYTES >> PAGE_SHIFT) * COMMON_IDS));
    }

    static int64_t slabs_within(int64_t max_bytes) {
        const int64_t room = max_bytes - table_room(max_bytes) - static_cast<int64_t>(sizeof(BlendedLookup));
        return std::clamp<int64_t>(room / (SLAB_BYTES + Arena::overhead(1)), NUM_CLASSES, MAX_SLABS);
    }

    // The contexts that end with a window, from its oldest token on.
    template <typename Found>
    Found walk(const uint32_t* window, int32_t available) const {
        Found now, before;
        for (int32_t age = std::min(available, reach()) - 1; age >= 0; --age) {
            before = now;
            advance(before, window[age], now);
        }
        return now;
    }

    Cursor learn(Cursor& cursor, uint32_t token);
    void train(const Cursor& cursor, uint32_t token, float mass);
    float chance(const Cursor& cursor, uint32_t token) const;
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
    void list_orphan(uint32_t reference);
    bool is_abandoned(uint32_t reference) const;
    bool free_orphan();
    void free_spare_orphan(int32_t order);
    bool is_held(uint32_t reference) const;
    bool ends_are_sound() const;
    const char* find_fault_below(uint32_t reference, int32_t order, int64_t& num_reached) const;
};

}  // namespace stand
