"""Loops, hooks and wrappers that a segment could get wrong without a word, each with its answer."""

import contextlib
import copy
import pickle
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from toys import WIDTH, Block, Doorless, WithDoor, Wrapper, toy
from training import add_lora, entry_of, keys, model_and_inputs
from transformers import LlamaConfig, LlamaModel

import simpletuner_segckpt
from simpletuner_segckpt import Family, UnsupportedModel
from simpletuner_segckpt.engine.call_shapes import MOST_SHAPES, CallShape, ProofTable, call_shape
from simpletuner_segckpt.engine.proof import Proof
from simpletuner_segckpt.schedules.schedule import Schedule
from simpletuner_segckpt.verify.step import counted, step

KINDS = [WithDoor, Doorless]
WIDE = (range(0, 2), range(2, 4), range(4, 6))


def alone(*blocks):
    return tuple(range(block, block + 1) for block in blocks)


def variant(kind, forward, block=Block):
    """A toy of ``kind`` with another loop and another block class."""

    class Variant(kind):
        def __init__(self, depth=6):
            super().__init__(depth)
            self.blocks = nn.ModuleList(block() for _ in range(depth))

    Variant.forward = forward
    return toy(Variant)


# Loops. In each of them blocks must not run together.


def detaches(self, hidden_states, temb):
    for index, block in enumerate(self.blocks):
        hidden_states = self.run(block, hidden_states, temb)
        if index == 2:
            hidden_states.detach_()
    return self.out(hidden_states)


def changes_grad_mode(self, hidden_states, temb):
    with contextlib.ExitStack() as stack:
        for index, block in enumerate(self.blocks):
            if index == 3:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            hidden_states = self.run(block, hidden_states, temb)
    return self.out(hidden_states.float())


def draws_random_numbers(self, hidden_states, temb):
    for block in self.blocks:
        torch.rand(1)
        hidden_states = self.run(block, hidden_states, temb)
    return self.out(hidden_states)


class Dropping(Block):
    def forward(self, hidden_states, temb):
        return nn.functional.dropout(super().forward(hidden_states, temb), 0.2)


class WithObject(Block):
    def forward(self, hidden_states, temb):
        result = super().forward(hidden_states, temb)
        return result, SimpleNamespace(aux=result.mean())


def adds_up_objects(self, hidden_states, temb):
    aux = 0
    for block in self.blocks:
        hidden_states, extra = self.run(block, hidden_states, temb)
        aux = aux + extra.aux
    return self.out(hidden_states) + aux


class Narrowing(Block):
    """Drops one token."""

    def forward(self, hidden_states, temb):
        return super().forward(hidden_states, temb)[:, 1:]


def counts_tokens(self, hidden_states, temb):
    hidden_states = torch.cat([hidden_states] * 3, 1)
    tokens = 0
    for block in self.blocks:
        hidden_states = self.run(block, hidden_states, temb)
        tokens += hidden_states.shape[1]
    return self.out(hidden_states) * tokens


class Context:
    """Nobody can tell what is data of it."""

    scale = 1.0


class Twice(Block):
    """Counts in an object that all blocks share: what it holds when the block runs matters."""

    def forward(self, hidden_states, temb):
        return hidden_states + torch.tanh(self.inner(hidden_states) * temb.scale)


def counts_in_an_object(self, hidden_states, temb):
    context = Context()
    for block in self.blocks:
        hidden_states = self.run(block, hidden_states, context)
    return self.out(hidden_states)


class Scaled(Block):
    scale = 1.0

    def forward(self, hidden_states, temb):
        return super().forward(hidden_states, temb) * self.scale


def sets_attributes(self, hidden_states, temb):
    self.step = getattr(self, "step", 0) + 1
    for index, block in enumerate(self.blocks):
        block.scale = 1 + index / self.step
        hidden_states = self.run(block, hidden_states, temb)
    return self.out(hidden_states)


