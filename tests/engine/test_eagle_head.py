"""Checkpoints of EAGLE-1 heads: the published layout, what may be missing, and what is refused."""

import pytest
import torch
from plain_eagle import random_head
from safetensors.torch import load_file, save_file
from tiny_models import SHAPE, tiny_model

from stand.drafters.eagle.head import EagleHead

SIZE, INNER, KEYS = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["hidden_size"] // 2
LAYER = {
    "self_attn.q_proj.weight": (SIZE, SIZE),
    "self_attn.k_proj.weight": (KEYS, SIZE),
    "self_attn.v_proj.weight": (KEYS, SIZE),
    "self_attn.o_proj.weight": (SIZE, SIZE),
    "mlp.gate_proj.weight": (INNER, SIZE),
    "mlp.up_proj.weight": (INNER, SIZE),
    "mlp.down_proj.weight": (SIZE, INNER),
    "post_attention_layernorm.weight": (SIZE,),
}


def published(**changes: tuple[int, ...] | None) -> dict[str, torch.Tensor]:
    """Made-up weights with the names of published heads; changes: other shapes by name, None leaves a name out."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed_tokens.weight": (SHAPE["vocab_size"], SIZE), "fc.weight": (SIZE, 2 * SIZE), "fc.bias": (SIZE,)}
    shapes |= {f"layers.0.{name}": shape for name, shape in LAYER.items()}
    shapes |= changes
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items() if shape is not None}


@torch.inference_mode()
def estimate(head: EagleHead) -> torch.Tensor:
    head.config._attn_implementation = "sdpa"
    features = torch.randn(1, 5, SIZE, generator=torch.Generator().manual_seed(1))
    return head(features, torch.tensor([[4, 5, 6, 7, 8]]), torch.arange(5)[None])


@pytest.mark.parametrize("target", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_published_heads_are_read(target, name, tmp_path):
    tensors = published()
    write = torch.save if name.endswith(".bin") else save_file
    write(tensors, tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        head = EagleHead.load(tiny_model(target), path)
        own = head.state_dict()
        assert all(torch.equal(own[key], value) for key, value in tensors.items())
        assert not own.keys() - tensors.keys() or all(not own[key].any() for key in own.keys() - tensors.keys())


def test_embeddings_of_its_own_are_saved_with_a_head(tmp_path):
    """Frequent tokens are named for published heads, too, which are saved then."""
    save_file({name: value.bfloat16() for name, value in published().items()}, tmp_path / "model.safetensors")
    head = EagleHead.load(tiny_model("llama"), tmp_path)
    head.restrict([3, 4, 5])
    head.save(tmp_path)
    again = EagleHead.load(tiny_model("llama"), tmp_path)
    assert torch.equal(estimate(again), estimate(head)) and again.vocabulary.tolist() == [3, 4, 5]
    assert all(not name.startswith("embed") for name, _ in again.named_parameters())  # nothing trains them


def test_the_first_estimate_is_what_the_paper_writes():
    """One pair: attention sees itself alone, so the layer is o(v(x)) without a norm before it, and the feed-forward."""
    model = tiny_model("llama")
    head = random_head(model)
    head.config._attn_implementation = "sdpa"
    feature, token = torch.randn(SIZE), 9
    with torch.inference_mode():
        got = head(feature[None, None], torch.tensor([[token]]), torch.tensor([[3]]))[0, 0]
        hidden = head.fc(torch.cat([model.get_input_embeddings().weight[token], feature]))
        layer = head.layers[0]
        value = layer.self_attn.v_proj(hidden).view(2, -1).repeat_interleave(2, dim=0).flatten()
        hidden = hidden + layer.self_attn.o_proj(value)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    torch.testing.assert_close(got, hidden)


def test_parts_that_may_be_missing_count_as_published_code_has_them(tmp_path):
    """No embeddings: the target's; no biases: zero; a norm before the attention: applied."""
    save_file(published(**{"embed_tokens.weight": None, "fc.bias": None}), tmp_path / "model.safetensors")
    head = EagleHead.load(tiny_model("qwen2"), tmp_path)
    assert head.embed_tokens is None and head._embedding[0] is tiny_model("qwen2").get_input_embeddings()
    assert not head.fc.bias.any()
    plain = estimate(head)
    normed = published(**{"embed_tokens.weight": None, "fc.bias": None})
    normed["layers.0.input_layernorm.weight"] = torch.full((SIZE,), 0.5)
    save_file(normed, tmp_path / "model.safetensors")
    assert not torch.allclose(estimate(EagleHead.load(tiny_model("qwen2"), tmp_path)), plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc.weight": (SIZE, SIZE)}, r"fc.weight must be \[32, 64\] for this target, got \[32, 32\]"),
        ({"layers.0.mlp.up_proj.weight": (INNER + 8, SIZE)}, r"mlp.up_proj.weight must be \[48, 32\]"),
        ({"embed_tokens.weight": (50, SIZE)}, r"embed_tokens.weight must be \[61, 32\]"),
        ({"layers.0.self_attn.v_proj.weight": None}, "lacks layers.0.self_attn.v_proj.weight"),
        ({"midlayer.hidden_norm.weight": (SIZE,)}, "got midlayer.hidden_norm.weight beyond them"),
        ({"layers.1.mlp.up_proj.weight": (INNER, SIZE)}, "got layers.1.mlp.up_proj.weight beyond them"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(changes, message, tmp_path):
    save_file(published(**changes), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        EagleHead.load(tiny_model("llama"), tmp_path)


def test_other_families_and_missing_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="families llama, qwen2, got 'gemma2'"):
        EagleHead(tiny_model("gemma2"))
    with pytest.raises(ValueError, match="model.safetensors or pytorch_model.bin"):
        EagleHead.load(tiny_model("llama"), tmp_path)


def test_a_saved_head_is_read_again_and_holds_nothing_of_the_target(tmp_path):
    head = random_head(tiny_model("qwen2")).to(torch.bfloat16).to(torch.float32)
    head.save(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(head.state_dict())
    assert "embed_tokens.weight" not in head.state_dict()
    assert torch.equal(estimate(EagleHead.load(tiny_model("qwen2"), tmp_path)), estimate(head))
