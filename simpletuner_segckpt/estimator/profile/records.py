"""What was measured of a model, block by block. Plain data: ``composing`` needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from .treatments import instead_of

GIB = 1 << 30  # bytes


@dataclass(frozen=True, slots=True)
class Work:
    """What operators do. All of it adds up, and can be subtracted.

    products: FLOPs of matrix products and convolutions. attention: FLOPs of fused attention.
    traffic: bytes read and written by all other operators. kernels: number of operators that
    compute something, as opposed to those that return a view.
    """

    products: float = 0
    attention: float = 0
    traffic: float = 0
    kernels: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: "Work") -> "Work":
        return self + other * -1

    def __mul__(self, factor: float) -> "Work":
        return Work(*(getattr(self, f.name) * factor for f in fields(self)))

    @property
    def flops(self) -> float:
        return self.products + self.attention


@dataclass(frozen=True, slots=True)
class Run:
    """A block that ran forward and backward alone, in one way.

    own: bytes that it made and keeps for backward, its results not counted.
    holds: which of the values that it takes it keeps; results: which of those that it gives.
    forward_peak: bytes above what was alive before it ran. recompute_peak and backward_peak: above
    what was alive when its backward began, the gradients of its results among that; while it is
    recomputed, and after that. moved: bytes to CPU memory.
    """

    own: int
    holds: tuple[bool, ...]
    results: tuple[bool, ...]
    forward_peak: int
    recompute_peak: int
    backward_peak: int
    forward: Work
    backward: Work
    moved: int = 0


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
    forward: Work = Work()
    backward: Work = Work()


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
