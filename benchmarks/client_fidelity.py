"""How true the load client's numbers are, against a server that knows when it sent each token.

    python benchmarks/client_fidelity.py [--json OUT] [--tokenizer DIR] [--guidellm PYTHON] [--small] [--ours]

The server is benchmarks/exact_server.c: tokens on an exact schedule, and a record of when each was really sent, in the
same clock the client uses. An error is what a tool reported minus what the server recorded, so a server that was itself
late is not held against the client. Compared are our client, where the system lets it run ahead of ordinary processes
and where it does not ("no priority"); `vllm bench serve` of this environment; and GuideLLM of an environment of its own
(made in a temporary folder unless --guidellm names its interpreter). The last two need --tokenizer, the folder of any
tokenizer. A tool that cannot run is listed with the reason. Sizes are for two cores and about ten minutes; --small
takes a minute or two, --ours leaves the other tools out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from exact_server import ExactServer, Sent
from rich.console import Console
from rich.table import Table

from sweep.engine.failures import LaunchFailure
from sweep.measure.arrivals import Load
from sweep.measure.client import Job
from sweep.measure.fleet import run_clients
from sweep.measure.latency import Run, percentile, summarize
from sweep.measure.requests import RequestSet
from sweep.measure.vllm_bench import run_vllm_bench
from sweep.measure.workload import LengthDistribution, WorkloadSpec

MODEL = "exact"
OURS, NO_PRIORITY = "sweep", "sweep, no priority"
HONEST_TTFT_P99_MS, HONEST_LATE_SHARE = 5.0, 0.01  # of an open loop, beyond which it is not honest


@dataclass(frozen=True)
class Scenario:
    """A load on an exact server. libraries: whether the other tools run it too."""

    name: str
    load: Load
    requests: int
    first_ms: float = 50.0
    gap_ms: float = 10.0
    tokens_per_chunk: int = 1
    early_chunk: bool = False
    prompt_tokens: int = 64
    output_tokens: int = 64
    processes: int = 1
    libraries: bool = False

    @property
    def per_token_ms(self) -> float:
        return self.gap_ms / self.tokens_per_chunk

    def server(self) -> ExactServer:
        return ExactServer(self.first_ms, self.gap_ms, self.tokens_per_chunk, self.early_chunk)


@dataclass(frozen=True)
class Row:
    """One tool in one scenario. *_error: reported minus the server's own record; *_off: as a share of it.

    ttft_request_p99_error_ms: p99 of the errors of single requests, which only our client can be asked for.
    cpu_us_per_token: of the whole process, its start included; load_cpu_us_per_token: while the load ran. startup_s:
    from starting the tool to its first request's arrival. beyond_limit: an open loop that is too much for the client.
    """

    scenario: str
    tool: str
    requests: int
    ttft_p50_ms: float | None = None
    ttft_p50_error_ms: float | None = None
    ttft_p99_error_ms: float | None = None
    ttft_request_p99_error_ms: float | None = None
    itl_mean_ms: float | None = None
    itl_off: float | None = None
    tpot_off: float | None = None
    cpu_us_per_token: float | None = None
    load_cpu_us_per_token: float | None = None
    startup_s: float | None = None
    health: dict[str, Any] | None = None
    beyond_limit: bool = False
    unavailable: str | None = None


# Title, field of a Row or of a client's summary, digits, scale.
COLUMNS = (
    ("TTFT p50 ms", "ttft_p50_ms", 2, 1.0),
    ("p50 error", "ttft_p50_error_ms", 2, 1.0),
    ("p99 error", "ttft_p99_error_ms", 2, 1.0),
    ("ITL mean ms", "itl_mean_ms", 3, 1.0),
    ("ITL off %", "itl_off", 3, 100.0),
    ("TPOT off %", "tpot_off", 3, 100.0),
    ("µs/token", "cpu_us_per_token", 0, 1.0),
    ("in load", "load_cpu_us_per_token", 0, 1.0),
    ("CPU share", "client_cpu_share", 2, 1.0),
    ("start s", "startup_s", 1, 1.0),
    ("lag p99 ms", "loop_lag_p99_ms", 2, 1.0),
    ("late sends %", "late_send_share", 1, 100.0),
)


def closed_loops(small: bool) -> list[Scenario]:
    n = {1: 8, 32: 128, 256: 512} if small else {1: 20, 32: 320, 256: 1024}
    loops = [Scenario(f"{c} at a time", Load(c), n[c], libraries=True) for c in n]
    chunks = Scenario(
        "32, 4-token chunks, early role", Load(32), n[32], gap_ms=40.0, tokens_per_chunk=4, early_chunk=True,
        libraries=True,
    )  # fmt: skip
    long = Scenario("8, contexts of 50k", Load(8), 16 if small else 104, prompt_tokens=50_000)
    return [*loops, chunks, long]


def open_loops(small: bool) -> list[Scenario]:
    rates = (40, 300) if small else (40, 150, 300, 600, 900, 1200, 1600)
    return [Scenario(f"{rate} requests/s", Load(None, rate), max(200, 2 * rate)) for rate in rates]


def request_set(scenario: Scenario) -> RequestSet:
    """Requests whose first token id is their number, so that the server's record names them."""
    warmup = max(scenario.load.concurrency or 0, 2 * int(scenario.load.request_rate_rps or 0), 8)
    total = scenario.requests + warmup
    prompts = np.random.default_rng(0).integers(100, 40_000, (total, scenario.prompt_tokens), dtype=np.int32)
    prompts[:, 0] = np.arange(total)
    starts = np.arange(total + 1, dtype=np.int64) * scenario.prompt_tokens
    return RequestSet(prompts.reshape(-1), starts, np.full(total, scenario.output_tokens), scenario.requests)


