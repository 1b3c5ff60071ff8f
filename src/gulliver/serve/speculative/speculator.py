"""`Speculator`: drafts only when it makes serving faster.

Read `draft`. A guess is accepted about as often as similar ones were recently (`AcceptanceRate`).
For s sequences and the n likeliest guesses of all, with probabilities p, the speedup over no drafts
is (1 + sum(p) / s) t(s) / (t(s + n) + d), where t is the time of a forward and d that of drafting,
both measured; a draft model's prefill of a text is spread over the tokens that it may still get.
The best n is verified (`best`). If the recent mean is below 1.02, drafting is off for this number
of sequences, except for trials on a few of them that take less than a hundredth of the time. While
it is on, one forward after 4, 8, 16, ... 64 with drafts has none, so that t(s) is measured again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np

from gulliver.errors import UsageError, nearest
from gulliver.options import Options, Range
from gulliver.serve.batch import Batch, Draft, Drafter, Runner, Wanted
from gulliver.serve.speculative.glide import GlideDraft, is_draft, load_draft
from gulliver.serve.speculative.proposers import LookUp, Proposal, Proposer
from gulliver.serve.speculative.small_model import SmallModel, check_tokenizers

log = logging.getLogger("gulliver")
LEAST_GAIN = 1.02
"""Minimum predicted speedup for drafting, which covers the error of predictions."""
TRIAL = 0.01
"""Maximum fraction of the time spent on trials of whether drafting pays off again."""
FEW, SHARE = 4, 8
"""A trial runs on one of `SHARE` sequences, at most `FEW`, oldest first, so that a draft model's
prefill of their texts is short compared with the batch's steps."""
ROUNDS = 8
"""Number of rounds whose gains are averaged."""
LOOKED_AT = 16
"""While drafting is off, one of this many steps is used for learning."""
FIRST = 3
"""Number of forwards without drafts before the first with them."""
GAPS = 4, 64
"""First and last number of drafts after which a forward without drafts is measured again."""


@dataclass(frozen=True)
class SpeculationOptions(Options):
    """Limits of drafting.

    Attributes:
        depth: maximum tokens of a path.
        nodes: maximum draft tokens of a sequence; attention is slower above 15.
        fixed: whether to always draft and verify `depth` tokens, whatever the cost; for
            measurements.
    """

    depth: Annotated[int, Range(1, 64)] = 8
    nodes: Annotated[int, Range(1, 64)] = 15
    fixed: bool = False


@dataclass
class Mean:
    """Moving average that starts as a plain mean of the first values."""

    value: float = 0.0
    count: int = field(default=0, repr=False)
    memory: int = 20

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, self.memory)
        self.value += (value - self.value) / self.count

    def add_seconds(self, seconds: float) -> None:
        # What took three times as long was disturbed by something else: now, or before.
        if 3 * seconds < self.value:
            self.count = 0
        self.add(min(seconds, 3 * self.value) if self.count else seconds)


class StepCost:
    """Seconds of a forward by its number of tokens."""

    # Means at each size up to 32, then at sizes a quarter of a power of two apart, interpolated
    # linearly: kernels take tiles of rows, so one token more may cost half as much again. Seconds
    # never decrease with the number of tokens.

    def __init__(self) -> None:
        self._points: dict[int, tuple[Mean, Mean]] = {}
        self._scale = 1.0

    def note(self, tokens: int, seconds: float) -> None:
        # Without drafts, only small batches are measured. Longer contexts or another process slow
        # down all sizes, so each measurement updates a scale that they share.
        if self._points:
            self._scale *= min(max(seconds / float(self.seconds(tokens)), 0.1), 10.0) ** 0.1
        key = tokens if tokens <= 32 else 12 + round(4 * math.log2(tokens))
        size, mean = self._points.setdefault(key, (Mean(), Mean()))
        seconds /= self._scale
        mean.add_seconds(seconds)
        size.add(tokens)

    def measured(self, sequences: int) -> bool:
        """Whether forwards without drafts, or smaller ones, have been measured."""
        known = (size.count for size, _ in self._points.values() if size.value <= 1.1 * sequences)
        return sum(known) >= FIRST

    @property
    def largest(self) -> float:
        """Largest measured number of tokens."""
        return max((size.value for size, _ in self._points.values()), default=0.0)

    def seconds(self, tokens: Any) -> Any:
        """Seconds of a forward by number of tokens, a scalar or an array; 0 if unknown."""
        if not self._points:
            return 0.0 * np.asarray(tokens)
        points = sorted((size.value, mean.value) for size, mean in self._points.values())
        sizes, seconds = zip(*points, strict=True)
        seconds = np.maximum.accumulate(seconds)
        found = np.interp(tokens, sizes, seconds)
        # Larger ones follow the slope from the last much smaller size; without one, they cost
        # nothing more, so that they are tried.
        small = [place for place, size in enumerate(sizes) if size <= 0.75 * sizes[-1]]
        if small:
            slope = (seconds[-1] - seconds[small[-1]]) / (sizes[-1] - sizes[small[-1]])
            found = found + slope * np.maximum(0, np.asarray(tokens) - sizes[-1])
        return found * self._scale


