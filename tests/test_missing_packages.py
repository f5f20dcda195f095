"""Doors to libraries that are not installed say what to install; another absent module is told as it is."""

import pytest

from stand.extra import missing_package

INSTALL = {"asker": "this door", "install": "a-library"}


@pytest.mark.parametrize("name", ["a_library", "a_library.part"])
def test_the_package_is_named_with_its_remedy(name):
    error = missing_package(ModuleNotFoundError("gone", name=name), "a_library", **INSTALL)
    assert str(error) == f"this door needs {name}, which is not installed; pip install a-library"
    assert error.name == name and not isinstance(error, ModuleNotFoundError)


@pytest.mark.parametrize("name", ["a_library_of_others", "numpy", None])
def test_what_else_is_absent_is_told_as_it_is(name):
    original = ModuleNotFoundError("gone", name=name)
    assert missing_package(original, "a_library", **INSTALL) is original
