"""A model family as data: the Pydantic models behind the TOML files in ``model_families``."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


def matches(pattern: str, path: str) -> bool:
    """Whether ``pattern``, in which ``*`` stands for any one name, names ``path``."""
    wanted, names = pattern.split("."), path.split(".")
    return len(wanted) == len(names) and all(
        want in ("*", name) for want, name in zip(wanted, names, strict=True)
    )


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Stack(_Record):
    """One ``nn.ModuleList`` of blocks that the model's forward loops over, or a block by itself."""

    path: str  # attribute path of the list on the model; `*` stands for any one name
    block: str  # class name of the blocks
    count: str | int = ""  # the key of the model's config.json that gives it, or a list; or itself
    carried: Mapping[str, int | Literal["return"]] = {}
    """Block parameter -> index in the block's returned tuple, or the whole return value."""
    feed_forward: tuple[str, ...] = ()  # attribute paths inside a block
    down_projection: tuple[str, ...] = ()  # where it is no part of a ``feed_forward``
    attention: tuple[str, ...] = ()
    called_by: str = ""
    """Function of the module of the model's class that the loop calls with a block as its first
    argument, in the place of the block itself."""
    optional: bool = False  # the list may be missing from a model
    per_block: str = ""  # why this stack can never be segmented
    cut: str = ""  # where in the stack segments end early, and why

    @property
    def sources(self) -> dict[str, int]:
        """``carried`` by leaf of the result; the whole value is its only leaf."""
        return {name: 0 if source == "return" else source for name, source in self.carried.items()}

    @property
    def projections(self) -> tuple[str, ...]:
        """Paths of what contains the down-projections of a block."""
        return self.feed_forward + self.down_projection

    def describes(self, path: str) -> bool:
        """Whether the list at ``path`` is this stack, or one of those that its path names."""
        return matches(self.path, path)


class LeftOut(_Record):
    """A list of blocks that the model never hands to its checkpoint function."""

    path: str
    reason: str


class ArgumentCondition(_Record):
    """An argument of the model's forward that forces per-block when it is given."""

    argument: str
    reason: str
    stacks: tuple[str, ...] = ()  # all stacks when empty
    since: str = ""  # release of diffusers that brought the argument, where it is a later one


# Which blocks a trainer's own class covers where it goes block by block: all of them whatever the
# keys say, every n-th whatever the stride, or every n-th and with a stride those in its windows.
Coverage = Literal["all", "every-nth", "windows"]


class Native(_Record):
    """What a trainer's own class, which brings its own setters, does with the keys."""

    classes: tuple[str, ...]
    segments: Literal["whole-block", "per-block", "every-nth", "ignored", "broken"]
    fallback: Coverage | None = None  # where a class with segments goes block by block
    fault: str = ""  # why it must not go block by block
    backends: tuple[str, ...] = ()  # those that it carries out
    feed_forward: Coverage | None = None  # of the backends that recompute feed-forwards
    attention_offload: bool = False
    block_by_block: Mapping[str, Coverage] = {}  # stacks that have a rule of their own
    counted_on: bool = False  # the index of blocks runs on from one stack into the next
    notes: tuple[str, ...] = ()


