"""The command line: exit codes, JSON for scripts, and one line with its fix for every mistake a user can make."""

from __future__ import annotations

import errno
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from example_study import write_meta, write_study

from sweep import cli
from sweep.study import plan as plan_module
from sweep.study.folder import locked
from sweep.study.run import Session

INFEASIBLE = "ttft_p99_ms<=0.001"


@pytest.fixture
def example(tmp_path: Path) -> str:
    return str(write_study(tmp_path / "example"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"num_attention_heads": 9}')
    return str(folder)


@pytest.fixture
def cpu(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of a sweep of a local checkpoint on this machine's CPU, whose vLLM is known from data."""
    monkeypatch.setattr(plan_module, "known_arguments", lambda python, cache_dir: KNOWN)
    return [
        "model=local", "model.name=m", f"model.path={model}", "hardware=cpu", "engine=vllm_cpu", "workload=cpu_demo",
        "search_space=cpu_small", "study=s", f"storage.dir={tmp_path / 'runs'}",
    ]  # fmt: skip


def argument(kind: str, choices: list[str] | None = None) -> dict[str, Any]:
    flags = ["--x", "--no-x"] if kind == "bool" else ["--x"]
    return {"flags": flags, "choices": choices, "type": kind, "is_bool": kind == "bool"}


KNOWN = {
    "version": "9.9",
    "arguments": {
        "max_num_seqs": argument("int"),
        "max_model_len": argument("int"),
        "enforce_eager": argument("bool"),
        "dtype": argument("str", ["auto", "half", "bfloat16"]),
        "kv_cache_dtype": argument("str", ["auto", "fp8"]),
        "speculative_config": argument("loads"),
    },
}


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def is_mistake(self, message: str, fix: str) -> None:
        """Exit code 2; on standard error one line that names the mistake and one with the fix; no traceback."""
        assert self.code == cli.EXIT_USER_ERROR, self.out + self.err
        lines = self.err.splitlines()
        assert len(lines) == 2, self.err
        assert lines[0].startswith("sweep: error: ") and re.search(message, lines[0]), self.err
        assert lines[1].startswith("  fix: ") and re.search(fix, lines[1]), self.err


@pytest.fixture
def sweep(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*words: str) -> Outcome:
        try:
            code = cli.main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


# ---------------------------------------------------------------- words on the command line


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        ([], "COMMAND", "sweep --help"),
        (["statsu"], "invalid choice: 'statsu'", "sweep --help"),
        (["status", "--jsn"], "unrecognized arguments: --jsn", "did you mean '--json'"),
        (["run", "--cgf", "job"], "unrecognized arguments: --cgf", "did you mean '--cfg'"),
        (["run", "-n"], "unrecognized arguments: -n", "sweep run --help"),
        (["front", "a", "b"], "unrecognized arguments: b", "sweep front --help"),
        (["pick", "x"], "--sla --sla-file is required", "sweep pick --help"),
        (["export", "x"], "required: -o/--output", "sweep export --help"),
        (["pick", "--sla", "x", "--minimize", "a", "--maximize", "b"], "not allowed with", "sweep pick --help"),
        (["run", "nonsense"], "'nonsense' is not an override", "key=value"),
    ],
)
def test_words_that_are_not_understood(sweep: Callable[..., Outcome], words: list[str], message: str, fix: str) -> None:
    sweep(*words).is_mistake(message, fix)


def test_help_lists_the_commands(sweep: Callable[..., Outcome]) -> None:
    shown = sweep("--help")
    assert shown.code == 0
    for command in ("run", "plan", "status", "front", "pick", "export", "report", "completion"):
        assert f"    {command}" in shown.out


def test_overrides_may_stand_between_options(sweep: Callable[..., Outcome], cpu: list[str]) -> None:
    shown = sweep("run", *cpu[:4], "--cfg", "job", *cpu[4:])
    assert shown.code == 0 and "study: s\n" in shown.out
    assert "hardware/cpu" in sweep("plan", "--info", "defaults", *cpu).out


