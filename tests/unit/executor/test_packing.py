"""Which launch starts next: never more devices than there are, nobody waits for ever, no needless reload."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.executor.packing import MAX_OVERTAKEN, NodeState, Waiting, choose

WIDTHS = st.sampled_from([1, 2, 4, 8])
MODELS = st.sampled_from(["a", "b", "c"])
QUEUES = st.lists(st.builds(Waiting, WIDTHS, MODELS, st.integers(0, MAX_OVERTAKEN)), max_size=6)


@given(QUEUES, st.integers(0, 8), st.sets(MODELS), st.sets(MODELS), st.sets(MODELS))
def test_what_is_chosen_fits_and_may_be_read(
    waiting: list[Waiting], free: int, in_memory: set[str], obtained: set[str], obtaining: set[str]
) -> None:
    index = choose(waiting, NodeState(free, in_memory, obtained, obtaining))
    if index is not None:
        chosen = waiting[index]
        assert chosen.devices <= free
        assert chosen.checkpoint in obtained or not obtaining
        blocked = [i for i, w in enumerate(waiting) if w.overtaken >= MAX_OVERTAKEN]
        assert not blocked or index == blocked[0]


@given(QUEUES, st.integers(0, 8))
def test_devices_stay_idle_only_where_nothing_fits_or_they_are_kept(waiting: list[Waiting], free: int) -> None:
    fits = any(w.devices <= free for w in waiting)
    kept = next((w for w in waiting if w.overtaken >= MAX_OVERTAKEN), None)
    assert (choose(waiting, NodeState(free)) is not None) == (fits if kept is None else kept.devices <= free)


@given(st.lists(st.tuples(WIDTHS, MODELS, st.integers(1, 5)), min_size=1, max_size=25), st.data())
def test_everybody_gets_a_turn_on_eight_devices(arrivals: list[tuple[int, str, int]], data: st.DataObject) -> None:
    """A node in discrete time with an endless stream of narrow launches on top: each arrival starts all the same."""
    queue: list[tuple[int, Waiting]] = [(i, Waiting(w, m)) for i, (w, m, _) in enumerate(arrivals)]
    running: list[tuple[int, Waiting]] = []
    started: list[int] = []
    obtained: set[str] = set()
    narrow = data.draw(st.integers(1, 3))
    for now in range(600):
        obtained |= {w.checkpoint for _, w in running}
        running = [(end, w) for end, w in running if end > now]
        queue += [(-1, Waiting(1, "a"))] * max(0, narrow - sum(i < 0 for i, _ in queue))
        while True:
            free = 8 - sum(w.devices for _, w in running)
            assert free >= 0
            fetching = {w.checkpoint for _, w in running} - obtained
            index = choose([w for _, w in queue], NodeState(free, frozenset(), obtained, fetching))
            if index is None:
                break
            number, chosen = queue.pop(index)
            queue[:index] = [(i, replace(w, overtaken=w.overtaken + 1)) for i, w in queue[:index]]
            running.append((now + (arrivals[number][2] if number >= 0 else 2), chosen))
            started.append(number)
            if number < 0:
                break
        if all(i in started for i in range(len(arrivals))):
            return
    pytest.fail("somebody never started")


def test_devices_are_filled_before_the_order_is_kept() -> None:
    waiting = [Waiting(4, "a"), Waiting(2, "a"), Waiting(8, "a")]
    assert choose(waiting, NodeState(8)) == 2  # all eight at once, the others later
    assert choose(waiting, NodeState(6)) == 0  # four and two
    assert choose(waiting, NodeState(2)) == 1


def test_a_checkpoint_in_memory_goes_before_another_that_fills_as_much() -> None:
    waiting = [Waiting(4, "a"), Waiting(4, "b")]
    assert choose(waiting, NodeState(4)) == 0
    assert choose(waiting, NodeState(4, in_memory={"b"})) == 1


def test_a_place_that_fits_exactly_is_not_broken_up() -> None:
    assert choose([Waiting(1, "a"), Waiting(1, "a"), Waiting(2, "a")], NodeState(2)) == 2


def test_one_first_download_at_a_time() -> None:
    waiting = [Waiting(1, "b"), Waiting(1, "a")]
    assert choose(waiting, NodeState(4, obtaining={"c"})) is None
    assert choose(waiting, NodeState(4, obtained={"a"}, obtaining={"b"})) == 1


def test_who_was_overtaken_too_often_has_devices_kept() -> None:
    waiting = [Waiting(8, "a", MAX_OVERTAKEN), Waiting(1, "a")]
    assert choose(waiting, NodeState(7)) is None
    assert choose(waiting, NodeState(8)) == 0
