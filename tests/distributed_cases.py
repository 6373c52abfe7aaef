"""Training under DDP and FSDP in two gloo processes; ``test_distributed`` starts it and reads it.

Every case trains a small model twice, wrapped in the same way, without and with a schedule, and
leaves behind what differed and what was seen. Run by torch's own launcher with the path of the
file to write:

    torchrun --standalone --nproc-per-node 2 tests/distributed_cases.py results.json
"""

import json
import logging
import os
import sys
import time
import traceback
from collections import Counter
from contextlib import contextmanager, nullcontext, redirect_stdout
from datetime import timedelta
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from toys import WithDoor, toy
from training import add_lora, keys, model_and_inputs, warned
from transformers import LlamaConfig, LlamaForCausalLM

import simpletuner_segckpt
from simpletuner_segckpt import (
    SegmentBroken,
    UnsupportedModel,
    fully_shard_segments,
    sharding_units,
)
from simpletuner_segckpt.model.interception import RECEIVER, Intercepted
from simpletuner_segckpt.verify.step import SEED, Step, loss_of, step

STACKS = {
    "flux": ("transformer_blocks", "single_transformer_blocks"),
    "auraflow": ("joint_transformer_blocks", "single_transformer_blocks"),
    "llama": ("model.layers",),
    "toy": ("blocks",),
    "wan": ("blocks",),
    "sd3": ("transformer_blocks",),
}
DEPTH = {
    "flux": {"num_layers": 3, "num_single_layers": 3},
    "auraflow": {"num_mmdit_layers": 3, "num_single_dit_layers": 3},
}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
EXAMPLES = Path(__file__).parents[1] / "examples"


# Models, and what is observed of a step.


def build(name: str, **depth: int) -> tuple[Any, dict[str, Any]]:
    """A model with the same weights on both ranks, and inputs of each rank's own."""
    torch.manual_seed(0)
    if name == "llama":
        sizes = {"num_attention_heads": 2, "intermediate_size": 32, "attention_dropout": 0.2}
        config = LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=5, **sizes)
        model = LlamaForCausalLM(config).train()
        torch.manual_seed(dist.get_rank())
        return model, {"input_ids": torch.randint(0, 50, (2, 7)), "use_cache": False}
    model, inputs = (
        toy(WithDoor, depth=3) if name == "toy" else model_and_inputs(name, **DEPTH[name] | depth)
    )
    torch.manual_seed(dist.get_rank())
    for key in ("hidden_states", "encoder_hidden_states"):
        if key in inputs:
            inputs[key] = torch.randn_like(inputs[key])
    return model, inputs


def blocks(name: str, model: Any) -> list[Module]:
    return [block for path in STACKS[name] for block in model.get_submodule(path)]


def own_shards(result: Step) -> Step:
    """The step with what this rank holds of each gradient, under the names of the plain model."""
    prefixes = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.")
    gradients = {}
    for name, gradient in result.gradients.items():
        for prefix in prefixes:
            name = name.replace(prefix, "")
        gradients[name] = (
            gradient if gradient is None else getattr(gradient, "_local_tensor", gradient)
        )
    return Step(result.loss, gradients, result.random_state)


class Collectives(TorchDispatchMode):
    """Counts all-gathers."""

    gathers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.gathers += func is torch.ops.c10d._allgather_base_.default
        return func(*args, **(kwargs or {}))


class Exchanges(TorchDispatchMode):
    """Counts functional collectives. (What waits for one, or wraps its result, is none.)"""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        library, _, name = func.name().partition("::")
        self.count += library == "_c10d_functional" and not name.startswith(("wait_", "_wrap"))
        return func(*args, **(kwargs or {}))


def observed(model: Module, inputs: dict[str, Any]) -> tuple[Step, int]:
    """A training step, and its all-gathers."""
    with Collectives() as collectives:
        result = own_shards(step(model, inputs))
    return result, collectives.gathers


