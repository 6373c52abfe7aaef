"""Text encoders and decoders of transformers: their layers are gates themselves."""

from collections import Counter

import pytest
import torch
from training import keys
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5EncoderModel,
)

import simpletuner_segckpt
from simpletuner_segckpt.prove import counted, step

SIZES = {"num_attention_heads": 2, "intermediate_size": 32}


def llama():
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=6, attention_dropout=0.2, **SIZES
    )
    return LlamaForCausalLM(config), "model.layers"


def clip():
    config = CLIPTextConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=6, attention_dropout=0.2, **SIZES
    )
    return CLIPTextModel(config), "encoder.layers"


def t5():
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=6, num_heads=2)
    return T5EncoderModel(config), "encoder.block"


@pytest.fixture(params=[llama, clip, t5])
def case(request):
    torch.manual_seed(0)
    model, path = request.param()
    path = next(name for name, _ in model.named_modules() if name.endswith(path))
    tokens = torch.randint(0, 50, (2, 7))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return model, path, inputs


def without_cache(model, inputs):
    return inputs | ({"use_cache": False} if isinstance(model, LlamaForCausalLM) else {})


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("enable", ["never", "before", "after"])
@pytest.mark.parametrize("keys_", [keys(1), keys(2), keys(2, 4, keep_last=1)])
def test_gradients_are_equal_and_the_cache_is_off(case, training, enable, keys_, caplog):
    model, path, inputs = case
    model.train(training)
    expected = step(model, without_cache(model, inputs))
    if enable == "before":
        model.gradient_checkpointing_enable()
    installation = simpletuner_segckpt.apply(model, keys_)
    if enable == "after":
        model.gradient_checkpointing_enable()
    for number in range(3):
        with counted(model, [path]) as calls:
            assert step(model, inputs) == expected
        covered = installation.effect[path].covered
        gap = installation.effect[path].gap
        planned = dict.fromkeys(covered, 2) | dict.fromkeys(gap, 1)
        if number:  # the first step may try segments out
            assert calls[path] == Counter(planned)
    assert (
        len(covered)
        == {1: 6, 2: 6 if keys_ == keys(2) else 3}[keys_["gradient_checkpointing_interval"]]
    )
    said = [record.message for record in caplog.records if "use_cache" in record.message]
    assert len(said) == isinstance(model, LlamaForCausalLM)


def linear_calls(model, path, inputs):
    """How often the first linear layer of each block runs in one step."""
    calls = Counter()
    handles = [
        next(m for m in block.modules() if isinstance(m, torch.nn.Linear)).register_forward_hook(
            lambda *_, index=index: calls.update([index])
        )
        for index, block in enumerate(model.get_submodule(path))
    ]
    step(model, inputs)
    for handle in handles:
        handle.remove()
    return set(calls.values())


def test_remove_restores_what_was_enabled(case):
    model, path, inputs = case
    model.train()
    inputs = without_cache(model, inputs)
    for native in (False, True):
        if native:
            model.gradient_checkpointing_enable()
        before = {name: dict(m.__dict__) for name, m in model.named_modules()}
        installation = simpletuner_segckpt.apply(model, keys(2))
        step(model, inputs)
        installation.remove()
        assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before
        assert linear_calls(model, path, inputs) == {2 if native else 1}


def test_the_layers_that_the_library_itself_was_told_to_checkpoint_come_back(case):
    model, path, inputs = case
    model.train()
    inputs = without_cache(model, inputs)
    model.activation_checkpointing_enable(every_n_layers=2)
    flags = [layer.gradient_checkpointing for layer in model.get_submodule(path)]
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    assert sorted(flags) == [False] * 3 + [True] * 3
    installation = simpletuner_segckpt.apply(model, keys(3))
    for _ in range(2):
        step(model, inputs)
    assert installation.effect[path].covered == tuple(range(6))
    assert linear_calls(model, path, inputs) == {2}
    installation.remove()
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before
    assert linear_calls(model, path, inputs) == {1, 2}


def test_generation_keeps_its_cache():
    torch.manual_seed(0)
    model = llama()[0].eval()
    tokens = torch.randint(0, 50, (1, 5))
    expected = model.generate(tokens, max_new_tokens=6, do_sample=False)
    simpletuner_segckpt.apply(model, keys(2))
    assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False), expected)
    with torch.no_grad():
        assert model(tokens).past_key_values is not None


def test_frozen_first_layers(case):
    model, path, inputs = case
    model.train()
    inputs = without_cache(model, inputs)
    for parameter in model.get_input_embeddings().parameters():
        parameter.requires_grad_(False)
    for layer in list(model.get_submodule(path))[:3]:
        layer.requires_grad_(False)
    expected = step(model, inputs)
    simpletuner_segckpt.apply(model, keys(2))
    for _ in range(3):
        assert step(model, inputs) == expected


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_filled_cache_is_never_filled_again(training, implementation, caplog):
    """A recompute would append to it once more, also block by block: such blocks run plainly."""
    torch.manual_seed(0)
    model, path = llama()
    model.config._attn_implementation = implementation
    model.config.attention_dropout = 0.0
    model.train(training)
    tokens = torch.randint(0, 50, (1, 9))

    def run(**_):
        with torch.no_grad():
            cache = model(tokens[:, :4], use_cache=True).past_key_values
        return model(tokens[:, 4:], past_key_values=cache, use_cache=True).logits

    expected = step(model, {}, run=run)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, {}, run=run) == expected
    assert installation.effect[path].covered == ()
    assert "blocks that are given a KV cache run without being recomputed" in caplog.text
    plain = {"input_ids": tokens, "use_cache": None}
    model.config.use_cache = True
    for _ in range(3):
        step(model, plain)
    assert installation.effect[path].segments == (range(0, 2), range(2, 4), range(4, 6))
