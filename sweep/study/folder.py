"""A study's folder: made once, locked while a sweep runs, continued only with the configuration it was made for."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sweep.config import SweepConfig
from sweep.errors import StudyError
from sweep.results.records import SCHEMA_VERSION

STUDY_FILE = "study.json"
LOCK_FILE = "lock"
# What a measurement depends on. Budget, sampler, executor, constraints and objectives may change between runs.
_FROZEN = ("model", "hardware", "workload", "space", "engine", "quality", "proof")
# What within them judges or runs a measurement without changing it.
_FREE = ("quality.non_inferiority", "quality.task_timeout_s", "quality.python")
_MIN_FREE_BYTES = 2 * 2**30


@contextmanager
def study_folder(config: SweepConfig, search_space_fingerprint: str) -> Iterator[Path]:
    """The study's folder, created or found to belong to this configuration, and locked against every other sweep.

    Raises StudyError for anything that keeps it from being used.
    """
    folder = _make(config)
    with locked(folder):
        path = folder / STUDY_FILE
        if path.exists():
            saved = _read(path)
            _check_same(saved, config, search_space_fingerprint)
            saved |= {"config": config.to_dict(), "objectives": config.objectives.metrics}
        else:
            saved = {
                "schema": SCHEMA_VERSION,
                "study": config.study,
                "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "config": config.to_dict(),
                "search_space_fingerprint": search_space_fingerprint,
                "objectives": config.objectives.metrics,
                "versions": _versions(),
                "host": _host(),
                "workload_checksum": None,
            }
        write_json(path, saved)
        yield folder


def _make(config: SweepConfig) -> Path:
    """The folder, on a disk with room for its results, and not somebody else's."""
    folder = (Path(config.storage.dir).expanduser() / config.study).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        inside = {path.name for path in folder.iterdir()}
        if STUDY_FILE not in inside and any(not _is_ours(name) for name in inside):
            raise StudyError(f"{folder} exists and is not a study", "choose another study=… or storage.dir=…")
        (folder / LOCK_FILE).touch()
    except OSError as error:
        raise StudyError(
            f"storage.dir={config.storage.dir} cannot be used: {error.filename}: {error.strerror}",
            "choose another storage.dir=…",
        ) from error
    free = shutil.disk_usage(folder).free
    if free < _MIN_FREE_BYTES:
        raise StudyError(
            f"only {free / 2**30:.1f} GiB free under {folder}",
            "free at least 2 GiB, or choose another storage.dir=…",
        )
    return folder


def _is_ours(name: str) -> bool:
    """What a sweep that was killed before study.json existed leaves behind."""
    return name == LOCK_FILE or name.startswith(f"{STUDY_FILE}.")


def update_study(folder: Path, **changes: Any) -> None:
    """Add facts that are known only once a server ran (workload checksum, vLLM version)."""
    path = folder / STUDY_FILE
    saved = json.loads(path.read_text())
    if any(saved.get(key) != value for key, value in changes.items()):
        write_json(path, saved | changes)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one sweep writes to a study. Raises StudyError naming the process that holds it. Survives kill -9."""
    path = folder / LOCK_FILE
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            raise StudyError(
                f"study '{folder.name}' is being run by process {holder}",
                "wait for it, stop it with Ctrl-C or kill, or choose another study=…",
            ) from error
        except OSError as error:
            raise StudyError(
                f"{path} cannot be locked: {error.strerror}", "choose a storage.dir=… on a file system with locks"
            ) from error
        handle.truncate(0)
        handle.write(f"{os.getpid()} on {platform.node()}")
        handle.flush()
        yield


def write_json(path: Path, data: Any) -> None:
    """Atomic: a reader sees the old or the new file, never half of one."""
    temporary = path.with_suffix(path.suffix + f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(data, indent=1))
    temporary.replace(path)


def _read(path: Path) -> dict[str, Any]:
    """study.json of an earlier session, with everything in it that a comparison needs."""
    try:
        saved: dict[str, Any] = json.loads(path.read_text())
        if saved["schema"] > SCHEMA_VERSION:
            raise StudyError(
                f"{path} has schema {saved['schema']}, newer than this sweep understands ({SCHEMA_VERSION})",
                "upgrade sweep to continue this study",
            )
        _ = saved["search_space_fingerprint"], {group: saved["config"].get(group) for group in _FROZEN}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StudyError(
            f"{path} is corrupt ({error})", "restore it from a backup, or choose another study=…"
        ) from error
    return saved


def _check_same(saved: Mapping[str, Any], config: SweepConfig, fingerprint: str) -> None:
    # A field that an older sweep did not have was what its default still is.
    old, new = _filled(saved["config"], SweepConfig().to_dict()), config.to_dict()
    differences = [
        f"{key}: {was!r} before, {now!r} now"
        for group in _FROZEN
        for key, was, now in _differences(group, old.get(group), new[group])
        if not key.startswith(_FREE)
    ]
    if differences or saved["search_space_fingerprint"] != fingerprint:
        shown = "; ".join(differences[:3]) or "the search space"
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise StudyError(
            f"study '{config.study}' was made for another configuration: {shown}{more}",
            "measurements of both would not be comparable: choose another study=…, or the old values",
        )


def _filled(saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """saved, with the defaults of the keys it lacks, at every depth."""
    both = {name: value for name, value in saved.items() if isinstance(value, dict) and defaults.get(name)}
    return {**defaults, **saved, **{name: _filled(value, defaults[name]) for name, value in both.items()}}


def _differences(key: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(was, dict) and isinstance(now, dict):
        for name in sorted(was.keys() | now.keys()):
            yield from _differences(f"{key}.{name}", was.get(name), now.get(name))
    elif json.dumps(was) != json.dumps(now):
        yield key, was, now


def _versions() -> dict[str, str | None]:
    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {
        "python": platform.python_version(),
        **{p: of(p) for p in ("sweep-llm", "optuna", "hydra-core", "moocore")},
    }


def _host() -> dict[str, Any]:
    return {
        "node": platform.node(),
        "system": platform.platform(),
        "cpu_count": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "driver": _nvidia_driver(),
    }


def _nvidia_driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return result.stdout.splitlines()[0].strip() if result.returncode == 0 and result.stdout else None
