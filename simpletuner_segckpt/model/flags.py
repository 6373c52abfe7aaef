"""Whether a model checkpoints, and which function it asks: two attributes of some of its modules.

In diffusers and transformers a module that can checkpoint has the switch ``gradient_checkpointing``
and the function that its loop then hands each block to.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch.utils.checkpoint
from torch.nn import Module

from ..private.of_libraries import CHECKPOINT_FUNCTION, STOCK_FUNCTIONS_MODULE
from .wrappers import unwrapped

SWITCH = "gradient_checkpointing"


class CheckpointFlags:
    """The modules of one model that have the two attributes, and what these were at first.

    names: of the modules. There are names only, so that a copy of the model has the same ones.
    Modules that were taken out of the model since are left alone.
    """

    def __init__(self, model: Module):
        found = {
            name: module
            for name, module in model.named_modules()
            if hasattr(module, SWITCH) and unwrapped(module) is module  # wrappers pass it on
        }
        self.names = tuple(found)
        self._before: dict[str, dict[str, Any]] = {
            name: {
                key: module.__dict__[key]
                for key in (SWITCH, CHECKPOINT_FUNCTION)
                if key in module.__dict__
            }
            for name, module in found.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        before = {
            name: {key: None if _is_local(value) else value for key, value in state.items()}
            for name, state in self._before.items()
        }
        return {"names": self.names, "_before": before}

    def is_on(self, model: Module) -> bool:
        """Whether checkpointing is on; a model without the switch cannot say no."""
        return all(getattr(module, SWITCH) for _, module in _modules(model, self.names[:1]))

    def switch(self, model: Module, on: bool) -> None:
        """Switch checkpointing on or off."""
        for _, module in _modules(model, self.names):
            setattr(module, SWITCH, on)

    def is_uneven(self, model: Module) -> bool:
        """Whether it is on in some modules and off in others (``every_n_layers``)."""
        return len({bool(getattr(module, SWITCH)) for _, module in _modules(model, self.names)}) > 1

    def set_function(self, model: Module, function: Any) -> list[Any]:
        """Have every module ask ``function``; returns the functions of others that it replaces."""
        replaced = []
        for _, module in _modules(model, self.names):
            previous = getattr(module, CHECKPOINT_FUNCTION, None)
            if previous is not function and not _is_stock(previous) and previous not in replaced:
                replaced.append(previous)
            setattr(module, CHECKPOINT_FUNCTION, function)
        return replaced

    def has_function(self, model: Module, function: Any) -> bool:
        """Whether it is ``function`` that is asked."""
        return all(
            getattr(module, CHECKPOINT_FUNCTION, None) is function
            for _, module in _modules(model, self.names[:1])
        )

    def restore(self, model: Module) -> None:
        """Give every module the attributes back that it had."""
        for name, module in _modules(model, self._before):
            state = self._before[name]
            for key in (SWITCH, CHECKPOINT_FUNCTION):
                if key in state:
                    setattr(module, key, state[key])
                else:
                    module.__dict__.pop(key, None)
        without_function = (not state.get(CHECKPOINT_FUNCTION) for state in self._before.values())
        switched_on = (bool(state.get(SWITCH)) for state in self._before.values())
        if any(on and lost for on, lost in zip(switched_on, without_function, strict=True)):
            # In a copy of the model: the stock function could not be copied with it.
            enable: Any = model.enable_gradient_checkpointing
            enable()


def described(function: Any) -> str:
    """A checkpoint function by its name and its options."""
    if isinstance(function, partial):
        options = ", ".join(f"{key}={value!r}" for key, value in function.keywords.items())
        return f"{described(function.func)} ({options})"
    return getattr(function, "__qualname__", str(function))


def _modules(model: Module, names: Iterable[str]) -> list[tuple[str, Any]]:
    """Those of the modules with these names that are still there, unwrapped."""
    found = []
    for name in names:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            continue
        found.append((name, unwrapped(module)))
    return found


def _is_stock(function: Any) -> bool:
    """Whether ``function`` is what diffusers and transformers themselves set on enable and disable,
    without options of somebody's own."""
    if isinstance(function, partial) and function.keywords == {"use_reentrant": False}:
        function = function.func
    return (
        function is None
        or function is torch.utils.checkpoint.checkpoint
        or getattr(function, "__module__", "") == STOCK_FUNCTIONS_MODULE
    )


def _is_local(value: Any) -> bool:
    """Whether ``value`` is a function made inside another one, which cannot be pickled."""
    return "<locals>" in getattr(value, "__qualname__", "")
