"""Which models the engine can serve: refused families by reason, and a self-check on the loaded weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.forward.cache.cache_argument import cache_argument
from stand.forward.cache.key_shape import remember
from stand.forward.cache.tree_cache import SwappedForwards, TreeCache
from stand.forward.devices import input_device, is_split
from stand.forward.long_factors import long_factors, served_positions, switching_length
from stand.forward.model import LOGIT_TOLERANCES, cast_dtype, max_positions, run_plan, text_config
from stand.forward.packed_plan import StepPlan
from stand.forward.ranks import refuse_going_apart
from stand.forward.recurrent.layers import recurrent_layers
from stand.forward.tree_attention import OwnMaskError, exclusive, tree_attention
from stand.forward.window_check import window_disagreement
from stand.trees import NO_PARENT, DraftBatch, DraftTree

SERVED_LAYERS = frozenset({"full_attention", "sliding_attention"})
RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid"})  # where all are among `recurrent_layers`
KEEPING_KEYS = SERVED_LAYERS | {"hybrid"}
LAYERS_BESIDE = frozenset({"moe", "mlp"})  # of models with such layers: they keep nothing
CHECK_TOKENS = 6  # committed tokens before the check's tree
CHECK_PARENTS = (NO_PARENT, 0, 0, 1, 1, 2, 5)
KEPT_NODE = 6  # of that tree
MODEL_ERRORS = RuntimeError, AttributeError, TypeError, ValueError, LookupError  # what a model's own code raises
STEP_TOLERANCE = 1e-4  # rules that differ in few tokens differ by little; rounding in 16 bits would hide that
SMALLEST_MASK = 6e4  # about float16's largest number: models mask tokens with it, a larger one or an infinity
_CHECKED: WeakKeyDictionary[PreTrainedModel, list[tuple[str, type]]] = WeakKeyDictionary()  # as `_kinds_of` says


class UnsupportedModelError(ValueError):
    """The engine cannot decode this model exactly."""


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model whose layers cannot hold a tree or whose masks say what attention is not told, then compare one
    small tree forward with plain forwards, and a forward with a far position in it with one without. In the model's
    own type, also inside `torch.autocast`: rounding of 16 bits would hide what differs."""
    _refuse_wrappers(model)
    _refuse_by_configuration(model)
    _refuse_absent_weights(model)
    _refuse_training(model)
    _refuse_compiled(model)
    with exclusive(model), torch.autocast(input_device(model).type, enabled=False):
        _refuse_other_masks(model)
        _compare_forwards(model)
    _CHECKED[model] = _kinds_of(model)


def _refuse_other_masks(model: PreTrainedModel) -> None:
    with failures_refused(type(model).__name__, "run a plain forward over a short text"):
        disagreement = window_disagreement(model)
    if disagreement is not None:
        raise UnsupportedModelError(
            f"a layer's attention must be told the window that its mask has, got {type(model).__name__}, where "
            f"{disagreement}; tree attention makes its own masks, so the model is served only where its configuration "
            "has no sliding window"
        )


def _compare_forwards(model: PreTrainedModel) -> None:
    with failures_refused(type(model).__name__, "run one packed forward with tree attention"):
        difference = tree_difference(model)
    tolerance = LOGIT_TOLERANCES.get(model.dtype)
    if tolerance is None:
        raise UnsupportedModelError(
            f"the model's dtype must be float32, bfloat16 or float16, got {model.dtype}; load it with dtype="
        )
    if difference > tolerance:
        tolerance = LOGIT_TOLERANCES.get(cast_dtype(model), tolerance)
    if math.isnan(difference):
        raise UnsupportedModelError(
            f"a model's logits must be numbers, got NaN, or none below {SMALLEST_MASK:g}, from {type(model).__name__}; "
            "check the model's weights and dtype"
        )
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"a tree forward of {type(model).__name__} must equal plain forwards up to rounding "
            f"({tolerance:g} of the logits' spread), got {difference:.3g}; "
            "its positions or its attention look at cache slots rather than at position_ids, or what it makes of a "
            "token follows from the others of the forward (activations quantised together), so it cannot be served"
        )
    if recurrent_layers(model):
        _compare_states(model, tolerance)
    with failures_refused(type(model).__name__, "run a forward whose last position is its farthest"):
        difference = far_position_difference(model)
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"tokens of {type(model).__name__} must not depend on later positions of the same forward (up to rounding, "
            f"{tolerance:g} of the logits' spread), got {difference:.3g} from position {max_positions(model) - 1}; "
            "rows of other lengths share a forward, so it cannot be served"
        )


