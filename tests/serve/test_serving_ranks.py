"""A served model over tensor ranks and stages is the model; who fails is named, and replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.serve import Batch, Engine, EngineOptions, SamplingParams, Span
from gulliver.serve.batch import RunnerLost
from gulliver.serve.ranks.controller import RanksRunner
from gulliver.serve.ranks.stage import Layout, RankSizes, plan_ranks
from gulliver.serve.ranks.worker import RankMessage, RankWorker
from gulliver.serve.weights import SERVED
from tests.pool import Pool
from tests.serve.serving_models import Slots, next_token, prompts
from tests.serve.serving_ranks import COUNT, Case, answers, reference, save, texts

CLOSE = 1e-5
TWO = (Case("mixtral", 2, 1), Case("qwen2", 1, 2))
# The other families are in the whole grid.
FOUR = (Case("llama", 2, 2), Case("bloom", 1, 4))
MORE = {
    2: [Case(kind, *ways) for kind in SERVED for ways in ((2, 1), (1, 2))],
    # Four heads over three ranks are two, one and one.
    3: [*(Case(kind, 1, 3) for kind in SERVED), Case("gpt2", 3, 1)],
    4: [Case(kind, *ways) for kind in SERVED for ways in ((2, 2), (1, 4), (4, 1))],
}


def held(pool: Pool, folder: Path, cases: tuple[Case, ...]) -> None:
    """Holds each case against transformers, one prompt at a time."""
    save(folder, sorted({case.kind for case in cases}))
    ranks = cases[0].tensor * cases[0].pipeline
    made = pool.run(answers, ranks + 1, str(folder), cases)[-1]
    for case, (tokens, logits, _, flights) in zip(cases, made, strict=True):
        want = reference(case.kind)
        assert tokens == [right for right, _ in want], case
        for text, seen, (_, right) in zip(texts(), logits, want, strict=True):
            got = torch.stack([seen[len(text) - 1 + place] for place in range(COUNT)])
            assert (got - right).abs().max() < CLOSE, case
        assert (flights > 0) == (case.pipeline > 1), "stages have several batches in flight"


@pytest.mark.deadline(300)
def test_models_over_two_ranks_give_the_logits_of_transformers(pool: Pool, tmp_path: Path) -> None:
    held(pool, tmp_path, TWO)


@pytest.mark.deadline(300)
def test_models_over_four_ranks_give_the_logits_of_transformers(pool: Pool, tmp_path: Path) -> None:
    held(pool, tmp_path, FOUR)


@pytest.mark.full
@pytest.mark.deadline(900)
@pytest.mark.parametrize("ranks", MORE)
def test_every_family_is_exact_over_ranks_or_refused(
    pool: Pool, tmp_path: Path, ranks: int
) -> None:
    for case in MORE[ranks]:
        save(tmp_path, [case.kind])
        try:
            plan_ranks(tmp_path / case.kind, None, case.tensor, case.pipeline, None)
        except GulliverError as error:
            assert "tensor" in str(error) or "pipeline" in str(error)  # noqa: PT017
            continue
        held(pool, tmp_path, (case,))


def test_heads_that_cannot_be_dealt_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, ["llama"])
    with pytest.raises(GulliverError, match=r"has 2 heads .* 3 tensor ranks.* tensor from 1 to 2"):
        plan_ranks(tmp_path / "llama", None, 3, 1, None)
    with pytest.raises(GulliverError, match=r"4 blocks .* too few for 5 stages"):
        plan_ranks(tmp_path / "llama", None, 1, 5, None)


def test_files_that_are_not_whole_are_refused_before_a_rank_is_started(tmp_path: Path) -> None:
    save(tmp_path, ["llama"])
    folder = tmp_path / "llama"
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    whole = weights.pop(name)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(GulliverError, match=f"lack {name}"):
        plan_ranks(folder, None, 2, 1, None)
    save_file({**weights, name: whole[:3].clone()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(GulliverError, match=rf"{name} is \[3, 32\] in the files"):
        plan_ranks(folder, None, 1, 2, None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(GulliverError, match=r"model\.safetensors"):
        plan_ranks(folder, None, 1, 2, None)


def test_stages_of_given_speeds_get_layers_to_match(tmp_path: Path) -> None:
    save(tmp_path, ["llama"])
    even = plan_ranks(tmp_path / "llama", None, 1, 2, None)
    uneven = plan_ranks(tmp_path / "llama", None, 1, 2, (3.0, 1.0))
    assert (even.bounds, uneven.bounds) == ((0, 2, 4), (0, 3, 4))


class Stub:
    """A stage of stand-ins: `Slots` behind the interface of a rank's model."""

    width, dtype = 1, torch.float32

    def __init__(self, fault: Callable[[Batch], None]) -> None:
        self.slots, self.fault = Slots(16, 4), fault

    def run(self, batch: Batch, carry: Tensor | None) -> Tensor:
        self.fault(batch)
        self.slots.submit(batch)
        return self.slots.collect()


