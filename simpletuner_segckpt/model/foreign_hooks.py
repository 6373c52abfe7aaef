"""Hooks of other code around the blocks of a model, and what moves their weights.

Recompute stops early, so the post-forward hook of a segment's last block does not fire while
those of the blocks before it do. Hooks that move weights are exact per-block and destroy them in
wider segments; some of diffusers' are wrong with any recompute, and refused.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.nn import Module

from ..messages.errors import UnsupportedModel
from ..private.of_libraries import (
    ACCELERATE_HOOK,
    OUTPUT_CAPTURING,
    RECOMPUTE_HOOK,
    diffusers_hooks,
    has_diffusers_hooks,
    is_stateful,
)
from ..private.of_torch import global_forward_hooks, hooks_on
from ..schedules.conditions import Condition
from ..schedules.group_offload import MOVED_TOGETHER, TAKEN_AWAY, needed_again
from ..schedules.report import StackReport
from .stacks import all_modules
from .wrappers import unwrapped

# By these methods the object of a block swapper is known, SimpleTuner's (4.10.1) by the first; the
# loop of a model calls them between blocks.
_SWAPS = ("stream_in", "wait_for_block", "submit_move_blocks", "submit_move_blocks_forward")


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


def swap_manager(model: Module) -> Condition | None:
    """An object on the model by which its loop moves the weights of blocks between their calls."""
    for name, value in vars(model).items():
        if any(hasattr(type(value), verb) for verb in _SWAPS):
            return Condition("model", name, "it moves the weights of each block as that block runs")
    return None


def refuse_hooks(planned: StackReport, blocks: Sequence[Module]) -> None:
    """Raise ``UnsupportedModel`` where hooks of diffusers give wrong gradients with the schedule.

    Whatever diffusers offloads or caches, it does to every block alike, so the first one tells.
    """
    for module in all_modules(blocks[:1]) if planned.covered else ():
        for name, hook in diffusers_hooks(module).items():
            if is_stateful(hook):
                raise UnsupportedModel(
                    f"{planned.path}: the hook {name} of diffusers answers for blocks from what it "
                    "kept of an earlier step, which a recompute does not repeat; call "
                    "disable_cache() before training"
                )
            if name == "group_offloading":
                _refuse_offloading(hook, planned, len(blocks))


def _refuse_offloading(hook: Any, planned: StackReport, blocks: int) -> None:
    together = len(hook.group.modules)
    if hook.config.offload_type == "block_level" and together > 1:
        raise UnsupportedModel(
            f"{planned.path}: {MOVED_TOGETHER.format(together)}; write num_blocks_per_group=1, or "
            "leaf_level"
        )
    if needed := needed_again(planned, blocks):
        which = f"blocks {' '.join(map(str, needed))}"
        raise UnsupportedModel(f"{planned.path}: {TAKEN_AWAY.format(which)}")


def _hook_on(block: Any) -> str | None:
    """A hook on the block itself, of any kind."""
    for kind, hook in hooks_on(block):
        if not _made_for_recompute(hook):
            return f"{kind} {_name(hook)}"
    if ACCELERATE_HOOK in block.__dict__:
        return f"accelerate hook {type(block.__dict__[ACCELERATE_HOOK]).__name__}"
    if has_diffusers_hooks(block):
        return f"diffusers hook {', '.join(diffusers_hooks(block))}"
    return None


def _hook_inside(block: Module) -> str | None:
    """A forward hook on a module inside the block: what it does after each pass, twice over."""
    for inner in all_modules([block])[1:]:
        for _, hook in hooks_on(inner, "forward hook"):
            if not _made_for_recompute(hook):
                return f"forward hook {_name(hook)} on a {type(inner).__name__}"
    return None


def _global_hooks() -> Iterator[str]:
    for hook in global_forward_hooks():
        if not _made_for_recompute(hook):
            yield f"global hook {_name(hook)}"


def _made_for_recompute(hook: Any) -> bool:
    """Whether a hook is torch's own: FSDP2's, or that of a profiler or a FLOP counter.

    Or one of those by which the models of transformers capture outputs: from the first capture on
    they stay, and do nothing in a forward that captures nothing (a condition of the call).
    """
    function = _function(hook)
    owner = getattr(function, "__self__", function)
    module = getattr(owner, "__module__", None) or type(owner).__module__
    known = module.startswith("torch.") or module == OUTPUT_CAPTURING
    return known or helps_recompute(hook)


def helps_recompute(hook: Any) -> bool:
    """Whether a hook is on a block so that PEFT's other hooks are there when it is recomputed.

    ``recompute.state`` sees to that; a hook that adds more of them in the recompute would leave
    them. Known by its name in PEFT 0.21; without it aLoRA runs per-block.
    """
    return _name(hook).startswith(RECOMPUTE_HOOK)


def _name(hook: Any) -> str:
    function = _function(hook)
    return getattr(function, "__qualname__", type(function).__qualname__)


def _function(hook: Any) -> Any:
    return hook.func if isinstance(hook, partial) else hook
