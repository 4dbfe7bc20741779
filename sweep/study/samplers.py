"""Samplers by name. A dict and a function: to add one, add a line."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable

import optuna
from optuna.samplers import BaseSampler

from sweep.config import SamplerConfig
from sweep.errors import ConfigError, did_you_mean


def _tpe(config: SamplerConfig) -> BaseSampler:
    # Constant liar: launches run side by side, and a running one must repel the next suggestion.
    return optuna.samplers.TPESampler(seed=config.seed, n_startup_trials=config.startup_trials, constant_liar=True)


def _gp(config: SamplerConfig) -> BaseSampler:
    if any(importlib.util.find_spec(m) is None for m in ("scipy", "torch")):
        raise ConfigError("sampler=gp needs scipy and torch", "pip install 'sweep-llm[gp]', or choose sampler=tpe")
    return optuna.samplers.GPSampler(seed=config.seed, n_startup_trials=config.startup_trials)


def _qmc(config: SamplerConfig) -> BaseSampler:
    if importlib.util.find_spec("scipy") is None:
        raise ConfigError("sampler=qmc needs scipy", "pip install 'sweep-llm[gp]', or choose sampler=tpe")
    with warnings.catch_warnings():  # the class has been experimental since Optuna 3.0
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.QMCSampler(seed=config.seed, scramble=True)


# Grid has no Optuna sampler here: Optuna's own calls study.stop(), which raises in ask/tell. The loop walks the
# space itself, as our own search (sweep) does; random stands in for the sampler that is then never asked.
SAMPLERS: dict[str, Callable[[SamplerConfig], BaseSampler]] = {
    "tpe": _tpe,
    "random": lambda c: optuna.samplers.RandomSampler(seed=c.seed),
    "nsga2": lambda c: optuna.samplers.NSGAIISampler(seed=c.seed, population_size=max(c.startup_trials, 4)),
    "gp": _gp,
    "qmc": _qmc,
    "grid": lambda c: optuna.samplers.RandomSampler(seed=c.seed),
    "sweep": lambda c: optuna.samplers.RandomSampler(seed=c.seed),
}


def make_sampler(config: SamplerConfig) -> BaseSampler:
    """Raises ConfigError for an unknown name or a missing extra."""
    if config.kind not in SAMPLERS:
        raise ConfigError(f"sampler.kind={config.kind!r} is unknown", did_you_mean(config.kind, SAMPLERS))
    return SAMPLERS[config.kind](config)
