"""A process of `benchmarks.long_video`: trains, samples or decodes the whole grid under a limit.

It prints one line of JSON: seconds of each step, the most memory beside what the process held
before the model was built, what was predicted, and a number that tells that something was computed.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._long_video_costs import Tokens, cost
from gulliver.booster import Booster, GeminiPlugin
from gulliver.hardware import current_cluster
from gulliver.memory import activation_peak
from gulliver.models import STDiT3, VideoAutoencoder
from gulliver.parallel.convolution import stream_decode
from gulliver.video import RectifiedFlow

FPS = 24.0


@dataclass(frozen=True)
class Job:
    """Work of a process: its part, its sizes and its limits.

    Attributes:
        part: ``train``, ``sample`` or ``decode``.
        grid: latent frames, rows and columns.
        width: channels of the transformer, one head.
        words: caption tokens.
        steps: number of steps.
        limit: memory beside interpreter and torch, in bytes.
        activations: what is done with activations in training, as `GeminiPlugin` takes it.
        disk: bytes on the disk that activations may take.
        folder: folder on that disk.
        stretch: latent frames that are decoded at once.
        channels: channels of the decoder's convolutions.
    """

    part: str
    grid: tuple[int, int, int]
    width: int
    words: int
    steps: int
    limit: int
    activations: str
    disk: int
    folder: str
    stretch: int
    channels: int


@dataclass
class Done:
    """Results that a process reports.

    Attributes:
        seconds: seconds of each step.
        peak: most bytes beside what was held before the model was built.
        predicted_s: predicted seconds of a step.
        predicted: predicted bytes.
        plain: predicted bytes with nothing done about them.
        value: loss, or mean square of what was made.
    """

    seconds: list[float]
    peak: int
    predicted_s: float
    predicted: int
    plain: int
    value: float


class Narrow(nn.Module):
    """A narrow decoder of 4 x 8 x 8: latents enlarged twice, then this library's own decoder."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.grow = nn.Upsample(scale_factor=(1, 2, 2))
        self.inner = VideoAutoencoder(latent_channels=4, width=channels)

    def stream_decoder(self, latents: Tensor) -> Tensor:
        """Decodes any stretch of a clip's latents."""
        return self.inner.stream_decoder(self.grow(latents))

    def forward(self, latents: Tensor) -> Tensor:
        """Decodes a whole clip's latents."""
        return self.stream_decoder(latents)


def model_of(job: Job) -> STDiT3:
    """One pair of blocks, one head as wide as a head of the published models."""
    torch.manual_seed(0)
    return STDiT3(
        hidden_size=job.width,
        depth=1,
        num_heads=1,
        caption_channels=job.width,
        model_max_length=job.words,
        class_dropout_prob=0.0,
        zero_init_temporal=False,
    )


def inputs_of(job: Job, batch: int = 1) -> dict[str, Any]:
    """Conditions of a clip of 16 seconds."""
    _, rows, columns = job.grid
    return {
        "y": torch.randn(batch, 1, job.words, job.width),
        "fps": torch.full((batch,), FPS),
        "height": torch.full((batch,), 8.0 * rows),
        "width": torch.full((batch,), 8.0 * columns),
    }


def followed(job: Job, batch: int) -> dict[str, Any]:
    """Inputs on meta, with plain numbers for sizes, so that shapes alone tell all."""
    with torch.device("meta"):
        inputs = inputs_of(job, batch)
        inputs["x"] = torch.empty(batch, 4, *job.grid)
        inputs["timestep"] = torch.empty(batch)
    _, rows, columns = job.grid
    return {**inputs, "height": [8.0 * rows] * batch, "width": [8.0 * columns] * batch}


