"""One study on real vLLM, killed, interrupted and continued by the same command until it is whole.

Its space holds vLLM's defaults, an argument vLLM's own validation refuses, and one that kills the engine at start-up.
Five server starts in all: the defaults twice (the first is killed in the middle of a load), the refused one twice (the
first is interrupted), the dying one once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sweep.decide.opened import Study, open_study
from sweep.engine.processes import LAUNCH_ID
from sweep.launch.spec import EVENTS_FILE, LAUNCHES_DIR
from sweep.results.records import RECORDS_FILE, LaunchRecord, PointRecord, QualityRecord

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

REFUSED, DYING = "bitsandbytes", "fp8"
SPACE = f"# @package space\nname: e2e\nparams:\n  quantization: {{choices: [null, {REFUSED}, {DYING}]}}\n"
WAIT_S = 400.0


class Sweep:
    """The command under test, always the same, in a folder of its own."""

    def __init__(self, tmp_path: Path, model: Path, engine_python: str) -> None:
        (tmp_path / "conf" / "search_space").mkdir(parents=True)
        (tmp_path / "conf" / "search_space" / "e2e.yaml").write_text(SPACE)
        self.folder = tmp_path / "runs" / "e2e"
        self._cwd = tmp_path
        self._env = {**os.environ, "SWEEP_SMOLLM2": str(model), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        self._run = [
            "run", "--config-dir", str(tmp_path / "conf"), "study=e2e", "model=smollm2_135m", "hardware=cpu",
            "engine=vllm_cpu", f"engine.python={engine_python}", "search_space=e2e", "sampler=grid",
            "workload=cpu_demo", "workload.loads.concurrency=[4,1]", "workload.num_requests=12",
            "workload.warmup_requests=1", "workload.output_tokens.median=24",
            "quality.num_prompts=2", "quality.prompt_tokens=64",
            "proof.max_loop_lag_ms=10000", "proof.max_undelivered_share=0.5", "validation.finalists=0", "repeats=none",
            "objectives.metrics=[cost_usd_per_mtok,ttft_p50_ms,quality_kl]", "budget=unlimited",
        ]  # fmt: skip

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "sweep", *self._run]
        return subprocess.Popen(
            command, cwd=self._cwd, env=self._env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def read(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sweep", *words]
        return subprocess.run(command, cwd=self._cwd, env=self._env, text=True, capture_output=True, check=False)

    def study(self) -> Study:
        return open_study(self.folder)

    def points(self) -> list[PointRecord]:
        return [r for r in self.study().records if isinstance(r, PointRecord)]

    def lines(self) -> list[str]:
        path = self.folder / RECORDS_FILE
        return path.read_text().splitlines() if path.exists() else []

    def phase(self) -> str:
        """What the newest launch is at, by its own word."""
        events = sorted(self.folder.glob(f"{LAUNCHES_DIR}/*/{EVENTS_FILE}"))
        found = [line for line in events[-1].read_text().splitlines() if '"phase"' in line] if events else []
        return str(json.loads(found[-1])["phase"]) if found else ""

    def leftovers(self) -> list[list[str]]:
        """Command lines of every process that a launch of this study left: engines, workers and load clients."""
        found = []
        for process in psutil.process_iter():
            try:
                command, environment = process.cmdline(), process.environ()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            here = str(self.folder)
            if here in environment.get(LAUNCH_ID, "") or any(f"{here}/{LAUNCHES_DIR}" in word for word in command):
                found.append(command)
        return found


def wait_for(what: str, condition: Callable[[], bool], controller: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {WAIT_S:.0f} s"
        if controller is not None and controller.poll() is not None:
            output = controller.stdout.read() if controller.stdout else ""
            pytest.fail(f"sweep ended with {controller.returncode} before {what}:\n{output}")
        time.sleep(0.1)


def quantization(record: PointRecord | LaunchRecord) -> str | None:
    value: str | None = record.engine["args"].get("quantization")
    return value


@pytest.fixture
def sweep(tmp_path: Path, smollm2: Path, engine_python: str) -> Sweep:
    return Sweep(tmp_path, smollm2, engine_python)


def test_killed_interrupted_and_continued_until_the_study_is_whole(sweep: Sweep) -> None:
    # kill -9 in the middle of the second load of the first launch
    controller = sweep.start()
    wait_for("first point", lambda: '"kind": "point"' in "".join(sweep.lines()), controller)
    wait_for("second load", lambda: sweep.phase() == "load c1", controller)
    time.sleep(1.0)
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    before = sweep.lines()
    assert [(p.load_label, p.state) for p in sweep.points()] == [("c4", "measured")]
    assert json.loads(sweep.read("status", str(sweep.folder), "--json").stdout)["status"]["state"] == "died"
    wait_for("end of everything the killed sweep had started", lambda: not sweep.leftovers())

    # the same command measures what is missing; Ctrl-C while the next configuration starts
    controller = sweep.start()
    wait_for("second point", lambda: len(sweep.points()) == 2, controller)
    wait_for("start of the next configuration", lambda: sweep.phase() == "starting", controller)
    wait_for("its server", lambda: any("serve" in command for command in sweep.leftovers()), controller)
    controller.send_signal(signal.SIGINT)
    output, _ = controller.communicate(timeout=WAIT_S)
    assert controller.returncode == 130 and "interrupted; the same command continues it" in output
    assert sweep.leftovers() == []
    assert [(p.load_label, p.state) for p in sweep.points()] == [("c4", "measured"), ("c1", "measured")]
    assert sweep.lines()[: len(before)] == before

    # and once more to the end
    done = sweep.start()
    output, _ = done.communicate(timeout=WAIT_S)
    assert done.returncode == 0, output
    assert "every configuration of the space is settled" in output and "Pareto front of" in output
    assert sweep.leftovers() == []

    points = sweep.points()
    assert Counter((quantization(p), p.load_label, p.state, p.cause, p.transient) for p in points) == {
        (None, "c4", "measured", None, False): 1,
        (None, "c1", "measured", None, False): 1,
        (REFUSED, "c4", "failed", "invalid_argument", False): 1,
        (REFUSED, "c1", "failed", "invalid_argument", False): 1,
        (DYING, "c4", "failed", "unsupported", False): 1,
        (DYING, "c1", "failed", "unsupported", False): 1,
    }
    assert all(p.detail for p in points if p.state == "failed")
    study = sweep.study()
    launches = [r for r in study.records if isinstance(r, LaunchRecord)]
    causes = {REFUSED: "invalid_argument", DYING: "unsupported"}
    second = quantization(launches[2])  # a grid's order is random
    (third,) = causes.keys() - {second}
    assert [(quantization(r), r.cause) for r in launches] == [
        (None, "interrupted"),
        (None, None),
        (second, "interrupted"),
        (second, causes[second]),
        (third, causes[third]),
    ]
    (quality,) = [r for r in study.records if isinstance(r, QualityRecord)]
    assert quality.state == "measured" and quality.positions == 2 * 63 and quality.noise_floor_kl is not None
    assert sweep.lines()[: len(before)] == before

    # what a person gets out of it
    assert (sweep.folder / "report.html").stat().st_size > 100_000
    status = json.loads(sweep.read("status", str(sweep.folder), "--json").stdout)["status"]
    assert (status["state"], status["counts"]["measured"], status["counts"]["failed"]) == ("finished", 2, 4)
    front = json.loads(sweep.read("front", str(sweep.folder), "--json").stdout)["front"]
    assert {p["load_label"] for p in front} <= {"c4", "c1"} and front
    picked = sweep.read("pick", str(sweep.folder), "--sla", "ttft_p50_ms<=1e6 quality_kl<=1")
    assert picked.returncode == 0 and "vllm serve" in picked.stdout
    missed = sweep.read("pick", str(sweep.folder), "--sla", "ttft_p50_ms<=0.001")
    assert missed.returncode == 3 and "ttft_p50_ms" in missed.stdout
