"""Weights that others stream through memory which blocks share."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from toys import Doorless, WithDoor, toy
from training import keys

import simpletuner_segckpt
from simpletuner_segckpt import Family, FamilyRegistry, SegmentBroken
from simpletuner_segckpt.verify.step import step

WIDTH = 8
KINDS = [WithDoor, Doorless]


class Dequantised(torch.autograd.Function):
    """Keeps the very buffer on its context, as kernels for quantised weights do."""

    @staticmethod
    def forward(ctx, x, q):
        ctx.q = q
        return x @ q.float()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.q.float().T, None


class Int8Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("q", torch.randint(-3, 4, (WIDTH, WIDTH), dtype=torch.int8))
        self.scale = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.act = nn.Tanh()

    def forward(self, hidden_states, temb):
        return hidden_states + self.act(Dequantised.apply(hidden_states * self.scale, self.q))


def int8_model(kind, depth=6):
    class Variant(kind):
        def __init__(self, depth=depth):
            super().__init__(depth)
            self.blocks = nn.ModuleList(Int8Block() for _ in range(depth))

    Variant.__name__ = kind.__name__
    return toy(Variant)


def stream(model, how):
    """Have the buffers of all blocks share one storage, filled before each call of a block."""
    own = [block.q.clone() for block in model.blocks]
    shared = torch.zeros_like(own[0])

    def fill(index):
        if how == "past the version":
            shared.data.copy_(own[index])
        else:
            shared.copy_(own[index])

    def fill_own(block, index):
        block.q.copy_(own[index])

    for index, block in enumerate(model.blocks):
        if how == "by the module":
            block.q = shared.view(WIDTH, WIDTH)
            block.register_forward_pre_hook(lambda m, args, i=index: fill_own(m, i))
        elif how == "in the forward":
            block.q = shared.view(WIDTH, WIDTH)
            forward = block.forward

            def streaming(*args, forward=forward, index=index, **kwargs):
                fill(index)
                return forward(*args, **kwargs)

            block.forward = streaming
        else:
            block.q = shared.view(WIDTH, WIDTH)
            block.register_forward_pre_hook(lambda m, args, i=index: fill(i))


HOWS = ["in place", "by the module", "past the version", "in the forward"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOWS)
def test_a_buffer_that_all_blocks_share(kind, how):
    """Exact at every interval: those are gradients of the weights as they were before."""
    model, inputs = int8_model(kind)
    inputs["hidden_states"].requires_grad_()
    expected = step(model, inputs)
    stream(model, how)
    for interval in (1, 2):
        installation = simpletuner_segckpt.apply(model, keys(interval))
        for _ in range(3):
            assert step(model, inputs) == expected
        assert installation.effect["blocks"].covered == tuple(range(6))
        installation.remove()


class Counting(nn.Module):
    """Writes a buffer itself, and what it computes depends on it (as a spectral norm's)."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("u", torch.ones(WIDTH))

    def forward(self, hidden_states, temb):
        with torch.no_grad():
            self.u.mul_(0.5).add_(self.inner.weight.sum(0))
        return hidden_states + torch.tanh(self.inner(hidden_states) * self.u)


@pytest.mark.parametrize("hook", [None, "before", "after"])
def test_what_blocks_write_themselves_is_put_back_whatever_hooks_there_are(hook):
    class Variant(WithDoor):
        def __init__(self, depth=4):
            super().__init__(depth)
            self.blocks = nn.ModuleList(Counting() for _ in range(depth))

    model, inputs = toy(Variant)
    twin = copy.deepcopy(model)
    expected = [(step(twin, inputs), twin.blocks[0].u.clone()) for _ in range(3)]
    calls = []
    for block in model.blocks:
        if hook == "before":
            block.register_forward_pre_hook(lambda *_: calls.append(1))
        elif hook == "after":
            block.register_forward_hook(lambda *_: calls.append(1))
    simpletuner_segckpt.apply(model, keys(1))
    for result, u in expected:
        assert step(model, inputs) == result
        assert torch.equal(model.blocks[0].u, u)
    assert len(calls) >= (12 if hook else 0)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.ff.requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, hidden_states, temb):
        hidden_states = hidden_states + torch.tanh(self.inner(hidden_states) * self.scale)
        return hidden_states + self.ff(hidden_states)


