"""Middle blocks of diffusers' autoencoders, without the mask of tokens x tokens that they make.

HunyuanVideo's middle block hides later frames by a dense mask, made on every call. Here its
forward is replaced, for as long as a `with` block lasts, by one that calls
`frame_causal_attention`; layers, weights and results are the same. Others are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.parallel.convolution._attention import frame_causal_attention

MASKED = ("HunyuanVideoMidBlock3D",)
"""Classes of blocks whose forward makes such a mask."""


@contextmanager
def without_masks(network: Any) -> Iterator[None]:
    """Makes the middle blocks of a module, or of a method's module, compute without their mask."""
    # Perhaps a bound method of a module, or a partial of one.
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
    """Attends as diffusers' attention does, over frames up to the own; ``[B, C, T, H, W]``."""
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
