"""Modules that others put around a model or around its blocks, and what is inside."""

import sys
from typing import Any

from peft import PeftModel
from torch.nn import Module

from ..private.of_torch import (
    CHECKPOINT_WRAPPER_FUNCTION,
    ORIGINAL,
    WRAPPED,
    is_compiled_in_place,
    is_optimized,
)


def wrappers(block: Any) -> list[Any]:
    """What is wrapped around a block, outermost first, and the block itself."""
    found = [block]
    while (held := next((k for k in WRAPPED if k in found[-1]._modules), None)) is not None:
        found.append(found[-1]._modules[held])
    return found


def unwrapped(block: Any) -> Any:
    """The block inside the wrappers that others put around it, or the block itself."""
    return wrappers(block)[-1]


def is_compiled(block: Any) -> bool:
    """Whether ``torch.compile`` wraps the block, or ``block.compile()`` was called."""
    return any(ORIGINAL in m._modules or is_compiled_in_place(m) for m in wrappers(block))


def recomputes_itself(block: Any) -> bool:
    """Whether torch's checkpoint wrapper is around the block."""
    return any(CHECKPOINT_WRAPPER_FUNCTION in module.__dict__ for module in wrappers(block))


def unwrap(model: Module) -> Module:
    """The module whose forward runs, inside DDP, FSDP, ``torch.compile`` and PEFT wrappers.

    Where accelerate compiled the regions of a model, that is the copy that it made.
    """
    inner = _inside_parallel(model)
    if is_optimized(inner):
        return unwrap(getattr(inner, ORIGINAL))
    return unwrap(inner.get_base_model()) if isinstance(inner, PeftModel) else inner


# Whose ``module`` is the model, by where they come from: what nobody imported wraps nothing.
_PARALLEL = (
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.nn.parallel", "DataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("deepspeed", "DeepSpeedEngine"),
)


def _inside_parallel(model: Any) -> Module:
    """The model inside those wrappers.

    Not by accelerate's ``extract_model_from_parallel``: before 1.13 it fails where blocks are
    compiled, and out of a compiled DDP it takes the DDP for good.
    """
    loaded = ((sys.modules.get(module), name) for module, name in _PARALLEL)
    kinds = tuple(getattr(module, name) for module, name in loaded if hasattr(module, name))
    while isinstance(model, kinds):
        model = model.module
    return model
