"""One training forward within a memory budget: with its plan, or measured for the next ones."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module

from ..offload.saved_tensors import Offload
from ..schedules.conditions import Condition
from ..schedules.effect import Effect
from ..schedules.report import StackReport
from .budgeted import Budgeted
from .call_sizes import sizes_of
from .forward import Forward
from .learning import Learner
from .runs import StackRun, UnitsRun


class WithinBudget:
    """The plan of a forward of ``module``, called with ``arguments``, and who made it."""

    def __init__(
        self, budget: Budgeted, module: Module, arguments: Mapping[str, Any], inputs_on_cpu: bool
    ):
        self.budget = budget
        self.sizes = sizes_of(module, arguments)
        self.plan = budget.plan(module, self.sizes)
        self.learner = None
        if self.plan.learning:
            exact = budget.memory.exact
            self.learner = Learner(module, arguments, budget.kinds, exact, inputs_on_cpu)

    def planned(self, stack: StackReport) -> StackReport:
        """The same with the schedule of this forward."""
        return replace(stack, schedule=self.plan.schedule(stack.path, stack.blocks))

    def around(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What to enter around a checkpoint call and its recompute."""
        return nullcontext(), _MemoryMayRunOut(self)

    def ran_out(self, error: BaseException | None) -> None:
        """Whatever was raised: was it that there is no memory?"""
        if isinstance(error, torch.OutOfMemoryError):
            self.budget.ran_out(self.sizes, error)

    def returned(self, output: Any) -> None:
        """The forward is over."""
        if self.learner is not None:
            self.budget.learned(self.sizes, self.plan, self.learner.finish(output))
            self.learner = None
        self.budget.returned(self.sizes, self.plan, output)


class _MemoryMayRunOut(nullcontext[None]):
    """Around a recompute, which may be entered once for every backward."""

    def __init__(self, within: WithinBudget):
        super().__init__()
        self.within = within

    def __exit__(self, *error: Any) -> None:
        self.within.ran_out(error[1])


class BudgetedForward(Forward):
    """A forward whose blocks run as ``within`` says."""

    def __init__(
        self,
        runs: Iterable[StackRun],
        units: UnitsRun,
        conditions: Sequence[Condition],
        inside_checkpoint: bool,
        offload: Offload | None,
        within: WithinBudget,
    ):
        super().__init__(runs, units, conditions, inside_checkpoint, offload)
        self.within = within

    def _run(self, run: StackRun, index: int, block: Module, args: tuple, kwargs: dict) -> Any:
        learner = self.within.learner
        if learner is not None:
            learner.calls(run, index, block, args, kwargs)
        result = super()._run(run, index, block, args, kwargs)
        if learner is not None:
            learner.returned(result)
        return result

    def returned(self, output: Any) -> None:
        self.within.returned(output)

    def abandon(self) -> None:
        super().abandon()
        self.within.learner = None
        self.within.ran_out(sys.exc_info()[1])  # hooks of a model are called with it at hand

    def effect(self) -> Effect:
        return replace(super().effect(), within=self.within.plan.within)
