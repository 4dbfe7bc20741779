"""The stages of a verification: each workload is the study's, and harder in the one way it says."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from sweep.config import ClassConfig, LengthConfig, LoadsConfig, TraceConfig, WorkloadConfig
from sweep.errors import ConfigError, StudyError
from sweep.measure.workload import HELD_OUT_DRAW, WorkloadSpec, build_requests
from sweep.results.points import OperatingPoint
from sweep.study.stages import Stages, build_stages

CORPUS = np.random.default_rng(0).integers(0, 50_000, 60_000)


def point(load: dict[str, Any], **metrics: float) -> OperatingPoint:
    return OperatingPoint(
        point_id="p", config_hash="p", fingerprint="f", launch_id="l", engine={"model": "m"}, load=load,
        load_label="c4", params=None, purpose="trial", devices=1, provenance="measured", state="measured",
        metrics=metrics,
    )  # fmt: skip


def workload(**changes: Any) -> dict[str, Any]:
    base = WorkloadConfig(
        name="w",
        prompt_tokens=LengthConfig(kind="lognormal", median=50, sigma=0.5, low=8, high=200),
        output_tokens=LengthConfig(value=20),
        num_requests=40,
        loads=LoadsConfig(concurrency=[16, 4, 1]),
    )
    return {**asdict(base), **changes}


CLOSED = point({"concurrency": 4}, request_throughput_rps=2.5)
ALL = Stages(burst_cv=2.0, longer=1.5, soak_s=60.0)


def specs(*args: Any, **kwargs: Any) -> dict[str, WorkloadSpec]:
    return {s["name"]: WorkloadSpec.from_dict(s["workload"]) for s in build_stages(*args, **kwargs)}


def test_each_stage_is_one_load_of_the_studys_requests_on_the_held_out_draw() -> None:
    built = build_stages(ALL, workload(), CLOSED, None, None)
    assert [s["name"] for s in built] == ["held_out", "bursts", "longer", "soak"]
    assert {s["draw"] for s in built} == {HELD_OUT_DRAW}
    found = specs(ALL, workload(), CLOSED, None, None)
    assert {name: [load.label for load in s.loads] for name, s in found.items()} == {
        "held_out": ["c4"], "bursts": ["r2.5cv2"], "longer": ["c4"], "soak": ["c4"],
    }  # fmt: skip
    lengths = {name: np.diff(build_requests(s, CORPUS, draw=HELD_OUT_DRAW).starts) for name, s in found.items()}
    assert lengths["longer"].mean() == pytest.approx(1.5 * lengths["held_out"].mean(), rel=0.1)
    assert lengths["longer"].max() <= 300
    assert (found["soak"].max_load_s, found["soak"].num_requests) == (60.0, 225)


def test_stages_can_be_left_out_and_made_shorter() -> None:
    built = build_stages(Stages(None, 1.0, None, None, 12), workload(), point({"concurrency": 4}), None, None)
    assert [(s["name"], s["workload"]["num_requests"]) for s in built] == [("held_out", 12)]


def test_bursts_at_a_share_of_the_rate_and_of_an_open_loop() -> None:
    (_, bursts) = build_stages(Stages(longer=None, burst_share=0.8), workload(), CLOSED, None, None)
    assert bursts["asked"] == {"cv": 2.0, "share": 0.8}
    assert WorkloadSpec.from_dict(bursts["workload"]).loads[0].request_rate_rps == 2.0
    open_loop = point({"request_rate_rps": 3.0, "burstiness": 1.0})
    found = specs(Stages(burst_cv=4.0, longer=None), workload(), open_loop, None, None)
    assert [load.label for s in found.values() for load in s.loads] == ["r3", "r3cv4"]


def test_longer_prompts_end_where_the_context_does() -> None:
    longer = specs(Stages(burst_cv=None, longer=10.0), workload(), CLOSED, 512, None)["longer"]
    assert longer.longest_request_tokens is not None and longer.longest_request_tokens <= 511
    classes = {"a": asdict(ClassConfig(prompt_tokens=LengthConfig(value=30))), "b": asdict(ClassConfig())}
    found = specs(Stages(burst_cv=None, longer=2.0), workload(classes=classes), CLOSED, None, None)["longer"]
    assert [c.prompt_tokens.longest for c in found.classes] == [60, 400]


def test_a_soak_takes_no_more_texts_than_are_held_out() -> None:
    found = specs(Stages(None, 1.0, None, 3600.0), workload(), CLOSED, None, 1000)
    assert found["soak"].num_requests == 450
    build_requests(found["soak"], CORPUS[:1100], draw=HELD_OUT_DRAW)


def test_a_trace_is_replayed_faster_not_rewritten() -> None:
    trace = asdict(TraceConfig(file="azure_conv_2023"))
    mine = workload(
        prompt_tokens={"kind": "trace", "high": 200}, output_tokens={"kind": "trace", "high": 20}, trace=trace,
        loads={"rate_scale": [0.5]},
    )  # fmt: skip
    rate = WorkloadSpec.from_dict(mine).loads[0].request_rate_rps
    replayed = point({"request_rate_rps": rate, "rate_scale": 0.5})
    found = specs(Stages(soak_s=30.0), mine, replayed, None, None)
    assert [s.loads[0].label for s in found.values()] == ["x0.5", f"r{float(f'{rate:.4g}'):g}cv2", "x0.5", "x0.5"]
    assert found["longer"].trace is not None and found["longer"].trace.length_scale == 1.5


def test_a_rate_that_is_needed_and_unknown() -> None:
    with pytest.raises(StudyError, match="request rate of p was not measured"):
        build_stages(Stages(), workload(), point({"concurrency": 4}), None, None)


@pytest.mark.parametrize(
    "wrong", [{"burst_cv": -1.0}, {"longer": 0.5}, {"soak_s": 0.0}, {"burst_share": 0.0}, {"requests": 0}]
)
def test_stages_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Stages(**wrong)
