"""What `benchmarks.serving --parts pipeline` measures: stages and links as servers, and packing.

Stages are ranks in network namespaces, with shaped links between them and the engine's own worker,
controller and messages. What a stage computes is a stand-in that takes a fixed time and no core:
there are fewer cores than stages here, and the links and the order of things are what is measured.
Two ways to run m batches are timed and held against their formulas, with t the seconds of a stage
and c those of a link, both measured with one batch at a time:

    blocking        m x (sum t + sum c)             the next batch begins when the one before is out
    non-blocking    sum + (m - 1) x max(t, c)       batches are sent ahead, links are servers

A link that was idle sends the first bytes faster (the shaping allows a burst of 70 kB): in the
maximum c is that of carries sent one behind the other, measured by themselves.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Client, Listener
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._harness import Report, Spread, alternate, at_most
from benchmarks._models import llama
from benchmarks.netlab import Net, run
from gulliver.comm import init_world, shutdown
from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import post
from gulliver.serve import Batch, LocalRunner, Span
from gulliver.serve.batch import Facts
from gulliver.serve.ranks.controller import RanksRunner
from gulliver.serve.ranks.stage import Layout, RankSizes
from gulliver.serve.ranks.worker import CARRY_TAG, RankMessage, RankWorker

WAYS = ("blocking", "non-blocking")
RATE = "200mbit"
TOKENS, WIDTH = 64, 1024  # Of a batch, so that its carry takes about 10 ms on a link of 200 Mbit/s
STAGES = {
    "3 stages, compute slowest": (0.02, 0.03, 0.02),
    "3 stages, links slowest": (0.005, 0.005, 0.005),
    "4 stages, even": (0.012, 0.012, 0.012, 0.012),
    "4 stages, uneven": (0.01, 0.02, 0.01, 0.01),
}
MANY = 16  # Batches of a makespan
SECRET = b"benchmark"


@dataclass
class Fixed:
    """A stage that takes a fixed time."""

    seconds: float
    last: bool
    width: int = WIDTH
    dtype: torch.dtype = torch.float32

    def run(self, batch: Batch, carry: Tensor | None) -> Tensor:
        """Waits, and gives what the next stage or the controller expects."""
        time.sleep(self.seconds)
        if self.last:
            return torch.zeros(1, 1)
        return torch.zeros(1, batch.tokens, WIDTH) if carry is None else carry


class _Crew:
    def __init__(self, links: Sequence[Any]) -> None:
        self.links = links

    def fate(self, rank: int) -> str:
        """Says that a rank is gone."""
        return f"is gone ({rank})"

    def close(self) -> None:
        for link in self.links:
            link.close()

    def restarted(self) -> RanksRunner:
        """Nothing is started again here."""
        raise AssertionError


@dataclass(frozen=True)
class Seen:
    """Seconds of a batch by stage, and by link where the next stage was waiting; 0 elsewhere."""

    stages: tuple[float, ...]
    links: tuple[float, ...]


class Timed(RanksRunner):
    """A runner that notes what each stage and link took, of what the ranks tell of a batch."""

    def _note(self, rank: int, message: RankMessage) -> None:
        ranks = self.times.setdefault(message.ticket, {})
        ranks[rank] = message.value
        super()._note(rank, message)
        if len(ranks) < self.layout.ranks:
            return
        stages = [ranks[rank] for rank in range(self.layout.ranks)]
        links = [
            max(0.0, got - max(end, began)) for (_, _, end), (began, got, _) in pairwise(stages)
        ]
        self.seen.append(Seen(tuple(done - got for _, got, done in stages), tuple(links)))

    def __init__(self, crew: Any, layout: Layout) -> None:
        self.times: dict[int, dict[int, tuple[float, float, float]]] = {}
        self.seen: deque[Seen] = deque(maxlen=MANY)
        super().__init__(crew, layout)


def stages_on_links(folder: str, seconds: Sequence[float], rounds: int) -> dict[str, Any]:
    """Runs each way in turns; every rank calls it, and the last one is the controller."""
    world = init_world()
    count = len(seconds)
    layout = Layout(1, tuple(range(count + 1)))
    spans: dict[str, list[float]] = {way: [] for way in WAYS}
    single: list[Any] = []
    streamed = [_streamed(world.rank, first) for first in range(count - 1)]
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, streamed)
    for turn in range(rounds):
        for way in WAYS:
            address = f"{folder}/{turn}-{way}"
            if world.rank == count:
                with Listener(address, authkey=SECRET) as listener:
                    dist.barrier()
                    span, seen = _controlled(listener, layout, way)
                spans[way].append(span)
                single += seen if way == "blocking" else []
            else:
                dist.barrier()
                _staged(address, layout, world.rank, seconds)
            dist.barrier()
    shutdown()
    if world.rank < count:
        return {}
    stage = [_median([one.stages[s] for one in single]) for s in range(count)]
    link = [_median([one.links[s] for one in single]) for s in range(count - 1)]
    streams = [max(told[first] for told in every) for first in range(count - 1)]
    return {"spans": spans, "stages": stage, "links": link, "streamed": streams}


def _streamed(rank: int, first: int) -> float:
    """Seconds of a carry on the link from a rank to the next, behind others; 0 elsewhere."""
    group = RankGroup()
    carries = [torch.empty(1, TOKENS, WIDTH) for _ in range(MANY)]
    dist.barrier()
    if rank == first:
        for sent in [post([], [(first + 1, c)], group.process_group, CARRY_TAG) for c in carries]:
            sent.wait()
    if rank != first + 1:
        return 0.0
    ends = []
    for come in [post([(first, c)], [], group.process_group, CARRY_TAG) for c in carries]:
        come.wait()
        ends.append(time.perf_counter())
    return (ends[-1] - ends[1]) / (MANY - 2)


def _staged(address: str, layout: Layout, rank: int, seconds: Sequence[float]) -> None:
    link = Client(address, authkey=SECRET)
    link.send(rank)
    link.send(RankMessage("sizes", value=RankSizes(1, None, 64)))
    link.recv()
    link.send(RankMessage("ready"))
    model = Fixed(seconds[rank], rank == layout.stages - 1)
    RankWorker(link, model, layout, rank).run()
    link.close()


def _controlled(listener: Listener, layout: Layout, way: str) -> tuple[float, list[Any]]:
    found = {}
    for _ in range(layout.ranks):
        link = listener.accept()
        found[link.recv()] = link
    runner = Timed(_Crew([found[r] for r in range(layout.ranks)]), layout)
    batches = [Batch(t, [Span(t, 0, [1] * TOKENS, [0] * 4, 1)]) for t in range(MANY + 2)]
    # Connections are opened, and memory is touched, before the clock runs.
    for batch in batches[:2]:
        runner.submit(batch)
        runner.collect()
    runner.seen.clear()
    begun = time.perf_counter()
    most, flying = (1 if way == "blocking" else MANY), 0
    for batch in batches[2:]:
        if flying == most:
            runner.collect()
            flying -= 1
        runner.submit(batch)
        flying += 1
    for _ in range(flying):
        runner.collect()
    span = time.perf_counter() - begun
    time.sleep(0.2)  # the last words of the ranks
    seen = list(runner.seen)[2:]
    runner.close()
    return span, seen


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def formulas(
    stages: Sequence[float],
    links: Sequence[float],
    many: int,
    streamed: Sequence[float] | None = None,
) -> dict[str, float]:
    """Seconds that each way should take."""
    whole = sum(stages) + sum(links)
    return {
        "blocking": many * whole,
        "non-blocking": whole + (many - 1) * max(*stages, *(streamed or links)),
    }


def makespans(report: Report, rounds: int) -> None:
    """Times the schedules on shaped links, next to the formulas."""
    worst = 0.0
    for name, seconds in STAGES.items():
        with tempfile.TemporaryDirectory() as folder, Net(len(seconds) + 1, rate=RATE) as net:
            found = run(stages_on_links, net, folder, seconds, rounds)[-1]
        predicted = formulas(found["stages"], found["links"], MANY, found["streamed"])
        for way in WAYS:
            spread = Spread(tuple(found["spans"][way]))
            off = spread.median / predicted[way] - 1
            report.rows.append(
                (f"{name}: {way}", spread.shown(".3f"), f"{predicted[way]:.3f}", f"{off:+.1%}")
            )
            if way == "non-blocking":
                worst = max(worst, abs(off))
        report.figures[name] = {
            **{way: _median(found["spans"][way]) for way in WAYS},
            "stages": found["stages"],
            "links": found["links"],
            "links streamed": found["streamed"],
            "predicted": predicted,
        }
    report.bars.append(at_most("off the formula, non-blocking", worst, 0.1))
    report.notes.append(
        f"makespans of {MANY} batches of {TOKENS} tokens, each {TOKENS * WIDTH * 4 >> 10} KiB "
        f"on links of {RATE}; t and c are medians of the blocking runs; stages wait instead of "
        "computing, as there are fewer cores than stages"
    )


SHARES = (1.0, 0.75, 0.5, 0.25)
SEQUENCES, LONGEST = 8, 128


def packing(report: Report, rounds: int) -> None:
    """Seconds of prompts packed and padded, at several means of their length over the longest."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = llama(1000, 512, 1408, 6, 8, length=256).eval().requires_grad_(False)
    for share in SHARES:
        lengths = _lengths(share)
        prompts = [torch.randint(3, 1000, (n,)).tolist() for n in lengths]
        found = alternate(
            {"packed": _packed(model, prompts), "padded": _padded(model, prompts)}, rounds
        )
        gain = found["padded"].median / found["packed"].median
        ideal = LONGEST * SEQUENCES / sum(lengths)
        name = f"mean/longest {share:g}: packed, padded"
        said = f"{found['packed'].median:.3f}, {found['padded'].median:.3f}"
        report.rows.append((name, said, f"ideal {ideal:.2f} x", f"{gain:.2f} x"))
        report.figures[f"packed at {share:g}"] = {"gain": gain, "ideal": ideal}
    report.notes.append(
        f"packed: {SEQUENCES} prompts of at most {LONGEST} tokens through pages; padded: "
        "transformers' own forward of the padded batch, with its mask; logits of the last tokens"
    )


