"""What ``segckpt plan --buckets`` prints: a line for each bucket, then the mix of them."""

import json
from typing import Any

from ..costs.records import GIB
from ..estimator.predict.mix import MixPlan
from ..estimator.predict.within import MARKS, counts, drawn
from ..estimator.workload.parse import describe
from ..messages.findings import printable
from .printing import room_line

WIDTH = 120  # columns that the table needs, also where no terminal says how many there are


def print_mix(mix: MixPlan) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=WIDTH, highlight=False, emoji=False, markup=False, soft_wrap=True)
    console.print(printable(describe(mix.buckets[0].read)).partition(":")[0])
    console.print(room_line(mix.room.budget, mix.room.reach))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("data set", "samples", "blocks"):
        table.add_column(name, no_wrap=True)
    for name in ("share", "peak GiB", "step s", "recomputed", "single s"):
        table.add_column(name, justify="right", no_wrap=True)
    for at, (bucket, plan) in enumerate(zip(mix.buckets, mix.plans, strict=True)):
        cells = [printable(bucket.name), bucket.size]
        if plan is None:
            cells += ["nothing fits", f"{bucket.share:.0%}", "", "", ""]
        else:
            step = plan.found.step
            cells += [counts(plan.found.schedules), f"{bucket.share:.0%}", f"{step.peak / GIB:.2f}"]
            cells += [f"{plan.seconds:.3f}", f"{step.recomputed_share:.0%}"]
        cells.append(f"{mix.single.found[at].seconds:.3f}" if mix.single else "-")
        table.add_row(*cells)
    console.print(table)
    console.print(f"[]: {MARKS}")
    for line in (*_mixed(mix), *_notes(mix)):
        console.print(printable(line))


def _mixed(mix: MixPlan) -> list[str]:
    """The step time over the mix, and the keys to have it."""
    single = mix.single
    if mix.seconds is None:
        return ["over the mix: not every bucket fits within the budget"]
    key = json.dumps({"gradient_checkpointing_budget": mix.room.key})
    if single is None:
        return [f"over the mix: {mix.seconds:.3f} s with {key}; no single schedule fits every one"]
    more = f"{100 * (single.seconds / mix.seconds - 1):+.1f}".replace("-0.0", "+0.0")
    return [
        f"over the mix: {mix.seconds:.3f} s with {key}",
        f"the best single schedule that fits every bucket: {single.seconds:.3f} s ({more}%)",
        f"  {json.dumps(dict(single.keys))}",
    ]


def _notes(mix: MixPlan) -> list[str]:
    assumed = dict.fromkeys(line for bucket in mix.buckets for line in bucket.read.assumed)
    ignored = dict.fromkeys(line for bucket in mix.buckets for line in bucket.read.ignored)
    return [
        *(f"note: {condition}" for condition in mix.conditions),
        *(f"note: assumed: {line}" for line in assumed),
        *(f"note: not modelled: {line}" for line in ignored),
        f"note: times are predictions for {mix.card.title}, not measurements; a bucket's share is "
        "what probability and repeats of its data set say, since sizes of data sets are not known",
    ]


def print_mix_json(mix: MixPlan) -> None:
    """Bytes and seconds; null stands for what there is none of."""
    buckets: list[dict[str, Any]] = []
    for at, (bucket, plan) in enumerate(zip(mix.buckets, mix.plans, strict=True)):
        work = bucket.read.workload
        step = plan.found.step if plan else None
        buckets.append(
            {
                "data_set": bucket.name,
                "share": bucket.share,
                "width": work.width,
                "height": work.height,
                "frames": work.frames,
                "keys": dict(plan.keys) if plan else None,
                "plan": drawn(plan.found.report) if plan else None,
                "peak": step.peak if step else None,
                "seconds": plan.seconds if plan else None,
                "recomputed_share": step.recomputed_share if step else None,
                "single_seconds": mix.single.found[at].seconds if mix.single else None,
                "assumed": bucket.read.assumed,
                "not_modelled": bucket.read.ignored,
            }
        )
    single = mix.single
    document = {
        "card": mix.card.title,
        "budget": mix.room.budget,
        "usable": mix.room.reach,
        "buckets": buckets,
        "seconds": mix.seconds,
        "single": {"keys": dict(single.keys), "seconds": single.seconds} if single else None,
    }
    print(json.dumps(document, indent=2))
