"""The drafter without torch: it imports, drafts, learns, saves and loads; what needs the engine names the remedy."""

import subprocess
import sys

import pytest

import stand

BLOCKED = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"

DRAFTS = """
import numpy as np
import stand
from stand.trees import BlendedLookup, LookupTree, TreeShape

run = np.array([5, 6, 7, 8] * 10, dtype=np.int32)
lookup = BlendedLookup()
lookup.learn(run[:0], run)
lookup.save("walk.lookup")
tokens = []
for one in (lookup, stand.BlendedLookup.load("walk.lookup")):
    batch = one.draft([run[:6]], 8, seed=0, rows=[0], steps=[0], kind="sampled")
    batch[0].check()
    tokens.append(batch.token_ids.tolist())
assert tokens[0] == tokens[1] and tokens[0][:4] == [6, 7, 8, 5], tokens
table = LookupTree()
table.learn(run[:0], run)
shaped = table.draft([run[:6]], TreeShape.paper(), seed=0, rows=[0], steps=[0], kind="deterministic")
assert shaped.token_ids[:3].tolist() == [6, 7, 8], shaped
print("drafted")
"""


def run_python(code, folder):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)


def test_drafts_without_torch(tmp_path):
    result = run_python(BLOCKED + DRAFTS, tmp_path)
    assert result.stdout.split() == ["drafted"], result.stderr


@pytest.mark.parametrize(
    "statement",
    [
        "import stand; stand.wrap",
        "from stand import BlendedDrafter",
        "from stand.engine import Engine",
        "from stand.wrapping import wrap",
        "import stand.verifiers",
        "from stand.plugins.generate import stand_generate",
    ],
)
def test_what_needs_the_engine_names_the_remedy(statement, tmp_path):
    result = run_python(BLOCKED + statement, tmp_path)
    assert "MissingExtraError" in result.stderr, result.stderr
    assert 'pip install "stand-decoding[engine]"' in result.stderr
    assert "without torch and transformers" in result.stderr


def test_with_the_engine_nothing_is_refused():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert stand.wrap.__name__ == "wrap"