def ours(scenario: Scenario, python: str = sys.executable, tool: str = OURS) -> Row:
    requests = request_set(scenario)
    with scenario.server() as server, tempfile.TemporaryDirectory() as folder:
        requests.save(Path(folder) / "requests.npz")
        job = Job(
            server.base_url, MODEL, str(Path(folder) / "requests.npz"), scenario.load.to_dict(), temperature=0.0,
            num_requests=scenario.requests, warmup_requests=8, max_load_s=300.0, request_timeout_s=60.0, seed=1,
            out=str(Path(folder) / "out.parquet"),
        )  # fmt: skip
        cpu, began = children_cpu_s(), time.perf_counter()
        run_clients(job, processes=scenario.processes, python=python)
        cpu = children_cpu_s() - cpu
        table, health = pq.read_table(job.out), json.loads(Path(job.out).with_suffix(".json").read_text())
        record = dict(server.record())
    rows = [row for row in table.to_pylist() if row["phase"] == "measured"]
    if bad := next((row["error"] for row in rows if row["status"] != "ok"), None):
        raise RuntimeError(f"{scenario.name}: a request failed: {bad}")
    sent = [record[row["index"]] for row in rows]
    lengths = LengthDistribution(value=scenario.output_tokens)
    spec = WorkloadSpec("exact", LengthDistribution(value=scenario.prompt_tokens), lengths)
    reported = summarize(Run(table, health), health, spec)
    errors = [(row["first_token_s"] - row["sent_s"]) * 1e3 - of.ttft_ms for row, of in zip(rows, sent, strict=True)]
    tokens = scenario.output_tokens * table.num_rows
    row = compared(scenario, tool, reported, sent, cpu, began, min(of.arrived_s for of in record.values()), tokens)
    return replace(
        row,
        ttft_request_p99_error_ms=percentile(np.array(errors), 99),
        load_cpu_us_per_token=health["client_cpu_s"] / tokens * 1e6,
        health={name: value for name, value in health.items() if name not in ("schema", "load", "counts")},
    )


