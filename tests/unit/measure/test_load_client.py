"""The client's clock and books against a server that knows what it wrote when. No tolerance: only cause and effect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sweep.measure.arrivals import Load, arrivals_s
from sweep.measure.client import Job, LoadRun
from sweep.measure.recording import LoadRecord, rows, summary
from sweep.measure.requests import RequestSet

OK, HTTP_ERROR, BREAKS_OFF, HANGS, ERROR_EVENT, SHORT = range(6)


def run(server: Any, requests: RequestSet, load: Load, **changes: Any) -> LoadRecord:
    values: dict[str, Any] = {
        "base_url": server.base_url,
        "model": "m",
        "requests": "",
        "load": load.to_dict(),
        "temperature": 0.5,
        "num_requests": requests.num_measured,
        "warmup_requests": 1,
        "max_load_s": 60.0,
        "request_timeout_s": 30.0,
        "seed": 7,
        "out": "",
    }
    made = LoadRun(Job(**(values | changes)), requests)
    made.run()
    return made.record


def test_no_token_is_reported_before_the_server_wrote_it(scripted_server: Any, scripted_requests: Any) -> None:
    scripted_server.tokens_per_chunk = 3
    scripted_server.early_empty_chunk = True
    scripted_server.first_s, scripted_server.gap_s = 0.1, 0.03
    requests = scripted_requests([OK] * 6, warmup=3, max_tokens=8)
    load_run = run(scripted_server, requests, Load(3))
    zero = load_run.window[0] if load_run.window else 0.0
    for row in rows(load_run, requests):
        assert row["status"] == "ok", row["error"]
        assert row["chunk_tokens"] == [3, 3, 2]
        assert (row["prompt_tokens"], row["output_tokens"], row["first_chunk_tokens"]) == (3, 8, 3)
        written = scripted_server.writes[row["index"]]
        seen = [zero + t for t in row["chunk_times_s"]]
        assert len(written) == len(seen) == 3
        assert all(w <= s + 1e-9 for w, s in zip(written, seen, strict=True))
        assert seen[0] == zero + row["first_token_s"] and seen[-1] == zero + row["last_token_s"]
        assert row["due_s"] <= row["sent_s"] < row["first_token_s"] - scripted_server.first_s  # not the empty chunk
        assert row["last_token_s"] <= row["end_s"]


def test_requests_are_asked_for_exactly_what_the_set_says(scripted_server: Any, scripted_requests: Any) -> None:
    run(scripted_server, scripted_requests([OK] * 2, warmup=1), Load(1))
    assert [body["prompt"] for body in scripted_server.bodies] == [[OK, 2, 7], [OK, 0, 7], [OK, 1, 7]]
    for body in scripted_server.bodies:
        assert body | {"prompt": 0} == {
            "model": "m",
            "prompt": 0,
            "max_tokens": 5,
            "temperature": 0.5,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


def test_every_failure_has_its_row_and_its_reason(scripted_server: Any, scripted_requests: Any) -> None:
    kinds = [HTTP_ERROR, BREAKS_OFF, HANGS, ERROR_EVENT, SHORT, OK]
    requests = scripted_requests(kinds, warmup=2)
    load_run = run(scripted_server, requests, Load(2), request_timeout_s=0.5)
    table = rows(load_run, requests)
    of = {row["index"]: row for row in table if row["phase"] == "measured"}
    assert [of[i]["status"] for i in range(6)] == ["error", "error", "timeout", "error", "error", "ok"]
    assert of[0]["error"] == "HTTP 400: prompt too long"
    assert of[1]["chunk_tokens"] == [1] and of[1]["error"]
    assert of[2]["chunk_tokens"] == [1] and of[2]["error"] == "no end after 0.5 s"
    assert of[3]["error"] == "the engine died"
    assert of[4]["error"] == "asked for 5 tokens, got 4"
    counts = summary(load_run, table)["counts"]
    assert counts == {
        "planned": 6, "ok": 1, "error": 4, "timeout": 1, "warmup": 2, "warmup_failed": 0,
        "ended_after_window": counts["ended_after_window"],
    }  # fmt: skip


def test_a_server_that_is_gone_gives_rows_with_errors(scripted_server: Any, scripted_requests: Any) -> None:
    scripted_server.base_url = "http://127.0.0.1:9"
    requests = scripted_requests([OK] * 3, warmup=1)
    table = rows(run(scripted_server, requests, Load(1)), requests)
    assert [row["status"] for row in table] == ["error"] * 4
    assert all("Connect" in row["error"] for row in table)


def test_a_server_without_usage_per_chunk_is_an_error_not_a_guess(scripted_server: Any, scripted_requests: Any) -> None:
    scripted_server.usage_in_chunks = False
    requests = scripted_requests([OK], warmup=1)
    table = rows(run(scripted_server, requests, Load(1)), requests)
    assert all("continuous_usage_stats" in row["error"] for row in table)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_closed_loop_keeps_its_concurrency_through_warmup_and_window(
    scripted_server: Any, scripted_requests: Any, concurrency: int
) -> None:
    requests = scripted_requests([OK] * 20, warmup=8)
    load_run = run(scripted_server, requests, Load(concurrency))
    table = rows(load_run, requests)
    assert scripted_server.in_flight_max == concurrency
    assert [row["phase"] for row in table] == ["warmup"] * concurrency + ["measured"] * 20
    assert [row["index"] for row in table] == [*range(28 - concurrency, 28), *range(20)]
    made = summary(load_run, table)
    assert made["window_rule"] == "steady"
    first_idle = sorted(row["end_s"] for row in table)[-concurrency]
    assert made["window_s"] >= first_idle > 0
    assert made["counts"]["ended_after_window"] <= concurrency - 1
    for row in table:  # inside the window a request starts only where another has ended
        before = [other for other in table if other["sent_s"] < row["sent_s"]]
        assert sum(other["end_s"] > row["sent_s"] for other in before) < concurrency


def test_warmup_is_at_least_the_concurrency_and_at_least_what_was_asked(
    scripted_server: Any, scripted_requests: Any
) -> None:
    requests = scripted_requests([OK] * 2, warmup=6)
    table = rows(run(scripted_server, requests, Load(2), warmup_requests=5), requests)
    assert sum(row["phase"] == "warmup" for row in table) == 5
    with pytest.raises(SystemExit, match="needs 7"):
        run(scripted_server, requests, Load(7))


def test_fewer_requests_than_slots_are_measured_over_the_whole_run(
    scripted_server: Any, scripted_requests: Any
) -> None:
    scripted_server.gap_s = 0.02
    requests = scripted_requests([OK] * 2, warmup=8)
    load_run = run(scripted_server, requests, Load(8))
    table = rows(load_run, requests)
    made = summary(load_run, table)
    assert made["window_rule"] == "whole_run"
    assert made["window_s"] == pytest.approx(max(row["end_s"] for row in table if row["phase"] == "measured"))


def test_the_open_loop_sends_at_seeded_due_times_whatever_the_server_does(
    scripted_server: Any, scripted_requests: Any
) -> None:
    requests = scripted_requests([HANGS] * 12, warmup=12)
    load = Load(None, request_rate_rps=200.0, burstiness=0.5)
    runs = [run(scripted_server, requests, load, request_timeout_s=0.4) for _ in range(2)]
    gaps = []
    for load_run in runs:
        table = [row for row in rows(load_run, requests) if row["phase"] == "measured"]
        assert len(table) == 12
        assert all(row["sent_s"] >= row["due_s"] for row in table)
        assert all(row["status"] == "timeout" for row in table)  # none waited for another
        gaps.append(np.diff([row["due_s"] for row in table]))
        assert table[0]["due_s"] == 0.0
        made = summary(load_run, table)
        assert made["window_rule"] == "whole_run"  # nothing ended between the first and the last arrival
    expected = np.random.default_rng(7).gamma(0.5, 1 / (200.0 * 0.5), 12)[1:]
    for gap in gaps:
        assert gap == pytest.approx(expected, abs=1e-9)  # a time stamp of many seconds holds no more digits


def test_open_loop_warmup_lasts_until_its_first_requests_ended(scripted_server: Any, scripted_requests: Any) -> None:
    scripted_server.first_s = 0.2
    requests = scripted_requests([OK] * 5, warmup=500)
    load_run = run(scripted_server, requests, Load(None, 100.0), warmup_requests=2)
    table = rows(load_run, requests)
    warmup = [row for row in table if row["phase"] == "warmup"]
    assert 2 < len(warmup) < 500
    first_measured = next(row for row in table if row["phase"] == "measured")
    assert max(row["end_s"] for row in warmup[:2]) < first_measured["sent_s"]
    made = summary(load_run, table)
    assert made["window_rule"] in ("arrivals", "whole_run")
    assert made["counts"]["ok"] == 5


def test_a_ramp_is_sent_as_its_arrivals_say(scripted_server: Any, scripted_requests: Any) -> None:
    requests = scripted_requests([OK] * 30, warmup=30)
    load = Load(None, 200.0, ramp_from_rps=20.0)
    load_run = run(scripted_server, requests, load)
    due = [row["due_s"] for row in rows(load_run, requests) if row["phase"] == "measured"]
    expected = arrivals_s(load, 30, np.random.default_rng(7))
    assert due == pytest.approx((expected - expected[0]).tolist())


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_a_replay_keeps_the_recorded_times_scaled(scripted_server: Any, scripted_requests: Any, scale: float) -> None:
    times = np.array([0.0, 0.01, 0.01, 0.2, 0.25, -0.3, -0.1])  # five measured, two before them
    requests = replace(scripted_requests([OK] * 5, warmup=2), arrivals_s=times, fixed_warmup=2)
    load_run = run(scripted_server, requests, Load(None, 9.0, rate_scale=scale))
    table = rows(load_run, requests)
    assert [row["index"] for row in table] == [5, 6, 0, 1, 2, 3, 4]
    assert [row["due_s"] for row in table] == pytest.approx((times[[5, 6, 0, 1, 2, 3, 4]] / scale).tolist())
    assert all(row["sent_s"] >= row["due_s"] for row in table)
    made = summary(load_run, table)
    assert (made["window_s"], made["load"]["rate_scale"]) == (pytest.approx(0.25 / scale), scale)


def test_a_replay_of_requests_without_times_is_refused(scripted_server: Any, scripted_requests: Any) -> None:
    with pytest.raises(SystemExit, match=r"no arrival times, load x1 needs them"):
        run(scripted_server, scripted_requests([OK], warmup=1), Load(None, 9.0, rate_scale=1.0))


def talk(scripted_requests: Any, kinds: list[int], after: list[int], **changes: Any) -> RequestSet:
    """Conversations; the warm-up's requests come last and are sent first."""
    requests = scripted_requests(kinds, warmup=len(after) - len(kinds))
    return replace(requests, after=np.array(after), fixed_warmup=len(after) - len(kinds), **changes)


