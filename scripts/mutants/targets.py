"""What is mutated, and the quick tests that judge it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GROWTH = ("growth", "candidates", "masks", "thresholds", "outcome", "draft_writer", "frontier")
GROWN = (  # the tests of production_drafts that draft with growth
    "test_growth_under_one_budget_is_adapted",
    "test_grown_chains_are_adapted",
    "test_settings_matter",
    "test_grown_drafts_come_as_often_as_their_laws_say",
)
SUFFIXES = (".py", ".pyx", ".pxi", ".h")


@dataclass(frozen=True)
class Target:
    name: str
    sources: tuple[str, ...]  # patterns below the project's root
    tests: tuple[str, ...]  # files, or one test of a file as FILE::TEST

    def files(self) -> list[Path]:
        found = {path for pattern in self.sources for path in ROOT.glob(pattern)}
        return sorted(path for path in found if path.suffix in SUFFIXES and path.name != "__init__.py")


def _tests(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


TARGETS = (
    Target(
        "verifiers",
        ("verifiers/**/*.py", "verifiers/**/*.pxi"),
        (
            *_tests("verifiers", "compiled", "draw_laws", "transport", "verifiers", "verifiers_step"),
            *_tests("trees", "draft_kinds"),
        ),
    ),
    Target(
        "sampling",
        ("stand/laws/sampling.py",),
        _tests("engine", "sampling", "filters", "processors", "generation_config", "hub"),
    ),
    Target(
        "processors",
        tuple(
            f"stand/laws/{name}.py"
            for name in ("processors", "node", "seen_tokens", "output_penalties", "grammars/allowed_tokens")
        ),
        (
            *_tests("engine", "processors", "sampling", "small_law", "grammars", "allowed_tokens", "output_penalties"),
            *_tests("gpu", "gpu_processors", "gpu_no_wait"),
        ),
    ),
    Target(
        "grammars",
        tuple(
            f"stand/laws/grammars/{name}.py"
            for name in ("masks", "matchers", "marks", "after_thoughts", "thinking_budget")
        ),
        (
            *_tests("engine", "grammar_walks", "matchers", "after_thoughts", "thinking_budget"),
            *_tests("engine", "drafts_of_grammars", "grammars"),
        ),
    ),
    Target(
        "captured",
        tuple(f"stand/gpu/{name}.py" for name in ("captured_step", "guarded_step", "step_body")),
        _tests(
            "gpu",
            *("gpu_processors", "gpu_step", "gpu_guarded_step", "gpu_features", "gpu_streams", "gpu_model_state"),
            *("gpu_put_back", "gpu_recurrent_step", "gpu_self_check", "gpu_runner", "gpu_no_wait", "gpu_moving_ropes"),
            *("gpu_small_law", "gpu_logprobs"),
        ),
    ),
    Target("filters", ("stand/laws/*.h",), _tests("engine", "filters", "sampling")),
    Target(
        "cache",
        ("stand/forward/cache/tree_cache.py", "stand/forward/packed_plan.py"),
        (
            *_tests(
                "engine",
                "forward",
                "packed_plan",
                "cache_memory",
                "few_token_attention",
                "paged_cache",
                "eagle_drafter",
                "engine",
                "reused_keys",
                "mps",
                "amd_intel",
            ),
            *_tests("gpu", "gpu_guarded_step"),
        ),
    ),
    Target(
        "drafters",
        ("stand/drafters/*.py", "stand/drafters/costs/*.py"),
        _tests(
            "engine",
            *("blended_drafter", "cost_drafts", "drafter_promises", "eagle_head", "foreign_drafter", "known_costs"),
            *("law_source", "law_trees", "model_drafter", "chain_length", "step_cost", "text_drafters", "engine"),
            *("assumed_costs", "draft_vocabulary", "eagle_drafter", "growing_draft", "paying_runs", "stream_weights"),
            *("sharing", "trained_parts", "drafts_of_grammars", "amd_intel"),
        ),
    ),
    Target(
        "trained",
        (
            "stand/drafters/heads/*.py",
            "stand/drafters/dflash/*.py",
            "stand/drafters/eagle/*.py",
            "stand/drafters/streams/*.py",
        ),
        (
            *_tests("engine", "eagle_drafter", "eagle_head", "foreign_head", "streaming_drafter", "stream_weights"),
            *_tests("engine", "dflash_head", "dflash_laws", "dflash_refusals", "dflash_rows"),
            *_tests("engine", "eagle3_head", "eagle3_rows", "mtp_head"),
            *_tests("engine", "law_source", "draft_vocabulary"),
            *_tests("engine", "paying_runs", "features", "growing_draft", "trained_parts"),
            *_tests("verifiers", "dflash_drafts", "eagle_drafts", "stream_drafts"),
        ),
    ),
    Target(
        "neighbours",
        ("stand/drafters/neighbours/*.py",),
        _tests("engine", "neighbour_laws", "neighbour_memory", "law_source"),
    ),
    Target("sharing", ("stand/sharing/*.py", "trees/locked_files.py"), _tests("engine", "news", "sharing")),
    Target("llama.cpp", ("stand/plugins/llama_cpp/*.py", "stand/plugins/foreign/*.py"), _tests("plugins", "llama_cpp")),
    Target("mlx", ("stand/plugins/mlx/*.py",), _tests("plugins", "mlx")),
    Target("merging", ("trees/blended/merging.py",), _tests("trees", "merging")),
    Target(
        "scheduling",
        (
            "stand/scheduling/*.py",
            "stand/plugins/open_runs.py",
            "stand/forward/cache/paged_cache.py",
            "stand/forward/long_factors.py",
        ),
        (
            *_tests(
                "engine", "open_run", "scheduler", "common_beginnings", "paged_cache", "page_allocator", "put_back"
            ),
            *_tests(
                "engine", "cancelled_requests", "given_back", "cache_memory", "stream", "long_factors", "rope_kinds"
            ),
            *_tests("gpu", "gpu_put_back", "gpu_recurrent_step", "gpu_moving_ropes", "gpu_open_run"),
            *_tests("plugins", "open_runs"),
            "tests/engine/test_step_cost.py::test_steps_of_a_real_model_are_timed",
            "tests/engine/test_devices.py::test_memory_ends_where_one_of_the_devices_is_full",
            "tests/engine/test_devices.py::test_offloaded_weights_write_the_same",
        ),
    ),
    Target(
        "recurrent",
        (
            "stand/forward/recurrent/*.py",
            "stand/gpu/kernel_scan.py",
            *(f"stand/fusion/forwards/{name}.py" for name in ("gated_norm", "delta_layer")),
        ),
        (
            *_tests("engine", "linear_attention", "recurrent_layers", "key_shape"),
            *_tests("gpu", "gpu_recurrent_step", "gpu_delta_layer", "gpu_guarded_step"),
        ),
    ),
    Target(
        "kinds",
        (
            *("stand/forward/latent_keys.py", "stand/forward/attention_shape.py", "stand/gpu/kernel_attention.py"),
            *("stand/gpu/device_cache.py", "stand/gpu/tuning/attention_tiles.py"),
            *(f"stand/gpu/packets/{name}" for name in ("work_list.py", "packing.pxi")),
        ),
        (
            *_tests("engine", "latent_keys", "reused_keys"),
            *_tests("gpu", "gpu_work_list", "gpu_packing", "gpu_tiles", "gpu_guarded_step", "gpu_unequal_layers"),
        ),
    ),
    Target(
        "mixtures",
        (
            *(f"stand/fusion/{name}.py" for name in ("forwards/experts", "forwards/router", "cpu/experts")),
            "stand/gpu/tuning/expert_tiles.py",
        ),
        (
            *_tests("engine", "cpu_experts"),
            *_tests("gpu", "gpu_experts", "gpu_route", "gpu_sigmoid_route", "gpu_router_fusion", "gpu_compile"),
        ),
    ),
    Target(
        "media",
        ("stand/media/*.py", "stand/texts/chats.py", "stand/forward/window_check.py"),
        _tests("engine", "images", "prompts", "multimodal_models"),
    ),
    Target(
        "logprobs",
        ("stand/laws/logprobs.py", "stand/texts/confidence.py", "stand/texts/stop.py"),
        (*_tests("engine", "logprobs", "stop"), *_tests("gpu", "gpu_logprobs")),
    ),
    Target(
        "devices",
        ("stand/forward/devices.py", "stand/forward/cache/key_shape.py"),
        (
            *_tests("engine", "devices", "key_shape"),
            "tests/engine/test_sharded_ranks.py::test_shards_in_one_process_are_served_without_fusion",
            "tests/engine/test_sharded_ranks.py::test_steps_of_shards_are_timed_by_themselves",
            "tests/engine/test_sharded_ranks.py::test_synced_gpus_needs_ranks",
        ),
    ),
    Target(
        "drafts",
        ("trees/include/noise.pxi", "trees/draft.py", "trees/parents.py"),
        (*_tests("trees", "draft", "noise", "draft_kinds"), *_tests("verifiers", "verifiers_step")),
    ),
    Target(
        "growth",
        tuple(f"trees/blended/growth/{name}.h" for name in GROWTH),
        (
            *(f"tests/verifiers/test_production_drafts.py::{test}" for test in GROWN),
            *_tests("trees", "blended", "growth_twin", "outcome", "outside_laws", "token_masks"),
        ),
    ),
)


def all_files() -> Iterator[tuple[Target, Path]]:
    for target in TARGETS:
        for path in target.files():
            yield target, path
