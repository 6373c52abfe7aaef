"""Peak memory and step time of every mode of the model that a config trains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...config.settings import ConfigSource, load_settings
from ...costs.cards import Card
from ...costs.step_time import Time
from ...families.registry import FamilyRegistry
from ..profile.records import Profile
from ..workload.parse import Overrides, ParsedWorkload, parse_workload
from .modes import MODES, OWN, ModePrediction, keys_of, predict_mode
from .peak import time_of


@dataclass(frozen=True)
class ModeRow:
    """One mode. ``time`` and ``against_none`` are None without a card, ``traced`` without a trace.

    against_none: step time as a multiple of that of ``none``. traced: bytes at the peak of a whole
    step that was run without memory.
    """

    estimate: ModePrediction
    time: Time | None = None
    against_none: float | None = None
    traced: int | None = None


@dataclass(frozen=True)
class Estimates:
    """What ``segckpt estimate`` prints."""

    read: ParsedWorkload
    profile: Profile
    card: Card | None
    rows: list[ModeRow] = field(default_factory=list)


def estimate_config(
    config: ConfigSource,
    *,
    registry: FamilyRegistry | None = None,
    overrides: Overrides = Overrides(),
    modes: Sequence[str] = tuple(MODES),
    on: Card | None = None,
    traced: Sequence[str] = (),
) -> Estimates:
    """Every mode of the model that ``config`` trains; the config's own comes first.

    ``config`` is what ``apply`` takes. ``traced`` names modes of which a whole step is run as the
    check. Meanwhile Python's garbage collector is off for the whole process, and an estimate in
    another thread waits (see ``without_memory``).

    Raises ``ConfigError``, ``UnknownFamily``, ``FamilyError`` and ``WorkloadError``.
    """
    from ..profile.profile import profile

    settings = load_settings(config)
    known = FamilyRegistry.default() if registry is None else registry
    read = parse_workload(settings, known, overrides)
    found = Estimates(read, profile(read.workload), on)
    family = read.workload.family

    plain = predict_mode(found.profile, family, settings, "none", keys_of("none")).step
    none = time_of(plain, on) if on and plain else None

    def row(name: str, keys: Mapping[str, Any]) -> ModeRow:
        made = predict_mode(found.profile, family, settings, name, keys, on)
        if made.step is None:
            return ModeRow(made)
        time = time_of(made.step, on) if on else None
        against_none = time.total / none.total if time and none else None
        if name not in traced:
            return ModeRow(made, time, against_none)
        if made.plan:  # which no keys can say for one step
            said = "; ".join(filter(None, (made.remark, "a plan within a budget is not traced")))
            return ModeRow(replace(made, remark=said), time, against_none)
        return ModeRow(made, time, against_none, _traced(read, keys))

    own = settings.checkpointing.model_dump(by_alias=True, exclude_defaults=True)
    found.rows.append(row(OWN, own))
    asked = dict.fromkeys([*modes, *(name for name in traced if name != OWN)])
    found.rows.extend(row(name, keys_of(name)) for name in asked)
    return found


def _traced(read: ParsedWorkload, keys: Mapping[str, Any]) -> int:
    from ..profile.trace import trace

    return trace(read.workload, keys)
