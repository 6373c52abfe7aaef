"""Real models at real size for the tests of the estimator."""

from dataclasses import replace
from functools import cache

from training import skip_before

from simpletuner_segckpt.estimator.profile.profile import profile
from simpletuner_segckpt.estimator.workload.workload import Workload
from simpletuner_segckpt.families.registry import FamilyRegistry

REGISTRY = FamilyRegistry.shipped()


def workload(name, flavour=None, **changes):
    """A family's published size, LoRA of rank 16 in bf16, at the family's usual resolution."""
    family = REGISTRY.find(name, flavour)
    skip_before(family)
    training = family.training
    width, height = training.resolution
    made = Workload(
        family,
        family.classes[0],
        family.config_of_size(family.size(flavour)),
        width=width,
        height=height,
        frames=training.frames,
        targets=training.targets,
    )
    return replace(made, **changes | {"config": made.config | changes.get("config", {})})


@cache
def _profiled(name, flavour, changes):
    return profile(workload(name, flavour, **dict(changes)))


def profiled(name, flavour=None, **changes):
    """The profile of ``workload``, made once in a process."""
    return _profiled(name, flavour, tuple(sorted(changes.items())))
