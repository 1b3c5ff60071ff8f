"""Guesses of trained drafts: how many are right, by kind of draft and by shape of the tree."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._harness import Report, at_least
from benchmarks._speculation_models import DRAFTS, draft_folder
from gulliver.serve import Engine, EngineOptions, LocalRunner, SamplingParams
from gulliver.serve.speculative import Proposer, SpeculationOptions, Speculator
from gulliver.serve.speculative.glide import Glide, GlideDraft, load_draft
from gulliver.serve.speculative.proposers import Proposal, chain

DEPTH = 5
PROMPT, TOKENS = 48, 64
CAPE = (7, 7, 7, 5, 5, 5, 3, 3, 1, 1, 1)
"""Alternatives to a guess of the path, by tenths of how sure the draft is of it: those of the
official code of GliDe with a CaPE, whose numbers count the one on the path."""
Rounds = Sequence[Sequence[tuple[int, int]]]
"""Rounds of each text: guesses, and how many were right."""


class CapeDraft(GlideDraft):
    """A draft whose trees are those of CaPE."""

    def alternatives(self, sure: float) -> int:
        return CAPE[int(sure * 10)]


class Noted(Speculator):
    """A speculator that notes how many guesses each round verified and how many were right."""

    def __init__(self, proposer: Proposer, options: SpeculationOptions) -> None:
        super().__init__(proposer, options)
        self.rounds: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def verified(self, sequence: int, draft: Any, path: Sequence[int], tokens: int) -> None:
        """Notes a round."""
        super().verified(sequence, draft, path, tokens)
        self.rounds[sequence].append((len(draft.tokens), len(path)))


class Foretold(Proposer):
    """Free guesses of a chosen quality: the known answer with some tokens replaced."""

    name, free = "foretold", True

    def __init__(self, answers: dict[tuple[int, ...], list[int]], right: float) -> None:
        self._answers, self._right = answers, right
        generator = torch.Generator().manual_seed(0)
        self._draws = torch.rand(1 << 12, generator=generator).tolist()

    def propose(self, wanted: Any, depth: int) -> dict[int, Proposal]:
        found = {}
        for one in wanted:
            come = self._answers[tuple(one.tokens[:PROMPT])]
            at = len(one.tokens) - PROMPT
            tokens = [
                token if self._draws[(at * 31 + n * 7) % len(self._draws)] < self._right else 1
                for n, token in enumerate(come[at : at + min(depth, one.most)])
            ]
            if tokens:
                found[one.sequence] = chain(tokens, [self._right] * len(tokens))
        return found


class Guided(GlideDraft):
    """A draft with the costs of a `Glide` and guesses of a chosen quality, as `Foretold`'s."""

    def __init__(self, model: Glide, answers: dict[tuple[int, ...], list[int]], right: float):
        super().__init__(model, 0)
        self.name, self._answers, self._right = f"a GliDe draft, {right:.0%} right", answers, right
        self._random = random.Random(0)

    def _drawn(self, logits: Any, news: Any, paths: Any, number: int) -> list[int]:
        super()._drawn(logits, news, paths, number)
        tokens = []
        for one in (new.one for new in news):
            come = self._answers[tuple(one.tokens[:PROMPT])][len(one.tokens) - PROMPT + number]
            tokens.append(come if self._random.random() < self._right else 1)
            path = paths[one.sequence]
            path.tokens[-1], path.sure[-1] = tokens[-1], self._right
        return tokens


