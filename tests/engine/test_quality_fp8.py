"""Quality on real servers: an 8-bit KV cache is clearly farther from the reference than the reference's repeat."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.engine.server import Server
from sweep.measure.quality import QualitySpec, compare, measure_logprobs, noise_floor, quality_prompts
from sweep.measure.workload import corpus_text, tokenize_corpus

pytestmark = pytest.mark.engine

SPEC = QualitySpec(num_prompts=8, prompt_tokens=128)


def launch(model: Path, python: str, folder: Path, name: str, **args: object) -> Server:
    engine = EngineConfig(
        str(model),
        {"enforce_eager": True, "max_model_len": 1024, **args},
        {"VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    return Server(
        engine,
        python=python,
        log_path=folder / f"{name}.log",
        device_env={},
        startup_timeout_s=300,
        stop_timeout_s=30,
        launch_id=f"quality-{name}",
    )


def test_fp8_kv_cache_is_farther_than_a_repeat(smollm2: Path, engine_python: str, tmp_path: Path) -> None:
    with launch(smollm2, engine_python, tmp_path, "bf16") as server:
        prompts = quality_prompts(tokenize_corpus(server.base_url, server.served_model, corpus_text()[:20_000]), SPEC)
        reference = measure_logprobs(server.base_url, server.served_model, prompts, replace(SPEC, concurrency=1))
        repeat = measure_logprobs(server.base_url, server.served_model, prompts, SPEC)
        with pytest.raises(LaunchFailure, match="greater than max allowed") as refused:
            measure_logprobs(server.base_url, server.served_model, prompts, replace(SPEC, top_logprobs=21))
    assert refused.value.cause is FailureCause.request_errors
    with launch(smollm2, engine_python, tmp_path, "fp8", kv_cache_dtype="fp8") as server:
        candidate = measure_logprobs(server.base_url, server.served_model, prompts, SPEC)

    assert reference.logprobs.shape == (8 * 127, 20)
    assert reference.actual_ids.tolist() == [token for prompt in prompts for token in prompt[1:]]
    assert (np.diff(reference.logprobs, axis=1) <= 0).all()
    assert np.exp(reference.logprobs).sum(axis=1).max() <= 1 + 1e-5
    assert -4.0 < reference.actual_logprobs.mean() < -2.0  # a real model on English text, nats per token

    floor = noise_floor(reference, [repeat])
    fp8 = compare(reference, candidate)
    assert floor < 0.002
    assert fp8.quality_kl_se is not None
    assert fp8.quality_kl - 4 * fp8.quality_kl_se > max(5 * floor, 0.005)
    assert fp8.quality_top1_agreement < compare(reference, repeat).quality_top1_agreement
    assert fp8.quality_top1_agreement > 0.8
