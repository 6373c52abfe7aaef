"""A model with most of its blocks taken out, since blocks that are alike cost alike."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ...costs.build import build_of
from ...families.schema import Family
from ...model.stacks import blocks_of, stacks_of, units_of
from ...schedules.report import UNITS
from .recorder import Call, PlacedBlock
from .records import Block, Glue, Profile


def places_of(model: nn.Module, family: Family) -> list[PlacedBlock]:
    """The blocks that a schedule is about: those of stacks, then units, each in its order."""
    stacks = stacks_of(model, family.stacks)
    places = [
        PlacedBlock(path, index, block)
        for path in stacks
        for index, block in enumerate(blocks_of(model, path))
    ]
    units = units_of(model, family.units, stacks)
    return places + [PlacedBlock(UNITS, i, model.get_submodule(u)) for i, u in enumerate(units)]


def thinned(places: Sequence[PlacedBlock], family: Family) -> list[PlacedBlock]:
    """Of every stack the first two blocks of each build, and the last block.

    All units, and all of a stack in which the loop does something between certain blocks.
    """
    whole = {UNITS, *(p.stack for p in places if getattr(family.stack_at(p.stack), "cut", ""))}
    seen: Counter[Any] = Counter()
    last = {place.stack: place.index for place in places}
    kept = []
    for place in places:
        build = place.stack, build_of(place.module)
        seen[build] += 1
        if seen[build] <= 2 or place.index == last[place.stack] or place.stack in whole:
            kept.append(place)
    return kept


def put_blocks(model: nn.Module, places: Sequence[PlacedBlock]) -> None:
    """Have the stacks of ``model`` hold these blocks."""
    stacks: dict[str, list[nn.Module]] = {}
    for place in places:
        if place.stack != UNITS:
            stacks.setdefault(place.stack, []).append(place.module)
    for path, blocks in stacks.items():
        held: Any = model.get_submodule(path)
        held._modules.clear()
        held.extend(blocks)


def one_after_another(calls: Sequence[Call]) -> bool:
    """Whether each stack runs in order and on its own."""
    runs = [(call.place.stack, call.place.index) for call in calls]
    stacks = list(dict.fromkeys(stack for stack, _ in runs))
    return runs == sorted(set(runs), key=lambda run: (stacks.index(run[0]), run[1]))


def extended(small: Profile, calls: Sequence[Call], whole: Sequence[PlacedBlock]) -> Profile:
    """The profile of the whole model from that of a few of its blocks."""
    at_of = {id(call.place.module): at for at, call in enumerate(calls)}
    stacks = list(dict.fromkeys(call.place.stack for call in calls))
    ran = [place for place in whole if place.stack in stacks]
    order = sorted(ran, key=lambda place: (stacks.index(place.stack), place.index))
    uses = Counter(value for call in calls for value in set(call.takes))
    alike: dict[Any, int] = {}
    for at, call in enumerate(calls):  # the second of its build stands for those left out
        build = call.place.stack, build_of(call.place.module)
        if build not in alike or calls[alike[build]].place.index == 0:
            alike[build] = at
    fresh = 1 + max(v for call in calls for v in (*call.takes, *call.gives))
    current: dict[int, int] = {}
    blocks: list[Block] = []
    glue: list[Glue] = []
    between: set[int] = set()
    for place in order:
        at = at_of.get(id(place.module), -1)
        own = at >= 0
        if not own:
            at = alike[place.stack, build_of(place.module)]
        call = calls[at]
        before = calls[at - 1] if at else None
        takes = []
        for value in call.takes:
            if before and value in before.gives and blocks:
                gives = blocks[-1].gives
                takes.append(gives[min(before.gives.index(value), len(gives) - 1)])
            elif value in current:
                takes.append(current[value])
            elif own or uses[value] > 1:
                takes.append(value)
            else:
                takes.append(fresh)
                fresh += 1
        gives_: list[int] = []
        for at_, value in enumerate(call.gives):
            if value in call.takes:
                gives_.append(takes[call.takes.index(value)])
            elif value in call.gives[:at_]:  # two views of one tensor
                gives_.append(gives_[call.gives.index(value)])
            else:
                gives_.append(fresh)
                fresh += 1
            current[value] = gives_[-1]
        originals = (*call.takes, *call.gives)
        new = (*takes, *gives_)
        between |= {n for o, n in zip(originals, new, strict=True) if o in small.between}
        blocks.append(
            Block(place.stack, place.index, small.blocks[at].kind, tuple(takes), tuple(gives_))
        )
        glue.append(small.glue[at])
    return replace(
        small,
        blocks=tuple(blocks),
        glue=(*glue, small.glue[-1]),
        between=frozenset(between),
    )
