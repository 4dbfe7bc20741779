"""What output tokens cost at the load they were measured at."""

from __future__ import annotations


def cost_usd_per_mtok(
    price_usd_per_device_hour: float, devices: int, output_tokens_per_s: float | None
) -> float | None:
    """USD per million output tokens: price x devices / (3600 x output tokens per second) x 10^6.

    The devices are paid whether busy or not, so the cost belongs to the load: half the throughput, twice the cost.
    None when no throughput was measured, or none happened.
    """
    if not output_tokens_per_s:
        return None
    return price_usd_per_device_hour * devices / (3600 * output_tokens_per_s) * 1e6
