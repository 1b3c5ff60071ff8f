"""`SamplingParams`: how tokens of a request are sampled, and when generation ends."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.options import AT_LEAST_0, AT_LEAST_1, Range, check_options

MOST_LOGPROBS = 20
"""Maximum number of alternatives per token, as in the OpenAI API."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens of a request are sampled, and when generation ends.

    Logits are processed in the order of transformers: penalties, temperature, `top_k`, `top_p`,
    `min_p`. Random numbers depend only on `seed`, sample and token index, so neither batching nor
    preemption changes a sample.

    Attributes:
        max_tokens: maximum new tokens; None continues until the context or the cache is full.
        temperature: 0 is greedy, 1 samples from the model's own distribution.
        top_k: sample among this many likeliest tokens; 0 for all.
        top_p: sample among the fewest likeliest tokens with this total probability.
        min_p: sample among tokens with at least this fraction of the highest probability.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in the
            prompt or the completion.
        presence_penalty: subtracted from the logits of tokens in the completion.
        frequency_penalty: subtracted once for each occurrence in the completion.
        seed: random seed; None chooses one for each request.
        n: number of completions, which share the prompt's keys and values.
        stop: texts that end a completion; they are not part of it.
        stop_token_ids: tokens that end a completion; they are not part of its text.
        ignore_eos: whether generation continues after the model's end-of-text tokens.
        logprobs: None returns no log-probabilities, 0 those of the sampled tokens, k > 0 also those
            of the k likeliest, all before the processing above.
        speculate: whether drafts may be used, if the engine has a drafter; completions do not
            change.
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
        # No prefix, because the server reports fields by the names that clients know.
        check_options(self, "")
        if not all(self.stop):
            raise GulliverError("stop has an empty string: use at least one character")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether penalties apply, so that logits depend on earlier tokens."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


# Results of requests: `Event` for each step, `RequestOutput` at the end.


FinishReason = Literal["stop", "length", "cancelled", "error"]
"""Reason why a completion ended. `stop`: an end-of-text token, a stop token or a stop string;
`length`: max_tokens, context or cache are exhausted; `cancelled`: by `Engine.cancel`; `error`: see
`Event.error`."""


@dataclass(frozen=True, slots=True)
class Likely:
    """A token and its log-probability under the model."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a completion.

    Attributes:
        id: token id.
        logprob: log-probability under the model; None if `logprobs` is None.
        likely: the `logprobs` likeliest tokens, likeliest first.
        offset: number of characters of the completion before it, if `logprobs` is set.
    """

    id: int
    logprob: float | None = None
    likely: tuple[Likely, ...] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """An update of one completion: tokens of a step, or its end.

    Attributes:
        request: request number, as returned by `Engine.add`.
        sample: index of the completion among the request's `n`.
        tokens: new tokens; more than one if drafts were accepted.
        text: new text that is final: whole characters, and nothing that may be the beginning of a
            stop string. The texts of all events concatenated are the completion.
        finish: why the completion ended; None until then.
        error: message, with `finish="error"`.
        prefix_cached: prompt tokens found in the prefix cache; set at the end.
    """

    request: int
    sample: int
    tokens: tuple[Token, ...] = ()
    text: str = ""
    finish: FinishReason | None = None
    error: str | None = None
    prefix_cached: int = 0


@dataclass
class CompletionOutput:
    """A completion.

    Attributes:
        index: index of the completion among the request's `n`.
        text: text without the stop string; empty without a tokenizer.
        tokens: tokens, including the one that ended it, with their probabilities.
        finish_reason: why it ended.
        error: message, with `finish_reason="error"`.
    """

    index: int = 0
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the completion."""
        return [token.id for token in self.tokens]

    @property
    def finish(self) -> FinishReason | None:
        """Old name of `finish_reason`, until the next release."""
        return self.finish_reason

    ids = token_ids


@dataclass
class RequestOutput:
    """A prompt and its completions.

    Attributes:
        prompt: text of the prompt; None if it was given as tokens.
        prompt_token_ids: tokens of the prompt.
        num_cached_tokens: prompt tokens found in the prefix cache.
        outputs: completions of the prompt.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    # Old names, until the next release.
    completions = property(lambda self: self.outputs)
    prompt_ids = property(lambda self: self.prompt_token_ids)
    prefix_cached = property(lambda self: self.num_cached_tokens)