class Implementation(_Record):
    """Another package's class of the same model, whose loop is its own.

    Without ``stacks`` it has those of the family, and what they carry is found by recording. Its
    arguments are its own, too: the family's conditions do not concern it.
    """

    trainer: str  # the package that brings the classes
    classes: tuple[str, ...]  # dotted paths, as the package itself imports them
    stacks: tuple[Stack, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    conditions: tuple[ArgumentCondition, ...] = ()


class Tiny(_Record):
    """A small model of one class, and example inputs, with which anyone can prove the family.

    Inputs are keyword arguments of the model's forward; ``tiny.make`` says how a table
    describes a tensor.
    """

    model_class: str = Field(alias="class")
    needs: tuple[str, ...] = ()
    """Packages without which it cannot run, with a version or without; or "cuda"."""
    config: Mapping[str, Any] = {}
    inputs: Mapping[str, Any] = {}


class Training(_Record):
    """What one training step feeds the model at its real size, for the estimator.

    Inputs are as in ``Tiny``; a dimension may be an expression in ``batch``, ``frames``,
    ``height`` and ``width`` (of the latents), ``text`` and the integers of the model's config.
    """

    downscale: tuple[int, int, int] = (1, 8, 8)  # pixels for one latent: frames, height, width
    text: int = 0  # tokens that the text encoder hands over
    resolution: tuple[int, int] = (1024, 1024)  # width and height that it is usually trained at
    frames: int = 1
    targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")  # of the trainer's LoRA
    experts: int = 1  # of a mixture, between which the tokens are divided
    inputs: Mapping[str, Any] = {}


class Family(_Record):
    """All that is known of one architecture. ``family`` is the trainer's ``model_family``."""

    family: str
    title: str
    aliases: tuple[str, ...] = ()
    flavours: tuple[str, ...] = ()
    default: bool = False  # used when files share a family and no flavour is named
    classes: tuple[str, ...] = ()  # dotted paths of the model classes
    since: str = ""  # release of diffusers that brought them, where it is a later one
    units: tuple[str, ...] = ()
    """Modules outside the stacks that the model hands to its checkpoint function one by one;
    paths in which ``*`` stands for any one name. They form one sequence in execution order."""
    keyword_loop: str = ""  # why the loop must take its plain branch, not its checkpoint branch
    stacks: tuple[Stack, ...]
    left_out: tuple[LeftOut, ...] = ()
    conditions: tuple[ArgumentCondition, ...] = ()
    sizes: Mapping[str, Mapping[str, Any]] = {}
    native: Native | None = None
    implementations: tuple[Implementation, ...] = ()
    training: Training | None = None
    tiny: tuple[Tiny, ...] = ()

    def stack_at(self, path: str) -> Stack | None:
        """The stack that describes the list at ``path``."""
        return next((stack for stack in self.stacks if stack.describes(path)), None)

    def implemented_as(self, own: Implementation) -> "Family":
        """The family as one of its implementations has it."""
        stacks = own.stacks or [s.model_copy(update={"carried": {}}) for s in self.stacks]
        left_out = own.left_out if own.stacks else self.left_out
        return self.model_copy(
            update={
                "stacks": tuple(stacks),
                "left_out": left_out,
                "conditions": own.conditions,
                "units": () if own.stacks else self.units,
                "keyword_loop": "",
            }
        )

    def size(self, flavour: str | None) -> str | None:
        """Name of the published size that a flavour has; None when no size is known.

        The size of that name, else the longest size name within the flavour's name, else the
        first one.
        """
        within = [name for name in self.sizes if flavour and name.lower() in flavour.lower()]
        return max(within, key=len) if within else next(iter(self.sizes), None)

    def counts(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Blocks per stack path, in execution order, from the values of a model's config.

        Stacks whose number of blocks the config does not give are left out.
        """
        found = {}
        for stack in self.stacks:
            value = None if stack.optional else stack.count
            if isinstance(value, str):
                value = config.get(value)
            if isinstance(value, (list, tuple)):
                value = len(value)
            if isinstance(value, int) and not isinstance(value, bool):
                found[stack.path] = value
        return found

    def counts_of_size(self, name: str) -> dict[str, int]:
        """Blocks per stack path of a published size.

        Its ``blocks`` table gives those of stacks named by patterns, and the number of units.
        """
        return self.counts(self.sizes[name]) | dict(self.sizes[name].get("blocks", {}))

    def config_of_size(self, name: str | None) -> dict[str, Any]:
        """The model's configuration of a published size; the class has the rest as defaults."""
        return {k: v for k, v in self.sizes[name].items() if k != "blocks"} if name else {}
