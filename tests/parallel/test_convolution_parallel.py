"""Networks of convolutions over ranks are the plain networks, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gulliver.comm import World, all_reduce
from gulliver.comm.watchdog import sent_bytes
from gulliver.errors import GulliverError
from gulliver.models import VideoAutoencoder
from gulliver.parallel.convolution import share_autoencoder
from tests.pool import Pool
from tests.video.autoencoder_models import TinyAutoencoder, tiny_image_autoencoder

VIDEO_DIMS = ("samples", "height", "width", "time")


def _make(name: str) -> tuple[nn.Module, Tensor]:
    """Returns a network and an input, the same on every rank."""
    torch.manual_seed(0)
    if name == "images":
        return tiny_image_autoencoder().double(), torch.randn(2, 3, 20, 12).double()
    if name == "ours":
        return VideoAutoencoder(width=8).double(), torch.randn(1, 3, 9, 20, 12).double()
    norm, attention, *sizes = name.split()
    shape = [int(size) for size in sizes] or [5, 10, 6]
    return TinyAutoencoder(norm, attention).double(), torch.randn(2, 3, *shape).double()


def _run(network: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns the output, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    ours = isinstance(network, VideoAutoencoder)
    out = network.decode(network.encode(x)) if ours else network(x)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view_as(out)
    gradients = torch.autograd.grad((out.square() * weights).sum(), [x, *network.parameters()])
    return out.detach(), list(gradients)


def _errors(world: World, cases: list[tuple[str, str]]) -> dict[str, float]:
    found = {}
    for name, dim in cases:
        network, x = _make(name)
        plain = _run(network, x)
        shared = share_autoencoder(network, dim=dim)
        out, gradients = _run(network, x)
        # That of the input is whole already.
        for gradient in gradients[1:]:
            all_reduce(gradient)
        with torch.no_grad():
            eager = network(x) if not isinstance(network, VideoAutoencoder) else out
        shared.off()
        pairs = zip([plain[0], plain[0], *plain[1]], [out, eager, *gradients], strict=True)
        found[f"{name}, {dim}"] = max(
            float((a - b).abs().max() / a.abs().max().clamp(min=1)) for a, b in pairs
        )
    return found


CASES = [
    *(("group raster", dim) for dim in VIDEO_DIMS),
    *(("frame frame", dim) for dim in ("height", "time")),
    *(("root full", dim) for dim in ("width", "time")),
    *(("images", dim) for dim in ("height", "width")),
    *(("ours", dim) for dim in VIDEO_DIMS),
    # Fewer latent rows than ranks; fewer rows than a window covers.
    ("group raster 5 4 6", "height"),
    ("group raster 1 6 2", "width"),
    ("root frame 2 4 4", "time"),
]


CHOSEN = [
    *(("group raster", dim) for dim in VIDEO_DIMS),
    ("images", "width"),
    ("ours", "time"),
    ("ours", "samples"),
    *CASES[-3:],
]
"""Cases of the default run."""


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, CHOSEN[3:]),
        pytest.param(4, CHOSEN, marks=pytest.mark.full),
        (3, CHOSEN[:2]),
        *(pytest.param(n, CASES, marks=pytest.mark.full) for n in (2, 3, 4)),
    ],
)
def test_a_shared_network_is_the_plain_one_forward_and_backward(
    pool: Pool, ranks: int, cases: list[tuple[str, str]]
) -> None:
    for errors in pool.run(_errors, ranks, cases):
        assert errors == {key: pytest.approx(0, abs=1e-10) for key in errors}


def _refused(world: World) -> list[str]:
    found = []
    network, x = _make("root full")
    wrong = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.InstanceNorm2d(3))
    for module, dim, given in (
        (wrong.double(), "height", x[:, :, 0]),
        (nn.Conv3d(3, 3, 3, padding=1, padding_mode="reflect").double(), "time", x),
        (nn.Upsample(scale_factor=2, mode="bilinear"), "width", x[:, :, 0]),
        (nn.Sequential(nn.Dropout(0.5)), "height", x),
    ):
        shared = share_autoencoder(module, dim=dim)
        with pytest.raises(GulliverError) as raised:
            module(given)
        shared.off()
        found.append(str(raised.value))
    with pytest.raises(GulliverError) as raised:
        share_autoencoder(network, dim="hight")
    return [*found, str(raised.value)]


def test_what_cannot_be_exact_is_refused_by_name_on_all_ranks(pool: Pool) -> None:
    messages = pool.run(_refused, 2)
    assert messages[0] == messages[1]
    words = ("instance norm", "mode reflect", "mode bilinear",
             "different masks", "height")  # fmt: skip
    for word, message in zip(words, messages[0], strict=True):
        assert word in message


def _halo(world: World) -> tuple[int, int]:
    """Bytes sent by this rank for a convolution, without those of gathering its output."""
    x = torch.randn(1, 8, 4, 16 * world.size, 16)
    network = nn.Conv3d(8, 8, 3, padding=1)
    shared = share_autoencoder(network, dim="height")
    with torch.no_grad():
        before = sent_bytes()
        out = network(x)
    shared.off()
    gathered = out.nbytes * (world.size - 1) // world.size
    return sent_bytes() - before - gathered, out.nbytes


def test_halos_are_a_row_for_each_neighbour(pool: Pool) -> None:
    for rank, (sent, whole) in enumerate(pool.run(_halo, 4)):
        assert sent == whole // (16 * 4) * (1 if rank in (0, 3) else 2)


def _chosen(world: World) -> tuple[list[str], list[str]]:
    torch.manual_seed(0)
    network, clips = TinyAutoencoder("group", "raster"), torch.randn(2, 3, 3, 8, 4)
    told: list[str] = []
    shared = share_autoencoder(network, dim="auto", show=told.append)
    found = []
    for x in (clips, clips[:1], clips[:1].mT):
        with torch.no_grad():
            network(x)
        found.append(shared.chosen["encoder", tuple(x.shape)])
    return found, told


def test_auto_takes_clips_where_there_are_enough_and_else_the_longer_side(pool: Pool) -> None:
    for chosen, told in pool.run(_chosen, 2):
        assert chosen == ["samples", "height", "width"]
        assert told[2].endswith("each with a part of the height of 1x3x3x8x4")


def _summed(world: World) -> float:
    network, x = _make("group raster")
    _, gradients = _run(network, x)
    shared = share_autoencoder(network, dim="width")
    out = network(x)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view_as(out)
    (out.square() * weights).sum().backward()
    shared.sum_gradients()
    pairs = zip(network.parameters(), gradients[1:], strict=True)
    return max(float((p.grad - g).abs().max() / g.abs().max()) for p, g in pairs)


def test_summed_gradients_are_those_of_the_plain_network(pool: Pool) -> None:
    assert max(pool.run(_summed, 2)) < 1e-10
