"""Convolutional networks over ranks, over time and in pieces, exactly, forward and backward.

    shared = share_autoencoder(autoencoder, mesh)              # several ranks encode and decode
    for video in stream_decode(autoencoder, latents): ...      # any length in constant memory
    video = stream_trained(autoencoder.decode, latents.split(4, dim=2))    # backward too
    chunked = chunk_convolutions(autoencoder, budget="1GiB")   # each convolution in pieces

They hold for modules made of convolutions, norms, resampling and attention; what cannot be exact is
refused by name. `sharded` has the tensor through which a module runs unchanged, `shapes` and
`functions` what torch's functions mean for a part, `ranks` and `stream` where the rest comes from.
"""

from gulliver.parallel.convolution import _compute as _compute
from gulliver.parallel.convolution._attention import frame_causal_attention
from gulliver.parallel.convolution._chunked import ChunkedConvolutions, chunk_convolutions
from gulliver.parallel.convolution._maskless import without_masks
from gulliver.parallel.convolution._networks import has_networks
from gulliver.parallel.convolution._plan import (
    INDEX_LIMIT,
    Convolution,
    ConvPlan,
    plan_convolution,
)
from gulliver.parallel.convolution._predict import SharingPrediction
from gulliver.parallel.convolution._recompute import stream_trained
from gulliver.parallel.convolution._share import SharedNetworks, share_autoencoder
from gulliver.parallel.convolution._stream import stream_decode, stream_encode, stream_module

__all__ = [
    "INDEX_LIMIT",
    "ChunkedConvolutions",
    "ConvPlan",
    "Convolution",
    "SharedNetworks",
    "SharingPrediction",
    "chunk_convolutions",
    "frame_causal_attention",
    "has_networks",
    "plan_convolution",
    "share_autoencoder",
    "stream_decode",
    "stream_encode",
    "stream_module",
    "stream_trained",
    "without_masks",
]