def goes_round_twice(self, hidden_states, temb):
    for round_ in range(2):
        for block in self.blocks:
            hidden_states = self.run(block, hidden_states, temb)
            if round_ == 0:
                hidden_states = hidden_states * 1.1
    return self.out(hidden_states)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("forward", "block", "segments"),
    [
        (detaches, Block, (range(0, 2), *alone(2, 3), range(4, 6))),
        (changes_grad_mode, Block, (range(0, 2), *alone(2, 3), range(4, 6))),
        (draws_random_numbers, Dropping, alone(*range(6))),
        (adds_up_objects, WithObject, alone(*range(6))),
        (counts_tokens, Narrowing, alone(*range(6))),
        (counts_in_an_object, Twice, alone(*range(6))),
        (sets_attributes, Scaled, alone(*range(6))),
        (goes_round_twice, Block, alone(*range(6)) * 2),
    ],
)
def test_loops_whose_blocks_must_not_run_together(kind, forward, block, segments):
    model, inputs = variant(kind, forward, block)
    expected = [step(copy.deepcopy(model), inputs)] * 3
    if forward is sets_attributes:
        twin = copy.deepcopy(model)
        expected = [step(twin, inputs) for _ in range(3)]
    installation = simpletuner_segckpt.apply(model, keys(2))
    for number in range(3):
        assert step(model, inputs) == expected[number]
    assert installation.effect["blocks"].segments == segments


class LooksElsewhere(Block):
    """Multiplies by what its model says, not by what it is given."""

    def forward(self, hidden_states, temb):
        return super().forward(hidden_states, temb) * self.owner[0].factor


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_look_at_something_else_than_arguments(kind):
    """Identity cannot see it; trying the segments out once on the recorded inputs does."""

    def forward(self, hidden_states, temb):
        self.factor = 1.0
        for block in self.blocks:
            hidden_states = self.run(block, hidden_states, temb)
            self.factor *= 1.1
        return self.out(hidden_states)

    model, inputs = variant(kind, forward, LooksElsewhere)
    for block in model.blocks:
        block.owner = [model]
    with torch.no_grad():
        expected = model(**inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert torch.equal(model(**inputs), expected)
    assert installation.effect["blocks"].segments == alone(*range(6))
    assert "other values" in installation.effect["blocks"].reason


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_pairs_modules(kind):
    """`for attention, feed_forward in self.layers`: a list of lists is no stack."""

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(3))
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, hidden_states, temb):
            for first, second in self.layers:
                hidden_states = second(first(hidden_states, temb), temb)
            for block in self.blocks:
                hidden_states = block(hidden_states, temb)
            return hidden_states

    model, inputs = toy(Pairs)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == (range(0, 2), range(2, 4))


def test_a_list_with_one_block_in_it_several_times():
    class Tied(WithDoor):
        def build(self, depth):
            super().build(depth)
            self.blocks = nn.ModuleList([self.blocks[0]] * depth)

    model, _ = toy(Tied)
    with pytest.raises(simpletuner_segckpt.UnsupportedModel):
        simpletuner_segckpt.apply(model, keys(2))


def test_lists_that_only_look_like_stacks_do_not_use_up_keep_last(caplog):
    class WithMore(WithDoor):
        def build(self, depth):
            super().build(depth)
            self.heads = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(4))

        def forward(self, hidden_states, temb):
            return self.heads[1](super().forward(hidden_states, temb))

    model, inputs = toy(WithMore)
    installation = simpletuner_segckpt.apply(model, keys(1, keep_last=2))
    for _ in range(2):
        step(model, inputs)
    assert installation.effect["blocks"].gap == (4, 5)
    assert "heads was not reached" in caplog.text


def test_a_list_that_holds_a_block_twice_is_no_stack_and_that_is_said():
    class Tied(WithDoor):
        def build(self, depth):
            super().build(depth)
            self.blocks[3] = self.blocks[0]

    model, inputs = toy(Tied)
    with pytest.raises(UnsupportedModel, match="`blocks` holds one block more than once, so its"):
        simpletuner_segckpt.apply(model, keys(2))
    described = Family.model_validate(
        {"family": "tied", "title": "Tied", "stacks": [{"path": "blocks", "block": "Block"}]}
    )
    with pytest.raises(UnsupportedModel, match="`blocks` holds one block more than once, so its"):
        simpletuner_segckpt.apply(model, keys(2), family=described)

    class TiedAndMore(Tied):
        def build(self, depth):
            super().build(depth)
            self.more = nn.ModuleList(Block() for _ in range(depth))

        def forward(self, hidden_states, temb):
            for block in self.more:
                hidden_states = self.run(block, hidden_states, temb)
            return super().forward(hidden_states, temb)

    model, inputs = toy(TiedAndMore)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, inputs) == expected
    assert installation.effect["more"].segments == WIDE
    [(path, reason)] = installation.report.left_out
    assert (path, reason.startswith("holds one block more than once")) == ("blocks", True)


