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
from gulliver.serve.decoder import DenseModel, NativeDecoder, decoder_of, in_huge_pages
from gulliver.serve.offload import StreamedWeights
from gulliver.serve.options import ModelOptions
from gulliver.serve.weights import BLOCK, cache_blocks, check_served, context_of, free_bytes


class PagedModel:
    """A model or stage, with the pages that its attention reads."""

    def __init__(
        self, model: Any, shape: ModelShape, streamed: StreamedWeights | None, device: torch.device
    ) -> None:
        self.model, self.shape, self.streamed, self.device = model, shape, streamed, device
        self.pages: Pages | None = None
        self.decoder: NativeDecoder | None = None

    def take_cache(self, blocks: int, block_size: int, native: bool = False) -> Pages:
        """Allocates the cache; with `native`, native code runs the model if it supports it."""
        shape = self.shape
        if self.streamed is not None:
            taken = blocks * block_size * shape.token_bytes
            self.streamed.set_budget(self.streamed.manager.budget - taken)
        self.pages = Pages(shape.layers, blocks, block_size, shape.dtype, self.device)
        self._detach = attach(self.model, self.pages)
        if native and self.streamed is None:
            self.decoder = decoder_of(self.model, shape, self.pages)
        return self.pages

    @property
    def budget(self) -> int | None:
        """Bytes for streamed weights and the cache together; None if weights are not streamed."""
        return None if self.streamed is None else self.streamed.manager.budget

    def end_step(self) -> None:
        """Marks the end of a forward; the next one uses streamed weights in the same order."""
        if self.pages is not None:
            self.pages.end()
        if self.streamed is not None:
            self.streamed.end_step()

    def close(self) -> None:
        self.decoder = None
        if self.pages is not None:
            self._detach()
            self.pages.keys.clear()
            self.pages.values.clear()
        if self.streamed is not None:
            self.streamed.close()


class LocalRunner:
    """A transformers model on one device, with the pages of its layers.

    Dense decoders run in native code (`gulliver.serve.decoder`). Others run their own forward:
    packed tokens form one row, `position_ids` count per sequence, and logits are computed only for
    the wanted rows. Until `close`, the model's attention uses the cache.

    Attributes:
        pages: keys and values of all layers.
        measured: measured sizes of the model.
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
        """Measures the model with a forward of one token, and allocates its cache.

        Args:
            model: causal language model of transformers.
            context: maximum tokens of a sequence; None for the model's own.
            cache_bytes: bytes of the cache, such as ``"2GiB"``; None chooses based on memory and
                context.
            cache_tokens: size of the cache in tokens, instead of `cache_bytes`.
            block_size: tokens per block.
            sequences: number of concurrent sequences, from which the size is chosen.
            streamed: the model's weights, if they are streamed from a disk.
            decoder: ``"torch"`` always runs the model's own forward; see `ModelOptions`.

        Raises:
            GulliverError: the model is not supported, its own context is smaller than `context`, or
                the cache does not fit.
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
        context = context_of(getattr(model.config, "max_position_embeddings", None), context)
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
        """The weights, if they are streamed from disk."""
        return self._paged.streamed

    @property
    def max_in_flight(self) -> int:
        """Number of batches in flight, always 1."""
        return 1

    @torch.inference_mode()
    def submit(self, batch: Batch) -> None:
        decoder = self._paged.decoder
        if decoder is not None:
            self.pages.copy(batch)
            self._results.append(decoder.run(batch))
            return
        self.pages.begin(batch)
        tokens, wanted = inputs_of(batch, self.device)
        logits = forward(self._model, tokens, self.pages.positions, wanted)
        self._results.append(logits[: batch.outputs])
        self._paged.end_step()

    def collect(self) -> Tensor:
        return self._results.popleft()

    def close(self) -> None:
        """Restores the model and frees the memory of the cache."""
        self._paged.close()


class DenseRunner:
    """A dense decoder in native code, without a module of transformers."""

    max_in_flight, native = 1, True

    def __init__(
        self, model: DenseModel, context: int | None, options: ModelOptions, sequences: int
    ) -> None:
        """Allocates the cache; raises `Unfit` if native code does not support the model."""
        shape, device = model.shape, torch.device("cpu")
        model = in_huge_pages(model, free_bytes(device))
        blocks = cache_blocks(shape.token_bytes, device, context, sequences, options)
        self.pages = Pages(shape.layers, blocks, BLOCK, shape.dtype, device)
        self._decoder = NativeDecoder(model, self.pages)
        self.facts = Facts(shape.vocabulary, context, blocks, BLOCK)
        self._results: deque[Tensor] = deque()

    def submit(self, batch: Batch) -> None:
        self.pages.copy(batch)
        self._results.append(self._decoder.run(batch))

    def collect(self) -> Tensor:
        return self._results.popleft()

    def close(self) -> None:
        del self._decoder
        self.pages.keys.clear()
        self.pages.values.clear()
