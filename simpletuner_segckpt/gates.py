"""The modules of a model that ask for a checkpoint function, and the two attributes they have."""

from functools import partial
from typing import Any

import torch.utils.checkpoint
from torch.nn import Module

from .stacks import unwrapped

FLAG = "gradient_checkpointing"  # whether to ask
FUNCTION = "_gradient_checkpointing_func"  # whom to ask


class Gates:
    """The gates of one model by name, and the state that each had when this was made.

    Holds names only, so the same gates are found in a copy of the model.
    """

    def __init__(self, model: Module):
        found = {
            name: module
            for name, module in model.named_modules()
            if hasattr(module, FLAG) and unwrapped(module) is module  # wrappers pass it on
        }
        self.names = tuple(found)
        self._before: dict[str, dict[str, Any]] = {
            name: {key: gate.__dict__[key] for key in (FLAG, FUNCTION) if key in gate.__dict__}
            for name, gate in found.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        before = {
            name: {key: None if _is_local(value) else value for key, value in state.items()}
            for name, state in self._before.items()
        }
        return {"names": self.names, "_before": before}

    def on(self, model: Module) -> bool:
        """Whether checkpointing is enabled; a model without gates cannot say no."""
        return all(getattr(self._gate(model, name), FLAG) for name in self.names[:1])

    def switch(self, model: Module, on: bool) -> None:
        """Enable or disable checkpointing."""
        for name in self.names:
            setattr(self._gate(model, name), FLAG, on)

    def uneven(self, model: Module) -> bool:
        """Whether checkpointing is on in some gates and off in others (``every_n_layers``)."""
        return len({bool(getattr(self._gate(model, name), FLAG)) for name in self.names}) > 1

    def ask(self, model: Module, function: Any) -> list[Any]:
        """Have every gate ask ``function``; returns the functions of others that it replaces."""
        replaced = []
        for name in self.names:
            gate = self._gate(model, name)
            previous = getattr(gate, FUNCTION, None)
            if previous is not function and not _is_stock(previous) and previous not in replaced:
                replaced.append(previous)
            setattr(gate, FUNCTION, function)
        return replaced

    def asks(self, model: Module, function: Any) -> bool:
        """Whether the gates ask ``function``."""
        return all(
            getattr(self._gate(model, n), FUNCTION, None) is function for n in self.names[:1]
        )

    def restore(self, model: Module) -> None:
        """Give every gate the state back that it had."""
        for name, state in self._before.items():
            gate = self._gate(model, name)
            for key in (FLAG, FUNCTION):
                if key in state:
                    setattr(gate, key, state[key])
                else:
                    gate.__dict__.pop(key, None)
        if any(state.get(FLAG) and not state.get(FUNCTION) for state in self._before.values()):
            # In a copy of the model: the stock function could not be copied with it.
            enable: Any = model.enable_gradient_checkpointing
            enable()

    @staticmethod
    def _gate(model: Module, name: str) -> Any:
        return unwrapped(model.get_submodule(name))  # wrapped since, perhaps


def _is_stock(function: Any) -> bool:
    """Whether ``function`` is what diffusers and transformers themselves set on enable and disable,
    without options of somebody's own."""
    if isinstance(function, partial) and function.keywords == {"use_reentrant": False}:
        function = function.func
    return (
        function is None
        or function is torch.utils.checkpoint.checkpoint
        or getattr(function, "__module__", "") == "diffusers.models.modeling_utils"
    )


def described(function: Any) -> str:
    """A checkpoint function by its name and its options."""
    if isinstance(function, partial):
        options = ", ".join(f"{key}={value!r}" for key, value in function.keywords.items())
        return f"{described(function.func)} ({options})"
    return getattr(function, "__qualname__", str(function))


def _is_local(value: Any) -> bool:
    """Whether ``value`` is a function made inside another one, which cannot be pickled."""
    return "<locals>" in getattr(value, "__qualname__", "")
