"""What one training forward really did."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ..messages.units import readable
from .conditions import Condition
from .report import UNITS, StackReport, Strategy
from .schedule import Schedule
from .tally import Tally


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks that ran together: recomputed under one checkpoint call, or one plain block.

    Where only feed-forwards are recomputed, ``recomputed`` says that those of this block are.
    """

    blocks: range
    recomputed: bool
    tally: Tally = field(default_factory=Tally)

    def __str__(self) -> str:
        blocks = " ".join(map(str, self.blocks))
        return f"[{blocks}]" if self.recomputed else blocks


@dataclass(frozen=True, slots=True)
class StackEffect:
    """What one stack did in one training forward.

    missing: blocks that never came, by way of which nothing can have been recomputed.
    """

    path: str
    strategy: Strategy | Literal["not reached"]
    reason: str
    spans: tuple[Span, ...]
    missing: tuple[int, ...] = ()

    @property
    def segments(self) -> tuple[range, ...]:
        """The blocks under each checkpoint call, in the order they ran."""
        return tuple(span.blocks for span in self.spans if span.recomputed)

    @property
    def covered(self) -> tuple[int, ...]:
        return tuple(block for segment in self.segments for block in segment)

    @property
    def gap(self) -> tuple[int, ...]:
        return tuple(b for span in self.spans if not span.recomputed for b in span.blocks)

    @property
    def drawing(self) -> str:
        """For example ``[0 1] 2 3``: in brackets what one checkpoint call recomputes."""
        return " ".join(map(str, self.spans))

    @property
    def feed_forwards(self) -> int:
        """Calls of feed-forwards that are recomputed by themselves."""
        return sum(span.tally.feed_forwards for span in self.spans)

    @property
    def kept(self) -> Counter[str]:
        """Outputs that a recompute takes from memory, by operator: see ``tally.Tally``."""
        return sum((span.tally.kept for span in self.spans), Counter[str]())

    @property
    def offloaded(self) -> int:
        """Tensors that wait for backward in CPU memory."""
        return sum(span.tally.offloaded.total() for span in self.spans)

    def lines(self) -> list[str]:
        reason = f" ({self.reason})" if self.reason else ""
        counts = {"feed-forwards recomputed": self.feed_forwards}
        counts |= {f"outputs of {kind} kept": n for kind, n in sorted(self.kept.items())}
        counts["tensors in CPU memory"] = self.offloaded
        told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return [
            f"{self.path}: {self.strategy}{reason}",
            f"  {self.drawing}",
            *([f"  {told}"] if told else []),
            *([f"  not reached: {' '.join(map(str, self.missing))}"] if self.missing else []),
        ]


@dataclass(slots=True)
class Within:
    """What a memory budget has made of one forward.

    asked: the budget as the key says it; limit: bytes that it leaves. sizes: those of the call.
    learning: whether it was the first of these, in which everything is recomputed. predicted:
    bytes at the peak of the step. measured: the same, once its backward is over, if it was the
    highest so far. share: seconds that recompute takes, of those that recomputing everything takes.
    plan: the schedule of each stack. note: what could not be measured.
    """

    asked: str
    sizes: str
    limit: int
    predicted: int | None = None
    learning: bool = False
    measured: int | None = None
    share: float = 1.0
    plan: dict[str, Schedule] = field(default_factory=dict)
    note: str = ""

    def lines(self) -> list[str]:
        return [
            f"within {self.asked}: {self.told}",
            *(f"  {line}" for line in self.drawn),
            *([f"  {self.note}"] if self.note else []),
        ]

    @property
    def drawn(self) -> list[str]:
        """A line for each stack; see ``Schedule.marked``."""
        return [f"{path}: {schedule.marked()}" for path, schedule in self.plan.items()]

    @property
    def told(self) -> str:
        """What of the budget the step takes, in a few words."""
        if self.predicted is None:
            return "first forward of this shape, everything is recomputed and measured"
        peak = f"{readable(self.predicted)} predicted"
        if self.measured is not None:
            peak += f", {readable(self.measured)} measured"
        return f"{peak}, {self.share:.0%} of the recompute of all blocks"


