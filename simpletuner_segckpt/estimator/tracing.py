"""A whole step of the real model under its schedule, without memory: the check on composing.

The plugin itself is installed, so what runs is what would run on the card. It takes some ten
seconds for each schedule, where composing takes a millisecond.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .. import links, recording
from ..accelerator import Accelerator
from ..install import apply
from ..links import Handed
from ..settings import load_settings
from . import building, fakes
from .cuda import CudaSemantics
from .ledger import Ledger
from .profiling import loss_of, with_weights
from .records import Profile
from .values import KnownValues
from .workload import Workload, training_of

KEY_OF_BUFFERS = "gradient_checkpointing_offload_pin_memory_max_buckets"


def trace(work: Workload, keys: Mapping[str, Any]) -> int:
    """The peak of one step in bytes, run in full with the ``gradient_checkpointing*`` keys.

    Raises ``ConfigError`` and ``WorkloadError``.
    """
    config = load_settings(keys).checkpointing
    moves = config.enabled and (config.offload_attention or config.inputs_on_cpu)
    if moves:
        keys = {**keys, KEY_OF_BUFFERS: 1_000_000}  # what is pageable would be looked at
    ledger = Ledger()
    cuda = CudaSemantics.of(work)
    with (
        fakes.without_memory(exact_lifetimes=moves),
        KnownValues(training_of(work.family).experts),
        fakes.explained(work.family.title),
        patch.object(Accelerator, "current", lambda: _Beside(ledger)),
        # The first forward watches what the loop does with what blocks return.
        patch.object(links, "is_ordinary", lambda leaf: isinstance(leaf, torch.Tensor)),
        patch.object(recording, "random_states", list),
        patch.object(Handed, "of", staticmethod(_handed)),
    ):
        model = building.build(work)
        apply(model, keys, family=work.family)
        with cuda:  # the first forward learns what the blocks hand on
            loss_of(model(**building.inputs(work)))
        cuda.forget()
        if work.accumulates:
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        with ledger, cuda:
            inputs = building.inputs(work)
            loss = loss_of(model(**inputs))
            del inputs
            cuda.forget()
            fakes.backward([loss])
        empty = Profile((), {}, (), (), weights=0, trained=0, states=0)
        static = with_weights(empty, model, work)
    gradients = static.trained if static.accumulates else 0
    step = max(ledger.peak + gradients, static.trained + static.stepping)
    return static.weights + static.states + step


def _handed(plain: torch.Tensor, on_read: Any, on_look: Any) -> Handed:
    """``Handed.of`` for a tensor without memory, of which no alias of another class can be made.

    Whatever is asked of the result is answered by ``plain``, so its own shape is of no account.
    """
    with unset_fake_temporarily():
        handed = torch.empty(0).as_subclass(Handed)
    handed.plain, handed.on_read, handed.on_look = plain, on_read, on_look
    return handed


class _Stream(nullcontext[None]):
    """A stream of an accelerator that does everything at once."""

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> None: ...


class _Beside(Accelerator):
    """The CPU as an accelerator: what is offloaded goes where the ledger does not look."""

    def __init__(self, ledger: Ledger):
        super().__init__("cpu")
        self.ledger = ledger

    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    def stream(self, device: torch.device) -> Any:
        return _Stream()

    def current_stream(self, device: torch.device) -> Any:
        return _Stream()

    def pinned(self, nbytes: int) -> torch.Tensor:
        with self.ledger.looking_away():
            return torch.empty(nbytes, dtype=torch.uint8)

    def use(self, tensor: torch.Tensor, stream: Any) -> None: ...
