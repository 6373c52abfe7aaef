"""What all training forwards of a model did."""

from collections import Counter
from dataclasses import dataclass, field

from .effect import Effect, Within

# Shapes of call that are told apart; the one that was not met for longest is forgotten.
MOST_SHAPES = 64


@dataclass(slots=True)
class ShapeHistory:
    """What a memory budget made of calls of one shape.

    steps: how many there were. learned: in how many of them everything was recomputed, to be
    measured. last: of the last one.
    """

    last: Within
    steps: int = 0
    learned: int = 0

    def lines(self, sizes: str) -> list[str]:
        steps = f"{self.steps} step" + "s" * (self.steps != 1)
        learned = f", {self.learned} of them to learn" if self.learned else ""
        plan = (f"    {line}" for line in self.last.drawn)
        return [f"  {sizes}: {steps}{learned}; {self.last.told}", *plan]


@dataclass(slots=True)
class History:
    """What ran since the schedule was installed, forward by forward.

    trained: training forwards that were observed to their end.
    without_gradients: forwards under ``no_grad`` or ``inference_mode``.
    switched_off: forwards with gradients while checkpointing was off on the model.
    compiled: whether a training forward ran in a graph that was compiled as a whole, unobserved.
    past_the_hooks: blocks that were recomputed although no forward of the model was seen to begin.
    ran: by stack path, in how many training forwards it ran under which strategy, and why.
    drawn: by stack path, what ran last: ``[0 1] 2 3`` and so on.
    recomputed: whether any block was recomputed in any of them.
    shapes: within a memory budget, what it made of each shape of call. learned: training forwards
    in which everything was recomputed, to measure a shape.
    """

    trained: int = 0
    without_gradients: int = 0
    switched_off: int = 0
    compiled: bool = False
    past_the_hooks: int = 0
    ran: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)
    drawn: dict[str, str] = field(default_factory=dict)
    recomputed: bool = False
    shapes: dict[str, ShapeHistory] = field(default_factory=dict)
    learned: int = 0

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def add(self, effect: Effect) -> None:
        """One more training forward."""
        self.trained += 1
        for stack in effect.stacks:
            if stack.spans:
                self.ran.setdefault(stack.path, Counter())[stack.strategy, stack.reason] += 1
                self.drawn[stack.path] = stack.drawing
            self.recomputed = self.recomputed or bool(stack.segments)
        if effect.within is not None:
            self._add_shape(effect.within)

    def _add_shape(self, within: Within) -> None:
        shape = self.shapes.pop(within.sizes, None) or ShapeHistory(within)
        shape.last = within
        shape.steps += 1
        shape.learned += within.learning
        self.learned += within.learning
        self.shapes[within.sizes] = shape  # those met last at the end
        while len(self.shapes) > MOST_SHAPES:
            del self.shapes[next(iter(self.shapes))]

    def lines(self) -> list[str]:
        """How many forwards of each kind; for each stack how often it ran how, and the last."""
        counts = {
            "training": self.trained,
            "without gradients": self.without_gradients,
            "with checkpointing switched off": self.switched_off,
        }
        told = [f"{count} {what}" for what, count in counts.items() if count]
        out = [f"forwards: {', '.join(told) or 'none observed'}"]
        if self.compiled:
            out.append("training in a graph compiled as a whole: per-block, not observed")
        if self.past_the_hooks:
            out.append(f"past the model's forward: {self.past_the_hooks} blocks, per-block")
        for path, counted in self.ran.items():
            told = [
                f"{strategy} in {count}{f' ({reason})' if reason else ''}"
                for (strategy, reason), count in counted.most_common()
            ]
            out += [f"{path}: {', '.join(told)}", f"  {self.drawn[path]}"]
        if self.shapes:
            asked = next(reversed(self.shapes.values())).last.asked
            out.append(f"within {asked}, {self.learned} of the steps to learn shapes:")
            out += [line for sizes, shape in self.shapes.items() for line in shape.lines(sizes)]
        return out
