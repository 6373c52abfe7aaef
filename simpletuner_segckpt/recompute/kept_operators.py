"""``gradient_checkpointing_keep``: the operators whose outputs a recompute takes from memory.

Worth keeping is what saves many FLOPs for each byte. An output of attention saves 2 x (length of
the keys) FLOPs for each element and an output of a matrix product 2 x (width of its input), so
``attention`` pays for long sequences, and of a feed-forward the projection that comes *down* from
the hidden width. Attention to a shorter sequence (a text) is cheap to repeat, and so has a word of
its own, ``cross-attention``. An attention whose sequence is spread over several processes is kept
with what these exchange for it, so that nothing is sent again. ``kind_of`` is the place that
decides, operator by operator.
"""

from collections.abc import Collection
from functools import cache, partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..private.of_torch import is_exchange
from .contexts import Contexts

aten = torch.ops.aten


# Matrix products, by the position of their weight, whose last two dimensions are (in, out).
_WEIGHT = {"mm": 1, "addmm": 2, "bmm": 1, "baddbmm": 2, "_scaled_mm": 1, "_grouped_mm": 1}


_PRODUCTS = {getattr(aten, name).default: n for name, n in _WEIGHT.items() if hasattr(aten, name)}


# In names of operators that compute a whole attention: aten's, those of FlexAttention, of
# flash-attn, xFormers, SageAttention and what diffusers and transformers register for them.
_ATTENTION = ("attention", "attn", "sdpa", "flash_fwd")


_BACKWARD = ("backward", "bwd")


# In names of those that take (batch, heads, sequence, channels); the others have the heads third.
_HEADS_FIRST = ("scaled_dot_product", "flex_attention", "sdpa")


_DROPOUT = ("dropout", "dropout_p", "p_dropout", "p")  # arguments of such operators


# What is kept under another word than its own.
_PART_OF = {"collectives": "attention"}


def is_asked_for(kind: str | None, words: Collection[str]) -> bool:
    """Whether a kind of output is kept with these ``words`` in the config."""
    return kind is not None and _PART_OF.get(kind, kind) in words


def in_graph(kinds: Collection[str]) -> Contexts:
    """torch's own contexts that keep ``kinds``, for a graph that is being traced.

    No module tells there what it contains. Whatever comes down is kept then: of the projections in
    a block, those of feed-forwards, of LoRA to its rank and of keys and values that are shared by
    heads.
    """
    return partial(create_selective_checkpoint_contexts, partial(_keep_in_graph, tuple(kinds)))


def _keep_in_graph(
    kinds: tuple[str, ...], _: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    kept = kind_of(operator, args, kwargs) in kinds
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def kind_of(operator: Any, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """What an operator computes, if its output can be kept at all.

    That is the word in the config, but for ``collectives``, which are part of ``attention``.
    """
    if is_attention(operator):
        if not replayable(operator, args, kwargs):
            return None
        return "cross-attention" if looks_elsewhere(operator, args, kwargs) else "attention"
    if is_exchange(operator):
        return "collectives"
    return "ffn" if comes_down(operator, args) else None


@cache
def is_candidate(operator: Any) -> bool:
    """Whether ``kind_of`` could name an operator, with arguments that allow it."""
    return (
        is_attention(operator)
        or is_exchange(operator)
        or operator in _PRODUCTS
        or operator is aten.convolution.default
    )


@cache
def is_attention(operator: Any) -> bool:
    """Whether an operator computes a whole attention forward, by its name."""
    name = operator.name().lower()
    return any(part in name for part in _ATTENTION) and not any(part in name for part in _BACKWARD)


def looks_elsewhere(operator: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the keys of an attention are of a shorter sequence than its queries."""
    schema = getattr(operator, "_schema", None)
    names = [argument.name for argument in schema.arguments[:2]] if schema else []
    query, key = (*args, *map(kwargs.get, names[len(args) :]), None, None)[:2]
    if not isinstance(query, torch.Tensor) or not isinstance(key, torch.Tensor):
        return False
    sequence = -2 if any(part in operator.name().lower() for part in _HEADS_FIRST) else -3
    if min(query.dim(), key.dim()) < -sequence:
        return False
    return bool(key.shape[sequence] < query.shape[sequence])


def replayable(operator: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether skipping an operator in the recompute leaves everything else as it was.

    Not when it draws random numbers, since those drawn after it would differ, nor when it writes
    to one of its arguments.
    """
    for position, name, writes in _hindrances(operator):
        value = args[position] if position < len(args) else kwargs.get(name)
        if value is not None if writes else value:
            return False
    return True


@cache
def _hindrances(operator: Any) -> list[tuple[int, str, bool]]:
    """Position and name of the arguments that are dropouts, or that are written to."""
    schema = getattr(operator, "_schema", None)  # higher-order operators have none
    found = []
    for position, argument in enumerate(schema.arguments if schema else ()):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes or argument.name in _DROPOUT:
            found.append((position, argument.name, writes))
    return found


def comes_down(operator: Any, args: tuple) -> bool:
    """Whether an operator is a linear map to fewer channels than it takes."""
    if operator in _PRODUCTS:
        narrow: int = args[_PRODUCTS[operator]].shape[-1]
        return narrow < args[_PRODUCTS[operator]].shape[-2]
    if operator is aten.convolution.default:  # of images: channels are dimension 1
        return args[1].shape[0] < args[0].shape[1]
    return False
