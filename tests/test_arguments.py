"""A block gets the very objects that its loop passed: what it may write to, objects of data."""

import dataclasses
from collections import OrderedDict, UserDict, UserList, deque, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerators import FakeAccelerator
from torch import nn
from toys import Block, Doorless, WithDoor, toy
from training import keys, model_and_inputs

import simpletuner_segckpt
from simpletuner_segckpt.offload.device import Accelerator
from simpletuner_segckpt.verify.step import step

KINDS = [WithDoor, Doorless]
BACKENDS = ["torch", "unsloth"]
PLAN = (range(0, 2), range(2, 4), range(4, 6))
ALONE = tuple(range(block, block + 1) for block in range(6))


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    monkeypatch.setattr(Accelerator, "current", classmethod(lambda cls: FakeAccelerator()))


class Attributes:
    """An object of a class that says nothing of what its attributes are."""

    def __getitem__(self, key):
        return vars(self)[key]

    def __setitem__(self, key, value):
        vars(self)[key] = value

    def __contains__(self, key):
        return key in vars(self)


class Namespace(SimpleNamespace, Attributes):
    """The same of a class of data."""


@dataclasses.dataclass
class Record:
    given: Any
    more: Any = None


Pair = namedtuple("Pair", "first second")

# Each makes what the blocks share and returns it with the mapping inside that they write to.
SHARED = {
    "dict": lambda: [{}] * 2,
    "OrderedDict": lambda: [OrderedDict()] * 2,
    "UserDict": lambda: [UserDict()] * 2,
    "attributes": lambda: [Attributes()] * 2,
    "namespace": lambda: [Namespace()] * 2,
    "in a list": lambda: (lambda inner: ([inner], inner))({}),
    "in a tuple": lambda: (lambda inner: (Pair(inner, 0), inner))({}),
    "in a record": lambda: (lambda inner: (Record([inner]), inner))({}),
}


def inside(shared):
    while isinstance(shared, (list, tuple)):
        shared = shared[0]
    return inside(shared.given) if isinstance(shared, Record) else shared


class Sharing(Block):
    """Adds what the block before the last one left, and leaves something itself."""

    def forward(self, hidden_states, temb):
        mapping = inside(temb)
        hidden_states = hidden_states + torch.tanh(self.inner(hidden_states))
        index = self.index
        mapping[f"k{index}"] = hidden_states * 0.5
        if f"k{index - 2}" in mapping:
            hidden_states = hidden_states + mapping[f"k{index - 2}"]
        return hidden_states


def sharing(kind, make, block=Sharing):
    """A toy whose blocks share what ``make`` makes; what the last forward shared is ``last``."""

    class Variant(kind):
        def __init__(self, depth=6):
            super().__init__(depth)
            self.blocks = nn.ModuleList(block() for _ in range(depth))
            for index, each in enumerate(self.blocks):
                each.index = index

        def forward(self, hidden_states, temb):
            shared, self.last = make()
            for each in self.blocks:
                hidden_states = self.run(each, hidden_states, shared)
            return self.out(hidden_states)

    Variant.__name__ = kind.__name__
    return toy(Variant)


