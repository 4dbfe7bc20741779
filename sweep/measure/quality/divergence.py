"""How far two engines' next-token distributions are apart: KL divergence, top-1 agreement, perplexity.

KL divergence is what llama.cpp's perplexity tool reports for quantized models (pull request 5076) and what "Accuracy is
not all you need" (arXiv 2407.09141) recommends beside flips: it sees differences that perplexity and task accuracy
average away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sweep.measure.quality.logprobs import FloatArray, IntArray, PromptLogprobs

_MASS_FLOOR = 1e-6
_LARGEST_NLL = 50.0


@dataclass(frozen=True)
class QualityResult:
    """Agreement with the reference. quality_kl: nats per token; quality_top1_agreement: fraction; quality_perplexity.

    perplexity_difference: to the reference's, on the same positions, so that what the text itself varies by cancels.
    Standard errors are over prompts (see _clustered_se), None when there is only one prompt. quality_kl is as measured;
    whoever reports it takes max(quality_kl, noise floor), because below the floor engines are tied. identical: every
    log-probability equals the reference's, so that whatever was asked for changed nothing.
    """

    quality_kl: float
    quality_top1_agreement: float
    quality_perplexity: float | None
    perplexity_difference: float | None
    quality_kl_se: float | None
    quality_top1_agreement_se: float | None
    quality_perplexity_se: float | None
    perplexity_difference_se: float | None
    positions: int
    identical: bool


def compare(reference: PromptLogprobs, candidate: PromptLogprobs) -> QualityResult:
    """Mean KL(reference || candidate) and top-1 agreement over positions of the same prompts.

    KL at one position, with p the reference's distribution and q the candidate's, over a partition of the
    vocabulary:

        sum over v in L of p(v) ln(p(v)/q(v))  +  p(A) ln(p(A)/q(A))  +  p(R) ln(p(R)/q(R))

    L: tokens both engines list (top-k plus the token of the text). A: tokens only the reference lists. R: the
    rest. p(A) is known; q(A) is not, but no token the candidate leaves out is likelier than its k-th, and all
    of them together have what its list leaves, so q(A) <= min(|A| q_k, 1 - q(listed)). The q(A) that makes
    the expression smallest within that bound is used: the KL that the lists prove, and no more.

    Lumping tokens together never increases KL (data-processing inequality; Cover & Thomas, Elements of
    Information Theory, log-sum inequality), so this is a lower bound of the full KL. Measured against it with
    k = 20 on SmolLM2-135M: 22 to 32 % low from bf16 through int8 to int4, 45 % at int3, in the same order. It
    is 0 for identical distributions.

    Top-1 agreement: the engines' sets of most likely tokens intersect. Sets, because bf16 logits tie (the
    first two at 4 % of positions), and which of two tied tokens is listed first says nothing.
    """
    if not (
        np.array_equal(reference.actual_ids, candidate.actual_ids)
        and np.array_equal(reference.prompt_index, candidate.prompt_index)
    ):
        raise ValueError("reference and candidate scored different prompts")
    p_ids, p_log = _listed(reference)
    q_ids, q_log = _listed(candidate)
    same = (p_ids[:, :, None] == q_ids[:, None, :]) & (p_ids >= 0)[:, :, None]
    kl = _position_kl(p_ids, p_log, q_log, same, candidate.logprobs[:, -1])
    p_top, q_top = p_log == p_log.max(axis=1, keepdims=True), q_log == q_log.max(axis=1, keepdims=True)
    agree = (same & p_top[:, :, None] & q_top[:, None, :]).any(axis=(1, 2)).astype(np.float64)
    nll, change = -candidate.actual_logprobs, reference.actual_logprobs - candidate.actual_logprobs
    perplexity, perplexity_se = _perplexity(nll, reference.prompt_index)
    change_se = _clustered_se(change, reference.prompt_index)
    return QualityResult(
        quality_kl=float(kl.mean()),
        quality_top1_agreement=float(agree.mean()),
        quality_perplexity=perplexity,
        perplexity_difference=None if perplexity is None else perplexity * -float(np.expm1(-change.mean())),
        quality_kl_se=_clustered_se(kl, reference.prompt_index),
        quality_top1_agreement_se=_clustered_se(agree, reference.prompt_index),
        quality_perplexity_se=perplexity_se,
        perplexity_difference_se=None if perplexity is None or change_se is None else perplexity * change_se,
        positions=len(kl),
        identical=np.array_equal(reference.token_ids, candidate.token_ids)
        and np.array_equal(reference.logprobs, candidate.logprobs),
    )


def _perplexity(nll: FloatArray, prompt_index: IntArray) -> tuple[float | None, float | None]:
    """exp of the mean negative log-likelihood (n,), and its standard error by the delta method: exp(mean) x se.

    None where vLLM's stand-in for an impossible token, -9999, puts it beyond all numbers.
    """
    if nll.mean() > _LARGEST_NLL:
        return None, None
    value, se = float(np.exp(nll.mean())), _clustered_se(nll, prompt_index)
    return value, None if se is None else value * se


def noise_floor(reference: PromptLogprobs, equals: Sequence[PromptLogprobs]) -> float:
    """The KL (nats/token) between engines of equal quality: the largest KL of the reference to its equals.

    equals: repeats of the reference (measure one with concurrency 1 and one batched: batching changes
    rounding), and controls of the same fingerprint under other settings, such as compiled instead of eager.
    Repeats alone can give 0.0 where a control gives 0.0015. Candidates below the floor are tied with the
    reference and with one another.
    """
    if not equals:
        raise ValueError("a noise floor needs at least one repeat or control of the reference")
    return max(compare(reference, other).quality_kl for other in equals)


def _listed(x: PromptLogprobs) -> tuple[IntArray, FloatArray]:
    """Top-k and the token of the text, (n, k+1). Where that is in the top-k already: id -1, logprob -inf."""
    repeated = (x.token_ids == x.actual_ids[:, None]).any(axis=1)
    ids = np.column_stack([x.token_ids, np.where(repeated, -1, x.actual_ids)])
    return ids, np.column_stack([x.logprobs, np.where(repeated, -np.inf, x.actual_logprobs)])


def _position_kl(
    p_ids: IntArray, p_log: FloatArray, q_log: FloatArray, same: npt.NDArray[np.bool_], q_kth_log: FloatArray
) -> FloatArray:
    """The formula of `compare`, (n,). same[i, a, b]: reference's a-th and candidate's b-th token are one."""
    common = same.any(axis=2)
    p = np.exp(p_log)
    q_log_at_p = np.take_along_axis(q_log, same.argmax(axis=2), axis=1)
    log_ratio = np.subtract(p_log, q_log_at_p, where=common, out=np.zeros_like(p_log))
    kl_common = (p * log_ratio).sum(axis=1)

    p_missing = np.where(common, 0.0, p).sum(axis=1)
    p_rest = np.maximum(1.0 - p.sum(axis=1), 0.0)
    q_outside = np.maximum(1.0 - np.exp(np.where(common, q_log_at_p, -np.inf)).sum(axis=1), _MASS_FLOOR)
    n_missing = ((p_ids >= 0) & ~common).sum(axis=1)
    q_bound = np.minimum(n_missing * np.exp(q_kth_log), 1.0 - np.exp(q_log).sum(axis=1))
    p_outside = p_missing + p_rest
    share = np.divide(p_missing, p_outside, where=p_outside > 0, out=np.zeros_like(p_outside))
    # Unbounded, the smallest KL splits q's mass as p's is split: A and R are then one bucket.
    q_missing = np.minimum(np.maximum(q_bound, _MASS_FLOOR), share * q_outside)
    kl = kl_common + _term(p_missing, q_missing) + _term(p_rest, q_outside - q_missing)
    return np.asarray(np.maximum(kl, 0.0))


def _term(p: FloatArray, q: FloatArray) -> FloatArray:
    """p ln(p/q), and 0 where p is 0."""
    ratio = np.divide(p, np.maximum(q, _MASS_FLOOR), where=p > 0, out=np.ones_like(p))
    return np.asarray(p * np.log(ratio))


def _clustered_se(values: FloatArray, prompt_index: IntArray) -> float | None:
    """Standard error of the mean of values (n,), with prompts as clusters.

    Positions of one prompt are correlated, so the usual sd/sqrt(n) is too small. With G prompts and residuals
    summed within each: sqrt(G/(G-1) sum_g (sum_{i in g} (x_i - mean))^2) / n ("Adding error bars to evals",
    arXiv 2411.00640).
    """
    _, cluster = np.unique(prompt_index, return_inverse=True)
    sums = np.bincount(cluster, weights=values - values.mean())
    groups = len(sums)
    if groups < 2:
        return None
    return float(np.sqrt(groups / (groups - 1) * (sums**2).sum()) / len(values))
