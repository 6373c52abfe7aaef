"""Two processes: DDP, FSDP2, FSDP1, accelerate. What they do is in ``distributed_cases``."""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import accelerate
import pytest
import torch
from distributed_cases import (
    ACCELERATE,
    CONTEXT_PARALLEL,
    DDP,
    FSDP1,
    FSDP2,
    FSDP2_BF16,
    PREFETCH,
    STACKS,
)
from filelock import FileLock
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from toys import WithDoor, toy
from training import keys, model_and_inputs, warned
from transformers import LlamaConfig, LlamaForCausalLM

import simpletuner_segckpt
from simpletuner_segckpt import UnsupportedModel, sharding_units
from simpletuner_segckpt.model.tiny import is_before
from simpletuner_segckpt.verify.step import Step, step

CASES = Path(__file__).with_name("distributed_cases.py")
BLOCKS = {"flux": 3, "auraflow": 3, "llama": 5, "wan": 5, "sd3": 5}


@pytest.fixture(scope="session")
def results(tmp_path_factory, worker_id):
    """What every case left behind, by its name: a list with the record of each rank.

    Whichever worker comes first starts the two processes; the others wait.
    """
    folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        folder = folder.parent  # all workers share it
    path, unfinished = folder / "distributed.json", folder / "unfinished.json"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            ran = subprocess.run(
                [*launch, "--nproc-per-node", "2", CASES, unfinished],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert ran.returncode == 0, ran.stderr[-5000:]
            unfinished.rename(path)
        return json.loads(path.read_text())


@pytest.fixture
def ranks(results):
    """Gives the records of both ranks, of a case that raised nothing."""

    def of(name):
        assert [record.get("raised") for record in results[name]] == [None, None]
        return results[name]

    return of


def per_block(name):
    """By stack, every block in a checkpoint call of its own."""
    return {path: [[block] for block in range(BLOCKS[name])] for path in STACKS[name]}


def in_segments(name, interval=2):
    """By stack, the segments of that many blocks."""
    blocks = list(range(BLOCKS[name]))
    cut = [blocks[start : start + interval] for start in range(0, len(blocks), interval)]
    return dict.fromkeys(STACKS[name], cut)


@pytest.mark.parametrize(("name", "mode"), DDP)
def test_ddp(ranks, name, mode):
    """Recorded, segmented, validated in between, forced to run per block, segmented again."""
    forced = {
        "flux": "transformer_blocks runs block by block: controlnet_block_samples",
        "auraflow": "joint_transformer_blocks runs block by block: forward hook",
        "llama": "model.layers runs block by block: output_hidden_states",
    }[name]
    first, segmented = per_block(name), in_segments(name)
    forced_run = first | (
        {STACKS[name][1]: segmented[STACKS[name][1]]} if name == "auraflow" else {}
    )
    for record in ranks(f"ddp {name} {mode}"):
        assert record["differences"] == []
        assert record["seen"] == [first, *[segmented] * 3, forced_run, segmented]
        assert [message.startswith(forced) for message in record["said"]] == [True]


@pytest.mark.parametrize("name", ["flux", "llama"])
def test_ddp_accumulates_without_synchronising(ranks, name):
    for record in ranks(f"ddp accumulation {name}"):
        assert record["differences"] == []
        assert record["seen"] == in_segments(name)


# All-gathers of a step without a schedule, by what is a unit: the root's, and of each unit one in
# forward and one in backward.
GATHERS = {
    ("flux", "block"): 1 + 2 * 6,
    ("flux", "segment"): 1 + 2 * 4,
    ("auraflow", "block"): 1 + 2 * 6,
    ("auraflow", "segment"): 1 + 2 * 4,
    ("llama", "block"): 1 + 2 * 5,
    ("llama", "segment"): 1 + 2 * 3,
}


def first_gathers(name, unit, order, interval):
    """All-gathers of the first step with a schedule.

    Of a model that no family describes, segments of several blocks are tried out after it: their
    units are gathered once more, and before the root is done with its forward it is as well.
    """
    expected = GATHERS[name, unit]
    if name != "llama" or interval == 1:
        return expected
    tried = {2: 4, 4: 4}[interval] // (2 if unit == "segment" else 1)
    return expected + tried + (order == "apply, shard")


SHARDED = [(f"fsdp2 {name} {unit} {order}", name, unit, order, 2) for name, unit, order in FSDP2]
BF16 = [
    pytest.param(
        f"fsdp2 bf16 {name} {unit} {order} {interval}",
        *(name, unit, order, interval),
        marks=pytest.mark.skipif(torch.__version__ < "2.13", reason="see SEG609"),
    )
    for name, unit, order, interval in FSDP2_BF16
]


@pytest.mark.parametrize(("case", "name", "unit", "order", "interval"), SHARDED + BF16)
def test_fsdp2(ranks, case, name, unit, order, interval):
    """Three steps with the schedule and one after ``remove()``, all as without it."""
    plain = GATHERS[name, unit]
    first = first_gathers(name, unit, order, interval)
    for record in ranks(case):
        assert record["differences"] == []
        assert record["seen"] == in_segments(name, interval)
        assert record["gathers"] == [plain, first, *[plain] * 3]
        assert record["names kept"]
        assert record["traces"] == []
        assert record["said"] == []


def test_fsdp2_accumulates_and_trains_adapters(ranks):
    for record in ranks("fsdp2 accumulation"):
        assert record["differences"] == []
        assert record["seen"] == in_segments("flux")
    for record in ranks("fsdp2 lora"):
        assert record["differences"] == []
        assert record["seen"] == in_segments("flux")
        assert record["saved alike"]


def test_ranks_may_call_a_sharded_model_in_different_ways(ranks):
    """Every rank gathers as often as the others, whether its blocks run in segments or not."""
    segmented = in_segments("flux")
    alone = segmented | {"transformer_blocks": [[0], [1], [2]]}
    records = ranks("ranks differ flux")
    assert [record["differences"] for record in records] == [[], []]
    assert [record["seen"] for record in records] == [alone, segmented]
    records = ranks("ranks differ llama")
    assert [record["differences"] for record in records] == [[], []]
    assert [record["seen"] for record in records] == [per_block("llama"), in_segments("llama")]
    [said] = records[0]["said"]
    assert said.startswith("model.layers runs block by block: a new shape of call cannot be tried")
    assert records[1]["said"] == []


def test_ranks_have_plans_of_their_own_within_a_budget(ranks):
    """Shards are not run alone, where other ranks would wait: every rank recomputes them."""
    everything, nothing = per_block("flux"), {path: [] for path in STACKS["flux"]}
    records = ranks("budget DDP")
    assert [record["differences"] for record in records] == [[], []]
    assert [record["seen"] for record in records] == [everything, nothing]
    records = ranks("budget FSDP2")
    assert [record["differences"] for record in records] == [[], []]
    assert [record["seen"] for record in records] == [everything, everything]
    assert all(record["note"].startswith("sharded blocks are not run alone") for record in records)


@pytest.mark.parametrize(("interval", "forward", "backward"), PREFETCH)
def test_weights_are_gathered_as_the_models_own_checkpointing_does(
    ranks, interval, forward, backward
):
    """Whatever is gathered ahead, and when one rank alone runs block by block."""
    records = ranks(f"fsdp2 prefetch {interval} {forward} {backward}")
    blocks = range(4)
    segments = [list(blocks[start : start + interval]) for start in blocks[::interval]]
    alone = [[block] for block in blocks]
    for record, seen in zip(records, (alone, segments), strict=True):
        assert record["differences"] == []
        assert record["seen"] == dict.fromkeys(STACKS["flux"], seen)
        every = 1 + 2 * 8
        assert record["gathers"] == {"plain": [every] * 2, "own": [every], "schedule": [every] * 4}


def test_a_step_that_was_refused_can_be_repeated_on_shards(ranks):
    for record in ranks("fsdp2 broken"):
        assert record["refused"]
        assert record["differences"] == []
        assert record["seen"] == {"blocks": [[0], [1], [2]]}


def test_versions_of_torch_whose_recompute_leaves_out_the_cast(ranks):
    for record in ranks("old torch"):
        counts = {case: len(messages) for case, messages in record["said"].items()}
        warned = {"2.11.0 torch.bfloat16", "2.12.1+cpu torch.bfloat16"}
        assert len(counts) == 8
        assert counts == {case: int(case in warned) for case in counts}


def test_sharding_twice_is_refused(ranks):
    for record in ranks("sharded twice"):
        assert record["said"] == [
            f"SEG501 {name} is sharded already, and the blocks of `{path}` with it; "
            "shard them once only, units before the model"
            for name, path in (
                ("FSDPWithDoor: the model", "blocks"),
                (f"FluxTransformer2DModel: `{STACKS['flux'][1]}.1`", STACKS["flux"][1]),
                ("WithDoor: the model", "blocks"),
            )
        ]


def test_what_is_sharded_before_stays_a_unit(ranks):
    """A gather in forward and one in backward, but for the last unit, which stays gathered."""
    for record in ranks("sharded before"):
        assert record["differences"] == []
        assert record["units"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert record["gathers"] == [[2 * (4 + 3) - 1] * 3] * 2


@pytest.mark.parametrize(("name", "order"), FSDP1)
def test_fsdp1(ranks, name, order):
    """The blocks are in wrappers; the schedule is on what is inside, and on each wrapper once."""
    covered = [[0, 1], [3, 4]] if name == "llama" else [[0, 1]]
    for record in ranks(f"fsdp1 {name} {order}"):
        assert record["differences"] == []
        assert record["seen"] == dict.fromkeys(STACKS[name], covered)


@pytest.mark.parametrize(("kind", "order"), ACCELERATE)
def test_accelerate(ranks, kind, order):
    wrapper, gathers = {
        "DDP": ("DistributedDataParallel", 0),
        "FSDP2": ("FSDP2", 2 + 2 * 6),  # accelerate makes the last norm a unit of its own
        "FSDP2 segments": ("FSDP2", 1 + 2 * 4),
    }[kind]
    for record in ranks(f"accelerate {kind} {order}"):
        assert record["wrapper"] == wrapper
        assert record["gathers"] == [gathers] * 3
        assert record["differences"] == []
        assert record["seen"] == in_segments("flux")
        assert record["said"] == []


@pytest.mark.skipif(accelerate.__version__ < "1.15", reason="accelerate wraps no blocks")
def test_activation_checkpointing_of_accelerates_fsdp(ranks):
    for record in ranks("accelerate FSDP2 activation checkpointing apply, prepare"):
        assert record["differences"] == []
        assert record["seen"] == {path: [] for path in STACKS["flux"]}
        assert [message.split(":")[0] for message in record["said"]] == list(STACKS["flux"])
        assert all("blocks 0 1 2 recompute themselves" in message for message in record["said"])


# Attentions of a model that exchange their sequence; of SD3, two blocks have a second one.
ATTENTIONS = {"wan": 5, "flux": 6, "sd3": 7}
# Of each the collectives in forward and in backward: queries, keys, values and the output by
# Ulysses; in a ring keys and values together, and in backward their gradients on to two others.
COLLECTIVES = {"ulysses": (4, 4), "ring": (1, 3)}


@pytest.mark.skipif(is_before("0.38"), reason="its backward fails in diffusers 0.37")
@pytest.mark.parametrize(("name", "kind"), CONTEXT_PARALLEL)
def test_context_parallelism_of_diffusers(ranks, name, kind):
    """In segments, as without a schedule; with kept attention nothing is exchanged once more."""
    forward, backward = COLLECTIVES[kind]
    once = 1 + ATTENTIONS[name] * (forward + backward)  # the output of the model is gathered
    again = ATTENTIONS[name] * forward
    for record in ranks(f"context parallel {name} {kind}"):
        assert record["differences"] == []
        assert record["exchanges"] == [*[once + again] * 2, once, *[once] * 2]
        assert record["seen"] == [in_segments(name)] * 2
        assert [kept.get("collectives", 0) for kept in record["kept"]] == [0, again]
        assert record["said"] == []


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_examples(ranks, name):
    """The losses and what is saved are those without checkpointing."""
    records = ranks(f"example {name}")
    for record in records:
        off, on = record["losses"]
        assert off == on
        assert len(on) == 3
        assert record["saved alike"]
    ran = {"ddp": "[0 1] 2 [3 4] 5 [6 7]", "fsdp2": "[0 1] [2 3] [4 5]"}[name]
    assert records[0]["printed"].count(ran) == 2  # in the report, and in the effect
    assert records[1]["printed"] == ""


# In one process.


def llama():
    sizes = {"num_attention_heads": 2, "intermediate_size": 32, "attention_dropout": 0.2}
    config = LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=5, **sizes)
    return LlamaForCausalLM(config).train(), {"input_ids": torch.randint(0, 50, (2, 7))}


def observed(name, model, inputs):
    """A step under the names of the plain model, and how often each block's first linear ran."""
    calls = Counter()

    def counting(key, forward, *args):
        calls[key] += 1
        return forward(*args)

    counted = {}
    for path in STACKS[name]:
        for index, block in enumerate(model.get_submodule(path)):
            linear = next(m for m in block.modules() if isinstance(m, torch.nn.Linear))
            linear.forward = partial(counting, (path, index), linear.forward)
            counted[path, index] = linear
    result = step(model, inputs)
    for linear in counted.values():
        del linear.forward
    gradients = {
        name.replace("_checkpoint_wrapped_module.", ""): gradient
        for name, gradient in result.gradients.items()
    }
    return Step(result.loss, gradients, result.random_state), [calls[key] for key in counted]


@pytest.mark.parametrize("order", ["apply, wrap", "wrap, apply", "apply, step, wrap"])
@pytest.mark.parametrize("name", ["flux", "auraflow", "llama"])
def test_blocks_that_recompute_themselves_are_left_to_it(name, order, caplog):
    """torch's checkpoint wrapper is around all blocks of each stack but the last."""
    depth = {
        "flux": {"num_layers": 3, "num_single_layers": 3},
        "auraflow": {"num_mmdit_layers": 3, "num_single_dit_layers": 3},
    }
    model, inputs = llama() if name == "llama" else model_and_inputs(name, **depth[name])
    inputs |= {"use_cache": False} if name == "llama" else {}
    expected = observed(name, model, inputs)[0]

    def wrap():
        for path in STACKS[name]:
            stack = model.get_submodule(path)
            for index in range(len(stack) - 1):
                stack[index] = checkpoint_wrapper(stack[index])

    if order == "wrap, apply":
        wrap()
    installation = simpletuner_segckpt.apply(model, keys(2))
    if order == "apply, step, wrap":
        step(model, inputs)
    if order != "wrap, apply":
        wrap()
    last = BLOCKS[name] - 1
    for _ in range(2):
        found, calls = observed(name, model, inputs)
        assert found == expected
        assert calls == [2] * BLOCKS[name] * len(STACKS[name])
        assert {s.path: s.covered for s in installation.effect.stacks} == dict.fromkeys(
            STACKS[name], (last,)
        )
    blocks = " ".join(map(str, range(last)))
    said = [t for t in warned(caplog.records) if f"blocks {blocks} recompute themselves" in t]
    assert [message.split(":")[0] for message in said] == list(STACKS[name])
    installation.remove()
    assert observed(name, model, inputs)[0] == expected


def indices(model, units):
    """The units as the paths of their blocks."""
    paths = {id(module): path for path, module in model.named_modules()}
    return [[paths[id(block)] for block in unit] for unit in units]


@pytest.mark.parametrize("source", ["config", "installation", "after a step"])
def test_a_unit_is_a_segment_or_a_block(source):
    model, inputs = model_and_inputs("flux")
    schedule = config = keys(2, 3, keep_last=3)
    if source != "config":
        schedule = simpletuner_segckpt.apply(model, config)
    if source == "after a step":
        step(model, inputs)
    double, single = STACKS["flux"]
    assert indices(model, sharding_units(model, schedule)) == [
        [f"{double}.0", f"{double}.1"],
        [f"{double}.2"],
        [f"{double}.3", f"{double}.4"],
        [f"{single}.0", f"{single}.1"],
        [f"{single}.2"],
        [f"{single}.3"],
        [f"{single}.4"],
    ]


@pytest.mark.parametrize(
    "config",
    [{"gradient_checkpointing": False}, keys(1), keys(2) | {"musubi_blocks_to_swap": 1}],
)
def test_every_block_is_a_unit_where_nothing_is_segmented(config):
    model, _ = model_and_inputs("wan")
    found = indices(model, sharding_units(model, config))
    assert found == [[f"blocks.{index}"] for index in range(5)]


def test_what_a_forward_has_shown_to_be_no_segment_is_no_unit():
    model, inputs = toy(WithDoor, depth=4)
    model.between = lambda index, state: state * 2 if index == 0 else state
    installation = simpletuner_segckpt.apply(model, keys(2))
    together = [["blocks.0", "blocks.1"], ["blocks.2", "blocks.3"]]
    assert indices(model, sharding_units(model, installation)) == together
    step(model, inputs)
    alone = [["blocks.0"], ["blocks.1"], ["blocks.2", "blocks.3"]]
    assert indices(model, sharding_units(model, installation)) == alone


def test_a_model_without_stacks_has_no_units():
    with pytest.raises(UnsupportedModel, match="Linear has no nn.ModuleList of two or more blocks"):
        sharding_units(torch.nn.Linear(2, 2), keys(2))
    unet, _ = model_and_inputs("sd1x")
    with pytest.raises(UnsupportedModel, match="UNet2DConditionModel has no stack whose blocks"):
        sharding_units(unet, keys(2))
