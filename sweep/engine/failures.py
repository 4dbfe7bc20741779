"""Why a launch failed: one word for the sampler and the table, one line of evidence for the person."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from enum import StrEnum
from pathlib import PurePath
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
    unknown_to_estimator = "unknown_to_estimator"
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


# Most specific first: a refused argument is also a death at start-up, an out-of-memory one too. The words are those of
# vLLM 0.32, PyTorch 2.13, CUDA and the Hugging Face hub.
_SIGNS: Sequence[tuple[re.Pattern[str], FailureCause]] = [
    (re.compile(pattern, re.IGNORECASE), cause)
    for pattern, cause in (
        (r"No space left on device|\[Errno 28\]", FailureCause.disk_full),
        (r"address already in use|EADDRINUSE|\[Errno 98\]", FailureCause.port_in_use),
        (
            r"uncorrectable (ECC|NVLink)|GPU is lost|has fallen off the bus|CUDA driver error"
            r"|CUDA-capable device\(s\) is/are busy|no CUDA-capable device|system not yet initialized",
            FailureCause.device_lost,
        ),
        (
            r"out of memory|OutOfMemoryError|MemoryError|bad_alloc|(can't|cannot) allocate memory"
            r"|No available memory for the cache blocks|larger than the available KV cache"
            r"|Free memory on device|less than desired (GPU|CPU) memory|less than requested memory for kv"
            r"|exceeds available Mamba cache blocks",
            FailureCause.out_of_memory,
        ),
        (r"error: (argument|unrecognized arguments|the following arguments)", FailureCause.invalid_argument),
        (
            r"Repo id must be|(Repository|Revision|LocalEntry|RemoteEntry)NotFound|GatedRepo|OfflineModeIsEnabled"
            r"|is not a local folder and is not a valid model identifier|Invalid repository ID or local directory"
            r"|does not appear to have a file named|Cannot find any model weights|couldn't connect to"
            r"|Can't load the configuration of|No such file or directory: \S*\.(json|safetensors|gguf|bin|model)\b",
            FailureCause.model_not_found,
        ),
        (
            r"_C\w*::\w+\(\) expected at most|'_C\w*' object has no attribute|no kernel image|not (yet )?supported"
            r"|only supported|unsupported|does not support|NotImplementedError|not (yet )?implemented|is not compiled"
            r"|out of resource:"
            r"|No module named|requires .*(compute capability|CUDA|GPU)|No valid attention backend"
            r"|is not valid for this configuration|Could not run '.*' with arguments from the '\w+' backend"
            r"|Not enough allowed NUMA nodes",
            FailureCause.unsupported,
        ),
        (
            r"validation errors? for \w+|invalid device ordinal"
            r"|(Value|Type|Key|Assertion)Error: .*(must|should|invalid|unknown|not (divisible|recognized))",
            FailureCause.invalid_argument,
        ),
    )
]
# Causes that a server may show at any time; of the others, a server that was up tells only when it died.
_ANY_TIME = (FailureCause.out_of_memory, FailureCause.disk_full, FailureCause.device_lost)
_PHASE_CAUSE = {
    "startup": FailureCause.died_at_startup,
    "first_request": FailureCause.first_request_failed,
    "load": FailureCause.engine_died,
}
# "(EngineCore pid=4711) ERROR 12-01 03:38:49 [core.py:1512] " before what was said.
_PREFIX = re.compile(
    r"(?:\x1b\[[0-9;]*m)*(?:\((?P<process>[\w -]+) pid=\d+\)\s*)?(?:\x1b\[[0-9;]*m)*"
    r"(?:(?:INFO|WARNING|ERROR|CRITICAL|DEBUG)\s+[\d-]+ [\d:.]+ (?P<source>\[\S+:\d+\])\s?)?"
)
_ERROR = re.compile(
    r"(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Fault)(?:_\w+)?\b|(?:[a-z_]\w*\.)+[A-Z]\w*: "
    r"|(?:[\w./-]+ )*[\w./-]+: error: |what\(\): |Fatal Python error: |!+ Segfault encountered"
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_CHAINED = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_MARKS = re.compile(r"[\^~\s]*")
_VALIDATION = re.compile(r"(?P<count>\d+) validation errors? for \w+$")
# Errors that only pass on that something else went wrong.
_GENERIC = re.compile(
    r"Engine core initialization failed|EngineDeadError|EngineCore encountered an issue"
    r"|WorkerProc initialization failed|Worker failed with error|Failed core proc|Executor failed"
    r"|RuntimeError: cancelled|CancelledError|KeyboardInterrupt: terminated"
    r"|Connection(Reset|Refused)Error|BrokenPipeError|Connection (closed|reset) by peer"
)
_DIED = re.compile(r"(died|exited) unexpectedly")
_ASKED_TO_STOP = re.compile(r"KeyboardInterrupt: terminated|API server: shutdown triggered")
_NOISE = re.compile(r"nanobind|resource_tracker|warnings\.warn|- leaked |\.\.\. skipped|^-{3,}|^\W*$")
_SHORT_MESSAGE, _LONG_MESSAGE = 60, 300


def classify(phase: Phase, exit_code: int | None, log_tail: str, response: str | None) -> tuple[FailureCause, str]:
    """Cause and evidence of a failure. exit_code: None while alive. response: what a request got, where one was sent.

    The cause known from a log line wins during start-up. A server that was up and died is named by when it died
    (first request, load), except for causes that say more: memory, disk, device.
    """
    lines = log_tail.splitlines()
    said = [_PREFIX.sub("", line, count=1).strip() for line in lines]
    errors = _errors(lines, engine_first=phase != "startup")
    answer = _answer(response)
    for pattern, cause in _SIGNS:
        # Only lines that report an error count: a warning may well say "not supported" and go on.
        where = [*errors, answer, *(said if cause in (FailureCause.disk_full, FailureCause.port_in_use) else [])]
        found = next((text for text in where if pattern.search(text)), None)
        if found is not None:
            return (cause if phase == "startup" or cause in _ANY_TIME else _PHASE_CAUSE[phase]), _short(found)
    telling = [text for text in (answer, *errors) if text and not _GENERIC.search(text)]
    if not telling and (exit_code in (-signal.SIGTERM, -signal.SIGINT) or any(map(_ASKED_TO_STOP.search, said))):
        return FailureCause.interrupted, "the server was asked to stop, and not by this launch"
    died = [text for text in said if _DIED.search(text)]
    killed = [f"the server was killed by {signal.Signals(-exit_code).name}"] if exit_code and exit_code < 0 else []
    last = [text for text in reversed(said) if not _NOISE.search(text)]
    evidence = [*telling, *died, *killed, *errors, *last, "the server wrote nothing"]
    return _PHASE_CAUSE[phase], _short(evidence[0])


def _errors(lines: Sequence[str], *, engine_first: bool) -> list[str]:
    """Messages of the exceptions in a log, root causes first.

    A message that says little carries the place that raised it. Where one exception was raised from another, the
    later one comes first. engine_first: those of the engine's processes before those of the API server, which logs
    every request that failed.
    """
    found: list[tuple[bool, str]] = []
    place, code, chained = "", "", False
    for number, line in enumerate(lines):
        prefix = _PREFIX.match(line)
        said = line[prefix.end() :].strip() if prefix else line.strip()
        frame = _FRAME.match(said)
        if frame:
            place = f" ({PurePath(frame['file']).name}:{frame['line']} in {frame['function']})"
        elif _CHAINED.match(said):
            chained = True
        elif _ERROR.match(said):
            text = _validation_message(said, lines[number + 1 :]) or said
            text += f": {code}" if code and text.isidentifier() else ""
            text += place if len(text) < _SHORT_MESSAGE else ""
            outside = engine_first and (prefix is None or not re.match("EngineCore|.*Worker", prefix["process"] or ""))
            found.insert(len(found) - 1 if chained and found else len(found), (outside, text))
            place, code, chained = "", "", False
        elif not _MARKS.fullmatch(said):
            code = said
    return [text for outside in (False, True) for o, text in found if o is outside]


def _validation_message(said: str, following: Sequence[str]) -> str | None:
    """Pydantic says what is wrong on the lines after the exception's: joined here to one."""
    header = _VALIDATION.search(said)
    if header is None:
        return None
    message: list[str] = []
    errors = int(header["count"])
    for line in following[: 12 * errors]:
        text, ended, _ = f" {_PREFIX.sub('', line, count=1).strip()}".partition(" [type=")
        if not text.startswith(" For further information"):
            message.append(text.strip().removeprefix("Value error, "))
        errors -= bool(ended)
        if not errors:
            break
    return f"{said.removeprefix('pydantic_core._pydantic_core.ValidationError: ')}: {' '.join(filter(None, message))}"


def _answer(response: str | None) -> str:
    """What an HTTP answer says: the message of vLLM's error object, or the text as it is."""
    try:
        parsed = json.loads(response or "")
    except ValueError:
        return response or ""
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _short(text: str) -> str:
    return text if len(text) <= _LONG_MESSAGE else text[: _LONG_MESSAGE - 1] + "…"