class Threads:
    """Ranks that are threads; `start` runs one, and may fail as it is told."""

    def __init__(self, count: int, start: Callable[[int, Any, int], None], attempt: int = 0):
        self.count, self.start, self.attempt = count, start, attempt
        # A connection that nobody has any more is closed.
        self.pairs = [Pipe() for _ in range(count)]
        self.links = [here for here, _ in self.pairs]
        for rank, (_, there) in enumerate(self.pairs):
            threading.Thread(target=start, args=(rank, there, attempt), daemon=True).start()

    def fate(self, rank: int) -> str:
        return "is gone"

    def close(self) -> None:
        for link in self.links:
            link.close()

    def restarted(self) -> RanksRunner:
        return runner(Threads(self.count, self.start, self.attempt + 1))


ONE = Layout(1, (0, 1))


def runner(crew: Threads, layout: Layout = ONE, timeout_s: float = 20.0) -> RanksRunner:
    return RanksRunner(crew, layout, timeout_s, 20.0, 4)


def greet(link: Any) -> None:
    link.send(RankMessage("sizes", value=RankSizes(5, None, 16)))
    link.recv()
    link.send(RankMessage("ready"))


def breaks(batch: Batch) -> None:
    raise RuntimeError("out of luck")


@pytest.mark.parametrize("fault", ["error", "death", "lost command"])
def test_requests_go_on_from_their_tokens_after_a_rank_was_lost(fault: str) -> None:
    def start(rank: int, link: Any, attempt: int) -> None:
        greet(link)

        def hook(batch: Batch) -> None:
            if attempt == 0 and batch.ticket == 3:
                raise {"error": RuntimeError("out of luck"), "death": EOFError()}[fault]

        class Losing:
            """A connection that loses a command."""

            def __getattr__(self, name: str) -> Any:
                return getattr(link, name)

            def recv(self) -> Any:
                got = link.recv()
                lost = attempt == 0 and isinstance(got, Batch) and got.ticket == 3
                return replace(got, ticket=4) if lost else got

        try:
            if fault == "lost command":
                losing: Any = Losing()
                RankWorker(losing, Stub(lambda batch: None), ONE, rank).run()
            else:
                RankWorker(link, Stub(hook), ONE, rank).run()
        except EOFError:
            link.close()
        except Exception as error:
            link.send(RankMessage("failed", value=str(error)))

    engine = Engine(runner(Threads(1, start)), options=EngineOptions(8, 4, True))
    asked = SamplingParams(max_tokens=6, temperature=0)
    given = prompts((3, 9, 5))
    given = [[token % 5 for token in text] for text in given]
    made: dict[int, list[int]] = {engine.add(text, asked): [] for text in given}
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            made[event.request] += [token.id for token in event.tokens]
    for text, tokens in zip(given, made.values(), strict=True):
        history = list(text)
        for token in tokens:
            assert token == next_token(history, 5)
            history.append(token)
    assert engine.counts()["restarts"] == 1
    engine.runner.close()


def test_a_rank_that_fails_every_time_ends_the_step_with_its_error() -> None:
    def start(rank: int, link: Any, attempt: int) -> None:
        greet(link)
        try:
            RankWorker(link, Stub(breaks), ONE, rank).run()
        except RuntimeError as error:
            link.send(RankMessage("failed", value=str(error)))

    engine = Engine(runner(Threads(1, start)))
    engine.add([1, 2], SamplingParams(max_tokens=2))
    with pytest.raises(RunnerLost, match=r"rank 0 \(stage 0, tensor rank 0\) failed: out of luck"):
        list(iter(engine.step, None))
    assert engine.counts()["restarts"] == 3


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_the_stage_that_holds_a_batch_up_is_named(silent: int) -> None:
    layout = Layout(1, (0, 1, 2, 3))

    def start(rank: int, link: Any, attempt: int) -> None:
        greet(link)
        link.recv()
        if rank < silent:
            link.send(RankMessage("done", 0, (0.0, 0.0, 1.0)))

    one = runner(Threads(3, start), layout, 0.5)
    one.submit(Batch(0, [Span(0, 0, [1], [0], 1)]))
    with pytest.raises(RunnerLost, match=rf"stage {silent}, .* batch 0, has not responded for 0.5"):
        one.collect()
    one.close()


def test_rank_error_precedes_connection_errors() -> None:
    layout = Layout(2, (0, 1))

    def start(rank: int, link: Any, attempt: int) -> None:
        greet(link)
        link.recv()
        said = ("Connection closed by peer", "no such weight")[rank]
        link.send(RankMessage("failed", value=said))

    one = runner(Threads(2, start), layout)
    one.submit(Batch(0, [Span(0, 0, [1], [0], 1)]))
    with pytest.raises(RunnerLost, match=r"tensor rank 1.* no such weight"):
        one.collect()
    one.close()


def test_batches_in_flight_get_as_many_tokens_each() -> None:
    engine = Engine(Slots(64, 4, max_in_flight=3), options=EngineOptions(64, 16, False))
    sizes: list[int] = []
    submit = engine.runner.submit
    engine.runner.submit = lambda batch: (sizes.append(batch.tokens), submit(batch))[1]  # type: ignore[method-assign]
    for _ in range(12):
        engine.add([1, 2], SamplingParams(max_tokens=8, temperature=0))
    while engine.busy:
        engine.step()
    steady = sizes[6:-6]
    assert max(steady) - min(steady) <= 1, sizes
    assert max(steady) == 4, "twelve sequences in three batches"
