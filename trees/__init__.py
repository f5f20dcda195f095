"""What to guess next: the lookup tree, tree shapes and drafts.

Imports in milliseconds: numpy, msgpack and the compiled core, never torch.
"""

if __name__ != "stand.trees":
    raise ImportError(
        f"this package must be imported as stand.trees, got {__name__}; "
        "install the project (pip install -e .) and write `import stand.trees`"
    )

from stand.trees.draft import NO_PARENT, ROOT, DraftBatch, DraftTree

__all__ = ["NO_PARENT", "ROOT", "DraftBatch", "DraftTree"]
