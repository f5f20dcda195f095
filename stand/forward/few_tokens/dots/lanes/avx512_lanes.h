// Sixteen lanes in one register of AVX-512: 4 rows by 6 tokens fill 24 of the 32 registers.

using Lanes = __m512;
constexpr int32_t MOST_TOKENS = 6;

// [a, b] with half as many lanes each: the sums of their halves.
STAND_TARGET STAND_INLINE Lanes halves(Lanes a, Lanes b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
}

// [a, b, c, d] with four lanes each, of operands with eight lanes each.
STAND_TARGET STAND_INLINE Lanes quarters(Lanes a_b, Lanes c_d) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a_b, c_d, 0x88), _mm512_shuffle_f32x4(a_b, c_d, 0xDD));
}

STAND_TARGET STAND_INLINE void add_lanes(const Lanes* sums, float* totals) {
    Lanes all = quarters(halves(sums[0], sums[1]), halves(sums[2], sums[3]));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4E));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xB1));
    _mm_storeu_ps(totals, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, all)));
}
