"""Copies of processors and criteria share what must be shared, and nothing else."""

import copy
import threading
from functools import partial

import pytest
import torch
from letter_tokenizer import letter_tokenizer
from tiny_models import tiny_model
from transformers import LogitsProcessor

from stand.own_copy import own_copy


class Holding(LogitsProcessor):
    """What must not be copied for every node of a draft, and a state that must."""

    def __init__(self):
        self.held = {"tokenizer": letter_tokenizer(), "models": [tiny_model("llama")]}
        self.event, self.seen = threading.Event(), []

    def __call__(self, input_ids, scores):
        return scores


def test_copies_share_tokenizers_models_and_events():
    first = Holding()
    second = own_copy(first, "it must be copyable")
    third = own_copy([second], "it must be copyable")[0]
    assert third is not first and third.seen is not first.seen
    assert third.held["tokenizer"] is first.held["tokenizer"] and third.event is first.event
    assert third.held["models"][0] is first.held["models"][0] and third.held is not first.held


class Sharing(LogitsProcessor):
    """Copies itself, and looks at a table which tells when somebody reads all of it."""

    class Table(dict):
        def values(self):
            raise AssertionError("the table must be left alone")

    def __init__(self):
        self.table, self.seen = self.Table(), []

    def __deepcopy__(self, memo):
        copied = object.__new__(type(self))
        copied.table, copied.seen = self.table, list(self.seen)
        return copied

    def __call__(self, input_ids, scores):
        return scores


def test_what_copies_itself_is_not_looked_into():
    first = Sharing()
    for held in (first, [first]):
        second = own_copy(held, "it must be copyable")
        second = second[0] if isinstance(second, list) else second
        assert second.table is first.table and second.seen is not first.seen
    keeper = Holding()
    keeper.held["inner"] = first
    copied = own_copy(keeper, "it must be copyable")
    assert copied.held["inner"].table is first.table and copied.event is keeper.event


class Copying(Sharing):
    """Copies itself attribute by attribute, but for the table."""

    def __init__(self):
        super().__init__()
        self.event, self.model = threading.Event(), torch.nn.Linear(1, 1)

    def __deepcopy__(self, memo):
        copied = object.__new__(type(self))
        for name, value in vars(self).items():
            setattr(copied, name, value if name == "table" else copy.deepcopy(value, memo))
        return copied


class SlottedCopying(LogitsProcessor):
    __slots__ = ("event",)

    def __init__(self):
        self.event = threading.Event()

    def __deepcopy__(self, memo):
        copied = object.__new__(type(self))
        copied.event = copy.deepcopy(self.event, memo)
        return copied


def test_what_copies_itself_shares_events_and_models_too():
    """Though nothing in it is looked into, and an event cannot be copied."""
    first, keeper = Copying(), Holding()
    keeper.held["inner"] = first
    for second in (own_copy(first, "it must be copyable"), own_copy(keeper, "it must be copyable").held["inner"]):
        assert second.event is first.event and second.model is first.model and second.table is first.table
        assert second is not first and second.seen is not first.seen
    slotted = SlottedCopying()
    assert own_copy(slotted, "it must be copyable").event is slotted.event


def test_what_copies_itself_and_holds_an_event_deeper_is_told_where_it_is_shared():
    first = Copying()
    first.seen = {"event": threading.Event()}
    with pytest.raises(
        ValueError, match=r"got Copying with TypeError: .* \(where a class copies itself, as an attribute"
    ):
        own_copy(first, "it must be copyable")


@pytest.mark.parametrize("wrapped", [lambda first: first.__call__, lambda first: partial(Holding.__call__, first)])
def test_copies_of_methods_and_partials_share_the_same(wrapped):
    """A method of the object that holds the flag and the model is a usual criterion."""
    first = Holding()
    copied = own_copy(wrapped(first), "it must be copyable")
    second = copied.args[0] if isinstance(copied, partial) else copied.__self__
    assert second is not first and second.seen is not first.seen
    assert second.event is first.event and second.held["models"][0] is first.held["models"][0]
