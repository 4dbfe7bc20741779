"""Causes and evidence read from logs that vLLM 0.32 (CPU build) really wrote, one file per provoked failure.

logs/*.log: from the first sign of trouble to the end, long tracebacks thinned, folders of the machine replaced.
What needs a GPU could not be provoked: those lines are written by hand from the messages in the sources of vLLM and
PyTorch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sweep.engine.failures import FailureCause, Phase, classify

LOGS = Path(__file__).with_name("logs")
ENGINE_DEAD = (
    '{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.",'
    '"type":"InternalServerError","param":null,"code":500}}'
)
TOO_LONG = (
    '{"error":{"message":"This model\'s maximum context length is 4 tokens. However, your prompt contains 28 input '
    'tokens","type":"BadRequestError","param":"input_tokens","code":400}}'
)

# file, phase, exit code, answer, cause, beginning of the detail
PROVOKED: list[tuple[str, Phase, int | None, str | None, str, str]] = [
    ("unknown_flag", "startup", 2, None, "invalid_argument", "vllm: error: unrecognized arguments: --no-such-flag 1"),
    (
        "refused_choice", "startup", 2, None, "invalid_argument",
        "vllm serve: error: argument --kv-cache-dtype: invalid choice: 'int3' (choose from",
    ),
    (
        "bitsandbytes", "startup", 1, None, "invalid_argument",
        "1 validation error for ModelConfig: Unknown quantization method: bitsandbytes. Must be one of",
    ),
    (
        "unknown_speculation_key", "startup", 1, None, "invalid_argument",
        "1 validation error for SpeculativeConfig: bogus Unexpected keyword argument",
    ),
    (
        "fp8_without_kernel", "startup", 1, None, "unsupported",
        "RuntimeError: _C::static_scaled_fp8_quant() expected at most 0 argument(s) but received 4",
    ),
    ("no_cache_blocks", "startup", 1, None, "out_of_memory", "ValueError: No available memory for the cache blocks."),
    (
        "cache_larger_than_memory", "startup", 1, None, "out_of_memory",
        "ValueError: Available memory on node 0 (11.04/13.09 GiB) on kv cache allocation is less than requested",
    ),
    (
        "missing_model", "startup", 1, None, "model_not_found",
        "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/missing'",
    ),
    (
        "folder_without_model", "startup", 1, None, "model_not_found",
        "1 validation error for ModelConfig: Invalid repository ID or local directory specified: '/models/empty'",
    ),
    (
        "hub_unreachable", "startup", 1, None, "model_not_found",
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder",
    ),
    (
        "truncated_checkpoint", "startup", 1, None, "died_at_startup",
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata",
    ),
    ("port_taken", "startup", 1, None, "port_in_use", "OSError: [Errno 98] Address already in use"),
    ("segmentation_fault", "startup", 1, None, "died_at_startup", "!!!!!!! Segfault encountered !!!!!!!"),
    (
        "engine_killed_while_starting", "startup", 1, None, "died_at_startup",
        "RuntimeError: Engine core initialization failed.",
    ),
    (
        "pipeline_parallel", "first_request", 0, ENGINE_DEAD, "first_request_failed",
        "AssertionError: assert self.intermediate_tensors is not None",
    ),
    (
        "head_dim_16", "first_request", 0, ENGINE_DEAD, "first_request_failed",
        "RuntimeError: Unsupported CPU attention configuration: head_dim=16",
    ),
    (
        "prompt_too_long", "first_request", None, TOO_LONG, "first_request_failed",
        "This model's maximum context length is 4 tokens.",
    ),
    ("engine_killed", "load", 0, None, "engine_died", "[shutdown] MPClient: engine core exited unexpectedly"),
    ("worker_killed", "load", 0, None, "engine_died", "Worker proc VllmWorker-0 died unexpectedly"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "phase", "exit_code", "response", "cause", "detail"), PROVOKED, ids=[p[0] for p in PROVOKED]
)
def test_a_provoked_failure_is_named_and_shown(
    name: str, phase: Phase, exit_code: int | None, response: str | None, cause: str, detail: str
) -> None:
    log = (LOGS / f"{name}.log").read_text()
    found, evidence = classify(phase, exit_code, log, response)
    assert found is FailureCause(cause)
    assert evidence.startswith(detail)
    assert "\n" not in evidence and len(evidence) <= 300


def test_every_log_is_used() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == {p[0] for p in PROVOKED}


def test_a_log_cut_off_in_the_middle_still_gives_one_line_and_a_cause() -> None:
    """The tail of a log begins and ends anywhere."""
    for path in sorted(LOGS.glob("*.log")):
        log = path.read_text()
        for share in range(10):
            cut = log[len(log) * share // 10 :]
            cause, evidence = classify("startup", 1, cut, None)
            assert evidence and "\n" not in evidence, path.name
            assert cause is not FailureCause.unknown


# ---------------------------------------------------------------- by hand: what needs a GPU

WORKER = "(Worker_TP1 pid=4711) ERROR 12-01 03:36:14 [multiproc_executor.py:953] "
GPU_STARTUP = [
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of "
        "79.11 GiB of which 1.05 GiB is free. Process 4711 has 78.05 GiB memory in use.",
        "out_of_memory",
    ),
    (
        "ValueError: Free memory on device cuda:0 (8.2/79.1 GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 72.8 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "out_of_memory",
    ),
    (
        "ValueError: Free memory on device cuda:0 (8.2/79.1 GiB) on startup is less than the engine's budget after "
        "excluding external process's weights (0.92, 72.8 GiB).",
        "out_of_memory",
    ),
    (
        "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (310). Each decode request needs one.",
        "out_of_memory",
    ),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "unsupported"),
    (
        "ValueError: The quantization method fp8 is not supported for the current GPU. Minimum capability: 89. "
        "Current capability: 80.",
        "unsupported",
    ),
    (
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has "
        "compute capability 7.5.",
        "unsupported",
    ),
    (
        "ValueError: Selected backend AttentionBackendEnum.FLASHMLA is not valid for this configuration. Reason: "
        "['FlashMLA is only for MLA models']",
        "unsupported",
    ),
    ("ModuleNotFoundError: No module named 'deep_ep'", "unsupported"),
    (
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 163840",
        "unsupported",
    ),
    ("torch._dynamo.exc.Unsupported: Attempted to call function marked as skipped", "unsupported"),
    ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "device_lost"),
    ("torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "device_lost"),
    ("pynvml.NVMLError_GpuIsLost: GPU is lost", "device_lost"),
    ("torch.AcceleratorError: CUDA error: invalid device ordinal", "invalid_argument"),
    (
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "port_in_use",
    ),
    (
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.5",
        "died_at_startup",
    ),
]


@pytest.mark.parametrize(("line", "cause"), GPU_STARTUP, ids=[line[:60] for line, _ in GPU_STARTUP])
def test_what_a_gpu_says_at_startup(line: str, cause: str) -> None:
    log = (
        f"{WORKER}Traceback (most recent call last):\n{WORKER}{line}\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    )
    assert classify("startup", 1, log, None) == (FailureCause(cause), line[:300])


def test_an_illegal_memory_access_is_the_kernels_fault_and_no_reason_to_try_again() -> None:
    line = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    cause, evidence = classify("load", 1, f"{WORKER}{line}\n", None)
    assert (cause, evidence) == (FailureCause.engine_died, line)
    assert not cause.transient


def test_the_rank_that_failed_is_shown_and_not_those_that_lost_it() -> None:
    root = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB."
    log = "\n".join(
        [
            f"{WORKER}{root}",
            "(Worker_TP0 pid=4710) ERROR 12-01 03:36:15 [multiproc_executor.py:953] "
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, remote process exited",
        ]
    )
    assert classify("load", 1, log, None) == (FailureCause.out_of_memory, root)


def test_of_chained_exceptions_the_one_that_explains_is_shown() -> None:
    explained = (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try "
        "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
    )
    log = "\n".join(
        [
            f"{WORKER}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 500.00 MiB.",
            f"{WORKER}",
            f"{WORKER}The above exception was the direct cause of the following exception:",
            f"{WORKER}",
            f"{WORKER}{explained}",
        ]
    )
    assert classify("startup", 1, log, None) == (FailureCause.out_of_memory, explained)


def test_requests_that_failed_earlier_do_not_explain_an_engines_death() -> None:
    log = "\n".join(
        [
            "(APIServer pid=1) ERROR 12-01 03:30:00 [vllm_error.py:54] vllm.exceptions.VLLMValidationError: too long",
            "(EngineCore pid=2) ERROR 12-01 03:36:15 [core.py:1512] RuntimeError: cudaGraphLaunch failed in a replay",
        ]
    )
    assert classify("load", 1, log, None)[1].startswith("RuntimeError: cudaGraphLaunch failed")
