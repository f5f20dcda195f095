// Best-first growth of drafts by path probability, under one node budget for all rows.
//
// Growth is adapted: which node grows next, from which law, and when to stop follow from what is already revealed, and
// nothing revealed is dropped or re-ordered, so ratio verifiers stay lossless.

#pragma once

#include "blender.h"
#include "../longest_match/fill_shape.h"
#include "frontier.h"

namespace stand {

struct GrowthRequest {
    const int32_t* window;  // newest first: the pending token is window[0]
    int32_t window_size;    // at least 1
    int32_t max_depth;
    uint8_t scope;
    uint64_t key;  // step_key of this row and step
};

// The window of a node: its path from newest to root, then the row's own window. Returns its length.
inline int32_t path_window(const GrowthRequest& row, const int32_t* token_ids, const int32_t* parents, int32_t node,
                           int32_t limit, uint32_t* window) {
    int32_t available = 0;
    for (; node >= 0 && available < limit; node = parents[node])
        window[available++] = static_cast<uint32_t>(token_ids[node]);
    for (int32_t age = 0; age < row.window_size && available < limit; ++age)
        window[available++] = static_cast<uint32_t>(row.window[age]);
    return available;
}

struct GrowthSettings {
    DraftKind kind;
    int32_t budget;        // nodes of all rows together, roots not counted
    float floor;           // no node whose path is less probable
    int32_t support_size;  // candidates that a law may cover, where children are sampled
    const float* rises = nullptr;  // [budget] share of itself by which the step's cost rises with each further node
};

struct GrownNode {
    GrownNode() {}  // leaves unset what has no value here

    uint32_t token;
    int32_t row, local, parent, depth, rank;  // local: number within the row; parent: index into nodes, -1 at a root
    int32_t num_children = 0;
    float path;  // estimated probability that the node is accepted
    float product = 1.0f;  // of the estimates along the path, before calibration
    bool is_located = false;
    Contexts contexts;
    int32_t support = -1;  // into supports, where children are sampled
    int32_t law = -1;      // into laws, where the node was sampled; its law covers the parent's support
};

// The candidates of a node whose children are sampled, in descending probability.
struct Support {
    std::vector<Candidate> candidates;
    std::vector<double> uniforms;
    std::vector<char> taken;
};

// Where the nodes of all rows go: row b's from offsets[b] on.
struct GrowthSink {
    const int32_t* offsets;
    int32_t* token_ids;
    int32_t* parents;  // row-local
    int32_t* depths;
    int32_t* ranks;
    float* path_probabilities;
    float* path_estimates;  // before calibration
    int32_t* support_ids;  // [M, width], filled with NO_TOKEN by the caller
    float* law;            // [M, width], filled with 0 by the caller
    int32_t width;         // Growth::width()
};

class Growth {
   public:
    std::vector<GrownNode> nodes;
    std::vector<Support> supports;
    std::vector<std::vector<float>> laws;
    std::vector<int32_t> row_sizes;  // nodes per row, roots included

    void grow(const ContextStore& store, const std::vector<GrowthRequest>& requests, const GrowthSettings& settings);

    // Candidates that the widest law covers.
    int32_t width() const;
    void write(const GrowthSink& sink) const;

   private:
    // What the children of one node have in common.
    struct Family {
        int32_t parent;
        float product;         // of the parent
        const float* factors;  // of the children's depth
    };

    // Of the sampled child's law, the share that the target's law is assumed to overlap besides its collision mass.
    static constexpr float OVERLAP = 0.25f;

    const ContextStore* store_ = nullptr;
    const Calibration* calibration_ = nullptr;
    const std::vector<GrowthRequest>* requests_ = nullptr;
    GrowthSettings settings_{};
    float least_ = 0.0f;     // what is less likely is not looked for yet
    float lowering_ = 0.0f;  // factor of `least_` when better items are used up
    float fineness_ = 0.0f;  // share of `least_` below which single entries are left out
    float hopeless_ = 0.0f;  // items below are forgotten
    // A node's children are looked for when no better node is left than a child with this share of its probability: one
    // that is followed by something surer is a little late, but half of all nodes are never looked at in vain.
    float patience_ = 0.0f;
    Frontier frontier_;
    std::vector<Contexts> roots_;  // two by row, which take turns
    std::vector<int32_t> oldest_;  // by row, the age of the token where locating its root begins
    EmptyLaws empty_laws_;
    Blender blender_;
    int32_t room_ = 0;  // nodes that may still be revealed
    float expected_ = 0.0f;  // tokens that the step yields by estimate: one per row and the nodes' path probabilities

