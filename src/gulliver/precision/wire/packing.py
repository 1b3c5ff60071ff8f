"""Packs elements into blocks with scales, and unpacks them.

packed:  scale 0 | scale 1 | ... | elements of block 0 | of block 1 | ... | up to three zeros
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.hardware.probe import kept_seconds
from gulliver.precision.wire.formats import (
    LEAST_SCALE,
    SCALE_BYTES,
    ElementKind,
    WireFormat,
    packed_bytes,
)

RUN = 1 << 16
"""Elements processed at a time."""
_LARGEST = torch.finfo(torch.float32).max
_NAN = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7F, torch.int8: 0x80, None: 0}
"""Codes of NaN by element dtype; int4 codes are half bytes."""
_LOG = logging.getLogger("gulliver")
_TOLD = (
    "a message contains infinities or NaNs, which the receiver also gets; see "
    "gulliver.precision.wire.nonfinite_blocks()"
)
_lock = threading.Lock()
_nonfinite = 0
_on_devices: dict[torch.device, Tensor] = {}
"""Counters on devices; reading them waits for the device."""


# [Note: passes] Packed data is as large as a chunk's gradients, and on a CPU each pass over it
# through memory costs half as much as a gigabit link. So it is processed in runs of 64 Ki elements,
# which stay in the cache with the call's only scratch buffer: maximum, minimum, product, cast for
# fp8, and one more for integers. Memory is read once and written once, and a call needs 256 KiB in
# addition to its result. On a GPU the run is all of it.
#
# [Note: not finite] Scales are always finite: they are computed from a block's finite elements,
# which are unaffected by the others. An infinity or NaN is sent as the format's code for it: itself
# in e5m2 (and in bf16, which has no blocks), NaN in e4m3, and NaN in int8 and int4, as the code
# that no finite element has (-128, -8). So overflows remain detectable, with their position. The
# scale of such a block is negative, so unpacking checks the elements of these blocks only. They are
# counted (`nonfinite_blocks`).
#
# [Note: small blocks] A scale is at least the smallest normal float32. So a block of zeros stays
# zero, nothing is divided by zero, and values below 1e-35 lose bits.
def nonfinite_blocks() -> int:
    """Returns the number of blocks with an infinity or NaN packed by this process."""
    return _nonfinite + sum(int(count) for count in list(_on_devices.values()))


def pack(tensor: Tensor, wire: WireFormat, out: Tensor | None = None) -> Tensor:
    flat = tensor.detach().reshape(-1)
    count = packed_bytes(flat.numel(), wire, flat.element_size())
    packed = flat.new_empty(count, dtype=torch.uint8) if out is None else out
    if wire.name == "identity":
        packed.copy_(flat.contiguous().view(torch.uint8))
        return packed
    if not flat.is_floating_point():
        raise GulliverError(
            f"{flat.dtype} cannot be packed as {wire}, because integers must be exact"
        )
    if not wire.scaled:
        size = 2 * flat.numel()
        packed[size:].zero_()
        packed[:size].view(torch.bfloat16).copy_(flat)
        return packed
    scales, values = _places(packed, flat.numel(), wire)
    values[-(-flat.numel() * wire.kind.bits // 8) :].zero_()
    scratch = _scratch(flat)
    for start, rows, length in _runs(flat, wire.block):
        run = flat[start : start + rows * length].view(rows, length)
        buffer = scratch[: run.numel()].view(rows, length)
        first = start // wire.block
        marks = _scale(run, buffer, scales[first : first + rows], wire.kind)
        nbytes = rows * -(-length * wire.kind.bits // 8)
        begin = start * wire.kind.bits // 8
        into = values[begin : begin + nbytes].view(rows, -1)
        _encode(buffer, into, wire)
        if marks is not None:
            _mark(into, *marks)
    return packed


def unpack(
    packed: Tensor,
    wire: WireFormat,
    numel: int,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    add: float = 0.0,
) -> Tensor:
    target = packed.new_empty(numel, dtype=dtype) if out is None else out
    if not wire.scaled:
        kept = target.dtype if wire.name == "identity" else torch.bfloat16
        found = packed[: numel * kept.itemsize].view(kept)
        if add:
            target.add_(found, alpha=add)
        else:
            target.copy_(found)
        return target
    scales, values = _places(packed, numel, wire)
    scratch, factor = _scratch(target), _factor(wire.kind)
    # Reading scales on a device would wait for it.
    marked = target.device.type != "cpu" or bool((scales < 0).any())
    scales = scales.abs() if marked else scales
    for start, rows, length in _runs(target, wire.block):
        begin, nbytes = start * wire.kind.bits // 8, rows * -(-length * wire.kind.bits // 8)
        buffer = scratch[: rows * length].view(rows, length)
        _decode(values[begin : begin + nbytes].view(rows, -1), buffer, wire)
        if marked and wire.kind.dtype is not torch.float8_e5m2:
            beyond = buffer.abs() > wire.kind.largest / factor
            buffer.masked_fill_(beyond, float("nan"))
        into = target[start : start + rows * length].view(rows, length)
        scale = scales[start // wire.block :][:rows].unsqueeze(1)
        scale = scale if factor == 1.0 else scale * factor
        if target.dtype is torch.float32 and not add:
            torch.mul(buffer, scale, out=into)
        elif target.dtype is torch.float32:
            into.addcmul_(buffer, scale, value=add)
        elif add:
            into.add_(buffer.mul_(scale), alpha=add)
        else:
            into.copy_(buffer.mul_(scale))
    return target


def _places(packed: Tensor, numel: int, wire: WireFormat) -> tuple[Tensor, Tensor]:
    end = SCALE_BYTES * -(-numel // wire.block)
    return packed[:end].view(torch.float32), packed[end:]


def _runs(flat: Tensor, block: int) -> Iterator[tuple[int, int, int]]:
    """Yields ranges to process: first element, number of blocks, and elements per block."""
    whole, rest = divmod(flat.numel(), block)
    step = RUN // block if flat.device.type == "cpu" else max(whole, 1)
    for row in range(0, whole, step):
        yield row * block, min(step, whole - row), block
    if rest:
        yield whole * block, 1, rest


def _scratch(like: Tensor) -> Tensor:
    size = min(like.numel(), RUN) if like.device.type == "cpu" else like.numel()
    return like.new_empty(size, dtype=torch.float32)


Marks = tuple[Tensor, Tensor]
"""Mask of non-finite elements [blocks, elements], and their codes."""


def _scale(run: Tensor, buffer: Tensor, scales: Tensor, kind: ElementKind) -> Marks | None:
    """Writes the scales of blocks to `scales`, and the scaled blocks to `buffer`."""
    if run.dtype is not torch.float32:
        run = buffer.copy_(run)
    largest, marks = _largest(run), None
    if run.device.type != "cpu" or not math.isfinite(float(largest.sum())):
        marks = _marks(run, kind)
    if marks is not None:
        run = torch.where(marks[0], 0.0, run)
        largest = _largest(run)
    # With the largest scale, no product exceeds the largest float32.
    largest.div_(kind.largest)
    torch.clamp(largest, LEAST_SCALE, _LARGEST / kind.largest * (1 - 2.0**-22), out=scales)
    torch.mul(run, torch.reciprocal(scales, out=largest).unsqueeze(1), out=buffer)
    if marks is not None:
        scales.copy_(torch.where(marks[0].any(1), -scales, scales))
    return marks


def _largest(run: Tensor) -> Tensor:
    return torch.maximum(run.amax(1), run.amin(1).neg_())  # nan where one is


def _marks(run: Tensor, kind: ElementKind) -> Marks | None:
    """Finds non-finite elements, and counts their blocks; None if there are none."""
    global _nonfinite
    bad = run.isfinite().logical_not_()
    count = bad.any(1).sum()
    with _lock:
        if run.device.type != "cpu":
            _on_devices[run.device] = _on_devices.get(run.device, 0) + count
        elif not int(count):
            return None
        else:
            if not _nonfinite:
                _LOG.warning(_TOLD)
            _nonfinite += int(count)
    codes = torch.full_like(run, _NAN[kind.dtype], dtype=torch.uint8)
    if kind.dtype is torch.float8_e5m2:
        codes.masked_fill_(run == math.inf, 0x7C).masked_fill_(run == -math.inf, 0xFC)
    return bad, codes


def _mark(values: Tensor, bad: Tensor, codes: Tensor) -> None:
    half = values.shape[1]
    if half == bad.shape[1]:
        values.copy_(torch.where(bad, codes, values))
        return
    low, high = bad[:, :half], bad[:, half:]
    values.bitwise_and_(low.to(torch.uint8).mul_(0x0F).bitwise_not_())
    values[:, : high.shape[1]].bitwise_and_(high.to(torch.uint8).mul_(0xF0).bitwise_not_())


def _encode(buffer: Tensor, values: Tensor, wire: WireFormat) -> None:
    if wire.kind.floats:
        assert wire.kind.dtype is not None, "formats of floats have a dtype"
        values.view(wire.kind.dtype).copy_(buffer)
        return
    buffer.round_()
    if wire.kind.dtype is not None:
        values.view(wire.kind.dtype).copy_(buffer)
        return
    # The second half of a block is in the upper halves of the bytes.
    half = values.shape[1]
    low, high = buffer[:, :half].add_(8.0), buffer[:, half:].add_(8.0)
    low[:, : high.shape[1]].add_(high, alpha=16.0)
    values.copy_(low)


def _decode(values: Tensor, buffer: Tensor, wire: WireFormat) -> None:
    """Writes the elements to `buffer`, without applying scales."""
    if wire.kind.dtype is None:
        half = values.shape[1]
        buffer[:, :half].copy_(values & 15)
        buffer[:, half:].copy_((values >> 4)[:, : buffer.shape[1] - half])
        buffer.sub_(8.0)
    elif wire.kind.floats:
        # Ten times as fast as the cast: moves exponent and mantissa to their place in a float16, up
        # to a factor (`_factor`). The sign moves along, and is taken from the second highest bit.
        bits = values.view(torch.int8).to(torch.int16)
        bits.mul_(1 << (10 - wire.kind.mantissa))
        if wire.kind.mantissa == 3:
            bits.bitwise_and_(~(1 << 14))
        buffer.copy_(bits.view(torch.float16))
    else:
        buffer.copy_(values.view(wire.kind.dtype))


def _factor(kind: ElementKind) -> float:
    """Returns the factor that `_decode` leaves out: exponents of a float16 begin at -14."""
    return 2.0 ** (14 + kind.least_exponent) if kind.floats else 1.0


# Rates at which this machine packs and unpacks, measured once per format and cached.
#
# ``gulliver probe`` measures all of them; a plan measures the ones it needs if they are unknown.


SAMPLE = 1 << 18
"""Elements packed in a measurement: several runs, but only milliseconds."""
ROUNDS = 5


@dataclass(frozen=True)
class PackRates:
    """Seconds per packed and unpacked element."""

    pack_s: float  # Seconds that packing takes
    unpack_s: float  # Seconds that unpacking takes
    call_s: float = 0.0  # Seconds of packing and unpacking next to nothing


@lru_cache
def pack_rates(wire: WireFormat, device: str = "cpu") -> PackRates:
    """Returns how fast a device packs float32: cached, or measured within milliseconds."""
    if wire.name == "identity":
        return PackRates(0.0, 0.0)
    facts = {"what": "packing 1", "wire": str(wire), "device": device}
    return PackRates(*kept_seconds(facts, lambda: _measured(wire, device), 3))


def _measured(wire: WireFormat, device: str) -> tuple[float, ...]:
    # A separate generator: the program's random numbers must not depend on cached rates.
    random = torch.Generator(device).manual_seed(1)
    sample = torch.randn(SAMPLE, device=device, generator=random)
    packed = pack(sample, wire)
    few = sample[: wire.block]
    little = pack(few, wire)

    def both() -> object:
        return unpack(pack(few, wire, little), wire, len(few))

    return (
        _timed(lambda: pack(sample, wire, packed), device) / SAMPLE,
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
