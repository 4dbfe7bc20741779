"""A trace in memory: what is known of requests somebody once sent, and what can be done to them before a replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MOONCAKE_BLOCK_TOKENS = 512
# Timestamps are on a grid if at least this share of the rows has the time of the row before it.
_GRID_SHARE = 0.5
# A block is a system prompt's if more than this share of the rows has it.
_COMMON_SHARE = 0.1


@dataclass(frozen=True, eq=False)
class Trace:
    """Rows in order of arrival; a column is None if the file does not have it.

    timestamps_s: (n,), since the first row. prompt_tokens, output_tokens: (n,). prompts: their text. classes: names of
    request classes. conversations: (n,), rows with the same number are the turns of one conversation. blocks: for each
    row the ids of its prompt's blocks of block_tokens tokens, equal ids for equal prompts up to there.
    """

    timestamps_s: FloatArray | None = None
    prompt_tokens: IntArray | None = None
    output_tokens: IntArray | None = None
    prompts: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None
    conversations: IntArray | None = None
    blocks: tuple[IntArray, ...] | None = None
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def __len__(self) -> int:
        columns = (self.timestamps_s, self.prompt_tokens, self.output_tokens, self.prompts, self.classes)
        return len(next(c for c in (*columns, self.conversations) if c is not None))

    @property
    def rate_rps(self) -> float | None:
        """Mean arrival rate; None without arrival times."""
        times = self.timestamps_s
        return float((len(times) - 1) / (times[-1] - times[0])) if times is not None and times[-1] > times[0] else None

    def take(self, rows: npt.NDArray[np.integer[Any]]) -> Trace:
        """The trace of these rows, in this order."""

        def of(column: Any) -> Any:
            if column is None or isinstance(column, np.ndarray):
                return None if column is None else column[rows]
            return tuple(column[i] for i in rows)

        return replace(
            self,
            **{name: of(getattr(self, name)) for name in self.__dataclass_fields__ if name != "block_tokens"},
        )

    def reuse_share(self) -> float:
        """Share of the prompt tokens whose block an earlier row has too: the hit rate of an infinite cache."""
        assert self.blocks is not None and self.prompt_tokens is not None
        seen: set[int] = set()
        hits = 0
        for ids, length in zip(self.blocks, self.prompt_tokens.tolist(), strict=True):
            for position, block in enumerate(ids.tolist()):
                if block in seen:
                    hits += min(self.block_tokens, length - position * self.block_tokens)
                seen.add(block)
        return hits / float(self.prompt_tokens.sum())

    def families(self) -> IntArray:
        """Numbers (n,), equal for rows that belong together: turns of a conversation, questions about a document.

        Where there are only blocks, that is the first block of a row that is no system prompt (in a tenth of the rows).
        """
        if self.conversations is not None:
            return self.conversations
        if self.blocks is None:
            return np.arange(len(self))
        ids, counts = np.unique(np.concatenate([np.unique(row) for row in self.blocks]), return_counts=True)
        common = set(ids[counts > _COMMON_SHARE * len(self)].tolist())
        first = [next((b for b in row.tolist() if b not in common), -1 - i) for i, row in enumerate(self.blocks)]
        return np.unique(first, return_inverse=True)[1].astype(np.int64)

    def scaled(self, scale: float, smallest_block: int) -> Trace:
        """Prompts (and their blocks) and answers `scale` times as long; a block has at least smallest_block tokens."""
        if scale == 1.0:
            return self
        block = max(smallest_block, round(self.block_tokens * scale)) if self.blocks is not None else self.block_tokens
        factor = block / self.block_tokens if self.blocks is not None else scale
        prompts, outputs = (
            None if column is None else np.maximum(np.ceil(column * by), 1).astype(np.int64)
            for column, by in ((self.prompt_tokens, factor), (self.output_tokens, scale))
        )
        return replace(self, prompt_tokens=prompts, output_tokens=outputs, block_tokens=block)

    def spread(self, rng: np.random.Generator) -> Trace:
        """Arrival times off the grid they were recorded on, if they are on one (Mooncake's conversations: 3 s).

        Rows with the same time are spread evenly at random, in their order, over the time to the next recorded one (at
        most the median of such steps). Without this a replay sends bursts that the recording made, not the users.
        """
        times = self.timestamps_s
        if times is None or len(times) < 2 or (np.diff(times) == 0).mean() < _GRID_SHARE:
            return self
        recorded, first, counts = np.unique(times, return_index=True, return_counts=True)
        step = float(np.median(np.diff(recorded)))
        room = np.minimum(np.diff(recorded, append=recorded[-1] + step), step)
        offset = np.concatenate([np.sort(rng.random(c)) * r for c, r in zip(counts, room, strict=True)])
        return replace(self, timestamps_s=times[first].repeat(counts) + offset)
