"""A model family as data: the Pydantic models behind the TOML files in ``model_families``."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Stack(_Record):
    """One ``nn.ModuleList`` of blocks that the model's forward loops over."""

    path: str  # attribute path of the list on the model
    block: str  # class name of the blocks
    count: str  # key of the model's config.json that gives the number of blocks
    carried: Mapping[str, int | Literal["return"]] = {}
    """Block parameter -> index in the block's returned tuple, or the whole return value."""
    feed_forward: tuple[str, ...] = ()  # attribute paths inside a block
    attention: tuple[str, ...] = ()
    optional: bool = False  # the list may be missing from a model
    per_block: str = ""  # why this stack can never be segmented


class LeftOut(_Record):
    """A list of blocks that the model never hands to its checkpoint function."""

    path: str
    reason: str


class ArgumentCondition(_Record):
    """An argument of the model's forward that forces per-block when it is given."""

    argument: str
    reason: str
    stacks: tuple[str, ...] = ()  # all stacks when empty


class Tiny(_Record):
    """A small model of one class, and example inputs, with which anyone can prove the family.

    Inputs are keyword arguments of the model's forward; ``tiny.make`` says how a table
    describes a tensor.
    """

    model_class: str = Field(alias="class")
    config: Mapping[str, Any] = {}
    inputs: Mapping[str, Any] = {}


class Family(_Record):
    """All that is known of one architecture. ``family`` is the trainer's ``model_family``."""

    family: str
    title: str
    aliases: tuple[str, ...] = ()
    flavours: tuple[str, ...] = ()
    default: bool = False  # used when files share a family and no flavour is named
    classes: tuple[str, ...] = ()  # dotted paths of the model classes
    stacks: tuple[Stack, ...]
    left_out: tuple[LeftOut, ...] = ()
    conditions: tuple[ArgumentCondition, ...] = ()
    sizes: Mapping[str, Mapping[str, Any]] = {}
    tiny: tuple[Tiny, ...] = ()

    def size(self, flavour: str | None) -> tuple[str, Mapping[str, Any]] | None:
        """Name and config values of the published size that a flavour has.

        The size of that name, else the longest size name within the flavour's name, else the
        first one. ``None`` when no size is known.
        """
        if not self.sizes:
            return None
        within = [name for name in self.sizes if flavour and name.lower() in flavour.lower()]
        name = max(within, key=len) if within else next(iter(self.sizes))
        return name, self.sizes[name]

    def counts(self, config: Mapping[str, Any]) -> dict[str, PositiveInt]:
        """Blocks per stack path, in execution order, from the values of a model's config.

        Stacks whose number of blocks the config does not give are left out.
        """
        return {
            stack.path: config[stack.count]
            for stack in self.stacks
            if isinstance(config.get(stack.count), int) and not stack.optional
        }