@dataclass(frozen=True, slots=True)
class Effect:
    """What the last training forward really did.

    Modules outside every stack that the model handed to its checkpoint function are the
    blocks of a stack of their own, ``units``, numbered in the order in which they ran.

    cpu_bytes: CPU memory that what waits there takes.
    pinned_bytes: pinned CPU memory that the model holds, also for what is not in use now.
    within: what a memory budget has made of it.
    """

    stacks: tuple[StackEffect, ...]
    conditions: tuple[Condition, ...] = ()
    cpu_bytes: int = 0
    pinned_bytes: int = 0
    within: Within | None = None

    def __str__(self) -> str:
        lines = [f"because of {condition}" for condition in self.conditions]
        lines += [line for stack in self.stacks for line in stack.lines()]
        if self.cpu_bytes or self.pinned_bytes:
            waiting, held = readable(self.cpu_bytes), readable(self.pinned_bytes)
            lines.append(f"in CPU memory: {waiting}; pinned buffers: {held}")
        lines += self.within.lines() if self.within else []
        return "\n".join(lines)

    def __getitem__(self, path: str) -> StackEffect:
        """The effect on the stack at ``path``. Raises ``KeyError`` when it has none."""
        for stack in self.stacks:
            if stack.path == path:
                return stack
        raise KeyError(path)


def shortfalls(
    planned: StackReport,
    effect: StackEffect,
    *,
    compiled: Collection[int] = (),
    moves: bool = False,
) -> Iterator[str]:
    """What was planned for the inside of the blocks and did not happen in a forward, and why.

    compiled: the blocks that are, which hides what they do.
    moves: whether there is an accelerator to move tensors from.
    """

    def named(spans: Iterable[Span]) -> str:
        return "blocks " + " ".join(str(block) for span in spans for block in span.blocks)

    def hidden(spans: Iterable[Span]) -> bool:
        return all(block in compiled for span in spans for block in span.blocks)

    covered = [span for span in effect.spans if span.recomputed]
    for kind in planned.kept:
        asked = [s for s in covered if kind in planned.schedule.kept_by(s.blocks.start)]
        without = [span for span in asked if not span.tally.kept[kind]]
        if not without or (planned.path == UNITS and len(without) < len(asked)):
            continue  # most units have no attention
        if kind == "attention":
            why = "they ran no fused attention without dropout, which alone can be kept"
        elif kind == "cross-attention":
            why = "they ran no fused attention without dropout to a shorter sequence"
        elif hidden(without):
            why = "compiled blocks hide their operators"
        else:
            why = (
                "they ran no projection of a feed-forward that comes down from a greater width, "
                "or one of quantised weights by an operator of another library"
            )
        yield f"keep: nothing of {kind} is kept in {named(without)}: {why}"
    if planned.feed_forward:
        without = [span for span in covered if not span.tally.feed_forwards]
        if without and not hidden(without):
            parts = ", ".join(planned.feed_forward)
            yield f"{named(without)} did not call {parts}, so nothing of them is recomputed"
        covered = [span for span in covered if span.tally.feed_forwards or hidden([span])]
    if not moves:
        return
    in_cpu_memory = [span for span in effect.spans if span.blocks[0] in planned.offloaded]
    without = [span for span in in_cpu_memory if not span.tally.offloaded["attention"]]
    if without:
        why = "compiled blocks hide it" if hidden(without) else "it saved nothing that can be moved"
        yield f"nothing of attention is in CPU memory, {named(without)}: {why}"
    entered = any(span.tally.offloaded["inputs"] for span in covered)
    if planned.inputs_on_cpu and covered and not entered:
        inside = planned.feed_forward and hidden(covered)
        why = "compiled blocks hide it" if inside else "none of it can be moved"
        yield f"nothing that enters a checkpoint call is in CPU memory: {why}"
