"""Planned steps under a memory limit: exact, within the budget, and by the bytes that are told."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import Booster, DataCentricLoader, DataCentricPlugin, GeminiPlugin
from gulliver.booster import limited as _limited
from gulliver.booster import plugins as _plan_plugin
from gulliver.booster import plugins as _plugins
from gulliver.comm import World
from gulliver.data import DataCentricPlanner, Samples
from gulliver.errors import GulliverError
from gulliver.memory.host import HostStore
from gulliver.plan import Plan
from tests.data_centric.data_centric_costs import line_costs
from tests.data_centric.data_centric_runs import KINDS, Case, errors
from tests.memory.test_memory_stores import LateCopier
from tests.pool import Pool

pytest.importorskip("transformers")

CASES = {
    1: [Case("llama", 3, clip=0.5, steps=1)],
    2: [Case("documents", 3, by_tokens=True, steps=2, seed=1), Case("llama", 3, steps=1, stages=2)],
    4: [Case("llama", 3, clip=0.5, steps=2, tensor=2)],
}
FULL = [
    Case(family, 3, 0.5, family == "documents", mode, seed=seed, tensor=tensor)
    for family in KINDS
    for mode, tensor, seed in (
        ("all_to_all", 1, 0),
        ("ring_attn", 1, 1),
        *((("all_to_all", 2, 2), ("all_to_all", 4, 3)) if family != "documents" else ()),
    )
]
FULL += [
    Case(family, 3, 0.5, seed=4, tensor=tensor, stages=2)
    for family in ("llama", "stdit3")
    for tensor in (1, 2)
]
"""Every one of them for 20 steps."""
WIDTH, DEPTH, STEPS, BATCHES = 64, 6, 4, 2


def _limited_cases(world: World, cases: list[Case], folder: str) -> list[dict[str, float]]:
    return [errors(world, replace(case, disk=folder)) for case in cases]


def _assert_exact(found: list[list[dict[str, float]]], cases: list[Case]) -> float:
    """Asserts what each rank has found of each case; returns how often a rank had no work."""
    idle = 0.0
    for rank, ofs in enumerate(found):
        for case, of in zip(cases, ofs, strict=True):
            assert max(of["gradients"], of["losses"], of["weights"]) <= 1e-10, (rank, case, of)
            assert of["over"] <= 0, (rank, case, of)
            assert of["evictions"] > 0, (rank, case, of)
            idle += of["idle"]
    return idle


@pytest.mark.deadline(120)
@pytest.mark.parametrize("ranks", CASES)
def test_gradients_at_the_least_limit_are_those_of_one_process(
    pool: Pool, tmp_path: Path, ranks: int
) -> None:
    found = pool.run(_limited_cases, ranks, CASES[ranks], str(tmp_path), deadline_s=110)
    idle = _assert_exact(found, CASES[ranks])
    assert ranks != 2 or idle, "some rank had nothing to do in some step"
    assert not list(tmp_path.iterdir()), "nothing is left on the disk"


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)))


def _sample(number: int) -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))


def _plan(limit: Any, folder: str, precision: str | None = None, sampled: bool = True) -> Plan:
    model = _net()
    plugin = DataCentricPlugin(
        memory_limit=limit,
        disk=f"{folder}:64MiB",
        chunk_mb=0.02,
        precision=precision,
        verbose=False,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    return plugin.make_plan(model, optimizer, sample=_sample(0)[None] if sampled else None)


def _boosted(plan: Plan) -> tuple[Booster, Any, Any]:
    booster, model = Booster(plan=plan, verbose=False), _net()
    with patch.object(_limited, "Footprint", side_effect=OSError):
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    return booster, model, optimizer


def _loader(world: World, model: Any, optimizer: Any) -> DataCentricLoader:
    """Steps in which every rank has as many micro-batches of one sample."""
    many = world.size * BATCHES
    costs = line_costs(lambda n: n, 3)
    planner = DataCentricPlanner(costs, [3] * (many * STEPS), world.size, Samples(many))
    data = [_sample(number) for number in range(many * STEPS)]
    return DataCentricLoader(planner, data, model, optimizer)


def _moved(world: World, folder: str, precision: str | None, share: float) -> dict[str, Any]:
    """What a plan says of bytes, and what is measured, at a limit a share above the least."""
    roomy = _plan("1GiB", folder, precision).predicted.moved
    assert roomy is not None
    plan = _plan(int(roomy.minimum * (1 + share)), folder, precision)
    booster, model, optimizer = _boosted(plan)
    for step in _loader(world, model, optimizer):
        for batch in step:
            step.backward(model(batch.data.to(model[0][0].weight.dtype)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    moved, compared = plan.predicted.moved, booster.compare()
    assert moved is not None
    pairs = {
        "read": (compared["read"].measured, moved.read),
        "written": (compared["written"].measured, moved.written),
        "total": (compared["total"].measured, plan.predicted.bytes.total),
        "sent": (compared["sent"].measured, compared["sent"].predicted),
        "told": (compared["total"].measured, sum(optimizer.memory().values())),
    }
    booster.close()
    return pairs


@pytest.mark.parametrize(("precision", "share"), [(None, 0.05), ("bf16", 0.0)])
def test_step_traffic_and_memory_match_plan(
    pool: Pool, tmp_path: Path, precision: str | None, share: float
) -> None:
    for pairs in pool.run(_moved, 2, str(tmp_path), precision, share):
        for name, (measured, told) in pairs.items():
            exact = name in ("read", "written")
            assert measured == (told if exact else pytest.approx(told, rel=0.05)), (name, pairs)


def _held(world: World, stages: list[int]) -> list[tuple[Any, Any]]:
    """Bytes that each stage holds without a limit, as measured and predicted."""
    found = list[tuple[Any, Any]]()
    for stage in stages:
        plugin = DataCentricPlugin(stage, chunk_mb=0.02, verbose=False)
        optimizer = torch.optim.AdamW((model := _net()).parameters())
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(model, optimizer)
        for step in _loader(world, model, optimizer):
            for batch in step:
                step.backward(model(batch.data).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        total = booster.compare()["total"]
        found.append((total.measured, total.predicted))
    return found


def test_predicted_bytes_include_full_gradients_and_parameters(pool: Pool) -> None:
    for found in pool.run(_held, 2, [2, 3]):
        for measured, predicted in found:
            assert measured == predicted


def _on_the_host(world: World) -> tuple[float, int]:
    """Largest difference of weights to a run without a limit, with state in host memory."""
    plan = _plan("1GiB", ".", sampled=False)
    assert plan.predicted.moved is not None
    text = _plan(plan.predicted.moved.minimum, ".", sampled=False).to_yaml()
    text = re.sub(r"(?m)^( +)disk: \S+$", r"\1disk: null", text).replace("host: 0", "host: 64 MiB")
    free = DataCentricPlugin(3, chunk_mb=0.02, verbose=False)
    plans, weights, evictions = (Plan.from_yaml(text), None), list[dict[str, Tensor]](), 0
    with (
        patch.object(_limited, "HostStore", lambda n, device: HostStore(n, device, LateCopier())),
        patch.object(_plan_plugin, "check_plan"),  # refuses what is for GPUs on a CPU
        patch.object(_plugins, "check_plan"),
    ):
        for one in plans:
            optimizer = torch.optim.AdamW((model := _net()).parameters())
            booster = (
                Booster(free, verbose=False) if one is None else Booster(plan=one, verbose=False)
            )
            with patch.object(_limited, "Footprint", side_effect=OSError):
                model, optimizer, *_ = booster.boost(model, optimizer)
            for step in _loader(world, model, optimizer):
                for batch in step:
                    step.backward(model(batch.data).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            weights.append({n: v.clone() for n, v in model.state_dict().items()})
            evictions += 0 if one is None else optimizer.shards.manager.stats()["evictions"]
    first, second = weights
    return max(float((first[n] - second[n]).abs().max()) for n in first), evictions


def test_host_tier_is_used(pool: Pool) -> None:
    for error, evictions in pool.run(_on_the_host, 2):
        assert error <= 1e-6
        assert evictions > 0


def _doubled(module: nn.Module, _: Any) -> None:
    weight: Any = module[0].weight  # type: ignore[index]
    weight.data.mul_(2)


def _inside(world: World, folder: str) -> dict[str, Any]:
    """What a loop may do with parameters in a step of its rank, and what not."""
    booster, model, optimizer = _boosted(_plan("2MiB", folder, sampled=False))
    found, wanted = dict[str, Any](), _net().state_dict()
    step = next(iter(_loader(world, model, optimizer)))
    batches: Any = iter(step)
    batch = next(batches)
    if world.rank == 0:  # the others take no part
        found["read"] = torch.equal(model[3][0].weight.detach(), wanted["3.0.weight"])
    with torch.no_grad():
        model[3][0].weight.mul_(2)
    with pytest.raises(GulliverError) as written:
        step.backward(model(batch.data).square().mean())
    found["written"] = str(written.value)
    batches.close()
    with pytest.raises(GulliverError) as left:
        optimizer.step()
    found["left"] = str(left.value)
    optimizer.zero_grad()
    hook = model[3].register_forward_pre_hook(_doubled)
    step = next(iter(_loader(world, model, optimizer)))
    batches = iter(step)
    batch = next(batches)
    with pytest.raises(GulliverError) as written:
        step.backward(model(batch.data).square().mean())
    found["in forward"] = str(written.value)
    batches.close()
    hook.remove()
    optimizer.zero_grad()
    with torch.no_grad():
        found["after"] = float(model(_sample(0)).square().mean())
        found["wanted"] = float(_net()(_sample(0)).square().mean())
    ordinary = GeminiPlugin("2MiB", disk=f"{folder}:64MiB", chunk_mb=0.02, verbose=False)
    other = _net()
    other, second, *_ = Booster(ordinary).boost(other, torch.optim.AdamW(other.parameters()))
    with pytest.raises(GulliverError) as equal:
        _loader(world, other, second)
    found["equal"] = str(equal.value)
    booster.close()
    return found


def test_parameters_are_read_by_one_rank_and_written_by_none_inside_a_step(
    pool: Pool, tmp_path: Path
) -> None:
    for rank, found in enumerate(pool.run(_inside, 2, str(tmp_path))):
        assert rank or found["read"]
        assert "write parameters on all ranks" in found["written"]
        assert "write parameters on all ranks" in found["in forward"]
        assert "zero_grad()" in found["left"]
        assert found["after"] == pytest.approx(found["wanted"], rel=1e-6)
        assert "DataCentricPlugin(memory_limit=...)" in found["equal"]


def test_invalid_limits_are_rejected() -> None:
    with pytest.raises(GulliverError, match=r"stage 1.*zero_stage=3"):
        DataCentricPlugin(1, memory_limit="1GiB")
    with pytest.raises(GulliverError, match="memory_limit"):
        DataCentricPlugin(disk=".:1GiB")
    plugin = DataCentricPlugin(memory_limit="100KiB", disk=".:64MiB", verbose=False)
    model = _net()
    with pytest.raises(GulliverError, match="100\\.0 KiB"):
        plugin.make_plan(model, torch.optim.AdamW(model.parameters()))
