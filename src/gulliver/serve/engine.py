"""`Engine`: requests in, events out, one batch per step.

Read `step`: it keeps as many batches in flight as the runner requests, waits for the oldest and
samples tokens from its logits. The engine has no thread; its owner calls `step`, and `add` and
`cancel` between steps. Steps are timed only for drafters.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.serve.batch import Batch, Drafter, Runner, RunnerLost, Span, walk
from gulliver.serve.options import EngineOptions
from gulliver.serve.requests import AnswerText, check_request, tokens_of
from gulliver.serve.sampling import DrawRow, Event, FinishReason, SamplingParams, Token, draw
from gulliver.serve.scheduler import AnswerState, BlockPool, Scheduler, Status

_log = logging.getLogger("gulliver")
MOST_LOSSES = 3
"""Consecutive runner failures, without a batch in between, after which the engine gives up."""


class Engine:
    """Continuous batching of requests over one runner."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any | None = None,
        options: EngineOptions | None = None,
        end_tokens: Sequence[int] = (),
        drafter: Drafter | None = None,
    ) -> None:
        self.runner, self.tokenizer = runner, tokenizer
        self.options = options or EngineOptions()
        self.end_tokens = frozenset(end_tokens)
        self.drafter = drafter
        self._answers: dict[int, list[AnswerState]] = {}
        self._numbers = self._requests = self._losses = 0
        self._events: list[Event] = []
        self._in_flight: deque[tuple[Batch, list[AnswerState], float]] = deque()
        self._last_done = 0.0
        self._totals: dict[str, int] = dict.fromkeys(_TOTALS, 0)
        self._begin()

    def _begin(self) -> None:
        facts, options = self.runner.facts, self.options
        if self.drafter is not None:
            self.drafter.begin(self.runner)
        self._pool = BlockPool(facts.blocks, facts.block_size)
        self._scheduler = Scheduler(
            self._pool,
            options.tokens,
            options.sequences,
            options.share_prefixes,
            self.drafter,
        )

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        scheduler = self._scheduler
        return bool(scheduler.waiting or scheduler.running or self._events or self._in_flight)

    def counts(self) -> dict[str, int]:
        """Current counts (waiting, running, blocks) and counts since the start (all others)."""
        scheduler, pool = self._scheduler, self._pool
        return {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "blocks": pool.blocks,
            "free_blocks": pool.free,
            "kept_blocks": pool.kept,
            "preemptions": scheduler.preemptions,
            **self._totals,
        }

    def add(self, prompt: str | Sequence[int], sampling: SamplingParams | None = None) -> int:
        """Adds a request.

        Args:
            prompt: text or tokens.
            sampling: sampling parameters.

        Returns:
            Request number, counted from 0.

        Raises:
            GulliverError: the prompt is empty, too long for the context or the cache, has tokens
                outside the vocabulary, or is text and there is no tokenizer.
        """
        sampling = sampling or SamplingParams()
        tokens = self.tokens_of(prompt)
        facts, wanted = self.runner.facts, sampling.max_tokens
        check_request(tokens, sampling, facts)
        if sampling.n > self.options.sequences:
            raise GulliverError(
                f"n={sampling.n} exceeds sequences={self.options.sequences}; use a smaller n"
            )
        if sampling.stop and self.tokenizer is None:
            raise GulliverError("stop strings need a tokenizer; without one, use stop_token_ids")
        longest = facts.longest if wanted is None else len(tokens) + wanted
        request, self._requests = self._requests, self._requests + 1
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= self.end_tokens
        text = AnswerText(self.tokenizer, sampling.stop, tokens)
        first = AnswerState(
            *(self._numbers, request, 0, len(tokens), tokens, sampling, seed, ends, longest, text),
            forks=sampling.n - 1,
        )
        self._numbers += 1
        self._answers[request] = [first]
        self._scheduler.add(first)
        return request

    def tokens_of(self, prompt: str | Sequence[int]) -> list[int]:
        """Encodes a prompt with the tokenizer; tokens are returned as they are.

        Raises:
            GulliverError: the prompt is invalid, or is text and there is no tokenizer.
        """
        return tokens_of(prompt, self.tokenizer)

    def cancel(self, request: int) -> bool:
        """Cancels a request; False if there is none with that number."""
        answers = self._answers.get(request, [])
        for answer in answers:
            if answer.status is Status.ENDED:
                continue
            if answer.in_flight:
                answer.cancelled = True
            else:
                self._end(answer, "cancelled")
        return bool(answers)

    def knows(self, request: int) -> bool:
        return request in self._answers

    def step(self) -> list[Event]:
        """Runs one batch.

        Returns:
            New events; none if there was nothing to run.

        Raises:
            RunnerLost: the runner failed and cannot be restarted; requests are unchanged, see
                `replay`.
        """
        while len(self._in_flight) < self.runner.max_in_flight:
            batch = self._scheduler.next_batch(self.runner.max_in_flight)
            if batch is None:
                break
            known = {answer.number: answer for answer in self._scheduler.running}
            answers = [known[span.sequence] for span in batch.spans]
            self._in_flight.append((batch, answers, perf_counter()))
            self.runner.submit(batch)
        if self._in_flight:
            try:
                logits = self.runner.collect()
            except RunnerLost as lost:
                self._restart(lost)
            else:
                self._losses = 0
                batch, answers, begun = self._in_flight.popleft()
                self._settle(batch, answers, logits)
                before, self._last_done = self._last_done, perf_counter()
                if self.drafter is not None:
                    self.drafter.ran(batch, self._last_done - max(begun, before))
        events, self._events = self._events, []
        return events

    def _restart(self, lost: RunnerLost) -> None:
        again: Callable[[], Runner] | None = getattr(self.runner, "restarted", None)
        self._losses += 1
        if again is None or self._losses > MOST_LOSSES:
            raise lost
        self._totals["restarts"] += 1
        _log.warning("%s; restarting it; requests continue from their tokens", lost)
        self.replay(again())

    def replay(self, runner: Runner) -> None:
        """Continues on another runner with an empty cache, recomputing running requests.

        Args:
            runner: runner of the same model, with room for the longest request.
        """
        facts = runner.facts
        running = [*self._scheduler.running, *self._scheduler.waiting]
        if any(answer.longest > facts.longest for answer in running):
            raise GulliverError(
                f"a request may have up to {max(answer.longest for answer in running)} tokens, and "
                f"this runner takes {facts.longest} at most"
            )
        self.runner = runner
        self._in_flight.clear()
        preemptions = self._scheduler.preemptions
        self._begin()
        self._scheduler.preemptions = preemptions
        for answer in running:
            answer.status, answer.in_flight, answer.draft = Status.WAITING, False, None
            answer.blocks, answer.cached, answer.published, answer.moves = [], 0, 0, []
            self._scheduler.add(answer)
            if answer.cancelled:
                self._end(answer, "cancelled")

    def _settle(self, batch: Batch, answers: list[AnswerState], logits: Tensor) -> None:
        """Samples tokens of a batch's completions from its logits."""
        self._totals["steps"] += 1
        rows = [r for pair in zip(batch.spans, answers, strict=True) for r in _rows(*pair)]
        drawn = draw(logits, rows)
        place = 0
        for span, answer in zip(batch.spans, answers, strict=True):
            answer.in_flight = False
            mine = drawn[place : place + span.outputs]
            place += span.outputs
            if answer.cancelled:
                self._end(answer, "cancelled")
            elif mine:
                for fork in self._forks(answer):
                    self._advance(fork, span, [_first_of_fork(logits[place - 1], fork)])
                self._advance(answer, span, mine)

    def _forks(self, answer: AnswerState) -> list[AnswerState]:
        """Creates a request's other completions after its prompt has been computed."""
        made = []
        for sample in range(1, answer.forks + 1):
            fork = AnswerState(
                *(self._numbers, answer.request, sample, answer.prompt, list(answer.tokens)),
                *(answer.sampling, answer.seed, answer.ends, answer.longest),
                answer.text.forked(),
            )
            self._numbers += 1
            self._scheduler.fork(answer, fork)
            self._answers[answer.request].append(fork)
            made.append(fork)
        if made:
            answer.forks = 0
        return made

    def _advance(self, answer: AnswerState, span: Span, drawn: list[Token | None]) -> None:
        """Adds the accepted tokens of a step, up to one that ends the completion."""
        draft, answer.draft = answer.draft, None
        if None in drawn:
            self._end(answer, "error", error=_NOT_FINITE)
            return
        rows = [token for token in drawn if token is not None]
        _, path = walk(draft, lambda row, _: rows[row].id)
        accepted_tokens, text, finish = [], "", None
        for token in (rows[0], *(rows[node + 1] for node in path)):
            answer.tokens.append(token.id)
            known = token.logprob is not None
            accepted_tokens.append(replace(token, offset=answer.text.count) if known else token)
            more, finish = self._text_of(answer, token.id)
            text += more
            if finish is not None:
                break
        if draft is not None:
            self._keep(answer, span, path)
            self._totals["drafted_tokens"] += len(draft.tokens)
            self._totals["accepted_tokens"] += len(accepted_tokens) - 1
            assert self.drafter is not None
            self.drafter.verified(answer.number, draft, path, len(accepted_tokens))
        self._totals["tokens"] += len(accepted_tokens)
        if finish is not None:
            self._end(answer, finish, tuple(accepted_tokens), text)
        else:
            self._events.append(Event(answer.request, answer.sample, tuple(accepted_tokens), text))

    def _keep(self, answer: AnswerState, span: Span, path: Sequence[int]) -> None:
        """Keeps keys and values of accepted drafts; rejected ones are past the cached length."""
        size = self._pool.size

        def slot(place: int) -> int:
            return answer.blocks[place // size] * size + place % size

        answer.cached += len(path)
        answer.moves = [
            (slot(span.start + 1 + node), slot(span.start + 1 + place))
            for place, node in enumerate(path)
            if node != place
        ]

    def _text_of(self, answer: AnswerState, token: int) -> tuple[str, FinishReason | None]:
        """Returns the text that a token adds, and the finish reason if it ends the completion."""
        if token in answer.ends:
            return answer.text.end(), "stop"
        text, stopped = answer.text.add(token)
        if stopped:
            return text, "stop"
        if len(answer.tokens) >= answer.longest:
            return text + answer.text.end(), "length"
        return text, None

    def _end(
        self,
        answer: AnswerState,
        finish: FinishReason,
        tokens: tuple[Token, ...] = (),
        text: str = "",
        error: str | None = None,
    ) -> None:
        self._scheduler.end(answer)
        if answer.sample == 0:
            self._totals["prompt_tokens"] += answer.prompt
            self._totals["prefix_cached_tokens"] += answer.prefix_cached
        self._totals["finished"] += 1
        ended = Event(
            answer.request, answer.sample, tokens, text, finish, error, answer.prefix_cached
        )
        self._events.append(ended)
        # Completions that have not started end with the one that they would have forked from.
        for sample in range(1, answer.forks + 1):
            self._events.append(Event(answer.request, sample, (), "", finish, error))
        if all(other.status is Status.ENDED for other in self._answers[answer.request]):
            del self._answers[answer.request]


_TOTALS = (
    *("steps", "tokens", "prompt_tokens", "prefix_cached_tokens"),
    *("drafted_tokens", "accepted_tokens", "finished", "restarts"),
)
"""Totals since the start; prompts are counted when their requests end."""

_NOT_FINITE = (
    "the model's logits are not finite: its weights are broken, or exceed this dtype's range (try "
    "float32)"
)


def _rows(span: Span, answer: AnswerState) -> list[DrawRow]:
    """Describes how to sample from each row of a span's logits: last token, and draft tokens."""
    made: list[DrawRow] = []
    for row in range(span.outputs):
        if row == 0:
            history = tuple(answer.tokens) if answer.sampling.penalised else ()
            place = len(answer.tokens) - answer.prompt
        else:
            before = made[span.parents[row] if span.parents is not None else row - 1]
            history = (*before.history, span.tokens[row]) if answer.sampling.penalised else ()
            place = before.place + 1
        about = answer.sampling, answer.seed, answer.sample, place
        made.append(DrawRow(*about, history, answer.prompt))
    return made


def _first_of_fork(logits: Tensor, fork: AnswerState) -> Token | None:
    about = fork.sampling, fork.seed, fork.sample, 0
    return draw(logits[None], [DrawRow(*about, tuple(fork.tokens), fork.prompt)])[0]
