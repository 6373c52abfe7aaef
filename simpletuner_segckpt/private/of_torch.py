"""What of torch is private and used here.

``Module._modules``, ``_parameters`` and ``_buffers`` stand where they are used: they are part of
what a module is pickled as, and so have not changed since torch 0.1.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import batchnorm, instancenorm
from torch.nn.modules import module as torch_module

__all__ = [
    "TorchDispatchMode",
    "pytree",
    "set_most_recent_first",
]

# Nested containers, flattened as torch.utils.checkpoint itself does it.
try:
    from torch.utils import _pytree as pytree
except ImportError:  # the name that it would have as a public one
    from torch.utils import pytree  # type: ignore[attr-defined, no-redef]

# What torch's own counters of operators build on.
try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:

    class TorchDispatchMode:  # type: ignore[no-redef]
        """Sees nothing."""

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: Any) -> None: ...


# Whether compiled code is tried that ran last first; it holds for the process,
# and nothing tells its present value.
try:
    from torch._C._dynamo import eval_frame
except ImportError:
    eval_frame = None  # type: ignore[assignment]
set_most_recent_first: Any = getattr(eval_frame, "_set_lru_cache", None)

# Modules whose kernels write their statistics past the version of a buffer.
NormBase: Any = getattr(
    batchnorm,
    "_NormBase",
    (
        *(batchnorm.BatchNorm1d, batchnorm.BatchNorm2d, batchnorm.BatchNorm3d),
        *(batchnorm.SyncBatchNorm,),
        *(instancenorm.InstanceNorm1d, instancenorm.InstanceNorm2d, instancenorm.InstanceNorm3d),
    ),
)

# What a subclass of Tensor enters to call the functions of its base.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def top_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """What packs and unpacks the tensors that are saved now; None where nobody does."""
    return _top_hooks(True) if _top_hooks is not None else None


def inside_checkpoint() -> bool:
    """Whether a checkpoint call, of whomever, runs around this code."""
    hooks = top_saved_tensors_hooks()
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


def current_backward() -> int | None:
    """Which backward runs in this thread, by a number of its own."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


# The functional collectives by which processes exchange parts of a tensor. No sum is among them.
_EXCHANGES = {
    f"_c10d_functional::{name}"
    for name in ("all_to_all_single", "all_gather_into_tensor", "all_gather_into_tensor_coalesced")
}


def is_exchange(operator: Any) -> bool:
    """Whether an operator hands a tensor to other processes, and returns what they handed on."""
    return operator.name() in _EXCHANGES


def finished(tensor: Tensor) -> Tensor:
    """What a functional collective returned, when it is there: it may still be under way."""
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return waited


# How many dispatch modes are open in this thread.
dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)

_exclude_key = getattr(torch._C, "_SetExcludeDispatchKeyGuard", None)


