"""`serve`: a rank's life: it loads its part, says what it has room for, and works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gulliver.comm import ALONE, RankGroup
from gulliver.serve._batch import Batch
from gulliver.serve._ways import ModelOptions
from gulliver.serve.ranks._layout import Layout
from gulliver.serve.ranks._stage import StageModel
from gulliver.serve.ranks._worker import RankMessage, work


def serve(
    link: Any,
    folder: Path,
    options: ModelOptions,
    layout: Layout,
    rank: int,
    sequences: int,
    block_size: int,
    before: Callable[[Batch], None] | None = None,
) -> None:
    """Runs a rank until the controller ends it; errors are sent to the controller."""
    # Every rank of the layout calls it, in a world whose first ranks are those of the layout.
    try:
        group = tensor_group(layout, rank)
        model = StageModel(folder, options, layout, rank, group)
        link.send(RankMessage("sizes", value=model.sizes(options, block_size, sequences)))
        blocks = link.recv()
        if blocks is None:
            return
        model.take_cache(blocks, block_size)
        link.send(RankMessage("ready"))
        world = RankGroup(tuple(range(layout.ranks)), rank)
        work(link, model, layout, rank, world, before)
        model.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the controller has gone
    except Exception as error:
        text = " ".join(str(error).split())[:500] or type(error).__name__
        with contextlib.suppress(OSError):  # the controller may have gone meanwhile
            link.send(RankMessage("failed", value=text))


def tensor_group(layout: Layout, rank: int) -> RankGroup:
    """The tensor ranks of a rank's stage; every rank of the layout calls it."""
    if layout.tensor == 1:
        return ALONE
    mine = layout.members(layout.place(rank).stage)
    group: Any = dist.new_group(list(mine), use_local_synchronization=True)
    return RankGroup(mine, mine.index(rank), group)
