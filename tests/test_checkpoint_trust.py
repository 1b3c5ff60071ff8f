"""What a demanding user tries on checkpoints: nothing is lost silently, nothing hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import Booster
from gulliver.checkpoint import AsyncCheckpointer, load
from gulliver.comm import World, adopt_world
from gulliver.errors import GulliverError
from gulliver.io import TwinEngine

PAGE = 64 * 2**10


def slow_engine() -> TwinEngine:
    """One whose pool is smaller than the states here, so that a held disk keeps them uncopied."""
    return TwinEngine(page_bytes=PAGE, pages=2)


# Buffers that a forward changes


class Queue(nn.Module):
    """A queue of keys as in Momentum Contrast: every forward writes the next rows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(32, 64)
        self.register_buffer("queue", torch.zeros(2000, 64))
        self.register_buffer("table", torch.rand(2000, 64))
        self.next = 0

    def forward(self, x: Tensor) -> Tensor:
        keys = self.encoder(x)
        queue: Tensor = self.queue  # type: ignore[assignment]
        scores = keys @ queue.clone().T
        queue[self.next : self.next + len(keys)] = keys.detach()
        self.next += len(keys)
        return scores.sum() + keys.sum()


@pytest.mark.parametrize("boosted", [False, True])
def test_buffers_that_forwards_change_are_saved_as_they_were(tmp_path: Path, boosted: bool) -> None:
    adopt_world(World(0, 1, 0, torch.device("cpu")))
    model = Queue()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, booster = slow_engine(), Booster()
    trained: Any = model
    if boosted:
        trained, optimizer, *_ = booster.boost(model, optimizer)
    checkpointer = AsyncCheckpointer(tmp_path, keep=0, engine=engine)
    wanted = []
    for step in range(3):
        wanted.append({name: value.clone() for name, value in model.state_dict().items()})
        engine.hold(True)
        if boosted:
            booster.save(tmp_path, step, trained, optimizer, keep=0, engine=engine)
        else:
            checkpointer.save(step, {"model": model, "optimizer": optimizer})
        loss = trained(torch.rand(8, 32))
        engine.hold(False)
        loss.backward()
        optimizer.step()
        (booster if boosted else checkpointer).wait()
    for step, state in enumerate(wanted):
        found = load(tmp_path, step=step).values["model"]
        assert all(torch.equal(found[name], value) for name, value in state.items())
    (booster if boosted else checkpointer).close()
    engine.close()
    adopt_world(None)


def test_a_buffer_that_does_not_change_is_not_copied_again(tmp_path: Path) -> None:
    model = Queue()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        for step, copied in ((1, {"queue", "table"}), (2, {"queue"})):
            checkpointer.save(step, {"model": model})
            snapshot = checkpointer._snapshot
            assert snapshot is not None
            checkpointer.wait()
            kept = {name for name, t in model.named_buffers() if t.data_ptr() in snapshot.addresses}
            assert kept == {"queue", "table"} - copied
            model(torch.rand(8, 32))


def test_what_was_once_changed_while_it_was_saved_is_copied_at_once_from_then_on(
    tmp_path: Path,
) -> None:
    values, engine = torch.zeros(40_000), slow_engine()
    checkpointer = AsyncCheckpointer(tmp_path, engine=engine)
    for step in (1, 2, 3):
        engine.hold(True)
        checkpointer.save(step, {"mine": {"values": values}})
        values += 1
        engine.hold(False)
        if step == 1:
            with pytest.raises(GulliverError, match="mine: values was changed while it was being"):
                checkpointer.wait()
        else:
            checkpointer.wait()
            assert load(tmp_path).values["mine"]["values"].eq(step - 1).all()
    checkpointer.close()
    engine.close()
