"""Streamed networks give what the whole gives, in memory that does not grow with the clip."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.models import VideoAutoencoder
from gulliver.parallel.convolution import stream_decode, stream_encode, stream_trained
from gulliver.parallel.convolution.stream import stream_module
from tests.video.autoencoder_models import TinyAutoencoder

STRETCHES = [[1, 4, 8], [5, 2, 2, 4], [3, 10], [13]]


@pytest.mark.parametrize("attention", ["frame", "raster"])
@pytest.mark.parametrize("norm", ["frame", "root", "group"])
def test_streamed_segments_equal_whole_clip(norm: str, attention: str) -> None:
    torch.manual_seed(0)
    network = TinyAutoencoder(norm, attention).double()
    clip = torch.randn(2, 3, 13, 8, 6).double()
    norms = "passes" if norm == "group" else "refuse"
    with torch.no_grad():
        latents, video = network.encoder(clip), network(clip)
        for sizes in STRETCHES:
            found = stream_encode(network, lambda s=sizes: clip.split(s, 2), norms)
            torch.testing.assert_close(torch.cat(list(found), 2), latents, rtol=0, atol=1e-12)
        found = stream_decode(network, lambda: latents.split([2, 1, 4], 2), norms)
        torch.testing.assert_close(torch.cat(list(found), 2), video, rtol=0, atol=1e-12)


def test_our_autoencoder_streams_any_stretches_forward_and_backward() -> None:
    torch.manual_seed(0)
    model = VideoAutoencoder(width=8).double()
    clip = torch.randn(1, 3, 17, 8, 12).double().requires_grad_()
    latents = model.encode(clip)
    for sizes in ([17], [5, 4, 8], [1, 3, 13]):
        streamed = torch.cat(list(stream_encode(model, clip.split(sizes, 2))), 2)
        torch.testing.assert_close(streamed, latents, rtol=0, atol=1e-12)
        wanted = torch.autograd.grad(latents.square().sum(), clip, retain_graph=True)
        found = torch.autograd.grad(streamed.square().sum(), clip)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
    video = torch.cat(list(stream_decode(model, latents.split([2, 1, 2], 2))), 2)
    torch.testing.assert_close(video, model.decode(latents), rtol=0, atol=1e-12)


def test_layers_that_look_ahead_wait_for_the_frames_they_need() -> None:
    torch.manual_seed(0)
    network, clip = Ahead().double(), torch.randn(1, 3, 18, 4, 4).double()
    for sizes in ([1] * 18, [4, 9, 5]):
        found = torch.cat(list(stream_module(network, clip.split(sizes, 2))), 2)
        torch.testing.assert_close(found, network(clip), rtol=0, atol=1e-12)


class Ahead(nn.Module):
    """Layers that look ahead, and a downsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv3d(3, 3, 3, padding=1), nn.Conv3d(3, 3, 5, padding=2)
        self.down = nn.Conv3d(3, 3, (4, 1, 1), stride=(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.two(torch.relu(self.one(x)))
        return self.down(x)


def test_a_stream_is_trained_segment_by_segment_with_the_gradients_of_the_whole() -> None:
    torch.manual_seed(0)
    plain = VideoAutoencoder(width=8).double()
    tiny = TinyAutoencoder("frame", "raster").double()
    networks = [
        (Ahead().double(), lambda m, x: m(x), ([1] * 18, [4, 9, 5], [18])),
        (plain, lambda m, x: m.moments(x), ([1, 4, 4, 8], [5, 4, 8])),
        (tiny, lambda m, x: m.encoder(x), ([1, 4, 4, 8], [5, 12])),
    ]
    for network, call, splits in networks:
        frames = sum(splits[0])
        clip = torch.randn(1, 3, frames, 8, 8, dtype=torch.float64, requires_grad=True)
        inputs = [clip, *(p for p in network.parameters())]
        whole = call(network, clip)
        weights = torch.randn_like(whole)
        loss = (whole * weights).square().sum()
        wanted = torch.autograd.grad(loss, inputs, allow_unused=True)
        for sizes in splits:
            found = stream_trained(lambda x, c=call, n=network: c(n, x), clip.split(sizes, 2))
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
            loss = (found * weights).square().sum()
            # Twice, as an adaptive weight does: what is dropped is computed again.
            torch.autograd.grad(loss, clip, retain_graph=True)
            gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
            torch.testing.assert_close(gradients, wanted, rtol=1e-9, atol=1e-10)


def test_non_causal_functions_are_rejected_in_streams() -> None:
    clip = torch.randn(1, 3, 13, 8, 6)
    parts = clip.split([5, 8], 2)
    with pytest.raises(GulliverError, match=r"group norm over time.*norms='passes'"):
        list(stream_encode(TinyAutoencoder("group", "raster"), parts))
    with pytest.raises(GulliverError, match=r"dim 2.*causal"):
        list(stream_encode(TinyAutoencoder("root", "full"), parts))
    with pytest.raises(GulliverError, match="several times"):
        stream_encode(TinyAutoencoder(), parts, "passes")
    with pytest.raises(GulliverError, match="passes"):
        stream_encode(TinyAutoencoder(), parts, "pass")  # type: ignore[arg-type]
    with pytest.raises(GulliverError, match="no frames"):
        list(stream_encode(TinyAutoencoder(), []))
    with pytest.raises(GulliverError, match="encoder"):
        stream_encode(nn.Linear(2, 2), parts)
