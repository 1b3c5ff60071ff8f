"""`Speculator`: chooses how much is drafted and verified, so that drafts never make it slower.

Read `draft`: it asks the proposer as deep as pays, calibrates how sure it is, and takes those
guesses of all sequences together whose verification is worth its time (`_cost.best`). Whether it is
asked at all is for `_guard.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Annotated

from gulliver.options import AT_LEAST_1, Options, Range
from gulliver.serve._batch import Batch, Runner
from gulliver.serve._speculation import Draft, Drafter, Wanted
from gulliver.serve.speculative._cost import Calibration, Choice, Mean, StepCost, best
from gulliver.serve.speculative._guard import MARGIN, Guard, few, highest_gain
from gulliver.serve.speculative._measure import measure_proposals, measure_steps
from gulliver.serve.speculative._proposal import Proposal, Proposer

log = logging.getLogger("gulliver")
LOOKED_AT = 16
"""Steps of which one is learnt from while nothing is drafted."""


@dataclass(frozen=True)
class SpeculationOptions(Options):
    """Limits of what is drafted.

    Attributes:
        depth: most tokens of a path.
        nodes: most guesses of a sequence; attention over pages is slower for more than 15.
        fixed: whether `depth` guesses are made and verified at all times, whatever they cost: for
            measurements.
        budget: most guesses of all sequences together; None leaves it to the costs.
    """

    depth: Annotated[int, Range(1, 64)] = 8
    nodes: Annotated[int, Range(1, 64)] = 15
    fixed: bool = False
    budget: Annotated[int | None, AT_LEAST_1] = None


@dataclass
class _Pending:
    """A proposal whose tokens have not come yet.

    Attributes:
        length: tokens that the sequence had.
        proposal: what was proposed.
        kind: kind of its guesses, for the calibration.
    """

    length: int
    proposal: Proposal
    kind: object


@dataclass
class Told:
    """Counts since the start.

    Attributes:
        rounds: rounds in which something could have been drafted.
        drafted: rounds in which something was verified.
        guesses: guesses that were verified.
        accepted: guesses that were right.
        seen: guesses by depth whose parent was right; verified or not.
        right: those of them that were right.
    """

    rounds: int = 0
    drafted: int = 0
    guesses: int = 0
    accepted: int = 0
    seen: dict[int, int] = field(default_factory=dict)
    right: dict[int, int] = field(default_factory=dict)

    def acceptance(self) -> list[float]:
        """Share of first guesses that were right, by depth from 1, where their parents were."""
        return [self.right.get(depth, 0) / self.seen[depth] for depth in sorted(self.seen)]


class Speculator(Drafter):
    """A drafter that drafts as much as pays.

    Attributes:
        proposer: what guesses.
        options: limits.
        cost: seconds of forwards.
        told: counts.
        choice: what was chosen in the last round that was considered.
        why: why nothing is drafted; empty while something is.
    """

    def __init__(self, proposer: Proposer, options: SpeculationOptions | None = None) -> None:
        """Makes a drafter that has seen nothing.

        Args:
            proposer: what guesses.
            options: limits.
        """
        self.proposer, self.options = proposer, options or SpeculationOptions()
        self.cost, self.told, self.choice = StepCost(), Told(), Choice()
        self.calibration = Calibration()
        self.why = ""
        self._pending: dict[int, _Pending] = {}
        self._rested = 0
        self._guard = Guard()
        # Seconds of guesses: of one sequence where they are looked up, otherwise of one depth, by
        # the number of sequences; and of a token of a text that is read.
        self._each, self._deeper, self._reading = Mean(), StepCost(), Mean(memory=50)
        # Chance that a path is right down to a depth, of what was proposed.
        self._reach = [Mean(0.7 ** (depth + 1), 5) for depth in range(self.options.depth)]

    def begin(self, runner: Runner) -> None:
        """Measures what forwards and guesses cost, where it can be before requests come."""
        if runner.facts.blocks and not self.cost.known:
            measure_steps(runner, self.cost)
        self.proposer.begin(runner)
        if not self.proposer.free and not self._deeper.known and self.cost.known:
            measure_proposals(self.proposer, runner.facts, self._deeper, self._reading)

    def rests(self, sequences: int) -> bool:
        """Whether nothing will be drafted for so many sequences: asked before they are gathered."""
        if self.options.fixed or self._pending or not self._guard.is_off(sequences):
            return False
        if self._guard.is_due(self.drafting(few(sequences), 1)):
            return False
        self.told.rounds += 1
        self._rested += 1
        return True

    def draft(self, wanted: Sequence[Wanted], budget: int) -> Mapping[int, Draft]:
        """Drafts what pays."""
        begun = perf_counter()
        self._compare(wanted)
        self.told.rounds += 1
        self._rested = 0
        some, trial = self._asked(wanted)
        if not some:
            return {}
        depth = self._depth(len(wanted))
        read = sum(self.proposer.unread(one) for one in some)
        proposals = self.proposer.propose(some, depth)
        spent = perf_counter() - begun
        self._spent(len(some), depth, spent, read)
        kinds = {one.sequence: self._kind(one) for one in some}
        for one in some:
            proposal = proposals.get(one.sequence)
            if proposal is not None and one.sequence not in self._pending:
                kind = kinds[one.sequence]
                self._pending[one.sequence] = _Pending(len(one.tokens), proposal, kind)
        ranked = self._ranked(proposals, kinds, {one.sequence: one.most for one in some})
        times = len(wanted) // len(some) if trial else 1
        taken = self._worth(ranked, times, len(wanted), budget)
        if trial:
            self._guard.pay(perf_counter() - begun)
        chosen: dict[int, list[int]] = {}
        for _, number, node in ranked[:taken]:
            chosen.setdefault(number, []).append(node)
        self.told.drafted += bool(chosen)
        return {number: _part(proposals[number], sorted(of)) for number, of in chosen.items()}

    def _asked(self, wanted: Sequence[Wanted]) -> tuple[Sequence[Wanted], bool]:
        """Sequences that guesses are asked for, and whether this is a trial."""
        sequences, guard = len(wanted), self._guard
        plain = self.cost.seconds(sequences)
        if self.options.fixed or plain <= 0:
            return wanted, False
        first = guard.gain(sequences) is None
        if first:
            _, promised = self._promised(sequences)
            if promised < 1 + MARGIN:
                guard.learn(sequences, promised)
                self._say(Choice(gain=promised), sequences)
        if not first and not guard.is_off(sequences):
            return self._worth_reading(wanted, plain), False
        most = highest_gain(
            *(self.cost.seconds, lambda depth: self.drafting(sequences, depth)),
            *(sequences, self.options.depth),
        )
        if most < 1 + MARGIN:
            self.why = (
                f"with {sequences} sequences guesses would give {most:.2f} times the plain tokens "
                "per second if all were right"
            )
            guard.pay(0.0)  # looked at again when a trial would be due
            return (), True
        # Texts that are read already cost nothing to try on.
        some = sorted(wanted, key=self.proposer.unread)[: few(sequences)]
        unread = sum(self.proposer.unread(one) for one in some)
        cost = self.drafting(len(some), self._depth(sequences)) + unread * self._reading.value
        if (first and not guard.is_off(sequences)) or guard.may_try(cost):
            return some, True
        return (), True

    def _worth_reading(self, wanted: Sequence[Wanted], plain: float) -> Sequence[Wanted]:
        """Leaves out texts that would take longer to read than guesses for their rest can save."""
        gain = self._guard.gain(len(wanted)) or 1.0
        saved = plain / len(wanted) * (1 - 1 / max(gain, 1.0))
        each = self._reading.value
        some = [one for one in wanted if self.proposer.unread(one) * each <= saved * one.most]
        if not some:
            self.why = "reading the texts would take longer than guesses for their rest can save"
        return some

    def _depth(self, sequences: int) -> int:
        """How deep to ask the proposer."""
        if self.options.fixed or self.proposer.free or self.cost.seconds(sequences) <= 0:
            return self.options.depth
        return self._promised(sequences)[0]

    def _promised(self, sequences: int) -> tuple[int, float]:
        """Depth with most tokens per second by what is expected of guesses, and its gain."""
        plain = self.cost.seconds(sequences)
        best_depth, most, reach = 1, 0.0, 0.0
        for depth in range(1, self.options.depth + 1):
            reach += self._reach[depth - 1].value
            seconds = self.cost.seconds(sequences * (1 + depth)) + self.drafting(sequences, depth)
            if (1 + reach) / seconds > most:
                best_depth, most = depth, (1 + reach) / seconds
        return best_depth, most * plain

    def drafting(self, sequences: int, depth: int) -> float:
        """Seconds of making guesses for so many sequences, as they were lately."""
        if self.proposer.free:
            return self._each.value * sequences
        return self._deeper.seconds(sequences) * depth

    def _spent(self, sequences: int, depth: int, seconds: float, read: int) -> None:
        """Learns what guesses took, and what reading did."""
        apart = self.proposer.apart
        if read and apart:
            self._reading.add(apart / read)
        if self.proposer.free:
            self._each.add((seconds - apart) / sequences)
        else:
            self._deeper.note(sequences, (seconds - apart) / depth)

    def _kind(self, one: Wanted) -> object:
        """Guesses of requests that are drawn alike are calibrated together."""
        sampling = one.sampling
        return "greedy" if sampling.greedy else round(sampling.temperature * 4)

    def _ranked(
        self,
        proposals: Mapping[int, Proposal],
        kinds: Mapping[int, object],
        rooms: Mapping[int, int],
    ) -> list[tuple[float, int, int]]:
        """Guesses as (minus the chance of being accepted, sequence, node), the likeliest first.

        A node's parent stands before it: its chance is not less, and its index is.
        """
        ranked: list[tuple[float, int, int]] = []
        for number, proposal in proposals.items():
            depths, paths = proposal.depths, []
            for node, (parent, sure) in enumerate(
                zip(proposal.parents, proposal.sure, strict=True)
            ):
                before = paths[parent] if parent >= 0 else 1.0
                kind = kinds[number], _is_first(proposal, node)
                paths.append(before * self.calibration.chance(kind, depths[node], sure))
            own = sorted((-path, node) for node, path in enumerate(paths))
            room = min(rooms[number], self.options.nodes)
            ranked += [(path, number, node) for path, node in own[:room]]
        return sorted(ranked, key=lambda one: (one[0], one[2]))

    def _worth(
        self, ranked: Sequence[tuple[float, int, int]], times: int, sequences: int, budget: int
    ) -> int:
        """Number of guesses that are worth verifying, the likeliest first.

        Args:
            ranked: guesses.
            times: how many times as many sequences there are as were asked for guesses: the others
                would have guesses like theirs.
            sequences: sequences of the batch.
            budget: most guesses.
        """
        if self.options.budget is not None:
            budget = min(budget, self.options.budget)
        chances = [-path for path, _, _ in ranked[:budget]]
        if self.options.fixed:
            self.choice = Choice(len(chances), sum(chances))
            return len(chances)
        all_chances = [chance for chance in chances for _ in range(times)][:budget]
        spent = self.drafting(sequences, self._depth(sequences))
        self.choice = best(all_chances, sequences, self.cost, spent)
        gain = self.choice.gain
        # Where nothing is worth verifying, drafting was for nothing.
        plain = self.cost.seconds(sequences)
        came = gain if gain >= 1 + MARGIN else plain / (plain + spent) if plain else 1.0
        self._guard.learn(sequences, came)
        self._say(self.choice, sequences)
        return self.choice.taken if times == 1 and gain >= 1 + MARGIN else 0

    def _say(self, choice: Choice, sequences: int) -> None:
        """Notes why nothing is drafted, and logs when that changes."""
        before = self.why
        if not self._guard.is_off(sequences) and choice.gain >= 1 + MARGIN:
            self.why = ""
        elif choice.taken:
            self.why = (
                f"{choice.taken} guesses for {sequences} sequences, {choice.accepted:.2f} of them "
                f"right, would take a step {choice.step:.2f} times as long: {choice.gain:.2f} "
                "times the plain tokens per second"
            )
        elif choice.gain < 1:
            self.why = (
                f"with {sequences} sequences guesses as good as the last ones would give "
                f"{choice.gain:.2f} times the plain tokens per second"
            )
        else:
            self.why = "nothing is known to guess"
        if bool(before) != bool(self.why) and choice.taken:
            state = f"off: {self.why}" if self.why else "on"
            log.info("speculation (%s) is %s", self.proposer.name, state)

    def ran(self, batch: Batch, seconds: float) -> None:
        """Learns what a forward took; parts of prompts have other costs, and are not counted."""
        # While it rests a few are enough to follow the machine: learning from one takes 15 to 30
        # microseconds, where a step of a small model takes 2000.
        if batch.outputs == batch.tokens and self._rested % LOOKED_AT == 0:
            self.cost.note(batch.tokens, seconds)
        self._guard.earn(seconds)

    def verified(self, sequence: int, draft: Draft, path: Sequence[int], tokens: int) -> None:
        """Counts; what is learnt of guesses is learnt when the next ones are made."""
        self.told.guesses += len(draft.tokens)
        self.told.accepted += tokens - 1

    def _compare(self, wanted: Sequence[Wanted]) -> None:
        """Learns from the tokens that came which guesses were right, verified or not."""
        for one in wanted:
            pending = self._pending.get(one.sequence)
            if pending is not None and self._settled(pending, one.tokens):
                del self._pending[one.sequence]

    def _settled(self, pending: _Pending, tokens: Sequence[int]) -> bool:
        """Compares a proposal, unless more tokens must come first."""
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
            self.calibration.learn((pending.kind, first), depth, proposal.sure[node], node in right)
            if first:
                self.told.seen[depth] = self.told.seen.get(depth, 0) + 1
                self.told.right[depth] = self.told.right.get(depth, 0) + (node in right)
        for depth, mean in enumerate(self._reach[: max(depths)], 1):
            mean.add(float(depth <= reached))
        return True

    def dropped(self, sequence: int) -> None:
        """Forgets a sequence."""
        self._pending.pop(sequence, None)
        self.proposer.dropped(sequence)

    def close(self) -> None:
        """Lets go of the proposer's memory."""
        self._pending.clear()
        self.proposer.close()

    def __str__(self) -> str:
        told = self.told
        if not told.rounds:
            return f"speculation ({self.proposer.name}): nothing could be drafted yet"
        share = told.drafted / told.rounds
        rate = told.accepted / told.guesses if told.guesses else 0.0
        line = (
            f"speculation ({self.proposer.name}): drafted in {share:.0%} of {told.rounds} rounds, "
            f"{told.guesses} guesses, {rate:.0%} right"
        )
        return f"{line}; now off: {self.why}" if self.why else line


def _is_first(proposal: Proposal, node: int) -> bool:
    """Whether a node is on the first path, which stands at the front."""
    return proposal.parents[node] == node - 1


def _part(proposal: Proposal, nodes: Sequence[int]) -> Draft:
    """The nodes of a proposal that are verified, as a draft."""
    index = {-1: -1, **{node: place for place, node in enumerate(nodes)}}
    parents = [index[proposal.parents[node]] for node in nodes]
    tokens = [proposal.tokens[node] for node in nodes]
    is_chain = parents == list(range(-1, len(nodes) - 1))
    return Draft(tokens, None if is_chain else parents)
