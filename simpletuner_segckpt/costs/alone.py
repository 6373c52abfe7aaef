"""Run a block by itself, with the arguments that it is called with, in every way there is.

It is the real block, with its adapters, dtypes and quantized layers, on its device; forward and
backward, whose gradients go nowhere. Bytes and work are counted operator by operator.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from ..private.of_torch import memory_of, pytree
from ..recompute.submodules import CallWrapper
from ..schedules.schedule import Kept
from .ledger import Ledger, tensors_in
from .records import Run
from .treatments import COVERED, KEPT, PLAIN, keeping


@dataclass(frozen=True)
class BlockCall:
    """How a block is called. plain: what runs it; again: makes what runs it and recomputes it."""

    block: Module
    plain: Callable[..., Any]
    again: Callable[[], Callable[..., Any]]
    args: tuple
    kwargs: dict[str, Any]


def runs_of(call: BlockCall, covered: Callable[[Kept], CallWrapper], exact: bool) -> dict[str, Run]:
    """What ``call`` costs, by treatment: recomputed with each choice of operators, and plain.

    covered: what recomputes, for each choice. A choice that keeps no more than one without some of
    its operators is left out, and so is what there is not the memory for. Raises what the block
    raises.
    """

    def recomputed(kinds: Kept) -> Run:
        return _run(call, partial(covered(kinds), call.again()), exact)

    runs = {COVERED: recomputed(())}
    try:
        for kinds in KEPT[1:]:
            fewer = [keeping(set(kinds) - {kind}) for kind in kinds]
            if not runs.keys() >= set(fewer):
                continue
            run = recomputed(kinds)
            if run.own > max(runs[treatment].own for treatment in fewer):
                runs[keeping(kinds)] = run
        runs[PLAIN] = _run(call, call.plain, exact)
    except torch.OutOfMemoryError:
        pass  # of the larger ones; those that were measured are known
    return runs


def _run(call: BlockCall, function: Callable[..., Any], exact: bool) -> Run:
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    places = {memory: place for place, memory in enumerate(values_in(leaves))}
    held = [False] * len(places)
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        memory = memory_of(tensor)
        saved.add(memory)
        if memory in places:
            held[places[memory]] = True
        return tensor.detach()  # what a node has made itself would hold that node

    ledger = Ledger(exact)
    hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
    with ledger, torch.enable_grad(), _uncached_autocast():
        given = [_apart(leaf) for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(given, spec)
        level = ledger.level
        ledger.mark()
        with hooks:
            result = function(*args, **kwargs)
        del args, kwargs
        forward, forward_peak = ledger.work, ledger.peak - level
        results = tensors_in(result)
        own = ledger.level - level - sum({memory_of(r): _size(ledger, r) for r in results}.values())
        kept_results = tuple(memory_of(tensor) in saved for tensor in results)
        outputs = [tensor for tensor in results if tensor.requires_grad]
        wanted = [leaf for leaf in given if isinstance(leaf, Tensor) and leaf.requires_grad]
        wanted += [weight for weight in call.block.parameters() if weight.requires_grad]
        del result, results
        level = ledger.level
        ledger.mark()
        if outputs and wanted:
            arriving = [torch.zeros_like(output) for output in outputs]
            torch.autograd.grad(outputs, wanted, arriving, allow_unused=True)
        backward_peak = ledger.peak - level
    return Run(
        own=own,
        holds=tuple(held),
        results=kept_results,
        forward_peak=forward_peak,
        recompute_peak=0,  # among the other
        backward_peak=backward_peak,
        forward=forward,
        backward=ledger.work,
    )


def values_in(leaves: Collection[Any]) -> dict[int, int]:
    """The memory of the tensors among ``leaves``, in their order, and its bytes."""
    return {
        memory_of(leaf): leaf.untyped_storage().nbytes()
        for leaf in leaves
        if isinstance(leaf, Tensor)
    }


def _size(ledger: Ledger, tensor: Tensor) -> int:
    return ledger.size_of(tensor.untyped_storage())


def _apart(leaf: Any) -> Any:
    """``leaf`` without the graph that it is in."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)


@contextmanager
def _uncached_autocast() -> Iterator[None]:
    """Within this, weights are cast each time, as in the first block of a forward."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
