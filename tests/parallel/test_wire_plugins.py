"""Wire formats under plugins: runs stay near those that send all as it is, and send less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gulliver.booster import (
    Booster,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
)
from gulliver.comm import World
from gulliver.comm.watchdog import sent_bytes
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster
from gulliver.hardware.cluster import Axis, Device, Link
from gulliver.parallel.zero.gate import GradientGate
from gulliver.plan import Plan
from gulliver.precision.wire import wire_format
from tests.hybrid.hybrid_models import batch, build
from tests.pool import Pool

STEPS = 6


def _model(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width), nn.LayerNorm(width)
    )


def _data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(16, 64, generator=generator)
    return x, torch.sin(2 * x.roll(1, 1))


Run = tuple[list[float], dict[str, torch.Tensor], float]


def _trained(world: World, plugin: Any, options: dict[str, Any], steps: int = STEPS) -> Run:
    """Losses, the parameters that a checkpoint would have, and bytes sent in a step."""
    booster = Booster(plugin=plugin(**options, verbose=False))
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses, before = [], 0
    for step in range(steps):
        # The first steps are compared with unpacked gradients, and count other bytes.
        before = _sent(optimizer) if step == 3 else before
        x, target = _data(world.rank, step)
        loss = nn.functional.mse_loss(model(x), target)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    sent = (_sent(optimizer) - before) / (steps - 3)
    state = model.state_dict().items()
    weights = {n.removeprefix("module."): p.detach().clone() for n, p in state}
    return losses, weights, sent


def _sent(optimizer: Any) -> int:
    """Bytes sent so far, when gathers that are under way have been posted."""
    for sharded in getattr(optimizer, "all_chunks", ()):
        optimizer.gatherer.finish(sharded)
    return sent_bytes()


def _zero(stage: int) -> tuple[Any, dict[str, Any]]:
    return LowLevelZeroPlugin, {"stage": stage, "chunk_mb": 0.05}


REPLICAS = {
    "DDP": (TorchDDPPlugin, {}),
    **{f"stage {stage}": _zero(stage) for stage in range(4)},
    "torus": (LowLevelZeroPlugin, {"stage": 3, "chunk_mb": 0.05, "axes": {"node": 2, "local": 2}}),
    "in backward": (LowLevelZeroPlugin, {"stage": 2, "chunk_mb": 0.05, "step_in_backward": True}),
    "hybrid": (HybridParallelPlugin, {"zero_stage": 2, "chunk_mb": 0.05}),
}


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_train_as_without_a_wire_format_and_send_less(pool: Pool, name: str) -> None:
    plugin, options = REPLICAS[name]
    ranks = 4 if name == "torus" else 2
    exact = pool.run(_trained, ranks, plugin, options)
    packed = {"communication_dtype": "fp8", "force_communication_dtype": True}
    found = pool.run(_trained, ranks, plugin, options | packed)
    for (losses, weights, sent), (others, expected, whole) in zip(found, exact, strict=True):
        for loss, other in zip(losses, others, strict=True):
            assert loss == pytest.approx(other, rel=1e-2)
        begun = _model().state_dict()
        off = torch.cat([(weights[key] - expected[key]).flatten() for key in weights])
        moved = torch.cat([(expected[key] - begun[key]).flatten() for key in weights])
        assert float(off.norm()) <= 0.06 * float(moved.norm())
        for key, value in weights.items():
            assert torch.equal(value, found[0][1][key]), "ranks have other parameters"
        assert any(not torch.equal(weights[key], expected[key]) for key in weights)
        if name == "DDP":
            # As they are DDP's own messages are not counted.
            count = sum(p.numel() for p in _model().parameters())
            assert sent == pytest.approx(count * wire_format("fp8").ratio() * 4, rel=0.03)
        else:
            assert sent / whole == pytest.approx(0.254, abs=0.01)


def _stopped(world: World, plugin: Any, options: dict[str, Any]) -> str:
    try:
        _trained(world, plugin, options)
    except GulliverError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("name", ["DDP", "stage 0", "stage 2", "stage 3"])
def test_harmful_format_is_stopped_naming_parameter(pool: Pool, name: str) -> None:
    plugin, options = REPLICAS[name]
    options = options | {"communication_dtype": {"reduce": "int4:1024"}}
    options |= {"force_communication_dtype": True}
    for told in pool.run(_stopped, 2, plugin, options):
        assert told.startswith("the gradient of '"), told
        assert "communication_dtype=int4:1024" in told
        assert "error_feedback=True" in told
    for right in ({"error_feedback": True}, {"wire_gate": False}):
        assert pool.run(_stopped, 2, plugin, options | right) == ["trained"] * 2


LAST = 12


def _compared(world: World, options: dict[str, Any], least: int) -> tuple[float, float, float]:
    """Bytes of a step: of the last ones, as compared, and the mean over all steps.

    A busy machine makes the tuner try more sizes: the last steps come when it has ended. They are
    so many that a message which leaves just before or after them is little beside theirs.
    """
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2, **options, verbose=False))
    model = _model()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.05))
    before, steps, left = sent_bytes(), 0, LAST
    late = before
    while left:
        settled = steps >= least and not (optimizer.tuner and optimizer.tuner.tuning)
        if settled and left == LAST:
            late = _sent(optimizer)
        left -= settled
        x, target = _data(world.rank, steps)
        booster.backward(nn.functional.mse_loss(model(x), target), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    last, every = (_sent(optimizer) - late) / LAST, (sent_bytes() - before) / steps
    row = next(row for row in booster.compare().rows if row.kind == "sent")
    return last, row.measured, every


def test_bytes_that_are_compared_are_without_those_of_tuning_and_of_the_gate(pool: Pool) -> None:
    packed = {"communication_dtype": "int8", "force_communication_dtype": True}
    for options, least, more in (({"chunk_mb": 0.05, **packed}, 4, 1.2), ({}, 8, 0.95)):
        for last, measured, every in pool.run(_compared, 2, options, least):
            assert measured == pytest.approx(last, rel=0.05)
            assert every > more * last


class _Uneven(nn.Module):
    """Gradients are the inputs; those of 64 parameters are small beside those of 192."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.zeros(192)), nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.large * x[:192]).sum() + 0.02 * (self.small * x[192:]).sum()


