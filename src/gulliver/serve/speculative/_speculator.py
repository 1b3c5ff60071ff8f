"""`Speculator`: chooses how much is drafted and verified, so that drafts never make it slower.

Read `draft`: it asks the proposer as deep as pays, calibrates how sure it is, and takes those
guesses of all sequences together whose verification is worth its time (`_cost.best`).

[Note: the guard] Three things keep speculation from costing. Guesses are chosen by seconds that
were measured on this machine, at this load. What a guess is worth is what became of guesses like
it: all proposals are compared with the tokens that came, verified or not. And where drafting does
not pay it rests: it is tried again on `FEW` sequences, and only so often that this takes `TRIAL` of
the time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from gulliver.errors import GulliverError
from gulliver.serve._batch import Batch, Runner
from gulliver.serve._speculation import Draft, Drafter, Wanted
from gulliver.serve.speculative._cost import Calibration, Choice, Mean, StepCost, best
from gulliver.serve.speculative._measure import measure_steps
from gulliver.serve.speculative._proposal import Proposal, Proposer

log = logging.getLogger("gulliver")

TRIAL = 0.01
"""Share of the time that is spent on finding out whether drafting has begun to pay."""
LONGEST_REST = 1000
"""Most rounds between two trials."""
FEW = 4
"""Sequences that drafting is tried on while it does not pay."""
MARGIN = 0.02
"""Gain that must be predicted before anything is drafted: predictions are that uncertain."""


@dataclass(frozen=True)
class SpeculationOptions:
    """Limits of what is drafted.

    Attributes:
        depth: most tokens of a path.
        nodes: most guesses of a sequence; attention over pages is slower for more than 15.
        fixed: whether `depth` guesses are made and verified at all times, whatever they cost: for
            measurements.
        budget: most guesses of all sequences together; None leaves it to the costs.
    """

    depth: int = 8
    nodes: int = 15
    fixed: bool = False
    budget: int | None = None

    def __post_init__(self) -> None:
        for name in ("depth", "nodes"):
            if not 1 <= getattr(self, name) <= 64:
                raise GulliverError(f"{name}={getattr(self, name)!r}: give 1 to 64")
        if self.budget is not None and self.budget < 1:
            raise GulliverError(f"budget={self.budget!r}: give 1 or more, or None")


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
        self._resting = 0
        # By the power of two of the sequences: seconds of a proposal, for a model those of each of
        # its depths; and what the last rounds were worth.
        self._seconds: dict[int, Mean] = {}
        self._gains: dict[int, Mean] = {}
        # Chance that a path is right down to a depth, of what was proposed.
        self._reach = [Mean(0.7 ** (depth + 1), 5) for depth in range(self.options.depth)]

    def begin(self, runner: Runner) -> None:
        """Measures what forwards cost, where the runner can be measured before requests come."""
        if runner.facts.blocks and not self.cost.known:
            measure_steps(runner, self.cost)
        self.proposer.begin(runner)

    def draft(self, wanted: Sequence[Wanted], budget: int) -> Mapping[int, Draft]:
        """Drafts what pays."""
        begun = perf_counter()
        self._compare(wanted)
        self.told.rounds += 1
        trial = self._off(len(wanted))
        if trial and self._resting > 0:
            self._resting -= 1
            return {}
        some = wanted[:FEW] if trial else wanted
        depth = self._depth(len(wanted))
        proposals = self.proposer.propose(some, depth)
        spent = perf_counter() - begun
        self._spent(len(some), depth, spent - self.proposer.apart)
        kinds = {one.sequence: self._kind(one) for one in some}
        for one in some:
            proposal = proposals.get(one.sequence)
            if proposal is not None and one.sequence not in self._pending:
                kind = kinds[one.sequence]
                self._pending[one.sequence] = _Pending(len(one.tokens), proposal, kind)
        ranked = self._ranked(proposals, kinds, {one.sequence: one.most for one in some})
        taken = self._worth(ranked, len(some), len(wanted), budget)
        if self.why and not self.options.fixed:
            plain = self.cost.seconds(len(wanted))
            self._resting = min(int(spent / (TRIAL * plain)), LONGEST_REST) if plain else 0
        chosen: dict[int, list[int]] = {}
        for _, number, node in ranked[:taken]:
            chosen.setdefault(number, []).append(node)
        self.told.drafted += bool(chosen)
        return {number: _part(proposals[number], sorted(of)) for number, of in chosen.items()}

    def _off(self, sequences: int) -> bool:
        """Whether drafting has not paid lately, with about so many sequences."""
        gain = self._gains.get(_level(sequences))
        return not self.options.fixed and gain is not None and gain.value < 1 + MARGIN

    def _depth(self, sequences: int) -> int:
        """How deep to ask the proposer: where tokens per second are most, by what is expected."""
        plain = self.cost.seconds(sequences)
        if self.options.fixed or self.proposer.free or plain <= 0:
            return self.options.depth
        best_depth, most, reach = 1, 0.0, 0.0
        for depth in range(1, self.options.depth + 1):
            reach += self._reach[depth - 1].value
            seconds = self.cost.seconds(sequences * (1 + depth)) + self.drafting(sequences, depth)
            if (1 + reach) / seconds > most:
                best_depth, most = depth, (1 + reach) / seconds
        return best_depth

    def drafting(self, sequences: int, depth: int) -> float:
        """Seconds of making guesses, as they were lately with about so many sequences."""
        level = _level(sequences)
        known = [one for one in self._seconds if one <= level] or [*self._seconds][:1]
        if not known:
            return 0.0
        return self._seconds[max(known)].value * (1 if self.proposer.free else depth)

    def _spent(self, sequences: int, depth: int, seconds: float) -> None:
        """Learns what guesses took: by token where a model makes them."""
        mean = self._seconds.setdefault(_level(sequences), Mean())
        mean.add(seconds / (1 if self.proposer.free else depth))

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
        self, ranked: Sequence[tuple[float, int, int]], some: int, sequences: int, budget: int
    ) -> int:
        """Number of guesses that are worth verifying, the likeliest first.

        Args:
            ranked: guesses.
            some: sequences that were asked for guesses.
            sequences: sequences of the batch; those not asked would have guesses like the others.
            budget: most guesses.
        """
        if self.options.budget is not None:
            budget = min(budget, self.options.budget)
        chances = [-path for path, _, _ in ranked[:budget]]
        if self.options.fixed:
            self.choice = Choice(len(chances), sum(chances))
            return len(chances)
        times = sequences // some
        all_chances = [chance for chance in chances for _ in range(times)][:budget]
        depth = max((self._depth(sequences), 1)) if not self.proposer.free else 1
        spent = self.drafting(sequences, depth)
        self.choice = best(all_chances, sequences, self.cost, spent)
        gain = self.choice.gain
        # Where nothing is worth verifying, drafting was for nothing.
        plain = self.cost.seconds(sequences)
        came = gain if gain >= 1 + MARGIN else plain / (plain + spent) if plain else 1.0
        self._gains.setdefault(_level(sequences), Mean(memory=8)).add(came)
        self._say(self.choice, sequences)
        return self.choice.taken if times == 1 and gain >= 1 + MARGIN else 0

    def _say(self, choice: Choice, sequences: int) -> None:
        """Notes why nothing is drafted, and logs when that changes."""
        before = self.why
        if not self._off(sequences) and choice.gain >= 1 + MARGIN:
            self.why = ""
        elif choice.taken:
            self.why = (
                f"{choice.taken} guesses for {sequences} sequences, {choice.accepted:.2f} of them "
                f"right, would take a step {choice.step:.2f} times as long: {choice.gain:.2f} "
                "times the plain tokens per second"
            )
        else:
            self.why = "nothing is known to guess"
        if bool(before) != bool(self.why) and choice.taken:
            state = f"off: {self.why}" if self.why else "on"
            log.info("speculation (%s) is %s", self.proposer.name, state)

    def ran(self, batch: Batch, seconds: float) -> None:
        """Learns what a forward took; parts of prompts have other costs, and are not counted."""
        if batch.outputs == batch.tokens:
            self.cost.note(batch.tokens, seconds)

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


def _level(sequences: int) -> int:
    """Power of two of a number of sequences: those of one level cost about the same."""
    return int(math.log2(sequences))


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
