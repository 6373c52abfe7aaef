"""Text encoders and decoders of transformers: their layers are gates themselves."""

import copy
import inspect
import logging
import threading
from collections import Counter
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from training import keys, model_and_inputs, warned
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CLIPTextConfig,
    CLIPTextModel,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipTextConfig,
    SiglipTextModel,
    StaticCache,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.models.bart.modeling_bart import BartDecoder
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import simpletuner_segckpt
from simpletuner_segckpt.verify.step import counted, step

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = SIZES | {"num_key_value_heads": 1, "head_dim": 8}
T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 6, "num_heads": 2}
VISION = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2]}


class AudioTokens(nn.Module):
    """HeartMuLa in small: a Llama over the frames, and another over the codebooks of each."""

    def __init__(self, codebooks: int = 3):
        super().__init__()
        self.embeddings = nn.Embedding(50, 16)
        self.backbone = LlamaModel(LlamaConfig(**DECODER))
        self.decoder = LlamaModel(LlamaConfig(**DECODER))
        self.codebooks = codebooks
        self.head = nn.Linear(16, 50)

    def forward(self, input_ids, attention_mask, hidden_states_buffer=None, decode=True):
        capture = hidden_states_buffer is not None
        states = self.backbone(
            inputs_embeds=self.embeddings(input_ids),
            attention_mask=attention_mask,
            output_hidden_states=capture,
        )
        if capture:
            hidden_states_buffer.update(enumerate(states.hidden_states))
        if not decode:
            return states.last_hidden_state
        frames = states.last_hidden_state.flatten(0, 1)[:, None].expand(-1, self.codebooks, -1)
        return self.head(self.decoder(inputs_embeds=frames).last_hidden_state)


def seq2seq_of_bart():
    if "self.layerdrop > 0" not in inspect.getsource(BartDecoder.forward):
        pytest.skip("Bart of this transformers draws random numbers between any two layers")
    sizes = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_layers": 6}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 6}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = BartConfig(vocab_size=50, **sizes, **heads, **special, decoder_start_token_id=2)
    return BartForConditionalGeneration(config)


def qwen_with_vision():
    text = DECODER | {"rope_parameters": ROPE}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=VISION | {"out_hidden_size": 16})
    return Qwen2_5_VLForConditionalGeneration(config)


def t5_with_decoder():
    return T5ForConditionalGeneration(T5Config(**T5, decoder_start_token_id=0))


MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.2)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**DECODER)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**DECODER, use_sliding_window=True, max_window_layers=3, sliding_window=4)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**DECODER)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**DECODER)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**DECODER, sliding_window=4)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**DECODER, sliding_window=4, sliding_window_pattern=3)
    ),
    "qwen2.5-vl": qwen_with_vision,
    "t5": lambda: T5EncoderModel(T5Config(**T5)),
    "umt5": lambda: UMT5EncoderModel(UMT5Config(**T5)),
    "t5 with decoder": t5_with_decoder,
    "bart": seq2seq_of_bart,
    "clip": lambda: CLIPTextModel(CLIPTextConfig(**SIZES, attention_dropout=0.2)),
    "siglip": lambda: SiglipTextModel(SiglipTextConfig(**SIZES)),
    "audio tokens": AudioTokens,
}
WITHOUT_CACHE = ("t5", "umt5", "clip", "siglip")
SEQ2SEQ = ("t5 with decoder", "bart")
TWO_STACKS = (*SEQ2SEQ, "audio tokens")