def _uneven(world: World, plugin: Any, options: dict[str, Any], wire: str, bad: bool) -> str:
    options = options | {"communication_dtype": {"reduce": wire}, "verbose": False}
    booster = Booster(plugin=plugin(**options, force_communication_dtype=True))
    model = _Uneven()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(256, generator=torch.Generator().manual_seed(world.rank))
    if bad and world.rank:
        x[200] = torch.inf
    try:
        booster.backward(model(x), optimizer)
        optimizer.step()
    except GulliverError as error:
        return str(error)
    return str([p.detach().isfinite().logical_not().nonzero() for p in model.parameters()])


@pytest.mark.parametrize("name", ["DDP", "stage 0", "stage 2"])
def test_smaller_blocks_are_advised_where_large_ones_harm(pool: Pool, name: str) -> None:
    plugin, options = REPLICAS[name]
    for told in pool.run(_uneven, 2, plugin, options, "int8", False):
        assert "gradient of 'small'" in told
        assert "int8:64" in told
    assert pool.run(_uneven, 2, plugin, options, "int8:64", False)[0].startswith("[")


def test_the_gate_names_the_parameter_that_is_off() -> None:
    exact = torch.randn(256, generator=torch.Generator().manual_seed(1))
    gate = GradientGate(wire_format("int8"), False, True)
    gate.add("a", exact, exact)
    gate.add("b", exact.roll(2), exact)
    with pytest.raises(GulliverError, match=r"'b'.*format with more bits"):
        gate.end_step()
    overflowed = GradientGate(wire_format("fp8"), False, True)
    overflowed.add("a", exact * torch.inf, exact)
    with pytest.raises(GulliverError, match=r"'a'.*communication_dtype=fp8"):
        overflowed.end_step()


@pytest.mark.parametrize("name", ["DDP", "stage 2"])
def test_an_overflow_reaches_the_parameters_that_it_would_reach_as_it_is(
    pool: Pool, name: str
) -> None:
    plugin, options = REPLICAS[name]
    whole = pool.run(_uneven, 2, plugin, options, "identity", True)
    for wire in ("fp8", "fp8_e5m2", "int8", "int4"):
        assert pool.run(_uneven, 2, plugin, options, wire, True) == whole, wire
    assert "[[8]]" in whole[0]