@contextmanager
def heard():
    """What is logged within this, beside how the model's stacks were found."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.addFilter(lambda record: "stacks are found by probing" not in record.getMessage())
    handler.emit = lambda record: messages.extend(warned([record]))
    logger = logging.getLogger("simpletuner_segckpt")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def segments(installation) -> dict[str, list[list[int]]]:
    """By stack, the blocks that each checkpoint call of the last forward held."""
    return {s.path: [list(segment) for segment in s.segments] for s in installation.effect.stacks}


# DDP.

DDP_MODES = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
}


def ddp(name: str, mode: str) -> dict[str, Any]:
    """Three steps, validation, a step, one in which a condition forces per-block, one more."""
    runs = []
    for scheduled in (False, True):
        model, inputs = build(name)
        if mode == "find_unused_parameters":
            model.never_used = torch.nn.Linear(3, 3)
        wrapped = DistributedDataParallel(model, **DDP_MODES[mode])
        installation = None
        with heard() as messages:
            if scheduled:
                installation = simpletuner_segckpt.apply(wrapped, keys(2))
            runs.append(_train(name, wrapped, inputs, installation))
    (expected, _), (found, seen) = runs
    return {"differences": differences(found, expected), "seen": seen, "said": messages}


def _train(name: str, wrapped: Any, inputs: dict[str, Any], installation: Any) -> tuple:
    model = wrapped.module
    steps, seen = [], []

    def train(**more: Any) -> None:
        steps.append(own_shards(step(wrapped, inputs | more)))
        seen.append(installation and segments(installation))

    for _ in range(3):
        train()
    # As trainers do around validation; the model without a schedule has nothing to disable.
    for call in ("disable", "enable") if installation else ():
        method = "gradient_checkpointing_{}" if name == "llama" else "{}_gradient_checkpointing"
        getattr(model, method.format(call))()
        with torch.no_grad():
            model(**inputs)
    train()
    if name == "flux":
        hidden = model.x_embedder(inputs["hidden_states"]).detach()
        train(controlnet_block_samples=[torch.ones_like(hidden)])
    elif name == "llama":
        train(output_hidden_states=True)
    else:
        hook = blocks(name, model)[0].register_forward_hook(lambda *_: None)
        train()
        hook.remove()
    train()
    return steps, seen


def ddp_accumulation(name: str) -> dict[str, Any]:
    """Three micro-batches, of which only the last one synchronises."""
    runs = []
    for scheduled in (False, True):
        model, inputs = build(name)
        wrapped = DistributedDataParallel(model)
        if scheduled:
            installation = simpletuner_segckpt.apply(model, keys(2))
        runs.append([_accumulated(wrapped, inputs, wrapped.no_sync) for _ in range(2)])
    return {"differences": differences(*reversed(runs)), "seen": segments(installation)}


def _accumulated(model: Module, inputs: dict[str, Any], no_sync: Any) -> Step:
    torch.manual_seed(SEED)
    model.zero_grad(set_to_none=True)
    for number in range(3):
        with nullcontext() if number == 2 else no_sync():
            loss = loss_of(model(**inputs))
            loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return own_shards(Step(loss.detach(), gradients, torch.get_rng_state()))


# FSDP2.


def shard(name: str, model: Any, config: Any, unit: str, policy: MixedPrecisionPolicy) -> None:
    if unit == "segment":
        fully_shard_segments(model, config, mp_policy=policy)
        return
    for block in blocks(name, model):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def fsdp2(name: str, unit: str, order: str, interval: int = 2, bf16: bool = False) -> dict:
    """Steps without a schedule, with it, and with it removed again."""
    policy = BF16 if bf16 else MixedPrecisionPolicy()
    config = keys(interval)
    model, inputs = build(name)
    names = list(model.state_dict())
    shard(name, model, config, unit, policy)
    expected, plain_gathers = observed(model, inputs)
    model, inputs = build(name)
    with heard() as messages:
        if order == "apply, shard":
            installation = simpletuner_segckpt.apply(model, config)
            shard(name, model, installation, unit, policy)
        else:
            shard(name, model, config, unit, policy)
            installation = simpletuner_segckpt.apply(model, config)
        runs = []
        for _ in range(3):
            runs.append(observed(model, inputs))
            with torch.no_grad():  # a validation, after which the root is gathered still
                model(**inputs)
            model.reshard()
        seen = segments(installation)
        saved = list(model.state_dict())
        installation.remove()
        runs.append(observed(model, inputs))
    traces = [
        path
        for path, module in model.named_modules()
        if isinstance(module, Intercepted) or RECEIVER in module.__dict__
    ]
    return {
        "differences": differences([run for run, _ in runs], [expected] * 4),
        "gathers": [plain_gathers, *(gathers for _, gathers in runs)],
        "seen": seen,
        "said": messages,
        "names kept": saved == names,
        "traces": traces,
    }


def fsdp2_accumulation() -> dict[str, Any]:
    """Three micro-batches of which the last one reduces gradients, weights gathered each time."""
    runs = []
    for scheduled in (False, True):
        model, inputs = build("flux")
        shard("flux", model, keys(2), "segment", MixedPrecisionPolicy())
        if scheduled:
            installation = simpletuner_segckpt.apply(model, keys(2))

        @contextmanager
        def no_sync(model=model):
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)

        runs.append([_accumulated(model, inputs, no_sync) for _ in range(2)])
    return {"differences": differences(*reversed(runs)), "seen": segments(installation)}


def fsdp2_lora() -> dict[str, Any]:
    """A LoRA with dropout on a sharded, frozen model; the whole state is as without a schedule."""
    runs, states = [], []
    for scheduled in (False, True):
        model, inputs = build("flux")
        add_lora(model)
        shard("flux", model, keys(2), "segment", MixedPrecisionPolicy())
        if scheduled:
            installation = simpletuner_segckpt.apply(model, keys(2))
        runs.append([observed(model, inputs)[0] for _ in range(2)])
        states.append(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    found = differences(*reversed(runs))
    return {"differences": found, "seen": segments(installation), "saved alike": _equal(*states)}


def fsdp2_ranks_differ(name: str) -> dict[str, Any]:
    """From the third step on, one rank calls the model in another way than the other."""
    runs = []
    with heard() as messages:
        for scheduled in (False, True):
            model, inputs = build(name)
            shard(name, model, keys(2), "segment", MixedPrecisionPolicy())
            if scheduled:
                installation = simpletuner_segckpt.apply(model, keys(2))
            steps = [observed(model, inputs)[0] for _ in range(2)]
            if dist.get_rank() == 0 and name == "llama":
                inputs["position_ids"] = torch.arange(7)[None]
            elif dist.get_rank() == 0:
                inputs["controlnet_block_samples"] = [torch.ones(1, 1, 1)]
            steps += [observed(model, inputs)[0] for _ in range(2)]
            runs.append(steps)
    found = differences(*reversed(runs))
    return {"differences": found, "seen": segments(installation), "said": messages}


def budget(kind: str) -> dict[str, Any]:
    """One rank has memory for nothing, the other for everything."""
    runs = []
    for scheduled in (False, True):
        model, inputs = build("flux")
        wrapped = DistributedDataParallel(model) if kind == "DDP" else model
        if kind == "FSDP2":
            shard("flux", model, keys(1), "block", MixedPrecisionPolicy())
        if scheduled:
            amount = ("1MiB", "1TiB")[dist.get_rank()]
            config = {"gradient_checkpointing_budget": amount}
            installation = simpletuner_segckpt.apply(wrapped, config)
        runs.append([observed(wrapped, inputs)[0] for _ in range(3)])
    found = differences(*reversed(runs))
    told = installation.effect.within
    return {"differences": found, "seen": segments(installation), "note": told.note}


def fsdp2_prefetch(interval: int, forward: int, backward: int) -> dict[str, Any]:
    """A unit for each block, which gathers that many of those after, or before, it ahead.

    Three ways: without checkpointing, with the model's own, with the schedule. In the third step
    one rank alone passes a residual, so that its blocks run one by one.
    """
    runs = {}
    residual = {"controlnet_block_samples": [torch.ones(1, 1, 1)]}
    for way in ("plain", "own", "schedule"):
        model, inputs = build("flux", num_layers=4, num_single_layers=4)
        shard("flux", model, None, "block", MixedPrecisionPolicy())
        units = blocks("flux", model)
        for index, unit in enumerate(units):
            if forward:
                unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + forward])
            if backward:
                before = units[max(index - backward, 0) : index]
                unit.set_modules_to_backward_prefetch(before[::-1])
        if way == "own":
            model.enable_gradient_checkpointing()
        elif way == "schedule":
            installation = simpletuner_segckpt.apply(model, keys(interval))
        alone = residual if dist.get_rank() == 0 else {}
        calls = {"plain": [{}, alone], "own": [alone], "schedule": [{}, {}, alone]}[way]
        runs[way] = [observed(model, inputs | more) for more in calls]
    seen = segments(installation)
    runs["schedule"].append(observed(model, inputs))
    steps = {way: [run for run, _ in run_steps] for way, run_steps in runs.items()}
    plain, with_residual = steps["plain"]
    return {
        "differences": differences(steps["schedule"], [plain, plain, with_residual, plain]),
        "gathers": {way: [gathers for _, gathers in run_steps] for way, run_steps in runs.items()},
        "seen": seen,
    }


def fsdp2_broken() -> dict[str, Any]:
    """A loop begins to use the state between its blocks: the step is refused, and repeated."""
    runs = []
    for scheduled in (False, True):
        model, inputs = build("toy")
        shard("toy", model, keys(2), "segment", MixedPrecisionPolicy())
        if scheduled:
            installation = simpletuner_segckpt.apply(model, keys(2))
        steps = [observed(model, inputs)[0] for _ in range(2)]
        model.between = lambda index, state: state * 2 if index == 0 else state
        refused = False
        try:
            steps.append(observed(model, inputs)[0])
        except SegmentBroken:
            refused = True
            steps.append(observed(model, inputs)[0])
        runs.append([*steps, observed(model, inputs)[0]])
    found = differences(*reversed(runs))
    return {"differences": found, "seen": segments(installation), "refused": refused}


def old_torch() -> dict[str, Any]:
    """What is said on the versions of torch whose recompute leaves out FSDP2's cast."""
    said = {}
    real = torch.__version__
    for version in ("2.10.0", "2.11.0", "2.12.1+cpu", "2.13.0"):
        for policy in (MixedPrecisionPolicy(), BF16):
            model, inputs = build("toy")
            shard("toy", model, keys(2), "segment", policy)
            with heard() as messages:
                simpletuner_segckpt.apply(model, keys(2))
                torch.__version__ = TorchVersion(version)
                for _ in range(2):
                    step(model, inputs)
                torch.__version__ = real
            told = [message for message in messages if version in message]
            said[f"{version} {policy.param_dtype}"] = told
    return {"said": said}


