"""Parameters of ZeRO are right for whoever reads or writes them, whenever they are used."""

from __future__ import annotations

import copy
import random
import statistics
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.comm import World
from gulliver.comm.watchdog import sent_bytes
from gulliver.errors import GulliverError
from gulliver.memory.buffers import Presence
from gulliver.parallel.zero.checkpoint import relayout
from gulliver.parallel.zero.tuner import MOST_SIZES, best_size, next_size
from tests.pool import Pool

STAGES = (0, 1, 2, 3)


class Odd(nn.Module):
    """A tied head by function, a layer called twice, frozen and plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.twice = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("shift", torch.ones(6))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.twice(self.frozen(self.embed(ids)))))
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.shift
        return F.linear(x, self.embed.weight)


def data(number: int, rank: int) -> Tensor:
    return torch.randint(9, (4,), generator=torch.Generator().manual_seed(50 * number + rank))


def pair(stage: int, **options: object) -> tuple[Booster, Odd, object, Odd, torch.optim.Optimizer]:
    torch.manual_seed(0)
    twin = Odd()
    model = copy.deepcopy(twin)
    booster = Booster(LowLevelZeroPlugin(stage, chunk_mb=0.0004, verbose=False, **options))
    _, optimizer, *_ = booster.boost(model, torch.optim.AdamW(trained(model), lr=1e-2))
    return booster, model, optimizer, twin, torch.optim.AdamW(trained(twin), lr=1e-2)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def step(world: World, number: int, booster, model, optimizer, twin, plain) -> None:
    booster.backward(model(data(number, world.rank)).square().mean(), optimizer)
    sum(twin(data(number, r)).square().mean() / world.size for r in range(world.size)).backward()
    for stepper in (optimizer, plain):
        stepper.step()
        stepper.zero_grad()


def equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def _readers(world: World, stage: int) -> None:
    booster, model, optimizer, twin, plain = pair(stage)
    held = list(model.parameters())
    for number in range(3):
        if number == 1:
            other = {k: v + 0.25 for k, v in twin.state_dict().items()}
            model.load_state_dict(other)
            twin.load_state_dict(other)
        if number == 2:
            with torch.no_grad():
                for net in (model, twin):
                    net.layers[2].weight.mul_(0.5)
                    net.twice.bias[1:3] = 0.125
                    net.frozen.weight.add_(1.0)
        step(world, number, booster, model, optimizer, twin, plain)
        state, expected = model.state_dict(), twin.state_dict()
        assert list(state) == list(expected)
        for name in state:
            equal(state[name], expected[name])
        for mine, theirs in zip(held, twin.parameters(), strict=True):
            with torch.no_grad():
                equal(0.5 * mine, 0.5 * theirs)
        equal(model.layers[1](torch.ones(2, 6).double()), twin.layers[1](torch.ones(2, 6).double()))
        with torch.no_grad():
            equal(model(data(9, 0)), twin(data(9, 0)))
        equal(copy.deepcopy(model)(data(8, 0)), twin(data(8, 0)))


@pytest.mark.parametrize("stage", STAGES)
def test_every_reader_sees_the_values_after_the_step_and_what_was_written(
    pool: Pool, stage: int
) -> None:
    pool.run(_readers, 2, stage)


def _data_writers(world: World, stage: int) -> None:
    """Numbers of few bits, so that 16 bits and float32 copies compute what float64 does."""
    for precision in (None, "bf16"):
        torch.manual_seed(0)
        twin = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).double()
        for p in twin.parameters():
            p.data = torch.randint(-8, 8, p.shape).double() / 8
        model = copy.deepcopy(twin).float()
        plugin = LowLevelZeroPlugin(stage, 0.00005, precision, verbose=False)
        booster = Booster(plugin)
        _, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=2**-4))
        plain = torch.optim.SGD(twin.parameters(), lr=2**-4)
        kept: list[Tensor] = []
        for number in range(5):
            for net, stepper in ((model, optimizer), (twin, plain)):
                sum(p.sum() for p in net.parameters()).backward()
                stepper.step()
                stepper.zero_grad()
                if number == 1:
                    for p in net.parameters():
                        p.data.clamp_(-0.5, 0.5)
                if number == 2:
                    held = [p.data for p in net.parameters()]
                    for value in held:
                        value.view(-1)[::2] = 0.125
                    kept += held if net is model else []
                if number == 3:
                    whole = booster.full_parameters(net) if net is model else nullcontext()
                    with whole:
                        views = [net[1].bias.data, net[0].weight.detach()[1]]
                        views[0].copy_(torch.full((5,), 0.25))
                        views[1].fill_(-0.125)
            state = model.state_dict()
            for name, value in twin.state_dict().items():
                equal(state[name].double(), value)
        del state
        model[0].weight.detach()  # another chunk comes, so the last one leaves
        kept[-1].zero_()
        if stage == 3:
            with pytest.raises(GulliverError, match="full_parameters"):
                optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_writes_through_data_are_trained_on(pool: Pool, stage: int) -> None:
    pool.run(_data_writers, 2, stage)


def _gradient_on_one_rank(world: World) -> str:
    booster, model, optimizer, *_ = pair(2)
    booster.backward(model(data(0, world.rank)).mean(), optimizer)
    if world.rank == 1:
        model.twice.bias.grad = torch.ones(6).double()
    with pytest.raises(GulliverError) as caught:
        optimizer.step()
    return str(caught.value)


def test_a_gradient_set_on_one_rank_is_refused_on_all(pool: Pool) -> None:
    first, second = pool.run(_gradient_on_one_rank, 2)
    assert "a gradient on another rank was set" in first
    assert "the gradient of 'twice.bias' was set" in second


def _two_calls(world: World, stage: int) -> None:
    """Two forwards before one backward, a regulariser on all parameters, a submodule's own loss."""
    booster, model, optimizer, twin, plain = pair(stage)
    for number in range(3):
        total = []
        for net, ranks in ((model, [world.rank]), (twin, range(world.size))):
            parts = []
            for rank in ranks:
                loss = net(data(number, rank)).square().mean() + net(data(7, rank)).mean()
                loss = loss + net.layers[0](torch.ones(1, 6).double()).sum()
                parts.append(loss + 1e-2 * sum(p.square().sum() for p in trained(net)))
            total.append(sum(parts) / len(parts))
        booster.backward(total[0], optimizer)
        total[1].backward()
        for stepper in (optimizer, plain):
            stepper.step()
            stepper.zero_grad()
    for mine, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        equal(mine, theirs)


