"""The part of an activation that a rank has, where a model drops.

It follows from what ran before and from shapes:

- dim 0 is the batch's: a micro-batch has some of its samples;
- where sequences have ranks of their own, dim 1 is cut as the plan's layout says;
- after a column layer, and until a row layer brings them together, features are apart: the last
  dim, or the heads of attention's weights ``[batch, heads, queries, keys]``;
- elsewhere in blocks whose sequence is cut over the tensor ranks, dim 1 is cut as `SharedSequence`
  says; all else is whole.

A shape that does not fit is refused: nobody would notice a mask for the wrong part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster.hybrid._mesh import HybridMesh
from gulliver.errors import GulliverError
from gulliver.parallel import Along, hugging_face_of
from gulliver.parallel.tensor import (
    ColumnConvolution,
    ColumnLinear,
    RowConvolution,
    RowLinear,
    SharedSequence,
    TensorPlan,
    deal,
)

COLUMNS, ROWS = ColumnLinear | ColumnConvolution, RowLinear | RowConvolution


@dataclass
class Forward:
    """One forward of the model."""

    # Number drawn for the batch, the same on all ranks of the model.
    seed: int
    # Number of the first sample in the batch.
    start: int = 0
    # How many of them; 0 for all of the batch.
    samples: int = 0
    # Tokens of the sequence that ranks share, once that is known; 0 for none.
    length: int = 0


class ActivationParts:
    """Tracks which part of an activation this rank has while a model runs."""

    def __init__(self, model: nn.Module, mesh: HybridMesh, plan: TensorPlan | None) -> None:
        self.mesh, self.apart = mesh, None
        self.attention = plan.attention if plan is not None else {}
        self.adapter = vars(hugging_face_of(model)).get("gulliver_adapter")
        self.shared: dict[str, SharedSequence] = {}
        if plan is None:
            return
        for path in plan.stacks:
            stack = model.get_submodule(path)
            shared = (m.shared for m in stack.modules() if isinstance(m, ColumnLinear | RowLinear))
            found = next((s for s in shared if s is not None), None)
            if found is not None:
                assert isinstance(found, SharedSequence)
                self.shared[path] = found
            # A recomputation may end between columns and rows: the next block begins anew.
            for block in stack.children():
                block.register_forward_pre_hook(self._join)
        model.register_forward_pre_hook(self._join, prepend=True)
        for module in model.modules():
            if isinstance(module, COLUMNS):
                module.register_forward_hook(self._part)
            elif isinstance(module, ROWS):
                module.register_forward_hook(self._join)

    def __deepcopy__(self, memo: Any) -> ActivationParts:
        return self

    def _part(self, module: Any, *_: Any) -> None:
        # The column layer whose outputs are still apart; None where features are whole.
        self.apart = None if module.gather_output else module

    def _join(self, *_: Any) -> None:
        self.apart = None

    def of(self, path: str, x: Tensor, forward: Forward) -> list[Along]:
        """Where an activation lies in the whole one."""
        dims = [Along.whole(size) for size in x.shape]
        if forward.samples and x.dim() and not (x.shape[0] == 1 < forward.samples):
            if x.shape[0] % forward.samples:
                raise _unknown_part(path, x, f"{forward.samples} samples along dim 0")
            rows = x.shape[0] // forward.samples
            dims[0] = Along.whole(x.shape[0], forward.start * rows)
        if self.adapter is not None and self.adapter.shared:
            self._over_sequence(path, x, forward, dims)
        if self.apart is not None:
            self._features(path, x, dims)
        else:
            self._over_tensor(path, x, dims)
        return dims

    def _over_sequence(self, path: str, x: Tensor, forward: Forward, dims: list[Along]) -> None:
        opened, groups = self.adapter.opened, self.adapter.groups  # type: ignore[union-attr]
        if opened is not None and opened.call.length:
            forward.length = opened.call.length
        # Of a model that makes its tokens itself, none is cut before there is a length.
        if forward.length and x.dim() > 2:
            layout = groups.plan.lay(forward.length)
            dims[1] = _cut(path, x, layout.positions(groups.rank), forward.length)

    def _over_tensor(self, path: str, x: Tensor, dims: list[Along]) -> None:
        shared = next((s for stack, s in self.shared.items() if path.startswith(f"{stack}.")), None)
        if shared is None:
            return
        lengths = shared.ask(x) if shared.lengths is None else shared.lengths
        if lengths:
            place = shared.rank_group.rank
            start = sum(lengths[:place])
            own = torch.arange(start, start + lengths[place])
            if x.dim() < 3:
                raise _unknown_part(path, x, "[batch, length, width]")
            dims[1] = _cut(path, x, own, sum(lengths))

    def _features(self, path: str, x: Tensor, dims: list[Along]) -> None:
        rank_group, runs = self.mesh.tensor, getattr(self.apart, "runs", ())
        groups = next((n for p, n in self.attention.items() if f"{path}.".startswith(f"{p}.")), 0)
        if groups:
            # Where key-value heads are copied, each rank has as many query heads as the others.
            dealt = deal(max(groups, rank_group.size), rank_group.size)
            if x.dim() != 4 or x.shape[1] % dealt[rank_group.rank]:
                raise _unknown_part(path, x, "[batch, heads, queries, keys]")
            heads = x.shape[1] // dealt[rank_group.rank]
            start = sum(dealt[: rank_group.rank]) * heads
            whole = max(groups, rank_group.size) * heads
            dims[1] = Along(torch.arange(start, start + x.shape[1]), whole)
            return
        sizes = [stop - start for start, stop in runs]
        if x.shape[-1] == sum(sizes):
            found = torch.cat([torch.arange(*run) for run in runs])
            dims[-1] = Along(found, self.apart.total)  # type: ignore[union-attr]
        elif len(runs) > 1 and x.shape[-1] == sizes[0]:
            # A gate and what it gates, computed by one layer, are one product now.
            dims[-1] = Along(torch.arange(*runs[0]), self.apart.total // len(runs))  # type: ignore[union-attr]
        else:
            raise _unknown_part(
                path, x, f"the {sum(sizes)} features that this rank has of the layer"
            )


def _cut(path: str, x: Tensor, own: Tensor, length: int) -> Along:
    """Dim 1, a piece of the sequence or all of it."""
    if x.shape[1] == len(own):
        return Along(own, length)
    if x.shape[1] == length:
        return Along.whole(length)
    raise _unknown_part(path, x, f"{len(own)} or all {length} tokens along dim 1")


def _unknown_part(path: str, x: Tensor, wanted: str) -> GulliverError:
    return GulliverError(
        f"{path} drops elements of {tuple(x.shape)}, of which it is not known where they stand in "
        f"the whole (expected {wanted}): set it to 0, or take dropout='alike'"
    )
