"""Hooks of other code on the blocks of a model, which a segment would break."""

from collections.abc import Iterable
from typing import Any

from torch.nn import Module

from .report import Condition
from .stacks import uncompiled


def model_conditions(path: str, blocks: Iterable[Module]) -> list[Condition]:
    """What other code has attached to the blocks of one stack and a segment would break.

    Recompute stops early, so the post-forward hook of a segment's last block does not fire
    while those of the blocks before it do: hooks that move weights are exact block by block
    and destroy them in wider segments.
    """
    for index, block in enumerate(blocks):
        name = _foreign_hook(block) or _foreign_hook(uncompiled(block))
        if name:
            reason = f"block {index} of `{path}` carries it, and it must run once per block"
            return [Condition("model", name, reason, (path,))]
    return []


def _foreign_hook(block: Any) -> str | None:
    for kind, hooks in (
        ("forward pre-hook", block._forward_pre_hooks),
        ("forward hook", block._forward_hooks),
        ("backward pre-hook", block._backward_pre_hooks),
        ("backward hook", block._backward_hooks),
    ):
        for hook in hooks.values():
            origin = getattr(hook, "__self__", hook)
            module = getattr(origin, "__module__", None) or type(origin).__module__
            if not module.startswith("torch.distributed."):  # FSDP2's are made for recompute
                return f"{kind} {getattr(hook, '__qualname__', type(hook).__qualname__)}"
    if "_hf_hook" in block.__dict__:
        return f"accelerate hook {type(block._hf_hook).__name__}"
    if "_diffusers_hook" in block.__dict__:
        return f"diffusers hook {', '.join(block._diffusers_hook.hooks)}"
    return None
