"""Families whose class no library has: a stand-in with the loop that the file describes.

And classes that bring their own setters, as trainers' classes do.
"""

import copy
import logging

import pytest
import torch
from counting import watched
from diffusers import ModelMixin
from torch import nn
from toys import WIDTH, WithDoor, toy
from training import REGISTRY, family, keys

import simpletuner_segckpt
from simpletuner_segckpt import ConfigError, Family
from simpletuner_segckpt.config.settings import load_settings
from simpletuner_segckpt.install import own_setters
from simpletuner_segckpt.schedules.own_setters import COVERAGES, MEANINGS, native_report
from simpletuner_segckpt.schedules.report import make_report
from simpletuner_segckpt.verify.step import step

WITHOUT_CLASS = [described for described in REGISTRY if not described.tiny]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q = self.to_q(x).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(q, q, q).squeeze(1)


class FeedForward(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Down(nn.Linear):
    """The down-projection of a feed-forward that is no module of its own."""

    def __init__(self):
        super().__init__(2 * WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(torch.cat([x, x.sin()], -1))


def make_block(stack) -> type[nn.Module]:
    """The block class of a stack: its parameters, its parts, and what it returns to feed them."""
    name, parameters, returns = stack.block, sorted(stack.carried), stack.sources
    order = sorted(returns, key=returns.get)
    single = f"results[{order[0]!r}]"
    several = "(" + ", ".join(f"results[{parameter!r}]" for parameter in order) + ")"
    source = (
        f"def forward(self, {', '.join(parameters)}, temb):\n"
        f"    results = self.mix(temb, {', '.join(f'{p}={p}' for p in parameters)})\n"
        f"    return {single if len(order) == 1 else several}\n"
    )
    namespace = {}
    exec(source, namespace)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.dropout = nn.Dropout(0.1)
            for paths, kind in PARTS:
                for path in paths(stack):
                    add(self, path, kind())

        def mix(self, temb, **state):
            total = sum(state.values())
            for paths, _ in PARTS:
                for path in paths(stack):
                    total = total + torch.sin(self.get_submodule(path)(total))
            return {
                key: value + self.dropout(torch.tanh(self.inner(total) * temb))
                for key, value in state.items()
            }

    Block.forward = namespace["forward"]
    Block.__name__ = Block.__qualname__ = name
    return Block


PARTS = (
    (lambda stack: stack.attention, Attention),
    (lambda stack: stack.feed_forward, FeedForward),
    (lambda stack: stack.down_projection, Down),
)


def add(owner: nn.Module, path: str, module: nn.Module) -> None:
    """Put ``module`` at a dotted path, with modules around it where there are none."""
    *parents, last = path.split(".")
    for name in parents:
        if not hasattr(owner, name):
            owner.add_module(name, nn.Module())
        owner = getattr(owner, name)
    owner.add_module(last, module)


class StandIn(nn.Module):
    """The stacks of a family one after the other, each from the state that the file carries."""

    _supports_gradient_checkpointing = True

    def __init__(self, described: Family, depth: int = 5):
        super().__init__()
        self.described = described
        self.gradient_checkpointing = False
        for stack in described.stacks:
            block = make_block(stack)
            add(self, stack.path, nn.ModuleList(block() for _ in range(depth)))

    def enable_gradient_checkpointing(self, gradient_checkpointing_func):
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = gradient_checkpointing_func

    def forward(self, x, temb):
        kept = []
        for stack in self.described.stacks:
            names = sorted(stack.carried)
            state = dict.fromkeys(names, x)
            for index, block in enumerate(self.get_submodule(stack.path)):
                given = temb + kept.pop() if stack.per_block and kept and index else temb
                result = self.run(block, [state[name] for name in names], given)
                results = (result,) if isinstance(result, torch.Tensor) else result
                state = {name: results[stack.sources[name]] for name in names}
                if stack.per_block:  # a collecting loop, or one with skip connections
                    kept.append(results[0].mean(dim=1, keepdim=True))
            x = sum(state.values())
        return x

    def run(self, block, state, temb):
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return self._gradient_checkpointing_func(block, *state, temb)
        return block(*state, temb)


def stand_in(described):
    torch.manual_seed(0)
    model = StandIn(described).train()
    return model, {"x": torch.randn(2, 5, WIDTH), "temb": torch.randn(2, 1, WIDTH)}


@pytest.mark.parametrize("described", WITHOUT_CLASS, ids=lambda f: f.title)
@pytest.mark.parametrize(
    ("interval", "stride", "keep_last"), [(2, None, 0), (2, 4, 1), (9, None, 3)]
)
def test_a_stand_in_for_each_family_without_a_class(described, interval, stride, keep_last):
    model, inputs = stand_in(described)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(
        model, keys(interval, stride, keep_last), family=described
    )
    for _ in range(3):
        assert step(model, inputs) == expected
    for planned in installation.report.stacks:
        stack = next(s for s in described.stacks if s.describes(planned.path))
        effect = installation.effect[planned.path]
        assert effect.covered == planned.covered
        if not stack.per_block:
            assert effect.segments == planned.segments


@pytest.mark.parametrize("described", WITHOUT_CLASS, ids=lambda f: f.title)
def test_what_stands_inside_the_blocks_of_a_stand_in(described):
    model, inputs = stand_in(described)
    paths = [(stack.path, stack) for stack in described.stacks]
    expected, once, calls_once = watched(model, inputs, paths)
    if any(stack.feed_forward for stack in described.stacks):
        config = {"gradient_checkpointing_backend": "torch-ffn", **keys(1, 2)}
        installation = simpletuner_segckpt.apply(model, config, family=described)
        got, counts, calls = watched(model, inputs, paths)
        assert got == expected
        assert counts.attention == once.attention
        for key, count in calls.items():
            path, block, kind = key
            covered = block in installation.effect[path].covered
            twice = kind == "feed_forward" and covered and described.stack_at(path).feed_forward
            assert count == calls_once[key] * (2 if twice else 1)
        installation.remove()
    projections = any(stack.projections for stack in described.stacks)
    kept = ["attention", "ffn"] if projections else ["attention"]
    config = {"gradient_checkpointing_keep": kept, **keys(2)}
    installation = simpletuner_segckpt.apply(model, config, family=described)
    for _ in range(2):
        got, counts, _ = watched(model, inputs, paths)
        assert got == expected
        assert (counts.attention, counts.down) == (once.attention, once.down)
        kept_by = [installation.effect[path].kept for path, _ in paths]
        assert sum(kept["attention"] for kept in kept_by) == once.attention
        assert sum(kept["ffn"] for kept in kept_by) == once.down


def test_zlab_with_skip_tensors_in_the_state():
    """Skips that travel in the state, as a list that grows and shrinks, are never segmented."""

    class Skips(WithDoor):
        def forward(self, hidden_states, temb):
            state = (hidden_states, ())
            for index, block in enumerate(self.blocks):
                hidden_states = self.run(block, state[0], temb + sum(state[1]))
                skips = (
                    (*state[1], hidden_states.mean(1, keepdim=True)) if index < 3 else state[1][:-1]
                )
                state = (hidden_states, skips)
            return self.out(state[0])

    model, inputs = toy(Skips)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(3):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].strategy == "per-block"


# Classes with setters of their own.


class Native(WithDoor):
    """A trainer's class: it takes the keys itself."""

    def build(self, depth):
        super().build(depth)
        self.interval = None

    def set_gradient_checkpointing_interval(self, value):
        self.interval = value

    def set_gradient_checkpointing_segment_stride(self, value):
        self.stride = value


class TakesAll(Native):
    def set_gradient_checkpointing_backend(self, value):
        self.backend = value

    def set_gradient_checkpointing_offload_attention(self, value):
        self.offload = value


def native_family(segments="whole-block", **more):
    stack = {"path": "blocks", "block": "Block", "count": "depth"}
    facts = {"classes": ("test_standins.Native",), "segments": segments, "backends": ("torch",)}
    base = {"family": "toy", "title": "Toy", "stacks": (stack,), "native": facts | more}
    return Family.model_validate(base)


def test_native_setters_are_called_and_restored():
    model, inputs = toy(Native)
    expected = step(model, inputs)
    before = copy.copy(model.__dict__)
    installation = simpletuner_segckpt.apply(model, keys(2, 4), family=native_family(), native=True)
    assert (model.interval, model.stride, model.gradient_checkpointing) == (2, 4, True)
    assert installation.report.strategy == "native"
    assert installation.report.remarks == ()
    assert installation.report.stacks[0].segments == (range(0, 2), range(4, 6))
    assert step(model, inputs) == expected
    assert not model._forward_pre_hooks
    assert installation.effect is None
    simpletuner_segckpt.apply(model, keys(3), family=native_family(), native=True)
    assert model.interval == 3
    installation.remove()  # replaced: does nothing
    assert model.interval == 3
    simpletuner_segckpt.remove(model)
    assert model.__dict__ == before


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["interval", "stride", "enable", "remarks", "info"])
def test_native_setters_that_fail_leave_what_was_set_before(where, error, monkeypatch):
    def fail(*_, **__):
        raise error("boom")

    model, inputs = toy(Native)
    expected = step(model, inputs)
    pristine = copy.copy(model.__dict__)
    first = simpletuner_segckpt.apply(model, keys(2, 4), family=native_family(), native=True)
    before = copy.copy(model.__dict__)
    owner, name = {
        "interval": (Native, "set_gradient_checkpointing_interval"),
        "stride": (Native, "set_gradient_checkpointing_segment_stride"),
        "enable": (ModelMixin, "enable_gradient_checkpointing"),
        "remarks": (own_setters, "differences"),
        "info": (logging.Logger, "info"),
    }[where]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        with pytest.raises(error):
            simpletuner_segckpt.apply(model, keys(3), family=native_family(), native=True)
    assert model.__dict__ == before
    assert simpletuner_segckpt.installation_of(model).report is first.report
    assert step(model, inputs) == expected
    first.remove()
    assert model.__dict__ == pristine


