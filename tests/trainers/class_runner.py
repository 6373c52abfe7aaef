"""Model classes of trainers, built small: the keys on each, beside its own way with them.

A table of rows is given to ``run``; nothing here knows a trainer. Of every row, with the same
weights in one process: whether a step under each schedule equals the plain step bit by bit, how
many blocks backward ran again, what a forward left alive for it, whether there were segments.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import simpletuner_segckpt
from simpletuner_segckpt import FamilyRegistry
from simpletuner_segckpt.families.schema import Family, Tiny
from simpletuner_segckpt.model.stacks import blocks_of
from simpletuner_segckpt.model.tiny import make_inputs, make_model
from simpletuner_segckpt.schedules.report import UNITS
from simpletuner_segckpt.verify.memory import LiveBytes
from simpletuner_segckpt.verify.step import SEED, loss_of, step

DEPTH = 6
INTERVAL = "gradient_checkpointing_interval"
KEEP = "gradient_checkpointing_keep"

# Name of a mode -> its keys.
MODES: dict[str, dict[str, Any]] = {
    "layer": {},
    "interval 2": {INTERVAL: 2},
    "2 of 3": {INTERVAL: 2, "gradient_checkpointing_segment_stride": 3},
    "keep attention": {INTERVAL: 2, KEEP: ["attention"]},
    "keep attention, ffn": {INTERVAL: 2, KEEP: ["attention", "ffn"]},
    "keep_last 2": {INTERVAL: 2, "gradient_checkpointing_keep_last": 2},
    "torch-ffn": {"gradient_checkpointing_backend": "torch-ffn"},
    "unsloth": {INTERVAL: 2, "gradient_checkpointing_backend": "unsloth"},
    "offload": {INTERVAL: 2, "gradient_checkpointing_segment_stride": 3}
    | {"gradient_checkpointing_offload_attention": True},
}


@dataclass(frozen=True)
class Row:
    """One class. What is left out comes from the family's first tiny model.

    build: makes the model where a class takes no configuration by keywords.
    prepare: changes the inputs that ``inputs`` describes, where no table can.
    beside: paths of what the class recomputes besides blocks, in which ``*`` is any name. It may
        keep less by as much as these are worth to us, where they are recomputed as well.
    cannot: why it is not run.
    """

    family: str
    model_class: str
    flavour: str | None = None
    config: Mapping[str, Any] | None = None
    inputs: Mapping[str, Any] | None = None
    build: Callable[[], nn.Module] | None = None
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = field(default=lambda inputs: inputs)
    beside: tuple[str, ...] = ()
    cannot: str = ""


@dataclass(frozen=True)
class Measured:
    """One mode on one class. wrong: what differs from a plain step; refused: why it did not run."""

    refused: str = ""
    wrong: tuple[str, ...] = ()
    again: int = 0  # blocks that backward ran again
    alive: int = 0  # bytes that a forward left for backward
    segments: str = ""  # what ran, and why no segments where there are none


@dataclass(frozen=True)
class Outcome:
    """Of one row: what each mode did, with our engine and with setters of the class."""

    row: Row
    title: str
    blocks: int = 0
    ours: Mapping[str, Measured] = field(default_factory=dict)
    theirs: Mapping[str, Measured] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    beside: int = 0  # bytes of the forward that ``layer`` leaves, for what ``row.beside`` names


def run(
    rows: Iterable[Row],
    *,
    native: bool,
    trainer_calls: Callable[[nn.Module], None] | None = None,
    own_switch: Callable[[nn.Module], None] | None = None,
) -> Iterator[Outcome]:
    """Run every mode on every row.

    native: the classes have setters of their own, which are measured, too. trainer_calls: what the
    trainer calls on its model by itself, which must not change what is installed. own_switch:
    switches on the classes' own checkpointing of every block, which is measured beside ``layer``.
    """
    registry = FamilyRegistry.shipped()
    gc.collect()
    gc.freeze()  # the trainer's own modules are many, and every measurement collects
    for row in rows:
        family = registry.find(row.family, row.flavour)
        if row.cannot:
            yield Outcome(row, family.title)
            continue
        kind = type(_model(row, family))
        family = registry.for_class(kind, row.family, row.flavour) or family
        yield _run(row, family, native, trainer_calls, own_switch)


def _run(
    row: Row,
    family: Family,
    native: bool,
    trainer_calls: Callable[[nn.Module], None] | None,
    own_switch: Callable[[nn.Module], None] | None,
) -> Outcome:
    inputs = _inputs(row, family)
    plain = step(_model(row, family), inputs)
    problems = [] if step(_model(row, family), inputs) == plain else ["its steps are not alike"]
    ours, theirs = {}, {}
    for name, keys in MODES.items():
        ours[name] = _measure(row, family, inputs, plain, keys, name)
        if native and not any("keep" in key for key in keys):
            theirs[name] = _measure(row, family, inputs, plain, keys, name, native=True)
    if own_switch is not None:
        theirs["layer"] = _switched_on(row, family, inputs, plain, own_switch)
    if trainer_calls is not None:
        expected = ours["interval 2"]
        for when in ("before", "after"):
            calls = {when: trainer_calls}
            found = _measure(row, family, inputs, plain, MODES["interval 2"], "", **calls)
            if found != expected:
                problems.append(f"differs when the trainer makes its calls {when} apply: {found}")
    beside = 0
    if row.beside:
        also = family.model_copy(update={"units": (*family.units, *row.beside)})
        beside = ours["layer"].alive - _measure(row, also, inputs, plain, {}, "layer").alive
    problems += _problems(ours, theirs, beside)
    blocks = len(_witnesses(_model(row, family), family, inputs))
    return Outcome(row, family.title, blocks, ours, theirs, tuple(problems), beside)


def _switched_on(
    row: Row,
    family: Family,
    inputs: Mapping[str, Any],
    plain: Any,
    switch: Callable[[nn.Module], None],
) -> Measured:
    """The class's own checkpointing, without anything of ours."""
    model = _model(row, family)
    witnesses = _witnesses(model, family, inputs)
    switch(model)
    with _counting(witnesses) as calls:
        wrong = step(model, inputs).differences(plain)
    again = sum(calls.values()) - sum(count for _, count in witnesses.values())
    return Measured("", tuple(wrong), again, _alive(model, inputs))


