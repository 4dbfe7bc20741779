"""The simulated engine as an OpenAI-compatible server that looks like vLLM to everything that measures vLLM.

    python -m sweep.engine.simulated_server --model NAME --host 127.0.0.1 --port 8000 [--flag of vLLM's ...]

--simulation '{"model": {…}, "hardware": {…}, "simulation": {…}}' takes fields of the dataclasses in sweep/config.py;
--time-scale overrides simulation.time_scale: seconds of wall clock for each simulated second.
Serves /health, /v1/models, /version, /v1/completions (one prompt, text or token ids; streamed or not; prompt_logprobs),
/tokenize, /reset_prefix_cache and /metrics. Output text is filler; token ids are hashes of pieces of text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from typing import Any

from aiohttp import web

from sweep.config import HardwareConfig, ModelConfig, SimulationConfig
from sweep.engine.engine_args import EngineConfig
from sweep.engine.processes import LAUNCH_ID
from sweep.engine.simulated import VOCABULARY, SimulatedEngine, prompt_logprobs, simulate
from sweep.engine.simulated_scheduler import BLOCK_TOKENS, Request, Scheduler
from sweep.errors import ConfigError

_BOS = 1
_PIECE = re.compile(r"\w{1,4}|\s+|[^\w\s]")
_DEFAULT_HARDWARE = HardwareConfig(name="h100", memory_gib=79.6)
_CRASH_BATCH = 4  # requests in the batch at which an engine that dies under load does
_GENERIC_DEATH = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
_GROWING: tuple[tuple[str, str], ...] = (
    ("prompt_tokens_total", "prompt_tokens"),
    ("generation_tokens_total", "generation_tokens"),
    ("num_preemptions_total", "preemptions"),
    ("prefix_cache_queries_total", "prefix_queries"),
    ("prefix_cache_hits_total", "prefix_hits"),
    ("spec_decode_num_draft_tokens_total", "draft_tokens"),
    ("spec_decode_num_accepted_tokens_total", "accepted_tokens"),
    ("request_queue_time_seconds_sum", "queue_time_s"),
    ("request_queue_time_seconds_count", "started"),
)


class Replica:
    """Lets the time of a scheduler's steps pass, and hands the tokens to whoever waits for them."""

    def __init__(self, scheduler: Scheduler, time_scale: float, crash: Callable[[], None] | None) -> None:
        self.scheduler = scheduler
        self.behind_s = 0.0
        self._scale = time_scale
        self._crash = crash
        self._wake = asyncio.Event()
        self._queues: dict[Request, asyncio.Queue[int]] = {}

    async def generate(self, request: Request) -> AsyncIterator[int]:
        """Numbers of new tokens as they come. Raises ValueError for a request that can never be scheduled."""
        request.arrived_s = self._now_s()
        self.scheduler.add(request)
        queue = self._queues[request] = asyncio.Queue()
        self._wake.set()
        received = 0
        try:
            while received < request.max_tokens:  # not `finished`, which the scheduler knows a step earlier
                received += (new := await queue.get())
                yield new
        finally:
            self.scheduler.abort(request)
            del self._queues[request]

    async def run(self) -> None:
        """Step for ever; sleeps when idle. Where this machine is too slow for the clock, the clock waits."""
        due = time.monotonic()
        while True:
            step = self.scheduler.step(self._now_s())
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                due = time.monotonic()
                continue
            due += step.duration_s * self._scale
            wait_s = due - time.monotonic()
            if wait_s < 0:
                self.behind_s -= wait_s
                due -= wait_s
            await asyncio.sleep(max(wait_s, 0.0))
            if self._crash is not None and len(self.scheduler.running) >= _CRASH_BATCH:
                self._crash()
            for request, new in step.emitted:
                if request in self._queues:
                    self._queues[request].put_nowait(new)

    def _now_s(self) -> float:
        return time.monotonic() / self._scale


