"""The processes, port and shared memory of one launch: how they are marked, found, and made to end."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

LAUNCH_ID = "SWEEP_LAUNCH_ID"
OWNER_FD = "SWEEP_OWNER_FD"  # see vllm_serve.py
_PRCTL = ctypes.CDLL(None, use_errno=True).prctl
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2
_KILL_WAIT_S = 20.0
_TRACKER_WAIT_S = 5.0
# What vLLM and Python name their own segments; people keep checkpoints in /dev/shm too.
_SEGMENT = re.compile(r"/dev/shm/(?:psm_|vllm_)[^/]+$")


def carriers(launch_id: str) -> list[psutil.Process]:
    """Every process that carries this launch id in its environment, but not ourselves."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(LAUNCH_ID) == launch_id and process.pid != os.getpid():
                found.append(process)
    return found


def kill_leftovers(launch_id: str) -> int:
    """End every process that carries this launch id in its environment; returns how many there were.

    Python's resource trackers are left to end by themselves at first: each removes the shared memory that the
    processes it served have left behind.
    """
    found: set[psutil.Process] = set()
    began = time.monotonic()
    while (left := carriers(launch_id)) and time.monotonic() < began + _KILL_WAIT_S:
        found.update(left)
        spare_trackers = time.monotonic() < began + _TRACKER_WAIT_S
        for process in left:
            with suppress(psutil.NoSuchProcess):
                if not (spare_trackers and _is_resource_tracker(process)):
                    process.kill()
        psutil.wait_procs(left, timeout=_POLL_S)
    return len(found)


def _is_resource_tracker(process: psutil.Process) -> bool:
    return any("multiprocessing.resource_tracker" in word for word in process.cmdline())


def mapped_shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Named shared memory of vLLM that these processes have mapped: nobody removes all of it when they are killed."""
    found: set[Path] = set()
    for process in processes:
        with suppress(OSError):
            segments = map(_SEGMENT.search, Path(f"/proc/{process.pid}/maps").read_text().splitlines())
            found.update(Path(segment[0]) for segment in segments if segment)
    return found


def foreign_listeners(port: int, pid: int) -> str | None:
    """Who else than the process and its descendants listens on this port, "nobody" if even they don't; None if fine.

    Two servers can listen on one port without an error (SO_REUSEPORT), and would share its requests.
    """
    ours = {pid}
    with suppress(psutil.NoSuchProcess):
        ours.update(child.pid for child in psutil.Process(pid).children(recursive=True))
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr]
    owners = {c.pid for c in listening if tuple(c.laddr)[1:] == (port,)}
    if not owners:
        return "nobody"
    others = [f"process {owner}" if owner else "another user's process" for owner in owners - ours]
    return ", ".join(others) or None


def lease_port() -> socket.socket:
    """A port of our own until the socket is closed: bound but not listening, so the kernel gives it to nobody else.

    The server binds it all the same, as vLLM sets SO_REUSEADDR.
    """
    lease = socket.socket()
    lease.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    lease.bind(("127.0.0.1", 0))
    return lease


def end_with_parent(niceness: int) -> Callable[[], None]:
    """What a child does between fork and exec, so that the kernel sends it SIGTERM when we die, however we die."""
    parent = os.getpid()

    def in_child() -> None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # we died before it asked
            os._exit(1)
        os.nice(niceness)

    return in_child


def kernel_oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory since boot, in any container; 0 if it won't say."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
