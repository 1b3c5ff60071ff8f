"""Planned steps of one rank on a GPU against plain torch on the CPU; they skip without one."""

from __future__ import annotations

import pytest
import torch

from gulliver.comm import World
from gulliver.data_centric.recompute import RecomputeSwitch
from gulliver.hardware import host_copies, measure_moves
from gulliver.hardware.offload import fit_moves
from gulliver.memory.activations import ActivationOffload, ActivationStack, HostArena
from tests.data_centric.data_centric_runs import Case, errors
from tests.data_centric.test_data_centric_offload import Blocks, gradients_of
from tests.hybrid.test_gpu_hybrid import nccl

__all__ = ["nccl"]  # a fixture

pytestmark = pytest.mark.gpu
CASES = (
    Case("llama", 1, clip=0.5, steps=6),
    Case("documents", 3, by_tokens=True, steps=4),
    Case("stdit3", 2, steps=4),
    Case("llama", 1, steps=6, offload=True),
    Case("stdit3", 3, steps=4, offload=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_planned_steps_on_a_gpu_are_those_of_plain_torch(nccl: World, case: Case) -> None:
    found = errors(nccl, case)
    assert found["gradients"] <= 1e-10
    assert found["losses"] <= 1e-10
    assert found["weights"] <= 1e-10
    assert bool(found["moved"]) == case.offload


def test_what_blocks_save_leaves_the_memory_of_a_gpu(nccl: World) -> None:
    device, count = nccl.device, 6
    model, x = Blocks(count).to(device), torch.randn(512, 8, device=device)
    wanted = gradients_of(model, x)
    block = 2 * 512 * 512 * 4  # before and after GELU
    stack = ActivationStack(HostArena(count * 2 * block, device), device)
    switch = RecomputeSwitch(model, [("blocks", count)], ActivationOffload(stack))

    def held(away: int) -> int:
        switch.set([0], [away])
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = model(x)
        torch.cuda.synchronize()
        found = torch.cuda.memory_allocated() - before
        loss.backward()
        return found

    kept = held(0)
    for away in (1, 3, count):
        assert kept - held(away) == (away - 1) * block
        assert stack.held == 0
        assert stack.most <= 2 * block
        found = gradients_of(model, x)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    stack.store.close()


def test_moves_of_a_gpu_are_measured(nccl: World) -> None:
    found = fit_moves(measure_moves(host_copies(nccl.device)))
    assert found.to_host_s > 0
    assert found.from_host_s > 0
