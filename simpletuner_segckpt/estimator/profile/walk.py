"""A training step gone through span by span: what is alive at each point. No torch.

A span is a segment under one checkpoint call, or a block that is not recomputed as a whole. In
forward each span adds what it keeps; in backward it is freed, after what it recomputes. Values
that blocks hand on are counted once, however many keep them. See docs/estimator.md for what this
leaves out.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...costs.records import Run
from ...costs.treatments import COVERED, PLAIN
from .records import Block, Profile


@dataclass(frozen=True)
class PlannedSpan:
    """Positions of consecutive blocks, and how they run. Only covered spans have several."""

    blocks: tuple[int, ...]
    treatment: str = PLAIN
    inputs_on_cpu: bool = False

    @property
    def covered(self) -> bool:
        return self.treatment.startswith(COVERED)


def levels(profile: Profile) -> tuple[list[int], list[int]]:
    """Bytes alive with nothing recomputed: before each block and after the last, in forward; and
    before each block in backward, gradients not counted.
    """
    plain = [PlannedSpan((at,)) for at in range(len(profile.blocks))]
    step = StepWalk(profile, ValueUses.of(profile), plain)
    forward = step.forward()
    return forward, step.backward()


@dataclass(frozen=True)
class ValueUses:
    """What is the same for all schedules of a profile.

    arriving: for each block, the values that it takes first and no block makes, with their bytes.
    first_use and last_use: value -> the first and last block that takes or gives it. shared: bytes
    of the gradients of such values that several blocks take.
    """

    arriving: tuple[dict[int, int], ...]
    first_use: dict[int, int]
    last_use: dict[int, int]
    shared: int

    @classmethod
    def of(cls, profile: Profile) -> "ValueUses":
        made = {value for block in profile.blocks for value in block.gives}
        arriving: list[dict[int, int]] = [{} for _ in profile.blocks]
        first_use: dict[int, int] = {}
        last_use: dict[int, int] = {}
        uses: Counter[int] = Counter()
        gradients: dict[int, int] = {}
        for at, block in enumerate(profile.blocks):
            kind = profile.kinds[block.kind]
            for value in (*block.takes, *block.gives):
                first_use.setdefault(value, at)
                last_use[value] = at
            for value, size, gradient in zip(
                block.takes, kind.takes, kind.takes_gradient, strict=True
            ):
                uses[value] += 1
                if value not in made:
                    arriving[first_use[value]].setdefault(value, size)
                    gradients[value] = size * gradient
        shared = sum(size for value, size in gradients.items() if uses[value] > 1)
        return cls(tuple(arriving), first_use, last_use, shared)


def gradient_of(profile: Profile, at: int) -> int:
    """Bytes of the gradients of what a block gives."""
    return sum(profile.kinds[profile.blocks[at].kind].gives_gradient)


def shared_gradients(profile: Profile) -> int:
    """Bytes of the gradients of values that several blocks take and none makes."""
    return ValueUses.of(profile).shared


class StepWalk:
    """The state of the memory while a step is gone through."""

    def __init__(self, profile: Profile, values: ValueUses, spans: Sequence[PlannedSpan]):
        self.profile = profile
        self.values = values
        self.spans = spans
        self.level = 0
        self.peak = 0
        self.kept_at_peak = 0
        self.gradients_at_peak = 0
        self.where = ""
        self._kept = math.inf  # while a span is gone back through: what was kept until then
        self.gradients = profile.trained if profile.accumulates else 0
        self._alive: dict[int, int] = {}
        self._holders: Counter[int] = Counter()
        self._holding: list[list[int]] = []

    # -- values ----------------------------------------------------------------------------

    def _arrive(self, value: int, size: int) -> None:
        if value not in self._alive:
            self._alive[value] = size
            self.level += size

    def _leave(self, value: int, at: int) -> None:
        """Let a value go that no span holds and no block from ``at`` on takes."""
        if value in self._alive and not self._holders[value] and self.values.last_use[value] < at:
            self.level -= self._alive.pop(value)

    def _reach(self, extra: int, where: str) -> None:
        if self.level + extra + self.gradients > self.peak:
            self.peak = self.level + extra + self.gradients
            self.kept_at_peak = int(min(self.level, self._kept))
            self.gradients_at_peak = self.gradients
            self.where = where

    # -- forward ---------------------------------------------------------------------------

    def forward(self) -> list[int]:
        """Go through the forward; the levels before each block, and after all of them."""
        profile = self.profile
        entered = []
        for value in profile.between:  # what lies between the blocks is one more holder
            self._holders[value] += 1
        for span in self.spans:
            holding: list[int] = []
            for at in span.blocks:
                self._reach(profile.glue[at].forward_peak, "before the blocks" if at == 0 else "")
                self.level += profile.glue[at].kept
                for value, size in self.values.arriving[at].items():
                    self._arrive(value, size)
                block = profile.blocks[at]
                run = self.run_of(span, at)
                entered.append(self.level)
                self._reach(run.forward_peak, f"forward of {block.stack} {block.index}")
                kind = profile.kinds[block.kind]
                for value, size in zip(block.gives, kind.gives, strict=True):
                    self._arrive(value, size)
                self.level += run.own
                holding += self._held(span, at)
            for value in holding:
                self._holders[value] += 1
            self._holding.append(holding)
            for at in span.blocks:
                block = profile.blocks[at]
                for value in (*block.takes, *block.gives):
                    self._leave(value, span.blocks[-1] + 1)
        head = profile.glue[-1]
        self._reach(head.forward_peak, "after the blocks")
        for value in list(self._alive):
            self._leave(value, len(profile.blocks) + 1)
        entered.append(self.level)
        self.level += head.kept
        return entered

    def run_of(self, span: PlannedSpan, at: int) -> Run:
        return self.profile.kinds[self.profile.blocks[at].kind].run(span.treatment)

    def plain_run(self, at: int) -> Run:
        return self.profile.kinds[self.profile.blocks[at].kind].run(PLAIN)

    def _held(self, span: PlannedSpan, at: int) -> list[int]:
        """Values that a block keeps until its backward."""
        block = self.profile.blocks[at]
        run = self.run_of(span, at)
        first = at == span.blocks[0]
        if span.covered and not self._differentiable(span):
            return []
        if span.covered:
            made = {v for b in span.blocks for v in self.profile.blocks[b].gives}
            takes = [v for v in block.takes if first or v not in made]
            return [] if span.inputs_on_cpu else takes
        taken = [v for v, held in zip(block.takes, run.holds, strict=True) if held]
        return taken + [v for v, held in zip(block.gives, run.results, strict=True) if held]

    def _differentiable(self, span: PlannedSpan) -> bool:
        """Whether backward comes to a span at all: not to frozen blocks with frozen inputs."""
        kinds = (self.profile.kinds[self.profile.blocks[at].kind] for at in span.blocks)
        return any(any(kind.gives_gradient) for kind in kinds)

    # -- backward --------------------------------------------------------------------------

    def backward(self) -> list[int]:
        """Go through the backward; the levels before each block, gradients not counted."""
        profile = self.profile
        begun = [0] * len(profile.blocks)
        head = profile.glue[-1]
        self._reach(head.backward_peak, "the loss")
        self.level -= head.freed
        shared = 0
        for span, holding in zip(reversed(self.spans), reversed(self._holding), strict=True):
            last = profile.blocks[span.blocks[-1]]
            begun[span.blocks[-1]] = self._kept = self.level
            self.level += shared
            if span.covered and self._differentiable(span):
                self._covered_backward(span)
            elif not span.covered:
                run = self.run_of(span, span.blocks[0])
                self._reach(run.backward_peak, f"backward of {last.stack} {last.index}")
                self.level -= run.own
            self.level -= shared
            shared = self.values.shared
            for value in holding:
                self._holders[value] -= 1
            for at in span.blocks:
                block = profile.blocks[at]
                for value in {*block.takes, *block.gives}:
                    if value in profile.between and self.values.first_use[value] == at:
                        self._holders[value] -= 1
                    self._leave(value, len(profile.blocks) + 1)
                if not profile.accumulates:
                    self.gradients += profile.kinds[block.kind].trained
                glue = profile.glue[at]
                self._reach(glue.backward_peak, "between the blocks")
                self.level -= glue.freed
        self.level = self._kept = 0
        self.gradients = profile.trained
        self._reach(profile.stepping, "the optimizer's step")
        return begun

    def _covered_backward(self, span: PlannedSpan) -> None:
        """Recompute the blocks of a segment, then go back through them."""
        profile = self.profile
        before = self.level
        first = profile.blocks[span.blocks[0]]
        name = f"segment {first.stack} {first.index}"
        gradient = gradient_of(profile, span.blocks[-1])
        if span.inputs_on_cpu:
            kind = profile.kinds[first.kind]
            self.level += sum(
                size
                for value, size in zip(first.takes, kind.takes, strict=True)
                if value not in self._alive
            )
        if len(span.blocks) == 1:
            run = self.run_of(span, span.blocks[0])
            self._reach(max(run.recompute_peak, run.backward_peak), f"recompute of {name}")
            self.level = before - run.own
            return
        inner: list[int] = []
        for at in span.blocks:
            plain, run = self.plain_run(at), self.run_of(span, at)
            coming = self._passing(at - 1) if inner else 0  # not kept, but the call holds it
            if at == span.blocks[-1]:  # whose recompute stops when it has what backward needs
                self._reach(coming + run.recompute_peak, f"recompute of {name}")
                grown = plain.own - run.own
            else:
                again = plain.forward_peak - run.own
                self._reach(coming + gradient + again, f"recompute of {name}")
                grown = plain.own - run.own + self._handed_on(at)
            inner.append(grown)
            self.level += grown
        for at, grown in zip(reversed(span.blocks), reversed(inner), strict=True):
            self._reach(self.plain_run(at).backward_peak, f"backward of {name}")
            self.level -= grown + self.run_of(span, at).own
        self.level = before - sum(self.run_of(span, at).own for at in span.blocks)

    def _handed_on(self, at: int) -> int:
        """Bytes of the results of a block that it or the next one keeps in a recompute."""
        block, following = self.profile.blocks[at], self.profile.blocks[at + 1]
        run = self.plain_run(at)
        taken = zip(following.takes, self.plain_run(at + 1).holds, strict=True)
        held = {value for value, holds in taken if holds}
        held |= {value for value, own in zip(block.gives, run.results, strict=True) if own}
        return self._bytes(block, held)

    def _passing(self, at: int) -> int:
        """Bytes of the results of a block that the next one takes and neither of them keeps."""
        block, following = self.profile.blocks[at], self.profile.blocks[at + 1]
        return self._bytes(block, set(following.takes)) - self._handed_on(at)

    def _bytes(self, block: Block, values: Collection[int]) -> int:
        """Bytes of those of ``values`` that ``block`` makes."""
        sizes = dict(zip(block.gives, self.profile.kinds[block.kind].gives, strict=True))
        return sum(sizes[v] for v in sizes if v in values and v not in block.takes)
