// The queue of best-first growth: items that compete for the next node, best first.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../store/float_bits.h"

namespace stand {

// Kinds of items: a child with a known token, the sampling of a child, or a look for children.
enum class Action : uint8_t { reveal, sample, expand };

struct Item {
    float key;      // calibrated chance of acceptance, in (0, 1]
    float product;  // the same before calibration
    uint32_t token;
    int32_t node;
    Action action;

    // Positive floats compare like their bits; of equals the child of the earlier node is better, then the lower id.
    uint64_t rank() const {
        return static_cast<uint64_t>(float_bits(key)) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(node));
    }
    bool operator<(const Item& other) const {
        const uint64_t mine = rank(), its = other.rank();
        return mine != its ? mine < its : token > other.token;
    }
};

// A radix queue: items whose keys lie within one sixty-fourth of an octave share a list, and bits tell which lists hold
// something. Lists are short, so the best of a list is found by looking at each; items come out in exact order. With a
// crowd of rows lists would be long: then it is a binary heap instead.
class Frontier {
   public:
    Frontier() { clear(false); }

    bool empty() const { return is_crowded_ ? heap_.empty() : summary_ == 0; }

    void clear(bool is_crowded) {
        is_crowded_ = is_crowded;
        heap_.clear();
        num_places_ = 0;
        std::memset(heads_, 0xFF, sizeof heads_);
        std::memset(words_, 0, sizeof words_);
        summary_ = 0;
    }

    // Field by field: an item put together elsewhere would be copied while its parts are still on their way to memory.
    void push(float key, float product, uint32_t token, int32_t node, Action action) {
        if (is_crowded_) return push_in_crowd(Item{key, product, token, node, action});
        const uint32_t list = list_of(key);
        if (num_places_ == places_.size()) places_.resize(2 * num_places_ + 64);
        Place& place = places_[num_places_];
        place.item.key = key;
        place.item.product = product;
        place.item.token = token;
        place.item.node = node;
        place.item.action = action;
        place.next = heads_[list];
        heads_[list] = static_cast<int32_t>(num_places_++);
        words_[list >> 6] |= uint64_t{1} << (list & 63);
        summary_ |= 1u << (list >> 6);
    }

    // The best item, there until the next push. The frontier must not be empty.
    const Item& pop() {
        if (is_crowded_) return pop_of_crowd();
        const uint32_t word = 31 - __builtin_clz(summary_);
        const uint32_t list = word << 6 | (63 - __builtin_clzll(words_[word]));
        int32_t* best = &heads_[list];
        for (int32_t* next = &places_[*best].next; *next >= 0; next = &places_[*next].next)
            if (places_[*best].item < places_[*next].item) best = next;
        const Place& place = places_[*best];
        *best = place.next;
        words_[word] &= ~(static_cast<uint64_t>(heads_[list] < 0) << (list & 63));
        summary_ &= ~(static_cast<uint32_t>(words_[word] == 0) << word);
        return place.item;
    }

   private:
    static constexpr uint32_t OCTAVES = 16, NUM_WORDS = OCTAVES + 1, NUM_LISTS = NUM_WORDS * 64;
    struct Place {
        Item item;
        int32_t next;  // in the same list, -1 at its end
    };
    bool is_crowded_;
    std::vector<Item> heap_;
    Item popped_;  // from the heap
    std::vector<Place> places_;  // those from num_places_ on are unused
    size_t num_places_ = 0;
    int32_t heads_[NUM_LISTS];
    uint64_t words_[NUM_WORDS];
    uint32_t summary_;

    [[gnu::cold, gnu::noinline]] void push_in_crowd(const Item& item) {
        heap_.push_back(item);
        std::push_heap(heap_.begin(), heap_.end());
    }

    [[gnu::cold, gnu::noinline]] const Item& pop_of_crowd() {
        std::pop_heap(heap_.begin(), heap_.end());
        popped_ = heap_.back();
        heap_.pop_back();
        return popped_;
    }

    // All keys below the lowest octave share the first list.
    static uint32_t list_of(float key) {
        constexpr uint32_t lowest = (127u - OCTAVES) << 23;
        const uint32_t bits = float_bits(key);
        return (bits > lowest ? bits - lowest : 0) >> 17;
    }
};

}  // namespace stand
