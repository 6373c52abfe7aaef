"""Models that are unlike the others: UNets, loops that drop arguments, a ControlNet in parts."""

from collections import Counter

import pytest
import torch
from diffusers import ZImageControlNetModel
from diffusers.models.attention_processor import AuraFlowAttnProcessor2_0
from toys import WithDoor, toy
from training import add_lora, keys, model_and_inputs

import simpletuner_segckpt
from simpletuner_segckpt.schedules.report import UNITS
from simpletuner_segckpt.verify.memory import SavedBytes
from simpletuner_segckpt.verify.step import step

MICRO_BLOCKS = {
    "ResnetBlock2D",
    "BasicTransformerBlock",
    "SDCascadeResBlock",
    "SDCascadeAttnBlock",
    "SDCascadeTimestepBlock",
}


def recomputed(model, inputs):
    """How often each module that the checkpoint function may get runs, by path, in one step."""
    calls = Counter()
    patched = []
    for path, module in model.named_modules():
        if type(module).__name__ in MICRO_BLOCKS:
            forward = module.forward

            def counting(*args, forward=forward, path=path, **kwargs):
                calls[path] += 1
                return forward(*args, **kwargs)

            module.forward = counting
            patched.append(module)
    try:
        result = step(model, inputs)
    finally:
        for module in patched:
            del module.forward
    return result, calls


def explode(*_, **__):
    raise ArithmeticError


@pytest.mark.parametrize(
    ("name", "interval", "stride"), [("sdxl", 2, 4), ("stable_cascade", 3, None)]
)
def test_the_same_micro_blocks_on_step_1_and_step_16(name, interval, stride):
    model, inputs = model_and_inputs(name)
    other, other_inputs = toy(WithDoor)
    other.enable_gradient_checkpointing()
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(interval, stride) | {"model_family": name})
    assert installation.report.family == name
    steps = []
    for number in range(16):
        result, calls = recomputed(model, inputs)
        steps.append(calls)
        assert result == expected, number
        if number % 4 == 0:
            with torch.no_grad():
                model(**inputs)
            last = [m for n, m in model.named_modules() if n in steps[0]][-1]
            last.forward = explode  # half-way through the up blocks
            with pytest.raises(ArithmeticError):
                model(**inputs)
            del last.forward
            step(other, other_inputs)
    assert steps == [steps[0]] * 16
    # Covered modules run twice: as many runs more as there are covered spans, nowhere else.
    effect = installation.effect
    recomputed_spans = sum(len(stack.covered) for stack in effect.stacks)
    installation.remove()
    once = recomputed(model, inputs)[1]
    assert steps[0].total() - once.total() == recomputed_spans
    units = effect[UNITS]
    assert units.covered == tuple(
        index for index in range(len(units.spans)) if index % (stride or interval) < interval
    )


def test_transformers_inside_a_unet_are_segmented_as_stacks():
    model, inputs = model_and_inputs("sdxl")
    installation = simpletuner_segckpt.apply(model, keys(2) | {"model_family": "sdxl"})
    for _ in range(2):
        step(model, inputs)
    wide = {s.path: s.segments for s in installation.effect.stacks if s.strategy == "segmented"}
    assert wide["mid_block.attentions.0.transformer_blocks"] == (
        range(0, 2),
        range(2, 4),
        range(4, 5),
    )
    assert all("transformer_blocks" in path for path in wide)
    assert all("transformer_blocks" not in path for path, _ in installation.report.left_out)


def test_units_that_run_more_often_than_they_were_counted_keep_their_attention():
    model, inputs = model_and_inputs("stable_cascade")
    expected = step(model, inputs)
    asked = {"gradient_checkpointing_keep": ["attention"], "model_family": "stable_cascade"}
    installation = simpletuner_segckpt.apply(model, asked)
    counted = installation.report.stacks[0].blocks
    for _ in range(2):
        assert step(model, inputs) == expected
        units = installation.effect[UNITS]
        assert (len(units.spans), counted) == (30, 18)
        assert units.kept == {"attention": 10}


def test_keep_last_of_a_unet_takes_the_last_units():
    model, inputs = model_and_inputs("sdxl")
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(1, keep_last=2) | {"model_family": "sdxl"})
    for _ in range(2):
        assert step(model, inputs) == expected
        units = installation.effect[UNITS]
        assert units.gap == (len(units.spans) - 2, len(units.spans) - 1)


# Arguments that upstream's own checkpoint branch drops.


