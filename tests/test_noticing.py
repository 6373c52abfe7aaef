"""Models that a script under ``segckpt launch`` trains in its own way: noticed, and served once."""

import copy
from contextlib import nullcontext
from functools import partial, wraps

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from diffusers.training_utils import EMAModel
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel
from toys import TOY_FAMILY, WIDTH, Block, Doorless, WithDoor, Wrapper, toy
from training import keys

from simpletuner_segckpt import FamilyRegistry, apply, installation_of
from simpletuner_segckpt.config.settings import load_settings
from simpletuner_segckpt.install.launched import Refused
from simpletuner_segckpt.install.scheduled import scheduled

DOORLESS = f"{Doorless.__module__}.Doorless"
CHECKPOINTS = torch.utils.checkpoint.__dict__.copy()


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not torch_module._global_forward_pre_hooks
    for name in ("checkpoint", "CheckpointFunction", "_checkpoint_without_reentrant_generator"):
        assert getattr(torch.utils.checkpoint, name) is CHECKPOINTS[name]


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    """The shipped families, and one of the toy that asks its checkpoint function."""
    folder = tmp_path_factory.mktemp("families")
    (folder / "toy.toml").write_text(TOY_FAMILY)
    return FamilyRegistry.default([folder])


@pytest.fixture
def launched(registry):
    def launched(config=None, **options):
        return scheduled(load_settings(keys(2, 3) | (config or {})), registry, **options)

    return launched


@pytest.fixture
def runs(monkeypatch):
    """How often each block has run with gradients, in the order of their first runs."""
    counts = {}
    forward = Block.forward

    @wraps(forward)
    def counted(self, *args, **kwargs):
        counts[id(self)] = counts.get(id(self), 0) + torch.is_grad_enabled()
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Block, "forward", counted)

    def runs():
        found = list(counts.values())
        counts.clear()
        return found

    return runs


def train(model, inputs, called=None):
    """The gradients of a step."""
    model.zero_grad(set_to_none=True)
    called = model if called is None else called
    called(**inputs).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert grads
    return grads


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


# Two of three blocks: 0 1 - 3 4 - of six.
COVERED = [2, 2, 1, 2, 2, 1]
# The same where no family describes the blocks: segments are tried out when the first is over.
TRIED = [3, 3, 1, 3, 3, 1]
ALL = [2] * 6
NONE = [1] * 6


def test_a_model_that_nobody_switches_on_is_scheduled_from_its_first_forward_on(
    launched, runs, caplog
):
    caplog.set_level("INFO", "simpletuner_segckpt")
    model, inputs = toy(WithDoor)
    expected = train(model, inputs)
    assert runs() == NONE
    with launched() as found:
        assert same(train(model, inputs), expected)
        assert runs() == COVERED
        assert torch_module._global_forward_pre_hooks
        assert same(train(model, inputs), expected)
        assert runs() == COVERED
        assert not torch_module._global_forward_pre_hooks
    assert found.shortfall() is None
    assert "WithDoor is noticed in its first training forward" in caplog.text
    assert found.models[0].lines()[:2] == [
        "WithDoor, forwards: 2 training",
        "  blocks: per-block in 1 (first forward of this shape of call), segmented in 1",
    ]


def test_a_class_that_is_asked_for(launched, runs):
    model, inputs = toy(Doorless)
    expected = train(model, inputs)
    runs()
    with launched() as found:
        train(model, inputs)
        assert runs() == NONE
    assert found.shortfall()[0] == "never-enabled"
    with launched(asked_for=DOORLESS) as found:
        for count in (TRIED, COVERED, COVERED):
            assert same(train(model, inputs), expected)
            assert runs() == count
    assert found.shortfall() is None
    assert [len(s) for s in installation_of(model).effect["blocks"].segments] == [2, 2]


def test_one_that_is_asked_for_and_never_comes(launched):
    model, inputs = toy(WithDoor)
    with launched(asked_for=DOORLESS) as found:
        train(model, inputs)
        train(model, inputs)
        assert torch_module._global_forward_pre_hooks  # it may still come
    rule, reason = found.shortfall()
    assert (rule, reason) == ("never-enabled", f"no training forward of a {DOORLESS} was seen")


