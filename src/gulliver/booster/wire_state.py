"""Error feedback of packed messages in checkpoints, one entry per rank.

A rank feeds back the packing errors of its own gradients, and its parameters differ from its shards
by the packing errors of their changes. Neither makes sense on another number of ranks: there errors
are dropped, and all ranks begin with the parameters as saved.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from gulliver.checkpoint.collect import PerRank
from gulliver.checkpoint.reader import StepReader
from gulliver.comm.collectives import gather_objects
from gulliver.comm.world import init_world
from gulliver.parallel.optimizer import BoostedOptimizer
from gulliver.parallel.zero.optimizer import ZeroOptimizer

WIRE = "wire"


def _feedback(optimizer: BoostedOptimizer) -> Any:
    """The object that feeds packing errors back; None without one."""
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.shards.reducer.sender
    return optimizer.feedback


def wire_entry(optimizer: BoostedOptimizer) -> dict[str, PerRank]:
    """The checkpoint entry of packing errors, if messages are packed."""
    feedback = _feedback(optimizer)
    lost = feedback.lost() if feedback is not None and feedback.feeds else None
    shown = optimizer.checkpoint.shown_parts() if isinstance(optimizer, ZeroOptimizer) else {}
    if lost is None and not shown:
        return {}
    # Copied, because the next backward overwrites them.
    return {WIRE: PerRank({"lost": _copied(lost or {}), "shown": _copied(shown)})}


def _copied(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def restore_wire(reader: StepReader, optimizer: BoostedOptimizer) -> None:
    """Restores packing errors, or warns that they are dropped; every rank calls it."""
    world, feedback = init_world(), _feedback(optimizer)
    if feedback is not None:
        feedback.take_lost({})
    if not reader.is_per_rank(WIRE):
        return
    saved = reader.manifest.world_size
    found: dict[str, Any] = {}
    if saved == world.size:
        found = reader.value(WIRE, world.rank)
    fits = bool(found) and _fits(optimizer, found)
    if not all(gather_objects(fits)):
        if world.is_main:
            where = (
                f"this run of {world.size}" if saved != world.size else "chunks are cut elsewhere"
            )
            logging.getLogger("gulliver").warning(
                "%s: what packing had lost is left out: it is of %d ranks, %s",
                reader.folder,
                saved,
                where,
            )
        return
    if feedback is not None:
        feedback.take_lost(found["lost"])
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.checkpoint.take_shown_parts(found["shown"])


def _fits(optimizer: BoostedOptimizer, found: dict[str, Any]) -> bool:
    shapes = {name: p.shape for p, name in optimizer.names.items()}
    if any(shapes.get(name) != tensor.shape for name, tensor in found["lost"].items()):
        return False
    if not isinstance(optimizer, ZeroOptimizer):
        return True
    ours = {name: tensor.shape for name, tensor in optimizer.checkpoint.shown_parts().items()}
    return ours == {name: tensor.shape for name, tensor in found["shown"].items()}
