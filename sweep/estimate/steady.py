"""The steady state of a deployment under a load, from the duration of its scheduler's steps.

A request is prefilled in mixed steps, beside those that decode, and then decodes. While b requests are in flight, each
of them sees the prefills of the other b - 1 during its own life; that and Little's law give all three figures. Means
only: no percentile, no burst, no length distribution, no preemption. Sources: the step structure and the two constants
of the time to first token are those that the authors of aiconfigurator calibrated on 1,928 measured vLLM points
(`VLLMBackend`); queueing before the engine, KV-cache limits, data parallelism and open loops are added here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sweep.config import HardwareConfig
from sweep.engine.engine_args import EngineConfig
from sweep.estimate.kernels import kernel_steps, max_position
from sweep.estimate.knobs import NotCovered, Scheduling, scheduling
from sweep.estimate.steps import Memory, Steps
from sweep.measure.outline import make_outline
from sweep.measure.workload import Load, WorkloadSpec

DISPATCH_MS_PER_LAYER = 0.8


@dataclass(frozen=True)
class Estimate:
    """Means at steady state; memory_gib: of one device at this load.

    fits: whether the engine would start; None when too close to call, and the times then hold if it does. Where it
    does not, times are None. ttft_ms is None where requests arrive faster than they can be served: the queue, and
    with it the time, grows without bound. waiting_ms: the part of ttft_ms that is spent behind other requests.
    decode_step_ms, mixed_step_ms: between two outputs of a request, where nobody's prompt is read beside it and where
    one is; mixed_share: of the steps that are mixed. outputs_per_step: tokens, above 1 with accepted drafts.
    """

    ttft_ms: float | None
    tpot_ms: float | None
    output_throughput_tok_s: float | None
    memory_gib: float
    fits: bool | None
    waiting_ms: float = 0.0
    decode_step_ms: float = 0.0
    mixed_step_ms: float = 0.0
    mixed_share: float = 0.0
    outputs_per_step: float = 1.0


@dataclass(frozen=True)
class Unknown:
    """No estimate: what the kernel data does not cover."""

    reason: str


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a request. shared_prefix_tokens: of the prompt, found in the prefix cache if there is one."""

    prompt_tokens: int
    output_tokens: int
    shared_prefix_tokens: int = 0

    @classmethod
    def of(cls, workload: WorkloadSpec) -> Lengths | Unknown:
        """The means over the requests of a workload's first draw; of a conversation, the earlier turns are shared."""
        if not workload.ignore_eos:
            return Unknown("how long answers are is the model's choice (workload.ignore_eos=false)")
        outline = make_outline(workload, 0)
        if outline.rows is not None:
            return Unknown("a trace that brings its own prompts or shared blocks is not modelled")
        class_prefixes = np.array([c.shared_prefix_tokens for c in workload.request_classes])
        shared = np.where(outline.prefix_ids < 0, 0, class_prefixes[outline.class_ids])
        follows = (outline.after >= 0) & (outline.text_ids[outline.after] == outline.text_ids)
        history = np.where(follows, outline.own_tokens[outline.after], 0)
        prompt, output = shared + outline.own_tokens, outline.max_tokens
        return cls(
            *(max(round(float(x.mean())), least) for x, least in ((prompt, 1), (output, 1), (shared + history, 0)))
        )


def estimate(
    engine: EngineConfig,
    hardware: HardwareConfig,
    lengths: Lengths,
    load: Load,
    *,
    acceptance: float | None = None,
) -> Estimate | Unknown:
    """Mean TTFT, TPOT and output throughput of this engine config under this load, or why there is no figure.

    acceptance: accepted share of the proposed draft tokens (the metric spec_acceptance_rate); needed with
    speculative decoding, because it depends on the text.
    """
    if load.ramp_from_rps is not None or load.rate_scale is not None:
        return Unknown("a ramp or a trace has no steady state")
    args = engine.nested_args
    limits = scheduling(args, hardware)
    if hardware.memory_gib is None:
        return Unknown(f"the memory of {hardware.name} is not known: set hardware.memory_gib")
    if limits.draft_tokens and acceptance is None:
        return Unknown("speculative decoding needs an acceptance: it depends on the text, not on the engine")
    try:
        steps = kernel_steps(engine, args, hardware)
        longest = limits.max_model_len or max_position(engine.model) or 0
        return steady_state(steps, limits, lengths, load, hardware.memory_gib, longest, acceptance or 0.0)
    except NotCovered as reason:
        return Unknown(str(reason))


