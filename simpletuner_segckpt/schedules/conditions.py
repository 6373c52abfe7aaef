"""Everything that forces per-block, each with its reason.

A condition is known from the trainer's config (before a model exists), from the model (hooks
that a segment would break) or only from the arguments of one call. The identity checks of
the engine are the net beneath; conditions are there to give the reason, and to catch what
identity cannot see.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..config.deepspeed import zero_stage
from ..config_schema import TrainerKeys


@dataclass(frozen=True, slots=True)
class Condition:
    """A fact that forces per-block, or switches checkpointing off.

    ``where`` says what it was seen in: the ``config``, the ``model`` or one ``call``. ``name``
    is the config key, the hook or the argument. ``stacks`` is empty when all are concerned.
    """

    where: Literal["config", "model", "call"]
    name: str
    reason: str
    stacks: tuple[str, ...] = ()
    off: bool = False

    def concerns(self, path: str) -> bool:
        return not self.stacks or path in self.stacks

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


# Arguments by which any model's loop captures, caches, routes or adds something per block.
CALL_CONDITIONS = tuple(
    Condition("call", name, reason)
    for name, reason in {
        "kv_cache": "every block reads and writes its own entry of the cache",
        "past_key_values": "every block reads and writes its own entry of the cache",
        "cache": "every block reads and writes its own entry of the cache",
        "output_hidden_states": "the state after each block is captured",
        "output_attentions": "the attention weights of each block are captured",
        "hidden_states_buffer": "the state after each block is captured",
        "controlnet_block_samples": "a ControlNet residual is added after a block",
        "controlnet_single_block_samples": "a ControlNet residual is added after a block",
        "block_controlnet_hidden_states": "a ControlNet residual is added after a block",
        "skip_layers": "some blocks are left out",
    }.items()
)


# Keys of the trainer that force per-block where they are set.
CONFIG_CONDITIONS = {
    "musubi_blocks_to_swap": "block swapping moves each block's weights as that block runs",
    "crepa_enabled": "CREPA captures hidden states after a block",
    "layersync_enabled": "LayerSync captures hidden states after a block",
    "internal_guidance_enabled": "internal guidance captures hidden states after a block",
    "nextlat_enabled": "NextLat captures hidden states after a block",
    "distillation_method": "self_transcendence captures hidden states after a block",
    "tread_config": "TREAD routes tokens around chosen blocks",
    "controlnet": "a ControlNet residual is added after a block",
    "max_grounding_entities": "a grounding module runs after each block",
    "enable_group_offload": "group offloading moves each block's weights as that block runs",
    "diffusion_blocks_config": "only a slice of the blocks is trained at a time",
}


def config_conditions(trainer: TrainerKeys) -> list[Condition]:
    """The conditions that the trainer's own keys bring about."""
    found = [
        Condition("config", key, reason)
        for key, reason in CONFIG_CONDITIONS.items()
        if _is_set(trainer, key)
    ]
    if sharding_stage(trainer) == 3:
        reason = "ZeRO stage 3 gathers and releases the weights of every module by hooks"
        found.append(Condition("config", "deepspeed_config", reason))
    if trainer.fsdp_enable and trainer.fsdp_activation_checkpointing:
        found.append(
            Condition(
                "config",
                "fsdp_activation_checkpointing",
                "FSDP recomputes the blocks itself, so the model must not",
                off=True,
            )
        )
    return found


def sharding_stage(trainer: TrainerKeys) -> int | None:
    """The ZeRO stage of DeepSpeed that the trainer uses, where its config can be read."""
    try:
        return zero_stage(trainer.deepspeed_config)
    except ValueError:
        return None  # which a finding says


def _is_set(trainer: TrainerKeys, key: str) -> bool:
    if key == "layersync_enabled":
        return trainer.layersync_enabled and trainer.layersync_lambda > 0
    if key == "enable_group_offload":  # by leaves it does what it does inside the blocks
        return trainer.enable_group_offload and trainer.group_offload_type == "block_level"
    if key == "distillation_method":
        return trainer.distillation_method == "self_transcendence"
    return bool(getattr(trainer, key))


# What happens to a block that is given a KV cache, whoever made it.
NOT_RECOMPUTED = "blocks that are given a KV cache run without being recomputed"


def call_conditions(
    known: Iterable[Condition], arguments: Mapping[str, Any], model: Any
) -> list[Condition]:
    """Those of ``known`` whose argument is really given in a call of ``model``.

    What a call leaves out, the models of transformers take from their config.
    """
    found = []
    by_default = configs(model)
    for condition in known:
        value = arguments.get(condition.name)
        if is_cache(value):
            found.append(replace(condition, reason=NOT_RECOMPUTED))
        elif _given(value):
            found.append(condition)
        elif value is None and any(_given(getattr(c, condition.name, None)) for c in by_default):
            found.append(replace(condition, reason=f"by the model's config, {condition.reason}"))
    return found


def configs(model: Any) -> list[Any]:
    """The config of a transformers model and those of its parts; empty for other models."""
    config = getattr(model, "config", None)
    parts = getattr(type(config), "sub_configs", None)
    if parts is None:
        return []
    return [config, *(part for name in parts if (part := getattr(config, name, None)))]


def _given(value: Any) -> bool:
    if value is None or value is False:
        return False
    # An empty dict is there to be filled.
    return not (isinstance(value, (list, tuple, set)) and not value)


def is_cache(value: Any) -> bool:
    """Whether ``value`` is a KV cache that a block which is given it writes to."""
    return hasattr(value, "update") and hasattr(value, "get_seq_length")