def _problems(
    ours: Mapping[str, Measured], theirs: Mapping[str, Measured], beside: int
) -> Iterator[str]:
    """``beside``: bytes that a class keeps less since it recomputes more than blocks."""
    for name, mine in ours.items():
        if mine.refused and not mine.refused.startswith("ConfigError"):
            yield f"{name} fails: {mine.refused}"
        for wrong in mine.wrong[:1]:
            yield f"{name} changes {wrong}"
        other = theirs.get(name)
        alike = other and not other.refused and not other.wrong and other.again == mine.again
        joined = name == "layer" or not mine.segments.startswith("per-block")  # as theirs may be
        least = mine.alive - beside
        if other and alike and joined and least > other.alive and name != "torch-ffn":
            # Of feed-forwards each draws its own line.
            yield f"{name} keeps {least} bytes, its own setters {other.alive}"


def _measure(
    row: Row,
    family: Family,
    inputs: Mapping[str, Any],
    plain: Any,
    keys: Mapping[str, Any],
    name: str,
    native: bool = False,
    before: Callable[[nn.Module], None] | None = None,
    after: Callable[[nn.Module], None] | None = None,
) -> Measured:
    model = _model(row, family)
    witnesses = _witnesses(model, family, inputs)
    once = Counter({key: calls for key, (_, calls) in witnesses.items()})
    try:
        if before:
            before(model)
        installation = simpletuner_segckpt.apply(
            model,
            {"model_family": row.family, "model_flavour": row.flavour} | dict(keys),
            family=family,
            native=native,
        )
        if after:
            after(model)
        wrong = step(model, inputs).differences(plain)
        wrong += step(model, inputs).differences(plain)
        with _counting(witnesses) as calls:
            wrong += step(model, inputs).differences(plain)
        alive = _alive(model, inputs)
    except Exception as error:  # whatever the class does
        first = str(error).strip().split("\n")[0]
        return Measured(refused=f"{type(error).__name__}: {first}")
    again = sum((calls - once).values())
    segments = ""
    if not native:
        effect = installation.effect
        planned = {stack.path: stack for stack in installation.report.stacks}
        for stack in effect.stacks:
            if stack.strategy == "not reached":
                wrong.append(f"{stack.path}, of which no block was reached")
            if stack.path != UNITS and stack.covered != planned[stack.path].covered:
                wrong.append(f"which blocks of {stack.path} are covered")
        if not any(stack.feed_forward for stack in planned.values()):
            covered = {(s.path, b) for s in effect.stacks for b in s.covered if s.path != UNITS}
            ran = {key for key in calls if calls[key] > once[key]}
            if covered != {key for key in ran if key[0] != UNITS}:
                wrong.append("how often blocks run")
        segments = "; ".join(dict.fromkeys(_said(stack) for stack in effect.stacks))
    return Measured("", tuple(dict.fromkeys(wrong)), again, alive, segments)