def test_a_function_of_the_model_handed_to_its_checkpoint_function():
    class Chunks(WithDoor):
        def chunk(self, hidden_states):
            return torch.tanh(hidden_states)

        def forward(self, hidden_states, temb):
            hidden_states = self._gradient_checkpointing_func(self.chunk, hidden_states)
            return super().forward(hidden_states, temb)

    model, inputs = toy(Chunks)
    model.enable_gradient_checkpointing()
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, inputs) == expected
    assert installation.effect["units"].covered == (0,)
    assert installation.effect["blocks"].segments == WIDE


# Checkpointing of others.


def test_a_model_that_checkpoints_its_blocks_itself():
    def forward(self, hidden_states, temb):
        for block in self.blocks:
            hidden_states = torch.utils.checkpoint.checkpoint(
                block, hidden_states, temb, use_reentrant=False
            )
        return self.out(hidden_states)

    model, inputs = variant(Doorless, forward)
    expected = step(model, inputs)
    simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        with counted(model, ["blocks"]) as calls:
            assert step(model, inputs) == expected
        assert calls["blocks"] == Counter(dict.fromkeys(range(6), 2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_inside_another_checkpoint_call(kind):
    model, inputs = toy(kind)

    def outer(hidden_states, temb):
        return torch.utils.checkpoint.checkpoint(model, hidden_states, temb, use_reentrant=False)

    expected = step(model, inputs, run=outer)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, inputs, run=outer) == expected
    for _ in range(2):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == WIDE


# Ends of a forward that torch does not announce, and forwards inside forwards.


@pytest.mark.parametrize("kind", KINDS)
def test_a_keyboard_interrupt(kind):
    model, inputs = toy(kind)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for proven in (False, True):
        model.between = interrupt
        with pytest.raises(KeyboardInterrupt):
            model(**inputs)
        model.between = None
        with torch.no_grad(), counted(model, ["blocks"]) as calls:
            model(**inputs)
        assert set(calls["blocks"].values()) == {1}
        for _ in range(2):
            assert step(model, inputs) == expected
        assert installation.effect["blocks"].segments == WIDE, proven


def test_an_interrupt_without_a_traceback_leaves_nothing():
    """The record of a forward that was stopped is dropped by the next one, tensors and all."""
    model, inputs = toy(WithDoor)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        step(model, inputs)
    model.between = interrupt
    for _ in range(3):
        with contextlib.suppress(KeyboardInterrupt):
            model(**inputs)
    model.between = None
    step(model, inputs)
    assert entry_of(installation).running.by_thread == {}
    assert installation.effect["blocks"].segments == WIDE


def interrupt(index, state):
    if index == 2:
        raise KeyboardInterrupt
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_inside_a_forward_that_goes_on(kind):
    model, inputs = toy(kind)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))

    def inside(index, state):
        if index == 1:
            model.between = interrupt
            with torch.no_grad(), contextlib.suppress(KeyboardInterrupt):
                model(**inputs)
            model.between = inside
        return state

    model.between = inside
    for _ in range(2):
        assert step(model, inputs) == expected
    assert installation.history.trained == 2
    assert installation.effect["blocks"].segments == WIDE
    assert entry_of(installation).running.by_thread == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_that_returns_nothing(kind):
    """It trains like any other; one that raises does not."""

    class Leaves(kind):
        def forward(self, hidden_states, temb):
            self.results = [super().forward(hidden_states, temb)]

    def run(**inputs):
        assert model(**inputs) is None
        return model.results.pop()

    model, inputs = toy(Leaves)
    expected = step(model, inputs, run=run)
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    installation = simpletuner_segckpt.apply(model, keys(2))
    for trained in range(1, 4):
        assert step(model, inputs, run=run) == expected
        assert installation.history.trained == trained
    assert installation.effect["blocks"].segments == WIDE
    model.between = fail
    with pytest.raises(ArithmeticError):
        model(**inputs)
    del model.between
    assert installation.history.trained == 3
    assert entry_of(installation).running.by_thread == {}
    model = copy.deepcopy(model)
    assert step(model, inputs, run=run) == expected
    assert simpletuner_segckpt.installation_of(model).history.trained == 1
    model = installation.model
    installation.remove()
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before


