// Drafting: fills the slots of a shape with children drawn from the lookup tree, and records their laws.
//
// Growth is adapted (each node's children depend on its own context and on fresh noise alone) and nothing drawn is
// dropped or re-ordered, so ratio verifiers stay lossless. Coupled drafts are the exception: their noise is the target's
// own, and the laws that they record say only how they would have been drawn from fresh noise.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "table.h"
#include "../noise.h"

namespace stand {

enum class DraftKind : int32_t { sampled = 0, mixed = 1, deterministic = 2, coupled = 3, independent = 4 };

// Children of one node in reveal order: picks are positions in the row, laws[child * row.size ...] goes over the row.
struct Children {
    std::vector<int32_t> picks;
    std::vector<float> laws;
};

// The law of the next child: the row restricted to positions not yet taken, renormalised. The remaining mass is
// summed, never had by subtraction. False where nothing remains.
inline bool append_law(const float* probabilities, int32_t size, const std::vector<char>& taken, Children& children) {
    double mass = 0.0;
    for (int32_t position = 0; position < size; ++position)
        if (!taken[position]) mass += probabilities[position];
    if (!(mass > 0.0)) return false;
    for (int32_t position = 0; position < size; ++position)
        children.laws.push_back(taken[position] ? 0.0f : static_cast<float>(probabilities[position] / mass));
    return true;
}

// Gumbel-Top-K without replacement as its equivalent race: candidate j finishes at -log(u_j) / p_j, the order of
// arrival is the draw order. Positions already taken do not run. Equal uniforms give the top-k (ties: row order).
inline void race(const float* probabilities, const double* uniforms, int32_t size, int32_t num_children,
                 std::vector<char>& taken, Children& children) {
    std::vector<std::pair<double, int32_t>> arrivals;
    arrivals.reserve(size);
    for (int32_t position = 0; position < size; ++position)
        if (!taken[position] && probabilities[position] > 0.0f)
            arrivals.emplace_back(-std::log(uniforms[position]) / probabilities[position], position);
    const size_t num_drawn = std::min<size_t>(num_children, arrivals.size());
    std::partial_sort(arrivals.begin(), arrivals.begin() + num_drawn, arrivals.end());
    for (size_t rank = 0; rank < num_drawn; ++rank) {
        append_law(probabilities, size, taken, children);
        children.picks.push_back(arrivals[rank].second);
        taken[arrivals[rank].second] = 1;
    }
}

inline void take_top(int32_t size, int32_t num_children, Children& children) {
    for (int32_t position = 0; position < std::min(num_children, size); ++position) {
        children.picks.push_back(position);
        children.laws.insert(children.laws.end(), size, 0.0f);
        children.laws[children.laws.size() - size + position] = 1.0f;
    }
}

// One sampled child from outside the num_children - 1 likeliest tokens, verified first, then those, one-hot.
inline void draw_mixed(const float* probabilities, const double* uniforms, int32_t size, int32_t num_children,
                       Children& children) {
    std::vector<char> taken(size, 0);
    std::fill(taken.begin(), taken.begin() + std::min(num_children - 1, size), char(1));
    race(probabilities, uniforms, size, 1, taken, children);
    take_top(size, num_children - 1, children);
}

// Draws with replacement, one uniform per child: siblings may be equal, their laws are.
inline void draw_independent(const float* probabilities, const double* uniforms, int32_t size, int32_t num_children,
                             Children& children) {
    const std::vector<char> taken(size, 0);
    double mass = 0.0;
    for (int32_t position = 0; position < size; ++position) mass += probabilities[position];
    for (int32_t child = 0; child < num_children; ++child) {
        if (!append_law(probabilities, size, taken, children)) return;
        double point = uniforms[child] * mass;
        int32_t pick = 0;
        while (pick + 1 < size && probabilities[pick + 1] > 0.0f && point >= probabilities[pick])
            point -= probabilities[pick++];
        children.picks.push_back(pick);
    }
}

inline void draw_children(DraftKind kind, const float* probabilities, const double* uniforms, int32_t size,
                          int32_t num_children, Children& children) {
    children.picks.clear();
    children.laws.clear();
    if (kind == DraftKind::deterministic) {
        take_top(size, num_children, children);
    } else if (kind == DraftKind::mixed) {
        draw_mixed(probabilities, uniforms, size, num_children, children);
    } else if (kind == DraftKind::independent) {
        draw_independent(probabilities, uniforms, size, num_children, children);
    } else {
        std::vector<char> taken(size, 0);
        race(probabilities, uniforms, size, num_children, taken, children);
    }
}

struct ShapeView {
    const int32_t* parents;  // [N], NO_PARENT at slot 0
    int32_t num_slots;
};

// True where parents[0] == -1 and 0 <= parents[i] < i.
inline bool shape_is_sound(const ShapeView& shape) {
    if (shape.num_slots < 1 || shape.parents[0] != -1) return false;
    for (int32_t slot = 1; slot < shape.num_slots; ++slot)
        if (shape.parents[slot] < 0 || shape.parents[slot] >= slot) return false;
    return true;
}

// Where the nodes of all rows go; `num_nodes` counts those written so far.
struct DraftSink {
    int32_t* token_ids;
    int32_t* parents;
    int32_t* depths;
    int32_t* ranks;
    int32_t* slots;
    int32_t* support_ids;  // [M, row_size], filled with NO_TOKEN by the caller
    float* law;            // [M, row_size], filled with 0 by the caller
    int64_t num_nodes;
};

struct DraftRequest {
    DraftKind kind;
    int32_t floor_order;
    const int32_t* window;  // newest first: the pending token is window[0]
    int32_t window_size;    // at least 1
    uint64_t key;           // step_key of this row and step
    uint64_t target_key;    // stream_key of the target's noise; this and what follows: where the kind is coupled
    uint64_t row;
    uint64_t position;  // absolute index of the row's first new token
};

class Drafter {
   public:
    Drafter(const Lookup& lookup, const ShapeView& shape) : lookup_(lookup), shape_(shape), slots_(shape.num_slots) {
        for (int32_t slot = 1; slot < shape.num_slots; ++slot) ++slots_[shape.parents[slot]].num_wanted;
    }

