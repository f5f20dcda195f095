// One term per lane and load, tokens as floats. Included after Lanes.

using Token = float;
using Loaded = Lanes;
constexpr int32_t STEP = TERMS;

template <class Number>
STAND_INLINE Token as_token(Number value) {
    return widened(value);
}