def sharded_twice() -> dict[str, Any]:
    """What is said where blocks are sharded already: by themselves, with the model, by FSDP1."""
    said = []

    def refused(model: Module) -> None:
        try:
            fully_shard_segments(model, keys(2))
        except UnsupportedModel as error:
            said.append(str(error))

    refused(fully_shard_segments(build("toy")[0], keys(2)))
    model, _ = build("flux")
    fully_shard(model.single_transformer_blocks[1])
    refused(model)
    model, _ = build("toy")
    refused(FullyShardedDataParallel(model, device_id=torch.device("cpu")))
    return {"said": said}


def sharded_before() -> dict[str, Any]:
    """An embedding and a part of a block are units already; options that differ, and lists."""
    runs = []
    for scheduled in (False, True):
        model, inputs = build("flux", num_layers=4, num_single_layers=4)
        fully_shard(model.x_embedder)
        fully_shard(model.transformer_blocks[1].ff)
        order = blocks("flux", model)
        units = [[order.index(block) for block in unit] for unit in sharding_units(model, keys(2))]
        fully_shard_segments(
            model,
            keys(2),
            last={"reshard_after_forward": False},
            root={"reshard_after_forward": True},
            forward_prefetch=2,
            backward_prefetch=1,
        )
        if scheduled:
            simpletuner_segckpt.apply(model, keys(2))
        runs.append([observed(model, inputs) for _ in range(3)])
    steps = [[run for run, _ in run_steps] for run_steps in runs]
    return {
        "differences": differences(*reversed(steps)),
        "gathers": [[gathers for _, gathers in run_steps] for run_steps in runs],
        "units": units,
    }


