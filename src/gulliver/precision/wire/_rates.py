"""Rates at which this machine packs and unpacks, measured once for each format."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from gulliver.precision.wire._formats import WireFormat
from gulliver.precision.wire._pack import pack, unpack

SAMPLE = 1 << 18
"""Elements that are packed to measure: more than one run, and soon done."""
ROUNDS = 5


@dataclass(frozen=True)
class PackRates:
    """Seconds of an element.

    Attributes:
        pack_s: seconds that packing takes.
        unpack_s: seconds that unpacking takes.
        call_s: seconds of packing and unpacking next to nothing.
    """

    pack_s: float
    unpack_s: float
    call_s: float = 0.0


@lru_cache
def pack_rates(wire: WireFormat, device: str = "cpu") -> PackRates:
    """Measures how fast a device packs float32, in a few milliseconds."""
    if wire.name == "identity":
        return PackRates(0.0, 0.0)
    sample = torch.randn(SAMPLE, device=device, generator=torch.Generator(device).manual_seed(1))
    packed = pack(sample, wire)
    few = sample[: wire.block]
    little = pack(few, wire)
    return PackRates(
        _timed(lambda: pack(sample, wire, out=packed), device) / SAMPLE,
        _timed(lambda: unpack(packed, wire, SAMPLE, out=sample), device) / SAMPLE,
        _timed(lambda: unpack(pack(few, wire, out=little), wire, len(few)), device),
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
