"""Everything that forces per-block: the same blocks covered, said once, and only while it holds."""

import logging
from collections import Counter

import pytest
import torch
from diffusers.models.transformers import transformer_flux2
from swapping import BlockSwapper
from training import keys, model_and_inputs

import simpletuner_segckpt
from simpletuner_segckpt.schedules.schedule import make_schedules
from simpletuner_segckpt.verify.step import counted, step

STACKS = {"transformer_blocks": 5, "single_transformer_blocks": 5}


def flux_residuals(inputs, argument):
    return inputs | {argument: [torch.randn(2, 16, 32) for _ in range(5)]}


def flux2_cache(inputs):
    if not hasattr(transformer_flux2, "Flux2KVCache"):
        pytest.skip("Flux.2 has a KV cache since diffusers 0.38")
    cache = transformer_flux2.Flux2KVCache(num_double_layers=5, num_single_layers=5)
    return inputs | {"kv_cache": cache, "kv_cache_mode": "extract", "num_ref_tokens": 4}


def check_calls(calls, schedules):
    for path, schedule in schedules.items():
        covered = dict.fromkeys(schedule.covered, 2)
        assert calls[path] == Counter(covered | dict.fromkeys(schedule.gap, 1)), path


@pytest.mark.parametrize("keep_last", [0, 1, 3, 6])
@pytest.mark.parametrize(
    ("argument", "stack"),
    [
        ("controlnet_block_samples", "transformer_blocks"),
        ("controlnet_single_block_samples", "single_transformer_blocks"),
    ],
)
def test_controlnet_residuals_of_one_stack(argument, stack, keep_last, caplog):
    """The stack with residuals runs per-block; the other one stays segmented."""
    model, inputs = model_and_inputs("flux")
    with_residuals = flux_residuals(inputs, argument)
    expected, expected_plain = step(model, with_residuals), step(model, inputs)
    schedules = make_schedules(STACKS, 2, 4, keep_last)
    installation = simpletuner_segckpt.apply(model, keys(2, 4, keep_last))
    with caplog.at_level(logging.WARNING, "simpletuner_segckpt"):
        for _ in range(3):
            with counted(model, list(STACKS)) as calls:
                assert step(model, with_residuals) == expected
            check_calls(calls, schedules)
    effect = installation.effect
    assert effect[stack].strategy == ("per-block" if schedules[stack].segments else "off")
    assert "residual" in effect[stack].reason
    [condition] = effect.conditions
    assert (condition.name, condition.where, condition.stacks) == (argument, "call", (stack,))
    if schedules[stack].segments:  # otherwise nothing is recomputed there anyway
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert argument in caplog.text
        assert stack in caplog.text
    other = next(path for path in STACKS if path != stack)
    assert effect[other].segments == schedules[other].segments
    # The next plain forwards are segmented again.
    for _ in range(2):
        assert step(model, inputs) == expected_plain
    for path, schedule in schedules.items():
        assert installation.effect[path].segments == schedule.segments


@pytest.mark.parametrize("keep_last", [0, 1, 3])
@pytest.mark.parametrize("argument", ["block_controlnet_hidden_states", "skip_layers"])
def test_sd3_residuals_and_skip_layers(argument, keep_last, caplog):
    model, inputs = model_and_inputs("sd3")
    width = model.transformer_blocks[0].attn.to_q.out_features
    tokens = model(**inputs)[0].shape[-1] ** 2 // 4
    given = {
        "block_controlnet_hidden_states": [torch.randn(2, tokens, width)],
        "skip_layers": [1, 3],
    }
    extra = {argument: given[argument]}
    expected, plain = step(model, inputs | extra), step(model, inputs)
    schedule = make_schedules({"transformer_blocks": 5}, 2, 4, keep_last)["transformer_blocks"]
    installation = simpletuner_segckpt.apply(model, keys(2, 4, keep_last))
    caplog.clear()  # keep_last may leave the stride without effect
    for _ in range(3):
        with counted(model, ["transformer_blocks"]) as calls:
            assert step(model, inputs | extra) == expected
        skipped = {1, 3} if argument == "skip_layers" else set()
        planned = dict.fromkeys(schedule.covered, 2) | dict.fromkeys(schedule.gap, 1)
        ran = Counter({b: n for b, n in planned.items() if b not in skipped})
        assert calls["transformer_blocks"] == ran
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert argument in caplog.text
    assert installation.effect["transformer_blocks"].strategy == "per-block"
    for _ in range(2):
        assert step(model, inputs) == plain
    assert installation.effect["transformer_blocks"].segments == schedule.segments


