"""Frozen request sets: every configuration of a study is sent the same requests, and a checksum shows that it was.

Prompts are slices of real text, tokenized once by the served model, or the user's own text. (On random tokens drafts
are accepted as in no production, so they are had only by asking: workload.text=random.) Everything random comes from
numpy Generators seeded by (workload seed, draw), so a request set is the same in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sweep.errors import ConfigError
from sweep.measure.corpus import TokenArray, text_at, unique_starts
from sweep.measure.draws import seed_sequence, slot_of
from sweep.measure.lengths import IntArray
from sweep.measure.outline import Outline, make_outline

if TYPE_CHECKING:
    from sweep.measure.workload import WorkloadSpec

FloatArray = npt.NDArray[np.float64]

_BLOCKS = 1
_SHUFFLE = 10


@dataclass(frozen=True)
class Request:
    """prompt: token ids, or text that the server tokenizes. max_tokens: the length of the answer.

    class_name: "" where the workload has no classes.
    """

    prompt: list[int] | str
    max_tokens: int
    temperature: float | None
    class_name: str


@dataclass(frozen=True, eq=False)
class RequestSet:
    """Frozen requests: `num_measured` measured ones, then a pool for the warm-up, in the order they are sent in.

    token_ids: all prompts end to end; as uint8 they are UTF-8 text. starts: (n + 1,), prompt i is
    token_ids[starts[i]:starts[i + 1]]. max_tokens: (n,). The rest may be None, (n,) otherwise: class_ids number
    class_names; temperatures; after: the request whose end must come before this one is sent, or -1; arrivals_s: times
    of the trace's arrivals, 0 for the first measured one (negative for the warm-up). fixed_warmup: how many of the
    pool's last requests every load sends first; 0 leaves that to the client's rule.
    """

    token_ids: npt.NDArray[np.int32 | np.uint8]
    starts: IntArray
    max_tokens: IntArray
    num_measured: int
    class_names: tuple[str, ...] = ()
    class_ids: IntArray | None = None
    temperatures: FloatArray | None = None
    after: IntArray | None = None
    arrivals_s: FloatArray | None = None
    fixed_warmup: int = 0

    def __len__(self) -> int:
        return len(self.max_tokens)

    def __getitem__(self, i: int) -> Request:
        prompt = self.token_ids[self.starts[i] : self.starts[i + 1]]
        return Request(
            prompt.tobytes().decode() if self.is_text else prompt.tolist(),
            int(self.max_tokens[i]),
            None if self.temperatures is None else float(self.temperatures[i]),
            self.class_name(i),
        )

    def class_name(self, i: int) -> str:
        """Of request i; "" where the workload has no classes."""
        return "" if self.class_ids is None else self.class_names[self.class_ids[i]]

    @property
    def is_text(self) -> bool:
        return self.token_ids.dtype == np.uint8

    @property
    def num_warmup(self) -> int:
        return len(self) - self.num_measured

    @property
    def checksum(self) -> str:
        """sha256 over every prompt, length, the split into measured and warm-up requests, and all else that is set."""
        digest = hashlib.sha256(np.int64(self.num_measured).astype("<i8").tobytes())
        for array, kind in ((self.starts, "<i8"), (self.max_tokens, "<i8")):
            digest.update(array.astype(kind).tobytes())
        digest.update(self.token_ids.astype("u1" if self.is_text else "<i4").tobytes())
        for name in ("class_ids", "temperatures", "after", "arrivals_s"):
            if (column := getattr(self, name)) is not None:
                digest.update(name.encode() + column.astype("<f8").tobytes())
        if self.class_names or self.fixed_warmup:
            digest.update(f"{self.class_names} {self.fixed_warmup}".encode())
        return digest.hexdigest()

    @cached_property
    def shared_prefix_share(self) -> float:
        """prefix_share of the whole set."""
        return self.prefix_share(range(len(self)))

    def prefix_share(self, sent: Iterable[int]) -> float:
        """Share of the prompt tokens of these requests that repeat the beginning of another one among them.

        That is the highest prefix-cache hit rate they can cause, in any order: a cache without bound, of blocks of one
        token. (All tokens but the distinct ones of the prefix tree; neighbours in sorted order share what it shares.)
        Counted in bytes where prompts are text.
        """
        kind = "u1" if self.is_text else ">i4"  # big-endian: bytes then sort as tokens do
        prompts = sorted(
            self.token_ids[self.starts[i] : self.starts[i + 1]].astype(kind).tobytes() for i in sorted(set(sent))
        )
        arrays = [np.frombuffer(prompt, dtype=kind) for prompt in prompts]
        total = sum(map(len, arrays))
        return sum(_common(a, b) for a, b in pairwise(arrays)) / total if total else 0.0

    def save(self, path: Path) -> None:
        """As .npz."""
        with path.open("wb") as f:
            values = {field.name: getattr(self, field.name) for field in fields(self)}
            arrays: dict[str, Any] = {name: np.asarray(value) for name, value in values.items() if value is not None}
            np.savez(f, **arrays)

    @classmethod
    def load(cls, path: Path) -> RequestSet:
        with np.load(path) as data:
            values: dict[str, Any] = {name: data[name] for name in data.files}
        values["class_names"] = tuple(values["class_names"].tolist())
        values |= {name: int(values[name]) for name in ("num_measured", "fixed_warmup")}
        return cls(**values)


def build_requests(spec: WorkloadSpec, corpus_token_ids: npt.ArrayLike, *, draw: int) -> RequestSet:
    """Draw number `draw` of the workload: 0, 1, 2, … for repeats, HELD_OUT_DRAW for what no repeat may see.

    Texts start at corpus positions whose first UNIQUE_TOKENS tokens occur nowhere else in the corpus, and positions are
    dealt out without replacement over all draws. So no prompt shares its beginning with another of any draw unless the
    workload says so (shared prefixes, conversations), and a prefix cache cannot hit by accident. A trace's blocks are
    texts of their own, the same text for the same id within a draw. A text that reaches the corpus's end continues at
    its beginning. Raises ConfigError when corpus or trace are too short for that many draws.
    """
    corpus = np.ascontiguousarray(corpus_token_ids, dtype=np.int32)
    if spec.text == "random":
        corpus = np.random.default_rng(seed_sequence(spec.seed, 0, _SHUFFLE)).permutation(corpus)
    outline = make_outline(spec, draw).measured_first()
    rows = outline.rows
    if rows is not None and rows.prompts is not None:
        prompts: list[Any] = [np.frombuffer(text.encode(), dtype=np.uint8) for text in rows.prompts]
    elif rows is not None:
        prompts = _block_prompts(outline, corpus, np.random.default_rng(seed_sequence(spec.seed, draw, _BLOCKS)))
    else:
        prompts = _corpus_prompts(spec, outline, corpus, draw)
    classes = spec.request_classes
    temperatures = np.array([request_class.temperature for request_class in classes])[outline.class_ids]
    return RequestSet(
        np.concatenate(prompts),
        np.r_[np.int64(0), np.cumsum([len(p) for p in prompts], dtype=np.int64)],
        outline.max_tokens,
        spec.num_requests,
        class_names=tuple(request_class.name for request_class in classes) if spec.classes else (),
        class_ids=outline.class_ids if spec.classes else None,
        temperatures=temperatures if spec.classes else None,
        after=outline.after if (outline.after >= 0).any() else None,
        arrivals_s=outline.arrivals_s,
        fixed_warmup=outline.fixed_warmup,
    )


def _corpus_prompts(spec: WorkloadSpec, outline: Outline, corpus: TokenArray, draw: int) -> list[TokenArray]:
    prefix_tokens = [c.shared_prefix_tokens for c in spec.request_classes if c.shared_prefix_tokens
                     for _ in range(c.num_shared_prefixes)]  # fmt: skip
    starts = unique_starts(corpus)
    needed = outline.texts + len(prefix_tokens)
    slots = len(starts) // needed
    slot = slot_of(
        draw,
        slots,
        f"workload.num_requests={spec.num_requests} with {outline.warmup} warm-up requests needs {needed} distinct"
        f" texts a draw; the corpus of {len(corpus)} tokens has {len(starts)}, {slots} draws (the last is held out):"
        f" none is left for draw {draw}",
        "lower workload.num_requests or the number of repeats",
    )
    deal = np.random.default_rng(np.random.SeedSequence(spec.seed)).permutation(starts)
    mine = deal[slot * needed : (slot + 1) * needed]
    prefixes = [text_at(corpus, s, n) for s, n in zip(mine[outline.texts :], prefix_tokens, strict=True)]
    prompts = [
        text_at(corpus, mine[text], n) for text, n in zip(outline.text_ids, outline.own_tokens.tolist(), strict=True)
    ]
    return [
        prompt if prefix < 0 else np.concatenate([prefixes[prefix], prompt])
        for prefix, prompt in zip(outline.prefix_ids, prompts, strict=True)
    ]


def _block_prompts(outline: Outline, corpus: TokenArray, rng: np.random.Generator) -> list[TokenArray]:
    rows = outline.rows
    assert rows is not None and rows.blocks is not None
    numbers = {block: i for i, block in enumerate(np.unique(np.concatenate(rows.blocks)).tolist())}
    starts = rng.permutation(unique_starts(corpus))
    if len(numbers) > len(starts):
        raise ConfigError(
            f"the trace's rows have {len(numbers)} different blocks; the corpus of {len(corpus)} tokens has"
            f" {len(starts)} places to begin one",
            "lower workload.num_requests",
        )
    return [
        np.concatenate([text_at(corpus, starts[numbers[b]], rows.block_tokens) for b in blocks.tolist()])[:tokens]
        for blocks, tokens in zip(rows.blocks, outline.own_tokens.tolist(), strict=True)
    ]


def _common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """How many elements two arrays share from their beginning on."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
