"""Installed, disabled, enabled, copied, saved, broken, removed: in any order."""

import _thread
import copy
import gc
import io
import logging
import pickle
import threading
import weakref
from collections import Counter

import pytest
import torch
import torch.utils.checkpoint
from accelerate.utils import compile_regions
from diffusers import ModelMixin
from diffusers.training_utils import EMAModel
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from toys import Doorless, WithDoor, toy
from training import add_lora, entry_of, keys, model_and_inputs, set_dropout

import simpletuner_segckpt
from simpletuner_segckpt.engine import entry as entry_module
from simpletuner_segckpt.engine.entry import CheckpointEntry
from simpletuner_segckpt.engine.patches import ModelPatches
from simpletuner_segckpt.install import apply as apply_module
from simpletuner_segckpt.install.apply import overall_history
from simpletuner_segckpt.model import compiled
from simpletuner_segckpt.model.flags import CheckpointFlags
from simpletuner_segckpt.verify.memory import SavedBytes
from simpletuner_segckpt.verify.step import counted, loss_of, step

STACKS = ["transformer_blocks", "single_transformer_blocks"]
PLAN = (range(0, 2), range(4, 5))  # of 5 blocks with interval 2 and stride 4


@pytest.fixture
def flux():
    return model_and_inputs("flux")


def installed(model, inputs, config=None):
    """An installation whose segments are proven."""
    installation = simpletuner_segckpt.apply(model, config or keys(2, 4))
    for _ in range(2):
        step(model, inputs)
    return installation


def segments(installation):
    return [stack.segments for stack in installation.effect.stacks]


@pytest.fixture
def checkpoint_calls(monkeypatch):
    """The keyword arguments of every call of torch's checkpoint function."""
    calls = []
    real = torch.utils.checkpoint.checkpoint

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", spy)
    return calls


def test_always_non_reentrant(flux, checkpoint_calls):
    model, inputs = flux
    installed(model, inputs)
    assert len(checkpoint_calls) == 6 + 4  # first forward per block, then 2 segments per stack
    assert all(call == {"use_reentrant": False} for call in checkpoint_calls)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_validation_costs_what_inference_costs(flux, checkpoint_calls, context):
    model, inputs = flux
    installation = installed(model, inputs)
    checkpoint_calls.clear()
    effect = installation.effect
    with context(), counted(model, STACKS) as calls:
        model(**inputs)
    assert not checkpoint_calls
    assert set(calls["transformer_blocks"].values()) == {1}
    assert installation.effect is effect
    step(model, inputs)
    assert segments(installation) == [PLAN, PLAN]


def test_disable_and_enable_in_any_order(flux, checkpoint_calls):
    model, inputs = flux
    expected = step(model, inputs)
    installation = installed(model, inputs)
    for calls in (
        ["disable"],
        ["disable", "disable"],
        ["enable", "disable"],
        ["disable", "enable"],
        ["disable", "disable", "enable"],
        ["enable"],
        ["enable", "enable", "disable", "enable"],
    ):
        for call in calls:
            getattr(model, f"{call}_gradient_checkpointing")()
        checkpoint_calls.clear()
        on = calls[-1] == "enable"
        assert model.is_gradient_checkpointing == on
        assert step(model, inputs) == expected
        assert len(checkpoint_calls) == (4 if on else 0), calls
        assert segments(installation) == ([PLAN, PLAN] if on else [])


def test_enable_before_apply(flux):
    model, inputs = flux
    expected = step(model, inputs)
    model.enable_gradient_checkpointing()
    installation = installed(model, inputs)
    with counted(model, STACKS) as calls:
        assert step(model, inputs) == expected
    assert calls["transformer_blocks"] == Counter({0: 2, 1: 2, 2: 1, 3: 1, 4: 2})
    assert segments(installation) == [PLAN, PLAN]


def own_function(block, *args):
    return torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=False)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_checkpoint_function_of_the_trainer_is_replaced_and_that_is_said(flux, caplog, order):
    model, inputs = flux
    expected = step(model, inputs)
    with caplog.at_level(logging.WARNING, "simpletuner_segckpt"):
        if order == "before":
            model.enable_gradient_checkpointing(own_function)
        installation = installed(model, inputs)
        if order == "after":
            model.enable_gradient_checkpointing(own_function)
        for _ in range(2):
            with counted(model, STACKS) as calls:
                assert step(model, inputs) == expected
    assert max(calls["transformer_blocks"].values()) == 2
    assert segments(installation) == [PLAN, PLAN]
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "own_function" in caplog.text
    installation.remove()
    restored = own_function if order == "before" else None
    assert model._gradient_checkpointing_func is restored


