"""The seam between what knows GPUs (kernel tables, roofline) and what knows scheduling (steady state, simulation)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Memory:
    """Memory of one device. fixed_gib: everything but the KV cache, weights included.

    caution_gib: the part of fixed_gib that is allowance rather than knowledge. The cache of a sequence of n tokens
    takes kv_gib_per_sequence + n x kv_gib_per_token.
    """

    weights_gib: float
    fixed_gib: float
    caution_gib: float
    kv_gib_per_token: float
    kv_gib_per_sequence: float = 0.0

    def kv_gib(self, sequences: float, tokens: float) -> float:
        """Cache of that many sequences of that many tokens each."""
        return sequences * (self.kv_gib_per_sequence + tokens * self.kv_gib_per_token)


class Steps(Protocol):
    """One rank of a deployment."""

    @property
    def layers(self) -> int:
        """Of the model."""
        ...

    def step_ms(
        self, prefill_tokens: int, prompt_tokens: int, cached_tokens: int, decoding: int, queries: int, context: int
    ) -> float:
        """Duration of one scheduler step.

        prefill_tokens: computed in this step, of prompts of prompt_tokens whose first cached_tokens are in the cache.
        decoding: sequences that decode beside them, each with `queries` tokens (1 + drafts) over `context` tokens.
        """
        ...

    def memory(self, max_num_batched_tokens: int) -> Memory:
        """What one device holds when a step may batch that many tokens."""
        ...
