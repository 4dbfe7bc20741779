"""Failures are told apart by the texts that vLLM 0.32, torch and the kernel really write (CPU ones: from its logs)."""

from __future__ import annotations

import pytest

from sweep.engine.failures import FailureCause, Phase, classify

SERVER = "(APIServer pid=24771) "
WORKER = "(Worker pid=24797) ERROR 12-01 03:36:14 [multiproc_executor.py:953] "
CORE = "(EngineCore pid=24784) ERROR 12-01 03:36:15 [core.py:1510] "
GENERIC = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
DEAD = (
    f"{SERVER}ERROR 12-01 03:38:49 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: "
    "EngineCore encountered an issue. See stack trace (above) for the root cause.\n"
    'INFO:     127.0.0.1:35274 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error'
)
ANSWER_500 = '{"error":{"message":"EngineCore encountered an issue","type":"InternalServerError","code":500}}'
VALIDATION = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, "
VALIDATION_END = (
    " [type=value_error, input_value=ArgsKwargs((), {'model': ...nderer_num_workers': 1}), input_type=ArgsKwargs]\n"
    "    For further information visit https://errors.pydantic.dev/2.14/v/value_error"
)


def worker_died(line: str) -> str:
    """The log of a worker that failed while loading: the root cause far above, generic errors below."""
    return "\n".join(
        [
            f"{WORKER}WorkerProc failed to start.",
            f"{WORKER}Traceback (most recent call last):",
            f'{WORKER}  File "/site-packages/vllm/v1/worker/gpu_worker.py", line 594, in load_model',
            f"{WORKER}    self.model_runner.load_model(load_dummy_weights=load_dummy_weights)",
            f"{WORKER}{line}",
            f"{CORE}Exception: WorkerProc initialization failed due to an exception in a background process. "
            "See stack trace for root cause.",
            "Traceback (most recent call last):",
            "    raise RuntimeError(",
            GENERIC,
        ]
    )


