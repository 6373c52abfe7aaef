"""The fastest keys that fit into a memory budget, for the model that a config trains."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticCustomError

from ...config.settings import ConfigSource, Settings, load_settings
from ...config_schema import CHECKPOINTING_KEYS, PREFIX, CheckpointingConfig, MemoryBudget
from ...costs.cards import DEFAULT_CARD, Card, card
from ...costs.records import GIB
from ...families.registry import FamilyRegistry
from ...families.schema import Family
from ...messages.errors import WorkloadError
from ...schedules.conditions import config_conditions
from ..profile.records import Profile
from ..workload.parse import Overrides, ParsedWorkload, parse_workload
from ..workload.workload import Workload
from .peak import time_of
from .usable import MARGIN, in_bytes, margin_beside, usable

if TYPE_CHECKING:
    from .search import Found
    from .within import Within


LARGE = 0.15  # a share of the peak for which it is worth saying what would cut it


FASTER = 0.98  # another step is worth mentioning when it takes this share of the time, or less


@dataclass(frozen=True)
class Room:
    """A budget, of which a predicted peak may ``reach`` so many bytes.

    key: how ``gradient_checkpointing_budget`` says it.
    """

    budget: float
    reach: float
    key: str

    @classmethod
    def of(cls, asked: float | str, on: Card | None, margin: float) -> "Room":
        """asked: bytes, or text. Raises ``WorkloadError``, also where nothing is left of it."""
        if isinstance(asked, str):
            budget, key = memory(asked, on)
            reach = usable(budget, margin_beside(key, margin))
        else:
            budget, key = int(asked), MemoryBudget(round(asked / GIB, 3), "GiB")
            reach = usable(budget, margin)
        if reach <= 0:
            raise WorkloadError(
                f"of {budget / GIB:.2f} GiB nothing is left after the margin and the CUDA context"
            )
        return cls(budget, reach, str(key))


@dataclass(frozen=True)
class PlanOfBlocks:
    """A plan that no keys but the budget can say. keys: those. seconds: of a step."""

    keys: Mapping[str, Any]
    seconds: float
    found: "Within"


@dataclass(frozen=True)
class BudgetPlan:
    """What ``segckpt plan`` prints. Bytes and seconds.

    conditions: why blocks run one by one. enabled: whether the config has checkpointing on.
    budget: of the card. usable: what of it the peak may reach. found: the fastest that fits.
    next: of what is faster, the one with the least peak. least: the least peak of all, given when
    nothing fits. none: seconds of a step that recomputes nothing. within: a plan for each block
    that takes ``FASTER`` of the time of ``found`` or less.
    """

    read: ParsedWorkload
    conditions: tuple[str, ...]
    enabled: bool
    card: Card
    budget: float
    usable: float
    none: float
    found: "Found | None"
    next: "Found | None" = None
    least: "Found | None" = None
    within: "PlanOfBlocks | None" = None


def plan_config(
    config: ConfigSource,
    budget: float | str,
    *,
    on: Card | None = None,
    margin: float = MARGIN,
    registry: FamilyRegistry | None = None,
    overrides: Overrides = Overrides(),
) -> BudgetPlan:
    """The keys with the least step time whose peak fits into ``budget`` of a card.

    budget: bytes, or text such as ``24GiB`` or ``90%`` (of ``on``). margin: share of it that stays
    free, beside the CUDA context. The search is exact over all intervals up to 8 and the whole
    stack, strides, ``keep_last``, operators to keep, backends and offloading. Raises
    ``ConfigError``, ``UnknownFamily``, ``FamilyError``, ``WorkloadError``.
    """
    from .search import Search

    settings, conditions = to_plan(config)
    room = Room.of(budget, on, margin)
    known = FamilyRegistry.default() if registry is None else registry
    read = parse_workload(settings, known, overrides)
    chosen = on or card(DEFAULT_CARD)
    measured = profiled(read.workload)
    search = Search(measured, read.workload.family, settings, chosen)
    none = next(c.seconds for c in search.candidates if c.keys == {PREFIX: False})
    found = search.fastest(room.reach)
    best = plan_of_blocks(measured, read.workload.family, settings, room, chosen)
    if best and found and best.seconds > found.seconds * FASTER:
        best = None
    return BudgetPlan(
        read=read,
        conditions=conditions,
        enabled=settings.checkpointing.enabled,
        card=chosen,
        budget=room.budget,
        usable=room.reach,
        none=none,
        found=found,
        next=search.smallest(faster_than=found.seconds * FASTER) if found else None,
        least=None if found else search.smallest(),
        within=best,
    )


def to_plan(config: ConfigSource) -> tuple[Settings, tuple[str, ...]]:
    """The settings of a config, and why blocks run one by one there.

    Raises ``ConfigError``, and ``WorkloadError`` where nothing is recomputed anyway.
    """
    settings = load_settings(config)
    conditions = config_conditions(settings.trainer)
    for condition in conditions:
        if condition.off:
            raise WorkloadError(f"there is nothing to plan, since {condition}")
    return settings, tuple(map(str, conditions))


def profiled(work: Workload) -> Profile:
    """A model that is measured. Raises ``WorkloadError``, also where it has no blocks."""
    from ..profile.profile import profile

    measured = profile(work)
    if not measured.blocks:
        raise WorkloadError(f"{work.family.title} has no blocks that could be scheduled")
    return measured


def plan_of_blocks(
    profile: Profile,
    family: Family,
    settings: Settings,
    room: Room,
    on: Card,
) -> PlanOfBlocks | None:
    """The fastest plan for each block within a budget, None where nothing fits."""
    from .modes import planned, refused, settings_with
    from .within import within

    best: PlanOfBlocks | None = None
    for backend in ({}, {f"{PREFIX}_backend": "unsloth"}):
        keys = {f"{PREFIX}_budget": room.key, **backend}
        asked = settings_with(settings, keys)
        report = planned(profile, family, asked)
        if report.budget is None or refused(asked, family, report):
            continue
        found = within(profile, report, room.reach, on)
        made = PlanOfBlocks(keys, time_of(found.step, on).total, found)
        if found.fits and (best is None or made.seconds < best.seconds):
            best = made
    return best


def keys_to_write(keys: Mapping[str, Any], enabled: bool = True) -> dict[str, Any]:
    """``keys``, and None for each other key of ours, which is to leave the file.

    enabled: whether the file has checkpointing on, so that its switch can stay as it is.
    """
    kept = {f"{PREFIX}_offload_pin_memory_max_buckets", f"{PREFIX}_offload_prefetch"}
    config = CheckpointingConfig.model_validate(dict(keys))
    offloads = config.offload_attention or config.inputs_on_cpu
    return {
        **({} if enabled else {PREFIX: True}),
        **{key: None for key in CHECKPOINTING_KEYS[1:] if not (offloads and key in kept)},
        **keys,
    }


def advice(plan: BudgetPlan) -> list[str]:
    """What dominates the least peak, and what in the trainer's config would cut it."""
    assert plan.least is not None
    step, work = plan.least.step, plan.read.workload
    parts = {
        "weights": step.weights,
        "gradients": step.gradients,
        "optimizer state": step.states,
        "activations that are kept": step.kept,
        "the working set of a block": step.working,
    }
    missing = step.peak - plan.usable
    lines = [f"missing are {missing / GIB:.2f} GiB"]
    for part in sorted(parts, key=lambda name: -parts[name]):
        if parts[part] >= LARGE * step.peak:
            lines.append(f"{part}: {parts[part] / GIB:.2f} GiB; {_lever(part, work)}")
    return lines