def test_a_forward_whose_hook_raises_does_not_count():
    model, inputs = toy(WithDoor)
    hook = model.register_forward_hook(lambda *_: fail())
    installation = simpletuner_segckpt.apply(model, keys(2))
    with pytest.raises(ArithmeticError):
        model(**inputs)
    assert installation.history.trained == 0
    assert installation.effect is None
    assert entry_of(installation).running.by_thread == {}
    hook.remove()
    step(model, inputs)
    assert installation.history.trained == 1


def fail(*_):
    raise ArithmeticError


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_without_gradients_inside_a_training_forward(kind):
    model, inputs = toy(kind)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(3))
    inner_outputs = []

    def inside(index, state):
        if index == 2:
            model.between = None
            with torch.no_grad():
                inner_outputs.append(model(**inputs))
            model.between = inside
        return state

    for _ in range(3):
        model.between = inside
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == (range(0, 3), range(3, 6))
    assert torch.equal(inner_outputs[0], inner_outputs[2])


# Changes to the model after apply.


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_removed_after_apply(kind, caplog):
    model, inputs = toy(kind)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        step(model, inputs)
    del model.blocks[3]
    with_plugin = [step(model, inputs) for _ in range(2)]
    assert "has 5 blocks now and had 6" in caplog.text
    installation.remove()
    assert [step(model, inputs)] * 2 == with_plugin


def test_blocks_with_switches_of_their_own_removed_after_apply():
    config = {"num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 16}
    model = LlamaModel(LlamaConfig(vocab_size=9, num_attention_heads=2, **config)).train()
    inputs = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "use_cache": False}
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        step(model, inputs)
    del model.layers[3]
    with_plugin = step(model, inputs)
    installation.remove()
    assert step(model, inputs) == with_plugin


def test_a_broken_installation_is_rolled_back(monkeypatch):
    model, inputs = toy(WithDoor)
    before = copy.copy(model.__dict__)
    monkeypatch.setattr(
        type(model), "enable_gradient_checkpointing", lambda *_, **__: 1 / 0, raising=False
    )
    with pytest.raises(ZeroDivisionError):
        simpletuner_segckpt.apply(model, keys(2))
    assert model.__dict__ == before
    monkeypatch.undo()
    expected = step(model, inputs)
    simpletuner_segckpt.apply(model, keys(2))
    assert step(model, inputs) == expected


def test_models_with_flags_of_their_own():
    class Flagged(Doorless):
        def __init__(self, depth=6):
            super().__init__(depth)
            self.gradient_checkpointing = False

    flagged, inputs = toy(Flagged)
    for model, path in ((flagged, "blocks"), (Wrapper(toy(WithDoor)[0]), "model.blocks")):
        expected = step(model, inputs)
        before = {name: dict(m.__dict__) for name, m in model.named_modules()}
        installation = simpletuner_segckpt.apply(model, keys(2))
        for _ in range(2):
            assert step(model, inputs) == expected
        assert installation.effect[path].segments == WIDE
        installation.remove()
        assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before


@pytest.mark.parametrize("model", [None, "model", 3])
def test_something_that_is_no_model(model):
    with pytest.raises(TypeError, match="pass an nn.Module"):
        simpletuner_segckpt.apply(model, keys(2))


# Hooks that run once per block, wherever they are.


def swapping_hooks(blocks):
    stored = {block: [p.detach().clone() for p in block.parameters()] for block in blocks}

    def fetch(block, *_):
        for parameter, value in zip(block.parameters(), stored.get(block, ()), strict=False):
            parameter.data.copy_(value)

    def drop(block, *_):
        if block in stored:
            for parameter in block.parameters():
                parameter.data.fill_(float("nan"))

    return fetch, drop


