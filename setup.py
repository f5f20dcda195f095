"""Build of the compiled modules. Everything else about the distribution is in pyproject.toml.

STAND_DEBUG=1 turns on bounds checks and C++ assertions and keeps symbols for a debugger.
"""

import os
import sys
from glob import glob

import numpy
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

OPTIMISED = ["-O3", "-DNDEBUG", "-g0"]
CHECKED = ["-O1", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"]
# Symbols that nothing looks up at run time are most of an optimised module; other linkers have other words for it.
STRIP = ["-Wl,--strip-all"] if sys.platform == "linux" and not DEBUG else []
# Without contraction a sum of products is rounded in the same way on every processor.
COMPILE_ARGS = ["-std=c++17", "-ffp-contract=off", *(CHECKED if DEBUG else OPTIMISED)]

NUMPY_API = ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")


def module_name(source):
    """trees/blended/lookup.pyx -> stand.trees.blended.lookup; stand/gpu/packing.pyx -> stand.gpu.packing."""
    name = os.path.splitext(source)[0].replace(os.sep, ".")
    return name if name.startswith("stand.") else "stand." + name


EXTENSIONS = [
    Extension(
        module_name(source),
        [source],
        language="c++",
        extra_compile_args=COMPILE_ARGS,
        extra_link_args=STRIP,
        include_dirs=[numpy.get_include()],
        define_macros=[NUMPY_API, *([("STAND_DEBUG", "1")] if DEBUG else [])],
        depends=sorted(glob(f"{package}/**/*.h", recursive=True)),
    )
    for package in ("stand", "trees", "verifiers")
    for source in sorted(glob(f"{package}/**/*.pyx", recursive=True))
]

setup(
    ext_modules=cythonize(EXTENSIONS, compiler_directives=DIRECTIVES, force=DEBUG),
    options={"build_ext": {"parallel": os.cpu_count()}},
)
