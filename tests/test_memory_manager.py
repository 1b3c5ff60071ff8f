"""The memory manager against a plain dict: whatever is done, contents stay bit for bit."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.memory import GRADIENTS, HELD, KINDS, OPTIMIZER_STATE, PARAMETERS, DiskStore, Manager

PAGE = 4096
SIZES = (1, 1000, 1024, 1025, 3000, 5000)
"""Elements of the objects in random programs."""

OPERATIONS = st.tuples(
    st.sampled_from(
        (
            "read",
            "write",
            "fresh",
            "hold",
            "drop",
            "discard",
            "lend",
            "give",
            "budget",
            "view",
            "step",
        )
    ),
    st.integers(0, 5),
    st.integers(0, 2**16),
)


class Twin:
    """What a manager does, without one: a dict of tensors."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.objects = []
        self.contents: list[Tensor] = []
        self.pins: list[int] = []
        self.lent: list[tuple[Tensor, Tensor, str]] = []

    def add(self, numel: int, value: Tensor | None) -> None:
        kind = KINDS[len(self.objects) % 3]
        name = f"object {len(self.objects)}"
        self.objects.append(self.manager.add(name, kind, numel, torch.float32, value))
        self.contents.append(torch.zeros(numel) if value is None else value.clone())
        self.pins.append(0)

    def do(self, what: str, index: int, value: int) -> None:
        manager, placed = self.manager, self.objects[index]
        if what in ("read", "write", "fresh", "hold"):
            tensor = manager.use(placed, write=what in ("write", "hold"), fresh=what == "fresh")
            if what != "fresh":
                assert torch.equal(tensor, self.contents[index])
            if what != "read":
                tensor.copy_(torch.arange(tensor.numel()) + float(value))
                self.contents[index].copy_(tensor)
            if what == "hold":
                self.pins[index] += 1
            else:
                manager.done(placed)
        elif what == "drop" and self.pins[index]:
            self.pins[index] -= 1
            manager.done(placed)
        elif what == "discard" and not self.pins[index]:
            manager.discard(placed)
            self.contents[index].zero_()
        elif what == "lend":
            buffer = manager.lend(SIZES[index], torch.float32, GRADIENTS)
            buffer.fill_(value)
            self.lent.append((buffer, buffer.clone(), GRADIENTS))
        elif what == "give" and self.lent:
            buffer, content, kind = self.lent.pop(value % len(self.lent))
            assert torch.equal(buffer, content)
            manager.give(buffer, kind)
        elif what == "budget":
            manager.set_budget(PAGE * (4 + value % 16))
        elif what == "view":
            assert torch.equal(manager.view(placed), self.contents[index])
        elif what == "step":
            manager.end_step()

    def check(self) -> None:
        """The counter is the sum of the tensors that exist; nothing is beyond the budget."""
        held = dict.fromkeys(KINDS, 0)
        for placed in self.objects:
            if placed.where in HELD:
                held[placed.kind] += placed.nbytes
        for buffer, content, kind in self.lent:
            assert torch.equal(buffer, content)
            held[kind] += buffer.nbytes
        assert self.manager.counter.live == held
        assert self.manager.held <= self.manager.budget

    def finish(self) -> None:
        for index, placed in enumerate(self.objects):
            with self.manager.using(placed) as tensor:
                assert torch.equal(tensor, self.contents[index])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(OPERATIONS, max_size=60), st.integers(4, 14))
def test_contents_are_those_of_a_plain_dict_after_any_program(program, pages):
    with tempfile.TemporaryDirectory() as folder:
        manager = Manager(PAGE * pages, "cpu", DiskStore(folder, 2**20))
        twin = Twin(manager)
        try:
            for index, numel in enumerate(SIZES):
                value = torch.randn(numel) if index % 2 else None
                try:
                    twin.add(numel, value)
                except GulliverError:
                    twin.add(numel, None)
            for what, index, value in program:
                with suppress(GulliverError):  # too small a budget: nothing may have changed
                    twin.do(what, index, value)
                twin.check()
            manager.set_budget(2**20)
            twin.finish()
        finally:
            manager.close()


def test_more_than_the_budget_is_trained_through_it(tmp_path: Path):
    manager = Manager(8 * PAGE, "cpu", DiskStore(tmp_path, 2**20))
    objects = [
        manager.add(f"o{n}", OPTIMIZER_STATE, 1024, torch.float32, torch.full((1024,), float(n)))
        for n in range(20)
    ]
    for _ in range(3):
        for placed in objects:
            with manager.using(placed, write=True) as tensor:
                tensor += 1
        manager.end_step()
    for n, placed in enumerate(objects):
        assert torch.equal(manager.view(placed), torch.full((1024,), n + 3.0))
    manager.close()
    assert os.listdir(tmp_path) == []


def test_too_small_a_budget_names_the_least(tmp_path: Path):
    manager = Manager(3 * PAGE, "cpu", DiskStore(tmp_path, 2**20))
    a = manager.add("a", PARAMETERS, 2048, torch.float32)
    b = manager.add("weights of layer 3", PARAMETERS, 2048, torch.float32)
    manager.use(a)
    with pytest.raises(GulliverError, match=f"weights of layer 3 .*at least {4 * PAGE}"):
        manager.use(b)
    manager.set_budget(4 * PAGE)
    manager.use(b)
    manager.close()
