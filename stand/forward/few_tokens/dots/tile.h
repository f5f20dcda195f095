// The products of a few rows of the weights with a few tokens. Included once per instruction set, inside the namespace
// that has its Lanes: a function's target cannot be a parameter of a template.

constexpr int32_t WIDTH = sizeof(Lanes) / sizeof(float);
constexpr int32_t PARTS = TERMS / WIDTH;
constexpr TileShape SHAPE{MOST_TOKENS, STEP};
constexpr int64_t TILE = PARTS * MOST_TOKENS * ROWS;  // sums

// Where a tile reads: its rows and its packed tokens, from the same term on.
template <class Number>
struct Operands {
    const Number* rows[ROWS];
    const Token* tokens;

    // So many terms later, with so many tokens.
    Operands later(int64_t terms, int64_t count) const {
        Operands other{{}, tokens + terms * count};
        for (int32_t r = 0; r < ROWS; ++r) other.rows[r] = rows[r] + terms;
        return other;
    }
};

// sums [TOKENS, ROWS] of the terms `first`, `first` + STEP, ... below `end`, one load at a time; added to the sums so
// far if `goes_on`. What comes next is fetched meanwhile, while arithmetic leaves memory idle.
template <int32_t TOKENS, class Number>
STAND_TARGET [[gnu::noinline]] void add_terms(const Operands<Number>& operands, int64_t first, int64_t end,
                                              const Ahead& ahead, bool goes_on, Lanes* sums) {
    Lanes own[TOKENS][ROWS];
    STAND_UNROLL for (int32_t t = 0; t < TOKENS; ++t)
        STAND_UNROLL for (int32_t r = 0; r < ROWS; ++r) own[t][r] = Lanes{};
    if (goes_on)
        STAND_UNROLL for (int32_t t = 0; t < TOKENS; ++t)
            STAND_UNROLL for (int32_t r = 0; r < ROWS; ++r) own[t][r] = sums[t * ROWS + r];
    const Token* tokens = operands.tokens + first;
    for (int64_t k = first; k < end; k += STEP, tokens += TOKENS * STEP) {
        Loaded weights[ROWS];
        STAND_UNROLL for (int32_t r = 0; r < ROWS; ++r) {
            weights[r] = load(operands.rows[r] + k);
            fetch(operands.rows[r] + k, ahead.near);
            if constexpr (PARTS == 1) fetch(operands.rows[r] + k, ahead.far);
        }
        STAND_UNROLL for (int32_t t = 0; t < TOKENS; ++t) {
            const Loaded values = load(tokens + t * STEP);
            STAND_UNROLL for (int32_t r = 0; r < ROWS; ++r) multiply_add(weights[r], values, own[t][r]);
        }
    }
    STAND_UNROLL for (int32_t t = 0; t < TOKENS; ++t)
        STAND_UNROLL for (int32_t r = 0; r < ROWS; ++r) sums[t * ROWS + r] = own[t][r];
}

// add_terms<count>, where 1 <= count <= MOST, for every part: sums [PARTS, MOST_TOKENS, ROWS].
template <int32_t MOST, class Number>
STAND_TARGET void add_parts(int64_t count, const Operands<Number>& operands, int64_t end, const Ahead& ahead,
                            bool goes_on, Lanes* sums) {
    if constexpr (MOST > 1)
        if (count < MOST) return add_parts<MOST - 1>(count, operands, end, ahead, goes_on, sums);
    for (int32_t part = 0; part < PARTS; ++part, sums += MOST_TOKENS * ROWS)
        add_terms<MOST>(operands, part * WIDTH, end, ahead, goes_on, sums);
}

// The terms behind the last whole step, `rest` of them, added to a tile's sums.
template <class Number>
STAND_TARGET void add_rest(int64_t count, const Operands<Number>& operands, int64_t rest, Lanes* sums) {
    Token filled[ROWS * STEP] = {};
    Operands<Token> last{{}, operands.tokens};
    for (int32_t r = 0; r < ROWS; ++r) {
        for (int64_t i = 0; i < rest; ++i) filled[r * STEP + i] = as_token(operands.rows[r][i]);
        last.rows[r] = filled + r * STEP;
    }
    add_parts<MOST_TOKENS>(count, last, STEP, {}, true, sums);
}

// The sums of a tile of ROWS rows from `row` on (of those that there are) and `count` tokens from `token` on ->
// results. Whatever the tile, lane i of a product has added up the terms i, i + 16, i + 32, ... in this order (in
// pairs: 2 i and 2 i + 1, 2 i + 32 and 2 i + 33, ...), the last ones filled up with zeros; now lanes are added as
// halves: i and i + 8, i and i + 4, i and i + 2, i and i + 1.
template <class Number>
STAND_TARGET void write_tile(const Product<Number, Token>& product, int64_t row, int64_t token, int64_t count,
                             const Lanes* sums) {
    const int64_t there = std::min<int64_t>(ROWS, product.num_rows - row);
    for (int64_t t = 0; t < count; ++t) {
        const int64_t place = (token + t) * product.stride + row;
        float totals[ROWS];
        add_lanes(sums + t * ROWS, totals);
        if (product.bias != nullptr)
            for (int64_t r = 0; r < there; ++r) totals[r] += widened(product.bias[row + r]);
        if (product.results == nullptr)
            for (int64_t r = 0; r < there; ++r) narrow(totals[r], product.narrow_results[place + r]);
        else if (there == ROWS)
            std::memcpy(product.results + place, totals, sizeof totals);
        else
            std::copy_n(totals, there, product.results + place);
    }
}
