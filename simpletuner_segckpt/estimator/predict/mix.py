"""What each bucket of a config's data sets gets within a budget, against one schedule for all."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...config.settings import ConfigSource, Settings
from ...costs.cards import DEFAULT_CARD, Card, card
from ...families.registry import FamilyRegistry
from ..profile.records import Profile
from ..workload.buckets import Bucket, parse_buckets
from ..workload.parse import Overrides
from ..workload.workload import Workload
from .plan import PlanOfBlocks, Room, plan_of_blocks, profiled, to_plan
from .usable import MARGIN

if TYPE_CHECKING:
    from .search import Found, Search


@dataclass(frozen=True)
class Single:
    """The fastest schedule that fits every bucket. seconds: of a step over the mix."""

    keys: Mapping[str, Any]
    seconds: float
    found: tuple["Found", ...]


@dataclass(frozen=True)
class MixPlan:
    """What ``segckpt plan --buckets`` prints.

    plans: for each bucket, None where nothing fits. single: None where no schedule fits all.
    """

    card: Card
    room: Room
    conditions: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    plans: tuple[PlanOfBlocks | None, ...]
    single: Single | None

    @property
    def seconds(self) -> float | None:
        """Of a step over the mix with a plan for each bucket; None where one does not fit."""
        fitting = [plan for plan in self.plans if plan]
        if len(fitting) < len(self.plans):
            return None
        return sum(b.share * p.seconds for b, p in zip(self.buckets, fitting, strict=True))


def plan_buckets(
    config: ConfigSource,
    budget: float | str,
    *,
    on: Card | None = None,
    margin: float = MARGIN,
    registry: FamilyRegistry | None = None,
    overrides: Overrides = Overrides(),
) -> MixPlan:
    """A plan for each bucket of ``config`` within a budget; as ``plan_config``.

    Every bucket counts by the steps that are of it, see ``parse_buckets``.
    """
    settings, conditions = to_plan(config)
    room = Room.of(budget, on, margin)
    known = FamilyRegistry.default() if registry is None else registry
    buckets = parse_buckets(settings, known, overrides)
    return plan_mix(buckets, settings, room, on or card(DEFAULT_CARD), conditions)


def plan_mix(
    buckets: list[Bucket],
    settings: Settings,
    room: Room,
    on: Card,
    conditions: tuple[str, ...] = (),
) -> MixPlan:
    """The same for buckets that are known. Raises ``WorkloadError``."""
    measured: list[tuple[Workload, Profile, PlanOfBlocks | None]] = []
    for bucket in buckets:
        work = bucket.read.workload
        if all(work != known for known, *_ in measured):
            found = profiled(work)
            plan = plan_of_blocks(found, work.family, settings, room, on)
            measured.append((work, found, plan))
    places = [[known for known, *_ in measured].index(b.read.workload) for b in buckets]
    shares = [0.0] * len(measured)
    for place, bucket in zip(places, buckets, strict=True):
        shares[place] += bucket.share
    return MixPlan(
        on,
        room,
        conditions,
        tuple(buckets),
        tuple(measured[place][2] for place in places),
        _single([(work, found) for work, found, _ in measured], shares, places, settings, room, on),
    )


def _single(
    measured: list[tuple[Workload, Profile]],
    shares: list[float],
    places: list[int],
    settings: Settings,
    room: Room,
    on: Card,
) -> Single | None:
    """The schedule with the least time over the mix of all that fit every bucket."""
    from .search import Search

    searches = [Search(found, work.family, settings, on) for work, found in measured]
    tables = [{_same(c.keys): c for c in search.candidates} for search in searches]
    order = sorted(
        (sum(s * table[key].seconds for s, table in zip(shares, tables, strict=True)), key)
        for key in set.intersection(*map(set, tables))
        if all(table[key].bound <= room.reach for table in tables)
    )
    largest_first = sorted(range(len(searches)), key=lambda at: -_least(searches[at]))
    for seconds, key in order:
        found: dict[int, Found] = {}
        for at in largest_first:
            found[at] = searches[at].compose(tables[at][key])
            if found[at].step.peak > room.reach:
                break
        else:
            return Single(found[0].keys, seconds, tuple(found[place] for place in places))
    return None


def _same(keys: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Keys as what they can be looked up by."""
    return tuple(sorted((key, str(value)) for key, value in keys.items()))


def _least(search: "Search") -> float:
    """A lower bound of the peak of all candidates."""
    return min(candidate.bound for candidate in search.candidates)
