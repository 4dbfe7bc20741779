"""A study folder as a sweep of SmolLM2-135M on a small CPU machine leaves it: repeats, failures, retries, quality."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from sweep.results.records import LaunchRecord, PointRecord, QualityRecord, RecordStore

OBJECTIVES = ["cost_usd_per_mtok", "ttft_p99_ms", "quality_kl"]
MODEL = "models/smollm2-135m-instruct"
BASE_ARGS = {"max_model_len": 2048, "enforce_eager": True}
NOISE_FLOOR_KL = 0.0015
PRICE_USD_PER_HOUR = 0.09

# name: (arguments, speed against the defaults, TTFT against the defaults, fingerprint, KL, devices)
_ENGINES: dict[str, tuple[dict[str, Any], float, float, str, float, int]] = {
    "defaults": ({}, 1.0, 1.0, "bf16", 0.0004, 1),
    "seqs8": ({"max_num_seqs": 8}, 0.97, 0.88, "bf16", 0.0004, 1),
    "batch512": ({"max_num_seqs": 8, "max_num_batched_tokens": 512}, 0.93, 0.74, "bf16", 0.0004, 1),
    "noprefix": ({"enable_prefix_caching": False}, 1.005, 1.03, "bf16", 0.0004, 1),
    "kvfp8": ({"kv_cache_dtype": "fp8"}, 1.06, 1.05, "kv-fp8", 0.0213, 1),
    "int8": ({"quantization": "int8_per_channel_weight_only"}, 1.31, 0.93, "int8", 0.0061, 1),
    "int8kv": (
        {"quantization": "int8_per_channel_weight_only", "kv_cache_dtype": "fp8", "max_num_seqs": 8},
        1.36, 0.84, "int8-kv-fp8", 0.0287, 1,
    ),
    "ngram": (
        {"speculative_config.method": "ngram", "speculative_config.num_speculative_tokens": 4},
        0.82, 1.12, "bf16", 0.0004, 1,
    ),
    "dp2": ({"data_parallel_size": 2}, 1.38, 0.66, "bf16", 0.0004, 2),
}  # fmt: skip
# Measured shape of the machine: (concurrency, output tok/s, median TTFT in ms) of the defaults.
_LOADS = ((16, 106.0, 2791.0), (8, 93.0, 1365.0), (4, 72.0, 720.0), (1, 26.0, 201.0))
_BROKEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "bnb": (
        {"quantization": "bitsandbytes"},
        "invalid_argument",
        "ValueError: bitsandbytes quantization is currently not supported in cpu.",
    ),
    "fp8": (
        {"quantization": "fp8"},
        "died_at_startup",
        "RuntimeError: _C::static_scaled_fp8_quant() expected at most 0 argument(s) but received 3",
    ),
    "pp2": (
        {"pipeline_parallel_size": 2},
        "first_request_failed",
        "HTTP 500: EngineDeadError: EngineCore encountered an issue (AssertionError) <see stack trace>",
    ),
}


def write_study(folder: Path, *, seed: int = 7) -> Path:
    """Write the study into folder (created) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_meta(folder)
    store = RecordStore(folder)
    rng = random.Random(seed)
    for number, (name, spec) in enumerate(_ENGINES.items()):
        if name == "dp2":
            _timed_out(store, name, spec)
        _measured(store, rng, number, name, spec)
    for number, (name, (args, cause, detail)) in enumerate(_BROKEN.items()):
        _broken(store, 20 + number, name, args, cause, detail)
    # A healthy-looking point whose proof failed: another process used the machine meanwhile.
    args, _, _, fingerprint, _, devices = _ENGINES["noprefix"]
    store.append(
        _point("noprefix", "l-noprefix", args, fingerprint, devices, 32, 0, "quarantined",
               cause="proof_failed", detail="client loop lag p99 212 ms: the load client was starved")
    )  # fmt: skip
    for fingerprint, kl in {spec[3]: spec[4] for spec in _ENGINES.values()}.items():
        failed = fingerprint == "int8-kv-fp8"
        store.append(
            QualityRecord(
                fingerprint=fingerprint,
                reference_fingerprint="bf16",
                state="failed" if failed else "measured",
                metrics={} if failed else {"quality_kl": kl, "quality_top1_agreement": 1 - 2.2 * kl**0.8},
                noise_floor_kl=NOISE_FLOOR_KL,
                positions=0 if failed else 4096,
                launch_id="l-int8kv" if failed else f"l-{fingerprint}",
                finished_at="2026-05-04T11:30:00+00:00",
                cause="request_errors" if failed else None,
                detail="HTTP 400: prompt_logprobs is not supported with fp8 KV cache here" if failed else None,
                standard_errors={} if failed else {"quality_kl": kl / 12},
            )
        )
    return folder


def write_meta(folder: Path) -> None:
    """Only study.json: a study that has not measured anything yet."""
    meta = {
        "schema": 1,
        "study": "demo",
        "created_at": "2026-05-04T10:00:00+00:00",
        "config": {
            "model": {"name": "smollm2-135m", "path": MODEL},
            "hardware": {"name": "cpu", "price_usd_per_device_hour": PRICE_USD_PER_HOUR},
            "workload": {"name": "chat_small", "prompt_tokens": 128, "output_tokens": 32, "num_requests": 32},
            "budget": {"trials": 36, "hours": 0.25, "usd": None},
        },
        "search_space_fingerprint": "5a1f0c77e2d4",
        "objectives": OBJECTIVES,
        "versions": {"sweep": "0.1.0", "vllm": "0.32.0", "optuna": "5.0.0", "python": "3.11.9"},
        "host": {"cpu": "x86-64 with AVX-512", "cores": 2, "memory_gib": 24, "devices": []},
        "workload_checksum": "sha256:6f1d0a",
    }
    (folder / "study.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _engine(args: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "args": {**BASE_ARGS, **args}, "env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}


