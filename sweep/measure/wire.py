"""HTTP/1.1 over a raw socket, one request at a time, each read stamped with the time its bytes reached this machine.

The kernel notes when a packet arrives (SO_TIMESTAMPNS, socket(7)), so a client that is busy and reads late still learns
the right time. Chunks that wait together are read together and all carry the last one's time, so what is lost is the
time between them, and only if the client is later than the next chunk. Where the kernel stamps nothing, a read's time
is when the process got to it. All times are time.perf_counter seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
from collections.abc import Callable
from errno import EINPROGRESS
from time import perf_counter, time_ns
from typing import Any
from urllib.parse import urlsplit

_READ_BYTES = 2**16
_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python does not name it
_TIMESPEC = struct.Struct("@ll")
_CONTROL_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)


class Answer:
    """The answer to one request, fed as it comes. reads: where (time, body bytes) of each socket read go, unframed.

    status: None until the head has come. ended_at: when its last byte came, None before. reusable: the server keeps the
    connection. feed raises ValueError for what is no HTTP/1.1 answer.
    """

    def __init__(self, reads: list[tuple[float, bytes]]) -> None:
        self.status: int | None = None
        self.reads = reads
        self.ended_at: float | None = None
        self.reusable = True
        self.feed: Callable[[float, bytes], None] = self._head
        self._rest = b""
        self._missing = 0  # bytes of the current chunk, its line end included, or of the body, yet to come

    def _head(self, at: float, data: bytes) -> None:
        head, end, body = (self._rest + data).partition(b"\r\n\r\n")
        if not end:
            self._rest = head
            return
        self._rest = b""
        first, *lines = head.decode("latin-1").split("\r\n")
        version, code = first.split(" ", 2)[:2]
        if not version.startswith("HTTP/1."):
            raise ValueError(f"no HTTP/1.1 answer but {first[:80]!r}")
        if 100 <= int(code) < 200:  # an interim answer
            self._head(at, body)
            return
        self.status = int(code)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.reusable = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        if headers.get("transfer-encoding", "").lower() == "chunked":
            self.feed = self._chunks
        elif "content-length" in headers:
            self.feed, self._missing = self._sized, int(headers["content-length"])
        else:
            self.feed, self.reusable = self._until_closed, False
        self.feed(at, body)

    def _chunks(self, at: float, data: bytes) -> None:
        if self._rest:
            data, self._rest = self._rest + data, b""
        size, position, missing, body = len(data), 0, self._missing, b""
        while True:
            if missing:  # in a chunk: its bytes, then \r\n
                body += data[position : position + missing - 2] if missing > 2 else b""
                position += missing
                if position >= size:
                    break
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                self._rest, position = data[position:], size
                break
            length = int(data[position:line_end].partition(b";")[0], 16)
            if length == 0:
                if data.find(b"\r\n\r\n", line_end) < 0:  # trailers to come
                    self._rest, position = data[position:], size
                else:
                    self.ended_at = at
                break
            position, missing = line_end + 2, length + 2
        self._missing = max(position - size, 0)
        if body:
            self.reads.append((at, body))

    def _sized(self, at: float, data: bytes) -> None:
        self._missing -= len(data)
        if data:
            self.reads.append((at, data))
        if self._missing <= 0:
            self.ended_at = at

    def _until_closed(self, at: float, data: bytes) -> None:
        if data:
            self.reads.append((at, data))

    def close(self, at: float) -> bool:
        """The server closed the connection. Whether that is how this answer ends."""
        if self.feed == self._until_closed:
            self.ended_at = at
        return self.ended_at is not None


class Server:
    """Where requests go, and the connections to it that are free. One per load.

    A free connection is used again for keep_alive_s. stamped: reads so far that carry the kernel's time, and all reads.
    Raises SystemExit for an address that cannot be one.
    """

    def __init__(self, base_url: str, keep_alive_s: float) -> None:
        url = urlsplit(base_url)
        if url.scheme != "http" or url.hostname is None:
            raise SystemExit(f"the load client speaks http, not {base_url!r}")
        found = socket.getaddrinfo(url.hostname, url.port or 80, type=socket.SOCK_STREAM)
        self.family: int = found[0][0]
        self.address: Any = found[0][4]
        self.stamped = [0, 0]
        self._host, self._base_path = url.netloc, url.path.rstrip("/")
        self._keep_alive_s = keep_alive_s
        self._free: list[tuple[float, Connection]] = []
        # The kernel begins to stamp some time after the first socket asks for it.
        self._first = _stamped_socket(self.family)

    def post(self, path: str, body: bytes) -> bytes:
        """The bytes of a request."""
        head = (
            f"POST {self._base_path}{path} HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def fetch(self, request: bytes, answer: Answer) -> None:
        """Send a request and feed the answer until it has ended. Raises OSError, or ValueError for what is no HTTP."""
        connection = self._take()
        try:
            await connection.exchange(request, answer)
        finally:
            if answer.ended_at is not None and answer.reusable and connection.usable:
                self._free.append((perf_counter(), connection))
            else:
                connection.close()

    def _take(self) -> Connection:
        while self._free:
            since, connection = self._free.pop()
            if connection.usable and perf_counter() - since < self._keep_alive_s:
                return connection
            connection.close()
        return Connection(self)

    def close(self) -> None:
        self._first.close()
        for _, connection in self._free:
            connection.close()
        self._free.clear()


class Connection:
    """One connection. usable: open, as far as is known."""

    def __init__(self, server: Server) -> None:
        self.usable = True
        self._stamped = server.stamped
        self._loop = asyncio.get_running_loop()
        self._socket = _stamped_socket(server.family)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answer: Answer | None = None
        self._unsent = memoryview(b"")
        self._over: asyncio.Future[None] | None = None
        error = self._socket.connect_ex(server.address)
        if error not in (0, EINPROGRESS):
            self._socket.close()
            raise OSError(error, os.strerror(error))
        self._loop.add_reader(self._socket, self._read)

    async def exchange(self, request: bytes, answer: Answer) -> None:
        """Send the request, at once if the kernel takes it, and feed the answer until it ends."""
        self._answer, self._unsent = answer, memoryview(request)
        self._over = self._loop.create_future()
        if not self._write():
            self._loop.add_writer(self._socket, self._write_more)
        try:
            await self._over
        finally:
            self._answer = self._over = None

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
        self.usable = False

    def _write(self) -> bool:
        """Whether all is sent. While a new connection is being made, nothing is."""
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return False
        return not self._unsent

    def _write_more(self) -> None:
        try:
            if self._write():
                self._loop.remove_writer(self._socket)
        except OSError as error:
            self._fail(error)

    def _read(self) -> None:
        try:
            data, control, _, _ = self._socket.recvmsg(_READ_BYTES, _CONTROL_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(error)
            return
        real_ns, at = time_ns(), perf_counter()
        self._stamped[1] += 1
        if control:
            seconds, ns = _TIMESPEC.unpack(control[0][2])
            at -= (real_ns - seconds * 1_000_000_000 - ns) * 1e-9
            self._stamped[0] += 1
        answer = self._answer
        if answer is None:  # between two requests a server may only close
            self.close()
        elif not data:
            self._fail(None if answer.close(at) else ConnectionError("the server closed the connection in its answer"))
        else:
            try:
                answer.feed(at, data)
            except ValueError as error:
                self._fail(error)
            else:
                if answer.ended_at is not None and self._over is not None and not self._over.done():
                    self._over.set_result(None)

    def _fail(self, error: Exception | None) -> None:
        self.close()
        if self._over is not None and not self._over.done():
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)


def _stamped_socket(family: int) -> socket.socket:
    """A non-blocking TCP socket whose reads the kernel stamps, where it can."""
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setblocking(False)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            made.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    return made
