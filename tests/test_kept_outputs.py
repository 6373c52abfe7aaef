"""Where the mode is open that meets the operators to be kept: at them, and hardly anywhere else."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from counting import Counts
from torch import nn
from torch.nn import functional
from toys import WIDTH, WithDoor, toy
from training import add_lora, keys, model_and_inputs

import simpletuner_segckpt
from simpletuner_segckpt.recompute import kept_outputs
from simpletuner_segckpt.verify.step import counted, step

KEEP = "gradient_checkpointing_keep"
BOTH = {KEEP: ["attention", "ffn"]}


@pytest.fixture
def seen(monkeypatch):
    """The operators that go through Python."""
    counts: Counter[str] = Counter()
    for mode in (kept_outputs._Forward, kept_outputs._Again):
        original = mode.__torch_dispatch__

        def dispatch(self, func, types, args=(), kwargs=None, original=original):
            counts[str(func)] += 1
            return original(self, func, types, args, kwargs)

        monkeypatch.setattr(mode, "__torch_dispatch__", dispatch)
    return counts


@pytest.mark.parametrize("config", [{KEEP: "attention"}, BOTH], ids=str)
@pytest.mark.parametrize("lora", [False, True])
def test_few_operators_go_through_python(seen, config, lora):
    model, inputs = model_and_inputs("flux")
    if lora:
        model.requires_grad_(False)
        add_lora(model)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, config)
    totals, kept = [], []
    for _ in range(3):
        seen.clear()
        assert step(model, inputs) == expected
        totals.append(seen.total())
        kept.append([stack.kept for stack in installation.effect.stacks])
    assert kept[0] == kept[1] == kept[2]
    assert totals[1] == totals[2] < totals[0] / 4
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert seen[attention] == 2 * sum(stack["attention"] for stack in kept[0])
    assert not seen["aten.native_layer_norm.default"]


class Attending(nn.Module):
    """A block whose attention can change its place, and what is around it."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.to_q = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, WIDTH)
        self.how = "plain"

    def attend(self, x):
        q = self.to_q(x)[:, None]
        if self.how == "within a mode":
            with Counts():
                q = q * 2
                return functional.scaled_dot_product_attention(q, q, q)[:, 0]
        if self.how == "twice":
            q = functional.scaled_dot_product_attention(q, q + 1, q)
        if self.how == "without gradients":
            with torch.no_grad():
                return functional.scaled_dot_product_attention(q, q, q)[:, 0]
        return functional.scaled_dot_product_attention(q, q, q)[:, 0]

    def forward(self, hidden_states, temb):
        x = hidden_states
        if self.how == "later":
            x = torch.tanh(self.before(x)).unflatten(-1, (2, -1)).sin().flatten(-2)
        x = x + self.attend(x) * 0.5
        return torch.sin(self.after(x)) * temb


@pytest.fixture
def attending():
    model, inputs = toy(WithDoor)
    model.blocks = nn.ModuleList(Attending() for _ in range(6))
    return model, inputs


HOWS = ["plain", "later", "twice", "within a mode", "without gradients"]


@pytest.mark.parametrize("first", HOWS)
def test_calls_that_go_another_way_than_the_one_before(attending, first):
    """Gradients are right in every step; what is kept is right again in the second one."""
    model, inputs = attending
    installation = simpletuner_segckpt.apply(model, {**keys(1), KEEP: "attention"})

    def run(how):
        for block in model.blocks:
            block.how = how
        counts = Counts()
        with counts:
            got = step(model, inputs)
        return got, counts.attention

    def expected(how):
        twin, _ = toy(WithDoor)
        twin.blocks = nn.ModuleList(Attending() for _ in range(6))
        twin.load_state_dict(model.state_dict())
        for block in twin.blocks:
            block.how = how
        return step(twin, inputs)

    for how in (first, *(h for h in HOWS if h != first)):
        right = expected(how)
        for number in range(3):
            got, runs = run(how)
            assert got == right, (how, number)
            times = 12 if how == "twice" else 6
            if number:
                assert installation.effect["blocks"].kept["attention"] == times
                assert runs == times


def test_every_block_may_keep_something_else():
    """A plan of a forward says of each block what it keeps."""
    model, inputs = model_and_inputs("wan", num_layers=6)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, {KEEP: ["attention", "ffn"]} | keys(2))
    [planned] = installation.report.stacks
    segments = (range(0, 2), range(2, 3), range(3, 4), range(4, 5))
    each = ((), (), ("attention",), ("attention", "ffn"), ("ffn",), ())
    schedule = replace(planned.schedule, segments=segments, kept=each)
    installation._owner.forwards.stacks = (replace(planned, schedule=schedule),)
    for _ in range(3):
        with counted(model, ["blocks"]) as calls:
            assert step(model, inputs) == expected
    assert calls["blocks"] == Counter({0: 2, 1: 2, 2: 2, 3: 2, 4: 2, 5: 1})
    effect = installation.effect["blocks"]
    assert effect.segments == segments
    assert [span.tally.kept for span in effect.spans] == [
        {},
        {"attention": 1},
        {"attention": 1, "ffn": 1},
        {"ffn": 1},
        {},
    ]
