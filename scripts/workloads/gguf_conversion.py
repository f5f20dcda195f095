"""A GGUF file as a plain model folder: weights dequantised into safetensors, tokenizer, chat template, settings.

    python scripts/workloads/gguf_conversion.py FILE.gguf FOLDER float32

transformers reads the file and dequantises it, but marks the model as quantised, and such a model cannot be saved.
So its weights go into a fresh model of the same settings. What was written is read back and compared: every weight,
the tokenizer on a sample text, and greedy tokens. `gguf` and `accelerate` must be importable; `real_models.py` sees
to that, and it is what scripts should use.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SAMPLE = "The capital of France is"
CHECKED_TOKENS = 5


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class, settings, weights and dtype that is not marked as quantised."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config).to(model.dtype).eval()
    plain.load_state_dict(model.state_dict())
    plain.generation_config = copy.deepcopy(model.generation_config)
    return plain


def greedy_tokens(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """The first `CHECKED_TOKENS` tokens that follow the prompt."""
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=CHECKED_TOKENS, do_sample=False)
    return output[0, len(prompt) :].tolist()


def check_same(folder: Path, source: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError unless what `folder` holds is the source and its tokenizer."""
    read, read_tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    weights, read_weights = source.state_dict(), read.state_dict()
    differing = [name for name in weights if not _equal(weights[name], read_weights.get(name))]
    if differing:
        raise ValueError(f"weights read back must equal those written, got others in {differing[0]}; write them again")
    prompt, read_prompt = tokenizer(SAMPLE)["input_ids"], read_tokenizer(SAMPLE)["input_ids"]
    if prompt != read_prompt or tokenizer.chat_template != read_tokenizer.chat_template:
        raise ValueError("the tokenizer read back must equal the one written, got another; write it again")
    wanted, got = greedy_tokens(source, prompt), greedy_tokens(read, prompt)
    if wanted != got:
        raise ValueError(f"greedy tokens must be those of the GGUF model, {wanted}, got {got}; write the model again")


def _equal(wanted: torch.Tensor, got: torch.Tensor | None) -> bool:
    return got is not None and wanted.dtype == got.dtype and torch.equal(wanted, got)


def convert(gguf: Path, folder: Path, *, dtype: torch.dtype) -> None:
    """Writes the model and checks it. Raises ValueError where the check fails."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype).eval()
    plain_copy(source).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    check_same(folder, source, tokenizer)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), dtype=getattr(torch, sys.argv[3]))
