"""What a trainer's ``deepspeed_config`` says that a schedule depends on: the ZeRO stage."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config_schema import CheckpointingConfig, TrainerKeys, is_unset
from ..messages.findings import Finding
from .file import ConfigFile

KEY = "deepspeed_config"


def findings_of(
    file: ConfigFile, key: str, trainer: TrainerKeys, config: CheckpointingConfig
) -> Iterator[Finding]:
    """What is lost under the ZeRO stage of a file, where ``key`` is, or is not known of it."""
    if not config.enabled or config.feed_forward_only:
        return
    try:
        stage = zero_stage(trainer.deepspeed_config)
    except ValueError as error:
        message = f"is not read, since {error}: should it have ZeRO stage 3, no segments are formed"
        yield file.finding("wrong-type", message, key, "warning")
        return
    if stage == 3 and config.interval > 1:
        message = (
            "has ZeRO stage 3, whose hooks gather and release the weights of every module, so "
            "no segments are formed: the covered blocks are recomputed one by one; with stage 2 "
            "they run in segments"
        )
        yield file.finding("unsupported-option", message, key, "warning")


def zero_stage(config: Any) -> int | None:
    """The stage in a DeepSpeed config, or in accelerate's words for one; None if it has none.

    ``config`` is a mapping, or the path of a JSON file that holds one. Raises ``ValueError`` when
    it is neither.
    """
    if is_unset(config) or config is False:
        return None
    if isinstance(config, str):
        try:
            config = json.loads(Path(config).read_bytes())
        except (ValueError, RecursionError, OSError):
            raise ValueError("it is neither JSON nor the path of a JSON file") from None
    if not isinstance(config, dict):
        raise ValueError("it holds no object")
    if isinstance(path := config.get("deepspeed_config_file"), str):
        return zero_stage(path)
    section = config.get("zero_optimization")
    stage = section.get("stage") if isinstance(section, dict) else config.get("zero_stage")
    return int(str(stage)) if str(stage) in ("0", "1", "2", "3") else None
