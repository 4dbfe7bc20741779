"""Which load comes next on a server that is up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sweep.measure.workload import Load
from sweep.search.ladder import HOPELESS_LOADS, Incumbents, Limit, LoadPoint, hopeless, level, next_load

LADDER = tuple(Load(c) for c in (256, 64, 16, 4, 1))


def server(most: float, slow: float = 1.0):
    """Throughput saturates at `most` requests in flight; latency grows from there."""

    def measure(load: Load) -> LoadPoint:
        busy = level(load)
        tokens = 50.0 * min(busy, most)
        return LoadPoint(
            load,
            {
                "output_throughput_tok_s": tokens,
                "ttft_p99_ms": slow * (50.0 + 20.0 * max(0.0, busy - most)),
                "cost_usd_per_mtok": 100.0 * slow / tokens,
            },
        )

    return measure


def walk(measure, ladder=LADDER, limits=(), incumbents=None, most=20) -> list[LoadPoint]:
    points: list[LoadPoint] = []
    while (load := next_load(points, ladder, limits, incumbents or Incumbents(), most)) is not None:
        points.append(measure(load))
    return points


def test_the_ladder_is_walked_busiest_first():
    assert [p.load for p in walk(server(1e9))][: len(LADDER)] == list(LADDER)


@given(st.integers(2, 250))
def test_the_largest_load_within_the_sla_is_found(most):
    limit = Limit("ttft_p99_ms", 200.0)
    points = walk(server(most), limits=[limit])
    best = max(level(p.load) for p in points if limit.met(p))
    true = most + 7.5
    assert best <= true
    assert best * 1.3 >= true or true - best < 2 or best == 256


def test_the_knee_is_placed_once_between_two_levels():
    points = walk(server(32))
    extra = [level(p.load) for p in points if p.load not in LADDER]
    assert extra
    assert all(16 <= c <= 256 for c in extra)


def test_a_hopeless_configuration_is_cut_after_two_loads():
    known = Incumbents(("cost_usd_per_mtok", "ttft_p99_ms"), [[0.001, 10.0]])
    points = walk(server(32, slow=3.0), incumbents=known)
    assert len(points) == HOPELESS_LOADS
    assert hopeless(points, known)


def test_what_may_still_win_within_its_error_goes_on():
    measured = server(32)(LADDER[0])
    just_better = [[0.95 * float(measured.metrics[n] or 0) for n in ("cost_usd_per_mtok", "ttft_p99_ms")]]
    known = Incumbents(("cost_usd_per_mtok", "ttft_p99_ms"), just_better)
    assert known.dominate(measured)
    uncertain = LoadPoint(measured.load, measured.metrics, errors={"cost_usd_per_mtok": 0.1, "ttft_p99_ms": 0.1})
    assert not known.dominate(uncertain)


def test_open_loops_are_bisected_in_requests_per_second():
    ladder = (Load(None, 8.0), Load(None, 1.0))
    points = walk(server(3.0), ladder, [Limit("ttft_p99_ms", 100.0)])
    assert any(p.load not in ladder for p in points)
    assert all(p.load.concurrency is None for p in points)


def test_a_launch_ends_at_its_most_loads():
    assert len(walk(server(32), limits=[Limit("ttft_p99_ms", 200.0)], most=3)) == 3