@pytest.mark.parametrize("off", [False, "false", "off", "no", "none", "None", 0, "0"])
def test_off_means_off_whoever_enables_it(flux, checkpoint_calls, caplog, off):
    model, inputs = flux
    config = {"gradient_checkpointing": off, "gradient_checkpointing_interval": 4}
    config["gradient_checkpointing_segment_stride"] = 2  # wrong, but without effect
    expected = step(model, inputs)
    with SavedBytes(model) as plain:
        loss_of(model(**inputs))
    model.enable_gradient_checkpointing()
    installation = simpletuner_segckpt.apply(model, config)
    assert installation.report.strategy == "off"
    assert step(model, inputs) == expected
    with caplog.at_level(logging.WARNING, "simpletuner_segckpt"):
        caplog.clear()
        for _ in range(2):
            model.enable_gradient_checkpointing()
            with SavedBytes(model) as saved:
                loss_of(model(**inputs))
            assert saved.total == plain.total
    assert not checkpoint_calls
    assert len(caplog.records) == 1
    assert "off again" in caplog.text


def snapshot(model):
    """Everything that an installation could leave behind, by module name."""
    return {
        name: (
            type(module),
            list(module.__dict__),
            {
                key: value if not isinstance(value, dict) else dict(value)
                for key, value in module.__dict__.items()
                if not key.startswith(("_parameters", "_buffers", "_modules"))
            },
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("kind", [WithDoor, Doorless])
def test_remove_leaves_no_trace(kind, enabled):
    model, inputs = toy(kind)
    if enabled and kind is WithDoor:
        model.enable_gradient_checkpointing()
    function = torch.utils.checkpoint.checkpoint
    before = snapshot(model)
    installation = installed(model, inputs, keys(2))
    simpletuner_segckpt.apply(model, keys(3))  # applied twice
    installation.remove()  # the first one is gone already
    assert snapshot(model) != before
    simpletuner_segckpt.remove(model)
    assert snapshot(model) == before
    simpletuner_segckpt.remove(model)
    assert snapshot(model) == before
    assert torch.utils.checkpoint.checkpoint is function


def test_applied_again_without_the_keys(flux):
    """Leaving keys out clears them: no plan is left over, nothing is wrapped twice."""
    model, inputs = flux
    expected = step(model, inputs)
    installed(model, inputs)
    installation = installed(model, inputs, {"gradient_checkpointing": True})
    with counted(model, STACKS) as calls:
        assert step(model, inputs) == expected
    assert calls["transformer_blocks"] == Counter(dict.fromkeys(range(5), 2))
    assert len(model._forward_pre_hooks) == 1
    assert len(model._forward_hooks) == 2  # that it returned, and that it is over
    assert segments(installation) == [tuple(range(b, b + 1) for b in range(5))] * 2


def test_a_bad_config_leaves_the_model_as_it_is(flux):
    model, inputs = flux
    installation = installed(model, inputs)
    for bad in (keys(2, 1), {"gradient_checkpointing_keep": "attentions"}, "/no/such/file.json"):
        with pytest.raises(simpletuner_segckpt.ConfigError):
            simpletuner_segckpt.apply(model, bad)
    with pytest.raises(simpletuner_segckpt.UnknownFamily):
        simpletuner_segckpt.apply(model, keys(2), family="fluxx")
    step(model, inputs)
    assert segments(installation) == [PLAN, PLAN]


# What an apply does, in this order: who can raise in it, and what.
STAGES = [
    (CheckpointEntry, "step_aside"),
    (CheckpointFlags, "__init__"),
    (ModelPatches, "claim"),
    (ModelPatches, "intercept_blocks"),
    (ModelPatches, "intercept_parts"),
    (ModelMixin, "enable_gradient_checkpointing"),
    (torch.nn.Module, "register_forward_pre_hook"),
    (torch.nn.Module, "register_forward_hook"),
    (entry_module, "cache_makers"),
    (apply_module, "Installation"),
    (logging.Logger, "info"),
]
ONLY_OF = {"enable_gradient_checkpointing": WithDoor, "intercept_blocks": Doorless}


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("kind", "stage"),
    [(k, s) for k in (WithDoor, Doorless) for s in STAGES if k is ONLY_OF.get(s[1], k)],
    ids=lambda value: value[1] if isinstance(value, tuple) else value.__name__,
)
def test_an_apply_that_fails_leaves_the_schedule_that_was_there(
    kind, stage, after, error, monkeypatch
):
    model, inputs = toy(kind)
    model.register_forward_hook(lambda *_: None)  # those of others stay where they are
    expected = step(model, inputs)
    pristine = snapshot(model)
    installation = installed(model, inputs, keys(2))
    model.register_forward_hook(lambda *_: None)
    before = snapshot(model)
    holders = set(compiled._holders)
    real = getattr(*stage)

    def fail(*args, **kwargs):
        if after:
            real(*args, **kwargs)
        raise error("boom")

    with monkeypatch.context() as patched:
        patched.setattr(*stage, fail)
        with pytest.raises(error):
            simpletuner_segckpt.apply(model, keys(3))
    assert snapshot(model) == before
    assert simpletuner_segckpt.installation_of(model).report is installation.report
    assert not compiled._holders - holders
    assert step(model, inputs) == expected
    assert installation.history.trained == 3
    assert segments(installation) == [(range(0, 2), range(2, 4), range(4, 6))]
    assert simpletuner_segckpt.apply(model, keys(3)).report is not installation.report
    simpletuner_segckpt.remove(model)
    simpletuner_segckpt.remove(model)
    model._forward_hooks.popitem()
    assert snapshot(model) == pristine


def test_a_first_apply_that_fails_leaves_no_trace(monkeypatch):
    model, _ = toy(Doorless)
    before = snapshot(model)
    for stage in STAGES[1:]:
        with monkeypatch.context() as patched:
            patched.setattr(*stage, explode)
            if stage[0] is not ModelMixin:
                with pytest.raises(ArithmeticError):
                    simpletuner_segckpt.apply(model, keys(2))
        assert snapshot(model) == before
    assert simpletuner_segckpt.installation_of(model) is None


def test_an_apply_that_fails_on_a_model_whose_regions_are_compiled(monkeypatch):
    """The schedule is on the model and on the copy of it that accelerate trains."""
    model, inputs = toy(WithDoor)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    twin = compile_regions(model, backend="eager")
    step(model, inputs)
    assert step(model, inputs, run=twin) == expected
    before = snapshot(model), snapshot(twin)
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointEntry, "attach", explode)
        with pytest.raises(ArithmeticError):
            simpletuner_segckpt.apply(twin, keys(3))
    assert (snapshot(model), snapshot(twin)) == before
    assert step(model, inputs, run=twin) == expected
    assert installation.history.trained == 3


