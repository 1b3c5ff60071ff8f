"""Rates at which this machine packs and unpacks, measured once for each format and kept.

``gulliver probe`` measures them with all else; a plan that asks before measures those it needs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from gulliver.hardware import kept_seconds
from gulliver.precision.wire._formats import WireFormat
from gulliver.precision.wire._pack import pack, unpack

SAMPLE = 1 << 18
"""Elements that are packed to measure: more than one run, and soon done."""
ROUNDS = 5


@dataclass(frozen=True)
class PackRates:
    """Seconds of an element."""

    pack_s: float  # Seconds that packing takes
    unpack_s: float  # Seconds that unpacking takes
    call_s: float = 0.0  # Seconds of packing and unpacking next to nothing


@lru_cache
def pack_rates(wire: WireFormat, device: str = "cpu") -> PackRates:
    """Returns how fast a device packs float32, from the cache or measured in milliseconds."""
    if wire.name == "identity":
        return PackRates(0.0, 0.0)
    facts = {"what": "packing 1", "wire": str(wire), "device": device}
    return PackRates(*kept_seconds(facts, lambda: _measured(wire, device), 3))


def _measured(wire: WireFormat, device: str) -> tuple[float, ...]:
    # Of its own: random numbers of the program must not depend on whether rates were kept.
    random = torch.Generator(device).manual_seed(1)
    sample = torch.randn(SAMPLE, device=device, generator=random)
    packed = pack(sample, wire, generator=random)
    few = sample[: wire.block]
    little = pack(few, wire, generator=random)

    def both() -> object:
        return unpack(pack(few, wire, little, random), wire, len(few))

    return (
        _timed(lambda: pack(sample, wire, packed, random), device) / SAMPLE,
        _timed(lambda: unpack(packed, wire, SAMPLE, out=sample), device) / SAMPLE,
        _timed(both, device),
    )


def _timed(call: Callable[[], object], device: str) -> float:
    found = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)
