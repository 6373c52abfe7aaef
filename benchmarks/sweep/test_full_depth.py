"""The estimator at published depth and size: against whole traced steps, and for every size."""

import pytest
from test_training_tables import SIZES, adapted, forward_of, step_of

from simpletuner_segckpt import estimate_config, plan_config
from simpletuner_segckpt.config.settings import load_settings
from simpletuner_segckpt.estimator.predict.modes import planned
from simpletuner_segckpt.estimator.predict.peak import compose, spans_of
from simpletuner_segckpt.estimator.profile.fake_tensors import backward, without_memory
from simpletuner_segckpt.estimator.profile.known_values import KnownValues
from simpletuner_segckpt.estimator.profile.profile import profile
from simpletuner_segckpt.estimator.profile.trace import trace
from simpletuner_segckpt.estimator.workload.build import build
from simpletuner_segckpt.estimator.workload.parse import parse_workload
from simpletuner_segckpt.families.registry import FamilyRegistry

GIB = 1 << 30
WAN = {"model_family": "wan", "model_flavour": "t2v-480p-1.3b-2.1"}
INTERVAL = "gradient_checkpointing_interval"
STRIDE = "gradient_checkpointing_segment_stride"
KEEP = "gradient_checkpointing_keep"
LAST = "gradient_checkpointing_keep_last"
CASES = {
    "wan 1.3b": (
        {"model_family": "wan", "model_flavour": "t2v-480p-1.3b-2.1", "resolution": 480},
        {INTERVAL: 2, STRIDE: 4},
    ),
    "hidream": ({"model_family": "hidream", "resolution": 512}, {INTERVAL: 2, STRIDE: 4}),
    "sd3": (
        {"model_family": "sd3", "train_batch_size": 4},
        {INTERVAL: 3, STRIDE: 5, LAST: 2, KEEP: ["attention", "ffn"]},
    ),
    "sd1x": ({"model_family": "sd1x", "train_batch_size": 2}, {KEEP: "attention"}),
}


@pytest.mark.parametrize("name", CASES)
def test_composing_is_the_whole_step(name):
    config, keys = CASES[name]
    settings = load_settings(config | keys)
    work = parse_workload(settings, FamilyRegistry.shipped()).workload
    found = profile(work)
    report = planned(found, work.family, settings)
    peak, traced = compose(found, spans_of(found, report.stacks)).peak, trace(work, keys)
    assert peak == pytest.approx(traced, rel=0.005)
    static = found.weights + found.states  # which both have from the same place
    assert peak - static == pytest.approx(traced - static, rel=0.01)


def test_a_plan_for_wan_fits():
    """Traced; and of the published modes that fit none is faster."""
    found = plan_config(WAN, 24 * GIB)
    assert (found.read.workload.width, found.read.workload.frames) == (832, 81)
    assert trace(found.read.workload, found.found.keys) <= found.usable < 24 * GIB
    slower = ["layer", "interval2", "torch-ffn+offload", "seg2-stride4+offload"]
    rows = estimate_config(WAN, modes=slower, on=found.card).rows
    assert all(found.found.seconds < row.time.total for row in rows[1:])
    assert found.next is None or found.next.step.peak > found.found.step.peak


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_a_step_of_every_size(name, size):
    work = step_of(name, size)
    with without_memory(), KnownValues(work.family.training.experts):
        model = build(work)
        backward([output.float().mean() for output in forward_of(model, work)])
    assert any(parameter.grad is not None for parameter in model.parameters())
    assert adapted(model, work.family.training.targets) == set(work.family.training.targets)
