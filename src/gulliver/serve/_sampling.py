"""`SamplingParameters`: how the tokens of a request are drawn, and when they end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gulliver.errors import GulliverError

MOST_LOGPROBS = 20
"""Most alternatives of a token that are told, as OpenAI's interface has it."""


@dataclass(frozen=True)
class SamplingParameters:
    """How the tokens of a request are drawn, and when they end.

    Logits are changed in this order, that of transformers: penalties, temperature, `top_k`,
    `top_p`, `min_p`. What is drawn is a function of `seed`, the sample's number and the token's
    place: neither the batch that a request runs in nor preemption changes it.

    Attributes:
        max_tokens: most tokens to make; None goes on until the context or the cache is full.
        temperature: 0 takes the likeliest token, 1 the model's own distribution.
        top_k: draw among this many likeliest tokens; 0 among all.
        top_p: draw among the fewest likeliest tokens that have this probability together.
        min_p: draw among tokens of at least this share of the likeliest one's probability.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that
            the prompt or the answer has.
        presence_penalty: subtracted from the logits of tokens that the answer has.
        frequency_penalty: subtracted once for each time that the answer has the token.
        seed: None draws one for each request.
        n: number of answers, which share the prompt's keys and values.
        stop: texts that end an answer and are not part of it.
        stop_token_ids: tokens that end an answer; its text does not have them.
        ignore_eos: whether the model's own end-of-text tokens are tokens as others.
        logprobs: None tells no probabilities, 0 those of the tokens taken, k > 0 those of the k
            likeliest beside. They are of the model's own distribution, before any change.
        speculate: whether tokens may be drafted, where the engine has drafts; no answer depends on
            it.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    speculate: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, value, right, said in self._ranges():
            if not right:
                raise GulliverError(f"{name}={value!r}: {said}")

    def _ranges(self) -> list[tuple[str, object, bool, str]]:
        """Each field's name, value, whether it is in range, and what the range is."""
        temperature, penalty = self.temperature, self.repetition_penalty
        return [
            ("max_tokens", self.max_tokens, _at_least(self.max_tokens, 1), "give 1 or more"),
            ("temperature", temperature, _between(temperature, 0, 100), "give 0 (greedy) to 100"),
            ("top_k", self.top_k, _at_least(self.top_k, 0), "give 0 (all tokens) or more"),
            ("top_p", self.top_p, _between(self.top_p, 0, 1) and self.top_p > 0, "give (0, 1]"),
            ("min_p", self.min_p, _between(self.min_p, 0, 1), "give 0 to 1"),
            ("repetition_penalty", penalty, _between(penalty, 0.01, 100), "give 0.01 to 100"),
            *(
                (name, value, _between(value, -2, 2), "give -2 to 2")
                for name, value in (
                    ("presence_penalty", self.presence_penalty),
                    ("frequency_penalty", self.frequency_penalty),
                )
            ),
            ("seed", self.seed, self.seed is None or _whole(self.seed), "give a whole number"),
            ("n", self.n, _at_least(self.n, 1) and self.n <= 128, "give 1 to 128"),
            ("stop", self.stop, all(isinstance(s, str) and s for s in self.stop), "give texts"),
            (
                "stop_token_ids",
                self.stop_token_ids,
                all(_whole(token) for token in self.stop_token_ids),
                "give numbers of tokens",
            ),
            (
                "logprobs",
                self.logprobs,
                _at_least(self.logprobs, 0) and (self.logprobs or 0) <= MOST_LOGPROBS,
                f"give 0 to {MOST_LOGPROBS}",
            ),
            ("speculate", self.speculate, isinstance(self.speculate, bool), "give True or False"),
        ]

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_least(value: int | None, least: int) -> bool:
    return value is None or (_whole(value) and value >= least)


def _between(value: float, low: float, high: float) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and low <= value <= high