class Ring:
    """Two buffers for the frozen weights of all blocks, as block swappers have them."""

    def __init__(self, blocks, told_by):
        self.own = [[p.detach().clone() for p in self.frozen(b)] for b in blocks]
        self.slots = [[p.clone() for p in self.own[0]] for _ in range(2)]
        self.blocks = list(blocks)
        for index, block in enumerate(blocks) if told_by == "a hook" else ():
            block.register_full_backward_hook(
                lambda *_, i=index: self.wait_for_block(i - 1) if i else None
            )

    def frozen(self, block):
        return [p for p in block.parameters() if not p.requires_grad]

    def wait_for_block(self, index):
        slot = self.slots[index % 2]
        for parameter, memory, value in zip(
            self.frozen(self.blocks[index]), slot, self.own[index], strict=True
        ):
            memory.copy_(value)
            parameter.data = memory


class Swapped(Doorless):
    def __init__(self, depth=8):
        super().__init__(depth)
        self.blocks = nn.ModuleList(Frozen() for _ in range(depth))

    def forward(self, hidden_states, temb):
        for index, block in enumerate(self.blocks):
            self.ring[0].wait_for_block(index)
            hidden_states = block(hidden_states, temb)
            if self.told_by == "the graph":
                # The gradient of its output comes just before the block is recomputed.
                hidden_states.register_hook(lambda _, i=index: self.ring[0].wait_for_block(i))
        return self.out(hidden_states)


REGISTRY = FamilyRegistry(
    [
        Family(
            family="swapped",
            title="Swapped",
            classes=[f"{__name__}.Swapped"],
            stacks=[
                {
                    "path": "blocks",
                    "block": "Frozen",
                    "count": "depth",
                    "carried": {"hidden_states": "return"},
                    "feed_forward": ["ff"],
                }
            ],
        )
    ]
)


def ring_model(told_by):
    model, inputs = toy(Swapped)
    model.told_by = told_by
    inputs["hidden_states"].requires_grad_()
    plain = copy.deepcopy(model)
    plain.ring = model.ring = [type("", (), {"wait_for_block": lambda self, index: None})()]
    expected = step(plain, inputs)
    model.ring = [Ring(model.blocks, told_by)]  # in a list: not to be known by its methods
    return model, inputs, expected


@pytest.mark.parametrize("told_by", ["a hook", "the graph"])
@pytest.mark.parametrize(
    "config",
    [
        keys(1),
        keys(2),
        keys(2, 4),
        keys(1, keep_last=4),
        keys(1, 2),
        keys(1) | {"gradient_checkpointing_backend": "torch-ffn"},
    ],
)
def test_a_ring_of_two_buffers_for_frozen_weights(told_by, config, caplog):
    """Blocks that a swapper feeds are recomputed as a whole, whatever the keys say."""
    model, inputs, expected = ring_model(told_by)
    ffn = "gradient_checkpointing_backend" in config
    installation = simpletuner_segckpt.apply(model, config, registry=REGISTRY)
    early = told_by == "the graph" and (ffn or config == keys(1, 2))
    if early:  # what ran before the second buffer was used again cannot be saved any more
        with pytest.raises(SegmentBroken, match="share the memory of their weights"):
            step(model, inputs)
    for _ in range(3):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == tuple(range(b, b + 1) for b in range(8))
    said = [r.getMessage() for r in caplog.records if "share the memory" in r.getMessage()]
    assert len(said) == (0 if config == keys(1) else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_tied_weights_are_not_streamed(kind):
    model, inputs = toy(kind)
    for block in model.blocks[1:]:
        block.inner = model.blocks[0].inner
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2, 4))
    for _ in range(3):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == (range(0, 2), range(4, 6))
