// Best-first growth of drafts by path probability, under one node budget for all rows.
//
// Growth is adapted: which node grows next, from which law, and when to stop follow from what is already revealed, and
// nothing revealed is dropped or re-ordered, so ratio verifiers stay lossless.

#pragma once

#include "candidates.h"
#include "frontier.h"
#include "thresholds.h"

namespace stand {

struct GrowthRequest {
    const int32_t* window;  // newest first: the pending token is window[0]
    int32_t window_size;    // at least 1
    int32_t max_depth;
    int32_t max_nodes;  // the root not counted
    uint8_t scope;
    uint64_t key;  // step_key of this row and step
};

struct GrowthSettings {
    DraftKind kind;
    int32_t budget;        // nodes of all rows together, roots not counted
    float floor;           // no node whose path is less probable
    int32_t width;         // children of a node; 1: chains
    int32_t num_candidates;  // that a law may cover, where children are sampled
    const float* rises = nullptr;  // [budget] share of itself by which the step's cost rises with each further node
    const OutsideLaws* outside = nullptr;  // of all rows
    const OutsideOdds* outside_odds = nullptr;
    const TokenMasks* masks = nullptr;  // of all rows
};

struct GrownNode {
    GrownNode() {}  // leaves unset what has no value here

    uint32_t token;
    int32_t row, local, parent, depth, rank;  // local: number within the row; parent: index into nodes, -1 at a root
    int32_t num_children = 0;
    int32_t outside = NOWHERE;  // node with its law from outside
    int32_t mask = NOWHERE;  // node with its mask
    float path;  // estimated probability that the node is accepted
    float product = 1.0f;  // of the estimates along the path, before calibration
    bool is_located = false;
    Contexts contexts;
    int32_t candidates = -1;  // their number, where children are sampled
    int32_t law = -1;  // where it lies, of a node that was sampled; it covers the parent's candidates
};

class Growth {
   public:
    std::vector<GrownNode> nodes;
    Candidates candidates;
    std::vector<int32_t> row_sizes;  // nodes per row, roots included

    DraftKind kind() const { return settings_.kind; }
    int32_t num_candidates() const { return settings_.num_candidates; }

    void grow(const BlendedLookup& lookup, const std::vector<GrowthRequest>& requests, const GrowthSettings& settings);

   private:
    // What the children of one node have in common.
    struct Family {
        int32_t parent;
        float product;         // of the parent
        const float* factors;  // of the children's depth
    };

    // Of the candidates' mass besides the chance that a draw of the target falls on the child: assumed share on which
    // the child is kept too.
    static constexpr float OVERLAP = 0.25f;
    static constexpr int32_t CROWD = 1024;  // rows

    const BlendedLookup* lookup_ = nullptr;
    const Calibration* calibration_ = nullptr;
    const std::vector<GrowthRequest>* requests_ = nullptr;
    GrowthSettings settings_{};
    Thresholds thresholds_;
    Frontier frontier_;
    std::vector<Contexts> roots_;  // two by row, which take turns
    std::vector<int32_t> oldest_;  // by row, the age of the token where locating its root begins
    EmptyLaws empty_laws_;
    Blender blender_;
    int32_t room_ = 0;  // nodes that may still be revealed
    float expected_ = 0.0f;  // tokens that the step yields by estimate: one per row and the nodes' path probabilities

    void push(float key, float product, uint32_t token, int32_t node, Action action) {
        if (key >= (action == Action::expand ? thresholds_.hopeless : std::max(thresholds_.hopeless, settings_.floor)))
            frontier_.push(key, product, token, node, action);
    }

