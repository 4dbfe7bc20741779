"""Every trap of telling Optuna has its test here (the behaviours were measured on Optuna 5.0)."""

from __future__ import annotations

import optuna
import pytest
from optuna.trial import TrialState

from sweep.config import HardwareConfig, ModelConfig, ParamConfig, SamplerConfig, SpaceConfig
from sweep.decide.sla import parse_sla
from sweep.space.search_space import SearchSpace, make_search_space
from sweep.study.samplers import SAMPLERS, make_sampler
from sweep.study.tell import OptunaMirror, Outcome, create_study

OBJECTIVES = ["cost_usd_per_mtok", "output_throughput_tok_s"]


def make_space() -> SearchSpace:
    params = {
        "seqs": ParamConfig(low=8, high=64, log=True, step=2),
        "kv": ParamConfig(choices=[None, "fp8"]),
        "spec": ParamConfig(bundles={"off": {}, "ngram": {"speculative_config.method": "ngram"}}),
        "k": ParamConfig(low=2, high=4, step=1, when="spec == 'ngram'"),
        "mem": ParamConfig(low=0.5, high=0.9),
    }
    return make_search_space(SpaceConfig("t", params), ModelConfig(name="m", path="o/m"), HardwareConfig(name="h"))


def make_mirror(kind: str = "tpe", bounds: str = "", seed: int = 0) -> OptunaMirror:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = make_sampler(SamplerConfig(kind, seed=seed, startup_trials=4))
    study = create_study(optuna.storages.InMemoryStorage(), "s", OBJECTIVES, sampler)
    parsed = parse_sla(bounds).bounds if bounds else ()
    return OptunaMirror(study, make_space(), ["c8", "c1"], OBJECTIVES, parsed, kind)


MEASURED = Outcome((1.5, 90.0), False, {"cost_usd_per_mtok": 1.5, "ttft_p90_ms": 100.0}, {"point_id": "x"})
INFEASIBLE = Outcome(None, True, {}, {"cause": "out_of_memory"})
NOTHING = Outcome(None, False, {}, {"cause": "interrupted"})


@pytest.mark.parametrize("kind", SAMPLERS)
def test_every_sampler_survives_all_outcomes(kind: str) -> None:
    if kind in ("gp", "qmc"):
        pytest.importorskip("scipy")
        pytest.importorskip("torch")
    rounds = 6 if kind == "gp" else 24
    mirror = make_mirror(kind)
    for i in range(rounds):
        trial, params, load = mirror.ask()
        assert load in ("c8", "c1") and params["seqs"] in (8, 16, 32, 64)
        assert ("k" in params) == (params["spec"] == "ngram")
        mirror.tell(trial, (MEASURED, INFEASIBLE, NOTHING)[i % 3])
        mirror.add(params, "c1", MEASURED)
    states = [t.state for t in mirror.study.get_trials(deepcopy=False)]
    assert states.count(TrialState.RUNNING) == 0 and len(states) == 2 * rounds


def test_an_infeasible_trial_never_carries_a_made_up_value_for_tpe() -> None:
    mirror = make_mirror("tpe")
    trial, _, _ = mirror.ask()
    mirror.tell(trial, INFEASIBLE)
    (told,) = mirror.study.get_trials(deepcopy=False)
    assert told.state is TrialState.PRUNED and told.values is None
    assert told.constraints["runs"] > 0


def test_nsga2_sees_infeasible_trials_with_neutral_values_and_a_violation() -> None:
    mirror = make_mirror("nsga2")
    trial, params, load = mirror.ask()
    mirror.tell(trial, MEASURED)
    mirror.add(params, load, INFEASIBLE)
    told = mirror.study.get_trials(deepcopy=False)[1]
    assert told.state is TrialState.COMPLETE and told.values == [1.5, 90.0] and told.constraints["runs"] > 0


def test_constraints_are_always_all_set_in_one_order() -> None:
    mirror = make_mirror("tpe", "ttft_p90_ms<=50 itl_p50_ms<=10")
    full = Outcome((1.5, 90.0), False, {"ttft_p90_ms": 100.0, "itl_p50_ms": 5.0}, {})
    for outcome in (full, INFEASIBLE):
        trial, _, _ = mirror.ask()
        mirror.tell(trial, outcome)
    first, second = mirror.study.get_trials(deepcopy=False)
    assert list(first.constraints) == list(second.constraints) == ["runs", "ttft_p90_ms<=50", "itl_p50_ms<=10"]
    assert first.constraints["ttft_p90_ms<=50"] == pytest.approx(1.0) and first.constraints["itl_p50_ms<=10"] == 0.0
    assert first.constraints["runs"] == 0.0


def test_a_missing_constrained_metric_is_not_a_number() -> None:
    mirror = make_mirror("tpe", "itl_p99_ms<=10")
    trial, _, _ = mirror.ask()
    mirror.tell(trial, MEASURED)
    (told,) = mirror.study.get_trials(deepcopy=False)
    assert told.state is TrialState.FAIL and told.values is None


def test_directions_and_names_are_natural() -> None:
    study = make_mirror().study
    assert [d.name for d in study.directions] == ["MINIMIZE", "MAXIMIZE"]
    assert study.metric_names == OBJECTIVES


def test_rebuilt_study_suggests_from_the_records() -> None:
    """The mirror of records equals the study that grew by asking: same parameters, values, constraints."""
    first = make_mirror("tpe")
    told = []
    for i in range(8):
        trial, params, load = first.ask()
        outcome = Outcome((1.0 + i, 90.0 - i), False, {"cost_usd_per_mtok": 1.0 + i}, {"point_id": str(i)})
        first.tell(trial, outcome)
        told.append((params, load, outcome))
    second = make_mirror("tpe")
    second.add_all(told)
    for a, b in zip(first.study.get_trials(), second.study.get_trials(), strict=True):
        assert (a.params, a.values, a.constraints, a.user_attrs, a.distributions) == (
            b.params, b.values, b.constraints, b.user_attrs, b.distributions,
        )  # fmt: skip


def test_creating_again_replaces() -> None:
    storage = optuna.storages.InMemoryStorage()
    sampler = make_sampler(SamplerConfig("random"))
    create_study(storage, "s", OBJECTIVES, sampler).add_trial(optuna.trial.create_trial(values=[1.0, 2.0]))
    assert create_study(storage, "s", OBJECTIVES, sampler).trials == []
