"""`StageModel`: one rank's shard of a model, with its own pages.

`make_stage` and `apply_tensor` shard the model as in training; in its own forward, blocks of other
stages do nothing. A rank caches keys and values of its own layers and heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.comm.groups import ALONE, RankGroup
from gulliver.errors import GulliverError
from gulliver.layout.even import split_evenly
from gulliver.parallel.pipeline.stack import Stack, cut, stack_of
from gulliver.parallel.pipeline.stage import make_stage
from gulliver.parallel.tensor.apply import apply_tensor
from gulliver.parallel.tensor.plan import plan_tensor
from gulliver.quantize.files import quantize_like
from gulliver.serve.attention import (
    ModelShape,
    alibi_slopes,
    arguments_of,
    forward,
    inputs_of,
    measure,
)
from gulliver.serve.batch import Batch
from gulliver.serve.local import PagedModel
from gulliver.serve.offload import unit_paths
from gulliver.serve.options import ModelOptions
from gulliver.serve.weights import (
    Filling,
    Source,
    build_on_meta,
    cache_blocks,
    check_served,
    context_of,
    fill_model,
    is_quantised,
    kept_dtype,
)

# Assignment of layers to ranks. Ranks are numbered stage by stage: rank = stage x tensor + index
# among the stage's tensor ranks. Blocks are assigned by the exact partition of a chain
# (`gulliver.solve`), which minimizes the time of the slowest stage, for equal or given speeds.


@dataclass(frozen=True)
class RankPlace:
    """A rank's stage and tensor index."""

    stage: int
    # Index of the rank among the tensor ranks of its stage.
    tensor: int