# FSDP1.


def fsdp1(name: str, order: str) -> dict[str, Any]:
    def wrap(model: Any) -> Any:
        policy = ModuleWrapPolicy({type(block) for block in blocks(name, model)})
        device = torch.device("cpu")
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=device
        )

    model, inputs = build(name)
    expected = own_shards(step(wrap(model), inputs))
    model, inputs = build(name)
    if order == "shard, apply":
        wrapped = wrap(model)
        installation = simpletuner_segckpt.apply(wrapped, keys(2, 3))
    else:
        installation = simpletuner_segckpt.apply(model, keys(2, 3))
        if order == "apply, step, shard":
            step(model, inputs)
        wrapped = wrap(model)
    steps = [own_shards(step(wrapped, inputs)) for _ in range(3)]
    seen = segments(installation)
    installation.remove()
    steps.append(own_shards(step(wrapped, inputs)))
    return {"differences": differences(steps, [expected] * 4), "seen": seen}


# accelerate.


def accelerated(kind: str, order: str) -> dict[str, Any]:
    """``Accelerator.prepare`` with DDP and bf16, or with FSDP2; a sharded model stays as it is."""
    runs = []
    for scheduled in (False, True):
        accelerator = _accelerator(kind)
        model, inputs = build("flux")
        if scheduled and order == "apply, prepare":
            installation = simpletuner_segckpt.apply(model, keys(2))
        if kind == "FSDP2 segments":
            fully_shard_segments(model, keys(2))
        prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        with heard() as messages:
            if scheduled and order == "prepare, apply":
                installation = simpletuner_segckpt.apply(prepared, keys(2))
            seen = [observed(prepared, inputs) for _ in range(3)]
        runs.append([run for run, _ in seen])
    wrapper = "FSDP2" if isinstance(prepared, FSDPModule) else type(prepared).__name__
    found = differences(*reversed(runs))
    return {
        "differences": found,
        "seen": segments(installation),
        "wrapper": wrapper,
        "gathers": [gathers for _, gathers in seen],
        "said": messages,
    }


