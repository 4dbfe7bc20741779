"""The plan of a sweep, with what vLLM's parser says given as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_launches import make_config, make_space

from sweep.config import ParamConfig, SweepConfig
from sweep.errors import ConfigError, SlaError
from sweep.estimate.preview import Candidate
from sweep.study import plan as plan_module
from sweep.study.plan import Plan, make_plan, with_estimated_times


def argument(kind: str = "int", choices: list[str] | None = None, is_bool: bool = False, no: bool = True) -> Any:
    flags = ["--x", "--no-x"] if is_bool and no else ["--x"]
    return {"flags": flags, "choices": choices, "type": kind, "is_bool": is_bool}


KNOWN = {
    "version": "9.9",
    "arguments": {
        "max_num_seqs": argument(),
        "tensor_parallel_size": argument(),
        "data_parallel_size": argument(),
        "gpu_memory_utilization": argument("float"),
        "dtype": argument("str", ["auto", "half", "bfloat16"]),
        "enable_prefix_caching": argument("bool", is_bool=True),
        "speculative_config": argument("loads"),
    },
}


def planned(config: SweepConfig, monkeypatch: pytest.MonkeyPatch, known: Any = KNOWN) -> Plan:
    monkeypatch.setattr(plan_module, "known_arguments", lambda python, cache_dir: known)
    return make_plan(config, make_space(config), Path("unused"))


def test_a_plan_counts_names_and_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {
        "tensor_parallel_size": ParamConfig(choices=[1, 2, 4]),
        "max_num_seqs": ParamConfig(choices=[None, 16, 32], when="tensor_parallel_size == 1"),
    }
    config = make_config(tmp_path, params=params, devices=2, hours=2.0)
    config.space.constraints = ["max_num_seqs != 16"]
    plan = planned(config, monkeypatch)
    assert (plan.space.total, plan.space.valid) == (5, 3)
    assert plan.space.invalid == {"violates: max_num_seqs != 16": 1, "needs 4 devices, the node has 2": 1}
    assert (plan.loads, plan.launches, plan.points, plan.problems) == (("c8", "c2", "c1"), 3, 9, ())
    assert plan.arguments_checked == "9.9" and plan.baseline_command.endswith("vllm serve org/m")
    assert plan.hours is not None and plan.usd == pytest.approx(plan.hours * 2 * 2.0)
    assert 1.0 <= plan.launches_side_by_side <= 2.0
    text = plan.text()
    for part in (
        "5 configurations, 3 can be launched",
        "1 left out: needs 4 devices",
        "when tensor_parallel_size == 1",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("budget", "launches", "points"),
    [
        ({}, 3, 9),
        ({"trials": 4}, 2, 4),
        ({"trials": 100}, 3, 9),
        ({"hours": 240.0 / 3600.0}, 1, 3),
        ({"hours": 1e-6}, 1, 3),
        ({"usd": 2 * 2 * 240.0 / 3600.0}, 2, 6),
        ({"usd": 1000.0, "hours": 240.0 / 3600.0}, 1, 3),
    ],
)
def test_the_tightest_budget_bounds_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: dict[str, float], launches: int, points: int
) -> None:
    """One launch of three loads is planned at 240 s."""
    plan = planned(make_config(tmp_path, **budget), monkeypatch)
    assert (plan.launch_s, plan.launches, plan.points) == (240.0, launches, points)


def test_estimated_launches_replace_the_planning_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight devices for an hour are 28,800 device-seconds; a launch takes 1,500 on average: 19 of them."""
    config = make_config(tmp_path, params={"max_num_seqs": ParamConfig(low=1, high=100)}, devices=8, hours=1.0)
    plan = planned(config, monkeypatch)
    found = with_estimated_times(plan, config, {"a": Candidate(2, 300.0, ()), "b": Candidate(4, 600.0, ())})
    assert (found.launch_s, found.launches_side_by_side, found.launches) == (450.0, pytest.approx(2.4), 19)
    assert "7 min 30 s with its 3 loads (estimated)" in found.text() and "h buy" not in found.text()
    assert with_estimated_times(plan, config, {}) == plan and "h buy" in plan.text()


