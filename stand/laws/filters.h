// Laws from scores: temperature, top_k, top_p and min_p in the order and with the kept tokens of transformers' warpers,
// by a few passes over a row and a sort of the few tokens at the border, instead of a sort of the vocabulary.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <new>
#include <vector>

#include "../simd/threads.h"
#include "block_passes.h"

namespace stand {

struct Filters {
    float temperature;
    int64_t top_k;  // 0: off
    double top_p;   // 1: off
    float min_p;    // 0: off
};

// One row after the other; memory is kept in between.
class RowFilter {
   public:
    RowFilter(int64_t size, const Filters& filters, Vectors vectors)
        : size_(size),
          num_blocks_((size + BLOCK - 1) / BLOCK),
          filters_(filters),
          vectors_(vectors),
          cells_(num_blocks_ * LANES),
          weights_(num_blocks_ * BLOCK),
          buckets_(filters.top_p < 1.0 ? num_blocks_ * BLOCK : 0),
          tail_(BLOCK, LOWEST) {}

    // Writes the law of `scores` [size], and its `count` <= size best tokens: the most probable first, of equally
    // probable ones those with higher scores, then with lower ids. NaN throughout where no best score is finite.
    void apply(const float* scores, float* law, int64_t count, int32_t* best_ids, float* best_probabilities) {
        scores_ = scores;
        const int64_t rest = size_ % BLOCK;
        std::copy(scores + size_ - rest, scores + size_, tail_.begin());
        if (!scan()) {
            const float nothing = std::numeric_limits<float>::quiet_NaN();
            std::fill(law, law + size_, nothing);
            std::fill(best_ids, best_ids + count, 0);
            std::fill(best_probabilities, best_probabilities + count, nothing);
            return;
        }
        const bool has_top_k = 0 < filters_.top_k && filters_.top_k < size_;
        if (has_top_k && filters_.top_k <= static_cast<int64_t>(cells_.size()))
            filter_few(law);
        else
            filter_all(has_top_k ? score_of_rank(filters_.top_k) : LOWEST, law);
        if (count > 0) find_best(law, count, best_ids, best_probabilities);
    }

   private:
    struct Entry {
        float score;  // divided by the temperature
        int32_t token;
    };

    // The order in which top_p takes tokens out: of equal scores, the lowest ids first.
    static bool is_before(const Entry& a, const Entry& b) {
        return a.score != b.score ? a.score < b.score : a.token < b.token;
    }

    const int64_t size_, num_blocks_;
    const Filters filters_;
    const Vectors vectors_;
    const float* scores_ = nullptr;
    float best_ = LOWEST;
    std::vector<float> cells_, weights_;  // one block after the other
    std::vector<uint16_t> buckets_;
    std::vector<float> tail_;  // the last block, filled up
    std::vector<double> masses_;
    std::vector<float> ranked_;
    std::vector<int32_t> tokens_;
    std::vector<Entry> entries_;

    template <class Pass>
    Pass run(Pass pass) const {
        run_with(vectors_, pass);
        return pass;
    }

    const float* block(int64_t index) const {
        return (index + 1) * BLOCK <= size_ ? scores_ + index * BLOCK : tail_.data();
    }

    float score(int64_t token) const { return scores_[token] / filters_.temperature; }

    // Fills the cells; false where the best score is not finite, or one is NaN.
    bool scan() {
        int32_t has_nan = 0;
        for (int64_t i = 0; i < num_blocks_; ++i)
            has_nan |= run(Scan{block(i), filters_.temperature, cells_.data() + i * LANES}).has_nan;
        best_ = *std::max_element(cells_.begin(), cells_.end());
        return !has_nan && std::isfinite(best_);
    }

    // Entries of all tokens with a score of at least `lowest`, by id within a cell.
    void gather(float lowest) {
        entries_.clear();
        for (int64_t cell = 0; cell < static_cast<int64_t>(cells_.size()); ++cell) {
            if (!(cells_[cell] >= lowest)) continue;
            const int64_t first = cell / LANES * BLOCK + cell % LANES;
            for (int64_t token = first; token < std::min(first + BLOCK, size_); token += LANES)
                if (score(token) >= lowest) entries_.push_back({score(token), static_cast<int32_t>(token)});
        }
    }

