"""Host memory that the activations of planned steps may move to: ``--planner.offload``."""

from __future__ import annotations

import socket

import torch

from gulliver.comm import World, barrier, gather_objects
from gulliver.errors import GulliverError
from gulliver.hardware import HostRoom, SampleFit, host_copies, measure_moves, memory_bytes
from gulliver.options import size_text

LARGEST = 0.8
"""Share of a machine's memory that may be locked for activations."""


def check_host(offload: float | None, device: torch.device, ranks: int, memory: int) -> None:
    """Refuses host memory that is not there."""
    if offload is None:
        return
    if device.type != "cuda":
        raise GulliverError(
            f"--planner.offload {offload:g}: this run computes on its {device.type}, whose memory "
            "is the host's: leave it out, or train on GPUs"
        )
    asked = offload * 2**30 * ranks
    if asked > LARGEST * memory:
        most = LARGEST * memory / ranks / 2**30
        raise GulliverError(
            f"--planner.offload {offload:g} for {ranks} ranks of this machine are "
            f"{size_text(asked)}, and it has {size_text(memory)}: give at most {most:.3g}"
        )


def check_machine(offload: float | None, world: World) -> None:
    """The same for this machine; every rank calls it."""
    names = gather_objects(socket.gethostname())
    ranks = names.count(socket.gethostname())
    check_host(offload, world.device, ranks, memory_bytes("cpu"))


def with_moves(fit: SampleFit, device: torch.device) -> SampleFit:
    """Measures how fast bytes move to the host and back, on all ranks at once; rank 0's counts."""
    if device.type != "cuda" or fit.to_host_s:
        return fit
    barrier()
    return fit.with_moves(measure_moves(host_copies(device)))


def host_of(offload: float | None, pac: bool, fit: SampleFit) -> tuple[HostRoom | None, str]:
    """Host memory to plan with, and what is told of it; nothing where nothing moves."""
    room = None if offload is None or not pac else fit.host_room(offload * 2**30)
    if room is None:
        return None, ""
    return room, (
        f"activations may move to {size_text(room.bytes)} of a rank's host memory, of "
        f"{size_text(room.locked)} as --planner.offload says, at "
        f"{room.rates.write_rate / 1e9:.3g} GB/s there and {room.rates.read_rate / 1e9:.3g} back, "
        f"measured; error {fit.move_error:.1%} at most"
    )
