"""What is around a block when it runs is there in its recompute, or the error says why not."""

import random
from itertools import count

import numpy
import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import Block, WithDoor, toy
from training import keys, model_and_inputs

import simpletuner_segckpt
from simpletuner_segckpt.messages.errors import RecomputeError
from simpletuner_segckpt.verify.step import loss_of, step


def made_of(block, depth=4):
    class Variant(WithDoor):
        def __init__(self, depth=depth):
            super().__init__(depth)
            self.blocks = nn.ModuleList(block() for _ in range(depth))

    Variant.__name__ = "WithDoor"
    return toy(Variant)


class DrawsFromPython(Block):
    def forward(self, hidden_states, temb):
        hidden_states = super().forward(hidden_states, temb)
        return hidden_states.exp() if random.random() < 0.5 else hidden_states.sin().cos()


class DrawsFromNumpy(Block):
    def forward(self, hidden_states, temb):
        hidden_states = super().forward(hidden_states, temb)
        return hidden_states.exp() if numpy.random.rand() < 0.5 else hidden_states.sin().cos()


@pytest.mark.parametrize("block", [DrawsFromPython, DrawsFromNumpy])
@pytest.mark.parametrize("interval", [1, 2])
def test_random_numbers_of_python_and_numpy(block, interval):
    model, inputs = made_of(block)

    def run(model):
        random.seed(3)
        numpy.random.seed(3)
        result = step(model, inputs)
        return result, random.random(), numpy.random.rand()

    expected = run(model)
    installation = simpletuner_segckpt.apply(model, keys(interval))
    for _ in range(3):
        assert run(model) == expected
    assert installation.effect["blocks"].covered == (0, 1, 2, 3)


@pytest.mark.parametrize(
    "around", [lambda: sdpa_kernel(SDPBackend.MATH), lambda: attention_backend("_native_math")]
)
@pytest.mark.parametrize("interval", [1, 2])
def test_contexts_around_the_forward_only(around, interval):
    model, inputs = model_and_inputs("wan")

    def run(**given):
        with around():
            return model(**given)

    expected = step(model, inputs, run=run)
    simpletuner_segckpt.apply(model, keys(interval))
    before = torch.backends.cuda.flash_sdp_enabled()
    for _ in range(3):
        assert step(model, inputs, run=run) == expected
    assert torch.backends.cuda.flash_sdp_enabled() is before


class Flips(Block):
    """Takes another expert each time it is called, as a router may by one unit of rounding."""

    calls = count()

    def forward(self, hidden_states, temb):
        hidden_states = super().forward(hidden_states, temb)
        half = hidden_states[:, : 2 + next(self.calls) % 2]
        return hidden_states + half.exp().mean()


def test_a_choice_that_comes_out_differently():
    model, inputs = made_of(Flips, depth=3)
    simpletuner_segckpt.apply(model, keys(1))
    with pytest.raises(RecomputeError) as raised:
        loss_of(model(**inputs)).backward()
    assert "block 2 of `blocks` (schedule [0] [1] [2])" in str(raised.value)
    assert "a choice among values" in str(raised.value)
    assert "SEG613" in str(raised.value)


def test_what_enters_a_segment_is_written_before_backward():
    model, inputs = made_of(Block)
    simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        step(model, inputs)
    loss = loss_of(model(**inputs))
    inputs["temb"].mul_(2)
    with pytest.raises(RecomputeError, match="blocks 2 to 3 of `blocks`.*written in place"):
        loss.backward()


@pytest.mark.parametrize("interval", [1, 2])
def test_weights_that_are_released_and_not_brought_back(interval):
    model, inputs = made_of(Block)
    model.blocks.requires_grad_(False)
    inputs["hidden_states"].requires_grad_()
    simpletuner_segckpt.apply(model, keys(interval))
    for _ in range(2):
        step(model, inputs)
    loss = loss_of(model(**inputs))
    for block in model.blocks:
        block.inner.weight.untyped_storage().resize_(0)
    with pytest.raises(RecomputeError, match="of `blocks`.*moved or released"):
        loss.backward()


def test_other_errors_keep_their_class_and_say_where():
    class Fails(Block):
        fails = False

        def forward(self, hidden_states, temb):
            if self.fails:
                raise RuntimeError("something else")
            return super().forward(hidden_states, temb)

    model, inputs = made_of(Fails)
    simpletuner_segckpt.apply(model, keys(2))
    loss = loss_of(model(**inputs))
    Fails.fails = True
    with pytest.raises(RuntimeError, match="something else") as raised:
        loss.backward()
    assert type(raised.value) is RuntimeError
    assert "block 3 of `blocks`" in raised.value.__notes__[0]
