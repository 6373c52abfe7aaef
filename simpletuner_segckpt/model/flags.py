"""Whether a model checkpoints, and which function it asks: two attributes of some of its modules.

In diffusers and transformers a module that can checkpoint has the switch ``gradient_checkpointing``
and the function that its loop then hands each block to.
"""

from collections.abc import Iterable
from functools import partial
from inspect import getattr_static
from typing import Any

import torch.utils.checkpoint
from torch.nn import Module

from ..messages.errors import UnsupportedModel
from ..private.of_libraries import (
    CHECKPOINT_FUNCTION,
    INPUT_GRADIENTS_HOOK,
    STOCK_FUNCTIONS_MODULE,
)
from ..private.of_torch import drop_forward_hooks, hooks_on
from .wrappers import unwrapped

SWITCH = "gradient_checkpointing"
# That of a class that has an ``enable_gradient_checkpointing`` of its own (SimpleTuner's MageFlow).
OTHER_SWITCH = "checkpoint"
# In a copy, a function of the original that cannot be copied.
_LOST = "lost"


class CheckpointFlags:
    """The modules of one model that have the two attributes, and what these were at first.

    names: of the modules whose switch can be set. There are names only, so that a copy of the model
    has the same ones. Modules that were taken out of the model since are left alone.

    A switch that is a property without a setter is the class's own affair while it is off; one that
    is on would have the loop recompute by itself whatever is installed: ``UnsupportedModel``.
    """

    def __init__(self, model: Module):
        found = {
            name: module
            for name, module in model.named_modules()
            if _has_switch(module) and unwrapped(module) is module  # wrappers pass it on
        }
        self._fixed = tuple(name for name, module in found.items() if _is_fixed(module, SWITCH))
        self.names = tuple(name for name in found if name not in self._fixed)
        self._before: dict[str, dict[str, Any]] = {
            name: {
                key: getattr(module, key)
                for key in (_switch_of(module), CHECKPOINT_FUNCTION)
                if key in module.__dict__ or _property(module, key)
            }
            for name, module in found.items()
            if name in self.names
        }
        self._input_hooks = {
            name: len(hooks) for name, m in model.named_modules() if (hooks := _input_hooks(m))
        }
        self._refuse_fixed(model)

    def __getstate__(self) -> dict[str, Any]:
        before = {
            name: {key: _LOST if _is_local(value) else value for key, value in state.items()}
            for name, state in self._before.items()
        }
        return self.__dict__ | {"_before": before}

    @property
    def can_ask(self) -> bool:
        """Whether the modules' loops can be switched to the function that is set on them."""
        return bool(self.names) and not self._fixed

    def is_on(self, model: Module) -> bool:
        """Whether checkpointing is on; a model without the switch cannot say no."""
        return all(
            getattr(module, _switch_of(module)) for _, module in _modules(model, self.names[:1])
        )

    def switch(self, model: Module, on: bool) -> None:
        """Switch checkpointing on or off. Raises ``UnsupportedModel``."""
        if not on:
            self._refuse_fixed(model)
        for _, module in _modules(model, self.names):
            setattr(module, _switch_of(module), on)

    def _refuse_fixed(self, model: Module) -> None:
        for _, module in _modules(model, self._fixed):
            if getattr(module, SWITCH):
                raise UnsupportedModel(
                    f"`{SWITCH}` of {type(module).__name__} is a property that cannot be set, and "
                    "it is on, so its loop recomputes blocks by itself; switch it off, or give it "
                    "a setter"
                )

    def is_uneven(self, model: Module) -> bool:
        """Whether it is on in some modules and off in others (``every_n_layers``)."""
        modules = [module for _, module in _modules(model, self.names)]
        return len({bool(getattr(module, _switch_of(module))) for module in modules}) > 1

    def set_function(self, model: Module, function: Any) -> list[Any]:
        """Have every module ask ``function``; returns the functions of others that it replaces."""
        replaced = []
        for _, module in _modules(model, self.names):
            if _is_fixed(module, CHECKPOINT_FUNCTION):
                continue
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
            if not _is_fixed(module, CHECKPOINT_FUNCTION)
        )

    def restore(self, model: Module) -> None:
        """Give every module the attributes back that it had."""
        for name, module in _modules(model, self._before):
            state = self._before[name]
            for key in (_switch_of(module), CHECKPOINT_FUNCTION):
                if key not in state:
                    module.__dict__.pop(key, None)
                elif not _is_fixed(module, key):
                    setattr(module, key, None if state[key] == _LOST else state[key])
        if not any(map(_was_on, self._before.values())):
            # PEFT asks for one where checkpointing is on, which was our doing, and whoever enables
            # it then asks for another.
            for name, module in model.named_modules():
                most = self._input_hooks.get(name, 0) + 1
                drop_forward_hooks(module, _input_hooks(module)[:-most])
        lost = (s for s in self._before.values() if s.get(CHECKPOINT_FUNCTION) == _LOST)
        if any(map(_was_on, lost)):
            enable: Any = model.enable_gradient_checkpointing
            enable()


def described(function: Any) -> str:
    """A checkpoint function by its name and its options."""
    if isinstance(function, partial):
        options = ", ".join(f"{key}={value!r}" for key, value in function.keywords.items())
        return f"{described(function.func)} ({options})"
    return getattr(function, "__qualname__", str(function))


def _switch_of(module: Module) -> str:
    """Name of the attribute that switches the module's own checkpointing."""
    own = isinstance(module.__dict__.get(OTHER_SWITCH), bool)
    enables = hasattr(type(module), "enable_gradient_checkpointing")
    return OTHER_SWITCH if own and enables and not hasattr(module, SWITCH) else SWITCH


def _has_switch(module: Module) -> bool:
    return hasattr(module, SWITCH) or _switch_of(module) == OTHER_SWITCH


def _was_on(state: dict[str, Any]) -> bool:
    return bool(state.get(SWITCH) or state.get(OTHER_SWITCH))


def _property(module: Module, key: str) -> property | None:
    """The property of the module's class by this name."""
    found = getattr_static(type(module), key, None)
    return found if isinstance(found, property) else None


def _is_fixed(module: Module, key: str) -> bool:
    """Whether ``key`` is a property without a setter."""
    found = _property(module, key)
    return found is not None and found.fset is None


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


def _input_hooks(module: Module) -> list[Any]:
    """The hooks by which transformers has a gradient begin at the output of ``module``."""
    return [
        hook
        for _, hook in hooks_on(module, "forward hook")
        if getattr(hook, "__qualname__", "").startswith(INPUT_GRADIENTS_HOOK)
    ]


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
