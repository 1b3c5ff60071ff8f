"""Planned steps as they run: gradients of one process, whatever the groups of ranks are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gulliver.booster import Booster, DataCentricLoader, DataCentricPlugin, LowLevelZeroPlugin
from gulliver.comm import World
from gulliver.data import DataCentricPlanner, Samples, document_shapes, pack_documents
from gulliver.data_centric.recompute import RecomputeSwitch
from gulliver.errors import GulliverError
from tests.data_centric.data_centric_costs import line_costs
from tests.data_centric.data_centric_runs import (
    KINDS,
    PLANNED,
    Case,
    RandomPlans,
    Uneven,
    errors,
    loss_of,
    make_model,
    planned,
    trained,
)
from tests.hybrid.hybrid_cells import make_optimizer
from tests.pool import Pool

pytest.importorskip("transformers")

DEFAULT = {
    1: [Case("stdit3", 3, steps=2), Case("documents", 2, by_tokens=True, steps=2)],
    2: [
        Case("stdit3", 3, steps=2),
        Case("documents", 0, clip=0.5, by_tokens=True, steps=3),
        Case("qwen2", 3, steps=2, stages=2),
    ],
    4: [
        Case("llama", 1, clip=0.5, steps=6),
        Case("documents", 3, by_tokens=True, mode="ring_attn", steps=3),
        Case("stdit3", 2, steps=2),
        Case("llama", 2, clip=0.5, steps=3, tensor=2),
        Case("documents", 2, by_tokens=True, mode="ring_attn", steps=3, stages=2),
        Case("stdit3", 1, clip=0.5, steps=3, stages=2),
    ],
}
INSIDE = [
    Case(family, stage, 0.5, False, mode, seed=stage, tensor=tensor, stages=stages)
    for family, kinds in (
        ("llama", ((2, 1), (4, 1), (1, 2), (2, 2))),
        ("stdit3", ((2, 1), (4, 1), (1, 2), (1, 4), (2, 2))),
        ("qwen2", ((1, 2),)),
    )
    for tensor, stages in kinds
    for stage in (0, 1, 2, 3)
    for mode in ("all_to_all", "ring_attn")
]
"""Every one of them for 20 steps."""


def _several(world: World, cases: list[Case]) -> list[dict[str, float]]:
    return [errors(world, case) for case in cases]


@pytest.mark.deadline(120)
@pytest.mark.parametrize("ranks", DEFAULT)
def test_every_gradient_is_that_of_one_process(pool: Pool, ranks: int) -> None:
    idle = 0.0
    for rank, found in enumerate(pool.run(_several, ranks, DEFAULT[ranks], deadline_s=110)):
        for case, of in zip(DEFAULT[ranks], found, strict=True):
            assert of["gradients"] <= 1e-10, (rank, case, of)
            assert of["losses"] <= 1e-10, (rank, case, of)
            assert of["weights"] <= 1e-10, (rank, case, of)
            idle += of["idle"]
    assert ranks == 1 or idle, "some rank had nothing to do in some step"


@pytest.mark.full
@pytest.mark.deadline(600)
@pytest.mark.parametrize("case", INSIDE, ids=str)
def test_every_gradient_with_tensor_ranks_or_stages_inside_is_that_of_one_process(
    pool: Pool, case: Case
) -> None:
    for rank, (of,) in enumerate(pool.run(_several, 4, [case], deadline_s=300)):
        assert of["gradients"] <= 1e-10, (rank, of)
        assert of["losses"] <= 1e-10, (rank, of)
        assert of["weights"] <= 1e-10, (rank, of)


@pytest.mark.deadline(120)
def test_killed_run_resumes_with_other_ranks(pool: Pool, tmp_path: Path) -> None:
    whole, weights, widest = pool.run(trained, 4, "", 8)[0]
    assert widest > 1, "some group shares a sample"
    curve: list[Any] = []
    for ranks, steps, stages in ((4, 2, 2), (2, 3, 1), (3, 3, 1)):
        found = pool.run(trained, ranks, str(tmp_path), steps, stages=stages)
        curve += found[0][0]
        assert all(rank[0] == found[0][0] for rank in found)
    assert sorted(index for samples, _ in curve for index in samples) == list(range(PLANNED))
    assert [samples for samples, _ in curve] == [samples for samples, _ in whole]
    assert max(abs(a - b) for (_, a), (_, b) in zip(curve, whole, strict=True)) < 1e-10
    assert max(float((found[0][1][n] - w).abs().max()) for n, w in weights.items()) < 1e-10


@pytest.mark.deadline(120)
def test_resume_on_equal_ranks_is_bitwise(pool: Pool, tmp_path: Path) -> None:
    whole, weights, _ = pool.run(trained, 3, "", 3)[0]
    first = pool.run(trained, 3, str(tmp_path), 1)[0][0]
    rest, found, _ = pool.run(trained, 3, str(tmp_path), 2)[0]
    assert first + rest == whole
    assert all(torch.equal(found[name], value) for name, value in weights.items())


@pytest.mark.parametrize("family", ["llama", "stdit3"])
def test_recomputed_blocks_follow_the_plan(family: str) -> None:
    model, data = make_model(family, wired=False), Uneven(family)
    kinds = [(kind.name, kind.count) for kind in KINDS[family]]
    switch, runs = RecomputeSwitch(model, kinds), dict[str, int]()
    for path in (path for paths in switch.paths for path in paths):
        norm = next(m for m in model.get_submodule(path).modules() if "Norm" in type(m).__name__)
        norm.register_forward_hook(lambda *_, path=path: runs.update({path: runs.get(path, 0) + 1}))
    batch = {name: value[None] for name, value in data[0].items()}
    for counts in ([2] * len(kinds), [1] * len(kinds), [0] * len(kinds)):
        switch.set(counts)
        runs.clear()
        loss_of(model, batch).backward()
        assert sorted(runs.values()) == sorted(
            2 if number < count else 1
            for paths, count in zip(switch.paths, counts, strict=True)
            for number in range(len(paths))
        )


def test_documents_are_packed_without_padding() -> None:
    row = pack_documents([torch.tensor([5, 6, 7]), {"input_ids": [8, 9], "labels": [8, -100]}])
    assert row["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert row["labels"].tolist() == [[-100, 6, 7, -100, -100]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    lengths = [1, 17, 100, 777, 4097]
    planned_as = [shape.tokens for shape in document_shapes(lengths)]
    assert all(0 <= p - max(n, 16) <= n / 8 for n, p in zip(lengths, planned_as, strict=True))
    assert len({shape.tokens for shape in document_shapes(range(1, 4097))}) <= 80
    with pytest.raises(GulliverError, match="document 1 has 0 tokens"):
        document_shapes([3, 0])
    with pytest.raises(GulliverError, match="equal lengths"):
        pack_documents([{"input_ids": [1, 2], "labels": [1]}])
    padded = pack_documents([[5, 6]], least=5)
    assert padded["input_ids"].tolist() == [[5, 6, 0, 0, 0]]
    assert padded["labels"].tolist() == [[-100, 6, -100, -100, -100]]
    assert padded["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    whole = {"input_ids": [5, 6], "labels": None, "attention_mask": [1, 1]}
    assert pack_documents([whole])["labels"].tolist() == [[-100, 6]]
    with pytest.raises(GulliverError, match="remove padding"):
        pack_documents([{"input_ids": [0, 5], "attention_mask": [0, 1]}])


def test_costs_of_functions_are_a_line_through_samples() -> None:
    costs = line_costs(lambda n: n * n, 100, 7.0, 0.1, (1, 2))
    one, two = costs.batches(30, 1), costs.batches(30, 2)
    assert one.seconds.tolist() == pytest.approx([907.0, 1807.0, 2707.0])
    assert two.seconds.tolist()[:2] == pytest.approx([7 + 450 + 90, 7 + 900 + 180])
    assert two.communication.tolist()[:2] == pytest.approx([90, 180])
    assert len(two) == 6
    assert costs.degrees(4) == (1, 2)
    for bad in (
        lambda n: 0.0,
        lambda n: math.inf,
        lambda n: math.nan,
        lambda n: 99.0 if n < 9 else 1.0,
    ):
        with pytest.raises(GulliverError):
            line_costs(bad, 1000)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x[..., None])


def _one_shape(ranks: int, **changes: Any) -> DataCentricPlanner:
    costs = line_costs(lambda n: n, 12)
    return DataCentricPlanner(costs, [3, 5] * 6, ranks, Samples(6), **changes)


def _any_model(world: World, **settings: Any) -> dict[str, float]:
    """A model of no family: every group has one rank; its mean is over samples."""
    data = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in [3, 5] * 6]
    model = _Net()
    plain, plugin = _Net(), DataCentricPlugin(verbose=False, **settings)
    model, optimizer, *_ = Booster(plugin=plugin).boost(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    worst = 0.0
    for step in DataCentricLoader(_one_shape(world.size), data, model, optimizer):
        for batch in step:
            step.backward(model(batch.data).float().square().mean())
        plain.zero_grad()
        samples = [index for _, batch in step.plan for index in batch.samples]
        for index in samples:
            (plain(data[index]).square().mean() / len(samples)).backward()
        found = optimizer.full_gradients()
        wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        worst = max(worst, *(float((found[n] - wanted[n]).abs().max()) for n in wanted))
        optimizer.zero_grad()
    return {"worst": worst}


def test_any_model_trains_in_groups_of_one_rank(pool: Pool) -> None:
    for found in pool.run(_any_model, 2, zero_stage=3):
        assert found["worst"] < 1e-6


def test_fp16_loss_is_unscaled(pool: Pool) -> None:
    for found in pool.run(_any_model, 2, zero_stage=1, precision="fp16"):
        assert found["worst"] < 2e-3


def _refused(world: World) -> list[str]:
    """What is said to whom uses it wrongly; every case is refused on all ranks."""
    told = []

    def boosted(plugin: Any, **changes: Any) -> Any:
        model = _Net()
        return Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def say(action: Any) -> None:
        with pytest.raises(GulliverError) as error:
            action()
        told.append(str(error.value))

    data = [torch.zeros(n) for n in [3, 5] * 6]
    model, optimizer, *_ = boosted(DataCentricPlugin(1, verbose=False))
    say(lambda: DataCentricLoader(_one_shape(world.size + 1), data, model, optimizer))
    say(lambda: DataCentricLoader(_one_shape(2, seed=world.rank), data, model, optimizer))
    wide = DataCentricPlanner(line_costs(lambda n: n, 12, allowed=(1, 2)), [3, 5], 2, Samples(2))
    say(lambda: DataCentricLoader(wide, data, model, optimizer))
    plain, ddp, *_ = boosted(None)
    say(lambda: DataCentricLoader(_one_shape(2), data, plain, ddp))
    backward = LowLevelZeroPlugin(1, chunk_mb=1, step_in_backward=True, verbose=False)
    plain, early, *_ = boosted(backward)
    say(lambda: DataCentricLoader(_one_shape(2), data, plain, early))

    norm = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    plugin = DataCentricPlugin(1, verbose=False)
    norm, slow, *_ = Booster(plugin=plugin).boost(norm, torch.optim.SGD(norm.parameters(), lr=0.1))
    say(lambda: DataCentricLoader(_one_shape(2), data, norm, slow))
    loader = DataCentricLoader(_one_shape(2), [torch.zeros(4)] * 12, model, optimizer, shape_of=len)
    say(lambda: [list(step) for step in loader])
    optimizer.zero_grad()
    loader = DataCentricLoader(_one_shape(2), data, model, optimizer)
    step = next(iter(loader))
    say(lambda: step.backward(torch.zeros(1)))
    say(lambda: step.backward(torch.zeros(())))
    say(lambda: list(step))
    say(lambda: list(step))
    optimizer.zero_grad()
    step = next(iter(loader))
    batches: Any = iter(step)
    batch = next(batches)
    say(optimizer.step)
    say(lambda: optimizer.backward(model(batch.data).sum()))
    batches.close()
    say(lambda: list(DataCentricLoader(_one_shape(2), data, model, optimizer)))
    return told


def test_misuse_is_rejected_with_fix(pool: Pool) -> None:
    for told in pool.run(_refused, 2):
        wanted = (
            "3 ranks",
            "rank 1 has a different table",
            "intra=False",
            "boosted by DataCentricPlugin",
            "step_in_backward",
            "1 mixes the samples",
            "the table",
            "a loss of shape (1,)",
            "step.backward(loss)",
            "backward was not called",
            "each step once",
            "unequal work",
            "unequal work",
            "was not looped over",
        )
        assert len(told) == len(wanted)
        assert [w for w, line in zip(wanted, told, strict=True) if w not in line] == []


def _staged(world: World) -> list[str]:
    """What is said of steps that run through stages."""
    told, model = [], make_model("llama", wired=True)
    plugin = DataCentricPlugin(1, verbose=False, pp_size=2)
    model, optimizer, *_ = Booster(plugin=plugin).boost(model, make_optimizer(model))
    plans: Any = RandomPlans("llama", 2, 3)

    def say(action: Any) -> None:
        with pytest.raises(GulliverError) as error:
            action()
        told.append(str(error.value))

    say(lambda: DataCentricLoader(planned(2), Uneven("llama"), model, optimizer))
    step = next(iter(DataCentricLoader(plans, Uneven("llama"), model, optimizer)))
    say(step.loss)
    say(lambda: list(step))
    say(lambda: step.run(prepare=lambda batch: None))
    optimizer.zero_grad()
    other = Uneven("llama") if world.rank != 3 else Uneven("documents")
    loader = DataCentricLoader(plans, other, model, optimizer)

    def all_of_them() -> None:
        for step in loader:
            step.run()
            optimizer.step()
            optimizer.zero_grad()

    say(all_of_them)
    return told


def test_stages_refuse_a_loop_and_other_batches(pool: Pool) -> None:
    for told in pool.run(_staged, 4):
        wanted = (
            "stages=2",
            "step.loss()",
            "step.run(criterion)",
            "NoneType",
            "different batch from rank",
        )
        assert [w for w, line in zip(wanted, told, strict=True) if w not in line] == []


def _dropping(world: World) -> str:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=67, n_positions=32, n_embd=8, n_layer=2, n_head=2)
    )
    plugin = DataCentricPlugin(1, verbose=False, pp_size=2)
    with pytest.raises(GulliverError) as error:
        Booster(plugin=plugin).boost(model, make_optimizer(model))
    return str(error.value)


def test_stages_refuse_dropout(pool: Pool) -> None:
    for told in pool.run(_dropping, 2):
        assert "dropout" in told
