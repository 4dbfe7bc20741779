"""What an engine config would do on a GPU nobody has rented yet. A prior for the search, never a result."""

from sweep.estimate.kernels import is_available
from sweep.estimate.steady import Estimate, Lengths, Unknown, estimate

__all__ = ["Estimate", "Lengths", "Unknown", "estimate", "is_available"]
