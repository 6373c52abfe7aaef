"""Plans within a memory budget, predicted: against the best there are, and over a mix of buckets.

Prints `benchmarks/budget.md`. Nothing is measured, and no seconds of this machine are in it. Needs
scipy, from the extra `sweep`.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from simpletuner_segckpt.config.settings import Settings, load_settings
from simpletuner_segckpt.costs.cards import Card, card
from simpletuner_segckpt.costs.choose import fastest
from simpletuner_segckpt.costs.records import GIB
from simpletuner_segckpt.costs.step import StepCosts
from simpletuner_segckpt.estimator.predict.mix import MixPlan, plan_mix
from simpletuner_segckpt.estimator.predict.modes import planned
from simpletuner_segckpt.estimator.predict.peak import Composer, spans_of, time_of
from simpletuner_segckpt.estimator.predict.plan import Room
from simpletuner_segckpt.estimator.predict.usable import MARGIN
from simpletuner_segckpt.estimator.predict.within import costs_of, counts, with_ways
from simpletuner_segckpt.estimator.profile.profile import profile
from simpletuner_segckpt.estimator.profile.walk import PlannedSpan
from simpletuner_segckpt.estimator.workload.buckets import Bucket
from simpletuner_segckpt.estimator.workload.parse import ParsedWorkload
from simpletuner_segckpt.estimator.workload.workload import Workload, training_of
from simpletuner_segckpt.families.registry import FamilyRegistry

REGISTRY = FamilyRegistry.shipped()
BUDGETS = 10
CARD = "rtx4090"
SOLVING = 60  # seconds for a solver, after which its bound is taken
KEY = "gradient_checkpointing_budget"

# Name -> family, flavour, and what differs from its usual sample; few blocks at real width, then
# two whole models.
FEW = {"num_layers": 4, "num_single_layers": 4}
MODELS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "Wan 1.3B, 5 blocks": (
        "wan",
        "1.3b",
        {"width": 480, "height": 480, "config": {"num_layers": 5}},
    ),
    "Flux, 4 + 4 blocks, batch 4": ("flux", "dev", {"batch": 4, "config": FEW}),
    "SD3, 4 blocks": ("sd3", None, {"config": {"num_layers": 4}}),
    "Z-Image, 4 + 4 blocks": ("z_image", None, {"config": {"n_layers": 4}}),
    "LTX-Video, 4 blocks": ("ltxvideo", None, {"config": {"num_layers": 4}}),
    "Wan 1.3B, 30 blocks": ("wan", "1.3b", {"width": 832, "height": 480}),
    "Flux.1 dev, 19 + 38 blocks": ("flux", "dev", {}),
}

# Of the mix: name, width, height, frames.
MIX = [
    ("480p, 49 frames", 832, 480, 49),
    ("480p, 81 frames", 832, 480, 81),
    ("720p, 49 frames", 1280, 720, 49),
    ("720p, 81 frames", 1280, 720, 81),
    ("images, 720p", 1280, 720, 1),
]


def workload(name: str, flavour: str | None, **changes: Any) -> Workload:
    """A published size, LoRA of rank 16 in bf16."""
    family = REGISTRY.find(name, flavour)
    training = training_of(family)
    width, height = training.resolution
    made = Workload(
        family,
        family.classes[0],
        family.config_of_size(family.size(flavour) or ""),
        width=width,
        height=height,
        frames=training.frames,
        text=training.text,
        targets=training.targets,
    )
    return replace(made, **changes | {"config": {**made.config, **changes.get("config", {})}})


# -- against a solver --------------------------------------------------------------------------


@dataclass(frozen=True)
class Excess:
    """Of one model, over the budgets: how much the choice takes more than the optimum.

    step: of the whole step, at worst. least: of that within the least of the budgets. recompute: of
    what is more than without recompute, at worst. unproven: budgets for which the solver only had a
    bound, which was then taken for the optimum. All but ``least`` leave the least budget out.
    """

    blocks: int
    ways: int
    least: float
    step: float
    recompute: float
    unproven: int


def least_seconds(step: StepCosts, budget: float) -> tuple[float, bool]:
    """The fewest seconds more than plain of all assignments within ``budget`` bytes.

    And whether that is proven; otherwise it is a lower bound.
    """
    ways = [(at, way) for at, block in enumerate(step.blocks) for way in block.ways]
    place = np.array([at for at, _ in ways])
    kept = np.array([way.kept for _, way in ways]) / GIB
    rows, most = [], []
    for at, limits in enumerate(step.limits):
        here = place == at
        forward = np.array([way.forward_peak for _, way in ways]) / GIB
        backward = np.array([way.backward_peak for _, way in ways]) / GIB
        rows.append(kept * (place < at) + forward * here)
        most.append((budget - limits.forward) / GIB)
        rows.append(kept * (place <= at) + backward * here)
        most.append((budget - limits.backward) / GIB)
    rows.append(kept)
    most.append((budget - step.rest - step.head_peak) / GIB)
    one_each = np.array([place == at for at in range(len(step.blocks))], dtype=float)
    seconds = np.array([way.seconds for _, way in ways])
    unit = seconds.max() or 1.0
    found = milp(
        seconds / unit,
        constraints=[
            LinearConstraint(np.array(rows), -np.inf, np.array(most)),
            LinearConstraint(one_each, 1, 1),
        ],
        integrality=np.ones(len(ways)),
        bounds=Bounds(0, 1),
        options={"time_limit": SOLVING, "mip_rel_gap": 1e-4},
    )
    if found.status == 0:
        return found.fun * unit, True
    return max(0.0, found.mip_dual_bound or 0.0) * unit, False


def against_solver(work: Workload, on: Card) -> Excess:
    found = profile(work)
    report = planned(found, work.family, load_settings({KEY: "22GiB"}))
    costs = costs_of(found, report, on)
    plain = [min(block.ways, key=lambda way: way.seconds) for block in costs.blocks]
    bare = Composer(found)(spans_of(found, with_ways(report, found, plain).stacks))
    whole = time_of(bare, on).card
    low, high = costs.peak(costs.all_recomputed), costs.peak(plain)
    of_step, of_recompute = [], []
    unproven = 0
    for tenth in range(BUDGETS):
        budget = low + (high - low) * tenth // BUDGETS
        chosen = fastest(costs, budget)
        least, proven = least_seconds(costs, budget)
        assert chosen.fits
        unproven += not proven
        more = chosen.seconds - least
        of_step.append(more / (whole + least))
        of_recompute.append(more / least)
    ways = max(len(block.ways) for block in costs.blocks)
    return Excess(
        len(costs.blocks), ways, of_step[0], max(of_step[1:]), max(of_recompute[1:]), unproven
    )


def solver_table(on: Card) -> Iterator[str]:
    yield "| model | blocks | ways | step | step, least budget | recompute | not proven |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, (family, flavour, changes) in MODELS.items():
        found = against_solver(workload(family, flavour, **changes), on)
        yield (
            f"| {name} | {found.blocks} | {found.ways} | +{100 * found.step:.2f}% | "
            f"+{100 * found.least:.2f}% | +{100 * found.recompute:.2f}% | {found.unproven} |"
        )


# -- over a mix --------------------------------------------------------------------------------


def mixed(budget: float, settings: Settings, on: Card) -> MixPlan:
    buckets = []
    for name, width, height, frames in MIX:
        work = workload("wan", "1.3b", width=width, height=height, frames=frames)
        buckets.append(Bucket(name, 1 / len(MIX), ParsedWorkload(work)))
    return plan_mix(buckets, settings, Room.of(budget * GIB, on, MARGIN), on)


def bare_seconds(work: Workload, on: Card) -> float:
    """Seconds of a step that recomputes nothing, whatever it needs."""
    found = profile(work)
    spans = [PlannedSpan((block,)) for block in range(len(found.blocks))]
    return time_of(Composer(found)(spans), on).total


def mix_lines(budget: float, on: Card) -> Iterator[str]:
    mix = mixed(budget, load_settings({}), on)
    single = mix.single
    assert single is not None
    assert mix.seconds is not None
    yield "| bucket | blocks | peak GiB | step, s | single schedule, s | nothing recomputed, s |"
    yield "| --- | --- | --- | --- | --- | --- |"
    of_each, bare_of_mix = [], 0.0
    for bucket, plan, found in zip(mix.buckets, mix.plans, single.found, strict=True):
        assert plan is not None
        bare = bare_seconds(bucket.read.workload, on)
        bare_of_mix += bucket.share * bare
        of_each.append(1 - plan.seconds / found.seconds)
        yield (
            f"| {bucket.name} | {counts(plan.found.schedules)} | "
            f"{plan.found.step.peak / GIB:.2f} | {plan.seconds:.3f} | {found.seconds:.3f} | "
            f"{bare:.3f} |"
        )
    yield f"| the mix | | | {mix.seconds:.3f} | {single.seconds:.3f} | {bare_of_mix:.3f} |"
    yield ""
    keys = {key.removeprefix("gradient_checkpointing_"): v for key, v in single.keys.items()}
    largest = max(zip(mix.buckets, single.found, strict=True), key=lambda pair: pair[1].seconds)
    share = largest[0].share * largest[1].seconds / single.seconds
    yield (
        f"**{1 - mix.seconds / single.seconds:.1%} less** than the single schedule, `{keys}`;\n"
        f"{sum(of_each) / len(of_each):.1%} on average over the buckets. "
        f"Recomputing nothing at all would be {1 - bare_of_mix / single.seconds:.1%} less.\n"
        f"{share:.0%} of the time is that of the largest bucket."
    )


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--budgets", nargs="+", type=float, default=[24, 20, 16, 48], metavar="GIB")
    options = made.parse_args()
    on = card(CARD)
    print(HEAD.format(card=on.title, budgets=BUDGETS))
    print("\n".join(solver_table(on)))
    print(MIX_HEAD.format(margin=f"{MARGIN:.0%}"))
    for budget in options.budgets:
        print(f"\n### {budget:g} GiB\n")
        print("\n".join(mix_lines(budget, on)))
    print(MIX_END)


HEAD = """\
# Plans within a memory budget