def test_an_empty_list_of_layers_skips_nothing():
    model, inputs = model_and_inputs("sd3")
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        step(model, inputs | {"skip_layers": []})
    assert installation.effect["transformer_blocks"].strategy == "segmented"


@pytest.mark.parametrize("keep_last", [0, 1, 3, 6])
def test_a_kv_cache_that_identity_cannot_see(keep_last, caplog):
    """Flux.2 puts each block's cache into one dict: the same object for every block."""
    model, inputs = model_and_inputs("flux2")
    cached, plain = step(model, flux2_cache(inputs)), step(model, inputs)
    schedules = make_schedules(STACKS, 2, 4, keep_last)
    installation = simpletuner_segckpt.apply(model, keys(2, 4, keep_last))
    for _ in range(2):
        with counted(model, list(STACKS)) as calls:
            assert step(model, flux2_cache(inputs)) == cached
        check_calls(calls, schedules)
        for stack in installation.effect.stacks:
            assert stack.strategy == ("per-block" if stack.covered else "off")
            assert "cache" in stack.reason or not stack.covered
    said = [r.message for r in caplog.records if r.name == "simpletuner_segckpt"]
    wide = [s for s in schedules.values() if any(len(segment) > 1 for segment in s.segments)]
    assert len(said) == len(set(said)) == len(wide)
    assert all("kv_cache" in message for message in said)
    for _ in range(2):
        assert step(model, inputs) == plain
    for path, schedule in schedules.items():
        assert installation.effect[path].segments == schedule.segments


@pytest.mark.parametrize("keep_last", [0, 1, 3])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_hook_that_captures_a_hidden_state(block, keep_last, caplog):
    """Inside a segment, which ends there; at its end, and in a gap, where nothing has to give."""
    model, inputs = model_and_inputs("wan")
    kept = []

    def capture(module, args, output):
        kept.append(output)

    def loss_with_capture(**inputs):
        kept.clear()
        [sample] = model(**inputs)
        return sample, kept[0]

    plain = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2, 4, keep_last))
    schedule = make_schedules({"blocks": 5}, 2, 4, keep_last)
    for _ in range(2):
        assert step(model, inputs) == plain
    handle = model.blocks[block].register_forward_hook(capture)
    installation.remove()
    expected = step(model, inputs, run=loss_with_capture)
    installation = simpletuner_segckpt.apply(model, keys(2, 4, keep_last))
    caplog.clear()  # keep_last may leave the stride without effect
    with caplog.at_level(logging.WARNING, "simpletuner_segckpt"):
        for _ in range(2):
            with counted(model, ["blocks"]) as calls:
                assert step(model, inputs, run=loss_with_capture) == expected
            check_calls(calls, schedule)
    cut = make_schedules({"blocks": 5}, 2, 4, keep_last)["blocks"].cut(frozenset({block}))
    assert installation.effect["blocks"].segments == cut.segments
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (block == 0)
    assert ("forward hook" in caplog.text and "capture" in caplog.text) == (block == 0)
    handle.remove()
    for _ in range(2):
        assert step(model, inputs) == plain
    assert installation.effect["blocks"].segments == schedule["blocks"].segments


