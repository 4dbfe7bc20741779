from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sweep.errors import ConfigError
from sweep.measure.draws import HELD_OUT_DRAW
from sweep.measure.replay import TraceReplay
from sweep.measure.trace_files import trace_checksum, trace_path


def replay(**options: Any) -> TraceReplay:
    made = TraceReplay.from_dict({"file": "azure_conv_2023"} | options)
    assert made is not None
    return made


def numbered(tmp_path: Path, n: int, **columns: Any) -> str:
    """A log whose row i has i + 1 prompt tokens."""
    path = tmp_path / "log.jsonl"
    rows = [{"timestamp": i, "prompt_tokens": i + 1} | {k: v(i) for k, v in columns.items()} for i in range(n)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def row_numbers(made: TraceReplay, n: int, draw: int, seed: int = 0) -> list[int]:
    prompts = made.rows(n, draw, seed).prompt_tokens
    assert prompts is not None
    return (prompts - 1).tolist()


def test_no_file_is_no_replay() -> None:
    assert TraceReplay.from_dict({}) is None
    assert TraceReplay.from_dict({"file": None, "sampling": "window"}) is None


def test_windows_are_consecutive_disjoint_and_the_last_is_held_out(tmp_path: Path) -> None:
    made = replay(file=numbered(tmp_path, 45))
    draws = [row_numbers(made, 10, draw) for draw in (0, 1, 2)]
    assert draws == [list(range(10)), list(range(10, 20)), list(range(20, 30))]
    assert row_numbers(made, 10, HELD_OUT_DRAW) == list(range(30, 40))
    with pytest.raises(ConfigError, match=r"has rows for 4 draws of 10 .*none is left for draw 3") as error:
        made.rows(10, 3, 0)
    assert "longer trace" in (error.value.hint or "")


def test_a_trace_for_one_draw_holds_nothing_out(tmp_path: Path) -> None:
    made = replay(file=numbered(tmp_path, 15))
    assert row_numbers(made, 10, 0) == list(range(10))
    for draw in (1, HELD_OUT_DRAW):
        with pytest.raises(ConfigError, match="rows for 1 draws"):
            made.rows(10, draw, 0)
    with pytest.raises(ConfigError, match="rows for 0 draws"):
        made.rows(16, 0, 0)


def test_shares_are_disjoint_replicas_and_keep_conversations_whole(tmp_path: Path) -> None:
    made = replay(file=numbered(tmp_path, 400, conversation=lambda i: i % 80), keep_share=0.25)
    draws = [row_numbers(made, 60, draw) for draw in (0, 1, 2, HELD_OUT_DRAW)]
    conversations = [{i % 80 for i in rows} for rows in draws]
    assert sum(map(len, conversations)) == len(set().union(*conversations))
    for rows in draws:
        assert rows == sorted(rows) and max(rows) - min(rows) > 150  # it spans the trace, not a piece of it
    assert made.rate_rps == pytest.approx(0.25)
    assert row_numbers(made, 60, 0, seed=1) != draws[0]


def test_a_share_of_the_rows_keeps_that_share_of_the_rate() -> None:
    whole, fifth = replay(), replay(keep_share=0.2)
    assert whole.rate_rps == pytest.approx(5.26, rel=1e-3)
    assert fifth.rate_rps == pytest.approx(5.26 / 5, rel=1e-3)
    assert fifth.rows(1000, 0, 0).rate_rps == pytest.approx(5.26 / 5, rel=0.1)


def test_bootstrap_keeps_pairs_and_gives_up_arrivals() -> None:
    """Prompts and answers of these summaries are correlated (-0.46): independent marginals would not be."""
    made = replay(file="arxiv_summarization", sampling="bootstrap")
    assert made.rate_rps is None
    rows = made.rows(3000, 0, 0)
    assert rows.prompt_tokens is not None and rows.output_tokens is not None
    assert np.corrcoef(rows.prompt_tokens, rows.output_tokens)[0, 1] == pytest.approx(-0.46, abs=0.06)
    drawn = [row.tolist() for d in (0, 1, HELD_OUT_DRAW) if (row := made.rows(50, d, 0).prompt_tokens) is not None]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
    with pytest.raises(ConfigError, match="would tear the shared prefixes"):
        replay(file="mooncake_conversation", sampling="bootstrap")


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    file = numbered(tmp_path, 9)
    checksum = trace_checksum(trace_path(file))
    assert replay(file=file, sha256=checksum)
    numbered(tmp_path, 10)
    with pytest.raises(ConfigError, match="has changed: its sha256 is"):
        replay(file=file, sha256=checksum)


def test_scaled_lengths_and_those_of_text(tmp_path: Path) -> None:
    assert replay(length_scale=0.1).lengths("prompt_tokens").max() == 1405  # type: ignore[union-attr]
    path = tmp_path / "text.jsonl"
    path.write_text('{"prompt": "' + "word " * 40 + '"}')
    made = replay(file=str(path))
    assert made.lengths("prompt_tokens").tolist() == [50]  # type: ignore[union-attr]
    assert made.lengths("output_tokens") is None


@pytest.mark.parametrize(
    ("options", "named", "fix"),
    [
        ({"file": "azure_conv_2024"}, "workload.trace.file=azure_conv_2024", "azure_conv_2023"),
        ({"sampling": "random"}, "workload.trace.sampling=random", "bootstrap"),
        ({"keep_share": 0}, "workload.trace.keep_share=0", "above 0"),
        ({"keep_share": 2}, "workload.trace.keep_share=2", "up to 1"),
        ({"length_scale": -1}, "workload.trace.length_scale=-1", "above 0"),
        ({"max_rows": 0}, "workload.trace.max_rows=0", "at least 1"),
        ({"scale": 1}, "workload.trace.scale is unknown", "length_scale"),
        ({"file": "servegen_deepseek_r1", "keep_share": 0.5}, "workload.trace.keep_share=0.5", "rate_scale"),
    ],
)
def test_mistakes_name_field_value_and_fix(options: dict[str, Any], named: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        replay(**options)
    assert named in error.value.message and fix in (error.value.hint or "")
