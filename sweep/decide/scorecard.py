"""The realism score card: the ways a serving benchmark misleads, and for each what this study did.

Every line asks one question and answers it from the study's own configuration and records. Verdicts: ok; warn, where a
reader should know; bad, where the front must not be read as production; "not applicable", where the question has no
object in this study. The thresholds are here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, Literal

from sweep.decide.opened import Study
from sweep.decide.wording import plural
from sweep.results.front import front
from sweep.results.points import OperatingPoint, settings
from sweep.results.records import LaunchRecord, PointRecord
from sweep.results.validation import validations

Verdict = Literal["ok", "warn", "bad", "not applicable"]

_LATENCY = ("ttft_", "itl_", "tpot_", "e2e_")
# So many requests beyond a percentile make it a number and not an anecdote; below 1 it is not printed at all.
_STEADY_TAIL = 10
# How often a value must have been launched before its place in the order says anything.
_FEW_LAUNCHES = 2


@dataclass(frozen=True)
class Line:
    """question: what a sceptic asks. answer: what this study did. evidence: the numbers or settings that show it."""

    question: str
    answer: str
    verdict: Verdict
    evidence: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def score_card(study: Study) -> list[Line]:
    """Every line of the card, in a fixed order."""
    facts = _Facts(study)
    return [check(facts) for check in _CHECKS]


def score_card_text(study: Study) -> str:
    """The card for a terminal."""
    lines = score_card(study)
    counts = ", ".join(f"{n} {verdict}" for verdict in ("ok", "warn", "bad", "not applicable")
                       if (n := sum(line.verdict == verdict for line in lines)))  # fmt: skip
    marks = {"ok": "ok", "warn": "WARN", "bad": "BAD", "not applicable": "-"}
    width = max(len(line.question) for line in lines)
    rows = [f"{marks[x.verdict]:<5} {x.question:<{width}}  {x.answer} ({x.evidence})" for x in lines]
    return "\n".join([f"realism of {study.name}: {counts}", *rows])


@dataclass(frozen=True)
class _Facts:
    """A study and what several questions ask of it."""

    study: Study

    @property
    def workload(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.study.config.get("workload", {})
        return found

    @property
    def classes(self) -> list[Mapping[str, Any]]:
        """The workload's request classes with what they inherit; the workload itself where it has none."""
        own = (self.workload.get("classes") or {}).values()
        return [{**self.workload, **{k: v for k, v in c.items() if v is not None}} for c in own] or [self.workload]

    @cached_property
    def measured(self) -> list[OperatingPoint]:
        return [p for p in self.study.operating_points if p.state == "measured"]

    @cached_property
    def on_front(self) -> list[OperatingPoint]:
        return front(self.study.operating_points, self.study.objectives) if self.study.objectives else []

    @cached_property
    def runs(self) -> list[PointRecord]:
        return [r for r in self.study.records if isinstance(r, PointRecord) and r.state == "measured"]

    @cached_property
    def launches(self) -> list[LaunchRecord]:
        return [r for r in self.study.records if isinstance(r, LaunchRecord)]

    @property
    def judged_metrics(self) -> list[str]:
        """Objectives, and what the study's own bounds are on."""
        bounds = (self.study.config.get("constraints") or {}).get("bounds") or []
        return [*self.study.objectives, *(str(bound) for bound in bounds)]

    def proven(self, *path: str) -> list[Any]:
        """One value of every measured run's proof, where it has one."""
        found = []
        for run in self.runs:
            value: Any = run.proof
            for key in path:
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None:
                found.append(value)
        return found


