"""Modules as they were, for an installation that fails halfway."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch.nn import Module

from ..private.of_torch import FORWARD_HOOK_TABLES


class ModuleState(NamedTuple):
    """A module with its class, its attributes, and what is in its tables of hooks."""

    module: Module
    kind: type
    attributes: dict[str, Any]
    hooks: dict[str, dict[int, Any]]


def states_of(models: Iterable[Module]) -> list[ModuleState]:
    """What every module of ``models`` is and has now."""
    modules = dict.fromkeys(module for model in models for module in model.modules())
    return [
        ModuleState(
            module,
            type(module),
            dict(module.__dict__),
            {table: dict(module.__dict__[table]) for table in FORWARD_HOOK_TABLES},
        )
        for module in modules
    ]


def put_back(states: Sequence[ModuleState]) -> None:
    """Make the modules again what they were, the order of attributes and hooks included."""
    for module, kind, attributes, hooks in states:
        if type(module) is not kind:
            # Wrappers pass attributes that are set on them on to what they wrap.
            object.__setattr__(module, "__class__", kind)
        now = module.__dict__
        if list(now) != list(attributes) or any(now[k] is not attributes[k] for k in attributes):
            now.clear()
            now.update(attributes)
        for table, content in hooks.items():
            if list(now[table].items()) != list(content.items()):
                now[table].clear()  # in place, for the handles that refer to the table
                now[table].update(content)
