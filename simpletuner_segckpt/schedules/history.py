"""What all training forwards of a model did."""

from collections import Counter
from dataclasses import dataclass, field

from .effect import Effect


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
    """

    trained: int = 0
    without_gradients: int = 0
    switched_off: int = 0
    compiled: bool = False
    past_the_hooks: int = 0
    ran: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)
    drawn: dict[str, str] = field(default_factory=dict)
    recomputed: bool = False

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
        return out
