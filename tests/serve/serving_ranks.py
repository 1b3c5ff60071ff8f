"""The ranks of a served model in the pooled world of tests: the last rank is the controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gulliver.comm import World
from gulliver.serve import Batch, Engine, EngineOptions, SamplingParams
from gulliver.serve.options import ModelOptions
from gulliver.serve.ranks.controller import RanksRunner
from gulliver.serve.ranks.stage import plan_ranks
from gulliver.serve.ranks.worker import serve
from gulliver.serve.speculative import SpeculationOptions, Speculator
from gulliver.serve.speculative.proposers import LookUp
from gulliver.serve.speculative.small_model import SmallModel
from tests.serve.serving_models import Recording, filled, one_by_one, prompts, tiny

SECRET = b"of these tests"
COUNT = 8
SIZES = (3, 22, 1, 9, 14)


@dataclass(frozen=True)
class Case:
    """A model over ranks."""

    kind: str
    tensor: int
    pipeline: int
    memory: int | None = None
    quantize: str | None = None
    depth: int | None = None
    drafts: str | None = None

    def ways(self, folder: str) -> ModelOptions:
        """How it is run."""
        disk = None if self.memory is None else folder
        sizes: Any = {"tensor": self.tensor, "pipeline": self.pipeline, "cache_tokens": 128}
        return ModelOptions(
            None, self.quantize, memory=self.memory, disk=disk, timeout_s=30.0, **sizes
        )


class PoolCrew:
    """Ranks that are processes of the pool."""

    def __init__(self, links: Sequence[Connection], again: Callable[[], RanksRunner]) -> None:
        self.links, self._again = links, again

    def fate(self, rank: int) -> str:
        return "is gone"

    def close(self) -> None:
        for link in self.links:
            link.close()

    def restarted(self) -> RanksRunner:
        return self._again()


def answers(
    world: World,
    folder: str,
    cases: Sequence[Case],
    before: Callable[[int, int, Batch], None] | None = None,
    options: EngineOptions | None = None,
) -> list[Any]:
    """Serves models one after the other, each saved in ``folder/kind``.

    Every rank calls it; the last one is the controller.

    Args:
        world: one rank more than the models have.
        folder: folder of the models.
        cases: what is served.
        before: called on the ranks before each batch, with the rank and the attempt.
        options: limits of the engine.

    Returns:
        On the controller, for each case, tokens, logits by place, and counts of the engine.
    """
    made = []
    for number, case in enumerate(cases):
        where = Path(folder) / case.kind
        layout = plan_ranks(where, None, case.tensor, case.pipeline, None)
        assert layout.ranks == world.size - 1
        ways = case.ways(folder)
        address = f"{folder}/controller-{number}"
        if world.rank == layout.ranks:
            made.append(_control(address, case, layout, options))
            dist.barrier()
            continue
        dist.barrier()
        for attempt in range(1 if before is None else 2):
            link = Client(address, authkey=SECRET)
            link.send(world.rank)
            hook = None
            if before is not None:
                hook = lambda b, a=attempt: before(world.rank, a, b)  # noqa: E731
            serve(link, where, ways, layout, world.rank, 8, 4, hook)
            link.close()
        dist.barrier()
    return made


def _control(address: str, case: Case, layout: Any, options: EngineOptions | None) -> Any:
    listener = Listener(address, authkey=SECRET)
    dist.barrier()

    def start() -> RanksRunner:
        found = {}
        for _ in range(layout.ranks):
            link = listener.accept()
            found[link.recv()] = link
        links = [found[rank] for rank in range(layout.ranks)]
        crew = PoolCrew(links, start)
        return RanksRunner(crew, layout, 30.0, 60.0, 4, case.depth)

    runner: Any = Recording(start())
    drafter = None
    if case.drafts is not None:
        where = Path(address).parent / case.drafts
        proposer = LookUp()
        if where.is_dir():
            proposer = SmallModel(filled(where), cache_tokens=256)
        drafter = Speculator(proposer, SpeculationOptions(depth=3, fixed=True))
    engine = Engine(runner, None, options or EngineOptions(24, 4, True), (), drafter)
    asked = SamplingParams(max_tokens=COUNT, temperature=0)
    tokens: dict[int, list[int]] = {engine.add(t, asked): [] for t in texts()}
    flights = 0
    while engine.busy:
        for event in engine.step():
            assert event.error is None, event.error
            tokens[event.request] += [token.id for token in event.tokens]
        flights = max(flights, len(engine._in_flight))
    logits: list[dict[int, torch.Tensor]] = [{} for _ in tokens]
    for (sequence, place), row in runner.seen.items():
        logits[sequence][place] = row
    engine.runner.close()
    listener.close()
    return list(tokens.values()), logits, engine.counts(), flights


def texts() -> list[list[int]]:
    """Prompts with a common beginning."""
    return prompts(SIZES, shared=16)


def reference(kind: str) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens and logits of transformers, one prompt at a time."""
    return [one_by_one(tiny(kind), text, COUNT) for text in texts()]


def save(folder: Path, kinds: Sequence[str]) -> None:
    """Writes models as transformers does."""
    for kind in kinds:
        tiny(kind).save_pretrained(folder / kind)
