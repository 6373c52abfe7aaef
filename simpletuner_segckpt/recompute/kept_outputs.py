"""Outputs that a recompute takes from memory: where the operators are met that return them.

A Python mode sees every operator, which on small inputs costs the host more than the operators do.
So it is open for a whole call the first time only. What autograd saves is a clock that costs next
to nothing: a checkpoint call has the recompute save what the forward saved, one by one, so the
number of tensors saved so far names a moment in both. Learned is at which moments the mode is
needed, and from the next call on it is open only then: for some operators around each one that is
kept. A call that goes another way than the one before is as right, may keep less, and is learned
anew.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module

from ..messages.errors import RecomputeError
from ..private.of_torch import (
    TorchDispatchMode,
    detached_below_autograd,
    dispatch_modes,
    finished,
    is_exchange,
    memory_of,
    pytree,
    version,
)
from ..schedules.tally import tally
from .contexts import Once, Pack, Together, Unpack, within_innermost
from .kept_operators import is_asked_for, is_attention, is_candidate, kind_of
from .submodules import CallWrapper, treated

# Moment, operator, and how many of that operator came before in the same moment.
_Place = tuple[int, Any, int]

# Tensors that one operator saves of its arguments: queries, keys, values, a mask, offsets.
_MOST_SAVED = 8


@dataclass(frozen=True, slots=True)
class _Plan:
    """What was learned of a call.

    switches: the moments at which the mode is opened and closed in turns. kept: the places of what
    was kept. saved: the number of dimensions of each tensor that autograd saved.
    """

    switches: tuple[int, ...]
    kept: frozenset[_Place]
    saved: tuple[int, ...]


class Keeping:
    """What the keys have kept in the calls of one model, and what was learned of them."""

    def __init__(self, kinds: Iterable[str]):
        self.kinds = tuple(kinds)
        # By the first module of a call, and how many of them it runs.
        self._plans: WeakKeyDictionary[Module, dict[int, _Plan]] = WeakKeyDictionary()

    def contexts(
        self, modules: Sequence[Module]
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What to enter around a call of ``modules``, and around its recompute.

        Nothing is learned of a call without modules. What is kept serves one backward; another one
        recomputes it like everything else.
        """
        plans = self._plans.setdefault(modules[0], {}) if modules else {}
        forward = _Forward(self.kinds, plans, len(modules))
        again = _Again(forward)
        if "ffn" not in self.kinds:
            return forward, Once(again)
        parts = (treated({"feed_forward": mode.within_feed_forward}) for mode in (forward, again))
        return Together(forward, next(parts)), Once(Together(again, next(parts)))


