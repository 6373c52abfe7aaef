import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpletuner_segckpt.schedules.schedule import Schedule, make_schedule, make_schedules

blocks = st.integers(0, 80)
intervals = st.integers(1, 12)


def schedule(n, interval, extra):
    return make_schedule(n, interval, None if extra is None else interval + extra)


@pytest.mark.parametrize(
    ("interval", "stride", "picture"),
    [
        (1, None, "[0] [1] [2] [3] [4] [5] [6] [7] [8]"),
        (2, None, "[0 1] [2 3] [4 5] [6 7] [8]"),
        (2, 4, "[0 1] 2 3 [4 5] 6 7 [8]"),
        (3, None, "[0 1 2] [3 4 5] [6 7 8]"),
        (1, 3, "[0] 1 2 [3] 4 5 [6] 7 8"),
        (9, None, "[0 1 2 3 4 5 6 7 8]"),
        (100, None, "[0 1 2 3 4 5 6 7 8]"),
    ],
)
def test_pictures(interval, stride, picture):
    assert str(make_schedule(9, interval, stride)) == picture


def test_what_is_kept_is_marked():
    kept = (("attention",), ("attention", "ffn"), ("cross-attention",), (), ("ffn",), ("ffn",))
    made = Schedule(6, (range(1), range(1, 2), range(3, 4), range(4, 6)), kept)
    assert made.marked() == "[0a] [1af] 2 [3] [4f 5f]"
    assert str(made) == "[0] [1] 2 [3] [4 5]"
    assert make_schedule(3, 1, 2).marked() == "[0] 1 [2]"


@given(blocks, intervals, st.none() | st.integers(0, 12))
def test_meaning(n, interval, extra):
    made = schedule(n, interval, extra)
    stride = interval + (extra or 0)
    assert made.covered == tuple(b for b in range(n) if b % stride < interval)
    assert sorted((*made.covered, *made.gap)) == list(range(n))
    assert [segment.start for segment in made.segments] == list(range(0, n, stride))
    assert all(1 <= len(segment) <= interval for segment in made.segments)
    assert all(len(segment) == interval for segment in made.segments[:-1])


@given(blocks, intervals, st.none() | st.integers(0, 12), st.sets(st.integers(0, 80)))
def test_per_block_and_cut_keep_the_coverage(n, interval, extra, boundaries):
    made = schedule(n, interval, extra)
    assert made.per_block().covered == made.covered
    assert {len(segment) for segment in made.per_block().segments} <= {1}
    cut = made.cut(frozenset(boundaries))
    assert cut.covered == made.covered
    assert not any(k in boundaries for segment in cut.segments for k in segment[:-1])
    assert made.cut(frozenset()) == made


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), intervals, st.integers(0, 50))
def test_keep_last_counts_across_stacks(sizes, interval, keep_last):
    stacks = {str(number): size for number, size in enumerate(sizes)}
    made = make_schedules(stacks, interval, keep_last=keep_last)
    sequence = [(path, b) for path, n in stacks.items() for b in range(n)]
    plain = {(path, b) for path, s in made.items() for b in s.gap}
    assert plain == set(sequence[max(0, len(sequence) - keep_last) :])
    assert {path: s.blocks for path, s in made.items()} == stacks


def test_keep_last_of_two_stacks():
    made = make_schedules({"a": 3, "b": 2}, 2, keep_last=3)
    assert made == {"a": Schedule(3, (range(0, 2),)), "b": Schedule(2, ())}


@pytest.mark.parametrize(("interval", "stride"), [(0, None), (-1, None), (2, 1)])
def test_impossible(interval, stride):
    with pytest.raises(ValueError, match="interval|stride"):
        make_schedule(4, interval, stride)
