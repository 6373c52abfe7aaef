"""LoRA on frozen bases that are quantised: the same gradients, and whole segments.

The right values are those of the same quantised model without a schedule, bit by bit.
"""

from collections import Counter
from functools import partial

import bitsandbytes
import pytest
import torch
from diffusers import TorchAoConfig
from peft import LoraConfig
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
from training import keys, model_and_inputs

import simpletuner_segckpt
from simpletuner_segckpt.verify.step import SEED, counted, step

PLAN = (range(0, 2), range(4, 5))  # of 5 blocks with interval 2 and stride 4
CALLS = Counter({0: 2, 1: 2, 2: 1, 3: 1, 4: 2})


def replace_linears(module, make):
    """Put what ``make`` makes in the place of every linear layer, with the same weights."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            made = make(child.in_features, child.out_features, bias=child.bias is not None)
            made.load_state_dict(child.state_dict())
            setattr(module, name, made.to("cpu").requires_grad_(False))  # which quantises it
        else:
            replace_linears(child, make)


def nf4(model):
    def make(*shape, bias):
        return bitsandbytes.nn.Linear4bit(
            *shape, bias, compute_dtype=torch.float32, quant_type="nf4"
        )

    replace_linears(model.blocks, make)


def llm_int8(model):
    def make(*shape, bias):
        return bitsandbytes.nn.Linear8bitLt(*shape, bias, has_fp16_weights=False)

    replace_linears(model.blocks, make)


def float8_storage(model):
    """diffusers' own: weights wait in float8 and are cast around each layer's forward."""
    model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)


QUANTISATIONS = {
    "torchao int8": lambda model: quantize_(model, Int8WeightOnlyConfig()),
    "torchao float8": lambda model: quantize_(model, Float8WeightOnlyConfig()),
    "bitsandbytes nf4": nf4,
    "bitsandbytes int8": llm_int8,
    "diffusers float8 storage": float8_storage,
}


def add_lora(model):
    torch.manual_seed(SEED)
    names = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=4, target_modules=names, init_lora_weights=False))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # as trainers do, above a base of any type


def frozen_wan():
    model, inputs = model_and_inputs("wan")
    return model.requires_grad_(False), inputs


def gradients(found):
    """Of a step, those that there are."""
    return {name: gradient for name, gradient in found.gradients.items() if gradient is not None}


@pytest.mark.parametrize("quantise", QUANTISATIONS.values(), ids=QUANTISATIONS)
def test_lora_on_a_quantised_base(quantise):
    model, inputs = frozen_wan()
    full_precision = model(**inputs)[0]
    quantise(model)
    assert not torch.equal(model(**inputs)[0], full_precision)
    add_lora(model)
    expected = step(model, inputs)
    assert len(gradients(expected)) == 5 * 2 * 4 * 2  # blocks, attentions, projections, A and B
    for order in ("schedule last", "schedule before LoRA", "schedule first"):
        model, inputs = frozen_wan()
        if order == "schedule first":
            installation = simpletuner_segckpt.apply(model, keys(2, 4))
        quantise(model)
        if order == "schedule before LoRA":
            installation = simpletuner_segckpt.apply(model, keys(2, 4))
        add_lora(model)
        if order == "schedule last":
            installation = simpletuner_segckpt.apply(model, keys(2, 4))
        assert step(model, inputs) == expected
        with counted(model, ["blocks"]) as calls:
            assert step(model, inputs) == expected
        assert calls["blocks"] == CALLS
        assert installation.effect["blocks"].segments == PLAN


def test_a_model_that_diffusers_quantises_while_it_loads(tmp_path):
    model, inputs = model_and_inputs("flux")
    model.save_pretrained(tmp_path)
    config = TorchAoConfig(Int8WeightOnlyConfig())

    def load():
        return type(model).from_pretrained(tmp_path, quantization_config=config).train()

    quantised = load()
    add_lora(quantised)
    expected = step(quantised, inputs)
    for order in ("LoRA", "schedule"):
        quantised = load()
        if order == "schedule":
            installation = simpletuner_segckpt.apply(quantised, keys(2, 4))
        add_lora(quantised)
        if order == "LoRA":
            installation = simpletuner_segckpt.apply(quantised, keys(2, 4))
        for _ in range(2):
            assert step(quantised, inputs) == expected
        assert {stack.segments for stack in installation.effect.stacks} == {PLAN}


@pytest.mark.parametrize(("quantise", "kept"), [("torchao int8", 5), ("bitsandbytes nf4", 0)])
def test_keep_on_a_quantised_base(quantise, kept, caplog):
    """An operator of a library's own is not known as a projection, which is said."""
    model, inputs = frozen_wan()
    QUANTISATIONS[quantise](model)
    add_lora(model)
    expected = step(model, inputs)
    config = {**keys(2), "gradient_checkpointing_keep": ["attention", "ffn"]}
    installation = simpletuner_segckpt.apply(model, config)
    for _ in range(2):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].kept == Counter(attention=5, ffn=kept)
    assert ("quantised" in caplog.text) == (kept == 0)


@pytest.mark.parametrize("quantise", QUANTISATIONS.values(), ids=QUANTISATIONS)
def test_a_budget_on_a_quantised_base(quantise):
    model, inputs = frozen_wan()
    quantise(model)
    add_lora(model)
    expected = step(model, inputs)
    shares = []
    for amount in ("1KiB", "1TiB"):
        config = {"gradient_checkpointing_budget": amount}
        installation = simpletuner_segckpt.apply(model, config)
        for _ in range(2):
            assert step(model, inputs) == expected
        shares.append(installation.effect.within.share)
    assert shares == [1, 0]


@pytest.mark.parametrize("config", [keys(2, 4), {"gradient_checkpointing_budget": "1TiB"}])
def test_quantised_weights_that_are_streamed(config, caplog):
    """They wrap what is copied over that of another block; the wrappers stay."""
    model, inputs = frozen_wan()
    quantize_(model.blocks, Int8WeightOnlyConfig())
    add_lora(model)
    expected = step(model, inputs)
    own = [[getattr(*place).clone() for place in integers(block)] for block in model.blocks]
    slots = [[data.clone() for data in own[0]] for _ in range(2)]

    def bring(block, args, index):
        for place, data, slot in zip(integers(block), own[index], slots[index % 2], strict=True):
            setattr(*place, slot.copy_(data))

    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(partial(bring, index=index))
    installation = simpletuner_segckpt.apply(model, config)
    for _ in range(3):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == tuple(range(b, b + 1) for b in range(5))
    assert caplog.text.count("SEG614 blocks") == 1


def integers(block):
    """Where the quantised weights of a block hold their int8 values: object and attribute."""
    holders = [p for p in block.parameters() if hasattr(p, "__tensor_flatten__")]
    holders = [getattr(p, "tensor_impl", p) for p in holders]  # of torchao before 0.18
    names = ("int_data", "qdata")
    return [(holder, name) for holder in holders for name in names if hasattr(holder, name)]
