"""The one call: its contract, its mistakes, models and schedulers on disk, data loaders."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gulliver.booster import Booster, LowLevelZeroPlugin, TorchDDPPlugin
from gulliver.comm import World
from gulliver.comm.world import adopt_world
from gulliver.errors import GulliverError
from tests.pool import Pool


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    adopt_world(World(0, 1, 0, torch.device("cpu")))
    yield
    adopt_world(None)


class Tied(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 9, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.norm(self.embed(ids)))


def boost(plugin: Any = None, model: nn.Module | None = None, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = model or nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = Booster(plugin or LowLevelZeroPlugin(verbose=False), **kwargs)
    return booster, *booster.boost(model, optimizer)[:2]


def test_boost_returns_its_five_arguments_in_order() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    criterion, loader = nn.MSELoss(), [1, 2]
    booster = Booster(LowLevelZeroPlugin(verbose=False))
    found = booster.boost(model, optimizer, criterion, loader, scheduler)
    assert found[0] is model
    assert isinstance(found[1], torch.optim.Optimizer)
    assert found[1].param_groups is optimizer.param_groups
    assert found[2:] == (criterion, loader, scheduler)


def test_no_plugin_in_one_process_is_the_plain_loop() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    booster = Booster(TorchDDPPlugin(verbose=False))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(Booster().plugin, TorchDDPPlugin)
    with booster.no_sync(model):
        booster.backward(model(torch.ones(1, 3)).sum(), optimizer)
    optimizer.step()
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(torch.ones(1, 3)).sum().backward()
    other.step()
    assert torch.equal(model.weight, twin.weight)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LowLevelZeroPlugin(stagee=1), "did you mean 'stage'"),
        (lambda: Booster(mixed_precision="fp16"), "did you mean 'bf16'"),
        (lambda: Booster(plugin="zero"), r"LowLevelZeroPlugin\(\.\.\.\)"),
        (lambda: Booster().plan, "call boost first"),
        (lambda: Booster().backward(torch.ones(()), torch.optim.SGD([torch.ones(1)])), "boosted"),
        (lambda: boost()[0].boost(*boost()[1:]), "already boosted"),
        (lambda: boost(model=nn.Linear(3, 2, device="meta")), "is on meta"),
        (lambda: boost()[2].step(lambda: 0.0), "closures"),
    ],
)
def test_misuse_is_one_line_error_with_fix(make: Any, message: str) -> None:
    with pytest.raises(GulliverError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def _print_plan(world: World) -> str:
    import contextlib
    import io

    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        booster, *_ = boost(LowLevelZeroPlugin())
    return f"{text.getvalue().count('plan:')} {booster.plan.to_yaml()}"


def test_only_the_main_rank_prints_and_all_have_the_same_plan(pool: Pool) -> None:
    first, second = pool.run(_print_plan, 2)
    assert (first[0], second[0]) == ("1", "0")
    assert first[1:] == second[1:]


def test_max_norm_of_the_plugin_clips_every_step() -> None:
    torch.manual_seed(0)
    twin = nn.Linear(3, 2)
    booster, model, optimizer = boost(LowLevelZeroPlugin(max_norm=0.1, verbose=False))
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        x = torch.full((2, 3), step + 1.0)
        booster.backward(model(x).square().sum(), optimizer)
        twin(x).square().sum().backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        for stepper in (optimizer, other):
            stepper.step()
            stepper.zero_grad()
        torch.testing.assert_close(optimizer.grad_norm, expected.double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-6, atol=1e-7)


# Mixed precision


def test_bf16_runs_calls_under_autocast_and_keeps_parameters_in_float32() -> None:
    torch.manual_seed(0)
    twin = nn.Linear(3, 2)
    booster, model, optimizer = boost(mixed_precision="bf16")
    x = torch.randn(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        expected = twin(x)
    found = model(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    booster.backward(found.float().sum(), optimizer)
    expected.float().sum().backward()
    assert torch.equal(optimizer.full_gradients()["weight"], twin.weight.grad)
    assert model.weight.dtype == torch.float32
    assert booster.plan.mixed_precision == "bf16"


def test_a_copy_of_a_bf16_model_computes_with_its_own_weights() -> None:
    _, model, _ = boost(mixed_precision="bf16")
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
    assert float(average(torch.ones(1, 3)).abs().sum()) == 0
    assert average(torch.ones(1, 3)).dtype == torch.bfloat16


def test_autocast_is_left_when_the_forward_fails() -> None:
    _, model, _ = boost(mixed_precision="bf16")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(1, 5))
        assert not torch.is_autocast_enabled("cpu")
    assert model(torch.ones(1, 3)).dtype == torch.bfloat16


# Models on disk


def _save_tied(world: World, path: Path, plugin: Any) -> dict[str, Tensor]:
    booster, model, optimizer = boost(plugin, Tied())
    booster.backward(model(torch.arange(6) + world.rank).sum(), optimizer)
    optimizer.step()
    booster.save_model(model, path)
    plain = model.module if hasattr(model, "module") else model
    return {name: value.clone() for name, value in plain.state_dict().items()}


@pytest.mark.parametrize(
    "plugin", [LowLevelZeroPlugin(stage=2, verbose=False), TorchDDPPlugin(verbose=False)]
)
def test_a_model_is_saved_under_its_own_names_and_loads_anywhere(
    pool: Pool, tmp_path: Path, plugin: Any
) -> None:
    path = tmp_path / "model.safetensors"
    state = pool.run(_save_tied, 2, path, plugin)[0]
    assert list(tmp_path.iterdir()) == [path]
    found = load_file(path)
    assert found.keys() == Tied().state_dict().keys()
    assert all(torch.equal(found[name], state[name]) for name in found)
    booster, model, _ = boost(model=Tied())
    assert booster.load_model(model, path) == []
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())
    assert model.last.weight is model.embed.weight


def test_a_loaded_model_is_what_the_optimizer_steps(tmp_path: Path) -> None:
    booster, model, optimizer = boost()
    booster.save_model(model, tmp_path / "m")
    expected = model.weight.detach().clone() - 0.1
    booster.backward(model(torch.ones(1, 3)).sum() * 5, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    booster.load_model(model, tmp_path / "m")
    booster.backward(model(torch.ones(1, 3)).sum(), optimizer)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-6, atol=1e-7)


def _wrong_shape(path: Path) -> None:
    booster, model, _ = boost(model=Tied(5))
    booster.save_model(model, path)


def _other_names(path: Path) -> None:
    booster, model, _ = boost(model=nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))))
    booster.save_model(model, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.unlink(), "does not exist"),
        (lambda p: p.write_bytes(p.read_bytes()[:-10]), "truncated"),
        (lambda p: torch.save({"embed.weight": torch.ones(2)}, p), "truncated"),
        (_wrong_shape, r"of other shapes.*\(9, 5\) there, \(9, 4\) here"),
        (
            _other_names,
            r"7 missing from it \(embed.weight, .*, \.\.\.\); 8 left over \(0.bias, .*\.\.\.\)",
        ),
    ],
)
def test_a_file_of_something_else_is_one_clear_line_and_changes_nothing(
    spoil: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    booster, model, _ = boost(model=Tied())
    booster.save_model(model, path)
    spoil(path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(GulliverError, match=message) as caught:
        booster.load_model(model, path)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())


def test_non_strict_load_returns_mismatches(tmp_path: Path) -> None:
    booster, model, _ = boost(model=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    booster.save_model(model, tmp_path / "m")
    smaller = nn.Sequential(nn.Linear(2, 2))
    assert booster.load_model(smaller, tmp_path / "m", strict=False) == ["1.bias", "1.weight"]
    assert torch.equal(smaller[0].weight, model[0].weight)
    with pytest.raises(GulliverError, match="5 missing"):
        booster.load_model(nn.BatchNorm1d(2), tmp_path / "m", strict=False)


# Schedulers on disk

LR = torch.optim.lr_scheduler
SCHEDULERS = {
    "lambda": lambda o: LR.LambdaLR(o, lambda k: 1 / (k + 1)),
    "cosine": lambda o: LR.CosineAnnealingLR(o, 9),
    "sequence": lambda o: LR.SequentialLR(
        o, [LR.LinearLR(o, 0.1, total_iters=3), LR.LambdaLR(o, lambda k: 0.9**k)], [3]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_scheduler_state_is_restored(kind: str, tmp_path: Path) -> None:
    rates: list[list[float]] = []
    for resumed in (False, True):
        booster, _, optimizer = boost()
        scheduler = SCHEDULERS[kind](optimizer)
        rates.append([])
        if resumed:
            booster.load_optimizer(optimizer, tmp_path / "o")
            booster.load_lr_scheduler(scheduler, tmp_path / "s.json")
        for step in range(4 if resumed else 0, 8):
            if step == 4 and not resumed:
                booster.save_lr_scheduler(scheduler, tmp_path / "s.json")
                booster.save_optimizer(optimizer, tmp_path / "o")
                rates[0].clear()
            optimizer.step()
            scheduler.step()
            rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1


def test_another_scheduler_is_refused(tmp_path: Path) -> None:
    booster, _, optimizer = boost()
    booster.save_lr_scheduler(SCHEDULERS["cosine"](optimizer), tmp_path / "s")
    with pytest.raises(GulliverError, match=r"CosineAnnealingLR, .* LambdaLR"):
        booster.load_lr_scheduler(SCHEDULERS["lambda"](optimizer), tmp_path / "s")
    with pytest.raises(GulliverError, match="does not exist"):
        booster.load_lr_scheduler(SCHEDULERS["lambda"](optimizer), tmp_path / "t")


# Data loaders


def _loaded(world: World, epoch: int) -> tuple[list[int], int]:
    data = TensorDataset(torch.arange(23))
    loader = LowLevelZeroPlugin().prepare_dataloader(data, batch_size=4, shuffle=True, seed=5)
    loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    assert loader.generator is not None
    return [int(i) for (part,) in loader for i in part], loader.generator.initial_seed()


def test_ranks_share_a_data_set_and_their_workers_differ(pool: Pool) -> None:
    epochs = []
    for epoch in (0, 1):
        parts, seeds = zip(*pool.run(_loaded, 2, epoch), strict=True)
        assert len(parts[0]) == len(parts[1]) == 12
        assert set(parts[0]) | set(parts[1]) == set(range(23))
        assert seeds[0] != seeds[1]
        epochs.append(parts)
    assert epochs[0] != epochs[1]


# DDP


def _ddp_attributes(world: World) -> tuple[float, float, int]:
    model = Tied()
    model.note = 7
    booster, wrapped, optimizer = boost(TorchDDPPlugin(verbose=False), model)
    with booster.no_sync(wrapped):
        booster.backward(wrapped(torch.arange(4)).sum() * (world.rank + 1), optimizer)
    alone = float(model.norm.bias.grad.sum())
    booster.backward(wrapped(torch.arange(4)).sum() * 0, optimizer)
    return alone, float(model.norm.bias.grad.sum()), wrapped.note


def test_ddp_forwards_attributes_and_no_sync_skips_reduction(pool: Pool) -> None:
    (one, mean, note), (two, same, _) = pool.run(_ddp_attributes, 2)
    assert one != two
    assert mean == same == pytest.approx((one + two) / 2, rel=1e-5)
    assert note == 7


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.register_buffer("n", torch.tensor(3))


MISFITS = {
    r"1e\+300 does not fit float32": {"w": torch.tensor([1e300, 1.0], dtype=torch.float64)},
    "does not fit float32": {"w": torch.tensor([1 + 5j, 2j])},
    "1.7000000.* does not fit int64": {"n": torch.tensor(1.7)},
    "16777217 does not fit float32": {"w": torch.tensor([2**24 + 1, 1])},
}


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_loading_rejects_mismatched_values(stage: int | None, tmp_path: Path) -> None:
    for message, odd in MISFITS.items():
        save_file({"w": torch.ones(2), "n": torch.tensor(4), **odd}, tmp_path / "m.safetensors")
        booster, model = Booster(), Counted()
        if stage is not None:
            booster, model, _ = boost(LowLevelZeroPlugin(stage, verbose=False), model)
        with pytest.raises(GulliverError, match=message):
            booster.load_model(model, tmp_path / "m.safetensors")
        assert [model.w.tolist(), int(model.n)] == [[0, 0], 3]


@pytest.mark.parametrize("stage", [1, 3])
def test_folders_load_like_files_or_raise(stage: int, tmp_path: Path) -> None:
    booster, model, optimizer = boost(LowLevelZeroPlugin(stage, verbose=False))
    booster.save(tmp_path / "run", 1, model, optimizer)
    booster.save_huggingface(model, tmp_path / "hf")
    booster.save_optimizer(optimizer, tmp_path / "optimizer")
    booster.close()
    expected = model.weight.detach().clone()
    for name in ("hf", "run", "run/step-00000001"):
        booster, other, _ = boost(LowLevelZeroPlugin(stage, verbose=False))
        with torch.no_grad():
            other.weight.add_(1)
        assert booster.load_model(other, tmp_path / name) == []
        assert torch.equal(other.weight, expected)
    with pytest.raises(GulliverError, match="is an optimizer's state: use load_optimizer"):
        booster.load_model(other, tmp_path / "optimizer")


@pytest.mark.parametrize("plugin", [LowLevelZeroPlugin(stage=3, verbose=False), TorchDDPPlugin()])
def test_module_added_after_boost_is_reported_at_step(plugin: Any) -> None:
    booster, model, optimizer = boost(plugin, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    model[1] = nn.Linear(3, 2)
    booster.backward(model(torch.ones(1, 3)).sum(), optimizer)
    with pytest.raises(GulliverError, match=r"1\.weight"):
        optimizer.step()
