"""Everything that forces per-block, each with its reason.

A condition is known from the trainer's config (before a model exists), from the model (hooks
that a segment would break) or only from the arguments of one call. The identity checks of
the engine are the net beneath; conditions are there to give the reason, and to catch what
identity cannot see.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .config_schema import TrainerKeys
from .report import Condition

if TYPE_CHECKING:
    import torch

# Arguments by which any model's loop captures, caches, routes or adds something per block.
CALL_CONDITIONS = tuple(
    Condition("call", name, reason)
    for name, reason in {
        "kv_cache": "every block reads and writes its own entry of the cache",
        "past_key_values": "every block reads and writes its own entry of the cache",
        "cache": "every block reads and writes its own entry of the cache",
        "use_cache": "every block writes its own entry of the cache",
        "output_hidden_states": "the state after each block is captured",
        "hidden_states_buffer": "the state after each block is captured",
        "controlnet_block_samples": "a ControlNet residual is added after a block",
        "controlnet_single_block_samples": "a ControlNet residual is added after a block",
        "block_controlnet_hidden_states": "a ControlNet residual is added after a block",
        "skip_layers": "some blocks are left out",
    }.items()
)


def config_conditions(trainer: TrainerKeys) -> list[Condition]:
    """The conditions that the trainer's own keys bring about."""
    facts = {
        "musubi_blocks_to_swap": (
            trainer.musubi_blocks_to_swap > 0,
            "block swapping moves each block's weights as that block runs",
        ),
        "crepa_enabled": (trainer.crepa_enabled, "CREPA captures hidden states after a block"),
        "layersync_enabled": (
            trainer.layersync_enabled and trainer.layersync_lambda > 0,
            "LayerSync captures hidden states after a block",
        ),
        "internal_guidance_enabled": (
            trainer.internal_guidance_enabled,
            "internal guidance captures hidden states after a block",
        ),
        "nextlat_enabled": (
            trainer.nextlat_enabled,
            "NextLat captures hidden states after a block",
        ),
        "distillation_method": (
            trainer.distillation_method == "self_transcendence",
            "self_transcendence captures hidden states after a block",
        ),
        "tread_config": (
            bool(trainer.tread_config),
            "TREAD routes tokens around chosen blocks",
        ),
        "controlnet": (trainer.controlnet, "a ControlNet residual is added after a block"),
        "max_grounding_entities": (
            trainer.max_grounding_entities > 0,
            "a grounding module runs after each block",
        ),
        "diffusion_blocks_config": (
            bool(trainer.diffusion_blocks_config),
            "only a slice of the blocks is trained at a time",
        ),
    }
    found = [Condition("config", key, reason) for key, (holds, reason) in facts.items() if holds]
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


def call_conditions(known: Iterable[Condition], arguments: Mapping[str, Any]) -> list[Condition]:
    """Those of ``known`` whose argument is really given in ``arguments``."""
    return [condition for condition in known if _given(arguments.get(condition.name))]


def _given(value: Any) -> bool:
    if value is None or value is False:
        return False
    return not (isinstance(value, (list, tuple, dict, set)) and not value)


def model_conditions(path: str, blocks: Iterable["torch.nn.Module"]) -> list[Condition]:
    """What other code has attached to the blocks of one stack and a segment would break.

    Recompute stops early, so the post-forward hook of a segment's last block does not fire
    while those of the blocks before it do: hooks that move weights are exact block by block
    and destroy them in wider segments.
    """
    for index, block in enumerate(blocks):
        name = _foreign_hook(block)
        if name:
            reason = f"block {index} of `{path}` carries it, and it must run once per block"
            return [Condition("model", name, reason, (path,))]
    return []


def _foreign_hook(block: Any) -> str | None:
    for kind, hooks in (
        ("forward pre-hook", block._forward_pre_hooks),
        ("forward hook", block._forward_hooks),
        ("backward pre-hook", block._backward_pre_hooks),
        ("backward hook", block._backward_hooks),
    ):
        for hook in hooks.values():
            origin = getattr(hook, "__self__", hook)
            module = getattr(origin, "__module__", None) or type(origin).__module__
            if not module.startswith("torch.distributed."):  # FSDP2's are made for recompute
                return f"{kind} {getattr(hook, '__qualname__', type(hook).__qualname__)}"
    if "_hf_hook" in block.__dict__:
        return f"accelerate hook {type(block._hf_hook).__name__}"
    if "_diffusers_hook" in block.__dict__:
        return f"diffusers hook {', '.join(block._diffusers_hook.hooks)}"
    return None
