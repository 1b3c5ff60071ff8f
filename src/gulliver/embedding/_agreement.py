"""Errors that one rank finds and all ranks raise: none waits for a message that never comes.

A rank that has found a bad id, or has no room for a batch, takes part in the exchange that is due
all the same, with a flag: in the numbers that are gathered with the ids, or as one element more
behind what it sends. Where a flag is set all ranks exchange texts, and raise the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from gulliver.comm import RankGroup, exchange, gather_integers
from gulliver.errors import GulliverError


def flagged(pieces: Sequence[Tensor], error: GulliverError | None, like: Tensor) -> Tensor:
    """Returns what a rank is sent, flat, with the flag behind it."""
    flag = like.new_full((1,), float(error is not None))
    return torch.cat([*(piece.reshape(-1) for piece in pieces), flag])


def unflagged(
    group: RankGroup, arriving: Sequence[Tensor], error: GulliverError | None
) -> list[Tensor]:
    """Returns what has arrived without the flags."""
    flags = torch.stack([flat.detach()[-1] for flat in arriving])
    if bool(flags.any()):
        raise_together(group, error, flags.device)
    return [flat[:-1] for flat in arriving]


def raise_together(group: RankGroup, error: GulliverError | None, device: torch.device) -> NoReturn:
    """Raises the error of the first rank that has one; all ranks call it."""
    if group.size == 1:
        assert error is not None, "a rank of its own flags what it has found"
        raise error
    text = list(str(error or "").encode())
    lengths = gather_integers(group, [len(text)], device)
    mine = torch.tensor(text, dtype=torch.int64, device=device)
    texts = exchange(group, [mine] * group.size, [length for (length,) in lengths])
    rank = next(rank for rank, (length,) in enumerate(lengths) if length)
    raise GulliverError(f"rank {rank}: {bytes(texts[rank].tolist()).decode()}") from error
