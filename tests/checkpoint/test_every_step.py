"""A save at every step, with one state in flight: each holds the values of its own step."""

from __future__ import annotations

import multiprocessing as mp
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import Booster, GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.checkpoint import AsyncCheckpointer, CheckpointFolder, compare, load, verify
from gulliver.checkpoint.saving import SavingCost
from gulliver.comm import World
from gulliver.io import Engine
from gulliver.io.native import default_engine
from tests.pool import Pool, start_server

PAGE, PAGES, STEPS = 64 * 2**10, 6, 6
"""Few pages: an optimizer's step comes before most of the state has been copied."""

Make = Callable[[Any], torch.optim.Optimizer]
ADAMW: Make = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)  # noqa: E731
KINDS: dict[str, tuple[Make, Callable[[], Plugin]]] = {
    "fused": (
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        lambda: TorchDDPPlugin(verbose=False),
    ),
    "foreach": (
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
        lambda: TorchDDPPlugin(verbose=False),
    ),
    "momentum": (
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=False),
        lambda: TorchDDPPlugin(verbose=False),
    ),
    **{
        f"ZeRO {stage}": (ADAMW, lambda stage=stage: LowLevelZeroPlugin(stage=stage, verbose=False))
        for stage in (0, 1, 2, 3)
    },
    "Gemini": (ADAMW, lambda: GeminiPlugin("64MiB", chunk_mb=0.5, verbose=False)),
}


class Run:
    """A boosted model of about a megabyte, its optimizer and an average of the weights."""

    def __init__(self, kind: str) -> None:
        make, plugin = KINDS[kind]
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 1))
        self.booster = Booster(plugin())
        self.model, self.optimizer, *_ = self.booster.boost(model, make(model.parameters()))
        self.average = torch.zeros(50_000)

    def step(self, number: int) -> None:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        self.booster.backward(self.model(x).square().mean(), self.optimizer)
        self.optimizer.step()
        self.average.lerp_(torch.full((), float(number)), 0.5)

    def save(self, folder: Path, step: int, **options: Any) -> bool:
        state = {"average": self.average}
        return self.booster.save(
            folder, step, self.model, self.optimizer, state=state, keep=0, **options
        )


def few_pages() -> Engine:
    return default_engine(page_bytes=PAGE, pages=PAGES)


def save_every_step(world: World, kind: str, folder: Path) -> list[int]:
    """Saves while a slow disk lets pages go late; returns the steps that were saved."""
    with few_pages() as engine:
        run, saved = Run(kind), []
        for step in range(STEPS):
            run.step(step)
            engine.hold(True)
            release = threading.Timer(0.02, engine.hold, [False])
            release.start()
            if run.save(folder, step, engine=engine, when_busy="skip"):
                saved.append(step)
            # The last is not skipped: the comparison wants one after several updates.
            if step == STEPS - 2:
                run.booster.wait()
            release.join()
        run.booster.close()
    return saved


def save_synchronously(world: World, kind: str, folder: Path, steps: list[int]) -> None:
    run = Run(kind)
    for step in range(STEPS):
        run.step(step)
        if step in steps:
            run.save(folder, step, use_async=False)
    run.booster.close()


@pytest.mark.parametrize("kind", KINDS)
def test_step_saved_during_training_equals_a_synchronous_save(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    saved, other = pool.run(save_every_step, 2, kind, tmp_path / "a")
    assert saved == other
    assert saved[0] == 0
    assert saved[-1] == STEPS - 1
    pool.run(save_synchronously, 2, kind, tmp_path / "b", saved)
    for step in saved:
        found = compare(tmp_path / "a", tmp_path / "b", entry=None, step=step, other_step=step)
        assert found.equal, (step, found)
        assert found.compared > 6
        assert verify(tmp_path / "a", step) == []


def test_skipped_steps_are_counted_and_memory_is_bounded(tmp_path: Path) -> None:
    """The disk hangs for ten steps: none waits, none is queued, the next state is the newest."""
    weight = nn.Parameter(torch.zeros(3 * 2**20))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = -torch.ones_like(weight)
    checkpointer = AsyncCheckpointer(tmp_path, keep=0, when_busy="skip")

    def train_and_save(step: int) -> bool:
        optimizer.step()
        return checkpointer.save(step, {"model": {"weight": weight}})

    assert train_and_save(1)
    checkpointer.wait()
    engine = checkpointer._engine
    assert engine is not None
    pages = engine.pages
    state_pages = -(-weight.nbytes // engine.page_bytes) + 1
    assert pages <= max(state_pages, checkpointer._ring_pages)
    engine.hold(True)
    try:
        assert train_and_save(2)
        assert [train_and_save(step) for step in range(3, 13)] == [False] * 10
        assert checkpointer.skipped == 10
        assert engine.pages == pages
    finally:
        engine.hold(False)
    checkpointer.wait()
    assert train_and_save(13)
    checkpointer.close()
    assert checkpointer.last is not None
    assert checkpointer.last.skipped == 10
    assert CheckpointFolder(tmp_path).steps() == [1, 2, 13]
    for step in (1, 2, 13):
        assert load(tmp_path, step=step).values["model"]["weight"].eq(step).all()


def test_sparing_saves_make_steps_a_tenth_longer() -> None:
    cost, now, left, saved = SavingCost(), 0.0, 0, 0
    for _ in range(400):
        cost.note(now, left > 0)
        if not left and not cost.exceeded:
            cost.began()
            left, saved = 3, saved + 1  # a save takes three steps, which are half as long again
        now += 1.5 if left else 1.0
        left = max(0, left - 1)
    assert 400 * 1.09 < now < 400 * 1.11
    assert saved == pytest.approx(400 * 0.1 / 1.5, abs=2)


def test_sparing_saves_go_on(tmp_path: Path) -> None:
    checkpointer = AsyncCheckpointer(tmp_path, keep=1, when_busy="sparing")
    for step in range(10_000):
        checkpointer.save(step, {"step": step})
        time.sleep(0.002)
        if checkpointer.saves == 3:
            break
    assert not checkpointer.save(step + 1, {"step": step + 1})
    assert checkpointer.skipped == step - 1
    checkpointer.wait()
    assert checkpointer.save(step + 2, {"step": step + 2})
    checkpointer.close()
    assert load(tmp_path).values["step"] == step + 2


def value_at(step: int) -> Tensor:
    return torch.full((2**20,), float(step))


def save_for_ever(folder: Path, ready: Any) -> None:
    weight = nn.Parameter(value_at(0))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = -torch.ones_like(weight)
    checkpointer = AsyncCheckpointer(folder, keep=2, when_busy="skip")
    step = 0
    while True:
        optimizer.step()
        step += 1
        checkpointer.save(step, {"model": {"weight": weight}})
        if checkpointer.last is not None:
            ready.set()


def test_process_killed_while_saving_leaves_the_last_complete_step(tmp_path: Path) -> None:
    start_server()
    context = mp.get_context("forkserver")
    for kill in range(3):
        ready = context.Event()
        child = context.Process(target=save_for_ever, args=(tmp_path, ready), daemon=True)
        child.start()
        assert ready.wait(60)
        time.sleep(0.01 * kill)
        child.kill()
        child.join()
        loaded = load(tmp_path)
        assert loaded.values["model"]["weight"].equal(value_at(loaded.step))
        assert verify(tmp_path) == []
