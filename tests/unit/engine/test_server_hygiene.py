"""What a running server is asked for the proof of a point: its owner, its model, its cache, its devices."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sweep.engine import server as server_module
from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.engine.server import Server


class Answers:
    """(status, body) of each request in turn, the last one for ever."""

    def __init__(self, *script: tuple[int, bytes]) -> None:
        self.script = list(script)
        self.asked: list[str] = []

    def handler(self) -> type[BaseHTTPRequestHandler]:
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                answers.asked.append(self.path)
                status, body = answers.script.pop(0) if len(answers.script) > 1 else answers.script[0]
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@pytest.fixture
def ask(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A Server object whose port is answered by a script; our own process stands for the server's."""
    running: list[HTTPServer] = []

    def make(*script: tuple[int, bytes], devices: str = "") -> tuple[Server, Answers]:
        answers = Answers(*script)
        http = HTTPServer(("127.0.0.1", 0), answers.handler())
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        running.append(http)
        server = Server(
            EngineConfig("m", {}, {}), python="python", log_path=tmp_path / "log",
            device_env={"CUDA_VISIBLE_DEVICES": devices}, startup_timeout_s=5, stop_timeout_s=5, launch_id="hygiene",
        )  # fmt: skip
        (tmp_path / "log").touch()
        server._port = http.server_port
        server._process = SimpleNamespace(pid=os.getpid(), poll=lambda: None)  # type: ignore[assignment]
        return server, answers

    yield make
    for http in running:
        http.shutdown()
        http.server_close()


def test_a_reset_that_vllm_refuses_with_status_200_is_repeated(ask: Any) -> None:
    busy, done = (200, b'{"success":false}'), (200, b'{"success":true}')
    server, answers = ask(busy, busy, done)
    assert server.reset_prefix_cache() is True
    assert answers.asked == ["/reset_prefix_cache"] * 3


def test_a_cache_that_is_kept_is_never_measured_as_empty(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_RESET_WAIT_S", 0.3)
    server, _ = ask((200, b'{"success":false}'))
    with pytest.raises(LaunchFailure, match="blocks of it are still in use") as failure:
        server.reset_prefix_cache()
    assert failure.value.cause is FailureCause.load_timeout


@pytest.mark.parametrize(("answer", "forgotten"), [((200, b""), True), ((404, b"{}"), False), ((405, b""), False)])
def test_older_servers_and_those_without_a_reset(ask: Any, answer: tuple[int, bytes], forgotten: bool) -> None:
    server, _ = ask(answer)
    assert server.reset_prefix_cache() is forgotten


def test_an_engine_that_fails_to_reset_is_a_failure(ask: Any) -> None:
    server, _ = ask((500, b"dead"))
    with pytest.raises(LaunchFailure, match="reset_prefix_cache"):
        server.reset_prefix_cache()


def test_the_model_it_answers_to(ask: Any) -> None:
    server, _ = ask((200, json.dumps({"data": [{"id": "org/m"}]}).encode()))
    assert server.reports_model() == "org/m"
    for bad in ((200, b'{"data": []}'), (200, b"<html>"), (500, b"")):
        server, _ = ask(bad)
        assert server.reports_model() is None


def test_the_owner_of_the_port(ask: Any) -> None:
    server, _ = ask((200, b""))
    assert server.foreign_owner() is None
    server._process = SimpleNamespace(pid=1, poll=lambda: None)
    assert server.foreign_owner() in (None, f"process {os.getpid()}")  # None where we are a child of process 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server._port = free.getsockname()[1]
        assert server.foreign_owner() == "nobody"


def test_processes_of_others_on_our_devices(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = ask((200, b""), devices="0,1")
    assert server.device_ids == ["0", "1"]
    seen = [{"pid": 11}, {"pid": 12}, {"pid": 13}]
    monkeypatch.setattr(server_module, "pids_are_the_drivers", lambda: True)
    monkeypatch.setattr(server_module, "carriers", lambda launch_id: [SimpleNamespace(pid=12)])
    assert server.foreign_device_processes(seen) == [{"pid": 11}, {"pid": 13}]
    # In a container the numbers say nothing; who was there before us is known not to be ours.
    monkeypatch.setattr(server_module, "pids_are_the_drivers", lambda: False)
    server._device_pids_before = {13}
    assert server.foreign_device_processes(seen) == [{"pid": 13}]