    // Appends one row's draft to the sink.
    void draft(const DraftRequest& request, DraftSink& sink) {
        first_ = sink.num_nodes;
        reset();
        emit(sink, request.window[0], -1, 0, 0, 0);
        slots_[0].node = 0;
        expand(request, 0, sink);
        for (int32_t slot = 1; slot < shape_.num_slots; ++slot) {
            Slot& parent = slots_[shape_.parents[slot]];
            if (parent.next_rank >= parent.num_drawn) continue;
            const int32_t rank = parent.next_rank++;
            slots_[slot].node = static_cast<int32_t>(sink.num_nodes - first_);
            emit_child(sink, parent, rank, slot);
            expand(request, slot, sink);
        }
    }

   private:
    struct Slot {
        int32_t num_wanted = 0;  // children in the shape
        int32_t node = -1;       // row-local, -1 where left out
        int32_t num_drawn = 0;
        int32_t next_rank = 0;
        size_t first_pick = 0;  // into picks_
        size_t first_law = 0;   // into laws_
        int32_t row_size = 0;
    };

    const Lookup& lookup_;
    ShapeView shape_;
    std::vector<Slot> slots_;
    std::vector<int32_t> picks_;
    std::vector<float> laws_;
    std::vector<double> uniforms_;
    Children children_;
    int64_t first_ = 0;

    void reset() {
        picks_.clear();
        laws_.clear();
        for (Slot& slot : slots_) {
            slot.node = -1;
            slot.num_drawn = slot.next_rank = 0;
        }
    }