def steady_state(
    steps: Steps,
    limits: Scheduling,
    lengths: Lengths,
    load: Load,
    device_gib: float,
    max_model_len: int,
    acceptance: float,
) -> Estimate:
    """As `estimate`, for any model of steps."""
    memory = steps.memory(limits.max_num_batched_tokens)
    fits, cache_gib = room(memory, limits.gpu_memory_utilization * device_gib, max_model_len)
    mean_tokens = lengths.prompt_tokens + lengths.output_tokens / 2
    if fits is False:
        return Estimate(None, None, None, memory.fixed_gib + memory.kv_gib(1, max_model_len), False)
    # One slot: a replica, or one of the micro-batches that a pipeline keeps in flight.
    slots = limits.replicas * limits.pipeline
    by_cache = int(cache_gib / memory.kv_gib(1, mean_tokens))
    most = max(1, min(limits.max_num_seqs // limits.pipeline, by_cache))
    slot = _Slot(steps, limits, lengths, acceptance)
    if load.concurrency is not None:
        batch = min(max(1, math.ceil(load.concurrency / slots)), most)
        served = min(load.concurrency, slots * batch)
        life = slot.life(batch)
        rate = served / life.request_ms
        queued_ms = (load.concurrency - served) / rate
        ttft: float | None = life.ttft_ms + queued_ms
    else:
        assert load.request_rate_rps is not None
        wanted = load.request_rate_rps / 1e3 / slots
        batch = slot.smallest_batch(wanted, most)
        life = slot.life(batch)
        overloaded = batch / life.request_ms < wanted
        rate = slots * min(wanted, batch / life.request_ms)
        queued_ms = 0.0
        ttft = None if overloaded else life.ttft_ms
    kv_gib = memory.kv_gib(batch, mean_tokens)
    return Estimate(
        ttft,
        life.tpot_ms,
        rate * lengths.output_tokens * 1e3,
        memory.fixed_gib + kv_gib,
        fits,
        waiting_ms=life.waiting_ms + queued_ms,
        decode_step_ms=life.decode_step_ms,
        mixed_step_ms=life.mixed_step_ms,
        mixed_share=life.mixed_share,
        outputs_per_step=life.outputs_per_step,
    )


def room(memory: Memory, usable_gib: float, max_model_len: int) -> tuple[bool | None, float]:
    """Whether one sequence of max_model_len fits beside everything else, as vLLM demands, and the cache in GiB.

    None when only the allowance within fixed_gib decides.
    """
    left, needed = usable_gib - memory.fixed_gib, memory.kv_gib(1, max(max_model_len, 1))
    if left >= needed:
        return True, left
    return (None, needed) if left + memory.caution_gib >= needed else (False, 0.0)


@dataclass(frozen=True)
class _Life:
    """One request: times in ms, see Estimate. request_ms: from its first step to its last token."""

    ttft_ms: float
    tpot_ms: float
    request_ms: float
    waiting_ms: float
    decode_step_ms: float
    mixed_step_ms: float
    mixed_share: float
    outputs_per_step: float


@dataclass(frozen=True)
class _Slot:
    """The life of one request among `batch` equals."""

    steps: Steps
    limits: Scheduling
    lengths: Lengths
    acceptance: float

    def life(self, batch: int) -> _Life:
        limits, lengths, steps = self.limits, self.lengths, self.steps
        cached = lengths.shared_prefix_tokens if limits.prefix_caching else 0
        new = max(lengths.prompt_tokens - cached, 1)
        queries = 1 + limits.draft_tokens
        per_step = 1.0 + self.acceptance * limits.draft_tokens
        context = lengths.prompt_tokens + lengths.output_tokens // 2
        decode_steps = (lengths.output_tokens - 1) / per_step
        # Prefill tokens of a step: one prompt at a time, or as many as must start per step, within the token limit.
        beside_decoding = max(limits.max_num_batched_tokens - batch * queries, 1)
        chunk_limit = beside_decoding if limits.chunked_prefill else max(beside_decoding, new)
        chunk = min(chunk_limit, max(new, new * batch / (decode_steps + 1)), new * batch)
        own_steps = max(1.0, new / chunk)
        decoding = max(batch - math.ceil(chunk / new), 0)
        drafting = 1.0 + limits.draft_layers / steps.layers
        mixed_ms = steps.step_ms(round(chunk), lengths.prompt_tokens, cached, decoding, queries, context) * drafting
        decode_ms = steps.step_ms(0, 0, 0, batch, queries, context) * drafting
        others_steps = max(new * batch / chunk - own_steps, 0.0)
        mixed_share = min(others_steps / decode_steps, 1.0) if decode_steps else 0.0
        tpot_ms = (mixed_ms * mixed_share + decode_ms * (1.0 - mixed_share)) / per_step
        crowding = min(1.0 + math.log2(batch) / 8.0, 2.0)
        own_ms = mixed_ms * math.ceil(own_steps) + DISPATCH_MS_PER_LAYER * steps.layers
        ttft_ms = own_ms * crowding
        decode_all_ms = tpot_ms * (lengths.output_tokens - 1)
        # Where prefilling alone fills every step, requests leave no faster than prompts are read.
        request_ms = max(ttft_ms + decode_all_ms, mixed_ms * new * batch / chunk)
        first_ms = request_ms - decode_all_ms
        return _Life(first_ms, tpot_ms, request_ms, first_ms - own_ms, decode_ms, mixed_ms, mixed_share, per_step)

    def smallest_batch(self, rate_per_ms: float, most: int) -> int:
        """The fewest requests in flight that complete at this rate; `most` if even they do not."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if middle / self.life(middle).request_ms >= rate_per_ms:
                high = middle
            else:
                low = middle + 1
        return low
