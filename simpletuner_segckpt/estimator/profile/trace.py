"""A whole step of the real model under its schedule, without memory: the check on ``predict.peak``.

The plugin itself is installed, so what runs is what would run on the card. It takes some ten
seconds for each schedule, where predicting takes a millisecond.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from ...config.settings import load_settings
from ...costs.ledger import Ledger
from ...engine.platform import Platform
from ...engine.watched import WatchedTensor
from ...install.apply import apply_on
from ...offload.device import Accelerator
from ...private.of_fake_tensors import backward, unset_fake_temporarily
from ..workload import build as building
from ..workload.workload import Workload, training_of
from .cuda import CudaSemantics
from .fake_tensors import explained, without_memory
from .known_values import KnownValues
from .profile import with_weights
from .recorder import loss_of
from .records import Profile

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
        without_memory(exact_lifetimes=moves),
        KnownValues(training_of(work.family).experts),
        explained(work.family.title),
    ):
        model = building.build(work)
        apply_on(_WithoutMemory(ledger), model, keys, family=work.family)
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
            backward([loss])
        empty = Profile((), {}, (), (), weights=0, trained=0, states=0)
        static = with_weights(empty, model, work)
    gradients = static.trained if static.accumulates else 0
    step = max(ledger.peak + gradients, static.trained + static.stepping)
    return static.weights + static.states + step


class _WithoutMemory(Platform):
    """Tensors without memory, on an accelerator whose bytes a ledger counts."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger

    def accelerator(self) -> Accelerator:
        return _Beside(self.ledger)

    def random_states(self) -> None:
        return None

    def is_ordinary(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor)

    def watched(
        self, plain: torch.Tensor, on_read: Callable[[str], None], on_look: Callable[[], None]
    ) -> WatchedTensor:
        """A stand-in: no alias of another class can be made of a tensor without memory.

        Whatever is asked of it is answered by ``plain``, so its own shape is of no account.
        """
        with unset_fake_temporarily():
            return WatchedTensor.standing_for(torch.empty(0), plain, on_read, on_look)


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
