"""What belongs to a launch is found and ended, and nothing else is touched."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sweep.engine import vllm_serve
from sweep.engine.processes import (
    LAUNCH_ID,
    OWNER_FD,
    carriers,
    foreign_listeners,
    kill_leftovers,
    lease_port,
    mapped_shared_memory,
)

SHARED = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=4096).name, flush=True)
time.sleep(60)
"""
SERVING = f"""
import os, sys, time
sys.path.insert(0, {str(Path(vllm_serve.__file__).parent)!r})
import vllm_serve
vllm_serve._GRACE_S = 1.0
vllm_serve._end_with_owner(int(os.environ["{OWNER_FD}"]))
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("serving", flush=True)
time.sleep(60)
"""


@pytest.fixture
def launch_id(tmp_path: Path) -> Iterator[str]:
    name = f"processes-{tmp_path.name}-{os.getpid()}"
    yield name
    kill_leftovers(name)


def start(launch_id: str, script: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, LAUNCH_ID: launch_id, **env},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_killed_processes_leave_no_shared_memory(launch_id: str) -> None:
    """Python's resource tracker removes it, if it is let live long enough."""
    with start(launch_id, SHARED) as process:
        segment = Path("/dev/shm") / first_line(process)
        assert segment.exists()
        deadline = time.monotonic() + 20  # the tracker needs a moment to become a program of its own
        while len(carriers(launch_id)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(carriers(launch_id)) == 2, "the program and its resource tracker"
        assert kill_leftovers(launch_id) == 2
    assert carriers(launch_id) == []
    assert not segment.exists()


def test_a_process_that_renames_itself_is_still_found(launch_id: str) -> None:
    """As vLLM's engine does; without SPT_NOENV its new name would lie over its environment."""
    pytest.importorskip("setproctitle")
    rename = "import setproctitle, time; setproctitle.setproctitle('VLLM::EngineCore' * 99); print(1, flush=True)"
    with start(launch_id, f"{rename}; time.sleep(60)", SPT_NOENV="1") as process:
        assert first_line(process) == "1"
        assert [p.pid for p in carriers(launch_id)] == [process.pid]
        kill_leftovers(launch_id)


def test_our_own_process_is_never_a_leftover(launch_id: str) -> None:
    script = "from sweep.engine.processes import *; import os; print(kill_leftovers(os.environ[LAUNCH_ID]), flush=True)"
    with start(launch_id, script, PYTHONPATH=str(Path(__file__).parents[3])) as process:
        assert first_line(process) == "0"
    assert process.returncode == 0


def test_only_segments_named_as_vllms_count_as_its_shared_memory(tmp_path: Path) -> None:
    """People keep checkpoints in /dev/shm, which vLLM maps as well."""
    ours, checkpoint = (Path(f"/dev/shm/{name}-{tmp_path.name}-{os.getpid()}") for name in ("vllm_dist_x", "model"))
    maps = []
    try:
        for path in (ours, checkpoint):
            path.write_bytes(bytes(4096))
            with path.open("r+b") as file:
                maps.append(mmap.mmap(file.fileno(), 4096))
        found = mapped_shared_memory([psutil.Process()])
        assert ours in found and checkpoint not in found
        ours.unlink()
        assert ours not in mapped_shared_memory([psutil.Process()])
    finally:
        for mapped in maps:
            mapped.close()
        for path in (ours, checkpoint):
            path.unlink(missing_ok=True)


def test_a_leased_port_is_given_to_nobody_else_but_its_server_may_bind_it() -> None:
    leases = [lease_port() for _ in range(200)]
    try:
        port = leases[0].getsockname()[1]
        assert len({lease.getsockname()[1] for lease in leases}) == len(leases)
        assert foreign_listeners(port, os.getpid()) == "nobody"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.socket() as server:  # as vLLM does it
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            assert foreign_listeners(port, os.getpid()) is None
    finally:
        for lease in leases:
            lease.close()


def test_a_stranger_who_shares_the_port_is_named(launch_id: str) -> None:
    share = "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)"
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        script = f"import socket, time; s = socket.socket(); {share}; s.bind(('127.0.0.1', {port})); s.listen()"
        with start(launch_id, f"{script}; print(1, flush=True); time.sleep(60)") as stranger:
            assert first_line(stranger) == "1"
            assert foreign_listeners(port, stranger.pid) == f"process {os.getpid()}"
            assert foreign_listeners(port, os.getpid()) is None, "a child of ours is no stranger"
            kill_leftovers(launch_id)


def test_a_server_that_ignores_sigterm_ends_with_its_owner(launch_id: str) -> None:
    """vLLM does while its engine loads."""
    owner_fd, held_by_owner = os.pipe()
    os.set_inheritable(owner_fd, True)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVING],
        env={**os.environ, LAUNCH_ID: launch_id, OWNER_FD: str(owner_fd)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        pass_fds=(owner_fd,),
    )
    os.close(owner_fd)
    with server:
        assert first_line(server) == "serving"
        assert len(carriers(launch_id)) == 2, "the server and the process that watches its owner"
        time.sleep(0.5)
        assert server.poll() is None
        os.close(held_by_owner)
        assert server.wait(timeout=60) == -signal.SIGKILL
    psutil.wait_procs(carriers(launch_id), timeout=60)
    assert carriers(launch_id) == []