# ---------------------------------------------------------------- reading a study


def test_reading_commands_answer_in_json(sweep: Callable[..., Outcome], example: str) -> None:
    status = json.loads(sweep("status", example, "--json").out)
    assert (status["study"], status["status"]) == ("demo", None)
    front = json.loads(sweep("front", example, "--json").out)
    assert front["front"] and [o["metric"] for o in front["objectives"]] == [
        "cost_usd_per_mtok",
        "ttft_p99_ms",
        "quality_kl",
    ]
    other = json.loads(sweep("front", example, "--json", "--objectives", "ttft_p99_ms").out)
    assert len(other["front"]) == 1
    picked = sweep("pick", example, "--sla", "ttft_p99_ms<=5000", "--json")
    assert picked.code == 0 and json.loads(picked.out)


def test_an_infeasible_pick_says_so_and_exits_3(sweep: Callable[..., Outcome], example: str) -> None:
    assert sweep("pick", example, "--sla", "ttft_p99_ms<=5000").code == 0
    missed = sweep("pick", example, "--sla", INFEASIBLE)
    assert missed.code == cli.EXIT_INFEASIBLE and "ttft_p99_ms" in missed.out
    assert sweep("pick", example, "--sla", INFEASIBLE, "--json").code == cli.EXIT_INFEASIBLE


def test_the_newest_study_under_runs_is_the_default(
    sweep: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("first", "second")):
        os.utime(write_study(tmp_path / "runs" / name), (1e9 + number, 1e9 + number))
    assert json.loads(sweep("status", "--json").out)["path"].endswith("second")


def test_export_and_report_name_what_they_wrote(sweep: Callable[..., Outcome], example: str, tmp_path: Path) -> None:
    for suffix in ("csv", "parquet"):
        path = tmp_path / f"points.{suffix}"
        assert sweep("export", example, "-o", str(path)).out.strip() == str(path) and path.stat().st_size > 0
    assert Path(sweep("report", example).out.strip()).is_file()


