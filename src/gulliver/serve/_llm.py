"""`LLM`: prompts in, answers out."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from gulliver.errors import GulliverError
from gulliver.serve._engine import Engine, EngineOptions
from gulliver.serve._events import Completion, Event, Output
from gulliver.serve._load import dtype_name, end_tokens, load_text
from gulliver.serve._local import LocalRunner
from gulliver.serve._prompts import Prompt, chat_tokens, listed
from gulliver.serve._runner import Opened, open_runner
from gulliver.serve._sampling import SamplingParameters
from gulliver.serve._speculation import Drafter
from gulliver.serve._ways import Ways


class LLM:
    """A language model that answers many prompts at a time, of several threads as well.

    Attributes:
        engine: the engine that it drives.
        tokenizer: the model's tokenizer; None where there is none.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None = None,
        dtype: str | torch.dtype | None = None,
        quantize: str | None = None,
        context: int | None = None,
        cache_bytes: int | str | None = None,
        cache_tokens: int | None = None,
        options: EngineOptions | None = None,
        drafter: Drafter | None = None,
        speculation: str | Path | None = None,
        memory: int | str | None = None,
        disk: Path | str | None = None,
        tensor: int = 1,
        pipeline: int = 1,
        speeds: Sequence[float] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Loads a model where it is given as a folder, and takes memory for its cache."""
        _check_kinds(options, drafter, speculation)
        options = options or EngineOptions()
        ways = Ways(
            *(dtype_name(dtype), quantize, context, cache_bytes, cache_tokens),
            *(memory, disk, tensor, pipeline, None if speeds is None else tuple(speeds), timeout_s),
        )
        if isinstance(model, (str, Path)):
            if tokenizer is not None:
                raise GulliverError("a folder has its own tokenizer: give none beside it")
            text = load_text(Path(model), ways.dtype, quantize) if speculation else None
            drafter = _drafter(speculation, drafter, text, options)
            opened = open_runner(model, ways, options.sequences, options.step_tokens)
        else:
            _refuse_for_models(ways)
            drafter = _drafter(speculation, drafter, tokenizer, options)
            sizes = context, cache_bytes, cache_tokens
            runner = LocalRunner(model, *sizes, sequences=options.sequences)
            opened = Opened(runner, tokenizer, end_tokens(model, tokenizer))
        self.tokenizer = opened.tokenizer
        self._lock, self._inboxes, self._closed = Lock(), dict[int, deque[Event]](), False
        try:
            self.engine = Engine(
                opened.runner, opened.tokenizer, options, opened.end_tokens, drafter
            )
        except BaseException:
            opened.runner.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParameters | Sequence[SamplingParameters] | None = None,
    ) -> list[Output]:
        """Answers prompts.

        Args:
            prompts: texts, or lists of tokens; one alone is a list of one.
            sampling: how answers are drawn: for all alike, or one for each prompt.

        Returns:
            Outputs in the order of the prompts.

        Raises:
            GulliverError: a prompt cannot be answered; none has been begun then.
        """
        several = listed(prompts)
        if sampling is None or isinstance(sampling, SamplingParameters):
            sampling = [sampling or SamplingParameters()] * len(several)
        if isinstance(sampling, str) or any(
            not isinstance(s, SamplingParameters) for s in sampling
        ):
            raise GulliverError(
                "sampling takes SamplingParameters, one for all prompts or one each"
            )
        if len(sampling) != len(several):
            raise GulliverError(f"{len(several)} prompts and {len(sampling)} sampling parameters")
        outputs: dict[int, Output] = {}
        try:
            for prompt, one in zip(several, sampling, strict=True):
                tokens = self.engine.tokens_of(prompt)
                completions = [Completion() for _ in range(one.n)]
                text = prompt if isinstance(prompt, str) else None
                outputs[self._add(tokens, one)] = Output(text, tokens, 0, completions)
            for event in self._events(list(outputs), sum(one.n for one in sampling)):
                _note(outputs[event.request], event)
        finally:
            self._forget(list(outputs))
        return list(outputs.values())

    def stream(
        self, prompt: Prompt, sampling: SamplingParameters | None = None
    ) -> Generator[Event, None, None]:
        """Answers one prompt, token by token; an iterator that is left ends the request.

        Args:
            prompt: text or tokens.
            sampling: how the answer is drawn.

        Yields:
            Events of the answer; their texts joined are its text.

        Raises:
            GulliverError: the prompt cannot be answered, or the answer ended in an error.
        """
        number = self._add(prompt, sampling)
        try:
            for event in self._events([number], 1 if sampling is None else sampling.n):
                if event.error is not None:
                    raise GulliverError(event.error)
                yield event
        finally:
            self._forget([number])

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        sampling: SamplingParameters | None = None,
    ) -> Output:
        """Answers a conversation, written by the tokenizer's chat template.

        Args:
            messages: dictionaries of ``role`` and ``content``.
            sampling: how the answer is drawn.

        Raises:
            GulliverError: there is no template, or it refuses the conversation.
        """
        return self.generate([chat_tokens(self.tokenizer, messages)], sampling)[0]

    def _add(self, prompt: Prompt, sampling: SamplingParameters | None) -> int:
        with self._lock:
            self._check_open()
            number = self.engine.add(prompt, sampling)
            self._inboxes[number] = deque()
        return number

    def _events(self, numbers: Sequence[int], answers: int) -> Generator[Event, None, None]:
        """Yields events of requests until all of their answers have ended."""
        # A batch has tokens of whoever asks, another thread or a stream that is being read: whoever
        # steps lays their events aside for them.
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
        """Ends requests that have not ended, of a stream that is left or after an error."""
        with self._lock:
            for number in numbers:
                self.engine.cancel(number)
                self._inboxes.pop(number, None)

    def close(self) -> None:
        """Gives the model back, and the memory of the cache."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.engine.runner.close()
            if self.engine.drafter is not None:
                self.engine.drafter.close()

    def _check_open(self) -> None:
        if self._closed:
            raise GulliverError("this LLM is closed: make another one, or close it later")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_kinds(options: object, drafter: object, speculation: object) -> None:
    """Refuses arguments of another kind than is taken, before anything is loaded."""
    if options is not None and not isinstance(options, EngineOptions):
        raise GulliverError(f"options={options!r}: give EngineOptions(...) of gulliver.serve")
    if isinstance(drafter, (str, Path)):
        raise GulliverError(f"drafter={str(drafter)!r} is a name: speculation= takes names")
    if drafter is not None and not hasattr(drafter, "draft"):
        raise GulliverError(
            f"drafter={drafter!r} drafts nothing: give what make_speculator of "
            "gulliver.serve.speculative makes, or speculation='ngram'"
        )
    if speculation is not None and not isinstance(speculation, (str, Path)):
        known = "drafter= takes drafters" if hasattr(speculation, "draft") else "or leave it out"
        raise GulliverError(
            f"speculation={speculation!r} is no name: give 'ngram', 'suffix' or the folder of a "
            f"draft; {known}"
        )


