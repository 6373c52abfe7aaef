"""Memory control for training diffusion transformers, from ``gradient_checkpointing*`` keys.

>>> installation = simpletuner_segckpt.apply(model, "config.json")   # doctest: +SKIP

Importing the package imports no torch; ``apply`` does when it is first used.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config_schema import CheckpointingConfig
    from .errors import (
        ConfigError,
        FamilyError,
        RecomputeError,
        SegckptError,
        SegmentBroken,
        UnknownFamily,
        UnsupportedModel,
        WorkloadError,
    )
    from .estimate import estimate_config
    from .family import Family
    from .install import Installation, apply, installation_of, remove
    from .plan import plan_config
    from .probing import probe
    from .registry import FamilyRegistry
    from .sharding import fully_shard_segments, sharding_units

_HOMES = {
    "CheckpointingConfig": "config_schema",
    "ConfigError": "errors",
    "Family": "family",
    "FamilyError": "errors",
    "FamilyRegistry": "registry",
    "Installation": "install",
    "RecomputeError": "errors",
    "SegckptError": "errors",
    "SegmentBroken": "errors",
    "UnknownFamily": "errors",
    "UnsupportedModel": "errors",
    "WorkloadError": "errors",
    "apply": "install",
    "estimate_config": "estimate",
    "fully_shard_segments": "sharding",
    "installation_of": "install",
    "plan_config": "plan",
    "probe": "probing",
    "remove": "install",
    "sharding_units": "sharding",
}

__all__ = [
    "CheckpointingConfig",
    "ConfigError",
    "Family",
    "FamilyError",
    "FamilyRegistry",
    "Installation",
    "RecomputeError",
    "SegckptError",
    "SegmentBroken",
    "UnknownFamily",
    "UnsupportedModel",
    "WorkloadError",
    "apply",
    "estimate_config",
    "fully_shard_segments",
    "installation_of",
    "plan_config",
    "probe",
    "remove",
    "sharding_units",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("simpletuner-segckpt")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
