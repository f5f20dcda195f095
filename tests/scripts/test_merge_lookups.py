"""The command that merges lookups: its figures, and what it says where it cannot."""

import json

import merge_lookups
import numpy as np

from stand.trees import BlendedLookup


def saved(path, tokens, **settings):
    lookup = BlendedLookup(**settings)
    lookup.learn([], np.array(tokens, dtype=np.int32))
    lookup.save(path)
    return str(path)


def test_two_files_become_one(tmp_path, capsys):
    files = [saved(tmp_path / "one", [1, 2, 3, 4] * 3), saved(tmp_path / "other", [5, 6, 7, 8] * 3)]
    output = tmp_path / "merged"
    assert merge_lookups.main([*files, "--output", str(output), "--max-bytes", "4000000"]) == 0
    figures = json.loads(capsys.readouterr().out)
    lookup = BlendedLookup.load(output)
    assert figures == {
        "output": str(output),
        "num_files": 2,
        "num_contexts": len(lookup),
        "nbytes": lookup.nbytes,
        "max_bytes": 4_000_000,
        "file_bytes": output.stat().st_size,
    }
    for context, following in (([1, 2, 3], 4), ([5, 6, 7], 8)):
        assert lookup.predict(np.array(context, dtype=np.int32))[0][0] == following


def test_files_that_do_not_fit_together_are_told(tmp_path, capsys):
    files = [saved(tmp_path / "one", [1, 2]), saved(tmp_path / "other", [1, 2], depth=4)]
    assert merge_lookups.main([*files, "--output", str(tmp_path / "merged")]) == 2
    assert "merge_lookups: files must have one vocabulary and equal settings" in capsys.readouterr().err
    assert merge_lookups.main([files[0], "--output", str(tmp_path / "none" / "merged")]) == 2
    assert "--output" in capsys.readouterr().err