@pytest.mark.parametrize(
    ("segments", "schedule"),
    [
        ("per-block", "[0] [1] 2 3 [4] [5]"),
        ("ignored", "[0] [1] [2] [3] [4] [5]"),
        ("every-nth", "0 1 2 3 4 5"),  # which blocks only the class knows
    ],
)
def test_what_a_native_class_makes_of_an_interval_is_said(segments, schedule, caplog):
    model, _ = toy(Native)
    facts = native_family(segments, notes=("musubi is ignored",))
    report = simpletuner_segckpt.apply(model, keys(2, 4), family=facts, native=True).report
    said = report.remarks
    assert any(MEANINGS[segments] in line for line in said)
    assert "musubi is ignored" in said
    assert all(line in caplog.text for line in said)
    [stack] = report.stacks
    assert (stack.strategy, str(stack.schedule)) == ("native", schedule)


FORCED = {"crepa_enabled": True}


@pytest.mark.parametrize(
    ("fallback", "config", "schedule"),
    [
        ("windows", keys(2, 4), "[0 1] 2 3 [4 5]"),
        ("windows", keys(2, 4) | FORCED, "[0] [1] 2 3 [4] [5]"),
        ("windows", keys(2) | FORCED, "[0] 1 [2] 3 [4] 5"),
        ("every-nth", keys(2, 4) | FORCED, "[0] 1 [2] 3 [4] 5"),
        ("all", keys(2, 4) | FORCED, "[0] [1] [2] [3] [4] [5]"),
        ("windows", keys(1, 2), "[0] [1] [2] [3] [4] [5]"),  # a stride needs an interval above 1
    ],
)
def test_what_a_native_class_covers_block_by_block(fallback, config, schedule):
    model, _ = toy(Native)
    facts = native_family(fallback=fallback)
    report = simpletuner_segckpt.apply(model, config, family=facts, native=True).report
    assert str(report.stacks[0].schedule) == schedule
    named = any(COVERAGES[fallback] in line for line in report.remarks)
    assert named is (config["gradient_checkpointing_interval"] > 1)