def test_global_hooks():
    model, inputs = toy(WithDoor)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(3))
    for _ in range(2):
        step(model, inputs)
    fetch, drop = swapping_hooks(model.blocks)
    handles = [
        nn.modules.module.register_module_forward_pre_hook(fetch),
        nn.modules.module.register_module_forward_hook(drop),
    ]
    try:
        assert step(model, inputs) == expected
        assert "global hook" in installation.effect["blocks"].reason
    finally:
        for handle in handles:
            handle.remove()
        for block in model.blocks:
            fetch(block)
    assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == (range(0, 3), range(3, 6))


def test_hooks_inside_blocks():
    model, inputs = toy(WithDoor)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        step(model, inputs)
    handle = model.blocks[3].inner.register_forward_hook(lambda *_: None)
    for segments in (alone(*range(6)), (range(2), *alone(2, 3), range(4, 6))):
        assert step(model, inputs) == expected
        assert installation.effect["blocks"].segments == segments
    assert "block 3" in installation.effect["blocks"].reason
    handle.remove()
    assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == WIDE


def test_hooks_on_blocks_under_a_compiled_wrapper():
    model, inputs = toy(WithDoor)
    expected = step(model, inputs)
    fetch, drop = swapping_hooks(list(model.blocks))
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(fetch)
        block.register_forward_hook(drop)
        model.blocks[index] = torch.compile(block, backend="eager")
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        installed = step(model, inputs)
        assert torch.equal(installed.loss, expected.loss)
        assert next(iter(installed.gradients.values())).isfinite().all()
    assert installation.effect["blocks"].strategy == "per-block"


# LoRA scale: lost in the recompute of diffusers itself.


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_a_lora_scale_is_the_same_in_recompute(interval, scale):
    model, inputs = model_and_inputs("flux")
    add_lora(model)
    inputs["joint_attention_kwargs"] = {"scale": scale}
    expected = step(model, inputs)
    simpletuner_segckpt.apply(model, keys(interval))
    for _ in range(2):
        assert step(model, inputs) == expected


# Switched off and on.


def test_a_disabled_model_has_no_stale_effect():
    model, inputs = toy(WithDoor)
    installation = simpletuner_segckpt.apply(model, keys(2))
    step(model, inputs)
    model.disable_gradient_checkpointing()
    step(model, inputs)
    assert installation.effect.stacks == ()
    assert installation.effect.conditions[0].off


# Trying segments out, in models that nobody described.


class NeedsGradients(Block):
    def forward(self, hidden_states, temb):
        assert torch.is_grad_enabled()
        return super().forward(hidden_states, temb)


class Statistics(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden_states, temb):
        self.seen += 1
        return super().forward(hidden_states, temb)


@pytest.mark.parametrize("kind", KINDS)
def test_trying_out_has_the_grad_mode_of_the_forward(kind):
    model, inputs = variant(kind, kind.forward, NeedsGradients)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == WIDE


def test_trying_out_a_block_that_raises_is_no_error():
    class OnlyInTheLoop(Block):
        def forward(self, hidden_states, temb):
            if not self.__dict__["model"][0].in_loop:
                raise RuntimeError("not in the loop")
            return super().forward(hidden_states, temb)

    def in_loop(self, hidden_states, temb):
        self.in_loop = True
        for block in self.blocks:
            hidden_states = self.run(block, hidden_states, temb)
        self.in_loop = False
        return self.out(hidden_states)

    model, inputs = variant(WithDoor, in_loop, OnlyInTheLoop)
    for block in model.blocks:
        block.__dict__["model"] = [model]
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        model(**inputs)
    assert installation.effect["blocks"].segments == alone(*range(6))
    assert "raise RuntimeError" in installation.effect["blocks"].reason


def test_trying_out_leaves_buffers_alone():
    model, inputs = variant(WithDoor, WithDoor.forward, Statistics)
    simpletuner_segckpt.apply(model, keys(2))
    for _ in range(3):
        model(**inputs)
    assert [block.seen.item() for block in model.blocks] == [3.0] * 6


# Classes and copies of intercepted blocks.


