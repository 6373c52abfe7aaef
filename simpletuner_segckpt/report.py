"""What was asked, what is installed and why, and what really ran.

Plain records without torch, shared by ``validate`` (before a model exists) and ``apply``.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from .schedule import Schedule

UNITS = "units"  # the path under which modules outside every stack are reported
Strategy = Literal["segmented", "per-block", "native", "off"]


@dataclass(frozen=True, slots=True)
class Condition:
    """A fact that forces per-block, or switches checkpointing off.

    ``where`` says what it was seen in: the ``config``, the ``model`` or one ``call``. ``name``
    is the config key, the hook or the argument. ``stacks`` is empty when all are concerned.
    """

    where: Literal["config", "model", "call"]
    name: str
    reason: str
    stacks: tuple[str, ...] = ()
    off: bool = False

    def concerns(self, path: str) -> bool:
        return not self.stacks or path in self.stacks

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class StackReport:
    """How one stack is scheduled; ``reason`` says why it is not, or not wholly, segmented.

    feed_forward: attribute paths in a block of what is recomputed of covered blocks; empty when
        it is the whole block.
    kept: operators whose outputs covered blocks keep, ``attention`` and ``ffn``.
    inputs_on_cpu: whether what enters a checkpoint call waits for backward in CPU memory.
    offloaded: blocks whose attention saves to CPU memory.
    """

    path: str
    strategy: Strategy
    schedule: Schedule
    reason: str = ""
    feed_forward: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    inputs_on_cpu: bool = False
    offloaded: tuple[int, ...] = ()

    @property
    def blocks(self) -> int:
        return self.schedule.blocks

    @property
    def segments(self) -> tuple[range, ...]:
        return self.schedule.segments

    @property
    def covered(self) -> tuple[int, ...]:
        return self.schedule.covered

    @property
    def gap(self) -> tuple[int, ...]:
        return self.schedule.gap

    def lines(self) -> list[str]:
        """For example ``blocks: 8 blocks, segmented: [0 1] 2 3 [4 5] 6 7`` and the counts."""
        because = f" ({self.reason})" if self.reason else ""
        if self.strategy == "off":
            out = [f"{self.path}: {self.blocks} blocks, none recomputed{because}"]
        else:
            out = [
                f"{self.path}: {self.blocks} blocks, {self.strategy}{because}",
                f"  {self.schedule}",
                f"  {self._counts()}, {len(self.gap)} run normally",
            ]
        if self.kept:
            kept = " and ".join(self.kept)
            out.append(f"  their outputs of {kept} stay in memory and are not recomputed")
        if self.inputs_on_cpu:
            out.append("  the inputs of each checkpoint call wait in CPU memory")
        if self.offloaded:
            blocks = "blocks " + " ".join(map(str, self.offloaded))
            if len(self.offloaded) == self.blocks:
                blocks = "all blocks"
            out.append(f"  what attention saves waits in CPU memory: {blocks}")
        return out

    def _counts(self) -> str:
        if self.feed_forward:
            names = ", ".join(self.feed_forward)
            return f"feed-forwards ({names}) of {len(self.covered)} blocks recomputed"
        return f"{len(self.covered)} recomputed in {len(self.segments)} checkpoint calls"


@dataclass(frozen=True, slots=True)
class Report:
    """What is installed on a model, or would be."""

    family: str | None
    conditions: tuple[Condition, ...] = ()
    stacks: tuple[StackReport, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()  # (path, reason)
    remarks: tuple[str, ...] = ()  # what a class with setters of its own makes of the keys

    @property
    def strategy(self) -> Strategy:
        """``native`` if any stack is, else ``segmented``, else ``per-block``, else ``off``."""
        found = {stack.strategy for stack in self.stacks}
        order: tuple[Strategy, ...] = ("native", "segmented", "per-block")
        return next((strategy for strategy in order if strategy in found), "off")

    def without_moves(self) -> "Report":
        """The report where everything is in CPU memory anyway, so that nothing is moved there."""
        stacks = (replace(stack, inputs_on_cpu=False, offloaded=()) for stack in self.stacks)
        return replace(self, stacks=tuple(stacks))

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        out = [f"family {self.family or 'unknown (probed)'}, strategy {self.strategy}"]
        out += [f"  because of {condition}" for condition in self.conditions]
        out += [line for stack in self.stacks for line in stack.lines()]
        out += [f"{path}: left out ({reason})" for path, reason in self.left_out]
        out += [f"remark: {remark}" for remark in self.remarks]
        return out


@dataclass(slots=True)
class Tally:
    """What happened inside the blocks of one span, beside their being recomputed or not.

    feed_forwards: calls of feed-forwards that are recomputed by themselves.
    kept: outputs that a recompute takes from memory, by operator (``attention``, ``ffn``).
    offloaded: tensors that wait for backward in CPU memory, by what saved them: an ``attention``,
        or a checkpoint call its ``inputs``.
    """

    feed_forwards: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    offloaded: Counter[str] = field(default_factory=Counter)


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
    """What one stack did in one training forward."""

    path: str
    strategy: Strategy
    reason: str
    spans: tuple[Span, ...]

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
        """Outputs that a recompute takes from memory, by operator (``attention``, ``ffn``)."""
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
        ]


@dataclass(frozen=True, slots=True)
class Effect:
    """What the last training forward really did.

    Modules outside every stack that the model handed to its checkpoint function are the
    blocks of a stack of their own, ``units``, numbered in the order in which they ran.
    """

    stacks: tuple[StackEffect, ...]
    conditions: tuple[Condition, ...] = ()

    def __str__(self) -> str:
        lines = [f"because of {condition}" for condition in self.conditions]
        return "\n".join([*lines, *(line for stack in self.stacks for line in stack.lines())])

    def __getitem__(self, path: str) -> StackEffect:
        """The effect on the stack at ``path``. Raises ``KeyError`` when it has none."""
        for stack in self.stacks:
            if stack.path == path:
                return stack
        raise KeyError(path)


@dataclass(slots=True)
class History:
    """What ran since the schedule was installed, forward by forward, in the model and its copies.

    trained: training forwards that were observed to their end.
    without_gradients: forwards under ``no_grad`` or ``inference_mode``.
    switched_off: forwards with gradients while checkpointing was off on the model.
    compiled: whether a training forward ran in a graph that was compiled as a whole, unobserved.
    past_the_hooks: blocks that were recomputed although no forward of the model was seen to begin.
    ran: by stack path, in how many training forwards it ran under which strategy, and why.
    drawn: by stack path, what ran last: ``[0 1] 2 3`` and so on.
    recomputed: whether any block was recomputed in any of them.
    """

    trained: int = 0
    without_gradients: int = 0
    switched_off: int = 0
    compiled: bool = False
    past_the_hooks: int = 0
    ran: dict[str, Counter[tuple[Strategy, str]]] = field(default_factory=dict)
    drawn: dict[str, str] = field(default_factory=dict)
    recomputed: bool = False

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __deepcopy__(self, memo: dict[int, object]) -> "History":
        return self

    def add(self, effect: Effect) -> None:
        """One more training forward."""
        self.trained += 1
        for stack in effect.stacks:
            if stack.spans:
                self.ran.setdefault(stack.path, Counter())[stack.strategy, stack.reason] += 1
                self.drawn[stack.path] = stack.drawing
            self.recomputed = self.recomputed or bool(stack.segments)

    def lines(self) -> list[str]:
        """How many forwards of each kind; for each stack how often it ran how, and the last."""
        counts = {
            "training": self.trained,
            "without gradients": self.without_gradients,
            "with checkpointing switched off": self.switched_off,
        }
        told = [f"{count} {what}" for what, count in counts.items() if count]
        out = [f"forwards: {', '.join(told) or 'none observed'}"]
        if self.compiled:
            out.append("training in a graph compiled as a whole: per-block, not observed")
        if self.past_the_hooks:
            out.append(f"past the model's forward: {self.past_the_hooks} blocks, per-block")
        for path, counted in self.ran.items():
            told = [
                f"{strategy} in {count}{f' ({reason})' if reason else ''}"
                for (strategy, reason), count in counted.most_common()
            ]
            out += [f"{path}: {', '.join(told)}", f"  {self.drawn[path]}"]
        return out


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
        without = [span for span in covered if not span.tally.kept[kind]]
        if not without or (planned.path == UNITS and len(without) < len(covered)):
            continue  # most units have no attention
        if kind == "attention":
            why = "they ran no fused attention without dropout, which alone can be kept"
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
