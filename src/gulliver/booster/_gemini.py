"""The plugin for models larger than memory: one number, the limit, and a plan that keeps to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from gulliver.booster._fp8 import fp8_plan
from gulliver.booster._model import HALVES
from gulliver.booster._plugins import DEFAULT_CHUNK_MB, MIB, Plugin
from gulliver.booster._tiers import TierOptions, plan_tiers
from gulliver.booster._wires import WireOptions
from gulliver.comm import current_world
from gulliver.errors import GulliverError, nearest
from gulliver.hardware import Cluster
from gulliver.plan import Fp8Plan, Mesh, Plan, Precision, ZeroPlan


class GeminiPlugin(Plugin):
    """ZeRO's stage 3 under a memory limit: what does not fit lies in the host or on a disk.

    Values are those of a run without a limit. Parameters, gradients and optimizer state move chunk
    by chunk, ahead of use; which of them stay is planned from the order in which a step uses them.
    A limit that is too small is refused before the first step, with the least one that would do.

    Args:
        memory_limit: memory for parameters, gradients, optimizer state, their buffers and
            activations on each rank, in bytes or as text: ``6GiB``, ``500 MB``, or ``70%`` of what
            the device has, or on a CPU this process. The interpreter and torch are not counted.
        host_limit: page-locked host memory of a GPU that may be used, as text or in bytes; None
            for none.
        disk: folder and the bytes that may lie there, ``/scratch:100GiB``; None for none. With
            `host_limit` what does not fit the host's memory lies there.
        placement_policy: ``auto`` keeps what costs least to keep; ``static`` the shares below.
        shard_param_frac: share of the parameters that is sharded; 1.0, as stage 3 shards all.
        offload_optim_frac: share of the optimizer's state that may leave the memory, ``static``.
        offload_param_frac: share of the parameters that may leave it, ``static``.
        chunk_mb: size of a chunk in MiB; ``auto`` chooses by what a step would move.
        precision: ``bf16`` or ``fp16``, as of `LowLevelZeroPlugin`.
        max_norm: clip gradients to this global norm at every step; 0 leaves that to the loop.
        step_in_backward: step each chunk inside `Booster.backward`, as soon as its gradient is
            complete, so that gradients take no memory.
        activations: what forward keeps for backward: ``keep`` it, ``recompute`` blocks, or
            ``offload`` it to the disk or the host, where it shares the budget of the state;
            ``auto`` chooses for each block by the predicted step.
        keep_freed: let freed memory stay with the process for its next tensors, on a CPU with
            glibc, once steps hardly wait for transfers and the limit has the room: it spares page
            faults. False gives it back to the system always.
        gather_ahead: chunks that are gathered from other ranks ahead of the one in use.
        assume_elementwise: the same as in `LowLevelZeroPlugin`.
        broadcast_buffers: the same as in `LowLevelZeroPlugin`.
        weights: folder of a Hugging Face checkpoint, or a safetensors file, that the model is
            filled from when it is boosted. A model on meta is filled chunk by chunk, so it may be
            larger than memory; without weights its modules initialise themselves, by
            ``reset_parameters``.
        verbose: print the plan when the model is boosted.
        use_fp8: the same as in `TorchDDPPlugin`.
        fp8_emulation: the same as in `TorchDDPPlugin`.
        communication_dtype: format of what travels between ranks, as of `LowLevelZeroPlugin`, or of
            some kinds of it: ``reduce``.
        force_communication_dtype: the same as in `LowLevelZeroPlugin`, as are the next two.
        error_feedback: add what packing loses of a gradient to the next one.
        wire_gate: compare gradients with unpacked ones now and then.

    Raises:
        GulliverError: a size, a share or a name of no sense; what would be right is said.
    """

    takes = ("meta",)

    def __init__(
        self,
        memory_limit: int | float | str,
        host_limit: int | float | str | None = None,
        disk: Path | str | None = None,
        placement_policy: str = "auto",
        shard_param_frac: float = 1.0,
        offload_optim_frac: float | None = None,
        offload_param_frac: float | None = None,
        chunk_mb: float | str = "auto",
        precision: str | None = None,
        max_norm: float = 0.0,
        step_in_backward: bool = False,
        activations: str = "keep",
        keep_freed: bool = True,
        gather_ahead: int = 2,
        assume_elementwise: bool = False,
        broadcast_buffers: bool = True,
        weights: Path | str | None = None,
        verbose: bool = True,
        use_fp8: bool | str | Fp8Plan = False,
        fp8_emulation: bool = False,
        communication_dtype: str | Mapping[str, str] | None = None,
        force_communication_dtype: bool = False,
        error_feedback: bool = False,
        wire_gate: bool = True,
    ) -> None:
        self.fp8 = fp8_plan(use_fp8, fp8_emulation)
        self.wires = WireOptions.of(
            communication_dtype, force_communication_dtype, error_feedback, wire_gate
        )
        self.memory = TierOptions(
            memory_limit,
            host_limit,
            disk,
            placement_policy,
            shard_param_frac,
            offload_optim_frac,
            offload_param_frac,
            step_in_backward,
            activations,
            keep_freed,
        )
        if isinstance(chunk_mb, str) and chunk_mb != "auto":
            raise GulliverError(f"chunk_mb={chunk_mb!r} is not known: 'auto', or a number of MiB")
        size = DEFAULT_CHUNK_MB if isinstance(chunk_mb, str) else chunk_mb
        if not (size > 0 and max_norm >= 0 and gather_ahead >= 0):
            raise GulliverError(
                "chunk_mb must be positive, max_norm and gather_ahead not negative, not "
                f"{chunk_mb}, {max_norm}, {gather_ahead}"
            )
        if precision not in (None, *HALVES):
            raise GulliverError(
                f"GeminiPlugin(precision={precision!r}) is not supported: "
                f"{nearest(str(precision), HALVES)} (or None)"
            )
        self.chunk_mb, self._chunk_bytes = chunk_mb, int(size * MIB)
        self.precision, self.max_norm, self.gather_ahead = precision, max_norm, gather_ahead
        self.assume_elementwise, self.broadcast_buffers = assume_elementwise, broadcast_buffers
        self.weights, self.verbose = None if weights is None else str(weights), verbose

    def choices(self, ranks: int, precision: str = "none") -> Plan:
        """Shards over all ranks, under the limit."""
        device = current_world().device.type
        return Plan(
            plugin=type(self).__name__,
            mesh=Mesh(device, {"data": ranks}),
            zero=ZeroPlan(
                stage=3,
                chunk_bytes=self._chunk_bytes,
                gather_ahead=self.gather_ahead,
                broadcast_buffers=self.broadcast_buffers,
                assume_elementwise=self.assume_elementwise,
                tiers=self.memory.tiers(device),
            ),
            precision=Precision(precision, self.precision or "none", fp8=self.fp8),
            max_norm=float(self.max_norm),
            weights=self.weights,
        )

    def for_model(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        cluster: Cluster | None,
    ) -> Plan:
        """The size of chunks, where it is not given, and the blocks that are recomputed."""
        return plan_tiers(plan, model, optimizer, cluster, self.chunk_mb == "auto")