def test_no_study_at_all(sweep: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep("status").is_mistake("no study named, and none under ./runs", "name its folder")


def test_a_missing_study_lists_those_that_are_there(sweep: Callable[..., Outcome], example: str) -> None:
    sweep("front", f"{example}2").is_mistake("no study at '.*example2'", "studies there: .*example")


def test_a_folder_that_is_no_study(
    sweep: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # studies of the working folder would be offered instead
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    sweep("status", str(folder)).is_mistake("is not a study folder", "sweep run")


@pytest.mark.parametrize(
    ("file", "text", "message", "fix"),
    [
        ("study.json", "{", r"cannot read .*study\.json", "backup"),
        ("records.jsonl", "rubbish\n", r"records\.jsonl:1 is not a sweep record", "restore the line"),
        ("records.jsonl", '{"schema": 99, "kind": "point"}\n', "schema 99 is newer", "upgrade"),
        ("status.json", "{", r"status\.json is corrupt", "delete it"),
    ],
)
def test_a_damaged_study_is_named(
    sweep: Callable[..., Outcome], example: str, file: str, text: str, message: str, fix: str
) -> None:
    (Path(example) / file).write_text(text)
    sweep("status", example).is_mistake(message, fix)


@pytest.mark.parametrize(
    ("sla", "message", "fix"),
    [
        ("latency<=500", "unknown metric 'latency'", "known|mean"),
        ("ttft_p99_ms<=500kg", "has no unit 'kg'", "use ms"),
        ("ttft_p99<=500", "has no unit", "write ttft_p99<=500ms"),
        ("quality_top1_agreement>=98", "is a fraction", "98%"),
        ("ttft_p99_ms>=500", "would forbid the better values", "ttft_p99_ms<=500"),
        ("fast please", "not understood", "metric<=number"),
        ("", "SLA is empty", "for example"),
    ],
)
def test_an_sla_that_is_not_understood(
    sweep: Callable[..., Outcome], example: str, sla: str, message: str, fix: str
) -> None:
    sweep("pick", example, "--sla", sla).is_mistake(message, fix)


def test_an_unknown_metric_to_minimize(sweep: Callable[..., Outcome], example: str) -> None:
    sweep("pick", example, "--sla", "ttft_p99_ms<=5000", "--minimize", "cost").is_mistake("unknown metric 'cost'", ".")
    sweep("front", example, "--objectives", "ttft_p99").is_mistake("unknown metric 'ttft_p99'", "did you mean")


def test_an_export_to_an_unknown_format(sweep: Callable[..., Outcome], example: str) -> None:
    sweep("export", example, "-o", "points.xlsx").is_mistake("cannot export to 'points.xlsx'", r"\.csv or \.parquet")


def test_a_study_that_has_measured_nothing_yet_can_be_read(sweep: Callable[..., Outcome], tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    write_meta(folder)
    assert "nothing was run yet" in sweep("status", str(folder)).out
    assert "0 of 0 measured points" in sweep("front", str(folder)).out
    sweep("pick", str(folder), "--sla", "ttft_p99_ms<=1").is_mistake("measured", ".")


# ---------------------------------------------------------------- planning and running


def test_a_plan_in_json(sweep: Callable[..., Outcome], cpu: list[str], tmp_path: Path) -> None:
    shown = sweep("plan", "--json", *cpu)
    plan = json.loads(shown.out)
    assert shown.code == 0 and plan["problems"] == [] and plan["loads"] == ["c16", "c8", "c2"]
    assert not (tmp_path / "runs").exists()  # nothing is launched, nothing is left


def test_an_argument_that_vllm_does_not_know(sweep: Callable[..., Outcome], cpu: list[str], tmp_path: Path) -> None:
    wrong = "+engine.args.max_num_sequences=8"
    sweep("run", *cpu, wrong).is_mistake(r"vLLM 9\.9 refuses: no argument 'max_num_sequences'.*max_num_seqs", "correct")
    (tmp_path / "mine" / "search_space").mkdir(parents=True)
    text = "# @package space\nname: typo\nparams:\n  max_num_sequences: {choices: [4, 8]}\n"
    (tmp_path / "mine" / "search_space" / "typo.yaml").write_text(text)
    knob = [*cpu, "search_space=typo", "--config-dir", str(tmp_path / "mine")]
    sweep("run", *knob).is_mistake("max_num_sequences: no argument", "correct or remove")
    shown = sweep("plan", *knob)
    assert shown.code == cli.EXIT_USER_ERROR and "PROBLEM       max_num_sequences: no argument" in shown.out
    assert not (tmp_path / "runs").exists()


def test_a_wrong_dtype(sweep: Callable[..., Outcome], cpu: list[str]) -> None:
    sweep("run", *cpu, "+engine.args.dtype=bf61").is_mistake("dtype=bf61: not among auto, half, bfloat16", "correct")


@pytest.mark.parametrize(
    ("override", "message", "fix"),
    [
        ("model.path=/no/such/model", r"model\.path=/no/such/model holds no config\.json", "."),
        ("budget.huors=8", "unknown key 'budget.huors'", "did you mean 'hours'"),
        ("workload=chatt", "workload=chatt does not exist", "did you mean 'chat'"),
        ("sampler.kind=tpee", "sampler.kind='tpee' is unknown", "did you mean 'tpe'"),
        ("objectives.metrics=[ttft_p99]", "unknown metric 'ttft_p99'", "did you mean"),
        ("constraints.bounds=['ttft_p99_ms<=5kg']", "has no unit 'kg'", "use ms"),
        ("hardware.devices=4096", "hardware.devices=4096, but only", "set hardware.devices="),
        ("storage.dir=/proc/nowhere", r"storage\.dir=/proc/nowhere cannot be used", "another storage.dir"),
        (
            "storage.optuna=sqlite:////no/such/folder/x.db",
            r"storage\.optuna=sqlite:////no/such.* cannot be used",
            "check",
        ),
        ("storage.optuna=nonsense", r"storage\.optuna=nonsense cannot be used", "storage.optuna=null"),
    ],
)
def test_a_mistake_in_the_configuration(
    sweep: Callable[..., Outcome], cpu: list[str], override: str, message: str, fix: str
) -> None:
    sweep("run", *cpu, override).is_mistake(message, fix)


def test_a_study_of_another_configuration(sweep: Callable[..., Outcome], cpu: list[str]) -> None:
    broken = "storage.optuna=nonsense"  # ends after the folder is made and before a launch
    sweep("run", *cpu, broken)
    other = sweep("run", *cpu, broken, "workload.temperature=0.5")
    other.is_mistake(r"another configuration: workload\.temperature: 0\.0 before, 0\.5 now", "another study=")


def test_a_study_that_is_being_run(sweep: Callable[..., Outcome], cpu: list[str], tmp_path: Path) -> None:
    broken = "storage.optuna=nonsense"
    sweep("run", *cpu, broken)
    with locked(tmp_path / "runs" / "s"):
        sweep("run", *cpu).is_mistake(f"study 's' is being run by process {os.getpid()}", "wait for it")


def test_a_database_that_is_locked_or_none(sweep: Callable[..., Outcome], cpu: list[str], tmp_path: Path) -> None:
    path = tmp_path / "optuna.db"
    path.write_bytes(b"no database at all" * 100)
    sweep("run", *cpu, f"storage.optuna=sqlite:///{path}").is_mistake("file is not a database", "check the URL")
    path.unlink()
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    url = f"storage.optuna='sqlite:///{path}?timeout=0'"
    sweep("run", *cpu, url).is_mistake("database is locked", "who else writes to it")
    holder.close()


def test_an_interpreter_that_does_not_run_or_has_no_vllm(
    sweep: Callable[..., Outcome], cpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    sweep("run", *cpu, "engine.python=/no/such/python").is_mistake(
        "engine.python=/no/such/python does not run", "name a"
    )
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    sweep("run", *cpu, f"engine.python={bare}").is_mistake("cannot import vllm", "install it there")
    shown = sweep("plan", *cpu, f"engine.python={bare}")
    assert shown.code == 0 and "not checked: engine.python has no vLLM" in shown.out


def test_a_full_disk_is_no_traceback(
    sweep: Callable[..., Outcome], cpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> Session:
        raise OSError(errno.ENOSPC, "No space left on device", "records.jsonl")

    monkeypatch.setattr("sweep.study.run.run_study", full)
    sweep("run", *cpu).is_mistake("no space left on the device of records.jsonl", "the same command continues")


def test_a_reader_that_closes_the_pipe_is_no_traceback(example: str) -> None:
    command = f"{sys.executable} -m sweep front {example} --json | head -c 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "{" and done.stderr == ""


# ---------------------------------------------------------------- answers in less than a second

HEAVY = ("torch", "vllm", "optuna", "plotly", "pandas", "hydra", "omegaconf", "pyarrow", "sqlalchemy", "transformers")
PROBE = """
import sys
from sweep.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("HEAVY", *sorted({name.split(".")[0] for name in sys.modules} & set(%r)))
"""


@pytest.fixture
def loaded(example: str) -> Iterator[Callable[..., str]]:
    def run(*words: str) -> str:
        command = [sys.executable, "-c", PROBE % (HEAVY,), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.splitlines()[-1]

    yield run


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["run", "--help"],
        ["status", "STUDY"],
        ["status", "STUDY", "--json"],
        ["front", "STUDY"],
        ["pick", "STUDY", "--sla", "ttft_p99_ms<=5000"],
        ["pick", "STUDY", "--sla", INFEASIBLE, "--json"],
    ],
)
def test_quick_commands_load_nothing_heavy(loaded: Callable[..., str], example: str, words: list[str]) -> None:
    assert loaded(*(example if word == "STUDY" else word for word in words)) == "HEAVY"
