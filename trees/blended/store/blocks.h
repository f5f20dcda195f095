// Memory of a blended lookup: blocks of seven sizes in slabs of 64 KB, addressed by 32-bit references.
//
// Addresses are reserved for as many slabs as there may ever be, side by side, so that a reference is an offset; memory
// is only taken by slabs in use.
//
// One block is one context: the tokens that followed it, latest first. After the header come arrays of `capacity`
// entries: tokens uint32, children uint32 (reference of the context that is one token longer, 0 where none was
// learned), weights uint16 (faded counts, WEIGHT_ONE = 1), stamps uint16 (when the token was last seen), scopes uint8
// (in which scope). One entry costs 13 bytes, a context that was followed by one token 24.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace stand {

struct Block {
    uint32_t parent;      // reference of the context without its newest token (order 1: that token); orphans: the next
    uint8_t size;         // entries in use
    uint8_t order_class;  // context length << 4 | ORPHAN | size class; length 0: free (`parent`: the next), or empty
    uint8_t visits;       // times learned, at most 255
    uint8_t credit;       // rounds of the clock that the block survives when memory is short
};

constexpr uint8_t ORPHAN = 8;  // nothing leads here any more: it waits to be freed, with all that hangs on it
constexpr int32_t NUM_CLASSES = 7;
constexpr int32_t MAX_ENTRIES = 1 << (NUM_CLASSES - 1);
constexpr uint32_t UNIT_BYTES = 8;
constexpr uint32_t LINE_BYTES = 64;  // of the cache
constexpr uint32_t SLAB_BYTES = 1u << 16;
constexpr uint32_t SLAB_UNITS = SLAB_BYTES / UNIT_BYTES;
constexpr int64_t MAX_SLABS = (int64_t{1} << 32) / SLAB_UNITS;  // that references reach: 32 GB
constexpr uint32_t CLASS_UNITS[NUM_CLASSES] = {3, 5, 8, 14, 27, 53, 105};  // 8 + 13 * capacity bytes, rounded up

inline int32_t order_of(const Block* block) { return block->order_class >> 4; }
inline int32_t class_of(const Block* block) { return block->order_class & (ORPHAN - 1); }
inline bool is_orphan(const Block* block) { return block->order_class & ORPHAN; }
inline int32_t capacity_of(const Block* block) { return 1 << class_of(block); }
inline uint32_t* tokens_of(Block* block) { return reinterpret_cast<uint32_t*>(block + 1); }
inline uint32_t* children_of(Block* block) { return tokens_of(block) + capacity_of(block); }
inline uint16_t* weights_of(Block* block) {
    return reinterpret_cast<uint16_t*>(children_of(block) + capacity_of(block));
}
inline uint16_t* stamps_of(Block* block) { return weights_of(block) + capacity_of(block); }
inline uint8_t* scopes_of(Block* block) { return reinterpret_cast<uint8_t*>(stamps_of(block) + capacity_of(block)); }

inline const uint32_t* tokens_of(const Block* block) { return tokens_of(const_cast<Block*>(block)); }
inline const uint32_t* children_of(const Block* block) { return children_of(const_cast<Block*>(block)); }
inline const uint16_t* weights_of(const Block* block) { return weights_of(const_cast<Block*>(block)); }
inline const uint16_t* stamps_of(const Block* block) { return stamps_of(const_cast<Block*>(block)); }
inline const uint8_t* scopes_of(const Block* block) { return scopes_of(const_cast<Block*>(block)); }

// Position of the token among the block's entries, or -1.
inline int32_t find_entry(const Block* block, uint32_t token) {
    const uint32_t* tokens = tokens_of(block);
    for (int32_t position = 0; position < block->size; ++position)
        if (tokens[position] == token) return position;
    return -1;
}

// Moves an entry to the front; those before it keep their order.
inline void move_to_front(Block* block, int32_t position) {
    if (position == 0) return;
    const auto rotate = [position](auto* array) {
        const auto value = array[position];
        std::memmove(array + 1, array, position * sizeof value);
        array[0] = value;
    };
    rotate(tokens_of(block));
    rotate(children_of(block));
    rotate(weights_of(block));
    rotate(stamps_of(block));
    rotate(scopes_of(block));
}

// Entries and header of `from` into the larger block `to`.
inline void copy_block(const Block* from, Block* to, int32_t to_class) {
    *to = *from;
    to->order_class = static_cast<uint8_t>(order_of(from) << 4 | to_class);
    std::memcpy(tokens_of(to), tokens_of(from), sizeof(uint32_t) * from->size);
    std::memcpy(children_of(to), children_of(from), sizeof(uint32_t) * from->size);
    std::memcpy(weights_of(to), weights_of(from), sizeof(uint16_t) * from->size);
    std::memcpy(stamps_of(to), stamps_of(from), sizeof(uint16_t) * from->size);
    std::memcpy(scopes_of(to), scopes_of(from), sizeof(uint8_t) * from->size);
}