def test_a_plan_says_what_its_hours_leave_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our search may end early, and the time of lm-eval is not known before it ran."""
    texts = {}
    for kind, tasks in (("random", []), ("sweep", ["everyday", "gsm8k"])):
        config = make_config(tmp_path, sampler=kind, hours=1.0)
        config.quality.tasks = tasks
        texts[kind] = planned(config, monkeypatch).text()
    assert "at most:" in texts["sweep"] and "not counted: everyday, gsm8k (lm-eval)" in texts["sweep"]
    assert "at most" not in texts["random"] and "not counted" not in texts["random"]


def test_an_endless_space_without_a_budget_has_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"gpu_memory_utilization": ParamConfig(low=0.5, high=0.9)}
    plan = planned(make_config(tmp_path, params=params), monkeypatch)
    assert plan.space.total is None and plan.launches is None and plan.usd is None
    assert "none: runs until" in plan.text() and "more than 20,000 configurations" in plan.text()


def test_problems_name_the_knob_and_what_vllm_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {
        "max_num_sequences": ParamConfig(choices=[None, 8]),
        "dtype": ParamConfig(choices=[None, "half", "float8"]),
        "max_num_seqs": ParamConfig(choices=[None, "many", 8]),
        "spec": ParamConfig(bundles={"off": {}, "on": {"speculative_config.method": "ngram", "VLLM_X": "1"}}),
    }
    config = make_config(tmp_path, params=params, engine_args={"enable_prefix_caching": 1})
    problems = planned(config, monkeypatch).problems
    assert problems == (
        "enable_prefix_caching=1: takes true or false",
        "max_num_sequences: no argument 'max_num_sequences' (did you mean 'max_num_seqs'?)",
        "dtype: dtype=float8: not among auto, half, bfloat16",
        "max_num_seqs: max_num_seqs=many: takes int",
    )


def test_without_vllm_nothing_is_checked_and_the_plan_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, engine_args={"nonsense": 1})
    plan = planned(config, monkeypatch, known=None)
    assert plan.problems == () and plan.arguments_checked is None
    assert "not checked" in plan.text()


def test_the_json_of_a_plan_is_plain_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(make_config(tmp_path, trials=6), monkeypatch)
    data = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert data["config"]["study"] == "s" and data["space"] == {
        "total": 3, "valid": 3, "invalid": {}, "sampled": None,
    }  # fmt: skip
    assert {"knobs", "loads", "objectives", "baseline_command", "problems", "warnings", "launches", "points", "hours",
            "usd", "arguments_checked", "launch_s"} <= data.keys()  # fmt: skip


def unknown_objective(config: SweepConfig) -> None:
    config.objectives.metrics = ["ttft_p99"]


def no_objective(config: SweepConfig) -> None:
    config.objectives.metrics = []


def twice(config: SweepConfig) -> None:
    config.objectives.metrics = ["ttft_p99_ms", "ttft_p99_ms"]


def unknown_sampler(config: SweepConfig) -> None:
    config.sampler.kind = "tpee"


def endless_grid(config: SweepConfig) -> None:
    config.sampler.kind = "grid"
    config.space.params = {"gpu_memory_utilization": ParamConfig(low=0.5, high=0.9)}


def too_wide(config: SweepConfig) -> None:
    config.engine.args = {"tensor_parallel_size": 16}


def wrong_bound(config: SweepConfig) -> None:
    config.constraints.bounds = ["ttft_p99_ms<=500 kg"]


def bound_of_the_reference(config: SweepConfig) -> None:
    config.constraints.bounds = ["quality_kl<=3ref"]


@pytest.mark.parametrize(
    ("spoil", "message", "hint"),
    [
        (unknown_objective, "unknown metric 'ttft_p99'", "did you mean"),
        (no_objective, r"objectives\.metrics=\[\]", "at least one"),
        (twice, r"objectives\.metrics=", "each once"),
        (unknown_sampler, "sampler.kind='tpee' is unknown", "did you mean 'tpe'"),
        (endless_grid, "gpu_memory_utilization is continuous", "give it a step"),
        (too_wide, r"the baseline needs 16 devices, hardware\.devices=1", "larger hardware"),
        (wrong_bound, "has no unit 'kg'", "use ms"),
        (bound_of_the_reference, "quality_kl<=3ref is relative to the reference", "own unit"),
    ],
)
def test_a_mistake_is_found_before_anything_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, message: str, hint: str
) -> None:
    config = make_config(tmp_path)
    spoil(config)
    with pytest.raises((ConfigError, SlaError), match=message) as error:
        planned(config, monkeypatch)
    assert hint in (error.value.hint or "")


def speculation_on_random_tokens(config: SweepConfig) -> None:
    config.workload.text = "random"
    config.space.params = {"spec": ParamConfig(bundles={"off": {}, "ngram": {"speculative_config.method": "ngram"}})}


@pytest.mark.parametrize(
    ("spoil", "warning"),
    [
        (lambda c: setattr(c.hardware, "price_usd_per_device_hour", 0.0), "cost_usd_per_mtok cannot be computed"),
        (lambda c: setattr(c.hardware, "price_note", "an example"), "price per device-hour: an example"),
        (lambda c: setattr(c.workload, "num_requests", 50), "num_requests=50 cannot support a p99"),
        (lambda c: setattr(c.quality, "enabled", False), "no point can be on the front"),
        (lambda c: setattr(c.space, "params", {"max_num_seqs": ParamConfig(choices=[8])}), "no member of this space"),
        (speculation_on_random_tokens, "make draft acceptance meaningless"),
    ],
)
def test_what_will_disappoint_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, warning: str
) -> None:
    config = make_config(tmp_path, quality=True)
    config.objectives.metrics = ["cost_usd_per_mtok", "ttft_p99_ms", "quality_kl"]
    assert not any(warning in text for text in planned(config, monkeypatch).warnings)
    spoil(config)
    assert any(warning in text for text in planned(config, monkeypatch).warnings)
