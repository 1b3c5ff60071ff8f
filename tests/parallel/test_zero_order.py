"""Ranks that use a model sharded by stage 3 in different ways are told, and end."""

from __future__ import annotations

import json
import os

import pytest

from tests.programs import TWO_RANKS, run_program, text

PROGRAM = """
import torch
from torch import nn
from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.comm import init_world
from gulliver.errors import GulliverError

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.backwards, self.skips = False, False
    def forward(self, x):
        for layer in reversed(self.layers) if self.backwards else self.layers:
            if not (self.skips and layer is self.layers[5]):
                x = torch.tanh(layer(x))
        return x

def train(booster, model, optimizer):
    booster.backward(model(torch.ones(2, 8)).sum(), optimizer)
    optimizer.step()
    optimizer.zero_grad()

def run(rank, case):
    world = init_world()
    model = Net()
    stage = 1 if case.endswith("1") else 3
    booster = Booster(LowLevelZeroPlugin(stage, chunk_mb=0.0004, verbose=False))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    train(booster, model, optimizer)
    if case == "order":
        model.backwards = rank == 1
    elif case == "skip":
        model.skips = rank == 1
    elif rank == 0 and case.startswith("evaluate"):
        with torch.no_grad():
            model(torch.ones(2, 8))
            model(torch.ones(2, 8))
    elif rank == 0 and case.startswith("read"):
        model.state_dict()
    elif rank == 0 and case == "part":
        model.layers[5](torch.ones(2, 8))
    elif case.startswith("no step") and rank == 1:
        booster.backward(model(torch.ones(2, 8)).sum(), optimizer)
        optimizer.zero_grad()
    elif case.startswith("write") and rank == 1:
        with torch.no_grad():
            model.layers[5].weight.fill_(1.0)
    if case == "evaluate, barrier":
        torch.distributed.barrier()
    if case != "read, end":
        for _ in range(3):
            train(booster, model, optimizer)
"""

DIFFERENT = {
    "order": ["rank 0 reduces the chunk of", "rank 1 gathers the chunk of"],
    "skip": ["rank 0 reduces the chunk of 'layers.5", "rank 1 gathers the chunk of"],
    "evaluate, train": ["rank 0 gathers the chunk of", "for a forward", "a backward"],
    "evaluate, barrier": [
        "rank 0 gathers the chunk of",
        "rank 1 waits in torch.distributed.b",
    ],
    "read, train": ["rank 0 gathers the chunk of", "for a read of parameters", "for a forward"],
    "no step, 1": ["rank 0 steps the optimizer", "rank 1 reduces the chunk of"],
    "no step, 3": ["rank 0 steps the optimizer", "rank 1 gathers the chunk of"],
    "write, 3": ["rank 1 gathers the chunk of 'layers.5", "for a read of parameters"],
    "part": ["rank 0 gathers the chunk of 'layers.5", "for a read of parameters", "for a forward"],
}


@pytest.mark.deadline(200)
def test_ranks_that_use_a_sharded_model_differently_end_with_one_line() -> None:
    done = run_program(text, PROGRAM + TWO_RANKS, *DIFFERENT, "read, end", "right", timeout=90)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for case, words in DIFFERENT.items():
        for status, errors in found[case]:
            assert os.waitstatus_to_exitcode(status) == 1, (case, errors)
            lines = errors.strip().splitlines()
            assert len(lines) == 1, (case, errors)
            assert "ranks run different collectives" in lines[0], (case, errors)
            assert all(word in lines[0] for word in words), (case, errors)
    (status, errors), (other, nothing) = found["read, end"]
    assert os.waitstatus_to_exitcode(status) == 1
    assert "GulliverError: rank 1 was lost: it ended, having made fewer steps or calls" in errors
    assert (other, nothing) == (0, "")
    assert found["right"] == [[0, ""], [0, ""]]
