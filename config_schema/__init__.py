"""Pydantic models of the config keys, and the JSON Schema generated from them."""

from .keys import (
    CHECKPOINTING_KEYS,
    OWN_KEYS,
    PREFIX,
    TRAINER_KEYS,
    CheckpointingConfig,
    TrainerKeys,
)
from .memory import MemoryBudget
from .spelling import describe, is_unset, switch, word
from .training import TrainingKeys

__all__ = [
    "CHECKPOINTING_KEYS",
    "OWN_KEYS",
    "PREFIX",
    "TRAINER_KEYS",
    "CheckpointingConfig",
    "MemoryBudget",
    "TrainerKeys",
    "TrainingKeys",
    "describe",
    "is_unset",
    "switch",
    "word",
]
