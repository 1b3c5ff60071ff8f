"""`LocalRunner`: runs batches of a model in this process."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from gulliver.serve.attention import (
    ModelShape,
    Pages,
    attach,
    forward,
    inputs_of,
    measure,
)
from gulliver.serve.batch import Batch, Facts
from gulliver.serve.decoder import NativeDecoder, decoder_of
from gulliver.serve.kernels import take_few_rows
from gulliver.serve.offload import StreamedWeights
from gulliver.serve.options import ModelOptions
from gulliver.serve.weights import BLOCK, cache_blocks, check_served, context_of


class PagedModel:
    """A model, or a stage of one, with the pages that its attention reads while it is served."""

    def __init__(
        self, model: Any, shape: ModelShape, streamed: StreamedWeights | None, device: torch.device
    ) -> None:
        self.model, self.shape, self.streamed, self.device = model, shape, streamed, device
        self.pages: Pages | None = None
        self.decoder: NativeDecoder | None = None

    def take_cache(self, blocks: int, block_size: int, native: bool = False) -> Pages:
        """Takes memory for the cache; the model attends over pages from now on.

        With `native`, `decoder` runs the model if it is one that native code knows.
        """
        shape = self.shape
        if self.streamed is not None:
            taken = blocks * block_size * shape.token_bytes
            self.streamed.set_budget(self.streamed.manager.budget - taken)
        self.pages = Pages(shape.layers, blocks, block_size, shape.dtype, self.device)
        self._detach = attach(self.model, self.pages)
        if native and self.streamed is None:
            self.decoder = decoder_of(self.model, shape, self.pages)
        self._give_back = take_few_rows(self.model) if self.decoder is None else lambda: None
        return self.pages

    @property
    def budget(self) -> int | None:
        """Bytes that streamed weights and the cache may take together."""
        return None if self.streamed is None else self.streamed.manager.budget

    def end_step(self) -> None:
        """Ends a forward; streamed weights are used in the same order by the next one."""
        if self.streamed is not None:
            self.streamed.end_step()

    def close(self) -> None:
        """Gives the model back, and the memory of the cache."""
        self.decoder = None
        if self.pages is not None:
            self._detach()
            self._give_back()
            self.pages.keys.clear()
            self.pages.values.clear()
        if self.streamed is not None:
            self.streamed.close()


class LocalRunner:
    """A model of transformers on one device, with the pages of its layers.

    Dense decoders run in native code (`gulliver.serve.decoder`). The forward of others is the
    model's own: packed tokens are one row, `position_ids` are each sequence's
    own, and logits are computed of the wanted rows only. While a runner has a model, the model
    attends over pages: `close` gives it back.

    Attributes:
        pages: keys and values of all layers.
        measured: sizes of the model.
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
        decoder: str = "native",
    ) -> None:
        """Measures the model by a forward of one token, and takes memory for its cache.

        Args:
            model: causal language model of transformers.
            context: most tokens of a sequence; None for the model's own.
            cache_bytes: bytes of the cache, such as ``"2GiB"``; None chooses by memory and context.
            cache_tokens: the same in tokens.
            block_size: tokens of a block.
            sequences: sequences that run at a time, to choose a size by.
            streamed: what brings the model's weights, where they come from a disk.
            decoder: ``"torch"`` runs the model's own forward also where native code could; see
                `ModelOptions`.

        Raises:
            GulliverError: the model is not served, its context is smaller, or there is no room for
                the cache.
        """
        check_served(model)
        self._model = model.eval()
        self.device = device = next(model.parameters()).device
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        with torch.inference_mode():
            self.measured = measure(
                model,
                lambda: forward(model, zero, zero, zero),
                range(model.config.num_hidden_layers),
            )
        self._paged = paged = PagedModel(model, self.measured, streamed, device)
        paged.end_step()
        context = context_of(model.config, context)
        sizes = ModelOptions(kv_cache=cache_bytes, cache_tokens=cache_tokens)
        blocks = cache_blocks(
            *(self.measured.token_bytes, device, context, sequences, sizes),
            *(block_size, paged.budget),
        )
        self.pages = paged.take_cache(blocks, block_size, native=decoder != "torch")
        self.facts = Facts(self.measured.vocabulary, context, blocks, block_size)
        self._results: deque[Tensor] = deque()

    @property
    def native(self) -> bool:
        """Whether steps run in native code."""
        return self._paged.decoder is not None

    @property
    def streamed(self) -> StreamedWeights | None:
        """What brings the weights, where they come from a disk."""
        return self._paged.streamed

    @property
    def max_in_flight(self) -> int:
        """One batch at a time."""
        return 1

    @torch.inference_mode()
    def submit(self, batch: Batch) -> None:
        """Runs a batch."""
        decoder = self._paged.decoder
        if decoder is not None and decoder.takes(batch):
            self.pages.copy(batch)
            self._results.append(decoder.run(batch))
            return
        self.pages.begin(batch)
        tokens, wanted = inputs_of(batch, self.device)
        logits = forward(self._model, tokens, self.pages.positions, wanted)
        self._results.append(logits[: batch.outputs])
        self._paged.end_step()

    def collect(self) -> Tensor:
        """Returns the logits of the oldest batch."""
        return self._results.popleft()

    def close(self) -> None:
        """Gives the model back, and the memory of the cache."""
        self._paged.close()
