"""A real vLLM server on the small model, as the engine tests share it within a module."""

from __future__ import annotations

from pathlib import Path

from sweep.engine.engine_args import EngineConfig
from sweep.engine.server import Server


def small_server(model: Path, python: str, folder: Path, *, max_model_len: int) -> Server:
    """Not started yet: use it as a context manager. folder: for its log; its name marks the server's processes."""
    engine = EngineConfig(
        str(model), {"enforce_eager": True, "max_model_len": max_model_len}, {"VLLM_CPU_KVCACHE_SPACE": "1"}
    )
    return Server(
        engine,
        python=python,
        log_path=folder / "server.log",
        device_env={},
        startup_timeout_s=400,
        stop_timeout_s=30,
        launch_id=f"{folder.name}-test",
    )