def test_classes_that_keep_an_eye_on_their_subclasses():
    registry = {}

    class Registered(Block):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            registry[cls.__name__] = cls

    class Leaf(Registered):
        pass

    class Final(Block):
        def __init_subclass__(cls, **kwargs):
            raise TypeError("final")

    for block in (Leaf, Final):
        model, inputs = variant(Doorless, Doorless.forward, block)
        expected = step(model, inputs)
        installation = simpletuner_segckpt.apply(model, keys(2))
        for _ in range(2):
            assert step(model, inputs) == expected
        assert installation.effect["blocks"].segments == WIDE
    assert registry == {"Leaf": Leaf}


def test_a_copy_of_one_block_is_a_plain_block():
    model, inputs = toy(Doorless)
    size = len(pickle.dumps(model.blocks[0]))
    model.register_forward_hook(lambda *_: None)  # cannot be pickled, and need not be
    simpletuner_segckpt.apply(model, keys(2))
    step(model, inputs)
    assert len(pickle.dumps(model.blocks[0])) < size + 150
    for twin in (copy.deepcopy(model.blocks[0]), pickle.loads(pickle.dumps(model.blocks[0]))):
        assert type(twin) is Block
        assert "_segckpt_receiver" not in twin.__dict__


# Dicts among the arguments, whose keys vary.


def takes_options(kind):
    """A toy whose blocks are given a dict; its key ``add`` adds something between two of them."""

    class WithOptions(Block):
        def forward(self, hidden_states, temb, options=None):
            scale = sum(value.mean() for value in (options or {}).values())
            return super().forward(hidden_states, temb) * (1 + scale)

    def forward(self, hidden_states, temb, options=None):
        for index, block in enumerate(self.blocks):
            if self.__dict__.get("gradient_checkpointing") and torch.is_grad_enabled():
                hidden_states = self._gradient_checkpointing_func(
                    block, hidden_states, temb, options
                )
            else:
                hidden_states = block(hidden_states, temb, options)
            if index == 2 and "add" in (options or {}):
                hidden_states = hidden_states + options["add"]
        return self.out(hidden_states)

    model, inputs = variant(kind, forward, WithOptions)
    twin = copy.deepcopy(model)
    installation = simpletuner_segckpt.apply(model, keys(2))

    def run(*names):
        """One step with these keys: right, or broken; the strategy."""
        options = {name: torch.full((WIDTH,), 0.1 * (1 + n)) for n, name in enumerate(names)}
        found = step(model, inputs | {"options": options})
        assert found == step(twin, inputs | {"options": options})
        return installation.effect["blocks"].strategy

    return run, entry_of(installation).forwards.proof_tables["blocks"]


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_are_new_in_every_step(kind):
    run, proven = takes_options(kind)
    assert [run(f"step_{n}") for n in range(6)] == ["per-block"] * 2 + ["segmented"] * 4
    assert len(proven) == 2
    # The loop hands the dict on: with more keys the arguments of a block are others.
    assert [run("a", f"b_{n}") for n in range(4)] == ["per-block"] * 2 + ["segmented"] * 2
    assert run("step_9") == run("a", "b_9") == run("step_0") == "segmented"
    assert len(proven) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_turn_out_to_matter(kind):
    run, _ = takes_options(kind)
    assert [run(name) for name in ("a", "b", "c")] == ["per-block", "per-block", "segmented"]
    with pytest.raises(simpletuner_segckpt.SegmentBroken):
        run("add")
    # From now on each set of keys is looked at by itself; those that were are known.
    assert run("add") == "per-block"
    assert [run(name) for name in ("a", "b", "c", "c", "d")] == [
        *("segmented", "segmented", "per-block", "segmented", "per-block")
    ]


def test_keys_that_are_seen_to_matter():
    run, proven = takes_options(WithDoor)
    assert [run(name) for name in ("add", "b", "c", "c")] == ["per-block"] * 3 + ["segmented"]
    assert run("add") == "segmented"  # but for the boundary where something is added
    for n in range(MOST_SHAPES + 6):
        assert run(f"new_{n}") == "per-block"
    assert len(proven) == MOST_SHAPES


