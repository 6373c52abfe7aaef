"""Hooks and swappers of other code, whenever they come and go: right gradients, or one sentence."""

import contextlib
import copy
import logging
from collections import Counter
from functools import partial
from itertools import chain

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook as AccelerateHook
from accelerate.hooks import add_hook_to_module
from diffusers import FirstBlockCacheConfig
from diffusers.hooks import HookRegistry, ModelHook, apply_group_offloading, apply_layerwise_casting
from peft import LoraConfig, get_peft_model
from swapping import BlockSwapper, LoopSwapper, Releaser
from torch import nn
from torch.nn.utils import parametrizations
from toys import WIDTH, Block, Doorless, WithDoor, toy
from training import add_lora, keys, model_and_inputs
from transformers import LlamaConfig, LlamaForCausalLM

import simpletuner_segckpt
from simpletuner_segckpt import RecomputeError, SegmentBroken, UnsupportedModel
from simpletuner_segckpt.schedules.schedule import make_schedule
from simpletuner_segckpt.verify.step import SEED, counted, loss_of, step

KINDS = [WithDoor, Doorless]
WHEN = ["before", "after", "segmented"]  # apply() comes before, after, or two steps ago
LISTS = ("blocks", "joint_transformer_blocks", "transformer_blocks", "single_transformer_blocks")


def case(kind):
    model, inputs = model_and_inputs(kind) if isinstance(kind, str) else toy(kind)
    return model, inputs, [list(getattr(model, path)) for path in LISTS if hasattr(model, path)]


def around(model, inputs, config, when, attach):
    """Apply the schedule before or after ``attach`` is called; what both return."""
    if when == "before":
        attached = attach()
        return simpletuner_segckpt.apply(model, config), attached
    installation = simpletuner_segckpt.apply(model, config)
    if when == "segmented":
        for _ in range(2):
            step(model, inputs)
    return installation, attach()


def strategies(installation):
    return {stack.strategy for stack in installation.effect.stacks}


# Hooks at the ends of segments, and within.


def scaling(base, method, fired):
    """A hook of diffusers or accelerate that acts on one side of a forward."""

    def pre_forward(self, module, *args, **kwargs):
        fired["before"] += 1
        return (args[0] * 0.5, *args[1:]), kwargs

    def post_forward(self, module, output):
        fired["after"] += 1
        return output * 0.5

    return type("Scaling", (base,), {method: locals()[method]})()


def put_on(kind, side, block, fired):
    if kind == "torch" and side == "before":
        block.register_forward_pre_hook(
            lambda _, args: (fired.update(["before"]), (args[0] * 0.5, *args[1:]))[1]
        )
    elif kind == "torch":
        block.register_forward_hook(
            lambda _, args, output: (fired.update(["after"]), output * 0.5)[1]
        )
    else:
        method = {"before": "pre_forward", "after": "post_forward"}[side]
        if kind == "diffusers":
            hook = scaling(ModelHook, method, fired)
            HookRegistry.check_if_exists_or_initialize(block).register_hook(hook, "scaling")
        else:
            add_hook_to_module(block, scaling(AccelerateHook, method, fired))


@pytest.mark.parametrize("model", ["wan", WithDoor])
@pytest.mark.parametrize("kind", ["torch", "diffusers", "accelerate"])
@pytest.mark.parametrize(
    ("side", "index", "cut"), [("before", 2, 1), ("after", 3, 3), ("before", 3, 2), ("after", 2, 2)]
)
def test_a_hook_on_one_block(model, kind, side, index, cut, caplog):
    """Before the first block of a segment, or after the last, it changes nothing; else it cuts.

    Where no family describes the model, its block is alone: segments are tried out there, and so
    would be the hook.
    """
    described = model == "wan"
    model, inputs, [blocks] = case(model)
    fired = Counter()
    put_on(kind, side, blocks[index], fired)
    expected = step(model, inputs)
    assert fired == {side: 1}
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(3):
        fired.clear()
        assert step(model, inputs) == expected
        assert fired == {side: 2 if side == "before" else 1}
    cuts = {cut} if described else {index - 1, index}
    effect = installation.effect["blocks"]
    assert effect.segments == make_schedule(len(blocks), 2).cut(frozenset(cuts)).segments
    inside = 2 in cuts
    assert effect.strategy == "segmented"
    assert (f"block {index} of `blocks` carries it" in effect.reason) == inside
    assert ("SEG601 segments of blocks end early" in caplog.text) == inside


