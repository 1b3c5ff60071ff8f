"""What a shared or streamed network cannot compute exactly is refused by name, never wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.parallel.convolution import share_autoencoder, stream_trained
from gulliver.parallel.convolution.stream import stream_module
from tests.pool import Pool

CLIP = (2, 3, 4, 7, 6)


class Between(nn.Module):
    """A function of an activation between two convolutions."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two = nn.Conv3d(3, 4, 3, padding=1), nn.Conv3d(4, 2, (1, 3, 3))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.call(self.one(x)))


def _between(call: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Between(call).double()


def _clip() -> Tensor:
    return torch.randn(CLIP, generator=torch.Generator().manual_seed(1)).double()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        return grad * 2


def _reentrant(x: Tensor) -> Any:
    # torch warns where the shell, which has no graph of its own, is its only input.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoint(torch.tanh, x, use_reentrant=True)


def _recomputed(x: Tensor) -> Any:
    return checkpoint(lambda y: torch.tanh(y).sin(), x, use_reentrant=False)


def _lost_gradients(world: World) -> list[str]:
    found = []
    for call in (Doubled.apply, _reentrant, _recomputed):
        network, x = _between(call), _clip()
        share_autoencoder(network, dim="height")
        try:
            network(x.requires_grad_()).sum().backward()
            found.append("")
        except GulliverError as error:
            found.append(str(error))
    return found


def test_functions_that_lose_gradients_are_refused_in_sharing_and_streaming(pool: Pool) -> None:
    for messages in pool.run(_lost_gradients, 2):
        assert "reentrant checkpoint" in messages[0]
        assert "torch's tanh while gradients are off" in messages[1]
        assert messages[2] == ""
    for call in (Doubled.apply, _reentrant):
        with pytest.raises(GulliverError, match="use_reentrant=False"):
            stream_trained(_between(call), _clip().split(2, 2))
        with pytest.raises(GulliverError, match="use_reentrant=False"):
            list(stream_module(_between(call), _clip().split(2, 2)))
        with torch.no_grad():
            list(stream_module(_between(call), _clip().split(2, 2)))
    torch.cat(list(stream_module(_between(_recomputed), _clip().split(2, 2))), 2).sum().backward()


def test_a_stream_has_no_gradients_of_norms_counted_in_passes() -> None:
    network = nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.GroupNorm(2, 4))
    clip = torch.randn(CLIP)
    with pytest.raises(GulliverError, match="no backward through group norms"):
        stream_module(network, lambda: clip.split(2, 2), norms="passes")
    with torch.no_grad():
        found = torch.cat(list(stream_module(network, lambda: clip.split(2, 2), norms="passes")), 2)
        torch.testing.assert_close(found, network(clip))


def test_forms_that_are_not_known_are_refused_by_name() -> None:
    def scan(y: Tensor) -> Tensor:
        made = [y[:, :, 0]]
        for frame in range(1, y.shape[2]):
            made.append(made[-1] * 0.5 + y[:, :, frame])
        return torch.stack(made, 2)

    def beside(y: Tensor) -> Tensor:
        return torch.cat([y, torch.zeros(2, 1, 11, 7, 6).double()], 1)[:, :4]

    clip = _clip().repeat(1, 1, 3, 1, 1)[:, :, :11]
    for call in (scan, beside):
        with pytest.raises(GulliverError, match="this form of torch's"):
            list(stream_module(_between(call), clip.split([3, 1, 4, 2, 1], 2)))


def _context(world: World) -> str:
    def attend(y: Tensor) -> Tensor:
        q = y.flatten(2).transpose(1, 2).unsqueeze(1)
        learned = torch.ones(2, 1, 5, 4).double()
        made = F.scaled_dot_product_attention(q, learned, learned)
        return made.squeeze(1).transpose(1, 2).view(y.shape)

    network = _between(attend)
    share_autoencoder(network, dim="height")
    with pytest.raises(GulliverError) as raised:
        network(_clip())
    return str(raised.value)


def test_attention_to_a_learned_context_is_refused_by_name(pool: Pool) -> None:
    for message in pool.run(_context, 2):
        assert "this form of torch's scaled_dot_product_attention" in message


def _written(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def call(y: Tensor) -> Tensor:
        y = y.clone()
        made = change(y)
        return y if made is None else made

    return call


def _base_after_view(y: Tensor) -> Tensor:
    view = y[:, :, :, :2]
    y.mul_(3)
    return torch.cat([view, y[:, :, :, 2:]], 3)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "rows": lambda y: _nothing(y[:, :, :, :3].mul_(2)),
    "flat": lambda y: _nothing(y[:, :, :, :3].flatten(3).mul_(2)),
    "one row": lambda y: _nothing(y.select(3, 5).zero_()),
    "channels": lambda y: _nothing(y[:, 3:].mul_(3)),
    "relu": lambda y: _nothing(F.relu(y[:, 1:], inplace=True)),
    "out": lambda y: _nothing(torch.neg(y[:, :, :, :3], out=y[:, :, :, 1:4])),
    "base": _base_after_view,
    "whole": lambda y: y.mul_(2).add_(1),
    "view": lambda y: _nothing(y.flatten(2).transpose(1, 2).mul_(3)),
}


def _nothing(made: Tensor) -> None:
    return None


def _writes(world: World) -> dict[str, str]:
    found = {}
    for name, change in WRITES.items():
        network, x = _between(_written(change)), _clip()
        with torch.no_grad():
            plain = network(x)
            shared = share_autoencoder(network, dim="height")
            try:
                wrong = float((network(x) - plain).abs().max())
                found[name] = "exact" if wrong < 1e-12 else "wrong"
            except GulliverError as error:
                found[name] = "in place" if "in place" in str(error) else str(error)
            shared.off()
    return found


def test_writes_to_what_has_views_are_refused_and_others_exact(pool: Pool) -> None:
    wanted = dict.fromkeys(WRITES, "in place") | {"whole": "exact"}
    for found in pool.run(_writes, 2):
        assert found == wanted


class Standardised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean()) / x.std()


class Flipped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(0)


def _mixing() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    conv = nn.Conv3d(3, 4, 3, padding=1)
    found = {
        "batch norm": nn.BatchNorm3d(4),
        "dropout": nn.Dropout(0.5),
        "mean": Standardised(),
        "flip": Flipped(),
        "evaluated": nn.Sequential(nn.BatchNorm3d(4), nn.Dropout(0.5), nn.GroupNorm(2, 4)).eval(),
    }
    return {name: nn.Sequential(conv, layer).double() for name, layer in found.items()}


def _dealt(world: World) -> dict[str, str]:
    found = {}
    # Alike clips, as a batch may have: what mixes them is found all the same.
    clips = _clip()[:1].expand(3, -1, -1, -1, -1).clone()
    for name, network in _mixing().items():
        with torch.no_grad():
            shared = share_autoencoder(network, dim="samples")
            try:
                made = network(clips)
                found[name] = ""
            except GulliverError as error:
                found[name] = str(error)
                continue
            finally:
                shared.off()
            torch.testing.assert_close(made, network(clips), rtol=0, atol=1e-12)
    return found


def test_clips_that_depend_on_each_other_are_not_dealt_to_ranks(pool: Pool) -> None:
    for found in pool.run(_dealt, 2):
        assert "counts statistics" in found["batch norm"]
        assert "different masks" in found["dropout"]
        assert "torch's mean over all dims" in found["mean"]
        assert "torch's flip" in found["flip"]
        assert found["evaluated"] == ""
