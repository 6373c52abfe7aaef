"""One training forward of a model: which run answers the call of a block."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch.nn import Module

from ..model.wrappers import unwrapped
from ..offload.saved_tensors import Offload
from ..schedules.conditions import Condition
from ..schedules.effect import Effect
from .runs import StackRun, UnitsRun
from .watched import plain_arguments, report_use


class Forward:
    """One training forward of a model: sends each block call to the run of its stack."""

    def __init__(
        self,
        runs: Iterable[StackRun],
        units: UnitsRun,
        conditions: Sequence[Condition] = (),
        inside_checkpoint: bool = False,
        offload: Offload | None = None,
    ):
        self.runs = tuple(runs)
        self.units = units
        self.conditions = tuple(conditions)
        self.inside_checkpoint = inside_checkpoint  # of somebody else, around the whole model
        self.offload = offload
        self._hands_out = any(type(run) is not StackRun for run in self.runs)
        self._places: dict[int, tuple[StackRun, int]] = {}
        for run in self.runs:
            for index, block in enumerate(run.stack.blocks):
                # Twice: the loop may go over the list as it was before its blocks were compiled.
                self._places[id(block)] = (run, index)
                self._places[id(unwrapped(block))] = (run, index)
        self.reached: list[StackRun] = []  # in execution order
        self._last: StackRun | None = None

    def call_block(self, block: Module, args: tuple, kwargs: dict) -> Any:
        """Answer the loop's call of ``block``; a block of no stack is a unit."""
        run, index = self._places.get(id(block), (self.units, -1))
        if self._last is not None and self._last is not run:
            self._last.between(f"a {type(block).__name__} of another stack")
        if self._last is not run and run not in self.reached:
            self.reached.append(run)
        self._last = run
        if not self._hands_out or type(run) not in (StackRun, UnitsRun):
            return self._run(run, index, block, args, kwargs)
        report_use((args, tuple(kwargs.values())), f"argument of a {type(block).__name__}")
        with plain_arguments(args, kwargs) as (args, kwargs):
            return self._run(run, index, block, args, kwargs)

    def _run(self, run: StackRun, index: int, block: Module, args: tuple, kwargs: dict) -> Any:
        if run is self.units:
            return self.units.run_unit(block, args, kwargs)
        return run.call_block(index, args, kwargs)

    def returned(self, output: Any) -> None:
        """The model's forward is over and has returned ``output``."""

    def finish(self) -> None:
        """The model's forward is over. Raises ``SegmentBroken``, or as ``Offload.finish``."""
        try:
            for run in self.runs:
                run.finish()
        finally:
            if self.offload is not None:
                self.offload.finish()

    def abandon(self) -> None:
        """The model's forward raised: let go of every tensor."""
        if self.offload is not None:
            self.offload.let_go()
        for run in self.runs:
            run.abandon()

    def effect(self) -> Effect:
        """What ran, stack by stack in execution order."""
        runs = [*self.reached, *(run for run in self.runs if run not in self.reached)]
        effects = tuple(run.effect() for run in runs)
        if self.offload is None:
            return Effect(effects, self.conditions)
        held = self.offload.cpu_bytes, self.offload.pinned_bytes
        return Effect(effects, self.conditions, *held)
