"""The state of an optimizer as leaves of a checkpoint that other kinds of optimizer load too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
