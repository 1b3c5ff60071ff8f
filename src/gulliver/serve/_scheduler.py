"""`Scheduler`: which tokens of which sequences are in the next batch.

Age decides: a sequence is older the earlier its request came. Read `next_batch`, which goes through
the running sequences from the oldest on and then admits waiting ones. A token of every sequence
that is being continued comes first; drafts and chunks of prompts fill what is left of the budget.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection

from gulliver.serve._batch import Batch, Pair, Span
from gulliver.serve._blocks import BlockPool, extend_digests
from gulliver.serve._sequence import AnswerState, Status
from gulliver.serve._speculation import Draft, Drafter, Wanted


def _age(sequence: AnswerState) -> tuple[int, int]:
    return sequence.request, sequence.sample


class Scheduler:
    """Sequences that wait and run, and the blocks that they hold."""

    def __init__(
        self,
        pool: BlockPool,
        step_tokens: int,
        most: int,
        share: bool = True,
        drafter: Drafter | None = None,
    ) -> None:
        self.pool, self.step_tokens, self.most, self.share = pool, step_tokens, most, share
        self.drafter = drafter
        self.waiting: list[AnswerState] = []
        self.running: list[AnswerState] = []
        self.preemptions = 0
        self._tickets = 0

    def add(self, sequence: AnswerState) -> None:
        """Takes a sequence in, behind the older ones."""
        insort(self.waiting, sequence, key=_age)

    def fork(self, sequence: AnswerState, other: AnswerState) -> None:
        """Starts `other` on the blocks of `sequence`, which has computed their prompt."""
        other.blocks, other.cached = list(sequence.blocks), sequence.cached
        other.digests, other.published = list(sequence.digests), sequence.published
        other.prefix_cached = sequence.prefix_cached
        self.pool.share(other.blocks)
        other.status = Status.RUNNING
        insort(self.running, other, key=_age)

    def end(self, sequence: AnswerState) -> None:
        """Takes a sequence out, its blocks free."""
        (self.running if sequence.status is Status.RUNNING else self.waiting).remove(sequence)
        sequence.status = Status.ENDED
        self._release(sequence)
        if self.drafter is not None:
            self.drafter.dropped(sequence.number)

    def next_batch(self, parts: int = 1) -> Batch | None:
        """Makes a batch; None where no sequence can be in one now."""
        spans: list[Span] = []
        copies: list[Pair] = []
        moves: list[Pair] = []
        ready = [s for s in self.running if not s.in_flight]
        limit = self._limit(parts)
        going = [s for s in ready if s.new == 1][:limit]
        single = len(going)
        # Guesses come on top of an equal part: of several batches none would have room for any.
        room = self.step_tokens - single
        drafts = self._drafts(going, room)
        budget = min(limit - single, room - sum(len(draft.tokens) for draft in drafts.values()))
        for sequence in ready:
            if sequence.status is not Status.RUNNING:
                continue  # gave up its blocks to an older one
            if sequence.new == 1 and single == 0:
                continue  # is in the next of several batches
            draft = self._affordable(sequence, drafts.get(sequence.number))
            count = 1 if sequence.new == 1 else min(sequence.new, budget)
            if count == 0 or not self._make_room(sequence, count, draft, copies):
                continue
            budget -= count if sequence.new > 1 else 0
            single -= sequence.new == 1
            spans.append(self._span(sequence, count, draft, moves))
        while self.waiting and budget > 0:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            count = min(sequence.new, budget)
            # It holds blocks for all of its tokens, and writes to none that is shared.
            budget -= count
            spans.append(self._span(sequence, count, None, moves))
        if not spans:
            return None
        self._tickets += 1
        return Batch(self._tickets - 1, spans, copies, moves)

    def _limit(self, parts: int) -> int:
        """Most tokens of a batch: of all that could be run now, an equal part."""
        # Tokens are dealt, not sequences: a chunk of a prompt weighs as much as many that go on.
        if parts == 1:
            return self.step_tokens
        going = sum(max(1, sequence.new) for sequence in self.running)
        wanted = going + sum(sequence.new for sequence in self.waiting[: self.most])
        return max(1, min(self.step_tokens, -(-wanted // parts)))

    def _drafts(self, ready: Collection[AnswerState], budget: int) -> dict[int, Draft]:
        """Asks the drafter, and takes nothing from it that there is no room for."""
        if self.drafter is None or budget <= 0 or not ready or self.drafter.rests(len(ready)):
            return {}
        wanted = {
            s.number: Wanted(
                *(s.number, s.tokens, s.cached - len(s.moves), s.blocks, most, s.sampling),
                *(s.seed, s.sample, s.prompt),
            )
            for s in ready
            # Forks take the prompt's blocks as they are, without drafts behind it.
            if s.new == 1
            and not s.forks
            and s.sampling.speculate
            and (most := s.longest - len(s.tokens) - 1) > 0
        }
        given = self.drafter.draft(list(wanted.values()), budget) if wanted else {}
        found = {}
        for number, draft in given.items():
            size = len(draft.tokens)
            if number in wanted and 0 < size <= min(budget, wanted[number].most):
                found[number], budget = draft, budget - size
        return found

    def _affordable(self, sequence: AnswerState, draft: Draft | None) -> Draft | None:
        """Drops a draft for which there are no free blocks: guesses take nothing from others."""
        if draft is None:
            return None
        size, end = self.pool.size, sequence.cached + 1 + len(draft.tokens)
        # The block that is written to first may have to be copied.
        needed = -(-end // size) - len(sequence.blocks) + 1
        return draft if needed <= self.pool.free else None

    def _make_room(
        self, sequence: AnswerState, count: int, draft: Draft | None, copies: list[Pair]
    ) -> bool:
        """Gets blocks for new tokens, those it writes to its own; others give up theirs if need be.

        Returns:
            Whether it has them; where not, nothing has changed but that others gave up theirs.
        """
        size, held = self.pool.size, sequence.blocks
        end = sequence.cached + count + (len(draft.tokens) if draft else 0)
        shared = [
            number
            for number in range(sequence.cached // size, min(len(held), -(-end // size)))
            if self.pool.holders(held[number]) > 1
        ]
        lacking = max(0, -(-end // size) - len(held))
        taken = self.pool.take(len(shared) + lacking)
        while taken is None:
            if not self._preempt_younger(sequence):
                return False
            shared = [number for number in shared if self.pool.holders(held[number]) > 1]
            taken = self.pool.take(len(shared) + lacking)
        for number in shared:
            own = taken.pop()
            copies.append((held[number], own))
            self.pool.release([held[number]])
            held[number] = own
        held += taken
        return True

    def _preempt_younger(self, sequence: AnswerState) -> bool:
        """Takes the blocks of the youngest sequence that is younger; False if there is none."""
        # The victim is computed again from its tokens later, and finds its old blocks as far as no
        # other sequence has taken them.
        for victim in reversed(self.running):
            if _age(victim) <= _age(sequence):
                return False
            if not victim.in_flight:
                self.running.remove(victim)
                victim.status = Status.WAITING
                self._release(victim)
                insort(self.waiting, victim, key=_age)
                self.preemptions += 1
                return True
        return False

    def _release(self, sequence: AnswerState) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.cached, sequence.published = [], 0, 0
        sequence.moves, sequence.draft = [], None

    def _admit(self, sequence: AnswerState) -> bool:
        """Gives the oldest that waits blocks for all its tokens, found or free; False if too few.

        The sequences that fork from it count as well.
        """
        # A sequence is admitted when blocks for all tokens that it has are free, and one for each
        # running sequence. Any sequence that is admitted fits the cache alone, and the oldest never
        # gives up its blocks, so none can starve.
        if len(self.running) + 1 + self._forks() + sequence.forks > self.most:
            return False
        size = self.pool.size
        found: list[int] = []
        if self.share:
            extend_digests(sequence.digests, sequence.tokens, size)
            # The last token is computed in any case: it has the logits.
            found = self.pool.find(sequence.digests[: (len(sequence.tokens) - 1) // size])
        self.pool.share(found)
        lacking = -(-len(sequence.tokens) // size) - len(found)
        # With nothing running all blocks are free: forks that find none then wait for each other.
        spare = len(self.running) + sequence.forks if self.running else 0
        taken = self.pool.take(lacking) if lacking + spare <= self.pool.free else None
        if taken is None:
            self.pool.release(found)
            return False
        sequence.blocks, sequence.cached = found + taken, len(found) * size
        sequence.published = len(found)
        sequence.prefix_cached = max(sequence.prefix_cached, min(sequence.cached, sequence.prompt))
        sequence.status = Status.RUNNING
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_age)
        return True

    def _forks(self) -> int:
        return sum(sequence.forks for sequence in self.running)

    def _span(
        self, sequence: AnswerState, count: int, draft: Draft | None, moves: list[Pair]
    ) -> Span:
        start, parents = sequence.cached, None
        tokens = sequence.tokens[start : start + count]
        outputs = 1 if start + count == len(sequence.tokens) else 0
        if draft is not None:
            tokens += draft.tokens
            outputs += len(draft.tokens)
            if draft.parents is not None:
                parents = [-1, *(parent + 1 for parent in draft.parents)]
        moves += sequence.moves
        sequence.moves, sequence.draft, sequence.in_flight = [], draft, True
        sequence.cached += count
        self._publish(sequence)
        return Span(sequence.number, start, tokens, list(sequence.blocks), outputs, parents)

    def _publish(self, sequence: AnswerState) -> None:
        """Publishes full blocks of tokens that are final."""
        # Published when the batch that computes a block is made, not when it is done: each layer
        # writes the keys and values of all tokens before it reads any, so a sequence may share what
        # another one of the same batch computes.
        if not self.share:
            return
        full = sequence.cached // self.pool.size
        extend_digests(sequence.digests, sequence.tokens, self.pool.size)
        for number in range(sequence.published, full):
            self.pool.publish(sequence.blocks[number], sequence.digests[number])
        sequence.published = max(sequence.published, full)
