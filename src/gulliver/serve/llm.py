"""`open_runner`: the runner of a folder's model, chosen by its options.

| options | runner |
|---|---|
| none | `DenseRunner`, a dense decoder in this process, its weights mapped |
| none, other models | `LocalRunner`, a transformers model in this process |
| ``memory_limit=`` | `LocalRunner`, with weights read from a disk (`StreamedWeights`) |
| ``tensor=``, ``pipeline=`` | `RanksRunner`, processes that it starts (`gulliver.serve.ranks`) |
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from gulliver.errors import GulliverError
from gulliver.serve.batch import Drafter, Runner
from gulliver.serve.decoder import Unfit, read_dense
from gulliver.serve.engine import Engine
from gulliver.serve.local import DenseRunner, LocalRunner
from gulliver.serve.options import EngineOptions, ModelOptions
from gulliver.serve.requests import Prompt, chat_tokens, listed
from gulliver.serve.sampling import CompletionOutput, Event, RequestOutput, SamplingParams
from gulliver.serve.weights import (
    build_on_meta,
    check_options,
    context_of,
    dtype_name,
    end_tokens,
    kept_dtype,
    load_model,
    tokenizer_of,
)

_log = logging.getLogger("gulliver")


def open_runner(
    folder: Path, tokenizer: Any, options: ModelOptions, sequences: int
) -> tuple[Runner, list[int]]:
    """Loads a model or starts its ranks; also returns the tokens that end a text."""
    if options.ranks > 1:
        from gulliver.serve.ranks.controller import start_ranks

        runner = start_ranks(folder, options, sequences)
        return runner, end_tokens(build_on_meta(folder, torch.float32), tokenizer)
    if options.decoder == "native" and options.limit is None:
        try:
            dense, context, ends = read_dense(folder, options, kept_dtype(folder, options.dtype))
            context = context_of(context, options.seq_length)
            runner = DenseRunner(dense, context, options, sequences)
            return runner, ends or end_tokens(None, tokenizer)
        except Unfit as reason:
            _log.info("loading with transformers: %s", reason)
    model, streamed = load_model(folder, options)
    try:
        sizes = options.seq_length, options.kv_cache, options.cache_tokens
        runner = LocalRunner(
            model, *sizes, sequences=sequences, streamed=streamed, decoder=options.decoder
        )
    except BaseException:
        if streamed is not None:
            streamed.close()
        raise
    if streamed is not None:
        _log.warning("memory_limit=%s: %s", options.memory_limit, streamed)
    return runner, end_tokens(model, tokenizer)


# `LLM`: prompts in, completions out.


class LLM:
    """A language model that completes many prompts at a time, also from several threads.

    Attributes:
        engine: the underlying engine.
        tokenizer: the model's tokenizer; None if it has none.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None = None,
        *,
        options: EngineOptions | None = None,
        drafter: Drafter | None = None,
        model_options: ModelOptions | None = None,
        **fields: Any,
    ) -> None:
        """Loads a model if given as a folder, and allocates its cache.

        Args:
            model: Hugging Face folder, name on the Hub (``org/name``), GGUF file, or a causal
                language model of transformers.
            tokenizer: tokenizer, if `model` is not a folder.
            options: limits of the engine.
            drafter: drafter for speculative decoding; the option `speculation` names one instead.
            model_options: how the model is loaded and run.
            fields: fields of `ModelOptions` by name, such as ``dtype``, ``quantize``,
                ``seq_length``, ``cache_tokens``, ``memory_limit``, ``tp_size`` or ``speculation``.

        Raises:
            GulliverError: the folder or the model cannot be served, or there is too little memory.
        """
        if "dtype" in fields:
            fields["dtype"] = dtype_name(fields["dtype"])
        given = replace(model_options or ModelOptions(), **fields)
        options = options or EngineOptions()
        if isinstance(model, (str, Path)):
            from gulliver.io.hub import fetch

            folder = fetch(Path(model))
            if tokenizer is not None:
                raise GulliverError("a folder has its own tokenizer: omit tokenizer")
            check_options(folder, given.dtype, given.quantize)
            tokenizer = tokenizer_of(folder)
            # The draft model is loaded before the cache takes the remaining memory.
            drafter = _drafter(given, drafter, tokenizer, options)
            runner, ends = open_runner(folder, tokenizer, given, options.sequences)
        else:
            _refuse_for_models(given)
            drafter = _drafter(given, drafter, tokenizer, options)
            sizes = given.seq_length, given.kv_cache, given.cache_tokens
            runner = LocalRunner(model, *sizes, sequences=options.sequences, decoder=given.decoder)
            ends = end_tokens(model, tokenizer)
        self.tokenizer = tokenizer
        self._lock, self._inboxes, self._closed = Lock(), dict[int, deque[Event]](), False
        try:
            self.engine = Engine(runner, tokenizer, options, ends, drafter)
        except BaseException:
            runner.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generates completions for prompts.

        Args:
            prompts: texts or lists of tokens; a single one counts as a list of one.
            sampling_params: sampling parameters, for all prompts or one for each.

        Returns:
            Outputs in the order of the prompts.

        Raises:
            GulliverError: a prompt is invalid; then none is started.
        """
        several = listed(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(several)
        if (given := len(sampling_params)) != len(several):
            raise GulliverError(f"{given} sampling parameters do not match {len(several)} prompts")
        outputs: dict[int, RequestOutput] = {}
        try:
            for prompt, one in zip(several, sampling_params, strict=True):
                tokens = self.engine.tokens_of(prompt)
                answers = [CompletionOutput(sample) for sample in range(one.n)]
                text = prompt if isinstance(prompt, str) else None
                outputs[self._add(tokens, one)] = RequestOutput(text, tokens, 0, answers)
            for event in self._events(list(outputs), sum(one.n for one in sampling_params)):
                _note(outputs[event.request], event)
        finally:
            self._forget(list(outputs))
        return list(outputs.values())

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[Event, None, None]:
        """Generates a completion for one prompt, token by token; closing the iterator cancels it.

        Args:
            prompt: text or tokens.
            sampling_params: sampling parameters.

        Yields:
            Events of the completion; concatenate their `text` for the full text.

        Raises:
            GulliverError: the prompt is invalid, or generation failed.
        """
        number = self._add(prompt, sampling_params)
        try:
            for event in self._events(
                [number], 1 if sampling_params is None else sampling_params.n
            ):
                if event.error is not None:
                    raise GulliverError(event.error)
                yield event
        finally:
            self._forget([number])

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        sampling_params: SamplingParams | None = None,
    ) -> RequestOutput:
        """Replies to a conversation, formatted by the tokenizer's chat template.

        Args:
            messages: dictionaries of ``role`` and ``content``.
            sampling_params: sampling parameters.

        Raises:
            GulliverError: there is no template, or it rejects the conversation.
        """
        return self.generate([chat_tokens(self.tokenizer, messages)], sampling_params)[0]

    def _add(self, prompt: Prompt, sampling: SamplingParams | None) -> int:
        with self._lock:
            self._check_open()
            number = self.engine.add(prompt, sampling)
            self._inboxes[number] = deque()
        return number

    def _events(self, numbers: Sequence[int], answers: int) -> Generator[Event, None, None]:
        """Yields events of requests until all of their completions have ended."""
        # A batch also has tokens of other threads and streams; the thread that steps the engine
        # puts their events into their inboxes.
        boxes = [self._inboxes[number] for number in numbers]
        while answers:
            with self._lock:
                if not any(boxes):
                    self._check_open()
                    assert self.engine.busy, "a request has not ended and is not there"
                    for event in self.engine.step():
                        if event.request in self._inboxes:
                            self._inboxes[event.request].append(event)
            for box in boxes:
                while box:
                    event = box.popleft()
                    answers -= event.finish is not None
                    yield event

    def _forget(self, numbers: Sequence[int]) -> None:
        """Cancels unfinished requests, after an error or if a stream is closed."""
        with self._lock:
            for number in numbers:
                self.engine.cancel(number)
                self._inboxes.pop(number, None)

    def close(self) -> None:
        """Restores the model and frees the cache."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.engine.runner.close()
            if self.engine.drafter is not None:
                self.engine.drafter.close()

    def _check_open(self) -> None:
        if self._closed:
            raise GulliverError("this LLM is closed: create another one")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drafter(
    given: ModelOptions, drafter: Drafter | None, tokenizer: Any, options: EngineOptions
) -> Drafter | None:
    if given.speculation is None:
        return drafter
    if drafter is not None:
        raise GulliverError("speculation= creates its own drafter: pass it or drafter=, not both")
    from gulliver.serve.speculative.speculator import make_speculator

    return make_speculator(given.speculation, None, tokenizer, options.sequences)


def _refuse_for_models(given: ModelOptions) -> None:
    if given.dtype is not None or given.quantize is not None:
        raise GulliverError(
            "dtype and quantize need a folder: convert a model with model.to(...) or "
            "gulliver.replace_module(model)"
        )
    if given.memory_limit is not None or given.ranks > 1:
        raise GulliverError(
            "memory_limit, tp_size and pp_size need a folder, whose weights are read in slices: "
            "save the model with save_pretrained and pass the folder"
        )


def _note(output: RequestOutput, event: Event) -> None:
    completion = output.outputs[event.sample]
    completion.text += event.text
    completion.tokens += event.tokens
    if event.finish is not None:
        completion.finish_reason, completion.error = event.finish, event.error
        output.num_cached_tokens = max(output.num_cached_tokens, event.prefix_cached)
