"""What was measured of a model, block by block. Plain data: ``composing`` needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...costs.records import NO_WORK, Run, Work
from ...costs.treatments import instead_of


@dataclass(frozen=True, slots=True)
class BlockProfile:
    """Blocks that are alike: built and called in the same way.

    takes and gives: bytes of the values that go in and come out; takes_gradient: whether a gradient
    comes back through them; gives_gradient: bytes of the gradients of what comes out. trained:
    bytes of the gradients of its parameters. runs: by treatment, see ``treatments``.
    """

    takes: tuple[int, ...]
    takes_gradient: tuple[bool, ...]
    gives: tuple[int, ...]
    gives_gradient: tuple[int, ...]
    trained: int
    runs: Mapping[str, Run] = field(default_factory=dict)

    def run(self, treatment: str) -> Run:
        """The run of a treatment, or of what a block does that has no part which it is about."""
        return next(self.runs[name] for name in instead_of(treatment) if name in self.runs)


@dataclass(frozen=True, slots=True)
class Block:
    """A block in its place: ``takes`` and ``gives`` are the numbers of values."""

    stack: str
    index: int
    kind: int
    takes: tuple[int, ...]
    gives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Glue:
    """What runs before a block, or after the last one.

    kept: bytes more that are alive after it (fewer, if negative), for backward or just because the
    model still refers to them. freed: bytes fewer after its backward. forward_peak and
    backward_peak: above what was alive when it began.
    """

    kept: int = 0
    freed: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    forward: Work = NO_WORK
    backward: Work = NO_WORK


@dataclass(frozen=True, slots=True)
class Profile:
    """A model, measured.

    counts: the blocks of each stack, in the order of the schedule; blocks: in that of execution.
    glue: one entry more than blocks, the last is the head.
    weights: bytes of the frozen and trained parameters and buffers on the accelerator. trained:
    bytes of the gradients of all trained parameters. states: bytes of optimizer state. stepping:
    bytes that the optimizer needs for the time of its step. linear: bytes of frozen linear layers
    as they are before quantization. between: values that are kept by what lies between the blocks.
    """

    kinds: tuple[BlockProfile, ...]
    counts: Mapping[str, int]
    blocks: tuple[Block, ...]
    glue: tuple[Glue, ...]
    weights: int
    trained: int
    states: int
    stepping: int = 0
    linear: int = 0
    between: frozenset[int] = frozenset()
    accumulates: bool = False
