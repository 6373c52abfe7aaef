"""Small real models and example inputs from a family file, for tests and for ``check``.

A table in ``[tiny.inputs]`` describes a tensor: ``shape``, ``dtype`` (float32 unless said)
and how it is filled: ``fill`` a constant, ``low``/``high`` random integers, ``values`` the
numbers themselves, otherwise standard normal. Anything else is passed on as it is.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from ..families.schema import Tiny


def load_class(path: str, since: str = "") -> type[torch.nn.Module]:
    """The class at a dotted path. Raises ``ImportError`` when it cannot be had, for any reason.

    since: the release of its package that brought it, if that is known.
    """
    module, _, name = path.rpartition(".")
    try:
        package = import_module(module)
        if hasattr(package, name):
            return getattr(package, name)
    except Exception as error:  # a module that raises while it is imported
        raise ImportError(f"{path} cannot be imported: {type(error).__name__}: {error}") from None
    came = f", which came with {since}" if since else ""
    raise ImportError(f"{module} {_release(module)} has no {name}{came}")


def is_before(since: str) -> bool:
    """Whether the installed diffusers is older than the release ``since``, if that is given."""
    return bool(since) and Version(_release("diffusers")) < Version(since)


def missing_needs(tiny: Tiny) -> list[str]:
    """What a tiny model needs and this machine lacks: packages, or ``cuda``."""
    return [
        need
        for need in tiny.needs
        if not (torch.cuda.is_available() if need == "cuda" else _is_installed(need))
    ]


def _is_installed(need: str) -> bool:
    wanted = Requirement(need)
    try:
        if find_spec(wanted.name) is None:
            return False
    except (ImportError, ValueError):
        return False
    return wanted.specifier.contains(_release(wanted.name), prereleases=True)


def _release(package: str) -> str:
    """The version of an installed package."""
    try:
        return version(package.partition(".")[0])
    except PackageNotFoundError:
        return "0"


def make_model(tiny: Tiny, seed: int = 0, **config: Any) -> torch.nn.Module:
    """The model with random weights; ``config`` overrides values of its configuration.

    Parameters that a class starts at zero are random too, since they would hide the gradients of
    everything before them, and so is what it leaves as it was in memory.
    """
    torch.manual_seed(seed)
    model = load_class(tiny.model_class)(**_plain(tiny.config) | config)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any() or not parameter.abs().max() < 100:
                parameter.normal_(std=0.05)
    return model


def make_inputs(tiny: Tiny, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments for the model's forward."""
    generator = torch.Generator().manual_seed(seed)
    return {name: make(spec, generator) for name, spec in tiny.inputs.items()}


def make(spec: Any, generator: torch.Generator) -> Any:
    """What ``spec`` describes: a tensor for a table of that form, containers inside out."""
    if isinstance(spec, Mapping):
        if "shape" in spec or "values" in spec:
            return _tensor(spec, generator)
        return {name: make(value, generator) for name, value in spec.items()}
    if isinstance(spec, (list, tuple)):
        return [make(value, generator) for value in spec]
    return spec


def _tensor(spec: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, spec.get("dtype", "float32"))
    if "values" in spec:
        return torch.tensor(_plain(spec["values"]), dtype=dtype)
    shape = tuple(spec["shape"])
    if "fill" in spec:
        return torch.full(shape, spec["fill"], dtype=dtype)
    if "high" in spec:
        low = spec.get("low", 0)
        return torch.randint(low, spec["high"], shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator, dtype=dtype)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
