"""Our own search inside a study: what the records and the config say of its constraints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_launches import OBJECTIVES, Session, engine_text, good, make_config

from sweep.config import ParamConfig
from sweep.launch.spec import LaunchSpec
from sweep.search import Constraint
from sweep.study import loop as loop_module
from sweep.study.own_search import OwnSearch, constraints_of, tried

SEQS = {"max_num_seqs": ParamConfig(choices=[None, 2, 4, 8])}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "POLL_S", 0.0)


def with_itl(spec: LaunchSpec) -> Iterator[list[dict[str, Any]]]:
    """As `good`, with an ITL of 50 ms; the configuration with two sequences has none."""
    for events in good(spec):
        yield [_with_itl(event, "max_num_seqs=2" in engine_text(spec)) for event in events]


def _with_itl(event: dict[str, Any], missing: bool) -> dict[str, Any]:
    record = event.get("record", {})
    if "metrics" not in record:
        return event
    return {**event, "record": {**record, "metrics": {**record["metrics"], "itl_p99_ms": None if missing else 50.0}}}


def test_bounds_and_margins_become_constraints_and_the_tighter_of_two_counts(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.constraints.bounds = ["itl_p99_ms<=100 ttft_p99<=2s", "itl_p99_ms<=60", "output_throughput_tok_s>=10"]
    config.quality.non_inferiority = {"quality_kl": 0.02}
    assert constraints_of(config) == [
        Constraint("itl_p99_ms", 60.0),
        Constraint("ttft_p99_ms", 2000.0),
        Constraint("output_throughput_tok_s", 10.0, -1.0),
        Constraint("loss of quality_kl", 0.0),
    ]


def test_a_study_tells_its_search_what_is_bounded(tmp_path: Path) -> None:
    config = make_config(tmp_path, params=SEQS, sampler="sweep")
    config.constraints.bounds = ["itl_p99_ms<=10"]
    session = Session(config, with_itl)
    session.run()
    found = {t.params["max_num_seqs"]: t for t in tried(session.loop.ledger, ["itl_p99_ms"])}
    assert all(v is not None and v[len(OBJECTIVES) :] == (50.0,) for v in found[4].points.values())
    missing = found[2]
    assert set(missing.points.values()) == {None} and missing.cause is None
    assert set(missing.lacking) == set(missing.points) and not found[4].lacking
    own = OwnSearch(config, session.space, session.loop.ladder, session.loop.ledger)
    assert own._search.metrics == (*OBJECTIVES, "itl_p99_ms")
