"""Loops as trainers' own classes have them: where a segment holds, and where it must not.

Their classes have setters of their own, which ``apply`` leaves alone.
"""

import copy
import sys

import pytest
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn
from toys import WIDTH, Block, toy
from training import warned

import simpletuner_segckpt
from simpletuner_segckpt import Family, SegmentBroken, UnsupportedModel
from simpletuner_segckpt.model.interception import BlockFunction
from simpletuner_segckpt.verify.step import counted, step


class Setters(ModelMixin, ConfigMixin):
    """A trainer's class, whose own loop checkpoints every block if it is told to."""

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(self, depth: int = 6):
        super().__init__()
        self.gradient_checkpointing = False
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.out = nn.Linear(WIDTH, WIDTH)

    def set_gradient_checkpointing_interval(self, value):
        self.interval = value

    def set_gradient_checkpointing_backend(self, value):
        self.backend = value

    def forward(self, hidden_states, temb):
        for block in self.blocks:
            hidden_states = self.run(block, hidden_states, temb)
        return self.out(hidden_states)

    def run(self, block, hidden_states, temb):
        if self.gradient_checkpointing:
            return torch.utils.checkpoint.checkpoint(
                block, hidden_states, temb, use_reentrant=False
            )
        return block(hidden_states, temb)


class Switches(Setters):
    """Is switched by an attribute of another name, and by methods of its own."""

    def __init__(self, depth: int = 6):
        super().__init__(depth)
        del self.gradient_checkpointing
        self.checkpoint = False

    def enable_gradient_checkpointing(self):
        self.checkpoint = True

    def disable_gradient_checkpointing(self):
        self.checkpoint = False

    def run(self, block, hidden_states, temb):
        if self.checkpoint and self.training:
            return torch.utils.checkpoint.checkpoint(
                block, hidden_states, temb, use_reentrant=False
            )
        return block(hidden_states, temb)


class Turns(Setters):
    """Hands the state on in another order of dimensions, and back."""

    def run(self, block, hidden_states, temb):
        state = hidden_states.permute(1, 0, 2).contiguous()
        state = torch.transpose(state, 0, 1).contiguous()
        return super().run(block, state, temb)


class Views(Setters):
    """Makes a view for a capture that nobody asked for."""

    captured = None

    def forward(self, hidden_states, temb):
        for index, block in enumerate(self.blocks):
            hidden_states = self.run(block, hidden_states, temb)
            tokens = hidden_states.flatten(1, 2).unflatten(1, (5, WIDTH))[:, 1:]
            if self.captured is not None:
                self.captured[index] = tokens
        return self.out(hidden_states)


class Tables(Setters):
    """Joins the same table anew before every block."""

    drift = 0.0

    def forward(self, hidden_states, temb):
        table = torch.ones(2, 1, WIDTH // 2)
        for index, block in enumerate(self.blocks):
            joined = torch.cat([table, table + index * self.drift], dim=-1)
            hidden_states = self.run(block, hidden_states, joined)
        return self.out(hidden_states * temb)


def run_block(block, hidden_states, temb, scale=1.0):
    """Runs the parts of a block, which is never called itself."""
    inner = block.inner(hidden_states) * temb
    return hidden_states + torch.tanh(inner) * scale


class Functions(Setters):
    def forward(self, hidden_states, temb):
        for block in self.blocks:
            hidden_states = run_block(block, hidden_states, temb, scale=0.5)
        return self.out(hidden_states)


def described(cls, **stack):
    own = {"path": "blocks", "block": "Block", "count": "depth", **stack}
    trained = {"trainer": "a trainer", "classes": (f"test_loops.{cls.__name__}",), "stacks": (own,)}
    base = {"family": "toy", "title": "Toy", "stacks": (own,), "implementations": (trained,)}
    return Family.model_validate(base)


BY_FUNCTION = described(Functions, called_by="run_block", carried={"hidden_states": "return"})
FAMILIES = {Functions: BY_FUNCTION}
TWO = {"gradient_checkpointing_interval": 2}


def applied(cls, **more):
    model, inputs = toy(cls)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, TWO | more, family=FAMILIES.get(cls))
    return model, inputs, expected, installation


@pytest.mark.parametrize("cls", [Setters, Switches, Turns, Views, Tables, Functions])
def test_what_a_loop_does_between_blocks_without_computing_costs_no_segment(cls):
    model, inputs, expected, installation = applied(cls)
    for switch in (model.enable_gradient_checkpointing, model.disable_gradient_checkpointing) * 2:
        model.set_gradient_checkpointing_interval(3)
        model.set_gradient_checkpointing_backend("unsloth")
        switch()
    model.enable_gradient_checkpointing()
    for _ in range(2):
        assert step(model, inputs) == expected
    with CountedParts(model) as calls:
        assert step(model, inputs) == expected
    assert calls == [2] * 6
    effect = installation.effect["blocks"]
    assert effect.strategy == "segmented"
    assert effect.segments == (range(0, 2), range(2, 4), range(4, 6))
    model.disable_gradient_checkpointing()
    with CountedParts(model) as calls:
        assert step(model, inputs) == expected
    assert calls == [1] * 6
    installation.remove()
    assert step(model, inputs) == expected


