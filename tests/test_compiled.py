"""Models compiled as a whole, and by their blocks: the same gradients, and the same schedule."""

import copy
import gc

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin, compile_regions
from peft import LoraConfig
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from toys import WIDTH, Doorless, WithDoor, toy
from training import keys, model_and_inputs, warned

import simpletuner_segckpt
from simpletuner_segckpt.engine import planner
from simpletuner_segckpt.model import compiled as compiled_code
from simpletuner_segckpt.verify.step import loss_of, step

pytestmark = pytest.mark.slow  # the compiler's own time

KINDS = [WithDoor, Doorless]
KEEP = "gradient_checkpointing_keep"
COVERED = (range(0, 2), range(4, 6))  # interval 2, stride 4, of six blocks
AS_A_WHOLE = "torch.compile: compiled as a whole: what is covered is recomputed unobserved"
IN_GRAPHS = torch.__version__ >= "2.14"
BY_ONE = f"{AS_A_WHOLE}; block by block, since " + (
    "no family file and no eager forward of this shape of call has shown what its blocks carry"
    if IN_GRAPHS
    else "segments of several blocks in one graph can get wrong gradients from inductor before "
    "torch 2.14"
)


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def segments_in_graphs(monkeypatch):
    monkeypatch.setattr(planner, "SEGMENTS_IN_GRAPHS", True)


@pytest.fixture
def said(caplog):
    """What the package warned of, but that nobody described the toys."""

    def messages():
        return [text for text in warned(caplog.records) if not text.startswith("no family")]

    return messages


# As a whole.


def compiled(model):
    """The model in one graph, and the number of checkpoint regions of each graph captured."""
    regions = []

    def backend(graph, example_inputs):
        calls = [n for n in graph.graph.nodes if n.op == "call_function"]
        regions.append(sum("activation_checkpoint" in str(call.target) for call in calls))
        return torch._dynamo.backends.debugging.aot_eager(graph, example_inputs)

    return torch.compile(model, backend=backend, fullgraph=True), regions


def validated_in_between(model, inputs, graph):
    """Training steps with validations between them, as trainers do both; the steps."""
    steps = []
    for _ in range(2):
        steps.append(step(model, inputs, run=graph))
        model.eval()
        with torch.no_grad():
            graph(**inputs)
        model.train()
        with torch.no_grad():
            graph(**inputs)
    return steps


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        (WithDoor, "apply compile"),
        (WithDoor, "compile step apply"),
        (Doorless, "compile apply"),
        (Doorless, "apply step step compile"),
    ],
)
def test_compiled_as_a_whole(kind, order, said):
    """The same coverage in one graph, in whatever order; removed from it, too.

    In segments, from torch 2.14 on, where forwards before have shown what is carried.
    """
    shown = IN_GRAPHS and "step step compile" in order
    told = AS_A_WHOLE if shown else BY_ONE
    model, inputs = toy(kind)
    expected = step(model, inputs)
    bare, regions = compiled(model)
    validated_in_between(model, inputs, bare)
    graphs_of_bare = len(regions)
    torch._dynamo.reset()

    graph = model
    for action in order.split():
        if action == "apply":
            installation = simpletuner_segckpt.apply(graph, keys(2, 4))
            assert said() == []
        elif action == "compile":
            graph, regions = compiled(model)
        else:
            assert step(model, inputs, run=graph) == expected
    regions.clear()
    assert validated_in_between(model, inputs, graph) == [expected] * 2
    assert regions[0] == (2 if shown else 4)  # blocks 0, 1, 4 and 5
    assert sum(regions[1:]) == 0  # the graphs of the validation
    assert len(regions) <= graphs_of_bare
    assert not counters["graph_break"]
    assert [str(condition) for condition in installation.effect.conditions] == [told]
    assert said() == ([] if shown else [BY_ONE])  # once

    for _ in range(2):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == COVERED
    installation.remove()
    regions.clear()
    assert step(model, inputs, run=graph) == expected
    assert sum(regions) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_as_a_whole_and_off(kind):
    model, inputs = toy(kind)
    simpletuner_segckpt.apply(model, {"gradient_checkpointing": False})
    if kind is WithDoor:
        model.enable_gradient_checkpointing()
    graph, regions = compiled(model)
    step(model, inputs, run=graph)
    assert sum(regions) == 0