def _lever(part: str, work: Workload) -> str:
    """What in the trainer's config would cut a part of the peak."""
    if part == "weights":
        if work.adapter == "full":
            return "they are all trained, so they stay"
        levers = [] if work.base_bytes <= 1 else ["base_model_precision int8-quanto halves them"]
        levers += [] if work.weights_on_cpu else ["ramtorch keeps them in CPU memory, if slowly"]
    elif part in ("gradients", "optimizer state"):
        levers = ["an 8-bit optimizer has smaller states"]
        if work.adapter == "full":
            levers.append("model_type lora trains a small share of the weights")
        else:
            levers.append("a smaller lora_rank has less of both")
    else:
        levers = ["a lower resolution" + (", or fewer frames," if work.frames > 1 else "")]
        levers[0] += " cuts it in proportion"
        if work.batch > 1:
            levers.append("so does a smaller train_batch_size, with gradient_accumulation_steps")
        if work.dropout and work.adapter == "lora":
            levers.append("lora_dropout 0 saves its masks and inputs")
    return "; ".join(levers) or "the trainer's config has nothing more to offer"


def memory(text: str, on: Card | None = None) -> tuple[int, MemoryBudget]:
    """Bytes of what ``gradient_checkpointing_budget`` would say, of the card ``on`` where of one.

    Raises ``WorkloadError``.
    """
    try:
        budget = MemoryBudget.parse(text)
    except PydanticCustomError as error:
        raise WorkloadError(f"the budget {error.message()}") from None
    if budget is None:
        raise WorkloadError(f'the budget is "{text}"; write an amount of memory, as 24GiB')
    found = in_bytes(budget, on)
    if found is None:
        raise WorkloadError(
            f"the budget is {budget} and no card is named; name one, or write an amount, as 24GiB"
        )
    return found, budget
