"""Runs convolutional networks exactly: sharded over ranks, streamed over time or in chunks.

    shared = share_autoencoder(autoencoder, mesh)              # several ranks encode and decode
    for video in stream_decode(autoencoder, latents): ...      # any length in constant memory
    video = stream_trained(autoencoder.decode, latents.split(4, dim=2))    # also backward
    chunked = chunk_convolutions(autoencoder, budget="1GiB")   # each convolution in chunks

These functions support modules made of convolutions, norms, resampling and attention; an operation
that would be inexact raises an error. `sharded` defines the tensor subclass that runs a module,
`shapes` and `functions` implement torch's functions on a shard, `ranks` and `stream` fetch missing
elements.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.parallel.convolution.chunked import chunk_convolutions as chunk_convolutions
    from gulliver.parallel.convolution.networks import without_masks as without_masks
    from gulliver.parallel.convolution.share import share_autoencoder as share_autoencoder
    from gulliver.parallel.convolution.stream import stream_decode as stream_decode
    from gulliver.parallel.convolution.stream import stream_encode as stream_encode
    from gulliver.parallel.convolution.stream import stream_trained as stream_trained

__getattr__, __dir__ = lazy_exports(__name__)
