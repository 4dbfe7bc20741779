"""Maths of sweep.measure.quality against full distributions, and its files and failures."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.errors import ConfigError
from sweep.measure.quality import (
    FloatArray,
    PromptLogprobs,
    QualitySpec,
    cache_path,
    compare,
    load_logprobs,
    measure_logprobs,
    noise_floor,
    quality_prompts,
    save_logprobs,
)
from sweep.measure.quality import logprobs as logprobs_module

PROMPTS = 4


def log_softmax(logits: FloatArray) -> FloatArray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def as_measured(full: FloatArray, k: int, actual: np.ndarray) -> PromptLogprobs:
    """What a server would report of the full log-distributions (n, vocabulary)."""
    ids = np.argsort(-full, axis=1, kind="stable")[:, :k]
    rows = np.arange(len(full))
    return PromptLogprobs(
        token_ids=ids,
        logprobs=np.take_along_axis(full, ids, axis=1),
        actual_ids=actual,
        actual_logprobs=full[rows, actual],
        prompt_index=rows * PROMPTS // len(full),
    )


def random_pair(seed: int, n: int, vocabulary: int, sharpness: float, noise: float) -> tuple[FloatArray, FloatArray]:
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.standard_normal((n, vocabulary))
    return log_softmax(logits), log_softmax(logits + noise * rng.standard_normal((n, vocabulary)))


def measured_pair(p: FloatArray, q: FloatArray, k: int, seed: int = 0) -> tuple[PromptLogprobs, PromptLogprobs]:
    actual = np.random.default_rng(seed).integers(p.shape[1], size=len(p))
    return as_measured(p, k, actual), as_measured(q, k, actual)


def full_kl(p: FloatArray, q: FloatArray) -> float:
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


pairs = st.builds(
    random_pair,
    seed=st.integers(0, 2**32 - 1),
    n=st.just(8),
    vocabulary=st.integers(8, 200),
    sharpness=st.floats(0.0, 12.0),
    noise=st.floats(0.0, 12.0),
)


@settings(deadline=None, max_examples=300)
@given(pair=pairs, k=st.integers(1, 8))
def test_kl_is_a_lower_bound_of_the_full_kl(pair: tuple[FloatArray, FloatArray], k: int) -> None:
    p, q = pair
    result = compare(*measured_pair(p, q, k))
    assert 0.0 <= result.quality_kl <= full_kl(p, q) + 1e-5
    assert 0.0 <= result.quality_top1_agreement <= 1.0


@settings(deadline=None)
@given(pair=pairs)
def test_kl_is_the_full_kl_when_the_whole_vocabulary_is_listed(pair: tuple[FloatArray, FloatArray]) -> None:
    p, q = pair
    result = compare(*measured_pair(p, q, k=p.shape[1]))
    assert result.quality_kl == pytest.approx(full_kl(p, q), abs=1e-5)
    both_top = (p == p.max(axis=1, keepdims=True)) & (q == q.max(axis=1, keepdims=True))
    assert result.quality_top1_agreement == both_top.any(axis=1).mean()


@settings(deadline=None)
@given(pair=pairs, k=st.integers(1, 8))
def test_identical_distributions_have_no_divergence(pair: tuple[FloatArray, FloatArray], k: int) -> None:
    p, _ = pair
    result = compare(*measured_pair(p, p.copy(), k))
    assert result.quality_kl == pytest.approx(0.0, abs=1e-12)
    assert (result.quality_top1_agreement, result.quality_top1_agreement_se) == (1.0, 0.0)


def test_kl_orders_candidates_by_their_distance() -> None:
    """From rounding to ruin, with a long tail and k = 20."""
    noises = [0.01, 0.02, 0.05, 0.2, 0.5, 2.0, 8.0]
    found = [compare(*measured_pair(*random_pair(1, 512, 5000, 3.0, noise), k=20)) for noise in noises]
    kl = [r.quality_kl for r in found]
    agreement = [r.quality_top1_agreement for r in found]
    assert kl == sorted(kl) and len(set(kl)) == len(kl)
    assert agreement == sorted(agreement, reverse=True)
    assert all(r.quality_kl_se is not None and r.quality_kl_se > 0 for r in found)


@pytest.mark.parametrize("candidate_is", ["confident", "flat"])
def test_a_candidate_that_shares_no_token_with_the_reference_is_far_away(candidate_is: str) -> None:
    """In one bucket with the rest, all unshared tokens would make such a candidate look perfect."""
    n, vocabulary, k = 16, 1000, 20
    p, q = np.zeros((n, vocabulary)), np.zeros((n, vocabulary))
    p[:, :k] = 12.0 + np.linspace(1, 0, k)
    q[:, k : 2 * k] = 12.0 if candidate_is == "confident" else 0.01
    p, q = log_softmax(p), log_softmax(q)
    actual = np.full(n, 999)
    result = compare(as_measured(p, k, actual), as_measured(q, k, actual))
    assert 0.5 * full_kl(p, q) < result.quality_kl <= full_kl(p, q)
    assert result.quality_top1_agreement == 0.0


def test_certain_tokens_give_finite_kl() -> None:
    """One token with all the mass (the rest clamped to -9999 as vLLM does), agreeing and disagreeing."""
    row = np.full(10, -9999.0)
    p, q = row.copy(), row.copy()
    p[0], q[1] = 0.0, 0.0
    actual = np.array([5, 5])
    reference = as_measured(np.stack([p, p]), 3, actual)
    candidate = as_measured(np.stack([p, q]), 3, actual)
    result = compare(reference, candidate)
    assert np.isfinite(result.quality_kl) and result.quality_kl > 1.0
    assert result.quality_top1_agreement == 0.5


def test_tied_most_likely_tokens_agree() -> None:
    tied = log_softmax(np.array([[2.0, 2.0, 0.0, -1.0]]))
    first = log_softmax(np.array([[2.0, 1.0, 0.0, -1.0]]))
    third = log_softmax(np.array([[2.0, 2.0, 3.0, -1.0]]))
    for other, expected in ((first, 1.0), (third, 0.0)):
        assert compare(*measured_pair(tied, other, k=2)).quality_top1_agreement == expected


def test_standard_error_treats_prompts_as_clusters() -> None:
    """Positions that repeat within a prompt carry no more information than one of them."""
    p, q = random_pair(3, PROMPTS, 100, 3.0, 1.0)
    once = compare(*measured_pair(p, q, k=20))
    actual = np.repeat(np.random.default_rng(0).integers(100, size=PROMPTS), 50)
    often = compare(
        as_measured(np.repeat(p, 50, axis=0), 20, actual), as_measured(np.repeat(q, 50, axis=0), 20, actual)
    )
    assert (once.positions, often.positions) == (PROMPTS, 50 * PROMPTS)
    assert often.quality_kl == pytest.approx(once.quality_kl)
    actual = actual[::50]
    each = [
        compare(as_measured(p[[i]], 20, actual[[i]]), as_measured(q[[i]], 20, actual[[i]])).quality_kl
        for i in range(PROMPTS)
    ]
    assert often.quality_kl_se == pytest.approx(np.std(each, ddof=1) / np.sqrt(PROMPTS))
    assert once.quality_kl_se == pytest.approx(often.quality_kl_se)


def test_one_prompt_has_no_standard_error() -> None:
    reference, candidate = measured_pair(*random_pair(4, 8, 50, 3.0, 1.0), k=5)
    one = np.zeros(8, np.int64)
    result = compare(replace(reference, prompt_index=one), replace(candidate, prompt_index=one))
    assert (result.quality_kl_se, result.quality_top1_agreement_se) == (None, None)


def test_noise_floor_is_the_largest_of_the_equals() -> None:
    p, near = random_pair(5, 64, 500, 3.0, 0.02)
    _, farther = random_pair(5, 64, 500, 3.0, 0.05)
    reference, first = measured_pair(p, near, k=20)
    _, second = measured_pair(p, farther, k=20)
    assert noise_floor(reference, [reference]) == pytest.approx(0.0, abs=1e-12)
    assert noise_floor(reference, [first, second, reference]) == compare(reference, second).quality_kl
    with pytest.raises(ValueError, match="at least one"):
        noise_floor(reference, [])


def test_different_prompts_cannot_be_compared() -> None:
    reference, candidate = measured_pair(*random_pair(6, 8, 50, 3.0, 1.0), k=5)
    with pytest.raises(ValueError, match="different prompts"):
        compare(reference, replace(candidate, actual_ids=candidate.actual_ids + 1))


def test_prompts_are_fixed_disjoint_stretches_of_the_corpus() -> None:
    corpus = list(range(10_000))
    spec = QualitySpec(num_prompts=16, prompt_tokens=256)
    prompts = quality_prompts(corpus, spec)
    assert prompts == quality_prompts(np.array(corpus), spec)
    assert all(p == list(range(p[0], p[0] + 256)) for p in prompts)
    assert len({token for p in prompts for token in p}) == 16 * 256
    assert prompts != quality_prompts(corpus, replace(spec, seed=1))
    with_bos = quality_prompts(corpus, spec, bos_token_id=-7)
    assert [p[0] for p in with_bos] == [-7] * 16 and [p[1:] for p in with_bos] == [p[1:] for p in prompts]


@pytest.mark.parametrize(("tokens", "hint"), [(1000, "quality.num_prompts=3"), (200, "smaller quality.prompt_tokens")])
def test_a_short_corpus_is_a_config_error(tokens: int, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        quality_prompts(range(tokens), QualitySpec())


@pytest.mark.parametrize("field", ["num_prompts", "top_logprobs", "concurrency", "request_timeout_s", "prompt_tokens"])
def test_spec_names_the_bad_field(field: str) -> None:
    with pytest.raises(ConfigError, match=f"quality.{field} is 0"):
        QualitySpec(**{field: 0})


def test_npz_roundtrip_and_damaged_files(tmp_path: Path) -> None:
    measured, _ = measured_pair(*random_pair(7, 8, 50, 3.0, 1.0), k=5)
    path = tmp_path / "deep" / "x.npz"
    assert load_logprobs(path) is None
    save_logprobs(path, measured)
    loaded = load_logprobs(path)
    assert loaded is not None
    for name in ("token_ids", "logprobs", "actual_ids", "actual_logprobs", "prompt_index"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(measured, name))
    assert [p.name for p in path.parent.iterdir()] == ["x.npz"]
    whole = path.read_bytes()
    for damaged in (b"", whole[:200], whole[:-30], b"not an archive"):
        path.write_bytes(damaged)
        assert load_logprobs(path) is None


def test_cache_path_tells_measurements_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tmp_path / "model"
    model.mkdir()
    weights = model / "model.safetensors"
    weights.write_bytes(b"one")
    prompts, spec = [[1, 2, 3]], QualitySpec()

    def path(**changed: str) -> Path:
        names = {
            "model": str(model),
            "fingerprint": "abc",
            "engine_version": "0.32.0",
            "device": "NVIDIA H100/80GB",
        }
        return cache_path([prompts, spec.top_logprobs], **{**names, **changed})

    first = path()
    assert first.parent.parent == tmp_path / "sweep" / "quality"
    assert first.name == "abc-0.32.0-NVIDIA_H100_80GB.npz"
    assert first == path()
    os.utime(weights, ns=(1, 1))
    others = {
        path(),
        path(fingerprint="def"),
        path(engine_version="0.33.0"),
        path(device="cpu"),
        path(model="org/name"),
        cache_path([[[1, 2, 4]], 20], model="org/name", fingerprint="a", engine_version="1", device="cpu"),
        cache_path([prompts, 5], model="org/name", fingerprint="a", engine_version="1", device="cpu"),
    }
    assert len(others | {first}) == 8


def test_no_server_is_engine_died() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused and nobody else gets the port
        with pytest.raises(LaunchFailure) as failure:
            measure_logprobs(f"http://127.0.0.1:{s.getsockname()[1]}", "m", [[1, 2], [3, 4]], QualitySpec())
    assert failure.value.cause is FailureCause.engine_died


def test_a_silent_server_is_a_time_out() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        spec = QualitySpec(request_timeout_s=0.2)
        with pytest.raises(LaunchFailure) as failure:
            measure_logprobs(f"http://127.0.0.1:{s.getsockname()[1]}", "m", [[1, 2]], spec)
    assert failure.value.cause is FailureCause.load_timeout


def entry(logprob: float) -> dict[str, float]:
    return {"logprob": logprob, "rank": 1}


@pytest.mark.parametrize(
    "answer",
    [
        "not an object",
        {},
        {"choices": [{"prompt_logprobs": None}]},
        {"choices": [{"prompt_logprobs": [None]}]},
        {"choices": [{"prompt_logprobs": [None, {"7": entry(-1.0)}]}]},
        {"choices": [{"prompt_logprobs": [None, {"5": entry(-1.0)}]}]},
        {"choices": [{"prompt_logprobs": [None, {"5": entry(float("nan")), "7": entry(-1.0)}]}]},
    ],
    ids=["text", "empty", "null", "too few positions", "text token missing", "too few tokens", "nan"],
)
def test_an_unusable_answer_is_request_errors(answer: object) -> None:
    with pytest.raises(LaunchFailure) as failure:
        logprobs_module._parse(json.dumps(answer), 0, [3, 5], QualitySpec(top_logprobs=2))
    assert failure.value.cause is FailureCause.request_errors


def test_answers_are_read_with_and_without_the_text_token_among_the_top() -> None:
    positions = [
        None,
        {"5": entry(-3.0), "8": entry(-0.5), "7": entry(-1.0)},
        {"9": entry(-2.0), "4": entry(-0.1)},
    ]
    parsed = logprobs_module._parse(
        json.dumps({"choices": [{"prompt_logprobs": positions}]}), 6, [3, 5, 9], QualitySpec(top_logprobs=2)
    )
    assert parsed.token_ids.tolist() == [[8, 7], [4, 9]]
    assert parsed.logprobs.tolist() == [[-0.5, -1.0], [-0.1, -2.0]]
    assert (parsed.actual_ids.tolist(), parsed.actual_logprobs.tolist()) == ([5, 9], [-3.0, -2.0])
    assert parsed.prompt_index.tolist() == [6, 6]
