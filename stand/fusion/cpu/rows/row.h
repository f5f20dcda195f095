// One row of each job. Included once per instruction set, inside a namespace that has its WIDTH: a function's target
// cannot be a parameter of a template.

using Lanes = float __attribute__((vector_size(4 * WIDTH)));
using Bits = int32_t __attribute__((vector_size(4 * WIDTH)));
using Halves = uint16_t __attribute__((vector_size(2 * WIDTH)));

STAND_TARGET STAND_INLINE Lanes load_whole(const float* values) {
    Lanes lanes;
    std::memcpy(&lanes, values, sizeof lanes);
    return lanes;
}

STAND_TARGET STAND_INLINE Lanes load_whole(const Bfloat16* values) {
    Halves halves;
    std::memcpy(&halves, values, sizeof halves);
    return (Lanes)(__builtin_convertvector(halves, Bits) << 16);
}

// The first `count` < WIDTH numbers, zeros behind them: a call, since it is seldom needed.
template <class Number>
STAND_TARGET [[gnu::noinline]] Lanes load_last(const Number* values, int64_t count) {
    Number filled[WIDTH] = {};
    std::memcpy(filled, values, count * sizeof(Number));
    return load_whole(filled);
}

// The first of `count` numbers, as many as there are.
template <class Number>
STAND_TARGET STAND_INLINE Lanes load(const Number* values, int64_t count) {
    return count < WIDTH ? load_last(values, count) : load_whole(values);
}

// As `narrow`.
STAND_TARGET STAND_INLINE Bits upper_halves(Lanes lanes) {
    const Bits bits = (Bits)lanes, nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF;
    return lanes == lanes ? nearest : Bits{} + 0x7FC0;
}

STAND_TARGET STAND_INLINE void store_whole(float* values, Lanes lanes) { std::memcpy(values, &lanes, sizeof lanes); }

STAND_TARGET STAND_INLINE void store_whole(Bfloat16* values, Lanes lanes) {
    const Halves halves = __builtin_convertvector(upper_halves(lanes), Halves);
    std::memcpy(values, &halves, sizeof halves);
}

template <class Number>
STAND_TARGET [[gnu::noinline]] void store_last(Number* values, int64_t count, Lanes lanes) {
    Number filled[WIDTH];
    store_whole(filled, lanes);
    std::memcpy(values, filled, count * sizeof(Number));
}

template <class Number>
STAND_TARGET STAND_INLINE void store(Number* values, int64_t count, Lanes lanes) {
    if (count < WIDTH) return store_last(values, count, lanes);
    store_whole(values, lanes);
}

// What a Number keeps of them.
template <class Number>
STAND_TARGET STAND_INLINE Lanes rounded(Lanes lanes) {
    if constexpr (std::is_same_v<Number, float>) return lanes;
    return (Lanes)(upper_halves(lanes) << 16);
}

// 1 / sqrt(mean of squares + epsilon)
template <class Number>
STAND_TARGET STAND_INLINE float scale_of(const Number* row, int64_t size, double epsilon) {
    Lanes sums[TERMS / WIDTH] = {};
    for (int64_t k = 0; k < size; k += TERMS)
        for (int64_t part = 0; part < TERMS; part += WIDTH) {
            const Lanes values = k + part < size ? load(row + k + part, size - k - part) : Lanes{};
            sums[part / WIDTH] += values * values;
        }
    float lanes[TERMS];
    std::memcpy(lanes, sums, sizeof lanes);
    for (int64_t half = TERMS / 2; half > 0; half /= 2)
        for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return 1.0f / std::sqrt(lanes[0] / static_cast<float>(size) + static_cast<float>(epsilon));
}

template <class Number>
STAND_TARGET STAND_INLINE void scale_row(const Number* row, const Number* weight, float scale, Rule rule, int64_t size,
                                         Number* output) {
    const float added = rule == Rule::one_plus ? 1.0f : 0.0f;
    for (int64_t k = 0; k < size; k += WIDTH) {
        const int64_t count = size - k;
        Lanes normal = load(row + k, count) * scale;
        if (rule == Rule::round_first) normal = rounded<Number>(normal);
        store(output + k, count, normal * (load(weight + k, count) + added));
    }
}

template <class Number>
STAND_TARGET void do_rows(const Norm& job, int64_t first, int64_t end) {
    const int64_t size = job.size;
    const Number* const weight = static_cast<const Number*>(job.weight);
    for (int64_t row = first; row < end; ++row) {
        const Number* states = static_cast<const Number*>(job.states) + row * job.states_stride;
        if (job.change != nullptr) {
            const Number* change = static_cast<const Number*>(job.change) + row * job.change_stride;
            Number* total = static_cast<Number*>(job.total) + row * size;
            for (int64_t k = 0; k < size; k += WIDTH)
                store(total + k, size - k, load(states + k, size - k) + load(change + k, size - k));
            states = total;
        }
        const float scale = scale_of(states, size, job.epsilon);
        scale_row(states, weight, scale, job.rule, size, static_cast<Number*>(job.output) + row * size);
    }
}

// e^x for x <= 0, to 2 units in the last place; 0 below -87, where float32 nears its smallest normal number. NaN stays.
// With n the integer nearest to x / ln 2, e^x = 2^n e^r; n is read from the last bits of n + SHIFT, where the exponent
// of 2^n already has its offset. The polynomial is Taylor's, |r| <= ln 2 / 2.
STAND_TARGET STAND_INLINE Lanes exponential(Lanes x) {
    constexpr float SHIFT = 12582912.0f + 127.0f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    const Lanes shifted = x * 1.44269504f + SHIFT, n = shifted - SHIFT;
    const Lanes r = x - n * LN2_HIGH - n * LN2_LOW;
    Lanes p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    return (x < -87.0f) ? Lanes{} : p * (Lanes)((Bits)shifted << 23);
}