class AcceptanceRate:
    """Acceptance rate of guesses by the proposer's confidence."""

    # Guesses are counted by kind, and by tenths of the proposer's confidence. Its own estimate,
    # corrected by how often it was right at any confidence, counts as four guesses.

    REMEMBERED = 400

    def __init__(self) -> None:
        self._counts: dict[tuple[object, int], tuple[float, float]] = {}

    def learn(self, kind: object, sure: float, right: bool) -> None:
        """Counts a guess whose parent was accepted."""
        # The entry of each kind at -1 has the sum of confidences instead of the number of guesses.
        for place, more in ((int(sure * 10), 1.0), (-1, sure)):
            seen, rights = self._counts.get((kind, place), (0.0, 0.0))
            if seen >= self.REMEMBERED:  # older ones count half, a quarter ...
                seen, rights = seen / 2, rights / 2
            self._counts[kind, place] = seen + more, rights + right

    def chance(self, kind: object, sure: float) -> float:
        """Probability that a guess is accepted if its parent is."""
        expected, right = self._counts.get((kind, -1), (0.0, 0.0))
        prior = min(1.0, sure * (right + 4) / (expected + 4))
        seen, rights = self._counts.get((kind, int(sure * 10)), (0.0, 0.0))
        return (rights + 4 * prior) / (seen + 4)


@dataclass(frozen=True)
class GuessChoice:
    """Guesses to verify, and their expected outcome."""

    # Number of guesses, the likeliest first.
    taken: int = 0
    # Expected number of them that are right.
    accepted: float = 0.0
    # Predicted tokens per second over those without drafts.
    gain: float = 1.0
    # Predicted seconds of the forward over those of one without drafts.
    step: float = 1.0


def best(chances: Sequence[float], sequences: int, cost: StepCost, drafting: float) -> GuessChoice:
    """Chooses how many guesses to verify for the most tokens per second."""
    # With s sequences and n guesses, whose chances of being accepted are p, tokens per second are
    # (s + p_1 + ... + p_n) / (t(s + n) + d); without drafts s / t(s).
    # Forwards of up to twice the largest measured size are tried; nothing is known of others.
    chances = chances[: max(0, int(2 * cost.largest) - sequences)]
    if not len(chances):
        return GuessChoice()
    accepted, plain = np.cumsum(chances), float(cost.seconds(sequences))
    gains = 1 + accepted / sequences
    steps = cost.seconds(sequences + 1 + np.arange(len(chances))) / plain
    gains /= steps + drafting / plain
    found = int(gains.argmax())
    return GuessChoice(found + 1, float(accepted[found]), float(gains[found]), float(steps[found]))


@dataclass
class _Pending:
    """A proposal whose correct tokens are not known yet."""

    # Tokens that the sequence had.
    length: int
    # What was proposed.
    proposal: Proposal
    # Kind of its guesses, for the calibration.
    kind: object


@dataclass
class SpeculationStats:
    """Counts since the start."""

    # Rounds in which drafting was possible.
    rounds: int = 0
    # Rounds in which drafts were verified.
    drafted: int = 0
    # Guesses that were verified.
    guesses: int = 0
    # Guesses that were right.
    accepted: int = 0
    # Guesses by depth whose parent was right; verified or not.
    seen: dict[int, int] = field(default_factory=dict)
    # Number of these guesses that were right, by depth.
    right: dict[int, int] = field(default_factory=dict)

    def acceptance(self) -> list[float]:
        """Returns the acceptance rate of tokens with accepted parents, by depth from 1."""
        return [self.right.get(depth, 0) / self.seen[depth] for depth in sorted(self.seen)]


