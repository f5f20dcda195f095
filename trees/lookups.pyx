# cython: embedsignature=True, embedsignature.format=clinic
"""Both lookups. One compiled module, because each by itself takes 6 kB of the wheel, and what they share as much again.

The work is done in C++ without the interpreter's lock. The files that are included here check arguments and own memory.
"""

cimport numpy as cnp
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from libcpp cimport bool as bool_t
from libcpp.vector cimport vector

import numpy as np

cnp.import_array()

from stand.trees.arguments import (
    check_is_batch, checked_nodes, int64_array, real, tail, vector as int32_vector, whole, within,
)
from stand.trees.blended.file import read_blended_lookup, write_blended_lookup
from stand.trees.blended.heads import laws_of_heads
from stand.trees.checked_file import LookupFileError, checked_fingerprint, empty_lookup
from stand.trees.compiled import check_batch, checked_estimates, checked_laws, tokens_of
from stand.trees.draft import DraftBatch
from stand.trees.fork_safety import lock_at_forks
from stand.trees.kinds import KIND_NUMBERS, KINDS
from stand.trees.longest_match.draft_arrays import (
    MAX_ORDER, batch_of, checked_orders, empty_arrays, empty_table, shapes_per_row
)
from stand.trees.longest_match.file import read_lookup_tree, write_lookup_tree
from stand.trees.noise import DRAFT, TARGET, step_keys

include "include/shared.pxi"
include "include/digest.pxi"
include "include/windows.pxi"
include "blended/lookup.pxi"
include "longest_match/lookup.pxi"

cdef extern from "include/compact_wrappers.h":
    pass
