"""Prompts with images: rows are what transformers' `generate` says, or have its law, and no image takes another's
place."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from image_cases import (
    CONFIGS,
    IMAGE,
    SERVED,
    VIDEO,
    chat_about,
    image_model,
    image_processor,
    image_prompt,
    picture,
)
from pearson import p_value
from plain_eagle import random_head
from printed_page import run_page
from small_law import p_of_continuations
from with_pages import needs_pages

import stand
from stand.forward.self_check import UnsupportedModelError
from stand.forward.window_check import looks_ahead
from stand.media import check, first_forward, media
from stand.media.check import check_media, media_difference
from stand.media.media import Media, MediaError, media_arguments
from stand.plugins.generate import stand_generate
from stand.scheduling import within_pages
from stand.scheduling.free_memory import bytes_per_token

PAGE = Path(__file__).parents[2] / "docs" / "images.md"
GREEDY = {"max_new_tokens": 20, "temperature": 0, "stop_token_ids": []}
PLACEHOLDERS = [IMAGE, VIDEO]
SAMPLED = {"max_new_tokens": 30, "temperature": 1.0, "top_k": 0, "stop_token_ids": [], "seed": 3}


@pytest.fixture(autouse=True)
def nothing_checked(monkeypatch):
    """Every test does its own checks."""
    monkeypatch.setattr(check, "_CHECKED", check.WeakKeyDictionary())


def engine_of(family: str, **settings) -> stand.Engine:
    return stand.wrap(image_model(family), **{"drafter": stand.BlendedDrafter(budget=16), **settings})


def generated(family: str, prompt: dict, count: int = 20) -> list[int]:
    """By transformers."""
    tokens = image_model(family).generate(**prompt, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return tokens[0, prompt["input_ids"].shape[1] :].tolist()


def media_of(family: str, prompt: dict) -> tuple[np.ndarray, Media]:
    token_ids = prompt["input_ids"][0].numpy().astype(np.int32)
    shown = {name: value for name, value in prompt.items() if name not in ("input_ids", "attention_mask")}
    return token_ids, Media.of(image_model(family), token_ids, shown)


@pytest.mark.parametrize("family", SERVED)
def test_tokens_are_generates_own(family):
    """Two prompts differ in the image alone; one has two images."""
    prompts = [image_prompt(family), image_prompt(family, seed=4), image_prompt(family, num_images=2, before=(8,))]
    engine = engine_of(family)
    for _ in range(2):
        output = engine.generate(prompts, **GREEDY)
    expected = [generated(family, prompt) for prompt in prompts]
    assert output.token_ids == expected and expected[0] != expected[1]
    assert output.stats.mean_acceptance_length > 1.2


@pytest.mark.parametrize("way", ["one call", "kept prompts"])
def test_images_with_equal_tokens_are_told_apart(way, monkeypatch):
    prompts = [image_prompt("qwen3_vl", before=tuple(range(3, 40)) * 30, seed=seed) for seed in (3, 4)]  # 1,124 tokens
    monkeypatch.setattr(image_model("qwen3_vl").config.text_config, "max_position_embeddings", 2048)

    def tokens() -> list[list[int]]:
        engine = engine_of("qwen3_vl")
        if way == "one call":
            return engine.generate(prompts, **GREEDY).token_ids
        with engine.keep_prompts(1e8):
            return [engine.generate(prompt, **GREEDY).token_ids[0] for prompt in prompts]

    expected = [generated("qwen3_vl", prompt) for prompt in prompts]
    assert tokens() == expected and expected[0] != expected[1]
    monkeypatch.setattr(media, "_digest", lambda shown: bytes(16))  # control
    assert tokens() == [expected[0]] * 2


LINES = tuple(range(3, 40)) * 30  # 1,110 tokens


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "qwen3_5", "llava"])
def test_keys_behind_an_image_are_taken_over_by_longer_texts(family, monkeypatch):
    """Turns of a chat: the image, and whole chunks of the text behind it; another image's are not."""
    monkeypatch.setattr(image_model(family).config.get_text_config(), "max_position_embeddings", 4096)
    turns = [image_prompt(family, behind=behind) for behind in ((7, 3), (7, 3, *LINES), (7, 3, *LINES, 8, 9, *LINES))]
    other = image_prompt(family, behind=(7, 3, *LINES, 5), seed=4)
    engine = engine_of(family, verifier="match")
    expected = [engine.generate(turn, **SAMPLED) for turn in (*turns, other)]
    copied = []
    with engine.keep_prompts(1e9):
        for turn, alone in zip((*turns, other), expected, strict=True):
            output = engine.generate(turn, **SAMPLED)
            assert output.token_ids == alone.token_ids and alone.stats.num_copied_prompt_tokens == 0
            copied.append(output.stats.num_copied_prompt_tokens)
    shown = media_of(family, turns[0])[1].text_start
    assert copied == [0, shown, shown + 1024, 0]


