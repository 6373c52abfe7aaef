"""What happens between two blocks is seen, whoever put it there: never a wrong gradient."""

import logging
from collections import Counter

import pytest
import torch
from torch import nn
from toys import CallsBoundMethods, Collects, Doorless, WithDoor, toy
from training import keys

import simpletuner_segckpt
from simpletuner_segckpt import SegmentBroken
from simpletuner_segckpt.schedules.schedule import make_schedules
from simpletuner_segckpt.verify.step import counted, step

KINDS = [WithDoor, Doorless]
PLAN = (range(0, 2), range(2, 4), range(4, 6))


def alone(*blocks: int) -> tuple[range, ...]:
    return tuple(range(block, block + 1) for block in blocks)


class Glue:
    """Called by a toy's loop after every block."""

    def __init__(self):
        self.kept = []

    def write(self, index, state):
        return state * 1.5

    def write_in_place(self, index, state):
        return state.mul_(1.5)

    def write_after_block_2(self, index, state):
        return state + 1 if index == 2 else state

    def read(self, index, state):
        self.kept.append(state.mean())
        return state

    def capture(self, index, state):
        self.kept.append(state)
        return state

    def capture_detached(self, index, state):
        self.kept.append(state.detach())
        return state

    def look(self, index, state):
        assert state.ndim == 3
        assert state.shape[-1] == state.size(-1)
        assert len(state) == 2
        assert state.requires_grad
        assert state.dtype is torch.float32
        assert isinstance(state, torch.Tensor)
        assert torch.is_tensor(state)
        return state.to(torch.float32).contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_that_the_loop_draws_between_blocks(kind):
    """In segments the dropout of a later block would come before them."""
    model, inputs = toy(kind)
    for block in model.blocks:
        block.inner = nn.Sequential(block.inner, nn.Dropout(0.5))
    drawn = []

    def draw(index, state):
        drawn.append(torch.rand(3))
        return state

    model.between = draw
    expected = step(model, inputs)
    first, drawn[:] = list(drawn), []
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, inputs) == expected
        assert all(map(torch.equal, drawn, first))
        drawn.clear()
    effect = installation.effect["blocks"]
    assert effect.segments == alone(*range(6))
    assert effect.reason == "random numbers are drawn before block 1"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("glue", ["write", "write_in_place", "read", "capture", "capture_detached"])
def test_glue_from_the_first_step_on_means_per_block(kind, glue, caplog):
    model, inputs = toy(kind)
    model.between = getattr(Glue(), glue)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    with caplog.at_level(logging.WARNING, "simpletuner_segckpt"):
        caplog.clear()
        for _ in range(3):
            with counted(model, ["blocks"]) as calls:
                assert step(model, inputs) == expected
            assert calls["blocks"] == Counter(dict.fromkeys(range(6), 2))
    effect = installation.effect["blocks"]
    assert effect.strategy == "per-block"
    assert effect.segments == alone(*range(6))
    said = [record.message for record in caplog.records]
    assert len(said) == 1
    assert "block 0" in said[0] or "block 1" in said[0]


@pytest.mark.parametrize("kind", [*KINDS, CallsBoundMethods])
def test_looking_at_metadata_is_no_reason(kind):
    model, inputs = toy(kind)
    model.between = Glue().look
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == PLAN


@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_cut_only_where_something_happens(kind):
    model, inputs = toy(kind)
    model.between = Glue().write_after_block_2
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, inputs) == expected
    effect = installation.effect["blocks"]
    assert effect.strategy == "segmented"
    assert effect.segments == (range(0, 2), *alone(2, 3), range(4, 6))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("glue", ["write", "write_in_place", "read", "capture", "capture_detached"])
