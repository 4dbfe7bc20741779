"""Task results: what lm-eval's rows become, their files, and what is refused before any launch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.errors import ConfigError
from sweep.measure.quality import tasks
from sweep.measure.quality.tasks import TaskSpec, ask_tasks, check_tasks, load_answers, save_answers, save_failure

# The interpreter this environment was made from: it holds no packages of ours.
BARE_PYTHON = str(Path(sys.base_prefix) / "bin" / "python3")


def rows(*values: Any, metric: str = "acc") -> list[dict[str, Any]]:
    return [{"item": str(i), metric: value, "bleu": 0.3} for i, value in enumerate(values)]


def test_items_are_right_or_wrong_by_the_usual_metric_or_the_one_asked_for() -> None:
    assert tasks._right("t", rows(1.0, 0.0), None) == {"0": True, "1": False}
    assert tasks._right("t", rows(0.0, metric="exact_match"), None) == {"0": False}
    both = [{"item": "a", "acc": 0.0, "acc_norm": 1.0}]
    assert (tasks._right("t", both, None), tasks._right("t", both, "acc_norm")) == ({"a": False}, {"a": True})


@pytest.mark.parametrize(
    ("given", "metric", "message"),
    [
        (rows(1.0, metric="rouge"), None, "no metric that says right or wrong of an item \\(it has: rouge, bleu\\)"),
        (rows(1.0), "f1", "no metric"),
        (rows(1.0, 0.5), None, "grades its items by acc"),
        ([], None, "it has: none"),
    ],
)
def test_a_task_without_right_and_wrong_is_refused(given: list[Any], metric: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        tasks._right("t", given, metric)
    assert "quality.task_metric" in (refused.value.hint or "")


def test_answers_survive_their_file_and_a_failure_says_why(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    assert load_answers(path) is None
    answers = {"t": {"0": True, "1": False}}
    save_answers(path, answers)
    assert load_answers(path) == answers
    whole = path.read_bytes()
    for damaged in (b"", whole[:-4], b"[1, 2]", b"{}x"):
        path.write_bytes(damaged)
        assert load_answers(path) is None
    save_failure(path, "lm-eval exited with 1")
    assert load_answers(path) == "lm-eval exited with 1"
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_the_question_changes_with_the_task_files_and_nothing_that_does_not_matter(tmp_path: Path) -> None:
    items = tmp_path / "items.jsonl"
    items.write_text("{}\n")
    spec = TaskSpec(("a",), str(tmp_path))
    first = spec.question()
    assert first == TaskSpec(("a",), str(tmp_path), python="/elsewhere/python", concurrency=2).question()
    assert first != TaskSpec(("a",), str(tmp_path), limit=5).question()
    os.utime(items, ns=(1, 1))
    assert spec.question() == first
    items.write_text("[]\n")
    assert spec.question() != first


def test_tasks_of_ones_own_need_no_hub_and_others_may_ask_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert tasks._environment(TaskSpec(("everyday",)))["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in tasks._environment(TaskSpec(("everyday", "hellaswag")))
    (tmp_path / "mine.yaml").write_text("task: 'mine'\ndoc_to_text: !function utils.text\n")
    assert tasks._environment(TaskSpec(("mine",), str(tmp_path)))["HF_HUB_OFFLINE"] == "1"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert tasks._environment(TaskSpec(("mine",), str(tmp_path)))["HF_HUB_OFFLINE"] == "0"


def test_the_example_task_is_whole() -> None:
    lines = (tasks.EXAMPLE_TASKS / "everyday.jsonl").read_text().splitlines()
    items = [json.loads(line) for line in lines]
    assert len(items) == len({item["question"] for item in items}) >= 200
    for item in items:
        assert len(set(item["choices"])) == 3 and item["answer"] in (0, 1, 2)
    shares = [sum(item["answer"] == i for item in items) / len(items) for i in range(3)]
    assert min(shares) > 0.25  # no position that a model could learn to prefer


def test_tasks_without_lm_eval_are_refused_before_anything_runs(tmp_path: Path) -> None:
    check_tasks(TaskSpec())
    with pytest.raises(ConfigError, match="cannot import") as refused:
        check_tasks(TaskSpec(("everyday",), python=BARE_PYTHON))
    assert "sweep-llm[quality]" in (refused.value.hint or "")
    with pytest.raises(ConfigError, match="cannot be run"):
        check_tasks(TaskSpec(("everyday",), python=str(tmp_path / "no-python")))
    with pytest.raises(ConfigError, match="is no folder"):
        check_tasks(TaskSpec(("everyday",), task_dir=str(tmp_path / "nowhere")))


def test_an_lm_eval_that_breaks_is_a_cause_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailure, match="exited with 1: ModuleNotFoundError") as failure:
        ask_tasks("http://127.0.0.1:9", "m", "m", TaskSpec(("everyday",), str(tmp_path), python=BARE_PYTHON))
    assert failure.value.cause is FailureCause.request_errors


def test_a_task_lm_eval_does_not_know_is_named(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "mine.yaml").write_text((tasks.EXAMPLE_TASKS / "everyday.yaml").read_text().replace("everyday", "mine"))
    with pytest.raises(ConfigError, match="knows no task everyday_typo") as refused:
        check_tasks(TaskSpec(("mine", "everyday_typo"), task_dir=str(tmp_path)))
    assert str(tmp_path) in (refused.value.hint or "")