class Application:
    """The HTTP side. dead: the engine crashed behind a live port, as vLLM's first request may find it."""

    def __init__(self, name: str, config: EngineConfig, engine: SimulatedEngine, settings: SimulationConfig) -> None:
        self._name = name
        self._config = config
        self._engine = engine
        self._settings = settings
        self._dead = False
        self._ids = count()
        self._replicas: list[Replica] = []

    def routes(self) -> web.Application:
        app = web.Application(client_max_size=2**27)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        app.router.add_post("/v1/completions", self._completions)
        app.cleanup_ctx.append(self._run_engine)
        return app

    async def _run_engine(self, _: web.Application) -> AsyncIterator[None]:
        crash = self._die_under_load if self._engine.crash == "load" else None
        self._replicas = [Replica(s, self._settings.time_scale, crash) for s in self._engine.replicas]
        tasks = [asyncio.create_task(replica.run()) for replica in self._replicas]
        for task in tasks:
            task.add_done_callback(_end_with)
        yield
        for task in tasks:
            task.cancel()
        behind_s = sum(replica.behind_s for replica in self._replicas)
        _say(f"this machine fell {behind_s:.2f} s behind the simulated clock in total")

    def _die_under_load(self) -> None:
        _say("RuntimeError: simulated crash region: the engine dies with several requests in its batch")
        os._exit(1)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=500 if self._dead else 200)

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self._name, "object": "model", "max_model_len": self._engine.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": f"simulated-{self._settings.seed}"})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = tokenize(body["prompt"], special=body.get("add_special_tokens", True))
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self._engine.max_model_len})

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        for replica in self._replicas:
            replica.scheduler.reset_prefix_cache()
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = []
        for number, replica in enumerate(self._replicas):
            scheduler = replica.scheduler
            labels = f'{{engine="{number}",model_name="{self._name}"}}'
            gauges = {
                "num_requests_running": len(scheduler.running),
                "num_requests_waiting": len(scheduler.waiting),
                "kv_cache_usage_perc": scheduler.used_blocks / scheduler.blocks,
            }
            growing = {name: getattr(scheduler.counters, field) for name, field in _GROWING}
            growing["request_queue_time_seconds_sum"] *= self._settings.time_scale
            lines += [f"vllm:{name}{labels} {value}" for name, value in (gauges | growing).items()]
        return web.Response(text="\n".join([*lines, ""]))

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        if self._engine.crash == "first_request":
            self._dead = True
            _say("AssertionError: simulated crash region: the engine dies on its first request")
            asyncio.get_running_loop().call_later(0.2, os._exit, 1)
        if self._dead:
            error = {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause."}
            return web.json_response({"error": {**error, "type": "EngineDeadError", "code": 500}}, status=500)
        prompt = body["prompt"]
        tokens = tokenize(prompt, special=True) if isinstance(prompt, str) else prompt
        asked = int(body.get("max_tokens") or 16)
        longest = self._engine.max_model_len
        if len(tokens) + asked > longest:
            text = f"This model's maximum context length is {longest} tokens, {len(tokens) + asked} were asked for."
            return web.json_response({"error": {"message": text, "code": 400}}, status=400)
        scored = body.get("prompt_logprobs")
        keys = [] if scored is not None else block_keys(tokens)  # vLLM scores prompts without the prefix cache
        request = Request(len(tokens), asked, keys)
        await asyncio.sleep(self._engine.dispatch_s * self._settings.time_scale)
        replica = min(self._replicas, key=lambda r: r.scheduler.load)
        events = replica.generate(request)
        if body.get("stream"):
            return await self._stream(http, body, request, events)
        async for _ in events:
            pass
        choice: dict[str, Any] = {"index": 0, "text": " x" * asked, "finish_reason": "length"}
        if scored is not None:
            choice["prompt_logprobs"] = self._score(tokens, int(scored))
        return web.json_response({**self._head(), "choices": [choice], "usage": _usage(request, asked)})

    async def _stream(
        self, http: web.Request, body: dict[str, Any], request: Request, events: AsyncIterator[int]
    ) -> web.StreamResponse:
        options = body.get("stream_options") or {}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        head, sent = self._head(), 0
        async for new in events:
            sent += new
            reason = "length" if sent >= request.max_tokens else None
            event = {**head, "choices": [{"index": 0, "text": " x" * new, "finish_reason": reason}]}
            if options.get("continuous_usage_stats"):
                event["usage"] = _usage(request, sent)
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if options.get("include_usage"):
            event = {**head, "choices": [], "usage": _usage(request, sent)}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _head(self) -> dict[str, Any]:
        return {"id": f"cmpl-{next(self._ids)}", "object": "text_completion", "model": self._name}

    def _score(self, tokens: Sequence[int], k: int) -> list[dict[str, Any] | None]:
        rows = prompt_logprobs(tokens, k, self._config, self._settings.seed)
        return [None, *({str(token): {"logprob": value} for token, value in row.items()} for row in rows)]


def tokenize(text: str, *, special: bool) -> list[int]:
    """A token for every four letters, run of blanks or sign."""
    tokens = [2 + zlib.crc32(piece.encode()) % (VOCABULARY - 2) for piece in _PIECE.findall(text)]
    return [_BOS, *tokens] if special else tokens


def block_keys(tokens: Sequence[int]) -> list[int]:
    """Identity of each full block together with everything before it."""
    keys, key = [], 0
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        key = hash((key, *tokens[end - BLOCK_TOKENS : end]))
        keys.append(key)
    return keys


def parse_arguments(words: Sequence[str]) -> dict[str, Any]:
    """vLLM's arguments as in EngineConfig.args: the inverse of EngineConfig.argv."""
    args: dict[str, Any] = {}
    rest = list(words)
    while rest:
        name = rest.pop(0)
        if not name.startswith("--"):
            raise ConfigError(f"unexpected argument {name!r}", "write --name value")
        key = name.removeprefix("--").replace("-", "_")
        if not rest or rest[0].startswith("--"):
            args[key.removeprefix("no_")] = not key.startswith("no_")
        else:
            args[key] = _value(rest.pop(0))
    return args


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _usage(request: Request, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": request.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": request.prompt_tokens + completion_tokens,
    }


def _end_with(task: asyncio.Task[None]) -> None:
    """A replica that fails ends the server, as an engine does: nobody shall wait for its tokens."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _say(f"{type(error).__name__}: {error}")
        os._exit(1)


def _say(text: str) -> None:
    sys.stdout.write(f"(EngineCore pid={os.getpid()}) {text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="sweep.engine.simulated_server", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--simulation", type=json.loads, default={})
    parser.add_argument("--time-scale", type=float)
    own, words = parser.parse_known_args()
    try:
        config = EngineConfig(own.model, parse_arguments(words), {})
        model = ModelConfig(**{"name": own.model, "path": own.model, **own.simulation.get("model", {})})
        hardware = HardwareConfig(**own.simulation.get("hardware", vars(_DEFAULT_HARDWARE)))
        settings = SimulationConfig(**own.simulation.get("simulation", {}))
        settings.time_scale = own.time_scale or settings.time_scale
        engine = simulate(config, model, hardware, settings, os.environ.get(LAUNCH_ID, ""))
    except (ConfigError, TypeError, ValueError) as error:
        _say(f"ValueError: {error}")
        return 1
    _say(f"simulating {own.model} on {hardware.name}: times from {engine.source}")
    time.sleep(engine.startup_s * settings.time_scale)
    if engine.startup_failure is not None:
        _say(engine.startup_failure)
        _say(_GENERIC_DEATH)
        return 1
    app = Application(own.model, config, engine, settings).routes()
    web.run_app(
        app,
        host=own.host,
        port=own.port,
        print=None,
        access_log=None,
        shutdown_timeout=0.2,
        handler_cancellation=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
