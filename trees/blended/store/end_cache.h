// Remembers the contexts at which runs that were learned lately ended. The next draft of the same text and its next run
// begin one token later. To find their contexts token by token would take a sixth of a small draft's time.
//
// The cache always gives the contexts that a walk from single tokens would find: it follows contexts that move, and
// forgets an end as soon as a context that leads there may be gone.

#pragma once

#include <algorithm>

#include "cursor.h"

namespace stand {

class EndCache {
   public:
    static constexpr int32_t NUM_ENDS = 64;

    // The windows of a lookup with contexts of up to `depth` tokens have size() = depth - 1.
    explicit EndCache(int32_t depth) : size_(depth - 1) {
        forget();
        std::fill(windows_[0], windows_[0] + NUM_ENDS * MAX_DEPTH, NO_NEWEST);
    }

    int32_t size() const { return size_; }

    // The contexts of 1 to size() tokens that end with a window, newest token first; null where it is not remembered.
    const Contexts* find(const uint32_t* window) const {
        for (int32_t place = 0; place < NUM_ENDS; ++place)
            if (newest_[place] == window[0] && std::equal(window, window + size_, windows_[place]))
                return &contexts_[place];
        return nullptr;
    }

    // By place: the window, null where nothing is remembered, and its contexts.
    const uint32_t* window_at(int32_t place) const { return newest_[place] == NO_NEWEST ? nullptr : windows_[place]; }
    const Contexts& contexts_at(int32_t place) const { return contexts_[place]; }

    // The end that is put next only depends on losses from here on.
    void begin_run() { num_lost_ = 0; }

    // A run ended with this window, which is padded with NO_NEWEST to MAX_DEPTH tokens, at this cursor.
    void put(const uint32_t* window, const Cursor& cursor) {
        if (size_ == 0 || num_lost_ > MAX_LOST) return;
        for (int32_t i = 0; i < num_lost_; ++i)
            if (holds(window, lost_[i])) return;
        const uint32_t* blocks = cursor.blocks + 1;
        if (std::find(blocks, blocks + size_, 0u) != blocks + size_) return;
        const uint32_t place = next_++ % NUM_ENDS;
        newest_[place] = window[0];
        std::copy(window, window + size_, windows_[place]);
        contexts_[place].token = window[0];
        contexts_[place].longest = size_;
        std::copy(blocks, blocks + size_, contexts_[place].blocks + 1);
    }

    // Nothing leads any more to a context that ends with these two tokens, nor to the longer ones below it.
    void lose(uint32_t token_before, uint32_t token) {
        const Pair pair{token_before, token};
        if (num_lost_ < MAX_LOST) lost_[num_lost_] = pair;
        num_lost_ = std::min(num_lost_ + 1, MAX_LOST + 1);
        for (int32_t place = 0; place < NUM_ENDS; ++place)
            if (holds(windows_[place], pair)) newest_[place] = NO_NEWEST;
    }

    // A context of `order` tokens is gone.
    void lose(int32_t order, uint32_t block) {
        if (order > size_) return;
        for (int32_t place = 0; place < NUM_ENDS; ++place)
            if (newest_[place] != NO_NEWEST && contexts_[place].blocks[order] == block) newest_[place] = NO_NEWEST;
    }

    // A context of `order` tokens that ends with this one has moved.
    void move(uint32_t token, int32_t order, uint32_t from, uint32_t to) {
        if (order < 1 || order > size_) return;
        for (int32_t place = 0; place < NUM_ENDS; ++place)
            if (newest_[place] == token && contexts_[place].blocks[order] == from) contexts_[place].blocks[order] = to;
    }

    void forget() { std::fill(newest_, newest_ + NUM_ENDS, NO_NEWEST); }

   private:
    static constexpr int32_t MAX_LOST = 32;
    struct Pair {
        uint32_t before, token;
    };

    const int32_t size_;
    uint32_t next_ = 0;
    uint32_t newest_[NUM_ENDS];  // NO_NEWEST: forgotten
    uint32_t windows_[NUM_ENDS][MAX_DEPTH];  // NO_NEWEST beyond size_: compared as a whole, in vectors
    Contexts contexts_[NUM_ENDS];
    Pair lost_[MAX_LOST];  // since the run began; more are only counted
    int32_t num_lost_ = 0;

    static bool holds(const uint32_t* window, Pair pair) {
        uint32_t answer = 0;
        for (int32_t age = 0; age < MAX_DEPTH - 2; ++age)
            answer |= (window[age] == pair.token) & (window[age + 1] == pair.before);
        return answer != 0;
    }
};

}  // namespace stand