class _Clocked(TorchDispatchMode):
    """A mode that is open at the moments of a plan, or all the time where there is none.

    plan: None while it is learned. rest: from which moment on the mode is open all the same, since
        the call goes another way than the plan's. outputs: what is kept.
    """

    supports_higher_order_operators = True

    def __init__(self, plan: _Plan | None, outputs: dict[_Place, Any]):
        super().__init__()
        self.plan = plan
        self.outputs = outputs
        self.rest: float = inf
        self._open = False
        # When it is to be opened or closed next, and when after that.
        self._due: float = inf
        self._later: Iterator[float] = iter(())
        self._feed_forwards = 0  # that run just now
        self._hooks: AbstractContextManager[Any] | None = None
        self._now: Callable[[], int] = int  # nothing is saved where no checkpoint call is around
        self._seen: Counter[tuple[int, Any]] = Counter()
        self._last: tuple[Any, ...] | None = None  # arguments and result of what ran last

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # as torch's own modes for checkpointing: compiled code is to run within it

    def __enter__(self) -> Any:
        self._below = dispatch_modes()
        self._hooks = within_innermost(self._clocked)
        if self._hooks is not None:
            self._hooks.__enter__()
        if self.plan is None or 0 in self.plan.switches:
            self._switch()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._open:
            super().__exit__(*error)
            self._last = None
        self._stop()

    def _stop(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None  # no cycle

    def within_feed_forward(self, function: CallWrapper, *args: Any, **kwargs: Any) -> Any:
        self._feed_forwards += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._feed_forwards -= 1
            if self._open and self._due <= self._now() + 1:  # no operator of torch runs just now
                self._turn()

    def _clocked(self, pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
        counting, self._now = self._clock(pack)
        return counting, unpack

    def _clock(self, inner: Pack) -> tuple[Pack, Callable[[], int]]:
        """What packs tensors that autograd saves, as ``inner`` does; and what tells the moment."""
        raise NotImplementedError

    def _follow(self, switches: Iterable[float]) -> None:
        self._later = iter(switches)
        self._due = next(self._later, inf)

    def _turn(self, saved: Tensor | None = None) -> None:
        if self._switch(saved):
            self._due = next(self._later, inf)

    def _switch(self, saved: Tensor | None = None) -> bool:
        """Open or close the mode; False where that has to wait.

        It has to while a mode of the block's own is open, which expects to be the last one. And
        torch sends an operator to the modes that were there when it was called: one that only now
        saves its arguments must still find this one.
        """
        if dispatch_modes() != self._below + self._open:
            return False
        if self._open:
            if saved is not None and not self._has_returned(saved):
                return False
            super().__exit__(None, None, None)
            self._last = None
        else:
            super().__enter__()
        self._open = not self._open
        return True

    def _has_returned(self, saved: Tensor) -> bool:
        """Whether the operator that saves this has run, and saves what it returned.

        That is not tracked yet, as it will be when it is the argument of another.
        """
        if saved.requires_grad or self._last is None:
            return False
        args, result, tracks = self._last
        given = list(_tensors(args))
        tracks = tracks and any(leaf.requires_grad for leaf in given)
        new = set(map(memory_of, _tensors(result))) - set(map(memory_of, given))
        return tracks and memory_of(saved) in new

    def _place(self, operator: Any) -> _Place:
        """That of an operator which runs now."""
        key = (self._now(), operator)
        self._seen[key] += 1
        return (*key, self._seen[key])


class _Forward(_Clocked):
    """Keeps what the operators return that the keys name, and learns where they run.

    plans: by number of modules, those of the calls that begin with the same module.
    """

    def __init__(self, kinds: tuple[str, ...], plans: dict[int, _Plan], modules: int):
        super().__init__(plans.get(modules), {})
        self.kinds = kinds
        self._plans = plans
        self._modules = modules
        self._places: set[_Place] = set()
        self._needed: set[int] = set()  # moments
        # Of what autograd saved the dimensions, and of the last the memory.
        self._saved: list[int] = []
        self._last_saved: deque[int] = deque(maxlen=_MOST_SAVED)

    def __exit__(self, *error: Any) -> None:
        learns = self._hooks is not None and error[0] is None
        super().__exit__(*error)
        if learns:
            self._learn()

    def _learn(self) -> None:
        if self.plan is None:
            after = {moment + 1 for moment in self._needed}
            switches = tuple(sorted(self._needed ^ after))
            plan = _Plan(switches, frozenset(self._places), tuple(self._saved))
            self._plans[self._modules] = plan
        elif (
            self.rest < inf or self._now() < len(self.plan.saved) or self._places != self.plan.kept
        ):
            self._plans.pop(self._modules, None)

    def _clock(self, inner: Pack) -> tuple[Pack, Callable[[], int]]:
        if self.plan is not None:
            return self._comparing(self.plan, inner)

        def pack(tensor: Tensor) -> Any:
            self._saved.append(tensor.dim())
            self._last_saved.append(memory_of(tensor))
            return inner(tensor)

        return pack, self._saved.__len__

    def _comparing(self, plan: _Plan, inner: Pack) -> tuple[Pack, Callable[[], int]]:
        expected = iter(plan.saved)
        self._follow(switch for switch in plan.switches if switch > 0)
        moment = 0

        def pack(tensor: Tensor) -> Any:
            nonlocal moment
            moment += 1
            if tensor.dim() != next(expected, None) and self.rest == inf:
                self.rest = moment
                self._follow(() if self._open else (moment,))
            if moment >= self._due:
                self._turn(tensor)
            return inner(tensor)

        return pack, lambda: moment

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.plan is not None:
            self._last = (args, result, torch.is_grad_enabled())
        if not is_candidate(func):
            return result
        place = self._place(func)
        kind = kind_of(func, args, kwargs)
        keeps = is_asked_for(kind, self.kinds) and (kind != "ffn" or self._feed_forwards > 0)
        attends = is_attention(func) and self.kinds != ("ffn",)
        if self.plan is None and (keeps or attends):
            self._need(args)  # also of one that its dropout, say, forbids to keep this time
        if kind is None or not keeps:
            return result
        counting = tally()
        if counting is not None:
            counting.kept[kind] += 1
        self.outputs[place] = _each(Tensor, _Output, result)
        self._places.add(place)
        if torch.is_grad_enabled():
            return result
        # Compiled code uses the memory of an output again, unseen, when its own backward does not
        # need it. Whatever was compiled, and how, it runs as one function for autograd, and so
        # without grad mode. (Functions for autograd that are not compiled run so as well, such as
        # diffusers' context parallelism.)
        if is_exchange(func):
            result = _each(Tensor, finished, result)
        return _each(Tensor, torch.clone, result)

    def _need(self, args: tuple) -> None:
        """The mode has to be open for an operator that runs now.

        From before its own arguments were saved: when they are, torch has chosen where it goes.
        """
        given = [memory_of(leaf) for leaf in _tensors(args)]
        last = [memory in given for memory in reversed(self._last_saved)] + [False]
        moment = self._now()
        self._needed.update(range(moment - last.index(False), moment + 1))


class _Again(_Clocked):
    """Answers from memory what was kept, in the recompute of a forward."""

    def __init__(self, forward: _Forward):
        super().__init__(forward.plan, forward.outputs)
        self.forward = forward

    def __enter__(self) -> Any:
        self.rest = self.forward.rest
        return super().__enter__()

    def _clock(self, inner: Pack) -> tuple[Pack, Callable[[], int]]:
        planned: list[float] = []
        if self.plan is not None:
            planned += [switch for switch in self.plan.switches if switch < self.rest]
            if len(planned) % 2 == 0:
                planned.append(self.rest)
        self._follow(switch for switch in planned if switch > 0)
        moment = 0

        def pack(tensor: Tensor) -> Any:
            nonlocal moment
            moment += 1
            if moment >= self._due:
                self._turn(tensor)
                if self._due == inf and not self._open:
                    self._stop()
            return inner(tensor)

        return pack, lambda: moment

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = self.outputs.pop(self._place(func), None) if is_candidate(func) else None
        if kept is None:
            result = func(*args, **(kwargs or {}))
        else:
            result = _each(_Output, _Output.read, kept)
        if self.plan is not None:
            self._last = (args, result, torch.is_grad_enabled())
        return result


class _Output:
    """A tensor that is kept."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor):
        self.tensor = detached_below_autograd(tensor)  # no cycle with the graph that it is in
        self.version = version(tensor)

    def read(self) -> Tensor:
        if version(self.tensor) != self.version:
            raise RecomputeError(
                "an output that `gradient_checkpointing_keep` keeps was written in place after "
                "it was kept; leave out `keep`, or have the block write into a copy"
            )
        return self.tensor


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of an operator, or in what it returned."""
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _each(kind: type, function: Callable[[Any], Any], result: Any) -> Any:
    """What an operator returned, with ``function`` of everything that is a ``kind`` in it."""
    if isinstance(result, kind):
        return function(result)
    if type(result) is tuple:  # quicker than pytree
        return tuple([_each(kind, function, part) for part in result])
    return pytree.tree_map_only(kind, function, result)
