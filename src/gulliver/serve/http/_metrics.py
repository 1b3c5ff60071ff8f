"""`Metrics`: what a server counts, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

GAUGES = {
    "running": "Answers that run",
    "waiting": "Answers that wait for blocks",
    "blocks": "Blocks of the cache",
    "free_blocks": "Blocks that can be taken",
    "kept_blocks": "Free blocks whose keys and values can still be found",
}
COUNTERS = {
    "steps": "Batches that were run",
    "tokens": "Tokens that were made",
    "prompt_tokens": "Tokens of prompts of ended requests",
    "prefix_cached_tokens": "Tokens of prompts whose keys and values were in the cache",
    "drafted_tokens": "Tokens that were drafted",
    "accepted_tokens": "Drafted tokens that were right",
    "preemptions": "Answers that gave up their blocks",
    "finished": "Answers that ended",
    "restarts": "Runners that were started again",
    "failures": "Steps that failed",
}
"""Numbers of `Engine.counts` that are exported; one that an engine does not have is left out."""


class Metrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self, counts: Callable[[], dict[str, int]]) -> None:
        self._registry = CollectorRegistry()
        self._counts = counts
        made = {"registry": self._registry, "namespace": "gulliver"}
        self.requests = Counter("requests", "Requests, by their end", ["path", "status"], **made)
        self.left = Counter("clients_left", "Requests whose client left", **made)
        self.inside = Gauge("answers", "Answers that were taken on and have not ended", **made)
        self.connections = Gauge("connections", "Open connections", **made)
        self.first = Histogram(
            "first_token_seconds", "From request to first token", buckets=SECONDS, **made
        )
        self.between = Histogram(
            "between_tokens_seconds",
            "From tokens of an answer to its next",
            buckets=SECONDS,
            **made,
        )
        self.whole = Histogram("request_seconds", "From request to end", buckets=SECONDS, **made)
        self._registry.register(self)  # type: ignore[arg-type]

    def collect(self) -> Iterable[Metric]:
        """The engine's own numbers, read when they are asked for."""
        counts = self._counts()
        for name, what in GAUGES.items():
            if name in counts:
                yield GaugeMetricFamily(f"gulliver_{name}", what, counts[name])
        for name, what in COUNTERS.items():
            if name in counts:
                yield CounterMetricFamily(f"gulliver_{name}", what, counts[name])

    def describe(self) -> Iterable[Metric]:
        """Nothing: what an engine counts is known when it is asked."""
        return ()

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)