def native_settings(**config):
    return load_settings({f"gradient_checkpointing_{key}": value for key, value in config.items()})


def native_schedules(facts, stacks, **config):
    settings = native_settings(**config)
    report = make_report(settings, facts, stacks)
    native = native_report(settings.checkpointing, facts, report)
    return [str(stack.schedule) for stack in native.stacks]


def test_stacks_that_a_native_class_counts_on():
    """As SimpleTuner 4.10.1 ran Kandinsky 5, small, with two stacks of 5 blocks."""
    facts = family("kandinsky5_video")
    stacks = {"text_transformer_blocks": 5, "visual_transformer_blocks": 5}
    assert native_schedules(facts, stacks, interval=2) == ["[0] 1 [2] 3 [4]", "0 [1] 2 [3] 4"]
    strided = native_schedules(facts, stacks, interval=2, segment_stride=4)
    assert strided == ["[0] [1] 2 3 [4]", "[0] 1 2 [3] [4]"]


def test_segments_that_run_on_from_one_stack_into_the_next():
    stacks = {"in_blocks": 5, "mid_block": 1, "out_blocks": 5}
    plain = "0 1 2 3 4"
    assert native_schedules(family("zlab_i1"), stacks, interval=2) == [plain, "0", plain]


def test_stacks_with_a_rule_of_their_own_in_a_native_class():
    """As SimpleTuner 4.10.1 ran Z-Image and MiniMax H3, small."""
    stacks = {"noise_refiner": 2, "context_refiner": 2, "layers": 5}
    strided = native_schedules(family("z_image"), stacks, interval=2, segment_stride=4)
    assert strided == ["[0] [1]", "[0] [1]", "[0 1] 2 3 [4]"]
    stacks = {"token_refiner.refiner_blocks": 3, "transformer_blocks": 5}
    strided = native_schedules(family("minimaxh3"), stacks, interval=2, segment_stride=4)
    assert strided == ["[0] [1] [2]", "[0 1] 2 3 [4]"]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("flux", "[0] 1 [2] 3 [4]"), ("chroma", "[0] [1] 2 3 [4]"), ("wan", "[0] [1] [2] [3] [4]")],
)
def test_feed_forwards_that_a_native_class_covers(name, schedule):
    """As SimpleTuner 4.10.1 ran them, small."""
    facts = family(name)
    path = facts.stacks[0].path
    keys = {"interval": 2, "segment_stride": 4, "backend": "unsloth-ffn"}
    assert native_schedules(facts, {path: 5}, **keys) == [schedule]
    report = make_report(native_settings(**keys), facts, {path: 5})
    [stack] = native_report(native_settings(**keys).checkpointing, facts, report).stacks
    assert stack.feed_forward == facts.stacks[0].feed_forward


