"""A training script under a config: its models get the schedule.

A model gets it when the script enables its checkpointing (``enablers``), or in its first training
forward (``noticing``); checkpoint calls that the script makes itself around blocks of such a model
give way to it (``own_calls``). All of that lasts as long as :func:`scheduled`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..config.settings import Settings
from ..families.registry import FamilyRegistry
from .enablers import installed_when_enabled
from .launched import Launched
from .noticing import noticing
from .own_calls import plain_around_blocks


@contextmanager
def scheduled(
    settings: Settings,
    registry: FamilyRegistry,
    *,
    text_encoders: bool = False,
    asked_for: str = "",
    native: bool = False,
) -> Iterator[Launched]:
    """Within this, every model that trains under checkpointing gets the schedule of ``settings``.

    diffusers models, and transformers models that a family describes, have the config's keys.
    Other transformers models, such as text encoders, recompute every block by itself, unless
    ``text_encoders``. Models of a class that a family names, and of the class ``asked_for``, by its
    dotted path, need not be enabled. With ``native``, classes that have setters for the keys carry
    them out themselves.

    A model that cannot have its schedule is left to its own library; when it is the one that the
    config is about, the call that enables it, or its first training forward, raises ``Refused``.
    """
    launched = Launched(settings, registry, text_encoders, asked_for, native)
    with ExitStack() as lasting:
        lasting.enter_context(installed_when_enabled(launched))
        if settings.checkpointing.enabled:
            hook = noticing(launched.wants, launched.notice, launched.is_served)
            launched.installed = lasting.enter_context(hook).look_for
            lasting.enter_context(plain_around_blocks())
        yield launched
