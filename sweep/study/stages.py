"""The stages of a verification: the study's workload at one load, and what makes each stage harder.

held_out   the point's own load on the held-out draw: what the search saw, on requests it never saw
bursts     the same mean rate as the point carried (or a stated share of it), arriving in bursts: an open loop with
           gamma-distributed gaps of a stated coefficient of variation
longer     the point's own load on prompts that are longer by a factor, cut where the engine's context ends
soak       the point's own load for a stated time without a pause, cut into windows afterwards
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from sweep.errors import ConfigError, StudyError
from sweep.measure.workload import HELD_OUT_DRAW, Load, WorkloadSpec
from sweep.results.points import OperatingPoint

# Requests prepared for a soak beyond what the point's rate needs: it ends by time, not for lack of requests.
_SOAK_SLACK = 1.5
# A soak takes no more than this share of the texts there are: the held-out half of the corpus.
_SOAK_SHARE = 0.45


@dataclass(frozen=True)
class Stages:
    """Which stages, and how hard. burst_cv, longer, soak_s: None leaves the stage out. burst_share: of the rate.

    requests: of the stages that are no soak; None for the workload's own number. Raises ConfigError for what cannot be.
    """

    burst_cv: float | None = 2.0
    burst_share: float = 1.0
    longer: float | None = 1.5
    soak_s: float | None = None
    requests: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("burst", self.burst_cv, 0.0), ("burst-share", self.burst_share, 0.0), ("longer", self.longer, 1.0),
            ("soak", self.soak_s, 0.0), ("requests", self.requests, 1.0),
        ):  # fmt: skip
            if value is not None and not (math.isfinite(value) and value >= least and value > 0):
                raise ConfigError(f"{name}={value:g}", f"give {'at least' if least else 'more than'} {least:g}")


def build_stages(
    stages: Stages, workload: Mapping[str, Any], point: OperatingPoint, context: int | None, texts: int | None
) -> list[dict[str, Any]]:
    """{"name", "asked", "workload", "draw"} of each stage, in order. workload: the config group of the study.

    context: tokens of the longest request the engine takes, texts: that the study's corpus has; None if unknown.
    Raises StudyError where the point's rate is needed and was not measured.
    """
    load = Load.from_dict(point.load)
    own = _at(workload, load, stages.requests)
    found = [_stage("held_out", {}, own)]
    if stages.burst_cv is not None:
        rate = float(f"{_rate(point) * stages.burst_share:.4g}")
        bursts = {**own, "loads": {"request_rate_rps": [rate], "cv": stages.burst_cv}}
        share = {} if stages.burst_share == 1 else {"share": stages.burst_share}
        found.append(_stage("bursts", {"cv": stages.burst_cv, **share}, bursts))
    if stages.longer is not None:
        found.append(_stage("longer", {"times": stages.longer}, _longer(own, stages.longer, context)))
    if stages.soak_s is not None:
        found.append(_stage("soak", {"seconds": stages.soak_s}, _soak(own, stages.soak_s, _rate(point), texts)))
    return found


def _stage(name: str, asked: Mapping[str, float], workload: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "asked": dict(asked), "workload": dict(workload), "draw": HELD_OUT_DRAW}


def _at(workload: Mapping[str, Any], load: Load, requests: int | None) -> dict[str, Any]:
    """The workload with this load alone."""
    if load.concurrency is not None:
        loads: dict[str, Any] = {"concurrency": [load.concurrency]}
    elif load.rate_scale is not None:
        loads = {"rate_scale": [load.rate_scale]}
    else:
        loads = {"request_rate_rps": [load.request_rate_rps], "burstiness": load.burstiness}
        loads["ramp_from_rps"] = load.ramp_from_rps
    return {**deepcopy(dict(workload)), "loads": loads, **({} if requests is None else {"num_requests": requests})}


def _rate(point: OperatingPoint) -> float:
    rate = point.load.get("request_rate_rps") or point.metrics.get("request_throughput_rps")
    if not rate:
        raise StudyError(
            f"the request rate of {point.point_id} was not measured, and bursts and a soak need it",
            "leave them out: --burst 0, no --soak",
        )
    return float(rate)


def _longer(workload: dict[str, Any], factor: float, context: int | None) -> dict[str, Any]:
    """Prompts longer by the factor. Of a trace, answers grow with them: its rows are scaled as they are."""
    longer = deepcopy(workload)
    trace = longer.get("trace") or {}
    if trace.get("file") is not None:
        trace["length_scale"] = float(trace.get("length_scale", 1.0)) * factor
    room = _room_for_prompts(workload, context)
    for group in (longer, *(longer.get("classes") or {}).values()):
        lengths = group.get("prompt_tokens")
        if lengths is not None:
            group["prompt_tokens"] = _scaled(lengths, factor, room)
    return longer


def _scaled(lengths: Mapping[str, Any], factor: float, room: int | None) -> dict[str, Any]:
    scaled = dict(lengths)
    for name in ("value", "low", "high"):
        if scaled.get(name) is not None:
            scaled[name] = _fitting(round(scaled[name] * factor), room)
    if scaled.get("median") is not None:
        scaled["median"] = scaled["median"] * factor
    if scaled.get("values") is not None:
        scaled["values"] = [_fitting(round(v * factor), room) for v in scaled["values"]]
    return scaled


def _fitting(tokens: int, room: int | None) -> int:
    return tokens if room is None else max(1, min(tokens, room))


def _room_for_prompts(workload: Mapping[str, Any], context: int | None) -> int | None:
    """Tokens left for a request's own prompt beside the longest answer and the shared prefix; None if unknown."""
    if context is None:
        return None
    taken = []
    for c in WorkloadSpec.from_dict(workload).request_classes:
        if c.output_tokens.longest is None:
            return None
        taken.append(c.output_tokens.longest + c.shared_prefix_tokens)
    return max(1, context - max(taken) - 1)  # one more for a token that starts every text


def _soak(workload: dict[str, Any], seconds: float, rate: float, texts: int | None) -> dict[str, Any]:
    """Enough requests to last; a trace that is replayed lasts as long as it has rows."""
    requests = max(int(workload.get("num_requests", 200)), math.ceil(seconds * rate * _SOAK_SLACK))
    spec = WorkloadSpec.from_dict(workload)
    if spec.trace is not None and spec.trace.sampling == "window" and hasattr(spec.trace.source, "__len__"):
        texts = int(len(spec.trace.source) * spec.trace.keep_share)
    if texts is not None:
        open_loop = spec.loads[0].concurrency is None  # prepares as many again for its warm-up
        requests = min(requests, int(texts * _SOAK_SHARE / (2 if open_loop else 1)))
    return {**workload, "num_requests": requests, "max_load_s": seconds}
