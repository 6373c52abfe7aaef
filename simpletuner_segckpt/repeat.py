"""A recompute that finds its modules as the forward did.

What a block computes depends on more than its arguments. PEFT registers hooks on its layers for
the time of one forward (aLoRA, a batch of several adapters), diffusers scales LoRA layers for one
forward, trainers switch adapters or freeze parameters before backward has run, and normalisations
write their buffers each time they are called. A recompute that ran with what is there *then* would
be of another function: wrong gradients, or saved tensors that do not match. So what is there when
a call begins is noted, put back while the call is repeated, and taken away again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _NormBase

from .hooks import helps_recompute
from .links import version
from .messages import Messages
from .stacks import all_modules

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
# What says which of a PEFT layer's adapters run, and how strongly.
_ADAPTERS = ("_disable_adapters", "_active_adapter", "scaling")
# Like ``training``, a switch of whole models that some attentions of transformers ask about.
_CHECKPOINTING = "gradient_checkpointing"
Switch = bool | None  # None: the module has none

# Elements of a buffer that is copied before each call, should the call write to it. Larger ones
# are weights (quantised, packed), which no forward writes.
COPIED = 2**20

_messages = Messages()


@dataclass(slots=True)
class _Buffer:
    module: Module
    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None

    @property
    def written(self) -> bool:
        # The kernels of batch normalisation write their statistics past the version.
        return version(self.tensor) != self.version or isinstance(self.module, _NormBase)


@dataclass(slots=True)
class _Noted:
    """What modules, and those inside them, had at one time.

    Hooks of modules that have any; whether each parameter was trained; buffers; the state of
    adapter layers; of every module, with its attributes, the two switches that a trainer may turn.
    """

    modules: list[tuple[Module, dict[str, Any], Switch, Switch]] = field(default_factory=list)
    hooks: dict[Module, dict[str, dict[int, Any]]] = field(default_factory=dict)
    trained: list[tuple[Parameter, bool]] = field(default_factory=list)
    buffers: list[_Buffer] = field(default_factory=list)
    adapters: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)


class Repeatable:
    """Calls ``function``, and from the second time on with ``modules`` as they were the first."""

    def __init__(self, modules: Sequence[Module], function: Callable[..., Any]):
        self.modules = modules
        self.function = function
        self._noted: _Noted | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._noted is not None:
            with _as_noted(self._noted):
                return self.function(*args, **kwargs)
        noted = self._noted = _note(self.modules)
        result = self.function(*args, **kwargs)
        noted.buffers = [buffer for buffer in noted.buffers if buffer.written]
        for buffer in noted.buffers:
            if buffer.copy is None:
                _messages.warn(
                    "written-buffer",
                    f"a {type(buffer.module).__name__} writes its buffer `{buffer.name}`, which is "
                    "too large to be copied: its recompute starts from what was written",
                )
        return result


def _note(modules: Sequence[Module]) -> _Noted:
    noted = _Noted()
    for module in all_modules(modules):
        state = module.__dict__  # of every module in every forward, past Module.__getattr__
        training = state.get("training")  # torch.compile's wrapper has none of its own
        noted.modules.append((module, state, training, state.get(_CHECKPOINTING)))
        if state["_forward_pre_hooks"] or state["_forward_hooks"]:
            noted.hooks[module] = _hooks_of(state)
        for parameter in state["_parameters"].values():
            if parameter is not None:
                noted.trained.append((parameter, parameter.requires_grad))
        for name, tensor in state["_buffers"].items():
            if tensor is not None:
                copy = tensor.detach().clone() if tensor.numel() <= COPIED else None
                noted.buffers.append(_Buffer(module, name, tensor, version(tensor), copy))
        if "_disable_adapters" in state:
            adapters = {key: state[key] for key in _ADAPTERS if key in state}
            if isinstance(adapters.get("scaling"), dict):
                adapters["scaling"] = dict(adapters["scaling"])
            noted.adapters.append((state, adapters))
    return noted


def _hooks_of(state: dict[str, Any]) -> dict[str, dict[int, Any]]:
    """The hooks of a module for its forward, by kind, that are to be there in a recompute."""
    found = {kind: state[kind].copy() for kind in _HOOKS}
    for key, hook in state["_forward_pre_hooks"].items():
        if helps_recompute(hook):
            del found["_forward_pre_hooks"][key]
    return found


@contextmanager
def _as_noted(noted: _Noted) -> Iterator[None]:
    """Within this, the modules have again what was noted of them."""
    replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def put(state: dict[str, Any], values: dict[str, Any]) -> None:
        replaced.append((state, {key: state[key] for key in values}))
        state.update(values)

    for module, state, training, checkpointing in noted.modules:
        if (hooks := _other_hooks(state, noted.hooks.get(module))) is not None:
            # Copies: what a hook registers during one recompute is gone in the next.
            put(state, {kind: found.copy() for kind, found in hooks.items()})
        if training is not None and state["training"] is not training:
            put(state, {"training": training})
        if checkpointing is not None and state.get(_CHECKPOINTING) not in (None, checkpointing):
            put(state, {_CHECKPOINTING: checkpointing})
    for state, adapters in noted.adapters:
        changed = {key: value for key, value in adapters.items() if state.get(key) != value}
        if changed:
            put(state, changed)
    for buffer in noted.buffers:
        if buffer.copy is not None and buffer.name in buffer.module._buffers:
            put(buffer.module._buffers, {buffer.name: buffer.copy.clone()})
    switched = [(p, trained) for p, trained in noted.trained if p.requires_grad is not trained]
    switched = [(p, trained) for p, trained in switched if p.is_leaf]
    for parameter, trained in switched:
        parameter.requires_grad_(trained)
    try:
        yield
    finally:
        for parameter, trained in switched:
            parameter.requires_grad_(not trained)
        for state, values in reversed(replaced):
            state.update(values)


def _other_hooks(
    state: dict[str, Any], noted: dict[str, dict[int, Any]] | None
) -> dict[str, dict[int, Any]] | None:
    """The hooks that a module had when they were noted, if it has others now."""
    if noted is not None:
        return noted if any(state[kind].keys() != noted[kind].keys() for kind in _HOOKS) else None
    if state["_forward_pre_hooks"] or state["_forward_hooks"]:
        return {kind: type(state[kind])() for kind in _HOOKS}
    return None
