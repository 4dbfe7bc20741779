"""Artefacts against real vLLM: its own parser reads the file as the command line, and the command serves."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from sweep.decide.deploy import artefact
from sweep.decide.opened import Study
from sweep.engine import vllm_serve
from sweep.engine.engine_args import EngineConfig
from sweep.results.records import PointRecord

pytestmark = pytest.mark.engine

# Parses as `vllm serve` does (vllm.entrypoints.cli.main), without starting anything.
_PARSE = """
import json, sys
import vllm.entrypoints.cli.serve as serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

def parse(words):
    parser = FlexibleArgumentParser()
    subparsers = parser.add_subparsers(required=False, dest="subparser")
    for command in serve.cmd_init():
        command.subparser_init(subparsers)
    values = vars(parser.parse_args(words))
    values["model"] = values.pop("model_tag") or values["model"]
    return {name: repr(value) for name, value in values.items() if name != "config"}

print("PARSED " + json.dumps([parse(words) for words in json.loads(sys.argv[1])]))
"""
ENGINES: list[dict[str, Any]] = [
    {},
    {
        "max_model_len": 1024,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "gpu_memory_utilization": 0.9,
        "kv_cache_dtype": "fp8",
        "tensor_parallel_size": 2,
        "served_model_name": ["a b", "1e-05", "y"],
        "revision": "1e3",
        "chat_template": "{{ '$HOME' }}\n# \"quoted\" \\n",
        "speculative_config.method": "ngram",
        "speculative_config.num_speculative_tokens": 4,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4], "mode": 3},
        "max_num_seqs": None,
    },
]


def make_study(model: str, args: dict[str, Any], env: dict[str, str]) -> Study:
    record = PointRecord(
        point_id="l-c1-r0", launch_id="l", config_hash="0123456789ab", fingerprint="f",
        engine={"model": model, "args": args, "env": env}, load={"concurrency": 1}, load_label="c1", params={},
        purpose="trial", devices=1, state="measured", metrics={"ttft_p50_ms": 100.0},
        finished_at="2026-05-04T10:00:00+00:00",
    )  # fmt: skip
    return Study(Path("night"), {"config": {"hardware": {"name": "cpu", "device": "cpu"}}}, (record,))


def test_vllm_reads_the_file_as_the_command_line(engine_python, tmp_path):
    lines = []
    for number, args in enumerate(ENGINES):
        study = make_study("org/model", args, {})
        file = tmp_path / f"{number}.yaml"
        file.write_text(artefact(study.operating_points[0], study, "yaml", port=8123))
        argv = EngineConfig("org/model", args, {}).argv()
        lines += [["serve", "--config", str(file)], ["serve", "org/model", *argv, "--port", "8123"]]
    command = [engine_python, "-c", _PARSE, json.dumps(lines)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = [line for line in result.stdout.splitlines() if line.startswith("PARSED ")]
    assert found, result.stderr[-2000:]
    parsed = json.loads(found[0].removeprefix("PARSED "))
    for from_file, from_words in zip(parsed[::2], parsed[1::2], strict=True):
        assert from_file == from_words
    assert parsed[2]["enable_prefix_caching"] == "False"
    assert parsed[2]["port"] == "8123"


@pytest.mark.parametrize("format", ["serve", "yaml"])
def test_it_serves(format, smollm2, engine_python, tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    args = {"enforce_eager": True, "max_model_len": 512, "enable_prefix_caching": False}
    study = make_study(str(smollm2), args, {"VLLM_CPU_KVCACHE_SPACE": "1"})
    text = artefact(study.operating_points[0], study, format, port=port)
    # vLLM's CPU build has no working `vllm` program; a GPU installation has.
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(engine_python)} {shlex.quote(vllm_serve.__file__)} "$@"\n')
    program.chmod(0o755)
    if format == "serve":
        script = tmp_path / "serve.sh"
        script.write_text(text)
    else:
        run = next(line for line in text.splitlines() if line.startswith("# run "))
        (tmp_path / run.split()[-1]).write_text(text)
        script = tmp_path / "run.sh"
        script.write_text(run.removeprefix("# run"))
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["sh", str(script)], cwd=tmp_path, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        answer = _first_completion(f"http://127.0.0.1:{port}", str(smollm2), process, log)
        assert "Paris" in answer
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            _kill(process.pid)


def _first_completion(url: str, model: str, process: subprocess.Popen[bytes], log: Path) -> str:
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    data = json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
        try:
            with opener.open(request, timeout=120) as response:
                return str(json.loads(response.read())["choices"][0]["text"])
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
