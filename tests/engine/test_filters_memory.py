"""The compiled filters under an address sanitizer: no pass reads or writes beyond a row, a block or a cell.

`<=` in place of `<` in a pass over a block changes no law where the next block repairs it, so no other test can tell.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

import stand

HEADERS = Path(stand.__file__).parent
SANITIZED = ["c++", "-std=c++17", "-O1", "-g", "-fsanitize=address", "-fno-omit-frame-pointer"]
ALL_SETTINGS = """
#include "laws/filters.h"

// Arrays of exactly the size that is promised, so that every number beyond is noticed; `missing`: of one array.
void try_all(int64_t size, stand::Vectors vectors, int missing) {
    uint32_t state = 1;
    std::vector<float> scores(3 * size), laws(3 * size - missing);
    for (float& score : scores) {
        state = state * 1664525u + 1013904223u;
        score = state >> 28 ? static_cast<float>(state >> 16) / 4096 : stand::LOWEST;  // with ties, some forbidden
    }
    scores[size - 1] = scores[2 * size - 1] = scores[3 * size - 1] = 17;
    for (int64_t top_k : {0, 1, 40, 600})
        for (double top_p : {1.0, 0.9, 1e-9})
            for (float min_p : {0.0f, 0.1f})
                for (int64_t count : {int64_t(0), std::min<int64_t>(size, 10), size}) {
                    std::vector<int32_t> ids(3 * count);
                    std::vector<float> best(3 * count);
                    stand::FilterRows rows{scores.data(), 3, size, {0.7f, top_k, top_p, min_p}, vectors,
                                           laws.data(), count, ids.data(), best.data()};
                    stand::filter_rows(rows, 1, nullptr);
                }
}

int main(int count, char** words) {
    for (int64_t size : {1, 15, 16, 17, 511, 512, 513, 1024, 1500})
        for (int32_t vectors = 0; vectors <= static_cast<int32_t>(stand::widest_vectors()); ++vectors)
            try_all(size, static_cast<stand::Vectors>(vectors), count - 1);
}
"""


def built(source: str, folder: Path) -> Path | None:
    """The program; None where it cannot be built and run."""
    (folder / "main.cpp").write_text(source, encoding="utf-8")
    program = folder / "main"
    command = [*SANITIZED, f"-I{HEADERS}", str(folder / "main.cpp"), "-o", str(program)]
    return program if subprocess.run(command, capture_output=True).returncode == 0 else None


def has_sanitizer(folder: Path) -> bool:
    if shutil.which("c++") is None:
        return False
    program = built("int main() {}", folder)
    return program is not None and subprocess.run([program], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def filters(tmp_path_factory) -> Path:
    """A program that filters rows of many sizes by all settings."""
    folder = tmp_path_factory.mktemp("filters")
    if not (HEADERS / "laws" / "filters.h").is_file() or not has_sanitizer(folder):
        pytest.skip("needs the source tree, and a C++ compiler with an address sanitizer")
    return built(ALL_SETTINGS, folder)


@pytest.mark.long
def test_nothing_beyond_an_array_is_touched(filters):
    done = subprocess.run([filters], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_number_beyond_is_noticed(filters):
    done = subprocess.run([filters, "missing"], capture_output=True, text=True)
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr
