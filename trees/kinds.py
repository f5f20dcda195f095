"""The kinds of drafts by name: how children are chosen."""

# By kind the number that the core has for it (`DraftKind` in include/sampling.h); the first NUM_GROWN_KINDS need no
# shape.
KIND_NUMBERS = {"sampled": 0, "mixed": 1, "deterministic": 2, "coupled": 3, "independent": 4}
NUM_GROWN_KINDS = 3
SHAPED_KINDS = tuple(KIND_NUMBERS)  # of drafts that fill a shape
KINDS = SHAPED_KINDS[:NUM_GROWN_KINDS]  # of all drafts
