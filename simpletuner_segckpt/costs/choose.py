"""The fastest way for each block within a budget of memory.

Whether a block fits depends on what those before it keep, and on nothing else of them. So one table
says, for each amount kept so far, the fewest seconds in which that can be; it is made block by
block, and read backwards. Amounts are rounded up to a grid, for each block by at most one part in
``GRID`` of what all blocks can keep. The grid does not depend on the budget: what fits a budget
fits any larger one, so that a larger budget never recomputes for longer.
"""

from dataclasses import dataclass

import torch

from .step import StepCosts, Way

GRID = 1 << 14


@dataclass(frozen=True, slots=True)
class Choice:
    """A way for each block. fits: whether the peak of that is within the budget. peak: bytes."""

    ways: tuple[Way, ...]
    fits: bool
    peak: int

    @property
    def seconds(self) -> float:
        """Seconds more than where nothing is recomputed."""
        return StepCosts.seconds(self.ways)


def fastest(step: StepCosts, budget: int) -> Choice:
    """The ways with the fewest seconds whose peak is at most ``budget`` bytes.

    Where none has that, every block is recomputed as a whole.
    """
    quickest = tuple(min(block.ways, key=lambda way: way.seconds) for block in step.blocks)
    if (peak := step.peak(quickest)) <= budget:
        return Choice(quickest, True, peak)
    unit, least = _grid(step)
    reached = torch.full((GRID + 1,), torch.inf, dtype=torch.float64)
    reached[0] = 0
    chosen: list[torch.Tensor] = []
    below = 0  # bytes that blocks so far keep at the least
    for block, limits, fewest in zip(step.blocks, step.limits, least, strict=True):
        following = torch.full_like(reached, torch.inf)
        which = torch.zeros(GRID + 1, dtype=torch.uint8)
        for number, way in enumerate(block.ways):
            more = -(-(way.kept - fewest) // unit)
            forward = budget - limits.forward - below - way.forward_peak
            backward = budget - limits.backward - below - fewest - way.backward_peak
            most = min(forward // unit, backward // unit - more, GRID - more)  # kept before it
            if most < 0:
                continue
            seconds = reached[: most + 1] + way.seconds
            there = following[more : more + most + 1]
            quicker = seconds < there
            there[quicker] = seconds[quicker]
            which[more : more + most + 1][quicker] = number
        chosen.append(which)
        reached = following
        below += fewest
    most = min((budget - step.rest - below - step.head_peak) // unit, GRID)
    ways = _read(step, chosen, reached[: max(0, most + 1)], unit, least)
    if not ways or step.elsewhere > budget:
        return all_recomputed(step, budget)
    peak = step.peak(ways)
    return Choice(ways, peak <= budget, peak)


def all_recomputed(step: StepCosts, budget: int) -> Choice:
    """Every block recomputed as a whole, whatever the budget."""
    peak = step.peak(step.all_recomputed)
    return Choice(step.all_recomputed, peak <= budget, peak)


def _grid(step: StepCosts) -> tuple[int, list[int]]:
    """Bytes of a unit of the grid; and the fewest bytes that each block can keep."""
    least = [min(way.kept for way in block.ways) for block in step.blocks]
    most = sum(max(way.kept for way in block.ways) for block in step.blocks)
    return max(1, -(-(most - sum(least)) // (GRID - len(least)))), least


def _read(
    step: StepCosts, chosen: list[torch.Tensor], ends: torch.Tensor, unit: int, least: list[int]
) -> tuple[Way, ...]:
    """The ways that lead to the best of ``ends``; none where there is no end."""
    if not len(ends) or ends.min() == torch.inf:
        return ()
    at = int(ends.argmin())
    ways: list[Way] = []
    for block, which, fewest in zip(
        reversed(step.blocks), reversed(chosen), reversed(least), strict=True
    ):
        way = block.ways[int(which[at])]
        ways.append(way)
        at -= -(-(way.kept - fewest) // unit)
    return tuple(reversed(ways))
