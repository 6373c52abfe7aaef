"""``gradient_checkpointing_keep``: in recomputed blocks, outputs that are taken from memory.

torch's own selective checkpointing does it: a policy sees every operator of the forward and says
whose outputs stay. Worth keeping is what saves many FLOPs for each byte. An output of attention
saves 2 x (length of the keys) FLOPs for each element and an output of a matrix product 2 x (width
of its input), so ``attention`` pays for long sequences, and of a feed-forward the projection that
comes *down* from the hidden width.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from .parts import Runner, tally, treated

# Makes what to enter around a forward, and around its recompute.
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

aten = torch.ops.aten

# Matrix products, by the position of their weight, whose last two dimensions are (in, out).
_PRODUCTS = {
    aten.mm.default: 1,
    aten.addmm.default: 2,
    aten.bmm.default: 1,
    aten.baddbmm.default: 2,
    aten._scaled_mm.default: 1,
    aten._grouped_mm.default: 1,
}

# In names of operators that compute a whole attention: aten's, those of FlexAttention, of
# flash-attn, xFormers, SageAttention and what diffusers and transformers register for them.
_ATTENTION = ("attention", "attn", "sdpa", "flash_fwd")
_BACKWARD = ("backward", "bwd")


class Kept:
    """The policy for one checkpoint call, and where the forward is inside it."""

    def __init__(self, kinds: Collection[str]):
        self.kinds = kinds
        self.depth = 0  # of feed-forwards that run just now

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What to enter around the forward, and around the recompute."""
        forward, recompute = create_selective_checkpoint_contexts(self)
        return self._with_parts(forward), self._with_parts(recompute)

    def __call__(
        self, context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        kind = self._kind(operator, args, kwargs)
        if kind is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counting = tally()
        if counting is not None and not context.is_recompute:
            counting.kept[kind] += 1
        return CheckpointPolicy.MUST_SAVE

    def _kind(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> str | None:
        if is_attention(operator):
            wanted = "attention" in self.kinds and replayable(operator, args, kwargs)
            return "attention" if wanted else None
        if self.depth and "ffn" in self.kinds and comes_down(operator, args):
            return "ffn"
        return None

    @contextmanager
    def _with_parts(self, mode: AbstractContextManager[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(mode)
            if "ffn" in self.kinds:
                stack.enter_context(treated({"feed_forward": self._feed_forward}))
            yield

    def _feed_forward(self, function: Runner, *args: Any, **kwargs: Any) -> Any:
        self.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            self.depth -= 1


def in_graph(kinds: Collection[str]) -> Contexts:
    """The same for a graph that is being traced, where no module tells what it contains.

    Whatever comes down is kept then: of the projections in a block, those of feed-forwards, of
    LoRA to its rank and of keys and values that are shared by heads.
    """
    return partial(create_selective_checkpoint_contexts, partial(_keep_in_graph, tuple(kinds)))


def _keep_in_graph(
    kinds: tuple[str, ...], _: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    attention = "attention" in kinds and is_attention(operator)
    if (attention and replayable(operator, args, kwargs)) or (
        "ffn" in kinds and comes_down(operator, args)
    ):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@cache
def is_attention(operator: Any) -> bool:
    """Whether an operator computes a whole attention forward, by its name."""
    name = operator.name().lower()
    return any(part in name for part in _ATTENTION) and not any(part in name for part in _BACKWARD)


def replayable(operator: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether skipping an operator in the recompute leaves everything else as it was.

    Not when it draws random numbers, since those drawn after it would differ, nor when it writes
    to one of its arguments.
    """
    schema = getattr(operator, "_schema", None)  # higher-order operators have none
    for position, argument in enumerate(schema.arguments if schema else ()):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if (writes and value is not None) or ("dropout" in argument.name and value):
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