def _said(stack: Any) -> str:
    if stack.strategy == "segmented":
        joined = any(len(segment) > 1 for segment in stack.segments)
        return "segments" if joined and not stack.reason else f"in part: {stack.reason}"
    return f"per-block: {stack.reason}" if stack.reason else stack.strategy


def _alive(model: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Bytes that a forward makes and leaves alive for its backward, wherever they are."""
    torch.manual_seed(SEED)
    model.zero_grad(set_to_none=True)
    gc.collect()
    with LiveBytes() as live:
        loss = loss_of(model(**inputs))
        gc.collect()
        total = live.total
    loss.backward()
    return total


def _witnesses(
    model: nn.Module, family: Family, inputs: Mapping[str, Any]
) -> dict[tuple[str, int], tuple[nn.Module, int]]:
    """By stack and block, the module in it that a plain forward calls first, and how often.

    A loop may run the parts of a block without calling the block, so blocks are not counted
    themselves.
    """
    stacks = _stacks(model, family)
    owners: dict[nn.Module, tuple[str, int]] = {}
    for path, blocks in stacks.items():
        for index, block in enumerate(blocks):
            parts = [m for m in block.modules() if m is not block] or [block]
            owners.update(dict.fromkeys(parts, (path, index)))
    calls: Counter[nn.Module] = Counter()
    handles = [m.register_forward_pre_hook(lambda m, args: calls.update([m])) for m in owners]
    with torch.no_grad():
        torch.manual_seed(SEED)
        model(**inputs)
    for handle in handles:
        handle.remove()
    found: dict[tuple[str, int], tuple[nn.Module, int]] = {}
    for module, count in calls.items():  # in the order of their first calls
        found.setdefault(owners[module], (module, count))
    return found


def _stacks(model: nn.Module, family: Family) -> dict[str, Sequence[nn.Module]]:
    report = simpletuner_segckpt.apply(
        model, {"gradient_checkpointing": False, "model_family": family.family}, family=family
    )
    report.remove()
    paths = [stack.path for stack in report.report.stacks if stack.path != UNITS]
    return {path: list(blocks_of(model, path)) for path in paths}


@contextmanager
def _counting(
    witnesses: Mapping[tuple[str, int], tuple[nn.Module, int]],
) -> Iterator[Counter[tuple[str, int]]]:
    calls: Counter[tuple[str, int]] = Counter()
    for key, (module, _) in witnesses.items():
        module.forward = _counted(module.forward, calls, key)  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        for module, _ in witnesses.values():
            del module.forward


def _counted(forward: Callable[..., Any], calls: Counter[Any], key: Any) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[key] += 1
        return forward(*args, **kwargs)

    return counted


def random_weights(model: nn.Module) -> nn.Module:
    """``model`` with all of its parameters drawn anew."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    return model


def _model(row: Row, family: Family) -> nn.Module:
    if row.build is not None:
        torch.manual_seed(0)
        return row.build().train()
    config = dict(family.tiny[0].config if row.config is None else row.config)
    if row.config is None:
        deeper = (s.count for s in family.stacks if isinstance(config.get(s.count), int))
        config |= dict.fromkeys(deeper, DEPTH)
    # What a class leaves as it is in memory (Z-Image) is NaN then, which make_model fills.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return make_model(Tiny(**{"class": row.model_class, "config": config})).train()
    finally:
        torch.use_deterministic_algorithms(False)


def _inputs(row: Row, family: Family) -> dict[str, Any]:
    inputs = family.tiny[0].inputs if row.inputs is None else row.inputs
    return row.prepare(make_inputs(Tiny(**{"class": row.model_class, "inputs": inputs})))