def test_samples_of_a_prompt_share_one_first_forward(monkeypatch):
    engine, prompt, calls = engine_of("qwen3_vl", verifier="match"), image_prompt("qwen3_vl"), []
    engine.generate(prompt, **GREEDY)
    tower = image_model("qwen3_vl").model.visual
    hook = tower.register_forward_hook(lambda *given: calls.append(1))
    try:
        output = engine.generate(prompt, **SAMPLED, num_return_sequences=6, max_rows=3)
    finally:
        hook.remove()
    assert len(calls) == 1 and len({*map(tuple, output.token_ids)}) == 6


@needs_pages
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_rows_that_are_put_back_see_the_image_again(family, monkeypatch):
    monkeypatch.setattr(within_pages, "GROWTH", 0)
    settings = {**SAMPLED, "num_return_sequences": 8, "max_new_tokens": 200}
    expected = engine_of(family, verifier="match").generate(image_prompt(family), **settings)
    engine = engine_of(family, verifier="match")
    cap = 3 * 256 * bytes_per_token(image_model(family))
    output = engine.generate(image_prompt(family), **settings, max_cache_bytes=cap)
    assert output.stats.num_put_back > 0 and expected.stats.num_put_back == 0
    assert output.token_ids == expected.token_ids


def continuation_law(family: str, prompt: dict, *, tokens: int, top_k: int) -> dict[tuple[int, ...], float]:
    """By plain forwards over the prompt and every continuation."""
    token_ids, shown = media_of(family, prompt)
    law = {(): 1.0}
    for _ in range(tokens):
        grown = {}
        for path, chance in law.items():
            text = torch.tensor([[*token_ids.tolist(), *path]])
            types = {name: torch.nn.functional.pad(kinds, (0, len(path))) for name, kinds in shown.types.items()}
            with torch.inference_mode():
                logits = image_model(family)(input_ids=text, **shown.inputs, **types, use_cache=False).logits[0, -1]
                logits[PLACEHOLDERS] = -torch.inf
            best, ids = logits.double().topk(top_k)
            for token, share in zip(ids.tolist(), best.softmax(-1).tolist(), strict=True):
                grown[*path, token] = chance * share
        law = grown
    return law


@pytest.mark.parametrize(
    ("family", "verifier"),
    [("qwen3_vl", "traversal"), ("qwen2_5_vl", "block"), ("gemma3", "traversal"), ("qwen3_5", "match")],
)
def test_continuations_have_the_law_of_plain_forwards(family, verifier):
    """Control: the law of another image."""
    shape = {"tokens": 3, "top_k": 3}
    drafter = stand.FixedShapeDrafter(shape=stand.TreeShape.chain(3)) if verifier == "block" else None
    engine = engine_of(family, verifier=verifier, **({"drafter": drafter} if drafter else {}))
    settings = {"max_new_tokens": 3, "temperature": 1.0, "top_k": 3, "stop_token_ids": [], "max_rows": 64}
    settings["suppress_tokens"] = PLACEHOLDERS  # a plain forward would look for further images
    output = engine.generate(image_prompt(family), **settings, num_return_sequences=2500, seed=11)
    counts: dict[tuple[int, ...], int] = {}
    for tokens in output.token_ids:
        counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    assert output.stats.mean_acceptance_length > 1.1
    assert p_of_continuations(counts, continuation_law(family, image_prompt(family), **shape)) > 1e-4
    assert p_of_continuations(counts, continuation_law(family, image_prompt(family, seed=4), **shape)) < 1e-6