def make(name):
    """A model in training mode, and inputs that hold a padded sequence."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    tokens = torch.randint(3, 50, (2, 7))
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask}
    return model, inputs | ({"labels": tokens} if name in SEQ2SEQ else {})


def plain_step(model, inputs, **options):
    """The step of the model as it is without a schedule."""
    return step(copy.deepcopy(model), inputs, **options)


def drawn(installation):
    """What ran, for the stacks of six blocks that did."""
    assert installation.effect is not None
    return [stack.drawing for stack in installation.effect.stacks if stack.spans]


def said(caplog, words):
    return sum(words in message for message in warned(caplog.records))


ALONE = "[0] [1] [2] [3] [4] [5]"
PAIRS = "[0 1] [2 3] [4 5]"
STRIDE = "[0 1] 2 3 [4 5]"
STRIDE_LAST = "[0 1] 2 3 [4] 5"  # the last block of the model is kept
# Where the attention of neighbours differs, so does their mask.
CUT = {
    "qwen2": ("[0 1] [2] [3] [4 5]", STRIDE_LAST),
    "gemma2": (ALONE, "[0] [1] 2 3 [4] 5"),
    "gemma3": ("[0 1] [2] [3] [4] [5]", STRIDE_LAST),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_equal_and_the_segments_are_those_of_the_schedule(name, caplog):
    model, inputs = make(name)
    expected = plain_step(model, inputs)
    pairs, stride = CUT.get(name, (PAIRS, STRIDE_LAST))
    first = [STRIDE] if name in TWO_STACKS else []
    stacks = 1 + len(first)
    for config, whole, ran in (
        (keys(1), [ALONE] * stacks, [ALONE] * stacks),
        (keys(2), [PAIRS] * stacks, [pairs] * stacks),
        (keys(2, 4, keep_last=1), [*first, STRIDE_LAST], [*first, stride]),
    ):
        caplog.clear()
        installation = simpletuner_segckpt.apply(model, config)
        for _ in range(2):
            assert step(model, inputs) == expected
        assert drawn(installation) == ran
        paths = [stack.path for stack in installation.effect.stacks if stack.spans]
        with counted(model, paths) as calls:
            assert step(model, inputs) == expected
        for path in paths:
            effect = installation.effect[path]
            planned = dict.fromkeys(effect.covered, 2) | dict.fromkeys(effect.gap, 1)
            assert calls[path] == Counter(planned)
        assert said(caplog, "use_cache is off") == (name not in WITHOUT_CACHE)
        assert said(caplog, "does not get the same `attention_mask`") == (ran != whole)
        assert not said(caplog, "no family describes")
        installation.remove()


@pytest.mark.parametrize("name", ["llama", "clip", "t5 with decoder"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("enable", ["never", "before", "after"])
def test_in_any_mode_and_with_the_library_s_own_switch(name, training, enable, caplog):
    model, inputs = make(name)
    model.train(training)
    expected = plain_step(model, inputs)
    if enable == "before":
        model.gradient_checkpointing_enable()
    installation = simpletuner_segckpt.apply(model, keys(2))
    if enable == "after":
        model.gradient_checkpointing_enable()
    for _ in range(3):
        assert model.is_gradient_checkpointing
        assert step(model, inputs) == expected
    assert set(drawn(installation)) == {PAIRS}
    assert not said(caplog, "is replaced by the schedule")


def switches(model):
    """What every module has that the library sets when it is told to checkpoint."""
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    return {
        path: {name: module.__dict__[name] for name in names if name in module.__dict__}
        for path, module in model.named_modules()
    }


def linear_calls(model, path, inputs):
    """How often the first linear layer of each block runs in one step."""
    calls = Counter()
    handles = [
        next(m for m in block.modules() if isinstance(m, nn.Linear)).register_forward_hook(
            lambda *_, index=index: calls.update([index])
        )
        for index, block in enumerate(model.get_submodule(path))
    ]
    step(model, inputs)
    for handle in handles:
        handle.remove()
    return [calls[index] for index in sorted(calls)]


told_to_checkpoint = pytest.mark.skipif(
    not hasattr(PreTrainedModel, "activation_checkpointing_enable"),
    reason="this transformers has no activation_checkpointing_enable",
)
STACK_OF = {"llama": "model.layers", "clip": "encoder.layers", "t5": "encoder.block"}


@pytest.mark.parametrize("name", STACK_OF)
def test_off_and_on_again_and_removed(name):
    model, inputs = make(name)
    path = STACK_OF[name]
    expected = plain_step(model, inputs)
    for native in (1, 2):
        if native == 2:
            model.gradient_checkpointing_enable()
        before = switches(model)
        installation = simpletuner_segckpt.apply(model, keys(2, 4))
        active = switches(model)
        step(model, inputs)
        model.gradient_checkpointing_disable()
        model.gradient_checkpointing_disable()
        assert not model.is_gradient_checkpointing
        assert step(model, inputs) == expected
        assert installation.effect.stacks == ()
        model.gradient_checkpointing_enable()
        for _ in range(2):
            assert step(model, inputs) == expected
        assert drawn(installation) == [STRIDE]
        assert switches(model) == active
        installation.remove()
        assert switches(model) == before
        assert linear_calls(model, path, inputs) == [native] * 6


def forward_hooks(model):
    return Counter(name for name, module in model.named_modules() for _ in module._forward_hooks)


@pytest.mark.parametrize("before", ["nothing", "hooks", "on"])
def test_peft_that_finds_checkpointing_on_leaves_no_hook_more(before):
    """It then has the embeddings ask for gradients, which enabling asks for, too."""
    left = []
    for installs in (False, True):
        model, inputs = make("llama")
        for _ in range(2 * (before == "hooks")):
            model.enable_input_require_grads()
        if before == "on":
            model.gradient_checkpointing_enable()
        installation = simpletuner_segckpt.apply(model, keys(2)) if installs else None
        wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        model.gradient_checkpointing_enable()
        for _ in range(2):
            step(wrapped, inputs)
        if installation:
            installation.remove()
        left.append(forward_hooks(model))
        model.disable_input_require_grads()
        left.append(forward_hooks(model))
    assert left[:2] == left[2:]
    assert sum(left[0].values()) > 0


@told_to_checkpoint
@pytest.mark.parametrize("name", STACK_OF)
@pytest.mark.parametrize("offload", [False, True])
def test_the_layers_that_the_library_itself_was_told_to_checkpoint(name, offload, caplog):
    model, inputs = make(name)
    path = STACK_OF[name]
    expected = plain_step(model, inputs)
    model.activation_checkpointing_enable(every_n_layers=2, offload=offload)
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    installation = simpletuner_segckpt.apply(model, keys(3))
    assert said(caplog, "some of the model's layers only") == 1
    assert said(caplog, "checkpoint_func (use_reentrant=False)") == offload
    for _ in range(2):
        assert step(model, inputs) == expected
    assert drawn(installation) == ["[0 1 2] [3 4 5]"]
    assert linear_calls(model, path, inputs) == [2] * 6
    installation.remove()
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before
    if not offload:  # which the library does on an accelerator only
        assert linear_calls(model, path, inputs) == [2, 1] * 3


@told_to_checkpoint
def test_options_that_the_schedule_takes_the_place_of_are_named(caplog):
    model, inputs = make("llama")
    installation = simpletuner_segckpt.apply(model, keys(2))
    options = {"use_reentrant": True}
    model.activation_checkpointing_enable(options, every_n_layers=3)
    for _ in range(2):
        step(model, inputs)
    assert drawn(installation) == [PAIRS]
    assert said(caplog, "the checkpoint function checkpoint (use_reentrant=True)") == 1
    assert said(caplog, "some of the model's layers only") == 1


@pytest.mark.parametrize("name", ["llama", "qwen2.5-vl", "t5 with decoder", "bart"])
@pytest.mark.parametrize("asked", ["call", "config"])
def test_no_cache_is_made(name, asked, caplog):
    model, inputs = make(name)
    if "labels" in inputs:  # with which some of the library's models make no cache themselves
        inputs["decoder_input_ids"] = inputs.pop("labels")
    model.config.get_text_config(decoder=True).use_cache = asked == "config"
    inputs |= {"use_cache": True} if asked == "call" else {}
    expected = plain_step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, inputs) == expected
    assert set(drawn(installation)) == {PAIRS}
    assert model(**inputs).past_key_values is None
    assert [message for message in warned(caplog.records) if "visual" not in message] == [
        "use_cache is off while gradient checkpointing trains: recompute would fill it again"
    ]
    with torch.no_grad():
        assert model(**inputs).past_key_values is not None


def filled(model, tokens):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    return cache


CACHES = {
    "empty": lambda model, tokens: DynamicCache(config=model.config),
    "filled": filled,
    "static": lambda model, tokens: StaticCache(config=model.config, max_cache_len=16),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_that_is_given_is_filled_once(cache, training, implementation, caplog):
    """A recompute would append to it once more, also block by block: such blocks run plainly."""
    model, inputs = make("llama")
    model.set_attn_implementation(implementation)
    model.config.attention_dropout = 0.0
    model.train(training)
    tokens = inputs["input_ids"]

    def run(argument="past_key_values", model=model):
        given = CACHES[cache](model, tokens[:, :4])
        output = model(tokens[:, 4:], **{argument: given})
        return output.logits

    plain = copy.deepcopy(model)
    expected = step(plain, {"model": plain}, run=run)
    installation = simpletuner_segckpt.apply(model, keys(2))
    # The newer name of the argument, where the installed model takes it.
    parameters = inspect.signature(LlamaForCausalLM.forward).parameters
    arguments = ["past_key_values", *({"cache"} & parameters.keys())]
    for argument in arguments:
        for _ in range(2):
            assert step(model, {"argument": argument}, run=run) == expected
            assert drawn(installation) == ["0 1 2 3 4 5"]
    assert [message.partition(": ")[2] for message in warned(caplog.records)] == [
        f"{argument}: blocks that are given a KV cache run without being recomputed"
        for argument in arguments
    ]
    for _ in range(2):
        step(model, inputs)
    assert drawn(installation) == [PAIRS]


@pytest.mark.parametrize("name", ["llama", "gemma3", "t5 with decoder"])
@pytest.mark.parametrize("training", [True, False])
def test_generation_is_as_it_was(name, training):
    model, inputs = make(name)
    model.train(training)
    tokens = inputs["input_ids"][:1]
    plain = copy.deepcopy(model)
    installation = simpletuner_segckpt.apply(model, keys(2))
    decoder = installation.report.stacks[-1].path
    for _ in range(2):
        generated = []
        for one in (plain, model):
            torch.manual_seed(3)  # dropout, in training mode
            with counted(one, [decoder]) as calls:
                generated.append(one.generate(tokens, max_new_tokens=6, do_sample=False))
            assert set(calls[decoder].values()) == {6}
        assert torch.equal(*generated)
        step(model, inputs)


class AsksNoGradients(LlamaDecoderLayer):
    """As before transformers 5.24, whose layers drop a cache in training mode, gradients or not."""

    def __call__(self, *args, **kwargs):
        if self.gradient_checkpointing and self.training:
            kwargs |= dict.fromkeys(kwargs.keys() & {"past_key_values", "cache"})
            return self._gradient_checkpointing_func(partial(super().__call__, **kwargs), *args)
        return super().__call__(*args, **kwargs)


@pytest.fixture
def asks_no_gradients():
    """Such a model, and a step that trains on a prefix of which ``part`` makes the cache."""
    model, inputs = make("llama")
    model.config.attention_dropout = 0.0
    for layer in model.model.layers:
        layer.__class__ = AsksNoGradients
        layer.self_attn.attention_dropout = 0.0
    tokens = inputs["input_ids"]

    def train(model, part):
        def run():
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                part(tokens[:, :4], past_key_values=cache)
            assert [cache.get_seq_length(layer) for layer in range(6)] == [4] * 6
            return model(tokens[:, 4:], past_key_values=cache).logits

        return step(model, {}, run=run)

    return model, inputs, train


def test_a_prefix_without_gradients_fills_its_cache(asks_no_gradients, caplog):
    model, inputs, train = asks_no_gradients
    plain = copy.deepcopy(model)
    expected, tokens = train(plain, plain), inputs["input_ids"][:1]
    generated = plain.generate(tokens, max_new_tokens=6, do_sample=False)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for part in (model, model.model, model):
        assert train(model, part) == expected
        assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False), generated)
        assert model.is_gradient_checkpointing
        for _ in range(2):
            step(model, inputs)
        assert drawn(installation) == [PAIRS]
    assert not said(caplog, "past its hooks")
    model.gradient_checkpointing_disable()
    train(model, model)
    assert not model.is_gradient_checkpointing  # the trainer's own choice is not taken back


def test_a_prefix_that_raises_leaves_checkpointing_on(asks_no_gradients):
    model, inputs, _ = asks_no_gradients
    installation = simpletuner_segckpt.apply(model, keys(2))
    for part in (model, model.model):
        for error in (RuntimeError, KeyboardInterrupt):  # torch calls no hook after the latter
            broken = model.model.layers[3].register_forward_hook(raising(error))
            with torch.no_grad(), pytest.raises(error):
                part(inputs["input_ids"])
            broken.remove()
            for _ in range(2):
                step(model, inputs)
            assert model.is_gradient_checkpointing
            assert drawn(installation) == [PAIRS]


def raising(error):
    def hook(*_):
        raise error

    return hook


@pytest.mark.parametrize("outer", ["prefix", "step"])
def test_threads_that_train_and_do_not_share_a_model(asks_no_gradients, outer):
    """The switch is one for all threads: whichever forward ends first leaves it as it is."""
    model, inputs, train = asks_no_gradients
    runs = {"prefix": lambda one: train(one, one), "step": lambda one: step(one, inputs)}
    plain = copy.deepcopy(model)
    expected = {name: run(plain) for name, run in runs.items()}
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        step(model, inputs)
    waiting = [threading.Thread(target=lambda: found.append(filled(model, inputs["input_ids"])))]
    if outer == "prefix":
        waiting = [threading.Thread(target=lambda: found.append(step(model, inputs)))]
    found = []

    def meanwhile(*_):
        while waiting:
            thread = waiting.pop()
            thread.start()
            thread.join(60)
            model.zero_grad()

    model.model.layers[2].mlp.register_forward_pre_hook(meanwhile)
    assert runs[outer](model) == expected[outer]
    if outer == "prefix":
        assert found == [expected["step"]]
    else:
        assert [found[0].get_seq_length(layer) for layer in range(6)] == [7] * 6
    assert model.is_gradient_checkpointing
    step(model, inputs)
    assert drawn(installation) == [PAIRS]


CAPTURES = [{"output_hidden_states": True}, {"output_attentions": True}]


@pytest.mark.parametrize("name", ["llama", "clip", "t5"])
@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("asked", ["call", "config"])
def test_captured_outputs_run_block_by_block(name, capture, asked, caplog):
    """The library captures with hooks that it installs for the first capture, and leaves."""
    model, inputs = make(name)
    model.set_attn_implementation("eager")
    plain = plain_step(model, inputs)
    configured = copy.deepcopy(model)
    installation = simpletuner_segckpt.apply(model, keys(2))
    given = inputs
    if asked == "call":
        given = inputs | capture
    for configurable in (model, configured):
        configurable.config.update(capture if asked == "config" else {})
    expected = step(configured, given)
    [argument] = capture
    for _ in range(2):
        assert step(model, given) == expected
        assert drawn(installation) == [ALONE]
    reason = installation.effect.stacks[0].reason
    assert reason.startswith(f"{argument}: ")
    assert reason.endswith("captured")
    assert said(caplog, reason) == 1
    model.config.update(dict.fromkeys(capture, False))
    for _ in range(2):
        assert step(model, inputs) == plain
    assert drawn(installation) == [PAIRS]


class PenultimateState(nn.Module):
    """A text encoder of which its own caller wants a state in between, as SDXL does."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, **inputs):
        return self.encoder(**inputs, output_hidden_states=True).hidden_states[-2]


