"""Autoencoders streamed and shared: memory of each rank, bytes and time beside the public way.

`python -m benchmarks.autoencoder` measures three things. *stream*: the most bytes of tensors alive
at once while a clip of 17 to 257 frames is encoded and decoded in stretches. *memory*: the same for
each of several ranks that decode together, beside the plain decoder's divided by the ranks, plus
the halos and the whole input and output that all ranks have. *wire*: on links of 200 Mbit/s (it
needs root) the bytes that a decode sends, and its time, beside the public channel-parallel way:
every convolution over a rank's own input channels, an all-reduce of the whole output, of which each
rank keeps its slice, and norms of whole groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn

from benchmarks._harness import Report, at_least, at_most, finish
from benchmarks._live_bytes import LiveBytes
from benchmarks._sequence_shared import seconds_of, settled, slowest
from benchmarks.netlab import Net, run, wire_bytes
from gulliver.comm import init_world
from gulliver.models import VideoAutoencoder
from gulliver.parallel.convolution import share_autoencoder, stream_decode, stream_encode

MIB = 1 << 20
LENGTHS = (17, 65, 129, 257)
KERNEL = 3
WAYS = ("public", "height", "channels")


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    ranks: int = 4
    channels: int = 64
    frames: int = 5
    size: int = 96
    """Rows and columns of the decoded clip."""
    rounds: int = 5
    rate: str = "200mbit"
    parts: tuple[str, ...] = ("stream", "memory", "wire")
    quick: bool = False
    """Small sizes, to see that it runs; the bars need not hold."""
    keep: bool = False
    """Write benchmarks/results."""


class Residual(nn.Module):
    """Norm, activation, convolution, twice."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = []
        for _ in range(2):
            convolution = nn.Conv3d(channels, channels, KERNEL, padding=1)
            layers += [nn.GroupNorm(32, channels), nn.SiLU(), convolution]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the convolutions' output."""
        return x + self.layers(x)


def decoder(channels: int) -> nn.Module:
    """A decoder of the usual layers: 4 x 4 times more pixels than latents."""
    torch.manual_seed(0)
    up = nn.Upsample(scale_factor=(1, 2, 2))
    return nn.Sequential(
        nn.Conv3d(16, channels, KERNEL, padding=1),
        Residual(channels),
        up,
        Residual(channels),
        up,
        Residual(channels),
        nn.GroupNorm(32, channels),
        nn.SiLU(),
        nn.Conv3d(channels, 3, KERNEL, padding=1),
    ).eval()


def latents(options: Options) -> Tensor:
    """Latents of the clip, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    side = options.size // 4
    return torch.randn(1, 16, options.frames, side, side, generator=generator)


class PublicRow(nn.Module):
    """A convolution as public code shares it: an all-reduce of the output, then the own slice."""

    def __init__(self, whole: nn.Conv3d, last: bool) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.weight = whole.weight.detach().chunk(size, 1)[rank].contiguous()
        self.bias, self.last, self.place = whole.bias, last, (rank, size)

    def forward(self, x: Tensor) -> Tensor:
        """Convolves this rank's channels."""
        out = nn.functional.conv3d(x, self.weight, padding=1)
        dist.all_reduce(out)
        out = out + self.bias.view(-1, 1, 1, 1)  # pyright: ignore[reportOptionalMemberAccess]
        return out if self.last else out.chunk(self.place[1], 1)[self.place[0]].contiguous()