@pytest.mark.parametrize("keep_last", [0, 1, 3])
def test_glue_slipped_into_a_proven_segment_raises_before_backward(kind, glue, keep_last):
    model, inputs = toy(kind)
    installation = simpletuner_segckpt.apply(model, keys(2, keep_last=keep_last))
    for _ in range(2):
        step(model, inputs)
    assert (
        installation.effect["blocks"].segments
        == make_schedules({"blocks": 6}, 2, keep_last=keep_last)["blocks"].segments
    )
    model.between = getattr(Glue(), glue)
    model.zero_grad(set_to_none=True)
    with pytest.raises(SegmentBroken, match=r"blocks 0 to 1 of `blocks`.*repeat the step"):
        model(**inputs)
    assert all(parameter.grad is None for parameter in model.parameters())
    # The same step again: block by block, right, and so it stays.
    model.between = getattr(Glue(), glue)
    again = step(model, inputs)
    assert installation.effect["blocks"].segments == alone(*range(6 - keep_last))
    installation.remove()
    assert step(model, inputs) == again


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_argument_changed_in_place_is_seen(kind):
    model, inputs = toy(kind)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        step(model, inputs)

    def change_temb(index, state):
        inputs["temb"].mul_(1.01)
        return state

    model.between = change_temb
    with pytest.raises(SegmentBroken, match="`temb`"):
        model(**inputs)
    assert installation.effect["blocks"].segments == PLAN  # of the last whole forward


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_or_repeated_block_is_seen(kind):
    model, inputs = toy(kind)
    simpletuner_segckpt.apply(model, keys(3))
    for _ in range(2):
        step(model, inputs)
    order = list(model.blocks)

    def forward(hidden_states, temb):
        for index in (0, 1, 3, 4, 5):
            hidden_states = model.run(model.blocks[index], hidden_states, temb)
        return model.out(hidden_states)

    model.forward = forward
    with pytest.raises(SegmentBroken, match="block 3 was called where block 2 was due"):
        model(**inputs)
    assert list(model.blocks) == order

    def short(hidden_states, temb):
        return model.out(model.run(model.blocks[0], hidden_states, temb))

    model.forward = short
    simpletuner_segckpt.apply(model, keys(3))
    del model.forward
    for _ in range(2):
        step(model, inputs)
    model.forward = short
    with pytest.raises(SegmentBroken, match="uses the state between its blocks .linear."):
        model(**inputs)


def test_another_module_between_two_blocks_is_seen():
    """A module that draws random numbers changes what the next block draws."""
    model, inputs = toy(WithDoor)
    model.extra = nn.Dropout(0.5)
    simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        step(model, inputs)
    model.between = lambda index, state: (
        model._gradient_checkpointing_func(model.extra, inputs["temb"]),
        state,
    )[1]
    with pytest.raises(SegmentBroken, match="Dropout"):
        model(**inputs)


class Skips(WithDoor):
    """A U-shaped loop: the state after block k comes back as an argument of a later block."""

    def forward(self, hidden_states, temb):
        states = []
        for block in self.blocks[:3]:
            hidden_states = self.run(block, hidden_states, temb)
            states.append(hidden_states)
        for block in self.blocks[3:]:
            hidden_states = self.run(block, hidden_states, states.pop())
        return self.out(hidden_states)


class Interleaved(WithDoor):
    """Two independent chains through one loop: running ahead would change the random order."""

    def __init__(self, depth: int = 6):
        super().__init__(depth)
        self.others = nn.ModuleList(type(self.blocks[0])() for _ in range(depth))

    def forward(self, hidden_states, temb):
        other = hidden_states
        for block, parallel in zip(self.blocks, self.others, strict=True):
            hidden_states = self.run(block, hidden_states, temb)
            other = self.run(parallel, other, temb)
        return self.out(hidden_states + other)


@pytest.mark.parametrize(
    ("kind", "segments"),
    [
        # The state after block 2 is at once both arguments of block 3: a segment may hold that.
        (Skips, (*alone(0, 1), range(2, 4), *alone(4, 5))),
        (Collects, alone(*range(6))),
        (Interleaved, alone(*range(6))),
    ],
)
def test_other_loops_are_segmented_only_where_that_is_right(kind, segments):
    model, inputs = toy(kind)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(3):
        assert step(model, inputs) == expected
    for stack in installation.effect.stacks:
        assert stack.segments == segments


def test_outputs_are_plain_tensors_also_when_the_model_returns_inner_states():
    model, inputs = toy(Collects)
    simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        samples, states = model(**inputs)
        assert {type(t) for t in (*samples, *states["states"])} == {torch.Tensor}


@pytest.mark.parametrize("loop", ["for", "slice", "index", "children", "identity"])
def test_a_model_without_a_checkpoint_function(loop):
    model, inputs = toy(Doorless)
    model.loop = loop
    block_class = type(model.blocks[0])
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2, 4, keep_last=1))
    for replays in (1, 0):  # nobody described it: the one segment is tried out once
        with counted(model, ["blocks"]) as calls:
            assert step(model, inputs) == expected
        segment = 2 + replays
        assert calls["blocks"] == Counter({0: segment, 1: segment, 2: 1, 3: 1, 4: 2, 5: 1})
    assert installation.effect["blocks"].segments == (range(0, 2), range(4, 5))
    with torch.no_grad(), counted(model, ["blocks"]) as calls:
        model(**inputs)
    assert calls["blocks"] == Counter(dict.fromkeys(range(6), 1))
    installation.remove()
    assert {type(block) for block in model.blocks} == {block_class}


def test_a_model_without_stacks_is_refused():
    model = nn.Sequential(nn.Linear(2, 2))
    before = dict(model.__dict__)
    with pytest.raises(simpletuner_segckpt.UnsupportedModel, match="Sequential has no"):
        simpletuner_segckpt.apply(model, keys(2))
    assert model.__dict__ == before