@pytest.mark.parametrize("stage", STAGES)
def test_losses_of_several_calls_and_of_the_parameters_themselves(pool: Pool, stage: int) -> None:
    pool.run(_two_calls, 2, stage)


def _gathered(world: World) -> tuple[int, int, int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(20)))
    booster = Booster(LowLevelZeroPlugin(3, chunk_mb=0.0011, gather_ahead=2, verbose=False))
    _, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    most, started, start = 0, [], optimizer.gatherer.start
    optimizer.gatherer.start = lambda chunk: (started.append(chunk), start(chunk))

    def count(*_: object) -> None:
        nonlocal most
        most = max(most, sum(c.presence is not Presence.ABSENT for c in optimizer.all_chunks))

    for layer in model:
        layer.register_forward_hook(count)
        layer.weight.register_post_accumulate_grad_hook(count)
    for _ in range(2):
        started.clear()
        booster.backward(model(torch.ones(2, 16)).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    held = sum(c.chunk.master_shard.nbytes for c in optimizer.all_chunks)
    return len(optimizer.all_chunks), most, held, len(started)


def test_stage_3_holds_its_shard_and_a_bounded_number_of_chunks(pool: Pool) -> None:
    for chunks, most, held, gathers in pool.run(_gathered, 2):
        assert chunks == 20
        assert gathers == 2 * 20 - 3  # the last of a forward stay for the backward
        assert 3 <= most <= 5
        assert held == 20 * 288 * 4 // 2  # 16 x 16 + 16, and what makes two parts of 16s


def _old_graph(world: World) -> None:
    booster, model, optimizer, twin, plain = pair(3)
    old = model(data(0, 0)).sum()
    step(world, 0, booster, model, optimizer, twin, plain)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        booster.backward(old, optimizer)


def test_a_graph_from_before_a_step_is_refused_by_stage_3_too(pool: Pool) -> None:
    pool.run(_old_graph, 2)


def _run_of(world: World, stage: int, chunk_mb: float) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Odd().float()
    booster = Booster(LowLevelZeroPlugin(stage, chunk_mb=chunk_mb, verbose=False))
    _, optimizer, *_ = booster.boost(model, torch.optim.AdamW(trained(model), lr=1e-2))
    for number in range(5):
        booster.backward(model(data(number, world.rank)).square().mean(), optimizer)
        optimizer.clip_grad_by_value(0.5)
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            names = [optimizer.names[p] for p in trained(model)]
            relayout(optimizer.shards, names[::-1], int(chunk_mb * 2**20) * 3)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("stage", STAGES)
def test_the_size_of_chunks_changes_no_bit(pool: Pool, stage: int) -> None:
    small = pool.run(_run_of, 3, stage, 0.0002)
    large = pool.run(_run_of, 3, stage, 1.0)
    for a, b in zip(small, large, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def _tuned(world: World, folder: str, again: bool) -> tuple[str, dict[int, float], bool]:
    torch.manual_seed(0)
    twin = Odd()
    model = copy.deepcopy(twin)
    plugin = LowLevelZeroPlugin(
        2, chunk_mb="again" if again else "auto", folder=folder, verbose=False
    )
    booster = Booster(plugin)
    _, optimizer, *_ = booster.boost(model, torch.optim.AdamW(trained(model), lr=1e-2))
    plain = torch.optim.AdamW(trained(twin), lr=1e-2)
    for number in range(8):
        step(world, number, booster, model, optimizer, twin, plain)
    for mine, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        equal(mine, theirs)
    assert optimizer.tuner.stage.name == "DONE"
    result = optimizer.tuner.result
    assert optimizer.shards.chunk_bytes == result.chosen
    return ",".join(result.order), result.measured, result.reused


def test_tuning_finds_the_order_of_use_tries_sizes_and_is_kept(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(_tuned, 2, str(tmp_path), True)
    order, measured, reused = found[0]
    assert order.startswith("embed.weight,") or order.index("embed") < order.index("layers.0")
    assert order.index("twice") < order.index("layers.0") < order.index("layers.3")
    assert measured
    assert not reused
    assert found[1] == found[0]
    assert (tmp_path / "chunks.json").exists()
    assert pool.run(_tuned, 2, str(tmp_path), False)[0][2]


def test_tuned_size_is_within_5_percent_of_the_best_of_noisy_steps() -> None:
    """Steps as chunk sizes make them, with noise of 5 %; of each size the fastest of 3 is taken."""
    draw, regrets = random.Random(0), []
    for number in range(400):
        per_chunk, hidden = 10 ** draw.uniform(-4.5, -2), 10 ** draw.uniform(-2, -0.5)

        def true(size: int, own: float = per_chunk, last: float = hidden) -> float:
            return 0.5 + own * 2**25 / size + last * size / 2**25

        measured = dict[int, float]()
        while (size := next_size(measured, 2**22, 2**26)) is not None:
            measured[size] = true(size) * (1 + min(draw.expovariate(20) for _ in range(3)))
        assert len(measured) <= MOST_SIZES, number
        least = min(true(2**n) for n in range(18, 27))
        regrets.append(true(best_size(measured)) / least - 1)
    assert statistics.quantiles(regrets, n=20)[-1] < 0.05
    assert statistics.median(regrets) < 0.005


def _tuned_by(world: World, loop: str, stage: int) -> None:
    """Trains by a loop in which backwards do not go through the optimizers that are tuned."""
    torch.manual_seed(0)
    twin = Odd()
    model = copy.deepcopy(twin)
    booster = Booster(LowLevelZeroPlugin(stage, chunk_mb="again", verbose=False))
    parts = (trained(model)[:1], trained(model)[1:]) if "two" in loop else (trained(model),)
    optimizers: list = [booster.boost(model, torch.optim.AdamW(part, lr=1e-2))[1] for part in parts]
    plain = torch.optim.AdamW(trained(twin), lr=1e-2)
    for number in range(10):
        loss = model(data(number, world.rank)).square().mean()
        if loop == "zero_grad before backward":
            optimizers[0].zero_grad()
        if loop == "loss.backward":
            loss.backward()
        else:
            booster.backward(loss, optimizers[number % 2 if loop == "two in turns" else 0])
        ranks = range(world.size)
        plain.zero_grad()
        sum(twin(data(number, r)).square().mean() / world.size for r in ranks).backward()
        for stepper in (*optimizers, plain):
            stepper.step()
        if loop != "zero_grad before backward":
            for optimizer in optimizers:
                optimizer.zero_grad()
    for mine, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        equal(mine, theirs)
    for optimizer in optimizers:
        assert optimizer.tuner.stage.name == "DONE"
        assert optimizer.tuner.result.measured


def _tuned_by_all(world: World) -> None:
    for stage in (0, 2):
        for loop in ("two", "two in turns"):
            _tuned_by(world, loop, stage)
    for stage in (1, 3):
        for loop in ("loss.backward", "zero_grad before backward"):
            _tuned_by(world, loop, stage)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_tuning_copes_with_backwards_of_others_and_is_exact(pool: Pool, size: int) -> None:
    pool.run(_tuned_by_all, size)


def _overflow(world: World) -> tuple[int, float, bool]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    booster = Booster(LowLevelZeroPlugin(2, chunk_mb=1.0, precision="fp16", verbose=False))
    _, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    before = model.weight.detach().clone()
    scale = optimizer.scaler.scale
    booster.backward(model(torch.full((2, 4), 1e4)).float().sum(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(model.weight, before)
    assert optimizer.scaler.scale == scale / 2
    for _ in range(30):
        booster.backward(model(torch.ones(2, 4)).float().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    equal(model.weight.detach().double(), (before.float() - 30e-3).half().double())
    return optimizer.skipped, optimizer.scaler.scale, True


def test_fp16_skips_a_step_that_overflowed_and_trains_on(pool: Pool) -> None:
    for skipped, scale, _ in pool.run(_overflow, 2):
        assert skipped >= 1
        assert scale < 2**16


def _boosted_twice(world: World) -> str:
    booster, model, *_ = pair(1)
    with pytest.raises(GulliverError) as caught:
        booster.boost(model, torch.optim.AdamW(trained(model)))
    return str(caught.value)


def test_a_model_is_boosted_once(pool: Pool) -> None:
    assert "another boosted optimizer" in pool.run(_boosted_twice, 2)[0]


class _Backwards(nn.Module):
    """Layers that are used in another order than that of their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for number in (1, 0, 3, 2, 5, 4, 7, 6):
            x = torch.tanh(self.layers[number](x))
        return x


def _sent(world: World, overlap: bool) -> int:
    booster = Booster(LowLevelZeroPlugin(3, chunk_mb=0.01, overlap=overlap, verbose=False))
    model = _Backwards()
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    before = sent_bytes()
    with torch.no_grad():
        model(torch.ones(2, 64))
    return sent_bytes() - before


def test_a_forward_gathers_each_chunk_once_with_overlap_and_without(pool: Pool) -> None:
    whole = 8 * (64 * 64 + 64) * 4
    for overlap in (True, False):
        for sent in pool.run(_sent, 2, overlap):
            assert whole / 2 <= sent < 0.6 * whole, (overlap, sent, whole)


def _evaluated_first(world: World) -> list[bool]:
    """Whether models that were evaluated in either mode before they trained are the same."""
    alike = []
    for stage in (1, 3):
        values = []
        for mode in (torch.no_grad, torch.inference_mode):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
            plugin = LowLevelZeroPlugin(stage, chunk_mb=0.02, verbose=False)
            booster = Booster(plugin=plugin)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer, *_ = booster.boost(model, optimizer)
            for step in range(2):
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
                with mode():
                    model(x)
                booster.backward(model(x).square().mean(), optimizer)
                optimizer.step()
                optimizer.zero_grad()
            values.append([value.clone() for value in model.state_dict().values()])
        alike.append(all(map(torch.equal, *values)))
    return alike


def test_what_was_made_in_inference_mode_serves_training(pool: Pool) -> None:
    assert pool.run(_evaluated_first, 2) == [[True, True]] * 2