@pytest.mark.parametrize(
    ("facts", "config", "said"),
    [
        ({"segments": "broken"}, keys(2), "`gradient_checkpointing` is on, but TakesAll breaks"),
        ({}, {"gradient_checkpointing_backend": "torch-ffn"}, "torch-ffn, which TakesAll does not"),
        ({}, {"gradient_checkpointing_offload_attention": True}, "does not carry out; write false"),
        ({"fault": "the gradients are wrong"}, keys(1), "the gradients are wrong; write 2 or more"),
        ({"fault": "the gradients are wrong"}, keys(2) | FORCED, "`crepa_enabled` makes TakesAll"),
    ],
)
def test_what_a_native_class_cannot_do_is_refused(facts, config, said):
    model, _ = toy(TakesAll)
    before = copy.copy(model.__dict__)
    with pytest.raises(ConfigError, match="SEG402") as error:
        simpletuner_segckpt.apply(model, config, family=native_family(**facts), native=True)
    assert said in str(error.value)
    assert model.__dict__ == before


def test_a_native_class_with_a_fault_that_segments_do_not_meet(caplog):
    model, _ = toy(TakesAll)
    facts = native_family(fault="the gradients are wrong", backends=("torch", "torch-ffn"))
    report = simpletuner_segckpt.apply(model, keys(2), family=facts, native=True).report
    assert "gradient_checkpointing_interval: the gradients are wrong" in report.remarks
    config = keys(1) | {"gradient_checkpointing_backend": "torch-ffn"}
    simpletuner_segckpt.apply(model, config, family=facts, native=True)
    simpletuner_segckpt.apply(model, {"gradient_checkpointing": False}, family=facts, native=True)
    config = keys(2) | {"gradient_checkpointing_backend": "unsloth"}
    simpletuner_segckpt.apply(model, config, family=facts, native=True)
    assert "is unsloth, but TakesAll recomputes with torch's own function" in caplog.text


