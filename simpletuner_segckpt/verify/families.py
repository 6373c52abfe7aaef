"""Prove families on the versions that are installed.

Each tiny model of a family file is built from its class and trained for a step under several
schedules, and with its feed-forwards recomputed alone or kept. A family passes when every gradient
is bit-equal to the un-checkpointed step, every block ran as often as its schedule says, and what
passes between the blocks and stands inside them is what the file says.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal

from torch.nn import Module

from ..families.schema import Family, Stack, Tiny
from ..install.apply import Installation, apply
from ..model.stacks import blocks_of, matching
from ..model.tiny import is_before, load_class, make_inputs, make_model, missing_needs
from ..schedules.effect import shortfalls
from ..schedules.report import UNITS
from .step import Step, counted, step

Verdict = Literal["segmented", "per-block", "not installed", "not proven", "drifted"]


# Interval and stride of the schedules that are tried.
SCHEDULES = ((1, None), (2, None), (3, None), (2, 4), (1, 3), (9, None))


@dataclass
class Check:
    """What came of checking one class of a family.

    ``details`` says what has changed, or why the class could not be checked.
    """

    family: Family
    model_class: str
    verdict: Verdict
    details: list[str] = field(default_factory=list)


def check_family(family: Family) -> Iterator[Check]:
    """Check every class of a family; those without a tiny model only for being there."""
    for tiny in family.tiny:
        yield check_tiny(family, tiny)
    covered = {tiny.model_class for tiny in family.tiny}
    for path in family.classes:
        if path not in covered:
            yield _without_tiny(family, path)


def check_tiny(family: Family, tiny: Tiny) -> Check:
    """Prove one class on its tiny model. Never raises for what is wrong with the class."""
    check = Check(family, tiny.model_class, "not installed")
    missing = missing_needs(tiny)
    if missing:
        check.details = [f"needs {need}" for need in missing]
        return check
    try:
        load_class(tiny.model_class, family.since)
    except ImportError as error:
        check.details = [str(error)]
        return check
    try:
        model = make_model(tiny).train()
        inputs = make_inputs(tiny)
        expected = step(model, inputs)
    except Exception as error:  # whatever a changed class does with old arguments
        check.verdict = "drifted"
        check.details = [f"the tiny model does not run: {type(error).__name__}: {error}"]
        return check
    behaviour = _Behaviour()
    try:
        check.details = [*_form(family, model)]
        _behave(family, model, inputs, expected, behaviour)
    except Exception as error:
        check.details.append(f"training under a schedule raises {type(error).__name__}: {error}")
    check.details += behaviour.differences
    check.verdict = "drifted" if check.details else behaviour.strategy
    return check


def _without_tiny(family: Family, path: str) -> Check:
    try:
        load_class(path)
    except ImportError:
        return Check(family, path, "not installed", ["described from facts, not proven"])
    return Check(family, path, "not proven", ["installed, but the file has no tiny model"])


def _form(family: Family, model: Module) -> Iterator[str]:
    """What the file says of the class, against the class."""
    parameters = signature(type(model).forward).parameters
    for condition in family.conditions:
        if condition.argument not in parameters and not is_before(condition.since):
            yield f"forward has no argument `{condition.argument}`"
    for stack in family.stacks:
        paths = [path for path in matching(model, stack.path) if blocks_of(model, path)]
        if not paths and not stack.optional:
            yield f"there is no list `{stack.path}`"
        for path in paths:
            yield from _form_of_stack(stack, path, model)
    patterns = [path for unit in family.units for path in matching(model, unit)]
    if family.units and not patterns:
        yield f"no module matches the units {', '.join(family.units)}"


def _form_of_stack(stack: Stack, path: str, model: Module) -> Iterator[str]:
    blocks = blocks_of(model, path)
    kinds = sorted({type(block).__name__ for block in blocks})
    if stack.block not in kinds:
        yield f"`{path}` holds {', '.join(kinds)}, not {stack.block}"
    for part in (*stack.projections, *stack.attention):
        if not all(hasattr(block, part.partition(".")[0]) for block in blocks):
            yield f"the blocks of `{path}` have no `{part}`"
    for name in stack.carried:
        if not any(name in signature(type(block).forward).parameters for block in blocks):
            yield f"the blocks of `{path}` take no `{name}`"
    count: object = stack.count
    if isinstance(count, str) and count:
        count = getattr(getattr(model, "config", None), count, None)
    if stack.count and (len(count) if isinstance(count, (list, tuple)) else count) != len(blocks):
        yield f"`{stack.count}` does not give the number of blocks in `{path}`"


@dataclass
class _Behaviour:
    """What differs between training with the family's schedules and without."""

    differences: list[str] = field(default_factory=list)
    strategy: Literal["segmented", "per-block"] = "per-block"  # segmented if any segment was wide

    def add(self, found: Iterable[str]) -> None:
        self.differences += [text for text in found if text not in self.differences]


