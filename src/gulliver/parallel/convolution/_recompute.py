"""Trains through a stream: backward in time, segment by segment, in the memory of one.

latents = stream_trained(autoencoder.moments, clip.split(16, dim=2))
loss(latents).backward()                                # one segment's activations at a time
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gulliver.parallel.convolution._maskless import without_masks
from gulliver.parallel.convolution._stream import FrameStream, Kept, with_last


# [Note: backward through a stream] A segment's outputs depend on its frames and on what every layer
# has kept of the frames before, and its own kept frames go to the next. So a segment is a function
#
#     (frames, kept) -> (outputs, kept of the next)
#
# and a stream is a chain of these, as a recurrent network is: its backward runs from the last
# segment to the first, and what comes back for the kept frames of one is the gradient that the
# segment before begins with. Forward therefore keeps the borders alone, a few frames of each layer;
# the activations of a segment are computed again when backward comes to it
# (`torch.utils.checkpoint`), and dropped when it has passed. Gradients are those of the whole clip,
# at the price of one more forward.
def stream_trained(
    network: Callable[[Tensor], Tensor], parts: Iterable[Tensor], dim: int = 2
) -> Tensor:
    """Runs a network over segments of time, and keeps the activations of one for backward.

    Args:
        network: module or function made of convolutions, resampling, attention, and norms that do
            not reach over time.
        parts: segments of its input, one after the other.
        dim: dim of time.

    Returns:
        The output for the whole clip.

    Raises:
        GulliverError: a layer looks at frames that are still to come.
    """
    stream, made = FrameStream({}), []
    for part, final in with_last(parts):
        stream, out = _segment(network, stream, part, dim, final)
        if out is not None:
            made.append(out)
    return torch.cat(made, dim)


def _segment(
    network: Callable[[Tensor], Tensor], before: FrameStream, part: Tensor, dim: int, final: bool
) -> tuple[FrameStream, Tensor | None]:
    """Runs one segment; returns the stream after it, and what came out."""
    after: list[FrameStream | None] = []

    def run(part: Tensor, *tails: Tensor) -> tuple[Tensor | None, ...]:
        # A stream of its own each time: backward computes this once more, from the same start.
        stream = _with_tails(before, iter(tails))
        with without_masks(network):
            out = stream.run(network, part, dim, final)
        if not after:
            after.append(stream)
        return out, *tails_of(stream)

    out, *tails = checkpoint(run, part, *tails_of(before), use_reentrant=False)
    # Not kept: what is made here holds the graph, which holds this function.
    stream, after[0] = after[0], None
    assert stream is not None, "the function was called"
    return _with_tails(stream, iter(tails)), out


def tails_of(stream: FrameStream) -> list[Tensor]:
    """Returns the frames that a stream's layers keep, and those that wait."""
    waiting = [] if stream.waiting is None else [stream.waiting]
    return [tail for kept in stream.kept.values() for tail in _tails(kept)] + waiting


def _tails(kept: Kept) -> list[Tensor]:
    if isinstance(kept, Tensor):
        return [kept]
    if isinstance(kept, list):
        return [tail for one in kept for tail in _tails(one)]
    return [] if kept.tail is None else [kept.tail]


def _with_tails(stream: FrameStream, tails: Iterator[Tensor]) -> FrameStream:
    """Returns a copy of a stream with other tensors in the places of `tails_of`."""
    kept = {name: _refilled(value, tails) for name, value in stream.kept.items()}
    waiting = None if stream.waiting is None else next(tails)
    return stream.taken_up(kept, waiting)


def _refilled(kept: Kept, tails: Iterator[Tensor]) -> Any:
    if isinstance(kept, Tensor):
        return next(tails)
    if isinstance(kept, list):
        return [_refilled(one, tails) for one in kept]
    return kept if kept.tail is None else replace(kept, tail=next(tails))
