"""What FSDP has done to a model, as far as recomputing its blocks is concerned."""

from collections.abc import Iterable

import torch
from torch.nn import Module

from ..private.of_torch import mixed_precision_of


def are_sharded(modules: Iterable[Module]) -> bool:
    """Whether FSDP, 1 or 2, shards any of ``modules`` or what is in them.

    Running those is a collective call: every rank must run them equally often.
    """
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel)
    return any(isinstance(inner, kinds) for module in modules for inner in module.modules())


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