class Speculator(Drafter):
    """A drafter that drafts only as much as pays off.

    Args:
        proposer: proposer of draft tokens.
        options: limits.

    Attributes:
        cost: seconds of forwards.
        stats: counts.
        choice: `GuessChoice` of the last round in which drafting was on or tried.
        why: why nothing is drafted; empty otherwise.
    """

    def __init__(self, proposer: Proposer, options: SpeculationOptions | None = None) -> None:
        self.proposer, self.options = proposer, options or SpeculationOptions()
        self.cost, self.stats, self.choice = StepCost(), SpeculationStats(), GuessChoice()
        self.acceptance = AcceptanceRate()
        self.why = ""
        self._pending: dict[int, _Pending] = {}
        self._rested = 0
        # By level, the power of two of the sequences: gains of the last rounds, and the earliest
        # time of a trial, in seconds of steps.
        self._gains: dict[int, Mean] = {}
        self._rest_until: dict[int, float] = {}
        # By level: drafts since a forward without them, and after how many there is one.
        self._drafts: dict[int, tuple[int, int]] = {}
        self._clock = 0.0
        # Seconds of drafting by number of sequences; those of one depth if a model drafts.
        self._guessing = StepCost()
        # Seconds of a round of drafting besides proposing.
        self._around = Mean()
        # Seconds in which the proposer reads a token of a new text, and how many such tokens each
        # sequence has for each token that it may still get: reading is spread over these.
        self._reading = Mean()
        self._to_read: dict[int, float] = {}
        # Probability that a proposed path is right down to a depth.
        self._reach = [Mean(0.7 ** (depth + 1), 5) for depth in range(self.options.depth)]

    def begin(self, runner: Runner) -> None:
        """Passes the target's runner to the proposer."""
        self.proposer.begin(runner)

    def pays(self, sequences: int) -> bool:
        """Whether drafting has recently paid off with about this many sequences."""
        gain = self._gains.get(_level(sequences))
        return self.options.fixed or (gain is not None and gain.value >= LEAST_GAIN)

    def rests(self, sequences: int) -> bool:
        """Whether drafting is off for this many sequences; then `draft` is not called."""
        if self._pending or not self._resting(sequences):
            return False
        self.stats.rounds += 1
        self._rested += 1
        return True

    def _resting(self, sequences: int) -> bool:
        until = self._rest_until.get(_level(sequences), 0.0)
        return not self.pays(sequences) and self._clock < until

    def _compares(self, sequences: int) -> bool:
        """Whether this forward runs without drafts although they pay, to measure it again."""
        if self.options.fixed or not self.pays(sequences):
            return False
        level = _level(sequences)
        drafts, gap = self._drafts.get(level, (0, GAPS[0]))
        due = drafts >= gap
        self._drafts[level] = (0, min(2 * gap, GAPS[1])) if due else (drafts + 1, gap)
        return due

    def draft(self, wanted: Sequence[Wanted], budget: int) -> Mapping[int, Draft]:
        """Drafts as much as pays off."""
        entered, sequences = perf_counter(), len(wanted)
        self._compare(wanted)
        compared = perf_counter() - entered
        self.stats.rounds += 1
        self._rested = 0
        measured = self.options.fixed or self.cost.measured(sequences)
        if not measured or self._resting(sequences) or self._compares(sequences):
            return {}
        trial = not self.pays(sequences)
        asked = wanted[: max(1, min(FEW, sequences // SHARE))] if trial else wanted
        for one in wanted:
            if one.sequence not in self._to_read:
                self._to_read[one.sequence] = self.proposer.unread(one) / max(1, one.most)
        depth = self._depth(sequences)
        unread, read_s = sum(map(self.proposer.unread, asked)), 0.0
        if not self.proposer.free and not self._guessing.measured(len(asked)):
            self.proposer.propose(asked, depth)  # not timed: first calls are slow
            read_s = self.proposer.apart
        begun = perf_counter()
        proposals = self.proposer.propose(asked, depth)
        if unread:
            self._reading.add_seconds((read_s + self.proposer.apart) / unread)
        spent = max(perf_counter() - begun - self.proposer.apart, 1e-9)
        self._guessing.note(len(asked), spent / (1 if self.proposer.free else depth))
        for one in asked:
            proposal = proposals.get(one.sequence)
            if proposal is not None and one.sequence not in self._pending:
                self._pending[one.sequence] = _Pending(len(one.tokens), proposal, _kind(one))
        ranked = self._ranked(proposals, asked)
        chances = [-path for path, _, _ in ranked]
        if trial:  # the other sequences would have guesses like those of the few
            chances = [one for one in chances for _ in range(sequences // len(asked))]
        taken = self._choose(chances[:budget], sequences, depth)
        # The first call is slow; proposers that run a model were called once before.
        first = self.proposer.free and not self._around.count
        if not self.pays(sequences) and not first:
            self._rest_until[_level(sequences)] = self._clock + (perf_counter() - entered) / TRIAL
        chosen: dict[int, list[int]] = {}
        for _, number, node in () if trial else ranked[:taken]:
            chosen.setdefault(number, []).append(node)
        self.stats.drafted += bool(chosen)
        drafts = {number: _part(proposals[number], sorted(of)) for number, of in chosen.items()}
        self._around.add_seconds(compared + perf_counter() - begun - spent - self.proposer.apart)
        return drafts

    def _choose(self, chances: Sequence[float], sequences: int, depth: int) -> int:
        """Returns how many guesses to verify; records whether drafting pays off."""
        if self.options.fixed:
            self.choice = GuessChoice(len(chances), sum(chances))
            return len(chances)
        drafting = self.drafting(sequences, depth)
        drafting += self._reading.value * sum(self._to_read.values())
        self.choice = choice = best(chances, sequences, self.cost, drafting)
        plain, came = float(self.cost.seconds(sequences)), choice.gain
        if came < LEAST_GAIN:  # nothing is verified: the guesses were for nothing
            came = plain / (plain + drafting)
        self._gains.setdefault(_level(sequences), Mean(memory=ROUNDS)).add(came)
        self._note_why(sequences)
        return choice.taken if choice.gain >= LEAST_GAIN else 0

    def _note_why(self, sequences: int) -> None:
        """Records why nothing is drafted, and logs changes."""
        before, choice = self.why, self.choice
        if self.pays(sequences):
            self.why = ""
        elif choice.taken:
            self.why = (
                f"{choice.taken} guesses for {sequences} sequences, {choice.accepted:.2f} of them "
                f"accepted, would take a step {choice.step:.2f} times as long: {choice.gain:.2f} "
                "times the plain tokens per second"
            )
        else:
            self.why = "there is nothing to propose"
        if bool(before) != bool(self.why):
            state = f"off: {self.why}" if self.why else "on"
            log.info("speculation (%s) is %s", self.proposer.name, state)

    def _depth(self, sequences: int) -> int:
        """Returns the depth with the most tokens per second, given recent acceptance."""
        if self.options.fixed or self.proposer.free:
            return self.options.depth
        rates, reach = [], 1.0
        # Not deeper than `best` will verify.
        most = max(1, int(2 * self.cost.largest) // sequences - 1)
        for depth, mean in enumerate(self._reach[:most], 1):
            reach += mean.value
            step = float(self.cost.seconds(sequences * (1 + depth)))
            rates.append(reach / (step + self.drafting(sequences, depth)))
        return 1 + rates.index(max(rates))

    def drafting(self, sequences: int, depth: int) -> float:
        """Recent average time of drafting for this many sequences, in seconds."""
        each = float(self._guessing.seconds(sequences))
        return self._around.value + (each if self.proposer.free else each * depth)

    def _ranked(
        self, proposals: Mapping[int, Proposal], asked: Sequence[Wanted]
    ) -> list[tuple[float, int, int]]:
        """Lists guesses as (minus acceptance probability, sequence, node), likeliest first."""
        # Parents come before their children: they have no smaller chance, and a smaller index.
        ranked: list[tuple[float, int, int]] = []
        for one in asked:
            proposal = proposals.get(one.sequence)
            if proposal is None:
                continue
            paths: list[float] = []
            for node, (parent, sure) in enumerate(
                zip(proposal.parents, proposal.sure, strict=True)
            ):
                before = paths[parent] if parent >= 0 else 1.0
                kind = _kind(one), _is_first(proposal, node)
                paths.append(before * self.acceptance.chance(kind, sure))
            own = sorted((-path, node) for node, path in enumerate(paths))
            most = min(one.most, self.options.nodes)
            ranked += [(path, one.sequence, node) for path, node in own[:most]]
        return sorted(ranked, key=lambda one: (one[0], one[2]))

    def ran(self, batch: Batch, seconds: float) -> None:
        """Records the duration of a forward; prompt chunks cost differently and are skipped."""
        # While drafting is off, a few steps are enough to track the machine: learning from one
        # takes 15 to 30 microseconds, and a step of a small model 2000.
        if batch.outputs == batch.tokens and self._rested % LOOKED_AT == 0:
            self.cost.note(batch.tokens, seconds)
        self._clock += seconds

    def verified(self, sequence: int, draft: Draft, path: Sequence[int], tokens: int) -> None:
        """Counts accepted tokens; acceptance rates are updated at the next draft."""
        self.stats.guesses += len(draft.tokens)
        self.stats.accepted += tokens - 1

    def _compare(self, wanted: Sequence[Wanted]) -> None:
        """Updates acceptance rates from new tokens, for verified and unverified guesses."""
        for one in wanted:
            pending = self._pending.get(one.sequence)
            if pending is not None and self._settled(pending, one.tokens):
                del self._pending[one.sequence]

    def _settled(self, pending: _Pending, tokens: Sequence[int]) -> bool:
        """Compares a proposal with the actual tokens; False if more tokens are needed first."""
        proposal, came = pending.proposal, tokens[pending.length :]
        depths = proposal.depths
        right: set[int] = {-1}
        for node, parent in enumerate(proposal.parents):
            here = depths[node] - 1
            if parent in right and here < len(came) and proposal.tokens[node] == came[here]:
                right.add(node)
        reached = max((depths[node] for node in right if node >= 0), default=0)
        if reached == len(came) and reached < max(depths):
            return False
        for node, parent in enumerate(proposal.parents):
            if parent not in right:
                continue
            depth, first = depths[node], _is_first(proposal, node)
            self.acceptance.learn((pending.kind, first), proposal.sure[node], node in right)
            if first:
                self.stats.seen[depth] = self.stats.seen.get(depth, 0) + 1
                self.stats.right[depth] = self.stats.right.get(depth, 0) + (node in right)
        for depth, mean in enumerate(self._reach[: max(depths)], 1):
            mean.add(float(depth <= reached))
        return True

    def dropped(self, sequence: int) -> None:
        self._pending.pop(sequence, None)
        self._to_read.pop(sequence, None)
        self.proposer.dropped(sequence)

    def close(self) -> None:
        """Frees the proposer's memory."""
        self._pending.clear()
        self._to_read.clear()
        self.proposer.close()

    def __str__(self) -> str:
        stats = self.stats
        if not stats.rounds:
            return f"speculation ({self.proposer.name}): nothing could be drafted yet"
        share = stats.drafted / stats.rounds
        rate = stats.accepted / stats.guesses if stats.guesses else 0.0
        line = (
            f"speculation ({self.proposer.name}): drafted in {share:.0%} of {stats.rounds} rounds, "
            f"{stats.guesses} guesses, {rate:.0%} right"
        )
        return f"{line}; now off: {self.why}" if self.why else line


def _level(sequences: int) -> int:
    """Load level of a number of sequences; times within a level are similar."""
    return int(math.log2(sequences))


def _kind(one: Wanted) -> object:
    """Key by which requests with similar sampling are counted together."""
    sampling = one.sampling
    return "greedy" if sampling.greedy else round(sampling.temperature * 4)


def _is_first(proposal: Proposal, node: int) -> bool:
    """Whether a node is on the first path, whose nodes come first."""
    return proposal.parents[node] == node - 1


def _part(proposal: Proposal, nodes: Sequence[int]) -> Draft:
    index = {-1: -1, **{node: place for place, node in enumerate(nodes)}}
    parents = [index[proposal.parents[node]] for node in nodes]
    tokens = [proposal.tokens[node] for node in nodes]
    is_chain = parents == list(range(-1, len(nodes) - 1))
    return Draft(tokens, None if is_chain else parents)


# Creates the drafter for ``LLM(folder, speculation=...)``.


LOOK_UPS = ("ngram", "suffix")


def make_speculator(
    kind: str | Path,
    options: SpeculationOptions | None = None,
    tokenizer: Any | None = None,
    sequences: int = 64,
) -> Speculator:
    """Creates a drafter.

    Args:
        kind: ``"ngram"`` looks up continuations in the same text, ``"suffix"`` in any text;
            otherwise the folder of a small transformers model, or of a draft model from ``gulliver
            speculate train``.
        options: limits.
        tokenizer: tokenizer of the target, to compare with a small model's.
        sequences: concurrent sequences.

    Raises:
        GulliverError: the folder has no draft model.
    """
    return Speculator(_proposer(kind, tokenizer, sequences), options)


def _proposer(kind: str | Path, tokenizer: Any | None, sequences: int) -> Proposer:
    if kind in LOOK_UPS:
        return LookUp(shared=kind == "suffix")
    folder = Path(kind)
    if not folder.is_dir():
        raise UsageError(
            f"speculation={str(kind)!r} is neither the folder of a draft nor a lookup method: "
            f"{nearest(str(kind), LOOK_UPS)}"
        )
    if is_draft(folder):
        from gulliver.precision.int8.replace import replace_module

        # A draft need not be exact, and most of its time goes into reading weights.
        return GlideDraft(replace_module(load_draft(folder), "int8", embeddings=True))
    from gulliver.serve.weights import load

    model, own = load(folder)
    check_tokenizers(own, tokenizer)
    return SmallModel(model, sequences=sequences)
