"""Estimates the costs of a batch in one process from a model's sizes.

Counts matrix products and the attention of transformers. Where ranks compute here, a block of each
kind is timed, and only what lies outside of blocks is counted.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gulliver.booster._measure import samples_of, tensors_of, with_peaks
from gulliver.booster._model import no_optimizer
from gulliver.booster._timed_blocks import time_blocks
from gulliver.hardware import (
    BACKWARD_OF_LINEAR,
    Device,
    current_cluster,
    layer_seconds,
    update_seconds,
)
from gulliver.parallel import state_sizes
from gulliver.plan import BlockWork, Work

NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TABLES = ("embed", "wte", "wpe", "position")
"""Words in the names of parameters that rows are taken from, rather than multiplied by."""


def estimate_work(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: Device,
    batch: int,
    length: int,
    precision: str = "fp32",
    activations: str = "keep",
    room: int | None = None,
    limited: bool = False,
) -> Work:
    """Estimates the costs of a step of a language model."""
    work = _computed(model, optimizer, device, batch, length, precision)
    if getattr(model, "config", None) is None:
        return work
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    computing = copy.deepcopy(model).to(getattr(torch, NAMES[precision]))
    sample = {"input_ids": ids, "labels": ids}
    if room is not None:
        work = _timed(work, model, time_blocks(computing, sample, room, limited))
    return with_peaks(work, computing, sample, None, activations)


def _timed(work: Work, model: nn.Module, seconds: Mapping[str, tuple[float, float]]) -> Work:
    """Work of a model with timed blocks; the rest is scaled by its parameters.

    Args:
        work: what was counted.
        model: whole model.
        seconds: seconds of the forward and of the backward of its blocks, by path.
    """
    if not seconds:
        return work
    inside = sum(_multiplied(model.get_submodule(path)) for path in seconds)
    outside = max(0, _multiplied(model) - inside) / max(1, inside)
    forward, backward = (sum(found) for found in zip(*seconds.values(), strict=True))
    rest = outside * forward
    return replace(
        work,
        forward_s=forward + rest,
        backward_s=backward + rest * work.backward_s / work.forward_s,
        share_blocks=forward / (forward + rest),
        blocks=tuple(BlockWork(path, found[0]) for path, found in seconds.items()),
    )


def estimate_sample(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, sample: Any, precision: str
) -> Work:
    """Estimates the costs of a sample for a model on meta."""
    batch = samples_of(sample)
    # Rows multiplied by matrices: token ids, or vectors.
    rows = (t.numel() // (t.shape[-1] if t.is_floating_point() else 1) for t in tensors_of(sample))
    length = max(1, max(rows, default=1) // max(1, batch))
    device = current_cluster(1).device
    return _computed(
        model, optimizer, device, batch, length, precision if precision in NAMES else "fp32"
    )


def _computed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: Device,
    batch: int,
    length: int,
    precision: str,
) -> Work:
    tokens = batch * length
    config = getattr(model, "config", None)
    layers = getattr(config, "num_hidden_layers", 0)
    width = getattr(config, "hidden_size", 0)
    # Attention scores and their product with values count as 2 x length x width more weights.
    weights = _multiplied(model) + layers * 2 * length * width
    forward = layer_seconds(device, weights, tokens, NAMES[precision])
    states, trained, stepper = 0, 0, optimizer or no_optimizer()
    whole = sum(p.numel() for p in model.parameters())
    for group in stepper.param_groups:
        for parameter in (p for p in group["params"] if p.requires_grad):
            trained += parameter.numel()
            states = max(states, len(state_sizes(stepper, group, parameter.shape)))
    item = 4 if precision == "fp32" else 2
    return Work(
        samples=batch,
        tokens=tokens,
        forward_s=forward,
        # Frozen weights need no gradients.
        backward_s=(1 + (BACKWARD_OF_LINEAR - 1) * (trained or whole) / max(1, whole)) * forward,
        update_s=update_seconds(device, 4 * trained, states),
        hidden_bytes=item * tokens * width,
    )


def _multiplied(model: nn.Module) -> int:
    """Elements of the matrices that multiply hidden states."""
    tables = {
        p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(False)
    }
    heads = {p for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters(False)}
    count = 0
    for name, parameter in model.named_parameters():
        table = parameter in tables or (not heads and any(word in name for word in TABLES))
        if parameter.ndim > 1 and (parameter in heads or not table):
            count += parameter.numel()
    return count
