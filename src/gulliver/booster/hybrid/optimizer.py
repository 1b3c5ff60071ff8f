"""The optimizer of a hybrid run: ZeRO over the replicas of this rank's part of the model.

Parameters are shards, so a norm covers all shards and counts replicated ones once. The gradients of
a weight that several stages hold are summed before they are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gulliver.booster.hybrid.transformers import gathered_logits
from gulliver.comm.collectives import Op, all_reduce, gather_objects
from gulliver.comm.groups import ALONE
from gulliver.errors import GulliverError
from gulliver.memory.parts import Region, region_of
from gulliver.parallel.optimizer import persistent_buffers
from gulliver.parallel.pipeline.pipeline import Pipeline
from gulliver.parallel.pipeline.stage import Stage
from gulliver.parallel.sequence.sharding import show
from gulliver.parallel.zero.chunks import ShardedChunk, squared_norm
from gulliver.parallel.zero.optimizer import ZeroOptimizer
from gulliver.parallel.zero.step import UnevenStep

if TYPE_CHECKING:
    from gulliver.booster.hybrid.mesh import HybridMesh

# Tensors by name, with the region of the full tensor that each one holds.
Held = dict[str, tuple[Tensor, Region | None]]


class HybridOptimizer(ZeroOptimizer):
    """ZeRO over the data and sequence axes, with norms over the full model."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        mesh: HybridMesh,
        whole_groups: Sequence[Sequence[str]],
        pipeline_stage: Stage | None = None,
        zero_stage: int = 0,
        frozen_in_groups: Sequence[nn.Parameter] = (),
        **options: Any,
    ) -> None:
        super().__init__(inner, names, zero_stage, group=mesh.replicas.process_group, **options)
        self._frozen = list(frozen_in_groups)
        self.mesh, self.pipeline_stage = mesh, pipeline_stage
        self.pipeline: Pipeline | None = None
        self.adds_micro_batches = pipeline_stage is not None
        self._apart = False  # whether stages have gradients that are not summed yet
        self._copies = pipeline_stage.copies() if pipeline_stage is not None else {}
        elsewhere = {n for n, rank_group in self._copies.items() if rank_group.rank > 0}
        if pipeline_stage is not None:
            elsewhere |= _buffers_before(pipeline_stage)
        self.checkpoint.describe_model(
            responsible=lambda name: mesh.tensor.rank == 0 and name not in elsewhere,
            written_elsewhere=elsewhere,
            whole_groups=[list(group) for group in whole_groups],
        )
        self._counted = {name: self._weight(name, p) for p, name in self.names.items()}
        self._squared = partial(_weighted_norm, self._counted)

    def run(
        self,
        batch: Any,
        criterion: Callable[[Any, Any], Tensor] | None,
        backward: bool,
        return_loss: bool,
        return_outputs: bool,
        weight: str | Callable[[Any], float] | None = None,
    ) -> dict[str, Any]:
        """Runs one batch through the pipeline; see `Booster.execute_pipeline`."""
        assert self.pipeline is not None, "the model is not cut into stages"
        for sharded in self.all_chunks:
            sharded.chunk.check_parameters()  # before the schedule, so that all stages raise
        scale = 1.0 if self.scaler is None or not backward else self.scaler.scale
        self._apart = self._apart or backward
        # Gradients of tied weights are summed before anything is reduced.
        adding = self._reducer.backward(reduce=False, scale=scale) if backward else nullcontext()
        with gathered_logits(self.pipeline.model, return_outputs), adding:
            found = self.pipeline.run(
                batch,
                criterion,
                forward_only=not backward,
                return_loss=return_loss,
                return_outputs=return_outputs,
                weight=weight,
                scale=scale,
            )
        if backward and not self._deferred:
            # As after any backward, as torch's clipping would see only one stage's gradients.
            self.join_copies()
            with self._reducer.backward(reduce=True, scale=scale):
                pass
        return found

    def run_planned(
        self,
        step: UnevenStep,
        batches: Sequence[Any],
        factors: Sequence[float],
        criterion: Callable[[Any, Any], Tensor] | None,
        before: Callable[[int], None],
        state: str,
    ) -> Tensor | None:
        """Runs micro-batches of unequal work through the pipeline."""
        assert self.pipeline is not None, "the model is not cut into stages"
        self._apart = True
        with step.several() as scale:
            return self.pipeline.run_each(
                batches,
                factors,
                criterion,
                scale=scale * self.size,
                before=before,
                state=state,
            )

    def penalty(self, term: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """Sums `term` over all trained parameters of the full model, to be added to a loss."""
        # A sum over `model.parameters()` also has the right gradients, but only counts this rank's
        # shards: its value would differ between ranks.
        if self.pipeline_stage is not None:
            raise GulliverError(
                "a penalty on parameters would need those of all pipeline stages in one loss; use "
                "the optimizer's weight_decay, or omit pp_size"
            )
        terms = {name: term(parameter) for parameter, name in self.names.items()}
        # The value counts each element once. The gradient of this rank's terms is already complete,
        # so it is not scaled: the mean over replicas does not change it.
        whole = sum(t.detach().double() * self._counted[name] for name, t in terms.items())
        share = torch.stack(list(terms.values())).sum()
        assert isinstance(whole, Tensor), "there is something to train"
        if self.mesh.shards.size > 1:
            all_reduce(whole, "sum", self.mesh.shards.process_group)
        return show(share, whole.to(share.dtype))

    def _weight(self, name: str, parameter: nn.Parameter) -> float:
        """Weight of this rank's values in a sum over all shards: 1 / number of ranks with them."""
        region = region_of(parameter)
        ranks = self.mesh.tensor.size if region is None else region.copies
        return 1.0 / (ranks * self._copies.get(name, ALONE).size)

    def _vote_and_flush(self) -> set[str]:
        self.join_copies()
        return super()._vote_and_flush()

    def join_copies(self) -> None:
        """Sums the gradients of weights that several stages hold, once per schedule."""
        if self.pipeline_stage is None or not self._apart:
            return
        self._apart = False
        trained = [name for name in self._counted if name in self._copies]
        self.pipeline_stage.sum_tied(_Opened(trained, self._reducer.open_gradient))

    def _over_ranks(self, total: Tensor, operation: Op) -> Tensor:
        total = super()._over_ranks(total, operation)
        if self.mesh.shards.size > 1:
            all_reduce(total, operation, self.mesh.shards.process_group)
        return total

    def full_gradients(self) -> dict[str, Tensor]:
        """Returns the full averaged gradients by name (collective)."""
        # Sent as objects, which is slow: for inspection, not for training.
        held = super().full_gradients()
        regions = {name: region_of(p) for p, name in self.names.items()}
        return self._joined({name: (g.clone(), regions[name]) for name, g in held.items()})

    def _joined(self, held: Held) -> dict[str, Tensor]:
        """Gathers full tensors from the shards on the ranks of one model."""
        found: dict[str, Tensor] = {}
        for part in (
            gather_objects(held, self.mesh.shards.process_group) if self._is_cut else [held]
        ):
            for name, (value, region) in part.items():
                if region is None:
                    found.setdefault(name, value)
                    continue
                whole = found.setdefault(name, value.new_zeros(region.shape))
                index = torch.cat([torch.arange(*run) for run in region.runs])
                whole.index_copy_(region.dim, index.to(value.device), value)
        order = [name for group in self.checkpoint.whole_groups or () for name in group]
        return {name: found[name] for name in order if name in found}

    @property
    def _is_cut(self) -> bool:
        return self.mesh.shards.size > 1


class _Opened(Mapping[str, Tensor]):
    """Gradients by name, loaded on access because memory may hold only a few."""

    def __init__(self, names: Sequence[str], opened: Callable[[str], Tensor]) -> None:
        self._names, self._opened = dict.fromkeys(names), opened

    def __getitem__(self, name: str) -> Tensor:
        return self._opened(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _weighted_norm(counted: Mapping[str, float], sharded: ShardedChunk, gradient: Tensor) -> Tensor:
    """Squared norm of a gradient shard, with a weight per parameter."""
    total = torch.zeros((), dtype=torch.float64, device=gradient.device)
    for piece in sharded.chunk.layout.pieces(sharded.chunk.part):
        run = gradient[piece.start : piece.end]
        total += squared_norm(sharded, run) * counted[piece.name]
    return total


def _buffers_before(stage: Stage) -> set[str]:
    """Names the buffers that an earlier stage also has (collective over the pipeline)."""
    found = gather_objects(list(persistent_buffers(stage.model)), stage.rank_group.process_group)
    # A process group numbers its ranks in ascending order, unlike a rank group.
    by_rank = dict(zip(sorted(stage.rank_group.ranks), found, strict=True))
    earlier = stage.rank_group.ranks[: stage.rank_group.rank]
    return {name for rank in earlier for name in by_rank[rank]}
