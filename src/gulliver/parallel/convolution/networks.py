"""Middle blocks of diffusers' autoencoders without their dense attention mask.

HunyuanVideo's middle block masks later frames with a dense mask that it builds in every call.
`without_masks` temporarily swaps its forward for one that calls `frame_causal_attention`; layers,
weights and results are the same. Other blocks are unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.parallel.convolution.functions import frame_causal_attention

MASKED = ("HunyuanVideoMidBlock3D",)
"""Classes of blocks whose forward builds a dense mask."""


@contextmanager
def without_masks(network: Any) -> Iterator[None]:
    """Context in which a module's middle blocks compute attention without a dense mask."""
    # `network` may be a bound method of a module, or a partial of one.
    network = getattr(getattr(network, "func", network), "__self__", network)
    found = network.modules() if isinstance(network, nn.Module) else ()
    blocks: list[Any] = [
        b for b in found if type(b).__name__ in MASKED and "forward" not in vars(b)
    ]
    for block in blocks:
        block.forward = partial(_middle, block)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _middle(block: Any, hidden_states: Tensor) -> Tensor:
    recompute = torch.is_grad_enabled() and block.gradient_checkpointing
    x = hidden_states
    for attention, layer in zip([None, *block.attentions], block.resnets, strict=True):
        if attention is not None:
            x = _attend(attention, x)
        x = block._gradient_checkpointing_func(layer, x) if recompute else layer(x)
    return x


def _attend(attention: Any, x: Tensor) -> Tensor:
    frames, height, width = x.shape[2:]
    tokens = x.flatten(2)
    if attention.group_norm is not None:
        tokens = attention.group_norm(tokens)
    tokens = tokens.transpose(1, 2)
    q, k, v = (
        layer(tokens).unflatten(2, (attention.heads, -1)).transpose(1, 2)
        for layer in (attention.to_q, attention.to_k, attention.to_v)
    )
    made = frame_causal_attention(q, k, v, height * width)
    made = attention.to_out[1](attention.to_out[0](made.transpose(1, 2).flatten(2)))
    made = made.transpose(1, 2).unflatten(2, (frames, height, width))
    made = made + x if attention.residual_connection else made
    return made / attention.rescale_output_factor


# The networks of an autoencoder.
#
# If an autoencoder has `stream_encoder` and `stream_decoder`, these map full clips; if it computes
# clips in its own chunks (`micro_frames`), `encode_pieces` and `decode_pieces` map streams of
# chunks. Otherwise it has `encoder` and `decoder`, optionally with `quant_conv` and
# `post_quant_conv`, as in diffusers. diffusers' own `encode` is not used, because it splits long
# clips into tiles and blends them.


def encoder_of(autoencoder: nn.Module, frames: int | None = None) -> Callable[[Tensor], Tensor]:
    """Returns the encoder, which maps videos to latents or to their mean and log-variance."""
    own = getattr(autoencoder, "stream_encoder", None)
    if own is not None:
        return own if frames is None else _with_frames(own, frames)
    return _ModuleChain(_part(autoencoder, "encoder"), getattr(autoencoder, "quant_conv", None))


def decoder_of(autoencoder: nn.Module, frames: int | None = None) -> Callable[[Tensor], Tensor]:
    own = getattr(autoencoder, "stream_decoder", None)
    if own is not None:
        return own if frames is None else _with_frames(own, frames)
    return _ModuleChain(
        getattr(autoencoder, "post_quant_conv", None), _part(autoencoder, "decoder")
    )


def networks_of(autoencoder: nn.Module) -> dict[str, nn.Module]:
    """Returns an autoencoder's networks by name; any other module is a single network."""
    found = getattr(autoencoder, "networks", None)
    if not isinstance(found, dict):
        parts = {name: getattr(autoencoder, name, None) for name in ("encoder", "decoder")}
        found = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        return found or {type(autoencoder).__name__: autoencoder}
    if not found:
        raise GulliverError(
            f"{type(autoencoder).__name__} passes frames between chunks itself, so it cannot be "
            "sharded; stream it, or use dim='samples'"
        )
    return found


def has_networks(autoencoder: Any) -> bool:
    return getattr(autoencoder, "networks", None) != {}


def pieces_of(autoencoder: nn.Module, name: str) -> Callable[..., Iterator[Tensor]] | None:
    if getattr(autoencoder, "micro_frames", None) is None:
        return None
    return getattr(autoencoder, f"{name}_pieces")


def _with_frames(own: Callable[..., Tensor], frames: int) -> Callable[[Tensor], Tensor]:
    return partial(own, frames=frames) if "frames" in inspect.signature(own).parameters else own


class _ModuleChain(nn.Module):
    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part for part in parts if part is not None)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def _part(autoencoder: nn.Module, name: str) -> nn.Module:
    part = getattr(autoencoder, name, None)
    if not isinstance(part, nn.Module):
        raise GulliverError(
            f"{type(autoencoder).__name__} has no module {name!r}: use one with encoder and "
            "decoder, or stream_module with its network"
        )
    return part
