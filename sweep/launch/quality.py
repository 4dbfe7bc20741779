"""The quality station of a launch: what a running engine is asked, and where the answers go.

Answers about a numerics fingerprint lie in the study's quality/ folder and in the cache that all studies share; the
study compares them with the reference's (study.quality_book). Two checks are about one configuration and judged here:
whether its speculation is lossless, and whether it answers under load as it does alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sweep.engine.failures import LaunchFailure
from sweep.engine.server import Server
from sweep.launch.spec import CONTROL, QUALITY_DIR, REPEAT, TASKS, LaunchSpec, answers_path, logprobs_path
from sweep.measure.quality import (
    QualitySpec,
    cache_path,
    load_logprobs,
    measure_logprobs,
    quality_prompts,
    save_logprobs,
)
from sweep.measure.quality.cache import whole_file
from sweep.measure.quality.completions import GreedyCheck, check_greedy
from sweep.measure.quality.tasks import TaskSpec, ask_tasks, load_answers, save_answers, save_failure
from sweep.measure.quality.under_load import measure_under_load
from sweep.measure.workload import Load, RequestSet, bos_token_id
from sweep.results.records import QualityRecord

if TYPE_CHECKING:
    from sweep.launch.launch import EventSink

Corpus = np.ndarray[Any, np.dtype[np.int64]]

# Greedy completions: how many, how long, after how much text. Enough for some hundred tokens to be judged.
GREEDY_PROMPTS = 8
GREEDY_TOKENS = 32
GREEDY_PROMPT_TOKENS = 64


def measure_quality(spec: LaunchSpec, server: Server, corpus: Corpus, events: EventSink) -> LaunchFailure | None:
    """The quality runs asked for, into the study folder. Returns a failure only if it left the server dead."""
    for run in spec.quality_runs:
        events.write("phase", phase=f"quality {run}".strip())
        target = answers_path if run == TASKS else logprobs_path
        try:
            cached = _cached_answers(spec, server) if run == TASKS else _cached_logprobs(spec, server, corpus, run)
        except LaunchFailure as failure:
            death = server.died()
            found = death or failure
            events.write("quality_failed", run=run, cause=found.cause.value, detail=found.detail)
            if run == TASKS:  # asked once: what it says of the tasks is no reason to start an engine again
                save_failure(answers_path(Path(spec.study_dir), spec.engine_config.fingerprint), str(found))
            if death is not None or run != TASKS:
                return death
            continue
        _copy(cached, target(Path(spec.study_dir), spec.engine_config.fingerprint, run), spec)
    events.write("quality")
    return None


def _copy(source: Path, target: Path, spec: LaunchSpec) -> None:
    target.parent.mkdir(exist_ok=True)
    temporary = target.with_suffix(f".{spec.launch_id}.tmp")  # no name that a reader of *.npz would take up
    shutil.copyfile(source, temporary)
    temporary.replace(target)


def quality_spec(quality: Mapping[str, Any]) -> QualitySpec:
    """The part of the quality settings that scoring text needs."""
    return QualitySpec(**{f.name: quality[f.name] for f in fields(QualitySpec) if f.name in quality})


def task_spec(quality: Mapping[str, Any]) -> TaskSpec:
    """The part of the quality settings that lm-eval needs."""
    return TaskSpec(
        tasks=tuple(quality["tasks"]),
        task_dir=quality["task_dir"],
        limit=quality["task_limit"],
        metric=quality["task_metric"],
        python=quality["python"],
        concurrency=quality["concurrency"],
        timeout_s=quality["task_timeout_s"],
    )


def _prompts(spec: LaunchSpec, server: Server, corpus: Corpus) -> list[list[int]]:
    bos = bos_token_id(server.base_url, server.served_model)
    return quality_prompts(corpus, quality_spec(spec.quality), bos_token_id=bos)


def _cached_logprobs(spec: LaunchSpec, server: Server, corpus: Corpus, run: str) -> Path:
    """Log-probabilities of this engine in the cache that all studies share; measured now if they are not there."""
    engine, asked = spec.engine_config, quality_spec(spec.quality)
    asked = replace(asked, concurrency=1) if run == REPEAT else asked
    prompts = _prompts(spec, server, corpus)
    names = {"": engine.fingerprint, CONTROL: f"{engine.hash}-{run}"}
    path = _cache_path(spec, server, [prompts, asked.top_logprobs], names.get(run, f"{engine.fingerprint}-{run}"))
    if load_logprobs(path) is None:
        server.reset_prefix_cache()
        save_logprobs(path, measure_logprobs(server.base_url, server.served_model, prompts, asked))
    return path


def _cached_answers(spec: LaunchSpec, server: Server) -> Path:
    """Item results of the tasks in the cache that all studies share; asked now if they are not there."""
    engine, asked = spec.engine_config, task_spec(spec.quality)
    path = _cache_path(spec, server, asked.question(), engine.fingerprint, suffix=".json")
    if load_answers(path) is None:
        tokenizer = str(engine.args.get("tokenizer") or engine.model)
        save_answers(path, ask_tasks(server.base_url, server.served_model, tokenizer, asked))
    return path


def _cache_path(spec: LaunchSpec, server: Server, question: Any, fingerprint: str, suffix: str = ".npz") -> Path:
    return cache_path(
        question,
        model=spec.engine_config.model,
        fingerprint=fingerprint,
        engine_version=server.vllm_version or "unknown",
        device=spec.device_name,
        suffix=suffix,
    )


def verified_speculation(spec: LaunchSpec, server: Server, corpus: Corpus, events: EventSink) -> LaunchSpec:
    """The spec to record points with: the same if its speculation changes no token, one with numerics of its own if so.

    A speculation that was caught, or could not be checked, has a quality that no scored prompt can show: a failed
    QualityRecord says so. What the check found is a fact of the study, made once for a configuration.
    """
    simulated = spec.provenance != "measured"  # it makes up tokens: there is nothing to verify
    if simulated or not (spec.quality["enabled"] and spec.engine_config.claims_exact_speculation):
        return spec
    distinct = replace(spec, distinct_numerics=True)
    if not spec.quality["verify_speculation"]:
        events.record(_no_quality(distinct, "speculation_not_verified", "quality.verify_speculation is false"))
        return distinct
    events.write("phase", phase="quality: is speculation lossless")
    try:
        check = _speculation_check(spec, server, corpus)
    except LaunchFailure as failure:
        events.record(_no_quality(distinct, "speculation_not_verified", str(failure)))
        return distinct
    events.write("facts", facts={f"speculation.{spec.engine_config.hash}": check.to_dict()})
    if check.lossless:
        return spec
    detail = (
        f"of {check.completions} greedy completions {check.identical:.0%} are the target model's own; a token was"
        f" chosen that the target finds {check.largest_gap_nats:.2g} nats less likely than its best"
    )
    events.record(_no_quality(distinct, "speculation_not_lossless", detail))
    return distinct


def _speculation_check(spec: LaunchSpec, server: Server, corpus: Corpus) -> GreedyCheck:
    """What is known of this configuration in this study, or is found out now."""
    path = Path(spec.study_dir) / QUALITY_DIR / f"{spec.engine_config.hash}-speculation.json"
    if path.exists():
        return GreedyCheck.from_dict(json.loads(path.read_text()))
    prompts = [prompt[:GREEDY_PROMPT_TOKENS] for prompt in _prompts(spec, server, corpus)[:GREEDY_PROMPTS]]
    asked = quality_spec(spec.quality)
    check = check_greedy(server.base_url, server.served_model, prompts, asked, max_tokens=GREEDY_TOKENS)
    with whole_file(path) as f:
        f.write(json.dumps(check.to_dict()).encode())
    return check


def _no_quality(spec: LaunchSpec, cause: str, detail: str) -> QualityRecord:
    return QualityRecord(
        fingerprint=spec.fingerprint,
        reference_fingerprint=spec.engine_config.fingerprint,
        state="failed",
        metrics={},
        noise_floor_kl=None,
        positions=0,
        launch_id=spec.launch_id,
        finished_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        cause=cause,
        detail=detail,
    )


def check_under_load(
    spec: LaunchSpec, server: Server, corpus: Corpus, requests: RequestSet, load: Load, events: EventSink
) -> None:
    """Whether this engine answers among other requests as it does alone: a fact of the study, with its tolerance.

    Raises LaunchFailure if the server cannot answer.
    """
    if load.concurrency is None:
        raise ValueError(f"load {load.label} is no closed loop")
    events.write("phase", phase=f"quality under load {load.label}")
    found = measure_under_load(
        server.base_url,
        server.served_model,
        _prompts(spec, server, corpus)[:GREEDY_PROMPTS],
        quality_spec(spec.quality),
        requests,
        concurrency=load.concurrency,
        greedy_tokens=GREEDY_TOKENS,
        greedy_prompt_tokens=GREEDY_PROMPT_TOKENS,
        max_kl=spec.quality["under_load_max_kl"],
    )
    events.write("facts", facts={"quality_under_load": {"load": load.label, **found.to_dict()}})