@contextmanager
def failures_refused(name: str, rule: str, *, of_error: Callable[[Exception], object] = str) -> Iterator[None]:
    """Within it, whatever a model's own code raises is a refusal: what the class `name` must do, and what came instead.
    A lack of memory says nothing of the model. of_error: what is told of an error."""
    try:
        yield
    except (torch.OutOfMemoryError, UnsupportedModelError):
        raise
    except OwnMaskError as error:
        raise UnsupportedModelError(f"{name} cannot be served: {error}") from error
    except MODEL_ERRORS as error:
        raise UnsupportedModelError(
            f"{name} must {rule}, got {type(error).__name__}: {of_error(error)}; this model class cannot be served"
        ) from error


def _compare_states(model: PreTrainedModel, tolerance: float) -> None:
    with failures_refused(type(model).__name__, "run steps over its cache, and a tree over states that it kept"):
        own_steps = own_steps_difference(model) if model.dtype is torch.float32 else 0.0
        kept = kept_difference(model)
    if not own_steps <= STEP_TOLERANCE:
        raise UnsupportedModelError(
            f"steps of {type(model).__name__} over transformers' own cache must equal its forwards over whole texts "
            f"(up to rounding, {STEP_TOLERANCE:g} of the logits' spread), got {own_steps:.3g}: which of them is meant "
            "is not known (Mamba-2's steps leave time_step_min out); it cannot be served"
        )
    if not kept <= tolerance:
        raise UnsupportedModelError(
            f"the states of {type(model).__name__} must follow the kept path of a tree (up to rounding, {tolerance:g} "
            f"of the logits' spread), got {kept:.3g} after {len(path_to(KEPT_NODE))} tokens; it cannot be served"
        )


def _refuse_wrappers(model: object) -> None:
    """What holds a model of transformers but is none: adapters, compiled and replicated ones."""
    foreign = {"llama_cpp": ("a Llama of llama.cpp", "llama_cpp"), "mlx_lm": ("a model of mlx-lm", "mlx")}
    kind, door = foreign.get(type(model).__module__.partition(".")[0], ("", ""))
    if door:
        raise UnsupportedModelError(f"wrap needs a transformers model, got {kind}; use stand.plugins.{door}.wrap")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):  # the base does without it
        raise UnsupportedModelError(
            f"a prompt must be token ids alone, got {type(model).__name__} with a learned one; call its own generate"
        )
    inner = {"get_base_model": "model.get_base_model()", "_orig_mod": "model._orig_mod", "module": "model.module"}
    for attribute, remedy in inner.items():
        if not isinstance(model, PreTrainedModel) and hasattr(model, attribute):
            raise UnsupportedModelError(
                f"wrap needs a transformers model itself, got {type(model).__name__} around one; pass {remedy}"
            )


