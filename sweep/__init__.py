"""Measure the Pareto front of speed, cost and quality over real vLLM deployments, and pick one for an SLA.

`sweep.open("runs/demo")` opens a study's results, `sweep.explain(study)` and `sweep.compare(one, other)` say what they
mean, `sweep.plots` draws them; `sweep.plan(…)` and `sweep.run(…)` take the overrides of the command line. Names load on
first use: `import sweep` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sweep.api import plan, run
    from sweep.decide import plots
    from sweep.decide.compare import compare
    from sweep.decide.explain import explain
    from sweep.decide.opened import Study
    from sweep.decide.opened import open_study as open

    __version__: str

__all__ = ["Study", "__version__", "compare", "explain", "open", "plan", "plots", "run"]

_HOMES = {
    "Study": ("sweep.decide.opened", "Study"),
    "compare": ("sweep.decide.compare", "compare"),
    "explain": ("sweep.decide.explain", "explain"),
    "open": ("sweep.decide.opened", "open_study"),
    "plan": ("sweep.api", "plan"),
    "run": ("sweep.api", "run"),
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("sweep-llm")
        except PackageNotFoundError:  # run from a source tree that is not installed
            return "0+unknown"
    if name == "plots":
        return import_module("sweep.decide.plots")
    if name in _HOMES:
        module, attribute = _HOMES[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'sweep' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