@pytest.mark.parametrize("kind", ["diffusers", "accelerate"])
def test_a_registry_without_hooks_and_a_hook_that_does_nothing(kind):
    model, inputs, [blocks] = case("wan")
    expected = step(model, inputs)
    for block in blocks:
        if kind == "accelerate":
            add_hook_to_module(block, AccelerateHook())
        else:
            registry = HookRegistry.check_if_exists_or_initialize(block)
            registry.register_hook(ModelHook(), "nothing")
            if block is blocks[1]:
                registry.remove_hook("nothing")
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, inputs) == expected
    assert strategies(installation) == {"segmented"}


# Weights that come and go with hooks.


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(
    ("kind", "interval"), [*((kind, n) for kind in KINDS for n in (1, 2, 4)), ("auraflow", 2)]
)
def test_a_block_swapper(kind, interval, when, caplog):
    """Flux, and a swapper with backward hooks: see ``test_conditions``."""
    model, inputs, stacks = case(kind)
    expected = step(model, inputs)
    attach = partial(BlockSwapper, list(chain(*stacks)), backward=False)
    installation, swapper = around(model, inputs, keys(interval), when, attach)
    for _ in range(2):
        assert step(model, inputs) == expected
    assert strategies(installation) == {"per-block"}
    assert ("forward pre-hook BlockSwapper.fetch" in caplog.text) == (interval > 1)
    swapper.remove()
    for _ in range(2):
        assert step(model, inputs) == expected
    assert strategies(installation) == {"segmented" if interval > 1 else "per-block"}


def test_what_an_author_of_hooks_on_blocks_can_rely_on():
    """Before a block in forward and in its recompute; after it in forward, and in no recompute."""
    model, inputs, [blocks] = case(WithDoor)
    simpletuner_segckpt.apply(model, keys(2, 4))
    fired = {"pre": Counter(), "post": Counter()}
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, i=index: fired["pre"].update([i]))
        block.register_forward_hook(lambda *_, i=index: fired["post"].update([i]))
    for planned in (dict.fromkeys(range(6), 2), {0: 2, 1: 2, 2: 1, 3: 1, 4: 2, 5: 2}):
        step(model, inputs)  # the first one recomputes everything: a hook may bring weights
        assert fired["pre"] == Counter(planned)
        assert fired["post"] == Counter(dict.fromkeys(range(6), 1))
        fired["pre"].clear()
        fired["post"].clear()


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize(
    ("kind", "interval"),
    [*((kind, n) for kind in KINDS for n in (1, 2, 4)), ("flux", 2)],
)
def test_weights_that_are_gathered_and_released_around_every_module(kind, interval, frees, when):
    model, inputs, stacks = case(kind)
    inputs["hidden_states"].requires_grad_()
    expected = step(model, inputs)
    attach = partial(Releaser, list(chain(*stacks)), frees)
    installation, releaser = around(model, inputs, keys(interval), when, attach)
    for _ in range(2):
        assert step(model, inputs) == expected
    assert strategies(installation) == {"per-block"}
    releaser.remove()
    for _ in range(2):
        assert step(model, inputs) == expected
    assert strategies(installation) == {"segmented" if interval > 1 else "per-block"}


def adapted():
    """A small Flux with LoRA, whose own weights are frozen, and its blocks."""
    model, inputs = model_and_inputs("flux", num_layers=2, num_single_layers=2)
    model.requires_grad_(False)
    add_lora(model)
    return model, inputs, [*model.transformer_blocks, *model.single_transformer_blocks]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_frozen_weights_that_are_gathered_and_released_under_adapters(whole, frees, when):
    """torch holds frozen weights themselves, so their shapes are those of the moment it looks."""
    model, inputs, blocks = adapted()
    expected = step(model, inputs)
    attach = partial(Releaser, blocks, frees, frozen=True, whole=whole)
    installation, _ = around(model, inputs, keys(2), when, attach)
    for _ in range(2):
        assert step(model, inputs) == expected
    assert strategies(installation) == {"per-block"}


