"""How much memory a cache of keys and values may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gulliver.errors import GulliverError
from gulliver.hardware import memory_bytes
from gulliver.options import byte_size
from gulliver.serve._ways import ModelOptions

BLOCK = 16
"""Tokens of a block."""
SHARE = 0.5
"""Part of the free memory that the caches of all ranks take at most, where no size is given."""
WHOLE = 2048
"""Context that a cache of no given size has room for, where the model's own has no end."""
BUDGET_SHARE = 4
"""Part of a limit of memory that a cache of no given size takes."""


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


def context_of(config: Any, wanted: int | None) -> int | None:
    """Most tokens of a sequence: as asked for, or the model's own; None where it has no end."""
    own = getattr(config, "max_position_embeddings", None)
    own = int(own) if isinstance(own, int) and own > 0 else None
    if wanted is not None and (wanted < 2 or (own is not None and wanted > own)):
        raise GulliverError(f"context={wanted}: give 2 to {own or 'any number'}")
    return own if wanted is None else wanted


def cache_blocks(
    token_bytes: int,
    device: torch.device,
    context: int | None,
    sequences: int,
    options: ModelOptions,
    size: int = BLOCK,
    budget: int | None = None,
    ranks: int = 1,
) -> int:
    """Chooses the number of blocks of a cache; `budget` is that of streamed weights, if any."""
    if options.cache_bytes is not None and options.cache_tokens is not None:
        raise GulliverError("give cache_bytes or cache_tokens, not both")
    block_bytes = max(token_bytes * size, 1)
    free = free_bytes(device)
    if options.cache_tokens is not None:
        blocks = options.cache_tokens // size
    elif options.cache_bytes is not None:
        blocks = byte_size("cache_bytes", options.cache_bytes) // block_bytes
    else:
        whole = -(-(context or WHOLE) // size)
        room = int(free * SHARE) // ranks
        room = room if budget is None else min(room, budget // BUDGET_SHARE)
        blocks = min(sequences * whole, max(room // block_bytes, 0))
        alone = ranks == 1 and budget is None
        if alone and blocks < whole and context is not None:
            raise GulliverError(
                f"{size_words(free)} of memory are free, and keys and values of one sequence of "
                f"{context} tokens take {size_words(whole * block_bytes)}, at most half of it: "
                f"give a context of at most {blocks * size}, bfloat16, or a quantised model"
            )
    if blocks < 1:
        raise GulliverError(
            f"the cache has no room for one block, {size_words(block_bytes)}: give more"
        )
    if blocks * block_bytes > free:
        raise GulliverError(
            f"a cache of {size_words(blocks * block_bytes)} exceeds the {size_words(free)} of "
            f"memory that are free: give cache_tokens of at most {free // block_bytes * size}"
        )
    return blocks


def size_words(count: float) -> str:
    """Writes a number of bytes."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