def test_names_and_files_are_untouched(flux, tmp_path):
    model, inputs = flux
    names = list(model.state_dict())
    parameters = [name for name, _ in model.named_parameters()]
    before = EMAModel(model.parameters(), model_cls=type(model), model_config=model.config)
    installed(model, inputs)
    after = EMAModel(model.parameters(), model_cls=type(model), model_config=model.config)
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == parameters
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, inputs)
        optimizer.step()
        for ema in (before, after):
            ema.step(model.parameters())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model")
    torch.testing.assert_close(dict(loaded.state_dict()), state, rtol=0, atol=0)
    for name, ema in (("before", before), ("after", after)):
        ema.save_pretrained(tmp_path / name)
        [file] = (tmp_path / name).glob("*.safetensors")
        assert sorted(load_file(file)) == sorted(names)
    model.load_state_dict(state)
    before.copy_to(model.parameters())


def roundtrip(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", [WithDoor, Doorless])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), roundtrip]
)
def test_copies_are_independent(kind, duplicate, native):
    model, inputs = toy(kind)
    expected = step(model, inputs)
    if native and kind is WithDoor:
        model.enable_gradient_checkpointing()
    installation = installed(model, inputs, keys(2, 4))
    twin = duplicate(model)
    twin_blocks = {id(block) for block in twin.blocks}
    with counted(twin, ["blocks"]) as calls:
        assert step(twin, inputs) == expected
    assert calls["blocks"] == Counter({0: 2, 1: 2, 2: 1, 3: 1, 4: 2, 5: 2})
    assert twin_blocks.isdisjoint(map(id, model.blocks))
    with torch.no_grad():  # the copy runs its own blocks
        for parameter in twin.blocks.parameters():
            parameter.zero_()
        changed = twin(**inputs)
    assert not torch.equal(changed, model(**inputs))
    simpletuner_segckpt.remove(twin)
    with counted(twin, ["blocks"]) as calls:
        step(twin, inputs)
    kept_native = native and kind is WithDoor
    assert set(calls["blocks"].values()) == ({2} if kept_native else {1})
    assert step(model, inputs) == expected
    assert segments(installation) == [(range(0, 2), range(4, 6))]
    watcher = weakref.ref(model)
    del model, installation
    gc.collect()
    assert watcher() is None


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), roundtrip]
)
def test_a_copy_counts_for_itself(duplicate):
    model, inputs = toy(WithDoor)
    installation = installed(model, inputs, keys(2))
    twin = duplicate(model)
    own = simpletuner_segckpt.installation_of(twin)
    assert own.effect is None
    assert str(own.history) == "forwards: none observed"
    step(twin, inputs)
    with torch.no_grad():
        twin(**inputs)
    assert segments(own) == [(range(0, 2), range(2, 4), range(4, 6))]  # what was proven holds
    assert (own.history.trained, own.history.without_gradients) == (1, 1)
    assert (installation.history.trained, installation.history.without_gradients) == (2, 0)
    together = duplicate is copy.deepcopy
    overall = overall_history(installation)
    assert (overall.trained, overall.without_gradients) == (2 + together, together)
    step(model, inputs)
    assert (own.history.trained, installation.history.trained) == (1, 3)
    assert overall_history(own).trained == (4 if together else 1)