def test_kept_operators_and_hooks_that_compute_inside_blocks():
    """Weights come in once more in a recompute, with operators that the forward did not run."""
    model, inputs, blocks = adapted()
    expected = step(model, inputs)
    simpletuner_segckpt.apply(model, keys(2) | {"gradient_checkpointing_keep": "attention"})
    brought = []

    class OnceMore(Releaser):
        def gather(self, module, *_):
            super().gather(module)
            for _, parameter in self.own(module) if brought else ():
                parameter.data.copy_(parameter.data.clone())

    OnceMore(blocks, frees=True, frozen=True)

    def run(**inputs):
        output = model(**inputs)
        brought.append(True)
        return output

    assert step(model, inputs, run=run) == expected


# Weights that the loop itself moves, between its blocks.


def swapped_by_the_loop(kind):
    """A toy whose loop swaps, and what its gradients are without."""
    model, inputs = toy(kind)
    expected = step(model, inputs)

    def begin():
        swapper = LoopSwapper(model.blocks)
        model.between = lambda index, state: (swapper.after(index), state)[1]
        swapper.handles = [model.register_forward_pre_hook(lambda *_: swapper.after(-1))]
        return swapper

    def run(swapper, **inputs):
        output = model(**inputs)
        output.register_hook(swapper.bring_all_in)
        return output

    return model, inputs, expected, begin, run


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_swaps_weights(kind):
    model, inputs, expected, begin, run = swapped_by_the_loop(kind)
    run = partial(run, begin())
    assert step(model, inputs, run=run).gradients.keys() == expected.gradients.keys()
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(3):
        assert step(model, inputs, run=run) == expected
    assert strategies(installation) == {"per-block"}
    assert "weights are moved or written before block 1" in installation.effect["blocks"].reason


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_begins_to_swap_when_segments_run_already(kind):
    """Seen before there is any gradient: the step is stopped, and right when it is repeated."""
    model, inputs, expected, begin, run = swapped_by_the_loop(kind)
    installation = simpletuner_segckpt.apply(model, keys(3))
    for _ in range(2):
        assert step(model, inputs) == expected
    assert strategies(installation) == {"segmented"}
    run = partial(run, begin())
    with pytest.raises(SegmentBroken, match="weights are moved or written before block 1"):
        step(model, inputs, run=run)
    for _ in range(2):
        assert step(model, inputs, run=run) == expected
    assert strategies(installation) == {"per-block"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_on_the_model_that_swaps_in_the_background(kind, caplog):
    """What another thread moves may not be seen; the object that does it is."""

    class Offloader:
        def wait_for_block(self, index):
            """Returns when the weights of a block are there."""

    model, inputs = toy(kind)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        step(model, inputs)
    model.offloader = Offloader()
    with caplog.at_level(logging.WARNING, "simpletuner_segckpt"):
        for _ in range(2):
            assert step(model, inputs) == expected
    assert strategies(installation) == {"per-block"}
    [condition] = installation.effect.conditions
    assert (condition.where, condition.name) == ("model", "offloader")
    assert [r.message.split(": ")[1] for r in caplog.records if "by block" in r.message] == [
        "offloader"
    ]
    del model.offloader
    assert step(model, inputs) == expected
    assert strategies(installation) == {"segmented"}


# Hooks that a forward has and its recompute would not, or the other way round.


def scaled_inputs(modules, factor):
    """Pre-hooks that change what modules get, for the time of one forward."""
    return [m.register_forward_pre_hook(lambda _, a: (a[0] * factor, *a[1:])) for m in modules]


def scaled_outputs(modules, factor):
    return [m.register_forward_hook(lambda _, args, output: output * factor) for m in modules]


def by_keyword(modules, factor):
    def hook(module, args, kwargs):
        return (args[0] * factor, *args[1:]), kwargs

    return [m.register_forward_pre_hook(hook, with_kwargs=True, prepend=True) for m in modules]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("register", [scaled_inputs, scaled_outputs, by_keyword])
@pytest.mark.parametrize("where", ["inside", "on blocks"])
def test_hooks_for_the_time_of_one_forward(kind, interval, register, where):
    """Two forwards, each with hooks of its own, and others when one backward runs for both."""
    model, inputs = toy(kind)
    modules = list(model.blocks) if where == "on blocks" else [b.inner for b in model.blocks]

    def two_forwards(**inputs):
        outputs = []
        for factor in (0.5, 2.0):
            handles = register(modules, factor)
            outputs.append(model(**inputs))
            for handle in handles:
                handle.remove()
        left = register(modules[::2], 7.0)
        outputs[0].register_hook(lambda _: None)
        kept.append(left)
        return outputs

    def clear():
        for handle in kept.pop():
            handle.remove()

    kept = []
    expected = step(model, inputs, run=two_forwards)
    clear()
    plain = step(model, inputs)
    assert expected.differences(plain)
    installation = simpletuner_segckpt.apply(model, keys(interval))
    before = [(*m._forward_pre_hooks, *m._forward_hooks) for m in modules]
    for _ in range(3):
        assert step(model, inputs, run=two_forwards) == expected
        clear()
    assert installation.effect["blocks"].covered == tuple(range(6))
    for _ in range(2):
        assert step(model, inputs) == plain
    assert [(*m._forward_pre_hooks, *m._forward_hooks) for m in modules] == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interval", [1, 3])
def test_two_backwards_and_a_recompute_whose_hooks_register_more(kind, interval):
    """What a hook registers during one recompute is not there in the next."""
    model, inputs = toy(kind)
    inner = [block.inner for block in model.blocks]

    def one_more(module, args):
        module.register_forward_pre_hook(lambda _, args: (args[0] + 1,))

    def run():
        handles = [m.register_forward_pre_hook(one_more) for m in inner]
        torch.manual_seed(SEED)
        model.zero_grad()
        loss = loss_of(model(**inputs))
        for module in inner:
            module._forward_pre_hooks.clear()
        for handle in handles:
            handle.remove()
        gradients = []
        for _ in range(2):
            loss.backward(retain_graph=True)
            gradients.append([p.grad.clone() for p in model.parameters()])
        return gradients

    expected = run()
    simpletuner_segckpt.apply(model, keys(interval))
    for _ in range(2):
        for mine, right in zip(run(), expected, strict=True):
            assert all(map(torch.equal, mine, right))
        assert not any(module._forward_pre_hooks for module in inner)


# Adapters.

ALORA = LoraConfig(
    task_type="CAUSAL_LM",
    r=4,
    alora_invocation_tokens=[7, 8],
    target_modules=["q_proj", "k_proj", "v_proj"],
)
MIXED = LoraConfig(
    task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]
)


