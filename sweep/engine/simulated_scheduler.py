"""vLLM's continuous batching in small: what runs in each step of a simulated engine, and for how long.

Decoding first, then prefill in chunks, within max_num_batched_tokens, max_num_seqs and the blocks of the KV cache; the
newest sequence is preempted and recomputed when blocks run out. Blocks of a shared prefix are counted once for each
sequence that uses them. It knows no clock: `Scheduler.step` says how long a step takes, and whoever calls it lets that
time pass (the HTTP server really, a loop in a notebook not at all).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweep.estimate.knobs import Scheduling
from sweep.estimate.steps import Steps

BLOCK_TOKENS = 16
_STEP_CV = 0.02


@dataclass(eq=False)
class Request:
    """A request in the engine. block_keys: identities of its prompt's full blocks, for the prefix cache.

    computed: tokens whose keys and values are in the cache. emitted: output tokens so far.
    """

    prompt_tokens: int
    max_tokens: int
    block_keys: Sequence[int] = ()
    arrived_s: float = 0.0
    started: bool = False
    computed: int = 0
    emitted: int = 0
    blocks: int = 0

    @property
    def known(self) -> int:
        return self.prompt_tokens + self.emitted

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.max_tokens

    @property
    def finished(self) -> bool:
        return self.emitted >= self.max_tokens


@dataclass
class Counters:
    """What /metrics shows of one replica, all growing."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    queue_time_s: float = 0.0
    started: int = 0


@dataclass(frozen=True)
class Step:
    """One pass of the engine: how long it takes, and who has how many new tokens at its end."""

    duration_s: float
    emitted: Sequence[tuple[Request, int]]


