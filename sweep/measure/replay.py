"""Which rows of a trace one draw takes, and how they are changed on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from sweep.errors import ConfigError, did_you_mean, require
from sweep.measure.client_mixture import ClientMixture
from sweep.measure.corpus import UNIQUE_TOKENS
from sweep.measure.draws import seed_sequence, slot_of
from sweep.measure.lengths import IntArray
from sweep.measure.trace import Trace
from sweep.measure.trace_files import read_trace, trace_checksum, trace_path

_FIELD = "workload.trace"
_KEEP, _SPREAD, _ROWS, _CLIENTS = range(4)
# Requests of a mixture that stand for all it could send.
_SAMPLE = 2000


@dataclass(frozen=True)
class TraceReplay:
    """A trace and how it is used. file: a shipped name (azure_conv_2023) or a path.

    sampling: "window" takes consecutive rows, each draw others, and keeps arrival times, order and shared prefixes;
    "bootstrap" draws rows with replacement (as pairs of prompt and answer) and keeps only their lengths. keep_share: a
    random share of the conversations, documents or (where nothing is shared) rows is kept: what one of 1/keep_share
    replicas sees behind a router that keeps prefixes together; the other replicas' shares are other draws.
    length_scale: prompts and answers that many times as long, for models and machines smaller than those of the trace.
    max_rows: how much of a long file is read. sha256: of the file, checked if given.

    Time is scaled by the load (loads.rate_scale), rate by keep_share; the former also changes how long bursts last. A
    window sees less of the trace's reuse the fewer rows it has: keep_share < 1 lets the same rows span more time.
    """

    file: str
    sampling: str = "window"
    keep_share: float = 1.0
    length_scale: float = 1.0
    max_rows: int = 200_000
    sha256: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TraceReplay | None:
        """None if no file is named. Raises ConfigError, also for a file that cannot be read as a trace."""
        known = [f.name for f in fields(cls)]
        for name in data:
            if name not in known:
                raise ConfigError(f"{_FIELD}.{name} is unknown", did_you_mean(name, known))
        if data.get("file") is None:
            return None
        replay = cls(**data)
        samplings = ("window", "bootstrap")
        require(replay.sampling in samplings, f"{_FIELD}.sampling", replay.sampling, f"give {' or '.join(samplings)}")
        require(0 < replay.keep_share <= 1, f"{_FIELD}.keep_share", replay.keep_share, "give a share above 0, up to 1")
        require(replay.length_scale > 0, f"{_FIELD}.length_scale", replay.length_scale, "give a number above 0")
        require(replay.max_rows >= 1, f"{_FIELD}.max_rows", replay.max_rows, "give at least 1")
        path = trace_path(replay.file)
        if replay.sha256 is not None and (found := trace_checksum(path)) != replay.sha256:
            raise ConfigError(
                f"{_FIELD}.file={replay.file} has changed: its sha256 is {found}",
                f"restore the file, or set {_FIELD}.sha256=null in a new study",
            )
        source = replay.source
        if replay.sampling == "bootstrap" and isinstance(source, Trace):
            for name in ("blocks", "conversations"):
                if getattr(source, name) is not None:
                    raise ConfigError(
                        f"{_FIELD}.sampling=bootstrap would tear the shared prefixes of {replay.file} apart",
                        f"use {_FIELD}.sampling=window",
                    )
        if isinstance(source, ClientMixture):
            require(replay.keep_share == 1, f"{_FIELD}.keep_share", replay.keep_share,
                    "scale a client mixture with workload.loads.rate_scale")  # fmt: skip
        return replay

    @property
    def source(self) -> Trace | ClientMixture:
        return read_trace(trace_path(self.file), self.max_rows)

    @property
    def rate_rps(self) -> float | None:
        """Mean arrival rate that rate_scale multiplies; None if there are no arrival times to replay."""
        rate = self.source.rate_rps
        return None if rate is None or self.sampling == "bootstrap" else rate * self.keep_share

    def rows(self, n: int, draw: int, seed: int) -> Trace:
        """The n rows of a draw, in order of sending. Raises ConfigError if the trace is too short for it."""
        source = self.source
        if isinstance(source, ClientMixture):
            times, prompts, outputs, classes = source.sample(n, seed_sequence(seed, draw, _CLIENTS))
            return Trace(times, prompts, outputs, classes=classes).scaled(self.length_scale, UNIQUE_TOKENS)
        if self.sampling == "bootstrap":
            trace = _prepared(self, seed, 0)
            return trace.take(np.random.default_rng(seed_sequence(seed, draw, _ROWS)).integers(len(trace), size=n))
        shares = [_prepared(self, seed, number) for number in range(int(1 / self.keep_share + 1e-9))]
        windows = max(map(len, shares)) // n
        free = [(share, w) for w in range(windows) for share in shares if (w + 1) * n <= len(share)]
        slot = slot_of(
            draw,
            len(free),
            f"{_FIELD}.file={self.file} has rows for {len(free)} draws of {n} with warm-up (the last is held out): none"
            f" is left for draw {draw}",
            "lower workload.num_requests or the number of repeats, or give a longer trace",
        )
        share, window = free[slot]
        return share.take(np.arange(window * n, (window + 1) * n))

    def lengths(self, column: str) -> IntArray | None:
        """The whole trace's "prompt_tokens" or "output_tokens" as they are replayed; None if it has none.

        Only the server knows the tokens of a text: four characters each is near enough for those who ask here.
        """
        mixture = isinstance(self.source, ClientMixture)
        rows = self.rows(_SAMPLE, 0, 0) if mixture else _prepared(replace(self, keep_share=1.0), 0, 0)
        if column == "prompt_tokens" and rows.prompts is not None:
            return np.array([max(1, len(text) // 4) for text in rows.prompts])
        known: IntArray | None = getattr(rows, column)
        return None if known is None else np.maximum(known, 1)


@lru_cache(maxsize=16)
def _prepared(replay: TraceReplay, seed: int, share: int) -> Trace:
    """One share of the trace (all of it if keep_share is 1), off its recording grid, and with scaled lengths."""
    trace = replay.source
    assert isinstance(trace, Trace)
    if replay.keep_share < 1:
        families = trace.families()
        rng = np.random.default_rng(seed_sequence(seed, 0, _KEEP))
        trace = trace.take(np.flatnonzero(rng.random(families.max() + 1)[families] // replay.keep_share == share))
    spread = trace.spread(np.random.default_rng(seed_sequence(seed, 0, _SPREAD)))
    return spread.scaled(replay.length_scale, UNIQUE_TOKENS)