@pytest.mark.parametrize(("backend", "interval"), [("torch", 2), ("unsloth", 1)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", SHARED)
def test_blocks_that_write_to_what_they_share(shared, kind, backend, interval, caplog):
    model, inputs = sharing(kind, SHARED[shared])
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(
        model, keys(interval) | {"gradient_checkpointing_backend": backend}
    )
    for _ in range(3):
        assert step(model, inputs) == expected
        assert installation.effect["blocks"].segments == ALONE
        written = vars(model.last) if isinstance(model.last, Attributes) else dict(model.last)
        assert list(written) == [f"k{index}" for index in range(6)]
    if interval == 2:
        assert "writes to its `" in caplog.text or "could be changed unseen" in caplog.text


class Collecting(Block):
    def forward(self, hidden_states, temb):
        store = temb
        hidden_states = super().forward(hidden_states, 1.0)
        store.append(hidden_states.detach().mean())
        if isinstance(store, (list, UserList)):
            return hidden_states * (1.0 + store[0])
        return hidden_states


@pytest.mark.parametrize("make", [list, deque, UserList])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_blocks_collect_is_there_once(make, backend):
    """A recompute finds what the forward found, and what it collects nobody sees."""
    model, inputs = sharing(WithDoor, lambda: [make()] * 2, Collecting)
    expected = step(model, inputs)
    simpletuner_segckpt.apply(model, keys(2) | {"gradient_checkpointing_backend": backend})
    for _ in range(2):
        assert step(model, inputs) == expected
        assert len(model.last) == 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_store_that_an_attention_processor_of_flux_fills(backend):
    model, inputs = model_and_inputs("flux")
    attention = model.transformer_blocks[0].attn
    plain = type(attention.processor)

    class Storing(plain):
        def __call__(self, attn, hidden_states, *args, store, **kwargs):
            store.append(hidden_states.shape)
            return super().__call__(attn, hidden_states, *args, **kwargs)

    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        block.attn.set_processor(Storing())
    count = len(model.transformer_blocks) + len(model.single_transformer_blocks)
    inputs["joint_attention_kwargs"] = {"store": []}
    expected = step(model, inputs)
    assert len(inputs["joint_attention_kwargs"]["store"]) == count
    simpletuner_segckpt.apply(model, keys(2) | {"gradient_checkpointing_backend": backend})
    for number in (2, 3, 4):
        assert step(model, inputs) == expected
        assert len(inputs["joint_attention_kwargs"]["store"]) == number * count


def test_blocks_that_begin_to_write_inside_a_segment(caplog):
    """They get the very container, so that forward is right; after it there are no segments."""

    class Later(Sharing):
        writes = False

        def forward(self, hidden_states, temb):
            if self.writes:
                return super().forward(hidden_states, temb)
            return hidden_states + torch.tanh(self.inner(hidden_states))

    model, inputs = sharing(WithDoor, SHARED["dict"], Later)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        step(model, inputs)
    assert installation.effect["blocks"].segments == PLAN
    Later.writes = True
    twin, _ = sharing(WithDoor, SHARED["dict"], Later)
    expected = step(twin, inputs)
    assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == PLAN
    assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == ALONE
    assert "blocks 0 to 1 write to their `temb`" in caplog.text


class Reading(Block):
    """Takes what it multiplies with from an object."""

    def forward(self, hidden_states, temb):
        params = temb
        value = params.given if params.more is None else params.more
        return hidden_states + torch.tanh(self.inner(hidden_states) * value)


class Handing:
    """A toy's loop that hands an object to each block. ``params`` makes it."""

    def forward(self, hidden_states, temb):
        shared = self.params(0, temb)
        for index, block in enumerate(self.blocks):
            params = shared if self.one_for_all else self.params(index, temb)
            if self.changes:
                params.more = temb * index
            hidden_states = self.run(block, hidden_states, params)
        return self.out(hidden_states)


def handing(kind, params, one_for_all=True, changes=False):
    class Variant(Handing, kind):
        def __init__(self, depth=6):
            super().__init__(depth)
            self.blocks = nn.ModuleList(Reading() for _ in range(depth))

    Variant.params = staticmethod(params)
    Variant.one_for_all = one_for_all
    Variant.changes = changes
    return toy(Variant)


Frozen = dataclasses.make_dataclass("Frozen", ["given", "more"], frozen=True)
Slotted = dataclasses.make_dataclass("Slotted", ["given", "more"], slots=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("params", "one_for_all", "changes", "segments"),
    [
        (lambda index, temb: Record(2.0), True, False, PLAN),
        (lambda index, temb: Record("a word", temb), True, False, PLAN),
        (lambda index, temb: Record(Record(temb), temb), True, False, PLAN),
        (lambda index, temb: Slotted(2.0, temb), True, False, PLAN),
        (lambda index, temb: Frozen(2.0, temb), False, False, PLAN),
        (lambda index, temb: SimpleNamespace(given=2.0, more=None), True, False, PLAN),
        (lambda index, temb: Record(2.0), True, True, ALONE),
        (lambda index, temb: Slotted(2.0, None), True, True, ALONE),
        (lambda index, temb: Record(2.0), False, False, ALONE),
        (lambda index, temb: Frozen(2.0 + index, None), False, False, ALONE),
    ],
)
def test_objects_of_data(kind, params, one_for_all, changes, segments):
    """One for all blocks that nobody changes is a constant, and so are equal frozen ones."""
    model, inputs = handing(kind, params, one_for_all, changes)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(3):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == segments


def test_an_object_that_holds_itself():
    params = Record(2.0)
    params.given = 2.0
    params.itself = params
    model, inputs = handing(WithDoor, lambda index, temb: params)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == ALONE


class Stateful(Block):
    """Takes its state in a container."""

    def forward(self, state):
        held = state["h"] if isinstance(state, dict) else state[0]
        return held + torch.tanh(self.inner(held))


class Keeping:
    """A loop that keeps the state in one container, which it writes to between the blocks."""

    def forward(self, hidden_states, temb):
        state = self.last = {"h": hidden_states} if self.holder is dict else [hidden_states]
        for block in self.blocks:
            result = self.run(block, state)
            state["h" if self.holder is dict else 0] = result
        return self.out(result)


@pytest.mark.parametrize("holder", [dict, list])
@pytest.mark.parametrize("interval", [1, 2])
def test_state_in_a_container_that_the_loop_writes_to(holder, interval):
    """A recompute finds in it what the block found; the caller's is never made anew."""

    class Variant(Keeping, Doorless):
        def __init__(self, depth=6):
            super().__init__(depth)
            self.blocks = nn.ModuleList(Stateful() for _ in range(depth))

        def run(self, block, state):
            return block(state)

    Variant.holder = holder
    model, inputs = toy(Variant)
    expected = step(model, inputs)
    simpletuner_segckpt.apply(model, keys(interval))
    for _ in range(3):
        assert step(model, inputs) == expected
        [last] = model.last.values() if holder is dict else model.last
        assert type(last) is torch.Tensor


class InPlace(Block):
    def forward(self, state):
        state["h"] = state["h"] + torch.tanh(self.inner(state["h"]))
        return state


def test_a_block_that_returns_the_container_it_was_given(caplog):
    class Variant(Doorless):
        def __init__(self, depth=6):
            super().__init__(depth)
            self.blocks = nn.ModuleList(InPlace() for _ in range(depth))

        def forward(self, hidden_states, temb):
            state = self.first = {"h": hidden_states}
            for block in self.blocks:
                state = block(state)
            assert state is self.first
            return self.out(self.first["h"])

    model, inputs = toy(Variant)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(3):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == ALONE
    assert "block 0 writes to its `state`" in caplog.text
