"""Workloads: which requests are sent and how fast. The words of a config, checked; the rest is one step per module.

lengths (token counts), trace_files and replay (traces), outline and requests (frozen request sets), arrivals (loads),
corpus (the text of prompts). What other parts of sweep need of them can be imported from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sweep.errors import ConfigError, did_you_mean, require
from sweep.measure.arrivals import Load, build_ladder
from sweep.measure.cache_state import STATES as CACHE_STATES
from sweep.measure.client_mixture import ClientMixture
from sweep.measure.corpus import UNIQUE_TOKENS, TokenArray, bos_token_id, corpus_text, tokenize_corpus
from sweep.measure.draws import HELD_OUT_DRAW
from sweep.measure.lengths import IntArray, LengthDistribution
from sweep.measure.replay import TraceReplay
from sweep.measure.requests import Request, RequestSet, build_requests

__all__ = [
    "HELD_OUT_DRAW", "UNIQUE_TOKENS", "Conversation", "IntArray", "LengthDistribution", "Load", "Request",
    "RequestClass", "RequestSet", "TokenArray", "TraceReplay", "WorkloadSpec", "bos_token_id", "build_requests",
    "corpus_text", "tokenize_corpus",
]  # fmt: skip

TEXTS = ("corpus", "random")
_SLOS = ("slo_ttft_ms", "slo_tpot_ms", "slo_e2e_ms")
# What a class takes from the workload where it says nothing itself. SLOs it does not: a tier has its own or none.
_INHERITED = ("prompt_tokens", "output_tokens", "shared_prefix_tokens", "num_shared_prefixes", "temperature")


@dataclass(frozen=True)
class RequestClass:
    """Requests with an SLO of their own. share: of the requests, relative to the other classes' shares.

    A class without any SLO meets it always. Where a trace names the classes of its rows, shares are not used.
    """

    name: str
    prompt_tokens: LengthDistribution
    output_tokens: LengthDistribution
    share: float = 1.0
    shared_prefix_tokens: int = 0
    num_shared_prefixes: int = 1
    temperature: float = 0.0
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    slo_e2e_ms: float | None = None

    @property
    def has_slo(self) -> bool:
        return any(getattr(self, name) is not None for name in _SLOS)


@dataclass(frozen=True)
class Conversation:
    """Multi-turn: a turn's prompt is everything said before and prompt_tokens more; its answer has output_tokens.

    What was said before is frozen like everything else: the answers in it are text of the corpus, not what the model
    answered, so a prefix cache finds the earlier prompt again, not the earlier answer. turns: of one conversation.
    max_tokens: it ends before prompt and answer exceed this. at_once: conversations under way at any time; None is the
    busiest concurrency of the ladder. Turns of a conversation stay in order: none is sent before the last one ended.
    """

    turns: LengthDistribution
    max_tokens: int
    at_once: int | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Conversation | None:
        """None for conversations of one turn, which are requests."""
        _check_names(data, cls, "workload.conversation")
        turns = LengthDistribution.from_dict(data.get("turns") or {"value": 1}, "workload.conversation.turns")
        turns.validate("workload.conversation.turns")
        if turns.kind == "fixed" and turns.value == 1:
            return None
        require(turns.kind != "trace", "workload.conversation.turns.kind", turns.kind, "a trace has its own turns")
        limit = data.get("max_tokens")
        if limit is None:
            raise ConfigError(
                "workload.conversation.max_tokens is not set",
                "set it to the longest prompt and answer of a conversation, at most the model's context",
            )
        return cls(turns, limit, data.get("at_once"))


@dataclass(frozen=True)
class WorkloadSpec:
    """What the clients ask. prompt_tokens is each request's own text; shared_prefix_tokens come on top of it.

    ignore_eos: answers have exactly the drawn length, so that every configuration does the same work; False lets the
    model stop by itself, and the drawn length is the most it may say. max_load_s bounds one load, warm-up included;
    request_timeout_s one request. SLOs are per request and define goodput; with classes, each class has its own.
    cache: the state in which a load finds the prefix cache, see measure.cache_state. text: "corpus", or "random" for
    its tokens in random order, whose draft acceptance means nothing.
    client_processes: that share each load; None is one, or more where one cannot deliver it (measure/fleet.py).
    """

    name: str
    prompt_tokens: LengthDistribution
    output_tokens: LengthDistribution
    temperature: float = 0.0
    num_requests: int = 200
    warmup_requests: int = 8
    max_load_s: float = 300.0
    loads: tuple[Load, ...] = ()
    seed: int = 0
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    request_timeout_s: float = 300.0
    shared_prefix_tokens: int = 0
    num_shared_prefixes: int = 1
    slo_e2e_ms: float | None = None
    ignore_eos: bool = True
    classes: tuple[RequestClass, ...] = ()
    conversation: Conversation | None = None
    trace: TraceReplay | None = None
    cache: str = "warmed"
    text: str = "corpus"
    client_processes: int | None = None

    def __post_init__(self) -> None:
        at_least = {"num_requests": 1, "warmup_requests": 0, "seed": 0, "temperature": 0, "shared_prefix_tokens": 0,
                    "num_shared_prefixes": 1}  # fmt: skip
        for name, least in at_least.items():
            require(getattr(self, name) >= least, f"workload.{name}", getattr(self, name), f"give {least} or more")
        for name in ("max_load_s", "request_timeout_s", *_SLOS):
            value = getattr(self, name)
            require(value is None or value > 0, f"workload.{name}", value, "give a number above 0")
        require(self.text in TEXTS, "workload.text", self.text, f"choose {' or '.join(TEXTS)}")
        require(
            self.client_processes is None or self.client_processes >= 1,
            "workload.client_processes", self.client_processes, "give null or at least 1",
        )  # fmt: skip
        require(self.cache in CACHE_STATES, "workload.cache", self.cache, f"choose {', '.join(CACHE_STATES)}")
        for request_class in self.request_classes:
            where = f"workload.classes.{request_class.name}" if self.classes else "workload"
            self._check_class(request_class, where)
        if self.trace is not None:
            self._check_trace(self.trace)
        if self.conversation is not None:
            self._check_conversation(self.conversation)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WorkloadSpec:
        """From the workload group of a config: {"prompt_tokens": {"kind": …}, "loads": {"concurrency": […]}, …}.

        Reads the trace, if there is one. Raises ConfigError naming the field, its value and the fix.
        """
        _check_names(data, cls, "workload")
        values = dict(data)
        for name in ("name", "prompt_tokens", "output_tokens"):
            if name not in values:
                raise ConfigError(f"workload.{name} is not set", f"set workload.{name}=…")
        try:
            values["trace"] = trace = TraceReplay.from_dict(values.get("trace") or {})
            for name in ("prompt_tokens", "output_tokens"):
                values[name] = _lengths(values[name], f"workload.{name}", trace)
            values["conversation"] = Conversation.from_dict(values.get("conversation") or {})
            values["loads"] = build_ladder(values.get("loads") or {}, None if trace is None else trace.rate_rps)
            given = values.pop("classes", None) or {}
            plain = cls(**values) if not given else None
            classes = tuple(_class(name, entry, values, trace) for name, entry in given.items())
            return plain or cls(**values, classes=classes)
        except TypeError as error:  # a comparison of a wrong type: JSON edited by hand
            raise ConfigError(f"workload '{values['name']}' has a value of a wrong type ({error})") from error

    @property
    def request_classes(self) -> tuple[RequestClass, ...]:
        """The classes, or one without a name that has everything of the workload."""
        own = {name: getattr(self, name) for name in (*_INHERITED, *_SLOS)}
        return self.classes or (RequestClass("", **own),)

    @property
    def busiest_concurrency(self) -> int:
        return max((load.concurrency or 0 for load in self.loads), default=0)

    @property
    def conversations_at_once(self) -> int:
        assert self.conversation is not None
        return self.conversation.at_once or self.busiest_concurrency or 16

    @property
    def longest_request_tokens(self) -> int | None:
        """Prompt and answer of the longest possible request; None if nothing bounds it."""
        if self.conversation is not None:
            return self.conversation.max_tokens
        if self.trace is not None and getattr(self.trace.source, "prompts", None) is not None:
            return None
        longest = [
            c.shared_prefix_tokens + prompt + output
            for c in self.request_classes
            if (prompt := c.prompt_tokens.longest) is not None and (output := c.output_tokens.longest) is not None
        ]
        return max(longest) if len(longest) == len(self.request_classes) else None

    def with_fixed_lengths(self, prompt_tokens: int, output_tokens: int) -> WorkloadSpec:
        """The same loads on independent requests that are all alike, as other load generators send them."""
        prompt, output = (LengthDistribution(value=tokens) for tokens in (prompt_tokens, output_tokens))
        return replace(self, prompt_tokens=prompt, output_tokens=output, shared_prefix_tokens=0, classes=(),
                       conversation=None, trace=None)  # fmt: skip

    def _check_class(self, request_class: RequestClass, where: str) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            lengths: LengthDistribution = getattr(request_class, name)
            lengths.validate(f"{where}.{name}")
            if lengths.kind == "trace" and self.trace is None:
                raise ConfigError(f"{where}.{name}.kind=trace without a trace", "set workload.trace.file=…")
        for name in ("share", *_SLOS):
            value = getattr(request_class, name)
            require(value is None or value > 0, f"{where}.{name}", value, "give a number above 0")

    def _check_trace(self, trace: TraceReplay) -> None:
        source = trace.source
        if isinstance(source, ClientMixture):
            names = {client.class_name for client in source.clients} - {None}
        else:
            names = set(source.classes or ())
            own_prompts = [c.prompt_tokens.kind == "trace" for c in self.request_classes]
            if (source.blocks is not None or source.prompts is not None) and any(own_prompts):
                if self.cache == "steady":
                    raise ConfigError(
                        f"workload.cache=steady with the prompts of workload.trace.file={trace.file}",
                        "keep workload.cache=warmed and raise workload.warmup_requests: the rows before the measured"
                        " ones fill the cache as they did then",
                    )
                what = f"workload.trace.file={trace.file} has prompts of its own"
                if not all(own_prompts):
                    raise ConfigError(f"{what}; some classes have other prompt_tokens", "remove those of the classes")
                if any(c.shared_prefix_tokens for c in self.request_classes):
                    raise ConfigError(f"{what} and shared_prefix_tokens > 0", "set workload.shared_prefix_tokens=0")
        known = [c.name for c in self.classes]
        if known and (unknown := sorted(map(str, names - set(known)))):
            raise ConfigError(
                f"workload.classes lacks '{unknown[0]}', a class of workload.trace.file={trace.file}",
                f"add workload.classes.{unknown[0]}; there are {', '.join(known)}",
            )

    def _check_conversation(self, conversation: Conversation) -> None:
        if self.trace is not None:
            raise ConfigError("workload.conversation and workload.trace.file", "use one: a trace has its own turns")
        at_once, busiest = conversation.at_once, self.busiest_concurrency
        if at_once is not None and at_once < max(busiest, 1):
            raise ConfigError(
                f"workload.conversation.at_once={at_once} cannot keep {busiest} requests in flight",
                f"give at least {max(busiest, 1)}, the highest of workload.loads.concurrency",
            )
        for c in self.request_classes:
            prompt, output = c.prompt_tokens.longest or 0, c.output_tokens.longest or 0
            if c.shared_prefix_tokens + prompt + output > conversation.max_tokens:
                raise ConfigError(
                    f"workload.conversation.max_tokens={conversation.max_tokens} is less than one turn",
                    f"give more than {c.shared_prefix_tokens} + {prompt} + {output}"
                    " (shared prefix, longest prompt, longest answer), or lower those",
                )


def _lengths(data: Mapping[str, Any], field: str, trace: TraceReplay | None) -> LengthDistribution:
    """A length distribution; one that is the trace's gets the trace's lengths as its values."""
    lengths = LengthDistribution.from_dict(data, field)
    if lengths.kind != "trace" or trace is None:
        return lengths
    known = trace.lengths(field.rpartition(".")[2])
    if known is None:
        raise ConfigError(
            f"{field}.kind=trace, and workload.trace.file={trace.file} has no such lengths",
            f"give {field} a distribution of its own",
        )
    return lengths.of_trace(known)


def _class(name: str, data: Mapping[str, Any], workload: Mapping[str, Any], trace: TraceReplay | None) -> RequestClass:
    field = f"workload.classes.{name}"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(f"workload.classes.{name} is not a name", "use lower-case letters, digits and '_'")
    _check_names(data, RequestClass, field, hidden=("name",))
    for slo in _SLOS:
        if workload.get(slo) is not None:
            raise ConfigError(f"workload.{slo}={workload[slo]} beside workload.classes", f"set {field}.{slo} instead")
    values: dict[str, Any] = {k: v for k, v in data.items() if v is not None}
    for key in ("prompt_tokens", "output_tokens"):
        if key in values:
            values[key] = _lengths(values[key], f"{field}.{key}", trace)
    defaults = {f.name: f.default for f in fields(WorkloadSpec)}
    inherited = {key: workload.get(key, defaults[key]) for key in _INHERITED if key not in values}
    return RequestClass(name, **{**inherited, **values})


def _check_names(data: Mapping[str, Any], cls: type, field: str, hidden: tuple[str, ...] = ()) -> None:
    known = [f.name for f in fields(cls) if f.name not in hidden]
    for name in data:
        if name not in known:
            raise ConfigError(f"{field}.{name} is unknown", did_you_mean(name, known))