Printed by `python benchmarks/budget.py`. All of it is predicted, for an {card}: bytes and
seconds are those of `segckpt plan`; [docs/estimator.md](../docs/estimator.md) says how far off
they are.

## Against the best assignment there is

What is chosen (`costs/choose.py`) against an exact solver (`scipy.optimize.milp`) over the same
sums over blocks, at {budgets} budgets for each model: from the peak with everything recomputed up
to a tenth below that with nothing recomputed. *Ways* are those of a block; *step* is by how much
the whole step takes longer than the optimum, at worst, and *recompute* the same of what recomputing
adds. Target: 5% of the step.

The least budget stands apart: it is the peak with everything recomputed to the byte. Other plans
that need just as much are not found there, since amounts are rounded up to a grid, for each block
by up to a sixteen-thousandth of what all blocks can keep.
"""

MIX_HEAD = """
## Over a mix of buckets

Wan 1.3B, LoRA of rank 16 in bf16, five buckets with as many steps each. {margin} of the budget and
half a GiB for the CUDA context stay free. The single schedule is the fastest of all that `segckpt
plan` searches and that fit every bucket. Blocks that are recomputed are in brackets, with what they
keep: `a` attention, `c` cross-attention, `f` feed-forward. Target: 15% less at 24 GiB."""

MIX_END = """
Why it is not more at 24 GiB: the longest steps are those of the largest bucket, for which a single
schedule is chosen anyway. That keeps attention, which is most of the work at such lengths, so there
is little left to save: less than the target even if nothing was recomputed. Small buckets gain
most, and count least. Where attention of the largest bucket does not fit whole, as within 20 GiB,
a plan for each block can keep it in most blocks, and the schedules in none."""


if __name__ == "__main__":
    main()
