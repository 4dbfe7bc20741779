"""Where quality measurements are kept for all studies: under $XDG_CACHE_HOME/sweep/quality."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def cache_path(
    question: Any, *, model: str, fingerprint: str, engine_version: str, device: str, suffix: str = ".npz"
) -> Path:
    """.../<checksum>/<fingerprint>-<version>-<device><suffix>, for the answers of one engine to one question.

    question: plain JSON of all that was asked. device (a GPU's name, or "cpu") is part of the name because kernels of
    one fingerprint differ between devices; the checksum also covers, for a local checkpoint, the sizes and times of its
    files, so that another model saved to the same folder is measured anew.
    """
    key = json.dumps([question, _checkpoint_stamp(Path(model))])
    checksum = hashlib.sha256(key.encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9._+-]+", "_", f"{fingerprint}-{engine_version}-{device}")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "sweep" / "quality" / checksum / f"{name}{suffix}"


def _checkpoint_stamp(model: Path) -> list[tuple[str, int, int]]:
    if not model.is_dir():
        return []
    files = sorted(p for p in model.iterdir() if p.suffix in (".safetensors", ".bin", ".json", ".gguf"))
    return [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file for writing that appears under its name only once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=path.suffix, delete=False) as f:
        try:
            yield f
            f.flush()
            Path(f.name).replace(path)
        except BaseException:
            Path(f.name).unlink(missing_ok=True)
            raise