def language_model():
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, **sizes))
    tokens = torch.randint(10, 50, (2, 9))
    tokens[0, 5:7] = tokens[1, 3:5] = torch.tensor([7, 8])  # where each row invokes the adapter
    return model, {"input_ids": tokens, "labels": tokens, "use_cache": False}


def with_adapters(model, config, *names):
    wrapped = get_peft_model(model, config)
    for name in names:
        wrapped.add_adapter(name, config)
    torch.manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    return wrapped.train()


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("order", ["peft", "apply", "segmented"])
@pytest.mark.parametrize("enabled", [False, True])
def test_alora(interval, order, enabled, caplog):
    """PEFT's hooks say where the adapter begins, and are gone when backward runs."""
    model, inputs = language_model()
    expected = step(with_adapters(copy.deepcopy(model), ALORA), inputs)
    assert all(g.any() for name, g in expected.gradients.items() if "lora_A" in name)
    if order == "peft":
        wrapped = with_adapters(model, ALORA)
        installation = simpletuner_segckpt.apply(wrapped, keys(interval))
    else:
        installation = simpletuner_segckpt.apply(model, keys(interval))
        if order == "segmented":
            for _ in range(2):
                step(model, inputs)
        wrapped = with_adapters(model, ALORA)
    if enabled:
        wrapped.gradient_checkpointing_enable()
    for _ in range(3):
        assert step(wrapped, inputs) == expected
    assert strategies(installation) == {"segmented" if interval == 2 else "per-block"}
    assert "block by block" not in caplog.text


