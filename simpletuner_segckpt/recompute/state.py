"""Modules that are recomputed as they were in forward.

What a block computes depends on more than its arguments. PEFT registers hooks on its layers for
the time of one forward (aLoRA, a batch of several adapters), diffusers scales LoRA layers for one
forward, trainers switch adapters or freeze parameters before backward has run, and normalisations
write their buffers each time they are called. A recompute that ran with what is there *then* would
be of another function: wrong gradients, or saved tensors that do not match. So what is there when
a call begins is noted, put back while the call is repeated, and taken away again. The values of
weights are not: whoever changes them between a forward and its backward gets what torch's own
checkpointing gets. Nor are Python attributes of modules that a forward counts or collects in; what
it collects in containers among its arguments is (see ``containers``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import Any

from torch.nn import Module, ModuleDict, Parameter

from ..messages.errors import RecomputeError
from ..model.flags import SWITCH
from ..model.foreign_hooks import helps_recompute
from ..model.stacks import all_modules
from ..private.of_libraries import ACCELERATE_HOOK, ACTIVE_ADAPTER, ADAPTERS_DISABLED
from ..private.of_torch import (
    FORWARD_HOOK_TABLES,
    FORWARD_HOOKS,
    FORWARD_PRE_HOOKS,
)
from .ambient import Ambient
from .buffers import Buffer, hooks_watched, written_by
from .containers import Contents, containers, holding
from .mismatch import Place, explained

# Attributes of a module that decide what it computes; trainers and libraries change them on whole
# models. Others may be the books of an engine (DeepSpeed counts on modules), so they stay.
_ATTRIBUTES = (
    SWITCH,  # some attentions of transformers ask it
    "forward",  # patched
    "processor",  # of an attention of diffusers
    ACCELERATE_HOOK,
    ADAPTERS_DISABLED,
    ACTIVE_ADAPTER,
)

_RARE = frozenset(_ATTRIBUTES)  # while nearly every module has ``training``

_ABSENT: Any = object()  # noted of a module without the attribute
_ABSENTS = (_ABSENT,) * len(_ATTRIBUTES)

_APART = ("_parameters", "_buffers")  # FSDP exchanges parameters; buffers see below


State = dict[str, Any]  # the attributes of a module, past Module.__getattr__


@dataclass(slots=True)
class _Noted:
    """What modules, and those inside them, had at one time.

    states: of each module. training: of each. attributes: those of ``_ATTRIBUTES``, and hooks:
    those for the forward, by the number of the module, of those that have any. dicts: copies of
    what PEFT's layers hold by adapter. merged: the adapters in their weights. trained: whether each
    of the parameters was. containers: what those among the arguments held.
    """

    ambient: Ambient
    states: list[State]
    training: list[Any]
    attributes: dict[int, tuple[Any, ...]]
    hooks: dict[int, State] = field(default_factory=dict)
    dicts: list[tuple[State, str, dict[Any, Any]]] = field(default_factory=list)
    merged: list[tuple[State, tuple[str, ...]]] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    containers: list[Contents] = field(default_factory=list)


class OfModules:
    """What runs ``modules``."""

    def __init__(self, modules: Sequence[Module]):
        self.modules = modules

    @cached_property
    def everything(self) -> list[Module]:
        """The modules, and those inside them."""
        return all_modules(self.modules)


class StatefulRecompute(OfModules):
    """Calls ``function``, and from the second time on with ``modules`` as they were the first.

    Raises ``RecomputeError`` where that cannot be. siblings: modules that may share memory with
    these; place: which blocks they are.
    """

    def __init__(
        self,
        modules: Sequence[Module],
        function: Callable[..., Any],
        siblings: Sequence[Module] = (),
        place: Place | None = None,
    ):
        super().__init__(modules)
        self.function = function
        self.siblings = siblings
        self.place = place
        self._noted: _Noted | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        noted = self._noted
        if noted is not None:
            with noted.ambient.again(), _as_noted(noted), holding(noted.containers):
                return self.function(*args, **kwargs)
        noted = self._noted = _note(self.modules, self.everything)
        noted.containers = [Contents.of(found) for found in containers(*args, *kwargs.values())]
        hooked = [noted.states[index] for index in noted.hooks]
        with explained(self.modules, self.place), hooks_watched(hooked, noted.buffers) as hooks:
            result = self.function(*args, **kwargs)
        noted.ambient.call_ended()
        noted.buffers = written_by(noted.buffers, hooks, self.siblings)
        return result


def _note(modules: Sequence[Module], everything: Sequence[Module]) -> _Noted:
    # Of every covered block in every forward: one thing after the other, which is quickest.
    states = [module.__dict__ for module in everything]
    noted = _Noted(Ambient(modules), states, _training(states), _attributes_of(states))
    noted.hooks = {index: _hooks_of(states[index]) for index in _hooked(states)}
    for state in [state for state in states if ADAPTERS_DISABLED in state]:
        _note_adapters(noted, state)
    held = [state["_parameters"] for state in states if state["_parameters"]]
    noted.parameters = [p for own in held for p in own.values() if p is not None]
    noted.trained = [parameter.requires_grad for parameter in noted.parameters]
    for module in [module for module in everything if module._buffers]:
        noted.buffers += [Buffer.of(module, *buffer) for buffer in module._buffers.items()]
    return noted


def _hooked(states: list[State]) -> list[int]:
    """The numbers of those that have hooks for the forward."""
    return [i for i, s in enumerate(states) if s[FORWARD_PRE_HOOKS] or s[FORWARD_HOOKS]]


def _note_adapters(noted: _Noted, state: State) -> None:
    noted.merged.append((state, tuple(state.get("merged_adapters", ()))))
    holders = [module for module in state["_modules"].values() if type(module) is ModuleDict]
    noted.dicts += [(m.__dict__, "_modules", m.__dict__["_modules"].copy()) for m in holders]
    own = [(key, value) for key, value in state.items() if type(value) is dict]
    noted.dicts += [(state, key, value.copy()) for key, value in own if key not in _APART]


def _hooks_of(state: State) -> State:
    """The hooks of a module for its forward, by kind, that are to be there in a recompute."""
    found = {kind: state[kind].copy() for kind in FORWARD_HOOK_TABLES}
    for key, hook in state[FORWARD_PRE_HOOKS].items():
        if helps_recompute(hook):
            del found[FORWARD_PRE_HOOKS][key]
    return found


def _training(states: list[State]) -> list[Any]:
    return [state.get("training", _ABSENT) for state in states]  # torch.compile's wrapper has none


def _attributes_of(states: list[State]) -> dict[int, tuple[Any, ...]]:
    """Of those that have any of them, by their number."""
    found = [(i, state) for i, state in enumerate(states) if not state.keys().isdisjoint(_RARE)]
    return {i: tuple(map(state.get, _ATTRIBUTES, _ABSENTS)) for i, state in found}


@contextmanager
def _as_noted(noted: _Noted) -> Iterator[None]:
    """Within this, the modules have again what was noted of them.

    Afterwards they are as they were, also when that could not be put back (no memory, say).
    """
    if any(merged != tuple(state.get("merged_adapters", ())) for state, merged in noted.merged):
        raise RecomputeError(
            "adapters were merged into the weights, or taken out of them, between a forward and "
            "its backward, which recomputes that forward; do it between steps"
        )
    with ExitStack() as undo:

        def put(state: State, key: str, value: Any) -> None:
            undo.callback(_set, state, key, state.get(key, _ABSENT))
            _set(state, key, value)

        states = noted.states
        if _training(states) != noted.training:
            for state, training in zip(states, noted.training, strict=True):
                if state.get("training", _ABSENT) is not training:
                    put(state, "training", training)
        now = _attributes_of(states)
        if now != noted.attributes:
            for index in now.keys() | noted.attributes.keys():
                before = noted.attributes.get(index, _ABSENTS)
                for key, value in zip(_ATTRIBUTES, before, strict=True):
                    if states[index].get(key, _ABSENT) is not value:
                        put(states[index], key, value)
        for index in noted.hooks.keys() | _hooked(states):
            state, hooks = states[index], noted.hooks.get(index)
            for kind in FORWARD_HOOK_TABLES:
                table = hooks[kind] if hooks else type(state[kind])()
                if state[kind].keys() != table.keys():
                    # A copy: what a hook registers during one recompute is gone in the next.
                    put(state, kind, table.copy())
        for state, key, held in noted.dicts:
            own = state[key]
            if own.keys() != held.keys() or not all(map(is_, own.values(), held.values())):
                put(state, key, held.copy())
        for buffer in noted.buffers:
            if buffer.tensor is None:
                put(buffer.module._buffers, buffer.name, None)
            elif buffer.copy is not None:
                put(buffer.module._buffers, buffer.name, buffer.copy.clone())
        if [parameter.requires_grad for parameter in noted.parameters] != noted.trained:
            for parameter, trained in zip(noted.parameters, noted.trained, strict=True):
                if parameter.requires_grad is not trained and parameter.is_leaf:
                    undo.callback(parameter.requires_grad_, not trained)
                    parameter.requires_grad_(trained)
        yield


def _set(state: State, key: str, value: Any) -> None:
    if value is _ABSENT:
        state.pop(key, None)
    else:
        state[key] = value
