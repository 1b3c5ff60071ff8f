"""What is chosen by what links cost: Ulysses or ring, and the way of tensor ranks' all-reduces."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from gulliver.booster._predict import attention_shape
from gulliver.comm import World, use_links
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster, current_cluster
from gulliver.parallel.sequence import Chosen, choose


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