LOADS = [Load(3), Load(None, 400.0), Load(None, 400.0, rate_scale=1.0)]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.label)
def test_turns_of_a_conversation_wait_for_one_another_and_nobody_else(
    scripted_server: Any, scripted_requests: Any, load: Load
) -> None:
    scripted_server.first_s = 0.02
    after = [6, 7, 8, 0, 1, 2, -1, -1, -1]  # three conversations of three turns, the first of each is warm-up
    arrivals = np.array([0, 1, 2, 3, 4, 5, -3, -2, -1]) / 400
    requests = talk(scripted_requests, [OK] * 6, after, arrivals_s=arrivals)
    load_run = run(scripted_server, requests, load)
    table = {row["index"]: row for row in rows(load_run, requests)}
    assert sorted(table) == list(range(9)) and all(row["status"] == "ok" for row in table.values())
    for index, before in enumerate(after):
        if before >= 0:
            assert table[index]["sent_s"] >= table[before]["end_s"]
            assert table[index]["due_s"] >= table[before]["end_s"]  # its user was reading, the client was not late
    assert scripted_server.in_flight_max == 3
    assert [row["phase"] for row in rows(load_run, requests)[:3]] == ["warmup"] * 3


def test_a_free_slot_takes_the_first_request_that_may_be_sent(scripted_server: Any, scripted_requests: Any) -> None:
    scripted_server.first_s = 0.05
    after = [7, 0, 1, -1, -1, -1, -1, -1]  # one conversation, and four requests of their own
    requests = replace(talk(scripted_requests, [OK] * 6, after), max_tokens=np.array([5, 5, 5, 60, 5, 60, 5, 60]))
    load_run = run(scripted_server, requests, Load(2))
    sent = {e.index: e for e in load_run.exchanges}
    assert sorted(sent) == list(range(8)) and scripted_server.in_flight_max == 2
    order = [6, 7, 0, 1, 2, 3, 4, 5]
    overtaken = [(j, i) for i in order for j in order[: order.index(i)] if sent[j].sent_at > sent[i].sent_at]
    for j, i in overtaken:  # only what had to wait is overtaken
        assert after[j] >= 0
        assert sent[after[j]].ended_at > sent[i].sent_at
    assert overtaken  # the conversation's next turn had to wait for the long warm-up request


