// One row of each job. Included once per instruction set, inside a namespace that has its WIDTH: a function's target
// cannot be a parameter of a template.

using Lanes = float __attribute__((vector_size(4 * WIDTH)));
using Bits = int32_t __attribute__((vector_size(4 * WIDTH)));

// The first `count` of WIDTH numbers, zeros behind them.
STAND_TARGET STAND_INLINE Lanes load(const float* values, int64_t count) {
    Lanes lanes{};
    if (count >= WIDTH)
        std::memcpy(&lanes, values, sizeof lanes);
    else
        std::memcpy(&lanes, values, count * sizeof(float));
    return lanes;
}

STAND_TARGET STAND_INLINE void store(float* values, int64_t count, Lanes lanes) {
    if (count >= WIDTH)
        std::memcpy(values, &lanes, sizeof lanes);
    else
        std::memcpy(values, &lanes, count * sizeof(float));
}

// 1 / sqrt(mean of squares + epsilon)
STAND_TARGET STAND_INLINE float scale_of(const float* row, int64_t size, double epsilon) {
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

STAND_TARGET STAND_INLINE void scale_row(const float* row, const float* weight, float scale, float added, int64_t size,
                                         float* output) {
    for (int64_t k = 0; k < size; k += WIDTH) {
        const int64_t count = size - k;
        store(output + k, count, load(row + k, count) * scale * (load(weight + k, count) + added));
    }
}

STAND_TARGET inline void do_rows(const Norm& job, int64_t first, int64_t end) {
    const int64_t size = job.size;
    for (int64_t row = first; row < end; ++row) {
        const float* states = job.states + row * job.states_stride;
        if (job.change != nullptr) {
            const float* change = job.change + row * job.change_stride;
            float* total = job.total + row * size;
            for (int64_t k = 0; k < size; k += WIDTH)
                store(total + k, size - k, load(states + k, size - k) + load(change + k, size - k));
            states = total;
        }
        const float scale = scale_of(states, size, job.epsilon);
        scale_row(states, job.weight, scale, job.is_one_plus ? 1.0f : 0.0f, size, job.output + row * size);
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

template <Activation ACTIVATION>
STAND_TARGET STAND_INLINE void gate_row(const float* gate, const float* up, int64_t size, float* output) {
    for (int64_t k = 0; k < size; k += WIDTH) {
        const Lanes x = load(gate + k, size - k);
        Lanes share;
        if constexpr (ACTIVATION == Activation::silu)
            share = sigmoid(x);
        else if constexpr (ACTIVATION == Activation::gelu_tanh)  // (1 + tanh y) / 2 = sigmoid(2 y)
            share = sigmoid((x * x * x * 0.044715f + x) * 1.59576912f);
        else
            share = normal_below(x);
        store(output + k, size - k, x * share * load(up + k, size - k));
    }
}

STAND_TARGET inline void do_rows(const Gate& job, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
        const float *gate = job.gate + row * job.gate_stride, *up = job.up + row * job.up_stride;
        float* output = job.output + row * job.size;
        if (job.activation == Activation::silu)
            gate_row<Activation::silu>(gate, up, job.size, output);
        else if (job.activation == Activation::gelu_tanh)
            gate_row<Activation::gelu_tanh>(gate, up, job.size, output);
        else
            gate_row<Activation::gelu_erf>(gate, up, job.size, output);
    }
}

// One head, normed where there is a weight, turned by the factors of its token.
STAND_TARGET [[gnu::noinline]] inline void turn_head(const Heads& job, const float* head, const float* weight,
                                                     const float* cosines, const float* sines, float* output) {
    float normed[LARGEST_HEAD];
    if (weight != nullptr) {
        const float scale = scale_of(head, job.size, job.epsilon);
        scale_row(head, weight, scale, job.is_one_plus ? 1.0f : 0.0f, job.size, normed);
        head = normed;
    }
    const int64_t half = job.half, rest = job.size - 2 * half;
    for (int64_t k = 0; k < half; k += WIDTH) {
        const int64_t count = half - k;
        const Lanes first = load(head + k, count), second = load(head + half + k, count);
        const Lanes cos_second = load(cosines + job.second + k, count), sin_second = load(sines + job.second + k, count);
        store(output + k, count, first * load(cosines + k, count) - second * load(sines + k, count));
        store(output + half + k, count, second * cos_second + first * sin_second);
    }
    std::memcpy(output + 2 * half, head + 2 * half, rest * sizeof(float));
}

STAND_TARGET inline void do_rows(const Heads& job, int64_t first, int64_t end) {
    const int64_t size = job.size;
    for (int64_t row = first; row < end; ++row) {
        const float *cosines = job.cosines + row * job.cosine_stride, *sines = job.sines + row * job.sine_stride;
        for (int64_t head = 0; head < job.heads; ++head)
            turn_head(job, job.query + row * job.query_stride + head * size, job.query_weight, cosines, sines,
                      job.output + (row * job.heads + head) * size);
        const int64_t slot = job.slots[row];
        if (slot < 0) continue;
        const int64_t place = slot / job.room * job.row_stride + slot % job.room * job.slot_stride;
        for (int64_t head = 0; head < job.key_heads; ++head) {
            const int64_t at = place + head * job.head_stride;
            turn_head(job, job.key + row * job.key_stride + head * size, job.key_weight, cosines, sines, job.keys + at);
            std::memcpy(job.values + at, job.value + row * job.value_stride + head * size, size * sizeof(float));
        }
    }
}