@dataclass(frozen=True)
class Layout:
    """The ranks of a model."""

    # Ranks that each layer is sharded over.
    tensor: int
    # Stage k has the blocks from ``bounds[k]`` to ``bounds[k + 1] - 1``.
    bounds: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.stages

    def place(self, rank: int) -> RankPlace:
        return RankPlace(rank // self.tensor, rank % self.tensor)

    def members(self, stage: int) -> tuple[int, ...]:
        return tuple(range(stage * self.tensor, (stage + 1) * self.tensor))

    def named(self, rank: int) -> str:
        place = self.place(rank)
        return f"rank {rank} (stage {place.stage}, tensor rank {place.tensor})"


def plan_ranks(
    folder: Path, dtype: str | None, tensor: int, pipeline: int, speeds: Sequence[float] | None
) -> Layout:
    """Assigns a folder's model to ranks, without loading weights."""
    if speeds is not None and (len(speeds) != pipeline or min(speeds) <= 0):
        raise GulliverError(
            f"speeds={list(speeds)}: pass {pipeline} positive numbers, one per stage"
        )
    if is_quantised(folder) and tensor > 1:
        raise GulliverError(
            f"tensor={tensor}: quantized files cannot be sharded over tensor ranks; pass the "
            "original folder with quantize=, or use pp_size"
        )
    model = build_on_meta(folder, kept_dtype(folder, dtype))
    check_served(model)
    if not is_quantised(folder):
        # Otherwise a rank would detect it only after all ranks have started.
        with Source(folder, model) as source:
            source.check(model)
    try:
        if tensor > 1:
            plan_tensor(model, tensor)
        found = cut(model, stack_of(model), pipeline, speeds=speeds)
    except GulliverError as error:
        raise GulliverError(_in_our_words(str(error))) from None
    return Layout(tensor, found.bounds)


def _in_our_words(text: str) -> str:
    for theirs, ours in (("tp_size", "tensor"), ("pp_size", "pipeline")):
        text = text.replace(theirs, ours)
    return text


# The model's shard on a rank.


@dataclass(frozen=True)
class RankSizes:
    """Sizes that a rank reports before it allocates its cache."""

    # Columns of the logits; 0 on a stage without them.
    vocabulary: int
    # Maximum tokens of a sequence; None if unlimited.
    context: int | None
    # Maximum blocks of the cache that fit in this rank's memory.
    blocks: int


class StageModel:
    """A rank's shard of a folder's model."""

    def __init__(
        self,
        folder: Path,
        options: ModelOptions,
        layout: Layout,
        rank: int,
        group: RankGroup = ALONE,
    ) -> None:
        self.place, self.layout = layout.place(rank), layout
        dtype = kept_dtype(folder, options.dtype)
        self._model: Any = build_on_meta(folder, dtype)
        self.width, self.dtype = int(self._model.config.hidden_size), dtype
        self._forward = None
        # The first forward of a stage checks for values that bypass the carry.
        self._looks = True
        paths, quantised = unit_paths(self._model), is_quantised(folder)
        with Source(folder, self._model) as source:
            stack = stack_of(self._model)
            if quantised:
                # Done on the full model, as a stage lacks some layers that the file names.
                quantize_like(self._model, folder)
            slopes = self._cut(group, stack)
            filling = Filling(self._model, source, options.quantize, quantised, group)
            streamed = fill_model(self._model, paths, filling, options)
        for path, value in slopes.items():
            self._model.get_submodule(path).gulliver_slopes = value
        self.shape = self._measure()
        self._paged = PagedModel(self._model, self.shape, streamed, torch.device("cpu"))
        self._paged.end_step()

    def _cut(self, group: RankGroup, stack: Stack) -> dict[str, Tensor]:
        """Shards the model on meta for this rank; returns the ALiBi slopes of its heads."""
        layout = self.layout
        slopes = {
            path: alibi_slopes(module.num_heads, torch.ones((), dtype=self.dtype))
            for path, module in self._model.named_modules()
            if type(module).__name__ == "BloomAttention"
        }
        plan = plan_tensor(self._model, layout.tensor) if layout.tensor > 1 else None
        found = None
        if layout.stages > 1:
            at = [b - a for a, b in zip(layout.bounds, layout.bounds[1:], strict=False)]
            found = cut(self._model, stack, layout.stages, at=at)
        if plan is not None:
            apply_tensor(self._model, plan, group)
        if found is not None:
            ranks = RankGroup(tuple(range(layout.stages)), self.place.stage)
            numbers = [[stage] for stage in range(layout.stages)]
            self._forward = make_stage(self._model, stack, found, ranks, numbers).stage_forward
            if self._forward.extra == -1:
                # Detecting it would run blocks on meta, without pages. Blocks of supported models
                # return a plain tensor; one that does not is rejected when it runs.
                self._forward.extra = None
        kept = dict(self._model.named_modules())
        mine = {}
        for path, value in slopes.items():
            if hasattr(kept.get(path), "num_heads"):
                sizes = split_evenly(len(value), group.size)
                mine[path] = value.split(list(sizes))[group.rank]
        return mine

    @property
    def last(self) -> bool:
        return self.place.stage == self.layout.stages - 1

    def sizes(self, options: ModelOptions, block_size: int, sequences: int) -> RankSizes:
        context = context_of(
            getattr(self._model.config, "max_position_embeddings", None), options.seq_length
        )
        blocks = cache_blocks(
            *(self.shape.token_bytes, torch.device("cpu"), context, sequences, options),
            *(block_size, self._paged.budget, self.layout.ranks),
        )
        return RankSizes(self.shape.vocabulary, context, blocks)

    def take_cache(self, blocks: int, block_size: int) -> None:
        self._paged.take_cache(blocks, block_size)

    @torch.no_grad()
    def run(self, batch: Batch, carry: Tensor | None) -> Tensor:
        # No inference mode: sums over ranks are finished in place by a thread of `gulliver.comm`,
        # and tensors created in inference mode on one thread cannot be changed on another.
        pages = self._paged.pages
        assert pages is not None, "the cache has been taken"
        pages.begin(batch)
        tokens, wanted = inputs_of(batch)
        out = self._call(tokens, pages.positions, wanted, carry)
        self._paged.end_step()
        return out[: batch.outputs] if self.last else out

    def _call(
        self, tokens: Tensor, positions: Tensor, wanted: Tensor, carry: Tensor | None
    ) -> Tensor:
        if self._forward is None:
            return forward(self._model, tokens, positions, wanted)
        carries = () if carry is None else (carry,)
        more = arguments_of(self._model, positions, wanted)
        given = (self._model, self.place.stage, carries, (tokens[None],), more)
        out: Any = self._forward.forward(*given, look=self._looks)
        self._looks = False
        return out.logits[0].float() if self.last else out[0].contiguous()

    @torch.no_grad()
    def _measure(self) -> ModelShape:
        one = torch.zeros(1, dtype=torch.int64)
        # Stages after the first get zeros as hidden states.
        carry = None if self.place.stage == 0 else torch.zeros(1, 1, self.width, dtype=self.dtype)
        layers = range(*self.layout.bounds[self.place.stage : self.place.stage + 2])
        return measure(self._model, lambda: self._call(one, one, one, carry), layers, self.last)

    def close(self) -> None:
        self._paged.close()
