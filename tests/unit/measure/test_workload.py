"""The words of a workload config: what they mean, and what is said when they contradict one another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sweep.errors import ConfigError
from sweep.measure.workload import LengthDistribution, WorkloadSpec

TALK = {"turns": {"kind": "uniform", "low": 1, "high": 5}, "max_tokens": 500}
ROWS = {"kind": "trace"}
MOONCAKE = {"trace": {"file": "mooncake_conversation"}, "prompt_tokens": ROWS}


def workload(**changes: Any) -> WorkloadSpec:
    base: dict[str, Any] = {
        "name": "test",
        "prompt_tokens": {"kind": "uniform", "low": 3, "high": 40},
        "output_tokens": {"kind": "fixed", "value": 4},
        "num_requests": 20,
        "warmup_requests": 3,
        "loads": {"concurrency": [4]},
    }
    return WorkloadSpec.from_dict(base | changes)


@pytest.mark.parametrize(
    ("changes", "named", "fix"),
    [
        ({"prompt_tokens": {"kind": "lognormal", "median": 5, "sigma": 1}}, "workload.prompt_tokens.high", "needs"),
        ({"prompt_tokens": {"kind": "normal"}}, "workload.prompt_tokens.kind='normal'", "lognormal"),
        ({"output_tokens": {"kind": "fixed"}}, "workload.output_tokens.value", "output_tokens.value="),
        ({"output_tokens": {"kind": "uniform", "low": 0, "high": 4}}, "workload.output_tokens.low=0", "at least 1"),
        ({"output_tokens": {"kind": "uniform", "low": 8, "high": 4}}, "workload.output_tokens.high=4", "8"),
        ({"output_tokens": {"kind": "empirical", "values": []}}, "workload.output_tokens.values", "needs"),
        ({"output_tokens": {"kind": "empirical", "values": [0]}}, "workload.output_tokens.values=(0,)", "1 token"),
        ({"output_tokens": {"kind": "quantiles", "values": [4, 2]}}, "output_tokens.values=(4, 2)", "smallest first"),
        ({"output_tokens": {"kind": "fixed", "value": 9, "high": 8}}, "workload.output_tokens.value=9", "8"),
        ({"output_tokens": {"knd": "fixed"}}, "workload.output_tokens.knd", "'kind'"),
        ({"prompt_tokens": ROWS}, "workload.prompt_tokens.kind=trace without a trace", "workload.trace.file="),
        ({"num_request": 3}, "workload.num_request is unknown", "'num_requests'"),
        ({"num_requests": 0}, "workload.num_requests=0", "1 or more"),
        ({"max_load_s": -1}, "workload.max_load_s=-1", "above 0"),
        ({"slo_ttft_ms": 0}, "workload.slo_ttft_ms=0", "above 0"),
        ({"loads": {"concurrency": [0]}}, "workload.loads.concurrency=0", "at least 1"),
        ({"loads": {"rate_scale": [1]}}, "workload.loads.rate_scale=[1] needs a trace", "azure_conv_2023"),
        ({"num_requests": "many"}, "wrong type", ""),
        ({"trace": {"file": "arxiv_summarization"}, "loads": {"rate_scale": [1]}}, "needs a trace with arrival", ""),
        (MOONCAKE | {"shared_prefix_tokens": 9}, "prompts of its own and shared_prefix_tokens > 0", "=0"),
        (MOONCAKE | {"classes": {"a": {}, "b": {"prompt_tokens": {"value": 3}}}}, "some classes have other", "remove"),
        (MOONCAKE | {"conversation": TALK}, "workload.conversation and workload.trace.file", "use one"),
        ({"conversation": TALK | {"max_tokens": None}}, "workload.conversation.max_tokens is not set", "context"),
        ({"conversation": TALK | {"max_tokens": 40}}, "workload.conversation.max_tokens=40", "0 + 40 + 4"),
        ({"conversation": TALK | {"at_once": 3}}, "at_once=3 cannot keep 4 requests in flight", "at least 4"),
        ({"conversation": TALK | {"turn": 3}}, "workload.conversation.turn is unknown", "'turns'"),
        ({"conversation": TALK | {"turns": ROWS}}, "workload.conversation.turns.kind=trace", ""),
        ({"classes": {"a": {"share": 0}}}, "workload.classes.a.share=0", "above 0"),
        ({"classes": {"a": {"slo_ttft": 5}}}, "workload.classes.a.slo_ttft is unknown", "'slo_ttft_ms'"),
        ({"classes": {"Fast!": {}}}, "workload.classes.Fast! is not a name", "lower-case"),
        ({"classes": {"a": {"output_tokens": {"value": 0}}}}, "workload.classes.a.output_tokens.value=0", "1 to"),
        ({"classes": {"a": {}}, "slo_ttft_ms": 5}, "workload.slo_ttft_ms=5 beside", "workload.classes.a.slo_ttft_ms"),
    ],
)
def test_mistakes_name_field_value_and_fix(changes: dict[str, Any], named: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        workload(**changes)
    assert named in error.value.message and "\n" not in error.value.message
    assert fix in (error.value.hint or "")


def test_classes_take_what_they_do_not_say_but_no_slo() -> None:
    spec = workload(
        temperature=0.7,
        shared_prefix_tokens=5,
        classes={
            "chat": {"share": 3, "slo_ttft_ms": 500, "prompt_tokens": None},
            "batch": {"output_tokens": {"value": 90}, "temperature": 0.0, "shared_prefix_tokens": 0},
        },
    )
    chat, batch = spec.request_classes
    assert (chat.name, chat.prompt_tokens, chat.temperature) == ("chat", spec.prompt_tokens, 0.7)
    assert (chat.shared_prefix_tokens, chat.has_slo) == (5, True)
    assert (batch.output_tokens, batch.temperature) == (LengthDistribution(value=90), 0.0)
    assert (batch.shared_prefix_tokens, batch.has_slo) == (0, False)
    assert spec.longest_request_tokens == max(5 + 40 + 4, 40 + 90)


def test_without_classes_all_requests_are_one_with_the_workloads_slo() -> None:
    (only,) = workload(slo_tpot_ms=9).request_classes
    assert (only.name, only.slo_tpot_ms, only.has_slo) == ("", 9, True)


def test_classes_of_a_log_must_be_known_if_any_is(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rows = [{"prompt_tokens": 5, "class": name} for name in ("chat", "batch")]
    path.write_text("\n".join(map(json.dumps, rows)))
    log = {"trace": {"file": str(path)}, "prompt_tokens": ROWS}
    assert not workload(**log).classes
    assert len(workload(**log, classes={"chat": {}, "batch": {}}).classes) == 2
    with pytest.raises(ConfigError, match=r"workload\.classes lacks 'batch', a class of"):
        workload(**log, classes={"chat": {}})


def test_lengths_of_a_trace_are_known_to_those_who_ask(tmp_path: Path) -> None:
    spec = workload(trace={"file": "azure_conv_2023", "length_scale": 0.1}, prompt_tokens=ROWS | {"high": 300})
    assert spec.prompt_tokens.longest == 300 and spec.longest_request_tokens == 304
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "only text"}')
    with pytest.raises(ConfigError, match=r"workload.output_tokens.kind=trace, and .* has no such lengths"):
        workload(trace={"file": str(path)}, prompt_tokens=ROWS, output_tokens=ROWS)


def test_fixed_lengths_leave_nothing_else_of_the_workload() -> None:
    spec = workload(conversation=TALK, shared_prefix_tokens=7, classes={"a": {}}).with_fixed_lengths(30, 5)
    assert (spec.prompt_tokens, spec.output_tokens) == (LengthDistribution(value=30), LengthDistribution(value=5))
    assert (spec.conversation, spec.trace, spec.classes, spec.shared_prefix_tokens) == (None, None, (), 0)
    assert [load.label for load in spec.loads] == ["c4"]
