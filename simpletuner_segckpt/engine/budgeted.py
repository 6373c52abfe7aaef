"""``gradient_checkpointing_budget``: a plan for each shape of call, within what memory there is.

The first forward of a shape recomputes every block and is measured (``learning``). From the second
on its blocks run in the ways that are fastest within the budget (``costs.choose``), where what is
alive when the forward begins counts, whoever made it. A shape whose sizes lie on the line between
those of two others has their costs in proportion, and needs no measuring: bytes grow in proportion
to the number of tokens, or faster, so that the line lies above them.

On an accelerator the allocator's counter corrects the prediction, where a step has raised it. When
memory runs out all the same, the shape recomputes everything from then on, and more is left free.
"""

import weakref
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import Module

from ..config_schema.memory import MemoryBudget
from ..costs.choose import Choice, all_recomputed, fastest
from ..costs.ledger import tensors_in
from ..costs.step import StepCosts
from ..costs.treatments import COVERED, schedule_of
from ..messages.log import Messages
from ..messages.units import readable
from ..offload.memory import Memory
from ..private.of_torch import current_backward, when_backward_ends
from ..schedules.effect import Within
from ..schedules.schedule import Schedule
from .call_shapes import MOST_SHAPES
from .call_sizes import Sizes, share_between
from .learning import KnownKinds, Learned, interpolated
from .recent import Recent

KEY = "gradient_checkpointing_budget"

# Of the budget: how far what is alive may move before ways are chosen anew; what is left free
# more each time that memory ran out.
TOLERANCE, STEP_BACK = 1 / 200, 1 / 20

# Where it takes long to ask what is in use: how often that is done of a shape before it is done
# once in so many forwards.
ASKED_AT_FIRST, ASKED_LATER = 3, 16

# Of the budget: left free for what is not measured, such as gradients that meet between blocks.
SLACK = 1 / 50

# Steps that tell how many forwards come before one backward.
LATEST_STEPS = 4


@dataclass(slots=True)
class _Shape:
    """What is known of a shape. correction: bytes that a step took more than was predicted.

    failed: whether memory ran out in it. used: what was in use when that was asked last, after how
    many forwards.
    """

    learned: Learned
    correction: int = 0
    failed: bool = False
    forwards: int = 0
    used: int = 0
    choice: Choice | None = None
    chosen_for: tuple[int, int, bool] = (0, 0, False)


class Plan:
    """How the blocks of one forward run.

    within: what is told of it. choice: None where every block is recomputed, and measured. kept:
    bytes that it keeps for backward.
    """

    def __init__(self, within: Within, choice: Choice | None = None):
        self.within = within
        self.choice = choice
        self.kept = 0
        self.treatments: dict[str, dict[int, str]] = {}  # by path and block

    @property
    def learning(self) -> bool:
        """Whether every block is recomputed, and measured."""
        return self.choice is None

    def schedule(self, path: str, blocks: int) -> Schedule:
        """That of the stack at ``path``. What was not measured is recomputed."""
        chosen = self.treatments.get(path, {})
        made = schedule_of([chosen.get(block, COVERED) for block in range(blocks)])
        if blocks:
            self.within.plan[path] = made
        return made


class _Backward:
    """Whether the backward of a forward has begun, and whether it is over."""

    def __init__(self, sizes: Sizes, plan: Plan, high: int | None):
        self.sizes = sizes
        self.plan = plan
        self.high = high
        self.begun = False
        self.over = False