    static void emit(DraftSink& sink, int32_t token_id, int32_t parent, int32_t depth, int32_t rank, int32_t slot) {
        const int64_t node = sink.num_nodes++;
        sink.token_ids[node] = token_id;
        sink.parents[node] = parent;
        sink.depths[node] = depth;
        sink.ranks[node] = rank;
        sink.slots[node] = slot;
    }

    void emit_child(DraftSink& sink, const Slot& parent, int32_t rank, int32_t slot) const {
        const int64_t node = sink.num_nodes, parent_node = first_ + parent.node;
        const int32_t token_id = sink.support_ids[parent_node * lookup_.row_size + picks_[parent.first_pick + rank]];
        emit(sink, token_id, parent.node, sink.depths[parent_node] + 1, rank, slot);
        const float* law = laws_.data() + parent.first_law + static_cast<size_t>(rank) * parent.row_size;
        std::copy(law, law + parent.row_size, sink.law + node * lookup_.row_size);
    }

    // Draws the children of a node that has just been emitted.
    void expand(const DraftRequest& request, int32_t slot_index, DraftSink& sink) {
        Slot& slot = slots_[slot_index];
        if (slot.num_wanted == 0) return;
        int32_t window[Lookup::MAX_ORDER];
        const int32_t available = fill_window(request, slot.node, sink, window);
        const Row row = lookup_.longest(window, available, request.floor_order);
        if (row.size == 0) return;
        if (request.kind == DraftKind::coupled)
            share_noise(request, row, sink.depths[first_ + slot.node]);
        else if (request.kind != DraftKind::deterministic)
            draw_noise(request, std::max(row.size, slot.num_wanted), slot_index);
        draw_children(request.kind, row.probabilities, uniforms_.data(), row.size, slot.num_wanted, children_);
        slot.num_drawn = static_cast<int32_t>(children_.picks.size());
        slot.row_size = row.size;
        slot.first_pick = picks_.size();
        slot.first_law = laws_.size();
        picks_.insert(picks_.end(), children_.picks.begin(), children_.picks.end());
        laws_.insert(laws_.end(), children_.laws.begin(), children_.laws.end());
        int32_t* support = sink.support_ids + (first_ + slot.node) * lookup_.row_size;
        std::copy(row.token_ids, row.token_ids + row.size, support);
    }

    void draw_noise(const DraftRequest& request, int32_t count, int32_t slot_index) {
        uniforms_.resize(count);
        for (int32_t place = 0; place < count; ++place) uniforms_[place] = uniform(request.key, slot_index, place);
    }

    // What the verifier draws the token after a node of this depth with: one number per token id.
    void share_noise(const DraftRequest& request, const Row& row, int32_t depth) {
        const uint64_t key = step_key(request.target_key, request.row, request.position + depth);
        uniforms_.resize(row.size);
        for (int32_t position = 0; position < row.size; ++position)
            uniforms_[position] = uniform(key, row.token_ids[position], 0);
    }

    // The node's path from newest to root, then the row's history (window[0] of the request is the root itself).
    int32_t fill_window(const DraftRequest& request, int32_t node, const DraftSink& sink, int32_t* window) const {
        const int32_t max_order = lookup_.max_order();
        int32_t available = 0;
        for (int32_t local = node; local > 0 && available < max_order; local = sink.parents[first_ + local])
            window[available++] = sink.token_ids[first_ + local];
        for (int32_t age = 0; age < request.window_size && available < max_order; ++age)
            window[available++] = request.window[age];
        return available;
    }
};

// Drafts all rows: shapes[b], requests[b].
inline void draft_rows(const Lookup& lookup, const std::vector<ShapeView>& shapes,
                       const std::vector<DraftRequest>& requests, DraftSink& sink) {
    const std::lock_guard<std::mutex> guard(lookup.mutex);
    for (size_t row = 0; row < requests.size(); ++row) {
        Drafter drafter(lookup, shapes[row]);
        drafter.draft(requests[row], sink);
    }
}

}  // namespace stand