@pytest.mark.parametrize("inside", [True, False])
def test_a_state_in_between_that_a_class_of_ones_own_asks_for(inside):
    """Its arguments do not say so, and the hooks of the capture run inside the segments."""
    encoder, inputs = make("clip")
    model = PenultimateState(encoder)
    expected = plain_step(model, inputs)
    installation = simpletuner_segckpt.apply(encoder if inside else model, keys(2))
    for _ in range(3):
        assert step(model, inputs) == expected
    assert drawn(installation) == [ALONE if inside else PAIRS]


def test_audio_tokens_with_a_buffer_of_hidden_states():
    model, inputs = make("audio tokens")

    def run(model=model, **inputs):
        buffer = {}
        output = model(**inputs, hidden_states_buffer=buffer)
        return output, tuple(buffer.values())

    plain = copy.deepcopy(model)
    expected = step(plain, inputs | {"model": plain}, run=run)
    installation = simpletuner_segckpt.apply(model, keys(2), family="heartmula")
    for _ in range(2):
        assert step(model, inputs, run=run) == expected
    assert drawn(installation) == [ALONE, PAIRS]
    assert "hidden_states_buffer" in installation.effect["backbone.layers"].reason
    for _ in range(2):
        step(model, inputs)
    assert drawn(installation) == [PAIRS, PAIRS]