@pytest.mark.parametrize("interval", [1, 2])
def test_a_batch_of_several_adapters(interval):
    """`adapter_names` is for evaluation mode, which gradients do not ask about."""
    model, inputs = language_model()
    wrapped = with_adapters(model, MIXED, "other").eval()
    for name, parameter in wrapped.named_parameters():
        parameter.requires_grad_("lora_" in name)
    inputs["adapter_names"] = ["other", "default"]
    expected = step(wrapped, inputs)
    assert all(g.any() for name, g in expected.gradients.items() if "lora_A" in name)
    installation = simpletuner_segckpt.apply(wrapped, keys(interval))
    for _ in range(3):
        assert step(wrapped, inputs) == expected
    assert strategies(installation) == {"segmented" if interval == 2 else "per-block"}


def switches_adapter(wrapped, **inputs):
    output = wrapped(**inputs).loss
    wrapped.set_adapter("other")
    return output


def without_adapter(wrapped, **inputs):
    with wrapped.disable_adapter():
        return wrapped(**inputs).loss


def evaluates(wrapped, **inputs):
    output = wrapped(**inputs).loss
    wrapped.eval()
    return output


def both(wrapped, **inputs):
    """Two forwards, each with an adapter of its own, before one backward."""
    loss = wrapped(**inputs).loss
    wrapped.set_adapter("other")
    return loss, wrapped(**inputs).loss


def freezes(wrapped, **inputs):
    output = wrapped(**inputs).loss
    for name, parameter in wrapped.named_parameters():
        if "layers.1." in name:
            parameter.requires_grad_(False)
    return output


@pytest.mark.parametrize("run", [switches_adapter, without_adapter, both, freezes, evaluates])
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("dora", [False, True])
def test_what_is_switched_before_backward(run, interval, dora):
    """A forward is recomputed with the adapters, frozen parameters and dropout that it had."""
    model, inputs = language_model()
    wrapped = with_adapters(model, copy.copy(MIXED), "other")
    if dora:
        config = copy.copy(MIXED)
        config.use_dora = True
        wrapped = with_adapters(language_model()[0], config, "other")
    wrapped.base_model.model.model.embed_tokens.weight.requires_grad_(True)

    def one_step():
        wrapped.train().set_adapter("default")
        for name, parameter in wrapped.named_parameters():
            if "layers.1." in name:
                parameter.requires_grad_("default" in name)
        result = step(wrapped, inputs, run=partial(run, wrapped))
        switches = {name: p.requires_grad for name, p in wrapped.named_parameters()}
        return result, switches, wrapped.active_adapter

    expected = one_step()
    installation = simpletuner_segckpt.apply(wrapped, keys(interval))
    for _ in range(3):
        assert one_step() == expected
    assert strategies(installation) == {"segmented" if interval == 2 else "per-block"}


# Captured states.


@pytest.mark.parametrize("kind", [*KINDS, "flux"])
@pytest.mark.parametrize("when", WHEN)
def test_states_that_hooks_capture_in_one_forward(kind, when):
    model, inputs, stacks = case(kind)
    blocks = stacks[-1]
    plain = step(model, inputs)

    def captured(**inputs):
        states = []
        with contextlib.ExitStack() as stack:
            for block in blocks[1:4]:
                hook = block.register_forward_hook(lambda _, args, output: states.append(output))
                stack.callback(hook.remove)
            output = model(**inputs)
        return output, list(states)

    expected = step(model, inputs, run=captured)
    installation, _ = around(model, inputs, keys(2), when, lambda: None)
    for _ in range(2):
        assert step(model, inputs, run=captured) == expected
    for _ in range(2):
        assert step(model, inputs) == plain
    assert strategies(installation) == {"segmented"}


# Hooks of diffusers and accelerate.


