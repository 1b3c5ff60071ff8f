"""The table of model families and the sequence modes they support, for checks of plans.

    check_family("bloom", "ring_attn", size=2)    # raises; the error names supported ones

Each supported combination has a test that compares outputs and gradients with a single process
(`docs/parity.md`); all others are rejected. The rows come from
`gulliver.families`. Read `MODES`, `families`, `check_family`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gulliver.errors import GulliverError, nearest
from gulliver.families.lookup import all_families, is_hugging_face, type_of
from gulliver.families.lookup import family_of as record_of
from gulliver.families.record import AUTO, SHARED_BY_SEQUENCE, SHARED_BY_TENSOR, Sequences
from gulliver.hardware.attention import AttentionShape as Shape
from gulliver.hardware.cluster import Cluster
from gulliver.hardware.probe import current_cluster
from gulliver.parallel.sequence.choice import Chosen, choose
from gulliver.parallel.sequence.layout import SequencePlan
from gulliver.plan.plan import Plan
from gulliver.precision.wire.formats import wire_format

MODES = {
    "split_gather": "activations between blocks sharded over the tensor axis",
    "ring": "the same, gathers and scatters in pieces under the matmuls",
    "all_to_all": "Ulysses: sequence exchanged for heads around attention",
    "ring_attn": "keys and values go round a ring, of two levels if wished",
    AUTO: "Ulysses, a ring or both, by predicted time",
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


HEADER = ("model", "sequence_parallelism_mode", "masks over shared sequences", "why not more")


def families() -> dict[str, Sequences]:
    found = {family.name: family.sequences for family in all_families()}
    return {name: known for name, known in found.items() if known is not None}


def table() -> list[tuple[str, ...]]:
    # All of them support tensor parallelism and pipeline stages, with any stage of ZeRO, in all
    # `DTYPES`.
    return [
        (name, ", ".join(known.modes), ", ".join(known.masks) or "-", known.why)
        for name, known in families().items()
    ]


def family_of(model: nn.Module) -> str | None:
    """The name of a model's family, or its Hugging Face model type; None if unsupported."""
    family, ours = record_of(model), is_hugging_face(model)
    if family.sequences is not None and (ours or family.classes):
        return family.name
    return type_of(model) if ours else None


def check_sizes(mode: str | None, tp_size: int, sp_size: int) -> None:
    if mode is None:
        if sp_size > 1:
            raise GulliverError(
                f"sp_size={sp_size} needs a sequence_parallelism_mode: 'all_to_all' or 'ring_attn'"
            )
        return
    if mode not in MODES:
        raise GulliverError(
            f"sequence_parallelism_mode={mode!r} is not known: {nearest(mode, MODES)}"
        )
    by_tensor = mode in SHARED_BY_TENSOR
    if by_tensor and tp_size == 1:
        raise GulliverError(
            f"sequence_parallelism_mode={mode!r} shards sequences over the tensor axis and needs a "
            "tp_size of at least 2; with separate ranks use 'all_to_all' or 'ring_attn'"
        )
    if by_tensor and sp_size > 1:
        raise GulliverError(
            f"sequence_parallelism_mode={mode!r} uses the tensor ranks; omit sp_size, or use "
            f"'all_to_all' or 'ring_attn' for sp_size={sp_size}"
        )
    if mode in SHARED_BY_SEQUENCE and sp_size == 1:
        raise GulliverError(f"sequence_parallelism_mode={mode!r} needs an sp_size of at least 2")


def check_family(family: str | None, mode: str | None, size: int) -> None:
    every = families()
    known = every.get(family or "")
    if known is None and mode in SHARED_BY_SEQUENCE:
        raise GulliverError(
            f"sequence_parallelism_mode={mode!r} needs a supported model "
            f"({', '.join(every)}), not {family or 'this one'}: use tp_size with tensor_rules, or "
            "gulliver.parallel.sequence in the model's code"
        )
    if known is not None and mode is not None and mode not in known.modes:
        axis = "tp_size" if known.modes[0] in SHARED_BY_TENSOR else "sp_size"
        raise GulliverError(
            f"{family} does not support sequence_parallelism_mode={mode!r}: {known.why}; use "
            f"{known.modes[0]!r} with {axis} {max(2, size)}"
        )


# Choices by communication cost: Ulysses or ring, and the all-reduce of tensor ranks.


LENGTHS = ("max_position_embeddings", "n_positions")
HEADS = ("num_attention_heads", "n_head", "num_heads")
WIDTHS = ("hidden_size", "n_embd", "d_model")


def sequence_plan(plan: Plan) -> SequencePlan:
    s = plan.sequence
    layout: Any = s.layout
    return SequencePlan(s.ulysses, s.outer, s.inner, layout, wire_format(plan.wire.sequence))


def choose_plan(
    model: nn.Module,
    world_size: int,
    sp_size: int,
    tp_size: int,
    causal: bool,
    length: int | None = None,
    cluster: Cluster | None = None,
) -> Chosen:
    """Returns the plan with the fastest predicted attention (collective)."""
    cluster = cluster or current_cluster(world_size)
    shape = attention_shape(model, tp_size, causal, length)
    if shape.dtype not in cluster.device.matmul:
        # If a dtype was not measured, such as float64, another one also ranks the plans.
        shape = replace(shape, dtype="float32")
    return choose(cluster, shape, sp_size, stride=tp_size)


def attention_shape(
    model: nn.Module, tp_size: int, causal: bool, length: int | None = None, batch: int = 1
) -> Shape:
    """Shape of the attention of one layer on one tensor-parallel rank."""
    config = getattr(model, "config", None)
    length = length or _field(config, LENGTHS, "sequence_length=")
    heads = _field(config, HEADS, "sequence_parallelism_mode=")
    width = getattr(config, "head_dim", None)
    dim = width or _field(config, WIDTHS, "sequence_parallelism_mode=") // heads
    grouped = getattr(config, "num_key_value_heads", None) or heads
    dtype = str(next(p.dtype for p in model.parameters() if p.is_floating_point()))
    return Shape(
        batch=batch,
        heads=max(1, heads // tp_size),
        kv_heads=max(1, grouped // tp_size),
        length=length,
        head_dim=dim,
        dtype=dtype.removeprefix("torch."),
        causal=causal,
    )


def _field(config: Any, names: tuple[str, ...], instead: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise GulliverError(
        f"the model's configuration has none of {', '.join(names)}, one of which is needed to "
        f"choose a plan; set {instead}"
    )
