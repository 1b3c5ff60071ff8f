"""Predicts how long the ranks need when each dim is cut, to choose among them.

The network runs once for each dim on tensors without values, as the busiest rank would: the first,
whose part is never smaller than another's. What it would compute, move and send is counted
and priced by the cluster's rates (`gulliver.hardware`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from gulliver._compat import DispatchMode
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster, memory_seconds, point_to_point_seconds
from gulliver.parallel.convolution._maskless import without_masks
from gulliver.parallel.convolution._ranks import Imagined


@dataclass(frozen=True)
class SharingPrediction:
    """The predicted cost of a forward with one dim cut."""

    dim: str  # Dim that is cut
    seconds: float  # Predicted seconds of the busiest rank
    sent: int  # Bytes that it sends
    exchanges: int
    operations: int  # Number of its floating-point operations

    def __str__(self) -> str:
        return (
            f"{self.dim}: {self.seconds * 1e3:.3g} ms, {self.sent / 2**20:.3g} MiB sent in "
            f"{self.exchanges} exchanges, {self.operations / 1e9:.3g} GFLOP"
        )


def predict(
    network: nn.Module, x: Tensor, dims: dict[str, int], ranks: int, cluster: Cluster
) -> list[SharingPrediction]:
    """Predicts a forward for every dim that can be cut, the fastest first."""
    found, refused = [], None
    for name, dim in dims.items():
        if -dim > x.dim() or dim >= x.dim() or (name == "time" and x.dim() < 5):
            continue
        try:
            found.append(_predicted(network, x, name, dim, ranks, cluster))
        except GulliverError as error:
            refused = refused or error
    if not found:
        raise refused or GulliverError(f"an input of shape {tuple(x.shape)} has no dim to cut")
    return sorted(found, key=lambda predicted: predicted.seconds)


def _predicted(
    network: nn.Module, x: Tensor, name: str, dim: int, ranks: int, cluster: Cluster
) -> SharingPrediction:
    holder = Imagined(0, ranks)
    counter, moved = FlopCounterMode(display=False), _Moved()
    given: Tensor = holder.shard(torch.empty(x.shape, dtype=x.dtype, device="meta"), dim)
    if name == "samples":
        # Whole clips need nothing of each other: the network runs on them plainly.
        given = torch.empty(-(-len(x) // ranks), *x.shape[1:], dtype=x.dtype, device="meta")
    state = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    empty = {key: torch.empty_like(value, device="meta") for key, value in state.items()}
    with torch.no_grad(), _plain(network), without_masks(network), moved, counter:
        functional_call(network, empty, (given,))
    device, operations = cluster.device, counter.get_total_flops()
    dtype = str(x.dtype).removeprefix("torch.")
    rate = device.matmul.get(dtype) or max(device.matmul.values())
    seconds = operations / rate + memory_seconds(device, moved.nbytes)
    if ranks > 1 and cluster.axes:
        link = cluster.axes[0].link
        each = holder.sent / max(1, holder.calls)
        seconds += holder.calls * point_to_point_seconds(link, int(each))
    return SharingPrediction(name, seconds, holder.sent, holder.calls, operations)


@contextmanager
def _plain(network: Any) -> Iterator[None]:
    """Restores a network's own forward inside the block."""
    replaced = vars(network).pop("forward", None)
    try:
        yield
    finally:
        if replaced is not None:
            network.forward = replaced


class _Moved(DispatchMode):
    """Counts the bytes that operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.nbytes += made.nbytes
        return made