STAND_TARGET STAND_INLINE Lanes absolute(Lanes x) { return (Lanes)((Bits)x & 0x7FFFFFFF); }

// 1 / (1 + e^-x)
STAND_TARGET STAND_INLINE Lanes sigmoid(Lanes x) {
    const Lanes small = exponential(-absolute(x));
    return (x < 0.0f ? small : Lanes{} + 1.0f) / (small + 1.0f);
}

// The normal distribution's function: (1 + erf(x / sqrt 2)) / 2. With z = |x| / sqrt 2 and t = 1 / (1 + 0.39 z),
// erfc(z) = e^(-z^2) times a polynomial of t, fitted so that the largest error in [0, 6] is least: 8.3e-9.
STAND_TARGET STAND_INLINE Lanes normal_below(Lanes x) {
    const Lanes z = absolute(x) * 0.707106781f, t = 1.0f / (z * 0.39f + 1.0f);
    Lanes p = t * -0.22753737f + 0.88666539f;
    p = p * t - 0.63540194f;
    p = p * t + 0.64956074f;
    p = p * t + 0.09138788f;
    p = p * t + 0.23532530f;
    const Lanes tail = p * t * exponential(-(z * z)) * 0.5f;
    return x < 0.0f ? tail : 1.0f - tail;
}

template <Activation ACTIVATION, class Number>
STAND_TARGET STAND_INLINE void gate_row(const Number* gate, const Number* up, int64_t size, Number* output) {
    for (int64_t k = 0; k < size; k += WIDTH) {
        const Lanes x = load(gate + k, size - k);
        Lanes share;
        if constexpr (ACTIVATION == Activation::silu)
            share = sigmoid(x);
        else if constexpr (ACTIVATION == Activation::gelu_tanh)  // (1 + tanh y) / 2 = sigmoid(2 y)
            share = sigmoid((x * x * x * 0.044715f + x) * 1.59576912f);
        else
            share = normal_below(x);
        store(output + k, size - k, rounded<Number>(x * share) * load(up + k, size - k));
    }
}

template <class Number>
STAND_TARGET void do_rows(const Gate& job, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
        const Number* gate = static_cast<const Number*>(job.gate) + row * job.gate_stride;
        const Number* up = static_cast<const Number*>(job.up) + row * job.up_stride;
        Number* output = static_cast<Number*>(job.output) + row * job.size;
        if (job.activation == Activation::silu)
            gate_row<Activation::silu>(gate, up, job.size, output);
        else if (job.activation == Activation::gelu_tanh)
            gate_row<Activation::gelu_tanh>(gate, up, job.size, output);
        else
            gate_row<Activation::gelu_erf>(gate, up, job.size, output);
    }
}

// One head, normed where there is a weight, turned by the factors of its token.
template <class Number>
STAND_TARGET [[gnu::noinline]] void turn_head(const Heads& job, const Number* head, const Number* weight,
                                              const Number* cosines, const Number* sines, Number* output) {
    Number normed[LARGEST_HEAD];
    if (weight != nullptr) {
        scale_row(head, weight, scale_of(head, job.size, job.epsilon), job.rule, job.size, normed);
        head = normed;
    }
    const int64_t half = job.half, rest = job.size - 2 * half;
    for (int64_t k = 0; k < half; k += WIDTH) {
        const int64_t count = half - k;
        const Lanes first = load(head + k, count), second = load(head + half + k, count);
        const Lanes cos_second = load(cosines + job.second + k, count);
        const Lanes sin_second = load(sines + job.second + k, count);
        const Lanes straight = rounded<Number>(first * load(cosines + k, count));
        store(output + k, count, straight - rounded<Number>(second * load(sines + k, count)));
        store(output + half + k, count, rounded<Number>(second * cos_second) + rounded<Number>(first * sin_second));
    }
    std::memcpy(output + 2 * half, head + 2 * half, rest * sizeof(Number));
}

template <class Number>
STAND_TARGET void do_rows(const Heads& job, int64_t first, int64_t end) {
    const int64_t size = job.size;
    const auto at = [](const void* numbers, int64_t place) { return static_cast<const Number*>(numbers) + place; };
    const Number *query_weight = at(job.query_weight, 0), *key_weight = at(job.key_weight, 0);
    Number* const keys = static_cast<Number*>(job.keys);
    Number* const values = static_cast<Number*>(job.values);
    for (int64_t row = first; row < end; ++row) {
        const Number *cosines = at(job.cosines, row * job.cosine_stride), *sines = at(job.sines, row * job.sine_stride);
        Number* const output = static_cast<Number*>(job.output) + row * job.heads * size;
        for (int64_t head = 0; head < job.heads; ++head)
            turn_head(job, at(job.query, row * job.query_stride + head * size), query_weight, cosines, sines,
                      output + head * size);
        const int64_t slot = job.slots[row];
        if (slot < 0) continue;
        const int64_t place = slot / job.room * job.row_stride + slot % job.room * job.slot_stride;
        for (int64_t head = 0; head < job.key_heads; ++head) {
            const int64_t to = place + head * job.head_stride;
            turn_head(job, at(job.key, row * job.key_stride + head * size), key_weight, cosines, sines, keys + to);
            std::memcpy(values + to, at(job.value, row * job.value_stride + head * size), size * sizeof(Number));
        }
    }
}
