"""Every shipped family: gradients bit-equal to no checkpointing, every block called as planned."""

from collections import Counter
from inspect import signature

import pytest
from training import REGISTRY, add_lora, counted, keys, set_dropout, step

import simpletuner_segckpt
from simpletuner_segckpt.schedule import make_schedules
from simpletuner_segckpt.tiny import make_inputs, make_model

SCHEDULES = [(1, None), (2, None), (3, None), (2, 4), (1, 3), (9, None)]
CLASSES = {tiny.model_class: (family, tiny) for family in REGISTRY for tiny in family.tiny}


@pytest.fixture(scope="module", params=sorted(CLASSES))
def case(request):
    return CLASSES[request.param]


@pytest.fixture(scope="module", params=["full", "lora"])
def trained(request, case):
    family, tiny = case
    model = make_model(tiny).train()
    set_dropout(model)
    if request.param == "lora":
        add_lora(model)
    return family, model, make_inputs(tiny)


@pytest.fixture(scope="module", params=["float32", "bfloat16 autocast"])
def reference(request, trained):
    family, model, inputs = trained
    autocast = request.param != "float32"
    return family, model, inputs, autocast, step(model, inputs, autocast)


@pytest.mark.parametrize("keep_last", [0, 1, 3])
@pytest.mark.parametrize(("interval", "stride"), SCHEDULES)
def test_gradients_and_calls(reference, interval, stride, keep_last):
    _, model, inputs, autocast, expected = reference
    installation = simpletuner_segckpt.apply(model, keys(interval, stride, keep_last))
    stacks = {stack.path: stack.blocks for stack in installation.report.stacks}
    schedules = make_schedules(stacks, interval, stride, keep_last)
    try:
        for run in range(2):  # the first one records, the second one forms segments
            with counted(model, list(stacks)) as calls:
                assert step(model, inputs, autocast) == expected
            for path, schedule in schedules.items():
                covered = dict.fromkeys(schedule.covered, 2)
                assert calls[path] == Counter(covered | dict.fromkeys(schedule.gap, 1)), (run, path)
        for path, schedule in schedules.items():
            assert installation.effect[path].segments == schedule.segments
    finally:
        installation.remove()


def test_family_says_what_the_model_does(case):
    """The carried state in the file is what the identity check finds on the real model."""
    family, tiny = case
    model, inputs = make_model(tiny).train(), make_inputs(tiny)
    installation = simpletuner_segckpt.apply(model, keys(2))
    model(**inputs)
    for stack in family.stacks:
        blocks = getattr(model, stack.path, None)
        if blocks is None:
            assert stack.optional
            continue
        assert {type(block).__name__ for block in blocks} == {stack.block}
        assert len(blocks) >= 5
        [boundaries] = [
            found for (_, path), found in installation._door.proven.items() if path == stack.path
        ]
        parameters = list(signature(blocks[0].forward).parameters)
        for boundary in boundaries:
            carried = {parameters[argument]: source for argument, source in boundary.carried}
            expected = {k: 0 if v == "return" else v for k, v in stack.carried.items()}
            assert carried == expected
        for part in (*stack.feed_forward, *stack.attention):
            blocks[0].get_submodule(part)
