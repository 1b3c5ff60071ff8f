"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gulliver.errors import GulliverError, nearest
from gulliver.schedule._classic import Fifo, Optimus, Pollux, Srpt, Tiresias
from gulliver.schedule._estimates import Estimator
from gulliver.schedule._lookahead import Rollout
from gulliver.schedule._ones import Ones
from gulliver.schedule._state import Policy

POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "fifo": lambda seed: Fifo(),
    "srpt": lambda seed: Srpt(),
    "tiresias": lambda seed: Tiresias(),
    "optimus": lambda seed: Optimus(Estimator(seed=seed)),
    "pollux": lambda seed: Pollux(),
    "ones": lambda seed: Ones(seed=seed),
    "rollout": lambda seed: Rollout(Estimator(seed=seed)),
}
"""Policies by name, made from the seed of what they draw."""


def make_policy(name: str, seed: int = 0) -> Policy:
    """Makes a policy with its default settings."""
    if name not in POLICIES:
        raise GulliverError(f"unknown policy {name!r}: {nearest(name, POLICIES)}")
    return POLICIES[name](seed)
