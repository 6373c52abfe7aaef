"""What a forward did is what was seen: blocks that never came, and blocks that others call."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn
from toys import Doorless, WithDoor, toy
from training import keys, model_and_inputs

import simpletuner_segckpt
from simpletuner_segckpt.verify.step import counted, step

KINDS = [WithDoor, Doorless]


class CallsParts(Doorless):
    """A loop that never calls its blocks, only what is inside them."""

    def forward(self, hidden_states, temb):
        for block in self.blocks:
            hidden_states = hidden_states + torch.tanh(block.inner(hidden_states) * temb)
        return self.out(hidden_states)


def test_blocks_that_never_came_are_not_reached(caplog):
    model, inputs = toy(CallsParts)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, inputs) == expected
    effect = installation.effect["blocks"]
    assert effect.strategy == "not reached"
    assert effect.segments == ()
    assert effect.missing == tuple(range(6))
    assert "none of its blocks was called" in str(installation.effect)
    assert not installation.history.recomputed
    assert caplog.text.count("blocks was not reached") == 1


def test_blocks_that_did_not_come_this_time_are_named():
    class Leaves(WithDoor):
        def forward(self, hidden_states, temb):
            for index in (0, 1, 2, 5):
                hidden_states = self.run(self.blocks[index], hidden_states, temb)
            return self.out(hidden_states)

    model, inputs = toy(Leaves)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, inputs) == expected
        assert installation.effect["blocks"].missing == (3, 4)
        assert "not reached: 3 4" in str(installation.effect)


class Outer(nn.Module):
    """Runs the blocks of another model, and never that model."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, temb):
        for block in self.inner.blocks:
            hidden_states = block(hidden_states, temb=temb)
        return self.inner.out(hidden_states)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_the_forward_of_another_module_calls(kind, caplog):
    inner, inputs = toy(kind)
    outer = Outer(inner)
    expected = step(outer, inputs)
    classes = [type(block) for block in inner.blocks]
    installation = simpletuner_segckpt.apply(inner, keys(2))
    for number in range(3):
        with counted(inner, ["blocks"]) as calls:
            assert step(outer, inputs) == expected
        # The first call of all is what shows it.
        assert calls["blocks"] == Counter({b: 2 - (number == b == 0) for b in range(6)})
    assert "by itself" in str(installation.effect)
    assert installation.history.past_the_hooks == 17
    assert caplog.text.count("call apply() on the outer model") == 1
    # The model itself goes on as it is scheduled, without gradients nothing is recomputed, and
    # what is switched off stays off.
    for _ in range(2):
        assert step(inner, inputs) == expected_of(inner, inputs)
    assert installation.effect["blocks"].segments == (range(0, 2), range(2, 4), range(4, 6))
    with torch.no_grad(), counted(inner, ["blocks"]) as calls:
        outer(**inputs)
    assert calls["blocks"] == Counter(range(6))
    twin = pickle.loads(pickle.dumps(inner)) if kind is Doorless else copy.deepcopy(inner)
    assert step(Outer(twin), inputs) == step(outer, inputs)
    installation.remove()
    assert [type(block) for block in inner.blocks] == classes
    assert not any(block._forward_pre_hooks for block in inner.blocks)
    with counted(inner, ["blocks"]) as calls:
        assert step(outer, inputs) == expected
    assert calls["blocks"] == Counter(range(6))


def expected_of(model, inputs):
    twin = copy.deepcopy(model)
    simpletuner_segckpt.remove(twin)
    return step(twin, inputs)


def test_pixart_blocks_under_a_controlnet_of_ones_own():
    """As diffusers' research project runs it: the outer forward goes over the inner blocks."""
    inner, inputs = model_and_inputs("pixart")

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer = inner

        def forward(self, **given):
            # The inner forward's own code, entered by another module.
            return type(inner).forward(self.transformer, **given)

    wrapper = Wrapper()
    paths = ["transformer_blocks"]
    expected = step(wrapper, inputs)
    installation = simpletuner_segckpt.apply(inner, keys(2))
    for _ in range(2):
        with counted(inner, paths) as calls:
            assert step(wrapper, inputs) == expected
        count = len(inner.transformer_blocks)
        assert calls[paths[0]] == Counter(dict.fromkeys(range(count), 2))
    assert installation.history.recomputed