def ordinary_priority(scenario: Scenario) -> Row:
    """Our client where the system does not let it run ahead of other processes."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return Row(scenario.name, NO_PRIORITY, scenario.requests, unavailable="no `setpriv` (util-linux) on PATH")
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "python"
        python.write_text(f'#!/bin/sh\nexec {setpriv} --bounding-set=-sys_nice {sys.executable} "$@"\n')
        python.chmod(0o755)
        return ours(scenario, str(python), NO_PRIORITY)


def vllm_bench(scenario: Scenario, tokenizer: str) -> Row:
    assert scenario.load.concurrency is not None
    with scenario.server() as server:
        cpu, began = children_cpu_s(), time.perf_counter()
        try:
            reported = run_vllm_bench(
                server.base_url, MODEL, python=sys.executable, tokenizer=tokenizer,
                concurrency=scenario.load.concurrency, num_requests=scenario.requests,
                prompt_tokens=scenario.prompt_tokens, output_tokens=scenario.output_tokens,
            )  # fmt: skip
        except LaunchFailure as failure:
            return Row(scenario.name, "vllm bench serve", scenario.requests, unavailable=str(failure))
        cpu = children_cpu_s() - cpu
        sent = sorted((of for _, of in server.record()), key=lambda of: of.arrived_s)
    first, measured = sent[0].arrived_s, sent[-scenario.requests :]  # it tries one request before it begins
    tokens = scenario.output_tokens * len(sent)
    return compared(scenario, "vllm bench serve", reported, measured, cpu, began, first, tokens)


def guidellm(scenario: Scenario, tokenizer: str, python: str) -> Row:
    with scenario.server() as server, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [
            python, "-m", "guidellm", "run", "--disable-console",
            "--backend", f"kind=openai_http,target={server.base_url},model={MODEL},request_format=/v1/completions",
            "--profile", f"kind=concurrent,streams={scenario.load.concurrency}",
            "--constraint", f"kind=max_requests,count={scenario.requests}",
            "--tokenizer", f"kind=hf_auto,model={tokenizer}",
            "--data",
            f"kind=synthetic_text,prompt_tokens={scenario.prompt_tokens},output_tokens={scenario.output_tokens}",
            "--output", f"kind=json,path={out}",
        ]  # fmt: skip
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
        cpu, began = children_cpu_s(), time.perf_counter()
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
            metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
        except (OSError, subprocess.TimeoutExpired, KeyError, IndexError) as error:
            cause = error if isinstance(error, subprocess.TimeoutExpired) else last_line(done.stderr or done.stdout)
            return Row(scenario.name, "GuideLLM", scenario.requests, unavailable=str(cause))
        cpu = children_cpu_s() - cpu
        sent = sorted((of for _, of in server.record()), key=lambda of: of.arrived_s)
    ttft, itl = (metrics[name]["successful"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
    reported = {
        "ttft_p50_ms": ttft["median"],
        "ttft_p99_ms": ttft["percentiles"]["p99"],
        "itl_mean_ms": itl["mean"],
        "tpot_mean_ms": None,  # its time per output token is the whole answer's over its tokens
    }
    tokens = scenario.output_tokens * len(sent)
    return compared(scenario, "GuideLLM", reported, sent, cpu, began, sent[0].arrived_s, tokens)


def compared(
    scenario: Scenario,
    tool: str,
    reported: dict[str, float | None],
    sent: list[Sent],
    cpu_s: float,
    began: float,
    first_arrived_s: float,
    tokens: int,
) -> Row:
    """What a tool reported beside the record of the requests it measured. cpu_s, tokens: of all requests it sent."""
    ttft = np.array([of.ttft_ms for of in sent])
    per_token = float(np.mean([of.per_token_ms(scenario.output_tokens) for of in sent]))
    p99 = percentile(ttft, 99)  # None where the requests are too few for one, whatever the tool printed
    return Row(
        scenario.name,
        tool,
        len(sent),
        ttft_p50_ms=reported["ttft_p50_ms"],
        ttft_p50_error_ms=minus(reported["ttft_p50_ms"], percentile(ttft, 50)),
        ttft_p99_error_ms=minus(reported["ttft_p99_ms"], p99),
        itl_mean_ms=reported["itl_mean_ms"],
        itl_off=off(reported["itl_mean_ms"], per_token),
        tpot_off=off(reported["tpot_mean_ms"], per_token),
        cpu_us_per_token=cpu_s / tokens * 1e6,
        startup_s=first_arrived_s - began,
    )


def minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def off(reported: float | None, true: float) -> float | None:
    return None if reported is None else reported / true - 1


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1][:300]


def make_guidellm(folder: Path) -> str:
    """An interpreter that holds GuideLLM, in an environment of its own. Raises RuntimeError with pip's last words."""
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    packages = ["guidellm>=0.8"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # The torch this environment has: on a machine without a GPU that saves 5 GB.
        packages.append(f"torch=={importlib.metadata.version('torch')}")
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *packages], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"pip could not install GuideLLM: {last_line(done.stderr)}")
    return str(python)


def libraries(args: argparse.Namespace, folder: Path) -> dict[str, Callable[[Scenario], Row]]:
    """The other tools by name, each a function of a scenario."""
    if args.ours:
        return {}
    if args.tokenizer is None:
        cause = "it needs a tokenizer: --tokenizer DIR"
        names = ("vllm bench serve", "GuideLLM")
        return {name: lambda s, name=name: Row(s.name, name, s.requests, unavailable=cause) for name in names}  # type: ignore[misc]
    found: dict[str, Callable[[Scenario], Row]] = {"vllm bench serve": lambda s: vllm_bench(s, args.tokenizer)}
    try:
        python = args.guidellm or make_guidellm(folder)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        cause = str(error)
        return found | {"GuideLLM": lambda s: Row(s.name, "GuideLLM", s.requests, unavailable=cause)}
    return found | {"GuideLLM": lambda s: guidellm(s, args.tokenizer, python)}


