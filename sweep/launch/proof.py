"""What must hold for a measurement to be believed, and the evidence that is kept of it with every point.

`gather` writes down what was found, as plain JSON; what could not be found out is null, never 0. `broken_proof` judges
that evidence alone, so a point can be judged again later by other limits. A point that fails is quarantined: visible,
never on the front. Limits and their meaning: config.ProofConfig. The proofs, in the order they are named:

    request errors     every measured request was answered in full
    owner, model       our process alone listens on our port, and serves the model it was started with
    foreign load       the engine produced no tokens but those our client received
    client             its event loop and its sending kept time, and a core of it was not used up
    load               what was delivered is what was asked for, whatever the server did with it
    steadiness         latencies of the second half of a stationary load are those of the first
    cache              the prefix cache hit no more than the workload repeats itself
    devices            nobody else computed on them, and nothing but their power limit held their clocks down

Preemptions, KV-cache blocks, device memory and power are recorded and not judged: they are the configuration's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from sweep.config import ProofConfig
from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.engine.server import Server
from sweep.measure.load import LoadResult
from sweep.measure.telemetry import DeviceReport
from sweep.measure.workload import Load, WorkloadSpec

# Reasons for low clocks that are the node's fault. A software power cap is how a busy GPU always runs.
_FAULTS = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
_CLIENT = ("loop_lag_p99_ms", "loop_lag_max_ms", "send_lateness_p99_ms", "send_lateness_max_ms", "late_send_share",
           "processes", "real_time", "client_cpu_share", "kernel_stamped_share")  # fmt: skip
_LOAD = ("load", "window_s", "window_rule", "stopped_by", "offered_rps", "delivered_rps", "concurrency_offered",
         "concurrency_mean")  # fmt: skip
_ENGINE = ("preemptions", "prefix_cache_hit_rate", "kv_cache_usage_max", "queue_time_mean_ms", "spec_acceptance_rate")


def gather(
    result: LoadResult,
    server: Server,
    workload: WorkloadSpec,
    load: Load,
    cache: Mapping[str, Any],
    drained_s: float | None,
) -> dict[str, Any]:
    """The evidence of one point. Call it while the server still runs.

    cache: what was done to the prefix cache before. drained_s: how long earlier requests took to leave the engine.
    """
    summary, engine = result.summary, result.engine
    return {
        "server": {
            "pid": server.pid,
            "foreign_owner": server.foreign_owner(),
            "started_model": server.served_model,
            "served_model": server.reports_model(),
            "vllm_version": server.vllm_version,
        },
        "load": {
            **{name: summary.get(name) for name in _LOAD},
            "drained_s": drained_s,
            "planned": summary.get("counts", {}).get("planned"),
            "completed": result.completed,
            "failed": result.failed,
            "warmup_failed": result.warmup_failed,
            "errors": list(result.error_examples),
            "short_answers": result.short,
            "answers_at_their_limit": result.cut_off,
        },
        "client": {name: summary.get(name) for name in _CLIENT},
        "engine": {
            **{name: result.metrics.get(name) for name in _ENGINE},
            "prompt_tokens": engine.prompt_tokens,
            "generation_tokens": engine.generation_tokens,
            "client_prompt_tokens": result.prompt_tokens,
            "client_output_tokens": result.output_tokens,
            "running_max": engine.running_max,
            "waiting_max": engine.waiting_max,
            "kv_blocks": engine.kv_blocks,
        },
        "drifts": [drift.to_dict() for drift in result.drifts],
        "stationary": _is_stationary(workload, load),
        "cache": {**cache, "expected_hit_rate": _expected_hit_rate(result, cache)},
        "devices": [_device(device, server) for device in result.devices] or None,
        "ttft_p50_ms": result.metrics.get("ttft_p50_ms"),
    }


def broken_proof(evidence: Mapping[str, Any], limits: Mapping[str, Any]) -> LaunchFailure | None:
    """Every proof that fails, as one cause and all the evidence, or None. limits: fields of config.ProofConfig."""
    limits = {**asdict(ProofConfig()), **limits}
    errors = list(_request_errors(evidence["load"]))
    others = [
        *_ownership(evidence["server"]),
        *_foreign_load(evidence, limits),
        *_client(evidence, limits),
        *_delivery(evidence["load"], limits),
        *_drift(evidence, limits),
        *_cache(evidence, limits),
        *_devices(evidence["devices"] or (), limits),
    ]
    if not errors and not others:
        return None
    cause = FailureCause.request_errors if errors else FailureCause.proof_failed
    return LaunchFailure(cause, "; ".join([*errors, *others]))


def _is_stationary(workload: WorkloadSpec, load: Load) -> bool:
    """Whether the second half of this load is like its first: no ramp, no recorded day, no growing conversations."""
    recorded = workload.trace is not None and workload.trace.sampling == "window"
    return load.ramp_from_rps is None and workload.conversation is None and not recorded


def _expected_hit_rate(result: LoadResult, cache: Mapping[str, Any]) -> float:
    """The highest that the requests sent can cause, what was primed for them included."""
    primed = cache.get("primed_tokens") or 0
    return min(1.0, result.shared_prefix_share + (primed / result.prompt_tokens if result.prompt_tokens else 0.0))


def _device(device: DeviceReport, server: Server) -> dict[str, Any]:
    seen = device.processes
    return {
        **{name: value for name, value in asdict(device).items() if name != "processes"},
        "other_processes": None if seen is None else list(server.foreign_device_processes(seen)),
    }


def _request_errors(load: Mapping[str, Any]) -> Iterator[str]:
    if load["failed"]:
        first = load["errors"][0] if load["errors"] else "no reason was told"
        yield f"{load['failed']} of {load['failed'] + load['completed']} requests failed: {first}"
    elif load["short_answers"]:
        yield f"{load['short_answers']} of {load['completed']} answers have fewer tokens than were asked for"


def _ownership(server: Mapping[str, Any]) -> Iterator[str]:
    if server["foreign_owner"] is not None:
        yield f"the port is served by {server['foreign_owner']}, not by this launch alone"
    if server["served_model"] != server["started_model"]:
        yield f"the server answers to the model {server['served_model']}, started was {server['started_model']}"


def _foreign_load(evidence: Mapping[str, Any], limits: Mapping[str, Any]) -> Iterator[str]:
    made, received = evidence["engine"]["generation_tokens"], evidence["engine"]["client_output_tokens"]
    if made is None or not received or evidence["load"]["failed"] or evidence["load"]["warmup_failed"]:
        return  # what a failed request was given is not known
    if made > received * (1 + limits["max_foreign_tokens_share"]):
        yield f"the engine produced {made:g} tokens and our client received {received}: somebody else used the server"


def _client(evidence: Mapping[str, Any], limits: Mapping[str, Any]) -> Iterator[str]:
    client, ttft_ms = evidence["client"], evidence["ttft_p50_ms"]
    said = {
        "loop_lag_p99_ms": ("max_loop_lag_ms", "its event loop lagged"),
        "send_lateness_p99_ms": ("max_send_lateness_ms", "its requests left late by"),
    }
    for name, (limit_name, words) in said.items():
        if client[name] is not None:
            # Where most requests failed there is no TTFT that could excuse a late one.
            limit = max(limits[limit_name], limits["max_loop_lag_share"] * (ttft_ms or 0.0))
            if client[name] > limit:
                yield f"the load client was late: {words} {client[name]:.1f} ms at p99, more than {limit:.1f} ms"
    share = client["client_cpu_share"]
    if share is not None and share > limits["max_client_cpu_share"]:
        most = limits["max_client_cpu_share"]
        yield f"the load client was at its end: it used {share:.0%} of a core, more than {most:.0%}"


def _delivery(load: Mapping[str, Any], limits: Mapping[str, Any]) -> Iterator[str]:
    for asked_name, got_name, unit in (
        ("offered_rps", "delivered_rps", "requests/s"),
        ("concurrency_offered", "concurrency_mean", "requests in flight"),
    ):
        asked, got = load[asked_name], load[got_name]
        if unit == "requests in flight" and asked is not None and asked < 1:
            continue  # mostly idle: the share says nothing, and the rate is judged above
        if asked and got is not None and got < asked * (1 - limits["max_undelivered_share"]):
            yield f"the load client did not deliver the load: {got:.4g} {unit} of {asked:.4g}"


def _drift(evidence: Mapping[str, Any], limits: Mapping[str, Any]) -> Iterator[str]:
    for drift in evidence["drifts"] if evidence["stationary"] else ():
        if drift["low"] > limits["max_drift"] or drift["high"] < -limits["max_drift"]:
            yield (
                f"the load was not steady: {drift['metric']} changed by {drift['change']:+.0%} from the first half to "
                f"the second (95 % {drift['low']:+.0%} to {drift['high']:+.0%})"
            )


def _cache(evidence: Mapping[str, Any], limits: Mapping[str, Any]) -> Iterator[str]:
    hits, expected = evidence["engine"]["prefix_cache_hit_rate"], evidence["cache"]["expected_hit_rate"]
    if hits is not None and hits > expected + limits["max_unexpected_hit_rate"]:
        yield f"{hits:.0%} prefix-cache hits where the workload shares {expected:.0%}: the cache was warm"


def _devices(devices: Any, limits: Mapping[str, Any]) -> Iterator[str]:
    for device in devices:
        for process in device["other_processes"] or () if limits["exclusive_devices"] else ():
            name, memory = process["name"] or "unknown name", process["memory_mib"]
            held = "" if memory is None else f" with {memory:.0f} MiB"
            yield f"device {device['device']} was shared with process {process['pid']} ({name}){held}"
        for reason in _FAULTS:
            share = (device["throttle"] or {}).get(reason, 0.0)
            if share > limits["max_throttled_share"]:
                yield f"device {device['device']} was slowed down by {reason} in {share:.0%} of the samples"