    void push(float key, float product, uint32_t token, int32_t node, Step step) {
        if (key >= (step == Step::expand ? hopeless_ : std::max(hopeless_, settings_.floor)))
            frontier_.push(key, product, token, node, step);
    }

    void set_thresholds();
    const Item& pop();
    float bar() const;
    void locate_roots();
    void plant(int32_t row);
    void locate(GrownNode& node);
    Family family(int32_t parent) const;
    static Item child(const Family& family, uint32_t token, float product, Step step);
    void offer(const Family& family, uint32_t token, float chance, Step step);
    int32_t reveal(const Item& item, uint32_t token);
    void expand(int32_t index);
    void expand_sampled(int32_t index);
    void push_sample(int32_t index);
    size_t sample(const Item& item);
    void write_law(const GrowthSink& sink, const GrownNode& node) const;
};

inline void Growth::grow(const ContextStore& store, const std::vector<GrowthRequest>& requests,
                         const GrowthSettings& settings) {
    store_ = &store;
    calibration_ = &store.calibrations[static_cast<int32_t>(settings.kind)];
    requests_ = &requests;
    settings_ = settings;
    room_ = settings.budget;
    expected_ = static_cast<float>(requests.size());
    const int32_t num_rows = static_cast<int32_t>(requests.size());
    set_thresholds();
    nodes.clear();
    supports.clear();
    laws.clear();
    frontier_.clear();
    nodes.reserve(settings.budget + num_rows);
    row_sizes.assign(num_rows, 0);
    empty_laws_.forget();
    locate_roots();
    for (int32_t row = 0; row < num_rows; ++row) plant(row);
    while (room_ > 0 && !frontier_.empty()) {
        const Item& item = pop();
        // A node pays while it adds a larger share to the tokens than to the cost. What may lie below a node is worth
        // up to 1 / patience_ of its key, so growth ends only where not even that pays.
        const float best = item.step == Step::expand ? item.key / patience_ : item.key;
        if (best < bar()) {
            if (item.key < patience_ * bar()) break;
            continue;
        }
        if (item.step == Step::expand)
            expand(item.node);
        else if (item.step == Step::sample)
            sample(item);
        else
            reveal(item, item.token);
    }
}

// What the last place is worth varies from step to step for one row, but little for many together, and there some row
// always has a node that is nearly as good: so less is looked for. Not where children are sampled, as their laws cover
// only what was found. Below a floor evidence still counts: it adds up.
inline void Growth::set_thresholds() {
    const float num_rows = static_cast<float>(requests_->size());
    const float company = settings_.kind == DraftKind::deterministic ? 1.0f - 1.0f / num_rows : 0.0f;
    const float price = 0.4f * num_rows / std::max(1, settings_.budget);  // of the last place, roughly
    least_ = std::max(0.2f * settings_.floor, std::min(0.03f + 0.02f * company, price));
    lowering_ = 0.2f + 0.2f * company;
    fineness_ = 0.1f + 0.05f * company;
    hopeless_ = 0.1f * least_;
    patience_ = 0.5f - 0.1f * company;
}

// The least path probability with which one more node pays.
inline float Growth::bar() const {
    return settings_.rises == nullptr ? 0.0f : expected_ * settings_.rises[settings_.budget - room_];
}

// The best item, there until the next push. Where it is less likely than what was looked for, more evidence counts from
// here on.
inline const Item& Growth::pop() {
    const Item& item = frontier_.pop();
    while (item.key < least_) least_ *= lowering_;
    return item;
}

// All rows take each token together, so that they wait for memory together. Like ContextStore::locate.
inline void Growth::locate_roots() {
    const int32_t num_rows = static_cast<int32_t>(requests_->size());
    roots_.assign(2 * num_rows, Contexts());
    oldest_.resize(num_rows);
    for (int32_t row = 0; row < num_rows; ++row) {
        const GrowthRequest& request = (*requests_)[row];
        const auto* window = reinterpret_cast<const uint32_t*>(request.window);
        const Contexts* end = store_->recent_end(window, request.window_size);
        if (end != nullptr) roots_[2 * row + 1] = *end;
        oldest_[row] = end != nullptr ? 0 : request.window_size - 1;
    }
    for (int32_t age = store_->reach() - 1; age >= 0; --age)
        for (int32_t row = 0; row < num_rows; ++row) {
            if (age > oldest_[row]) continue;
            const uint32_t token = static_cast<uint32_t>((*requests_)[row].window[age]);
            store_->advance(roots_[2 * row + (age + 1) % 2], token, roots_[2 * row + age % 2]);
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
    root.is_located = true;
    const int32_t index = static_cast<int32_t>(nodes.size()) - 1;
    if (request.max_depth > 0 && room_ > 0) push(1.0f, 1.0f, 0, index, Step::expand);
}

inline void Growth::locate(GrownNode& node) {
    store_->advance(nodes[node.parent].contexts, node.token, node.contexts);
    node.is_located = true;
}

inline Growth::Family Growth::family(int32_t parent) const {
    const GrownNode& node = nodes[parent];
    return Family{parent, node.product, calibration_->at_depth(node.depth + 1)};
}

// The factors of two depths are learned apart, so that a sure child may be given a little more than its parent: bound
// by the parent's chance, deep paths would come true more often than they say.
inline Item Growth::child(const Family& family, uint32_t token, float product, Step step) {
    return Item{Calibration::corrected(product, family.factors), product, token, family.parent, step};
}

// A child that is kept with this chance where its parent is.
inline void Growth::offer(const Family& family, uint32_t token, float chance, Step step) {
    const float product = family.product * chance;
    push(Calibration::corrected(product, family.factors), product, token, family.parent, step);
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
    node.path = path;
    node.product = item.product;
    --room_;
    expected_ += path;
    if (node.depth < (*requests_)[node.row].max_depth) {
        if (patience_ * path >= least_) locate(node);
        push(patience_ * path, 0.0f, 0, index, Step::expand);
    }
    return index;
}

inline void Growth::expand(int32_t index) {
    if (!nodes[index].is_located) locate(nodes[index]);
    const float least = least_ / nodes[index].path;
    const Clock clock{store_->clock.now, (*requests_)[nodes[index].row].scope};
    blender_.blend(*store_, nodes[index].contexts, clock, least, fineness_ * least, empty_laws_);
    if (settings_.kind != DraftKind::deterministic) {
        expand_sampled(index);
        return;
    }
    const Family children = family(index);
    for (int32_t i = 0; i < blender_.size; ++i)
        offer(children, blender_.tokens[i], blender_.probabilities[i], Step::reveal);
}

// "sampled": all children are drawn, one by one. "mixed": where it is worth a node, one child is drawn from outside the
// tokens that are sure to be revealed and stands first; the others follow as they are.
inline void Growth::expand_sampled(int32_t index) {
    const std::vector<Candidate> candidates = blender_.best(settings_.support_size);
    if (candidates.empty()) return;
    GrownNode& node = nodes[index];
    const float path = node.path;
    node.support = static_cast<int32_t>(supports.size());
    supports.push_back(Support{candidates, {}, std::vector<char>(candidates.size(), 0)});
    Support& support = supports.back();
    for (size_t position = 0; position < candidates.size(); ++position)
        support.uniforms.push_back(uniform((*requests_)[node.row].key, node.local, position));
    if (settings_.kind == DraftKind::sampled) {
        push_sample(index);
        return;
    }
    size_t num_sure = 0;
    float tail = 0.0f;
    while (num_sure < candidates.size() && path * candidates[num_sure].probability >= 2.0f * least_) ++num_sure;
    for (size_t position = num_sure; position < candidates.size(); ++position) tail += candidates[position].probability;
    size_t drawn = candidates.size();
    const Family children = family(index);
    if (OVERLAP * path * tail >= 2.0f * least_) {
        std::fill(support.taken.begin(), support.taken.begin() + num_sure, char(1));
        drawn = sample(child(children, 0, children.product * OVERLAP * tail, Step::sample));
    }
    for (size_t position = 0; position < candidates.size(); ++position)
        if (position != drawn)
            offer(children, candidates[position].token, candidates[position].probability, Step::reveal);
}

// The next draw competes with its estimated chance of acceptance.
inline void Growth::push_sample(int32_t index) {
    const Support& support = supports[nodes[index].support];
    float mass = 0.0f, squares = 0.0f;
    for (size_t position = 0; position < support.candidates.size(); ++position) {
        if (support.taken[position]) continue;
        const float probability = support.candidates[position].probability;
        mass += probability;
        squares += probability * probability;
    }
    if (!(mass > 0.0f)) return;
    offer(family(index), 0, OVERLAP * mass + (1.0f - OVERLAP) * squares / mass, Step::sample);
}

// Draws one child of a node without replacement: the first arrival of the race among candidates not yet taken. Returns
// its position in the support.
inline size_t Growth::sample(const Item& item) {
    const int32_t index = item.node;
    Support& support = supports[nodes[index].support];
    const size_t size = support.candidates.size();
    double mass = 0.0, earliest = 0.0;
    size_t winner = size;
    for (size_t position = 0; position < size; ++position) {
        if (support.taken[position]) continue;
        mass += support.candidates[position].probability;
        const double arrival = -std::log(support.uniforms[position]) / support.candidates[position].probability;
        if (winner == size || arrival < earliest) {
            earliest = arrival;
            winner = position;
        }
    }
    std::vector<float> law(size, 0.0f);
    for (size_t position = 0; position < size; ++position)
        if (!support.taken[position])
            law[position] = static_cast<float>(support.candidates[position].probability / mass);
    support.taken[winner] = 1;
    const uint32_t token = support.candidates[winner].token;
    const int32_t child = reveal(item, token);
    nodes[child].law = static_cast<int32_t>(laws.size());
    laws.push_back(std::move(law));
    if (settings_.kind == DraftKind::sampled) push_sample(index);
    return winner;
}

inline int32_t Growth::width() const {
    if (settings_.kind != DraftKind::deterministic) return settings_.support_size;
    int32_t most = 1;
    for (const GrownNode& node : nodes) most = std::max(most, node.num_children);
    return most;
}

inline void Growth::write(const GrowthSink& sink) const {
    for (const GrownNode& node : nodes) {
        const int32_t place = sink.offsets[node.row] + node.local;
        sink.token_ids[place] = static_cast<int32_t>(node.token);
        sink.parents[place] = node.parent < 0 ? -1 : nodes[node.parent].local;
        sink.depths[place] = node.depth;
        sink.ranks[place] = node.rank;
        sink.path_probabilities[place] = node.path;
        sink.path_estimates[place] = node.product;
        if (node.support >= 0) {
            int32_t* support = sink.support_ids + static_cast<int64_t>(place) * sink.width;
            for (const Candidate& candidate : supports[node.support].candidates)
                *support++ = static_cast<int32_t>(candidate.token);
        }
        if (node.parent >= 0) write_law(sink, node);
    }
}

// A sampled child's own law, or a one-hot; deterministic drafts have their children as the support.
inline void Growth::write_law(const GrowthSink& sink, const GrownNode& node) const {
    const GrownNode& parent = nodes[node.parent];
    float* law = sink.law + static_cast<int64_t>(sink.offsets[node.row] + node.local) * sink.width;
    if (node.law >= 0) {
        std::copy(laws[node.law].begin(), laws[node.law].end(), law);
    } else if (parent.support >= 0) {
        const std::vector<Candidate>& candidates = supports[parent.support].candidates;
        size_t position = 0;
        while (candidates[position].token != node.token) ++position;
        law[position] = 1.0f;
    } else {
        const int64_t place = sink.offsets[node.row] + parent.local;
        sink.support_ids[place * sink.width + node.rank] = static_cast<int32_t>(node.token);
        law[node.rank] = 1.0f;
    }
}

}  // namespace stand