    bool grows_together() const;
    void extend();
    const Item& pop();
    float bar() const;
    void locate_roots();
    void plant(int32_t row);
    void locate(GrownNode& node);
    Family family(int32_t parent) const;
    static Item child(const Family& family, uint32_t token, float product, Action action);
    void offer(const Family& family, uint32_t token, float chance, Action action);
    int32_t reveal(const Item& item, uint32_t token);
    void blend(const GrownNode& node, const Clock& clock, float least);
    void expand(int32_t index);
    void expand_sampled(int32_t index);
    void push_sample(int32_t index);
    bool take_candidates(int32_t index);
    int32_t sample_tail(const Family& children);
    int32_t sample(const Item& item);
};

inline void Growth::grow(const BlendedLookup& lookup, const std::vector<GrowthRequest>& requests,
                         const GrowthSettings& settings) {
    const std::lock_guard guard(lookup.mutex);
    lookup_ = &lookup;
    calibration_ = &lookup.calibrations[static_cast<int32_t>(settings.kind)];
    requests_ = &requests;
    settings_ = settings;
    expected_ = static_cast<float>(requests.size());
    const int32_t num_rows = static_cast<int32_t>(requests.size());
    nodes.clear();
    candidates.forget();
    nodes.reserve(settings.budget + num_rows);
    row_sizes.assign(num_rows, 0);
    empty_laws_.forget();
    locate_roots();
    if (grows_together()) {
        room_ = settings.budget;
        thresholds_ = Thresholds(settings.kind, num_rows, settings.budget, settings.floor);
        frontier_.clear(num_rows > CROWD);
        for (int32_t row = 0; row < num_rows; ++row) plant(row);
        extend();
        return;
    }
    for (int32_t row = 0; row < num_rows; ++row) {
        room_ = requests[row].max_nodes;
        thresholds_ = Thresholds(settings.kind, 1, room_, settings.floor);
        frontier_.clear(false);
        plant(row);
        extend();
    }
}

// Where the budget is enough for what every row may have, no row takes a node from another one, and each grows alone:
// queues are short. A node's price, where there is one, depends on all rows. Chains have short queues anyway, and side
// by side they wait for memory together.
inline bool Growth::grows_together() const {
    int64_t wanted = 0;
    for (const GrowthRequest& request : *requests_) wanted += request.max_nodes;
    return settings_.rises != nullptr || settings_.width == 1 || wanted > settings_.budget;
}

inline void Growth::extend() {
    while (room_ > 0 && !frontier_.empty()) {
        const Item& item = pop();
        if (row_sizes[nodes[item.node].row] > (*requests_)[nodes[item.node].row].max_nodes) continue;
        // A node pays while it adds a larger share to the tokens than to the cost. The children of a node are worth up
        // to 1 / patience of its item's key, so growth ends only where not even those pay.
        const float best = item.action == Action::expand ? item.key / thresholds_.patience : item.key;
        if (best < bar()) {
            if (item.key < thresholds_.patience * bar()) break;
            continue;
        }
        if (item.action == Action::expand)
            expand(item.node);
        else if (item.action == Action::sample)
            sample(item);
        else
            reveal(item, item.token);
    }
}

// The least path probability with which one more node pays.
inline float Growth::bar() const {
    return settings_.rises == nullptr ? 0.0f : expected_ * settings_.rises[settings_.budget - room_];
}

// The best item, valid until the next push. Where it is less likely than `least`, `least` falls.
inline const Item& Growth::pop() {
    const Item& item = frontier_.pop();
    while (item.key < thresholds_.least) thresholds_.least *= thresholds_.lowering;
    return item;
}

// All rows take each token together, so that they wait for memory together. Like BlendedLookup::locate.
inline void Growth::locate_roots() {
    const int32_t num_rows = static_cast<int32_t>(requests_->size());
    roots_.assign(2 * num_rows, Contexts());
    oldest_.resize(num_rows);
    for (int32_t row = 0; row < num_rows; ++row) {
        const GrowthRequest& request = (*requests_)[row];
        const auto* window = reinterpret_cast<const uint32_t*>(request.window);
        const Contexts* end = lookup_->cached_end(window, request.window_size);
        if (end != nullptr) roots_[2 * row + 1] = *end;
        oldest_[row] = end != nullptr ? 0 : request.window_size - 1;
    }
    for (int32_t age = lookup_->reach() - 1; age >= 0; --age)
        for (int32_t row = 0; row < num_rows; ++row) {
            if (age > oldest_[row]) continue;
            const uint32_t token = static_cast<uint32_t>((*requests_)[row].window[age]);
            lookup_->advance(roots_[2 * row + (age + 1) % 2], token, roots_[2 * row + age % 2]);
        }
}

inline void Growth::plant(int32_t row) {
    const GrowthRequest& request = (*requests_)[row];
    nodes.emplace_back();
    GrownNode& root = nodes.back();
    root.token = static_cast<uint32_t>(request.window[0]);
    root.row = row;
    root.local = row_sizes[row]++;
    root.parent = -1;
    root.depth = root.rank = 0;
    root.path = 1.0f;
    root.contexts = roots_[2 * row];
    if (settings_.outside != nullptr) root.outside = settings_.outside->root(row);
    if (settings_.masks != nullptr) root.mask = settings_.masks->tree.root(row);
    root.is_located = true;
    const int32_t index = static_cast<int32_t>(nodes.size()) - 1;
    if (std::min(request.max_depth, request.max_nodes) > 0 && room_ > 0) push(1.0f, 1.0f, 0, index, Action::expand);
}

inline void Growth::locate(GrownNode& node) {
    lookup_->advance(nodes[node.parent].contexts, node.token, node.contexts);
    node.is_located = true;
}

inline Growth::Family Growth::family(int32_t parent) const {
    const GrownNode& node = nodes[parent];
    return Family{parent, node.product, calibration_->at_depth(node.depth + 1)};
}

// The factors of two depths are learned apart, so a sure child may get a little more than its parent. A bound by the
// parent's chance would make estimates of deep paths too low.
inline Item Growth::child(const Family& family, uint32_t token, float product, Action action) {
    return Item{Calibration::corrected(product, family.factors), product, token, family.parent, action};
}

// A child that is kept with this chance where its parent is.
inline void Growth::offer(const Family& family, uint32_t token, float chance, Action action) {
    const float product = family.product * chance;
    push(Calibration::corrected(product, family.factors), product, token, family.parent, action);
}

// Adds a child. Its contexts are fetched now where its own children are likely to be wanted.
inline int32_t Growth::reveal(const Item& item, uint32_t token) {
    const int32_t index = static_cast<int32_t>(nodes.size()), parent = item.node;
    const float path = item.key;
    nodes.emplace_back();
    GrownNode& node = nodes.back();
    node.token = token;
    node.row = nodes[parent].row;
    node.local = row_sizes[node.row]++;
    node.parent = parent;
    node.depth = nodes[parent].depth + 1;
    node.rank = nodes[parent].num_children++;
    if (nodes[parent].outside != NOWHERE) node.outside = settings_.outside->child(nodes[parent].outside, token);
    if (nodes[parent].mask != NOWHERE) node.mask = settings_.masks->tree.child(nodes[parent].mask, token);
    node.path = path;
    node.product = item.product;
    --room_;
    expected_ += path;
    if (node.depth < (*requests_)[node.row].max_depth) {
        if (thresholds_.patience * path >= thresholds_.least) locate(node);
        push(thresholds_.patience * path, 0.0f, 0, index, Action::expand);
    }
    return index;
}

inline void Growth::blend(const GrownNode& node, const Clock& clock, float least) {
    const float cut = thresholds_.fineness * least;
    if (node.outside == NOWHERE) return blender_.blend(*lookup_, node.contexts, clock, least, cut, empty_laws_);
    const OutsideLaw law = settings_.outside->at(node.outside);
    blender_.blend(*lookup_, node.contexts, clock, least, cut, empty_laws_, &law, settings_.outside_odds);
}

inline void Growth::expand(int32_t index) {
    if (!nodes[index].is_located) locate(nodes[index]);
    const float wanted = settings_.width == 1 ? threshold::CHAIN_LEAST : 0.0f;
    const float least = std::max(wanted, thresholds_.least / nodes[index].path);
    const Clock clock{lookup_->clock.now, (*requests_)[nodes[index].row].scope};
    blend(nodes[index], clock, least);
    if (nodes[index].mask != NOWHERE) blender_.restrict(settings_.masks->at(nodes[index].mask));
    if (settings_.kind != DraftKind::deterministic) {
        expand_sampled(index);
        return;
    }
    const Family children = family(index);
    if (settings_.width == 1 && blender_.size > 0) {
        const Candidate first = blender_.first();
        offer(children, first.token, first.probability, Action::reveal);
    } else if (settings_.width < blender_.size) {
        for (const Candidate& candidate : blender_.best(settings_.width))
            offer(children, candidate.token, candidate.probability, Action::reveal);
    } else {
        for (int32_t i = 0; i < blender_.size; ++i)
            offer(children, blender_.tokens[i], blender_.probabilities[i], Action::reveal);
    }
}

// "sampled": all children are drawn, one by one. "mixed": where it is worth a node, one child is drawn from outside the
// tokens that are sure to be revealed and comes first; the others follow as they are.
inline void Growth::expand_sampled(int32_t index) {
    if (!take_candidates(index)) return;
    if (settings_.kind == DraftKind::sampled) {
        push_sample(index);
        return;
    }
    const Family children = family(index);
    const int32_t drawn = sample_tail(children), set = nodes[index].candidates;
    int32_t room = settings_.width - (drawn >= 0);
    for (int32_t position = 0; position < candidates.size(set) && room > 0; ++position)
        if (position != drawn) {
            const Candidates::Entry& entry = candidates.of(set)[position];
            offer(children, entry.token, entry.probability, Action::reveal);
            --room;
        }
}

// Fixes a node's candidates; false where there are none.
inline bool Growth::take_candidates(int32_t index) {
    const std::vector<Candidate>& best = blender_.best(settings_.num_candidates);
    if (best.empty()) return false;
    nodes[index].candidates = candidates.add(best, settings_.kind == DraftKind::sampled);
    return true;
}

// Draws one child from outside the sure candidates of a node, where this is worth a node, not below the floor and pays:
// what decides is known before the draw. Returns its position, or -1.
inline int32_t Growth::sample_tail(const Family& children) {
    const int32_t set = nodes[children.parent].candidates, size = candidates.size(set);
    Candidates::Entry* entries = candidates.of(set);
    const float path = nodes[children.parent].path, worth = 2.0f * thresholds_.least;
    int32_t num_sure = 0;
    float tail = 0.0f;
    const int32_t most_sure = std::min(size, settings_.width - 1);
    while (num_sure < most_sure && path * entries[num_sure].probability >= worth) ++num_sure;
    for (int32_t position = num_sure; position < size; ++position) tail += entries[position].probability;
    if (!(OVERLAP * path * tail >= worth)) return -1;
    const Item item = child(children, 0, children.product * OVERLAP * tail, Action::sample);
    if (item.key < std::max(settings_.floor, bar())) return -1;
    for (int32_t position = 0; position < num_sure; ++position) Candidates::take(entries[position]);
    return sample(item);
}

// The next draw competes with its estimated chance of acceptance.
inline void Growth::push_sample(int32_t index) {
    const int32_t set = nodes[index].candidates, size = candidates.size(set);
    const Candidates::Entry* entries = candidates.of(set);
    float mass = 0.0f, weight = 0.0f, shared = 0.0f;
    for (int32_t position = 0; position < size; ++position) {
        mass += entries[position].weight > 0.0f ? entries[position].probability : 0.0f;
        weight += entries[position].weight;
        shared += entries[position].weight * entries[position].probability;
    }
    if (weight > 0.0f) offer(family(index), 0, OVERLAP * mass + (1.0f - OVERLAP) * shared / weight, Action::sample);
}

// Draws one child of a node among its candidates not yet taken, which have positive mass. Returns its position.
inline int32_t Growth::sample(const Item& item) {
    const int32_t index = item.node, set = nodes[index].candidates, law = candidates.add_law(set);
    const int32_t winner = candidates.draw(set, (*requests_)[nodes[index].row].key, nodes[index].local);
    nodes[reveal(item, candidates.of(set)[winner].token)].law = law;
    if (settings_.kind == DraftKind::sampled && nodes[index].num_children < settings_.width) push_sample(index);
    return winner;
}

}  // namespace stand
