"""The load client against vLLM's own bench on the same running server: `proof.cross_check=true`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sweep.engine.server import Server
from sweep.launch.spec import LaunchSpec
from sweep.measure.load import measure_load
from sweep.measure.vllm_bench import run_vllm_bench
from sweep.measure.workload import Load, RequestSet, WorkloadSpec, build_requests

COMPARED = ("output_throughput_tok_s", "ttft_p50_ms", "tpot_p50_ms", "e2e_p50_ms")


def cross_check(
    spec: LaunchSpec,
    server: Server,
    workload: WorkloadSpec,
    requests: RequestSet,
    corpus: npt.NDArray[Any],
    load: Load,
) -> dict[str, Any]:
    """The same closed loop with fixed lengths (the requests' medians) through both clients.

    Returns {"load", "prompt_tokens", "output_tokens", metric: {"sweep": value, "vllm_bench": value}}. Raises
    LaunchFailure if either fails, ValueError for an open loop, which the two pace differently, or for text prompts.
    """
    if load.concurrency is None:
        raise ValueError(f"load {load.label} is no closed loop")
    if requests.is_text:
        raise ValueError("prompts given as text have no token lengths to repeat")
    prompt, output = int(np.median(np.diff(requests.starts))), int(np.median(requests.max_tokens))
    fixed = workload.with_fixed_lengths(prompt, output)
    server.reset_prefix_cache()
    ours = measure_load(
        server.base_url,
        server.served_model,
        fixed,
        load,
        build_requests(fixed, corpus, draw=spec.repeat),
        spec.folder / f"cross_check-{load.label}.parquet",
        price_usd_per_device_hour=spec.price_usd_per_device_hour,
        devices=spec.devices,
    ).metrics
    server.reset_prefix_cache()
    theirs = run_vllm_bench(
        server.base_url,
        server.served_model,
        python=spec.python,
        tokenizer=spec.engine_config.model,
        concurrency=load.concurrency,
        num_requests=workload.num_requests,
        prompt_tokens=prompt,
        output_tokens=output,
        warmup_requests=max(workload.warmup_requests, load.concurrency),
    )
    pairs = {name: {"sweep": ours.get(name), "vllm_bench": theirs.get(name)} for name in COMPARED}
    return {"load": load.label, "prompt_tokens": prompt, "output_tokens": output, **pairs}