def test_a_turn_after_one_that_failed_or_was_not_sent_is_sent(scripted_server: Any, scripted_requests: Any) -> None:
    requests = talk(scripted_requests, [HTTP_ERROR, OK, OK], [4, 0, 3, -1, -1])
    for load in (Load(1), Load(None, 100.0)):
        table = {row["index"]: row for row in rows(run(scripted_server, requests, load), requests)}
        assert [table[i]["status"] for i in (0, 1, 2)] == ["error", "ok", "ok"]
    alone = replace(requests, fixed_warmup=1)  # request 3 is not part of this load, so nobody waits for it
    table = {row["index"]: row for row in rows(run(scripted_server, alone, Load(1)), alone)}
    assert sorted(table) == [0, 1, 2, 4] and table[2]["status"] == "ok"


@pytest.mark.parametrize("load", LOADS[:2], ids=lambda load: load.label)
def test_conversations_end_with_max_load_s_too(scripted_server: Any, scripted_requests: Any, load: Load) -> None:
    scripted_server.first_s = 0.3
    after = [20, *range(19), -1, -1, -1]  # one long conversation, and two requests of their own
    requests = talk(scripted_requests, [OK] * 20, after)
    load_run = run(scripted_server, requests, load, max_load_s=1.0)
    assert load_run.stopped_by == "max_load_s"
    assert 3 < len(load_run.exchanges) < 8
    assert max(e.due_at for e in load_run.exchanges) <= load_run.began + 1.0


