"""Toy models for what no shipped class does: glue between blocks, capture, lists of one block."""

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states, temb):
        return hidden_states + torch.tanh(self.inner(hidden_states) * temb)


class Loop:
    """The loop that both kinds of toy share. ``between`` is called after every block."""

    between = None
    loop = "for"

    def build(self, depth: int) -> None:
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states, temb):
        if self.loop == "for":
            for index, block in enumerate(self.blocks):
                hidden_states = self.run(block, hidden_states, temb)
                if self.between is not None:
                    hidden_states = self.between(index, hidden_states)
        elif self.loop == "slice":
            for block in self.blocks[: len(self.blocks)]:
                hidden_states = self.run(block, hidden_states, temb)
        elif self.loop == "index":
            for index in range(len(self.blocks)):
                hidden_states = self.blocks[index](hidden_states=hidden_states, temb=temb)
        elif self.loop == "children":
            for block in self.blocks.children():
                hidden_states = self.run(block, hidden_states, temb)
        elif self.loop == "identity":
            for block in self.blocks:
                assert type(block).__name__ == "Block"
                if block is not self.blocks[-1] or block in list(self.blocks):
                    hidden_states = self.run(block, hidden_states, temb)
        return self.out(hidden_states)


class Doorless(Loop, nn.Module):
    """A plain model without a checkpoint function."""

    def __init__(self, depth: int = 6):
        super().__init__()
        self.build(depth)

    def run(self, block, hidden_states, temb):
        return block(hidden_states, temb=temb)


class WithDoor(Loop, ModelMixin, ConfigMixin):
    """A model that asks its checkpoint function for every block, as diffusers models do."""

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(self, depth: int = 6):
        super().__init__()
        self.build(depth)
        self.gradient_checkpointing = False

    def run(self, block, hidden_states, temb):
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return self._gradient_checkpointing_func(block, hidden_states, temb)
        return block(hidden_states, temb)


def toy(kind: type[nn.Module], **config) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = kind(**config).train()
    return model, {"hidden_states": torch.randn(2, 5, WIDTH), "temb": torch.randn(2, 1, WIDTH)}


class CallsBoundMethods(WithDoor):
    """Hands `block.__call__` to the checkpoint function, with keyword arguments."""

    def run(self, block, hidden_states, temb):
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return self._gradient_checkpointing_func(
                block.__call__, hidden_states=hidden_states, temb=temb
            )
        return block(hidden_states, temb)


class Collects(WithDoor):
    """A ControlNet's loop: the state after each block is an output."""

    def forward(self, hidden_states, temb):
        samples = ()
        for block in self.blocks:
            hidden_states = self.run(block, hidden_states, temb)
            samples += (hidden_states,)
        return [self.out(sample) for sample in samples], {"states": samples}


class Wrapper(nn.Module):
    """A model of one's own around another model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return self.model(**inputs)


TOY_FAMILY = """
family = "toy"
title = "Toy"
aliases = ["play-thing"]
classes = ["toys.WithDoor"]

[[stacks]]
path = "blocks"
block = "Block"
count = "depth"
carried = { hidden_states = "return" }

[sizes.big]
depth = 9
"""
