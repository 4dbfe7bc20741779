from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sweep.measure.stream import read_stream


def event(tokens: int, *, choices: bool = True, text: str = "x") -> bytes:
    content = [{"text": text}] if choices else []
    data = {"choices": content, "usage": {"prompt_tokens": 9, "completion_tokens": tokens}}
    return f"data: {json.dumps(data)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def reads(*events: bytes) -> list[tuple[float, bytes]]:
    return [(float(i), data) for i, data in enumerate(events)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.data())
def test_tokens_and_times_survive_any_cutting_of_the_bytes(chunks: list[int], data: Any) -> None:
    totals = [sum(chunks[: i + 1]) for i in range(len(chunks))]
    events = [event(0, text=""), *(event(total) for total in totals), event(totals[-1], choices=False), DONE]
    whole = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=30)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    stream = read_stream(reads(*pieces), asked_tokens=totals[-1])
    assert stream.error is None
    assert stream.chunk_tokens == chunks
    assert (stream.prompt_tokens, stream.output_tokens) == (9, totals[-1])
    line_ends = [len(b"".join(events[: i + 2])) - 1 for i in range(len(chunks))]
    expected = [next(i for i, end in enumerate([*cuts, len(whole)]) if end >= line_end) for line_end in line_ends]
    assert stream.chunk_times_s == expected


def test_a_chunk_without_text_still_counts_its_token() -> None:
    stream = read_stream(reads(event(1, text=""), event(2), event(2, choices=False), DONE), asked_tokens=2)
    assert stream.error is None
    assert stream.chunk_tokens == [1, 1]


def test_text_that_looks_like_an_event_is_text() -> None:
    fake = 'data: [DONE]\n\n"usage": {"completion_tokens": 50}'
    stream = read_stream(reads(event(1, text=fake), event(1, choices=False), DONE), asked_tokens=1)
    assert (stream.error, stream.chunk_tokens) == (None, [1])


def test_a_stream_that_breaks_off_keeps_its_tokens_and_is_an_error() -> None:
    stream = read_stream(reads(event(1), event(2)), asked_tokens=5)
    assert stream.chunk_tokens == [1, 1]
    assert stream.error == "the stream broke off after 2 tokens"


def test_an_error_event_is_the_error() -> None:
    error = b'data: {"error": {"message": "EngineDeadError", "code": 500}}\n\n'
    assert read_stream(reads(event(1), error, DONE), asked_tokens=5).error == "EngineDeadError"


def test_another_number_of_tokens_than_asked_is_an_error() -> None:
    stream = read_stream(reads(event(1), event(1, choices=False), DONE), asked_tokens=2)
    assert stream.error == "asked for 2 tokens, got 1"


def test_without_usage_in_every_chunk_nothing_is_guessed() -> None:
    plain = b'data: {"choices": [{"text": "x"}]}\n\n'
    stream = read_stream(reads(plain, plain, event(2, choices=False), DONE), asked_tokens=2)
    assert stream.chunk_tokens == []
    assert stream.error is not None and "continuous_usage_stats" in stream.error


def test_what_is_not_json_is_an_error() -> None:
    stream = read_stream(reads(b"data: <html>\n\n"), asked_tokens=1)
    assert stream.error is not None and "not a completion stream" in stream.error


def test_only_a_model_that_stopped_by_itself_may_say_less() -> None:
    def ended(reason: str) -> bytes:
        usage = {"prompt_tokens": 9, "completion_tokens": 2}
        return f"data: {json.dumps({'choices': [{'text': '', 'finish_reason': reason}], 'usage': usage})}\n\n".encode()

    for reason, error in (("stop", None), ("length", "asked for 5 tokens, got 2")):
        events = reads(event(1), ended(reason), event(2, choices=False), DONE)
        assert read_stream(events, asked_tokens=5, may_stop=True).error == error
        assert read_stream(events, asked_tokens=5).error == "asked for 5 tokens, got 2"
        assert read_stream(events, asked_tokens=2, may_stop=True).error is None