def test_the_hook_goes_when_a_model_trains_that_the_script_switched_on():
    """Of a class that nobody looks for, which ran before."""
    model, inputs = toy(WithDoor)
    with scheduled(load_settings(keys(2, 3)), FamilyRegistry.shipped()) as found:
        train(model, inputs)
        model.enable_gradient_checkpointing()
        train(model, inputs)
        assert torch_module._global_forward_pre_hooks
        train(model, inputs)
        assert not torch_module._global_forward_pre_hooks
    assert len(found.models) == 1


def test_off_installs_nothing(launched, runs):
    model, inputs = toy(WithDoor)
    with launched({"gradient_checkpointing": False}) as found:
        assert not torch_module._global_forward_pre_hooks
        train(model, inputs)
    assert (runs(), found.models, installation_of(model)) == (NONE, [], None)


def test_what_does_not_train_is_left_alone(launched, runs):
    model, inputs = toy(WithDoor)
    teacher = copy.deepcopy(model).requires_grad_(False)
    with launched() as found:
        teacher(**inputs)
        with torch.no_grad():
            model(**inputs)
        assert found.models == []
        train(model, inputs)
        average = EMAModel(model.parameters(), model_cls=WithDoor, model_config=model.config)
        average.copy_to(model.parameters())
        assert [told.name for told in found.models] == ["WithDoor"]
        assert installation_of(teacher) is None
        # A frozen one through which a gradient goes trains all the same.
        states = inputs["hidden_states"].clone().requires_grad_()
        runs()
        teacher(states, temb=inputs["temb"]).sum().backward()
        assert runs() == COVERED
    assert len(found.models) == 2


def test_a_copy_is_no_model_more(launched, runs):
    model, inputs = toy(WithDoor)
    with launched() as found:
        train(model, inputs)
        runs()
        train(copy.deepcopy(model), inputs)
        assert runs() == COVERED
    assert [told.history.trained for told in found.models] == [2]


def test_a_schedule_of_the_scripts_own_is_kept(launched, runs):
    model, inputs = toy(Doorless)
    apply(model, keys(1))
    with launched(asked_for=DOORLESS) as found:
        train(model, inputs)
    assert runs() == ALL
    assert [told.report.strategy for told in found.models] == ["per-block"]


def test_one_that_cannot_have_it_ends_the_run(launched):
    model, inputs = toy(WithDoor)
    with launched({"gradient_checkpointing_backend": "torch-ffn"}), pytest.raises(Refused):
        train(model, inputs)


@pytest.mark.parametrize("outer_first", [True, False])
def test_a_model_inside_another_one_is_served_once(launched, runs, outer_first):
    model, inputs = toy(WithDoor)
    outer = Wrapper(model)
    asked = f"{Wrapper.__module__}.Wrapper" if outer_first else ""
    with launched(asked_for=asked) as found:
        for count in (TRIED if outer_first else COVERED, COVERED):
            train(outer, inputs)
            assert runs() == count
    assert [told.name for told in found.models] == ["Wrapper" if outer_first else "WithDoor"]


def wrapped(kind, model):
    if kind == "peft":
        return get_peft_model(model, LoraConfig(target_modules=["inner"]))
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp1":  # whose parameters are the wrapper's
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if kind == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    if kind == "compile":
        return torch.compile(model, backend="eager")
    for block in model.blocks:
        block.compile(backend="eager")
    return model


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["peft", "ddp", "fsdp1", "fsdp2", "regional"])
def test_wrapped_models(group, launched, runs, kind):
    model, inputs = toy(WithDoor)
    model = wrapped(kind, model)
    expected = train(model, inputs)
    runs()
    with launched() as found:
        for _ in range(2):
            assert same(train(model, inputs), expected)
            assert runs() == COVERED or kind == "regional"  # whose second run is compiled code
        assert not torch_module._global_forward_pre_hooks
    assert found.shortfall() is None
    [told] = found.models
    assert told.history.lines()[1].startswith("blocks: per-block in 1 (first forward")


