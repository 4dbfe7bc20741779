"""Draws: the independent request sets of one workload. Repeats take draws 0, 1, 2, …; one is kept from any search."""

from __future__ import annotations

import numpy as np

from sweep.errors import ConfigError, require

# Finalists are validated on this draw, which no search and no repeat sees: the last part of the corpus or trace.
HELD_OUT_DRAW = -1


def seed_sequence(seed: int, draw: int, *key: int) -> np.random.SeedSequence:
    """The randomness of one draw; the same in every process. key tells its uses apart."""
    require(draw >= HELD_OUT_DRAW, "draw", draw, f"give 0 or more, or HELD_OUT_DRAW ({HELD_OUT_DRAW})")
    return np.random.SeedSequence(seed, spawn_key=(draw % 2**32, *key))


def slot_of(draw: int, slots: int, shortage: str, fix: str) -> int:
    """Which of `slots` disjoint parts of the material a draw takes. The last one is the held-out draw's.

    Where there is only one, draw 0 has it and nothing is held out. Raises ConfigError(shortage, fix) if there is none
    left for this draw.
    """
    free = 1 if slots == 1 else slots - 1
    if draw == HELD_OUT_DRAW and slots >= 2:
        return slots - 1
    if not 0 <= draw < free:
        raise ConfigError(shortage, fix)
    return draw