def _fixed_lengths(facts: _Facts) -> Line:
    question = "fixed lengths?"
    lengths = [c.get(name) or {} for c in facts.classes for name in ("prompt_tokens", "output_tokens")]
    kinds = {given.get("kind", "fixed") if isinstance(given, Mapping) else "fixed" for given in lengths}
    shown = ", ".join(sorted(kinds))
    if "fixed" not in kinds:
        return Line(question, "no, prompts and answers are drawn from distributions", "ok", f"kinds: {shown}")
    if kinds == {"fixed"}:
        return Line(question, "yes, every request is alike", "bad", "production mixes short and long; so do queues")
    return Line(question, "partly: some lengths are fixed", "warn", f"kinds: {shown}")


def _temperature(facts: _Facts) -> Line:
    question = "temperature 0 only?"
    found = sorted({float(c.get("temperature") or 0.0) for c in facts.classes})
    shown = f"temperatures: {', '.join(f'{t:g}' for t in found)}"
    if found == [0.0]:
        return Line(
            question, "yes, every answer is greedy; sampling costs time and lowers draft acceptance", "warn", shown
        )
    return Line(question, "no", "ok", shown)


def _warm_cache(facts: _Facts) -> Line:
    question = "warm cache only?"
    states = facts.proven("cache", "state")
    asked = str(facts.workload.get("cache", "warmed"))
    if not states:
        return Line(question, f"asked for: {asked}; what was done was not recorded", "warn", "no proof on its points")
    unknown = len(facts.proven("cache", "reset")) - sum(bool(x) for x in facts.proven("cache", "reset"))
    hits, shares = facts.proven("engine", "prefix_cache_hit_rate"), facts.proven("cache", "expected_hit_rate")
    seen = f"hit rate up to {max(hits):.0%}" if hits else "no hit rate told"
    evidence = f"{seen}, the requests share up to {max(shares, default=0.0):.0%}; {plural(len(states), 'load')}"
    if unknown:
        return Line(
            question, f"the server could not forget its cache before {plural(unknown, 'load')}", "bad", evidence
        )
    said = ", ".join(sorted(set(map(str, states))))
    if said == "steady":
        return Line(question, "yes: every load found the shared prefixes cached", "warn", evidence)
    return Line(question, f"no: emptied before every load, then {said}", "ok", evidence)


def _synthetic_text(facts: _Facts) -> Line:
    question = "synthetic text?"
    trace = (facts.workload.get("trace") or {}).get("file")
    if facts.workload.get("text", "corpus") == "random":
        return Line(
            question, "yes, tokens in random order", "bad", "draft acceptance and MoE routing mean nothing on it"
        )
    source = f"lengths and arrivals of trace {trace}" if trace else "lengths of workload.prompt_tokens"
    if facts.workload.get("ignore_eos", True):
        said = "real text; answers run to the drawn length whatever the model would say (ignore_eos)"
        return Line(question, said, "ok", source)
    return Line(question, "real text, and the model stops by itself", "ok", source)


def _arrivals(facts: _Facts) -> Line:
    """In a closed loop a slow server is asked less: the queue that real arrivals build up is never seen."""
    question = "closed loop only?"
    loads = facts.workload.get("loads") or {}
    open_loop = [f"{name}={loads[name]}" for name in ("request_rate_rps", "rate_scale") if loads.get(name)]
    closed = f"concurrency={loads.get('concurrency')}"
    if not open_loop:
        return Line(
            question, "yes: requests wait for answers, so no queue builds up as users would make it", "warn", closed
        )
    return Line(question, "no, requests arrive whether or not the server keeps up", "ok", ", ".join(open_loop))


def _tail(facts: _Facts) -> Line:
    question = "enough requests for the tail?"
    judged = facts.judged_metrics
    tail = max((p for p in (90, 99) if any(f"_p{p}_" in name for name in judged)), default=None)
    if tail is None:
        return Line(question, "no tail is judged", "not applicable", f"judged: {', '.join(judged) or 'nothing'}")
    counts = [p.metrics["requests_completed"] for p in facts.measured if "requests_completed" in p.metrics]
    if not counts:
        return Line(question, "nothing measured yet", "not applicable", f"p{tail}")
    beyond = min(counts) * (100 - tail) / 100
    evidence = f"at least {min(counts):g} requests a run: {beyond:.3g} beyond the p{tail}"
    if beyond < 1:
        return Line(question, f"no: a p{tail} is not printed from so few", "bad", evidence)
    if beyond < _STEADY_TAIL:
        wanted = _STEADY_TAIL * 100 // (100 - tail)
        return Line(question, f"barely: read its interval; {wanted} requests make it steady", "warn", evidence)
    return Line(question, "yes", "ok", evidence)


