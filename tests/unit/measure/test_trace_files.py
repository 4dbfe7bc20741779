"""Every format, what is read from it, and what is said of a line that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sweep.errors import ConfigError
from sweep.measure.client_mixture import ClientMixture
from sweep.measure.trace import Trace
from sweep.measure.trace_files import SHIPPED, read_trace, trace_path

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
CLIENT = {"rate_rps": 1, "prompt_tokens": [1, 2], "output_tokens": [1, 9]}


def write(tmp_path: Path, *lines: Any, name: str = "t.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def read(path: Path, max_rows: int = 10**6) -> Trace:
    trace = read_trace(path, max_rows)
    assert isinstance(trace, Trace)
    return trace


@pytest.mark.parametrize(
    ("name", "rows", "rate_rps"),
    [
        ("azure_conv_2023", 7921, 5.26),
        ("mooncake_conversation", 1371, 0.732),
        ("mooncake_synthetic", 1072, 1.048),
        ("arxiv_summarization", 3000, None),
    ],
)
def test_the_shipped_traces_are_whole(name: str, rows: int, rate_rps: float | None) -> None:
    trace = read(trace_path(name))
    assert len(trace) == rows
    assert trace.rate_rps == (None if rate_rps is None else pytest.approx(rate_rps, rel=1e-3))
    assert trace.prompt_tokens is not None and trace.output_tokens is not None
    assert trace.prompt_tokens.min() >= 1 and trace.output_tokens.min() >= 1
    if trace.timestamps_s is not None:
        assert trace.timestamps_s[0] == 0 and (np.diff(trace.timestamps_s) >= 0).all()


def test_the_shipped_clients_are_whole() -> None:
    mixture = read_trace(trace_path("servegen_deepseek_r1"), 10**6)
    assert isinstance(mixture, ClientMixture)
    assert len(mixture.clients) == 25 and mixture.rate_rps == pytest.approx(36.335, rel=1e-4)


def test_what_is_shipped_is_small_and_attributed() -> None:
    readme = (SHIPPED / "README.md").read_text()
    files = [p for p in SHIPPED.iterdir() if p.suffix != ".md"]
    assert len(files) == 5
    for path in files:
        assert path.stat().st_size <= 300_000
        assert f"`{path.name}`" in readme
    for needed in ("CC BY 4.0", "Splitwise", "FAST 2025", "2505.09999", "MLSys 2024"):
        assert needed in readme


def test_azure_rows_of_either_year_in_order_of_time(tmp_path: Path) -> None:
    path = write(
        tmp_path, AZURE + "2024-05-10 00:00:02.500000+00:00,7,8", "2024-05-10 00:00:00.5000000,5,6", name="t.csv"
    )
    trace = read(path)
    assert trace.timestamps_s is not None and trace.timestamps_s.tolist() == [0.0, 2.0]
    assert trace.prompt_tokens is not None and trace.prompt_tokens.tolist() == [5, 7]
    assert trace.output_tokens is not None and trace.output_tokens.tolist() == [6, 8]


def test_max_rows_bounds_what_is_read(tmp_path: Path) -> None:
    assert len(read(trace_path("azure_conv_2023"), 10)) == 10
    assert len(read(write(tmp_path, *[{"prompt": "x", "output_tokens": 2}] * 9), 3)) == 3


def test_a_log_with_everything(tmp_path: Path) -> None:
    rows = [
        {"timestamp": "2024-01-01T00:00:03Z", "prompt": "ä b", "output_tokens": 3, "class": "batch", "conversation": 7},
        {"timestamp": "2024-01-01T00:00:01Z", "prompt": "c", "output_tokens": 4, "class": "chat", "conversation": "x"},
    ]
    trace = read(write(tmp_path, *rows, ""))
    assert trace.prompts == ("c", "ä b") and trace.classes == ("chat", "batch")
    assert trace.timestamps_s is not None and trace.timestamps_s.tolist() == [0.0, 2.0]
    assert trace.conversations is not None and len(set(trace.conversations.tolist())) == 2


@pytest.mark.parametrize(
    ("lines", "where", "named"),
    [
        ([AZURE + "2023-11-16 18:15:46,12"], ":2", "2 fields instead of 3"),
        ([AZURE + "2023-11-16 18:15:46,12,5", "yesterday,1,2"], ":3", "TIMESTAMP='yesterday' is no time"),
        ([AZURE + "2023-11-16 18:15:46,-1,5"], ":2", "ContextTokens='-1' is no number of tokens"),
        ([AZURE + "2023-11-16 18:15:46,1,5.5"], ":2", "GeneratedTokens='5.5'"),
        ([AZURE], "", "no rows"),
        (["time,in,out", "1,2,3"], ":1", "neither JSON lines nor a CSV with the header TIMESTAMP,"),
        (['{"prompt": "a"}', "{oops"], ":2", "not JSON"),
        (['{"prompt": "a"}', "[1]"], ":2", "not a JSON object"),
        ([{"prompt": "a"}, {"prompt": "a", "output_tokens": 3}], ":2", "output_tokens is not in every line"),
        ([{"prompt": "a", "outputs": 3}], ":1", "outputs is unknown"),
        ([{"prompt": [1, 2, 3]}], ":1", "prompt is a list, not text"),
        ([{"prompt": ""}], ":1", "prompt='' is not text"),
        ([{"prompt": "\ud800"}], ":1", "is not text"),
        ([{"prompt": "a", "output_tokens": True}], ":1", "output_tokens=True is no number of tokens"),
        ([{"timestamp": None, "prompt": "a"}], ":1", "timestamp=None is no time"),
        ([{"prompt": "a", "class": 3}], ":1", "class=3 is not text"),
        ([{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}], ":1", "has 2 blocks of 512"),
        ([{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}], ":1", "has 0 blocks"),
        ([{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": ["a"]}], ":1", "hash_ids=['a']"),
        ([{"timestamp": 0, "input_length": 6, "hash_ids": [1]}], ":1", "output_length=None is no number"),
        ([CLIENT | {"rate_rps": 0}], ":1", "rate_rps=0"),
        ([CLIENT, CLIENT | {"family": "pareto"}], ":2", "family='pareto'"),
        ([CLIENT | {"family": "weibull", "cv": 2}], ":1", "cv=2 for family=weibull"),
        ([CLIENT | {"prompt_tokens": [5, 2]}], ":1", "prompt_tokens=[5, 2]"),
        ([CLIENT | {"output_tokens": 4}], ":1", "output_tokens=4"),
        ([CLIENT | {"burst": 4}], ":1", "burst is unknown"),
    ],
)
def test_a_malformed_row_is_one_error_with_file_line_and_field(
    tmp_path: Path, lines: list[Any], where: str, named: str
) -> None:
    path = write(tmp_path, *lines)
    with pytest.raises(ConfigError) as error:
        read_trace(path, 10**6)
    assert f"{path}{where}" in error.value.message and named in error.value.message
    assert error.value.hint and "\n" not in error.value.message


def test_a_missing_trace_names_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match="azure_conv_2024 is not a file") as error:
        trace_path("azure_conv_2024")
    assert "azure_conv_2023" in (error.value.hint or "")
