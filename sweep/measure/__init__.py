"""Measuring a running deployment: the requests, the load client, latency and cost, engine counters, quality."""
