// A digest of all that a lookup has learned: equal histories give equal digests, and what is learned next changes it.
//
// It is mixed into the seed of a call, so that random numbers which decided what was learned never meet drafts that
// depend on it.

#pragma once

#include <cstdint>

#include "noise.h"

namespace stand {

// The digest after `num_tokens` more tokens. The number of tokens is mixed in too: an empty lesson is a lesson.
inline uint64_t extended_digest(uint64_t digest, const int32_t* token_ids, int64_t num_tokens) {
    digest = chain_key(digest, static_cast<uint64_t>(num_tokens));
    for (int64_t place = 0; place < num_tokens; ++place)
        digest = chain_key(digest, static_cast<uint32_t>(token_ids[place]));
    return digest;
}

}  // namespace stand
