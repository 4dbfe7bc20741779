"""When a sweep ends: trials, hours or money, whichever comes first."""

from __future__ import annotations

from dataclasses import dataclass

from sweep.config import BudgetConfig, HardwareConfig
from sweep.executor.clock import WALL, Clock
from sweep.study.ledger import Ledger


@dataclass
class Budget:
    """Spending counts everything recorded in the study, by earlier sessions too.

    hours: wall-clock during which launches were alive. usd: those hours x every device of the node x its price,
    since a rented node is paid for whether or not all its devices work. clock: of the executor.
    """

    config: BudgetConfig
    hardware: HardwareConfig
    hours_before: float = 0.0
    clock: Clock = WALL

    def __post_init__(self) -> None:
        self.started = self.clock.monotonic()

    def hours_spent(self) -> float:
        return self.hours_before + (self.clock.monotonic() - self.started) / 3600.0

    def usd_per_hour(self) -> float:
        return self.hardware.devices * self.hardware.price_usd_per_device_hour

    def hours_allowed(self) -> float | None:
        """The tighter of the bounds in hours and in money, in hours; None without either."""
        limits = []
        if self.config.hours is not None:
            limits.append(self.config.hours)
        if self.config.usd is not None:
            limits.append(self.config.usd / self.usd_per_hour())
        return min(limits, default=None)

    def points_left(self, ledger: Ledger, in_flight: int) -> int | None:
        """Operating points that may still be started; None without a bound."""
        if self.config.trials is None:
            return None
        return max(0, self.config.trials - ledger.settled_points - in_flight)

    def ended(self, ledger: Ledger) -> str | None:
        """Why nothing more may ever start, or None. A launch that cannot be expected to finish in time is not begun."""
        if self.points_left(ledger, 0) == 0:
            return f"budget.trials={self.config.trials} reached"
        return self.out_of_time(ledger)

    def out_of_time(self, ledger: Ledger) -> str | None:
        """Why no launch can be expected to finish in time, or None."""
        allowed = self.hours_allowed()
        if allowed is None:
            return None
        expected_h = (ledger.mean_launch_s() or 0.0) / 3600.0
        if self.hours_spent() + expected_h <= allowed:
            return None
        name = "hours" if self.config.hours is not None and allowed == self.config.hours else "usd"
        bound = f"budget.{name}={getattr(self.config, name)}"
        return f"{bound} reached: no time for another launch of {expected_h * 60:.1f} min"

    def hours_left(self) -> float | None:
        """Hours until the tighter of the bounds in hours and in money; None without either."""
        allowed = self.hours_allowed()
        return None if allowed is None else max(0.0, allowed - self.hours_spent())