def _accelerator(kind: str) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    if kind == "DDP":
        return Accelerator(cpu=True, mixed_precision="bf16")
    accelerator = Accelerator(cpu=True)
    # accelerate itself leaves the FSDP plugin out where there is no accelerator.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="no_wrap" if kind == "FSDP2 segments" else "transformer_based_wrap",
        transformer_cls_names_to_wrap=["FluxTransformerBlock", "FluxSingleTransformerBlock"],
        activation_checkpointing=kind == "FSDP2 activation checkpointing",
        cpu_ram_efficient_loading=False,
    )
    return accelerator


# diffusers' context parallelism.


class JointAttention:
    """For SD3, whose own processor knows nothing of other processes."""

    _attention_backend = None
    _parallel_config = None

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        def heads(linear, norm, states):
            split = linear(states).unflatten(-1, (attn.heads, -1))
            return split if norm is None else norm(split)

        image = hidden_states.shape[1]
        query = heads(attn.to_q, attn.norm_q, hidden_states)
        key = heads(attn.to_k, attn.norm_k, hidden_states)
        value = heads(attn.to_v, None, hidden_states)
        if encoder_hidden_states is not None:
            text = encoder_hidden_states
            query = torch.cat([query, heads(attn.add_q_proj, attn.norm_added_q, text)], dim=1)
            key = torch.cat([key, heads(attn.add_k_proj, attn.norm_added_k, text)], dim=1)
            value = torch.cat([value, heads(attn.add_v_proj, None, text)], dim=1)
        result = dispatch_attention_fn(
            query,
            key,
            value,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        ).flatten(2, 3)
        own = attn.to_out[1](attn.to_out[0](result[:, :image]))
        if encoder_hidden_states is None:
            return own
        other = result[:, image:]
        return own, other if attn.context_pre_only else attn.to_add_out(other)


