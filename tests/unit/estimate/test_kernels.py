"""The estimator on measured kernels: what it covers, and the faults of its package that must not show."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest

from sweep import compose
from sweep.config import HardwareConfig
from sweep.engine.engine_args import EngineConfig
from sweep.estimate import Estimate, Lengths, Unknown, estimate, is_available
from sweep.estimate.kernels import kernel_steps
from sweep.measure.workload import Load

pytestmark = pytest.mark.skipif(not is_available(), reason="the estimate extra is not installed")

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
LENGTHS = Lengths(1024, 256)
GPUS = {
    name: HardwareConfig(name=name, devices=8, memory_gib=memory_gib)
    for name, memory_gib in (("a100x8", 80.0), ("h100x8", 79.6), ("h200x8", 140.4), ("b200x8", 179.0), ("l40sx8", 45.0))
}


def known(
    model: str = LLAMA, gpu: str = "h100x8", concurrency: int = 32, lengths: Lengths = LENGTHS,
    acceptance: float | None = None, **args: Any,
) -> Estimate:  # fmt: skip
    engine = EngineConfig(model, {"max_model_len": 8192, **args}, {})
    found = estimate(engine, GPUS[gpu], lengths, Load(concurrency), acceptance=acceptance)
    assert isinstance(found, Estimate), found
    return found


@pytest.mark.parametrize("model", ["gpt_oss_120b", "llama31_8b", "llama33_70b", "qwen3_30b_a3b", "qwen3_32b"])
@pytest.mark.parametrize("hardware", ["h100x8", "h200x8", "b200x8"])
def test_every_shipped_model_is_covered(model: str, hardware: str) -> None:
    config = compose.load_config([f"model={model}", f"hardware={hardware}"])
    engine = EngineConfig(config.model.path, {**config.model.args, "tensor_parallel_size": 8}, {})
    found = estimate(engine, config.hardware, LENGTHS, Load(32))
    assert isinstance(found, Estimate) and found.fits
    assert found.ttft_ms and found.tpot_ms and 1 < found.tpot_ms < 100 and 10 < found.ttft_ms < 1000


def test_faster_gpus_are_faster() -> None:
    times = [known(gpu=gpu).tpot_ms for gpu in ("l40sx8", "a100x8", "h100x8", "h200x8", "b200x8")]
    assert times == sorted(times, reverse=True)  # type: ignore[type-var]


def test_memory_decides_what_fits() -> None:
    big = "meta-llama/Llama-3.3-70B-Instruct"
    assert known(big).fits is False and known(big, tensor_parallel_size=4).fits is True
    assert known(big).memory_gib == pytest.approx(131, rel=0.1)


def test_block_scaled_fp8_does_not_cost_double() -> None:
    plain, block = (known(quantization=q, concurrency=8).tpot_ms for q in ("fp8", "fp8_per_block"))
    assert plain is not None and block == pytest.approx(plain, rel=0.15)


def test_a_prefix_changes_the_answer_in_either_order() -> None:
    """The package's own run_agg answers the second of these from the cache entry of the first."""
    without, having = Lengths(4096, 64), Lengths(4096, 64, shared_prefix_tokens=3584)
    first = [known(lengths=lengths).ttft_ms for lengths in (without, having)]
    assert [known(lengths=lengths).ttft_ms for lengths in (having, without)] == first[::-1]
    assert first[0] > 1.5 * first[1]  # type: ignore[operator]


def test_verified_drafts_read_the_cache_once() -> None:
    """A step that verifies three drafts of a long context costs far less than four steps."""
    steps = kernel_steps(EngineConfig(LLAMA, {}, {}), {}, GPUS["h100x8"])
    assert steps.step_ms(0, 0, 0, 32, 4, 8000) < 1.5 * steps.step_ms(0, 0, 0, 32, 1, 8000)


@pytest.mark.parametrize(
    ("model", "gpu", "args", "words"),
    [
        (LLAMA, "a100x8", {"quantization": "fp8"}, "fp8"),
        (LLAMA, "h100x8", {"quantization": "gptq"}, "quantization=gptq"),
        ("Qwen/Qwen3-32B", "h100x8", {"tensor_parallel_size": 3}, "divisible"),
        ("someone/unheard-of", "h100x8", {}, "no config.json of someone/unheard-of"),
        (LLAMA, "h100x8", {"speculative_config.method": "ngram", "speculative_config.num_speculative_tokens": 2},
         "acceptance"),
    ],
)  # fmt: skip
def test_what_is_not_covered_is_unknown_with_its_reason(
    model: str, gpu: str, args: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("asked a hub"))
    found = estimate(EngineConfig(model, args, {}), GPUS[gpu], LENGTHS, Load(8))
    assert isinstance(found, Unknown) and words in found.reason and "/" not in found.reason.replace(model, "")


def test_other_hardware_and_ramps_are_unknown() -> None:
    engine = EngineConfig(LLAMA, {}, {})
    cpu = estimate(engine, HardwareConfig(name="mi300x", memory_gib=192.0), LENGTHS, Load(1))
    ramp = estimate(engine, GPUS["h100x8"], LENGTHS, Load(None, 8.0, ramp_from_rps=1.0))
    assert isinstance(cpu, Unknown) and "mi300x" in cpu.reason and isinstance(ramp, Unknown)


def test_loading_tables_is_silent(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    known(gpu="h200x8", tensor_parallel_size=2, kv_cache_dtype="fp8", max_num_batched_tokens=3000)
    out = capfd.readouterr()
    assert not out.out and not out.err and not caplog.records
