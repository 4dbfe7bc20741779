"""Why a launch failed: one word for the sampler and the table, one line of evidence for the person."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

Phase = Literal["startup", "first_request", "load"]


class FailureCause(StrEnum):
    """What went wrong. Everything not transient is a property of the configuration and teaches the sampler."""

    invalid_argument = "invalid_argument"
    unsupported = "unsupported"
    model_not_found = "model_not_found"
    out_of_memory = "out_of_memory"
    died_at_startup = "died_at_startup"
    startup_timeout = "startup_timeout"
    first_request_failed = "first_request_failed"
    engine_died = "engine_died"
    request_errors = "request_errors"
    load_timeout = "load_timeout"
    port_in_use = "port_in_use"
    disk_full = "disk_full"
    device_lost = "device_lost"
    interrupted = "interrupted"
    proof_failed = "proof_failed"
    unknown = "unknown"

    @property
    def transient(self) -> bool:
        """Worth one retry on clean devices: the fault is the machine's or the moment's, not the configuration's."""
        return self in _TRANSIENT


_TRANSIENT = {
    FailureCause.port_in_use,
    FailureCause.startup_timeout,
    FailureCause.load_timeout,
    FailureCause.device_lost,
    FailureCause.interrupted,
}


class LaunchFailure(Exception):
    """A launch, load or proof that failed. detail: the line of log or response that shows it."""

    def __init__(self, cause: FailureCause, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail


# Most specific first: a refused argument is also a death at start-up, an out-of-memory one too.
_SIGNS: Sequence[tuple[re.Pattern[str], FailureCause]] = [
    (re.compile(pattern, re.IGNORECASE), cause)
    for pattern, cause in (
        (r"No space left on device|\[Errno 28\]", FailureCause.disk_full),
        (r"address already in use|\[Errno 98\]", FailureCause.port_in_use),
        (r"error: (argument|unrecognized arguments|the following arguments)", FailureCause.invalid_argument),
        (
            r"CUDA error: (unspecified launch failure|an illegal memory access|device-side|uncorrectable ECC)"
            r"|CUDA driver error|Xid|NVML: GPU is lost|has fallen off the bus",
            FailureCause.device_lost,
        ),
        (
            r"out of memory|OutOfMemoryError|No available memory for the cache blocks"
            r"|larger than the available KV cache|Free memory on device|MemoryError|Cannot allocate memory"
            r"|not enough memory|less than desired (GPU|CPU) memory",
            FailureCause.out_of_memory,
        ),
        (
            r"Repo(sitory)? ?id must|RepositoryNotFound|is not a local folder and is not a valid model identifier"
            r"|Invalid repository ID|does not appear to have a file named|No such file or directory: .*config\.json"
            r"|Can't load the configuration of|LocalEntryNotFoundError|GatedRepoError|couldn't connect to",
            FailureCause.model_not_found,
        ),
        (
            r"_C::\w+\(\) expected at most|not (yet )?supported|Unsupported|NotImplementedError|no kernel image"
            r"|not implemented for|is not compiled|requires .*(compute capability|CUDA)|does not support"
            r"|has no attribute '\w+'.*_C|Could not run '.*' with arguments from the '\w+' backend",
            FailureCause.unsupported,
        ),
        (
            r"validation error for \w+|ValueError: .*(must|should|invalid|Unknown|not (divisible|recognized))"
            r"|pydantic|Value error,|must be divisible by",
            FailureCause.invalid_argument,
        ),
    )
]
_PHASE_CAUSE = {
    "startup": FailureCause.died_at_startup,
    "first_request": FailureCause.first_request_failed,
    "load": FailureCause.engine_died,
}
# A failing exception line of Python, after vLLM's own log prefix has been removed.
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault)\b.*|^\S*: error: .*")
_GENERIC = re.compile(
    r"Engine core initialization failed|EngineDeadError|EngineCore encountered an issue|See stack trace"
    r"|Failed core proc|CancelledError|ConnectionResetError|BrokenPipeError|^SystemExit"
)
_PREFIX = re.compile(
    r"^(?:\x1b\[[0-9;]*m)*(?:\([\w -]+pid=\d+\)\s*)?(?:\x1b\[[0-9;]*m)*"
    r"(?:(?:INFO|WARNING|ERROR|DEBUG)\s+[\d-]+ [\d:.]+ \S+\s?)?"
)


def classify(phase: Phase, exit_code: int | None, log_tail: str, response: str | None) -> tuple[FailureCause, str]:
    """Cause and evidence of a failure. exit_code: None while alive. response: what a request got, where one was sent.

    The cause known from a log line wins during start-up. A server that was up and died is named by when it died
    (first request, load), except for causes that say more: memory, disk, device.
    """
    lines = [_PREFIX.sub("", line).strip() for line in log_tail.splitlines()]
    errors = [line for line in lines if _EXCEPTION.match(line) and not _GENERIC.search(line)]
    evidence = [*reversed(errors), *([response] if response else []), *reversed(lines)]
    for pattern, cause in _SIGNS:
        # Only lines that report an error count: a warning may well say "not supported" and go on.
        found = next((line for line in errors if pattern.search(line)), None)
        if found is None and cause in (FailureCause.disk_full, FailureCause.port_in_use):
            found = next((line for line in lines if pattern.search(line)), None)
        if found is not None:
            return (cause if phase == "startup" or _names_itself(cause) else _PHASE_CAUSE[phase]), _short(found)
    if exit_code == -9:
        return FailureCause.out_of_memory, "the process was killed (SIGKILL), as the kernel does when memory runs out"
    detail = next((line for line in evidence if line), "the server wrote nothing")
    return _PHASE_CAUSE[phase], _short(detail)


def _names_itself(cause: FailureCause) -> bool:
    return cause in (FailureCause.out_of_memory, FailureCause.disk_full, FailureCause.device_lost)


def _short(line: str) -> str:
    return line if len(line) <= 300 else line[:297] + "..."