class Scheduler:
    """One replica. blocks: of its KV cache. prefill_factor, step_factor: this launch's deviation from the model."""

    def __init__(
        self,
        steps: Steps,
        limits: Scheduling,
        blocks: int,
        acceptance: float,
        rng: np.random.Generator,
        step_factor: float = 1.0,
        prefill_factor: float = 1.0,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counters = Counters()
        self.blocks = blocks
        self.used_blocks = 0
        self.limits = limits
        self._steps = steps
        self._acceptance = acceptance
        self._rng = rng
        self._step_factor, self._prefill_factor = step_factor, prefill_factor
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._queries = 1 + limits.draft_tokens
        self._budget = limits.max_num_batched_tokens * limits.pipeline

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it could never be scheduled."""
        if _blocks(request.longest) > self.blocks:
            raise ValueError(f"{request.longest} tokens exceed the KV cache of {self.blocks * BLOCK_TOKENS}")
        if not self.limits.chunked_prefill and request.longest > self._budget:
            raise ValueError(f"{request.longest} tokens exceed max_num_batched_tokens without chunked prefill")
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        if request in self.running:
            self.running.remove(request)
            self._free(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def reset_prefix_cache(self) -> None:
        self._cached.clear()

    def step(self, now_s: float) -> Step | None:
        """Schedule and compute one step; None when there is nothing to do."""
        budget = self._budget
        plan: list[tuple[Request, int]] = []
        preempted = False
        for request in list(self.running):
            missing = request.known - request.computed
            tokens = min(missing if missing > 1 else self._queries, budget)
            if tokens < 1 or request not in self.running:
                continue
            while not self._reserve(request, request.computed + tokens):
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                plan.append((request, tokens))
                budget -= tokens
        while self.waiting and budget > 0 and not preempted and len(self.running) < self.limits.max_num_seqs:
            tokens = self._admit(self.waiting[0], budget, now_s)
            if not tokens:
                break
            plan.append((self.running[-1], tokens))
            budget -= tokens
        return Step(self._duration_s(plan), self._advance(plan)) if plan else None

    def _admit(self, request: Request, budget: int, now_s: float) -> int:
        """Move the first waiting request into the batch; returns its tokens of this step, 0 if it has to wait."""
        hits = self._hits(request)
        tokens = request.known - hits
        if tokens > budget and not self.limits.chunked_prefill:
            return 0
        tokens = min(tokens, budget)
        if not self._reserve(request, hits + tokens):
            return 0
        if not request.started:
            request.started = True
            self.counters.queue_time_s += now_s - request.arrived_s
            self.counters.started += 1
            self.counters.prompt_tokens += request.prompt_tokens
            self.counters.prefix_queries += request.prompt_tokens
            self.counters.prefix_hits += hits
        request.computed = hits
        self.running.append(self.waiting.popleft())
        return tokens

    def _hits(self, request: Request) -> int:
        if not self.limits.prefix_caching:
            return 0
        hits = 0
        for key in request.block_keys:
            if key not in self._cached:
                break
            self._cached.move_to_end(key)
            hits += BLOCK_TOKENS
        return min(hits, request.known - 1)  # the last token is always computed

    def _reserve(self, request: Request, tokens: int) -> bool:
        more = max(_blocks(min(tokens, request.longest)) - request.blocks, 0)
        if self.used_blocks + more > self.blocks:
            return False
        self.used_blocks += more
        request.blocks += more
        return True

    def _free(self, request: Request) -> None:
        self.used_blocks -= request.blocks
        request.blocks = 0

    def _preempt(self, request: Request) -> None:
        self._free(request)
        request.computed = 0
        self.counters.preemptions += 1
        self.waiting.appendleft(request)

    def _duration_s(self, plan: Sequence[tuple[Request, int]]) -> float:
        """Of one pass; a pipeline has as many micro-batches in flight as stages, each with its share."""
        prefill = [(s, n) for s, n in plan if s.known - s.computed > 1]
        decode = [s for s, _ in plan if s.known - s.computed <= 1]
        stages = self.limits.pipeline
        decoding = math.ceil(len(decode) / stages)
        context = round(sum(s.computed for s in decode) / len(decode)) + 1 if decode else 1
        decode_ms = self._steps.step_ms(0, 0, 0, decoding, self._queries, context) if decode else 0.0
        whole_ms = decode_ms
        if prefill:
            tokens = math.ceil(sum(n for _, n in prefill) / stages)
            known = round(sum(s.known for s, _ in prefill) / len(prefill))
            done = min(round(sum(s.computed for s, _ in prefill) / len(prefill)), known - 1)
            whole_ms = self._steps.step_ms(tokens, known, done, decoding, self._queries, context)
        drafting = 1.0 + self.limits.draft_layers / self._steps.layers
        mixed_ms = decode_ms + self._prefill_factor * max(whole_ms - decode_ms, 0.0)
        return drafting * mixed_ms * self._step_factor * lognormal(self._rng, _STEP_CV) / 1e3

    def _advance(self, plan: Sequence[tuple[Request, int]]) -> list[tuple[Request, int]]:
        emitted = []
        for request, tokens in plan:
            decoding = request.known - request.computed <= 1
            new = 0
            if decoding:
                accepted = int(self._rng.binomial(tokens - 1, self._acceptance)) if tokens > 1 else 0
                self.counters.draft_tokens += tokens - 1
                self.counters.accepted_tokens += accepted
                new = min(1 + accepted, request.max_tokens - request.emitted)
                request.computed += new
            else:
                request.computed += tokens
                new = int(request.computed == request.known)
            if not new:
                continue
            if not request.emitted and self.limits.prefix_caching:
                self._remember(request)
            request.emitted += new
            self.counters.generation_tokens += new
            emitted.append((request, new))
            if request.finished:
                self.running.remove(request)
                self._free(request)
        return emitted

    def _remember(self, request: Request) -> None:
        self._cached.update(dict.fromkeys(request.block_keys))
        while len(self._cached) > self.blocks:
            self._cached.popitem(last=False)


def lognormal(rng: np.random.Generator, cv: float) -> float:
    """A factor of mean 1 and this coefficient of variation."""
    variance = math.log1p(cv * cv)
    return float(np.exp(rng.normal(-variance / 2, math.sqrt(variance))))


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
