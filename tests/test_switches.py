"""Classes whose checkpointing is switched in a way of their own."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from diffusers import ConfigMixin, ModelMixin
from torch import nn
from toys import Loop, toy
from training import keys

import simpletuner_segckpt
from simpletuner_segckpt import UnsupportedModel
from simpletuner_segckpt.verify.step import counted, step


class Switched(Loop):
    """Its loop calls torch's own checkpoint function where ``recomputes`` says so."""

    _supports_gradient_checkpointing = True

    def __init__(self, depth=6):
        super().__init__()
        self.build(depth)
        self.prepare()

    def prepare(self):
        self.gradient_checkpointing = False

    def run(self, block, hidden_states, temb):
        if self.training and torch.is_grad_enabled() and self.recomputes():
            arguments = (block, hidden_states, temb)
            return torch.utils.checkpoint.checkpoint(*arguments, use_reentrant=False)
        return block(hidden_states, temb)

    def recomputes(self):
        return self.gradient_checkpointing


class Model(Switched, ModelMixin, ConfigMixin):
    pass


class NoArguments(Model):
    def enable_gradient_checkpointing(self):
        self.gradient_checkpointing = True


class OfOldDiffusers(Model):
    def _set_gradient_checkpointing(self, module, value=False):
        module.gradient_checkpointing = value


class NoMethod(Model):
    enable_gradient_checkpointing = property()  # raises AttributeError, as what is not there


class NoSwitch(Model):
    """diffusers' own method refuses a model of which no module has the attribute."""

    def prepare(self):
        pass

    def recomputes(self):
        return False


class ReadOnly(Model):
    _on = False

    def prepare(self):
        pass

    @property
    def gradient_checkpointing(self):
        return self._on

    def enable_gradient_checkpointing(self, gradient_checkpointing_func=None):
        self._on = True


class Passing(ReadOnly):
    """A property with a setter is as good as an attribute."""

    gradient_checkpointing = ReadOnly.gradient_checkpointing.setter(
        lambda self, on: setattr(self, "_on", on)
    )

    def enable_gradient_checkpointing(self):
        self._on = True


class FixedFunction(Switched, nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        self.build(depth)
        self.gradient_checkpointing = False

    @property
    def _gradient_checkpointing_func(self):
        return lambda block, *args: block(*args)


SHAPES = [NoArguments, OfOldDiffusers, NoMethod, NoSwitch, ReadOnly, Passing, FixedFunction]
# Interval 2, stride 4, of 6 blocks.
RUNS = {0: 2, 1: 2, 2: 1, 3: 1, 4: 2, 5: 2}


@pytest.mark.parametrize("kind", SHAPES)
def test_each_has_the_schedule(kind):
    model, inputs = toy(kind)
    plain = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2, 4))
    for trained in (model, copy.deepcopy(model)):
        assert step(trained, inputs) == plain  # the one in which segments are proven
        with counted(trained, ["blocks"]) as runs:
            assert step(trained, inputs) == plain
        assert runs["blocks"] == RUNS
    assert installation.effect["blocks"].segments == (range(0, 2), range(4, 6))
    installation.remove()
    with counted(model, ["blocks"]) as runs:
        assert step(model, inputs) == plain
    assert set(runs["blocks"].values()) == {1}


@pytest.mark.parametrize("kind", [NoArguments, OfOldDiffusers, Passing, FixedFunction])
def test_switching_counts_and_comes_back(kind):
    model, inputs = toy(kind)
    model.gradient_checkpointing = True
    attributes = dict(vars(model))
    installation = simpletuner_segckpt.apply(model, keys(2))
    model.gradient_checkpointing = False
    step(model, inputs)
    assert installation.history.switched_off == 1
    model.gradient_checkpointing = True
    step(model, inputs)
    assert installation.effect["blocks"].covered == tuple(range(6))
    installation.remove()
    assert vars(model) == attributes
    with counted(model, ["blocks"]) as runs:
        step(model, inputs)
    assert set(runs["blocks"].values()) == {2}  # its own loop's doing


def test_a_switch_that_is_on_for_good_is_refused():
    sentence = "`gradient_checkpointing` of ReadOnly is a property that cannot be set, and it is on"
    model, inputs = toy(ReadOnly)
    model.enable_gradient_checkpointing()
    attributes = dict(vars(model))
    for config in (keys(2), {"gradient_checkpointing": False}):
        with pytest.raises(UnsupportedModel, match=sentence):
            simpletuner_segckpt.apply(model, config)
    assert vars(model) == attributes
    model, inputs = toy(ReadOnly)
    installation = simpletuner_segckpt.apply(model, keys(2))
    model.enable_gradient_checkpointing()  # after it: said by the forward, before the first block
    with pytest.raises(UnsupportedModel, match=sentence):
        step(model, inputs)
    model._on = False
    step(model, inputs)
    assert installation.effect["blocks"].covered == tuple(range(6))
