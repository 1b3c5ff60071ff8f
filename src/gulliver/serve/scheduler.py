"""`AnswerState`, `BlockPool` and `Scheduler`: sequences, their blocks, and batches."""

from __future__ import annotations

import enum
import hashlib
from array import array
from bisect import insort
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from gulliver.serve.batch import Batch, Draft, Drafter, Pair, Span, Wanted
from gulliver.serve.requests import AnswerText
from gulliver.serve.sampling import SamplingParams


class Status(enum.Enum):
    """States of a sequence."""

    # WAITING -> RUNNING when it gets blocks; RUNNING -> WAITING when it is preempted; both ->
    # ENDED. A sequence in a batch whose logits have not arrived is RUNNING and `in_flight`.

    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclass(eq=False)
class AnswerState:
    """One completion of a request."""

    # Number of the sequence, in the order of age.
    number: int
    request: int
    # Index of the completion in the request.
    sample: int
    # Number of tokens of the prompt.
    prompt: int
    tokens: list[int]
    # Its sampling parameters.
    sampling: SamplingParams
    # Seed of its sampling.
    seed: int
    ends: Collection[int]
    # Maximum number of its tokens.
    longest: int
    text: AnswerText
    # Number of other completions that wait for its prompt to be computed.
    forks: int = 0
    status: Status = Status.WAITING
    # Number of leading tokens whose keys and values are in `blocks`.
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    # Digests of its full blocks; the first `published` of them are published.
    digests: list[bytes] = field(default_factory=list)
    published: int = 0
    # Slots to move in the next batch that it is part of.
    moves: list[tuple[int, int]] = field(default_factory=list)
    # Draft in the batch that it is part of.
    draft: Draft | None = None
    # Whether it is in a batch whose logits have not arrived.
    in_flight: bool = False
    # Whether it was cancelled while in flight.
    cancelled: bool = False
    # Tokens of the prompt that were found in the cache.
    prefix_cached: int = 0

    @property
    def new(self) -> int:
        """Number of tokens whose keys and values must be computed; 1 while decoding."""
        return len(self.tokens) - self.cached

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt :]


# `BlockPool`: which blocks of the cache are free, held and shared.
#
# A block is held by any number of sequences. A full one may be *published* under the digest of all
# tokens up to its end; it then outlives its holders, and a sequence that begins with the same
# tokens reuses it. Unpublished free blocks are allocated first, then the published one that was
# released first. A block is only a number here, without torch.


