"""The fastest plan for each block of a measured model within a budget.

``costs_of`` makes sums over blocks of what ``profile.walk`` goes through exactly, so that
``costs.choose`` can choose among all plans there are. Both differ where a value that two blocks
hold would be counted twice; so what was chosen is gone through, and chosen again with less where
that is above the budget.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...costs.cards import Card
from ...costs.choose import fastest
from ...costs.records import NO_WORK, Run
from ...costs.step import BlockCosts, StepCosts, Way
from ...costs.step_time import Time, time_for
from ...costs.treatments import COVERED, PLAIN, schedule_of
from ...schedules.report import Report
from ...schedules.schedule import Schedule
from ..profile.records import Profile
from ..profile.walk import ValueUses
from .peak import Composed, Composer, spans_of, time_of

MARKS = "recomputed in brackets; kept there: a attention, c cross-attention, f ffn"


ROUNDS = 8  # of choosing again with less


@dataclass(frozen=True)
class Within:
    """A plan within a budget. report: with the schedules of it. fits: whether its peak does."""

    report: Report
    step: Composed
    fits: bool

    @property
    def schedules(self) -> list[Schedule]:
        """Those of the stacks, in execution order."""
        return [stack.schedule for stack in self.report.stacks]


def within(profile: Profile, report: Report, budget: float, card: Card) -> Within:
    """The fastest plan of all whose peak is at most ``budget`` bytes.

    report: how a budget would be installed on the model. card: where a second is one. Where nothing
    fits, every block is recomputed.
    """
    composer = Composer(profile)

    def planned(ways: Sequence[Way]) -> Within:
        chosen = with_ways(report, profile, ways)
        step = composer(spans_of(profile, chosen.stacks))
        return Within(chosen, step, step.peak <= budget)

    found = []
    for host in _shares_of_host(profile, card):
        costs = costs_of(profile, report, card, host)
        reach = int(budget)
        for _ in range(ROUNDS):
            choice = fastest(costs, reach)
            found.append(planned(choice.ways))
            if found[-1].fits or not choice.fits:
                break
            reach -= found[-1].step.peak - int(budget)
    fitting = [plan for plan in found if plan.fits]
    if not fitting:
        return planned(costs.all_recomputed)
    return min(fitting, key=lambda plan: time_of(plan.step, card).total)


def _shares_of_host(profile: Profile, card: Card) -> tuple[float, ...]:
    """What of host and card to count as seconds: a step waits for the slower one of them.

    Where recomputing changes which one that is, between both, and the best of what comes out.
    """
    plain = recomputed = Time(0, 0, 0)
    for part in profile.glue:
        glue = time_for(part.forward, part.backward, NO_WORK, 0, card)
        plain, recomputed = plain + glue, recomputed + glue
    for block in profile.blocks:
        kind = profile.kinds[block.kind]
        bare, run = kind.run(PLAIN), kind.run(COVERED)
        again = run.backward - bare.backward
        plain += time_for(bare.forward, bare.backward, NO_WORK, 0, card)
        recomputed += time_for(run.forward, run.backward, again, 0, card)
    waiting = {plain.launch_bound, recomputed.launch_bound}
    return (0.0, 0.5, 1.0) if len(waiting) > 1 else (float(waiting.pop()),)


def drawn(report: Report) -> dict[str, str]:
    """By the path of a stack, how each of its blocks runs; see ``Schedule.marked``."""
    return {stack.path: stack.schedule.marked() for stack in report.stacks}


def counts(schedules: Sequence[Schedule]) -> str:
    """How many blocks run in which way: ``12 [], 10 [af], 8 plain``. See ``Schedule.marked``."""
    found: dict[str, int] = {}
    for schedule in schedules:
        covered = set(schedule.covered)
        for block in range(schedule.blocks):
            way = f"[{schedule.mark(block)}]" if block in covered else "plain"
            found[way] = found.get(way, 0) + 1
    order = sorted(found, key=lambda way: (way == "plain", way))
    return ", ".join(f"{found[way]} {way}" for way in order)


def with_ways(report: Report, profile: Profile, ways: Sequence[Way]) -> Report:
    """``report`` with the schedules in which the blocks run in these ways."""
    chosen = {
        (block.stack, block.index): way.treatment
        for block, way in zip(profile.blocks, ways, strict=True)
    }
    stacks = []
    for stack in report.stacks:
        treatments = [chosen.get((stack.path, block), PLAIN) for block in range(stack.blocks)]
        stacks.append(replace(stack, schedule=schedule_of(treatments)))
    return replace(report, stacks=tuple(stacks))


# -- sums over blocks --------------------------------------------------------------------------


def costs_of(profile: Profile, report: Report, card: Card, host: float = 0.0) -> StepCosts:
    """What the blocks cost in each way that a budget chooses between.

    Those that ``report`` leaves alone, and those that backward never comes to, run plainly. host:
    share of the seconds of the host, that of the card being the rest.
    """
    return _Costs(profile, report, card, host).made()


class _Costs:
    """``costs_of`` while it is worked out: what each value of the step adds, and to what."""

    def __init__(self, profile: Profile, report: Report, card: Card, host: float):
        self.profile = profile
        self.host = host
        self.values = ValueUses.of(profile)
        self.card = card
        self.on_cpu = {stack.path for stack in report.stacks if stack.inputs_on_cpu}
        active = {stack.path for stack in report.stacks if stack.strategy != "off"}
        self.treatments = [
            [COVERED, *_others(profile.kinds[block.kind].runs)]
            if block.stack in active and any(profile.kinds[block.kind].gives_gradient)
            else [PLAIN]
            for block in profile.blocks
        ]
        count = len(profile.blocks)
        self.before = [part.kept for part in profile.glue[:-1]]
        self.passing = [0] * count  # alive in a block's forward, and counted later
        self.entering = [0] * count  # of those, what is alive before what runs before it
        self.kept = [dict.fromkeys(treatments, 0) for treatments in self.treatments]
        self.backward = [dict.fromkeys(treatments, 0) for treatments in self.treatments]

    def made(self) -> StepCosts:
        profile = self.profile
        self._place_values()
        late = 0  # bytes of the glue that go earlier in backward than they came in forward
        blocks = []
        for at in reversed(range(len(profile.blocks))):
            below = profile.glue[at + 1]
            late += below.kept - below.freed
            blocks.append(BlockCosts(self._ways(at, late), self.before[at], self._trained(at)))
        head = profile.glue[-1]
        static = profile.weights + profile.states
        return StepCosts(
            tuple(reversed(blocks)),
            alive=static + (profile.trained if profile.accumulates else 0),
            head_peak=max(head.forward_peak, head.kept + head.backward_peak),
            elsewhere=static + profile.trained + profile.stepping,
        )

    def _trained(self, at: int) -> int:
        """Bytes of gradients that a block leaves; of those there already, none."""
        kind = self.profile.kinds[self.profile.blocks[at].kind]
        return 0 if self.profile.accumulates else kind.trained

    def _ways(self, at: int, late: int) -> tuple[Way, ...]:
        glue, kind = self.profile.glue[at], self.profile.kinds[self.profile.blocks[at].kind]
        before_it = glue.forward_peak + self.entering[at] - self.before[at]
        shared = self.values.shared if at < len(self.profile.blocks) - 1 else 0
        ways: list[Way] = []
        for treatment in self.treatments[at]:
            run = kind.run(treatment)
            kept = run.own + self.kept[at][treatment]
            needed = max(run.recompute_peak, run.backward_peak)
            after = glue.backward_peak + self._trained(at) - kept
            way = Way(
                treatment,
                kept,
                max(run.forward_peak + self.passing[at], before_it),
                max(needed + shared + self.backward[at][treatment], after) + late,
                self._seconds(at, treatment),
            )
            if not any(_as_good(other, way) for other in ways):
                ways.append(way)
        return tuple(ways)

    def _seconds(self, at: int, treatment: str) -> float:
        """Seconds more than where the block runs plainly."""
        block = self.profile.blocks[at]
        kind = self.profile.kinds[block.kind]
        run, plain = kind.run(treatment), kind.run(PLAIN)
        again = run.backward - plain.backward
        moved = sum(kind.takes) if self._moves(at, treatment) else 0
        time = time_for(run.forward - plain.forward, again, again, moved, self.card)
        waiting = time.host * self.host + time.card * (1 - self.host)
        return max(0.0, waiting + time.link)

    # -- values ------------------------------------------------------------------------------

    def _place_values(self) -> None:
        """Count each value once: where it is certain to be held, or else by the ways that do."""
        makers: dict[int, int] = {}
        takers: dict[int, list[int]] = {}
        sizes: dict[int, int] = {}
        for at, block in enumerate(self.profile.blocks):
            kind = self.profile.kinds[block.kind]
            for value, size in zip(block.takes, kind.takes, strict=True):
                takers.setdefault(value, []).append(at)
                sizes.setdefault(value, size)
            for value, size in zip(block.gives, kind.gives, strict=True):
                if value not in block.takes and value not in takers:
                    makers.setdefault(value, at)
                    sizes.setdefault(value, size)
        for value, size in sizes.items():
            self._place(value, size, makers.get(value), takers.get(value, []))

    def _place(self, value: int, size: int, maker: int | None, takers: list[int]) -> None:
        users = takers if maker is None else [maker, *takers]
        holders = {at: list(self._holding(at, value)) for at in users}
        certain = [at for at in users if len(holders[at]) == len(self.treatments[at])]
        if value in self.profile.between:
            certain.insert(0, users[0])
        if not certain and len(takers) > 1:
            certain = takers[:1]  # some of them will hold it
        end = certain[0] if certain else (takers or users)[0]
        if maker is not None:
            self.entering[end] += size if end > maker else 0
        first = users[0] if maker is None else maker + 1
        for at in range(first, end):
            self.passing[at] += size
            self.entering[at] += size if at > first or maker is not None else 0
        if certain:
            if end == maker:
                for treatment in self.treatments[end]:
                    self.kept[end][treatment] += size
            else:
                self.before[end] += size
        elif end != maker:
            self.passing[end] += size
        for at in users:
            for treatment in holders[at]:
                if not certain:
                    self.kept[at][treatment] += size
                elif at < end:
                    self.backward[at][treatment] += size
            if not certain or at < end:
                for treatment in self.treatments[at]:
                    if at in takers and self._moves(at, treatment):
                        self.backward[at][treatment] += size

    def _holding(self, at: int, value: int) -> Iterator[str]:
        """The ways of a block in which it holds a value until its backward."""
        block = self.profile.blocks[at]
        kind = self.profile.kinds[block.kind]
        for treatment in self.treatments[at]:
            run = kind.run(treatment)
            if treatment.startswith(COVERED):
                if value in block.takes and not self._moves(at, treatment):
                    yield treatment
            elif _holds(run, block.takes, block.gives, value):
                yield treatment

    def _moves(self, at: int, treatment: str) -> bool:
        """Whether what enters a block waits for its backward in CPU memory."""
        return treatment.startswith(COVERED) and self.profile.blocks[at].stack in self.on_cpu


def _others(runs: Iterable[str]) -> list[str]:
    """Of the ways that a block was run in, those that a budget may choose but the first."""
    return [name for name in runs if name == PLAIN or name.startswith(f"{COVERED}+")]


def _holds(run: Run, takes: tuple[int, ...], gives: tuple[int, ...], value: int) -> bool:
    """Whether a run that is not recomputed keeps a value that it took or gave."""
    values = (*zip(takes, run.holds, strict=True), *zip(gives, run.results, strict=True))
    return any(held and number == value for number, held in values)


def _as_good(other: Way, way: Way) -> bool:
    """Whether there is nothing for which ``way`` would be preferred."""
    return (
        other.kept <= way.kept
        and other.seconds <= way.seconds
        and other.forward_peak <= way.forward_peak
        and other.backward_peak <= way.backward_peak
    )
