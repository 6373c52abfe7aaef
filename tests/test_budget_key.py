"""What ``gradient_checkpointing_budget`` plans on a model, before any forward."""

import pytest
from accelerators import FakeAccelerator
from toys import WithDoor, toy
from training import keys, model_and_inputs

import simpletuner_segckpt
from simpletuner_segckpt.model.interception import RECEIVER
from simpletuner_segckpt.offload.device import Accelerator
from simpletuner_segckpt.recompute.submodules import SubmoduleHook

BUDGET = "gradient_checkpointing_budget"
REMARK = "remark: there is no accelerator, so the budget of {} is of the RAM"


@pytest.fixture(params=[None, FakeAccelerator()], ids=["CPU", "accelerator"])
def accelerator(request, monkeypatch):
    monkeypatch.setattr(Accelerator, "current", classmethod(lambda cls: request.param))
    return request.param


@pytest.mark.parametrize(
    ("budget", "written", "of_device"),
    [("22GiB", "22 GiB", False), ("90%", "90%", True), ("auto", "auto", True)],
)
def test_the_report(accelerator, budget, written, of_device):
    model, _ = toy(WithDoor)
    report = simpletuner_segckpt.apply(model, {BUDGET: budget}).report
    remark = [REMARK.format(written)] if of_device and accelerator is None else []
    assert report.lines() == [
        "family unknown (probed), strategy per-block",
        f"budget: {written}; what is recomputed is decided for each shape of call, the first of "
        "each recomputes everything",
        f"blocks: 6 blocks, per-block (within {written} each shape of call gets a plan of its own)",
        "  [0] [1] [2] [3] [4] [5]",
        "  6 recomputed in 6 checkpoint calls, 0 run normally",
        *remark,
    ]


def test_what_is_off_has_no_budget():
    model, _ = toy(WithDoor)
    off = {BUDGET: "90%", "gradient_checkpointing": False}
    report = simpletuner_segckpt.apply(model, off).report
    assert report.budget is None
    assert not any("budget" in line for line in report.lines())


@pytest.mark.parametrize(
    ("config", "led"),
    [({BUDGET: 22}, True), ({"gradient_checkpointing_keep": "ffn"}, True), (keys(2), False)],
    ids=["budget", "keep", "neither"],
)
def test_feed_forwards_whose_projections_may_be_kept(config, led):
    model, _ = model_and_inputs("wan")
    simpletuner_segckpt.apply(model, config)
    for block in model.blocks:
        assert isinstance(vars(block.ffn).get(RECEIVER), SubmoduleHook) == led
