"""A memory budget: real steps within it, counted by a ledger that knows nothing of the plugin."""

import copy
import gc

import pytest
import torch
from budgets import MODELS, Trainer, extremes, larger, made, within
from training import entry_of, warned

from simpletuner_segckpt import apply, installation_of, remove

MIB = 1 << 20


def budget(amount):
    return {
        "gradient_checkpointing": True,
        "gradient_checkpointing_budget": f"{amount / MIB:.6f}MiB",
    }


@pytest.fixture(autouse=True)
def nothing_left():
    """What tests before have left to the garbage collector counts as alive until it runs."""
    gc.collect()


@pytest.mark.parametrize(
    ("name", "full"), [*((name, False) for name in MODELS), ("flux", True), ("llama", True)]
)
def test_steps_stay_within_the_budget(name, full):
    low, high = extremes(name, full)
    trainer = Trainer(name, full)
    expected = trainer.gradients()
    for part in (3, 7):
        limit = low + (high - low) * part // 10
        gc.collect()
        peaks, installation = within(trainer, limit)
        told = installation.effect.within
        assert max(peaks[1:]) <= limit
        assert 0 < told.share < 1
        # What one more plain block keeps is left at most, beside a tenth.
        blocks = sum(stack.blocks for stack in installation.report.stacks)
        assert peaks[-1] > 0.9 * limit - (high - low) / blocks
        assert peaks[-1] <= told.predicted * 1.02  # a fiftieth is left free for that
        assert all(map(torch.equal, trainer.gradients(), expected))
    remove(trainer.model)
    assert all(map(torch.equal, trainer.gradients(), expected))


def test_a_larger_budget_recomputes_less():
    low, high = extremes("wan", False)
    shares = []
    for tenth in range(0, 13, 2):
        trainer = Trainer("wan")
        _, installation = within(trainer, low + (high - low) * tenth // 10)
        shares.append(installation.effect.within.share)
        del trainer, installation
        gc.collect()
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 0


def test_a_budget_that_nothing_meets_recomputes_everything(caplog):
    trainer = Trainer("flux")
    _, installation = within(trainer, MIB // 4)
    assert installation.effect.within.share == 1
    assert {stack.gap for stack in installation.effect.stacks} == {()}
    [said] = [line for line in warned(caplog.records) if "budget" in line]
    assert said.startswith("`gradient_checkpointing_budget` is 0.25 MiB, which is less than")


def test_each_shape_has_its_plan_from_its_second_step():
    low, high = extremes("wan", False)
    trainer = Trainer("wan")
    _, inputs = made("wan")
    small, middle, large = (larger(inputs, times) for times in (2, 5, 8))
    installation = apply(trainer.model, budget((low + high) // 2))
    gc.collect()
    for number in range(8):
        for shape in (small, large):
            peak = trainer.step(shape)
            assert installation.effect.within.learning == (number == 0)
            assert number == 0 or peak <= (low + high) // 2
        with torch.no_grad():
            trainer.forward(small)
    assert installation.history.learned == 2
    # Its sizes lie between those of two others: nothing has to be learned of it.
    assert trainer.step(middle) <= (low + high) // 2
    assert not installation.effect.within.learning
    shapes = installation.history.shapes
    assert [(s.steps, s.learned) for s in shapes.values()] == [(8, 1), (8, 1), (1, 0)]
    shares = [shapes[name].last.share for name in shapes]
    assert shares[0] < shares[2] < shares[1]
    assert "within" in str(installation.history)


def test_two_forwards_before_one_backward_share_the_budget():
    trainer = Trainer("wan")
    inputs = larger(made("wan")[1], 4)
    gc.collect()
    one = trainer.step(inputs)
    both = trainer.step(inputs, inputs)
    limit = (one + both) // 2
    installation = apply(trainer.model, budget(limit))
    peaks = [trainer.step(inputs, inputs) for _ in range(4)]
    assert max(peaks[2:]) <= limit
    assert installation.effect.within.share < 1


def test_with_accumulation_the_gradients_count():
    low, high = extremes("llama", True)
    trainer = Trainer("llama", full=True, accumulate=True)
    gc.collect()
    peaks, _ = within(trainer, (low + high) // 2 + MIB, steps=4)
    assert max(peaks[1:]) <= (low + high) // 2 + MIB


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_when_memory_runs_out_that_shape_recomputes_everything(when, caplog):
    low, high = extremes("flux", False)
    trainer = Trainer("flux")
    # Of a plan that recomputes the block in which memory runs out.
    _, installation = within(trainer, (low + high) // 2 if when == "forward" else low * 21 // 20)
    assert installation.effect.within.share < 1
    calls = []

    def run_out(module, args):
        calls.append(module)
        if len(calls) == (1 if when == "forward" else 2):
            raise torch.OutOfMemoryError("no memory is left")

    block = trainer.model.single_transformer_blocks[2]
    handle = block.proj_out.register_forward_pre_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.step()
    handle.remove()
    [note] = raised.value.__notes__
    assert note.startswith("`gradient_checkpointing_budget` is")
    assert note in warned(caplog.records)
    del raised
    trainer.optimizer.zero_grad()
    trainer.step()
    assert installation.effect.within.share == 1
    assert {stack.gap for stack in installation.effect.stacks} == {()}


def test_a_copy_has_plans_of_its_own():
    low, high = extremes("wan", False)
    trainer = Trainer("wan")
    within(trainer, (low + high) // 2)
    twin = copy.deepcopy(trainer.model)
    own = installation_of(twin)
    assert own.effect is None
    trainer.model = twin
    trainer.trained = [p for p in twin.parameters() if p.requires_grad]
    trainer.step()
    assert not own.effect.within.learning  # what was measured holds for it too
    assert entry_of(own).forwards.budgeted is not None


def test_plans_change_without_compiling_blocks_again():
    model, inputs = made("wan")
    model.compile_repeated_blocks(backend="eager", fullgraph=True)
    inputs = larger(inputs, 4)
    shares = []
    for amount in ("1MiB", "1TiB"):
        installation = apply(model, {"gradient_checkpointing_budget": amount})
        for _ in range(2):
            model(**inputs)[0].sum().backward()
        shares.append(installation.effect.within.share)
        if len(shares) == 1:
            torch.compiler.set_stance("fail_on_recompile")
    torch.compiler.set_stance("default")
    assert shares == [1, 0]


def test_a_model_that_is_compiled_as_a_whole_recomputes_everything(caplog):
    model, inputs = made("wan")
    apply(model, {"gradient_checkpointing_budget": "1TiB"})
    torch.compile(model, backend="eager")(**inputs)[0].sum().backward()
    [said] = [line for line in warned(caplog.records) if "as a whole" in line]
    assert "a graph has one plan and a memory budget asks for one for each shape of call" in said
