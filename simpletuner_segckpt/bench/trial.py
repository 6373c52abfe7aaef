"""What ``bench`` trains: the model of a config at its real size, or the tiny one of its family."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from ..config.settings import Settings, read_keys
from ..config_schema import PREFIX, TrainingKeys
from ..estimator.workload import build as building
from ..estimator.workload.parse import Overrides, describe, parse_workload
from ..estimator.workload.workload import Workload
from ..families.registry import FamilyRegistry
from ..families.schema import Family, Tiny
from ..messages.errors import WorkloadError
from ..model.tiny import make_inputs, make_model, missing_needs
from ..private.of_torch import pytree

TINY_RANK = 4


# What a measured step has, whatever the config says of it, and how that is said.
PLAIN: Mapping[str, tuple[Any, str]] = {
    "optimizer": ("adamw", "torch's AdamW makes the steps"),
    "base_model_precision": ("no_change", "the weights are not quantized"),
    "ramtorch": (False, "the weights are on the device"),
    "gradient_accumulation_steps": (1, "every step updates the weights"),
    "use_ema": (False, "no copy of the weights is kept"),
    "dynamo_backend": ("no", "nothing is compiled"),
}


TINY_NOTE = (
    "a tiny model: its figures say nothing of the real one; its steps are bound by the host, so "
    "keep gains nothing in them"
)


UNCOMPILED = ("none", "disabled", "eager")


@dataclass(frozen=True)
class Trial:
    """A model and the inputs of a step. ``work`` is None for a tiny model, ``tiny`` for others.

    title: what is trained, in a line. identity: all that the figures depend on but the device and
    the keys, as JSON types. precision: of the weights. notes: what is assumed, and what differs
    from the config.
    """

    family: Family
    title: str
    identity: Mapping[str, Any]
    precision: str
    work: Workload | None = None
    tiny: Tiny | None = None
    rank: int | None = None  # of the LoRA of a tiny model; None when all weights are trained
    notes: list[str] = field(default_factory=list)

    def build(self, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
        """The model in training mode, and the arguments of its forward, both on ``device``."""
        torch.manual_seed(0)
        if self.work is not None:
            with torch.device(device):  # where billions of random numbers are made in a second
                model = building.build(self.work)
            inputs = building.inputs(self.work)
        else:
            assert self.tiny is not None
            model, inputs = make_model(self.tiny).train(), make_inputs(self.tiny)
            if self.rank is not None:
                model.requires_grad_(False)
                targets = building.targets_of(model, ("*",))
                lora = LoraConfig(r=self.rank, lora_alpha=self.rank, target_modules=targets)
                inject_adapter_in_model(lora, model)
        move: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor.to(device)  # noqa: E731
        return model.to(device), pytree.tree_map_only(torch.Tensor, move, inputs)

    @property
    def autocast(self) -> bool:
        """Whether the forward runs under bf16 autocast."""
        return self.work is not None and self.work.autocast


def trial_of(
    settings: Settings, registry: FamilyRegistry, overrides: Overrides, tiny: bool
) -> Trial:
    """Raises ``ConfigError``, ``UnknownFamily`` and ``WorkloadError``."""
    keys = read_keys(TrainingKeys, settings.file)
    notes = [
        f"{key} is {value} in the config; here {text}"
        for key, (plain, text) in PLAIN.items()
        if (value := getattr(keys, key)) not in (None, plain)
        and not (key == "dynamo_backend" and value in UNCOMPILED)
    ]
    if tiny:
        return _tiny(settings, keys, registry, overrides, notes)
    values = {
        k: v for k, v in settings.file.values.items() if str(k).removeprefix("--") not in PLAIN
    }
    values |= {key: plain for key, (plain, _) in PLAIN.items()}
    plain_file = replace(settings.file, values=values)
    read = parse_workload(replace(settings, file=plain_file), registry, overrides)
    work = replace(read.workload, base_bytes=4.0)
    identity = asdict(replace(work, family=None))  # type: ignore[arg-type]
    return Trial(
        work.family,
        describe(replace(read, workload=work)),
        identity | {"family": work.family.family, "tiny": False},
        {"bfloat16": "bf16", "float32": "fp32"}.get(work.dtype, work.dtype),
        work=work,
        notes=[*(f"assumed: {line}" for line in read.assumed), *notes],
    )


def _tiny(
    settings: Settings,
    keys: TrainingKeys,
    registry: FamilyRegistry,
    overrides: Overrides,
    notes: list[str],
) -> Trial:
    given = [k for k, v in asdict(overrides).items() if v and k not in ("family", "rank")]
    if given:
        names = ", ".join({"width": "resolution", "height": "resolution"}.get(k, k) for k in given)
        raise WorkloadError(f"--tiny has sizes of its own; leave out --{names.split(', ')[0]}")
    name = overrides.family or settings.trainer.model_family
    if name is None:
        raise WorkloadError("the config has no model_family; write it there or pass --family")
    family = registry.find(name, settings.trainer.model_flavour)
    if not family.tiny:
        raise WorkloadError(f"the family file of {family.family} has no tiny model")
    spec = family.tiny[0]
    missing = missing_needs(spec)
    if missing:
        raise WorkloadError(f"the tiny model of {family.family} needs {' and '.join(missing)}")
    rank = None if keys.model_type == "full" else overrides.rank or keys.lora_rank or TINY_RANK
    trained = (
        "all weights trained" if rank is None else f"LoRA of rank {rank} on every linear layer"
    )
    return Trial(
        family,
        f"{family.title}: the tiny model of its family file, {trained}, float32",
        {"family": family.family, "tiny": True, "rank": rank, **spec.model_dump(mode="json")},
        "fp32",
        tiny=spec,
        rank=rank,
        notes=[TINY_NOTE, *notes],
    )


def without_schedule(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config without its ``gradient_checkpointing*`` keys."""
    return {k: v for k, v in values.items() if not str(k).removeprefix("--").startswith(PREFIX)}