def _mean_only(facts: _Facts) -> Line:
    question = "latency by its mean only?"
    judged = [name for name in facts.judged_metrics if name.startswith(_LATENCY)]
    if not judged:
        return Line(question, "latency is not judged at all", "not applicable", "see the next line")
    shown = f"judged: {', '.join(judged)}"
    if all("_mean_" in name for name in judged):
        return Line(question, "yes: a mean hides what the slowest users get", "bad", shown)
    if not any("_p90_" in name or "_p99_" in name for name in judged):
        return Line(question, "no tail: half of the users are slower than a median", "warn", shown)
    return Line(question, "no", "ok", shown)


def _unusable_latency(facts: _Facts) -> Line:
    question = "throughput at an unusable latency?"
    judged = facts.judged_metrics
    latency = [n for n in judged if n.startswith((*_LATENCY, "goodput", "slo_attainment", "user_throughput"))]
    if latency:
        return Line(question, "no: latency is an objective or bounded", "ok", ", ".join(latency))
    return Line(question, "possible: nothing that is judged limits latency", "bad", ", ".join(judged) or "no objective")


def _dummy_weights(facts: _Facts) -> Line:
    question = "dummy weights?"
    dummy = [p for p in facts.measured if settings(p.engine).get("args.load_format") == "dummy"]
    simulated = [p for p in facts.measured if p.provenance != "measured"]
    if simulated:
        return Line(question, "no engine ran at all: a simulation", "bad", f"{plural(len(simulated), 'point')}")
    if dummy:
        return Line(question, "yes", "bad", f"load_format=dummy on {plural(len(dummy), 'point')}")
    model = (facts.study.config.get("model") or {}).get("name", "the model")
    return Line(question, "no, the checkpoint that would be served", "ok", str(model))


def _cold_start(facts: _Facts) -> Line:
    question = "cold start left out?"
    starts = [x.startup_s for x in facts.launches if x.startup_s is not None]
    first = [p.metrics["first_request_ms"] for p in facts.measured if "first_request_ms" in p.metrics]
    if not starts:
        return Line(question, "start-up was not measured", "warn", "no launch has a startup_s")
    evidence = f"start-up {min(starts):.0f} to {max(starts):.0f} s over {plural(len(starts), 'launch')}"
    if not first:
        return Line(question, "start-up measured, the first request after it not", "warn", evidence)
    return Line(
        question, "no: start-up and the first request are metrics", "ok",
        f"{evidence}; first request {min(first):.0f} to {max(first):.0f} ms",
    )  # fmt: skip


def _quality(facts: _Facts) -> Line:
    question = "quantization without quality?"
    baseline = {p.fingerprint for p in facts.measured if p.purpose == "baseline"}
    other = [p for p in facts.measured if p.fingerprint not in baseline]
    if not other:
        return Line(question, "nothing measured changes the numerics", "not applicable", "one numerics fingerprint")
    lacking = [p for p in other if not any(name.startswith("quality_") for name in p.metrics)]
    evidence = f"{plural(len({p.fingerprint for p in other}), 'fingerprint')} besides the reference"
    if lacking:
        return Line(question, f"yes: {plural(len(lacking), 'point')} without any quality", "bad", evidence)
    if not any("quality_" in name for name in facts.judged_metrics):
        return Line(question, "measured, but neither an objective nor bounded", "warn", evidence)
    return Line(question, "no: measured for each, and judged", "ok", evidence)