SD3_PLAN = {
    "transformer_blocks.0": {
        name: ContextParallelInput(split_dim=1, expected_dims=3)
        for name in ("hidden_states", "encoder_hidden_states")
    },
    "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}


@contextmanager
def flash_attention_on_cpu():
    """Give the operator that diffusers' ring attention calls a kernel for CPU: that of its like."""
    aten = torch.ops.aten

    def forward(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        alike = aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = alike(q, k, v, dropout_p, is_causal, scale=scale)
        nothing = torch.empty(0, dtype=torch.int64)
        return out, lse, nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing

    def backward(grad, q, k, v, out, lse, cq, ck, mq, mk, dropout_p, is_causal, *_, scale=None):
        alike = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return alike(grad, q, k, v, out, lse, dropout_p, is_causal, scale=scale)

    name = "_scaled_dot_product_flash_attention"
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(name, forward, "CPU")
        library.impl(f"{name}_backward", backward, "CPU")
        yield


def context_parallel(name: str, kind: str) -> dict[str, Any]:
    """Two steps with a schedule that was there before, one without, and two with kept attention."""
    torch.manual_seed(0)
    model, inputs = model_and_inputs(name, **DEPTH.get(name, {}))
    for module in model.modules() if name == "sd3" else ():
        if isinstance(module, Attention):
            module.processor = JointAttention()
    installation = simpletuner_segckpt.apply(model, keys(2))
    step(model, inputs)
    if kind == "ring":
        model.set_attention_backend("_native_flash")
    # diffusers divides by the number of accelerators.
    with patch("torch.accelerator.device_count", lambda: 1):
        model.enable_parallelism(
            config=ContextParallelConfig(**{f"{kind}_degree": 2}),
            cp_plan=SD3_PLAN if name == "sd3" else None,
        )
    steps, exchanges, seen, kept = [], [], [], []
    with heard() as messages, flash_attention_on_cpu():
        for config in (keys(2), None, keys(2) | {"gradient_checkpointing_keep": ["attention"]}):
            if config and steps:
                installation = simpletuner_segckpt.apply(model, config)
            for _ in range(2 if config else 1):
                with Exchanges() as collectives:
                    steps.append(own_shards(step(model, inputs)))
                exchanges.append(collectives.count)
            if config:
                seen.append(segments(installation))
                kept.append(sum((s.kept for s in installation.effect.stacks), Counter()))
                installation.remove()
    return {
        "differences": differences(steps, [steps[2]] * 5),
        "exchanges": exchanges,
        "seen": seen,
        "kept": kept,
        "said": messages,
    }


# All of them.


def differences(found: list[Step], expected: list[Step]) -> list[str]:
    """What differs from step to step; empty when nothing does."""
    return [
        f"step {number}: {difference}"
        for number, (a, b) in enumerate(zip(found, expected, strict=True))
        for difference in a.differences(b)
    ]


def example(name: str) -> dict[str, Any]:
    """An example for three steps, with checkpointing off and as it is; what it prints and saves."""
    spec = spec_from_file_location(f"{name}_example", EXAMPLES / name / "train.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    off = module.CONFIG | {"gradient_checkpointing": False}
    losses, saved = [], []
    for config in (off, module.CONFIG):
        with TemporaryDirectory() as output, redirect_stdout(StringIO()) as printed:
            losses.append(module.train(config, 3, Path(output)))
            saved.append([load_file(path) for path in Path(output).glob("*.safetensors")])
    return {
        "losses": losses,
        "saved alike": saved[0] == [] == saved[1] or _equal(*saved[0], *saved[1]),
        "printed": printed.getvalue(),
    }


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# Every way with Flux, whose loop asks its checkpoint function; of the others (AuraFlow's blocks are
# intercepted, Llama's class is in no family file) what differs.
DDP = [
    *(("flux", mode) for mode in DDP_MODES),
    ("auraflow", "find_unused_parameters"),
    ("llama", "static_graph"),
]
FSDP2 = [
    *(("flux", u, o) for u in ("block", "segment") for o in ("apply, shard", "shard, apply")),
    ("auraflow", "block", "shard, apply"),
    ("auraflow", "segment", "apply, shard"),
    ("llama", "block", "apply, shard"),
    ("llama", "segment", "shard, apply"),
]
FSDP2_BF16 = [
    ("flux", "block", "apply, shard", 2),
    ("llama", "segment", "apply, shard", 2),
    ("llama", "block", "shard, apply", 4),
]
# Interval, and how many units are gathered ahead in forward and in backward.
PREFETCH = [(2, 2, 0), (2, 2, 2), (4, 0, 0)]
FSDP1 = [
    ("flux", "apply, shard"),
    ("flux", "shard, apply"),
    ("auraflow", "apply, step, shard"),
    ("llama", "shard, apply"),
]
ACCELERATE = [
    ("DDP", "apply, prepare"),
    ("DDP", "prepare, apply"),
    ("FSDP2", "prepare, apply"),
    ("FSDP2 segments", "apply, prepare"),
]
CONTEXT_PARALLEL = [(name, "ulysses") for name in ("wan", "flux", "sd3")] + [("wan", "ring")]


def cases() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, mode in DDP:
        found[f"ddp {name} {mode}"] = partial(ddp, name, mode)
    for name, unit, order in FSDP2:
        found[f"fsdp2 {name} {unit} {order}"] = partial(fsdp2, name, unit, order)
    for name, order in FSDP1:
        found[f"fsdp1 {name} {order}"] = partial(fsdp1, name, order)
    for name in ("flux", "llama"):
        found[f"ddp accumulation {name}"] = partial(ddp_accumulation, name)
        found[f"ranks differ {name}"] = partial(fsdp2_ranks_differ, name)
    for name, unit, order, interval in FSDP2_BF16:
        run = partial(fsdp2, name, unit, order, interval, bf16=True)
        found[f"fsdp2 bf16 {name} {unit} {order} {interval}"] = run
    for interval, forward, backward in PREFETCH:
        run = partial(fsdp2_prefetch, interval, forward, backward)
        found[f"fsdp2 prefetch {interval} {forward} {backward}"] = run
    for kind in ("DDP", "FSDP2"):
        found[f"budget {kind}"] = partial(budget, kind)
    found["fsdp2 accumulation"] = fsdp2_accumulation
    found["fsdp2 lora"] = fsdp2_lora
    found["fsdp2 broken"] = fsdp2_broken
    found["old torch"] = old_torch
    found["sharded twice"] = sharded_twice
    found["sharded before"] = sharded_before
    for kind, order in (*ACCELERATE, ("FSDP2 activation checkpointing", "apply, prepare")):
        found[f"accelerate {kind} {order}"] = partial(accelerated, kind, order)
    for name, kind in CONTEXT_PARALLEL:
        found[f"context parallel {name} {kind}"] = partial(context_parallel, name, kind)
    for name in ("ddp", "fsdp2"):
        found[f"example {name}"] = partial(example, name)
    return found


def main(path: str, only: str = "") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))  # ranks that wait for each other
    results = {}
    for name, case in cases().items():
        if only not in name:
            continue
        began = time.perf_counter()
        try:
            result = case()
        except Exception:
            result = {"raised": traceback.format_exc()}
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, result | {"seconds": time.perf_counter() - began})
        results[name] = gathered
        if dist.get_rank() == 0:
            Path(path).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # now and then a thread of gloo is still there, which ends Python with an abort


if __name__ == "__main__":
    main(*sys.argv[1:])
