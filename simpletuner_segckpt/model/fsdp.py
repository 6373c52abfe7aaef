"""What FSDP has done to a model, as far as recomputing its blocks is concerned."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn import Module

from ..private.of_torch import forward_prefetch_put_off, mixed_precision_of
from .stacks import blocks_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def are_sharded(modules: Iterable[Module]) -> bool:
    """Whether FSDP, 1 or 2, shards any of ``modules`` or what is in them.

    Running those is a collective call: every rank must run them equally often.
    """
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel)
    return any(isinstance(inner, kinds) for module in modules for inner in module.modules())


def sharded_around(model: Module, base: Module, path: str) -> str:
    """What is sharded so that the blocks of the stack at ``path`` are: in words; empty if nothing.

    ``base`` is what runs inside ``model``. What FSDP2 shards inside a block is no hindrance: a unit
    can stand within another.
    """
    if not may_be_sharded():
        return ""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    steps = path.split(".")
    paths = [".".join(steps[:end]) for end in range(1, len(steps) + 1)]
    blocks = {f"`{path}.{index}`": block for index, block in enumerate(blocks_of(base, path))}
    around = {"the model": model, "the model in it": base}
    around |= {f"`{name}`": base.get_submodule(name) for name in paths}
    for name, module in (around | blocks).items():
        inside = module.modules() if name in blocks else [module]
        older = any(isinstance(inner, FullyShardedDataParallel) for inner in inside)
        if older or isinstance(module, FSDPModule):
            return name
    return ""


def may_be_sharded() -> bool:
    """Whether there are processes among which FSDP could shard anything."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def gather(modules: Iterable[Module]) -> None:
    """Begin to gather what FSDP2 has sharded of ``modules``, in their order, where it is not yet.

    Whoever runs one of them waits for its weights; backward reshards them.
    """
    for module in _sharded_in(modules):
        module.unshard(async_op=True)


@contextmanager
def no_forward_prefetch(modules: Iterable[Module]) -> Iterator[None]:
    """Within this, running ``modules`` gathers nothing ahead of them.

    In backward the modules that follow are done, and what is gathered of them is for nothing.
    """
    with ExitStack() as undo:
        for module in _sharded_in(modules):
            undo.enter_context(forward_prefetch_put_off(module))
        yield


def _sharded_in(modules: Iterable[Module]) -> "Iterator[FSDPModule]":
    from torch.distributed.fsdp import FSDPModule

    for module in modules:
        yield from (inner for inner in module.modules() if isinstance(inner, FSDPModule))


def recompute_fault(model: Module) -> str:
    """What is wrong with recomputing in the installed torch as FSDP2 trains ``model``, if anything.

    In torch 2.11 and 2.12 a recompute leaves out FSDP2's cast of a module's inputs, so its tensors
    have another dtype than those of the forward.
    """
    if torch.__version__ < "2.11" or torch.__version__ >= "2.13":
        return ""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            policy = mixed_precision_of(module)
            if policy and policy.param_dtype is not None and policy.cast_forward_inputs:
                return (
                    f"torch {torch.__version__} leaves out FSDP2's cast of inputs to "
                    f"{policy.param_dtype} in a recompute, so backward fails or mixes dtypes; "
                    "torch 2.13 repeats it"
                )
    return ""
