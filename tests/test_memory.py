"""What a training run leaves in memory: nothing but its weights and gradients.

The garbage collector is off in these tests. What only it could free would be held, on a real
machine, until it next runs: gigabytes of activations.
"""

import contextlib
import gc

import pytest
import torch
from toys import Doorless, WithDoor, toy
from training import add_lora, keys, model_and_inputs

import simpletuner_segckpt
from simpletuner_segckpt.verify.memory import LiveBytes
from simpletuner_segckpt.verify.step import loss_of, step


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def with_lora(name, **config):
    """A frozen model with a LoRA that has dropout, as trainers train it."""
    model, inputs = model_and_inputs(name, **config)
    model.requires_grad_(False)
    add_lora(model)
    return model, inputs


class Failing:
    """The forward of ``module``, which raises within ``now``; nothing else may."""

    def __init__(self, module):
        self.original = module.forward
        self.fails = False
        module.forward = self

    def __call__(self, *args, **kwargs):
        if self.fails:
            raise ArithmeticError
        return self.original(*args, **kwargs)

    @contextlib.contextmanager
    def now(self):
        self.fails = True
        try:
            yield
            pytest.fail("nothing called the module")
        except ArithmeticError:
            pass  # `pytest.raises` would keep the traceback, and with it tensors
        finally:
            self.fails = False


class Run:
    """A training run in which everything happens that keeps a backward from its forward."""

    def __init__(self, model, inputs, failing_part):
        self.model = model
        self.inputs = inputs
        self.part = Failing(model.get_submodule(failing_part))
        self.events = (
            self.validation,
            self.exception_in_forward,
            self.exception_in_recompute,
            self.loss_dropped,
        )

    def loss(self):
        fresh = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in self.inputs.items()
        }
        return loss_of(self.model(**fresh))

    def training(self):
        self.loss().backward()

    def validation(self):
        switches = isinstance(getattr(self.model, "gradient_checkpointing", None), bool)
        if switches:
            self.model.disable_gradient_checkpointing()
        with torch.no_grad():
            self.loss()
        if switches:
            self.model.enable_gradient_checkpointing()

    def exception_in_forward(self):
        with self.part.now():
            self.loss()

    def exception_in_recompute(self):
        loss = self.loss()
        with self.part.now():
            loss.backward()
        # torch's engine holds what a failed backward left in its queue until the next one.
        torch.zeros((), requires_grad=True).backward()

    def loss_dropped(self):
        self.loss()

    def steps(self, numbers):
        """Gradients add up over three steps; one of the events comes after every second."""
        for number in numbers:
            self.training()
            if number % 2:
                self.events[number // 2 % len(self.events)]()
            if number % 3 == 2:
                self.model.zero_grad(set_to_none=True)


def live_tensors():
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def tensors_in_garbage():
    """Tensors that only the garbage collector can free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


KEEP_ATTENTION = {"gradient_checkpointing_keep": ["attention"]}
FEED_FORWARDS = {"gradient_checkpointing_backend": "torch-ffn"}


@pytest.mark.parametrize(
    ("make", "config", "failing_part", "strategy", "steps"),
    [
        pytest.param(
            lambda: with_lora("sd3", num_layers=2),
            keys(2),
            "transformer_blocks.1",
            "segmented",
            200,
            id="door",
        ),
        pytest.param(
            lambda: with_lora("auraflow", num_mmdit_layers=2, num_single_dit_layers=2),
            FEED_FORWARDS,
            "single_transformer_blocks.1.ff",
            "per-block",
            60,
            id="keyword loop, feed-forwards",
        ),
        pytest.param(
            lambda: with_lora("wan", num_layers=2),
            keys(2) | KEEP_ATTENTION,
            "blocks.1",
            "segmented",
            60,
            id="door, attention kept",
        ),
        pytest.param(lambda: toy(Doorless), keys(2), "blocks.1", "segmented", 200, id="probed"),
    ],
)
@pytest.mark.usefixtures("no_collector")
def test_memory_stays_flat(make, config, failing_part, strategy, steps):
    model, inputs = make()
    installation = simpletuner_segckpt.apply(model, config)
    run = Run(model, inputs, failing_part)
    run.steps(range(20))
    after_20 = live_tensors()
    run.steps(range(20, steps))
    assert live_tensors() == after_20
    assert {stack.strategy for stack in installation.effect.stacks} == {strategy}
    for event in (run.training, *run.events):
        with LiveBytes() as live:  # the inputs are made within it, too
            event()
            model.zero_grad(set_to_none=True)
        assert live.total == 0, event.__name__
    assert tensors_in_garbage() == 0


@pytest.mark.usefixtures("no_collector")
def test_a_broken_segment_leaves_nothing():
    model, inputs = toy(WithDoor)
    simpletuner_segckpt.apply(model, keys(3))
    for _ in range(2):
        step(model, inputs)
    model.zero_grad(set_to_none=True)
    run = Run(model, inputs, "blocks.1")
    model.between = lambda index, state: state * 2
    with LiveBytes() as live:
        try:
            run.training()
            pytest.fail("nothing was broken")
        except simpletuner_segckpt.SegmentBroken:
            pass
        assert live.total == 0
        run.training()  # block by block from now on
        model.zero_grad(set_to_none=True)
        assert live.total == 0
    assert tensors_in_garbage() == 0
