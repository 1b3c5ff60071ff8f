"""Encodes and decodes clips of any length exactly, in constant memory.

    for latents in stream_encode(autoencoder, clips):        # clips [B, 3, frames, H, W]
        ...
    for video in stream_decode(autoencoder, latents):
        ...

The network's own forward runs on one segment of frames at a time. Its input has the shape of all
frames so far, but stores only the new ones; every convolution in time keeps its last frames
(`FrameStream.rows`), so each output frame is computed once, from the same frames as in the full
clip. The first and the last segment are padded like the clip. A downsampling layer keeps leftover
frames for the next segment.

Group norms over time are special: their statistics depend on later frames. ``norms="passes"`` runs
through the clip once per norm, because a norm's statistics depend on all earlier norms. That is
exact in constant memory; N norms cost about N / 2 full runs. By default such norms raise an error.

Attention in the middle block must be per frame or causal; causal attention caches keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver.errors import GulliverError, nearest
from gulliver.parallel.convolution.chunked import SlidingWindow
from gulliver.parallel.convolution.functions import merged
from gulliver.parallel.convolution.networks import (
    decoder_of,
    encoder_of,
    pieces_of,
    without_masks,
)
from gulliver.parallel.convolution.sharded import (
    Key,
    PartLayout,
    Rows,
    Sharded,
    ShardedDim,
    Sizes,
    Statistics,
    like,
    reject,
)

Norms = Literal["refuse", "passes"]
Clips = Iterable[Tensor] | Callable[[], Iterable[Tensor]]


def stream_encode(
    autoencoder: nn.Module, clips: Clips, norms: Norms = "refuse", frames: int | None = None
) -> Iterator[Tensor]:
    """Encodes one clip, segment by segment.

    Args:
        autoencoder: Gulliver or diffusers autoencoder (yields the output of `encoder` and
            `quant_conv`: concatenated mean and log-variance).
        clips: segments ``[batch, channels, frames, height, width]`` of any lengths; a function that
            returns them if `norms` needs several passes.
        norms: "refuse", or "passes" for exact statistics of group norms over time.
        frames: number of frames of the clip if not 4 k + 1, for autoencoders that pad it.

    Yields:
        Latents, as soon as the frames they depend on have arrived.

    Raises:
        GulliverError: a layer needs later frames.
    """
    own = pieces_of(autoencoder, "encode")
    if own is not None:
        return own(clips() if callable(clips) else clips, frames)
    network = encoder_of(autoencoder, frames)
    return stream_module(network, clips, 2, norms)


def stream_decode(
    autoencoder: nn.Module, latents: Clips, norms: Norms = "refuse", frames: int | None = None
) -> Iterator[Tensor]:
    """Decodes one clip's latents, segment by segment; see `stream_encode`."""
    own = pieces_of(autoencoder, "decode")
    if own is not None:
        return own(latents() if callable(latents) else latents, frames)
    network = decoder_of(autoencoder, frames)
    return stream_module(network, latents, 2, norms)


def stream_module(
    network: Callable[[Tensor], Tensor], clips: Clips, dim: int = 2, norms: Norms = "refuse"
) -> Iterator[Tensor]:
    """Runs any network over segments of time; see `stream_encode`."""
    if norms not in ("refuse", "passes"):
        raise GulliverError(f"unknown norms={norms!r}: {nearest(norms, ('refuse', 'passes'))}")
    counted: dict[tuple[Key, int], Statistics] = {}
    if norms == "passes":
        if not callable(clips):
            raise GulliverError(
                "norms='passes' reads the clip several times; pass a function that returns its "
                "chunks, such as lambda: clip.split(16, dim=2)"
            )
        while _count(network, clips, dim, counted):
            if torch.is_grad_enabled():
                raise GulliverError(
                    "norms='passes' has no backward through group norms over time: stream under "
                    "torch.no_grad(), or train with share_autoencoder"
                )
    return _streamed(network, clips, FrameStream(counted), dim)


def _streamed(network: Any, clips: Clips, stream: FrameStream, dim: int) -> Iterator[Tensor]:
    with without_masks(network):
        for part, final in with_last(clips() if callable(clips) else clips):
            made = stream.run(network, part, dim, final)
            if made is not None and made.numel():
                yield made


def _count(network: Any, clips: Any, dim: int, counted: dict[Any, Any]) -> bool:
    """Computes the statistics of the next norm; returns False if all norms have theirs."""
    stream = FrameStream(counted, counting=True)
    with torch.no_grad(), without_masks(network):
        for part, final in with_last(clips()):
            stream.run(network, part, dim, final)
    if stream.asked is None:
        return False
    counted[stream.asked] = merged(stream.found)
    return True


