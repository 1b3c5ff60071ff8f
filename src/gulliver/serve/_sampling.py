"""`SamplingParameters`: how the tokens of a request are drawn, and when they end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gulliver.errors import GulliverError
from gulliver.options import AT_LEAST_0, AT_LEAST_1, Range, check_options

MOST_LOGPROBS = 20
"""Most alternatives of a token that are returned, as in OpenAI's interface."""


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
        logprobs: None returns no probabilities, 0 those of the tokens taken, k > 0 also those of
            the k likeliest. They are of the model's own distribution, before any change.
        speculate: whether tokens may be drafted, where the engine has drafts; no answer depends on
            it.
    """

    max_tokens: Annotated[int | None, AT_LEAST_1] = None
    temperature: Annotated[float, Range(0, 100)] = 1.0
    top_k: Annotated[int, AT_LEAST_0] = 0
    top_p: Annotated[float, Range(0, 1, open_below=True)] = 1.0
    min_p: Annotated[float, Range(0, 1)] = 0.0
    repetition_penalty: Annotated[float, Range(0.01, 100)] = 1.0
    presence_penalty: Annotated[float, Range(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Range(-2, 2)] = 0.0
    seed: int | None = None
    n: Annotated[int, Range(1, 128)] = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int | None, Range(0, MOST_LOGPROBS)] = None
    speculate: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        # Without a prefix: the server says a field's name as its clients know it.
        check_options(self, "")
        if not all(self.stop):
            raise GulliverError("stop is empty: give texts of at least one character")

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
