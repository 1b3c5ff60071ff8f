"""Parts of a planner's saved position: how they are checked.

What it does not know: what a planner does with them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from gulliver.errors import GulliverError
from gulliver.options import whole_number

PARTS = ("epoch", "step", "drawn", "queue", "cuts")


def checked_seed(seed: Any) -> int:
    """A seed as an int."""
    if not -(2**63) < whole_number("seed", seed) < 2**63:
        raise GulliverError(f"seed={seed}: give a number below 2^63")
    return int(seed)


def digest_of(position: Mapping[str, Any]) -> str:
    """Digest of a position: which samples are done shows in no other part of it."""
    content = json.dumps([position.get(name) for name in PARTS])
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def checked_cuts(found: Any, most: int) -> list[int]:
    """Numbers of samples of the arranged steps of a position."""
    whole = isinstance(found, list) and all(type(n) is int and n > 0 for n in found)
    if not whole or sum(found) > most:
        raise GulliverError("the saved position is broken: its steps have more samples than wait")
    return list(found)


def check_state(state: Any, model: str, data: str) -> None:
    """Refuses what is no state of a planner of this model and these data."""
    keys = {"epoch", "step", "drawn", "queue", "data", "model", "refinement"}
    if not isinstance(state, Mapping) or not keys <= set(state):
        raise GulliverError("this is not the state of a data-centric planner")
    if state["model"] != model:
        raise GulliverError(
            f"the saved position was planned for model {state['model']!r}, this one is "
            f"{model!r}: resume with the same model"
        )
    if state["data"] != data:
        raise GulliverError(
            "the saved position belongs to other data or another seed: resume with what the "
            "run was started with"
        )