def test_a_native_class_without_a_setter_for_an_option():
    class OnlyInterval(WithDoor):
        def set_gradient_checkpointing_interval(self, value):
            self.interval = value

    model, _ = toy(OnlyInterval)
    ignored = keys(2, 4, 1) | {"gradient_checkpointing_keep": "attention"}
    budget = {"gradient_checkpointing_budget": "22GiB"}
    for facts, config, named in (
        (native_family(), ignored, ("segment_stride", "keep", "keep_last")),
        (None, ignored, ("segment_stride", "keep", "keep_last")),
        (native_family(), budget, ("budget",)),
    ):
        with pytest.raises(ConfigError) as error:
            simpletuner_segckpt.apply(model, config, family=facts, native=True)
        assert str(error.value).split("\n") == [
            f"SEG402 error: `gradient_checkpointing_{key}` is given, but OnlyInterval has no "
            "setter for it; leave it out"
            for key in named
        ]
    off = {"gradient_checkpointing": False}
    assert simpletuner_segckpt.apply(model, ignored | off, native=True).report.strategy == "off"
    report = simpletuner_segckpt.apply(model, keys(2), family=native_family(), native=True).report
    assert str(report.stacks[0].schedule) == "[0 1] [2 3] [4 5]"


def test_a_native_report_promises_nothing_that_only_the_class_knows():
    more = {
        "gradient_checkpointing_backend": "unsloth",
        "gradient_checkpointing_offload_attention": True,
        "gradient_checkpointing_offload_prefetch": True,
        "gradient_checkpointing_offload_pin_memory_max_buckets": 3,
    }
    model, _ = toy(TakesAll)
    facts = native_family(backends=("torch", "unsloth", "torch-ffn"), attention_offload=True)
    report = simpletuner_segckpt.apply(model, keys(2, 4) | more, family=facts, native=True).report
    assert (model.backend, model.offload) == ("unsloth", True)
    assert report.lines()[1:] == [
        "blocks: 6 blocks, native",
        "  [0 1] 2 3 [4 5]",
        "  4 recomputed in 2 checkpoint calls, 2 run normally",
        "remark: gradient_checkpointing_offload_pin_memory_max_buckets: the class has no setter "
        "for it; the trainer itself reads it",
        "remark: gradient_checkpointing_offload_prefetch: the class has no setter for it; the "
        "trainer itself reads it",
    ]
    config = keys(2) | {"gradient_checkpointing_backend": "torch-ffn"}
    [stack] = simpletuner_segckpt.apply(model, config, family=facts, native=True).report.stacks
    assert model.backend == "torch-ffn"
    assert (stack.segments, stack.reason) == (
        (),
        "a schedule of the class's own",
    )


def test_removing_a_native_schedule_touches_nothing_else():
    """What others changed since apply() stays as they left it."""
    model, inputs = toy(Native)
    model.eval()
    installation = simpletuner_segckpt.apply(model, keys(2), family=native_family(), native=True)
    model.train()
    model.mine = 3
    model.forward = model.forward
    simpletuner_segckpt.apply(model, keys(2), family=native_family(), native=True)
    installation.remove()  # replaced by an equal one: does nothing
    assert model.interval == 2
    simpletuner_segckpt.remove(model)
    assert (model.training, model.mine, model.interval) == (True, 3, None)
    assert "forward" in model.__dict__
    step(model, inputs)


def test_a_native_setter_that_raises():
    class Raises(Native):
        def set_gradient_checkpointing_backend(self, value):
            raise ValueError(value)

    model, _ = toy(Raises)
    before = copy.copy(model.__dict__)
    with pytest.raises(ValueError, match="torch"):
        simpletuner_segckpt.apply(model, keys(2, 4), family=native_family(), native=True)
    assert model.__dict__ == before


def test_a_native_class_switched_off():
    model, _ = toy(Native)
    model.enable_gradient_checkpointing()
    config = {"gradient_checkpointing": False}
    report = simpletuner_segckpt.apply(model, config, family=native_family(), native=True).report
    assert report.strategy == "off"
    assert not model.gradient_checkpointing
    simpletuner_segckpt.remove(model)
    assert model.gradient_checkpointing


def test_every_family_of_the_trainer_has_its_facts():
    with_facts = [described for described in REGISTRY if described.native]
    assert len(with_facts) >= 45
    omnigen = family("omnigen").native
    assert (omnigen.segments, omnigen.attention_offload) == ("ignored", False)
