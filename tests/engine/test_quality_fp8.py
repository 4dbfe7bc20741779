"""Quality on real servers: an 8-bit KV cache is clearly farther from the reference than the reference's repeat; the
tasks are answered through lm-eval; batching changes nothing; ngram speculation is lossless.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.engine.server import Server
from sweep.measure.quality import QualitySpec, compare, measure_logprobs, noise_floor, quality_prompts
from sweep.measure.quality.completions import check_greedy
from sweep.measure.quality.tasks import TaskSpec, ask_tasks
from sweep.measure.quality.under_load import measure_under_load
from sweep.measure.requests import RequestSet
from sweep.measure.workload import corpus_text, tokenize_corpus

pytestmark = pytest.mark.engine

SPEC = QualitySpec(num_prompts=8, prompt_tokens=128)
NGRAM = {
    "speculative_config.method": "ngram",
    "speculative_config.num_speculative_tokens": 4,
    "speculative_config.prompt_lookup_max": 4,
}


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


def requests(prompts: list[list[int]]) -> RequestSet:
    starts = np.arange(len(prompts) + 1) * len(prompts[0])
    return RequestSet(np.concatenate(prompts).astype(np.int32), starts, np.full(len(prompts), 8), len(prompts))


def test_fp8_kv_cache_is_farther_than_a_repeat(smollm2: Path, engine_python: str, tmp_path: Path) -> None:
    with launch(smollm2, engine_python, tmp_path, "bf16") as server:
        url, model = server.base_url, server.served_model
        prompts = quality_prompts(tokenize_corpus(url, model, corpus_text()[:20_000]), SPEC)
        reference = measure_logprobs(url, model, prompts, replace(SPEC, concurrency=1))
        repeat = measure_logprobs(url, model, prompts, SPEC)
        with pytest.raises(LaunchFailure, match="greater than max allowed") as refused:
            measure_logprobs(url, model, prompts, replace(SPEC, top_logprobs=21))
        pytest.importorskip("lm_eval")
        answers = ask_tasks(url, model, str(smollm2), TaskSpec(("everyday",), limit=24))
        busy = measure_under_load(
            url, model, prompts[:4], SPEC, requests(prompts[4:]),
            concurrency=4, greedy_tokens=8, greedy_prompt_tokens=32, max_kl=0.005,
        )  # fmt: skip
    assert refused.value.cause is FailureCause.request_errors
    assert len(answers["everyday"]) == 24
    assert 11 <= sum(answers["everyday"].values()) <= 23  # chance is 8, and it is a small model
    assert busy.answered > 0 and busy.unchanged and busy.top1_agreement > 0.95

    with launch(smollm2, engine_python, tmp_path, "fp8", kv_cache_dtype="fp8", **NGRAM) as server:
        candidate = measure_logprobs(server.base_url, server.served_model, prompts, SPEC)
        exact = check_greedy(server.base_url, server.served_model, [p[:64] for p in prompts], SPEC, max_tokens=24)
    assert exact.tokens == 8 * 24 and exact.lossless
    assert exact.identical >= 0.75

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
