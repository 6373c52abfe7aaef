"""Adapters of every kind: the order in which they, accelerate and the schedule come is free.

The right values are those of the same training without a schedule: losses, gradients, trained
weights and the random state after it, bit by bit.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from diffusers.training_utils import EMAModel
from lycoris import create_lycoris
from peft import (
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch.nn import Module
from training import keys, model_and_inputs

import simpletuner_segckpt
from simpletuner_segckpt.verify.step import SEED, Step, loss_of, step

PLAN = (range(0, 2), range(4, 5))  # of 5 blocks with interval 2 and stride 4
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


@dataclass
class Trained:
    """What an adapter makes of a model: what is called, and what has the trained weights."""

    called: Module
    network: Module | None = None  # of LyCORIS, which is not part of the model

    @property
    def parameters(self):
        return [p for p in (self.network or self.called).parameters() if p.requires_grad]

    def step(self, inputs, autocast=False):
        if self.network is None:
            return step(self.called, inputs, autocast)
        self.network.zero_grad(set_to_none=True)
        found = step(self.called, inputs, autocast)
        found.gradients |= {
            f"network.{name}": p.grad.clone()
            for name, p in self.network.named_parameters()
            if p.grad is not None
        }
        return found


def lora(**options):
    """Its B matrices are not zero, which would hide the gradients of its A matrices."""
    options = {"lora_dropout": 0.1, "init_lora_weights": False} | options
    return LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, **options)


def full(model):
    return Trained(model.requires_grad_(True))


def added(model, **options):
    model.add_adapter(lora(**options))
    return Trained(model)


def wrapped(model, config=None):
    return Trained(get_peft_model(model, config or lora()))


def several(model):
    model.add_adapter(lora(), "first")
    model.add_adapter(lora(use_dora=True), "second")
    model.set_adapters(["first", "second"], [0.7, 0.3])
    return Trained(model)


def onto_fused(model):
    model.add_adapter(lora())
    model.fuse_lora(0.5)
    model.unload_lora()
    return added(model)


def lycoris(model, algorithm, **options):
    network = create_lycoris(model, linear_dim=4, linear_alpha=2, algo=algorithm, **options)
    network.apply_to()
    for parameter in network.parameters():
        parameter.data.normal_(std=0.1)
    return Trained(model, network.train())


def adapt(model, adapter):
    model.requires_grad_(False)
    torch.manual_seed(SEED)
    trained = adapter(model)
    trained.called.train()
    return trained


def segments(installation):
    return {stack.segments for stack in installation.effect.stacks}


LYCORIS = {
    "locon": partial(lycoris, algorithm="locon", dropout=0.1, rank_dropout=0.1, module_dropout=0.1),
    "bypass": partial(lycoris, algorithm="lora", bypass_mode=True, dropout=0.1),
    "lokr": partial(lycoris, algorithm="lokr", factor=4, rank_dropout=0.1, module_dropout=0.2),
    "loha": partial(lycoris, algorithm="loha", dropout=0.1, module_dropout=0.2),
    "dora": partial(lycoris, algorithm="lora", dora_wd=True),
}


@pytest.mark.parametrize(
    ("name", "adapter", "autocast"),
    [
        ("flux", full, True),
        ("flux", added, False),
        ("wan", added, True),
        ("auraflow", wrapped, True),
        ("flux", partial(added, use_dora=True), True),
        ("auraflow", partial(added, use_dora=True, use_rslora=True), False),
        ("wan", several, False),
        ("auraflow", onto_fused, False),
        (
            "wan",
            partial(wrapped, config=LoKrConfig(target_modules=TARGETS, rank_dropout=0.1)),
            True,
        ),
        ("flux", partial(wrapped, config=LoHaConfig(target_modules=TARGETS)), False),
        (
            "flux",
            partial(
                wrapped,
                config=OFTConfig(r=0, oft_block_size=4, target_modules=TARGETS, module_dropout=0.1),
            ),
            False,
        ),
        (
            "wan",
            partial(wrapped, config=IA3Config(target_modules=TARGETS, feedforward_modules=[])),
            False,
        ),
        ("flux", LYCORIS["lokr"], False),
        ("wan", LYCORIS["locon"], False),
        ("wan", LYCORIS["bypass"], True),
        ("auraflow", LYCORIS["loha"], True),
        ("auraflow", LYCORIS["dora"], False),
    ],
)
def test_an_adapter_before_and_after_the_schedule(name, adapter, autocast):
    model, inputs = model_and_inputs(name)
    expected = adapt(model, adapter).step(inputs, autocast)
    assert any(g is not None and g.any() for g in expected.gradients.values())
    for order in ("adapter", "schedule"):
        model, inputs = model_and_inputs(name)
        if order == "schedule":
            installation = simpletuner_segckpt.apply(model, keys(2, 4))
            for _ in range(2):  # segmented before the adapter is there
                step(model, inputs)
        trained = adapt(model, adapter)
        if order == "adapter":
            installation = simpletuner_segckpt.apply(trained.called, keys(2, 4))
        for _ in range(2):
            assert trained.step(inputs, autocast) == expected
        assert segments(installation) == {PLAN}


def accumulated(model, inputs):
    """A step of three micro-batches, whose gradients add up."""
    torch.manual_seed(SEED)
    model.zero_grad(set_to_none=True)
    losses = []
    for _ in range(3):
        loss = loss_of(model(**inputs)) / 3
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return Step(torch.stack(losses), gradients, torch.get_rng_state())


def validated(model, inputs):
    with torch.no_grad():
        loss = loss_of(model(**inputs))
    return Step(loss, {}, torch.get_rng_state())


def a_life_of_adapters(model, inputs, apply, remove):
    """What trainers do with adapters in the course of a run, and what each step then gives."""

    def added(name, **options):
        torch.manual_seed(SEED)
        model.add_adapter(lora(**options), name)

    model.requires_grad_(False)
    apply()
    added("first")
    yield accumulated(model, inputs)
    yield accumulated(model, inputs)
    model.disable_adapters()  # the base alone, as for a prior
    yield validated(model, inputs)
    model.enable_adapters()
    yield step(model, inputs)
    added("second", use_dora=True)
    model.set_adapter("second")
    yield step(model, inputs)
    model.set_adapters(["first", "second"], [0.3, 0.6])
    yield step(model, inputs)
    remove()
    yield step(model, inputs)
    apply()
    yield step(model, inputs)
    yield accumulated(model, inputs)
    model.delete_adapters("second")
    model.set_adapter("first")
    yield step(model, inputs)
    model.fuse_lora(0.5)
    yield validated(model, inputs)
    model.unfuse_lora()
    yield step(model, inputs)
    model.fuse_lora(0.5)
    model.unload_lora()
    model.requires_grad_(True)
    yield step(model, inputs)
    added("third", use_rslora=True)
    yield step(model, inputs)


@pytest.mark.parametrize("name", ["flux", "auraflow"])
def test_a_life_of_adapters(name, tmp_path):
    model, inputs = model_and_inputs(name)
    expected = list(a_life_of_adapters(model, inputs, lambda: None, lambda: None))
    model.save_lora_adapter(tmp_path / "expected", "third")
    model, inputs = model_and_inputs(name)
    got = a_life_of_adapters(
        model,
        inputs,
        apply=lambda: simpletuner_segckpt.apply(model, keys(2, 4)),
        remove=lambda: simpletuner_segckpt.remove(model),
    )
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine == theirs, number
    installation = simpletuner_segckpt.apply(model, keys(2, 4))
    for _ in range(2):
        assert step(model, inputs) == expected[-1]
    assert segments(installation) == {PLAN}
    model.save_lora_adapter(tmp_path / "got", "third")
    files = [
        load_file(tmp_path / f / "pytorch_lora_weights.safetensors") for f in ("got", "expected")
    ]
    torch.testing.assert_close(*files, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "algorithm"), [("flux", "lokr"), ("auraflow", "locon")])
def test_lycoris_taken_off_and_its_multiplier_changed(name, algorithm):
    def life(trained, inputs):
        yield trained.step(inputs)
        trained.network.set_multiplier(0.5)
        yield trained.step(inputs)
        trained.network.restore()
        yield validated(trained.called, inputs)
        trained.network.apply_to()
        yield trained.step(inputs)

    model, inputs = model_and_inputs(name)
    expected = list(life(adapt(model, LYCORIS[algorithm]), inputs))
    assert len({one.loss.item() for one in expected}) == 3
    model, inputs = model_and_inputs(name)
    trained = adapt(model, LYCORIS[algorithm])
    installation = simpletuner_segckpt.apply(model, keys(2, 4))
    trained.step(inputs)
    assert list(life(trained, inputs)) == expected
    assert segments(installation) == {PLAN}


# With accelerate.


@dataclass
class Outcome:
    """What a run of training leaves behind."""

    losses: list[torch.Tensor]
    weights: list[torch.Tensor]
    averages: list[torch.Tensor]
    random_state: torch.Tensor
    names: list[str]

    def __eq__(self, other):
        lists = ("losses", "weights", "averages")
        return (
            all(torch.equal(a, b) for x in lists for a, b in self._pairs(other, x))
            and torch.equal(self.random_state, other.random_state)
            and self.names == other.names
        )

    def _pairs(self, other, name):
        return zip(getattr(self, name), getattr(other, name), strict=True)


@pytest.fixture
def accelerator():
    """Mixed precision, and gradients that add up over three batches."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def run_with(accelerator, name, adapter, apply, when):
    """Train for two steps of three batches; validate in between with the averaged weights."""
    model, inputs = model_and_inputs(name)
    if when == "first":
        apply(model)
    trained = adapt(model, adapter)
    if when == "before prepare":
        apply(trained.called)
    weights = trained.parameters
    early = EMAModel(weights)
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    prepared, network, optimizer = accelerator.prepare(trained.called, trained.network, optimizer)
    if when == "after prepare":
        apply(prepared)
    if when == "unwrapped":
        apply(accelerator.unwrap_model(prepared))
    late = EMAModel(weights)
    torch.manual_seed(SEED)
    losses = []
    for _ in range(6):
        with accelerator.accumulate(prepared):
            loss = loss_of(prepared(**inputs))
            losses.append(loss.detach())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            for average in (early, late):
                average.step(weights)
            early.store(weights)
            early.copy_to(weights)
            losses.append(validated(prepared, inputs).loss)
            early.restore(weights)
    unwrapped = accelerator.unwrap_model(prepared)
    saved = get_peft_model_state_dict(unwrapped) if network is None else network.state_dict()
    return Outcome(
        losses=losses,
        weights=[weight.detach() for weight in weights],
        averages=[*early.shadow_params, *late.shadow_params],
        random_state=torch.get_rng_state(),
        names=list(saved),
    )


@pytest.mark.parametrize(
    ("name", "adapter", "orders"),
    [
        ("wan", added, ("first", "before prepare", "after prepare", "unwrapped")),
        ("flux", LYCORIS["lokr"], ("first", "after prepare")),
        ("auraflow", partial(wrapped, config=lora(use_dora=True)), ("before prepare", "unwrapped")),
    ],
)
def test_accelerate_with_accumulation_and_averaged_weights(accelerator, name, adapter, orders):
    expected = run_with(accelerator, name, adapter, lambda model: None, "never")
    for when in orders:
        installations = []

        def apply(model):
            installations.append(simpletuner_segckpt.apply(model, keys(2, 4)))

        assert run_with(accelerator, name, adapter, apply, when) == expected, when
        [installation] = installations
        assert segments(installation) == {PLAN}
