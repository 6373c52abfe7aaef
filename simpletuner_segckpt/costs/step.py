"""What a training step costs when every block runs in a way of its own: sums over the blocks.

In forward each block adds what it keeps, in backward that goes again, last block first; at each
point there is besides what the block that runs there needs for itself. So the peak is the largest
of some sums, and the seconds are one. What this leaves out: blocks that share a checkpoint call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Way:
    """One way for one block to run: its ``treatment`` (see ``treatments``).

    kept: bytes alive from its forward to its backward. forward_peak: bytes above what was alive
    when its forward began. backward_peak: above what was alive when its backward began, gradients
    that come in among them. seconds: more than where nothing of it is recomputed.
    """

    treatment: str
    kept: int
    forward_peak: int
    backward_peak: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """A block in its place.

    ways: the first recomputes it as a whole. before: bytes that what runs before it, after the
    block before, keeps until their backward. trained: bytes of gradients that its backward leaves.
    waiting: bytes of gradients that only wait while its backward runs.
    """

    ways: tuple[Way, ...]
    before: int = 0
    trained: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class StepCosts:
    """A step, its blocks in execution order. Bytes.

    alive: when the forward begins. head_peak: above what is alive after the last block, until the
    backward of that begins. trained: gradients of what is in no block. elsewhere: the peak of what
    the blocks have no part in, such as the step of an optimizer.
    """

    blocks: tuple[BlockCosts, ...]
    alive: int = 0
    head_peak: int = 0
    trained: int = 0
    elsewhere: int = 0

    def peak(self, ways: Sequence[Way]) -> int:
        """Bytes at the peak of a step in which the blocks run in these ways."""
        kept = [0, *accumulate(way.kept for way in ways)]
        peaks = [self.elsewhere, kept[-1] + self.rest + self.head_peak]
        for at, (way, limits) in enumerate(zip(ways, self.limits, strict=True)):
            peaks.append(kept[at] + limits.forward + way.forward_peak)
            peaks.append(kept[at + 1] + limits.backward + way.backward_peak)
        return max(peaks)

    @staticmethod
    def seconds(ways: Sequence[Way]) -> float:
        """Seconds more than where nothing is recomputed."""
        return sum(way.seconds for way in ways)

    @property
    def rest(self) -> int:
        """Bytes alive after the last block, beside what blocks keep."""
        return self.alive + sum(block.before for block in self.blocks)

    @property
    def all_recomputed(self) -> tuple[Way, ...]:
        """Every block recomputed as a whole."""
        return tuple(block.ways[0] for block in self.blocks)

    @cached_property
    def limits(self) -> tuple["Limits", ...]:
        """For each block, what is alive beside what blocks keep when it runs."""
        return tuple(self._block_by_block())

    def _block_by_block(self) -> Iterator["Limits"]:
        level = self.alive
        gradients = self.trained + sum(block.trained for block in self.blocks)
        for block in self.blocks:
            level += block.before
            gradients -= block.trained
            yield Limits(level, level + gradients + block.waiting)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes alive beside what blocks keep: before a block's forward, and before its backward."""

    forward: int
    backward: int
