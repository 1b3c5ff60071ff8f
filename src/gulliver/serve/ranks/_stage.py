"""`StageModel`: one rank's part of a model, over its own pages.

The training side cuts the model (`make_stage`, `apply_tensor`); its own forward runs, in which
blocks of other stages do nothing. Keys and values of a rank are those of its layers and its heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.comm import ALONE, RankGroup
from gulliver.errors import GulliverError
from gulliver.options import byte_size
from gulliver.parallel.pipeline import Stack, cut, make_stage, stack_of
from gulliver.parallel.tensor import apply_tensor, deal, plan_tensor
from gulliver.quantize import quantize_like
from gulliver.serve._attention import attach, attached
from gulliver.serve._batch import Batch
from gulliver.serve._few_rows import take_few_rows
from gulliver.serve._filling import Filling, is_quantised
from gulliver.serve._forward import context_of, inputs_of
from gulliver.serve._load import kept_dtype
from gulliver.serve._measure import Measured, Recorder
from gulliver.serve._memory import free_bytes
from gulliver.serve._offload import StreamedWeights, unit_paths
from gulliver.serve._pages import LayerShape, Pages
from gulliver.serve._source import Source, build_on_meta
from gulliver.serve._streamed import stream
from gulliver.serve._ways import Ways
from gulliver.serve.ranks._layout import Layout

SHARE = 0.5
"""Part of the free memory that the caches of all ranks take at most, where no size is given."""
WHOLE = 2048
CACHE_SHARE = 4


# [Note: no inference mode] Sums over ranks are finished by a thread of `gulliver.comm`, in place,
# and what was made in inference mode on one thread cannot be changed on another.
@dataclass(frozen=True)
class Sizes:
    """What a rank says of itself before it takes memory for its cache."""

    # Columns of the logits; 0 on a stage without them.
    vocabulary: int
    # Most tokens of a sequence; None where positions have no end.
    context: int | None
    # Most blocks of the cache that this rank has memory for.
    blocks: int


class StageModel:
    """A rank's part of a folder's model."""

    def __init__(
        self, folder: Path, ways: Ways, layout: Layout, rank: int, group: RankGroup = ALONE
    ) -> None:
        self.place, self.layout = layout.place(rank), layout
        dtype = kept_dtype(folder, ways.dtype)
        self._model: Any = build_on_meta(folder, dtype)
        self.width, self.dtype = int(self._model.config.hidden_size), dtype
        self._forward, self.streamed = None, None
        self._paths, quantised = unit_paths(self._model), is_quantised(folder)
        with Source(folder, self._model) as source:
            stack = stack_of(self._model)
            if quantised:
                # Of the whole: a stage does not have all the layers that the file names.
                quantize_like(self._model, folder)
            slopes = self._cut(group, stack)
            filling = Filling(self._model, source, ways.quantize, quantised, group)
            if ways.limit is None:
                filling.fill_all()
            else:
                self.streamed: StreamedWeights | None = stream(
                    self._model, self._paths, filling, ways.limit, ways.disk
                )
        for path, value in slopes.items():
            self._model.get_submodule(path).gulliver_slopes = value.to(dtype)
        self.measured = self._measure()
        self._pages: Pages | None = None
        self._detach: Any = None
        self._give_back: Any = None

    def _cut(self, group: RankGroup, stack: Stack) -> dict[str, Tensor]:
        """Leaves this rank's part of the model, on meta; returns the slopes of its heads."""
        layout, slopes = self.layout, _slopes(self._model)
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
                # To find out, blocks would run on meta, where there are no pages. All served ones
                # return a plain tensor; one that does not is refused as it runs.
                self._forward.extra = None
        kept = dict(self._model.named_modules())
        mine = {}
        for path, value in slopes.items():
            if hasattr(kept.get(path), "num_heads"):
                sizes = deal(len(value), group.size)
                mine[path] = value.split(list(sizes))[group.rank]
        return mine

    @property
    def last(self) -> bool:
        """Whether logits come from this stage."""
        return self.place.stage == self.layout.stages - 1

    def sizes(self, ways: Ways, block_size: int, sequences: int) -> Sizes:
        """What this rank has memory for."""
        own = context_of(self._model.config)
        context = ways.context
        if context is not None and (context < 2 or (own is not None and context > own)):
            raise GulliverError(f"context={context}: give 2 to {own or 'any number'}")
        context = own if context is None else context
        if ways.cache_bytes is not None and ways.cache_tokens is not None:
            raise GulliverError("give cache_bytes or cache_tokens, not both")
        block_bytes = max(self.measured.token_bytes * block_size, 1)
        free = free_bytes(torch.device("cpu"))
        if ways.cache_tokens is not None:
            blocks = ways.cache_tokens // block_size
        elif ways.cache_bytes is not None:
            blocks = byte_size("cache_bytes", ways.cache_bytes) // block_bytes
        else:
            room = int(free * SHARE) // self.layout.ranks
            if self.streamed is not None:
                room = min(room, self.streamed.manager.budget // CACHE_SHARE)
            blocks = min(sequences * -(-(context or WHOLE) // block_size), room // block_bytes)
        if blocks < 1 or blocks * block_bytes > free:
            raise GulliverError(
                f"a cache of {blocks} blocks of {block_bytes} bytes each does not fit the {free} "
                "bytes of memory that are free: give cache_tokens, bfloat16 or more ranks"
            )
        return Sizes(self.measured.vocabulary, context, blocks)

    def take_cache(self, blocks: int, block_size: int) -> None:
        """Takes memory for the cache; from now on batches can be run."""
        measured = self.measured
        if self.streamed is not None:
            taken = blocks * block_size * measured.token_bytes
            self.streamed.set_budget(self.streamed.manager.budget - taken)
        cpu = torch.device("cpu")
        self._pages = Pages(measured.layers, blocks, block_size, measured.dtype, cpu)
        self._detach = attach(self._model, self._pages)
        self._give_back = take_few_rows(self._model)

    @torch.no_grad()
    def run(self, batch: Batch, carry: Tensor | None) -> Tensor:
        """Runs a batch through this rank's layers."""
        assert self._pages is not None, "the cache has been taken"
        self._pages.begin(batch)
        tokens, wanted = inputs_of(batch)
        out = self._call(tokens, self._pages.positions, wanted, carry)
        if self.streamed is not None:
            self.streamed.end_step()
        return out[: batch.outputs] if self.last else out

    def _call(
        self, tokens: Tensor, positions: Tensor, wanted: Tensor, carry: Tensor | None
    ) -> Tensor:
        known = (
            {} if self._model.config.model_type == "bloom" else {"position_ids": positions[None]}
        )
        known |= {"use_cache": False, "logits_to_keep": wanted}
        if self._forward is None:
            return self._model(tokens[None], **known).logits[0].float()
        carries = () if carry is None else (carry,)
        given = (self._model, self.place.stage, carries, (tokens[None],), known)
        out: Any = self._forward.forward(*given, look=self._looks)
        self._looks = False
        return out.logits[0].float() if self.last else out[0].contiguous()

    _looks = True
    """The first forward of a stage looks for what leaks past the carry."""

    @torch.no_grad()
    def _measure(self) -> Measured:
        """Shapes of this rank's keys and values, by a forward of one token."""
        # A stage behind the first is given hidden states of zeros.
        recorder = Recorder()
        one = torch.zeros(1, dtype=torch.int64)
        carry = None if self.place.stage == 0 else torch.zeros(1, 1, self.width, dtype=self.dtype)
        with attached(self._model, recorder):
            out = self._call(one, one, one, carry)
        if self.streamed is not None:
            self.streamed.end_step()
        first, stop = self.layout.bounds[self.place.stage : self.place.stage + 2]
        if sorted(recorder.shapes) != list(range(first, stop)):
            raise GulliverError(
                f"{type(self._model).__name__} attends over pages in layers "
                f"{sorted(recorder.shapes)} of stage {self.place.stage}, which has {first} to "
                f"{stop - 1}: it is not served over stages"
            )
        # Layers of other stages have no keys here; a layer keeps its number.
        none = LayerShape(0, 0)
        layers = tuple(recorder.shapes.get(number, none) for number in range(stop))
        return Measured(layers, recorder.dtype, out.shape[-1] if self.last else 0)

    def close(self) -> None:
        """Lets go of memory."""
        if self._detach is not None:
            self._detach()
            self._give_back()
        if self.streamed is not None:
            self.streamed.close()


def _slopes(model: Any) -> dict[str, Tensor]:
    """Slopes of ALiBi by attention module: those of a rank are its heads' of the whole."""
    found = {}
    for path, module in model.named_modules():
        if type(module).__name__ == "BloomAttention":
            from transformers.models.bloom.modeling_bloom import build_alibi_tensor

            ones = torch.ones(1, 2)
            found[path] = build_alibi_tensor(ones, module.num_heads, torch.float32)[:, 0, 1]
    return found
