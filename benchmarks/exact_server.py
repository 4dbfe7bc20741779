"""The exact server (exact_server.c) as a context manager: compiled when first needed, its record as plain data."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import urllib.request
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

_SOURCE = Path(__file__).with_name("exact_server.c")
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Sent:
    """One request as the server knows it, in perf_counter seconds. chunk_s: (chunks,), tokens_per_chunk in each."""

    arrived_s: float
    chunk_s: npt.NDArray[np.float64]
    tokens_per_chunk: int

    @property
    def ttft_ms(self) -> float:
        return float(self.chunk_s[0] - self.arrived_s) * 1e3

    def per_token_ms(self, tokens: int) -> float:
        """Time per token after the first chunk, of an answer of so many tokens."""
        return float(self.chunk_s[-1] - self.chunk_s[0]) * 1e3 / (tokens - self.tokens_per_chunk)


@cache
def compiled() -> Path:
    """The server's program. Raises RuntimeError where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("the exact server is C and no `cc` is on PATH")
    program = Path(tempfile.mkdtemp(prefix="exact_server_")) / "exact_server"
    subprocess.run([compiler, "-O2", "-o", str(program), str(_SOURCE)], check=True)
    return program


class ExactServer:
    """First chunk first_ms after a request arrived, then one of tokens_per_chunk tokens every gap_ms.

    early_chunk: a chunk without tokens at once. real_time: the system lets it run ahead of other processes.
    """

    def __init__(self, first_ms: float, gap_ms: float, tokens_per_chunk: int = 1, early_chunk: bool = False) -> None:
        self._arguments = [str(first_ms), str(gap_ms), str(tokens_per_chunk), str(int(early_chunk))]

    def __enter__(self) -> ExactServer:
        self._process = subprocess.Popen([str(compiled()), *self._arguments], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port, real_time = self._process.stdout.readline().split()
        self.base_url, self.real_time = f"http://127.0.0.1:{port}", real_time == "1"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def record(self) -> list[tuple[int, Sent]]:
        """(first token id of the prompt or -1, what was sent) of each request finished since the last call."""
        with _NO_PROXY.open(f"{self.base_url}/record", timeout=60) as response:
            lines = [np.array(line.split(), dtype=np.int64) for line in response.read().decode().splitlines()]
        return [(int(v[0]), Sent(float(v[1]) / 1e9, v[4:] / 1e9, int(v[3]))) for v in lines]
