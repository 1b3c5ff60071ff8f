"""Distributes whole clips over ranks, for networks that treat them independently.

A network that is handed whole clips runs on plain tensors, so nothing refuses a function that mixes
them. Layers that do are found by their types, and all else by trying: the result for a clip
next to another must be its result alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gulliver.comm import RankGroup, gather_objects
from gulliver.errors import GulliverError
from gulliver.parallel.convolution._sharded import Sharded, like

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
)  # fmt: skip
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference by dtype, relative to the largest value; that of 16 bits is `COARSE`."""

COARSE, ON_DEVICE = 3e-2, 3e-3
"""Tolerances of 16 bits, and of float32 on a device: convolutions may round products (TF32)."""


def own_samples(plain: Any, x: Sharded, rest: tuple[Any, ...]) -> Any:
    """Runs a network on this rank's clips alone."""
    held = len(x.local)
    # A rank without work computes a clip of zeros, as long as another computes one: it knows what
    # comes out then, and has a part in backward.
    own = x.local if held else x.local.new_zeros(1, *x.shape[1:]) + x.local.sum()
    made = plain(own, *rest)
    if not isinstance(made, Tensor):
        return made
    return like(x, made if held else made[:0])


def refuse_mixing_layers(network: nn.Module, name: str) -> None:
    """Refuses layers that mix clips, or draw different random numbers on every rank."""
    for where, part in network.named_modules():
        if isinstance(part, BATCH_NORMS) and (part.training or part.running_mean is None):
            raise GulliverError(
                f"batch norm {where!r} of the {name} counts statistics of all clips, so they "
                "cannot be dealt to ranks: call eval(), or use group norms"
            )
        if isinstance(part, DROPOUTS) and part.training and part.p:
            raise GulliverError(
                f"dropout {where!r} of the {name}: every rank would draw others; call eval(), or "
                "set it to 0"
            )


def verify_independent(
    network: nn.Module, plain: Any, name: str, given: tuple[Any, ...], group: RankGroup
) -> None:
    """Checks by running it that a network treats clips independently; all ranks call it."""
    try:
        wrong = _depends(network, plain, *given)
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    for found in gather_objects(wrong, group.process_group):
        if found:
            raise GulliverError(
                f"clips of the {name} cannot be dealt to ranks ({found}): what comes of a clip "
                "must be the same beside any other; cut height, width or time instead"
            )


class _Called(nn.Module):
    """A network's own forward, without hooks or replacements."""

    def __init__(self, network: nn.Module, plain: Any) -> None:
        super().__init__()
        self.network, self.plain = network, plain

    def forward(self, *given: Any) -> Any:
        return self.plain(*given)


@torch.no_grad()
def _depends(network: nn.Module, plain: Any, x: Tensor, *rest: Any) -> str:
    """Describes how the result of a clip depends on another; empty if it does not."""

    def call(clips: Tensor) -> Any:
        # Buffers of its own: trying leaves no trace.
        buffers = {f"network.{key}": value.clone() for key, value in network.named_buffers()}
        return functional_call(_Called(network, plain), buffers, (clips.clone(), *rest))

    one = x[:1]
    # Not the next clip, which may be the same: one that nothing makes equal to the first.
    other = torch.arange(one.numel(), dtype=torch.float64, device=x.device).mul(0.7).sin()
    other = (other.view_as(one) * one.abs().amax().clamp(min=1)).to(x.dtype)
    both = call(torch.cat([one, other]))
    if not isinstance(both, Tensor):
        return ""  # refused for what it is
    if not both.dim() or len(both) != 2:
        return f"of two clips it makes a tensor {tuple(both.shape)}"
    allowed = _tolerance(x, both, *network.parameters())
    for at, clip in enumerate((one, other)):
        alone = call(clip)[0].nan_to_num()
        apart = (
            (both[at].nan_to_num() - alone).abs().amax() if alone.numel() else alone.new_zeros(())
        )
        if apart > allowed * alone.abs().amax():
            return f"beside another clip, values differ by up to {float(apart):.2g}"
    return ""


def _tolerance(*tensors: Tensor) -> float:
    x = tensors[0]
    if torch.is_autocast_enabled(x.device.type):
        return COARSE
    found = max(TOLERANCES.get(t.dtype, COARSE) for t in tensors if t.is_floating_point())
    return max(found, ON_DEVICE) if x.is_cuda and found > TOLERANCES[torch.float64] else found
