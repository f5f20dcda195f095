"""Build of the compiled modules. Everything else about the distribution is in pyproject.toml.

The modules use the stable ABI of Python 3.11, so one wheel serves every later Python. Free-threaded builds of Python
have no stable ABI; there the modules are compiled for that Python alone.

STAND_DEBUG=1 turns on bounds checks and C++ assertions and keeps symbols for a debugger.
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from glob import glob

import numpy
from Cython.Build import cythonize
from Cython.Compiler.Options import get_directive_defaults
from setuptools import Extension, setup

DEBUG = os.environ.get("STAND_DEBUG", "0") == "1"
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": True,
    "embedsignature": False,  # stubs say them; docstrings of the two lookups do, where `inspect` reads them
    "freethreading_compatible": False,
    "auto_pickle": False,  # code that would only say that a class cannot be pickled, which Python says by itself
    "always_allow_keywords": False,  # of functions with one argument: 0.3 % of the wheel
    "binding": False,  # plain functions: a lookup's module packs 6 % smaller
}


def taken(flag):
    """[flag] where compilers and their linkers take it, else []: clang lacks some of GCC's, lld some of GNU ld's."""
    with tempfile.TemporaryDirectory() as folder:
        empty = os.path.join(folder, "empty.cpp")
        open(empty, "w").close()
        for name in ("CC", "CXX"):
            compiler = shlex.split(os.environ.get(name) or sysconfig.get_config_var(name) or "")
            others = [*shlex.split(os.environ.get("LDFLAGS", "")), "-shared", "-fPIC", "-Werror"]
            try:
                subprocess.run([*compiler, *others, flag, empty, "-o", empty + ".so"], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):  # where there is no compiler, the build says so
                return []
    return [flag]


IS_LEAN = sys.platform == "linux" and not DEBUG  # other compilers and linkers have other words for what follows from it
OPTIMISED = ["-O3", "-DNDEBUG", "-g0"]
# Modules that check and pass on: their time goes into calls of Python, and a quarter of their size is unrolled loops.
# Packing a step takes 0.3 us more of its 4 to 5. Drawing waits for memory.
COMPACT = {
    "stand._cyutility",
    "stand.step_compiled",
    "stand.trees.compiled",
}
# In the order of the source modules pack 2 % smaller, and unaligned as much again; neither costs time that is seen.
IN_ORDER = taken("-fno-schedule-insns2") if IS_LEAN else []
UNALIGNED = ["-falign-functions=1", "-falign-loops=1", "-falign-jumps=1"]
# Two passes that trade size for time: without, compact modules pack 1 % smaller, filters 2 %, STAND's lookup 3 % and
# products 4 %. All take as long, but for small products of 12 to 16 tokens (3 % longer). Code that is hoisted whatever
# registers it takes is 0.4 % less.
SPARING = taken("-fno-caller-saves") + taken("-fno-thread-jumps") if IS_LEAN else []
SPARING += taken("-fno-ira-hoist-pressure") if IS_LEAN else []
SMALL = [*UNALIGNED, *IN_ORDER, *SPARING]
# Two passes after which code is shorter and packs longer: 0.2 % of compact modules, 0.4 % of the default lookup.
REPEATING = taken("-fno-tree-tail-merge") + taken("-fno-optimize-sibling-calls") if IS_LEAN else []
# -Oz packs 1 % smaller than -Os; without jumps past known conditions another 1 %, without three more passes 0.3 %.
COMPACT_LEVEL = ["-Os", *taken("-Oz"), *taken("-fno-tree-dominator-opts"), *taken("-fno-code-hoisting")]
COMPACT_LEVEL += [*taken("-fno-move-loop-invariants"), *taken("-fno-shrink-wrap"), *IN_ORDER, *SPARING, *REPEATING]
# No exception of C++ passes in these: without tables for it they pack 4 % smaller, and 2 % with addresses in loops as
# they are written.
PLAIN = COMPACT - {"stand.trees.compiled"}
WITHOUT_EXCEPTIONS = ["-fno-exceptions", "-fno-unwind-tables"] if IS_LEAN else []
# These levels are of the C++ in headers: in modules with much of it `trees/include/compact_wrappers.h` compiles for
# size what Cython writes around it. Lookups, products and filters pack 11 % smaller by that; learning takes 2 % longer.
LEVELS = {
    # Loops are unrolled by hand; -Os: a fifth slower. Without vectors of unrelated numbers, with an eighth of GCC's
    # inlining, and without four passes that save nothing, it is smaller and within 1 % as fast. Loops without a copied
    # first test are 8 % less, and take 1 % longer.
    "stand.forward.few_tokens.dot_products": [
        "-O2",
        "-fno-tree-slp-vectorize",
        *taken("-fno-partial-inlining"),
        *taken("-fno-tree-ch"),
        *taken("-fno-tree-pre"),
        *taken("-fno-ipa-sra"),
        *taken("-fno-if-conversion"),
        *taken("--param=inline-unit-growth=5"),
        *SMALL,
    ],
    # As fast as -O3, a tenth smaller.
    "stand.laws.filters": ["-O2", "-ftree-vectorize", *taken("-fvect-cost-model=dynamic"), *SMALL],
    # Vectorised loops are a twenty-fifth of it and save nothing; most of what GCC would inline is a tenth, and learning
    # is faster without. Tests of loops that are copied before them, and jumps past conditions that are known, are a
    # twentieth and save nothing, and four passes more are a sixtieth. -O2 is a sixth smaller, and slower at serving
    # engines.
    "stand.trees.lookups": [
        "-O3",
        "-fno-tree-vectorize",
        "-fno-tree-slp-vectorize",
        *taken("-fno-tree-ch"),
        *taken("-fno-tree-dominator-opts"),
        *taken("-fno-ipa-cp-clone"),
        *taken("-fno-reorder-blocks-and-partition"),
        *taken("-fno-unswitch-loops"),
        *taken("-fno-split-loops"),
        *taken("-fno-move-loop-invariants"),
        *taken("-fno-shrink-wrap"),
        *taken("--param=inline-unit-growth=12"),
        *SMALL,
        *REPEATING,
    ],
    **dict.fromkeys(COMPACT - PLAIN, [*COMPACT_LEVEL, *taken("-fno-jump-tables")]),
    **dict.fromkeys(PLAIN, [*COMPACT_LEVEL, *WITHOUT_EXCEPTIONS, *taken("-fno-ivopts")]),
}
CHECKED = ["-O1", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"]
# Symbols that nothing looks up at run time are most of an optimised module. Of the wheel's bytes, calls without a table
# of stubs save 1.4 %, leaving out what nothing calls 0.5 %, and tables for stack traces at calls alone, which is where
# exceptions pass, 0.6 %.
SECTIONS = ["-fvisibility=hidden", "-ffunction-sections", "-fdata-sections"]
LEAN = [*SECTIONS, "-fno-plt", "-fno-asynchronous-unwind-tables", "-fno-ident"] if IS_LEAN else []
STRIP = []
if IS_LEAN:
    STRIP = ["-Wl,--strip-all,--gc-sections,--build-id=none", *taken("-Wl,--no-ld-generated-unwind-info")]
    # What C runs when a library is loaded and given back: nothing here asks for it, and no module is given back.
    STRIP += taken("-nostartfiles")
    # Nothing but what Python calls is seen from outside: not the standard library's templates either.
    STRIP += taken("-Wl,--version-script=" + os.path.abspath("trees/include/exports.map"))
    # Code and constants of one segment, of like alignment side by side: 0.4 % less, and 5 % less on disk.
    STRIP += taken("-Wl,-z,noseparate-code") + taken("-Wl,--sort-section=alignment")
# Without contraction a sum of products is rounded in the same way on every processor.
COMPILE_ARGS = ["-ffp-contract=off", *(CHECKED if DEBUG else OPTIMISED), *LEAN]

MACROS = [
    ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
    *([("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else []),
    *([("STAND_DEBUG", "1")] if DEBUG else []),
]
SHARED_CODE = "stand._cyutility"  # Cython's own code for arrays, once instead of in every module
SHARED_SOURCE = "stand/_cyutility.c"
# A fifth of it is left out: what no module here uses (functions that are no plain ones, classes of Python), and code
# for pickling. A module that does use it cannot be imported, and says what it lacks.
UNUSED_CODE = ["AutoPickle", "CythonFunction", "PythonClasses"]
get_directive_defaults()["auto_pickle"] = False  # DIRECTIVES do not reach Cython's own arrays
if os.path.exists(SHARED_SOURCE) and os.path.getmtime(SHARED_SOURCE) < os.path.getmtime(__file__):
    os.remove(SHARED_SOURCE)  # Cython would keep it, whatever is said here


def forget_lines(source):
    """Of errors in Cython's own code, which lie in no file that anybody has: a twentieth of what it packs to."""
    with open(source) as file:
        code = file.read()
    place = "{ __pyx_filename = __pyx_f[0]; (void) __pyx_lineno; (void) __pyx_clineno; }"
    shorter = re.sub(r"(#define __PYX_MARK_ERR_POS\(f_index, lineno\)).*", r"\1 " + place, code)
    if shorter != code:
        with open(source, "w") as file:
            file.write(shorter)


