"""Predictions beside the published sweep."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import sqrt
from statistics import median

from ..registry import FamilyRegistry
from ..settings import load_settings
from .cards import Card, card
from .composing import Composed
from .modes import MODES, estimate, keys_of
from .profiling import profile
from .published import SAME_AS, Example, Row, published, rows
from .reading import QUANTIZED, Overrides, read_workload
from .records import GIB, Profile
from .timing import time_of

GPUS = ("H100", "L40S")  # those of the sweep
MODES_BUILT_FOR = ("none", "layer", "interval2", "seg2-stride4")


@dataclass(frozen=True)
class Compared:
    """A published cell and its prediction; seconds are None where no time was published."""

    row: Row
    gib: float
    seconds: float | None
    launch_bound: bool

    @property
    def error(self) -> float:
        """Of the peak, as a share of what was published."""
        assert self.row.gib is not None
        return self.gib / self.row.gib - 1

    @property
    def built_for(self) -> bool:
        """Whether the row is one that the estimator claims to predict: bf16, not compiled."""
        return (
            self.row.mode.partition("+")[0] in MODES_BUILT_FOR
            and self.row.precision.startswith("bf16")
            and not published().compiled(self.row)
        )


@dataclass(frozen=True)
class Comparison:
    """All cells of one example on one card."""

    name: str
    example: Example
    cells: tuple[Compared, ...]

    @property
    def tau(self) -> float | None:
        """Kendall's tau-b of predicted and published step times, of the rows built for."""
        timed = [
            (cell.seconds, cell.row.seconds)
            for cell in self.cells
            if cell.built_for and cell.seconds is not None and cell.row.seconds is not None
        ]
        return kendall(timed)


def compare_example(name: str, gpu: str = "H100") -> Comparison:
    """Predict every measured cell of one example on one of the cards of the sweep."""
    example = published().examples[name]
    settings = load_settings(example.config)
    overrides = Overrides(width=example.width, height=example.height, frames=example.frames)
    read = read_workload(settings, FamilyRegistry.shipped(), overrides)
    measured = profile(read.workload)
    on = card(gpu)
    cells = []
    for row in rows():
        if row.example != name or row.gpu != gpu or row.gib is None or row.status != "measured":
            continue
        mode = SAME_AS.get(row.mode, row.mode)
        keys = example.modes.get(row.mode, keys_of(mode) if mode in MODES else None)
        if keys is None:
            continue
        made = estimate(
            _in_precision(measured, row.precision), read.workload.family, settings, mode, keys
        )
        if made.step is not None:
            cells.append(_cell(row, made.step, on))
    return Comparison(name, example, tuple(cells))


def _cell(row: Row, step: Composed, on: Card) -> Compared:
    time = time_of(step, on)
    timed = row.seconds is not None and row.precision.startswith("bf16")
    return Compared(row, step.peak / GIB, time.total if timed else None, time.launch_bound)


def _in_precision(measured: Profile, precision: str) -> Profile:
    """The profile with quantized linear layers; everything else of them is not modelled."""
    for start, size in QUANTIZED.items():
        if precision.startswith(start):
            saved = int(measured.linear * (1 - size / 2))
            return replace(measured, weights=measured.weights - saved)
    return measured


def kendall(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau-b, which allows for ties; None when one side has no order at all.

    Kendall, M. (1945), The treatment of ties in ranking problems. Two numbers within a thousandth
    are a tie.
    """
    agree = ties_left = ties_right = count = 0
    for (a, b), (c, d) in combinations(pairs, 2):
        left, right = _sign(a, c), _sign(b, d)
        agree += left * right
        ties_left += left == 0
        ties_right += right == 0
        count += 1
    below = sqrt((count - ties_left) * (count - ties_right))
    return agree / below if below else None


def _sign(a: float, b: float) -> int:
    return 0 if abs(a - b) <= 1e-3 * max(a, b) else (1 if a > b else -1)


def median_error(comparisons: Iterable[Comparison]) -> float:
    """The median of the absolute errors of all cells that the estimator claims to predict."""
    return median(abs(c.error) for found in comparisons for c in found.cells if c.built_for)
