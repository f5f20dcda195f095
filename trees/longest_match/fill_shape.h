// Drafting: fills the slots of a shape with children drawn from the lookup tree, and records their laws.
//
// Drafts are adapted: each node's children depend on its own context and on fresh noise alone, and nothing drawn is
// dropped or re-ordered. So ratio verifiers stay lossless. Coupled drafts are the exception: they use the target's own
// noise, and the laws that they record only say how they would have been drawn from fresh noise.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../include/noise.h"
#include "../include/sampling.h"
#include "../include/window.h"
#include "table.h"

namespace stand {

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
struct ShapeArrays {
    int32_t* token_ids;
    int32_t* parents;
    int32_t* depths;
    int32_t* ranks;
    int32_t* slots;
    int32_t* support_ids;  // [M, num_candidates], filled with NO_TOKEN by the caller
    float* law;            // [M, num_candidates], filled with 0 by the caller
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

class ShapeFiller {
   public:
    ShapeFiller(const Lookup& lookup, const ShapeView& shape)
        : lookup_(lookup), shape_(shape), slots_(shape.num_slots) {
        for (int32_t slot = 1; slot < shape.num_slots; ++slot) ++slots_[shape.parents[slot]].num_wanted;
    }

    // Appends one row's draft to the sink.
    void fill(const DraftRequest& request, ShapeArrays& sink) {
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
        int32_t law_size = 0;
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

    static void emit(ShapeArrays& sink, int32_t token_id, int32_t parent, int32_t depth, int32_t rank, int32_t slot) {
        const int64_t node = sink.num_nodes++;
        sink.token_ids[node] = token_id;
        sink.parents[node] = parent;
        sink.depths[node] = depth;
        sink.ranks[node] = rank;
        sink.slots[node] = slot;
    }

    void emit_child(ShapeArrays& sink, const Slot& parent, int32_t rank, int32_t slot) const {
        const int64_t node = sink.num_nodes, parent_node = first_ + parent.node;
        const int32_t* support = sink.support_ids + parent_node * lookup_.num_candidates;
        const int32_t token_id = support[picks_[parent.first_pick + rank]];
        emit(sink, token_id, parent.node, sink.depths[parent_node] + 1, rank, slot);
        const float* law = laws_.data() + parent.first_law + static_cast<size_t>(rank) * parent.law_size;
        std::copy(law, law + parent.law_size, sink.law + node * lookup_.num_candidates);
    }

    // Draws the children of a node that has just been emitted.
    void expand(const DraftRequest& request, int32_t slot_index, ShapeArrays& sink) {
        Slot& slot = slots_[slot_index];
        if (slot.num_wanted == 0) return;
        int32_t window[Lookup::MAX_ORDER];
        const RowView path{sink.token_ids + first_, sink.parents + first_, request.window + 1, request.window_size - 1};
        const int32_t available = node_window(path, slot.node, lookup_.max_order(), window);
        const Law known = lookup_.longest(window, available, request.floor_order);
        if (known.size == 0) return;
        if (request.kind == DraftKind::coupled)
            share_noise(request, known, sink.depths[first_ + slot.node]);
        else if (request.kind != DraftKind::deterministic)
            draw_noise(request, std::max(known.size, slot.num_wanted), slot_index);
        draw_children(request.kind, known.probabilities, uniforms_.data(), known.size, slot.num_wanted, children_);
        slot.num_drawn = static_cast<int32_t>(children_.picks.size());
        slot.law_size = known.size;
        slot.first_pick = picks_.size();
        slot.first_law = laws_.size();
        picks_.insert(picks_.end(), children_.picks.begin(), children_.picks.end());
        laws_.insert(laws_.end(), children_.laws.begin(), children_.laws.end());
        int32_t* support = sink.support_ids + (first_ + slot.node) * lookup_.num_candidates;
        std::copy(known.token_ids, known.token_ids + known.size, support);
    }

    void draw_noise(const DraftRequest& request, int32_t count, int32_t slot_index) {
        uniforms_.resize(count);
        for (int32_t place = 0; place < count; ++place) uniforms_[place] = uniform(request.key, slot_index, place);
    }

    // The verifier's own numbers for the token after a node of this depth: one per token id.
    void share_noise(const DraftRequest& request, const Law& known, int32_t depth) {
        const uint64_t key = step_key(request.target_key, request.row, request.position + depth);
        uniforms_.resize(known.size);
        for (int32_t position = 0; position < known.size; ++position)
            uniforms_[position] = uniform(key, known.token_ids[position], 0);
    }
};

// Drafts all rows: shapes[b], requests[b].
inline void draft_rows(const Lookup& lookup, const std::vector<ShapeView>& shapes,
                       const std::vector<DraftRequest>& requests, ShapeArrays& sink) {
    const std::lock_guard<std::mutex> guard(lookup.mutex);
    for (size_t row = 0; row < requests.size(); ++row) {
        ShapeFiller filler(lookup, shapes[row]);
        filler.fill(requests[row], sink);
    }
}

}  // namespace stand
