"""Hooks of other code around the blocks of a model, and what moves their weights.

A segment is called when its first block is, and recomputed as a whole up to where its last block
needs nothing more. So what a hook does before the first block, or after the last, happens when it
does block by block: once before a forward and once before its recompute, once after the forward.
What it does anywhere else would happen once more, or too early (the weights of a block are moved
away before its backward): segments end there. Some hooks of diffusers are wrong with any recompute,
and refused.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch.nn import Module

from ..messages.errors import UnsupportedModel
from ..private.of_libraries import (
    ACCELERATE_HOOK,
    OUTPUT_CAPTURING,
    RECOMPUTE_HOOK,
    diffusers_hooks,
    is_stateful,
    overridden,
    splits_context,
)
from ..private.of_torch import FORWARD_HOOKS, global_forward_hooks, hooks_on
from ..schedules.conditions import Condition
from ..schedules.group_offload import MOVED_TOGETHER, TAKEN_AWAY, needed_again
from ..schedules.report import StackReport
from .stacks import all_modules
from .wrappers import unwrapped

_OURS = f"{__name__.partition('.')[0]}."

# By these methods the object of a block swapper is known, SimpleTuner's (4.10.1) by the first; the
# loop of a model calls them between blocks.
_SWAPS = ("stream_in", "wait_for_block", "submit_move_blocks", "submit_move_blocks_forward")


class _Hook(NamedTuple):
    """A hook on a block or inside it: when it acts, as seen from the block."""

    name: str
    before: bool
    after: bool


def hook_boundaries(path: str, blocks: Iterable[Module], alone: bool) -> dict[int, str]:
    """The boundaries between blocks at which hooks on the blocks of one stack act, and which do.

    Boundary ``k`` lies between block ``k`` and block ``k + 1``. With ``alone`` a block that carries
    a hook is to have nothing else in its segment, on whichever side the hook acts.
    """
    found: dict[int, str] = {}
    for index, block in enumerate(blocks):
        hooks = list(_hooks_of(block))
        reason = f"block {index} of `{path}` carries it, and segments end where it acts"
        for boundary, acts in ((index - 1, "before"), (index, "after")):
            if names := [hook.name for hook in hooks if alone or getattr(hook, acts)]:
                found[boundary] = f"{names[0]}: {reason}"
    return found


def hook_everywhere() -> Condition | None:
    """A hook on all modules of the process."""
    for hook in global_forward_hooks():
        if not is_made_for_recompute(hook):
            return Condition("model", f"global hook {_name(hook)}", "it runs around every module")
    return None


def swap_managers(model: Module, paths: Sequence[str]) -> list[Condition]:
    """Objects on the model by which its loop moves the weights of blocks between their calls.

    One that is named for a stack of those at ``paths`` (``offloader_single``, say) is about that.
    """
    reason = "it moves the weights of each block as that block runs"
    found = []
    for name, value in vars(model).items():
        if any(hasattr(type(value), verb) for verb in _SWAPS):
            found.append(Condition("model", name, reason, _named_for(name, paths)))
    return sorted(found, key=lambda condition: not condition.stacks)


def _named_for(name: str, paths: Sequence[str]) -> tuple[str, ...]:
    """Those of several stacks that ``name`` has a word of which not all of them have."""
    words = [_words(path) for path in paths]
    if len(words) < 2:
        return ()
    own = _words(name).difference(words[0].intersection(*words[1:]))
    return tuple(path for path, its in zip(paths, words, strict=True) if own & its)


def _words(name: str) -> set[str]:
    return set(re.split(r"[._]+", name))


def may_be_fed(blocks: Iterable[Module]) -> bool:
    """Whether others are told of the calls of a block, as those are who bring its weights."""
    return any(
        not is_made_for_recompute(hook)
        for block in blocks
        for hooked in (block, unwrapped(block))
        for _, hook in hooks_on(hooked, "forward pre-hook", "backward pre-hook", "backward hook")
    )


def refuse_hooks(planned: StackReport, blocks: Sequence[Module]) -> None:
    """Raise ``UnsupportedModel`` where hooks of diffusers give wrong gradients with the schedule.

    Whatever diffusers offloads or caches, it does to every block alike, so the first one tells.
    """
    recomputes = planned.covered or planned.within_budget
    for module in all_modules(blocks[:1]) if recomputes else ():
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


def _hooks_of(block: Module) -> Iterator[_Hook]:
    """The hooks on a block, and on what its wrapper holds; those inside act all the time."""
    inner = unwrapped(block)
    for module in (block,) if inner is block else (block, inner):
        yield from _hooks_on(module)
    yield from _hooks_inside(block)


def _hooks_inside(block: Module) -> Iterator[_Hook]:
    for module in all_modules([block])[1:]:
        for _, hook in hooks_on(module, "forward hook"):
            if not is_made_for_recompute(hook):
                name = f"forward hook {_name(hook)} on a {type(module).__name__}"
                yield _Hook(name, before=True, after=True)


def _hooks_on(block: Any) -> Iterator[_Hook]:
    """The hooks on the block itself, of any kind. (Those for backward act in the midst of it.)"""
    for kind, hook in hooks_on(block):
        if not is_made_for_recompute(hook):
            before, after = kind != "forward hook", kind != "forward pre-hook"
            yield _Hook(f"{kind} {_name(hook)}", before, after)
    if ACCELERATE_HOOK in block.__dict__:
        hook = block.__dict__[ACCELERATE_HOOK]
        yield _around_forward(f"accelerate hook {type(hook).__name__}", hook)
    for name, hook in diffusers_hooks(block).items():
        if not splits_context(hook):
            yield _around_forward(f"diffusers hook {name}", hook)


def has_hook_inside(blocks: Sequence[Module], everything: Sequence[Module]) -> bool:
    """Whether a forward hook of others is on a module inside one of ``blocks``.

    everything: the blocks and all modules inside them; asked in every call, so quickly.
    """
    hooked = [module for module in everything if module.__dict__[FORWARD_HOOKS]]
    return any(
        not is_made_for_recompute(hook)
        for module in hooked
        if module not in blocks
        for _, hook in hooks_on(module, "forward hook")
    )


def _around_forward(name: str, hook: Any) -> _Hook:
    """One of accelerate's or diffusers', which has a method for each side, or for the whole."""
    whole = hasattr(hook, "new_forward")
    before, after = overridden(hook, "pre_forward"), overridden(hook, "post_forward")
    return _Hook(name, before or whole, after or whole)


def is_made_for_recompute(hook: Any) -> bool:
    """Whether a hook is torch's own: FSDP2's, or that of a profiler or a FLOP counter.

    Or one of those by which the models of transformers capture outputs: from the first capture on
    they stay, and do nothing in a forward that captures nothing (a condition of the call).
    """
    function = _function(hook)
    owner = getattr(function, "__self__", function)
    module = getattr(owner, "__module__", None) or type(owner).__module__
    known = module.startswith(("torch.", _OURS)) or module == OUTPUT_CAPTURING
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