def _config_hash(name: str) -> str:
    return f"{name.encode().hex():0<12}"[:12]


def _point(
    name: str, launch_id: str, args: dict[str, Any], fingerprint: str, devices: int, concurrency: int,
    repeat: int, state: Any, *, cause: str | None = None, detail: str | None = None, transient: bool = False,
    metrics: dict[str, float | None] | None = None,
) -> PointRecord:  # fmt: skip
    label = f"c{concurrency}"
    return PointRecord(
        point_id=f"{launch_id}-{label}-r{repeat}",
        launch_id=launch_id,
        config_hash=_config_hash(name),
        fingerprint=fingerprint,
        engine=_engine(args),
        load={"concurrency": concurrency, "request_rate_rps": None, "burstiness": 1.0},
        load_label=label,
        params=None if name == "defaults" else {**args, "concurrency": concurrency},
        purpose="baseline" if name == "defaults" else "trial",
        devices=devices,
        state=state,
        cause=cause,
        detail=detail,
        transient=transient,
        metrics=metrics or {},
        repeat=repeat,
        started_at="2026-05-04T10:05:00+00:00",
        finished_at="2026-05-04T10:05:20+00:00",
        raw=f"launches/{launch_id}/{label}-r{repeat}.parquet" if state == "measured" else None,
    )


def _measured(store: RecordStore, rng: random.Random, number: int, name: str, spec: tuple[Any, ...]) -> None:
    args, speed, ttft_factor, fingerprint, _, devices = spec
    launch_id = f"l-{name}"
    for concurrency, tok_s, ttft_ms in _LOADS:
        for repeat in range(3 if name in ("defaults", "int8") and concurrency == 8 else 1):
            noise = rng.uniform(0.985, 1.015)
            rate = tok_s * speed * noise
            ttft = ttft_ms * ttft_factor * rng.uniform(0.97, 1.03)
            itl = 1000 * concurrency / rate * 0.82
            metrics: dict[str, float | None] = {
                "output_throughput_tok_s": rate,
                "output_throughput_per_device_tok_s": rate / devices,
                "request_throughput_rps": rate / 32,
                "user_throughput_tok_s": 1000 / itl,
                "cost_usd_per_mtok": PRICE_USD_PER_HOUR * devices / 3600 / rate * 1e6,
                "ttft_p50_ms": ttft,
                "ttft_p99_ms": None if concurrency == 1 and name == "ngram" else ttft * rng.uniform(1.5, 1.8),
                "itl_p50_ms": itl,
                "itl_p99_ms": itl * rng.uniform(1.3, 1.5),
                "e2e_p99_ms": ttft * 1.6 + 32 * itl,
                "goodput_rps": None,
                "requests_completed": 32.0,
                "requests_failed": 0.0,
                "preemptions": 0.0,
                "kv_cache_usage_max": min(0.9, 0.02 * concurrency),
            }
            store.append(
                _point(name, launch_id, args, fingerprint, devices, concurrency, repeat, "measured", metrics=metrics)
            )
    store.append(_launch(name, launch_id, args, fingerprint, devices, number, startup_s=29 + rng.uniform(0, 6)))


def _launch(
    name: str, launch_id: str, args: dict[str, Any], fingerprint: str, devices: int, number: int, *,
    startup_s: float | None = None, cause: str | None = None, detail: str | None = None, transient: bool = False,
) -> LaunchRecord:  # fmt: skip
    return LaunchRecord(
        launch_id=launch_id,
        config_hash=_config_hash(name),
        fingerprint=fingerprint,
        engine=_engine(args),
        params=None if name == "defaults" else args,
        purpose="baseline" if name == "defaults" else "trial",
        devices=devices,
        device_ids=tuple(range(devices)),
        state="ok" if cause is None else "failed",
        cause=cause,
        detail=detail,
        transient=transient,
        startup_s=startup_s,
        duration_s=80.0 if cause is None else 14.0,
        started_at=f"2026-05-04T10:{number:02d}:00+00:00",
        finished_at=f"2026-05-04T10:{number + 1:02d}:15+00:00",
        log=f"launches/{launch_id}/server.log",
        vllm_version="0.32.0",
    )


def _timed_out(store: RecordStore, name: str, spec: tuple[Any, ...]) -> None:
    """A first try that a retry mends: its loads are failed by a transient cause, then measured."""
    args, _, _, fingerprint, _, devices = spec
    detail = "no completion within 120 s; last log line: Starting to load model"
    for concurrency, *_ in _LOADS:
        store.append(
            _point(name, "l-dp2-first", args, fingerprint, devices, concurrency, 0, "failed",
                   cause="startup_timeout", detail=detail, transient=True)
        )  # fmt: skip
    store.append(
        _launch(
            name, "l-dp2-first", args, fingerprint, devices, 30, cause="startup_timeout", detail=detail, transient=True
        )
    )


def _broken(store: RecordStore, number: int, name: str, args: dict[str, Any], cause: str, detail: str) -> None:
    devices = int(args.get("pipeline_parallel_size", 1))
    launch_id = f"l-{name}"
    for concurrency, *_ in _LOADS:
        store.append(_point(name, launch_id, args, name, devices, concurrency, 0, "failed", cause=cause, detail=detail))
    store.append(_launch(name, launch_id, args, name, devices, number, cause=cause, detail=detail))