def with_last(parts: Iterable[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    before = None
    for part in parts:
        if before is not None:
            yield before, False
        before = part
    if before is None:
        raise GulliverError("the clip has no frames to stream")
    yield before, True


class _Starved(Exception):
    """Raised if a layer needs more frames for its first output; the segment is then extended."""


class _Counted(Exception):
    """Raised to end the run of a segment once a norm's statistics are recorded."""


@dataclass
class RowCache:
    """Input frames that a layer keeps for the next segment."""

    window: SlidingWindow
    done: int = 0  # Number of outputs so far
    start: int = 0  # First position of the tail
    tail: Tensor | None = None  # Positions that later outputs need
    bound: int | None = None  # Position that a slice ends at


Kept = RowCache | list[RowCache] | Tensor


class FrameStream(PartLayout):
    """Layout of a stream: part 0 is the frames seen before, part 1 the new ones."""

    rank = 1
    where = "time"
    grows = True

    def __init__(self, counted: dict[Any, Statistics], counting: bool = False) -> None:
        self.counted, self.counting = counted, counting
        # Norm whose statistics are missing.
        self.asked: Any = None
        # Its statistics in each segment.
        self.found: list[Statistics] = []
        self.final = False
        # Frames that each layer keeps, by the layer's key.
        self.kept: dict[Any, Any] = {}
        self._new: dict[Any, Any] = {}
        self._seen: dict[Key, int] = {}
        self._past = 0
        # Frames that have produced no output yet.
        self.waiting: Tensor | None = None

    def with_kept(self, kept: dict[Any, Any], waiting: Tensor | None) -> FrameStream:
        other = FrameStream(self.counted, self.counting)
        other.kept, other.waiting, other._past = kept, waiting, self._past
        return other

    def run(self, network: Any, part: Tensor, dim: int, final: bool) -> Tensor | None:
        """Runs a network over the next segment; None if there is no output yet."""
        part = part if self.waiting is None else torch.cat([self.waiting, part], dim)
        if final and not self._past:
            return network(part)  # it is complete
        self.final, self._seen, self._new = final, {}, {}
        self.graded = torch.is_grad_enabled()
        x = Sharded(part, ShardedDim(dim, (self._past, part.shape[dim])), self)
        try:
            made = network(x)
            if not isinstance(made, Sharded):
                raise GulliverError(f"a streamed network must return one tensor, not {type(made)}")
            made = made.local
        except _Starved:
            assert not final, "every layer has had an output before"
            self.waiting = part
            return None
        except _Counted:
            made = None
        self.kept.update(self._new)
        self._past, self.waiting = self._past + part.shape[dim], None
        return made

    def rows(self, x: Sharded, window: SlidingWindow, after: int, key: Key) -> tuple[Rows, Sizes]:
        """Prepends cached frames to new ones, and caches frames that later outputs need."""
        name = self._name(key)
        kept = self.kept.get(name) or RowCache(window)
        if kept.window != window:
            reject(f"torch's {key[0]} counted from the end", x)
        local, start, stop = self._joined(x, kept.tail, kept.start)
        # Padding after the last frame exists only once the last frame has arrived.
        count = max(kept.done, window.count(stop, after if self.final else min(after, 0)))
        if not count:
            raise _Starved
        keep, bound = min(max(0, count * window.stride + window.first), stop), stop + after
        if after < 0 and bound == kept.bound and x.cut.sizes[1]:
            keep = stop  # the slice did not grow with new frames: it is complete
        tail = local.narrow(x.cut.dim, max(0, keep - start), stop - max(keep, start)).clone()
        self._new[name] = RowCache(window, count, max(keep, start), tail, bound)
        needs = window.needs(kept.done, count) if kept.done < count else (start, start)
        if max(0, needs[0]) < start:
            reject(f"torch's {key[0]} in reverse", x)
        return Rows([local], start, x.cut.dim, needs, (kept.done, count)), (
            kept.done,
            count - kept.done,
        )

    def wait(self) -> None:
        """Requests the next segment; one frame alone does not determine a merged dim's factors."""
        raise _Starved

    def whole(self, x: Sharded, key: Key) -> Tensor:
        name = self._name(key)
        if x.cut.outer != 1:
            reject("attention over a merged dim", x)
        tail = self.kept.get(name)
        local = x.local if tail is None else torch.cat([tail, x.local], x.cut.dim)
        self._new[name] = local
        return local

    def align(self, parts: Sequence[Sharded], key: Key) -> list[Sharded]:
        """Truncates activations to the frames that all of them have, and caches the rest."""
        if len({part.cut.sizes for part in parts}) == 1:
            return list(parts)
        name = self._name(key)
        kept = self.kept.get(name) or [RowCache(SlidingWindow()) for _ in parts]
        done, ready = kept[0].done, min(part.cut.extent for part in parts)
        if not ready:
            raise _Starved
        news, made = [], []
        for part, own in zip(parts, kept, strict=True):
            local, start, stop = self._joined(part, own.tail, own.start)
            dim = part.cut.dim
            made.append(
                like(part, local.narrow(dim, done - start, ready - done),
                     part.cut.resized((done, ready - done)))
            )  # fmt: skip
            tail = local.narrow(dim, ready - start, stop - ready).clone()
            news.append(RowCache(SlidingWindow(), ready, ready, tail))
        self._new[name] = news
        return made

    def at_ends(self, x: Sharded, before: int, after: int, mode: str) -> tuple[int, int]:
        """Returns the padding at both ends; it is 0 at the end until the last segment."""
        if after and self.final and not x.local.shape[x.cut.dim]:
            reject("padding after the last frame", x, "end with a longer segment")
        return before, after if self.final else 0

    def statistics(self, x: Sharded, own: Statistics, key: Key) -> Statistics:
        name = self._name(key)
        if name in self.counted:
            if self.graded:
                reject("training through a group norm over time", x, "share the autoencoder")
            return self.counted[name]
        if not self.counting:
            reject(
                "a group norm over time", x,
                "its statistics include later frames; norms='passes' counts them exactly",
            )  # fmt: skip
        self.asked = name
        self.found.append(own)
        raise _Counted

    def _name(self, key: Key) -> tuple[Key, int]:
        """Returns the cache key of an operation; operations run in the same order every time."""
        number = self._seen.get(key, 0)
        self._seen[key] = number + 1
        return key, number

    def _joined(self, x: Sharded, tail: Tensor | None, start: int) -> tuple[Tensor, int, int]:
        past, new = x.cut.sizes
        if tail is None:
            return x.local, past, past + new
        assert start + tail.shape[x.cut.dim] == past, "a layer was called in another order"
        joined = torch.cat([tail, x.local], x.cut.dim) if tail.shape[x.cut.dim] else x.local
        return joined, start, past + new


# Trains through a stream: backward in time, segment by segment, in the memory of one.
#
# latents = stream_trained(autoencoder.moments, clip.split(16, dim=2)) loss(latents).backward()
# # one segment's activations at a time


# [Note: backward through a stream] A segment's outputs depend on its frames and on the earlier
# frames that each layer has kept, and its own kept frames are inputs of the next segment. So a
# segment is a function
#
#     (frames, kept) -> (outputs, kept of the next)
#
# and a stream is a chain of these, like a recurrent network: backward runs from the last segment to
# the first, and the gradient of one segment's kept frames is an output gradient of the previous
# segment. So forward only stores the kept frames, a few per layer; a segment's activations are
# recomputed when backward reaches it (`torch.utils.checkpoint`) and then dropped. Gradients are
# those of the full clip, at the cost of one additional forward.
def stream_trained(
    network: Callable[[Tensor], Tensor], parts: Iterable[Tensor], dim: int = 2
) -> Tensor:
    """Runs a network over segments of a clip; backward recomputes one segment at a time.

    Args:
        network: module or function made of convolutions, resampling, attention, and norms that do
            not span time.
        parts: segments of its input, one at a time.
        dim: time dimension.

    Returns:
        The output for the whole clip.

    Raises:
        GulliverError: a layer needs later frames.
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
    after: list[FrameStream | None] = []

    def run(part: Tensor, *tails: Tensor) -> tuple[Tensor | None, ...]:
        # a new stream each time, because backward repeats this from the same state.
        stream = _with_tails(before, iter(tails))
        with without_masks(network):
            out = stream.run(network, part, dim, final)
        if not after:
            after.append(stream)
        return out, *tails_of(stream)

    out, *tails = checkpoint(run, part, *tails_of(before), use_reentrant=False)
    # Not stored, because the result refers to the graph, which refers to this function.
    stream, after[0] = after[0], None
    assert stream is not None, "the function was called"
    return _with_tails(stream, iter(tails)), out


def tails_of(stream: FrameStream) -> list[Tensor]:
    waiting = [] if stream.waiting is None else [stream.waiting]
    return [tail for kept in stream.kept.values() for tail in _tails(kept)] + waiting


def _tails(kept: Kept) -> list[Tensor]:
    if isinstance(kept, Tensor):
        return [kept]
    if isinstance(kept, list):
        return [tail for one in kept for tail in _tails(one)]
    return [] if kept.tail is None else [kept.tail]


def _with_tails(stream: FrameStream, tails: Iterator[Tensor]) -> FrameStream:
    kept = {name: _refilled(value, tails) for name, value in stream.kept.items()}
    waiting = None if stream.waiting is None else next(tails)
    return stream.with_kept(kept, waiting)


def _refilled(kept: Kept, tails: Iterator[Tensor]) -> Any:
    if isinstance(kept, Tensor):
        return next(tails)
    if isinstance(kept, list):
        return [_refilled(one, tails) for one in kept]
    return kept if kept.tail is None else replace(kept, tail=next(tails))
