"""A completion server whose every token is scripted, and which notes when it wrote what."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from sweep.measure.workload import RequestSet


class ScriptedServer:
    """Streams as vLLM does, on its own thread. A prompt's first token id chooses what happens to the request.

    tokens_per_chunk, first_s, gap_s: the usual answer; early_empty_chunk sends a chunk without tokens at once; stops
    says that the model ended its answer, not max_tokens.
    writes: {prompt's second token: times (perf_counter) at which its token chunks were handed to the socket}.
    in_flight: (now, highest). metrics_text: what /metrics answers; each finished request adds its tokens.
    """

    OK, HTTP_ERROR, BREAKS_OFF, HANGS, ERROR_EVENT, SHORT = range(6)

    def __init__(self) -> None:
        self.tokens_per_chunk = 1
        self.first_s = 0.01
        self.gap_s = 0.002
        self.early_empty_chunk = False
        self.usage_in_chunks = True
        self.stops = False
        self.writes: dict[int, list[float]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = self.in_flight_max = 0
        self.generated = 0
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> ScriptedServer:
        self._thread.start()
        self._started.wait()
        return self

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _serve(self) -> None:
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        text = (
            "# TYPE vllm:generation_tokens counter\n"
            f'vllm:generation_tokens_total{{engine="0",model_name="a }} b"}} {self.generated}\n'
            f'vllm:num_requests_running{{engine="0"}} {self.in_flight}\n'
            'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.5\n'
        )
        return web.Response(text=text)

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": [ord(c) for c in (await request.json())["prompt"]]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        kind, number = map(int, body["prompt"][:2])
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            if kind == self.HTTP_ERROR:
                return web.Response(status=400, text="prompt too long")
            return await self._stream(request, body, kind, number)
        finally:
            self.in_flight -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any], kind: int, number: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        prompt_tokens, asked = len(body["prompt"]), body["max_tokens"] - (kind == self.SHORT)

        async def write(event: dict[str, Any] | str) -> None:
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())

        def usage(tokens: int) -> dict[str, int]:
            return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}

        if self.early_empty_chunk:
            await write({"choices": [{"text": ""}], "usage": usage(0)})
        await asyncio.sleep(self.first_s)
        done = 0
        times = self.writes.setdefault(number, [])
        while done < asked:
            done = min(done + self.tokens_per_chunk, asked)
            times.append(perf_counter())
            ending = ("stop" if self.stops else "length") if done == asked else None
            choices = {"choices": [{"text": "x", "finish_reason": ending}]}
            await write(choices | ({"usage": usage(done)} if self.usage_in_chunks else {}))
            if kind == self.BREAKS_OFF and request.transport is not None:
                request.transport.close()
                return response
            if kind == self.HANGS:
                await asyncio.Event().wait()
            if kind == self.ERROR_EVENT:
                await write({"error": {"message": "the engine died", "code": 500}})
                break
            await asyncio.sleep(self.gap_s)
        self.generated += done
        await write({"choices": [], "usage": usage(done)})
        await write("[DONE]")
        return response


def scripted_requests(kinds: list[int], warmup: int, max_tokens: int = 5) -> RequestSet:
    """Measured requests of the given kinds (a prompt is [kind, number, 7]), and warm-up ones that succeed."""
    prompts = [[kind, number, 7] for number, kind in enumerate([*kinds, *[ScriptedServer.OK] * warmup])]
    n = len(prompts)
    return RequestSet(
        np.array(prompts, dtype=np.int32).reshape(-1),
        np.arange(n + 1, dtype=np.int64) * 3,
        np.full(n, max_tokens, dtype=np.int64),
        len(kinds),
    )


@pytest.fixture
def scripted_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer().start()
    yield server
    server.stop()


@pytest.fixture(name="scripted_requests")
def _scripted_requests() -> Any:
    return scripted_requests