@pytest.fixture
def nan_memory():
    """What memory holds before something is written to it: NaN, as ``torch.empty`` then gives."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(
    ("name", "level", "config", "strategy"),
    [
        ("wan", "leaf_level", keys(1), "per-block"),
        ("flux", "leaf_level", keys(2), "segmented"),
        ("flux", "block_level", keys(1), "per-block"),
        ("wan", "block_level", keys(2), "per-block"),
    ],
)
def test_group_offloading(name, level, config, strategy, when, nan_memory, tmp_path):
    """To a file, the one way in which the CPU is rid of weights that are offloaded."""
    model, inputs = model_and_inputs(name)
    expected = step(model, inputs)
    options = {"num_blocks_per_group": 1} if level == "block_level" else {}
    attach = partial(
        apply_group_offloading,
        model,
        "cpu",
        offload_type=level,
        offload_to_disk_path=str(tmp_path),
        **options,
    )
    installation, _ = around(model, inputs, config, when, attach)
    for _ in range(2):
        assert step(model, inputs) == expected
    assert strategies(installation) == {strategy}


@pytest.mark.parametrize(
    ("options", "config", "says"),
    [
        ({"offload_type": "block_level", "num_blocks_per_group": 2}, keys(2), "moves 2 blocks"),
        ({"offload_type": "block_level", "num_blocks_per_group": 1}, keys(1, 2), "blocks 1 3"),
        ({"offload_type": "leaf_level"}, keys(2, 4), "blocks 2 3"),
        ({"offload_type": "leaf_level"}, keys(2, keep_last=1), "blocks 4 needs"),
        (
            {"offload_type": "leaf_level"},
            {"gradient_checkpointing_budget": 22},
            "blocks 0 1 2 3 4 needs",
        ),
        (
            {"offload_type": "leaf_level"},
            {"gradient_checkpointing_backend": "torch-ffn"},
            "blocks 0 1 2 3 4",
        ),
    ],
)
@pytest.mark.parametrize("first", ["apply", "offloading"])
def test_group_offloading_that_would_give_wrong_gradients(options, config, says, first, tmp_path):
    model, inputs = model_and_inputs("wan")
    apply = partial(simpletuner_segckpt.apply, model, config)
    offload = partial(
        apply_group_offloading, model, "cpu", offload_to_disk_path=str(tmp_path), **options
    )
    if first == "apply":
        apply()
        step(model, inputs)
        offload()
        for _ in range(2):
            with pytest.raises(UnsupportedModel, match=says):
                model(**inputs)
    else:
        offload()
        before = dict(model.__dict__)
        with pytest.raises(UnsupportedModel, match=says):
            apply()
        assert model.__dict__ == before
    with torch.no_grad():
        assert model(**inputs)[0].isfinite().all()  # who does not train is not concerned


def test_a_cache_of_diffusers_is_for_inference():
    model, inputs = model_and_inputs("flux")
    expected = step(model, inputs)
    simpletuner_segckpt.apply(model, keys(2))
    model.enable_cache(FirstBlockCacheConfig(threshold=0.2))
    with pytest.raises(UnsupportedModel, match="disable_cache.. before training"):
        model(**inputs)
    model.disable_cache()
    for _ in range(2):
        assert step(model, inputs) == expected


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("config", [keys(1), keys(2), keys(2, 4)], ids=str)
@pytest.mark.parametrize("what", ["casting", "offloading"])
def test_weights_that_are_cast_or_offloaded_by_hooks(what, config, when):
    model, inputs, stacks = case("wan")
    model = model.bfloat16().float().requires_grad_(False)
    model.patch_embedding.requires_grad_(True)
    expected = step(model, inputs)

    def attach():
        for block in stacks[0]:
            if what == "casting":
                apply_layerwise_casting(block, torch.bfloat16, torch.float32)
            else:
                cpu_offload(block, torch.device("cpu"))

    installation, _ = around(model, inputs, config, when, attach)
    for _ in range(2):
        got = step(model, inputs)
        assert torch.equal(got.loss, expected.loss)
        for name in ("patch_embedding.weight", "patch_embedding.bias"):
            assert torch.equal(got.gradients[name], expected.gradients[name])
    wide = what == "casting" and config != keys(1)
    assert strategies(installation) == {"segmented" if wide else "per-block"}


# What blocks compute their weights from.


class Normalised(Block):
    """Writes its buffers in every forward: a power iteration, and running statistics."""

    def __init__(self):
        super().__init__()
        parametrizations.spectral_norm(self.inner)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, hidden_states, temb):
        return self.norm(super().forward(hidden_states, temb))


class Weighted(Block):
    def __init__(self):
        super().__init__()
        parametrizations.weight_norm(self.inner)


def tie(model):
    for block in list(model.blocks)[1:]:
        block.inner.weight = model.blocks[0].inner.weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [keys(1), keys(2), keys(3, 4)], ids=str)
@pytest.mark.parametrize("block", [Normalised, Weighted, Block])
def test_parametrised_and_tied_weights(kind, config, block):
    class Variant(kind):
        def __init__(self, depth=6):
            super().__init__(depth)
            self.blocks = nn.ModuleList(block() for _ in range(depth))
            if block is Block:
                tie(self)

    model, inputs = toy(Variant)
    twin = copy.deepcopy(model)
    installation = simpletuner_segckpt.apply(model, config)
    for _ in range(3):
        assert step(model, inputs) == step(twin, inputs)
        for mine, right in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, right)
    covered = {1: 6, 2: 6, 3: 5}[config["gradient_checkpointing_interval"]]
    assert len(installation.effect["blocks"].covered) == covered


class Averaging(Block):
    """Reads a buffer and writes it in one of the ways that there are."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("mean", None if how == "lazily" else torch.zeros(WIDTH))

    def forward(self, hidden_states, temb):
        mean = torch.zeros(WIDTH) if self.mean is None else self.mean
        update = 0.9 * mean + 0.1 * hidden_states.detach().mean(dim=(0, 1))
        result = super().forward(hidden_states * (1 + mean), temb)
        if self.how in ("by assignment", "lazily"):
            self.mean = update
        elif self.how == "its data":
            self.mean.data.copy_(update)
        elif self.how == "new data":
            self.mean.data = update
        else:
            self.mean.copy_(update)
        return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("how", ["by assignment", "lazily", "its data", "new data", "in place"])