@pytest.mark.parametrize("family", SERVED)
def test_the_check_sees_a_wrong_image_and_wrong_positions(family, monkeypatch):
    token_ids, shown = media_of(family, image_prompt(family))
    assert media_difference(image_model(family), token_ids, shown) < 1e-4
    other = media_of(family, image_prompt(family, seed=4))[1]
    real = first_forward.prefill_media

    def with_another_image(model, cache, token_ids, given):
        return real(model, cache, token_ids, other)

    with monkeypatch.context() as patch:
        patch.setattr(check, "prefill_media", with_another_image)
        with pytest.raises(UnsupportedModelError, match="must have the logits of a plain forward"):
            check_media(image_model(family), token_ids, shown)
    if not shown.rotary_offset:
        return
    patched = Media(shown.inputs, shown.types, shown.positions, 0, shown.text_start, shown.digest)
    with pytest.raises(UnsupportedModelError, match="must have the logits of a plain forward"):
        check_media(image_model(family), token_ids, patched)


def test_what_fails_in_the_model_is_refused_with_its_words():
    prompt = image_prompt("qwen3_vl")
    prompt["pixel_values"] = prompt["pixel_values"][:-4]
    with pytest.raises(
        MediaError, match="pixel_values, image_grid_thw must fit .*Qwen3VLForCond.*RuntimeError.*see whether model"
    ):
        engine_of("qwen3_vl").generate(prompt, **GREEDY)


def test_a_kind_of_prompt_is_checked_once(monkeypatch):
    calls, real = [], check.media_difference
    monkeypatch.setattr(check, "media_difference", lambda *given: calls.append(1) or real(*given))
    for _ in range(2):
        engine_of("qwen3_vl").generate([image_prompt("qwen3_vl", seed=seed) for seed in (3, 4)], **GREEDY)
    assert len(calls) == 1


def test_the_tree_of_the_check_holds_tokens_of_text():
    tokens = check._tokens_of_text(image_model("llava"), 7).tolist()
    assert tokens[0] == 7 and {0, 1, 2, IMAGE}.isdisjoint(tokens) and len({*tokens}) > 4


def test_several_end_tokens_are_no_obstacle(monkeypatch):
    """As Gemma 3's configuration has them."""
    monkeypatch.setattr(image_model("gemma3").config, "eos_token_id", [2, 3], raising=False)
    check_media(image_model("gemma3"), *media_of("gemma3", image_prompt("gemma3")))


def test_the_check_asks_for_few_logits(monkeypatch):
    """Of a long prompt they would take gigabytes."""
    shapes, model = [], image_model("llava")
    hook = model.get_output_embeddings().register_forward_hook(lambda module, given, out: shapes.append(out.shape[1]))
    try:
        check_media(model, *media_of("llava", image_prompt("llava", behind=(7,) * 300)))
    finally:
        hook.remove()
    assert max(shapes) < 10 < 300


def test_only_text_behind_an_image_is_learned(monkeypatch):
    learned, engine = [], engine_of("llava")
    monkeypatch.setattr(engine.drafter, "learn_prompt", lambda tokens, **given: learned.append(tokens.tolist()))
    engine.generate(image_prompt("llava"), **GREEDY)
    assert learned == [[58, 7, 3, 4, 5, 9]] and IMAGE not in learned[0]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_a_call_amid_a_step_takes_no_image(family):
    """There the attention is not the model's own. Between trajectories it is."""
    engine, prompt, nested = engine_of(family), image_prompt(family), []
    engine.generate(prompt, **GREEDY)
    with pytest.raises(MediaError, match="must begin between steps, got one in the midst of another call's step"):
        list(engine.run([[3, 4, 5]], on_step=lambda run: engine.generate(prompt, **GREEDY), **GREEDY))
    for _ in engine.run([[3, 4, 5]], **GREEDY):
        nested += engine.generate(prompt, **GREEDY).token_ids
    assert nested == [generated(family, prompt)]


