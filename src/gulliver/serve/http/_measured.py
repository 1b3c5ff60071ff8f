"""`Measured`: what a load has shown, as numbers, as a table and as JSON. No network here."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_NUMBER = re.compile(r"(?<!^)\b\d+")
"""A number that is not the status, with which a message begins."""


@dataclass
class RequestTiming:
    """One request of a load; times are seconds on one clock."""

    # When it was to be sent.
    due: float
    sent: float = 0.0
    # Times at which text or tokens came.
    heard: list[float] = field(default_factory=list)
    # When its answer was whole, or failed.
    ended: float = 0.0
    # Tokens of the prompt, as the server counts them.
    prompt: int = 0
    # Tokens of the answer, likewise.
    tokens: int = 0
    # Short name of what went wrong; None where nothing did.
    error: str | None = None

    @property
    def first(self) -> float | None:
        """Seconds from the request to the first text."""
        return self.heard[0] - self.sent if self.heard else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece of text and the next."""
        return [b - a for a, b in zip(self.heard, self.heard[1:], strict=False)]


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least `share` of the values do not exceed (nearest rank).

    Args:
        values: values, in any order; NaN where there are none.
        share: 0 to 1.
    """
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class Measured:
    """A load and what became of it.

    Attributes:
        samples: requests that were sent.
        rate: requests a second that were asked for; infinite for all at once.
        seed: seed of arrivals and prompts.
    """

    samples: Sequence[RequestTiming]
    rate: float
    seed: int

    @property
    def errors(self) -> dict[str, int]:
        """Numbers of requests that failed, by what went wrong.

        Messages that differ in their numbers alone count as one, said as it was first.
        """
        failed = [s.error for s in self.samples if s.error is not None]
        said: dict[str, str] = {}
        for error in failed:
            said.setdefault(_NUMBER.sub("#", error), error)
        counted = Counter(said[_NUMBER.sub("#", error)] for error in failed)
        return dict(counted.most_common())

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last answer."""
        if not self.samples:
            return 0.0
        return max(s.ended for s in self.samples) - min(s.sent for s in self.samples)

    @property
    def json(self) -> dict[str, Any]:
        """All figures; seconds throughout, null for what was not seen."""
        good = [s for s in self.samples if s.error is None]
        gaps = [gap for s in good for gap in s.gaps]
        seconds = self.seconds
        return {
            "requests": len(self.samples),
            "answered": len(good),
            "errors": self.errors,
            "seed": self.seed,
            "rate_asked": None if math.isinf(self.rate) else self.rate,
            "seconds": seconds,
            "requests_per_second": _share(len(good), seconds),
            "tokens_per_second": _share(sum(s.tokens for s in good), seconds),
            "prompt_tokens": sum(s.prompt for s in good),
            "answer_tokens": sum(s.tokens for s in good),
            "first_token_seconds": _quantiles([s.first for s in good if s.first is not None]),
            "between_tokens_seconds": _quantiles(gaps),
            "request_seconds": _quantiles([s.ended - s.sent for s in good]),
            # Where this is not small, the generator was what was slow.
            "sent_late_seconds": _quantiles([s.sent - s.due for s in self.samples]),
        }

    def lines(self) -> list[str]:
        """The figures for people."""
        known = self.json
        asked = "all at once" if math.isinf(self.rate) else f"{self.rate:g} a second, Poisson"
        made = [
            f"{known['answered']} of {known['requests']} requests answered in "
            f"{self.seconds:.2f} s ({asked}, seed {self.seed})",
            f"{_number(known['requests_per_second'])} requests/s, "
            f"{_number(known['tokens_per_second'])} tokens/s; {known['prompt_tokens']} tokens in, "
            f"{known['answer_tokens']} out",
            f"{'ms':<22}{'p50':>10}{'p90':>10}{'p99':>10}{'most':>10}{'of':>9}",
        ]
        for name, key in _ROWS.items():
            row_values = known[key]
            row = "".join(
                f"{_number(row_values[p], 1000):>10}" for p in ("p50", "p90", "p99", "most")
            )
            made.append(f"{name:<22}{row}{row_values['count']:>9}")
        return made + [f"error: {count} x {error}" for error, count in self.errors.items()]


_ROWS = {
    "first token": "first_token_seconds",
    "between tokens": "between_tokens_seconds",
    "whole answer": "request_seconds",
    "sent late": "sent_late_seconds",
}


def _share(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _quantiles(values: Sequence[float]) -> dict[str, float | int | None]:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}
    found = {name: percentile(values, share) if values else None for name, share in shares.items()}
    return {"count": len(values), **found}


def _number(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:.1f}"
