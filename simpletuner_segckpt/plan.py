"""``segckpt plan``: the fastest keys that fit into a memory budget, for the real model.

Exit codes: 0 keys found, 1 nothing fits or errors in the config, 2 could not run.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .conditions import config_conditions
from .config_schema import CHECKPOINTING_KEYS, OWN_KEYS, PREFIX, CheckpointingConfig
from .configedit import write_keys
from .errors import ConfigError, FamilyError, UnknownFamily, WorkloadError
from .estimate import (
    MARGIN,
    add_workload_options,
    describe,
    overrides_of,
    usable,
)
from .estimator.cards import Card, card, cards
from .estimator.reading import Overrides, Read, read_workload
from .estimator.records import GIB
from .estimator.timing import time_of
from .estimator.workload import Workload
from .output import command, refuse
from .registry import FamilyRegistry
from .settings import ConfigSource, load_settings
from .validate import print_findings, printable

if TYPE_CHECKING:  # it imports torch
    from .estimator.searching import Found

LARGE = 0.15  # a share of the peak for which it is worth saying what would cut it
FASTER = 0.98  # another step is worth mentioning when it takes this share of the time, or less
DEFAULT_CARD = "h100"  # whose ratio of FLOPs to bandwidth orders the steps when none is named


@dataclass(frozen=True)
class Plan:
    """What ``segckpt plan`` prints. Bytes and seconds.

    conditions: why blocks run one by one. enabled: whether the config has checkpointing on.
    budget: of the card. usable: what of it the peak may reach. found: the fastest that fits.
    next: of what is faster, the one with the least peak. least: the least peak of all, given when
    nothing fits. none: seconds of a step that recomputes nothing.
    """

    read: Read
    conditions: tuple[str, ...]
    enabled: bool
    card: Card
    budget: float
    usable: float
    none: float
    found: "Found | None"
    next: "Found | None" = None
    least: "Found | None" = None


def plan_config(
    config: ConfigSource,
    budget: float | str,
    *,
    on: Card | None = None,
    margin: float = MARGIN,
    registry: FamilyRegistry | None = None,
    overrides: Overrides = Overrides(),
) -> Plan:
    """The keys with the least step time whose peak fits into ``budget`` of a card.

    budget: bytes, or text such as ``24GiB``. margin: share of it that stays free, beside the CUDA
    context. The search is exact over all intervals up to 8 and the whole stack, strides,
    ``keep_last``, operators to keep, backends and offloading. Raises ``ConfigError``,
    ``UnknownFamily``, ``FamilyError``, ``WorkloadError``.
    """
    from .estimator.profiling import profile
    from .estimator.searching import Search

    settings = load_settings(config)
    conditions = config_conditions(settings.trainer)
    for condition in conditions:
        if condition.off:
            raise WorkloadError(f"there is nothing to plan, since {condition}")
    budget = memory(budget) if isinstance(budget, str) else budget
    reach = usable(budget, margin)
    if reach <= 0:
        raise WorkloadError(
            f"of {budget / GIB:.2f} GiB nothing is left after the margin and the CUDA context"
        )
    read = read_workload(settings, registry or FamilyRegistry.default(), overrides)
    chosen = on or card(DEFAULT_CARD)
    measured = profile(read.workload)
    if not measured.blocks:
        raise WorkloadError(f"{read.workload.family.title} has no blocks that could be scheduled")
    search = Search(measured, read.workload.family, settings, chosen)
    none = next(c.seconds for c in search.candidates if c.keys == {PREFIX: False})
    found = search.fastest(reach)
    return Plan(
        read=read,
        conditions=tuple(map(str, conditions)),
        enabled=settings.checkpointing.enabled,
        card=chosen,
        budget=budget,
        usable=reach,
        none=none,
        found=found,
        next=search.smallest(faster_than=found.seconds * FASTER) if found else None,
        least=None if found else search.smallest(),
    )


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


def print_text(plan: Plan) -> None:
    print(describe(plan.read))
    print(
        f"budget {plan.budget / GIB:.2f} GiB, of which the peak may reach {plan.usable / GIB:.2f} "
        "(the rest is margin and CUDA context)"
    )
    if plan.found:
        print(_line("fastest that fits", plan.found, plan.none))
        print(json.dumps(dict(plan.found.keys), indent=4))
        if plan.next:
            print(_line("faster, with more memory", plan.next, plan.none))
            print(f"  {json.dumps(dict(plan.next.keys))}")
        else:
            print("nothing that the keys can say is faster")
    elif plan.least:
        print(f"nothing fits; {_line('the least that the keys can reach', plan.least, plan.none)}")
        print(f"  {json.dumps(dict(plan.least.keys))}")
        for line in advice(plan):
            print(f"  {line}")
    for condition in plan.conditions:
        print(printable(f"note: {condition}"))
    for line in plan.read.assumed:
        print(printable(f"note: assumed: {line}"))
    for line in plan.read.ignored:
        print(printable(f"note: not modelled: {line}"))
    print(f"note: times are predictions for {plan.card.title}, not measurements")
    if plan.found and time_of(plan.found.step, plan.card).launch_bound:
        print(
            "note: launching the kernels takes longer there than running them, so the order of "
            "times comes from the number of kernels, not from FLOPs"
        )


def _line(what: str, found: "Found", none: float) -> str:
    step = found.step
    return (
        f"{what}: peak {step.peak / GIB:.2f} GiB, {found.seconds / none:.2f} times the step "
        f"without recompute, {100 * step.recomputed_share:.0f}% of the forward recomputed"
    )


def advice(plan: Plan) -> list[str]:
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


def print_json(plan: Plan) -> None:
    """Bytes and seconds; ``found``, ``next`` and ``least`` are null where there is none."""

    def entry(found: "Found | None") -> Any:
        if found is None:
            return None
        return {
            "keys": dict(found.keys),
            "peak": found.step.peak,
            "seconds": found.seconds,
            "against_none": found.seconds / plan.none,
        }

    document = {
        "workload": describe(plan.read),
        "card": plan.card.title,
        "budget": plan.budget,
        "usable": plan.usable,
        "found": entry(plan.found),
        "next": entry(plan.next),
        "least": entry(plan.least),
        "advice": advice(plan) if plan.least else [],
        "assumed": plan.read.assumed,
        "not_modelled": plan.read.ignored,
    }
    print(json.dumps(document, indent=2))


def memory(text: str) -> float:
    """Bytes of ``24GiB``, ``24GB`` (powers of 1000) or ``24`` (GiB)."""
    units = {"": GIB, "g": GIB, "gib": GIB, "gb": 10**9, "mib": 1 << 20, "mb": 10**6}
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", text.lower())
    if not found or found[2] not in units or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory; write 24GiB")
    return float(found[1]) * units[found[2]]


def _share(text: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%?\s*", text)
    if not found or float(found[1]) >= 90:
        raise argparse.ArgumentTypeError(f"{text!r} is no margin; write percent, as 5")
    return float(found[1]) / 100


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="segckpt plan",
        description="Find the gradient_checkpointing keys with the least step time whose peak "
        "memory fits a budget.",
        epilog="exit codes: 0 keys found, 1 nothing fits or errors in the config, 2 could not run",
    )
    add_workload_options(made)
    made.add_argument(
        "--budget", type=memory, metavar="24GiB", help="memory of the card; --gpu knows its own"
    )
    made.add_argument(
        "--margin",
        type=_share,
        default=MARGIN,
        metavar="PERCENT",
        help="of the budget to leave free, beside half a GiB for the CUDA context (default 5)",
    )
    made.add_argument(
        "--write",
        action="store_true",
        help="put the keys into the config file; the rest of it stays as it is, byte for byte",
    )
    made.add_argument("--output-format", choices=("text", "json"), default="text")
    return made


@command("plan")
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        on = card(options.gpu) if options.gpu else None
        if options.budget is None and on is None:
            raise WorkloadError(f"pass --budget, as 24GiB, or --gpu, one of {', '.join(cards())}")
        if options.write and options.config == "-":
            raise WorkloadError("--write needs a file, not standard input")
        plan = plan_config(
            options.config,
            options.budget or (on.memory * GIB if on else 0),
            on=on,
            margin=options.margin,
            registry=FamilyRegistry.default(options.families),
            overrides=overrides_of(options),
        )
        backup = None
        if options.write and plan.found:
            backup = write_keys(options.config, keys_to_write(plan.found.keys, plan.enabled))
    except ConfigError as error:
        return print_findings(options.config, error, options.output_format)
    except (UnknownFamily, FamilyError, WorkloadError) as error:
        return refuse("plan", printable(str(error)))
    (print_json if options.output_format == "json" else print_text)(plan)
    if options.write and plan.found:
        said = (
            f"written to {options.config}, which was saved as {backup}"
            if backup
            else (f"{options.config} has these keys already")
        )
        print(said, file=sys.stderr)
        if own := [key for key in OWN_KEYS if key in plan.found.keys]:
            message = (
                "not known to SimpleTuner, whose own run refuses a file with them; for apply()"
            )
            print(f"{', '.join(own)}: {message}", file=sys.stderr)
    return 0 if plan.found else 1


if __name__ == "__main__":
    sys.exit(main())
