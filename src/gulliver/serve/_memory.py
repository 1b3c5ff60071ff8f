"""How much memory a model and its cache may take, and what would fit where they do not."""

from __future__ import annotations

from pathlib import Path

import torch

from gulliver.errors import GulliverError
from gulliver.hardware import memory_bytes
from gulliver.options import byte_size
from gulliver.serve._measure import Measured

SHARE = 0.5
"""Part of the free memory that a cache of no given size takes at most."""
WHOLE = 2048
"""Context that a cache of no given size has room for, where the model's own has no end."""


def free_bytes(device: torch.device) -> int:
    """Returns the bytes of memory that are free on a device, for this process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limit = memory_bytes("cpu")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return min(limit, sizes["MemAvailable"])
    except (OSError, KeyError, ValueError, IndexError):
        return limit


def cache_blocks(
    measured: Measured,
    device: torch.device,
    context: int | None,
    size: int,
    sequences: int,
    cache_bytes: int | str | None,
    cache_tokens: int | None,
) -> int:
    """Chooses the number of blocks of a cache."""
    if cache_bytes is not None and cache_tokens is not None:
        raise GulliverError("give cache_bytes or cache_tokens, not both")
    block_bytes = measured.token_bytes * size
    free = free_bytes(device)
    if cache_tokens is not None:
        blocks = cache_tokens // size
    elif cache_bytes is not None:
        blocks = byte_size("cache_bytes", cache_bytes) // block_bytes
    else:
        whole = -(-(context or WHOLE) // size)
        # One sequence of the whole context runs in any case, as long as the memory has it.
        blocks = min(sequences * whole, max(int(free * SHARE) // block_bytes, 0))
        if blocks < whole and context is not None:
            fits = blocks * size
            raise GulliverError(
                f"{said(free)} of memory are free, and keys and values of one sequence of "
                f"{context} tokens take {said(whole * block_bytes)}, at most half of it: give a "
                f"context of at most {fits}, bfloat16, or a quantised model"
            )
    if blocks < 1:
        raise GulliverError(f"the cache has no room for one block, {said(block_bytes)}: give more")
    if blocks * block_bytes > free:
        raise GulliverError(
            f"a cache of {said(blocks * block_bytes)} exceeds the {said(free)} of memory that are "
            f"free: give cache_tokens of at most {free // block_bytes * size}"
        )
    return blocks


def said(count: float) -> str:
    """Writes a number of bytes."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
