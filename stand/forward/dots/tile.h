// The products of a few rows of the weights with a few tokens. Included once per instruction set, inside the namespace
// that has its Lanes: a function's target cannot be a parameter of a template.

constexpr int32_t WIDTH = sizeof(Lanes) / sizeof(float);
constexpr int32_t PARTS = TERMS / WIDTH;

// Where a tile reads: its rows, and tokens that are `stride` apart.
template <class Number>
struct Operands {
    const Number* rows[ROWS];
    const Token* tokens;
    int64_t stride;
};

// sums [TOKENS, ROWS] of the terms `first`, `first` + STEP, ... below `end`, one load at a time; added to the sums so far
// if `goes_on`. The rows that come next are fetched meanwhile, while arithmetic leaves memory idle: twice, because a
// processor drops such wishes when it has many.
template <int32_t TOKENS, class Number>
STAND_TARGET [[gnu::noinline]] void add_terms(const Operands<Number>& operands, int64_t first, int64_t end,
                                              int64_t ahead, bool goes_on, Lanes* sums) {
    Lanes own[TOKENS][ROWS];
    STAND_UNROLL for (int32_t t = 0; t < TOKENS; ++t)
        STAND_UNROLL for (int32_t r = 0; r < ROWS; ++r) own[t][r] = Lanes{};
    if (goes_on)
        STAND_UNROLL for (int32_t t = 0; t < TOKENS; ++t)
            STAND_UNROLL for (int32_t r = 0; r < ROWS; ++r) own[t][r] = sums[t * ROWS + r];
    for (int64_t k = first; k < end; k += STEP) {
        Loaded weights[ROWS];
        STAND_UNROLL for (int32_t r = 0; r < ROWS; ++r) {
            weights[r] = load(operands.rows[r] + k);
            fetch(operands.rows[r] + k, ahead);
            if constexpr (PARTS == 1) fetch(operands.rows[r] + k, 2 * ahead);
        }
        STAND_UNROLL for (int32_t t = 0; t < TOKENS; ++t) {
            const Loaded values = load(operands.tokens + t * operands.stride + k);
            STAND_UNROLL for (int32_t r = 0; r < ROWS; ++r) multiply_add(weights[r], values, own[t][r]);
        }
    }
    STAND_UNROLL for (int32_t t = 0; t < TOKENS; ++t)
        STAND_UNROLL for (int32_t r = 0; r < ROWS; ++r) sums[t * ROWS + r] = own[t][r];
}

// add_terms<count>, where 1 <= count <= MOST, for every part: sums [PARTS, MOST_TOKENS, ROWS].
template <int32_t MOST, class Number>
STAND_TARGET void add_parts(int64_t count, const Operands<Number>& operands, int64_t end, int64_t ahead, bool goes_on,
                            Lanes* sums) {
    if constexpr (MOST > 1)
        if (count < MOST) return add_parts<MOST - 1>(count, operands, end, ahead, goes_on, sums);
    for (int32_t part = 0; part < PARTS; ++part)
        add_terms<MOST>(operands, part * WIDTH, end, ahead, goes_on, sums + part * MOST_TOKENS * ROWS);
}

// Dot products of ROWS rows from `row` on (of those that there are) with `count` tokens from `token` on. Whatever the
// tile, lane i of a product adds up the terms i, i + 16, i + 32, ... in this order (in pairs: 2 i and 2 i + 1, 2 i + 32 and
// 2 i + 33, ...), the last ones filled up with zeros; then lanes are added as halves: i and i + 8, i and i + 4, i and
// i + 2, i and i + 1.
template <class Number, class Result>
STAND_TARGET void multiply_tile(const Product<Number, Result, Token>& product, int64_t row, int64_t token,
                                int64_t count) {
    const int64_t depth = product.depth, rest = depth % STEP;
    Operands<Number> operands{{}, product.tokens + token * depth, depth};
    for (int32_t r = 0; r < ROWS; ++r)
        operands.rows[r] = product.weights + std::min(row + r, product.num_rows - 1) * depth;
    Lanes sums[PARTS * MOST_TOKENS * ROWS];
    add_parts<MOST_TOKENS>(count, operands, depth - rest, ROWS * depth, false, sums);
    if (rest > 0) {
        Token filled[(ROWS + MOST_TOKENS) * STEP] = {};
        Operands<Token> last{{}, filled + ROWS * STEP, STEP};
        for (int32_t r = 0; r < ROWS; ++r) {
            for (int64_t i = 0; i < rest; ++i) filled[r * STEP + i] = as_token(operands.rows[r][depth - rest + i]);
            last.rows[r] = filled + r * STEP;
        }
        for (int32_t t = 0; t < count; ++t)
            std::copy_n(operands.tokens + (t + 1) * depth - rest, rest, filled + (ROWS + t) * STEP);
        add_parts<MOST_TOKENS>(count, last, STEP, 0, true, sums);
    }
    for (int32_t t = 0; t < count; ++t) {
        float totals[ROWS];
        add_lanes(sums + t * ROWS, totals);
        Result* results = product.results + (token + t) * product.stride;
        for (int64_t r = row; r < std::min(row + ROWS, product.num_rows); ++r)
            narrow(product.bias == nullptr ? totals[r - row] : totals[r - row] + widened(product.bias[r]), results[r]);
    }
}

// Rows [first, end), all tokens; as few tiles as possible, of nearly equal size.
template <class Number, class Result>
STAND_TARGET void multiply_rows(const Product<Number, Result, Token>& product, int64_t first, int64_t end) {
    const int64_t num_tokens = product.num_tokens, num_tiles = (num_tokens + MOST_TOKENS - 1) / MOST_TOKENS;
    for (int64_t row = first; row < end; row += ROWS)
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t token = num_tokens * tile / num_tiles;
            multiply_tile(product, row, token, num_tokens * (tile + 1) / num_tiles - token);
        }
}