def test_a_model_that_is_compiled_as_a_whole(launched, recwarn):
    torch._dynamo.reset()
    compiled = []

    def backend(graph, inputs):
        called = (str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        compiled.append(sum("checkpoint" in name for name in called))
        return graph

    model, inputs = toy(WithDoor)
    expected = train(model, inputs)
    with launched() as found:
        called = torch.compile(model, backend=backend)
        for _ in range(3):
            assert same(train(model, inputs, called), expected)
        assert not torch_module._global_forward_pre_hooks
    assert compiled == [4]  # once
    assert found.models[0].history.compiled
    assert not [w for w in recwarn if "global hooks" in str(w.message)]


@pytest.mark.parametrize("notices", [False, True])
def test_compiled_blocks_are_compiled_as_often_as_without_the_hook(registry, notices):
    torch._dynamo.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    model, inputs = toy(WithDoor)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    config = load_settings(keys(2, 3))
    with scheduled(config, registry) if notices else nullcontext():
        if not notices:
            apply(model, config, registry=registry)
        for _ in range(3):
            train(model, inputs)
    assert len(compiled) == 2  # of what has a gradient, and of the first block


# Loops that checkpoint by themselves, as those of other trainers do.


class Switched(Doorless):
    """Asks a flag, and nothing of anybody else."""

    gradient_checkpointing = False

    def run(self, block, hidden_states, temb):
        if self.training and self.gradient_checkpointing:
            return self.call(block, hidden_states, temb)
        return block(hidden_states, temb)

    def call(self, block, *args):
        return torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=False)


class Always(Switched):
    gradient_checkpointing = True


class Closes(Switched):
    """With a switch of another name, and the function that many scripts copy."""

    gradient_checkpointing = None
    use_checkpointing = True

    def run(self, block, hidden_states, temb):
        def create_custom_forward(module):
            def custom_forward(*inputs):
                return module(*inputs)

            return custom_forward

        return CHECKPOINTS["checkpoint"](
            create_custom_forward(block), hidden_states, temb, use_reentrant=False
        )


class Reentrant(Closes):
    def run(self, block, hidden_states, temb):
        return torch.utils.checkpoint.checkpoint(block, hidden_states, temb, use_reentrant=True)


class ByMethod(Closes):
    def run(self, block, hidden_states, temb):
        place = list(self.blocks).index(block)
        return torch.utils.checkpoint.checkpoint(
            self.run_at, place, hidden_states, temb, use_reentrant=False
        )

    def run_at(self, place, *args):
        return self.blocks[place](*args)


class Partial(Closes):
    def run(self, block, hidden_states, temb):
        call = partial(block.__call__, temb=temb)
        return torch.utils.checkpoint.checkpoint(call, hidden_states, use_reentrant=False)


class Keywords(Closes):
    def run(self, block, hidden_states, temb):
        return torch.utils.checkpoint.checkpoint(
            block, hidden_states=hidden_states, temb=temb, use_reentrant=False
        )


class OfDiffusers(WithDoor):
    """A class of diffusers' kind whose loop does not ask its checkpoint function."""

    def run(self, block, hidden_states, temb):
        if self.training and self.gradient_checkpointing:
            return torch.utils.checkpoint.checkpoint(
                block, hidden_states, temb, use_reentrant=False
            )
        return block(hidden_states, temb)


class CheckpointedBlock(Block):
    """kohya's: checkpoints its own forward."""

    checkpointing = True

    def forward(self, hidden_states, temb):
        if self.checkpointing:
            return torch.utils.checkpoint.checkpoint(
                self._forward, hidden_states, temb, use_reentrant=False
            )
        return self._forward(hidden_states, temb)

    def _forward(self, hidden_states, temb):
        return Block.forward(self, hidden_states, temb)


