"""Train the small reasoning model that the repository ships in `scripts/reasoner`.

    python scripts/train_reasoner.py --minutes 80              # train, then write scripts/reasoner
    python scripts/train_reasoner.py --evaluate                # held-out accuracy of scripts/reasoner

Training data are drawn without end by `workloads/problems.py` and `reasoning.py`; held-out problems never appear. Two single-threaded
processes average their gradients with gloo, in bfloat16 autocast: on a CPU that beats one process with two
threads. Matrices learn with Muon, the rest with AdamW. The learning rate is a function of the share of the
budget that is used up (minutes, or steps with `--steps`): warm-up, constant, then linearly to zero. A checkpoint
is written every few minutes and a run continues from it unless `--fresh` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from workloads.answers import extract_answer, majority_answer
from workloads.problems import (
    END_TOKEN,
    FAMILIES,
    PAD_TOKEN,
    PROBLEM_TOKEN,
    THINK_END,
    THINK_TOKEN,
    draw_problem,
    held_out_problems,
    write_prompt,
)
from workloads.reasoning import write_reasoning

REASONER = Path(__file__).resolve().parent / "reasoner"
# One digit; a word; signs with the spaces around them; white space.
PIECES = Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+ ?|\s+")
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}" + PROBLEM_TOKEN + "{{ message.content }}"
    "{% elif message.role == 'assistant' %}" + THINK_TOKEN + "{{ message.content }}" + END_TOKEN + "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + THINK_TOKEN + "{% endif %}"
)
# Keep freed memory in the process: returning and faulting it in again can cost more than the arithmetic.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
LENGTH_STEP = 32  # batches have lengths of this grid, so that the allocator can use its blocks again
WINDOW = 4  # batches drawn at once and sorted by length, so that little is padded
IGNORED = -100


def train_tokenizer(vocabulary_size: int, *, seed: int, samples: int = 8000) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose numbers are single digits, trained on freshly drawn texts."""
    rng = random.Random(f"tokenizer {seed}")
    texts = []
    for _ in range(samples):
        problem = draw_problem(rng, held_out=False)
        texts.append(f"{problem.problem}\n{write_reasoning(problem, rng).replace(THINK_END, '')}")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PIECES, behavior="isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    raw.decoder = decoders.ByteLevel()
    specials = [PAD_TOKEN, PROBLEM_TOKEN, THINK_TOKEN, END_TOKEN]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - 1,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    raw.add_tokens([AddedToken(THINK_END, special=False, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=[PROBLEM_TOKEN, THINK_TOKEN],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> torch.nn.Module:
    """A small Llama with tied embeddings and random weights.

    Not a Qwen2: for that model type AutoTokenizer replaces the folder's own splitting rule by Qwen2's.
    """
    torch.manual_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=(len(tokenizer) + 7) // 8 * 8,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=max(1, arguments.hidden // 128),
        attention_bias=True,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=arguments.attention)


def draw_batches(
    tokenizer: PreTrainedTokenizerFast, *, rows: int, seed: str, order_seed: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (input_ids [rows, L], labels [rows, L]); texts of similar length share a batch.

    Labels cover the reasoning and the answer, not the problem. `order_seed` is shared by all processes, so that
    their batches of one step have similar lengths and none waits for the other.
    """
    rng, order_rng = random.Random(seed), random.Random(order_seed)
    think, pad = tokenizer.convert_tokens_to_ids(THINK_TOKEN), tokenizer.pad_token_id
    while True:
        texts = []
        for _ in range(rows * WINDOW):
            problem = draw_problem(rng, held_out=False)
            texts.append(f"{write_prompt(problem.problem)}{write_reasoning(problem, rng)}{END_TOKEN}")
        encoded = sorted(tokenizer(texts)["input_ids"], key=len)
        order = list(range(WINDOW))
        order_rng.shuffle(order)
        for place in order:
            batch = encoded[place * rows : (place + 1) * rows]
            length = -(-len(batch[-1]) // LENGTH_STEP) * LENGTH_STEP
            input_ids = torch.full((rows, length), pad)
            labels = torch.full_like(input_ids, IGNORED)
            for row, token_ids in enumerate(batch):
                begin = token_ids.index(think) + 1
                input_ids[row, : len(token_ids)] = torch.tensor(token_ids)
                labels[row, begin : len(token_ids)] = input_ids[row, begin : len(token_ids)]
            yield input_ids, labels


def learn_batch(model: torch.nn.Module, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Add the gradient of the labelled tokens' mean cross-entropy, in two halves to save memory; returns the mean.

    Padding is on the right, so causality hides it.
    """
    total, count = 0.0, int((labels[:, 1:] != IGNORED).sum())
    for part_ids, part_labels in zip(input_ids.chunk(2), labels.chunk(2), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=part_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1),
            part_labels[:, 1:].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        (loss / count).backward()
        total += loss.item() / count
    return total


def build_optimizers(model: torch.nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, biases and norms."""
    named = list(model.named_parameters())
    matrices = [value for name, value in named if value.ndim == 2 and "embed" not in name]
    others = [value for name, value in named if value.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_at(used: float, step: int, *, warmup_steps: int = 60, decay_share: float = 0.5) -> float:
    """Learning-rate factor after a share `used` of the budget: warm-up, constant, linear to zero."""
    warm = min(1.0, (step + 1) / warmup_steps)
    return warm * min(1.0, max(0.0, (1.0 - used) / decay_share))


def average_gradients(model: torch.nn.Module, used: float) -> float:
    """Average the gradients over all processes; returns the first process's `used`, the same for all."""
    gradients = [parameter.grad for parameter in model.parameters()]
    own = used if dist.get_rank() == 0 else 0.0
    flat = torch.cat([gradient.flatten() for gradient in gradients] + [torch.tensor([own])])
    dist.all_reduce(flat)
    begin = 0
    for gradient in gradients:
        count = gradient.numel()
        gradient.copy_(flat[begin : begin + count].view_as(gradient) / dist.get_world_size())
        begin += count
    return float(flat[-1])


def save_folder(folder: Path, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write model (bfloat16) and tokenizer into a new folder and swap it in for the old one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    fresh.chmod(0o755)
    half = AutoModelForCausalLM.from_config(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    check_tokenizer(fresh, tokenizer)
    old = folder.with_name(f".{folder.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def check_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise ValueError if the folder's tokenizer splits texts in another way than the one trained with."""
    text = write_prompt("Find (12 + 34) * 56, then x, if 7x = 89.")
    loaded = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    if loaded != tokenizer(text)["input_ids"]:
        raise ValueError(
            f"a saved tokenizer must split texts as before, got {loaded} in {folder}; "
            "use a model type for which AutoTokenizer keeps tokenizer.json as it is"
        )


def save_state(path: Path, model, optimizers, progress: dict) -> None:
    """Write everything a run needs to go on, atomically."""
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": progress,
    }
    fresh = path.with_suffix(".new")
    torch.save(state, fresh)
    os.replace(fresh, path)


def load_state(path: Path, model, optimizers) -> dict:
    """Restore a run; returns its progress: step, tokens, seconds."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["progress"]


def train_process(rank: int, arguments: argparse.Namespace, meeting_file: str) -> None:
    """One of the training processes; the first one writes checkpoints and progress."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_file}", rank=rank, world_size=arguments.processes)
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoints / "tokenizer")
    model = build_model(arguments, tokenizer).train()
    optimizers = build_optimizers(model, arguments.learning_rate)
    progress = {"step": 0, "tokens": 0, "seconds": 0.0}
    state_path = arguments.checkpoints / "state.pt"
    if state_path.exists():
        progress = load_state(state_path, model, optimizers)
    if rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{count} parameters, {len(tokenizer)} tokens, from step {progress['step']}", flush=True)
    dist.barrier()
    run_steps(rank, arguments, model, optimizers, tokenizer, progress)
    if rank == 0:
        save_folder(arguments.output, model, tokenizer)
        describe_training(arguments, model, progress)
        print(f"wrote {arguments.output}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def describe_training(arguments: argparse.Namespace, model: torch.nn.Module, progress: dict) -> None:
    """Write `training.json` beside the weights: how they came about."""
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": progress["step"],
        "reasoning_tokens": progress["tokens"],
        "minutes": round(progress["seconds"] / 60, 1),
        "processes": arguments.processes,
        "texts_per_process_and_step": arguments.rows,
        "learning_rate": arguments.learning_rate,
        "seed": arguments.seed,
    }
    (arguments.output / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def run_steps(rank: int, arguments, model, optimizers, tokenizer, progress: dict) -> None:
    """Train until the budget is used up; `progress` is updated in place."""
    first_step = progress["step"]
    batches = draw_batches(
        tokenizer,
        rows=arguments.rows,
        seed=f"{arguments.seed} {rank} {first_step}",
        order_seed=f"{arguments.seed} {first_step}",
    )
    begin, earlier = time.monotonic(), progress["seconds"]
    last_save, recent = begin, []
    used = 0.0
    while used < 1.0:
        input_ids, labels = next(batches)
        recent.append(learn_batch(model, input_ids, labels))
        progress["seconds"] = earlier + time.monotonic() - begin
        budget_share = progress["seconds"] / (60 * arguments.minutes)
        if arguments.steps:
            budget_share = (progress["step"] + 1) / arguments.steps
        used = average_gradients(model, budget_share)
        apply_step(model, optimizers, arguments.learning_rate * rate_at(used, progress["step"]))
        progress["step"] += 1
        progress["tokens"] += int((labels != IGNORED).sum()) * arguments.processes
        if rank == 0 and progress["step"] % 20 == 0:
            report = {"loss": round(sum(recent) / len(recent), 4), "used": round(used, 3), **progress}
            print(json.dumps(report), flush=True)
            recent.clear()
        if rank == 0 and time.monotonic() - last_save > 60 * arguments.save_minutes:
            save_state(arguments.checkpoints / "state.pt", model, optimizers, progress)
            save_folder(arguments.checkpoints / "latest", model, tokenizer)
            last_save = time.monotonic()


def apply_step(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], learning_rate: float) -> None:
    """Clip, step all optimizers at the given rate, clear the gradients."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()


def sample_answers(model, tokenizer, statements: list[str], *, samples: int) -> list[list[int | None]]:
    """`samples` answers for every statement, sampled at temperature 1 from the whole distribution."""
    texts = [write_prompt(text) for text in statements]
    prompts = tokenizer(texts, padding=True, return_tensors="pt", padding_side="left")
    output = model.generate(
        **{name: prompts[name] for name in ("input_ids", "attention_mask")},
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=samples,
        max_new_tokens=900,
    )
    texts = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [extract_answer(text) for text in texts]
    return [answers[begin : begin + samples] for begin in range(0, len(answers), samples)]


@torch.inference_mode()
def evaluate(arguments: argparse.Namespace) -> dict:
    """Held-out accuracy at temperature 1: mean over single samples and majority vote, per family and in all."""
    torch.manual_seed(arguments.seed)
    folder = arguments.model or arguments.output
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    problems = held_out_problems(arguments.problems, seed=arguments.seed)
    single, majority = defaultdict(list), defaultdict(list)
    for begin in range(0, len(problems), 4):
        part = problems[begin : begin + 4]
        drawn = sample_answers(model, tokenizer, [item.problem for item in part], samples=arguments.samples)
        for problem, answers in zip(part, drawn, strict=True):
            single[problem.family].append(sum(value == problem.answer for value in answers) / len(answers))
            majority[problem.family].append(float(majority_answer(answers) == problem.answer))
        print(f"{begin + len(part)} / {len(problems)} problems", file=sys.stderr, flush=True)
    result = {"problems": len(problems), "samples": arguments.samples, "families": {}}
    for family in FAMILIES:
        if single[family]:
            result["families"][family] = {"single": mean(single[family]), "majority": mean(majority[family])}
    result["single"] = mean([value for values in single.values() for value in values])
    result["majority"] = mean([value for values in majority.values() for value in values])
    return result


def mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 4)


def train(arguments: argparse.Namespace) -> None:
    """Prepare tokenizer and folders, then run all training processes."""
    if arguments.fresh:
        shutil.rmtree(arguments.checkpoints, ignore_errors=True)
    arguments.checkpoints.mkdir(parents=True, exist_ok=True)
    if not (arguments.checkpoints / "tokenizer").exists():
        tokenizer = train_tokenizer(arguments.vocabulary, seed=arguments.seed)
        tokenizer.save_pretrained(arguments.checkpoints / "tokenizer")
    os.environ.update(ALLOCATOR)  # read by the allocator of the spawned processes
    with tempfile.TemporaryDirectory() as folder:
        meeting_file = str(Path(folder) / "meeting")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # a clean exit ends the daemons below, too
        mp.spawn(train_process, args=(arguments, meeting_file), nprocs=arguments.processes, daemon=True)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=80.0, help="time budget of the training")
    parser.add_argument("--steps", type=int, default=0, help="budget in steps instead of minutes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32, help="texts per process and step")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=704)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--attention", default="eager", choices=("eager", "sdpa"))
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--save-minutes", type=float, default=5.0)
    parser.add_argument("--checkpoints", type=Path, default=Path("reasoner_checkpoints"))
    parser.add_argument("--output", type=Path, default=REASONER)
    parser.add_argument("--fresh", action="store_true", help="forget earlier checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true", help="measure held-out accuracy instead")
    parser.add_argument("--model", type=Path, help="folder to evaluate (default: --output)")
    parser.add_argument("--problems", type=int, default=65, help="held-out problems to evaluate on")
    parser.add_argument("--samples", type=int, default=16)
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    if arguments.evaluate:
        print(json.dumps(evaluate(arguments)))
    else:
        train(arguments)


if __name__ == "__main__":
    main()
