"""Build of the compiled lookup tree. Everything else about the distribution stands in pyproject.toml.

STAND_DEBUG=1 turns bounds checks on, wrap-around off stays, and leaves C++ assertions in.
"""

import os
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("STAND_DEBUG", "0") == "1"

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": True,
    "embedsignature": True,
    "freethreading_compatible": False,
}

COMPILE_ARGS = ["-std=c++17", "-O1", "-g", "-UNDEBUG"] if DEBUG else ["-std=c++17", "-O3", "-DNDEBUG"]

HEADERS = sorted(glob("trees/*.h"))

EXTENSIONS = [
    Extension(
        f"stand.trees.{os.path.splitext(os.path.basename(source))[0]}",
        [source],
        language="c++",
        extra_compile_args=COMPILE_ARGS,
        define_macros=[("STAND_DEBUG", "1")] if DEBUG else [],
        depends=HEADERS,
    )
    for source in sorted(glob("trees/*.pyx"))
]

setup(ext_modules=cythonize(EXTENSIONS, compiler_directives=DIRECTIVES, force=DEBUG))
