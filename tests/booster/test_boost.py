"""What `boost` takes and refuses: on all ranks at once, before anything is done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from gulliver.booster import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
)
from gulliver.comm import World, broadcast
from gulliver.errors import GulliverError
from gulliver.memory.buffers import Presence
from gulliver.parallel.zero import optimizer as zero_optimizer
from tests.hybrid.hybrid_models import batch, build
from tests.parallel.test_zero_loops import Lamb, Net, data
from tests.pool import Pool


def _said(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except GulliverError as error:
        return str(error)
    return ""


def _zero(stage: int, **options: Any) -> Booster:
    return Booster(LowLevelZeroPlugin(stage, chunk_mb=0.0003, verbose=False, **options))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _refusals(world: World) -> list[str]:
    """Each leaves the model and its optimizer as they were, on the ranks that are right, too."""
    model = Net()
    before = copy.deepcopy(model.state_dict())
    wide = nn.Linear(4, 3 + world.rank).double()
    frozen = Net()
    frozen.a.requires_grad_(world.rank == 0)
    extra = nn.Sequential(nn.Linear(2, 2), *([nn.ReLU(), nn.Linear(2, 2)] if world.rank else []))
    single = torch.optim.SGD(model.parameters(), lr=0.1)
    if world.rank == 1:
        single = torch.optim.LBFGS(model.parameters())
    booster = _zero(2)
    found = [
        _said(booster.boost, model, torch.optim.AdamW),
        _said(booster.boost, model, 3),
        _said(booster.boost, wide, _sgd(wide)),
        _said(booster.boost, frozen, _sgd(frozen)),
        _said(booster.boost, extra, _sgd(extra)),
        _said(booster.boost, model, single),
        _said(Booster(TorchDDPPlugin(verbose=False)).boost, wide, _sgd(wide)),
    ]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    booster.boost(model, _sgd(model))
    return found


def test_boost_errors_are_raised_on_all_ranks_before_changes(pool: Pool) -> None:
    for found in pool.run(_refusals, 2):
        assert not any("\n" in said for said in found)
        kind, number, wide, frozen, extra, single, ddp = found
        assert "AdamW'>: pass a torch.optim.Optimizer" in kind
        assert "pass a torch.optim.Optimizer" in number
        for said in (wide, ddp):
            assert "parameter 'weight' is (3, 4) torch.float64" in said
            assert "on rank 0 and (4, 4) torch.float64" in said
        assert "'a.weight'" in frozen
        assert "frozen on rank 1" in frozen
        assert "'2.weight' is not there on rank 0" in extra
        assert "cannot run LBFGS" in single


class _Pair(nn.Module):
    """Two layers whose weights are made as the test says."""

    def __init__(self, first: Tensor, second: Tensor, buffer: Tensor | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(first), nn.Parameter(second)
        self.register_buffer("table", torch.zeros(1) if buffer is None else buffer)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ self.a) @ self.b).square().sum()


def _shared_memory(world: World) -> list[str]:
    """What shares elements is refused; neighbours within one tensor train as in plain torch."""
    found = []
    plugins = [LowLevelZeroPlugin(stage, verbose=False) for stage in (0, 3)]
    for plugin in (*plugins, HybridParallelPlugin(verbose=False)):
        table = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()
        for model in (
            _Pair(table[:4], table[:4]),
            _Pair(table[:4], table[1:]),
            _Pair(table[:4], torch.eye(4).double(), table[3]),
        ):
            found.append(_said(Booster(plugin).boost, model, _sgd(model)))
    wide = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).double()
    models = _Pair(wide[:, :4], wide[:, 4:]), _Pair(wide[:, :4].clone(), wide[:, 4:].clone())
    booster = _zero(2)
    _, optimizer, *_ = booster.boost(models[0], _sgd(models[0]))
    x = torch.ones(2, 4).double()
    booster.backward(models[0](x), optimizer)
    optimizer.step()
    models[1](x).backward()
    _sgd(models[1]).step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours.data, theirs.data, rtol=1e-12, atol=1e-12)
    return found


def test_shared_memory_split_by_sharding_is_an_error(
    pool: Pool,
) -> None:
    for found in pool.run(_shared_memory, 2):
        for same, part, buffer in (found[:3], found[3:6], found[6:]):
            assert "model.b = model.a" in same
            assert "parameter 'b' shares its memory with parameter 'a'" in part
            assert "buffer 'table' shares its memory with parameter 'a'" in buffer


class _Counting(nn.Module):
    """Running statistics, a buffer of its own that forward changes, and a constant one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("latest", torch.zeros(4), persistent=False)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("expanded", torch.ones(()).expand(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.sum()
            mean = x.detach().mean().expand(4)
            self.average.data.mul_(0.9).add_(mean, alpha=0.1)  # raises no version counter
            self.latest.data.copy_(mean)
        return (self.n(self.a(x) + self.average) * self.table).square().sum() * (
            1 + self.seen.tanh()
        )


def _buffers(world: World) -> None:
    trained = []
    for plugin in (
        TorchDDPPlugin(verbose=False),
        *(LowLevelZeroPlugin(stage, verbose=False) for stage in range(4)),
        GeminiPlugin(memory_limit="1GiB", verbose=False),
        LowLevelZeroPlugin(1, verbose=False, broadcast_buffers=False),
    ):
        torch.manual_seed(0)
        plain, booster = _Counting(), Booster(plugin)
        model, optimizer, *_ = booster.boost(plain, _sgd(plain))
        for number in range(4):
            with booster.no_sync(model) if number % 2 else nullcontext():
                booster.backward(model(data(number, world.rank)), optimizer)
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        booster.backward(model(data(9, world.rank)), optimizer)
        optimizer.step()
        with torch.no_grad():
            model.eval()(data(8))  # here DDP gives its ranks the values of rank 0
        trained.append({n: t.detach().clone() for n, t in plain.state_dict().items()})
        trained[-1] |= {"seen": plain.seen, "latest": plain.latest}
    for number in range(5):
        for name, value in trained[0].items():
            torch.testing.assert_close(trained[1 + number][name], value, rtol=1e-9, atol=1e-12)
    for name in ("n.running_mean", "average", "latest"):
        assert torch.allclose(trained[-1][name], trained[0][name]) == (world.rank == 0)


def test_running_statistics_are_broadcast_from_rank_0(pool: Pool) -> None:
    pool.run(_buffers, 2)


def _sent_first(world: World) -> list[bool]:
    """Whether gathers were on their way when buffers were sent, by stage."""
    found = []
    for stage in (1, 2):
        torch.manual_seed(0)
        booster = Booster(LowLevelZeroPlugin(stage, chunk_mb=1e-4, verbose=False))
        model, optimizer, *_ = booster.boost(plain := _Counting(), _sgd(plain))

        def watched(*given: Any, optimizer: Any = optimizer) -> None:
            found.append(any(c.presence is Presence.ARRIVING for c in optimizer.chunks))
            broadcast(*given)

        with patch.object(zero_optimizer, "broadcast", watched):
            booster.backward(model(data(0, world.rank)), optimizer)
            optimizer.step()
    return found


def test_buffers_are_sent_before_gathers_as_a_step_would_wait_for_these(pool: Pool) -> None:
    assert pool.run(_sent_first, 2) == [[False] * 2] * 2


def _hybrid_optimizers(world: World) -> list[str]:
    found = []
    for plugin in ({"tp_size": 2}, {"pp_size": 2, "num_microbatches": 2}):
        for make in (torch.optim.Adafactor, Lamb):
            model = build("llama", layers=2)
            booster = Booster(HybridParallelPlugin(**plugin, verbose=False))
            found.append(_said(booster.boost, model, make(model.parameters())))
    return found


def test_whole_tensor_optimizers_are_rejected_for_shards(pool: Pool) -> None:
    for sliced, unknown, staged, elsewhere in pool.run(_hybrid_optimizers, 2):
        assert "Adafactor with tp_size=1" in sliced
        assert "ZeRO does not know whether Lamb" in unknown
        assert not staged  # a stage has its tensors whole
        assert "assume_elementwise=True" in elsewhere


def _inference(world: World) -> None:
    torch.manual_seed(0)
    twin = Net()
    plugins = [LowLevelZeroPlugin(s, chunk_mb=0.0003, verbose=False) for s in range(4)]
    for plugin in (TorchDDPPlugin(verbose=False), *plugins):
        model = copy.deepcopy(twin)
        if world.rank:
            nn.init.zeros_(model.a.weight)  # rank 0's values are taken
        booster = Booster(plugin)
        model, optimizer, *_ = booster.boost(model)
        assert optimizer is None
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(model(data(3, world.rank)), twin(data(3, world.rank)))
        for name, value in model.state_dict().items():
            assert torch.equal(value, twin.state_dict()[name])


def _hybrid_inference(world: World) -> None:
    for plugin in ({"tp_size": 2}, {"zero_stage": 3}, {"pp_size": 2, "num_microbatches": 2}):
        twin = build("llama", layers=2)
        model = copy.deepcopy(twin)
        booster = Booster(HybridParallelPlugin(**plugin, verbose=False))
        model, optimizer, *_ = booster.boost(model)
        assert optimizer is None
        inputs = batch("llama", 4)
        with torch.no_grad():
            expected = twin(**inputs).loss
            if "pp_size" in plugin:
                loss = booster.execute_pipeline(iter([inputs]), model)["loss"]
            else:
                loss = model(**inputs).loss
        assert abs(float(loss) - float(expected)) <= 1e-6


def test_model_without_optimizer_only_runs_forward(pool: Pool) -> None:
    pool.run(_inference, 2)
    pool.run(_hybrid_inference, 2)


def _halves(net: Net) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    head = [*net.a.parameters(), net.stem.bias]
    adam = torch.optim.AdamW([*net.b.parameters(), net.stem.weight], lr=1e-2)
    return torch.optim.SGD(head, lr=0.1, momentum=0.9), adam


def _two_optimizers(world: World) -> list[str]:
    said = []
    for plugin in (
        TorchDDPPlugin(find_unused_parameters=True, verbose=False),
        *(LowLevelZeroPlugin(s, chunk_mb=0.0003, verbose=False) for s in range(3)),
    ):
        torch.manual_seed(0)
        twin = Net()
        model = copy.deepcopy(twin)
        booster, plain = Booster(plugin), _halves(twin)
        first, second = _halves(model)
        boosted, first, *_ = booster.boost(model, first)
        boosted, second, *_ = booster.boost(model, second)
        for number in range(4):
            branch = "ab"[number % 2]
            one = first if number < 3 else second
            booster.backward(boosted(data(number, world.rank), branch), one)
            ranks = range(world.size)
            sum(twin(data(number, r), branch) / world.size for r in ranks).backward()
            for stepper in (first, second, *plain):
                stepper.step()
                stepper.zero_grad()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        said.append(_said(booster.save, "unused", 1, boosted, first))
    model = Net()
    booster = _zero(3)
    booster.boost(model, torch.optim.SGD(model.a.parameters(), lr=0.1))
    said.append(_said(booster.boost, model, torch.optim.SGD(model.b.parameters(), lr=0.1)))
    return said


def test_two_optimizers_train_two_parts_of_one_model(pool: Pool) -> None:
    for *saves, third in pool.run(_two_optimizers, 2):
        assert all("save_optimizer for each" in said for said in saves)
        assert "stage 2 or less" in third


class _Tables(nn.Module):
    """A rotary table, a persistent buffer and a normalization by running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        frequencies = 10000.0 ** -(torch.arange(4) / 4)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("shift", torch.full((4,), 1 / 3))

    def forward(self, x: Tensor) -> Tensor:
        angles = 4095.0 * self.frequencies
        return self.norm(self.lin(x) + self.shift) * angles.cos().to(x.dtype)


def test_precision_casts_like_hugging_face_and_keeps_buffers() -> None:
    for plugin in (LowLevelZeroPlugin, HybridParallelPlugin):
        twin = _Tables()
        model = copy.deepcopy(twin)
        booster = Booster(plugin(precision="bf16", verbose=False))
        model, optimizer, *_ = booster.boost(model, _sgd(model))
        found = model(torch.ones(3, 4) + torch.arange(3.0)[:, None])
        assert found.dtype is torch.bfloat16
        assert model.lin.weight.dtype is model.shift.dtype is torch.bfloat16
        assert torch.equal(model.frequencies, twin.frequencies)
        assert model.norm.running_mean.dtype is model.norm.weight.dtype is torch.float32
        booster.backward(found.float().square().sum(), optimizer)
        optimizer.step()


def _given_back(world: World) -> None:
    """Trains, gives the model back, trains it anew: beside a plain model on one process."""
    for plugin in (TorchDDPPlugin(verbose=False), *(_zero(s).plugin for s in (1, 2, 3))):
        torch.manual_seed(0)
        twin = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))
        twin[3].bias = twin[0].bias = nn.Parameter(torch.zeros(8))
        twin[3].weight = twin[2].weight = nn.Parameter(torch.randn(8, 8))
        twin[2].bias.requires_grad_(False)
        model = copy.deepcopy(twin.double())
        for _ in range(2):
            booster, plain = Booster(plugin), _sgd(twin)
            boosted, optimizer, *_ = booster.boost(model, _sgd(model))
            for step in range(2):
                with optimizer.backward_pass() as scale:  # as a framework calls backward
                    (boosted(_input(step, world.rank)).square().sum() * scale).backward()
                mean = [twin(_input(step, r)).square().sum() for r in range(world.size)]
                (sum(mean) / world.size).backward()  # type: ignore[union-attr]
                for stepper in (optimizer, plain):
                    stepper.step()
                    stepper.zero_grad()
            assert booster.release(boosted, optimizer) is model
            assert model[3].weight is model[2].weight
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
                assert mine.requires_grad == theirs.requires_grad
        # Nothing of the runs is left: a plain backward leaves plain gradients.
        model(_input(0, 0)).square().sum().backward()
        twin(_input(0, 0)).square().sum().backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def _input(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, dtype=torch.float64, generator=generator)


def test_released_model_is_plain_and_can_be_boosted_again(pool: Pool) -> None:
    pool.run(_given_back, 2)
