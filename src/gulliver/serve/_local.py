"""`LocalRunner`: runs batches of a model in this process."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.serve._attention import attach
from gulliver.serve._batch import Batch, Facts
from gulliver.serve._families import check_served
from gulliver.serve._few_rows import take_few_rows
from gulliver.serve._forward import context_of, forward, inputs_of
from gulliver.serve._measure import Measured, measure
from gulliver.serve._memory import WHOLE, cache_blocks
from gulliver.serve._offload import StreamedWeights
from gulliver.serve._pages import Pages

BLOCK = 16
"""Tokens of a block."""
CACHE_SHARE = 4
"""Part of a limit of memory that a cache of no given size takes."""


class LocalRunner:
    """A model of transformers on one device, with the pages of its layers.

    The forward is the model's own: packed tokens are one row, `position_ids` are each sequence's
    own, and logits are computed of the rows that are wanted only. While a runner has a model, the
    model attends over pages: `close` gives it back.
    """

    def __init__(
        self,
        model: Any,
        context: int | None = None,
        cache_bytes: int | str | None = None,
        cache_tokens: int | None = None,
        block_size: int = BLOCK,
        sequences: int = 64,
        streamed: StreamedWeights | None = None,
    ) -> None:
        """Measures the model by a forward of one token, and takes memory for its cache.

        Args:
            model: causal language model of transformers, in evaluation mode, quantised or not.
            context: most tokens of a sequence; None for the model's own.
            cache_bytes: bytes of keys and values; None takes what `sequences` of the whole context
                need, at most half of the memory that is free.
            cache_tokens: the same in tokens.
            block_size: tokens of a block.
            sequences: sequences that run at a time, for the default size of the cache.
            streamed: the model's weights, where they come from a disk: they and the cache share
                the budget that the weights have so far, of which the cache takes a quarter by
                default.

        Raises:
            GulliverError: the model is not served, or there is no memory for one sequence.
        """
        check_served(model)
        if block_size < 1:
            raise GulliverError(f"block_size={block_size}: give 1 or more")
        self._model, self.streamed = model.eval(), streamed
        self.device = next(model.parameters()).device
        measured = measure(model, self.device)
        self._end_step()
        own = context_of(model.config)
        if context is not None and (context < 2 or (own is not None and context > own)):
            raise GulliverError(f"context={context}: give 2 to {own or 'any number'}")
        context = own if context is None else context
        if streamed is not None and cache_bytes is None and cache_tokens is None:
            whole = sequences * (context or WHOLE) * measured.token_bytes
            cache_bytes = min(whole, streamed.manager.budget // CACHE_SHARE)
        blocks = cache_blocks(
            measured, self.device, context, block_size, sequences, cache_bytes, cache_tokens
        )
        if streamed is not None:
            taken = blocks * block_size * measured.token_bytes
            streamed.set_budget(streamed.manager.budget - taken)
        self.measured: Measured = measured
        self._facts = Facts(measured.vocabulary, context, blocks, block_size)
        self.pages = Pages(measured.layers, blocks, block_size, measured.dtype, self.device)
        self._detach = attach(model, self.pages)
        self._give_back = take_few_rows(model)
        self._results: deque[Tensor] = deque()

    @property
    def facts(self) -> Facts:
        """Sizes of the model and of its cache."""
        return self._facts

    @property
    def depth(self) -> int:
        """One batch at a time."""
        return 1

    @torch.inference_mode()
    def submit(self, batch: Batch) -> None:
        """Runs a batch."""
        self.pages.begin(batch)
        tokens, wanted = inputs_of(batch, self.device)
        logits = forward(self._model, tokens, self.pages.positions, wanted)
        self._results.append(logits[: batch.outputs])
        self._end_step()

    def _end_step(self) -> None:
        if self.streamed is not None:
            self.streamed.end_step()

    def collect(self) -> Tensor:
        """Returns the logits of the oldest batch."""
        return self._results.popleft()

    def close(self) -> None:
        """Gives the model back, and the memory of the cache."""
        self._detach()
        self._give_back()
        self.pages.keys.clear()
        self.pages.values.clear()
        if self.streamed is not None:
            self.streamed.close()