    // At least `count` entries, with all that tie with the last: no more than `count` cells hold larger scores.
    void gather_best(int64_t count) {
        if (count > static_cast<int64_t>(cells_.size())) return gather(LOWEST);
        ranked_.resize(count);
        std::partial_sort_copy(cells_.begin(), cells_.end(), ranked_.begin(), ranked_.end(), std::greater<float>());
        gather(ranked_[count - 1]);
    }

    float score_of_rank(int64_t rank) {
        ranked_.resize(size_);
        for (int64_t token = 0; token < size_; ++token) ranked_[token] = score(token);
        std::nth_element(ranked_.begin(), ranked_.begin() + rank - 1, ranked_.end(), std::greater<float>());
        return ranked_[rank - 1];
    }

    // top_k with a small k: the other filters see the few tokens that it leaves.
    void filter_few(float* law) {
        gather_best(filters_.top_k);
        const auto last = entries_.end() - filters_.top_k;
        std::nth_element(entries_.begin(), last, entries_.end(), is_before);
        const float cut = last->score;
        const auto is_out = [cut](const Entry& entry) { return entry.score < cut || entry.score == LOWEST; };
        entries_.erase(std::remove_if(entries_.begin(), entries_.end(), is_out), entries_.end());
        double total = 0.0;
        for (const Entry& entry : entries_) total += exponential(best_ - entry.score);
        if (filters_.top_p < 1.0) drop_worst(0.0, (1.0 - filters_.top_p) * total, true);
        total = 0.0;
        for (const Entry& entry : entries_) total += weight_above_floor(entry);
        const float factor = static_cast<float>(1.0 / total);
        std::fill(law, law + size_, 0.0f);
        for (const Entry& entry : entries_) law[entry.token] = weight_above_floor(entry) * factor;
    }

    float weight_above_floor(const Entry& entry) const {
        const float weight = exponential(best_ - entry.score);
        return weight >= filters_.min_p ? weight : 0.0f;
    }

    // top_p: entries go, the worst first, while all that went weighs no more than the budget. The best one stays.
    void drop_worst(double gone, double budget, bool has_best) {
        std::sort(entries_.begin(), entries_.end(), is_before);
        const auto end = has_best ? entries_.end() - 1 : entries_.end();
        auto kept = entries_.begin();
        while (kept != end && (gone += exponential(best_ - kept->score)) <= budget) ++kept;
        entries_.erase(entries_.begin(), kept);
    }

    // The filters over all tokens with a score of at least `cut`.
    void filter_all(float cut, float* law) {
        const bool has_top_p = filters_.top_p < 1.0;
        const float floor = has_top_p ? 0.0f : filters_.min_p;
        double total = 0.0;
        for (int64_t i = 0; i < num_blocks_; ++i) {
            float* weights = weights_.data() + i * BLOCK;
            total += run(Weigh{filters_.temperature, best_, cut, floor, block(i), weights}).sum;
        }
        if (has_top_p) total = filter_top_p((1.0 - filters_.top_p) * total);
        run(Scale{weights_.data(), static_cast<float>(1.0 / total), size_, law});
    }

    // Clears the weights that top_p and min_p take out, and returns the sum of the others.
    double filter_top_p(double budget) {
        fill_buckets();
        int32_t border = LAST_BUCKET;
        double gone = 0.0;
        for (; border > 0 && gone + masses_[border] <= budget; --border) gone += masses_[border];
        gather_bucket(border);
        drop_worst(gone, budget, border == 0);
        double total = 0.0;
        for (int64_t i = 0; i < num_blocks_; ++i) {
            const uint16_t* buckets = buckets_.data() + i * BLOCK;
            float* weights = weights_.data() + i * BLOCK;
            total += run(Clear{static_cast<uint16_t>(border), filters_.min_p, buckets, weights}).sum;
        }
        for (const Entry& entry : entries_) total += weights_[entry.token] = weight_above_floor(entry);
        return total;
    }

