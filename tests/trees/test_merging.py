"""Files of lookups that become one: what each context knew in any of them, by a slow reader of files."""

import numpy as np
import pytest

from stand.trees import BlendedLookup, LookupFileError, LookupTree, merge_lookups
from stand.trees.blended.file import read_blended_lookup
from stand.trees.lookups import MOST_ENTRIES, NUM_ODDS

SKIP = len(MOST_ENTRIES) - 1


def walks(seed: int, *, count: int = 12, size: int = 6, length: int = 60) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, size, length).astype(np.int32) for _ in range(count)]


def saved(folder, name: str, texts, **settings):
    lookup = BlendedLookup(**settings)
    for text in texts:
        lookup.learn(text[:1], text[1:])
    lookup.save(folder / name)
    return folder / name


def contents(path) -> dict[tuple, tuple[int, list[tuple[int, int]]]]:
    """By context (its order, and its tokens from the oldest on): visits, and tokens with their weights."""
    arrays = read_blended_lookup(path, num_odds=NUM_ODDS)[1]
    found, contexts, entries = {}, iter(zip(arrays["sizes"], arrays["visits"], strict=True)), 0
    columns = [arrays[name].tolist() for name in ("tokens", "weights", "has_child")]

    def read(order: int, tokens: tuple[int, ...]) -> None:
        nonlocal entries
        size, visits = map(int, next(contexts))
        own = list(zip(*(column[entries : entries + size] for column in columns), strict=True))
        entries += size
        found[order, tokens] = visits, [(token, weight) for token, weight, _ in own]
        for token, _, has_child in own:
            if has_child:
                read(order + 1, (*tokens, token))

    if len(arrays["sizes"]):
        read(0, ())
    for root in arrays["roots"].tolist():
        read(SKIP if root % 2 else 1, (root // 2,))
    assert next(contexts, None) is None
    return found


def expected(first: dict, second: dict) -> dict:
    """By the rule of `merge_lookups`, as it is written there; contexts below tokens that are left out go with them."""
    merged = {}
    for context in first.keys() | second.keys():
        sides = [one[context] for one in (first, second) if context in one]
        if len(sides) == 1:
            merged[context] = sides[0]
            continue
        weights: dict[int, int] = {}
        places: dict[int, list[tuple[int, int]]] = {}
        for side, (_, entries) in enumerate(sides):
            for rank, (token, weight) in enumerate(entries):
                weights[token] = weights.get(token, 0) + weight
                places.setdefault(token, []).append((rank, side))
        weights = {token: min(65535, weight) for token, weight in weights.items()}
        by_weight = sorted(weights, key=lambda token: (-weights[token], min(places[token])))
        kept = sorted(by_weight[: MOST_ENTRIES[context[0]]], key=lambda token: min(places[token]))
        merged[context] = min(255, sides[0][0] + sides[1][0]), [(token, weights[token]) for token in kept]
    gone = {(order, tokens) for order, tokens in merged if order != SKIP and len(tokens) > 1}
    for order, tokens in sorted(gone, key=lambda context: context[0]):
        above = merged.get((order - 1, tokens[:-1]))
        if above is None or tokens[-1] not in [token for token, _ in above[1]]:
            del merged[order, tokens]
    return merged


@pytest.mark.parametrize(("size", "length"), [(2, 40), (6, 60), (300, 400)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_context_knows_what_it_knew_in_any_file(tmp_path, size, length, seed):
    """With 300 tokens the empty context has more successors than it keeps."""
    one = saved(tmp_path, "one", walks(seed, size=size, length=length))
    other = saved(tmp_path, "other", walks(seed + 7, size=size + 1, length=length))
    merged = merge_lookups([one, other], tmp_path / "merged")
    merged.check()
    found, wanted = contents(tmp_path / "merged"), expected(contents(one), contents(other))
    assert found == wanted and len(found) == len(merged)
    assert max(len(tokens) for _, tokens in found) > (2 if size > 100 else 4)


def test_texts_of_all_files_are_drafted_on(tmp_path):
    texts = [np.arange(start, start + 9, dtype=np.int32) for start in (100, 200, 300)]
    paths = [saved(tmp_path, f"{text[0]}", [text] * 3) for text in texts]
    merged, row = merge_lookups(paths, tmp_path / "merged"), np.zeros(1, dtype=np.int64)
    again = BlendedLookup.load(tmp_path / "merged")
    for lookup in (merged, again):
        for text in texts:
            assert lookup.draft([text[:3]], 4, seed=0, rows=row, steps=row, width=1).token_ids[1:].tolist() == [
                *text[3:7]
            ]
    assert merged.digest == again.digest != 0


def test_an_empty_lookup_adds_nothing(tmp_path):
    one, empty = saved(tmp_path, "one", walks(3)), saved(tmp_path, "empty", [])
    for paths in ([one], [one, empty], [empty, one]):
        merge_lookups(paths, tmp_path / "merged")
        for (name, before), after in zip(
            read_blended_lookup(one, num_odds=NUM_ODDS)[1].items(),
            read_blended_lookup(tmp_path / "merged", num_odds=NUM_ODDS)[1].values(),
            strict=True,
        ):
            np.testing.assert_allclose(after, before, rtol=1e-6, err_msg=name)
    assert len(merge_lookups([empty, empty], tmp_path / "merged")) == 0


def test_odds_are_averaged_by_what_files_know(tmp_path):
    paths = [saved(tmp_path, f"{seed}", walks(seed, count=5 * seed + 2)) for seed in range(2)]
    arrays = [read_blended_lookup(path, num_odds=NUM_ODDS)[1] for path in paths]
    numbers = np.array([len(one["sizes"]) for one in arrays], dtype=float)
    merge_lookups(paths, tmp_path / "merged")
    logs = sum(np.log(one["odds"]) * number for one, number in zip(arrays, numbers / numbers.sum(), strict=True))
    merged = read_blended_lookup(tmp_path / "merged", num_odds=NUM_ODDS)[1]["odds"]
    np.testing.assert_allclose(merged, np.exp(logs), rtol=1e-5)
    assert not np.allclose(arrays[0]["odds"], arrays[1]["odds"])


def test_weights_and_visits_have_an_end(tmp_path):
    path = saved(tmp_path, "one", [np.array([1, 2] * 300, dtype=np.int32)])
    merge_lookups([path] * 9, tmp_path / "merged")
    visits, entries = contents(tmp_path / "merged")[1, (1,)]
    assert visits == 255 and entries == [(2, 65535)]


def test_a_file_may_take_the_place_of_one_that_was_merged(tmp_path):
    one, other = saved(tmp_path, "one", walks(0)), saved(tmp_path, "other", walks(1))
    wanted = expected(contents(one), contents(other))
    merge_lookups([one, other], one)
    assert contents(one) == wanted and {path.name for path in tmp_path.iterdir()} == {"one", "other"}


def test_the_cap_holds_what_all_files_held(tmp_path):
    small = [saved(tmp_path, f"{seed}", walks(seed), max_bytes=cap) for seed, cap in ((0, 1 << 21), (1, 3 << 20))]
    assert merge_lookups(small, tmp_path / "merged").max_bytes == 3 << 20
    full = [saved(tmp_path, f"f{seed}", walks(seed, count=200, size=50), max_bytes=1 << 21) for seed in range(2)]
    assert (merged := merge_lookups(full, tmp_path / "merged")).max_bytes > 1 << 21
    assert len(merged) == len(contents(tmp_path / "merged"))


def test_what_cannot_be_merged_is_refused(tmp_path):
    one = saved(tmp_path, "one", walks(0))
    for paths in ([], str(one), one, None, [BlendedLookup()], BlendedLookup()):
        with pytest.raises(ValueError, match="paths must be a list of one file or more, got"):
            merge_lookups(paths, tmp_path / "merged")
    for settings in ({"fingerprint": b"other"}, {"depth": 5}, {"fade": 0.9}, {"rate": 0.1}, {"num_candidates": 3}):
        other = saved(tmp_path, "other", walks(1), **settings)
        with pytest.raises(ValueError, match=r"one vocabulary and equal settings, got .* merge those that are alike"):
            merge_lookups([one, other], tmp_path / "merged")
    LookupTree().save(tmp_path / "tree")
    with pytest.raises(LookupFileError, match=r"LookupTree\.load"):
        merge_lookups([one, tmp_path / "tree"], tmp_path / "merged")
    (tmp_path / "damaged").write_bytes(one.read_bytes()[:-1] + b"?")
    with pytest.raises(LookupFileError, match="checksum"):
        merge_lookups([one, tmp_path / "damaged"], tmp_path / "merged")
    with pytest.raises(FileNotFoundError):
        merge_lookups([one, tmp_path / "nothing"], tmp_path / "merged")
    with pytest.raises(ValueError, match="max_bytes"):
        merge_lookups([one], tmp_path / "merged", max_bytes=5)
    assert not (tmp_path / "merged").exists()


def test_what_does_not_fit_leaves_the_file_as_it_was(tmp_path):
    paths = [saved(tmp_path, f"{seed}", walks(seed, count=300, size=50)) for seed in range(2)]
    before = paths[0].read_bytes()
    with pytest.raises(LookupFileError, match=r"must fit into max_bytes=2097152, got room for .* larger max_bytes"):
        merge_lookups(paths, paths[0], max_bytes=1 << 21)
    assert paths[0].read_bytes() == before and len(list(tmp_path.iterdir())) == 2