def _lengths(share: float) -> list[int]:
    """Lengths of a given mean, one of them the longest."""
    rest = (share * LONGEST * SEQUENCES - LONGEST) / (SEQUENCES - 1)
    return [LONGEST, *[round(rest)] * (SEQUENCES - 1)]


def _packed(model: Any, prompts: Sequence[Sequence[int]]) -> Any:
    def timed() -> float:
        runner = LocalRunner(model, cache_tokens=SEQUENCES * LONGEST)
        facts: Facts = runner.facts
        each = LONGEST // facts.block_size
        spans = [
            Span(n, 0, prompt, range(n * each, (n + 1) * each), 1)
            for n, prompt in enumerate(prompts)
        ]
        begun = time.perf_counter()
        runner.submit(Batch(0, spans))
        runner.collect()
        took = time.perf_counter() - begun
        runner.close()
        return took

    return timed


def _padded(model: Any, prompts: Sequence[Sequence[int]]) -> Any:
    ids = torch.zeros(len(prompts), LONGEST, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, LONGEST - len(prompt) :] = torch.tensor(prompt)
        mask[row, LONGEST - len(prompt) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def timed() -> float:
        begun = time.perf_counter()
        with torch.inference_mode():
            model(ids, mask, position_ids=positions, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - begun

    return timed


def pipeline(rounds: int) -> Report:
    """All three; the stages first, as their processes are forked from this one."""
    columns = ("what", "seconds", "by the formula", "off, or times better")
    report = Report("serving-pipeline", "Serving: stages, links and packed tokens", columns)
    makespans(report, rounds)
    packing(report, rounds)
    return report
