"""Launches in virtual time: the contract of an executor, hours that take no time, and failures with their causes."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sweep.compose import load_config
from sweep.config import SweepConfig
from sweep.engine.engine_args import EngineConfig
from sweep.errors import ConfigError
from sweep.estimate import is_available
from sweep.executor.clock import VirtualClock
from sweep.executor.estimated import EstimatedExecutor, EstimatedJob
from sweep.launch.ladder import LadderRules, Limit, Rival
from sweep.launch.spec import build_engine, make_spec
from sweep.results.records import LaunchRecord, PointRecord, record_from_dict
from sweep.study.proposals import load_ladder

pytestmark = pytest.mark.skipif(not is_available(), reason="needs aiconfigurator-core")
NODE = ("model=llama31_8b", "hardware=h200x8", "engine=estimate", "quality=none", "objectives=speed_cost")


def make(tmp_path: Path, *overrides: str) -> tuple[SweepConfig, EstimatedExecutor, VirtualClock]:
    config = load_config([*NODE, f"storage.dir={tmp_path}", *overrides])
    clock = VirtualClock()
    return config, EstimatedExecutor(config, clock), clock


def submit(
    config: SweepConfig, executor: EstimatedExecutor, folder: Path, number: int = 1, **settings: Any
) -> EstimatedJob:
    engine: EngineConfig = build_engine(config, settings)
    return executor.submit(
        make_spec(
            config, folder, launch_id=f"{number:04d}-{engine.hash}", engine=engine, params={}, purpose="trial",
            attempt=0, loads=load_ladder(config)[:2], repeat=0, quality_runs=(),
        )
    )  # fmt: skip


def walk(tmp_path: Path, rules: LadderRules) -> list[PointRecord]:
    """The points of one launch over [256, 64, 8, 1] by these rules."""
    config, executor, clock = make(tmp_path, "workload.loads.concurrency=[1,8,64,256]")
    engine = build_engine(config, {})
    spec = make_spec(
        config, tmp_path / "s", launch_id="0001-x", engine=engine, params={}, purpose="trial", attempt=0,
        loads=load_ladder(config), repeat=0, quality_runs=(), ladder=asdict(rules),
    )  # fmt: skip
    ((*points, _),) = finish(clock, executor.submit(spec))
    return [p for p in points if isinstance(p, PointRecord)]


def finish(clock: VirtualClock, *jobs: EstimatedJob) -> list[list[PointRecord | LaunchRecord]]:
    said: list[list[PointRecord | LaunchRecord]] = [[] for _ in jobs]
    for _ in range(200):
        running = [job.running for job in jobs]
        for job, facts in zip(jobs, said, strict=True):
            records = [record_from_dict(e["record"]) for e in job.poll() if e["event"] == "record"]
            facts += [r for r in records if isinstance(r, PointRecord | LaunchRecord)]
        if not any(running):
            return said
        clock.sleep(0.2)
    pytest.fail("the launch does not end")


def test_a_launch_takes_minutes_of_virtual_time_and_says_what_a_real_one_says(tmp_path: Path) -> None:
    config, executor, clock = make(tmp_path)
    job = submit(config, executor, tmp_path / "s")
    assert not executor.has_room(8) and executor.has_room(7)
    ((first, second, end),) = finish(clock, job)
    assert executor.has_room(8)
    assert isinstance(end, LaunchRecord) and end.state == "ok" and end.startup_s is not None
    assert end.duration_s == pytest.approx(clock.monotonic(), abs=0.01) and clock.monotonic() > 60
    for record in (first, second):
        assert isinstance(record, PointRecord)
        assert (record.state, record.provenance) == ("measured", "estimated")
        assert record.metrics["startup_s"] == end.startup_s
    assert first.started_at < second.started_at < end.finished_at


def test_a_launch_places_levels_and_cuts_loads_as_a_real_one_does(tmp_path: Path) -> None:
    plain = walk(tmp_path / "plain", LadderRules())
    assert [p.load_label for p in plain] == ["c256", "c64", "c8", "c1"]
    between = math.sqrt(float(plain[1].metrics["itl_p50_ms"] or 0) * float(plain[2].metrics["itl_p50_ms"] or 0))
    found = walk(tmp_path / "limit", LadderRules(extra=2, limits=(Limit("itl_p50_ms", between),)))
    assert all(8 < p.load["concurrency"] < 64 for p in found[4:]) and len(found) == 6
    name = "cost_usd_per_mtok"
    rules = LadderRules(confidence=0.9, objectives=(name,), rivals=(Rival("r", {name: 1e-6}, {name: 0.0}),))
    cut = walk(tmp_path / "cut", replace(rules, spreads={name: (0.05, 4)}))
    assert [p.state for p in cut] == ["measured", "measured", "cut", "cut"]
    assert cut[-1].provenance == "estimated" and cut[-1].started_at >= cut[1].finished_at


def test_what_the_kernel_data_does_not_cover_fails_at_once_and_is_not_guessed(tmp_path: Path) -> None:
    config, executor, clock = make(tmp_path)
    ((*points, end),) = finish(clock, submit(config, executor, tmp_path / "s", kv_cache_dtype="fp8_e5m2"))
    assert isinstance(end, LaunchRecord) and end.duration_s == 0.0 and not end.transient
    assert {p.cause for p in (*points, end)} == {"unknown_to_estimator"}
    assert all(isinstance(p, PointRecord) and not p.metrics and "fp8_e5m2" in (p.detail or "") for p in points)


def test_too_little_memory_is_a_failure_with_the_figures(tmp_path: Path) -> None:
    config, executor, clock = make(tmp_path, "model=llama33_70b")
    ((*points, end),) = finish(clock, submit(config, executor, tmp_path / "s"))
    assert end.cause == "out_of_memory" and "129.2 GiB usable" in (end.detail or "")
    assert isinstance(end, LaunchRecord) and end.duration_s > 60  # reading weights comes first
    assert len(points) == 2


def test_the_second_launch_of_a_checkpoint_reads_it_from_memory(tmp_path: Path) -> None:
    config, executor, clock = make(tmp_path)
    (first,), (second,) = (
        [r for r in finish(clock, submit(config, executor, tmp_path / "s", n))[0] if isinstance(r, LaunchRecord)]
        for n in (1, 2)
    )
    assert first.startup_s is not None and second.startup_s is not None
    assert second.startup_s < first.startup_s - 5


def test_neighbours_slow_each_other_by_the_stated_factor(tmp_path: Path) -> None:
    def tpot(*overrides: str, neighbours: int) -> float:
        noiseless = ("engine.simulation.tpot_cv=0", "engine.simulation.ttft_cv=0")
        config, executor, clock = make(tmp_path, *noiseless, *overrides)
        jobs = [submit(config, executor, tmp_path / "s", n) for n in range(1, neighbours + 2)]
        point = finish(clock, *jobs)[0][0]
        assert isinstance(point, PointRecord)
        return point.metrics["tpot_mean_ms"] or 0.0

    alone = tpot("engine.simulation.interference=0.3", neighbours=0)
    assert tpot("engine.simulation.interference=0.3", neighbours=1) == pytest.approx(1.3 * alone)
    assert tpot("engine.simulation.interference=0", neighbours=1) == pytest.approx(alone)


def test_the_same_launch_gives_the_same_numbers(tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        config, executor, clock = make(tmp_path)
        point = finish(clock, submit(config, executor, tmp_path / "s"))[0][0]
        assert isinstance(point, PointRecord)
        runs.append(point.metrics)
    assert runs[0] == runs[1]


def test_a_cancelled_launch_frees_its_devices(tmp_path: Path) -> None:
    config, executor, _ = make(tmp_path)
    job = submit(config, executor, tmp_path / "s")
    job.cancel()
    assert not job.running and executor.has_room(8)


def test_what_cannot_be_estimated_at_all_is_said_before_the_first_launch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no kernel data"):
        make(tmp_path, "hardware.name=somegpu")
    with pytest.raises(ConfigError, match="the model's choice"):
        make(tmp_path, "workload.ignore_eos=false")


def test_a_virtual_clock_jumps_to_appointments_and_never_back() -> None:
    clock = VirtualClock()
    for moment in (5.0, 2.0):
        clock.wake_at(moment)
    seen = [clock.monotonic()]
    for _ in range(3):
        clock.sleep(0.2)
        seen.append(clock.monotonic())
    assert seen == [0.0, 2.0, 5.0, 5.2]