    // Buckets as far from the best token as top_p can cut: V tokens beyond that weigh less than 1 - top_p of it.
    void fill_buckets() {
        const double reach = std::log(static_cast<double>(size_) / (1.0 - filters_.top_p)) + 1.0;
        const float buckets_per_unit = static_cast<float>(LAST_BUCKET / reach);
        masses_.assign(LAST_BUCKET + 1, 0.0);
        for (int64_t i = 0; i < num_blocks_; ++i) {
            uint16_t* buckets = buckets_.data() + i * BLOCK;
            const float* weights = weights_.data() + i * BLOCK;
            const FindBuckets found =
                run(FindBuckets{filters_.temperature, best_, buckets_per_unit, block(i), weights, buckets});
            if (found.num_far < BLOCK / 4) {
                for (int32_t place = 0; place < BLOCK; ++place) masses_[buckets[place]] += weights[place];
            } else {
                masses_[LAST_BUCKET] += found.far_sum;
                add_near(buckets, weights);
            }
        }
    }

    // Without what is far: one sum for nearly all tokens would wait for itself.
    void add_near(const uint16_t* buckets, const float* weights) {
        uint16_t near[BLOCK];
        int32_t num_near = 0;
        for (int32_t place = 0; place < BLOCK; ++place) {  // what is far leaves its place to the next: no branch
            near[num_near] = static_cast<uint16_t>(place);
            num_near += buckets[place] < LAST_BUCKET;
        }
        for (int32_t j = 0; j < num_near; ++j) masses_[buckets[near[j]]] += weights[near[j]];
    }

    // Entries of a bucket's tokens that weigh anything.
    void gather_bucket(int32_t bucket) {
        tokens_.clear();
        for (int64_t i = 0; i < num_blocks_; ++i) {
            const uint16_t* buckets = buckets_.data() + i * BLOCK;
            run(Collect{buckets, static_cast<uint16_t>(bucket), static_cast<int32_t>(i * BLOCK), tokens_});
        }
        entries_.clear();
        for (const int32_t token : tokens_)
            if (weights_[token] > 0.0f) entries_.push_back({score(token), token});
    }

    void find_best(const float* law, int64_t count, int32_t* best_ids, float* best_probabilities) {
        gather_best(count);
        const auto is_better = [law](const Entry& a, const Entry& b) {
            if (law[a.token] != law[b.token]) return law[a.token] > law[b.token];
            return a.score != b.score ? a.score > b.score : a.token < b.token;
        };
        std::partial_sort(entries_.begin(), entries_.begin() + count, entries_.end(), is_better);
        for (int64_t i = 0; i < count; ++i) {
            best_ids[i] = entries_[i].token;
            best_probabilities[i] = law[entries_[i].token];
        }
    }
};

// Rows that follow on each other, in all arrays. Threads take them one by one; a row's results are its own.
struct FilterRows {
    const float* scores;
    int64_t num_rows, size;
    Filters filters;
    Vectors vectors;
    float* laws;
    int64_t count;
    int32_t* best_ids;
    float* best_probabilities;
    std::atomic<int64_t> next{0};
    std::atomic<bool> has_failed{false};

    void run() noexcept {
        try {
            int64_t row = next.fetch_add(1);
            if (row >= num_rows) return;
            for (RowFilter filter(size, filters, vectors); row < num_rows; row = next.fetch_add(1))
                filter.apply(scores + row * size, laws + row * size, count, best_ids + row * count,
                             best_probabilities + row * count);
        } catch (...) {  // memory: nothing may leave a thread
            has_failed = true;
        }
    }
};

// By `num_threads` threads at once, where that many numbers are worth the start; null `in_threads`: by the calling one.
inline void filter_rows(FilterRows& rows, int num_threads, RunInThreads in_threads) {
    constexpr int64_t LEAST_NUMBERS = 1 << 15;
    const bool is_shared = rows.num_rows > 1 && rows.num_rows * rows.size >= LEAST_NUMBERS;
    if (in_threads == nullptr || num_threads < 2 || !is_shared)
        rows.run();
    else
        run_in_threads(rows, num_threads, in_threads);
    if (rows.has_failed) throw std::bad_alloc();
}

}  // namespace stand