def honest(row: Row) -> bool:
    """Whether an open loop was delivered, on time, and its latencies are the server's."""
    assert row.health is not None and row.ttft_p99_error_ms is not None
    delivered = row.health["delivered_rps"] >= 0.95 * row.health["offered_rps"]
    late = row.health["late_send_share"] > HONEST_LATE_SHARE
    return delivered and not late and abs(row.ttft_p99_error_ms) <= HONEST_TTFT_P99_MS


@dataclass(frozen=True)
class Target:
    """found is None where it could not be measured."""

    what: str
    limit: float
    found: float | None

    @property
    def verdict(self) -> str:
        return "not measured" if self.found is None else "met" if self.found <= self.limit else "missed"


def targets(rows: list[Row]) -> list[Target]:
    mine = {row.scenario: row for row in rows if row.tool == OURS and not row.beyond_limit}
    found = [
        Target(f"TTFT p50 error at {c} at a time (ms)", limit, mine[f"{c} at a time"].ttft_p50_error_ms)
        for c, limit in ((32, 2.0), (256, 25.0))
    ]
    for c in (32, 256):
        name = f"{c} at a time"
        others = [
            abs(row.ttft_p99_error_ms)
            for row in rows
            if row.scenario == name and row.tool not in (OURS, NO_PRIORITY) and row.ttft_p99_error_ms is not None
        ]
        for own in (row for row in rows if row.scenario == name and row.tool in (OURS, NO_PRIORITY)):
            share = abs(own.ttft_p99_error_ms) / min(others) if others and own.ttft_p99_error_ms is not None else None
            found.append(Target(f"{own.tool}: TTFT p99 error at {name}, as a share of the best library's", 0.5, share))
    offs = [abs(x) for row in mine.values() for x in (row.itl_off, row.tpot_off) if x is not None]
    found.append(Target("per-token time off by, the worst of all loads (%)", 0.5, max(offs) * 100))
    return found


def show(rows: list[Row], checked: list[Target], honest_rps: float | None) -> None:
    console = Console(width=190)
    table = Table(title="Reported against the server's own record")
    for name in ("load", "tool"):
        table.add_column(name, no_wrap=True)
    for name in ("n", *(title for title, *_ in COLUMNS)):
        table.add_column(name, justify="right")
    for row in rows:
        if row.unavailable:
            console.print(f"{row.scenario}, {row.tool}: unavailable: {row.unavailable}")
        values = asdict(row) | (row.health or {})
        cells = [text(values.get(field), digits, scale) for _, field, digits, scale in COLUMNS]
        table.add_row(row.scenario + " (too much)" * row.beyond_limit, row.tool, str(row.requests), *cells)
    console.print(table)
    console.print(f"highest rate one client process delivered honestly: {text(honest_rps, 0)} requests/s of 64 tokens")
    for target in checked:
        console.print(f"{target.verdict:>12}  {target.what}: {text(target.found, 3)} (limit {target.limit:g})")


def text(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "–" if value is None else f"{value * scale:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokenizer")
    parser.add_argument("--guidellm", help="an interpreter that holds GuideLLM")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--ours", action="store_true", help="leave the other tools out")
    args = parser.parse_args()
    load_average = [os.getloadavg()]
    rows: list[Row] = []

    def keep(row: Row) -> Row:
        rows.append(row)
        print(f"{row.tool}: {row.scenario}: TTFT p50 error {text(row.ttft_p50_error_ms, 2)} ms", file=sys.stderr)
        return row

    with tempfile.TemporaryDirectory() as folder:
        others = libraries(args, Path(folder))
        for scenario in closed_loops(args.small):
            keep(ours(scenario))
            if scenario.load.concurrency in (32, 256) and scenario.tokens_per_chunk == 1:
                keep(ordinary_priority(scenario))
            for run in others.values() if scenario.libraries else ():
                keep(run(scenario))
    honest_rps = None
    for scenario in open_loops(args.small):
        row = ours(scenario)
        if not honest(row):
            keep(replace(row, beyond_limit=True))
            shared = ours(replace(scenario, name=f"{scenario.name}, 2 processes", processes=2))
            keep(replace(shared, beyond_limit=not honest(shared)))
            break
        keep(row)
        honest_rps = scenario.load.request_rate_rps
    load_average.append(os.getloadavg())
    checked = targets(rows)
    show(rows, checked, honest_rps)
    if args.json:
        result = {
            "cores": len(os.sched_getaffinity(0)),
            "load_average_before_and_after": load_average,
            "honest_open_loop_rps": honest_rps,
            "rows": [asdict(row) for row in rows],
            "targets": [asdict(target) | {"verdict": target.verdict} for target in checked],
        }
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