def _behave(
    family: Family,
    model: Module,
    inputs: Mapping[str, Any],
    expected: Step,
    behaviour: _Behaviour,
) -> None:
    for config in _configs(family):
        installation = apply(model, config, family=family)
        lists = [s.path for s in installation.report.stacks if s.path != UNITS]
        try:
            for _ in range(2):  # the first step records, the second one forms segments
                with counted(model, lists) as calls:
                    got = step(model, inputs)
                behaviour.add(_differences(got, expected, calls, installation))
            effect = installation.effect
            if effect and any(stack.strategy == "segmented" for stack in effect.stacks):
                behaviour.strategy = "segmented"
            behaviour.add(_links(family, installation))
            behaviour.add(_parts(installation))
        finally:
            installation.remove()


def _configs(family: Family) -> Iterator[dict[str, Any]]:
    """What is tried: schedules, and each part of the blocks that the file names."""
    for interval, stride in SCHEDULES:
        yield {
            "gradient_checkpointing_interval": interval,
            "gradient_checkpointing_segment_stride": stride,
        }
    if any(stack.feed_forward for stack in family.stacks):
        yield {"gradient_checkpointing_backend": "torch-ffn"}
    if any(stack.projections for stack in family.stacks):
        yield {"gradient_checkpointing_keep": "ffn"}


def _differences(
    got: Step, expected: Step, calls: Mapping[str, Counter[int]], installation: Installation
) -> Iterator[str]:
    for difference in got.differences(expected)[:3]:
        yield f"checkpointing changes {difference}"
    for stack in installation.report.stacks:
        if stack.path == UNITS:
            continue
        twice = () if stack.feed_forward else stack.covered
        planned = Counter(dict.fromkeys(range(stack.blocks), 1) | dict.fromkeys(twice, 2))
        if calls[stack.path] != planned:
            yield f"the blocks of `{stack.path}` do not run as often as the schedule says"


def _links(family: Family, installation: Installation) -> Iterator[str]:
    """Stacks that the file calls segmented and that were not, each with the reason."""
    effect = installation.effect
    for path, drift in installation.drifts.items():
        yield f"`{path}`: {drift}"
    for planned in installation.report.stacks:
        stack = family.stack_at(planned.path)
        if stack is None or effect is None or stack.per_block or stack.cut:
            continue
        drifted = planned.path in installation.drifts
        if not drifted and effect[planned.path].segments != planned.segments:
            yield f"`{planned.path}`: {effect[planned.path].reason}"


def _parts(installation: Installation) -> Iterator[str]:
    """Parts of blocks that the file names and that did not do what such a part does."""
    effect = installation.effect
    for planned in installation.report.stacks:
        if effect and planned.path != UNITS:
            for shortfall in shortfalls(planned, effect[planned.path]):
                yield f"`{planned.path}`: {shortfall}"
