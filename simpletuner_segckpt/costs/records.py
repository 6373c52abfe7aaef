"""What was measured of a block that ran alone. Plain data, no torch."""

from dataclasses import dataclass, fields

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


NO_WORK = Work()


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
