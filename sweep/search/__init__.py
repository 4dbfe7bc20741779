"""What to launch next: our own search, beside Optuna's samplers."""

from sweep.search.history import Constraint, Evidence, Tried
from sweep.search.search import Guess, Options, Prior, Search, Suggestion

__all__ = ["Constraint", "Evidence", "Guess", "Options", "Prior", "Search", "Suggestion", "Tried"]