struct Unmap {
    size_t size;
    void operator()(char* begin) const { munmap(begin, size); }
};
using AddressRange = std::unique_ptr<char, Unmap>;

// Addresses without memory: a page is taken when it is first written.
inline AddressRange reserve_addresses(size_t size) {
    void* begin = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) throw std::bad_alloc();
    return AddressRange(static_cast<char*>(begin), Unmap{size});
}

// Never moves a block. A slab belongs to one size class for good.
class Arena {
   public:
    // Each class owns a slab from the start, so that no class can be shut out by the others. Readers of eight entries
    // look up to a unit beyond the last block.
    explicit Arena(int64_t max_slabs)
        : max_slabs_(max_slabs), range_(reserve_addresses(max_slabs * SLAB_BYTES + UNIT_BYTES)) {
        for (int32_t size_class = 0; size_class < NUM_CLASSES; ++size_class) {
            classes_[size_class].slabs.reserve(max_slabs);
            add_slab(size_class);
        }
    }

    Block* at(uint32_t reference) const {
        return reinterpret_cast<Block*>(range_.get() + static_cast<size_t>(reference) * UNIT_BYTES);
    }

    // Asks for the cache lines of a block that will be read soon, and for the lines after it: they hold the rest of a
    // wide block, or the contexts that were made next. Inlined always: GCC takes a function that only
    // prefetches for one without effect and drops the calls that it has not inlined by then.
    template <int32_t NUM_LINES = 3>
    [[gnu::always_inline]] void fetch(uint32_t reference) const {
        if (reference == 0) return;
        const char* begin = reinterpret_cast<const char*>(at(reference));
        __builtin_prefetch(begin);
        for (int32_t line = 1; line < NUM_LINES; ++line) __builtin_prefetch(begin + line * LINE_BYTES - 1);
    }

    // A block of the class, its header unset; 0 where the class has none left and no slab may be added.
    uint32_t take(int32_t size_class, bool may_add_slab) {
        Class& pool = classes_[size_class];
        if (pool.first_free == 0) {
            if (!may_add_slab || num_slabs_ == max_slabs_) return 0;
            add_slab(size_class);
        }
        const uint32_t reference = pool.first_free;
        pool.first_free = at(reference)->parent;
        fetch<1>(pool.first_free);  // taken next
        ++pool.num_used;
        return reference;
    }

    void give(uint32_t reference) {
        Block* block = at(reference);
        const int32_t size_class = class_of(block);
        *block = Block{classes_[size_class].first_free, 0, static_cast<uint8_t>(size_class), 0, 0};
        classes_[size_class].first_free = reference;
        --classes_[size_class].num_used;
    }

    // The next block of a class in clock order, free or not.
    uint32_t next_in_clock(int32_t size_class) {
        Class& pool = classes_[size_class];
        if (++pool.hand_block >= blocks_per_slab(size_class)) {
            pool.hand_block = 0;
            if (++pool.hand_slab >= pool.slabs.size()) pool.hand_slab = 0;
        }
        return reference_of(pool.slabs[pool.hand_slab], size_class, pool.hand_block);
    }

    int64_t num_blocks() const {
        int64_t total = 0;
        for (const Class& pool : classes_) total += pool.num_used;
        return total;
    }
    // Everything that this object holds besides itself.
    int64_t nbytes() const { return num_slabs_ * SLAB_BYTES + overhead(max_slabs_); }
    static int64_t overhead(int64_t max_slabs) {
        return max_slabs * NUM_CLASSES * static_cast<int64_t>(sizeof(uint32_t));
    }

   private:
    struct Class {
        uint32_t first_free = 0;
        int64_t num_used = 0;
        std::vector<uint32_t> slabs;
        size_t hand_slab = 0;
        uint32_t hand_block = 0;
    };

    int64_t max_slabs_, num_slabs_ = 0;
    Class classes_[NUM_CLASSES];
    AddressRange range_;

    // The first cache line of a slab stays unused: reference 0 can mean none, and a block of four entries fills a line.
    static constexpr uint32_t FIRST_UNIT = LINE_BYTES / UNIT_BYTES;
    static uint32_t blocks_per_slab(int32_t size_class) { return (SLAB_UNITS - FIRST_UNIT) / CLASS_UNITS[size_class]; }
    static uint32_t reference_of(uint32_t slab, int32_t size_class, uint32_t block) {
        return slab * SLAB_UNITS + FIRST_UNIT + block * CLASS_UNITS[size_class];
    }

    void add_slab(int32_t size_class) {
        const uint32_t slab = static_cast<uint32_t>(num_slabs_++);
        classes_[size_class].slabs.push_back(slab);
        for (uint32_t block = blocks_per_slab(size_class); block-- > 0;) {
            const uint32_t reference = reference_of(slab, size_class, block);
            *at(reference) = Block{classes_[size_class].first_free, 0, static_cast<uint8_t>(size_class), 0, 0};
            classes_[size_class].first_free = reference;
        }
    }
};

}  // namespace stand