def test_buffers_that_blocks_write(kind, interval, how):
    class Variant(kind):
        def __init__(self, depth=6):
            super().__init__(depth)
            self.blocks = nn.ModuleList(Averaging(how) for _ in range(depth))

    model, inputs = toy(Variant)
    twin = copy.deepcopy(model)
    simpletuner_segckpt.apply(model, keys(interval))
    for _ in range(4):
        assert step(model, inputs) == step(twin, inputs)
        for mine, right in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, right)


def state_of(model):
    """What a recompute puts back for its time, by module name."""
    return {
        name: (
            {k: v.copy() if isinstance(v, dict) else v for k, v in module.__dict__.items()},
            [(p, p.requires_grad) for p in module.parameters(recurse=False)],
            [(id(b), b._version) for b in module.buffers(recurse=False)],
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("copies", [0, 1])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_recompute_that_cannot_begin_leaves_the_modules_as_they_are(
    error, copies, interval, monkeypatch
):
    """The memory for its buffers is not there, say, when some have been put back."""

    class Variant(WithDoor):
        def build(self, depth):
            super().build(depth)
            self.blocks = nn.ModuleList(Averaging("in place") for _ in range(depth))

    model, inputs = toy(Variant)
    twin = copy.deepcopy(model)
    simpletuner_segckpt.apply(model, keys(interval))
    for _ in range(2):
        step(model, inputs)
        step(twin, inputs)
    loss = loss_of(model(**inputs))
    model.eval()
    model.blocks.requires_grad_(False)
    for block in model.blocks:
        block.inner.register_forward_hook(lambda *_: None)
        block.processor = None
    before = state_of(model)
    made = []

    def clone(tensor):
        made.append(tensor)
        if len(made) > copies:
            raise error("there is none")
        return tensor.detach().mul(1)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", clone)
        with pytest.raises(error):
            loss.backward()
    assert len(made) == copies + 1
    assert state_of(model) == before
    model.train().requires_grad_()
    loss_of(twin(**inputs))
    assert step(model, inputs) == step(twin, inputs)


def test_what_is_gone_is_gone_after_a_recompute():
    """A buffer, and an attribute that is None where it was something."""

    class Optional(Averaging):
        def forward(self, hidden_states, temb):
            assert self.processor
            return super().forward(hidden_states, temb)

    class Variant(WithDoor):
        def build(self, depth):
            super().build(depth)
            self.blocks = nn.ModuleList(Optional("in place") for _ in range(depth))

    model, inputs = toy(Variant)
    simpletuner_segckpt.apply(model, keys(2))
    for block in model.blocks:
        block.processor = "plain"
    loss = loss_of(model(**inputs))
    for block in model.blocks:
        block.processor = None
        del block.mean
    loss.backward()
    for block in model.blocks:
        assert "mean" not in block._buffers
        assert block.__dict__["processor"] is None


class Doubling:
    """Stands in for the forward, or the attention processor, of a module for a while."""

    def __init__(self, original):
        self.original = original

    def __call__(self, *args, **kwargs):
        result = self.original(*args, **kwargs)
        return tuple(2 * r for r in result) if isinstance(result, tuple) else 2 * result


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("what", ["block", "linear", "processor"])
def test_what_is_patched_for_one_forward(what, interval):
    model, inputs = model_and_inputs("flux")
    block = model.transformer_blocks[1]
    attributes = {
        "block": (block, "forward"),
        "linear": (block.ff.net[0].proj, "forward"),
        "processor": (block.attn, "processor"),
    }
    module, name = attributes[what]

    def patched(**inputs):
        before = module.__dict__.get(name)
        setattr(module, name, Doubling(getattr(module, name)))
        try:
            return model(**inputs)
        finally:
            if before is None:
                delattr(module, name)
            else:
                setattr(module, name, before)

    expected = step(model, inputs, run=patched)
    assert expected != step(model, inputs)
    simpletuner_segckpt.apply(model, keys(interval))
    for _ in range(3):
        assert step(model, inputs, run=patched) == expected
    assert name not in module.__dict__ or name == "processor"


@pytest.mark.parametrize("interval", [1, 2])
def test_an_adapter_deleted_before_backward(interval):
    def gradients(config):
        model, inputs = model_and_inputs("flux")
        add_lora(model)
        if config:
            simpletuner_segckpt.apply(model, config)
        parameters = dict(model.named_parameters())
        torch.manual_seed(SEED)
        loss = loss_of(model(**inputs))
        model.delete_adapters("default")
        loss.backward()
        return {name: p.grad for name, p in parameters.items() if p.grad is not None}

    expected, found = gradients(None), gradients(keys(interval))
    assert any("lora_A" in name for name in expected)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_adapters_merged_before_backward_are_refused():
    model, inputs = model_and_inputs("flux")
    add_lora(model)
    simpletuner_segckpt.apply(model, keys(2))
    loss = loss_of(model(**inputs))
    layers = [m for m in model.modules() if hasattr(m, "merged_adapters")]
    for layer in layers:
        layer.merge()
    with pytest.raises(RecomputeError, match=r"SEG613 adapters were merged into the weights"):
        loss.backward()
    for layer in layers:
        layer.unmerge()
    step(model, inputs)


def test_a_buffer_that_is_too_large_to_be_copied(monkeypatch, caplog):
    class Counting(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(WIDTH))

        def forward(self, hidden_states, temb):
            self.seen += 1
            return super().forward(hidden_states, temb)

    class Counted(WithDoor):
        def build(self, depth):
            super().build(depth)
            self.blocks = nn.ModuleList(Counting() for _ in range(depth))

    monkeypatch.setattr("simpletuner_segckpt.recompute.buffers.COPIED", WIDTH - 1)
    model, inputs = toy(Counted)
    simpletuner_segckpt.apply(model, keys(1))
    for _ in range(2):
        step(model, inputs)
    assert [block.seen[0].item() for block in model.blocks] == [4.0] * 6
    said = [record.message for record in caplog.records if "buffer" in record.message]
    assert len(said) == 1
    assert "a Counting writes its buffer `seen`" in said[0]


def test_modules_that_hold_each_other():
    """A block with a way back to itself among its modules."""
    model, inputs = toy(WithDoor)
    for block in model.blocks:
        block.inner.owner = block
    with counted(model, ["blocks"]) as calls:
        simpletuner_segckpt.apply(model, keys(2))
        for _ in range(2):
            model(**inputs).sum().backward()
    assert set(calls["blocks"].values()) == {5}  # twice each, and tried out once


def test_a_lora_scale_in_whatever_way_it_is_set():
    """Also by a trainer that sets it on the layers for the time of one forward."""
    model, inputs = model_and_inputs("flux")
    add_lora(model)
    layers = [m for m in model.modules() if hasattr(m, "scaling")]

    def run(**inputs):
        for layer in layers:
            layer.scale_layer(0.3)
        output = model(**inputs)
        for layer in layers:
            layer.unscale_layer(0.3)
        return output

    expected = step(model, inputs, run=run)
    assert expected.differences(step(model, inputs))
    simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, inputs, run=run) == expected
