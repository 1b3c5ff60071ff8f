"""Checks of saved positions in the data: their content, and the order that they count in.

What it does not know: how a loader or a sampler goes on from there.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gulliver.errors import GulliverError

KEYS = {"epoch", "done", "rank", "generators", "inner", "is_over"}
"""Keys that every state of a loader has."""
SETTINGS = ("replacement", "num_samples", "shuffle", "seed", "num_replicas", "drop_last")
"""Attributes of torch's samplers that decide their order, besides their generator."""
CONTENTS = ("weights", "indices")
"""Long attributes that decide it too: their digest is kept."""


def set_state(generator: torch.Generator, state: str) -> None:
    """Gives a generator the state that a loader's state holds, in base64."""
    content = bytearray(base64.b64decode(state, validate=True))
    generator.set_state(torch.frombuffer(content, dtype=torch.uint8))


def check_content(state: Any) -> None:
    """Refuses what is no state of a loader."""
    if not isinstance(state, Mapping) or not set(state) >= KEYS:
        raise GulliverError("this is not the state of a data loader: it has no position")
    generators = state["generators"]
    if not isinstance(state["is_over"], bool) or not isinstance(generators, list):
        raise GulliverError("this is not the state of a data loader: its position is broken")
    try:
        for generator in generators:
            set_state(torch.Generator(), generator)
    except (TypeError, ValueError, RuntimeError):
        raise GulliverError(
            "this is not the state of a data loader: that of a generator in it is broken"
        ) from None


def check_position(epoch: Any, done: Any, batches: int | None) -> None:
    """Refuses what is no position in the data."""
    for name, value in (("epoch", epoch), ("done", done)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise GulliverError(
                f"the saved position has {name} {value!r}: it must be a whole number from 0 on"
            )
    if batches is not None and done > batches:
        raise GulliverError(
            f"the saved position is after batch {done} of an epoch, which has {batches} here: "
            "resume with what the run was started with"
        )


def order_of(source: Any) -> str:
    """Says how a sampler, or a batch sampler and the one inside it, orders indices."""
    # Samplers that are not torch's are told apart by their class and by settings of these names.
    parts = [type(source).__qualname__]
    if isinstance(source, list | tuple | range):
        parts.append(_digest(source))
    values = vars(source) if hasattr(source, "__dict__") else {}
    for name in SETTINGS:
        # Not through properties, which may need what is not there yet.
        value = values.get(name, values.get(f"_{name}"))
        if isinstance(value, bool | int | float | str):
            parts.append(f"{name}={value}")
    for name in CONTENTS:
        if isinstance(values.get(name), Iterable):
            parts.append(f"{name}={_digest(values[name])}")
    inside = values.get("sampler")
    return ", ".join(parts) + (f" of {order_of(inside)}" if inside is not None else "")


def _digest(values: Iterable[Any]) -> str:
    plain = values.tolist() if isinstance(values, torch.Tensor) else list(values)
    return hashlib.blake2b(repr(plain).encode(), digest_size=4).hexdigest()
