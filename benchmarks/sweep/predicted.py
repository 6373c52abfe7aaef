"""Predictions beside the published sweep."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import floor, isnan, log10
from statistics import median

from scipy.stats import kendalltau

from simpletuner_segckpt.config.settings import load_settings
from simpletuner_segckpt.costs.cards import Card, card
from simpletuner_segckpt.costs.records import GIB
from simpletuner_segckpt.estimator.predict.modes import MODES, keys_of, predict_mode
from simpletuner_segckpt.estimator.predict.peak import Composed, time_of
from simpletuner_segckpt.estimator.profile.profile import profile
from simpletuner_segckpt.estimator.profile.records import Profile
from simpletuner_segckpt.estimator.workload.parse import QUANTIZED, Overrides, parse_workload
from simpletuner_segckpt.families.registry import FamilyRegistry

from .published import SAME_AS, Example, Row, published, rows

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
    read = parse_workload(settings, FamilyRegistry.shipped(), overrides)
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
        made = predict_mode(
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
    """Kendall's tau-b, which allows for ties; None when one side has no order at all."""
    if not pairs:
        return None
    found = float(kendalltau(*zip(*map(_to_three_digits, pairs), strict=True)).statistic)
    return None if isnan(found) else found


def _to_three_digits(pair: tuple[float, float]) -> tuple[float, ...]:
    """Times that are published alike are ties, and so are predictions that differ by nothing."""
    return tuple(round(seconds, 2 - floor(log10(seconds))) for seconds in pair)


def median_error(comparisons: Iterable[Comparison]) -> float:
    """The median of the absolute errors of all cells that the estimator claims to predict."""
    return median(abs(c.error) for found in comparisons for c in found.cells if c.built_for)