def test_a_shallow_copy_counts_for_its_model():
    """accelerate makes one when it compiles regions."""
    model, inputs = toy(WithDoor)
    installation = installed(model, inputs, keys(2))
    step(model, inputs, run=copy.copy(model))
    step(model, inputs, run=compile_regions(model, backend="eager"))
    assert installation.history.trained == 4


def test_peft_wrapping_and_eval_mode_of_the_base(flux):
    """Gradients flow, so it applies, whatever train() and eval() say; dropout stays off."""
    model, inputs = flux
    set_dropout(model)
    config = LoraConfig(r=4, lora_dropout=0.0, target_modules=["to_q", "to_k"])
    wrapped = get_peft_model(model, config)
    wrapped.eval()
    expected = step(wrapped, inputs)
    installation = simpletuner_segckpt.apply(wrapped, keys(2, 4))
    assert installation.model is model
    for _ in range(2):
        with counted(model, STACKS) as calls:
            assert step(wrapped, inputs) == expected
    assert calls["transformer_blocks"] == Counter({0: 2, 1: 2, 2: 1, 3: 1, 4: 2})
    assert segments(installation) == [PLAN, PLAN]


def test_freezing_in_the_middle_of_a_run(flux):
    model, inputs = flux
    add_lora(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    first = [p for block in model.transformer_blocks[:2] for p in block.parameters()]
    first = [p for p in first if p.requires_grad]
    inputs["hidden_states"].requires_grad_(False)
    installation = simpletuner_segckpt.apply(model, keys(2))
    step(model, inputs)
    for frozen in ([], first, []):
        for parameter in trained:
            parameter.requires_grad_(all(parameter is not f for f in frozen))
        with counted(model, STACKS) as calls:
            got = step(model, inputs)
        # Nothing in the first segment needs a gradient, so nothing is recomputed there.
        assert calls["transformer_blocks"][0] == (1 if frozen else 2)
        assert calls["transformer_blocks"][2] == 2
        assert installation.effect["transformer_blocks"].strategy == "segmented"
        model.disable_gradient_checkpointing()
        assert step(model, inputs) == got
        model.enable_gradient_checkpointing()


def test_same_blocks_on_every_step_whatever_ran_in_between(flux):
    """No global counter decides, and nobody else's checkpointing is touched."""
    model, inputs = flux
    other, other_inputs = toy(WithDoor)
    other.enable_gradient_checkpointing()
    simpletuner_segckpt.apply(model, keys(3))
    function = torch.utils.checkpoint.checkpoint
    recomputed = []
    for _ in range(4):
        with counted(model, STACKS) as calls, counted(other, ["blocks"]) as others:
            step(model, inputs)
            step(other, other_inputs)
        recomputed.append({path: dict(counter) for path, counter in calls.items()})
        assert others["blocks"] == Counter(dict.fromkeys(range(6), 2))
        with torch.no_grad():
            model(**inputs)
        with pytest.raises(TypeError):
            model(**inputs | {"hidden_states": "no tensor"})
        assert torch.utils.checkpoint.checkpoint is function
    assert recomputed == [recomputed[0]] * 4


def explode(*_, **__):
    raise ArithmeticError("boom")


@pytest.mark.parametrize("where", ["forward", "recompute"])
def test_an_exception_in_a_block_disturbs_nothing(flux, where):
    model, inputs = flux
    expected = step(model, inputs)
    installation = installed(model, inputs)
    block = model.transformer_blocks[1]
    original, failing = block.forward, []
    block.forward = lambda *args, **kwargs: (explode if failing else original)(*args, **kwargs)
    loss = loss_of(model(**inputs))
    failing.append(True)
    with pytest.raises(ArithmeticError):
        model(**inputs) if where == "forward" else loss.backward()
    del block.forward
    assert step(model, inputs) == expected
    assert segments(installation) == [PLAN, PLAN]


def test_an_exception_in_the_loop_disturbs_nothing():
    model, inputs = toy(WithDoor)
    expected = step(model, inputs)
    installation = installed(model, inputs, keys(3))
    model.between = lambda index, state: explode() if index == 1 else state
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            model(**inputs)
    model.between = None
    assert step(model, inputs) == expected
    assert segments(installation) == [(range(0, 3), range(3, 6))]


def test_threads_do_not_meet(flux):
    model, inputs = flux
    expected = step(model, inputs)
    installation = installed(model, inputs)
    results = {}

    def run(name):
        losses = [loss_of(model(**inputs)).detach() for _ in range(5)]
        results[name] = losses

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(loss, expected.loss) for losses in results.values() for loss in losses)
    assert segments(installation) == [PLAN, PLAN]


