"""What lookups are given, checked; random numbers by their keys; drafts as serving engines take them, and which of
their texts go on; verdicts on a CPU. One compiled module of all parts, because each module by itself takes 6 kB of the
wheel."""

include "include/checked_arrays.pxi"
include "layouts/known_texts.pxi"
include "layouts/layout.pxi"
include "include/noise.pxi"
include "../verifiers/verdict_compiled.pxi"