class OfCheckpointedBlocks(Doorless):
    def build(self, depth):
        self.blocks = nn.ModuleList(CheckpointedBlock() for _ in range(depth))
        self.out = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize(
    "kind", [Always, Closes, Reentrant, ByMethod, Partial, Keywords, OfCheckpointedBlocks]
)
@pytest.mark.parametrize("interval", [1, 2])
def test_checkpoint_calls_of_a_models_own_give_way(launched, runs, caplog, kind, interval):
    """Each covered block is recomputed once, the others are not; and afterwards as before."""
    model, inputs = toy(kind)
    inputs["hidden_states"].requires_grad_()  # a reentrant call recomputes nothing otherwise
    expected = train(model, inputs)
    before = runs()
    assert before == (NONE if kind is Reentrant else ALL)
    asked = f"{kind.__module__}.{kind.__name__}"
    with launched(keys(interval, interval + 1), asked_for=asked) as found:
        covered = [COVERED, TRIED] if interval == 2 else [[2, 1] * 3] * 2
        for step in range(3):
            assert same(train(model, inputs), expected)
            assert runs() == covered[step == 0]
        installation_of(model).remove()
        assert same(train(model, inputs), expected)
        assert runs() == before
    assert found.shortfall() is None
    if kind is not Always:  # whose flag is off while the schedule runs
        assert caplog.text.count("checkpoint calls that the script makes itself around") == 1
    segments = found.models[0].history
    assert segments.trained == 3


@pytest.mark.parametrize("by", ["flag", "method", "nothing"])
def test_a_flag_that_the_script_sets(launched, runs, by):
    """Before or after it was noticed, and switched off for a while."""
    model, inputs = toy(Switched)
    expected = train(model, inputs)
    runs()
    with launched(asked_for=f"{Switched.__module__}.Switched"):
        if by != "nothing":
            model.gradient_checkpointing = True
        for count in (TRIED, COVERED):
            assert same(train(model, inputs), expected)
            assert runs() == count
        model.gradient_checkpointing = False
        train(model, inputs)
        assert runs() == NONE
        model.gradient_checkpointing = True
        assert same(train(model, inputs), expected)
        assert runs() == COVERED


@pytest.mark.parametrize("launches", [True, False])
def test_a_function_that_is_never_asked_is_given_up(registry, runs, caplog, launches):
    """The blocks are intercepted then, with and without ``launch``."""
    model, inputs = toy(OfDiffusers)
    expected = train(model, inputs)
    runs()
    config = load_settings(keys(2, 3))
    asked = f"{OfDiffusers.__module__}.OfDiffusers"
    with scheduled(config, registry, asked_for=asked) if launches else nullcontext():
        if not launches:
            apply(model, keys(2, 3))
        for _ in range(3):
            assert same(train(model, inputs), expected)
        tried = COVERED if launches else TRIED  # the registry has it as a toy
        assert runs() == [sum(step) for step in zip(ALL, tried, COVERED, strict=True)]
        assert "blocks was not reached" in caplog.text
        assert model.gradient_checkpointing


def test_checkpoint_calls_about_something_else_stay(launched, runs):
    """Of a part outside the stacks, of a model without a schedule, of one around the model."""

    class WithRefiner(Doorless):
        def forward(self, hidden_states, temb):
            states = torch.utils.checkpoint.checkpoint(
                self.refiner, hidden_states, temb, use_reentrant=False
            )
            return super().forward(states, temb)

    model, inputs = toy(WithRefiner)
    model.refiner = Block()
    expected = train(model, inputs)
    assert runs() == [2, *NONE]
    other, _ = toy(Always)
    with launched(asked_for=f"{__name__}.WithRefiner"):
        for count in (TRIED, COVERED):
            assert same(train(model, inputs), expected)
            assert runs() == [2, *count]
        train(other, inputs)
        assert runs() == ALL
        names = tuple(inputs)
        around = torch.utils.checkpoint.checkpoint(
            lambda *values: model(**dict(zip(names, values, strict=True))),
            *inputs.values(),
            use_reentrant=False,
        )
        model.zero_grad(set_to_none=True)
        around.sum().backward()
        assert same({n: p.grad for n, p in model.named_parameters()}, expected)
