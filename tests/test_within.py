"""Plans within a budget: sums over blocks against whole steps gone through, and what is chosen."""

import random

import pytest
from workloads import workload

from simpletuner_segckpt.config.settings import load_settings
from simpletuner_segckpt.costs.cards import card
from simpletuner_segckpt.costs.step import StepCosts
from simpletuner_segckpt.costs.treatments import COVERED, PLAIN
from simpletuner_segckpt.estimator.predict.modes import planned, predict_mode
from simpletuner_segckpt.estimator.predict.peak import Composer, spans_of, time_of
from simpletuner_segckpt.estimator.predict.usable import usable
from simpletuner_segckpt.estimator.predict.within import costs_of, counts, with_ways, within
from simpletuner_segckpt.estimator.profile.profile import profile
from simpletuner_segckpt.schedules.schedule import Schedule

GIB = 1 << 30
H100 = card("h100")
BUDGET = "gradient_checkpointing_budget"
TORCH = {BUDGET: "22GiB"}
UNSLOTH = TORCH | {"gradient_checkpointing_backend": "unsloth"}

# Real widths and few blocks; of SDXL's kinds of blocks, fewer: UNets hand values on past many.
WAN = {"width": 480, "height": 480, "config": {"num_layers": 5}}
FLUX = {"batch": 4, "config": {"num_layers": 4, "num_single_layers": 4}}
SMALL_UNET = {
    "block_out_channels": [64, 128],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": 1,
    "layers_per_block": 1,
    "attention_head_dim": [2, 4],
}
MODELS = {
    "wan": ("wan", WAN),
    "wan, full": ("wan", WAN | {"adapter": "full", "accumulates": True}),
    "flux": ("flux", FLUX),
    "sd3": ("sd3", {"config": {"num_layers": 4}}),
    "z_image": ("z_image", {"config": {"n_layers": 4}}),
    "ltxvideo": ("ltxvideo", {"config": {"num_layers": 4}}),
    "sdxl": ("sdxl", {"width": 512, "height": 512, "config": SMALL_UNET}),
}


# Whose blocks are treated as those of the others are: for `make slow`.
ALIKE = ("sd3", "z_image", "ltxvideo")


def reported(found, family, config):
    return planned(found, family, load_settings(config))


def plain_ways(costs):
    return [next(way for way in block.ways if way.treatment == PLAIN) for block in costs.blocks]


@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=pytest.mark.slow if m in ALIKE else ()) for m in MODELS],
)
def test_plans_within_ten_budgets(model):
    name, changes = MODELS[model]
    work = workload(name, None, **changes)
    found = profile(work)
    compose = Composer(found)
    # What a UNet's blocks hand on past others goes earlier in backward than the sums say.
    tolerance = 0.02 if model == "sdxl" else 0.001
    for config in (TORCH, UNSLOTH):
        report = reported(found, work.family, config)
        costs = costs_of(found, report, H100)

        def exact(ways, report=report):
            return compose(spans_of(found, with_ways(report, found, ways).stacks))

        draw = random.Random(0)
        plain = plain_ways(costs)
        for ways in [
            costs.all_recomputed,
            plain,
            *([draw.choice(block.ways) for block in costs.blocks] for _ in range(12)),
        ]:
            step = exact(ways)
            assert costs.peak(ways) == pytest.approx(step.peak, rel=tolerance)
        low, high = exact(costs.all_recomputed).peak, exact(plain).peak
        least = time_of(exact(plain), H100).total
        seconds = []
        for tenth in range(11):
            budget = low + (high * 1.01 - low) * tenth / 10
            chosen = within(found, report, budget, H100)
            assert chosen.fits
            assert chosen.step.peak <= budget
            seconds.append(time_of(chosen.step, H100).total)
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[-1] == pytest.approx(least)
        assert not any(schedule.covered for schedule in chosen.schedules)
        nothing = within(found, report, low / 2, H100)
        assert (nothing.fits, nothing.step.peak) == (False, low)


def test_seconds_are_those_of_the_step():
    work = workload("flux", None, **FLUX)
    found = profile(work)
    report = reported(found, work.family, UNSLOTH)
    costs = costs_of(found, report, H100)
    compose = Composer(found)
    plain = plain_ways(costs)
    least = time_of(compose(spans_of(found, with_ways(report, found, plain).stacks)), H100)
    for ways in (costs.all_recomputed, plain):
        step = compose(spans_of(found, with_ways(report, found, ways).stacks))
        more = time_of(step, H100).total - least.total
        assert StepCosts.seconds(ways) == pytest.approx(more, rel=1e-6, abs=1e-12)


def test_what_is_left_alone_runs_plainly():
    work = workload("wan", None, **WAN)
    found = profile(work)
    off = reported(found, work.family, {"gradient_checkpointing": False})
    costs = costs_of(found, off, H100)
    assert [len(block.ways) for block in costs.blocks] == [1] * 5
    covered = costs_of(found, reported(found, work.family, TORCH), H100)
    assert all(block.ways[0].treatment == COVERED for block in covered.blocks)
    assert len({way.treatment for way in covered.blocks[0].ways}) >= 5


def test_a_budget_as_a_mode():
    work = workload("wan", None, **WAN)
    found, settings = profile(work), load_settings({})

    def mode(budget, on=H100):
        return predict_mode(found, work.family, settings, "config", {BUDGET: budget}, on)

    made = mode("5GiB")
    assert made.step.peak <= usable(5 * GIB)
    drawn = made.plan["blocks"]
    assert drawn == made.report.stacks[0].schedule.marked()
    assert "[0" in drawn
    assert mode(5, on=None).step == made.step
    assert mode("0.1GiB").remark.startswith("nothing fits within 0.1 GiB, of which the peak may")
    assert mode("100%").step.peak == mode("auto").step.peak > made.step.peak
    assert mode("90%", on=None).impossible == "the budget is 90% of a device, and none is named"
    none = predict_mode(found, work.family, settings, "none", {"gradient_checkpointing": False})
    assert none.plan == {}


def test_how_many_blocks_run_in_which_way():
    kept = ((), ("attention", "ffn"), (), ("attention",))
    one = Schedule(4, (range(1), range(1, 2), range(3, 4)), kept)
    assert counts([one, Schedule.of_all(2)]) == "3 [], 1 [a], 1 [af], 1 plain"
