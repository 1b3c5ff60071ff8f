"""Chooses the FP8 layers of a plan, and synchronizes their scales over ranks.

Layers are chosen from the full model, its shards and the device's rates; `use_fp8` converts them
after sharding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.comm.collectives import all_reduce, broadcast_object
from gulliver.comm.groups import ALONE, RankGroup
from gulliver.errors import GulliverError, nearest
from gulliver.families.lookup import family_of
from gulliver.hardware.cluster import Cluster, Device
from gulliver.hardware.operators import fp8_break_even, fp8_seconds
from gulliver.hardware.probe import current_cluster
from gulliver.parallel.tensor.layers import ColumnLinear, RowLinear
from gulliver.parallel.tensor.styles import TensorPlan
from gulliver.plan.plan import Plan
from gulliver.plan.tree import Fp8Plan
from gulliver.precision.fp8.conversion import (
    Layer,
    Selection,
    check_hardware,
    check_layers,
    convert_to_fp8,
    linear_layers,
    select_layers,
    state_of,
)
from gulliver.precision.fp8.layers import COPIES, SCALINGS, Recipe, SharedDims

# Rows of a layer, if a plan does not have those of a batch.
TOKENS = 8192


# [Note: as one process] Results equal those of a single process with the same recipe on the same
# micro-batches. Data ranks each quantize their own samples, like a loop over micro-batches. Ranks
# that share a layer or a sequence quantize parts of one tensor: if a scale covers a dim that they
# share, they use the largest magnitude over all of them, by a small all-reduce (`Shared`). This is
# impossible for a layer with partial gradients on each rank, because the FP8 of a sum is not the
# sum of FP8 values. Such layers are not converted, and sequences are only sharded in models whose
# linear layers are all applied per token.
def fp8_plan(use_fp8: bool | str | Fp8Plan, emulation: bool) -> Fp8Plan | None:
    if isinstance(use_fp8, Fp8Plan):
        return replace(use_fp8, emulated=use_fp8.emulated or emulation)
    if not use_fp8:
        if emulation:
            raise GulliverError("fp8_emulation=True needs use_fp8=True")
        return None
    scaling = "tensorwise" if use_fp8 is True else use_fp8
    if scaling not in SCALINGS:
        raise GulliverError(
            f"use_fp8={use_fp8!r} is not known: {nearest(str(use_fp8), SCALINGS)} (or True)"
        )
    return Fp8Plan(scaling, emulated=emulation)


def with_fp8(
    plan: Plan, model: nn.Module, tensor: TensorPlan | None, cluster: Cluster | None
) -> tuple[Plan, dict[str, str]]:
    """Adds the FP8 layers to a plan; also returns why other layers stay in high precision."""
    fp8 = plan.precision.fp8
    if fp8 is None:
        return plan, {}
    _check_sequence(plan, model)
    found, others = select_layers(model, fp8.exclude, *_parts(tensor, model)), dict[str, str]()
    check_layers(found, fp8.layers or None)
    reason = ""
    if fp8.gate and not fp8.emulated:
        device = (cluster or current_cluster(plan.mesh.size)).device
        found, reason = gate_fp8(found, device, plan.work.tokens or TOKENS, fp8.scaling)
    taken = [layer.path for layer in found.taken]
    if fp8.layers:
        others = {path: "not requested" for path in taken if path not in fp8.layers}
        taken = [path for path in taken if path in fp8.layers]
    fp8 = replace(fp8, layers=tuple(taken), kept={**others, **found.kept})
    plan = replace(plan, precision=replace(plan.precision, fp8=fp8))
    return plan, {"precision.fp8": reason} if reason else {}


def gate_fp8(found: Selection, device: Device, tokens: int, scaling: str) -> tuple[Selection, str]:
    """Drops layers predicted to be slower in FP8, and reports the size from which FP8 is faster."""

    def judged(layer: Layer) -> Layer:
        if layer.why_not:
            return layer
        gain = fp8_seconds(device, tokens, layer.inputs, layer.outputs, scaling).gain
        return layer if gain > 1 else replace(layer, why_not=f"{gain:.2f} x as fast in FP8")

    side = fp8_break_even(device, tokens, scaling)
    least = "square layers never pay" if side is None else f"square layers pay from {side} on"
    told = f"{scaling}, {tokens} tokens, {device.name}: {least}"
    return Selection(tuple(judged(layer) for layer in found.layers)), told


def weight_bytes(plan: Plan, sizes: Mapping[str, int]) -> int:
    """Bytes of FP8 weight copies that a rank keeps between forward and backward."""
    fp8 = plan.precision.fp8
    if fp8 is None or not _keeps_weights(plan):
        return 0
    return COPIES[fp8.scaling] * sum(sizes.get(f"{path}.weight", 0) for path in fp8.layers)


def check_units(plan: Plan, model: nn.Module) -> None:
    if plan.precision.fp8 is not None:
        check_hardware(model, _recipe(plan.precision.fp8))


def use_fp8(
    plan: Plan, model: nn.Module, tensor: RankGroup = ALONE, sequence: RankGroup = ALONE
) -> None:
    fp8 = plan.precision.fp8
    if fp8 is None:
        return
    # Rates may have been measured on one rank's machine only.
    wanted = set(broadcast_object(fp8.layers))
    modules = {path: module for path, module in linear_layers(model) if path in wanted}
    if not modules or any(state_of(module) is not None for module in modules.values()):
        return
    shared = {path: _shared(module, tensor, sequence) for path, module in modules.items()}
    keep = _keeps_weights(plan)
    convert_to_fp8(model, _recipe(fp8), layers=modules, keep_weights=keep, shared=shared)


def _keeps_weights(plan: Plan) -> bool:
    # Sharded parameters avoid copies of every weight on every rank, and a pipeline would have one
    # copy per micro-batch in flight.
    return plan.stage != 3 and plan.mesh.of("pipeline") == 1


def _recipe(fp8: Fp8Plan) -> Recipe:
    return Recipe(fp8.scaling, fp8.emulated)


def _check_sequence(plan: Plan, model: nn.Module) -> None:
    known = family_of(model).sequences
    if plan.mesh.of("sequence") > 1 and not (known and known.causal):
        raise GulliverError(
            f"use_fp8 does not support sp_size={plan.mesh.of('sequence')}: some linear layers of "
            f"{type(model).__name__} are not applied per token, so gradients would be partial; "
            "omit sp_size, or use tp_size or pp_size"
        )


def _parts(
    tensor: TensorPlan | None, model: nn.Module
) -> tuple[dict[str, list[tuple[int, int]]], dict[str, str]]:
    parts, others = dict[str, list[tuple[int, int]]](), dict[str, str]()
    if tensor is None:
        return parts, others
    for path, module in linear_layers(model):
        placed = tensor.modules.get(path)
        if placed is None:
            continue
        if placed.how.kind not in ("column", "row"):
            others[path] = "its gradient is partial on each tensor rank"
            continue
        dims: Any = module.weight.shape
        outputs, inputs = dims if isinstance(module, nn.Linear) else dims[::-1]
        for place in range(tensor.size):
            runs = placed.runs(tensor.size, place, "weight")
            length = sum(stop - start for start, stop in runs)
            cut = (inputs, length) if placed.how.kind == "column" else (length, outputs)
            parts.setdefault(path, []).append(cut)
    return parts, others


def _shared(module: nn.Module, tensor: RankGroup, sequence: RankGroup) -> SharedDims:
    return SharedDims(
        tokens=_agree(sequence),
        inputs=_agree(tensor) if isinstance(module, RowLinear) else None,
        outputs=_agree(tensor) if isinstance(module, ColumnLinear) else None,
    )


def _agree(ranks: RankGroup) -> Any:
    if ranks.size == 1:
        return None
    return partial(_largest, group=ranks.process_group)


def _largest(largest: Tensor, group: torch.distributed.ProcessGroup | None) -> None:
    all_reduce(largest, "max", group)
