"""Hooks of other code around the blocks of a model, which a segment would break.

Recompute stops early, so the post-forward hook of a segment's last block does not fire while
those of the blocks before it do. Hooks that move weights are exact block by block and destroy
them in wider segments.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.nn import Module
from torch.nn.modules import module as torch_module

from .report import Condition
from .stacks import unwrapped


def model_conditions(path: str, blocks: Iterable[Module]) -> list[Condition]:
    """What is attached to the blocks of one stack, or to all modules, and runs once per block."""
    for everywhere in _global_hooks():
        return [Condition("model", everywhere, "it runs around every module", (path,))]
    for index, block in enumerate(blocks):
        name = _hook_on(block) or _hook_on(unwrapped(block)) or _hook_inside(block)
        if name:
            reason = f"block {index} of `{path}` carries it, and it must run once per block"
            return [Condition("model", name, reason, (path,))]
    return []


def _hook_on(block: Any) -> str | None:
    """A hook on the block itself, of any kind."""
    for kind, hooks in (
        ("forward pre-hook", block._forward_pre_hooks),
        ("forward hook", block._forward_hooks),
        ("backward pre-hook", block._backward_pre_hooks),
        ("backward hook", block._backward_hooks),
    ):
        for hook in hooks.values():
            if not _made_for_recompute(hook):
                return f"{kind} {_name(hook)}"
    if "_hf_hook" in block.__dict__:
        return f"accelerate hook {type(block._hf_hook).__name__}"
    if "_diffusers_hook" in block.__dict__:
        return f"diffusers hook {', '.join(block._diffusers_hook.hooks)}"
    return None


def _hook_inside(block: Module) -> str | None:
    """A forward hook on a module inside the block: what it does after each pass, twice over."""
    pending = [block]
    while pending:  # over every module of every block in every forward, so no generators
        for inner in pending.pop()._modules.values():
            if inner is not None:
                pending.append(inner)
                for hook in inner._forward_hooks.values():
                    if not _made_for_recompute(hook):
                        return f"forward hook {_name(hook)} on a {type(inner).__name__}"
    return None


def _global_hooks() -> Iterator[str]:
    for hooks in (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks):
        for hook in hooks.values():
            if not _made_for_recompute(hook):
                yield f"global hook {_name(hook)}"


def _made_for_recompute(hook: Any) -> bool:
    """Whether a hook is torch's own: FSDP2's, or that of a profiler or a FLOP counter."""
    owner = getattr(hook, "__self__", hook)
    module = getattr(owner, "__module__", None) or type(owner).__module__
    return module.startswith("torch.")


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)
