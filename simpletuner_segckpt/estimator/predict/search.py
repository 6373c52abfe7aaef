"""The fastest keys that fit into some memory: exact over all keys that ``candidates`` lists.

The time of a schedule follows from which blocks it covers, and a lower bound of its peak from what
each block keeps; both are sums over blocks, made for all candidates at once. So candidates are
composed in the order of their time, and only those that can fit.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch

from ...config.settings import Settings
from ...config_schema import PREFIX
from ...costs.cards import Card
from ...costs.records import Work
from ...costs.step_time import Time, time_for
from ...costs.treatments import CROSS, FFN, INPUTS, KEPT, OFFLOAD, PLAIN, keeping
from ...families.schema import Family
from ...schedules.report import make_report
from ...schedules.schedule import make_schedules
from ..profile.records import Profile
from ..profile.walk import PlannedSpan
from .modes import planned, refused, settings_with
from .peak import Composed, Composer, spans_of, time_of

WIDEST = 8  # blocks in a segment; beyond it only the whole stack


OFFLOADING = f"{PREFIX}_offload_attention"


@dataclass(frozen=True)
class Option:
    """Everything of the keys but the schedule; ``covered`` and ``gap`` are treatments.

    moves_inputs: whether what enters a checkpoint call goes to CPU memory.
    """

    keys: Mapping[str, Any]
    covered: str
    gap: str
    moves_inputs: bool


@dataclass(frozen=True)
class _Schedule:
    """Keys of the schedule, which blocks it covers and which of them begin a segment."""

    keys: Mapping[str, Any]
    covered: tuple[bool, ...]
    starts: tuple[bool, ...]

    def keys_with(self, option: Option) -> dict[str, Any] | None:
        """All keys, or None when others say the same."""
        if any(self.covered):
            return {**self.keys, **option.keys}
        if not option.keys:
            return {PREFIX: False}
        return {**self.keys, **option.keys} if set(option.keys) == {OFFLOADING} else None


@dataclass(frozen=True)
class Candidate:
    """Keys, the seconds that a step takes with them, and a lower bound of its peak in bytes."""

    keys: Mapping[str, Any]
    seconds: float
    bound: float


@dataclass(frozen=True)
class Found:
    """A candidate that was composed."""

    keys: Mapping[str, Any]
    seconds: float
    step: Composed


class Search:
    """All candidates for one model on one card."""

    def __init__(self, profile: Profile, family: Family, settings: Settings, card: Card):
        self.profile = profile
        self.family = family
        self.settings = settings
        self.card = card
        self._composer = Composer(profile)
        self._composed: dict[tuple[PlannedSpan, ...], Composed] = {}

    def fastest(self, budget: float) -> Found | None:
        """The least time of all that fits into ``budget`` bytes; of equals the one with most room.

        Of those the one with the fewest keys.
        """
        best: Found | None = None
        for candidate in self.candidates:
            if best and candidate.seconds > best.seconds * (1 + 1e-9):
                break
            if candidate.bound > budget:
                continue
            found = self.compose(candidate)
            if found.step.peak > budget:
                continue
            if best is None or _simplicity(found) < _simplicity(best):
                best = found
        return best

    def smallest(self, faster_than: float | None = None) -> Found | None:
        """The least peak of all, or of those whose step takes fewer seconds than that."""
        best: Found | None = None
        pool = [c for c in self.candidates if faster_than is None or c.seconds < faster_than]
        for candidate in sorted(pool, key=lambda c: c.bound):
            if best and candidate.bound > best.step.peak:
                break
            found = self.compose(candidate)
            if best is None or (found.step.peak, found.seconds) < (best.step.peak, best.seconds):
                best = found
        return best

    def compose(self, candidate: Candidate) -> Found:
        """What a candidate really is."""
        settings = settings_with(self.settings, candidate.keys)
        report = planned(self.profile, self.family, settings)
        spans = spans_of(self.profile, report.stacks)
        key = tuple(spans)
        found = self._composed.get(key)
        if found is None:
            found = self._composed[key] = self._composer(spans)
        return Found(candidate.keys, time_of(found, self.card).total, found)

    @cached_property
    def candidates(self) -> list[Candidate]:
        """Every schedule with every option, the fastest first."""
        schedules = self._schedules()
        covered = _matrix(schedule.covered for schedule in schedules)
        starts = _matrix(schedule.starts for schedule in schedules)
        kinds = [self.profile.kinds[block.kind] for block in self.profile.blocks]
        inputs = torch.tensor([sum(k.takes) for k in kinds], dtype=torch.float64)
        glue = self.profile.glue
        fixed = Time(0, 0, 0)
        for part in glue:
            fixed = fixed + time_for(part.forward, part.backward, Work(), 0, self.card)
        static = self.profile.weights + self.profile.states + sum(g.kept for g in glue[:-1])
        found = []
        for option in self._options():
            inside, outside = self._sums(option.covered), self._sums(option.gap)
            card, host, link, kept, _ = (covered @ (inside - outside) + outside.sum(0)).unbind(1)
            link = link + option.moves_inputs * 2 * (starts @ inputs) / self.card.link
            time = torch.maximum(card + fixed.card, host + fixed.host) + link
            last = torch.where(covered[:, -1] > 0, inside[-1, 4], outside[-1, 4])
            bound = kept + last.clamp(min=0) + static
            for schedule, s, b in zip(schedules, time.tolist(), bound.tolist(), strict=True):
                keys = schedule.keys_with(option)
                if keys is not None:
                    found.append(Candidate(keys, s, b))
        return sorted(found, key=lambda c: (c.seconds, c.bound, len(c.keys)))

    def _sums(self, treatment: str) -> torch.Tensor:
        """For each block: seconds of card, host and link, bytes kept, bytes above that."""
        rows = []
        for block in self.profile.blocks:
            kind = self.profile.kinds[block.kind]
            run, plain = kind.run(treatment), kind.run(PLAIN)
            again = run.backward - plain.backward
            time = time_for(run.forward, run.backward, again, run.moved, self.card)
            rows.append((time.card, time.host, time.link, run.own, run.forward_peak - run.own))
        return torch.tensor(rows, dtype=torch.float64)

    def _schedules(self) -> "list[_Schedule]":
        """Every different schedule once."""
        counts = self.profile.counts
        total, longest = sum(counts.values()), max(counts.values())
        places = [(block.stack, block.index) for block in self.profile.blocks]
        found = []
        seen = set()
        seen_spans = set()
        widths = sorted({*range(1, min(WIDEST, longest) + 1), longest})
        for interval, keep_last in product(widths, range(total + 1)):
            for stride in range(interval, longest + 1):
                schedules = make_schedules(counts, interval, stride, keep_last)
                segments = tuple(s.segments for s in schedules.values())
                if segments in seen:
                    continue
                seen.add(segments)
                keys = _keys(interval, stride, keep_last)
                report = planned(self.profile, self.family, settings_with(self.settings, keys))
                inside = {(path, b) for path, s in schedules.items() for b in s.covered}
                spans = tuple(spans_of(self.profile, report.stacks))
                if spans in seen_spans:  # one by one, all widths are the same
                    continue
                seen_spans.add(spans)
                first = {places[span.blocks[0]] for span in spans if span.covered}
                found.append(
                    _Schedule(
                        keys,
                        tuple(place in inside for place in places),
                        tuple(place in first for place in places),
                    )
                )
        return found

    def _options(self) -> Iterator[Option]:
        """What the family can carry out of backends, operators to keep and offloading."""
        crosses = any(CROSS in kind.runs for kind in self.profile.kinds)
        kept = [kinds for kinds in KEPT if crosses or "cross-attention" not in kinds]
        for backend, keep, offload in product(
            ("torch", "unsloth", "torch-ffn", "unsloth-ffn"),
            kept,
            (False, True),
        ):
            ffn, on_cpu = backend.endswith("-ffn"), backend.startswith("unsloth")
            if ffn and keep:
                continue
            keys: dict[str, Any] = {}
            if backend != "torch":
                keys[f"{PREFIX}_backend"] = backend
            if keep:
                keys[f"{PREFIX}_keep"] = list(keep)
            if offload:
                keys[OFFLOADING] = True
            asked = settings_with(self.settings, keys)
            report = make_report(asked, self.family, self.profile.counts)
            if refused(asked, self.family, report):
                continue
            moved = OFFLOAD if offload else ""
            alone = FFN + (INPUTS if on_cpu else "") + moved
            covered = alone if ffn else keeping(keep)
            yield Option(keys, covered, PLAIN + moved, on_cpu and not ffn)


def _keys(interval: int, stride: int, keep_last: int) -> dict[str, Any]:
    keys = {}
    if interval > 1 or stride > interval:
        keys[f"{PREFIX}_interval"] = interval
    if stride > interval:
        keys[f"{PREFIX}_segment_stride"] = stride
    if keep_last:
        keys[f"{PREFIX}_keep_last"] = keep_last
    return keys


def _matrix(rows: Iterable[Sequence[bool]]) -> torch.Tensor:
    return torch.tensor([list(row) for row in rows], dtype=torch.float64)


def _simplicity(found: Found) -> tuple[float, int]:
    """Of what takes the same time, the least memory is best, then the fewest keys."""
    return found.step.peak, len(found.keys) if found.keys != {PREFIX: False} else 0
