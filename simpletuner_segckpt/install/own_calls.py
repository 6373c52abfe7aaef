"""Checkpoint calls that a script makes itself, around blocks that have a schedule.

The loop of a model, or the forward of its blocks, may call ``torch.utils.checkpoint`` by itself.
While a training forward with a schedule runs, such a call is a plain one: otherwise a block would
be recomputed twice, or by the script's call and not as the schedule says.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from ..engine.entry import CheckpointEntry
from ..messages.log import logger
from ..model.interception import RECEIVER
from ..private.of_torch import current_backward, inside_checkpoint, plain_checkpoints
from .apply import entry_of


@contextmanager
def plain_around_blocks() -> Iterator[None]:
    """Within this, the schedule of a model takes the place of its own checkpoint calls."""
    with plain_checkpoints(_has_schedule) as able:
        if not able:
            logger.warning(
                "torch %s has no _checkpoint_without_reentrant_generator or CheckpointFunction: "
                "blocks that a model runs under checkpoint calls of its own are left to these",
                torch.__version__,
            )
        yield


def _has_schedule(function: Any, args: tuple) -> bool:
    """Whether a checkpoint call is about blocks that a schedule treats at this moment."""
    for module in (found for value in (function, *args) for found in _modules_in(value)):
        entry = module.__dict__.get(RECEIVER)
        if not isinstance(entry, CheckpointEntry):
            entry = entry_of(module)
        if entry is None:
            continue
        # In a recompute a block is to do what it did in the forward.
        again = entry.on and current_backward() is not None and inside_checkpoint()
        if entry.is_training or again:
            entry.messages.warn(
                "replaced",
                f"checkpoint calls that the script makes itself around {type(module).__name__} are "
                "plain calls: the schedule takes their place",
            )
            return True
    return False


def _modules_in(value: Any, depth: int = 3) -> Iterator[Module]:
    """The modules that a function calls, as far as can be told: what it is bound to or closes over.

    Functions within functions are looked through up to ``depth``.
    """
    if isinstance(value, Module):
        yield value
    elif callable(value) and depth:
        held = [getattr(value, "__self__", None)]
        if isinstance(value, partial):
            held += [value.func, *value.args, *value.keywords.values()]
        for cell in getattr(value, "__closure__", None) or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # of a name that has no value yet
                continue
        for inner in held:
            yield from _modules_in(inner, depth - 1)