def tokens_of(job: Job, batch: int) -> Tokens:
    """Sizes of a call: a token is 2 x 2 latents."""
    frames, rows, columns = job.grid
    return Tokens(batch, frames, -(-rows // 2) * -(-columns // 2), job.words)


def held() -> int:
    """Most bytes of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def slowness(job: Job, batch: int, backward: bool) -> float:
    """Measured over predicted seconds of an eighth of the frames: what rates are here, and now."""
    small = replace(job, grid=(max(1, job.grid[0] // 8), *job.grid[1:]))
    model, inputs = model_of(small).eval(), inputs_of(small, batch)
    expected = cost(model, tokens_of(small, batch), current_cluster(1).device, "float32", cpu=True)
    x, level = torch.randn(batch, 4, *small.grid), torch.full((batch,), 500.0)
    began = time.perf_counter()
    with torch.set_grad_enabled(backward):
        out = model(x, level, **inputs)
    if backward:
        out.square().mean().backward()
    seconds = expected.forward + (expected.backward if backward else 0.0)
    return (time.perf_counter() - began) / seconds


def train(job: Job) -> Done:
    """Steps of rectified flow, planned from shapes alone."""
    cluster = current_cluster(1)
    with torch.device("meta"):
        shapes = model_of(job)
    expected = cost(shapes, tokens_of(job, 1), cluster.device, "float32", cpu=True)
    start, slower = held(), slowness(job, 1, backward=True)
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        disk = f"{folder}:{job.disk >> 20}MiB"
        # Pages of libraries that are first touched while it trains are in what is measured, too.
        told = job.limit - job.limit // 8
        plugin = GeminiPlugin(told, disk=disk, activations=job.activations, verbose=False)
        options = torch.optim.AdamW(shapes.parameters(), lr=1e-4)
        first = plugin.make_plan(shapes, options, cluster, sample=followed(job, 1))
        known = {"forward_s": slower * expected.forward, "backward_s": slower * expected.backward}
        work = replace(first.work, tokens=tokens_of(job, 1).all, **known)
        plan = plugin.make_plan(shapes, options, cluster, work=work)
        model = model_of(job).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        booster = Booster(plan=plan, verbose=False)
        model, optimizer, *_ = booster.boost(model, optimizer)
        flow = RectifiedFlow(use_timestep_transform=True)
        x0, conditions = torch.randn(1, 4, *job.grid), inputs_of(job)
        seconds, loss = [], torch.zeros(())
        for step in range(job.steps):
            noise, level = torch.randn_like(x0), torch.tensor([500.0 + step])
            began = time.perf_counter()
            loss = flow.loss(model, x0, conditions, noise=noise, timesteps=level).mean()
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
            loss = loss.detach()
    memory = plan.predicted.bytes
    return Done(
        seconds,
        held() - start,
        plan.predicted.seconds.step,
        memory.total + memory.activations,
        work.peak,
        float(loss),
    )


def sample(job: Job) -> Done:
    """Euler steps with guidance: both branches in one batch."""
    cluster = current_cluster(1)
    with torch.device("meta"):
        shapes = model_of(job).eval().requires_grad_(False)
    expected = cost(shapes, tokens_of(job, 2), cluster.device, "float32", cpu=True)
    peak = activation_peak(shapes, (), followed(job, 2)).bytes or 0
    start, slower = held(), slowness(job, 2, backward=False)
    model, flow = model_of(job).eval(), RectifiedFlow(use_timestep_transform=True)
    conditions, times = inputs_of(job), [time.perf_counter()]
    latents = flow.sample(
        model,
        torch.randn(1, 4, *job.grid),
        conditions,
        null_inputs={"y": torch.zeros_like(conditions["y"])},
        steps=job.steps,
        cfg_scale=7.0,
        progress=lambda *_: times.append(time.perf_counter()),
    )
    seconds = [b - a for a, b in itertools.pairwise(times)]
    value = float(latents.square().mean())
    return Done(seconds, held() - start, slower * expected.forward, peak, peak, value)


def decode(job: Job) -> Done:
    """Latents to frames, some latent frames at a time; each is thrown away when it is there."""
    frames, rows, columns = job.grid
    with torch.device("meta"):
        shapes = Narrow(job.channels).eval().requires_grad_(False)
        # Two latent frames before a stretch are kept by every convolution in time.
        part = torch.empty(1, 4, job.stretch + 2, rows, columns)
        whole = torch.empty(1, 4, frames, rows, columns)
    predicted, plain = (activation_peak(shapes, (z,)).bytes or 0 for z in (part, whole))
    start, decoder = held(), Narrow(job.channels).eval()
    latents = torch.randn(1, 4, *job.grid)
    seconds, made, total, began = [], 0, 0.0, time.perf_counter()

    def parts() -> Iterator[Tensor]:
        yield from latents.split(job.stretch, dim=2)

    shape: tuple[int, ...] = ()
    with torch.no_grad():
        for video in stream_decode(decoder, parts()):
            shape = tuple(video.shape[3:])
            made += video.shape[2]
            total += float(video.square().mean()) * video.shape[2]
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
    assert made == 4 * (frames - 1) + 1, made
    assert shape == (8 * rows, 8 * columns), shape
    return Done(seconds, held() - start, 0.0, predicted + latents.nbytes, plain, total / made)


def main() -> None:
    """Does the job that the command line tells."""
    values = json.loads(sys.argv[1])
    job = Job(**{**values, "grid": tuple(values["grid"])})
    done = {"train": train, "sample": sample, "decode": decode}[job.part](job)
    print(json.dumps(asdict(done)), flush=True)


if __name__ == "__main__":
    main()