class CountedParts:
    """How often the linear layer of each block runs."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        calls = [0] * len(self.model.blocks)

        def count(index, module, args):
            calls[index] += 1

        self.handles = [
            block.inner.register_forward_pre_hook(lambda m, a, i=i: count(i, m, a))
            for i, block in enumerate(self.model.blocks)
        ]
        return calls

    def __exit__(self, *exception):
        for handle in self.handles:
            handle.remove()


def test_a_view_that_is_kept_is_the_state_that_is_kept():
    model, inputs, expected, installation = applied(Views)
    for _ in range(2):
        assert step(model, inputs) == expected
    model.captured = {}
    with pytest.raises(SegmentBroken, match="keeps the state between its blocks"):
        step(model, inputs)
    for _ in range(2):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].strategy == "per-block"


class Reads(Turns):
    """The same layout on the way, with other values."""

    def run(self, block, hidden_states, temb):
        turned = hidden_states.permute(1, 0, 2)
        return Setters.run(self, block, (turned * 1.0).permute(1, 0, 2), temb)


class Flips(Turns):
    """Another order of dimensions than before, of the same shape."""

    def forward(self, hidden_states, temb):
        square = hidden_states[:, :2, :2].repeat(1, 1, 4).reshape(2, 8, 2)[:, :, :1]
        state = square.expand(2, 8, WIDTH).contiguous()
        for block in self.blocks:
            state = Setters.run(self, block, state.transpose(1, 2).contiguous(), temb)
        return self.out(state)


@pytest.mark.parametrize("cls", [Reads, Flips])
def test_what_is_computed_or_turned_between_blocks_is_seen(cls):
    model, inputs, expected, installation = applied(cls)
    for _ in range(3):
        assert step(model, inputs) == expected
    effect = installation.effect["blocks"]
    assert effect.strategy == "per-block"
    assert "block 0" in effect.reason


def test_tables_with_other_values_for_each_block():
    model, inputs, expected, installation = applied(Tables)
    model.drift = 0.5
    expected = step(copy.deepcopy(model), inputs)
    for _ in range(2):
        assert step(model, inputs) == expected
    assert "does not get the same `temb`" in installation.effect["blocks"].reason


def test_tables_that_become_different_stop_the_forward():
    model, inputs, expected, installation = applied(Tables)
    for _ in range(2):
        assert step(model, inputs) == expected
    model.drift = 0.5
    with pytest.raises(SegmentBroken, match="`temb` of block 1 has other values"):
        step(model, inputs)
    assert step(model, inputs).loss.isfinite()
    assert installation.effect["blocks"].strategy == "per-block"


def test_a_function_runs_other_models_as_ever():
    plain, inputs = toy(Functions)
    model, _, expected, installation = applied(Functions)
    step(model, inputs)
    assert isinstance(sys.modules[__name__].run_block, BlockFunction)
    with CountedParts(plain) as calls:
        assert step(plain, inputs) == expected
    assert calls == [1] * 6
    twin = copy.deepcopy(model)
    for _ in range(2):
        assert step(twin, inputs) == expected
    with counted(twin, ["blocks"]) as counts:
        assert step(twin, inputs) == expected
    assert not counts["blocks"]  # a block is never called itself
    assert installation.proofs["blocks"].links(range(0, 2))[0].names == ("hidden_states",)


def test_a_function_that_is_not_there_is_refused():
    model, _ = toy(Functions)
    before = copy.copy(model.__dict__)
    family = described(Functions, called_by="run_it")
    with pytest.raises(UnsupportedModel, match=r"has no run_it\(\), which is to run its blocks"):
        simpletuner_segckpt.apply(model, TWO, family=family)
    assert model.__dict__ == before


class Joined(Setters):
    """Two stacks: the second one works on the two streams of the first in one tensor."""

    def __init__(self, depth: int = 6):
        super().__init__(depth)
        self.single = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, hidden_states, temb):
        state = super().forward(hidden_states, temb)
        state = torch.cat([hidden_states, state], dim=1)
        for block in self.single:
            state = self.run(block, hidden_states=state, temb=temb)
        return state

    def run(self, block, hidden_states, temb):
        return block(hidden_states, temb)


def test_a_family_that_expects_two_streams_where_there_is_one(caplog):
    model, inputs = toy(Joined)
    expected = step(model, inputs)
    stacks = (
        {"path": "blocks", "block": "Block", "carried": {"hidden_states": "return"}},
        {"path": "single", "block": "Block", "carried": {"hidden_states": 1, "temb": 0}},
    )
    wrong = Family.model_validate({"family": "toy", "title": "Toy", "stacks": stacks})
    more = {"gradient_checkpointing_segment_stride": 3}
    installation = simpletuner_segckpt.apply(model, TWO | more, family=wrong)
    for _ in range(3):
        assert step(model, inputs) == expected
    for path in ("blocks", "single"):
        assert str(installation.effect[path].segments) == "(range(0, 2), range(3, 5))"
    assert not [line for line in warned(caplog.records) if "block by block" in line]
