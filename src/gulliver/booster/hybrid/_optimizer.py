"""The optimizer of a hybrid run: ZeRO over the replicas of this rank's share of the model.

What differs from ZeRO over the whole world: parameters are shares of a model that further ranks
hold the rest of, so a norm is that of all shares together, those that several ranks hold counted
once; and a weight that several stages hold has a gradient on each, which are added up before they
are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gulliver.comm import Line, all_reduce
from gulliver.memory import region_of
from gulliver.parallel import ZeroOptimizer

if TYPE_CHECKING:
    from gulliver.booster.hybrid._mesh import HybridMesh
    from gulliver.parallel.pipeline import Pipeline


class HybridOptimizer(ZeroOptimizer):
    """ZeRO over the data and sequence axes, norms over the whole model.

    Args:
        inner: the user's optimizer, its groups rewritten to this rank's parameters.
        names: of this rank's trainable parameters, as the whole model names them.
        mesh: of the run.
        all_groups: names of all parameters of each group, of all ranks, in the model's order.
        copies: parameters that several stages hold: the line of ranks that hold them.
        sum_copies: adds up the gradients of such parameters over their stages.
        options: of `ZeroOptimizer`.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        mesh: HybridMesh,
        all_groups: Sequence[Sequence[str]],
        copies: Mapping[str, Line],
        sum_copies: Callable[[Mapping[str, Tensor]], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(inner, names, group=mesh.replicas.group, **options)
        self.mesh, self.pipeline = mesh, None
        self._all_groups = [list(group) for group in all_groups]
        self._copies, self._sum_copies = dict(copies), sum_copies
        self._counted = {name: self._weight(name, p) for p, name in self.names.items()}
        self.pipeline: Pipeline | None = None

    def _weight(self, name: str, parameter: nn.Parameter) -> float:
        """What this rank's values count in a sum over all shards."""
        ranks = 1 if region_of(parameter) is not None else self.mesh.tensor.size
        stages = self._copies[name].size if name in self._copies else 1
        return 1.0 / (ranks * stages)

    def group_names(self) -> list[list[str]]:
        """Names of the trained parameters of each group, of all ranks."""
        return [list(group) for group in self._all_groups]

    def _squared_norm(self) -> Tensor:
        """Of the mean gradient of the whole model, float64."""
        device = self.chunks[0].chunk.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for sharded in self.chunks:
            shard = sharded.gradient_shard
            if shard is None:
                continue
            for piece in sharded.chunk.layout.pieces(sharded.chunk.part):
                run = shard[piece.start : piece.end]
                squared = torch.linalg.vector_norm(run, dtype=torch.float64) ** 2
                total += squared * self._counted[piece.name]
        if self.parts > 1:
            all_reduce(total, "sum", self.group)
        if self.mesh.shards.size > 1:
            all_reduce(total, "sum", self.mesh.shards.group)
        return total