def _shared(world: World, grid: dict[str, Any], wire: Any) -> tuple[list[float], float]:
    if wire is not None:
        grid = grid | {"communication_dtype": wire, "force_communication_dtype": True}
    model = build("llama", torch.float32, layers=4 if "pp_size" in grid else 2)
    booster = Booster(plugin=HybridParallelPlugin(**grid, verbose=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses, before = [], sent_bytes()
    for step in range(4):
        data = batch("llama", 4, step, length=32, dtype=torch.float32)
        if "pp_size" in grid:
            done = booster.execute_pipeline(iter([data]), model, None, optimizer)
            losses.append(float(done["loss"]))
        else:
            loss = model(**data).loss
            booster.backward(loss, optimizer)
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, sent_bytes() - before


RING = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}
GRIDS = {
    "tensor": {"tp_size": 2},
    "tensor, sequences cut": {"tp_size": 2, "sequence_parallelism_mode": "split_gather"},
    "tensor, ring": {"tp_size": 2, "sequence_parallelism_mode": "ring"},
    "Ulysses": {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"},
    "ring": RING,
    "pipeline": {"pp_size": 2, "num_microbatches": 2},
}


@pytest.mark.parametrize("name", GRIDS)
def test_ranks_that_share_a_model_train_as_without_a_format(pool: Pool, name: str) -> None:
    kind = name.split(",")[0].lower()
    kind = "sequence" if kind in ("ulysses", "ring") else kind
    exact = pool.run(_shared, 2, GRIDS[name], None)
    for wire in ({kind: "fp8"}, {kind: "int8:64"}):
        found = pool.run(_shared, 2, GRIDS[name], wire)
        for (losses, sent), (others, whole) in zip(found, exact, strict=True):
            assert losses != others
            assert losses == pytest.approx(others, rel=1e-2)
            assert losses == pytest.approx(found[0][0], rel=1e-3)
            assert sent < 0.9 * whole


def _links(bandwidth: float) -> Cluster:
    device = Device("d", {"float32": 1e11}, 1e10, 1 << 30)
    return Cluster("c", device, (Axis("local", 4, Link(1e-5, bandwidth)),), measured=True)


def test_a_format_stays_off_where_it_would_not_pay_and_the_plan_says_why() -> None:
    model = _model(256)
    optimizer = torch.optim.Adam(model.parameters())
    options: dict[str, Any] = {"stage": 3, "communication_dtype": "fp8"}
    slow = LowLevelZeroPlugin(**options).make_plan(model, optimizer, _links(1e7))
    assert (slow.wire.gather, slow.wire.reduce) == ("fp8", "fp8")
    assert "fp8 pays" in slow.reasons["wire.reduce"]
    assert "on the wire: gather fp8, reduce fp8" in slow.summary()
    fast = LowLevelZeroPlugin(**options).make_plan(model, optimizer, _links(1e12))
    assert fast.wire.reduce == "identity"
    assert "fp8 stays off" in fast.reasons["wire.reduce"]
    forced = LowLevelZeroPlugin(**options, force_communication_dtype=True)
    plan = forced.make_plan(model, optimizer, _links(1e12))
    assert plan.wire.reduce == "fp8"
    plain = LowLevelZeroPlugin(stage=3).make_plan(model, optimizer, _links(1e12))
    assert plan.predicted.sent < 0.8 * plain.predicted.sent
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_packing_is_in_the_predicted_step_and_memory_counts_what_packed_changes_need() -> None:
    from gulliver.plan.tree import Work

    model = _model(256)
    optimizer = torch.optim.Adam(model.parameters())
    work = Work(samples=4, forward_s=1e-3, backward_s=2e-3)
    packed: dict[str, Any] = {"communication_dtype": "fp8", "force_communication_dtype": True}
    cluster = _links(1e9)
    one, other = (
        LowLevelZeroPlugin(stage=2, **options).make_plan(model, optimizer, cluster, work=work)
        for options in ({}, packed)
    )
    count = sum(p.numel() for p in model.parameters())
    passes = 8.0 / cluster.device.memory_rate  # of an element: two passes each way
    # A quarter of the parameters is packed, all are unpacked; of gradients three quarters both.
    packing = passes * count * (1 / 4 + 1 + 2 * 3 / 4)
    less = wire_format("fp8").ratio() * one.predicted.seconds.exposed
    assert other.predicted.seconds.exposed == pytest.approx(packing + less, rel=0.03)
    shard = sum(chunk.bytes for chunk in one.zero.chunks) / 4 if one.zero else 0
    beside = other.predicted.bytes.parameters - one.predicted.bytes.parameters
    assert beside == pytest.approx(2 * shard, rel=0.01)
    off = LowLevelZeroPlugin(stage=2, communication_dtype="fp8")
    plan = off.make_plan(model, optimizer, _links(1e12), work=work)
    assert plan.predicted.bytes == one.predicted.bytes