# Old names, until the next release.
SamplingParameters, Completion, Output = SamplingParams, CompletionOutput, RequestOutput


# Samples tokens from logits, and computes their log-probabilities.
#
# A sample is a function of the request's seed, the index of the completion and the position of the
# token, so it does not depend on other requests in the batch, on preemption or on drafts.


HEAD = 64
"""Number of likeliest tokens with individual noise; the remaining tokens share one value."""
COLDEST = 1e-30
"""Minimum temperature in float32."""


@dataclass(frozen=True, slots=True)
class DrawRow:
    """How to sample from a row of logits."""

    sampling: SamplingParams
    seed: int
    sample: int
    # Number of completion tokens before the sampled one.
    place: int
    # Prompt and completion so far, for penalties only, and the prompt's length.
    history: Sequence[int] = ()
    prompt: int = 0


def noise(
    key: int | np.uint64 | NDArray[np.uint64], tokens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Exponential noise of tokens [R, K]: splitmix64 (Steele and others, 2014) of key and token."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(key, np.uint64) + (tokens.astype(np.uint64) + _ONE) * _STEP
        for shift, factor in _MIX:
            mixed = (mixed ^ (mixed >> shift)) * factor
        mixed ^= mixed >> np.uint64(31)
    # In (0, 1): the logarithm of 0 is infinite, that of 1 is 0.
    return -np.log(((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)


_ONE, _STEP = np.uint64(1), np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


def draw_key(seed: int, sample: int, place: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{sample}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def draw(logits: Tensor, rows: Sequence[DrawRow]) -> list[Token | None]:
    """Samples a token for each row; None for logits that are not finite."""
    if not rows:
        return []
    highest, likeliest = logits.max(-1)
    sound = torch.isfinite(highest).tolist()
    ids: list[int] = likeliest.tolist()
    groups: dict[SamplingParams, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        if sound[index] and (not row.sampling.greedy or row.sampling.penalised):
            groups[row.sampling].append(index)
    for sampling, members in groups.items():
        drawn = _draw_alike(logits[members], sampling, [rows[m] for m in members])
        for member, token in zip(members, drawn, strict=True):
            ids[member] = token
    tokens: list[Token | None] = [Token(token) for token in ids]
    wanted = [i for i, r in enumerate(rows) if sound[i] and r.sampling.logprobs is not None]
    for index, token in zip(
        wanted, _logprobs(logits[wanted], [ids[i] for i in wanted]), strict=True
    ):
        count = rows[index].sampling.logprobs or 0
        tokens[index] = Token(token.id, token.logprob, token.likely[:count])
    return [token if good else None for token, good in zip(tokens, sound, strict=True)]


def _draw_alike(logits: Tensor, sampling: SamplingParams, rows: Sequence[DrawRow]) -> list[int]:
    """Samples tokens for rows [R, V] that have the same parameters."""
    changed = penalised(logits, sampling, rows)
    if sampling.greedy:
        return changed.argmax(-1).tolist()
    keys = np.array([draw_key(row.seed, row.sample, row.place) for row in rows], np.uint64)
    return _race(*_cut(changed, sampling), keys[:, None])


def _race(chances: Tensor, order: Tensor | None, keys: NDArray[np.uint64]) -> list[int]:
    """Draws one token per row by weights [R, K]; the `HEAD` likeliest have their own noise."""
    # [Note: noise per token] If exponential noise is divided by the weights, the minimum is at each
    # token with its probability (the Gumbel trick). The noise is a function of the token, so two
    # similar distributions mostly yield the same token: samples of a draft and of the model agree
    # with a probability of at least (1 - d) / (1 + d), where d is their total variation distance
    # (Daliri, Musco and Suresh, arXiv 2408.07978), and the model's own samples are those without
    # drafts. The minimum over all tokens outside the `HEAD` likeliest is one exponential number for
    # the sum of their weights; only if it wins, one of them is sampled, by cumulative sums.
    if chances.shape[-1] <= HEAD:
        head, at, rest = chances, None, None
    elif order is None:
        head, at = chances.topk(HEAD, -1)
        rest = chances.scatter(-1, at, 0)
    else:
        head, rest = chances[:, :HEAD], chances[:, HEAD:]
        at = torch.arange(HEAD, device=chances.device).expand_as(head)
    tokens = at if order is None else order[:, : head.shape[-1]]
    if tokens is None:
        tokens = torch.arange(head.shape[-1], device=head.device).expand_as(head)
    names = tokens.cpu().numpy()
    weights = head.double().cpu().numpy()
    if rest is not None:
        total = rest.sum(-1, keepdim=True, dtype=torch.float64)
        weights = np.concatenate([weights, total.cpu().numpy()], -1)
        names = np.concatenate([names, np.full((len(names), 1), -1)], -1)
    winners = (weights / noise(keys, names)).argmax(-1)
    drawn = np.take_along_axis(names, winners[:, None], -1)[:, 0]
    if rest is None:
        return drawn.tolist()
    for row in np.flatnonzero(drawn < 0).tolist():
        # For exponential noise e, exp(-e) is uniform in (0, 1).
        height = math.exp(-float(noise(keys[row], np.array([-2]))[0]))
        place = _below(rest[row], height)
        drawn[row] = place if order is None else int(order[row, HEAD + place])
    return drawn.tolist()


def _below(weights: Tensor, height: float) -> int:
    """Returns the index at which the cumulative sum of weights reaches a fraction of the total."""
    heights = weights.cumsum(-1, dtype=torch.float64)
    mark = (height * heights[-1]).clamp(max=heights[-1].nextafter(heights.new_zeros(())))
    return int(torch.searchsorted(heights, mark, right=True))


def _cut(logits: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Applies temperature, top_k, top_p and min_p."""
    # From the largest down: with a tiny temperature quotients become inf, and inf - inf is NaN.
    scaled = (logits - logits.amax(-1, keepdim=True)) / max(sampling.temperature, COLDEST)
    order = None
    if 0 < sampling.top_k < logits.shape[-1]:
        scaled, order = scaled.topk(sampling.top_k, -1)
    elif sampling.top_p < 1:
        scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
    chances = scaled.softmax(-1)
    if sampling.top_p < 1:
        # The likeliest always stays, because nothing is before it.
        before = chances.cumsum(-1) - chances
        before[:, 0] = 0
        chances = chances.masked_fill(before >= sampling.top_p, 0)
    if sampling.min_p > 0:
        least = chances.amax(-1, keepdim=True) * sampling.min_p
        chances = chances.masked_fill(chances < least, 0)
    return chances, order


def penalised(logits: Tensor, sampling: SamplingParams, rows: Sequence[DrawRow]) -> Tensor:
    """Applies penalties for earlier tokens; copies the logits if any apply."""
    if not sampling.penalised:
        return logits
    logits = logits.clone()
    for one, row in zip(logits, rows, strict=True):
        if sampling.repetition_penalty != 1:
            seen = _tokens({*row.history}, one)
            factor = sampling.repetition_penalty
            one[seen] = torch.where(one[seen] < 0, one[seen] * factor, one[seen] / factor)
        answer = row.history[row.prompt :]
        if answer and (sampling.presence_penalty or sampling.frequency_penalty):
            seen, counts = _tokens(answer, one).unique(return_counts=True)
            one[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    return logits


def _tokens(tokens: Any, like: Tensor) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=like.device)


def _logprobs(logits: Tensor, ids: Sequence[int]) -> list[Token]:
    """Returns the log-probabilities of tokens, and of the 20 likeliest ones of each row."""
    if not ids:
        return []
    known = logits.log_softmax(-1)
    own = known.gather(-1, torch.tensor(ids, device=logits.device)[:, None])[:, 0].tolist()
    best, places = known.topk(min(MOST_LOGPROBS, logits.shape[-1]), -1)
    return [
        Token(token, one, tuple(Likely(i, v) for i, v in zip(where, values, strict=True)))
        for token, one, values, where in zip(ids, own, best.tolist(), places.tolist(), strict=True)
    ]
