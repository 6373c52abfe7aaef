"""What is known of the boundaries between the blocks of a stack, and what segments that allows.

Nothing is believed that was not seen: a boundary is a ``Link``, or the reason why it is none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from torch.nn import Module

from ..recompute.backend import BlockWrappers
from ..recompute.submodules import CallWrapper
from ..schedules.schedule import Schedule
from .links import Link
from .platform import Platform

# What is known of a boundary between two blocks: how to cross it, or why a segment cannot.
Boundary = Link | str


@dataclass(frozen=True, slots=True)
class BoundStack:
    """The blocks of one stack, and how they run.

    whole: whether covered blocks are recomputed as a whole whatever the backend is for.
    """

    path: str
    schedule: Schedule
    blocks: Sequence[Module]
    wrappers: BlockWrappers
    platform: Platform
    carried: Mapping[str, int] = field(default_factory=dict)
    """What the family says is carried: a parameter of a block, and the leaf that feeds it."""
    together: Sequence[range] = ()
    """The segments that were planned, also where this forward runs block by block."""
    whole: bool = False

    @property
    def recomputes_parts(self) -> bool:
        """Whether only parts of the covered blocks are recomputed."""
        return self.wrappers.inside is not None and not self.whole

    def recomputed_whole(self) -> "BoundStack":
        """The same with every block recomputed as a whole, by itself."""
        alone = replace(self.schedule, segments=Schedule.of_all(len(self.blocks)).segments)
        return replace(self, schedule=alone, whole=True)

    def wrapper(self, block: int, covered: bool) -> CallWrapper:
        """How ``block`` runs, or the segment that begins with it."""
        if not covered:
            return self.wrappers.gap
        kept = self.schedule.kept_by(block)
        return self.wrappers.whole(kept) if self.whole else self.wrappers.covered(kept)


@dataclass(frozen=True, slots=True)
class Proof:
    """What the record of one forward allows: the schedule, cut where a boundary is no link.

    ``reason`` says why it was cut inside a segment, if it was.
    """

    schedule: Schedule
    boundaries: tuple[Boundary, ...]
    reason: str = ""

    @classmethod
    def of(cls, schedule: Schedule, boundaries: Sequence[Boundary]) -> "Proof":
        broken = {k: boundary for k, boundary in enumerate(boundaries) if isinstance(boundary, str)}
        inside = [k for segment in schedule.segments for k in segment[:-1] if k in broken]
        reason = broken[inside[0]] if inside else ""
        return cls(schedule.cut(frozenset(broken)), tuple(boundaries), reason)

    def links_as(self, other: "Proof") -> bool:
        """Whether the same boundaries are links here and there, and the same ones."""

        def found(proof: Proof) -> list[Link | None]:
            return [b if isinstance(b, Link) else None for b in proof.boundaries]

        return self.schedule == other.schedule and found(self) == found(other)

    def links(self, segment: range) -> Sequence[Link]:
        """What leads from each block of ``segment`` to the next: the schedule was cut elsewhere."""
        return cast("Sequence[Link]", self.boundaries[segment.start : segment.stop - 1])
