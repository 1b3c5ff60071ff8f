"""What is chosen by what links cost: Ulysses or ring, and the way of tensor ranks' all-reduces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from gulliver.comm import World, use_links
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster, current_cluster
from gulliver.parallel.sequence import Chosen, Shape, choose

LENGTHS = ("max_position_embeddings", "n_positions")
HEADS = ("num_attention_heads", "n_head", "num_heads")
WIDTHS = ("hidden_size", "n_embd", "d_model")


def choose_plan(
    model: nn.Module,
    world_size: int,
    sp_size: int,
    tp_size: int,
    causal: bool,
    length: int | None = None,
    cluster: Cluster | None = None,
) -> Chosen:
    """The plan with the least predicted seconds for a model's attention; every rank calls it.

    Args:
        model: a transformers model.
        world_size: ranks.
        sp_size: ranks that share a sequence.
        tp_size: ranks that share its tensors, and so its heads.
        causal: whether tokens see only those before them.
        length: tokens of a sequence; None is the longest that the model's configuration names.
        cluster: machines to choose for; None for those at hand.

    Raises:
        GulliverError: the configuration does not say what is needed.
    """
    cluster = cluster or current_cluster(world_size)
    shape = attention_shape(model, tp_size, causal, length)
    if shape.dtype not in cluster.device.matmul:
        # Where a dtype was not measured, such as float64, another one tells the plans apart, too.
        shape = replace(shape, dtype="float32")
    return choose(cluster, shape, sp_size, stride=tp_size)


def attention_shape(
    model: nn.Module, tp_size: int, causal: bool, length: int | None = None, batch: int = 1
) -> Shape:
    """The attention of a layer, as a tensor rank computes it.

    Args:
        model: a transformers model.
        tp_size: ranks that share its tensors, and so its heads.
        causal: whether tokens see only those before them.
        length: tokens of a sequence; None is the longest that the model's configuration names.
        batch: number of sequences.

    Raises:
        GulliverError: the configuration does not say what is needed.
    """
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


def use_measured_links(world: World, tp_size: int) -> None:
    """Lets all-reduces of tensor ranks go the way that was measured to be faster.

    Every rank calls it. Two ranks have one way; without a measurement that can be read, sizes
    decide.
    """
    if tp_size < 3 or world.device.type != "cpu":
        return
    try:
        cluster = current_cluster(world.size)
    except GulliverError:  # on all ranks alike
        cluster = None
    use_links(cluster if cluster is not None and cluster.measured else None)


def _field(config: Any, names: tuple[str, ...], instead: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise GulliverError(
        f"the model's configuration has none of {', '.join(names)}, which choosing a plan needs: "
        f"give {instead} yourself"
    )
