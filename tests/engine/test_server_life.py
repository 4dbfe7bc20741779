"""A server's life with the real vLLM: it answers, or fails in one of the real ways, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.engine.processes import LAUNCH_ID, carriers, kill_leftovers, mapped_shared_memory
from sweep.engine.server import Server

pytestmark = pytest.mark.engine

ARGS = {"enforce_eager": True, "max_model_len": 512}
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1"}
OWNER = """
import json, sys
from pathlib import Path
from sweep.engine.engine_args import EngineConfig
from sweep.engine.server import Server
engine, python, log, launch_id = sys.argv[1:]
Server(EngineConfig.from_dict(json.loads(engine)), python=python, log_path=Path(log), device_env={},
       startup_timeout_s=300, stop_timeout_s=30, launch_id=launch_id).start()
"""


@pytest.fixture(autouse=True)
def launch_id(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of this test's server. Whatever is left of it after a failed test is ended."""
    name = f"{request.node.name}-{os.getpid()}"
    yield name
    kill_leftovers(name)


@pytest.fixture
def launch(
    smollm2: Path, engine_python: str, tmp_path: Path, launch_id: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Server]:
    """A server with these arguments; its user has a proxy, which must not matter."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)

    def build(model: Path = smollm2, startup_timeout_s: float = 300.0, **args: object) -> Server:
        return Server(
            EngineConfig(str(model), {**ARGS, **args}, ENV),
            python=engine_python,
            log_path=tmp_path / "server.log",
            device_env={},
            startup_timeout_s=startup_timeout_s,
            stop_timeout_s=30,
            launch_id=launch_id,
        )

    return build


def engine_of(launch_id: str, timeout_s: float) -> list[psutil.Process]:
    """The process that runs the engine, as soon as it is there."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = [p for p in carriers(launch_id) if any("EngineCore" in word for word in p.cmdline())]
        if found:
            return found
        time.sleep(0.2)
    return []


def failure(server: Server) -> LaunchFailure:
    """The failure of a launch that cannot succeed, after its end."""
    try:
        with pytest.raises(LaunchFailure) as caught:
            server.start()
    finally:
        server.stop()
    assert server.startup_s is None
    return caught.value


def completion(server: Server) -> str:
    body = {"model": server.served_model, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def test_a_good_server_answers_and_its_end_takes_everything_along(
    launch: Callable[..., Server], launch_id: str
) -> None:
    with launch() as server:
        text = completion(server)
        server.reset_prefix_cache()
        verdict = server.died()
        segments = mapped_shared_memory(carriers(launch_id))
        running = {p.pid: " ".join(p.cmdline()) for p in carriers(launch_id)}
        astray = subprocess.Popen(["sleep", "600"], env={**os.environ, LAUNCH_ID: launch_id}, start_new_session=True)
        port = int(server.base_url.rsplit(":", 1)[1])

    assert "Paris" in text
    assert verdict is None
    assert server.pid in running
    assert any("EngineCore" in command for command in running.values())
    assert server.startup_s is not None and server.startup_s > 1
    assert server.vllm_version
    assert not server.is_alive()
    assert carriers(launch_id) == []
    assert not psutil.pid_exists(astray.pid), "it had left the process group"
    assert port not in {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert segments and not any(segment.exists() for segment in segments)
    assert not Path(server._socket_dir).exists()


def test_an_engine_killed_from_outside_is_a_death_and_its_remains_are_ended(
    launch: Callable[..., Server], launch_id: str
) -> None:
    with launch() as server:
        (engine,) = engine_of(launch_id, 10)
        engine.kill()
        psutil.wait_procs([engine], timeout=30)
        with pytest.raises(OSError):  # no answer, or 500 from the server whose engine is gone
            while True:
                completion(server)
        verdict = server.died()
    assert verdict is not None
    assert verdict.cause is FailureCause.engine_died
    assert "exited unexpectedly" in verdict.detail
    assert carriers(launch_id) == []


def test_a_refused_argument(launch: Callable[..., Server], launch_id: str) -> None:
    found = failure(launch(quantization="bitsandbytes"))
    assert found.cause is FailureCause.invalid_argument
    assert "Unknown quantization method: bitsandbytes" in found.detail
    assert carriers(launch_id) == []


def test_death_at_startup(launch: Callable[..., Server], launch_id: str) -> None:
    found = failure(launch(quantization="fp8"))
    assert found.cause is FailureCause.unsupported
    assert "static_scaled_fp8_quant" in found.detail
    assert carriers(launch_id) == []


def test_healthy_but_dead_on_the_first_request(
    launch: Callable[..., Server], launch_id: str, smollm2: Path, tmp_path: Path
) -> None:
    model = tmp_path / "head16"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, model / name)
    heads = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = json.loads((smollm2 / "config.json").read_text())
    small = {**config, **heads, "num_hidden_layers": 2, "intermediate_size": 128}
    (model / "config.json").write_text(json.dumps(small))

    found = failure(launch(model, load_format="dummy"))
    assert found.cause is FailureCause.first_request_failed
    assert "Unsupported CPU attention configuration: head_dim=16" in found.detail
    assert carriers(launch_id) == []


def test_a_slow_start_is_given_up_and_its_engine_ended_while_it_loads(
    launch: Callable[..., Server], launch_id: str
) -> None:
    server = launch(startup_timeout_s=3.0)
    try:
        with pytest.raises(LaunchFailure) as caught:
            server.start()
        assert engine_of(launch_id, 120), "the server went on to start its engine"
    finally:
        server.stop()
    assert caught.value.cause is FailureCause.startup_timeout
    assert "not healthy after 3 s" in caught.value.detail
    assert carriers(launch_id) == []


def test_a_server_ends_with_its_owner_even_while_its_engine_loads(
    smollm2: Path, engine_python: str, tmp_path: Path, launch_id: str
) -> None:
    engine = json.dumps(EngineConfig(str(smollm2), ARGS, ENV).to_dict())
    arguments = [engine, engine_python, str(tmp_path / "server.log"), launch_id]
    with subprocess.Popen([sys.executable, "-c", OWNER, *arguments], cwd=Path(__file__).parents[2]) as owner:
        loading = engine_of(launch_id, 120)
        owner.kill()
    assert loading, "the server was starting its engine"
    psutil.wait_procs(carriers(launch_id), timeout=120)
    assert carriers(launch_id) == []
