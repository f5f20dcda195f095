// Counter-based uniforms: the same key always gives the same number, and nothing here has a state.
//
// A key is (seed, stream, row, step, node, slot). Never put a context into it: two draft nodes with the same context
// must get different draws. Otherwise one random number decides twice, and ratio verifiers become lossy.
//
// Each stage adds a multiple of an odd constant and applies the SplitMix64 finaliser (Steele, Lea, Flood 2014, with
// Stafford's variant 13), so that for one (seed, stream, row, step) the numbers are a SplitMix64 sequence.

#pragma once

#include <cstdint>

namespace stand {

constexpr uint64_t DRAFT_STREAM = 1, ACCEPT_STREAM = 2, RESAMPLE_STREAM = 3, TARGET_STREAM = 4;
constexpr uint64_t GOLDEN_GAMMA = 0x9E3779B97F4A7C15ULL;
constexpr uint64_t FIRST_FACTOR = 0xBF58476D1CE4E5B9ULL, SECOND_FACTOR = 0x94D049BB133111EBULL;  // of the finaliser

inline uint64_t finalise(uint64_t word) {
    word = (word ^ (word >> 30)) * FIRST_FACTOR;
    word = (word ^ (word >> 27)) * SECOND_FACTOR;
    return word ^ (word >> 31);
}

inline uint64_t chain_key(uint64_t key, uint64_t word) { return finalise(key + GOLDEN_GAMMA * (word + 1)); }

inline uint64_t stream_key(uint64_t seed, uint64_t stream) { return chain_key(finalise(seed), stream); }

// row and step below 2^32.
inline uint64_t step_key(uint64_t stream_key, uint64_t row, uint64_t step) {
    return chain_key(stream_key, (row << 32) | step);
}

// node and slot below 2^32. 52 random bits, centred: the result lies in [2^-53, 1 - 2^-53], so its logarithm is finite.
inline double uniform(uint64_t step_key, uint64_t node, uint64_t slot) {
    const uint64_t bits = chain_key(step_key, (node << 32) | slot);
    return (static_cast<double>(bits >> 12) + 0.5) * 0x1.0p-52;
}

// A digest of all that a lookup has learned: equal histories give equal digests, and what is learned next changes it.
// It is mixed into the seed of a call, so that random numbers which decided what was learned never meet drafts that
// depend on it.
//
// The digest after `num_tokens` more tokens. The number of tokens is mixed in too: an empty lesson is a lesson.
inline uint64_t extended_digest(uint64_t digest, const int32_t* token_ids, int64_t num_tokens) {
    digest = chain_key(digest, static_cast<uint64_t>(num_tokens));
    for (int64_t place = 0; place < num_tokens; ++place)
        digest = chain_key(digest, static_cast<uint32_t>(token_ids[place]));
    return digest;
}

// Where the random numbers of a call that starts now start. A call that learns is an event of its own, so that of two
// such calls only one starts from a digest; no other thread may come in between. A call that does not learn starts
// apart: it may draft from lessons of calls that began at this digest too.
inline uint64_t start_of_call(uint64_t& digest, bool learns) {
    const uint64_t start = digest;
    if (!learns) return chain_key(start, uint64_t(1) << 63);
    digest = extended_digest(start, nullptr, 0);
    return start;
}

}  // namespace stand
