// Rows of the weights with all tokens, tile by tile. Included once per instruction set, after tile.h.

constexpr int64_t CHUNK_TILES = most_tiles(SHAPE);

// A band's rows [begin, end) with the tokens of a chunk. sums [BAND / ROWS, CHUNK_TILES, TILE] are room.
template <class Number>
STAND_TARGET void multiply_band(const Product<Number, Token>& product, const Order& order, int64_t begin,
                                int64_t end, int64_t chunk, Lanes* sums) {
    const int64_t depth = product.depth, whole = order.whole, packed = packed_depth(depth, SHAPE);
    const int64_t first = order.first_tile(chunk), last = order.first_tile(chunk + 1);
    const int64_t room = order.block < whole ? CHUNK_TILES * TILE : 0;  // of ROWS rows, whose sums wait
    for (int64_t k = 0; k < std::max<int64_t>(whole, 1); k += order.block) {
        const int64_t terms = std::min(order.block, whole - k);
        for (int64_t row = begin; row < end; row += ROWS) {
            const Ahead ahead = chunk > 0 ? Ahead{} : order.ahead(depth, begin, end, row, k);
            Operands<Number> operands;
            for (int32_t r = 0; r < ROWS; ++r)
                operands.rows[r] = product.weights + std::min(row + r, product.num_rows - 1) * depth + k;
            for (int64_t tile = first; tile < last; ++tile) {
                const int64_t token = order.tiles.begin(tile), count = order.tiles.size(tile);
                Lanes* own = sums + (row - begin) / ROWS * room + (tile - first) * TILE;
                operands.tokens = product.tokens + token * packed + k * count;
                add_parts<MOST_TOKENS>(count, operands, terms, ahead, k > 0, own);
                if (k + terms < whole) continue;
                if (depth > whole) add_rest(count, operands.later(terms, count), depth - whole, own);
                write_tile(product, row, token, count, own);
            }
        }
    }
}

// Rows [first, end), all tokens.
template <class Number>
STAND_TARGET void multiply_rows(const Product<Number, Token>& product, int64_t first, int64_t end) {
    const Order order(product.num_tokens, product.depth, SHAPE, sizeof(Token));
    Lanes sums[BAND / ROWS * CHUNK_TILES * TILE];
    for (int64_t begin = first, last; begin < end; begin = last) {
        last = begin + std::min(order.band, end - begin);
        for (int64_t chunk = 0; chunk < order.num_chunks; ++chunk)
            multiply_band(product, order, begin, last, chunk, sums);
    }
}
