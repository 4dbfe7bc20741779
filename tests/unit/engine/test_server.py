"""The life of a server's processes, with small programs in vLLM's place: what hangs, refuses to end, or slips away.

The same life with the real vLLM is in tests/engine/test_server_life.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sweep.engine import server as server_module
from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.engine.processes import LAUNCH_ID, kill_leftovers
from sweep.engine.server import Server

HEALTHY = "from http.server import *; HTTPServer(('127.0.0.1', {port}), SimpleHTTPRequestHandler).serve_forever()"


def program(folder: Path, script: str) -> str:
    """An "interpreter" that runs a shell script, whatever it is asked to run."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def launch(folder: Path, script: str, *, startup_timeout_s: float = 60.0, stop_timeout_s: float = 20.0) -> Server:
    return Server(
        EngineConfig("m", {}, {}),
        python=program(folder, script),
        log_path=folder / "server.log",
        device_env={},
        startup_timeout_s=startup_timeout_s,
        stop_timeout_s=stop_timeout_s,
        launch_id=f"unit-{folder.name}-{os.getpid()}",
    )


def carriers(folder: Path) -> list[psutil.Process]:
    """Every process of a launch of this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(LAUNCH_ID) == f"unit-{folder.name}-{os.getpid()}":
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def failure(server: Server) -> LaunchFailure:
    with pytest.raises(LaunchFailure) as caught:
        server.start()
    return caught.value


def end(server: Server) -> LaunchFailure:
    """The failure of a launch that cannot succeed, after its end."""
    try:
        return failure(server)
    finally:
        server.stop()


@pytest.fixture
def foreign_port(tmp_path: Path) -> Iterator[int]:
    """A port where a server that is not ours answers every question with 200."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    (tmp_path / "health").write_text("ok")
    foreign = subprocess.Popen(
        [sys.executable, "-c", HEALTHY.format(port=port)], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    try:
        yield port
    finally:
        foreign.kill()
        foreign.wait()


def test_death_before_health_is_told_with_its_cause(tmp_path: Path) -> None:
    server = launch(tmp_path, "echo 'OSError: [Errno 28] No space left on device' >&2; exit 1")
    caught = failure(server)
    server.stop()
    assert caught.cause is FailureCause.disk_full
    assert "No space left on device" in caught.detail


def test_a_kill_is_for_lack_of_memory_if_the_kernel_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = end(launch(tmp_path, "kill -9 $$"))
    assert killed.cause is FailureCause.died_at_startup
    assert killed.detail == "the server was killed by SIGKILL"

    counter = iter([7, 8])
    monkeypatch.setattr(server_module, "kernel_oom_kills", lambda: next(counter))
    starved = end(launch(tmp_path, "kill -9 $$"))
    assert starved.cause is FailureCause.out_of_memory
    assert "the kernel killed processes for lack of memory" in starved.detail


def test_an_explained_death_stays_explained_when_memory_ran_out_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = iter([7, 8])
    monkeypatch.setattr(server_module, "kernel_oom_kills", lambda: next(counter))
    explained = end(launch(tmp_path, "echo 'vllm: error: argument -x: no'; exit 2"))
    assert explained.cause is FailureCause.invalid_argument


def test_the_environment_is_the_users_the_engines_and_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices of the launch win over what the engine config says; a key that we would not know is left out."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("SOMETHING_OF_THE_USER", "kept")
    server = Server(
        EngineConfig("org/name", {}, {"VLLM_CPU_KVCACHE_SPACE": "2", "CUDA_VISIBLE_DEVICES": "7"}),
        python=program(tmp_path, f"env > {tmp_path}/env; exit 1"),
        log_path=tmp_path / "server.log",
        device_env={"CUDA_VISIBLE_DEVICES": "3"},
        startup_timeout_s=60.0,
        stop_timeout_s=5.0,
        launch_id=f"unit-{tmp_path.name}-{os.getpid()}",
    )
    end(server)
    env = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert "VLLM_API_KEY" not in env and "HF_HUB_OFFLINE" not in env
    assert env["SOMETHING_OF_THE_USER"] == "kept"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert env["CUDA_VISIBLE_DEVICES"] == "3"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env[LAUNCH_ID] == f"unit-{tmp_path.name}-{os.getpid()}"


def test_a_program_that_never_gets_healthy_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    server = launch(tmp_path, "echo loading weights; exec sleep 600", startup_timeout_s=1.0)
    caught = failure(server)
    server.stop()
    assert caught.cause is FailureCause.startup_timeout
    assert "loading weights" in caught.detail
    assert carriers(tmp_path) == []


def test_a_200_from_somebody_else_is_not_our_server(
    tmp_path: Path, foreign_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Taken:
        """What a lease would be if somebody else could still get the port."""

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", foreign_port

        def close(self) -> None:
            pass

    monkeypatch.setattr(server_module, "lease_port", Taken)
    server = launch(tmp_path, "exec sleep 600")
    caught = failure(server)
    server.stop()
    assert caught.cause is FailureCause.port_in_use
    assert str(foreign_port) in caught.detail
    assert carriers(tmp_path) == []


def test_stop_ends_what_ignores_sigterm_and_what_left_the_process_group(tmp_path: Path) -> None:
    script = "setsid sleep 600 & trap '' TERM; while :; do sleep 0.1; done"
    server = launch(tmp_path, script, startup_timeout_s=2.0, stop_timeout_s=0.5)
    failure(server)
    before = carriers(tmp_path)
    assert len({os.getsid(p.pid) for p in before}) == 2, "the program runs in two sessions"
    server.stop()
    assert carriers(tmp_path) == []
    assert not server.is_alive()
    server.stop()  # once more does nothing


def test_an_error_inside_the_context_stops_the_server(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailure), launch(tmp_path, "exec sleep 600", startup_timeout_s=1.0):
        pytest.fail("it cannot have started")
    assert carriers(tmp_path) == []


def test_an_interpreter_that_is_not_there_leaves_nothing_behind(tmp_path: Path) -> None:
    server = launch(tmp_path, "")
    Path(server._python).unlink()
    caught = failure(server)
    server.stop()
    assert caught.cause is FailureCause.died_at_startup
    assert "python" in caught.detail
    assert not Path(server._socket_dir).exists()


def test_leftovers_are_those_of_the_launch_and_no_others(tmp_path: Path) -> None:
    mine, other = (
        subprocess.Popen(["sleep", "600"], env={**os.environ, LAUNCH_ID: f"{tmp_path.name}-{n}"}) for n in ("a", "b")
    )
    try:
        assert kill_leftovers(f"{tmp_path.name}-a") == 1
        assert kill_leftovers(f"{tmp_path.name}-a") == 0
        assert not psutil.pid_exists(mine.pid)
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()