def test_numbers_about_what_is_shown_are_not_rounded():
    """Seconds per step of a video decide its positions; in bfloat16 two thirds are another number."""
    model = copy.deepcopy(image_model("qwen2_5_vl"))
    frames = 200
    ids = np.array([3, 4, 57, *[VIDEO] * frames, 58, 5, 6], dtype=np.int32)
    shown = {
        "pixel_values_videos": torch.zeros(frames * 4, 96), "video_grid_thw": torch.tensor([[frames, 2, 2]]),
        "second_per_grid_ts": torch.tensor([2 / 3]), "mm_token_type_ids": torch.from_numpy((ids == VIDEO) * 2)[None],
    }  # fmt: skip
    exact, rounded = Media.of(model, ids, shown), Media.of(model.to(torch.bfloat16), ids, shown)
    assert torch.equal(exact.positions, rounded.positions) and exact.digest == rounded.digest
    assert rounded.inputs["second_per_grid_ts"].dtype == torch.float32
    assert rounded.inputs["pixel_values_videos"].dtype == torch.bfloat16


def test_positions_behind_an_image_decide_how_much_is_one_forward(monkeypatch):
    """Where they do not count on, all but the last token; where they part at the end, no text follows."""
    token_ids, shown = media_of("qwen3_vl", image_prompt("qwen3_vl"))
    model, own = image_model("qwen3_vl"), shown.positions
    given = {**shown.inputs, **shown.types}

    def with_positions(positions: torch.Tensor) -> Media:
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "_prepare_position_ids_for_generation", lambda *given: positions)
            return Media.of(model, token_ids, given)

    assert with_positions(own).text_start == shown.text_start < len(token_ids) - 1
    jump = own.clone()
    jump[..., -2:] += 5
    moved = with_positions(jump)
    assert (moved.text_start, moved.rotary_offset) == (len(token_ids) - 1, shown.rotary_offset + 5)
    parted = own.clone()
    parted[1, 0, -1] += 1
    with pytest.raises(MediaError, match="must end with a token of text"):
        with_positions(parted)


def test_where_no_placeholder_is_known_all_but_the_last_token_is_one_forward():
    assert media._text_start(image_model("llava"), np.array([3, 4, 5, 6]), []) == 3
    assert media._text_start(image_model("llava"), np.array([3, IMAGE, 5, 6]), []) == 2


def test_what_is_shown_is_copied():
    """The first forward runs when the stream is asked for its first piece."""
    processor, prompt = image_processor(), image_prompt("gemma3")
    stream = stand.wrap(image_model("gemma3"), processor).stream(prompt, **GREEDY)
    expected = processor.batch_decode([generated("gemma3", prompt)], skip_special_tokens=True)[0]
    prompt["pixel_values"].copy_(image_prompt("gemma3", seed=4)["pixel_values"])
    assert "".join(text for _, text in stream) == expected


def test_the_model_notes_nothing_of_a_call():
    """`rope_deltas` say where the text that a user has begun goes on."""
    model = image_model("qwen3_vl")
    generated("qwen3_vl", image_prompt("qwen3_vl"))
    before = model.model.rope_deltas
    for prompt in (image_prompt("qwen3_vl", num_images=2), image_prompt("qwen3_vl", num_images=2, seed=5)):
        engine_of("qwen3_vl").generate(prompt, **GREEDY)
        assert model.model.rope_deltas is before and before is not None


def unfitting(family: str) -> dict:
    """Pixels of one image where the tokens stand for two."""
    return {**image_prompt(family, num_images=2), "pixel_values": image_prompt(family)["pixel_values"]}