class Gained(AuraFlowAttnProcessor2_0):
    """Multiplies by `gain`, which comes from attention_kwargs."""

    def __call__(self, *args, gain=1.0, **kwargs):
        result = super().__call__(*args, **kwargs)
        if isinstance(result, tuple):
            return tuple(tensor * gain for tensor in result)
        return result * gain


@pytest.mark.parametrize("keys_", [keys(1), keys(2), keys(2, 4, keep_last=1)])
def test_auraflow_gets_its_attention_kwargs(keys_):
    model, inputs = model_and_inputs("auraflow")
    model.set_attn_processor(Gained())
    inputs |= {"attention_kwargs": {"gain": 0.5}}
    expected = step(model, inputs)
    model.enable_gradient_checkpointing()
    assert step(model, inputs) != expected  # upstream drops them
    installation = simpletuner_segckpt.apply(model, keys_)
    for _ in range(3):
        assert step(model, inputs) == expected
        assert model.is_gradient_checkpointing
    assert sum(len(stack.covered) for stack in installation.effect.stacks) > 0
    model.disable_gradient_checkpointing()
    assert step(model, inputs) == expected
    assert installation.effect.stacks == ()
    model.enable_gradient_checkpointing()
    assert step(model, inputs) == expected
    assert installation.effect.stacks != ()


def test_an_interrupt_does_not_leave_a_keyword_loop_switched_off():
    model, inputs = model_and_inputs("auraflow")
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    block = model.single_transformer_blocks[1]

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    block.forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(**inputs)
    del block.forward
    for _ in range(2):
        assert step(model, inputs) == expected
        assert model.is_gradient_checkpointing
    for planned in installation.report.stacks:
        assert installation.effect[planned.path].segments == planned.segments


@pytest.mark.parametrize("keys_", [keys(1), keys(2), keys(2, 4, keep_last=1)])
def test_chroma_gets_its_attention_mask_and_lora_scale(keys_):
    model, inputs = model_and_inputs("chroma")
    add_lora(model)
    tokens = inputs["hidden_states"].shape[1] + inputs["encoder_hidden_states"].shape[1]
    mask = torch.ones(inputs["hidden_states"].shape[0], tokens, dtype=torch.bool)
    mask[0, :2] = False
    inputs |= {"attention_mask": mask, "joint_attention_kwargs": {"scale": 0.3}}
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys_)
    for _ in range(3):
        assert step(model, inputs) == expected
    assert {stack.strategy for stack in installation.effect.stacks} == {"per-block"}


@pytest.mark.parametrize("interval", [1, 2, 9])
def test_z_image_controlnet(interval):
    """It shares the refiners of the transformer that it is built on; the hints are carried."""
    transformer, inputs = model_and_inputs("z_image")
    torch.manual_seed(0)
    model = ZImageControlNetModel(
        control_layers_places=[0, 1, 2, 3, 4],
        control_refiner_layers_places=[0, 2],
        control_in_dim=4,
        add_control_noise_refiner="control_noise_refiner",
        dim=32,
        n_refiner_layers=5,
        n_heads=2,
        n_kv_heads=2,
    )
    model = ZImageControlNetModel.from_transformer(model, transformer).train()
    for name, parameter in model.named_parameters():
        if name.endswith("pad_token") or not parameter.any():  # not left as it was in memory
            parameter.data.normal_(std=0.05)
    model.gradient_checkpointing = False  # the class forgets to set it
    inputs = {name: inputs[name] for name in ("x", "t", "cap_feats")}
    inputs["control_context"] = [torch.randn(4, 1, 8, 8) for _ in range(2)]
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(interval))
    assert installation.report.family == "controlnet_z_image"
    for _ in range(3):
        assert step(model, inputs) == expected
    effect = installation.effect
    wide = tuple(range(s, min(s + interval, 5)) for s in range(0, 5, interval))
    for path in ("control_layers", "control_noise_refiner", "context_refiner"):
        assert effect[path].segments == wide
    assert effect["noise_refiner"].covered == (0, 1, 2, 3, 4)
    # A hint is added after blocks 0 and 2.
    assert not any(0 in s[:-1] or 2 in s[:-1] for s in effect["noise_refiner"].segments)


def test_a_unet_keeps_no_more_than_with_its_own_checkpointing():
    model, inputs = model_and_inputs("sdxl")

    def kept():
        with SavedBytes(model) as saved:
            model(**inputs)
        return saved.total

    model.enable_gradient_checkpointing()
    native = kept()
    for interval in (1, 2):
        simpletuner_segckpt.apply(model, keys(interval) | {"model_family": "sdxl"})
        step(model, inputs)
        assert kept() <= native