class Budgeted:
    """The plans of one model, from forward to forward."""

    def __init__(self, asked: MemoryBudget, memory: Memory, messages: Messages):
        self.asked = asked
        self.memory = memory
        self.messages = messages
        self.kinds = KnownKinds()
        self.margin = 0
        self._over_said = False
        self._shapes: Recent[Sizes, _Shape] = Recent(MOST_SHAPES)
        self._forget()

    def _forget(self) -> None:
        """What a copy does not have of the original."""
        self._limit: int | None = None
        self._waiting: list[weakref.ref[_Backward]] = []
        self._together: deque[int] = deque([1], maxlen=LATEST_STEPS)
        self._failures: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        gone = ("_limit", "_waiting", "_together", "_failures")
        return {key: value for key, value in self.__dict__.items() if key not in gone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def limit(self) -> int:
        """Bytes that a step may take."""
        if self._limit is None:
            self._limit = self.asked.in_bytes(self.memory.total())
        return int(self._limit * (1 - SLACK)) - self.margin

    def plan(self, module: Module, sizes: Sizes) -> Plan:
        """For a forward of ``module`` that begins."""
        waiting = self._before_backward()
        self._together[-1] = max(self._together[-1], len(waiting) + 1)
        if not waiting:
            self._together.append(1)
        shape = self._known(sizes)
        if shape is None:
            return Plan(Within(str(self.asked), str(sizes), self.limit, learning=True))
        used = self._used(shape) + (
            0 if self.memory.complete else sum(b.plan.kept for b in waiting)
        )
        shape.forwards += 1
        free = self.limit - used
        # Forwards that wait for their backward together share what there is.
        left = max(1, max(self._together) - len(waiting))
        costs, choice = self._choose(shape, module, used, used + free // left)
        plan = Plan(Within(str(self.asked), str(sizes), self.limit, choice.peak), choice)
        for place, way in zip(shape.learned.places, choice.ways, strict=True):
            path, block = place
            plan.treatments.setdefault(path, {})[block] = way.treatment
        plan.kept = costs.rest - used + sum(way.kept for way in choice.ways)
        most = StepCosts.seconds(costs.all_recomputed)
        plan.within.share = choice.seconds / most if most else 0.0
        plan.within.note = shape.learned.unmeasured
        return plan

    def _known(self, sizes: Sizes) -> _Shape | None:
        found = self._shapes.get(sizes)
        if found is None:
            found = self._in_between(sizes)
            if found is not None:
                self._shapes.put(sizes, found)
        return found

    def _in_between(self, sizes: Sizes) -> _Shape | None:
        """From two shapes that lie closest around this one, or one that has as many elements."""
        alike = [(s, shape) for s, shape in self._shapes.items() if s.fixed == sizes.fixed]
        own = sum(sizes.elements)
        below = [pair for pair in alike if sum(pair[0].elements) <= own]
        above = [pair for pair in alike if sum(pair[0].elements) >= own]
        for low in sorted(below, key=lambda pair: -sum(pair[0].elements)):
            for high in sorted(above, key=lambda pair: sum(pair[0].elements)):
                share = share_between(sizes, low[0], high[0])
                if share is None:
                    continue
                learned = interpolated(share, low[1].learned, high[1].learned)
                if learned is not None:
                    correction = max(low[1].correction, high[1].correction)
                    return _Shape(learned, correction, low[1].failed or high[1].failed)
        return None

    def _used(self, shape: _Shape) -> int:
        often = not self.memory.slow or shape.forwards < ASKED_AT_FIRST
        if often or shape.forwards % ASKED_LATER == 0:
            shape.used = self.memory.in_use()
        return shape.used

    def _choose(
        self, shape: _Shape, module: Module, used: int, limit: int
    ) -> tuple[StepCosts, Choice]:
        """The costs of the step as it begins, and the ways of its blocks."""
        fresh = next((p.grad is None for p in module.parameters() if p.requires_grad), False)
        costs = replace(shape.learned.costs, alive=used + shape.correction)
        if not fresh:  # gradients are there already, and are added to
            blocks = tuple(replace(block, trained=0) for block in costs.blocks)
            costs = replace(costs, blocks=blocks, trained=0)
        before = shape.chosen_for
        moved = abs(used + shape.correction - before[0]) + abs(limit - before[1])
        known = shape.choice
        if known and before[2] == fresh and moved <= TOLERANCE * limit and not shape.failed:
            peak = costs.peak(known.ways)
            if (peak <= limit) == known.fits:
                return costs, replace(known, peak=peak)
        choice = (all_recomputed if shape.failed else fastest)(costs, limit)
        shape.choice, shape.chosen_for = choice, (used + shape.correction, limit, fresh)
        if choice.peak > self.limit:
            self._say_over(choice.peak)
        return costs, choice

    def learned(self, sizes: Sizes, plan: Plan, learned: Learned) -> None:
        """A forward of a new shape is over and was measured."""
        plan.kept = learned.costs.rest + sum(w.kept for w in learned.costs.all_recomputed)
        plan.within.note = learned.unmeasured
        self._shapes.put(sizes, _Shape(learned))

    # From the end of a forward to that of its backward.

    def returned(self, sizes: Sizes, plan: Plan, output: Any) -> None:
        """A forward has returned ``output``, whose backward is to come."""
        outputs = [t for t in tensors_in(output) if t.grad_fn is not None]
        if not outputs:
            return
        backward = _Backward(sizes, plan, self.memory.peak())
        reference = weakref.ref(backward)
        self._waiting.append(reference)
        for tensor in outputs:
            # The graph of the forward holds this, and lets it go when it is freed itself.
            node: Any = tensor.grad_fn
            node.metadata[KEY] = backward
            tensor.register_hook(_Begins(reference, self))

    def _before_backward(self) -> list[_Backward]:
        """Those whose backward is to come, or runs; and what is seen of any that failed."""
        failures = self.memory.failures()
        ran_out = self._failures is not None and failures > self._failures
        self._failures = failures
        waiting = []
        for reference in self._waiting:
            backward = reference()
            if backward is None or backward.over:
                continue
            if backward.begun and current_backward() is None:
                backward.over = True  # it has raised
                if ran_out:
                    self.ran_out(backward.sizes, None)
                continue
            waiting.append(backward)
        self._waiting = [weakref.ref(backward) for backward in waiting]
        return waiting

    def begins(self, backward: _Backward) -> None:
        """Its first gradient is there."""
        if not backward.begun:
            backward.begun = True
            reference = weakref.ref(backward)
            when_backward_ends(lambda: self._ended(reference))

    def _ended(self, reference: "weakref.ref[_Backward]") -> None:
        backward = reference()
        if backward is None or backward.over:
            return
        backward.over = True
        high = self.memory.peak()
        if high is None or backward.high is None or high <= backward.high:
            return  # an earlier step has taken more
        plan, shape = backward.plan, self._shapes.get(backward.sizes)
        plan.within.measured = high
        if shape is not None and plan.choice is not None:
            shape.correction = max(0, shape.correction + high - plan.choice.peak)

    # When there is not enough.

    def ran_out(self, sizes: Sizes, error: BaseException | None) -> None:
        """Memory ran out in a forward or a backward of this shape."""
        shape = self._shapes.get(sizes)
        if shape is not None and not shape.failed:
            shape.failed = True
            self.margin += int(self.limit * STEP_BACK)
        said = (
            f"`{KEY}` is {self.asked}, and memory ran out in a call with {sizes}: calls like it "
            f"recompute every block from now on, and {readable(self.margin)} of the budget are "
            "left free; write a smaller one"
        )
        self.messages.warn("out-of-memory", said)
        if error is not None:
            error.add_note(said)

    def _say_over(self, peak: int) -> None:
        if not self._over_said:
            self._over_said = True
            self.messages.warn(
                "over-budget",
                f"`{KEY}` is {self.asked}, which is less than a step takes in which every block is "
                f"recomputed: about {readable(peak)}. Everything is recomputed, and training goes "
                "on",
            )


class _Begins:
    """A hook on what a forward returned: its backward begins. Keeps neither alive."""

    def __init__(self, backward: "weakref.ref[_Backward]", budget: Budgeted):
        self.backward = backward
        self.budget = weakref.ref(budget)

    def __call__(self, gradient: Tensor) -> None:
        backward, budget = self.backward(), self.budget()
        if backward is not None and budget is not None:
            budget.begins(backward)
