// Attention of one row's tokens over one head of keys. Included once per instruction set, after tile.h.

// sums [QUERIES, PIECES * WIDTH], `size` apart, += weights [QUERIES, count], `stride` apart, times values [count,
// size], value by value.
template <int32_t QUERIES, int32_t PIECES, class Number>
STAND_TARGET [[gnu::noinline]] void add_values(const float* weights, int64_t stride, const Number* values,
                                               int64_t count, int64_t size, float* sums) {
    Lanes own[QUERIES][PIECES];
    STAND_UNROLL for (int32_t q = 0; q < QUERIES; ++q)
        STAND_UNROLL for (int32_t p = 0; p < PIECES; ++p) own[q][p] = load(sums + q * size + p * WIDTH);
    for (int64_t k = 0; k < count; ++k) {
        Lanes value[PIECES];
        STAND_UNROLL for (int32_t p = 0; p < PIECES; ++p) value[p] = load(values + k * size + p * WIDTH);
        STAND_UNROLL for (int32_t q = 0; q < QUERIES; ++q) {
            const Lanes weight = spread(weights[q * stride + k]);
            STAND_UNROLL for (int32_t p = 0; p < PIECES; ++p) multiply_add(weight, value[p], own[q][p]);
        }
    }
    STAND_UNROLL for (int32_t q = 0; q < QUERIES; ++q)
        STAND_UNROLL for (int32_t p = 0; p < PIECES; ++p) store(own[q][p], sums + q * size + p * WIDTH);
}

// add_values for 1 <= queries <= MOST queries, all of `size`.
template <int32_t MOST, class Number>
STAND_TARGET void add_all_values(int64_t queries, const float* weights, int64_t stride, const Number* values,
                                 int64_t count, int64_t size, float* sums) {
    if constexpr (MOST > 1)
        if (queries < MOST) return add_all_values<MOST - 1>(queries, weights, stride, values, count, size, sums);
    int64_t first = 0;
    for (; first + ROWS * WIDTH <= size; first += ROWS * WIDTH)
        add_values<MOST, ROWS>(weights, stride, values + first, count, size, sums + first);
    for (; first < size; first += WIDTH)
        add_values<MOST, 1>(weights, stride, values + first, count, size, sums + first);
}

template <class Number>
STAND_TARGET void mix_values(int64_t queries, const float* weights, int64_t stride, const Number* values,
                             int64_t count, int64_t size, float* sums) {
    for (int64_t q = 0; q < queries; q += MOST_TOKENS)
        add_all_values<MOST_TOKENS>(std::min<int64_t>(queries - q, MOST_TOKENS), weights + q * stride, stride, values,
                                    count, size, sums + q * size);
}

// scores [count] -> exp(score - best), count a multiple of TERMS; their sum, lane by lane and then by halves. NaN where
// a score is NaN.
STAND_TARGET inline float weigh(float* scores, int64_t count) {
    float best[TERMS], total[TERMS] = {};
    int32_t is_broken = 0;
    std::copy_n(scores, TERMS, best);
    for (int64_t k = 0; k < count; k += TERMS)
        for (int32_t i = 0; i < TERMS; ++i) best[i] = best[i] > scores[k + i] ? best[i] : scores[k + i];
    for (int64_t k = 0; k < count; k += TERMS)
        for (int32_t i = 0; i < TERMS; ++i) is_broken |= scores[k + i] != scores[k + i];
    const float highest = is_broken ? std::numeric_limits<float>::quiet_NaN() : *std::max_element(best, best + TERMS);
    for (int64_t k = 0; k < count; k += TERMS)
        for (int32_t i = 0; i < TERMS; ++i) {
            scores[k + i] = exponential(highest - scores[k + i]);
            total[i] += scores[k + i];
        }
    for (int32_t half = TERMS / 2; half > 0; half /= 2)
        for (int32_t i = 0; i < half; ++i) total[i] += total[i + half];
    return total[0];
}

// The queries of tokens [first, end) of row `row` and of key head `head`. Each token looks at the committed keys and,
// as if they followed those, at its path's, so it makes no difference to a bit what else is drafted.
template <class Number>
STAND_TARGET void attend_tokens(const Attention& step, int64_t row, int64_t head, int64_t first, int64_t end,
                                float* scratch) {
    const int64_t size = step.size, groups = step.groups, queries = (end - first) * groups;
    const int64_t length = step.lengths[row], tail = step.tails[row];
    int64_t longest = 0, from = length;  // the first key that one of them sees, or one that nobody sees
    for (int64_t t = first; t < end; ++t) {
        longest = std::max(longest, step.path_length(t));
        from = std::min(from, step.first_seen(row, t));
    }
    from -= from % TERMS;
    const int64_t common = length - from, stride = (common + longest + TERMS - 1) / TERMS * TERMS;
    float* const packed = scratch;
    float* const sums = packed + queries * size;
    float* const tail_scores = sums + queries * size;
    float* const totals = tail_scores + queries * tail;
    float* const scores = totals + queries;
    const int64_t place = row * step.row_stride + head * step.head_stride;
    const Number* const keys = static_cast<const Number*>(step.keys) + place;
    const Number* const values = static_cast<const Number*>(step.values) + place;

    for (int64_t t = first, q = 0; t < end; ++t)
        for (int64_t g = 0; g < groups; ++g, ++q) {
            const Number* query = static_cast<const Number*>(step.queries) + t * step.query_stride +
                                  (head * groups + g) * step.query_head_stride;
            for (int64_t d = 0; d < size; d += TERMS)
                for (int32_t i = 0; i < TERMS; ++i) sums[q * size + d + i] = widened(query[d + i]) * step.scale;
        }
    pack_tokens(sums, queries, size, SHAPE, packed);
    const auto score = [&](const Number* first, int64_t count, float* results, int64_t apart) {
        multiply_rows(Product<Number>{packed, first, nullptr, results, nullptr, queries, count, size, apart}, 0, count);
    };
    score(keys + from * size, common, scores, stride);
    score(keys + length * size, tail, tail_scores, tail);
    std::fill_n(sums, queries * size, 0.0f);

    for (int64_t t = first, q = 0; t < end; ++t) {
        const int32_t* path = step.paths + step.path_offsets[t];
        const int64_t unseen = step.first_seen(row, t) - from, seen = common + step.path_length(t);
        for (int64_t g = 0; g < groups; ++g, ++q) {
            float* own = scores + q * stride;
            for (int64_t k = common; k < seen; ++k) own[k] = tail_scores[q * tail + path[k - common]];
            std::fill(own, own + unseen, -std::numeric_limits<float>::infinity());
            std::fill(own + seen, own + stride, -std::numeric_limits<float>::infinity());
            totals[q] = weigh(own, stride);
        }
    }
    mix_values(queries, scores, stride, values + from * size, common, size, sums);
    for (int64_t t = first, q = 0; t < end; ++t, q += groups)
        for (int64_t k = 0; k < step.path_length(t); ++k)
            mix_values(groups, scores + q * stride + common + k, stride,
                       values + (length + step.paths[step.path_offsets[t] + k]) * size, 1, size, sums + q * size);
    for (int64_t t = first, q = 0; t < end; ++t)
        for (int64_t g = 0; g < groups; ++g, ++q) {
            Number* mixed = static_cast<Number*>(step.mixed) + (t * step.num_heads() + head * groups + g) * size;
            for (int64_t d = 0; d < size; d += TERMS)
                for (int32_t i = 0; i < TERMS; ++i) narrow(sums[q * size + d + i] / totals[q], mixed[d + i]);
        }
}
