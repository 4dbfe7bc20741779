"""Errors a user can cause and mend. Failures of a trial are data, never one of these."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SweepError(Exception):
    """One line that names the field and the value, and a hint that says what to type instead."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.hint}" if self.hint else self.message


class ConfigError(SweepError):
    """A config, override or search space that cannot be run."""


class StudyError(SweepError):
    """A study folder that cannot be opened, continued or read."""


class SlaError(SweepError):
    """An SLA text that cannot be understood."""


def require(condition: bool, field: str, value: object, fix: str) -> None:
    """Raises ConfigError "field=value" with its fix unless the condition holds."""
    if not condition:
        raise ConfigError(f"{field}={value}", fix)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint naming the nearest known words, or all of them when nothing is near.

    >>> did_you_mean("ttft_p99", ["ttft_p99_ms", "itl_p99_ms"])
    "did you mean 'ttft_p99_ms'?"
    """
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=2, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(f"'{n}'" for n in near) + "?"
    return "known: " + ", ".join(names)
