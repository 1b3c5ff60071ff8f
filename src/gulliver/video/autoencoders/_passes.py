"""Forward of a training step: whole, streamed in segments, or shared between ranks.

All three give the same values and, after backward, the same gradients: where ranks share the
networks each has its part of them, which the optimizer adds up with those of other clips.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gulliver.comm import make_axes
from gulliver.models import VideoAutoencoder
from gulliver.parallel.convolution import SharedNetworks, share_autoencoder, stream_trained
from gulliver.video.autoencoders._losses import Posterior


@dataclass(frozen=True)
class Passes:
    """Forward of an autoencoder's networks on this rank."""

    model: VideoAutoencoder
    # Latent frames of a segment that is streamed; 0 runs clips whole.
    segment: int = 0
    shared: SharedNetworks | None = None

    def encode(self, videos: Tensor) -> Posterior:
        """Encodes clips [B, 3, T, H, W] to the posterior of their latents."""
        moments = self._run(self.model.moments, videos, self.model.compression[0])
        return Posterior.of(moments, self.model.latent_channels)

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents that were not normalised."""
        return self._run(self.model.decode_raw, latents, 1)

    def _run(self, network: Callable[[Tensor], Tensor], x: Tensor, unit: int) -> Tensor:
        frames = x.shape[2]
        size = self.segment * unit
        if not size or frames <= size:
            return network(x)
        # The first latent frame is of a single frame.
        first = size - (unit - 1)
        sizes = [first] + [min(size, frames - at) for at in range(first, frames, size)]
        return stream_trained(network, x.split(sizes, dim=2))

    def off(self) -> None:
        """Makes the autoencoder plain again."""
        if self.shared is not None:
            self.shared.off()


def make_passes(
    model: VideoAutoencoder, segment_frames: int, share_ranks: int, dim: str, ranks: int
) -> Passes:
    """Makes the passes of a run; every rank calls it."""
    if share_ranks == 1:
        return Passes(model, segment_frames // model.compression[0])
    axes = make_axes({"data": ranks // share_ranks, "share": share_ranks})
    group = axes.rank_group("share")
    return Passes(model, 0, share_autoencoder(model, group, dim))
