"""What a measurement must prove before it is believed, and the evidence that is kept of it."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sweep.config import ProofConfig
from sweep.launch.proof import broken_proof, gather
from sweep.measure.load import LoadResult
from sweep.measure.steadiness import Drift
from sweep.measure.telemetry import DeviceReport, EngineReport
from sweep.measure.workload import Conversation, LengthDistribution, Load, WorkloadSpec

LIMITS = asdict(ProofConfig())
CLOSED = Load(4)
WORKLOAD = WorkloadSpec("w", LengthDistribution(value=10), LengthDistribution(value=5))
SUMMARY = {
    "load": {"concurrency": 4}, "window_s": 10.0, "window_rule": "steady", "counts": {"planned": 100},
    "loop_lag_p99_ms": 1.0, "loop_lag_max_ms": 3.0, "send_lateness_p99_ms": 1.0, "client_cpu_share": 0.2,
    "concurrency_offered": 4.0, "concurrency_mean": 3.99,
}  # fmt: skip
DEVICE = DeviceReport("0", 10.0, 12.0, 300.0, 400.0, 3000.0, (1700.0, 1750.0, 1800.0), None, {"sw_power_cap": 1.0}, [])


class StubServer:
    """One that is what it should be. others: what its devices hold besides."""

    pid, served_model, vllm_version = 4711, "m", "0.32.0"
    owner: str | None = None
    model: str | None = "m"

    def foreign_owner(self) -> str | None:
        return self.owner

    def reports_model(self) -> str | None:
        return self.model

    def foreign_device_processes(self, seen: Any) -> list[Any]:
        return [p for p in seen if p["pid"] != self.pid]


def result(*, failed: int = 0, share: float = 0.0, hits: float | None = None, ttft_p50_ms: float | None = 100.0,
           generated: float | None = 550.0, summary: dict[str, Any] | None = None,
           **changes: Any) -> LoadResult:  # fmt: skip
    metrics = {"prefix_cache_hit_rate": hits, "ttft_p50_ms": ttft_p50_ms}
    engine = EngineReport({}, 1100.0, generated, 4.0, 0.0, 5000.0)
    base = LoadResult(
        metrics, {}, 100 - failed, failed, 0, ("3 x HTTP 500: dead",) if failed else (), engine,
        SUMMARY | (summary or {}), share, Path("x"), short=0, prompt_tokens=1100, output_tokens=550,
    )  # fmt: skip
    return replace(base, **changes)


def evidence(found: LoadResult | None = None, *, cache: dict[str, Any] | None = None, load: Load = CLOSED,
             workload: WorkloadSpec = WORKLOAD, **server: Any) -> dict[str, Any]:  # fmt: skip
    stub: Any = StubServer()
    for name, value in server.items():
        setattr(stub, name, value)
    state = {"asked": "warmed", "state": "warmed", "reset": True}
    return gather(found or result(), stub, workload, load, cache or state, 0.0)


@pytest.mark.parametrize(
    "good",
    [
        result(),
        result(summary={"loop_lag_p99_ms": 5.0}, ttft_p50_ms=10.0),
        result(summary={"loop_lag_p99_ms": 9.0}, ttft_p50_ms=200.0),
        result(summary={"loop_lag_p99_ms": None, "send_lateness_p99_ms": None, "client_cpu_share": None}),
        result(summary={"concurrency_offered": None, "concurrency_mean": None}),
        result(summary={"offered_rps": 10.0, "delivered_rps": 9.6}),
        result(summary={"concurrency_offered": 0.14, "concurrency_mean": 0.12}),  # mostly idle: its rate is judged
        result(hits=0.05),
        result(hits=0.52, share=0.5),
        result(generated=None),
        result(generated=540.0),
        result(devices=(DEVICE,)),
        result(drifts=(Drift("ttft_p50_ms", 0.4, -0.1, 0.9), Drift("tpot_p50_ms", 0.2, 0.1, 0.24))),
    ],
)
def test_a_good_measurement_is_believed(good: LoadResult) -> None:
    assert broken_proof(evidence(good), LIMITS) is None


BROKEN = [
    (result(failed=3), "3 of 100 requests failed: 3 x HTTP 500: dead"),
    (result(short=2), "2 of 100 answers have fewer tokens than were asked for"),
    (result(summary={"loop_lag_p99_ms": 5.1}, ttft_p50_ms=10.0), "event loop lagged 5.1 ms at p99, more than 5.0 ms"),
    (result(summary={"loop_lag_p99_ms": 10.1}, ttft_p50_ms=200.0), "more than 10.0 ms"),
    (result(summary={"loop_lag_p99_ms": 5.1}, ttft_p50_ms=None), "more than 5.0 ms"),
    (result(summary={"send_lateness_p99_ms": 11.0}), "requests left late by 11.0 ms at p99, more than 10.0 ms"),
    (result(summary={"client_cpu_share": 0.97}), "it used 97% of a core, more than 90%"),
    (result(summary={"offered_rps": 10.0, "delivered_rps": 8.0}), "did not deliver the load: 8 requests/s of 10"),
    (result(summary={"concurrency_offered": 1.0, "concurrency_mean": 0.8}), "0.8 requests in flight of 1"),
    (result(summary={"concurrency_mean": 3.0}), "client did not deliver the load: 3 requests in flight of 4"),
    (result(hits=0.06), "6% prefix-cache hits where the workload shares 0%: the cache was warm"),
    (result(hits=0.6, share=0.5), "the cache was warm"),
    (result(generated=700.0), "the engine produced 700 tokens and our client received 550"),
    (result(drifts=(Drift("ttft_p50_ms", 0.8, 0.5, 1.1),)), "not steady: ttft_p50_ms changed by +80%"),
    (
        result(devices=(replace(DEVICE, processes=[{"pid": 9, "name": "train.py", "memory_mib": 2048.0}]),)),
        "device 0 was shared with process 9 (train.py) with 2048 MiB",
    ),
    (
        result(devices=(replace(DEVICE, throttle={"hw_thermal_slowdown": 0.4}),)),
        "device 0 was slowed down by hw_thermal_slowdown in 40% of the samples",
    ),
]


@pytest.mark.parametrize(("bad", "words"), BROKEN, ids=[words[:40] for _, words in BROKEN])
def test_a_broken_proof_names_its_evidence(bad: LoadResult, words: str) -> None:
    broken = broken_proof(evidence(bad), LIMITS)
    assert broken is not None and words in broken.detail
    assert broken.cause.value == ("request_errors" if bad.failed or bad.short else "proof_failed")


def test_a_port_or_a_model_that_is_not_ours_breaks_the_proof() -> None:
    for found, words in (
        (evidence(owner="process 12"), "the port is served by process 12, not by this launch alone"),
        (evidence(model="other"), "answers to the model other, started was m"),
        (evidence(model=None), "answers to the model None"),
    ):
        broken = broken_proof(found, LIMITS)
        assert broken is not None and words in broken.detail


def test_every_proof_that_fails_is_named_not_only_the_first() -> None:
    bad = result(failed=3, hits=0.9, summary={"loop_lag_p99_ms": 99.0, "client_cpu_share": 1.0})
    broken = broken_proof(evidence(bad, owner="process 12"), LIMITS)
    assert broken is not None and broken.cause.value == "request_errors"
    assert len(broken.detail.split("; ")) == 5


def test_the_devices_of_others_may_be_allowed() -> None:
    shared = result(devices=(replace(DEVICE, processes=[{"pid": 9, "name": None, "memory_mib": None}]),))
    broken = broken_proof(evidence(shared), LIMITS)
    assert broken is not None and "process 9 (unknown name)" in broken.detail
    assert broken_proof(evidence(shared), LIMITS | {"exclusive_devices": False}) is None


def test_what_changes_on_purpose_is_not_called_unsteady() -> None:
    drifting = result(drifts=(Drift("ttft_p50_ms", 0.8, 0.5, 1.1),))
    talks = replace(WORKLOAD, conversation=Conversation(LengthDistribution(value=3), 100))
    assert broken_proof(evidence(drifting, load=Load(None, 5.0, ramp_from_rps=1.0)), LIMITS) is None
    assert broken_proof(evidence(drifting, workload=talks), LIMITS) is None
    assert broken_proof(evidence(drifting, load=Load(None, 5.0)), LIMITS) is not None


def test_primed_prefixes_may_hit() -> None:
    steady = {"asked": "steady", "state": "steady", "reset": True, "primed_prefixes": 2, "primed_tokens": 220}
    found = evidence(result(hits=0.7, share=0.5), cache=steady)
    assert found["cache"]["expected_hit_rate"] == pytest.approx(0.7)
    assert broken_proof(found, LIMITS) is None


def test_evidence_is_plain_json_and_judges_alike_when_read_again() -> None:
    for bad, _ in BROKEN:
        found = evidence(bad)
        again = json.loads(json.dumps(found, allow_nan=False))
        first, second = broken_proof(found, LIMITS), broken_proof(copy.deepcopy(again), LIMITS)
        assert first is not None and second is not None and first.detail == second.detail


def test_on_a_cpu_what_only_a_gpu_has_is_null() -> None:
    found = evidence()
    assert found["devices"] is None
    watched = evidence(result(devices=(replace(DEVICE, power_mean_w=None, energy_j=None, processes=None),)))
    assert watched["devices"][0]["energy_j"] is None and watched["devices"][0]["other_processes"] is None


def test_older_launches_without_a_limit_are_judged_by_its_default() -> None:
    bad = evidence(result(summary={"client_cpu_share": 0.97}))
    assert broken_proof(bad, {"max_loop_lag_ms": 5.0}) is not None
