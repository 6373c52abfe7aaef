"""Errors of torch from inside a recompute, told with the blocks that they are about."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module
from torch.utils.checkpoint import CheckpointError

from ..messages.errors import RecomputeError
from ..model.stacks import all_modules
from ..model.wrappers import is_compiled
from .contexts import Pack, Unpack, within_innermost

_IN_PLACE = "modified by an inplace operation"


@dataclass(frozen=True, slots=True)
class Place:
    """Which blocks of which stack run under one checkpoint call. schedule: that of the stack."""

    path: str
    blocks: range
    schedule: Any

    def __str__(self) -> str:
        first, last = self.blocks[0], self.blocks[-1]
        which = f"block {first}" if first == last else f"blocks {first} to {last}"
        return f"{which} of `{self.path}` (schedule {self.schedule})"


def explained(modules: Sequence[Module], place: Place | None) -> AbstractContextManager[Any]:
    """Within a checkpoint call: when torch cannot use its recompute, that is told as ours.

    Raises, from where backward needs what was recomputed, ``RecomputeError``.
    """

    def wrap(pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
        return pack, _Explained(unpack, modules, place)

    return within_innermost(wrap) or nullcontext()


class _Explained:
    """Takes back what a checkpoint call saved, as ``unpack`` does."""

    def __init__(self, unpack: Unpack, modules: Sequence[Module], place: Place | None):
        self.unpack = unpack
        self.modules = modules
        self.place = place

    def __call__(self, saved: Any) -> Any:
        try:
            return self.unpack(saved)
        except RecomputeError:
            raise
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            known = isinstance(error, CheckpointError) or _IN_PLACE in str(error)
            if not known and not _are_there(self.modules):
                known = True
            if not known:
                error.add_note(f"raised while {self._where} was recomputed in backward")
                raise
            torch_says = str(error).strip().splitlines()[0]
            raise RecomputeError(
                f"{self._where} cannot be recomputed as its forward ran: {self._cause(error)} "
                f"(torch: {torch_says})"
            ) from error

    @property
    def _where(self) -> str:
        return str(self.place or f"a {type(self.modules[0]).__name__}")

    def _cause(self, error: RuntimeError) -> str:
        if not _are_there(self.modules):
            return (
                "its weights were moved or released by other code after the forward, and are not "
                "back for the recompute"
            )
        if _IN_PLACE in str(error):
            return "what entered it was written in place between its forward and its backward"
        if any(is_compiled(module) for module in self.modules):
            return "it is compiled, and was compiled anew in between, or it takes another way"
        return (
            "it takes another way when it is repeated: time, a counter, random numbers that are "
            "not those of torch, Python or NumPy, or a choice among values (a router, top-k) that "
            "flips by one unit of rounding"
        )


def _are_there(modules: Sequence[Module]) -> bool:
    """Whether the weights of ``modules`` have memory, all on one device."""
    parameters = [p for m in all_modules(modules) for p in m._parameters.values() if p is not None]
    plain = [p for p in parameters if type(p) is torch.nn.Parameter]
    there = all(p.untyped_storage().nbytes() >= p.numel() * p.element_size() for p in plain)
    return there and len({p.device for p in plain}) <= 1