def test_a_part_that_runs_only_in_later_steps():
    """As the image encoder of a language model that saw text at first."""
    model, inputs = make("audio tokens")
    both, first = plain_step(model, inputs), plain_step(model, inputs | {"decode": False})
    installation = simpletuner_segckpt.apply(model, keys(2, 4, keep_last=1))
    for _ in range(3):  # when the first forward showed which lists are stacks, one more is seen
        assert step(model, inputs | {"decode": False}) == first
    assert drawn(installation) == [STRIDE_LAST]
    for _ in range(3):
        assert step(model, inputs) == both
    assert drawn(installation) == [STRIDE, STRIDE_LAST]


@pytest.mark.parametrize("name", STACK_OF)
def test_frozen_first_layers(name):
    model, inputs = make(name)
    for parameter in model.get_input_embeddings().parameters():
        parameter.requires_grad_(False)
    for layer in list(model.get_submodule(STACK_OF[name]))[:3]:
        layer.requires_grad_(False)
    expected = plain_step(model, inputs)
    simpletuner_segckpt.apply(model, keys(2))
    for _ in range(3):
        assert step(model, inputs) == expected


@pytest.mark.parametrize("name", ["t5 with decoder", "clip"])
def test_a_model_that_is_switched_before_backward(name):
    """T5's attention asks whether checkpointing is on; dropout asks for training mode."""
    model, inputs = make(name)
    expected = plain_step(model, inputs)
    simpletuner_segckpt.apply(model, keys(2))

    def run(**inputs):
        output = model(**inputs)
        model.eval()
        model.gradient_checkpointing_disable()
        return output

    for _ in range(3):
        model.train()
        model.gradient_checkpointing_enable()
        assert step(model, inputs, run=run) == expected


