"""Training under DeepSpeed's ZeRO in two gloo processes; ``test_deepspeed`` starts it and reads it.

torchrun --standalone --nproc-per-node 2 tests/deepspeed_cases.py results.json
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin
from deepspeed.utils import safe_get_full_fp32_param
from training import add_lora, keys, model_and_inputs

import simpletuner_segckpt
from simpletuner_segckpt.verify.step import SEED, loss_of

CONFIGS = {
    "segments": keys(2),
    "keep": keys(2) | {"gradient_checkpointing_keep": ["attention", "ffn"]},
    "ffn": {"gradient_checkpointing_backend": "torch-ffn"},
}
# Stage, what is trained, the schedule, and when it is applied.
CASES = [
    *((stage, "LoRA", name, "apply, wrap") for stage in (2, 3) for name in CONFIGS),
    *((stage, "all", "segments", "wrap, apply") for stage in (2, 3)),
    *((stage, "LoRA", "segments", "accelerate") for stage in (2, 3)),
]


def train(stage: int, trained: str, config: Any, order: str) -> tuple[list, dict, list]:
    """Three steps; their losses, the weights after them, and what ran in the last one.

    ``config`` may be "own", for the model's own checkpointing, or None.
    """
    torch.manual_seed(0)
    model, inputs = model_and_inputs("flux", num_layers=3, num_single_layers=3)
    if trained == "LoRA":
        model.requires_grad_(False)
        add_lora(model)
    torch.manual_seed(dist.get_rank())
    inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
    installation = None
    if config == "own":
        model.enable_gradient_checkpointing()
    elif config and order != "wrap, apply":
        installation = simpletuner_segckpt.apply(model, config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    wrapped, backward = (with_accelerate if order == "accelerate" else with_engine)(
        model, optimizer, stage
    )
    if isinstance(config, dict) and order == "wrap, apply":
        installation = simpletuner_segckpt.apply(wrapped, config)
    losses = []
    for number in range(3):
        torch.manual_seed(SEED + number)
        loss = loss_of(wrapped(**inputs))
        backward(loss)
        losses.append(loss.item())
    stacks = installation.effect.stacks if installation else ()
    seen = [(s.strategy, [list(segment) for segment in s.segments], s.reason) for s in stacks]
    weights = {
        name: safe_get_full_fp32_param(parameter).clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    wrapped.destroy()
    return losses, weights, seen


def settings(stage: int) -> dict[str, Any]:
    """Every weight is sharded under stage 3, and torch's own optimiser steps."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def with_engine(model: Any, optimizer: Any, stage: int) -> tuple[Any, Any]:
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(stage))

    def backward(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return engine, backward


def with_accelerate(model: Any, optimizer: Any, stage: int) -> tuple[Any, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = DeepSpeedPlugin(hf_ds_config=settings(stage))
    accelerator = Accelerator(deepspeed_plugin=plugin)
    engine, _ = accelerator.prepare(model, optimizer)
    return engine, accelerator.backward  # which steps as well


def compared(stage: int, trained: str, name: str, order: str) -> dict[str, Any]:
    """With the schedule, and as it is to be.

    Under stage 3 DeepSpeed's hooks make the gradients of a whole model differ in the last bit
    between checkpointing and none, so there the model's own checkpointing is what is right.
    """
    losses, weights, seen = train(stage, trained, CONFIGS[name], order)
    right = "own" if (stage, trained) == (3, "all") else None
    expected, as_expected, _ = train(stage, trained, right, order)
    differ = [key for key in weights if not torch.equal(weights[key], as_expected[key])]
    return {
        "losses": [losses, expected],
        "weights": len(weights),
        "differ": differ,
        "seen": seen,
        "learns": len(set(losses)),
    }


def main(path: str, only: str = "") -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    results = {}
    for case in CASES:
        if only not in " ".join(map(str, case)):
            continue
        try:
            result = compared(*case)
        except Exception:
            result = {"raised": traceback.format_exc()}
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, result)
        results[" ".join(map(str, case))] = gathered
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in distributed_cases


if __name__ == "__main__":
    main(*sys.argv[1:])