def _drafter(
    speculation: str | Path | None, drafter: Drafter | None, tokenizer: Any, options: EngineOptions
) -> Drafter | None:
    """The drafter that is named, made before the cache takes what memory is left."""
    if speculation is None:
        return drafter
    if drafter is not None:
        raise GulliverError("speculation makes a drafter: give one of the two")
    from gulliver.serve.speculative import make_speculator

    return make_speculator(speculation, None, tokenizer, options.sequences)


def _refuse_for_models(ways: Ways) -> None:
    """Refuses what a model that is loaded already cannot be given."""
    if ways.dtype is not None or ways.quantize is not None:
        raise GulliverError(
            "dtype and quantize are for folders: convert a model with model.to(...) or "
            "gulliver.replace_module(model)"
        )
    if ways.memory is not None or ways.tensor * ways.pipeline > 1:
        raise GulliverError(
            "memory, tensor and pipeline are for folders, whose weights are read in slices: save "
            "the model with save_pretrained and give the folder"
        )


def _note(output: Output, event: Event) -> None:
    """Adds an event to the answer that it is of."""
    completion = output.completions[event.sample]
    completion.text += event.text
    completion.tokens += event.tokens
    if event.finish is not None:
        completion.finish, completion.error = event.finish, event.error
        output.found = max(output.found, event.found)
