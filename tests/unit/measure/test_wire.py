"""HTTP framing taken off, whatever the pieces it comes in, and each piece with its time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.measure.wire import Answer, Server

HEAD = b"HTTP/1.1 200 OK\r\nserver: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def feed(pieces: list[bytes]) -> Answer:
    answer = Answer([])
    for at, piece in enumerate(pieces):
        assert answer.ended_at is None, "the answer ended before its last byte"
        answer.feed(float(at), piece)
    return answer


def cut(data: Any, whole: bytes) -> list[bytes]:
    cuts = sorted(data.draw(st.lists(st.integers(1, len(whole) - 1), max_size=20, unique=True)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@given(st.lists(st.binary(min_size=1, max_size=30), max_size=12), st.sampled_from([b"", b";x=1"]), st.data())
def test_chunks_are_joined_and_timed_whatever_the_cuts(chunks: list[bytes], extension: bytes, data: Any) -> None:
    framed = [b"%x%s\r\n%s\r\n" % (len(c), extension, c) for c in chunks]
    whole = HEAD + b"".join(framed) + b"0\r\n\r\n"
    pieces = cut(data, whole)
    answer = feed(pieces)
    assert (answer.status, answer.reusable, answer.ended_at) == (200, True, float(len(pieces) - 1))
    assert b"".join(body for _, body in answer.reads) == b"".join(chunks)
    came = [float(at) for at, piece in enumerate(pieces) for _ in piece]  # of every byte on the wire
    expected, position = [], len(HEAD)
    for chunk, frame in zip(chunks, framed, strict=True):
        begin = position + len(frame) - len(chunk) - 2
        expected += came[begin : begin + len(chunk)]
        position += len(frame)
    assert [at for at, body in answer.reads for _ in body] == expected


def test_a_body_that_looks_like_the_end_is_body() -> None:
    body = b"data: 1\r\n0\r\n\r\n"
    answer = feed([HEAD + b"%x\r\n%s\r\n" % (len(body), body), b"0\r\n", b"\r\n"])
    assert answer.reads == [(0.0, body)] and answer.ended_at == 2.0


def test_trailers_and_interim_answers_are_passed_over() -> None:
    answer = feed([b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD, b"1\r\na\r\n0\r\nx: y\r\n", b"\r\n"])
    assert (answer.status, answer.reads, answer.ended_at) == (200, [(1.0, b"a")], 2.0)


@given(st.binary(max_size=40), st.data())
def test_a_sized_answer_ends_with_its_last_byte(body: bytes, data: Any) -> None:
    pieces = cut(data, b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    answer = feed(pieces)
    assert (answer.status, answer.ended_at) == (400, float(len(pieces) - 1))
    assert b"".join(part for _, part in answer.reads) == body


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    answer = feed([b"HTTP/1.0 200 OK\r\n\r\nabc"])
    assert answer.ended_at is None and not answer.reusable
    assert answer.close(5.0) and answer.ended_at == 5.0
    assert not feed([HEAD]).close(5.0)


@pytest.mark.parametrize("junk", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 what\r\n\r\n", HEAD + b"zz\r\n"])
def test_what_is_no_http_is_an_error(junk: bytes) -> None:
    with pytest.raises(ValueError):
        feed([junk])


def test_only_http_is_spoken() -> None:
    with pytest.raises(SystemExit, match="speaks http, not 'https://x'"):
        Server("https://x", 1.0)


def test_a_read_has_the_time_its_bytes_came_not_the_time_of_the_reading() -> None:
    """The event loop sleeps through the arrival of the answer; its time must be the arrival's all the same."""
    written: list[float] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            time.sleep(0.05)
            written.append(time.perf_counter())
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            connection.recv(1000)

    async def ask() -> Answer:
        server, answer = Server(f"http://127.0.0.1:{listener.getsockname()[1]}", 1.0), Answer([])
        asyncio.get_running_loop().call_later(0.02, time.sleep, 0.3)
        await server.fetch(server.post("/", b"{}"), answer)
        assert server.stamped == [1, 1]
        server.close()
        return answer

    thread = threading.Thread(target=serve)
    thread.start()
    answer = asyncio.run(ask())
    thread.join()
    listener.close()
    assert answer.ended_at is not None
    assert written[0] <= answer.ended_at < written[0] + 0.2


def test_a_large_request_is_sent_whole_and_its_connection_used_again() -> None:
    got: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))
    body = b"x" * 20_000_000

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionError):
            for _ in range(2):
                data = b""
                while b"\r\n\r\n" not in data:
                    data += connection.recv(2**16)
                length = len(data) - data.index(b"\r\n\r\n") - 4
                time.sleep(0.05)  # let the socket's buffer fill up
                while length < len(body):
                    length += len(connection.recv(2**20))
                got.append(length)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async def ask() -> None:
        server = Server(f"http://127.0.0.1:{listener.getsockname()[1]}", 10.0)
        for _ in range(2):
            await server.fetch(server.post("/", body), answer := Answer([]))
            assert answer.status == 200
        server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    asyncio.run(ask())
    thread.join()
    listener.close()
    assert got == [len(body)] * 2