def held_out(folder: Path, tokenizer: Any, count: int) -> list[list[int]]:
    """Beginnings of texts that nobody learnt: several of a file, from different places."""
    import json

    rows = [json.loads(line)["text"] for line in (folder / "apart.jsonl").open()]
    ids = [tokenizer(row)["input_ids"] for row in rows]
    made = []
    for number in range(count):
        row = ids[number % len(ids)]
        begin = (number // len(ids) * 977 + 300) % max(1, len(row) - PROMPT)
        made.append(row[begin : begin + PROMPT])
    return made


def continued(
    model: Any,
    texts: Sequence[Sequence[int]],
    drafter: Any,
    count: int,
    tokens: int = TOKENS,
    temperature: float = 0.0,
) -> list[list[int]]:
    """Continues texts, `count` at a time."""
    runner = LocalRunner(model, cache_tokens=count * (PROMPT + tokens + 32) + 512)
    engine = Engine(runner, None, EngineOptions(4096, count, False), drafter=drafter)
    made: dict[int, list[int]] = {}
    for seed, text in enumerate(texts):
        asked = SamplingParams(tokens, temperature, seed=seed, ignore_eos=True)
        made[engine.add(text, asked)] = []
    while engine.busy:
        for event in engine.step():
            made[event.request] += [token.id for token in event.tokens]
    runner.close()
    return list(made.values())


def rounds_of(
    model: Any,
    draft: GlideDraft,
    texts: Sequence[Sequence[int]],
    options: SpeculationOptions,
    temperature: float = 0.0,
) -> list[list[tuple[int, int]]]:
    drafter = Noted(draft, options)
    continued(model, texts, drafter, len(texts), temperature=temperature)
    return [drafter.rounds[number] for number in range(len(texts))]


def by_depth(rounds: Rounds, depth: int) -> float:
    """Share of guesses at a depth that were right, where all before them were."""
    seen = [right for text in rounds for made, right in text if made >= depth <= right + 1]
    return sum(right >= depth for right in seen) / max(1, len(seen))


def accepted(rounds: Rounds) -> float:
    """Guesses of a round that were right."""
    return statistics.fmean(right for text in rounds for _, right in text)


def verified(rounds: Rounds) -> float:
    return statistics.fmean(made for text in rounds for made, _ in text)


def interval(
    figure: Callable[[Sequence[int]], float], texts: int, draws: int = 1000
) -> tuple[float, float]:
    """Middle 95 % of a figure over texts that are drawn again and again."""
    random = torch.Generator().manual_seed(0)
    found = sorted(
        figure(torch.randint(texts, (texts,), generator=random).tolist()) for _ in range(draws)
    )
    return found[int(0.025 * draws)], found[int(0.975 * draws)]


def difference(
    figure: Callable[[Rounds], float], mine: Rounds, theirs: Rounds
) -> tuple[float, float, float]:
    """A figure of one less that of the other, and its interval over texts."""

    def apart(some: Sequence[int]) -> float:
        return figure([mine[n] for n in some]) - figure([theirs[n] for n in some])

    return (apart(range(len(mine))), *interval(apart, len(mine)))


def pooled(found: Sequence[Sequence[list[tuple[int, int]]]]) -> list[list[tuple[int, int]]]:
    """Rounds of each text by drafts of all seeds."""
    return [[one for rounds in of for one in rounds] for of in zip(*found, strict=True)]


def acceptance(
    report: Report, model: Any, folder: Path, texts: list[list[int]], seeds: int
) -> None:
    """Compares drafts of equal size by depth, greedy and sampled."""
    for temperature, how in ((0.0, ""), (1.0, ", drawn at temperature 1")):
        found = _accepted_by(report, model, folder, texts, seeds, temperature, how)
        for other in ("plain", "glide without block mask"):
            shown = difference(accepted, found["glide"], found[other])
            row = (f"accepted: glide less {other}{how}", *(f"{one:+.2f}" for one in shown))
            report.rows.append((*row, "95 % over texts"))
            report.figures[f"glide less {other}{how}"] = list(shown)
            report.bars.append(at_least(f"glide less {other}{how}, low end", shown[1], 0.0))
        for depth in range(1, DEPTH + 1):
            shown = difference(
                lambda rounds, at=depth: by_depth(rounds, at),
                *(found["glide"], found["glide without block mask"]),
            )
            row = (f"right at depth {depth}: mask less none{how}", *(f"{x:+.1%}" for x in shown))
            report.rows.append((*row, "where all before were right"))
            report.figures[f"mask less none at depth {depth}{how}"] = list(shown)


def _accepted_by(
    report: Report,
    model: Any,
    folder: Path,
    texts: list[list[int]],
    seeds: int,
    temperature: float,
    how: str,
) -> dict[str, Rounds]:
    """Rounds of each kind of draft, of all seeds."""
    options = SpeculationOptions(depth=DEPTH, nodes=DEPTH, fixed=True)
    found: dict[str, Rounds] = {}
    for name in DRAFTS:
        drafts = [load_draft(draft_folder(folder, name, seed)) for seed in range(seeds)]
        size = sum(p.numel() for p in drafts[0].parameters())
        each = [
            rounds_of(model, GlideDraft(draft, beside=0), texts, options, temperature)
            for draft in drafts
        ]
        found[name] = mine = pooled(each)
        depths = [by_depth(mine, depth) for depth in range(1, DEPTH + 1)]
        low, high = interval(lambda some, of=mine: accepted([of[n] for n in some]), len(texts))
        report.rows.append(
            (
                f"accepted of {DEPTH}: {name}, {size:,} parameters{how}",
                *(f"{value:.2f}" for value in (accepted(mine), low, high)),
                "by depth " + " ".join(f"{depth:.0%}" for depth in depths),
            )
        )
        report.figures[f"{name}{how}"] = {
            "accepted": accepted(mine),
            "by depth": depths,
            "by seed": [accepted(rounds) for rounds in each],
        }
    return found


def expansion(report: Report, model: Any, folder: Path, texts: list[list[int]]) -> None:
    """Chains, CaPE and calibrated trees with as many verified guesses a round."""
    draft = load_draft(draft_folder(folder, "glide", 0))
    wide = SpeculationOptions(depth=4, nodes=64, fixed=True)
    found = {"CaPE, depth 4": rounds_of(model, CapeDraft(draft, max(CAPE)), texts, wide)}
    nodes = round(verified(found["CaPE, depth 4"]))
    for count in (8, nodes):
        chain = SpeculationOptions(count, count, True)
        found[f"chain of {count}"] = rounds_of(model, GlideDraft(draft, 0), texts, chain)
        tree = SpeculationOptions(8, count, True)
        found[f"calibrated tree of {count}"] = rounds_of(model, GlideDraft(draft, 7), texts, tree)
    for name, rounds in found.items():
        low, high = interval(lambda some, of=rounds: accepted([of[n] for n in some]), len(texts))
        shown = tuple(f"{one:.2f}" for one in (accepted(rounds), low, high))
        mean = verified(rounds)
        report.rows.append((f"accepted a round: {name}", *shown, f"{mean:.1f} verified"))
        report.figures[f"expansion, {name}"] = {"accepted": accepted(rounds), "verified": mean}
    pairs = [
        ("calibrated tree of 8", "chain of 8"),
        ("CaPE, depth 4", f"chain of {nodes}"),
        (f"calibrated tree of {nodes}", f"chain of {nodes}"),
        (f"calibrated tree of {nodes}", "CaPE, depth 4"),
    ]
    for one, other in pairs:
        shown = difference(accepted, found[one], found[other])
        row = (f"accepted: {one} less {other}", *(f"{value:+.2f}" for value in shown))
        report.rows.append((*row, "95 % over texts"))
        report.figures[f"{one} less {other}"] = list(shown)
        if other.startswith("chain"):
            report.bars.append(at_least(f"{one} less {other}, low end", shown[1], 0.0))
