"""How much a step takes: samples, tokens, or seconds, as the user says."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from gulliver.errors import GulliverError
from gulliver.options import positive_number, whole_number


@dataclass(frozen=True)
class Samples:
    """A step of so many samples; the last of an epoch may have fewer."""

    count: int

    def __post_init__(self) -> None:
        if whole_number("samples of a step", self.count) < 1:
            raise GulliverError(f"a step of {self.count} samples: give at least 1")

    def __str__(self) -> str:
        return f"{self.count:,} samples a step"


@dataclass(frozen=True)
class Tokens:
    """A step of about so many tokens: it ends with the sample that comes nearest."""

    count: int

    def __post_init__(self) -> None:
        if whole_number("tokens of a step", self.count) < 1:
            raise GulliverError(f"a step of {self.count} tokens: give at least 1")

    def __str__(self) -> str:
        return f"about {self.count:,} tokens a step"


@dataclass(frozen=True)
class Seconds:
    """A step of at most so many predicted seconds."""

    seconds: float

    def __post_init__(self) -> None:
        positive_number("seconds of a step", self.seconds)

    def __str__(self) -> str:
        return f"at most {self.seconds:g} s a step"


Budget = Samples | Tokens | Seconds


def weight(budget: Budget, tokens: int, rank_seconds: float) -> float:
    """How much of a budget's total a sample takes."""
    if isinstance(budget, Samples):
        return 1.0
    return float(tokens) if isinstance(budget, Tokens) else rank_seconds


def total(budget: Budget, ranks: int) -> float:
    """What the weights of a step's samples may sum up to."""
    if isinstance(budget, Samples | Tokens):
        return float(budget.count)
    return budget.seconds * ranks


def check_key(budget: Budget, tokens: int, least: float) -> float:
    """What a sample needs of a budget at least: tokens or seconds."""
    return least if isinstance(budget, Seconds) else float(tokens)


def check_sample(
    budget: Budget, index: int, shape: Hashable, tokens: int, least: float, ranks: int
) -> None:
    """Refuses a budget that no step with a sample can meet."""
    if isinstance(budget, Tokens) and tokens > budget.count:
        raise GulliverError(
            f"no step meets {budget}: sample {index} ({shape}) has {tokens:,} tokens; give at "
            "least as many"
        )
    if isinstance(budget, Seconds) and least > budget.seconds:
        raise GulliverError(
            f"no step meets {budget}: sample {index} ({shape}) takes {least:.4g} s on {ranks} "
            "ranks at best; give at least as many"
        )