def module_name(source):
    """trees/lookups.pyx -> stand.trees.lookups; stand/step_compiled.pyx -> stand.step_compiled."""
    name = os.path.splitext(source)[0].replace(os.sep, ".")
    return name if name.startswith("stand.") else "stand." + name


def extension(name, source, compile_args=(), **settings):
    return Extension(
        name,
        [source],
        extra_compile_args=[
            *compile_args,
            *COMPILE_ARGS,
            *([] if DEBUG else LEVELS.get(name, [])),
        ],
        extra_link_args=STRIP,
        define_macros=MACROS,
        py_limited_api=STABLE_ABI,
        **settings,
    )


EXTENSIONS = [
    extension(
        module_name(source),
        source,
        ["-std=c++17"],
        language="c++",
        include_dirs=[numpy.get_include()],
        depends=sorted({*glob(f"{package}/**/*.h", recursive=True), "trees/include/compact_wrappers.h"}),
    )
    for package in ("stand", "trees", "verifiers")
    for source in sorted(glob(f"{package}/**/*.pyx", recursive=True))
]
EXTENSIONS.append(extension(SHARED_CODE, SHARED_SOURCE))
COMPILED = cythonize(
    EXTENSIONS,
    compiler_directives=DIRECTIVES,
    force=DEBUG,
    shared_utility_qualified_name=SHARED_CODE,
    shared_utility_features_disabled=UNUSED_CODE,
)
if not DEBUG:
    forget_lines(SHARED_SOURCE)

setup(
    ext_modules=COMPILED,
    options={
        "build_ext": {"parallel": os.cpu_count()},
        "bdist_wheel": {"py_limited_api": "cp311"} if STABLE_ABI else {},
    },
)
