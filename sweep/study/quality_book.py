"""Quality once per numerics fingerprint: who measures it, what it is compared with, and when it is given up.

Launches only measure: each leaves the log-probabilities of its fingerprint, and what lm-eval found of it, in the
study's quality/ folder. The comparison with the reference (study.comparison) happens as soon as both exist, in whatever
order they come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from sweep.launch.spec import CONTROL, QUALITY_DIR, REPEAT, TASKS, answers_path, logprobs_path
from sweep.measure.quality import compare, load_logprobs, noise_floor
from sweep.measure.quality.tasks import load_answers
from sweep.results.records import QualityRecord, Record
from sweep.study.comparison import quality_record, same_but_for_its_time
from sweep.study.ledger import Ledger


class QualityBook:
    """reference: the fingerprint all others are compared with; reference_hash: the engine config that has it first.

    record: makes a QualityRecord durable. retries: of a measurement that failed. tasks: whether lm-eval is asked too.
    """

    def __init__(
        self,
        enabled: bool,
        folder: Path,
        reference: str,
        reference_hash: str,
        ledger: Ledger,
        record: Callable[[Record], None],
        retries: int,
        tasks: bool = False,
    ) -> None:
        self.enabled = enabled
        self.reference = reference
        self._folder = folder
        self._ledger = ledger
        self._record = record
        self._retries = retries
        self._tasks = tasks
        self._claimed: set[str] = set()
        self._control_claimed = False
        self._reference_hash = reference_hash
        self._failures: Counter[str] = Counter()
        self._compared: dict[str, tuple[float | None, bool, bool]] = {}

    def claim(self, fingerprint: str, config_hash: str) -> tuple[str, ...]:
        """The quality runs that the launch about to start shall make: those nobody has made or is about to make."""
        lost = self._ledger.quality(self.reference)
        if not self.enabled or (lost is not None and lost.state == "failed"):
            return ()
        is_reference = fingerprint == self.reference
        if fingerprint not in self._claimed and self._missing(fingerprint):
            self._claimed.add(fingerprint)
            self._reference_hash = config_hash if is_reference else self._reference_hash
            # The tasks first: whoever finds the log-probabilities may take what there is for all there will be.
            tasks = (TASKS,) if self._tasks and load_answers(answers_path(self._folder, fingerprint)) is None else ()
            return (*tasks, "", REPEAT) if is_reference else (*tasks, "")
        wants_control = is_reference and config_hash != self._reference_hash and not self._control_claimed
        if wants_control and not logprobs_path(self._folder, fingerprint, CONTROL).exists():
            self._control_claimed = True
            return (CONTROL,)
        return ()

    def release(
        self, fingerprint: str, launch_id: str, runs: Sequence[str], failures: Mapping[str, tuple[str, str]]
    ) -> None:
        """A launch that had claimed these runs ended. failures: run -> (cause, detail) of those it could not make."""
        if CONTROL in runs and CONTROL not in failures:
            self._control_claimed = False  # made, or never reached
        if "" in runs:
            self._claimed.discard(fingerprint)
            if "" in failures and self._missing(fingerprint):
                self._failures[fingerprint] += 1
                if self._failures[fingerprint] > self._retries:
                    self._give_up(fingerprint, launch_id, *failures[""])
        self._share_loss()

    def pending(self, fingerprint: str) -> bool:
        """Whether a value may still come."""
        return self.enabled and self._ledger.quality(fingerprint) is None

    def unmeasured(self) -> list[str]:
        """Fingerprints with measured points (and then the reference) that nobody has measured or given up."""
        if not self.enabled:
            return []
        waiting = [f for f in self._ledger.measured_fingerprints() if self.pending(f)]
        wanted = [self.reference, *waiting] if waiting else []
        return [f for f in dict.fromkeys(wanted) if self._missing(f) and f not in self._claimed]

    def compare_all(self) -> None:
        """Compare every measured fingerprint that has no record yet with the reference, if that is there."""
        reference = load_logprobs(logprobs_path(self._folder, self.reference))
        if not self.enabled or reference is None:
            self._share_loss()
            return
        runs = [load_logprobs(logprobs_path(self._folder, self.reference, run)) for run in (REPEAT, CONTROL)]
        equals = [run for run in runs if run is not None]
        floor = noise_floor(reference, equals) if equals else None
        reference_answers = load_answers(answers_path(self._folder, self.reference))
        for path in sorted((self._folder / QUALITY_DIR).glob("*.npz")):
            answers = load_answers(answers_path(self._folder, path.stem))
            state = (floor, answers is None, reference_answers is None)
            if path.stem.endswith((f"-{REPEAT}", f"-{CONTROL}")) or self._compared.get(path.stem) == state:
                continue
            candidate = load_logprobs(path)
            if candidate is not None:
                self._compared[path.stem] = state
                record = quality_record(
                    path.stem, self.reference, compare(reference, candidate), floor, answers, reference_answers
                )
                known = self._ledger.quality(path.stem)
                if known is None or not same_but_for_its_time(known, record):
                    self._record(record)

    def _missing(self, fingerprint: str) -> bool:
        """Neither measured nor given up. What is compared with the reference needs more of it than its record."""
        known = self._ledger.quality(fingerprint)
        needed = known is None or (fingerprint == self.reference and known.state == "measured")
        return needed and load_logprobs(logprobs_path(self._folder, fingerprint)) is None

    def _share_loss(self) -> None:
        """Without the reference nothing can be compared: every fingerprint shares its fate."""
        lost = self._ledger.quality(self.reference)
        if not self.enabled or lost is None or lost.state != "failed":
            return
        for fingerprint in self._ledger.measured_fingerprints():
            if self.pending(fingerprint):
                because = f"the reference could not be measured: {lost.detail}"
                self._give_up(fingerprint, lost.launch_id, lost.cause, because)

    def _give_up(self, fingerprint: str, launch_id: str | None, cause: str | None, detail: str) -> None:
        self._record(
            QualityRecord(
                fingerprint=fingerprint,
                reference_fingerprint=self.reference,
                state="failed",
                metrics={},
                noise_floor_kl=None,
                positions=0,
                launch_id=launch_id,
                finished_at=_now(),
                cause=cause,
                detail=detail,
            )
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
