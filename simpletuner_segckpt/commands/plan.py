"""``segckpt plan``: the fastest keys that fit into a memory budget, for the real model.

Exit codes: 0 keys found, 1 nothing fits or errors in the config, 2 could not run.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..config.edit import write_keys
from ..config_schema import OWN_KEYS
from ..costs.cards import card, cards
from ..costs.records import GIB
from ..estimator.predict.mix import plan_buckets
from ..estimator.predict.peak import time_of
from ..estimator.predict.plan import BudgetPlan, PlanOfBlocks, advice, keys_to_write, plan_config
from ..estimator.predict.usable import MARGIN
from ..estimator.predict.within import MARKS, drawn
from ..estimator.workload.parse import describe
from ..families.registry import FamilyRegistry
from ..messages.errors import ConfigError, FamilyError, UnknownFamily, WorkloadError
from ..messages.findings import printable
from .mix import print_mix, print_mix_json
from .output import command, refuse
from .printing import print_findings, room_line
from .workload_options import add_workload_options, overrides_of

if TYPE_CHECKING:
    from ..estimator.predict.peak import Composed
    from ..estimator.predict.search import Found


def print_text(plan: BudgetPlan) -> None:
    print(describe(plan.read))
    print(room_line(plan.budget, plan.usable))
    if plan.found:
        print(_line("fastest that fits", plan.found, plan.none))
        print(json.dumps(dict(plan.found.keys), indent=4))
        if plan.next:
            print(_line("faster, with more memory", plan.next, plan.none))
            print(f"  {json.dumps(dict(plan.next.keys))}")
        else:
            print("nothing that a schedule can say is faster")
        if plan.within:
            saved = 1 - plan.within.seconds / plan.found.seconds
            print(f"a plan for each block takes {100 * saved:.1f}% less time; the way to have it:")
            _print_plan(plan.within, plan.none)
    elif plan.least:
        print(f"nothing fits; {_line('the least that the keys can reach', plan.least, plan.none)}")
        print(f"  {json.dumps(dict(plan.least.keys))}")
        if plan.within:
            print("but a plan for each block fits; the way to have it:")
            _print_plan(plan.within, plan.none)
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


def _print_plan(plan: PlanOfBlocks, none: float) -> None:
    print(json.dumps(dict(plan.keys), indent=4))
    print(f"  {_figures(plan.found.step, plan.seconds, none)}")
    for path, blocks in drawn(plan.found.report).items():
        print(f"  {path}: {blocks}")
    print(f"  {MARKS}")


def _line(what: str, found: "Found", none: float) -> str:
    return f"{what}: {_figures(found.step, found.seconds, none)}"


def _figures(step: "Composed", seconds: float, none: float) -> str:
    return (
        f"peak {step.peak / GIB:.2f} GiB, {seconds / none:.2f} times the step without recompute, "
        f"{100 * step.recomputed_share:.0f}% of the forward recomputed"
    )


def print_json(plan: BudgetPlan) -> None:
    """Bytes and seconds; null stands for what there is none of."""

    def figures(found: "Found | PlanOfBlocks", step: "Composed") -> dict[str, Any]:
        return {
            "keys": dict(found.keys),
            "peak": step.peak,
            "seconds": found.seconds,
            "against_none": found.seconds / plan.none,
        }

    def entry(found: "Found | None") -> Any:
        return figures(found, found.step) if found else None

    within: dict[str, Any] | None = None
    if plan.within:
        made = plan.within.found
        within = figures(plan.within, made.step) | {
            "recomputed_share": made.step.recomputed_share,
            "plan": drawn(made.report),
        }
    document = {
        "workload": describe(plan.read),
        "card": plan.card.title,
        "budget": plan.budget,
        "usable": plan.usable,
        "found": entry(plan.found),
        "next": entry(plan.next),
        "least": entry(plan.least),
        "within": within,
        "advice": advice(plan) if plan.least else [],
        "assumed": plan.read.assumed,
        "not_modelled": plan.read.ignored,
    }
    print(json.dumps(document, indent=2))


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
        "--budget", metavar="24GiB", help="memory to use; default: all that --gpu has"
    )
    made.add_argument(
        "--margin",
        type=_share,
        default=MARGIN,
        metavar="PERCENT",
        help="of the budget to leave free, beside half a GiB for the CUDA context (default 5)",
    )
    made.add_argument(
        "--buckets",
        action="store_true",
        help="what every bucket of the config's data sets would get within the budget",
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
        if options.write and options.buckets:
            raise WorkloadError("--write is for the keys of one workload; leave out --buckets")
        budget = on.memory * GIB if on and options.budget is None else options.budget
        asked: dict[str, Any] = {
            "on": on,
            "margin": options.margin,
            "registry": FamilyRegistry.default(options.families),
            "overrides": overrides_of(options),
        }
        if options.buckets:
            mix = plan_buckets(options.config, budget, **asked)
            (print_mix_json if options.output_format == "json" else print_mix)(mix)
            return 0 if all(mix.plans) else 1
        plan = plan_config(options.config, budget, **asked)
        backup = None
        if options.write and plan.found:
            backup = write_keys(options.config, keys_to_write(plan.found.keys, plan.enabled))
    except ConfigError as error:
        return print_findings(options.config, error, options.output_format)
    except (UnknownFamily, FamilyError, WorkloadError) as error:
        return refuse("plan", str(error))
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
