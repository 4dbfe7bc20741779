"""Measure the Pareto front of speed, cost and quality over real vLLM deployments, and pick one for an SLA.

`sweep.open("runs/demo")` opens a study's results. Names load on first use: `import sweep`
costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sweep.decide.opened import Study
    from sweep.decide.opened import open_study as open

    __version__: str

__all__ = ["Study", "__version__", "open"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("sweep-llm")
        except PackageNotFoundError:  # run from a source tree that is not installed
            return "0+unknown"
    if name in ("open", "Study"):
        from sweep.decide.opened import Study, open_study

        return {"open": open_study, "Study": Study}[name]
    raise AttributeError(f"module 'sweep' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