LORA = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "clip": ["q_proj", "v_proj", "fc2"],
    "t5": ["q", "v", "wo"],
}


def with_lora(model, name, prepare):
    torch.manual_seed(1)
    if prepare:
        model = prepare_model_for_kbit_training(model)
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=LORA[name], init_lora_weights=False)
    return get_peft_model(model, config)


@pytest.mark.parametrize("name", LORA)
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("prepare", [True, False])
def test_a_lora_on_a_frozen_base_in_eval_mode(name, order, prepare):
    """``prepare_model_for_kbit_training`` freezes it, and enables checkpointing."""
    model, inputs = make(name)
    reference = with_lora(copy.deepcopy(model), name, prepare=False)
    if order == "before":
        installation = simpletuner_segckpt.apply(model, keys(2, 4))
    adapted = with_lora(model, name, prepare)
    if order == "after":
        installation = simpletuner_segckpt.apply(adapted, keys(2, 4))
    for training in (True, False):
        for either in (reference, adapted):
            either.train(training)
        expected = step(reference, inputs)
        for _ in range(2):
            assert step(adapted, inputs) == expected
        assert drawn(installation) == [STRIDE]
    assert adapted.base_model.model.is_gradient_checkpointing


def test_a_text_encoder_trained_along(caplog):
    """Two schedules in one step; switching one off leaves the other."""
    transformer, inputs = model_and_inputs("flux")
    encoder, text = make("t5")
    del inputs["encoder_hidden_states"], inputs["txt_ids"]

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.transformer = encoder, transformer

        def forward(self):
            states = self.encoder(**text).last_hidden_state
            places = torch.zeros(states.shape[1], 3)
            return self.transformer(**inputs, encoder_hidden_states=states, txt_ids=places)

    both = Both()
    expected = plain_step(both, {})
    on_encoder = simpletuner_segckpt.apply(encoder, keys(2))
    on_transformer = simpletuner_segckpt.apply(transformer, keys(2, keep_last=1))
    for _ in range(2):
        assert step(both, {}) == expected
    assert drawn(on_encoder) == [PAIRS]
    ran = drawn(on_transformer)
    on_encoder.remove()
    assert step(both, {}) == expected
    assert linear_calls(encoder, "encoder.block", text) == [1] * 6
    assert drawn(on_transformer) == ran


def test_what_is_said_of_a_class_that_no_file_describes(caplog):
    caplog.set_level(logging.INFO, logger="simpletuner_segckpt")
    for name in ("llama", "clip"):
        simpletuner_segckpt.apply(make(name)[0], keys(2))
    assert not warned(caplog.records)
    assert caplog.text.count("is made of layers of transformers, which are its stacks") == 2