def detached_below_autograd(tensor: Tensor) -> Tensor:
    """``tensor`` detached within a dispatch mode, so that writes to either show in its version."""
    if _exclude_key is None:
        return tensor.detach()
    with _exclude_key(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def memory_of(tensor: Tensor) -> int:
    """The same for tensors that share their memory; of fake ones as well."""
    return tensor.untyped_storage()._cdata


def saved_by(node: Any) -> Iterator[Tensor]:
    """The tensors that a node of autograd's graph has saved, as far as it tells."""
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                found = getattr(node, name)
            except RuntimeError:  # freed, or written in place since
                continue
            for value in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(value, Tensor):
                    yield value


def when_backward_ends(told: Callable[[], None]) -> None:
    """Have ``told`` called at the end of the backward that runs in this thread."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    queue = getattr(engine, "queue_callback", None)
    if queue is None:
        told()  # too early is better than never
    else:
        queue(told)


def version(tensor: Tensor | None) -> int:
    """How often a tensor was written in place; 0 where torch does not count that."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that ``tensor`` is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


# Attributes under which wrappers hold what they wrap: those of torch.compile, FSDP1 and torch's
# checkpoint wrapper.
ORIGINAL = "_orig_mod"
WRAPPED = (ORIGINAL, "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# That of the checkpoint wrapper for its function.
CHECKPOINT_WRAPPER_FUNCTION = "checkpoint_fn"


def is_optimized(module: Module) -> bool:
    """Whether ``module`` is the wrapper that ``torch.compile(model)`` returns.

    Without importing the compiler, which takes a second, where nobody has.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    kind = getattr(compiler, "OptimizedModule", None)
    return kind is not None and isinstance(module, kind)


def is_compiled_in_place(module: Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def persistent_buffers(module: Module) -> set[str]:
    """Names of the buffers that are part of the state of ``module``."""
    return set(module._buffers) - getattr(module, "_non_persistent_buffers_set", set())


# The hooks of a module, by the attribute that holds them.
FORWARD_PRE_HOOKS = "_forward_pre_hooks"
FORWARD_HOOKS = "_forward_hooks"
FORWARD_HOOK_TABLES = (
    FORWARD_PRE_HOOKS,
    "_forward_pre_hooks_with_kwargs",
    FORWARD_HOOKS,
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_HOOKS = {
    "forward pre-hook": FORWARD_PRE_HOOKS,
    "forward hook": FORWARD_HOOKS,
    "backward pre-hook": "_backward_pre_hooks",
    "backward hook": "_backward_hooks",
}


def hooks_on(module: Module, *kinds: str) -> Iterator[tuple[str, Any]]:
    """Each hook on ``module`` with its kind; of all kinds when none is named."""
    for kind in kinds or _HOOKS:
        for hook in getattr(module, _HOOKS[kind], {}).values():
            yield kind, hook


def drop_forward_hooks(module: Module, hooks: Collection[Any]) -> None:
    """Take hooks off a module whose handles somebody else has; these then do nothing."""
    table = getattr(module, FORWARD_HOOKS)
    for key in [key for key, hook in table.items() if hook in hooks]:
        del table[key]


def global_forward_hooks() -> Iterator[Any]:
    """The forward hooks and pre-hooks of all modules of the process."""
    for name in ("_global_forward_pre_hooks", "_global_forward_hooks"):
        yield from getattr(torch_module, name, {}).values()


def arguments_by_name(frame: FrameType) -> dict[str, Any]:
    """The keyword arguments of the call of a module that calls its hooks in ``frame``.

    torch hands them to no hook of all modules. Where they cannot be told there are none.
    """
    found = frame.f_locals.get("kwargs")
    return dict(found) if isinstance(found, dict) else {}


# What ``torch.utils.checkpoint.checkpoint`` leaves its work to: its two variants.
_VARIANTS = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")


@contextmanager
def plain_checkpoints(is_plain: Callable[[Any, tuple], bool]) -> Iterator[bool]:
    """Within this, checkpoint calls whose function and arguments ``is_plain`` just call it.

    Those of this package are as ever. Whoever holds ``checkpoint`` itself holds what it always was,
    for compilers too. Yields whether torch has what that takes.
    """
    own = [getattr(torch.utils.checkpoint, name, None) for name in _VARIANTS]
    if None in own:
        yield False
        return
    begin: Any
    reentrant: Any
    begin, reentrant = own

    def begin_if_asked(function: Any, preserve: Any, *options: Any, **kwargs: Any) -> Any:
        if _is_anothers() and is_plain(function, (*options, *kwargs.values())):
            return _nothing_around()
        return begin(function, preserve, *options, **kwargs)

    class IfAsked(reentrant):
        @classmethod
        def apply(cls, function: Any, preserve: Any, *args: Any) -> Any:
            if _is_anothers() and is_plain(function, args):
                return function(*args)
            return reentrant.apply(function, preserve, *args)

    try:
        for name, ours in zip(_VARIANTS, (begin_if_asked, IfAsked), strict=True):
            setattr(torch.utils.checkpoint, name, ours)
        yield True
    finally:
        for name, was in zip(_VARIANTS, own, strict=True):
            setattr(torch.utils.checkpoint, name, was)


def _nothing_around() -> Iterator[None]:
    yield


def _is_anothers() -> bool:
    """Whether the checkpoint call that runs is made by code outside torch and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and not name.startswith("torch."):
            return not name.startswith(__name__.partition(".")[0] + ".")
        frame = frame.f_back
    return True


def mixed_precision_of(module: Any) -> Any:
    """The mixed precision policy of a module that FSDP2 shards; None where it cannot be told."""
    from torch.distributed.fsdp import fully_shard

    return getattr(fully_shard.state(module), "_mp_policy", None)  # type: ignore[attr-defined]


# What FSDP2 keeps of ``set_modules_to_forward_prefetch``, which can be set and not read.
FORWARD_PREFETCH = "_states_to_forward_prefetch"


@contextmanager
def forward_prefetch_put_off(module: Any) -> Iterator[None]:
    """Within this, FSDP2 gathers no other module ahead when ``module`` runs."""
    from torch.distributed.fsdp import fully_shard

    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    listed = getattr(state, FORWARD_PREFETCH, None)
    if not listed:
        yield
        return
    setattr(state, FORWARD_PREFETCH, [])
    try:
        yield
    finally:
        setattr(state, FORWARD_PREFETCH, listed)