def test_compiled_as_a_whole_and_disabled_in_between(said):
    model, inputs = toy(WithDoor)
    simpletuner_segckpt.apply(model, keys(1))
    graph, regions = compiled(model)
    step(model, inputs, run=graph)
    model.disable_gradient_checkpointing()
    step(model, inputs, run=graph)
    model.enable_gradient_checkpointing()
    step(model, inputs, run=graph)
    assert regions[0] == 6
    assert regions[1] == 0
    assert set(regions[2:]) <= {6}
    assert said() == []  # block by block is what was asked for


def test_compiled_as_a_whole_with_another_schedule():
    model, inputs = toy(Doorless)
    expected = step(model, inputs)
    graph, regions = compiled(model)
    for config, recomputed in [(keys(2, 4), 4), (keys(1), 6), (keys(1, 2), 3)]:
        simpletuner_segckpt.apply(model, config)
        assert step(model, inputs, run=graph) == expected
        assert regions[-1] == recomputed


def test_a_keyword_loop_compiled_and_then_not():
    model, inputs = model_and_inputs("auraflow", num_mmdit_layers=2, num_single_dit_layers=2)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    graph, regions = compiled(model)
    stacks = installation.report.stacks
    planned = sum(len(s.segments) if IN_GRAPHS else s.blocks for s in stacks)
    for _ in range(2):
        torch.testing.assert_close(step(model, inputs, run=graph).gradients, expected.gradients)
    assert regions[0] == planned
    assert model.is_gradient_checkpointing
    for _ in range(2):
        assert step(model, inputs) == expected
    assert len(installation.effect.stacks) == 2
    model.disable_gradient_checkpointing()
    step(model, inputs, run=graph)
    assert regions[-1] == 0


def test_segments_that_inductor_gets_wrong():
    """Here one checkpoint call around both blocks makes inductor of torch 2.13 get the gradient of
    the patch embedding wrong by 7%."""
    model, inputs = model_and_inputs("wan", num_layers=2)
    inputs = {
        "hidden_states": torch.randn(1, 4, 5, 10, 14),
        "timestep": inputs["timestep"][:1],
        "encoder_hidden_states": inputs["encoder_hidden_states"][:1],
        "return_dict": False,
    }
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2))
    graph = torch.compile(model, fullgraph=True)
    got = step(model, inputs, run=graph)
    torch.testing.assert_close(got.gradients, expected.gradients, rtol=1e-3, atol=1e-5)
    step(model, inputs, run=graph)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    told = AS_A_WHOLE if IN_GRAPHS else BY_ONE
    assert [str(condition) for condition in installation.effect.conditions] == [told]


# With the backend of these tests, which is not inductor, segments are right in any torch.
in_graphs = pytest.mark.usefixtures("segments_in_graphs")


@in_graphs
@pytest.mark.parametrize("name", ["flux", "wan"])
def test_segments_in_one_graph(name):
    """By what the family file says is carried: as many checkpoint regions as segments."""
    model, inputs = model_and_inputs(name)
    expected = step(model, inputs)
    for config in (keys(2), keys(2, 3), keys(2, keep_last=2) | {KEEP: "attention"}):
        installation = simpletuner_segckpt.apply(model, config)
        graph, regions = compiled(model)
        for _ in range(2):
            assert step(model, inputs, run=graph) == expected
        assert regions == [sum(len(stack.segments) for stack in installation.report.stacks)]
        installation.remove()
        torch._dynamo.reset()


@in_graphs
def test_an_argument_that_forces_block_by_block_in_a_graph():
    model, inputs = model_and_inputs("flux")
    residuals = [torch.randn(2, 16, 32) for _ in range(5)]
    expected = step(model, inputs | {"controlnet_block_samples": residuals})
    simpletuner_segckpt.apply(model, keys(2))
    graph, regions = compiled(model)
    assert step(model, inputs | {"controlnet_block_samples": residuals}, run=graph) == expected
    assert regions == [5 + 3]