def test_rows_before_an_image_that_does_not_fit_are_given():
    """A run gives them first and names the request; a call that gives all together raises at once."""
    engine, good = engine_of("llava"), image_prompt("llava")
    expected = engine.generate(good, **GREEDY).token_ids
    requests = [good, stand.Request(unfitting("llava"), id="bad"), good]
    for max_rows in (1, 3):
        run, found = engine.run(requests, **GREEDY, max_rows=max_rows), []
        with pytest.raises(MediaError, match="pixel_values must fit the prompt's tokens and LlavaFor") as error:
            found.extend(one.token_ids for one in run)
        assert found == expected and error.value.__notes__ == [
            "request 1 of the run, counted from 0, with the id 'bad'"
        ]
    with pytest.raises(MediaError):
        engine.generate([good, unfitting("llava")], **GREEDY)
    assert engine.generate(good, **GREEDY).token_ids == expected


def test_models_that_prepare_themselves_are_refused(monkeypatch):
    model = image_model("llava")
    monkeypatch.setattr(type(model), "generate", lambda self, **given: None)
    with pytest.raises(UnsupportedModelError, match="need transformers' own generate, got LlavaFor.* with another one"):
        check_media(model, *media_of("llava", image_prompt("llava")))


@pytest.mark.parametrize("family", CONFIGS)
def test_masks_that_show_later_tokens_are_seen_by_themselves(family):
    """PaliGemma's; in bfloat16 logits alone may not tell. Tokens of one image may see each other."""
    token_ids, shown = media_of(family, image_prompt(family))
    inputs = {"input_ids": torch.from_numpy(token_ids.astype(np.int64))[None], **shown.inputs, **shown.types}
    assert looks_ahead(image_model(family), shown.text_start, **inputs) == (family == "paligemma")
    if family.startswith("gemma"):  # control: were an image cut
        assert all(looks_ahead(image_model(family), shown.text_start - cut, **inputs) for cut in (1, 2))


def test_a_prompt_that_sees_itself_is_refused_for_either(monkeypatch):
    """PaliGemma: every token of a prompt sees all of it, so that the last one cannot come by itself."""
    case = image_model("paligemma"), *media_of("paligemma", image_prompt("paligemma"))
    with pytest.raises(UnsupportedModelError, match="must see none that come in a later forward, got PaliGemma"):
        check_media(*case)
    monkeypatch.setattr(check, "looks_ahead", lambda *given, **inputs: False)
    with pytest.raises(UnsupportedModelError, match="must have the logits of a plain forward"):
        check_media(*case)


def test_layers_that_hand_on_what_they_were_not_given_are_fused_whole():
    """Qwen3-VL's layers tell their attention `use_cache`, which its model does not tell them."""
    report = engine_of("qwen3_vl").backend.fusion.report
    assert "additions joined with norms" in {swap.kind for swap in report if swap.is_kept}


def test_bfloat16():
    model = copy.deepcopy(image_model("qwen3_vl")).to(torch.bfloat16)
    output = stand.wrap(model, drafter=stand.BlendedDrafter(budget=16)).generate(image_prompt("qwen3_vl"), **GREEDY)
    assert len(output.token_ids[0]) == 20


def test_a_model_of_text_takes_no_images():
    assert media_arguments(image_model("llava").model.language_model) == frozenset()
    assert "pixel_values" in media_arguments(image_model("llava"))


OF_TOKENS = ("input_ids", "attention_mask", "mm_token_type_ids")


def changed(**changes) -> dict:
    prompt = {**image_prompt("qwen3_vl"), **changes}
    return {name: value for name, value in prompt.items() if value is not None}


@pytest.mark.parametrize(
    ("prompt", "rule"),
    [
        (lambda: changed(**{name: image_prompt("qwen3_vl")[name][:, :-6] for name in OF_TOKENS}),
         "must end with a token of text"),
        (lambda: {name: torch.cat([value, value]) for name, value in image_prompt("qwen3_vl").items()},
         "must be of one prompt where it shows something, got 2"),
        (lambda: changed(input_features=torch.zeros(1, 3)), "got input_features in the tokenizer's output"),
        (lambda: changed(pixel_values="x"), "pixel_values must be an array of numbers, got 'x'"),
        (lambda: changed(pixel_values=None, image_grid_thw=None), "got mm_token_type_ids in the tokenizer's output"),
    ],
)  # fmt: skip
def test_what_has_no_clear_meaning_is_refused(prompt, rule):
    with pytest.raises(ValueError, match=rule):
        engine_of("qwen3_vl").generate(prompt(), **GREEDY)