@pytest.mark.parametrize(("interval", "keep_last"), [(1, 0), (2, 3), (4, 1)])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("first", ["swapper", "schedule"])
def test_block_swapping_by_hooks(interval, backward, first, keep_last, caplog):
    """Exact per-block, destroyed by wider segments: found also when it comes after apply."""
    model, inputs = model_and_inputs("flux")
    model, inputs = (
        model.double(),
        {
            k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in inputs.items()
        },
    )
    expected = step(model, inputs)
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    covered_blocks = blocks[: len(blocks) - keep_last]  # one that is kept needs its weights
    # A backward hook changes the order in which autograd adds gradients up, by itself.
    simpletuner_segckpt.apply(model, keys(1, keep_last=keep_last))
    swapper = BlockSwapper(covered_blocks, backward)
    swapped = step(model, inputs)
    swapper.remove()
    simpletuner_segckpt.remove(model)
    torch.testing.assert_close(swapped.gradients, expected.gradients, rtol=0, atol=1e-15)
    if first == "schedule":
        installation = simpletuner_segckpt.apply(model, keys(interval, keep_last=keep_last))
        step(model, inputs)
    swapper = BlockSwapper(covered_blocks, backward)
    if first == "swapper":
        installation = simpletuner_segckpt.apply(model, keys(interval, keep_last=keep_last))
    for _ in range(2):
        assert step(model, inputs) == swapped
    assert {stack.strategy for stack in installation.effect.stacks} == {"per-block"}
    said = [record.message for record in caplog.records]
    assert len(said) == len(set(said)) == (0 if interval == 1 else 2)
    assert all("forward pre-hook" in message for message in said)
    swapper.remove()
    for _ in range(2):
        assert step(model, inputs) == expected
    strategy = "per-block" if interval == 1 else "segmented"
    assert {stack.strategy for stack in installation.effect.stacks} == {strategy}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"musubi_blocks_to_swap": 3}, "musubi_blocks_to_swap"),
        ({"crepa_enabled": "true"}, "crepa_enabled"),
        ({"layersync_enabled": True}, "layersync_enabled"),
        ({"internal_guidance_enabled": 1}, "internal_guidance_enabled"),
        ({"nextlat_enabled": True}, "nextlat_enabled"),
        ({"distillation_method": "self_transcendence"}, "distillation_method"),
        ({"tread_config": {"routes": [{"selection_ratio": 0.5}]}}, "tread_config"),
        ({"controlnet": True}, "controlnet"),
        ({"max_grounding_entities": "4"}, "max_grounding_entities"),
        ({"diffusion_blocks_config": {"blocks": 3}}, "diffusion_blocks_config"),
    ],
)
def test_config_conditions(config, name):
    model, inputs = model_and_inputs("wan")
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2, 4) | config)
    report = installation.report
    assert report.strategy == "per-block"
    assert [c.name for c in report.conditions] == [name]
    assert report.conditions[0].reason
    assert report.stacks[0].covered == (0, 1, 4)
    assert report.stacks[0].segments == (range(0, 1), range(1, 2), range(4, 5))
    with counted(model, ["blocks"]) as calls:
        assert step(model, inputs) == expected
    assert calls["blocks"] == Counter({0: 2, 1: 2, 2: 1, 3: 1, 4: 2})


@pytest.mark.parametrize(
    "config",
    [
        {"layersync_enabled": True, "layersync_lambda": 0},
        {"distillation_method": "lcm"},
        {"tread_config": None, "controlnet": "false", "musubi_blocks_to_swap": "0"},
        {"fsdp_enable": True},
    ],
)
def test_keys_that_are_no_condition(config):
    model, _ = model_and_inputs("wan")
    report = simpletuner_segckpt.apply(model, keys(2) | config).report
    assert (report.strategy, report.conditions) == ("segmented", ())


def test_fsdp_recomputes_itself():
    model, inputs = model_and_inputs("wan")
    model.enable_gradient_checkpointing()
    config = keys(2) | {"fsdp_enable": True, "fsdp_activation_checkpointing": True}
    installation = simpletuner_segckpt.apply(model, config)
    assert installation.report.strategy == "off"
    with counted(model, ["blocks"]) as calls:
        step(model, inputs)
    assert set(calls["blocks"].values()) == {1}
