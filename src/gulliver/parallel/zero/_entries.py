"""The state of an optimizer as leaves of a checkpoint that other kinds of optimizer load too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gulliver.parallel._optimizer import Leaf, Saved
from gulliver.parallel.zero import _saved
from gulliver.parallel.zero._optimizer import ZeroOptimizer


def export_leaves(optimizer: ZeroOptimizer) -> Saved:
    """State and, of parameters of 16 bits, their float32 copies, as far as this rank saves them."""
    return _saved.export_leaves(optimizer.shards, optimizer.writer)


def import_leaves(
    optimizer: ZeroOptimizer, entries: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, str], Leaf]:
    """Gives the tensors to fill for what `export_leaves` gave: state, and float32 copies too."""
    return _saved.import_leaves(optimizer.shards, entries, optimizer.has_whole_state)


def exact_parameters(optimizer: ZeroOptimizer, model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters whose changes travel packed, by the names of its `state_dict`."""
    # Every rank calls it.
    found: dict[nn.Parameter, Tensor] = {}
    shards = optimizer.shards
    _saved.take_finished_writes(shards)
    for sharded in shards.everything:
        if sharded.chunk.shown_part is not None:
            views = sharded.chunk.named_views(shards.gatherer.copied(sharded))
            found |= {p: views[name] for name, p in sharded.chunk.parameters.items()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: found[p] for name, p in named if p in found}


def shown_parts(optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    """This rank's parts of chunks as all ranks have them, where changes travel, by first name."""
    found: dict[str, Tensor] = {}
    for sharded in optimizer.everything:
        optimizer.gatherer.finish(sharded)
        if sharded.chunk.shown_part is not None:
            found[sharded.chunk.layout.slots[0].name] = sharded.chunk.shown_part
    return found


def take_shown_parts(optimizer: ZeroOptimizer, found: Mapping[str, Tensor]) -> None:
    """Gives parameters the values that all ranks had; shards stay. Every rank calls it."""
    for sharded in optimizer.everything:
        part = found.get(sharded.chunk.layout.slots[0].name)
        if part is not None:
            optimizer.gatherer.show(sharded, part)