def test_inputs_one_by_one_are_told_to_come_as_a_whole():
    """As `model.generate` takes them."""
    with pytest.raises(ValueError, match="got pixel_values, image_grid_thw, mm_token_type_ids beside them; pass what"):
        engine_of("qwen3_vl").generate(**image_prompt("qwen3_vl"), **GREEDY)


def test_padding_is_taken_off_with_its_types():
    prompt = image_prompt("qwen3_vl")
    pad = {name: torch.nn.functional.pad(prompt[name], (3, 0)) for name in ("input_ids", "attention_mask")}
    types = torch.nn.functional.pad(prompt["mm_token_type_ids"], (3, 0))
    output = engine_of("qwen3_vl").generate({**prompt, **pad, "mm_token_type_ids": types}, **GREEDY)
    assert output.token_ids == [generated("qwen3_vl", prompt)]


def test_drafters_that_follow_hidden_states_are_refused():
    model = image_model("llava")
    engine = stand.wrap(model, drafter=stand.EagleDrafter(random_head(model)))
    with pytest.raises(ValueError, match="needs prompts of text alone, got EagleDrafter and pixel_values"):
        engine.generate(image_prompt("llava"), **GREEDY)
    assert engine.generate(image_prompt("llava"), **GREEDY, draft=False).token_ids == [
        generated("llava", image_prompt("llava"))
    ]


def test_chats_with_images():
    """By a processor, which `wrap` takes in the tokenizer's place; chats of text alone too."""
    processor, model = image_processor(), image_model("gemma3")
    engine = stand.wrap(model, processor, drafter=stand.BlendedDrafter(budget=16))
    asked = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    chats = [chat_about(picture()), chat_about(picture(4))]
    expected = [generated("gemma3", processor.apply_chat_template(chat, **asked)) for chat in chats]
    assert engine.generate(chats, **GREEDY).token_ids == expected and expected[0] != expected[1]
    assert engine.generate(chats[0], **GREEDY).token_ids == expected[:1]
    runs = {one.row: one for one in engine.run([stand.Request(chat) for chat in chats], **GREEDY)}
    assert [runs[row].token_ids for row in range(2)] == expected
    pieces = "".join(text for _, text in engine.stream(chats[0], **GREEDY))
    assert pieces == processor.batch_decode([expected[0]], skip_special_tokens=True)[0] == runs[0].text
    text = [{"role": "user", "content": "ABC"}]
    assert engine.generate(text, **GREEDY).token_ids == engine.generate("ABC@", **GREEDY).token_ids


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (
            [{"type": "image", "image": None}, {"type": "video", "video": "x.mp4"}],
            "leaves out contents of type 'video'",
        ),
        ([{"type": "document", "path": "x.pdf"}], "leaves out contents of type 'document'"),
        ([{"type": "image", "image": None}, "ABC"], "must be a text or parts of text"),
        ([], "must be a text or parts of text"),
    ],
)
def test_parts_that_a_template_leaves_out_are_told(content, rule):
    content = [{**part, "image": picture()} if "image" in part else part for part in content]
    engine = stand.wrap(image_model("gemma3"), image_processor())
    with pytest.raises(ValueError, match=rule):
        engine.generate([{"role": "user", "content": content}], **GREEDY)
    with pytest.raises(ValueError, match="every chat message must have a role"):
        engine.generate([{"content": chat_about(picture())[0]["content"]}], **GREEDY)


def test_messages_that_a_template_leaves_out_are_told():
    processor = image_processor()
    processor.chat_template = "{% set messages = messages[1:] %}" + processor.chat_template
    engine = stand.wrap(image_model("gemma3"), processor)
    with pytest.warns(UserWarning, match="leaves out message 0, of role 'system'"):
        engine.generate([{"role": "system", "content": "DEF"}, *chat_about(picture())], **GREEDY)


