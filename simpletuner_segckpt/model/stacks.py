"""Find the lists of blocks in a model."""

from collections.abc import Iterable

from torch.jit import ScriptModule
from torch.nn import Module, ModuleList
from transformers.modeling_layers import GradientCheckpointingLayer

from ..families.schema import Stack, matches
from .wrappers import unwrapped


def blocks_of(model: Module, path: str) -> list[Module]:
    """The blocks of the stack at ``path``; empty when the model has no such list any more.

    A block that stands by itself, between two lists, is a stack of one.
    """
    try:
        found = model.get_submodule(path)
    except AttributeError:
        return []
    if isinstance(found, ModuleList):
        return list(found)
    return [found] if type(found).forward is not Module.forward else []


def all_modules(modules: Iterable[Module]) -> list[Module]:
    """``modules`` and every module inside them, each once."""
    found = list(dict.fromkeys(modules))
    seen = set(found)
    for module in found:  # which grows; of every block in every forward, so no generators
        for inner in module._modules.values():
            if inner is not None and inner not in seen:
                seen.add(inner)
                found.append(inner)
    return found


def candidate_stacks(model: Module) -> dict[str, int]:
    """Path and length of every outermost list of two or more equal blocks in ``model``.

    A block is a module that can be called and has modules of its own; all blocks of a stack
    have one class. A list may hold one of them more than once (``holds_one_twice``).
    """
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        if not isinstance(module, ModuleList) or any(path.startswith(f"{p}.") for p in found):
            continue
        blocks = [unwrapped(block) for block in module]
        if len(blocks) < 2 or len({type(block) for block in blocks}) > 1:
            continue
        kind = type(blocks[0])
        callable_ = kind.forward is not Module.forward and not issubclass(kind, ScriptModule)
        if callable_ and any(blocks[0].children()):
            found[path] = len(blocks)
    return found


def holds_one_twice(model: Module, path: str) -> bool:
    """Whether one block stands more than once in the list at ``path``, which then is no stack."""
    blocks = [unwrapped(block) for block in blocks_of(model, path)]
    return len(set(blocks)) < len(blocks)


def has_checkpointing_layers(model: Module) -> bool:
    """Whether there are layers in ``model`` of the class that transformers checkpoints."""
    return any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())


def matching(model: Module, pattern: str) -> list[str]:
    """Paths of the modules that ``pattern`` names, in the order of the model's own tree."""
    return [path for path, _ in model.named_modules() if matches(pattern, path)]


def stacks_of(model: Module, described: Iterable[Stack]) -> dict[str, int]:
    """Path and length of every list of blocks in ``model`` that one of the stacks describes."""
    found: dict[str, int] = {}
    for stack in described:
        lengths = {path: len(blocks_of(model, path)) for path in matching(model, stack.path)}
        if "*" in stack.path:  # a list of one block is a unit
            lengths = {path: count for path, count in lengths.items() if count > 1}
        found |= lengths
    return found


def units_of(model: Module, patterns: Iterable[str], stacks: Iterable[str]) -> list[str]:
    """Paths of the units that ``patterns`` name, without the blocks of ``stacks``."""
    blocks = tuple(f"{stack}." for stack in stacks)
    named = [path for pattern in patterns for path in matching(model, pattern)]
    return [path for path in named if not path.startswith(blocks)]