def test_what_is_remembered_of_shapes_of_calls():
    proven = ProofTable()
    proof = Proof(Schedule(2, ()), ("it is read",))
    shapes = [call_shape({f"argument_{n}": 1}, True) for n in range(1000)]
    for shape in shapes:
        proven.put(shape, proof)
        assert proven.get(shapes[0]) is proof  # the one that is met most often stays
    assert len(proven) == MOST_SHAPES
    assert proven.get(shapes[1]) is None


def test_shapes_of_calls():
    def shape(training=True, **arguments):
        return call_shape(arguments, training, named={"residuals"})

    assert shape(a=1, b=None) == shape(a=torch.ones(3)) == CallShape((True, ("a", None)))
    assert shape(a=1, c=True) != shape(a=1, c=False) != shape(a=1) != shape(training=False, a=1)
    empty, one = shape(a={}), shape(a={"x": 1})
    assert shape(a=None) != empty != one
    assert one.given == shape(a={"y": 2}).given
    assert one.keys != shape(a={"y": 2}).keys
    # A key that is the name of a condition is never one of many.
    assert one.given != shape(a={"residuals": 1}).given
    assert shape(a={"residuals": 1}, b={3: 1}).keys == ((), ("3",))


# Two schedules on one model.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["inner", "outer"])
def test_a_second_schedule_on_a_part_of_a_model_is_refused(kind, first):
    inner, inputs = toy(kind)
    outer = Wrapper(inner)
    one, other = (inner, outer) if first == "inner" else (outer, inner)
    before = {name: dict(m.__dict__) for name, m in outer.named_modules()}
    expected = step(outer, inputs)
    installation = simpletuner_segckpt.apply(one, keys(2))
    with pytest.raises(simpletuner_segckpt.UnsupportedModel, match="remove.. that one first"):
        simpletuner_segckpt.apply(other, keys(3))
    for _ in range(2):
        assert step(outer, inputs) == expected
    installation.remove()
    assert {name: dict(m.__dict__) for name, m in outer.named_modules()} == before
    simpletuner_segckpt.apply(other, keys(3))
    for _ in range(2):
        assert step(outer, inputs) == expected


# Keyword loops: their flag is off while their forward runs.


def test_a_thread_that_ends_in_the_middle_of_a_forward():
    model, inputs = model_and_inputs("auraflow")
    installation = simpletuner_segckpt.apply(model, keys(2))
    block = model.single_transformer_blocks[1]

    def leave(*_, **__):
        raise SystemExit

    block.forward = leave
    thread = threading.Thread(target=model, kwargs=inputs)
    thread.start()
    thread.join()
    del block.forward
    model.disable_gradient_checkpointing()
    step(model, inputs)
    assert installation.effect.stacks == ()
    model.enable_gradient_checkpointing()
    step(model, inputs)
    assert len(installation.effect.stacks) == 2


def test_thirty_shapes_of_batch_text_and_image():
    """Buckets, two epochs: one forward is recorded, and what it showed holds for all sizes."""
    model, _ = model_and_inputs("flux", num_layers=2, num_single_layers=2)
    twin = copy.deepcopy(model)
    expected = {}
    installation = simpletuner_segckpt.apply(model, keys(2))
    config = model.config
    for epoch in range(2):
        for bucket in range(30):
            torch.manual_seed(bucket)
            batch, text, image = 1 + bucket % 2, 3 + bucket % 5, 4 + bucket % 6
            inputs = {
                "hidden_states": torch.randn(batch, image, config.in_channels),
                "encoder_hidden_states": torch.randn(batch, text, config.joint_attention_dim),
                "pooled_projections": torch.randn(batch, config.pooled_projection_dim),
                "timestep": torch.full((batch,), 0.5),
                "img_ids": torch.rand(image, 3),
                "txt_ids": torch.rand(text, 3),
                "guidance": torch.full((batch,), 3.5) if config.guidance_embeds else None,
            }
            inputs = {name: value for name, value in inputs.items() if value is not None}
            if not epoch:
                expected[bucket] = step(twin, inputs)
            assert step(model, inputs) == expected[bucket]
            first = epoch == bucket == 0
            for stack in installation.effect.stacks:
                assert (stack.strategy == "segmented") is not first
