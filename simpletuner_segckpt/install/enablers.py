"""The methods by which scripts switch checkpointing on, which then also install the schedule.

diffusers models are switched on by ``enable_gradient_checkpointing``, transformers models by
``activation_checkpointing_enable`` or its older name ``gradient_checkpointing_enable``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from diffusers import ModelMixin
from torch.nn import Module
from transformers import PreTrainedModel

from ..engine.entry import CheckpointEntry
from ..messages.log import logger
from .launched import Launched

ENABLERS = (
    (ModelMixin, "enable_gradient_checkpointing"),
    (PreTrainedModel, "activation_checkpointing_enable"),
    (PreTrainedModel, "gradient_checkpointing_enable"),
)


@contextmanager
def installed_when_enabled(launched: Launched) -> Iterator[None]:
    """Within this, a model whose checkpointing is enabled gets its schedule at that call."""
    before = {
        (owner, name): owner.__dict__[name] for owner, name in ENABLERS if name in owner.__dict__
    }
    try:
        for (owner, name), method in before.items():
            setattr(owner, name, _installing(method, launched))
        yield
    finally:
        for (owner, name), method in before.items():
            setattr(owner, name, method)


def _installing(enable: Callable[..., None], launched: Launched) -> Callable[..., None]:
    """``enable``, the method of a model, and the installation of its schedule after it."""

    @wraps(enable)
    def enable_and_install(model: Module, *args: Any, **kwargs: Any) -> None:
        enable(model, *args, **kwargs)
        logger.disabled = False  # a script's own logging may disable what it does not name
        entries = [
            given for given in (*args, *kwargs.values()) if isinstance(given, CheckpointEntry)
        ]
        if entries:  # apply() is at work
            launched.note(model, entries[0].report, entries[0].observed.overall)
        else:
            launched.install(model)

    return enable_and_install
