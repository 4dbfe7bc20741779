"""One vLLM server's life: start, prove it is ours and answers, watch it, stop it until nothing of it is left."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sweep.engine.devices import device_memory_used_mib, pids_are_the_drivers, watch_devices
from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause, LaunchFailure, Phase, classify
from sweep.engine.processes import (
    LAUNCH_ID,
    OWNER_FD,
    carriers,
    end_with_parent,
    foreign_listeners,
    kernel_oom_kills,
    lease_port,
    mapped_shared_memory,
)
from sweep.engine.processes import kill_leftovers as kill_leftovers  # also for those who clean up after us

VLLM_SERVE = (str(Path(__file__).with_name("vllm_serve.py")), "serve")
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has no business on the loopback
_POLL_S = 0.2
_LOG_TAIL_BYTES = 200_000
_DEVICE_WAIT_S = 60.0
_DEVICE_SLACK_MIB = 64.0
_RESET_WAIT_S = 20.0
_NO_SUCH_ROUTE = (404, 405, 501)
# After a failed request the engine needs a moment to die and to write why: vLLM looks for a dead engine every 5 s.
_DEATH_WAIT_S = 15.0
# Before it serves there is no request to finish, and vLLM 0.32 loses a SIGTERM that comes while its engine loads (its
# zmq_socket_ctx catches the KeyboardInterrupt) and then waits ten minutes for that engine.
_UNREADY_STOP_TIMEOUT_S = 5.0
_UNEXPLAINED = (FailureCause.died_at_startup, FailureCause.first_request_failed, FailureCause.engine_died)


class Server:
    """A vLLM server under `python`, in its own process group, on its own port of the loopback interface.

    device_env confines it to its devices. launch_id, unique on this machine, marks every process of it through the
    environment, so that leftovers are found even when they left the process group. niceness: lowers its CPU priority,
    where it shares cores with the load client. Use as a context manager, or call stop(). The server ends with the
    process that started it, however that ends, and with its thread: start it from one that lasts.
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
        command: Sequence[str] = VLLM_SERVE,
    ) -> None:
        self.engine = engine
        self.startup_s: float | None = None
        self.first_request_ms: float | None = None
        self.served_model = ""
        self.vllm_version: str | None = None
        self._python = python
        self._log_path = log_path
        self._device_env = dict(device_env)
        self._startup_timeout_s = startup_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._launch_id = launch_id
        self._niceness = niceness
        self._command = tuple(command)
        self._port_lease: socket.socket | None = None
        self._port = 0
        self._socket_dir = ""
        self._owner_fd: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._memory_before: list[float] | None = None
        self._device_pids_before: set[int] = set()
        self._oom_kills_before = kernel_oom_kills()

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
        self._port_lease = lease_port()
        self._port = self._port_lease.getsockname()[1]
        self._memory_before = device_memory_used_mib(self.device_ids)
        with watch_devices(self.device_ids) as devices:
            self._device_pids_before = {p.pid for device in devices() for p in device.processes or ()}
        ours = ("--host", "127.0.0.1", "--port", str(self._port))
        try:
            # Not in the launch's folder: a socket's path must be short.
            self._socket_dir = tempfile.mkdtemp(prefix="sweep-")
            owner_fd, self._owner_fd = os.pipe()
            with self._log_path.open("ab") as log, os.fdopen(owner_fd):
                self._process = subprocess.Popen(
                    [self._python, *self._command, self.engine.model, *ours, *self.engine.argv()],
                    env={**self._environment(), OWNER_FD: str(owner_fd)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(owner_fd,),
                    preexec_fn=end_with_parent(self._niceness),
                )
        except OSError as error:
            raise LaunchFailure(classify("startup", None, f"OSError: {error}", None)[0], str(error)) from error
        self._await_health(deadline)
        self._check_owner()
        self.served_model = str(self._first_answer("/v1/models", deadline)["data"][0]["id"])
        self.vllm_version = self._first_answer("/version", deadline).get("version")
        prompt = {"model": self.served_model, "prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
        asked = time.monotonic()
        self._first_answer("/v1/completions", deadline, prompt)
        self.startup_s = time.monotonic() - began
        self.first_request_ms = (time.monotonic() - asked) * 1e3

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def died(self) -> LaunchFailure | None:
        """Why the server no longer serves, if it does not: its process ended, or its engine did behind a live port."""
        deadline = time.monotonic() + _DEATH_WAIT_S
        while self.is_alive() and time.monotonic() < deadline:
            if self._healthy(timeout_s=_DEATH_WAIT_S):
                return None
            time.sleep(_POLL_S)
        return self._failure("load", None)

    @property
    def device_ids(self) -> list[str]:
        """Its devices, as CUDA_VISIBLE_DEVICES names them."""
        return [d for d in self._device_env.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]

    def foreign_owner(self) -> str | None:
        """Who else answers on our port now, "nobody" if not even we do; None if it is this launch alone."""
        return foreign_listeners(self._port, self.pid)

    def foreign_device_processes(self, seen: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Those of the processes seen on our devices (pid, …) that are not of this launch.

        Where the driver numbers processes otherwise than we do (a container of its own), only those that were there
        before this launch are known to be others.
        """
        if not pids_are_the_drivers():
            return [p for p in seen if p["pid"] in self._device_pids_before]
        ours = {process.pid for process in carriers(self._launch_id)}
        return [p for p in seen if p["pid"] not in ours]

    def reports_model(self) -> str | None:
        """The id the server answers to now; None if it does not say."""
        try:
            return str(json.loads(self._request("/v1/models", timeout_s=10.0))["data"][0]["id"])
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return None

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False where this server cannot. Its engine must be idle.

        vLLM refuses while blocks are in use, with status 200 and {"success": false} (0.32): it is asked again for a
        while. Raises LaunchFailure if it goes on refusing, or does not answer.
        """
        deadline = time.monotonic() + _RESET_WAIT_S
        while True:
            try:
                answer = self._request("/reset_prefix_cache", timeout_s=30.0, method="POST")
            except urllib.error.HTTPError as error:
                if error.code in _NO_SUCH_ROUTE:
                    return False
                raise self._failure("load", f"POST /reset_prefix_cache: {error}") from error
            except OSError as error:
                raise self._failure("load", f"POST /reset_prefix_cache: {error}") from error
            if not answer.strip() or json.loads(answer).get("success", True):  # before 0.32 there was no body
                return True
            if time.monotonic() > deadline:
                text = f"the server kept its prefix cache for {_RESET_WAIT_S:g} s: blocks of it are still in use"
                raise LaunchFailure(FailureCause.load_timeout, text)
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to all that carries our launch id; idempotent, returns when all of it is gone."""
        if self._port_lease is None or self._stopped:
            return
        if self._process is not None:
            self._end(self._process)
        self._port_lease.close()
        if self._owner_fd is not None:
            os.close(self._owner_fd)
        shutil.rmtree(self._socket_dir, ignore_errors=True)
        self._await_device_memory()
        self._stopped = True

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        shared_memory = mapped_shared_memory(carriers(self._launch_id))
        if process.poll() is None:
            process.terminate()
            patience_s = self._stop_timeout_s if self.startup_s is not None else _UNREADY_STOP_TIMEOUT_S
            with suppress(subprocess.TimeoutExpired):
                process.wait(min(patience_s, self._stop_timeout_s))
        kill_leftovers(self._launch_id)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for segment in shared_memory:
            segment.unlink(missing_ok=True)

    # ---------------------------------------------------------------- start-up

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}  # we ask without one
        offline = {"HF_HUB_OFFLINE": "1"} if self.engine.is_local else {}
        return {
            **inherited,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order, in which devices are leased and their memory is read
            "PYTHONFAULTHANDLER": "1",  # a crash in a kernel leaves a line in the log
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_RPC_BASE_PATH": self._socket_dir,
            "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
            **offline,
            **self.engine.env,
            **self._device_env,
            "SPT_NOENV": "1",  # else setproctitle writes vLLM's process names over the environment in /proc
            LAUNCH_ID: self._launch_id,
        }

    def _await_health(self, deadline: float) -> None:
        while not self._healthy(timeout_s=5.0):
            if not self.is_alive():
                raise self._failure("startup", None)
            if time.monotonic() > deadline:
                last = next((line for line in reversed(self._log_lines()) if line.strip()), "the server wrote nothing")
                text = f"not healthy after {self._startup_timeout_s:.0f} s; last line: {last[:200]}"
                raise LaunchFailure(FailureCause.startup_timeout, text)
            time.sleep(_POLL_S)

    def _check_owner(self) -> None:
        """Who answers must be ours: a port can be taken between choice and use."""
        owner = foreign_listeners(self._port, self.pid)
        if owner is not None:
            raise LaunchFailure(FailureCause.port_in_use, f"port {self._port} is served by {owner}, not by this launch")

    def _first_answer(self, path: str, deadline: float, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of one of the first requests; whatever keeps it from coming is a failure of the launch."""
        try:
            return json.loads(self._request(path, timeout_s=max(1.0, deadline - time.monotonic()), body=body))
        except urllib.error.HTTPError as error:
            raise self._failure("first_request", error.read().decode(errors="replace")) from error
        except (OSError, ValueError) as error:
            if self.is_alive() and time.monotonic() >= deadline:
                text = f"healthy, but {path} did not answer within {self._startup_timeout_s:.0f} s of the start"
                raise LaunchFailure(FailureCause.startup_timeout, text) from error
            raise self._failure("first_request", f"{path}: {error}") from error

    # ---------------------------------------------------------------- requests

    def _request(
        self, path: str, *, timeout_s: float, body: Mapping[str, Any] | None = None, method: str | None = None
    ) -> bytes:
        """Raises OSError, of which urllib's HTTPError is one."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.base_url + path, data=data, headers=headers, method=method)
        try:
            with _DIRECT.open(request, timeout=timeout_s) as answer:
                return bytes(answer.read())
        except http.client.HTTPException as error:
            raise OSError(f"no HTTP answer: {error!r}") from error

    def _healthy(self, timeout_s: float) -> bool:
        try:
            self._request("/health", timeout_s=timeout_s)
        except OSError:
            return False
        return True

    # ---------------------------------------------------------------- failure and end

    def _failure(self, phase: Phase, response: str | None) -> LaunchFailure:
        deadline = time.monotonic() + (_DEATH_WAIT_S if phase == "first_request" else 0.0)
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        code = self._process.poll() if self._process is not None else None
        cause, detail = classify(phase, code, "\n".join(self._log_lines()), response)
        if cause in _UNEXPLAINED and kernel_oom_kills() > self._oom_kills_before:
            cause, detail = FailureCause.out_of_memory, f"the kernel killed processes for lack of memory; {detail}"
        return LaunchFailure(cause, detail)

    def _log_lines(self) -> list[str]:
        with self._log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()

    def _await_device_memory(self) -> None:
        """The driver frees a dead process's memory late; the next launch on these devices must not find it taken."""
        deadline = time.monotonic() + _DEVICE_WAIT_S
        while self._memory_before and time.monotonic() < deadline:
            now = device_memory_used_mib(self.device_ids)
            pairs = zip(now or [], self._memory_before, strict=False)
            if all(used <= before + _DEVICE_SLACK_MIB for used, before in pairs):
                return
            time.sleep(_POLL_S)
