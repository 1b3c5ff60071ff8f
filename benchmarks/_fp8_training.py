"""The two trainings of the FP8 benchmark: a GPT on real text, and the STDiT on moving digits.

Text is the installed Python sources, byte by byte. Clips are seen as 4 frames of 8 x 8 places with
16 channels, the pixels of each place, so that no autoencoder stands between. Data and weights are
those of a seed: two trainings of one seed differ in number formats alone. Ranks take every so many
samples of a batch each, so that together they train on the same ones.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.booster import Booster, Plugin
from gulliver.comm import all_reduce, current_world
from gulliver.models import stdit3
from gulliver.precision.fp8 import convert_to_fp8

ARMS = ("fp32", "tensorwise", "rowwise")
LAST = 0.1  # Share of the steps at the end whose mean is the final loss
WARM_UP = 20
MEGABYTES = 4


@dataclass(frozen=True)
class Size:
    """A GPT and its batches."""

    width: int = 128
    blocks: int = 3
    heads: int = 4
    length: int = 64
    batch: int = 12


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.qkv, self.proj = (
            nn.Linear(size.width, 3 * size.width),
            nn.Linear(size.width, size.width),
        )
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """A language model of bytes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embed, self.places = (
            nn.Embedding(256, size.width),
            nn.Embedding(size.length, size.width),
        )
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm, self.lm_head = nn.LayerNorm(size.width), nn.Linear(size.width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@cache
def text() -> Tensor:
    """Some megabytes of the installed Python's own sources, as bytes."""
    found, left = [], MEGABYTES * 10**6
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found.append(path.read_bytes()[:left])
        left -= len(found[-1])
    return torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8).long()


def gpt_losses(
    arm: str,
    seed: int,
    steps: int,
    size: Size = Size(),
    device: str = "cpu",
    emulate: bool = True,
    plugin: Plugin | None = None,
) -> list[float]:
    """Losses of a GPT's steps; on a GPU it is compiled, under bf16 autocast."""
    torch.manual_seed(seed)
    model = Gpt(size)
    draw, data = torch.Generator().manual_seed(seed), text()
    near = torch.arange(size.length + 1)

    def batch() -> Tensor:
        starts = torch.randint(len(data) - size.length - 1, (size.batch, 1), generator=draw)
        return data[starts + near].to(device)

    on_gpu = device == "cuda"
    call = _readied(model.to(device), arm, emulate, compiled=on_gpu)

    def loss(call: Callable[..., Tensor]) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            return call(batch()[_own(plugin)])

    return _trained(model, call, loss, steps, plugin)


def stdit_losses(arm: str, seed: int, steps: int, plugin: Plugin | None = None) -> list[float]:
    """Losses of a rectified flow of moving digits; arguments as of `gpt_losses`."""
    from gulliver.video.digits import MovingDigits

    torch.manual_seed(seed)
    model = stdit3(
        "tiny",
        in_channels=16,
        depth=2,
        caption_channels=64,
        model_max_length=8,
        class_dropout_prob=0.0,
        zero_init_temporal=False,
    )
    clips = MovingDigits(length=8 * steps, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    words = torch.randn(14, 64, generator=torch.Generator().manual_seed(1))
    call = _readied(model, arm, True)
    numbers = iter(range(steps))

    def loss(call: Callable[..., Tensor]) -> Tensor:
        number = next(numbers)
        indices = list(range(8 * number, 8 * number + 8))
        pixels = clips.batch(indices)[:, :1, ::4].transpose(1, 2)
        x = (
            F.pixel_unshuffle(pixels.flatten(0, 1), 4)
            .unflatten(0, pixels.shape[:2])
            .transpose(1, 2)
        )
        labels = torch.tensor([clips.labels(index) for index in indices])
        y = torch.stack([words[labels[:, 0]], words[10 + labels[:, 1]]], 1)[:, None]
        noise = torch.randn(x.shape, generator=draw)
        share = torch.rand(len(x), generator=draw)
        mixed = torch.lerp(x, noise, share[:, None, None, None, None])
        own = _own(plugin)
        x, y, noise, mixed, share = (t[own] for t in (x, y, noise, mixed, share))
        sizes = {"fps": 8.0, "height": 32.0, "width": 32.0}
        given = {name: torch.full((len(x),), value) for name, value in sizes.items()}
        out = call(x=mixed, timestep=1000 * share, y=y, **given)
        return F.mse_loss(out[:, :16], x - noise)

    return _trained(model, call, loss, steps, plugin)


def _readied(
    model: nn.Module, arm: str, emulate: bool, compiled: bool = False
) -> Callable[..., Tensor]:
    if arm in ARMS[1:]:
        convert_to_fp8(model, arm, emulate=emulate)
    return torch.compile(model) if compiled else model


def _own(plugin: Plugin | None) -> slice:
    """Samples of a batch that this rank takes."""
    world = current_world()
    return slice(None) if plugin is None else slice(world.rank, None, world.size)


def _trained(
    model: nn.Module,
    call: Callable[..., Tensor],
    loss_of: Callable[[Callable[..., Tensor]], Tensor],
    steps: int,
    plugin: Plugin | None,
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / WARM_UP, 1.0) * max(0.05, 1 - n / steps)
    )
    losses = []
    if plugin is not None:
        booster = Booster(plugin=plugin)
        call, boosted, *_ = booster.boost(model, optimizer)
        for _ in range(steps):
            loss = loss_of(call)
            booster.backward(loss, boosted)
            boosted.step()
            boosted.zero_grad()
            rates.step()
            losses.append(loss.detach())
        mean = torch.stack(losses)
        all_reduce(mean, "mean")
        return mean.tolist()
    for _ in range(steps):
        loss = loss_of(call)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def final(losses: list[float]) -> float:
    """The mean of the last losses: one alone depends on its batch."""
    last = losses[-max(1, round(LAST * len(losses))) :]
    return sum(last) / len(last)
