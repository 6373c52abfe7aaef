"""What was measured of one mode, and what can be said of several. No torch."""

from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median, quantiles
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from ..costs.records import GIB

Status = Literal["measured", "OOM", "failed", "unsupported", "not run"]


SAME_MEMORY = 0.005  # peaks that differ by less than this share are the same


class Cell(BaseModel):
    """One mode, as a line of ``results.jsonl``.

    keys: the checkpointing keys, all of them. reason: why it is not measured. seconds: of each
    step. peak_bytes: during the steps; memory says how that is known, from the device's
    ``allocator`` or ``counted`` operator by operator. recomputed: blocks, out of ``blocks``. ran:
    what the last step did, in a line. remarks: warnings of the plugin.
    """

    model_config = ConfigDict(frozen=True)

    mode: str
    keys: dict[str, Any] = {}
    status: Status = "not run"
    reason: str = ""
    seconds: tuple[float, ...] = ()
    peak_bytes: int = 0
    memory: Literal["allocator", "counted", ""] = ""
    recomputed: int = 0
    blocks: int = 0
    ran: str = ""
    remarks: tuple[str, ...] = ()
    torch: str = ""
    device: str = ""

    @property
    def measured(self) -> bool:
        return self.status == "measured"

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the range that the middle half of the steps lies in, in seconds."""
        if len(self.seconds) < 2:
            return 0.0
        lower, _, upper = quantiles(self.seconds, n=4, method="inclusive")
        return (upper - lower) / 2

    @property
    def gib(self) -> float:
        return self.peak_bytes / GIB


class Point(NamedTuple):
    """A mode in the picture. seconds: of a step. peak: bytes."""

    mode: str
    seconds: float
    peak: float


def points_of(cells: Iterable[Cell]) -> list[Point]:
    """The measured modes."""
    return [Point(cell.mode, cell.median, cell.peak_bytes) for cell in cells if cell.measured]


def front(points: Iterable[Point]) -> list[Point]:
    """The Pareto front, fastest first: no other mode is as fast in less memory."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.seconds, point.peak)):
        if not found or point.peak < found[-1].peak:
            found.append(point)
    return found


def without_effect(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Pairs of modes that ask for different things and have the same figures, within noise.

    The same are peaks less than half a percent apart, and medians of which the difference is less
    than their two spreads together.
    """
    return [
        (one.mode, other.mode)
        for one, other in combinations([cell for cell in cells if cell.measured], 2)
        if (one.keys, one.recomputed) != (other.keys, other.recomputed)
        and abs(one.peak_bytes - other.peak_bytes)
        < SAME_MEMORY * max(one.peak_bytes, other.peak_bytes)
        and abs(one.median - other.median) < one.spread + other.spread
    ]


def slower_for_keeping(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Modes that keep outputs and take longer, beyond noise, than the one that recomputes them."""
    key = "gradient_checkpointing_keep"
    measured = [cell for cell in cells if cell.measured]
    return [
        (one.mode, other.mode)
        for one in measured
        for other in measured
        if one.keys.get(key)
        and not other.keys.get(key)
        and one.keys | {key: None} == other.keys | {key: None}
        and one.median - other.median > one.spread + other.spread
    ]