def test_a_thread_that_python_did_not_start():
    """No list of threads names it, unless it asks for its own."""
    model, inputs = toy(Doorless)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    for _ in range(2):
        assert step(model, inputs) == expected
    main, entered, may_go_on, ended = threading.get_ident(), *(threading.Event() for _ in range(3))
    losses = []

    def wait(index, state):
        if threading.get_ident() != main and index == 2:
            entered.set()
            assert may_go_on.wait(60)
        return state

    def run():
        losses.append(loss_of(model(**inputs)).detach())
        ended.set()

    model.between = wait
    _thread.start_new_thread(run, ())
    assert entered.wait(60)
    losses.append(loss_of(model(**inputs)).detach())
    may_go_on.set()
    assert ended.wait(60)
    assert [torch.equal(loss, expected.loss) for loss in losses] == [True, True]
    assert entry_of(installation).running.by_thread == {}
    assert len(installation.effect["blocks"].segments) == 3


def test_gradient_accumulation_and_two_forwards_before_one_backward(flux):
    model, inputs = flux
    more = inputs | {"hidden_states": inputs["hidden_states"].flip(1)}

    def both(**_):
        return model(**inputs)[0], model(**more)[0]

    expected = step(model, inputs, run=both)
    installed(model, inputs)
    assert step(model, inputs, run=both) == expected


def test_another_shape_of_call_is_proven_anew(flux):
    model, inputs = flux
    longer = inputs | {
        "hidden_states": torch.randn(2, 36, 8),
        "img_ids": torch.zeros(36, 3, dtype=torch.int64),
    }
    expected = step(model, longer), step(model, inputs | {"joint_attention_kwargs": {}})
    installation = installed(model, inputs)
    assert step(model, longer) == expected[0]  # other sizes are the same shape of call
    assert segments(installation) == [PLAN, PLAN]
    assert step(model, inputs | {"joint_attention_kwargs": {}}) == expected[1]
    assert {stack.strategy for stack in installation.effect.stacks} == {"per-block"}
    assert step(model, inputs | {"joint_attention_kwargs": {}}) == expected[1]
    assert segments(installation) == [PLAN, PLAN]


def test_keys_that_are_new_in_every_step_of_a_model_that_is_described(flux):
    """Its file names what matters to the loop, and these keys are not it."""
    model, inputs = flux
    steps = [inputs | {"joint_attention_kwargs": {f"step_{n}": torch.ones(1)}} for n in range(4)]
    expected = [step(model, inputs) for inputs in steps]
    installation = simpletuner_segckpt.apply(model, keys(2, 4))
    strategies = []
    for inputs, right in zip(steps, expected, strict=True):
        assert step(model, inputs) == right
        strategies.append(installation.effect["transformer_blocks"].strategy)
    assert strategies == ["per-block", "segmented", "segmented", "segmented"]


