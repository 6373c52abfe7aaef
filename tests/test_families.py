"""Every shipped family: gradients bit-equal to no checkpointing, every block called as planned."""

from collections import Counter

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from training import REGISTRY, add_lora, installed, keys, set_dropout

import simpletuner_segckpt
from simpletuner_segckpt.engine.links import Link
from simpletuner_segckpt.model.stacks import blocks_of, matching, units_of
from simpletuner_segckpt.model.tiny import is_before, make_inputs, make_model
from simpletuner_segckpt.schedules.report import UNITS
from simpletuner_segckpt.schedules.schedule import make_schedules
from simpletuner_segckpt.verify.step import counted, step

# Interval, stride and keep_last. The first on every class; all of them on a few.
EVERYWHERE = [(2, 4, 1)]
ALL = [
    (interval, stride, keep_last)
    for interval, stride in [(1, None), (2, None), (3, None), (2, 4), (1, 3), (9, None)]
    for keep_last in (0, 1, 3)
]
IN_FULL = ("flux", "wan", "sd1x")  # two stacks, one stack, units beside stacks
FOUNDATION = {
    "diffusers.FluxTransformer2DModel",
    "diffusers.Flux2Transformer2DModel",
    "diffusers.SD3Transformer2DModel",
    "diffusers.WanTransformer3DModel",
    "diffusers.ZImageTransformer2DModel",
    "diffusers.QwenImageTransformer2DModel",
    "diffusers.QwenImage21Transformer2DModel",
    "diffusers.LTXVideoTransformer3DModel",
    "diffusers.LTX2VideoTransformer3DModel",
    "diffusers.PixArtTransformer2DModel",
    "diffusers.Lumina2Transformer2DModel",
}
CLASSES = {
    f"{family.family} {tiny.model_class}": (family, tiny)
    for family in REGISTRY
    for tiny in family.tiny
    if installed(family, tiny)
}
# Name, what is trained, precision, and the schedules. Full training in float32 for every class; the
# first ten families in every other way of training under one schedule.
CASES = [
    pytest.param(name, training, precision, schedules, id=f"{name} {training} {precision}")
    for name, (family, tiny) in sorted(CLASSES.items())
    for training, precision, schedules in (
        ("full", "float32", ALL if family.family in IN_FULL else EVERYWHERE),
        ("full", "bfloat16 autocast", [(2, None, 0)]),
        ("lora", "float32", [(2, None, 1)]),
        ("lora", "bfloat16 autocast", [(3, None, 0)]),
    )
    if tiny.model_class in FOUNDATION or (training, precision) == ("full", "float32")
]


@pytest.mark.parametrize(("name", "training", "precision", "schedules"), CASES)
def test_gradients_and_calls(name, training, precision, schedules):
    family, tiny = CLASSES[name]
    if "ZImage" in name and "autocast" in precision and is_before("0.38"):
        pytest.skip("Z-Image runs under autocast since diffusers 0.38")
    model = make_model(tiny).train()
    set_dropout(model)
    if training == "lora":
        add_lora(model)
    inputs, autocast = make_inputs(tiny), precision != "float32"
    expected = step(model, inputs, autocast)
    for schedule in schedules:
        check_schedule(family, model, inputs, autocast, expected, *schedule)


def check_schedule(family, model, inputs, autocast, expected, interval, stride, keep_last):
    """Gradients bit-equal, and every block called as often as the schedule says."""
    installation = simpletuner_segckpt.apply(
        model, keys(interval, stride, keep_last), family=family
    )
    stacks = {stack.path: stack.blocks for stack in installation.report.stacks}
    schedules = make_schedules(stacks, interval, stride, keep_last)
    lists = [path for path in stacks if path != UNITS]
    asked = f"interval {interval}, stride {stride}, keep_last {keep_last}"
    try:
        for run in range(2):  # the first one records, the second one forms segments
            with counted(model, lists) as calls:
                assert step(model, inputs, autocast) == expected, asked
            for path in lists:
                covered = dict.fromkeys(schedules[path].covered, 2)
                gap = dict.fromkeys(schedules[path].gap, 1)
                assert calls[path] == Counter(covered | gap), (run, path, asked)
        if UNITS in stacks:  # modules that run more than once count each time
            ran = len(installation.effect[UNITS].spans)
            schedules = make_schedules(stacks | {UNITS: ran}, interval, stride, keep_last)
        for path, schedule in schedules.items():
            effect = installation.effect[path]
            assert effect.covered == schedule.covered, asked
            stack = next((s for s in family.stacks if s.describes(path)), None)
            if stack and not stack.per_block and not stack.cut:
                assert effect.segments == schedule.segments, asked
    finally:
        installation.remove()


@pytest.mark.parametrize("case", CLASSES.values(), ids=CLASSES)
def test_family_says_what_the_model_is_and_does(case, monkeypatch):
    """The carried state in the file is what the identity check finds on the real model; every list
    of blocks is in the report; and checkpoint calls are of the non-reentrant kind."""
    calls = []
    real = torch.utils.checkpoint.checkpoint

    def spy(*args, **kwargs):
        calls.append(kwargs["use_reentrant"])
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", spy)
    family, tiny = case
    model, inputs = make_model(tiny).train(), make_inputs(tiny)
    installation = simpletuner_segckpt.apply(model, keys(2), family=family)
    check_lists(family, model, installation.report)
    model(**inputs)
    assert set(calls) == {False}
    for stack in family.stacks:
        lists = [path for path in matching(model, stack.path) if len(blocks_of(model, path)) > 1]
        assert lists or stack.optional
        for path in lists:
            check_stack(stack, path, blocks_of(model, path), installation)


def check_lists(family, model, report):
    reported = {stack.path for stack in report.stacks} | {path for path, _ in report.left_out}
    units = units_of(model, family.units, reported)
    for path, module in model.named_modules():
        names = [type(block).__name__ for block in module.children()]
        if not isinstance(module, nn.ModuleList) or len(names) < 2:
            continue
        if not all("Block" in name or "Layer" in name for name in names):
            continue
        inside = any(path.startswith(f"{known}.") for known in (*reported, *units))
        above = any(known.startswith(f"{path}.") for known in (*reported, *units))
        assert path in reported or inside or above, path


def check_stack(stack, path, blocks, installation):
    assert stack.block in {type(block).__name__ for block in blocks}
    for part in (*stack.feed_forward, *stack.attention):
        # Some blocks, or some configurations, go without; the attribute is then None.
        assert all(hasattr(block, part.partition(".")[0]) for block in blocks), part
    if stack.per_block:
        return
    for boundary in installation.proofs[path].boundaries:
        if isinstance(boundary, Link):
            assert boundary.by_name == stack.sources
        else:
            assert stack.cut, boundary
