"""Task accuracy through lm-eval: the user's tasks, asked of the running server, item by item.

lm-eval lives in a process of its own, and in an environment of its own if asked, because it brings dozens of packages.
What comes back is whether each item was answered right: pairs of engines are compared on the same items (see paired).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.errors import ConfigError
from sweep.measure.quality.cache import whole_file

PROBE = Path(__file__).with_name("lm_eval_probe.py")
EXAMPLE_TASKS = Path(__file__).with_name("task_files")
# What says "right" of one item, in the order in which tasks name them.
_METRICS = ("acc", "exact_match", "em", "acc_norm", "pass@1", "prompt_level_strict_acc")

_FAILURE = "failure"
_TASK_NAME = re.compile(r"^task:\s*(\S+)", re.MULTILINE)

Answers = Mapping[str, Mapping[str, bool]]


@dataclass(frozen=True)
class TaskSpec:
    """Which tasks to ask. task_dir: folder of the user's task files (YAML and data), where lm-eval runs.

    limit: items of each task, None for all. metric: what says that an item is right, None for the first of the usual
    ones. python: the interpreter that holds lm-eval, None for the one running sweep.
    """

    tasks: tuple[str, ...] = ()
    task_dir: str | None = None
    limit: int | None = None
    metric: str | None = None
    python: str | None = None
    concurrency: int = 8
    timeout_s: float = 3600.0

    @property
    def folder(self) -> Path:
        return EXAMPLE_TASKS if self.task_dir is None else Path(self.task_dir).expanduser().resolve()

    def question(self) -> dict[str, Any]:
        """All that decides the answers, with the contents of the task files: the key of the cache."""
        asked = {key: value for key, value in asdict(self).items() if key in ("tasks", "limit", "metric")}
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {**asked, "files": [[path.name, path.stat().st_size, _digest(path)] for path in files]}


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def check_tasks(spec: TaskSpec) -> None:
    """Before anything is launched. Raises ConfigError: no folder, no lm-eval, or a task that lm-eval does not know."""
    if not spec.tasks:
        return
    if not spec.folder.is_dir():
        raise ConfigError(f"quality.task_dir={spec.task_dir} is no folder", "name the folder with your task files")
    python = spec.python or sys.executable
    listing = (
        "import json, sys; from lm_eval.tasks import TaskManager; "
        "known = set(TaskManager(include_path=sys.argv[1]).all_tasks); "
        "print(json.dumps([name for name in sys.argv[2:] if name not in known]))"
    )
    command = [python, "-c", listing, str(spec.folder), *spec.tasks]
    try:
        done = subprocess.run(command, env=_environment(spec), capture_output=True, text=True, timeout=300, check=False)
    except OSError as error:
        raise ConfigError(f"quality.python={python} cannot be run: {error.strerror}", "name a Python") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(
            f"quality.tasks={list(spec.tasks)} need lm-eval, which {python} cannot import: {last}",
            "pip install 'sweep-llm[quality]', name another quality.python, or leave quality.tasks empty",
        )
    unknown = json.loads(done.stdout.strip().splitlines()[-1])
    if unknown:
        raise ConfigError(
            f"quality.tasks: lm-eval knows no task {', '.join(unknown)}",
            f"see `lm_eval ls tasks`; tasks of your own are YAML files in quality.task_dir ({spec.folder})",
        )


def ask_tasks(base_url: str, model: str, tokenizer: str, spec: TaskSpec) -> Answers:
    """task -> item -> answered right, for every task of the spec, asked of the running server.

    tokenizer: folder or id. Raises LaunchFailure: load_timeout, request_errors with lm-eval's last line; ConfigError
    for a task whose items are not right or wrong.
    """
    arguments = {
        "model": model,
        "base_url": f"{base_url}/v1/completions",
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "num_concurrent": spec.concurrency,
    }
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        asked = {"tasks": list(spec.tasks), "include_path": str(spec.folder), "limit": spec.limit}
        request.write_text(json.dumps({**asked, "model_args": arguments}))
        command = [spec.python or sys.executable, str(PROBE), str(request), str(answer)]
        try:
            done = subprocess.run(
                command,
                cwd=spec.folder,
                env=_environment(spec),
                capture_output=True,
                text=True,
                timeout=spec.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            detail = f"lm-eval took over quality.task_timeout_s={spec.timeout_s:g}"
            raise LaunchFailure(FailureCause.load_timeout, detail) from error
        if done.returncode != 0 or not answer.exists():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
            detail = f"lm-eval exited with {done.returncode}: {last[0][:300]}"
            raise LaunchFailure(FailureCause.request_errors, detail)
        tasks = json.loads(answer.read_text())["tasks"]
    return {name: _right(name, rows, spec.metric) for name, rows in sorted(tasks.items())}


def _right(task: str, rows: Sequence[Mapping[str, Any]], metric: str | None) -> dict[str, bool]:
    """Item -> right. Raises ConfigError where a metric is missing or graded."""
    offered = [name for name in rows[0] if name != "item"] if rows else []
    name = metric or next((m for m in _METRICS if m in offered), None)
    if name not in offered:
        raise ConfigError(
            f"task {task} has no metric that says right or wrong of an item (it has: {', '.join(offered) or 'none'})",
            "name one of them: quality.task_metric=…",
        )
    if not all(row[name] in (0.0, 1.0) for row in rows):
        raise ConfigError(
            f"task {task} grades its items by {name}, but paired statistics need right or wrong",
            "choose a 0/1 metric: quality.task_metric=…",
        )
    return {str(row["item"]): row[name] == 1.0 for row in rows}


def _environment(spec: TaskSpec) -> dict[str, str]:
    """Offline where every task lies in the task folder: a hub that cannot be reached costs minutes of retries.

    What the user's shell says of it counts more.
    """
    files = [path.read_text(errors="replace") for path in spec.folder.rglob("*.yaml")]
    own = {name.strip("'\"") for text in files for name in _TASK_NAME.findall(text)}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"} if own.issuperset(spec.tasks) else {}
    return {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", **offline, **os.environ}


def save_answers(path: Path, answers: Answers) -> None:
    """Write as JSON; readers see all of it or nothing."""
    with whole_file(path) as f:
        f.write(json.dumps(answers).encode())


def save_failure(path: Path, detail: str) -> None:
    """Write, in place of answers, why there are none."""
    with whole_file(path) as f:
        f.write(json.dumps({_FAILURE: detail}).encode())


def load_answers(path: Path) -> Answers | str | None:
    """Read answers, or why there are none; None when nothing was asked yet or the file is damaged."""
    try:
        read = json.loads(path.read_bytes())
        if _FAILURE in read:
            return str(read[_FAILURE])
        return {task: {item: bool(right) for item, right in items.items()} for task, items in read.items()}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return None
