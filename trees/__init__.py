"""What to guess next: the lookup, tree shapes and drafts.

Imports in milliseconds: numpy, msgpack and the compiled core, never torch.
"""

if __name__ != "stand.trees":
    raise ImportError(
        f"this package must be imported as stand.trees, got {__name__}; "
        "install the project (pip install -e .) and write `import stand.trees`"
    )

from stand.trees import noise
from stand.trees.blended.merging import merge_lookups
from stand.trees.checked_file import LookupFileError
from stand.trees.draft import NO_PARENT, NO_TOKEN, ROOT, DraftBatch, DraftTree
from stand.trees.fingerprint import problem_key, vocabulary_fingerprint
from stand.trees.lookups import BlendedLookup, LookupTree, OutsideLaws, TokenMasks
from stand.trees.shape import TreeShape, fit_shape

__all__ = [
    "NO_PARENT",
    "NO_TOKEN",
    "ROOT",
    "BlendedLookup",
    "DraftBatch",
    "DraftTree",
    "LookupFileError",
    "LookupTree",
    "OutsideLaws",
    "TokenMasks",
    "TreeShape",
    "fit_shape",
    "merge_lookups",
    "noise",
    "problem_key",
    "vocabulary_fingerprint",
]