STARTUP = [
    ("vllm: error: unrecognized arguments: --no-such-flag 1", "invalid_argument", "--no-such-flag"),
    (
        "vllm serve: error: argument --dtype: invalid choice: 'float8' (choose from 'auto', 'bfloat16')",
        "invalid_argument",
        "'float8'",
    ),
    (
        f"{VALIDATION}Unknown quantization method: bitsandbytes. Must be one of ['awq', 'fp8'].{VALIDATION_END}",
        "invalid_argument",
        "Unknown quantization method: bitsandbytes",
    ),
    (
        "vllm serve: error: argument --compilation-config/-cc: 1 validation error for CompilationConfig\nmode\n"
        "  Value error, Invalid compilation mode: lots. [type=value_error, input_value='lots', input_type=str]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
        "invalid_argument",
        "--compilation-config/-cc: 1 validation error for CompilationConfig: mode Invalid compilation mode: lots.",
    ),
    (
        "pydantic_core._pydantic_core.ValidationError: 2 validation errors for SchedulerConfig\n"
        "max_num_batched_tokens\n"
        "  Input should be greater than or equal to 1 [type=greater_than_equal, input_value=0, input_type=int]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/greater_than_equal\nmax_num_seqs\n"
        "  Input should be greater than or equal to 1 [type=greater_than_equal, input_value=0, input_type=int]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/greater_than_equal",
        "invalid_argument",
        "max_num_seqs Input should be greater than or equal to 1",
    ),
    (
        f"{VALIDATION}Invalid repository ID or local directory specified: '/models/empty'.\n"
        f"Please verify the following requirements:\n1. Provide a valid Hugging Face repository ID.\n{VALIDATION_END}",
        "model_not_found",
        "Invalid repository ID or local directory specified: '/models/empty'",
    ),
    (
        f"{VALIDATION}The quantization method modelopt_fp4 is not supported for the current GPU. "
        f"Minimum capability: 100. Current capability: 90.{VALIDATION_END}",
        "unsupported",
        "Minimum capability: 100",
    ),
    (
        worker_died("RuntimeError: _C::static_scaled_fp8_quant() expected at most 0 argument(s) but received 4"),
        "unsupported",
        "static_scaled_fp8_quant",
    ),
    (
        worker_died("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
        "out_of_memory",
        "No available memory for the cache blocks",
    ),
    (
        worker_died(
            "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (9.3 GiB). Try decreasing `max_model_len`"
        ),
        "out_of_memory",
        "131072",
    ),
    (
        worker_died(
            "ValueError: Available memory on node 0 (11.04/13.09 GiB) on kv cache allocation is less than requested "
            "memory for kv (1000.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE"
        ),
        "out_of_memory",
        "1000.0 GiB",
    ),
    (
        worker_died(
            "ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory "
            "utilization (0.9, 71.2 GiB). Decrease GPU memory utilization"
        ),
        "out_of_memory",
        "3.1/79.1 GiB",
    ),
    (
        worker_died("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has a total"),
        "out_of_memory",
        "224.00 MiB",
    ),
    (
        "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/missing'.",
        "model_not_found",
        "/models/missing",
    ),
    (
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder for the "
        "specified revision on the local disk and outgoing traffic has been disabled.",
        "model_not_found",
        "Cannot find an appropriate cached snapshot folder",
    ),
    (worker_died("OSError: [Errno 28] No space left on device: '/root/.cache'"), "disk_full", "No space left"),
    ("OSError: [Errno 98] Address already in use", "port_in_use", "Address already in use"),
    (
        worker_died("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"),
        "device_lost",
        "uncorrectable ECC error",
    ),
    (
        worker_died("safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete"),
        "died_at_startup",
        "SafetensorError: Error while deserializing header",
    ),
]


@pytest.mark.parametrize(("log", "cause", "evidence"), STARTUP, ids=[f"{c}-{e[:24]}" for _, c, e in STARTUP])
def test_death_at_startup_is_named_by_its_root_cause(log: str, cause: str, evidence: str) -> None:
    found, detail = classify("startup", 1, log, None)
    assert found is FailureCause(cause)
    assert evidence in detail
    assert "\n" not in detail
    assert not detail.startswith("(")  # vLLM's prefix of process, level and time is gone
    assert len(detail) <= 300


def test_a_warning_is_no_cause() -> None:
    log = f"{SERVER}WARNING 12-01 03:35:59 [cpu.py:347] Dual-Batch Overlap is not supported on CPU, disabled."
    assert classify("startup", 1, log, None)[0] is FailureCause.died_at_startup


def test_a_kill_without_words_is_told_as_such() -> None:
    """Whether it was the kernel's for lack of memory, Server asks the kernel."""
    cause, detail = classify("startup", -9, f"{SERVER}INFO 12-01 03:35:59 [core.py:1] loading", None)
    assert cause is FailureCause.died_at_startup
    assert "SIGKILL" in detail


def test_a_server_somebody_else_stopped_is_interrupted() -> None:
    log = f"{SERVER}INFO 12-01 03:35:59 [core.py:1] loading\nKeyboardInterrupt: terminated"
    assert classify("startup", 1, log, None)[0] is FailureCause.interrupted
    assert classify("load", -15, "", None)[0] is FailureCause.interrupted


def test_a_failed_first_request_is_named_so_and_shows_the_engines_root_cause() -> None:
    line = "RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0"
    cause, detail = classify("first_request", None, f"{WORKER}{line}\n{DEAD}", ANSWER_500)
    assert cause is FailureCause.first_request_failed
    assert "head_dim=16" in detail


def test_an_exception_without_words_is_told_by_the_line_that_raised_it_and_before_what_it_caused() -> None:
    log = "\n".join(
        [
            f"{WORKER}    assert self.intermediate_tensors is not None",
            f"{WORKER}           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
            f"{WORKER}AssertionError",
            f"{CORE}KeyError: 'cmpl-b0719f01bebe51e4-0-87965438'",
            DEAD,
        ]
    )
    _, detail = classify("first_request", None, log, ANSWER_500)
    assert detail == "AssertionError: assert self.intermediate_tensors is not None"


def test_what_processes_write_as_they_end_is_no_evidence() -> None:
    log = f'{SERVER}INFO 12-01 03:35:59 [core.py:1] loading\nnanobind: leaked 64 types!\n - leaked type "ATOMIC_OP"'
    assert classify("startup", 1, log, None)[1] == "loading"


def test_a_failed_first_request_without_an_error_in_the_log_shows_the_answer() -> None:
    log = 'INFO:     127.0.0.1:35274 - "POST /v1/completions HTTP/1.1" 400 Bad Request'
    cause, detail = classify("first_request", None, log, '{"error":{"message":"no such prompt"}}')
    assert cause is FailureCause.first_request_failed
    assert "no such prompt" in detail


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out_of_memory"),
        ("OSError: [Errno 28] No space left on device", "disk_full"),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "device_lost"),
        ("AssertionError", "engine_died"),
        ("NotImplementedError: this kernel", "engine_died"),
    ],
)
def test_death_under_load_is_an_engines_death_unless_the_cause_says_more(line: str, cause: str) -> None:
    assert classify("load", None, f"{WORKER}{line}\n{DEAD}", None)[0] is FailureCause(cause)


@pytest.mark.parametrize("phase", ["startup", "first_request", "load"])
def test_silence_is_a_failure_too(phase: Phase) -> None:
    cause, detail = classify(phase, 1, "", None)
    assert cause is not FailureCause.unknown
    assert detail


def test_only_the_moment_and_the_machine_are_worth_a_retry() -> None:
    transient = {"port_in_use", "startup_timeout", "load_timeout", "device_lost", "interrupted"}
    assert {cause.value for cause in FailureCause if cause.transient} == transient
