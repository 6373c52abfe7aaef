"""Modules that others put around a model or around its blocks, and what is inside."""

from typing import Any

from accelerate.utils import extract_model_from_parallel
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
    inner = extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=True)
    if is_optimized(inner):
        return unwrap(getattr(inner, ORIGINAL))
    return unwrap(inner.get_base_model()) if isinstance(inner, PeftModel) else inner


def is_one_graph(model: Module) -> bool:
    """Whether ``model`` is compiled as a whole, under PEFT's and parallel wrappers."""
    inner = extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=True)
    if is_optimized(inner) or is_compiled_in_place(inner):
        return True
    return isinstance(inner, PeftModel) and is_one_graph(inner.get_base_model())
