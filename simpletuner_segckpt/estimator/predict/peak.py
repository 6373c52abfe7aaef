"""From a profile and a schedule to the peak of memory and the work. Pure arithmetic, no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...costs.cards import Card
from ...costs.records import Work
from ...costs.step_time import Time, time_for
from ...costs.treatments import COVERED, of_block
from ...schedules.report import StackReport
from ..profile.records import Profile
from ..profile.walk import PlannedSpan, StepWalk, ValueUses


@dataclass(frozen=True)
class Composed:
    """One step. Bytes; ``kept`` and ``working`` are what is alive at the peak beside the rest.

    backward contains recomputed, the work that is done twice. moved: bytes to CPU memory and back.
    calls: number of checkpoint calls. where: what runs at the peak.
    """

    peak: int
    weights: int
    gradients: int
    states: int
    kept: int
    working: int
    forward: Work
    backward: Work
    recomputed: Work
    moved: int
    calls: int
    where: str

    @property
    def recomputed_share(self) -> float:
        """FLOPs that are done twice, as a share of those of the forward."""
        return self.recomputed.flops / self.forward.flops if self.forward.flops else 0.0


def time_of(step: Composed, card: Card) -> Time:
    """The time of a step on ``card``."""
    return time_for(step.forward, step.backward, step.recomputed, step.moved, card)


def spans_of(profile: Profile, stacks: Iterable[StackReport]) -> list[PlannedSpan]:
    """The spans of a schedule, in execution order."""
    reports = {stack.path: stack for stack in stacks}
    spans: list[PlannedSpan] = []
    for at, block in enumerate(profile.blocks):
        stack = reports.get(block.stack)
        if stack is None or (stack.strategy == "off" and block.index not in stack.offloaded):
            spans.append(PlannedSpan((at,)))
            continue
        treatment = of_block(stack, block.index)
        if not treatment.startswith(COVERED):
            spans.append(PlannedSpan((at,), treatment))
            continue
        begins = block.index == next(s for s in stack.segments if block.index in s).start
        if begins or spans[-1].blocks[-1] != at - 1 or not handed_on(profile, at):
            spans.append(PlannedSpan((at,), treatment, stack.inputs_on_cpu))
        else:
            spans[-1] = replace(spans[-1], blocks=(*spans[-1].blocks, at))
    return spans


def handed_on(profile: Profile, at: int) -> bool:
    """Whether a block gets just what the one before it returned, and otherwise what that one got.

    Segments end where something else happens in between, as they do in a real step.
    """
    before, block = profile.blocks[at - 1], profile.blocks[at]
    return any(value in before.gives for value in block.takes) and all(
        value in before.gives or value in before.takes for value in block.takes
    )


def compose(profile: Profile, spans: Sequence[PlannedSpan]) -> Composed:
    """One step with these spans."""
    return Composer(profile)(spans)


class Composer:
    """``compose`` for many schedules of one profile."""

    def __init__(self, profile: Profile):
        self.profile = profile
        self._values = ValueUses.of(profile)

    def __call__(self, spans: Sequence[PlannedSpan]) -> Composed:
        step = StepWalk(self.profile, self._values, spans)
        step.forward()
        step.backward()
        return _composed(step)


def _composed(walk: StepWalk) -> Composed:
    profile = walk.profile
    forward = backward = recomputed = Work()
    moved = calls = 0
    for glue in profile.glue:
        forward, backward = forward + glue.forward, backward + glue.backward
    for span in walk.spans:
        calls += span.covered
        for at in span.blocks:
            run, plain = walk.run_of(span, at), walk.plain_run(at)
            forward, backward = forward + run.forward, backward + run.backward
            recomputed = recomputed + (run.backward - plain.backward)
            moved += run.moved
        if span.inputs_on_cpu:
            moved += sum(profile.kinds[profile.blocks[span.blocks[0]].kind].takes)
    static = profile.weights + profile.states
    return Composed(
        peak=static + walk.peak,
        weights=profile.weights,
        gradients=walk.gradients_at_peak,
        states=profile.states,
        kept=walk.kept_at_peak,
        working=walk.peak - walk.kept_at_peak - walk.gradients_at_peak,
        forward=forward,
        backward=backward,
        recomputed=recomputed,
        moved=moved,
        calls=calls,
        where=walk.where,
    )
