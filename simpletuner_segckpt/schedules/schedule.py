"""Which blocks of a stack are recomputed, which share a checkpoint call, and what these keep.

Pure arithmetic: no torch, no I/O. ``interval`` is the number of blocks in a segment and
``stride`` the distance between the starts of two segments, so block ``b`` of a stack is
*covered* (recomputed in backward) when ``b % stride < interval``. All other blocks are
*gap*: they run normally and their activations stay in memory.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

Kept = tuple[str, ...]  # words of ``gradient_checkpointing_keep``, in their order there


@dataclass(frozen=True, slots=True)
class Schedule:
    """How each block of one stack of ``blocks`` blocks is treated.

    Each segment is a ``range`` of block indices, in ascending order and without overlap; what is in
    none runs plainly. kept: for each block, the operators whose outputs stay in memory where it is
    recomputed, alike for the blocks of a segment; empty where none of them keeps any.
    """

    blocks: int
    segments: tuple[range, ...]
    kept: tuple[Kept, ...] = ()

    @property
    def covered(self) -> tuple[int, ...]:
        """Indices of the blocks that backward recomputes."""
        return tuple(block for segment in self.segments for block in segment)

    @property
    def gap(self) -> tuple[int, ...]:
        """Indices of the blocks that run normally."""
        covered = set(self.covered)
        return tuple(block for block in range(self.blocks) if block not in covered)

    @classmethod
    def of_all(cls, blocks: int) -> "Schedule":
        """Every block covered, in a segment of its own."""
        return cls(blocks, tuple(range(block, block + 1) for block in range(blocks)))

    def kept_by(self, block: int) -> Kept:
        """The operators whose outputs stay in memory where ``block`` is recomputed."""
        return self.kept[block] if self.kept else ()

    def keeping(self, kinds: Kept) -> "Schedule":
        """The same schedule, with these operators kept wherever a block is recomputed."""
        return replace(self, kept=(kinds,) * self.blocks if kinds else ())

    def per_block(self) -> "Schedule":
        """The same coverage with every covered block in a segment of its own."""
        return self.without(())

    def without(self, blocks: Collection[int]) -> "Schedule":
        """Every covered block in a segment of its own, and ``blocks`` in the gap."""
        alone = tuple(range(b, b + 1) for b in self.covered if b not in blocks)
        return replace(self, segments=alone)

    def cut(self, boundaries: frozenset[int]) -> "Schedule":
        """The same coverage with no segment across a boundary in ``boundaries``.

        Boundary ``k`` lies between block ``k`` and block ``k + 1``.
        """
        pieces: list[range] = []
        for segment in self.segments:
            start = segment.start
            for block in segment:
                if block in boundaries or block == segment[-1]:
                    pieces.append(range(start, block + 1))
                    start = block + 1
        return replace(self, segments=tuple(pieces))

    def __str__(self) -> str:
        """Segments in brackets, gap blocks bare: ``[0 1] 2 3 [4 5] 6 7 [8]``."""
        return self._drawn([""] * self.blocks)

    def marked(self) -> str:
        """The same with a letter for each operator that a recomputed block keeps.

        ``[0] [1a] [2af] 3``: a for attention, c for cross-attention, f for ffn.
        """
        return self._drawn([self.mark(block) for block in range(self.blocks)])

    def mark(self, block: int) -> str:
        """The letters of what ``block`` keeps where it is recomputed; none where it is not."""
        if not any(block in segment for segment in self.segments):
            return ""
        return "".join(kind[0] for kind in self.kept_by(block))

    def _drawn(self, marks: Sequence[str]) -> str:
        starts = {segment.start for segment in self.segments}
        ends = {segment[-1] for segment in self.segments}
        return " ".join(
            f"{'[' if block in starts else ''}{block}{mark}{']' if block in ends else ''}"
            for block, mark in enumerate(marks)
        )


def make_schedule(blocks: int, interval: int = 1, stride: int | None = None) -> Schedule:
    """Schedule one stack; its last segment may be short.

    Raises ``ValueError`` when ``interval`` < 1 or ``stride`` < ``interval``.
    """
    stride = interval if stride is None else stride
    if interval < 1:
        raise ValueError(f"interval is {interval}; it must be 1 or more")
    if stride < interval:
        raise ValueError(f"stride is {stride}; it must be at least the interval, {interval}")
    starts = range(0, blocks, stride)
    return Schedule(blocks, tuple(range(s, min(s + interval, blocks)) for s in starts))


def make_schedules(
    stacks: Mapping[str, int],
    interval: int = 1,
    stride: int | None = None,
    keep_last: int = 0,
) -> dict[str, Schedule]:
    """Schedule every stack of a model from its own block 0.

    ``stacks`` maps the path of each stack to its number of blocks, in execution order. The
    last ``keep_last`` blocks of that whole sequence run normally, whatever the schedule says:
    activations that backward frees first cost little at the peak.
    """
    schedules = {}
    remaining = sum(stacks.values()) - keep_last
    for path, blocks in stacks.items():
        limit = min(blocks, max(0, remaining))
        full = make_schedule(limit, interval, stride)
        schedules[path] = Schedule(blocks, full.segments)
        remaining -= blocks
    return schedules
