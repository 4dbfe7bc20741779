"""One vLLM server's life: start, prove it is ours and answers, watch it, stop it until nothing of it is left."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from sweep.engine.devices import device_memory_used_mib
from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause, LaunchFailure, Phase, classify

LAUNCH_ID = "SWEEP_LAUNCH_ID"
_PRCTL = ctypes.CDLL(None, use_errno=True).prctl
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2
_LOG_TAIL_BYTES = 200_000
_KILL_WAIT_S = 20.0
_DEVICE_WAIT_S = 60.0
_DEVICE_SLACK_MIB = 64.0
# After a failed request the engine needs a moment to die and to write why.
_DEATH_WAIT_S = 10.0


class Server:
    """A vLLM server under `python`, in its own process group, on its own port of the loopback interface.

    device_env confines it to its devices. launch_id marks every process of it through the environment, so that
    leftovers are found even when they left the process group. niceness: lowers its CPU priority, where it shares
    cores with the load client. Use as a context manager, or call stop().
    """

    def __init__(
        self,
        engine: EngineConfig,
        *,
        python: str,
        log_path: Path,
        device_env: Mapping[str, str],
        startup_timeout_s: float,
        stop_timeout_s: float,
        launch_id: str,
        niceness: int = 0,
    ) -> None:
        self.engine = engine
        self.startup_s: float | None = None
        self.served_model = ""
        self.vllm_version: str | None = None
        self._python = python
        self._log_path = log_path
        self._device_env = dict(device_env)
        self._startup_timeout_s = startup_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._launch_id = launch_id
        self._niceness = niceness
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._memory_before: list[float] | None = None

    def __enter__(self) -> Server:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process.pid

    def start(self) -> None:
        """Start and wait until a real completion came back. Raises LaunchFailure; call stop() afterwards either way."""
        began = time.monotonic()
        deadline = began + self._startup_timeout_s
        self._port = _free_port()
        self._memory_before = device_memory_used_mib(self._devices())
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(self._python, "-m", "vllm.entrypoints.openai.api_server"),
                    *("--model", self.engine.model, "--host", "127.0.0.1", "--port", str(self._port)),
                    *self.engine.argv(),
                ],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=self._in_child,
            )
        self._await_health(deadline)
        self._check_owner()
        self.served_model = str(self._get("/v1/models", "first_request")["data"][0]["id"])
        self.vllm_version = self._get("/version", "first_request").get("version")
        self._first_completion(deadline)
        self.startup_s = time.monotonic() - began

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def died(self) -> LaunchFailure | None:
        """Why the server no longer serves, if it does not: its process ended, or its engine did behind a live port."""
        if self.is_alive() and self._healthy(timeout_s=10.0):
            return None
        return self._failure("load", None, wait=True)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Raises LaunchFailure if that fails: a warm cache must not be measured."""
        request = urllib.request.Request(f"{self.base_url}/reset_prefix_cache", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=30.0):
                pass
        except OSError as error:
            raise self._failure("load", f"POST /reset_prefix_cache: {error}", wait=False) from error

    def stop(self) -> None:
        """SIGTERM, then SIGKILL, to the group and all that carries our launch id; returns when all of it is gone."""
        if self._process is None:
            return
        if self._process.poll() is None:
            _signal_group(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._stop_timeout_s)
        _signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()
        kill_leftovers(self._launch_id)
        self._await_device_memory()

    # ---------------------------------------------------------------- start-up

    def _environment(self) -> dict[str, str]:
        offline = {"HF_HUB_OFFLINE": "1"} if Path(self.engine.model).is_dir() else {}
        return {
            **os.environ,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
            **offline,
            **self.engine.env,
            **self._device_env,
            LAUNCH_ID: self._launch_id,
        }

    def _in_child(self) -> None:
        """Between fork and exec: the kernel shall send SIGTERM when our process dies, however it dies."""
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)
        os.nice(self._niceness)

    def _await_health(self, deadline: float) -> None:
        while not self._healthy(timeout_s=5.0):
            if not self.is_alive():
                raise self._failure("startup", None, wait=False)
            if time.monotonic() > deadline:
                last = self._log_lines()[-1:] or ["the server wrote nothing"]
                text = f"not healthy after {self._startup_timeout_s:.0f} s; last line: {last[0][:200]}"
                raise LaunchFailure(FailureCause.startup_timeout, text)
            time.sleep(_POLL_S)

    def _check_owner(self) -> None:
        """The socket that answers must be ours: a port can be taken between choice and use."""
        ours = {p.pid for p in _family(self.pid)}
        listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr]
        owners = {c.pid for c in listening if tuple(c.laddr)[1:] == (self._port,)}
        if not owners & ours:
            who = f"process {', '.join(map(str, owners))}" if owners else "nobody"
            raise LaunchFailure(FailureCause.port_in_use, f"port {self._port} is served by {who}, not by this launch")

    def _first_completion(self, deadline: float) -> None:
        body = {"model": self.served_model, "prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
        request = urllib.request.Request(
            f"{self.base_url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=max(1.0, deadline - time.monotonic())) as answer:
                text = answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            raise self._failure("first_request", error.read().decode(errors="replace"), wait=True) from error
        except OSError as error:
            raise self._failure("first_request", str(error), wait=True) from error
        if json.loads(text)["usage"]["completion_tokens"] < 1:
            raise self._failure("first_request", f"a completion without tokens: {text}", wait=True)

    def _get(self, path: str, phase: Phase) -> Any:
        try:
            with urllib.request.urlopen(self.base_url + path, timeout=30.0) as answer:
                return json.loads(answer.read())
        except (OSError, ValueError) as error:
            raise self._failure(phase, f"GET {path}: {error}", wait=True) from error

    def _healthy(self, timeout_s: float) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=timeout_s) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    # ---------------------------------------------------------------- failure and end

    def _failure(self, phase: Phase, response: str | None, *, wait: bool) -> LaunchFailure:
        deadline = time.monotonic() + (_DEATH_WAIT_S if wait else 0.0)
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        code = self._process.poll() if self._process is not None else None
        return LaunchFailure(*classify(phase, code, "\n".join(self._log_lines()), response))

    def _log_lines(self) -> list[str]:
        with self._log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()

    def _devices(self) -> list[str]:
        return [d for d in self._device_env.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]

    def _await_device_memory(self) -> None:
        """The driver frees a dead process's memory late; the next launch on these devices must not find it taken."""
        deadline = time.monotonic() + _DEVICE_WAIT_S
        while self._memory_before and time.monotonic() < deadline:
            now = device_memory_used_mib(self._devices())
            pairs = zip(now or [], self._memory_before, strict=False)
            if all(used <= before + _DEVICE_SLACK_MIB for used, before in pairs):
                return
            time.sleep(_POLL_S)


def kill_leftovers(launch_id: str) -> int:
    """End every process that carries this launch id in its environment; returns how many there were."""
    left = [p for p in psutil.process_iter() if p.pid != os.getpid() and _carries(p, launch_id)]
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=_KILL_WAIT_S)
    return len(left)


def _carries(process: psutil.Process, launch_id: str) -> bool:
    try:
        return process.environ().get(LAUNCH_ID) == launch_id
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _family(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal_group(pid: int, signum: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signum)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
