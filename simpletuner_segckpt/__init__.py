"""Memory control for training diffusion transformers, from ``gradient_checkpointing*`` keys.

>>> installation = simpletuner_segckpt.apply(model, "config.json")   # doctest: +SKIP

Importing the package imports no torch; ``apply`` does when it is first used.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config_schema import CheckpointingConfig
    from .estimator.predict.estimate import estimate_config
    from .estimator.predict.plan import plan_config
    from .families.registry import FamilyRegistry
    from .families.schema import Family
    from .install.apply import Installation, apply, installation_of, remove
    from .install.sharding import fully_shard_segments, sharding_units
    from .messages.errors import (
        ConfigError,
        FamilyError,
        RecomputeError,
        SegckptError,
        SegmentBroken,
        UnknownFamily,
        UnsupportedModel,
        WorkloadError,
    )
    from .verify.probe import probe

_HOMES = {
    "CheckpointingConfig": "config_schema",
    "ConfigError": "messages.errors",
    "Family": "families.schema",
    "FamilyError": "messages.errors",
    "FamilyRegistry": "families.registry",
    "Installation": "install.apply",
    "RecomputeError": "messages.errors",
    "SegckptError": "messages.errors",
    "SegmentBroken": "messages.errors",
    "UnknownFamily": "messages.errors",
    "UnsupportedModel": "messages.errors",
    "WorkloadError": "messages.errors",
    "apply": "install.apply",
    "estimate_config": "estimator.predict.estimate",
    "fully_shard_segments": "install.sharding",
    "installation_of": "install.apply",
    "plan_config": "estimator.predict.plan",
    "probe": "verify.probe",
    "remove": "install.apply",
    "sharding_units": "install.sharding",
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