def test_rows_carry_their_class_and_requests_their_temperature(scripted_server: Any, scripted_requests: Any) -> None:
    requests = replace(
        scripted_requests([OK, OK], warmup=1),
        class_names=("chat", "batch"), class_ids=np.array([1, 0, 0]), temperatures=np.array([0.0, 0.7, 0.7]),
    )  # fmt: skip
    table = rows(run(scripted_server, requests, Load(1)), requests)
    assert [(row["index"], row["class"]) for row in table] == [(2, "chat"), (0, "batch"), (1, "chat")]
    assert [body["temperature"] for body in scripted_server.bodies] == [0.7, 0.0, 0.7]


def test_text_prompts_are_sent_as_text(scripted_server: Any) -> None:
    texts = [f"{OK}{number}7 für dich" for number in range(2)]  # the scripted server reads the first two characters
    data = [text.encode() for text in texts]
    requests = RequestSet(
        np.frombuffer(b"".join(data), dtype=np.uint8), np.r_[0, np.cumsum([len(d) for d in data])],
        np.full(2, 3), 1,
    )  # fmt: skip
    load_run = run(scripted_server, requests, Load(1))
    assert [body["prompt"] for body in scripted_server.bodies] == [texts[1], texts[0]]
    assert all(e.status == "ok" for e in load_run.exchanges)


def test_the_model_may_stop_by_itself_if_the_workload_lets_it(scripted_server: Any, scripted_requests: Any) -> None:
    scripted_server.stops = True
    requests = scripted_requests([SHORT, OK], warmup=1)
    strict = rows(run(scripted_server, requests, Load(1)), requests)
    assert [row["error"] for row in strict] == [None, "asked for 5 tokens, got 4", None]
    free = rows(run(scripted_server, requests, Load(1), ignore_eos=False), requests)
    assert [(row["status"], row["output_tokens"]) for row in free] == [("ok", 5), ("ok", 4), ("ok", 5)]
    assert [body["ignore_eos"] for body in scripted_server.bodies] == [True] * 3 + [False] * 3
    scripted_server.stops = False  # cut off, not ended: the context was full
    cut = rows(run(scripted_server, requests, Load(1), ignore_eos=False), requests)
    assert [row["status"] for row in cut] == ["ok", "error", "ok"]


@pytest.mark.parametrize("load", [Load(2), Load(None, 20.0)])
def test_no_request_is_sent_after_max_load_s(scripted_server: Any, scripted_requests: Any, load: Load) -> None:
    scripted_server.first_s = 0.05
    requests = scripted_requests([OK] * 400, warmup=2)
    load_run = run(scripted_server, requests, load, max_load_s=1.5)
    assert load_run.stopped_by == "max_load_s"
    assert 1 < len(load_run.measured) < 400
    assert max(e.due_at for e in load_run.exchanges) <= load_run.began + 1.5
    assert all(row["status"] == "ok" for row in rows(load_run, requests))


def test_a_load_that_ends_in_its_warmup_has_no_window(scripted_server: Any, scripted_requests: Any) -> None:
    scripted_server.first_s = 1.0
    requests = scripted_requests([OK] * 5, warmup=2)
    load_run = run(scripted_server, requests, Load(2), max_load_s=0.5)
    table = rows(load_run, requests)
    made = summary(load_run, table)
    assert (made["window_s"], made["window_rule"], made["stopped_by"]) == (None, None, "max_load_s")
    assert [row["phase"] for row in table] == ["warmup"] * 2
