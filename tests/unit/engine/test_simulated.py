"""One launch of the simulated engine: memory, crashes, noise and numerics, each as stated."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sweep.config import HardwareConfig, ModelConfig, SimulationConfig
from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause, classify
from sweep.engine.simulated import CRASHES, SimulatedEngine, expected_kl, prompt_logprobs, simulate
from sweep.engine.simulated_scheduler import Request
from sweep.errors import ConfigError
from sweep.measure.quality import PromptLogprobs, compare

H100X8 = HardwareConfig(name="h100x8", devices=8, memory_gib=79.6)
LLAMA_70B = ModelConfig(
    name="m", path="m", num_attention_heads=64, num_key_value_heads=8, num_hidden_layers=80, weights_gib=131.4
)
SMALL = replace(LLAMA_70B, weights_gib=15.0, num_hidden_layers=32)
QUIET = SimulationConfig(times="roofline")


def launched(
    args: dict[str, Any], model: ModelConfig = SMALL, settings: SimulationConfig = QUIET, launch: str = "1"
) -> SimulatedEngine:
    return simulate(EngineConfig("m", {"max_model_len": 8192, **args}, {}), model, H100X8, settings, launch)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "CUDA out of memory"),
        ({"tensor_parallel_size": 2, "gpu_memory_utilization": 0.85}, "No available memory for the cache blocks"),
        ({"tensor_parallel_size": 2, "max_model_len": 131072}, "larger than the available KV cache memory"),
    ],
)
def test_what_does_not_fit_fails_in_vllms_own_words(args: dict[str, Any], words: str) -> None:
    failure = launched(args, LLAMA_70B).startup_failure
    assert failure is not None and words in failure
    log = f"(EngineCore pid=1) {failure}\n(EngineCore pid=1) RuntimeError: Engine core initialization failed."
    assert classify("startup", 1, log, None)[0] is FailureCause.out_of_memory


def test_without_chunked_prefill_a_batch_must_hold_the_longest_prompt() -> None:
    failure = launched({"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}).startup_failure
    assert failure is not None
    cause, detail = classify("startup", 1, f"(EngineCore pid=1) {failure}", None)
    assert cause is FailureCause.invalid_argument and "smaller than max_model_len (8192)" in detail
    assert launched({"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}).startup_failure is None


def test_what_fits_starts_and_its_cache_is_what_is_left() -> None:
    narrow, wide = (launched({"tensor_parallel_size": t}, LLAMA_70B) for t in (2, 8))
    assert narrow.startup_failure is None and wide.replicas[0].blocks > 5 * narrow.replicas[0].blocks
    assert len(launched({"data_parallel_size": 4}).replicas) == 4


def test_loading_and_compiling_take_time() -> None:
    small, large = launched({}).startup_s, launched({"tensor_parallel_size": 4}, LLAMA_70B).startup_s
    assert QUIET.startup_s < launched({"enforce_eager": True}).startup_s < small < large


def test_the_same_launch_is_the_same_and_another_differs() -> None:
    def first_step_s(launch: str) -> float:
        replica = launched({}, launch=launch).replicas[0]
        replica.add(Request(500, 10))
        step = replica.step(0.0)
        assert step is not None
        return step.duration_s

    assert first_step_s("a") == first_step_s("a") != first_step_s("b")


def test_noise_between_launches_is_as_stated() -> None:
    """Prefill carries the TTFT's spread, decoding the TPOT's."""
    prefill, decode = [], []
    for launch in range(500):
        replica = launched({}, launch=str(launch)).replicas[0]
        replica.add(Request(4000, 2000))
        steps = [replica.step(0.0) for _ in range(30)]
        durations = [step.duration_s for step in steps if step is not None]
        prefill.append(durations[0])
        decode.append(np.mean(durations[1:]))
    assert np.std(prefill) / np.mean(prefill) == pytest.approx(0.10, rel=0.15)
    assert np.std(decode) / np.mean(decode) == pytest.approx(0.06, rel=0.15)


def test_crashes_come_in_regions_of_the_stated_share() -> None:
    crashing = replace(QUIET, crash_share=0.3)
    layouts = [{"tensor_parallel_size": t, "data_parallel_size": d} for t in (1, 2, 4, 8) for d in (1, 2, 4, 8)]
    numerics = [{"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}, {"quantization": "mxfp8"}, {"quantization": "int8"}]
    regions = [layout | numeric for layout in layouts for numeric in numerics]
    fates = [launched(region, settings=crashing).crash for region in regions]
    assert sum(f is not None for f in fates) / len(fates) == pytest.approx(0.3, abs=0.15)
    assert set(Counter(fates)) == {None, *CRASHES}
    assert fates == [launched({**r, "max_num_seqs": 32}, settings=crashing).crash for r in regions]
    assert all(launched(layout, settings=crashing).crash is None for layout in layouts), "defaults crash"
    assert fates != [launched(r, settings=replace(crashing, seed=1)).crash for r in regions]


def scored(args: dict[str, Any], prompts: int = 24, k: int = 20) -> PromptLogprobs:
    rng = np.random.default_rng(5)
    parts: list[list[Any]] = [[], [], [], [], []]
    for index in range(prompts):
        tokens = [int(t) for t in rng.integers(2, 32000, 200)]
        rows = prompt_logprobs(tokens, k, EngineConfig("m", args, {}), seed=0)
        for own, row in zip(tokens[1:], rows, strict=True):
            listed = sorted(row.items(), key=lambda item: -item[1])[:k]
            for part, value in zip(
                parts, ([t for t, _ in listed], [v for _, v in listed], own, row[own], index), strict=True
            ):
                part.append(value)
    ids, logprobs, actual, actual_logprobs, prompt_index = (np.array(part) for part in parts)
    return PromptLogprobs(ids, logprobs, actual, actual_logprobs, prompt_index)


@pytest.mark.parametrize("args", [{"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}, {"quantization": "awq"}])
def test_numerics_cost_the_stated_kl(args: dict[str, Any]) -> None:
    found = compare(scored({}), scored(args))
    # Lists of 20 prove a part of the divergence only, and two engines differ a little anyway.
    assert 0.6 * expected_kl(args) < found.quality_kl < 1.2 * (expected_kl(args) + 0.0005)
    assert found.quality_top1_agreement < 1.0


def test_the_noise_floor_is_not_zero_and_repeats_are_equal() -> None:
    assert compare(scored({}), scored({})).quality_kl == 0.0
    other = compare(scored({}), scored({"max_num_seqs": 8})).quality_kl
    assert 0.0002 < other < 0.0006 < expected_kl({"quantization": "fp8"})


def test_kernels_cover_what_they_can_and_the_roofline_the_rest() -> None:
    engine = launched({"enforce_eager": True}, settings=SimulationConfig())
    assert engine.source.startswith("roofline (") and launched({}).source == "roofline (asked for)"


def test_a_model_of_unknown_size_cannot_be_simulated() -> None:
    with pytest.raises(ConfigError, match=r"without model\.weights_gib"):
        launched({}, ModelConfig(name="m", path="m", num_hidden_layers=4))
