"""The command that tries the door to llama.cpp, with the stand-in of tests/oracles, and the file that it writes."""

import sys
import types

import fake_llama_cpp as fake
import llama_cpp_check
import numpy as np
import pytest
import torch
from measuring.beside_library import is_exact
from transformers import AutoModelForCausalLM
from workloads.gguf_writing import write_gguf

SMALL = ["--num-problems", "2", "--samples", "2", "--max-new-tokens", "6"]


class Writer:
    """In the place of `gguf.GGUFWriter`."""

    def __init__(self, path, kind):
        self.path, self.kind, self.settings, self.tensors, self.closed = path, kind, {}, {}, False
        Writer.last = self

    def add_tensor(self, name, values):
        assert name not in self.tensors
        self.tensors[name] = np.array(values)

    def close(self):
        self.closed = True

    def __getattr__(self, name):
        if name.startswith("write_"):
            return lambda: None
        return lambda value: self.settings.update({name.removeprefix("add_"): value})


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(fake, "VOCABULARY", 984)
    monkeypatch.setitem(sys.modules, "gguf", types.SimpleNamespace(GGUFWriter=Writer))
    before = torch.get_num_threads()
    yield fake.install(monkeypatch)
    torch.set_num_threads(before)


def test_the_arms_are_compared_and_wrong_answers_are_told(library, capsys):
    assert llama_cpp_check.main(SMALL) == 1
    output = capsys.readouterr().out
    assert "greedy texts that equal llama-cpp-python's: 2 of 2 without drafts, 2 with" in output
    arms = "llama-cpp-python, one by one", "engine without drafts", "engine  "
    assert all(arm in output for arm in arms)
    assert "right answers: 0 of 4" in output and output.endswith("NOT as it must be\n")


def test_a_file_that_is_given_is_not_asked_for_answers(library, capsys):
    assert llama_cpp_check.main([*SMALL, "some.gguf", "--tokenizer", str(llama_cpp_check.REASONER)]) == 0
    assert capsys.readouterr().out.endswith("\nas it must be\n")


def test_other_greedy_texts_are_told(library, capsys, monkeypatch):
    monkeypatch.setattr(fake.Llama, "generate", lambda self, tokens, **law: iter([5] * 500))
    assert not is_exact(llama_cpp_check.Model(llama_cpp_check.read_arguments(SMALL), "reasoner.gguf"))
    assert "python's: 0 of 2 without drafts, 0 with" in capsys.readouterr().out


def test_weights_are_written_as_llama_cpp_turns_them(library, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(llama_cpp_check.REASONER, dtype=torch.float32)
    write_gguf(model, tmp_path / "reasoner.gguf")
    weights, written = model.state_dict(), Writer.last
    assert written.closed and written.settings["tokenizer_model"] == "no_vocab"
    assert (written.settings["vocab_size"], written.settings["head_count_kv"]) == (984, 2)
    assert len(written.tensors) == len(weights) - 1  # embeddings are tied
    assert np.array_equal(written.tensors["blk.1.ffn_down.weight"], weights["model.layers.1.mlp.down_proj.weight"])
    own, turned = weights["model.layers.0.self_attn.k_proj.bias"].numpy(), written.tensors["blk.0.attn_k.bias"]
    assert np.array_equal(turned[64:128:2], own[64:96]) and np.array_equal(turned[65:128:2], own[96:128])
    assert np.array_equal(written.tensors["blk.0.attn_v.bias"], weights["model.layers.0.self_attn.v_proj.bias"])
