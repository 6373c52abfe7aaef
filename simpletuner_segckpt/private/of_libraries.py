"""Names of diffusers, transformers, PEFT and accelerate that are private and used here.

Attributes, looked up where they may be missing: without them a feature is not noticed.
"""

import sys
from collections.abc import Mapping
from inspect import signature
from typing import Any

# diffusers: whether a class can checkpoint, and the function that its loop asks.
SUPPORTS_CHECKPOINTING = "_supports_gradient_checkpointing"
CHECKPOINT_FUNCTION = "_gradient_checkpointing_func"
# transformers uses the same name for that function; here are the functions that diffusers sets.
STOCK_FUNCTIONS_MODULE = "diffusers.models.modeling_utils"

# diffusers: modules that it always loads in float32.
KEEP_IN_FP32 = "_keep_in_fp32_modules"

# transformers: the module of the hooks by which it captures outputs.
OUTPUT_CAPTURING = "transformers.utils.output_capturing"

# transformers: how the qualified name of the hook begins that has a gradient begin at the inputs,
# where PEFT leaves everything before the adapters frozen.
INPUT_GRADIENTS_HOOK = "PreTrainedModel.enable_input_require_grads."

# accelerate: its hook on a module, which also patches the forward.
ACCELERATE_HOOK = "_hf_hook"

# PEFT: on its layers, whether adapters are off, and which one is on.
ADAPTERS_DISABLED = "_disable_adapters"
ACTIVE_ADAPTER = "_active_adapter"
# PEFT: how the qualified name of the hook begins that adds PEFT's other hooks in a recompute.
RECOMPUTE_HOOK = "LoraModel._enable_peft_forward_hooks."

# diffusers: where it keeps which kernel its attentions call.
_ATTENTION_DISPATCH = "diffusers.models.attention_dispatch"


def _attention_registry() -> Any:
    """Without importing it, where nobody has."""
    module = sys.modules.get(_ATTENTION_DISPATCH)
    return getattr(module, "_AttentionBackendRegistry", None)


def attention_backend() -> Any:
    """The attention backend of diffusers that is active; None where it cannot be told."""
    return getattr(_attention_registry(), "_active_backend", None)


def set_attention_backend(backend: Any) -> None:
    """Make ``backend``, which ``attention_backend`` returned, the active one."""
    registry = _attention_registry()
    if registry is not None and backend is not None:
        registry._active_backend = backend


# diffusers: what `enable_gradient_checkpointing` leaves the work to.
SET_CHECKPOINTING = "_set_gradient_checkpointing"

_DIFFUSERS_HOOKS = "_diffusers_hook"
# diffusers, accelerate: where the class is that their hooks are derived from.
_HOOK_BASES = ("diffusers.hooks.hooks", "accelerate.hooks")
# diffusers: what a model's `enable_parallelism` was given.
_PARALLEL = "_parallel_config"
# diffusers: the hooks of its context parallelism.
_CONTEXT_MODULE = "diffusers.hooks.context_parallel"
_CONTEXT_PARALLEL = ("ContextParallelSplitHook", "ContextParallelGatherHook")


def diffusers_hooks(module: Any) -> Mapping[str, Any]:
    """The hooks of diffusers on a module by name: offloading, caches, context parallelism."""
    registry = module.__dict__.get(_DIFFUSERS_HOOKS)
    return registry.hooks if registry else {}


def is_stateful(hook: Any) -> bool:
    """Whether a hook of diffusers keeps something from one step for the next."""
    return bool(getattr(hook, "_is_stateful", False))


def splits_context(hook: Any) -> bool:
    """Whether a hook of diffusers does nothing but hand each process its part of a tensor.

    That is a function of the tensor alone, wherever it stands and how often it runs.
    """
    return type(hook).__name__ in _CONTEXT_PARALLEL and type(hook).__module__ == _CONTEXT_MODULE


def has_ring_attention(model: Any) -> bool:
    """Whether a model's attention is spread over processes in a ring, by diffusers."""
    parallel = getattr(getattr(model, _PARALLEL, None), "context_parallel_config", None)
    return parallel is not None and parallel.ring_degree > 1


def overridden(hook: Any, method: str) -> bool:
    """Whether a hook of diffusers or accelerate has a ``method`` of its own; that of their base of
    all hooks does nothing. Of what has no such base nobody knows.
    """
    bases = [base for base in type(hook).__mro__ if base.__module__ in _HOOK_BASES]
    found = getattr(hook, method, None)
    return not bases or getattr(found, "__func__", found) is not getattr(bases[-1], method)


def takes_checkpoint_function(model: Any) -> bool:
    """Whether ``enable_gradient_checkpointing(gradient_checkpointing_func=...)`` can be called.

    It cannot where a class has a method of another shape in its place, or in that of what it calls.
    """
    given = {"gradient_checkpointing_func": None}
    return _can_be_called(getattr(model, "enable_gradient_checkpointing", None), given) and (
        not hasattr(model, SET_CHECKPOINTING)
        or _can_be_called(getattr(model, SET_CHECKPOINTING), given | {"enable": True})
    )


def _can_be_called(function: Any, arguments: Mapping[str, Any]) -> bool:
    try:
        signature(function).bind(**arguments)
    except TypeError:  # no function at all, too
        return False
    return True