def test_an_answer_that_has_begun_goes_on():
    processor = image_processor()
    chat = [*chat_about(picture()), {"role": "assistant", "content": "DEF"}]
    asked = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "continue_final_message": True}
    expected = generated("gemma3", processor.apply_chat_template(chat, **asked))
    engine = stand.wrap(image_model("gemma3"), processor, drafter=stand.BlendedDrafter(budget=16))
    assert engine.generate(chat, **GREEDY).token_ids == [expected]
    assert engine.generate(chat[:1], **GREEDY).token_ids != [expected]


def test_chats_of_text_are_the_processors_too():
    """Whose template may be another one than the tokenizer's, which may put a token of its own before a text."""
    processor = image_processor()
    processor.tokenizer.chat_template = "{{ 'Z' }}"
    engine = stand.wrap(image_model("gemma3"), processor, drafter=stand.BlendedDrafter(budget=16))
    chat = [{"role": "user", "content": "ABC"}]
    assert engine.generate(chat, **GREEDY).token_ids == engine.generate("ABC@", **GREEDY).token_ids


@pytest.mark.skipif(not PAGE.is_file(), reason="needs the source tree, docs included")
def test_the_page_runs_as_printed(tmp_path, monkeypatch, capsys):
    """With a tiny model in the place of the hub's."""
    made = {"AutoModelForImageTextToText": image_model("gemma3"), "AutoProcessor": image_processor()}
    for name, one in made.items():
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", lambda *given, one=one, **settings: one)
    picture().save(tmp_path / "figure.png")

    def shorten(code: str) -> str:  # the tokenizer's letters hold the placeholder's
        return code.replace("max_new_tokens=200", "max_new_tokens=20").replace("How long is the side marked x?", "ABC")

    output = run_page(PAGE, tmp_path, monkeypatch, shorten)["output"]
    assert len({*output.texts}) > 4 and output.texts[0] in capsys.readouterr().out


def test_a_chat_with_an_image_needs_a_processor():
    processor = image_processor()
    engine = stand.wrap(image_model("gemma3"), processor.tokenizer)
    with pytest.raises(ValueError, match="needs the model's processor .*got content of type 'image'"):
        engine.generate(chat_about(picture()), **GREEDY)
    with pytest.raises(ValueError, match="a chat must be one that Gemma3Processor takes, got"):
        stand.wrap(image_model("gemma3"), processor).generate(chat_about("no_such_file.png"), **GREEDY)


@pytest.mark.parametrize("family", SERVED)
def test_custom_generate_takes_images(family):
    prompt = image_prompt(family)
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = image_model(family).generate(**prompt, **settings, custom_generate=stand_generate)
    assert tokens[0, prompt["input_ids"].shape[1] :].tolist() == generated(family, prompt)


@pytest.mark.parametrize("family", SERVED)
def test_custom_generate_takes_text_alone(family):
    """`generate` may prepare several positions of a token."""
    prompts = torch.tensor([[3, 4, 5, 6], [0, 0, 7, 8]])
    settings = {"attention_mask": (prompts > 0).long(), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    own, ours = (
        image_model(family).generate(prompts, **settings, pad_token_id=0, **way)
        for way in ({}, {"custom_generate": stand_generate})
    )
    assert torch.equal(own, ours)


def test_custom_generate_takes_no_positions_beside_an_image():
    prompt = image_prompt("llava")
    places = torch.arange(prompt["input_ids"].shape[1])[None]
    settings = {"max_new_tokens": 2, "do_sample": False, "custom_generate": stand_generate, "pad_token_id": 0}
    image_model("llava").generate(**prompt, position_ids=places, **settings)
    with pytest.raises(ValueError, match="position_ids must count a row's tokens from 0"):
        image_model("llava").generate(**prompt, position_ids=places + 1, **settings)


def test_custom_generate_takes_one_prompt_with_images():
    two = {name: torch.cat([value, value]) for name, value in image_prompt("llava").items()}
    with pytest.raises(ValueError, match="must be of one prompt where it shows something, got 2"):
        image_model("llava").generate(**two, max_new_tokens=2, custom_generate=stand_generate, do_sample=False)


def test_every_family_is_a_case():
    assert len(SERVED) == len(CONFIGS) - 1 == 12 and p_value([50, 50], [50, 50]) > 0.99
