"""What is installed beside the drafter, and the error that names the extra where something is not."""

from __future__ import annotations

import importlib.util

ENGINE_PACKAGES = ("torch", "transformers")


class MissingExtraError(ImportError):
    """`asker`, a module or name of this project, needs packages that only the extra `engine` installs."""

    def __init__(self, asker: str):
        absent = [name for name in ENGINE_PACKAGES if importlib.util.find_spec(name) is None]
        super().__init__(
            f"{asker} needs torch and transformers, got an installation without {' and '.join(absent)}; "
            'pip install "stand-decoding[engine]" (stand.trees, the drafter, works without)',
            name=absent[0],
        )


def missing_package(error: ModuleNotFoundError, package: str, *, asker: str, install: str) -> ImportError:
    """What to raise where `asker` could not import: how to `install` the absent `package`, or `error` itself where
    something else is absent."""
    if error.name is None or error.name.partition(".")[0] != package:
        return error
    return ImportError(f"{asker} needs {error.name}, which is not installed; pip install {install}", name=error.name)


def has_engine() -> bool:
    """Can what the extra `engine` installs be imported? Nothing is imported to find out."""
    return all(importlib.util.find_spec(name) is not None for name in ENGINE_PACKAGES)
