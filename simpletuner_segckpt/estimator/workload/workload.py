"""What is trained, and with what: everything that the memory of a step depends on but the keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...families.schema import Family, Training
from ...messages.errors import WorkloadError

Adapter = Literal["lora", "lycoris", "full"]


def training_of(family: Family) -> Training:
    """What a training step feeds a family's model. Raises ``WorkloadError``."""
    if family.training is None:
        raise WorkloadError(
            f"the family file of {family.family} has no [training] table, which says what a "
            "training step feeds the model; CONTRIBUTING.md shows how to write one"
        )
    return family.training


@dataclass(frozen=True)
class Workload:
    """One training step of one model.

    model_class: dotted path. size: its name, where it is a published one. config: the model's
    configuration. width, height (pixels) and frames: of a sample. text: tokens. dropout: of LoRA.
    lycoris: what SimpleTuner's ``lycoris_config`` file holds. dtype: of the weights, of the
    adapter's too. autocast: whether the forward runs under bf16 autocast. base_bytes: bytes for
    each weight of a frozen linear layer, at most those of dtype. optimizer_bytes: of state for each
    trained parameter. stepping: copies of the trained parameters that its step makes.
    weights_on_cpu: RamTorch, which keeps the weights of linear layers in CPU memory. accumulates:
    whether gradients stay between steps. ema: whether a copy of the trained parameters is kept.
    """

    family: Family
    model_class: str
    config: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1
    width: int = 1024
    height: int = 1024
    frames: int = 1
    text: int = 0
    adapter: Adapter = "lora"
    rank: int = 16
    dropout: float = 0.1
    targets: tuple[str, ...] = ()
    lycoris: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    autocast: bool = True
    base_bytes: float = 4.0
    optimizer_bytes: float = 6.0
    weights_on_cpu: bool = False
    fused_qkv: bool = False
    accumulates: bool = False
    ema: bool = False
    size: str = ""
    stepping: int = 0