def _repeats(facts: _Facts) -> Line:
    question = "one lucky run?"
    if not facts.on_front:
        return Line(question, "there is no front yet", "not applicable", plural(len(facts.measured), "measured point"))
    once = sum(p.n_repeats < 2 for p in facts.on_front)
    evidence = f"{len(facts.on_front) - once} of {plural(len(facts.on_front), 'front point')} measured more than once"
    if once == 0:
        return Line(question, "no", "ok", evidence)
    everywhere = once == len(facts.on_front)
    return Line(question, "yes" if everywhere else "for some points", "bad" if everywhere else "warn", evidence)


def _validation(facts: _Facts) -> Line:
    question = "finalists validated on held-out requests?"
    found = validations(facts.study.records, facts.study.objectives)
    good = [v for v in found if v.state == "measured"]
    if not good:
        return Line(question, "no: the best of many noisy points looks better than it is", "bad", f"{len(found)} tried")
    worse = [by for v in good for name in v.held_out if (by := v.worse_by(name)) is not None]
    evidence = f"{plural(len(good), 'point')}; worst change {max(worse):+.1%}" if worse else plural(len(good), "point")
    return Line(question, "yes, launched fresh", "ok", evidence)


def _launch_order(facts: _Facts) -> Line:
    """A knob whose values were launched one block after the other cannot be told from a node that warms up."""
    question = "order of launches a knob's effect?"
    order = [x for x in facts.launches if x.state == "ok" and x.purpose in ("baseline", "trial")]
    if len(order) < 2 * _FEW_LAUNCHES:
        return Line(question, "too few launches to tell", "not applicable", plural(len(order), "launch"))
    rows = [settings(x.engine) for x in order]
    knobs = sorted({name for row in rows for name in row if len({str(r.get(name)) for r in rows}) > 1})
    blocked = [name.partition(".")[2] or name for name in knobs if _in_blocks([str(r.get(name)) for r in rows])]
    controls = sum(x.purpose == "baseline" for x in order)
    evidence = f"{plural(len(order), 'launch')}, vLLM's defaults {controls} times among them"
    if not blocked:
        return Line(question, "no: no knob's values were launched block by block", "ok", evidence)
    words = f"possible for {', '.join(blocked)}: launched block by block, so drift looks like the knob"
    return Line(question, words, "warn" if controls < _FEW_LAUNCHES else "ok", evidence)


def _in_blocks(values: list[str]) -> bool:
    """Whether two values that each came twice or more were tried one entirely before the other."""
    places: dict[str, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value, []).append(place)
    often = [p for p in places.values() if len(p) >= _FEW_LAUNCHES]
    return any(max(a) < min(b) or max(b) < min(a) for a, b in combinations(often, 2))


def _proofs(facts: _Facts) -> Line:
    question = "every point with its proof?"
    records = [r for r in facts.study.records if isinstance(r, PointRecord) and r.state != "failed"]
    if not records:
        return Line(question, "nothing measured yet", "not applicable", "no records")
    quarantined = [r for r in records if r.state == "quarantined"]
    without = [r for r in facts.runs if not r.proof]
    evidence = f"{plural(len(records), 'run')}: {len(quarantined)} quarantined, {len(without)} without evidence"
    if without:
        return Line(question, "no", "warn", evidence)
    if len(quarantined) > len(records) / 2:
        return Line(question, "most were quarantined: this set-up cannot measure what it is asked to", "bad", evidence)
    return Line(question, "yes; what failed it is not on the front", "ok", evidence)


_CHECKS: tuple[Callable[[_Facts], Line], ...] = (
    _fixed_lengths,
    _temperature,
    _synthetic_text,
    _arrivals,
    _warm_cache,
    _cold_start,
    _tail,
    _mean_only,
    _unusable_latency,
    _dummy_weights,
    _quality,
    _repeats,
    _validation,
    _launch_order,
    _proofs,
)
