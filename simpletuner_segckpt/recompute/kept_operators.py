"""``gradient_checkpointing_keep``: in recomputed blocks, outputs that are taken from memory.

torch's own selective checkpointing does it: a policy sees every operator of the forward and says
whose outputs stay. Worth keeping is what saves many FLOPs for each byte. An output of attention
saves 2 x (length of the keys) FLOPs for each element and an output of a matrix product 2 x (width
of its input), so ``attention`` pays for long sequences, and of a feed-forward the projection that
comes *down* from the hidden width. Attention to a shorter sequence (a text) is cheap to repeat, and
so has a word of its own, ``cross-attention``. An attention whose sequence is spread over several
processes is kept with what these exchange for it, so that nothing is sent again.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from ..messages.errors import RecomputeError
from ..private.of_torch import (
    OPERATOR_NOT_IN_FORWARD,
    TorchDispatchMode,
    finished,
    is_exchange,
    pytree,
)
from ..schedules.tally import tally
from .contexts import Anew, Contexts, Once, Together
from .submodules import CallWrapper, treated

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


class Kept:
    """The policy for one checkpoint call, and where the forward is inside it."""

    def __init__(self, kinds: Collection[str]):
        self.kinds = kinds
        self.depth = 0  # of feed-forwards that run just now

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What to enter around the forward, and around the recompute.

        What is kept serves one backward; another one recomputes it like everything else.
        """
        forward, recompute = create_selective_checkpoint_contexts(self)
        outside: list[AbstractContextManager[Any]] = [forward]
        again: list[AbstractContextManager[Any]] = [_Following(), Once(recompute)]
        if "attention" in self.kinds or "cross-attention" in self.kinds:
            outside.append(HandOutCopies())
        if "ffn" in self.kinds:
            # In the recompute as well: older versions of torch ask the policy there, too.
            parts = partial(treated, {"feed_forward": self._feed_forward})
            outside.append(parts())
            again.append(Anew(parts))
        return Together(*outside), Together(*again)

    def __call__(
        self, _: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        kind = kind_of(operator, args, kwargs)
        if kind is None or _PART_OF.get(kind, kind) not in self.kinds:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if kind == "ffn" and not self.depth:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counting = tally()
        if counting is not None:
            counting.kept[kind] += 1
        return CheckpointPolicy.MUST_SAVE

    def _feed_forward(self, function: CallWrapper, *args: Any, **kwargs: Any) -> Any:
        self.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            self.depth -= 1


class _Following(AbstractContextManager[None]):
    """Says of a recompute that runs operators which its forward did not that ``keep`` cannot be."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and OPERATOR_NOT_IN_FORWARD in str(error):
            raise RecomputeError(
                "a recompute runs operators that its forward did not, as hooks do that bring in "
                "weights inside a block, so gradient_checkpointing_keep cannot tell what it kept; "
                f"leave that key out ({str(error).partition(' encountered')[0]})"
            ) from error


class HandOutCopies(TorchDispatchMode):
    """Gives compiled code copies of what its attention operators and collectives return.

    It uses the memory of an output again, unseen, when its own backward does not need it. What is
    kept must be another piece of memory, then. Whatever was compiled, and how, it runs as one
    function for autograd, and so without grad mode. (Functions for autograd that are not compiled
    run so as well, such as diffusers' context parallelism.)
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # as torch's own modes for checkpointing: compiled code is to run within it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() or not (is_attention(func) or is_exchange(func)):
            return result
        if is_exchange(func):
            result = pytree.tree_map_only(torch.Tensor, finished, result)
        return pytree.tree_map_only(torch.Tensor, torch.clone, result)


def in_graph(kinds: Collection[str]) -> Contexts:
    """The same for a graph that is being traced, where no module tells what it contains.

    Whatever comes down is kept then: of the projections in a block, those of feed-forwards, of
    LoRA to its rank and of keys and values that are shared by heads.
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
    schema = getattr(operator, "_schema", None)  # higher-order operators have none
    for position, argument in enumerate(schema.arguments if schema else ()):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if (writes and value is not None) or (argument.name in _DROPOUT and value):
            return False
    return True


def comes_down(operator: Any, args: tuple) -> bool:
    """Whether an operator is a linear map to fewer channels than it takes."""
    if operator in _PRODUCTS:
        narrow: int = args[_PRODUCTS[operator]].shape[-1]
        return narrow < args[_PRODUCTS[operator]].shape[-2]
    if operator is aten.convolution.default:  # of images: channels are dimension 1
        return args[1].shape[0] < args[0].shape[1]
    return False
