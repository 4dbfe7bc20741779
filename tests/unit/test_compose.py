"""Config composition, and one clear line for every mistake on the command line."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from sweep import compose
from sweep.completion import complete
from sweep.errors import ConfigError, SweepError
from sweep.measure.workload import WorkloadSpec
from sweep.space.search_space import make_search_space

H100 = ["model=llama31_8b", "hardware=h100x8"]


def options(group: str) -> list[str]:
    return sorted(p.stem for p in (compose.config_dir() / group).glob("*.yaml"))


@pytest.mark.parametrize("space", options("search_space"))
def test_every_shipped_space_composes_and_has_members(space: str) -> None:
    model = "qwen3_30b_a3b" if space == "moe" else "llama31_8b"
    config = compose.load_config([f"model={model}", "hardware=h100x8", f"search_space={space}"])
    search_space = make_search_space(config.space, config.model, config.hardware)
    assert search_space.size().valid > 0


@pytest.mark.parametrize(
    "group",
    [
        "model",
        "hardware",
        "workload",
        "objectives",
        "constraints",
        "engine",
        "sampler",
        "budget",
        "quality",
        "proof",
        "ladder",
        "storage",
    ],
)
def test_every_shipped_option_composes(group: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for option in options(group):
        if option == "auto":
            continue
        choice = {"model": "llama31_8b", "hardware": "h100", group: option}
        overrides = [f"{key}={value}" for key, value in choice.items()]
        if option in ("local", "smollm2_135m") and group == "model":
            overrides += [f"model.path={tmp_path}", "workload=cpu_demo"]
        assert compose.load_config(overrides).study


def test_overrides_reach_the_dataclasses() -> None:
    config = compose.load_config([*H100, "budget.hours=8", "workload.loads.concurrency=[4,2]", "study=mine"])
    assert config.budget.hours == 8.0 and config.workload.loads.concurrency == [4, 2] and config.study == "mine"
    assert config.hardware.devices == 8 and config.hardware.memory_gib == pytest.approx(79.6)


def test_margins_and_tasks_reach_the_dataclasses() -> None:
    config = compose.load_config([*H100, "quality=tasks", "+quality.non_inferiority.quality_task_accuracy=0.02"])
    assert (config.quality.tasks, config.quality.under_load) == (["everyday"], True)
    assert config.quality.non_inferiority == {"quality_task_accuracy": 0.02}


def test_every_shipped_workload_says_where_its_lengths_come_from() -> None:
    for option in options("workload"):
        text = (compose.config_dir() / "workload" / f"{option}.yaml").read_text()
        if option not in ("cpu_demo", "chat_poisson"):
            assert any(source in text for source in ("Splitwise", "FAST 2025", "2505.09999", "MLSys")), option
            assert any(licence in text for licence in ("CC BY 4.0", "CC-BY 4.0", "Apache-2.0", "MIT")), option


def test_the_workloads_reach_the_loads_classes_and_traces() -> None:
    replay = WorkloadSpec.from_dict(asdict(compose.load_config([*H100, "workload=azure_conv"]).workload))
    assert [load.label for load in replay.loads] == ["x4", "x2", "x1", "x0.5"]
    mixed = WorkloadSpec.from_dict(asdict(compose.load_config([*H100, "workload=mixed"]).workload))
    assert [(c.name, c.share, c.temperature) for c in mixed.classes] == [("interactive", 0.7, 0.7), ("batch", 0.3, 0.0)]
    assert mixed.loads[0].cv == pytest.approx(1.59)
    own = [
        *H100,
        "workload=chat",
        "+workload.classes={batch: {share: 2, slo_e2e_ms: 9}}",
        "workload.slo_ttft_ms=null",
        "workload.slo_tpot_ms=null",
        "workload.loads.ramp_from_rps=1",
        "workload.loads.request_rate_rps=[4]",
    ]
    spec = WorkloadSpec.from_dict(asdict(compose.load_config(own).workload))
    assert spec.classes[0].slo_e2e_ms == 9 and [load.label for load in spec.loads][-1] == "r1to4"


def test_a_study_belongs_to_the_content_of_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"prompt_tokens": 5}\n')
    overrides = [
        *H100,
        "workload=chat",
        "workload.trace.file=log.jsonl",
        "workload.output_tokens={kind: fixed, value: 3}",
    ]
    trace = compose.load_config(overrides).workload.trace
    assert trace.file == str(tmp_path / "log.jsonl") and len(trace.sha256 or "") == 64
    (tmp_path / "log.jsonl").write_text('{"prompt_tokens": 6}\n')
    assert compose.load_config(overrides).workload.trace.sha256 != trace.sha256
    (tmp_path / "log.jsonl").write_text('{"prompt_tokens": -1}\n')
    with pytest.raises(ConfigError, match=r"log\.jsonl:1: prompt_tokens=-1"):
        compose.load_config(overrides)


def test_the_study_is_named_after_what_it_measures() -> None:
    assert compose.load_config([*H100, "search_space=scheduler"]).study == "llama31_8b-h100x8-chat-scheduler"


def test_facts_of_a_local_checkpoint_are_read(tmp_path: Path) -> None:
    facts = {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30, "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    model = compose.load_config(["model=local", f"model.path={tmp_path}", "hardware=h100"]).model
    assert (model.num_attention_heads, model.num_hidden_layers, model.num_experts, model.is_moe) == (9, 30, 4, True)


def test_users_own_folder_comes_first(tmp_path: Path) -> None:
    folder = tmp_path / "search_space"
    folder.mkdir()
    text = "# @package space\nname: mine\nparams:\n  max_num_seqs: {choices: [null, 7]}\n"
    (folder / "mine.yaml").write_text(text)
    assert compose.load_config([*H100, "search_space=mine"], tmp_path).space.name == "mine"


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["budget.huors=8"], "unknown key 'budget.huors'", "did you mean 'hours'?"),
        (["budget.hours=lots"], "budget.hours: Value 'lots'", None),
        (["budget.hours=-1"], "budget.hours=-1.0 is not positive", "above 0"),
        (["bugdet=night"], "unknown key 'bugdet'", "did you mean 'budget'?"),
        (["workload=chatt"], "workload=chatt does not exist", "did you mean 'chat'?"),
        (["search_space=mine"], "search_space=mine does not exist", "cpu_small, dense"),
        (["space.params.max_num_seqs.choises=[1]"], "unknown key 'space.params.max_num_seqs.choises'", "'choices'"),
        (["workload.temperature=hot"], "workload.temperature: Value 'hot'", None),
        (["hardware.devices=2.5"], "hardware.devices: Value '2.5'", None),
        (["ladder=adaptiv"], "ladder=adaptiv does not exist", "did you mean 'adaptive'?"),
        (["ladder.extra_levels=-1"], "ladder.extra_levels=-1 is negative", "give 0"),
        (["ladder.cut_confidence=95"], "ladder.cut_confidence=95.0 is no confidence", "between 0.5 and 1"),
        (["nonsense"], "'nonsense' is not an override", "key=value"),
        (["study=a/b"], "study='a/b' is not a folder name", None),
        (["+engine.args.port=80"], "engine.args.port=80 is set by sweep itself", "remove"),
        (["engine.args.dtype=half"], "unknown key 'engine.args.dtype'", "+engine.args.dtype="),
        (["workload=code", "workload.prompt_tokens.high=99999"], "exceeds model.args.max_model_len=16384", "raise"),
        (["workload=code_agent", "workload.conversation.max_tokens=20000"], "longest request of 20000", "max_tokens"),
        (["workload=mooncake", "workload.prompt_tokens.high=null"], "exceeds model.args.max_model_len", "or raise"),
        (["workload.trace.file=/no/such.csv"], "workload.trace.file=/no/such.csv", "azure_conv_2023"),
        (["workload.loads.rate_scale=[1]"], "workload.loads.rate_scale=[1.0] needs a trace", "trace.file"),
        (["workload=mixed", "workload.classes.batch.slo_e2e=3"], "unknown key 'workload.classes.batch.slo_e2e'", "slo"),
        (["workload=mixed", "workload.slo_ttft_ms=3"], "workload.slo_ttft_ms=3.0 beside", "classes.interactive"),
        (["workload.loads.concurrency=[]"], "workload.loads is empty", "workload.loads.concurrency="),
        (["budget.usd=10", "hardware.price_usd_per_device_hour=0"], "budget.usd=10.0 needs a price", "what you pay"),
        (["+quality.non_inferiority.quality_kl=0"], "quality.non_inferiority.quality_kl=0 is no loss", "above 0"),
        (["+quality.non_inferiority.ttft_p99_ms=1"], "ttft_p99_ms is not compared with a reference", "quality_kl"),
        (["+quality.non_inferiority.quality_task_accuracy=0.1"], "quality.tasks is empty", "quality.tasks=["),
        (["quality=none", "+quality.non_inferiority.quality_kl=0.1"], "needs quality.enabled", "quality=kl"),
        (["quality.tasks=[everyday]", "engine=simulated"], "quality.tasks ask a real model", "quality.tasks=[]"),
        (["quality.under_load_max_kl=0"], "must be above 0", None),
        (["engine.kind=sglang"], "engine.kind='sglang' is unknown", "vllm"),
    ],
)
def test_a_mistake_is_named_with_its_fix(overrides: list[str], message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as error:
        compose.load_config([*H100, *overrides])
    assert message in error.value.message and "\n" not in error.value.message
    assert hint is None or hint in (error.value.hint or "")


def test_no_model_chosen_lists_the_models() -> None:
    with pytest.raises(ConfigError, match="no model chosen") as error:
        compose.load_config(["hardware=h100"])
    assert "qwen3_32b" in (error.value.hint or "")


def test_a_missing_checkpoint_says_how_to_obtain_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEP_SMOLLM2", "/no/such/folder")
    with pytest.raises(ConfigError, match="/no/such/folder") as error:
        compose.load_config(["model=smollm2_135m", "hardware=cpu", "workload=cpu_demo"])
    assert error.value.hint == "python scripts/prepare_smollm2.py"


def test_a_missing_config_dir_is_named(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="not a folder"):
        compose.load_config(H100, tmp_path / "nowhere")


def test_hydra_views() -> None:
    assert "hours: 8" in compose.config_text(H100, None, resolve=False)
    assert "study: llama31_8b-h100x8-chat-dense" in compose.config_text(H100, None, resolve=True)
    assert "hardware/h100x8" in compose.defaults_text(H100, None)


def test_completion_offers_commands_groups_options_and_keys() -> None:
    assert complete("sweep pl", ("plan", "run")) == ["plan"]
    assert complete("sweep run model=qwen3_3", ("plan", "run")) == ["model=qwen3_30b_a3b", "model=qwen3_32b"]
    assert "search_space=dense" in complete("sweep plan search_space=", ("plan", "run"))
    assert complete("sweep run model=qwen3_32b budget.ho", ("plan", "run")) == ["budget.hours="]
    assert complete("sweep run budget.nonsense=1 x", ("plan", "run")) == []
