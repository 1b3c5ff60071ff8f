"""The plugin for models larger than memory: one number, the limit, and a plan that keeps to it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver.booster._options import (
    CommunicationOptions,
    Fp8Options,
    LimitOptions,
    PlacementOptions,
    StepOptions,
    ZeroOptions,
    take_options,
)
from gulliver.booster._plugins import Plugin
from gulliver.booster._tiers import TierOptions, plan_tiers
from gulliver.comm import current_world
from gulliver.hardware import Cluster
from gulliver.plan import Mesh, Plan, Precision


class GeminiPlugin(Plugin):
    """ZeRO's stage 3 under a memory limit: what does not fit lies in the host or on a disk.

    Values are those of a run without a limit. Parameters, gradients and optimizer state move chunk
    by chunk, ahead of use; which of them stay is planned from the order in which a step uses them.
    A limit that is too small is refused before the first step, and the error names the smallest
    that is enough.

    Args:
        memory_limit: memory of each rank in bytes or as text, ``6GiB`` or ``70%``; see
            `LimitOptions`. The interpreter and torch are not counted.
        host_limit: page-locked host memory of a GPU that may be used; None for none.
        disk: folder and the bytes that may lie there, ``/scratch:100GiB``; None for none. With
            `host_limit` it takes what does not fit the host's memory.
        precision: ``bf16`` or ``fp16``; see `ZeroOptions`.
        max_norm: clip gradients to this global norm at every step; 0 leaves that to the loop.
        step_in_backward: step each chunk inside `Booster.backward`, so that gradients take no
            memory; see `StepOptions`.
        activations: ``keep``, ``recompute``, ``offload`` or ``auto``; see `StepOptions`.
        weights: folder of a Hugging Face checkpoint, or a safetensors file, that the model is
            filled from when it is boosted. A model on meta is filled chunk by chunk, so it may be
            larger than memory; without weights its modules initialise themselves, by
            ``reset_parameters``.
        verbose: print the plan when the model is boosted.
        options: fields of `ZeroOptions`, `PlacementOptions`, `StepOptions`, `Fp8Options` and
            `CommunicationOptions`.

    Raises:
        GulliverError: an option that it does not have, or a value out of range.
    """

    takes = ("meta",)

    def __init__(
        self,
        memory_limit: int | float | str,
        host_limit: int | float | str | None = None,
        disk: Path | str | None = None,
        *,
        precision: str | None = None,
        max_norm: float = 0.0,
        step_in_backward: bool = False,
        activations: str = "keep",
        weights: Path | str | None = None,
        verbose: bool = True,
        **options: Any,
    ) -> None:
        given = {
            "memory_limit": memory_limit,
            "host_limit": host_limit,
            "disk": disk,
            "precision": precision,
            "max_norm": max_norm,
            "step_in_backward": step_in_backward,
            "activations": activations,
        }
        kinds = (ZeroOptions, LimitOptions, StepOptions, PlacementOptions)
        formats = (Fp8Options, CommunicationOptions)
        groups = take_options(type(self), (*kinds, *formats), given | options)
        self.zero, limits, steps, placement = groups[:4]
        self.fp8, self.wires = groups[4].plan(), groups[5].wires()
        # Sizes of chunks are planned: a step of the tuner would not keep to the limit.
        self.zero.refuse_tuning()
        self.memory = TierOptions(
            **asdict(limits),
            step_in_backward=steps.step_in_backward,
            activations=steps.activations,
            **asdict(placement),
        )
        self.precision, self.max_norm = self.zero.precision, self.zero.max_norm
        self.step_in_backward = steps.step_in_backward
        self.broadcast_buffers = steps.broadcast_buffers
        self.weights, self.verbose = weights, verbose

    def choices(self, ranks: int, precision: str = "none") -> Plan:
        """Shards over all ranks, under the limit."""
        device = current_world().device.type
        return Plan(
            plugin=type(self).__name__,
            mesh=Mesh(device, {"data": ranks}),
            zero=self.zero.plan(
                stage=3,
                broadcast_buffers=self.broadcast_buffers,
                tiers=self.memory.tiers(device),
            ),
            precision=Precision(precision, self.precision or "none", fp8=self.fp8),
            max_norm=self.max_norm,
            weights=None if self.weights is None else str(self.weights),
        )

    def for_model(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        cluster: Cluster | None,
    ) -> Plan:
        """Chooses the size of chunks, where it is not given, and the blocks that are recomputed."""
        return plan_tiers(plan, model, optimizer, cluster, self.zero.chunk_mb == "auto")