def test_kept_bytes_follow_the_schedule():
    """Exact bytes: one hidden state per segment, and the same for every gap block."""
    model, inputs = model_and_inputs("wan", num_layers=8)
    arguments = []
    forward = model.blocks[1].forward
    model.blocks[1].forward = lambda *args: arguments.append(args) or forward(*args)
    step(model, inputs)
    del model.blocks[1].forward
    [(state, *_)] = arguments
    hidden_state = state.untyped_storage().nbytes()
    assert hidden_state == 2 * 32 * 32 * 4  # batch, tokens, width, float32

    def kept(config):
        installation = installed(model, inputs, config)
        with SavedBytes(model) as saved:
            loss_of(model(**inputs))
        installation.remove()
        return saved.total

    # Interval: 8, 4 and 1 segments.
    per_block = kept(keys(1))
    assert per_block - kept(keys(2)) == 4 * hidden_state
    assert kept(keys(2)) - kept(keys(8)) == 3 * hidden_state
    # A gap block keeps its activations; what enters it is one of them.
    first, second, third = (kept(keys(1, keep_last=last)) for last in (1, 2, 3))
    gap = second - first
    assert gap > 10 * hidden_state
    assert third - second == gap
    assert kept(keys(1, 2)) == first + 3 * gap  # 0 [1] 2 [3] ...: four of them
    # [0 1] 2 3 [4 5] 6 7: four too, and two blocks that no longer keep what enters them.
    assert kept(keys(2, 4)) == first + 3 * gap - 2 * hidden_state


@pytest.mark.parametrize("interval", [2, 3, 4, 5])
@pytest.mark.parametrize("wider_stride", [False, True])
def test_sd3_whose_last_block_returns_no_text(interval, wider_stride):
    model, inputs = model_and_inputs("sd3", num_layers=4)
    expected = step(model, inputs)
    stride = interval + 1 if wider_stride else None
    installation = simpletuner_segckpt.apply(model, keys(interval, stride))
    for _ in range(2):
        assert step(model, inputs) == expected
    assert (
        installation.effect["transformer_blocks"].segments == installation.report.stacks[0].segments
    )


def test_models_of_different_depth_do_not_share_a_plan():
    plans = []
    for depth in (6, 3, 7):
        model, inputs = toy(WithDoor, depth=depth)
        plans.append(installed(model, inputs, keys(2)).effect["blocks"].segments)
    assert plans == [
        (range(0, 2), range(2, 4), range(4, 6)),
        (range(0, 2), range(2, 3)),
        (range(0, 2), range(2, 4), range(4, 6), range(6, 7)),
    ]


def test_forward_called_past_the_hooks_is_said_and_right(flux, caplog):
    model, inputs = flux
    expected = step(model, inputs)
    installed(model, inputs)
    with caplog.at_level(logging.WARNING, "simpletuner_segckpt"):
        for _ in range(2):
            assert step(model, inputs, run=model.forward) == expected
    assert len(caplog.records) == 1
    assert "past its hooks" in caplog.text


class AsksAlways(WithDoor):
    """A loop that hands its blocks over whether gradients are wanted or not."""

    def run(self, block, hidden_states, temb):
        if self.gradient_checkpointing:
            return self._gradient_checkpointing_func(block, hidden_states, temb)
        return block(hidden_states, temb)


def test_a_loop_that_asks_without_gradients_runs_plain_blocks(caplog):
    model, inputs = toy(AsksAlways)
    with torch.no_grad():
        expected = model(**inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    caplog.clear()
    for run in (model, model.forward):
        with torch.no_grad(), counted(model, ["blocks"]) as calls:
            assert torch.equal(run(**inputs), expected)
        assert set(calls["blocks"].values()) == {1}
    assert not caplog.records
    assert installation.history.past_the_hooks == 0


def test_autocast_with_its_weight_cache():
    """A weight cast outside a segment and used inside it, in one autocast context."""
    model, inputs = model_and_inputs("flux")
    model.transformer_blocks[2].ff = model.transformer_blocks[0].ff  # shared across segments
    model.transformer_blocks[3].ff = model.transformer_blocks[0].ff

    def run(**inputs):
        with torch.no_grad():
            model(**inputs)
        return model(**inputs)[0] + model(**inputs)[0]

    expected = step(model, inputs, autocast=True, run=run)
    installed(model, inputs)
    assert step(model, inputs, autocast=True, run=run) == expected
