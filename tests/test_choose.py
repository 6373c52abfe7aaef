"""The choice of a way for each block within a budget, against all assignments there are."""

import random
from itertools import product

import pytest

from simpletuner_segckpt.costs.choose import fastest
from simpletuner_segckpt.costs.step import BlockCosts, StepCosts, Way

MIB = 1 << 20


def some_step(seed, blocks=6):
    """Blocks of two kinds whose ways keep more the less they recompute."""
    draw = random.Random(seed)

    def kind():
        whole = draw.uniform(1, 3)
        return [
            Way("covered", 4 * MIB, 40 * MIB, 90 * MIB, whole),
            Way("covered+attention", draw.randint(6, 12) * MIB, 40 * MIB, 85 * MIB, whole * 0.6),
            Way("plain", draw.randint(30, 60) * MIB, 50 * MIB, 50 * MIB, 0),
        ]

    kinds = [kind(), kind()]
    made = (
        BlockCosts(
            tuple(kinds[draw.randint(0, 1)]), draw.randint(0, 3) * MIB, draw.randint(0, 9) * MIB
        )
        for _ in range(blocks)
    )
    return StepCosts(tuple(made), alive=100 * MIB, head_peak=draw.randint(0, 80) * MIB)


def best_of_all(step, budget):
    choices = product(*(block.ways for block in step.blocks))
    return min((step.seconds(ways) for ways in choices if step.peak(ways) <= budget), default=None)


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_best_of_all_assignments(seed):
    step = some_step(seed)
    low, high = step.peak(step.all_recomputed), step.peak([b.ways[-1] for b in step.blocks])
    for tenth in range(12):
        budget = low + (high - low) * tenth // 10
        chosen = fastest(step, budget)
        assert chosen.fits
        assert chosen.peak == step.peak(chosen.ways) <= budget
        # But for what the grid rounds away: a part in a thousand of what blocks can keep.
        best = best_of_all(step, budget if tenth >= 10 else budget - (high - low) // 1000)
        assert best is None or chosen.seconds <= best


def test_a_larger_budget_never_recomputes_for_longer():
    step = some_step(5, blocks=40)
    low, high = step.peak(step.all_recomputed), step.peak([b.ways[-1] for b in step.blocks])
    seconds = [fastest(step, low + (high - low) * k // 50).seconds for k in range(51)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 0


def test_what_cannot_fit_is_all_recomputed():
    step = some_step(6)
    chosen = fastest(step, 10 * MIB)
    assert not chosen.fits
    assert chosen.ways == step.all_recomputed


def test_the_step_of_the_optimizer_counts():
    step = some_step(7)
    step = StepCosts(step.blocks, step.alive, step.head_peak, elsewhere=1 << 40)
    assert not fastest(step, 1 << 39).fits
    assert fastest(step, 1 << 40).seconds == 0