def public(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns the network as the public way runs it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, part in list(network.named_modules()):
        owner = network.get_submodule(name.rpartition(".")[0])
        key = name.rpartition(".")[2]
        if isinstance(part, nn.Conv3d):
            setattr(owner, key, PublicRow(part, part.out_channels == 3))
        elif isinstance(part, nn.GroupNorm):
            mine = nn.GroupNorm(part.num_groups // size, part.num_channels // size)
            for to, of in zip(mine.parameters(), part.parameters(), strict=True):
                to.data = of.data.chunk(size)[rank]
            setattr(owner, key, mine)
    return lambda x: network(x.chunk(size, 1)[rank].contiguous())


def ways(options: Options) -> dict[str, Callable[[Tensor], Tensor]]:
    """The contestants, each a function from whole latents to the whole clip."""
    found = {"public": public(decoder(options.channels))}
    for dim in WAYS[1:]:
        network = decoder(options.channels)
        share_autoencoder(network, dim=dim)
        found[dim] = network
    return found


@torch.no_grad()
def on_wire(options: Options) -> tuple[dict[str, int], dict[str, tuple[float, ...]], float]:
    """Bytes and seconds of each way on this rank, and the largest difference to the plain one."""
    init_world()
    x, contestants, error = latents(options), ways(options), 0.0
    plain, sent, seconds = decoder(options.channels)(x), {}, {name: [] for name in WAYS}
    for name, call in contestants.items():
        error = max(error, float((call(x) - plain).abs().max()))
        settled()
        before = wire_bytes()[0]
        call(x)
        settled()
        sent[name] = wire_bytes()[0] - before
    for _ in range(options.rounds):
        for name, call in contestants.items():
            seconds[name].append(seconds_of(lambda call=call: call(x)))
    return sent, {name: tuple(values) for name, values in seconds.items()}, error


@torch.no_grad()
def peaks(options: Options) -> tuple[int, int]:
    """Most bytes alive on this rank while the clip is decoded: plain, and shared by rows."""
    init_world()
    x, found = latents(options), []
    for dim in (None, "height"):
        network = decoder(options.channels)
        if dim is not None:
            share_autoencoder(network, dim=dim)
        with LiveBytes() as counter:
            network(x)
        found.append(counter.peak)
    return found[0], found[1]


@torch.no_grad()
def streamed_peak(frames: int, size: int) -> int:
    """Most bytes alive while a clip is encoded and its latents decoded, stretch by stretch."""
    torch.manual_seed(0)
    model = VideoAutoencoder(width=32).eval()

    def clips() -> Iterator[Tensor]:
        yield torch.zeros(1, 3, 1, size, size)
        for _ in range((frames - 1) // 4):
            yield torch.zeros(1, 3, 4, size, size)

    with LiveBytes() as counter:
        for video in stream_decode(model, stream_encode(model, clips())):
            del video
    return counter.peak


def report_stream(options: Options, report: Report) -> None:
    """Rows and the bar of the streamed peak."""
    size = 32 if options.quick else 64
    found = {frames: streamed_peak(frames, size) for frames in LENGTHS}
    for frames, peak in found.items():
        report.rows.append(("stream", f"{frames} frames", f"{peak / MIB:.2f} MiB", ""))
    growth = found[LENGTHS[-1]] / found[LENGTHS[0]]
    report.bars.append(at_most("stream: peak of 257 frames to that of 17", growth, 1.1))


def report_memory(options: Options, report: Report) -> None:
    """Rows and the bar of a rank's peak."""
    ranks = run(peaks, None, options, ranks=options.ranks)
    plain, worst = ranks[0][0], max(rank[1] for rank in ranks)
    row = options.channels * options.frames * options.size * 4
    # Halos of the widest layer, a row on each side, and what all ranks have whole by contract.
    around = 2 * row + latents(options).nbytes + 3 * row // options.channels * options.size
    share = plain / options.ranks + around
    report.rows.append(("memory", "plain", f"{plain / MIB:.1f} MiB", ""))
    shown = f"{plain / options.ranks / MIB:.1f} + {around / MIB:.1f} MiB"
    report.rows.append(("memory", f"of {options.ranks} ranks", f"{worst / MIB:.1f} MiB", shown))
    report.bars.append(at_most("memory: rank's peak to plain / n + halo", worst / share, 1.15))


def report_wire(options: Options, report: Report) -> None:
    """Rows and bars of bytes and time on shaped links."""
    with Net(options.ranks, options.rate) as net:
        ranks: list[Any] = run(on_wire, net, options)
    sent = {name: sum(rank[0][name] for rank in ranks) / len(ranks) for name in WAYS}
    seconds = slowest([rank[1] for rank in ranks])
    for name in WAYS:
        shown = f"{sent[name] / MIB:.2f} MiB", f"{seconds[name].median:.3f} s"
        report.rows.append(("wire", name, *shown))
    report.bars += [
        at_least("wire: bytes of the public way to height", sent["public"] / sent["height"], 3),
        at_least(
            "wire: bytes of the public way to channels",
            sent["public"] / sent["channels"],
            1.8,
        ),
        at_least(
            "wire: time of the public way to height",
            seconds["public"].median / seconds["height"].median,
            1.5,
        ),
        at_most("wire: largest difference to plain", max(rank[2] for rank in ranks), 1e-3),
    ]


REPORTS = {"memory": report_memory, "wire": report_wire, "stream": report_stream}
"""Parts in the order that they run: ranks are forked before this process computes anything."""


def main(options: Options) -> None:
    """Runs the parts."""
    report = Report(
        "autoencoder",
        "Autoencoders streamed and shared",
        ("part", "what", "found", "beside"),
        notes=[f"{options.ranks} ranks, links of {options.rate}, float32."],
    )
    for name, make in REPORTS.items():
        if name in options.parts:
            make(options, report)
    finish(report, options.keep)


if __name__ == "__main__":
    main(tyro.cli(Options))