class BlockPool:
    """Blocks 0 to `blocks - 1`, with reference counts and published digests."""

    def __init__(self, blocks: int, size: int) -> None:
        self.blocks, self.size = blocks, size
        self._holders = [0] * blocks
        self._blank = list(range(blocks - 1, -1, -1))
        # Published without references, least recently released first.
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._digest: dict[int, bytes] = {}
        self._block: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        return len(self._blank) + len(self._kept)

    @property
    def kept(self) -> int:
        """Number of free blocks with reusable keys and values."""
        return len(self._kept)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def take(self, count: int) -> list[int] | None:
        """Allocates blocks; None, allocating nothing, if too few are free."""
        if count > self.free:
            return None
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            del self._block[self._digest.pop(block)]
        assert self._holders[block] == 0, f"block {block} is free and held"
        self._holders[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Increments the reference counts of blocks that are held, or free and published."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._kept[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Decrements reference counts; blocks without references become free."""
        # The last of a sequence are released first: beginnings, which others may have in common,
        # stay longer.
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is released and not held"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._digest:
                    self._kept[block] = None
                else:
                    self._blank.append(block)

    def publish(self, block: int, digest: bytes) -> None:
        """Publishes a full block for reuse; of equal blocks the first stays published."""
        if digest not in self._block and block not in self._digest:
            self._block[digest], self._digest[block] = block, digest

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Finds the published blocks of the longest prefix of `digests`, without holding them."""
        found: list[int] = []
        for digest in digests:
            block = self._block.get(digest)
            if block is None:
                break
            found.append(block)
        return found


def extend_digests(digests: list[bytes], tokens: Sequence[int], size: int) -> None:
    """Appends the digests of full blocks of `tokens` that `digests` lacks."""
    # A digest covers all tokens up to the block's end, since keys and values depend on them
    # all.
    for number in range(len(digests), len(tokens) // size):
        before = digests[-1] if digests else b""
        block = array("q", tokens[number * size : (number + 1) * size])
        digests.append(hashlib.blake2b(before + block.tobytes(), digest_size=16).digest())


# `Scheduler`: which tokens of which sequences are in the next batch.
#
# Older sequences, whose requests arrived earlier, have priority. Read `next_batch`, which visits
# the running sequences, oldest first, and then admits waiting ones. One token of each decoding
# sequence comes first; drafts and prompt chunks fill the rest of the budget.


def _age(sequence: AnswerState) -> tuple[int, int]:
    return sequence.request, sequence.sample


class Scheduler:
    """Waiting and running sequences, and the blocks that they hold."""

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
        insort(self.waiting, sequence, key=_age)

    def fork(self, sequence: AnswerState, other: AnswerState) -> None:
        """Starts `other` on the blocks of `sequence`, which has prefilled their common prompt."""
        other.blocks, other.cached = list(sequence.blocks), sequence.cached
        other.digests, other.published = list(sequence.digests), sequence.published
        other.prefix_cached = sequence.prefix_cached
        self.pool.share(other.blocks)
        other.status = Status.RUNNING
        insort(self.running, other, key=_age)

    def end(self, sequence: AnswerState) -> None:
        (self.running if sequence.status is Status.RUNNING else self.waiting).remove(sequence)
        sequence.status = Status.ENDED
        self._release(sequence)
        if self.drafter is not None:
            self.drafter.dropped(sequence.number)

    def next_batch(self, parts: int = 1) -> Batch | None:
        """Returns the next batch, or None if no sequence can be scheduled."""
        spans: list[Span] = []
        copies: list[Pair] = []
        moves: list[Pair] = []
        ready = [s for s in self.running if not s.in_flight]
        limit = self._limit(parts)
        going = [s for s in ready if s.new == 1][:limit]
        single = len(going)
        # Drafts are added to an equal share, which alone would have no room for them.
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
            # It holds blocks for all of its tokens, and does not write to shared ones.
            budget -= count
            spans.append(self._span(sequence, count, None, moves))
        if not spans:
            return None
        self._tickets += 1
        return Batch(self._tickets - 1, spans, copies, moves)

    def _limit(self, parts: int) -> int:
        """Returns a batch's maximum tokens: one of `parts` equal shares of the runnable tokens."""
        # Balances tokens, not sequences: a prompt chunk costs as much as many decoding sequences.
        if parts == 1:
            return self.step_tokens
        going = sum(max(1, sequence.new) for sequence in self.running)
        wanted = going + sum(sequence.new for sequence in self.waiting[: self.most])
        return max(1, min(self.step_tokens, -(-wanted // parts)))

    def _drafts(self, ready: Collection[AnswerState], budget: int) -> dict[int, Draft]:
        """Requests drafts for sequences, and drops those that exceed the budget."""
        if self.drafter is None or budget <= 0 or not ready or self.drafter.rests(len(ready)):
            return {}
        wanted = {
            s.number: Wanted(
                *(s.number, s.tokens, s.cached - len(s.moves), s.blocks, most, s.sampling),
                *(s.seed, s.sample, s.prompt),
            )
            for s in ready
            # Forks share the prompt's blocks, which must not contain drafts.
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
        """Drops a draft if too few blocks are free; drafts never preempt others."""
        if draft is None:
            return None
        size, end = self.pool.size, sequence.cached + 1 + len(draft.tokens)
        # The block that is written to first may have to be copied.
        needed = -(-end // size) - len(sequence.blocks) + 1
        return draft if needed <= self.pool.free else None

    def _make_room(
        self, sequence: AnswerState, count: int, draft: Draft | None, copies: list[Pair]
    ) -> bool:
        """Allocates blocks for new tokens and copies shared ones; False if too few can be freed."""
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
        """Preempts the youngest running sequence younger than this one; False if there is none."""
        # The victim is recomputed from its tokens later, and reuses its old blocks unless other
        # sequences have taken them.
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
        """Admits the oldest waiting sequence, if blocks for it and for its forks are available."""
        # A sequence is admitted when blocks for all tokens that it has are free, and one for each
        # running sequence. Any sequence that is admitted fits the cache alone, and the oldest never
        # gives up its blocks, so none can starve.
        if len(self.running) + 1 + self._forks() + sequence.forks > self.most:
            return False
        size = self.pool.size
        found: list[int] = []
        if self.share:
            extend_digests(sequence.digests, sequence.tokens, size)
            # The last token is always computed, because its logits are needed.
            found = self.pool.find(sequence.digests[: (len(sequence.tokens) - 1) // size])
        self.pool.share(found)
        lacking = -(-len(sequence.tokens) // size) - len(found)
        # If nothing runs, all blocks are free; forks that find none wait for each other.
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
        """Publishes a sequence's full blocks, which will not change."""
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
