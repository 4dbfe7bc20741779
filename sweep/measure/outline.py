"""The outline of a draw: lengths, order, classes and who shares what with whom, before anything has its text.

Three kinds of workload have three kinds of outline. Plain: independent requests from the length distributions.
Conversations: turns that extend one another, of at_once conversations at a time, each in turn in random order; the draw
begins in the middle of them, so that there are long and short histories from its first request on. Trace: the rows of a
trace, with whatever they say about arrival times, shared prefixes, classes and conversations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sweep.errors import ConfigError
from sweep.measure.draws import seed_sequence
from sweep.measure.lengths import IntArray
from sweep.measure.trace import Trace

if TYPE_CHECKING:
    from sweep.measure.workload import RequestClass, WorkloadSpec

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Outline:
    """n requests in order of sending, the first `warmup` of them before the measured ones.

    class_ids, max_tokens, own_tokens, text_ids, prefix_ids, after: (n,). A prompt is prefix prefix_ids[i] (-1: none)
    and then the first own_tokens[i] tokens of text text_ids[i], which is below `texts`. after: the request whose end
    must come before, or -1. arrivals_s: (n,), 0 for the first measured one. rows: the trace's own prompts, if any.
    fixed_warmup: how many of the warm-up requests every load sends; 0 leaves it to the client's rule.
    """

    warmup: int
    class_ids: IntArray
    max_tokens: IntArray
    own_tokens: IntArray
    text_ids: IntArray
    texts: int
    prefix_ids: IntArray
    after: IntArray
    arrivals_s: FloatArray | None = None
    rows: Trace | None = None
    fixed_warmup: int = 0

    def measured_first(self) -> Outline:
        """The same requests numbered as a RequestSet has them: measured ones first, then the warm-up."""
        n, w = len(self.max_tokens), self.warmup
        order = np.r_[w:n, 0:w]
        return replace(
            self,
            after=np.where(self.after < 0, -1, (self.after - w) % n)[order],
            arrivals_s=None if self.arrivals_s is None else self.arrivals_s[order],
            rows=None if self.rows is None else self.rows.take(order),
            **{
                name: getattr(self, name)[order]
                for name in ("class_ids", "max_tokens", "own_tokens", "text_ids", "prefix_ids")
            },
        )


def make_outline(spec: WorkloadSpec, draw: int) -> Outline:
    """Raises ConfigError when a trace is too short for this draw."""
    if spec.conversation is not None:
        return _conversations(spec, draw)
    return _plain(spec, draw) if spec.trace is None else _trace(spec, draw)


def _plain(spec: WorkloadSpec, draw: int) -> Outline:
    # An open loop sends its warm-up until the server is warm: as many again as are measured should do.
    open_loop = any(load.concurrency is None for load in spec.loads)
    warmup = max(spec.warmup_requests, spec.busiest_concurrency, spec.num_requests if open_loop else 0)
    n = spec.num_requests + warmup
    rng = np.random.default_rng(seed_sequence(spec.seed, draw))
    class_ids = _class_ids(spec, n, rng)
    own, outputs = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    for k, request_class in enumerate(spec.request_classes):
        mine = np.flatnonzero(class_ids == k)
        own[mine] = request_class.prompt_tokens.sample(rng, len(mine))
        outputs[mine] = request_class.output_tokens.sample(rng, len(mine))
    prefixes = _prefix_ids(spec, class_ids, rng)
    return Outline(warmup, class_ids, outputs, own, np.arange(n), n, prefixes, np.full(n, -1))


def _trace(spec: WorkloadSpec, draw: int) -> Outline:
    assert spec.trace is not None
    if spec.trace.sampling == "bootstrap":
        shape = _plain(spec, draw)
        rows, warmup, fixed_warmup = spec.trace.rows(len(shape.max_tokens), draw, spec.seed), shape.warmup, 0
    else:
        warmup, fixed_warmup = max(spec.warmup_requests, spec.busiest_concurrency), spec.warmup_requests
        rows = spec.trace.rows(spec.num_requests + warmup, draw, spec.seed)
    n = len(rows)
    rng = np.random.default_rng(seed_sequence(spec.seed, draw))
    names = [request_class.name for request_class in spec.request_classes]
    known_classes = rows.classes is not None and spec.classes
    class_ids = np.array([names.index(c) for c in rows.classes or ()]) if known_classes else _class_ids(spec, n, rng)
    own, outputs = np.zeros(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    for k, request_class in enumerate(spec.request_classes):
        mine = np.flatnonzero(class_ids == k)
        for into, lengths, column in (
            (own, request_class.prompt_tokens, rows.prompt_tokens),
            (outputs, request_class.output_tokens, rows.output_tokens),
        ):
            if lengths.kind != "trace":
                into[mine] = lengths.sample(rng, len(mine))
            elif column is not None:  # it is None where the rows have text
                into[mine] = lengths.clip(column[mine])
    text_ids, after = np.arange(n), np.full(n, -1)
    if rows.conversations is not None:
        _, text_ids = np.unique(rows.conversations, return_inverse=True)
        order = np.argsort(text_ids, kind="stable")
        after[order[1:]] = np.where(text_ids[order[1:]] == text_ids[order[:-1]], order[:-1], -1)
    times = rows.timestamps_s if spec.trace.sampling == "window" else None
    own_prompts = all(request_class.prompt_tokens.kind == "trace" for request_class in spec.request_classes)
    return Outline(
        warmup=warmup,
        class_ids=class_ids,
        max_tokens=outputs,
        own_tokens=own,
        text_ids=text_ids,
        texts=n,
        prefix_ids=_prefix_ids(spec, class_ids, rng),
        after=after,
        arrivals_s=None if times is None else times - times[warmup],
        rows=rows if own_prompts and (rows.prompts is not None or rows.blocks is not None) else None,
        fixed_warmup=fixed_warmup,
    )


@dataclass
class _Conversation:
    """tokens: the length of its history, shared prefix included. last: its latest request, -1 before the first."""

    text_id: int
    class_id: int
    prefix_id: int
    prefix_tokens: int
    tokens: int
    turns_left: int
    last: int = -1

    def turn(self, request_class: RequestClass, max_tokens: int, rng: np.random.Generator) -> tuple[int, int] | None:
        """(prompt tokens after the shared prefix, output tokens) of the next turn; None if it has ended."""
        new = int(request_class.prompt_tokens.sample(rng, 1)[0])
        output = int(request_class.output_tokens.sample(rng, 1)[0])
        if self.turns_left == 0 or self.tokens + new + output > max_tokens:
            return None
        self.turns_left -= 1
        self.tokens += new + output
        return self.tokens - output - self.prefix_tokens, output


def _conversations(spec: WorkloadSpec, draw: int) -> Outline:
    assert spec.conversation is not None
    rng = np.random.default_rng(seed_sequence(spec.seed, draw))
    at_once, limit = spec.conversations_at_once, spec.conversation.max_tokens
    warmup = max(spec.warmup_requests, at_once)  # a turn of each, so that the measured ones find their history cached
    n, begun = spec.num_requests + warmup, 0

    def begin(turns: int) -> _Conversation:
        nonlocal begun
        begun += 1
        class_id = _class_ids(spec, 1, rng)
        prefix = spec.request_classes[int(class_id[0])].shared_prefix_tokens
        prefix_id = int(_prefix_ids(spec, class_id, rng)[0])
        return _Conversation(begun - 1, int(class_id[0]), prefix_id, prefix, prefix, turns)

    def next_turn(lane: int) -> tuple[int, int]:
        while True:
            conversation = lanes[lane]
            turn = conversation.turn(spec.request_classes[conversation.class_id], limit, rng)
            if turn is not None:
                return turn
            lanes[lane] = begin(int(spec.conversation.turns.sample(rng, 1)[0]))  # type: ignore[union-attr]

    # Whoever looks at a random moment finds long conversations more often, and each anywhere within it.
    sizes = spec.conversation.turns.sample(rng, 8 * at_once)
    lanes = [begin(int(turns)) for turns in rng.choice(sizes, at_once, p=sizes / sizes.sum())]
    for lane in range(at_once):
        for _ in range(int(rng.integers(lanes[lane].turns_left))):
            next_turn(lane)
    table: list[tuple[int, ...]] = []
    while len(table) < n:
        for lane in rng.permutation(at_once).tolist():
            own, output = next_turn(lane)
            current = lanes[lane]
            table.append((current.class_id, output, own, current.text_id, current.prefix_id, current.last))
            current.last = len(table) - 1
    class_ids, outputs, owns, text_ids, prefix_ids, after = np.array(table[:n], dtype=np.int64).T
    texts = 4 * at_once + n  # room for all that begin, the same for every draw
    if begun > texts:
        raise ConfigError(
            f"workload.conversation.max_tokens={limit} leaves most conversations no second turn",
            "raise it, or shorten the turns",
        )
    return Outline(warmup, class_ids, outputs, owns, text_ids, texts, prefix_ids, after, fixed_warmup=warmup)


def _class_ids(spec: WorkloadSpec, n: int, rng: np.random.Generator) -> IntArray:
    shares = np.array([request_class.share for request_class in spec.request_classes])
    if len(shares) == 1:
        return np.zeros(n, dtype=np.int64)
    return rng.choice(len(shares), size=n, p=shares / shares.sum())


def _prefix_ids(spec: WorkloadSpec, class_ids: IntArray, rng: np.random.Generator) -> IntArray:
    """Prefixes are numbered through all classes; each request has one of its class's, -1 if it has none."""
    prefix_ids, offset = np.full(len(class_ids), -1), 0
    for k, request_class in enumerate(spec.request_classes):
        mine = np.flatnonzero(class_ids == k)
        if request_class.shared_prefix_tokens:
            prefix_ids[mine] = offset + rng.integers(request_class.num_shared_prefixes, size=len(mine))
            offset += request_class.num_shared_prefixes
    return prefix_ids