@in_graphs
@pytest.mark.parametrize("kind", KINDS)
def test_a_traced_loop_is_held_to_what_was_shown(kind):
    """What stands between blocks is noticed by the trace; what is only read there is NaN."""
    model, inputs = toy(kind)
    installation = simpletuner_segckpt.apply(model, keys(2))
    expected = step(model, inputs)
    step(model, inputs)
    assert installation.effect["blocks"].strategy == "segmented"
    graph, _ = compiled(model)
    model.between = lambda index, state: state * 2
    with pytest.raises(Exception, match="is compiled in a segment"):
        step(model, inputs, run=graph)
    read = []

    def reading(index, state):
        read.append(state.sum())
        return state

    model.between = reading
    torch._dynamo.reset()
    graph, _ = compiled(model)
    assert step(model, inputs, run=graph) == expected
    assert [bool(value.isnan()) for value in read] == [True, False] * 3


# By regions: other shapes.

COUNTS = (5, 6, 9, 4, 7, 12)  # tokens


def batches(inputs):
    generator = torch.Generator().manual_seed(3)
    for count in COUNTS:
        yield inputs | {"hidden_states": torch.randn(2, count, WIDTH, generator=generator)}


def accumulated(model, batches):
    """The gradients of one backward after a forward of each batch."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    torch.stack([loss_of(model(**batch)) for batch in batches]).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def trained_on(model, batches):
    """Gradients of six batches, three to a backward and each by itself, twice round."""
    batches = list(batches)
    found = []
    for _ in range(2):
        found += [accumulated(model, batches[:3]), accumulated(model, batches[3:])]
        found += [accumulated(model, [batch]) for batch in batches]
    return found


def compile_blocks(model, how, backend):
    for index, block in enumerate(model.blocks):
        if how == "block.compile()":
            block.compile(backend=backend)
        else:
            model.blocks[index] = torch.compile(block, backend=backend)


@pytest.mark.parametrize(
    ("kind", "how", "backend", "interval", "order"),
    [
        (WithDoor, "block.compile()", "eager", 2, "apply"),
        (WithDoor, "block.compile()", "aot_eager", 1, "compile"),
        (WithDoor, "torch.compile(block)", "aot_eager", 2, "apply"),
        (Doorless, "torch.compile(block)", "aot_eager", 2, "compile"),
        (Doorless, "block.compile()", "inductor", 2, "apply"),
    ],
)
def test_six_token_counts_in_compiled_blocks(kind, how, backend, interval, order):
    """Code for any count of tokens is made while a backward is due for that of the first."""
    model, inputs = toy(kind)
    expected = trained_on(model, batches(inputs))
    if order == "compile":
        compile_blocks(model, how, backend)
    installation = simpletuner_segckpt.apply(model, keys(interval))
    if order == "apply":
        compile_blocks(model, how, backend)
    got = trained_on(model, batches(inputs))
    # For five tokens and for any number; the input of the first block needs no gradient.
    assert counters["stats"]["unique_graphs"] == 4
    rounding = {} if backend == "inductor" else {"rtol": 0, "atol": 0}
    for mine, theirs in zip(got, expected, strict=True):
        mine = {name.replace("_orig_mod.", ""): gradient for name, gradient in mine.items()}
        torch.testing.assert_close(mine, theirs, **rounding)
    width = range(0, 6, interval)
    assert installation.effect["blocks"].segments == tuple(range(b, b + interval) for b in width)


def test_a_backward_that_is_due_when_other_code_is_made():
    """Where torch's own look-up has a recompute run other code than its forward ran: Flux saves
    other tensors in code for any number of tokens than in code for sixteen."""
    model, inputs = model_and_inputs("flux", num_layers=2, num_single_layers=1)
    generator = torch.Generator().manual_seed(3)
    shapes = [
        inputs
        | {
            "hidden_states": torch.randn(2, count, 8, generator=generator),
            "img_ids": torch.randint(0, 4, (count, 3), generator=generator),
        }
        for count in (16, 20)
    ]
    expected = accumulated(model, shapes)
    installation = simpletuner_segckpt.apply(model, keys(2))
    model.compile_repeated_blocks(backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(accumulated(model, shapes), expected)
    assert installation.effect["transformer_blocks"].segments == (range(0, 2),)


def newest_is_tried_first():
    """Whether compiled code for the last shape is tried before that for the first."""
    torch._dynamo.reset()

    def increment(tensor):
        return tensor + 1

    run = torch.compile(increment, backend="eager", dynamic=False)
    run(torch.ones(2))
    (first,) = (entry.code for entry in _debug_get_cache_entry_list(increment.__code__))
    run(torch.ones(3))
    return _debug_get_cache_entry_list(increment.__code__)[0].code is not first


@pytest.fixture
def no_schedule_elsewhere(monkeypatch):
    """What other tests left to the garbage collector does not count."""
    with monkeypatch.context() as context:
        context.setattr(compiled_code, "_holders", set())
        compiled_code._set_order()
        yield
    compiled_code._set_order()


def test_the_order_of_compiled_code_is_given_back(no_schedule_elsewhere):
    assert newest_is_tried_first()
    model, _ = toy(WithDoor)
    first = simpletuner_segckpt.apply(model, keys(2))
    again = simpletuner_segckpt.apply(model, keys(1))
    copy_ = copy.deepcopy(model)
    assert not newest_is_tried_first()
    first.remove()
    again.remove()
    assert not newest_is_tried_first()  # for the copy
    del copy_
    gc.collect()
    assert newest_is_tried_first()


# By regions: who compiles them, and when.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["apply", "compile", "compile step"])
def test_regions_compiled_by_accelerate(kind, order):
    """accelerate trains a copy of the model: that one has the schedule, in either order."""
    model, inputs = toy(kind)
    expected = step(model, inputs)
    before = model.__dict__.get("gradient_checkpointing"), type(model.blocks[0])
    if order == "apply":
        installation = simpletuner_segckpt.apply(model, keys(2, 4))
    copy_ = compile_regions(model, backend="aot_eager")
    if order == "compile step":
        step(model, inputs, run=copy_)
    if order.startswith("compile"):
        installation = simpletuner_segckpt.apply(copy_, keys(2, 4))
    for _ in range(3):
        assert step(model, inputs, run=copy_) == expected
    assert installation.effect["blocks"].segments == COVERED
    installation.remove()
    for trained in (model, copy_):
        assert (
            trained.__dict__.get("gradient_checkpointing"),
            type(model.blocks[0]),
        ) == before
        assert not trained._forward_pre_hooks


@pytest.mark.parametrize(("order", "regional"), [("apply", True), ("prepare", False)])
def test_prepared_by_accelerate_with_mixed_precision(order, regional):
    model, inputs = model_and_inputs("flux")
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k"]))
    AcceleratorState._reset_state()  # it remembers the plugin of the first one in the process
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    options = {"dynamo_plugin": plugin} if regional else {}
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", **options)
    plain = accelerator.prepare(copy.deepcopy(model))
    expected = step(plain, inputs)
    if order == "apply":
        installation = simpletuner_segckpt.apply(model, keys(2, 4))
    prepared = accelerator.prepare(model)
    if order == "prepare":
        installation = simpletuner_segckpt.apply(prepared, keys(2, 4))
    for _ in range(3):
        assert step(prepared, inputs) == expected
    for stack in installation.effect.stacks:
        assert stack.segments == (range(0, 2), range(4, 5))


def test_what_is_around_a_model_stays_there():
    model, inputs = toy(WithDoor)
    expected = step(model, inputs)
    parallel = torch.nn.DataParallel(model)
    graph = torch.compile(parallel, backend="eager")
    installation = simpletuner_segckpt.apply(graph, keys(2, 4))
    assert installation.model is model
    assert graph._orig_mod is parallel
    assert step(model, inputs, run=graph) == expected
    assert installation.history.compiled


@pytest.mark.parametrize("order", ["apply", "compile", "compile step"])
def test_blocks_compiled_by_diffusers(order):
    model, inputs = model_and_inputs("flux")
    expected = step(model, inputs)
    if order == "apply":
        installation = simpletuner_segckpt.apply(model, keys(2, 4))
    model.compile_repeated_blocks(backend="eager", fullgraph=True)
    if order == "compile step":
        step(model, inputs)
    if order.startswith("compile"):
        installation = simpletuner_segckpt.apply(model, keys(2, 4))
    for _ in range(3):
        assert step(model, inputs) == expected
    for stack in installation.effect.stacks:
        assert stack.segments == (range(0, 2), range(4, 5))
    assert not counters["graph_break"]