def refuse_unready(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for what may have come over a model since it was wrapped. One with modules or weights
    of other classes is checked once more."""
    _refuse_training(model)
    _refuse_compiled(model)
    refuse_going_apart(model)
    if model in _CHECKED and _CHECKED[model] != _kinds_of(model):
        check_model(model)


def _kinds_of(model: PreTrainedModel) -> list[tuple[str, type]]:
    """Of its modules and weights, by name. Those of the same classes compute the same, with other numbers."""
    return [(name, type(part)) for name, part in (*model.named_modules(), *model.named_parameters())]


def _refuse_training(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError where the training mode of a module changes what the model computes."""
    training = [module for module in model.modules() if module.training]
    rates = [0.0, *(rate for module in training for rate in _noise_rates(module))]
    if model.training:
        rates.append(getattr(text_config(model), "attention_dropout", 0.0) or 0.0)
    if max(rates) > 0:
        raise UnsupportedModelError(
            f"the model must be in evaluation mode, got training mode with dropout or other noise of {max(rates):g}; "
            "call model.eval()"
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in training):
        raise UnsupportedModelError(
            "the model must keep its keys and values, got training mode with gradient checkpointing, which drops them; "
            "call model.eval()"
        )


def _noise_rates(module: torch.nn.Module) -> Iterator[float]:
    """Of what a module does at random in training: dropout, as a module or numbers of its own, and routers' jitter."""
    is_dropout = isinstance(module, torch.nn.Dropout) or "Dropout" in type(module).__name__  # peft has others
    for name, value in vars(module).items():
        if "drop" in name or "jitter" in name or is_dropout and name == "p":
            values = value.values() if isinstance(value, dict) else (value,)  # a number, or one of each adapter
            yield from (one for one in values if type(one) is float or is_dropout and type(one) is int)


def _refuse_compiled(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError where torch.compile has taken a module: it would trace what swaps its forwards."""
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable"):
            raise UnsupportedModelError(
                f"wrap needs a model that is not compiled, got a compiled forward of {name or type(model).__name__}; "
                "load the model anew, or remove what torch.compile has put there (del module.forward)"
            )


def _refuse_absent_weights(model: PreTrainedModel) -> None:
    if is_split(model):
        raise UnsupportedModelError(
            f"processes may share weights by tensor parallelism alone or by shards alone, got {type(model).__name__} "
            'split over several otherwise; load it with DistributedConfig(tp_size=) alone, or device_map="auto"'
        )
    refuse_going_apart(model)
    if input_device(model).type == "meta":
        raise UnsupportedModelError(
            f"the model's weights must be loaded, got {type(model).__name__} on meta; load it with from_pretrained"
        )


def _refuse_by_configuration(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"wrap needs a transformers causal language model, got {name}; load it with AutoModelForCausalLM"
        )
    config = text_config(model)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"the model must be decoder-only, got the encoder-decoder {name}; call model.generate for it"
        )
    if not model.can_generate() or model.generation_config is None:
        lack = "its generation_config" if model.can_generate() else "a generate of its own"
        raise UnsupportedModelError(
            f"the model must be one that generates text, got {name} without {lack}; load it with AutoModelForCausalLM"
        )
    layer_types = list(getattr(config, "layer_types", None) or ())
    has_known_states = 0 < sum(kind in RECURRENT_LAYERS for kind in layer_types) == len(recurrent_layers(model))
    others = set(layer_types) - SERVED_LAYERS - (RECURRENT_LAYERS | LAYERS_BESIDE if has_known_states else set())
    keeps_keys_alone = bool(layer_types) and SERVED_LAYERS.issuperset(layer_types)  # Granite 4 has such sizes, too
    if others or (getattr(model, "_is_stateful", False) and not (has_known_states or keeps_keys_alone)):
        kinds = ", ".join(sorted(others)) or "recurrent state"
        raise UnsupportedModelError(
            f"every layer must keep keys and values per token, or a state by the gated delta rule or Mamba-2, got "
            f"{name} with {kinds}; another state cannot hold the branches of a tree, so siblings would mix"
        )
    if has_known_states and set(layer_types).isdisjoint(KEEPING_KEYS):
        raise UnsupportedModelError(
            f"a layer at least must keep keys and values, got {name} with none; transformers' own cache needs one, too"
        )
    if getattr(config, "alibi", False):
        raise UnsupportedModelError(
            f"positions must be rotary, got ALiBi in {name}; its bias counts cache slots, which a tree does not follow"
        )
    if not (model._supports_attention_backend or has_known_states):  # classes with states do not say that they do
        raise UnsupportedModelError(
            f"a model must call its attention through transformers' AttentionInterface, got {name}, which does not; "
            "where it is remote code, use the library's own class"
        )


def check_case(model: PreTrainedModel) -> tuple[np.ndarray, DraftBatch]:
    """A prompt of CHECK_TOKENS tokens, int32, and a tree of 7 nodes to stand behind it."""
    generator, size = np.random.default_rng(0), text_config(model).vocab_size
    prompt = generator.integers(0, size, CHECK_TOKENS).astype(np.int32)
    tokens = generator.integers(0, size, len(CHECK_PARENTS)).astype(np.int32)
    return prompt, DraftBatch.concatenate([check_tree(tokens)])


def check_tree(tokens: np.ndarray) -> DraftTree:
    """Of 7 tokens."""
    empty = np.zeros((len(tokens), 1), dtype=np.int32)
    return DraftTree(tokens, np.array(CHECK_PARENTS, dtype=np.int32), empty, empty.astype(np.float32))


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest |logit - expected logit| of [N, V] logits, divided by the spread of the expected ones: twice as far as
    their largest lies above their median, of those that are no masks. NaN where a logit is."""
    is_score = expected.abs() < SMALLEST_MASK
    middle = expected.masked_fill(~is_score, torch.nan).nanmedian(dim=-1).values
    spread = float(2 * (expected.masked_fill(~is_score, -torch.inf).amax(dim=-1) - middle).mean())
    differences = (logits - expected).abs().masked_fill(logits == expected, 0.0)  # infinities may be equal, too
    return float(differences.max()) / max(spread, 1e-12)


@torch.inference_mode()
def tree_difference(model: PreTrainedModel) -> float:
    """`relative_difference` of one packed forward over a small tree to plain forwards over its paths."""
    prompt, batch = check_case(model)
    logits, size = tree_logits(model, prompt, batch), text_config(model).vocab_size
    if logits.shape[-1] != size:  # some are gathered twice from the ranks of transformers 5.16
        raise UnsupportedModelError(
            f"a model must score the {size} tokens of its vocabulary, got {logits.shape[-1]} logits of a token from "
            f"{type(model).__name__}; set config.vocab_size, or load it in one process"
        )
    return relative_difference(logits, _plain_logits(model, prompt, batch.token_ids))


@torch.inference_mode()
def own_steps_difference(model: PreTrainedModel) -> float:
    """`relative_difference` of steps of one token over transformers' cache to one forward over all tokens."""
    prompt, batch = check_case(model)
    tokens = np.concatenate([prompt, batch.token_ids]).astype(np.int64)
    input_ids = torch.from_numpy(tokens).to(input_device(model))[None]
    output = model(input_ids=input_ids[:, :CHECK_TOKENS], use_cache=True)
    logits = [output.logits[0]]
    argument = cache_argument(model)
    for place in range(CHECK_TOKENS, len(tokens)):
        past, position_ids = {argument: output[argument]}, torch.tensor([[place]], device=input_device(model))
        output = model(input_ids=input_ids[:, place : place + 1], position_ids=position_ids, use_cache=True, **past)
        logits.append(output.logits[0])
    return relative_difference(torch.cat(logits).float(), model(input_ids=input_ids, use_cache=False).logits[0].float())


@torch.inference_mode()
def kept_difference(model: PreTrainedModel) -> float:
    """`relative_difference` of the tree's logits behind a prompt of two chunks and a kept path of the same tree."""
    prompt, batch = check_case(model)
    path = path_to(KEPT_NODE)
    cache = TreeCache(num_rows=1, room=2 * CHECK_TOKENS + 2 * batch.num_nodes)
    with tree_attention(model):
        for first, last in ((0, CHECK_TOKENS // 2), (CHECK_TOKENS // 2, CHECK_TOKENS)):
            run_plan(model, cache, StepPlan.for_prompt(prompt[first:last], first, row=0, device=input_device(model)))
        run_plan(model, cache, StepPlan.for_drafts(batch, np.array([CHECK_TOKENS]), device=input_device(model)))
        cache.keep_states([KEPT_NODE])
        places = CHECK_TOKENS + np.arange(len(path))
        cache.compact(np.zeros(len(path), dtype=np.int64), CHECK_TOKENS + np.array(path), places)
        plan = StepPlan.for_drafts(batch, np.array([CHECK_TOKENS + len(path)]), device=input_device(model))
        logits = run_plan(model, cache, plan).float()
    kept = np.concatenate([prompt, batch.token_ids[path]])
    return relative_difference(logits, _plain_logits(model, kept, batch.token_ids))


@torch.inference_mode()
def far_position_difference(model: PreTrainedModel) -> float:
    """`relative_difference` of CHECK_TOKENS logits of a forward, with and without a token at the last position that is
    served: rotary factors that follow from the largest one show here. By `long_factors` too, if those serve."""
    alone, farthest = _first_logits(model, CHECK_TOKENS), max(max_positions(model) or 0, CHECK_TOKENS)
    difference = relative_difference(_first_logits(model, farthest), alone)
    if switching_length(model) is None:
        return difference
    with long_factors(model):
        alone = _first_logits(model, CHECK_TOKENS)
    return max(difference, relative_difference(_first_logits(model, served_positions(model)), alone))


def _first_logits(model: PreTrainedModel, end: int) -> torch.Tensor:
    """[CHECK_TOKENS, V] float32 of a forward with one more token at position `end` - 1, if that is another one."""
    prompt = check_case(model)[0].astype(np.int64)
    input_ids = torch.from_numpy(np.append(prompt, prompt[0]))[None].to(input_device(model))
    position_ids = torch.tensor([[*range(CHECK_TOKENS), end - 1]], device=input_device(model))
    seen = torch.ones_like(input_ids)  # else a gap in positions is taken for two packed texts
    asked = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": seen}
    shown = slice(CHECK_TOKENS + (end > CHECK_TOKENS))
    output = model(**{name: tensor[:, shown] for name, tensor in asked.items()}, use_cache=False)
    return output.logits[0, :CHECK_TOKENS].float()


def tree_logits(
    model: PreTrainedModel, prompt: np.ndarray, batch: DraftBatch, *, fusion: SwappedForwards | None = None
) -> torch.Tensor:
    """[N, V] float32 by one prefill and one packed forward."""
    cache = TreeCache(num_rows=1, room=CHECK_TOKENS + batch.num_nodes, fusion=fusion)
    with tree_attention(model):
        run_plan(model, cache, StepPlan.for_prompt(prompt, 0, row=0, device=input_device(model)), logits_to_keep=1)
        plan = StepPlan.for_drafts(batch, np.array([CHECK_TOKENS]), device=input_device(model))
        plan.attentions = []
        logits = run_plan(model, cache, plan).float()
    remember(model, cache, dict.fromkeys(plan.attentions))
    return logits


def _plain_logits(model: PreTrainedModel, prompt: np.ndarray, tokens: np.ndarray) -> torch.Tensor:
    """[N, V] float32 by a separate plain forward over the path to each leaf.

    With the model's own attention, except that soft-capped scores are transformers' eager attention's: the sdpa that
    Gemma 2 has by default in transformers 5.16 and 5.17 leaves the cap out.
    """
    is_capped = getattr(text_config(model), "attn_logit_softcapping", None) is not None
    logits: dict[int, torch.Tensor] = {}
    with tree_attention(model, "eager") if is_capped else nullcontext():
        for leaf in set(range(len(tokens))) - set(CHECK_PARENTS):
            path = path_to(leaf)
            logits |= zip(path, _path_logits(model, prompt, tokens[path]), strict=True)
    return torch.stack([logits[node] for node in range(len(tokens))])


def path_to(node: int) -> list[int]:
    """Of the check's tree, from the root on."""
    path = [node]
    while CHECK_PARENTS[path[0]] != NO_PARENT:
        path.insert(0, CHECK_PARENTS[path[0]])
    return path


def _path_logits(model: PreTrainedModel, prompt: np.ndarray, path: np.ndarray) -> torch.Tensor:
    """[len(path), V] float32 after each token of `path`, which follows the prompt."""
    input_ids = np.concatenate([prompt, path]).astype(np.int64)
    output = model(input_ids=torch.from_numpy(input_ids).to(input_device(model))[None], use_cache=False)
    return output.logits[0, -len(path) :].float()
