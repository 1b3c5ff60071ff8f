"""ZeRO does in every kind of training loop what torch does, or refuses; nothing is wrong silently.

The twin is a plain torch model in the same process, fed with the whole batch.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.comm import World
from gulliver.comm.world import adopt_world
from gulliver.errors import GulliverError
from gulliver.parallel import ZeroOptimizer
from gulliver.parallel.zero.checkpoint import relayout
from gulliver.parallel.zero.chunks import Phase
from gulliver.parallel.zero.reduce import IN_FLIGHT
from tests.pool import Pool

ALONE = World(0, 1, 0, torch.device("cpu"))
CHUNK_MB = 0.0003  # a few hundred bytes: several chunks


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    adopt_world(ALONE)
    yield
    adopt_world(None)


class Net(nn.Module):
    """Two branches over a shared stem; float64."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 4), nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor, branch: str = "a") -> Tensor:
        return getattr(self, branch)(torch.tanh(self.stem(x))).square().sum()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-6)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def boosted(
    stage: int = 1, make: Callable[[Any], torch.optim.Optimizer] = sgd
) -> tuple[Booster, Net, ZeroOptimizer]:
    torch.manual_seed(0)
    model = Net()
    booster = Booster(LowLevelZeroPlugin(stage=stage, chunk_mb=CHUNK_MB, verbose=False))
    _, optimizer, *_ = booster.boost(model, make(model.parameters()))
    assert isinstance(optimizer, ZeroOptimizer)
    assert len(optimizer.chunks) > 2
    return booster, model, optimizer


def plain(
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, make(model.parameters())


def data(number: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(97 * number + rank)).double()


def assert_equal_models(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            found, expected, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: n + m
        )


# What a loop may do, as a random program of steps; `run` does it to both.
OPERATIONS = (
    "backward a",
    "backward b",
    "no_sync a",
    "direct a",
    "direct b",
    "step",
    "clip and step",
    "zero_grad",
    "zero_grad to zeros",
    "model.zero_grad",
    "clear the stem",
    "relayout",
)


def run(program: list[str], world: World, stage: int, make: Any) -> tuple[nn.Module, nn.Module]:
    """The program on a boosted model and on a plain twin that sees all ranks' data."""
    booster, model, optimizer = boosted(stage, make)
    twin, twin_optimizer = plain(make)
    for number, operation in enumerate(program):
        verb, *rest = operation.split()
        if verb in ("backward", "no_sync", "direct"):
            branch = rest[0]
            loss = model(data(number, world.rank), branch)
            hold = booster.no_sync(model) if verb == "no_sync" else nullcontext()
            with hold:
                loss.backward() if verb == "direct" else booster.backward(loss, optimizer)
            whole = sum(twin(data(number, rank), branch) for rank in range(world.size))
            (whole / world.size).backward()
        elif operation in ("step", "clip and step"):
            if operation != "step":
                norm = optimizer.clip_grad_by_norm(0.3)
                expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
                torch.testing.assert_close(norm, expected.double(), rtol=1e-10, atol=1e-14)
            optimizer.step()
            twin_optimizer.step()
        elif operation == "zero_grad":
            optimizer.zero_grad()
            twin_optimizer.zero_grad()
        elif operation == "zero_grad to zeros":
            optimizer.zero_grad(set_to_none=False)
            twin_optimizer.zero_grad(set_to_none=False)
        elif operation == "relayout":
            optimizer.zero_grad()
            twin_optimizer.zero_grad()
            draw = random.Random(number)
            order = draw.sample(list(optimizer.names.values()), len(optimizer.names))
            relayout(optimizer.shards, order, draw.choice([64, 200, 1000]))
        elif operation == "model.zero_grad":
            model.zero_grad()
            twin.zero_grad()
        else:
            model.stem.weight.grad = twin.stem.weight.grad = None
    return model, twin


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(OPERATIONS), max_size=14),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([sgd, adamw]),
)
def test_any_order_of_events_does_what_torch_does(program: list[str], stage: int, make) -> None:
    assert_equal_models(*run([*program, "step"], ALONE, stage, make))


def _random_programs(world: World, seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        program = draw.choices(OPERATIONS, k=12)
        model, twin = run([*program, "step"], world, seed % 4, adamw if seed % 3 else sgd)
        try:
            assert_equal_models(model, twin)
        except AssertionError as error:
            raise AssertionError(f"{program}: {error}") from error


@pytest.mark.parametrize("size", [2, 3])
def test_any_order_of_events_does_what_torch_does_on_several_ranks(
    pool: Pool, size: int, full: bool
) -> None:
    pool.run(_random_programs, size, range(60 if full else 16))


FACTORIES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD plain": lambda p: torch.optim.SGD(p, lr=1e-2, maximize=True),
}


def _every_optimizer(world: World) -> list[str]:
    wrong = []
    for name, make in FACTORIES.items():
        model, twin = run(["backward a", "step", "zero_grad"] * 4, world, 2, make)
        try:
            assert_equal_models(model, twin)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    return wrong


def test_every_listed_optimizer_steps_shards_as_it_steps_tensors(pool: Pool) -> None:
    from gulliver.parallel.zero.elementwise import ELEMENTWISE

    assert {name.split()[0] for name in FACTORIES} == set(ELEMENTWISE)
    assert pool.run(_every_optimizer, 3) == [[], [], []]


def _one_rank_has_no_gradient(world: World, direct: bool) -> None:
    booster, model, optimizer = boosted(2)
    twin, twin_optimizer = plain()
    for number in range(3):
        loss = model(data(number))
        if world.rank == 1:
            loss = torch.zeros((), requires_grad=True) * 1.0
        loss.backward() if direct else booster.backward(loss, optimizer)
        (twin(data(number)) / world.size).backward()
        for stepper in (optimizer, twin_optimizer):
            stepper.step()
            stepper.zero_grad()
    assert_equal_models(model, twin)


@pytest.mark.parametrize("direct", [False, True], ids=["booster.backward", "loss.backward"])
def test_a_rank_without_any_gradient_takes_part(pool: Pool, direct: bool) -> None:
    pool.run(_one_rank_has_no_gradient, 2, direct)


def _tiny_parameters(world: World) -> int:
    torch.manual_seed(0)
    model, twin = nn.Linear(1, 1).double(), nn.Linear(1, 1).double()
    model.empty = nn.Parameter(torch.zeros(0, 3).double())
    twin.load_state_dict(model.state_dict(), strict=False)
    booster = Booster(LowLevelZeroPlugin(verbose=False))
    _, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    booster.backward(model(torch.ones(2, 1).double()).sum() + model.empty.sum(), optimizer)
    optimizer.step()
    twin_optimizer = adamw(twin.parameters())
    twin(torch.ones(2, 1).double()).sum().backward()
    twin_optimizer.step()
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-12, atol=0)
    return sum(len(sharded.pieces) for sharded in optimizer.chunks)


def test_ranks_that_own_nothing_take_part(pool: Pool) -> None:
    assert sorted(pool.run(_tiny_parameters, 4)) == [0, 0, 1, 1]


class Mixed(nn.Module):
    """Parameters of two dtypes, and gradients that are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 4, sparse=True)
        self.last = nn.Linear(4, 3).double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.embed(ids).double()).square().sum()


def test_two_dtypes_and_sparse_gradients_are_right() -> None:
    results = []
    for plan in (None, LowLevelZeroPlugin(stage=2, verbose=False)):
        torch.manual_seed(0)
        model = Mixed()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if plan is not None:
            _, optimizer, *_ = Booster(plan).boost(model, optimizer)
            assert len(optimizer.chunks) == 2
        for step in range(3):
            model(torch.tensor([step, 3, 3])).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model)
    for ours, theirs in zip(results[1].parameters(), results[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_stage_2_keeps_few_whole_gradient_buffers_alive() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    booster = Booster(LowLevelZeroPlugin(stage=2, chunk_mb=CHUNK_MB, verbose=False))
    _, optimizer, *_ = booster.boost(model, sgd(model.parameters()))
    alive: list[int] = []

    def count(_: Tensor) -> None:
        alive.append(sum(c.chunk.gradients.buffer is not None for c in optimizer.chunks))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    booster.backward(model(torch.ones(2, 8)).sum(), optimizer)
    assert len(optimizer.chunks) == 12
    assert 1 <= max(alive) <= IN_FLIGHT + 1
    assert all(c.chunk.gradients.buffer is None for c in optimizer.chunks)


def _memory(world: World, stage: int) -> tuple[Any, int, int, int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 8))
    model[2].requires_grad_(False)
    booster = Booster(LowLevelZeroPlugin(stage=stage, chunk_mb=0.02, verbose=False))
    inner = torch.optim.AdamW(
        [
            {"params": model[0].parameters()},
            {"params": [*model[1].parameters(), *model[2].parameters()], "amsgrad": True},
        ]
    )
    _, optimizer, *_ = booster.boost(model, inner)
    booster.backward(model(torch.ones(2, 64)).sum(), optimizer)
    optimizer.step()
    parameters = sum(c.chunk.data.nbytes for c in optimizer.chunks)
    parameters += sum(p.nbytes for p in model[2].parameters())
    held = [t for c in optimizer.chunks for t in (c.chunk.gradients.buffer, c.gradient_shard)]
    gradients = sum(t.nbytes for t in held if t is not None)
    state = [v for s in inner.state.values() for v in s.values() if v.ndim]
    optimizer.gatherer.finish_all()  # a world must not be left while messages are under way
    shards = sum(c.gradient_shard.nbytes for c in optimizer.chunks)
    return booster.plan.memory, parameters, gradients, sum(v.nbytes for v in state), shards


@pytest.mark.parametrize("stage", [1, 2])
def test_the_planned_memory_is_what_is_used(pool: Pool, stage: int) -> None:
    found = pool.run(_memory, 2, stage)
    plan, parameters, gradients, state, shards = found[0]
    assert parameters == plan.parameters
    assert gradients == shards  # after the peak within backward
    assert abs(sum(run[3] for run in found) / (2 * plan.optimizer_state) - 1) < 0.15
    assert state == plan.optimizer_state


def test_an_optimizer_that_was_stepped_before_boost_goes_on_as_it_was() -> None:
    models = []
    for boost in (False, True):
        model, stepper = plain(adamw)
        for number in range(6):
            if boost and number == 3:
                plugin = LowLevelZeroPlugin(chunk_mb=CHUNK_MB, verbose=False)
                _, stepper, *_ = Booster(plugin).boost(model, stepper)
            model(data(number)).backward()
            stepper.step()
            stepper.zero_grad()
        models.append(model)
    assert_equal_models(models[1], models[0])


def test_a_graph_from_before_a_step_is_refused_as_torch_refuses_it() -> None:
    booster, model, optimizer = boosted()
    stale = model(data(0))
    booster.backward(model(data(1)), optimizer)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_compiled_models_take_part() -> None:
    booster, model, optimizer = boosted()
    twin, twin_optimizer = plain()
    compiled = torch.compile(model, backend="eager")
    for number in range(4):
        # Another length compiles anew while the gradients are stand-ins.
        x = data(number)[: number + 1]
        booster.backward(compiled(x), optimizer)
        twin(x).backward()
        if number % 2:
            for stepper in (optimizer, twin_optimizer):
                stepper.step()
                stepper.zero_grad()
    assert_equal_models(model, twin)


class Shared(nn.Module):
    """One layer used by two checkpointed calls."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(3, 3).double(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x.square().sum()


def test_checkpointed_shared_layers_are_right_or_refused() -> None:
    gradients = []
    for boost in (False, True):
        torch.manual_seed(0)
        model = Shared(reentrant=False)
        loss = model(data(0).requires_grad_())
        if boost:
            booster = Booster(LowLevelZeroPlugin(verbose=False))
            _, optimizer, *_ = booster.boost(model, sgd(model.parameters()))
            booster.backward(model(data(0).requires_grad_()), optimizer)
            gradients.append(optimizer.full_gradients()["layer.weight"])
        else:
            loss.backward()
            gradients.append(model.layer.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=0)
    for stage in (0, 1):
        torch.manual_seed(0)
        model = Shared(reentrant=True)
        booster = Booster(LowLevelZeroPlugin(stage, verbose=False))
        _, optimizer, *_ = booster.boost(model, sgd(model.parameters()))
        # A chunk that has been reduced takes another gradient; one in flight refuses it.
        refused = pytest.raises(GulliverError, match="use_reentrant=False")
        with nullcontext() if stage else refused:
            booster.backward(model(data(0).requires_grad_()), optimizer)
    found = optimizer.full_gradients()["layer.weight"]
    torch.testing.assert_close(found, gradients[0], rtol=1e-12, atol=0)


def _clip_by_torch(booster: Booster, model: Net, optimizer: ZeroOptimizer) -> None:
    booster.backward(model(data(0)), optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _clip_the_groups(booster: Booster, model: Net, optimizer: ZeroOptimizer) -> None:
    booster.backward(model(data(0)), optimizer)
    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)


def _create_graph(booster: Booster, model: Net, optimizer: ZeroOptimizer) -> None:
    model(data(0)).backward(create_graph=True)


def _set_gradient(booster: Booster, model: Net, optimizer: ZeroOptimizer) -> None:
    with booster.no_sync(model):
        booster.backward(model(data(0)), optimizer)
    model.a.bias.grad = torch.ones(4).double()
    optimizer.step()


def _set_reduced_gradient(booster: Booster, model: Net, optimizer: ZeroOptimizer) -> None:
    booster.backward(model(data(0)), optimizer)
    model.a.bias.grad = torch.ones(4).double()
    optimizer.step()


def _scale_reduced_gradient(booster: Booster, model: Net, optimizer: ZeroOptimizer) -> None:
    booster.backward(model(data(0)), optimizer)
    model.a.bias.grad = 2 * model.a.bias.grad
    optimizer.step()


def _old_optimizer(booster: Booster, model: Net, optimizer: ZeroOptimizer) -> None:
    booster.backward(model(data(0)), optimizer)
    optimizer.inner.step()


def _unfreeze(booster: Booster, model: Net, optimizer: ZeroOptimizer) -> None:
    torch.manual_seed(0)
    other = Net()
    other.a.requires_grad_(False)
    _, second, *_ = Booster(LowLevelZeroPlugin(verbose=False)).boost(other, sgd(other.parameters()))
    other.a.requires_grad_(True)
    other(data(0)).backward()
    second.step()


def _assign(booster: Booster, model: Net, optimizer: ZeroOptimizer) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    booster.backward(model(data(0)), optimizer)
    optimizer.step()


def _convert(booster: Booster, model: Net, optimizer: ZeroOptimizer) -> None:
    model.float()
    booster.backward(model(data(0).float()), optimizer)


def _after_clipping(booster: Booster, model: Net, optimizer: ZeroOptimizer) -> None:
    booster.backward(model(data(0)), optimizer)
    optimizer.clip_grad_by_norm(1.0)
    model(data(1)).backward()


def _clip_nothing(booster: Booster, model: Net, optimizer: ZeroOptimizer) -> None:
    optimizer.clip_grad_by_norm(float("nan"))


def _state_dict(booster: Booster, model: Net, optimizer: ZeroOptimizer) -> None:
    optimizer.state_dict()


def _edit_groups(world: World) -> list[str]:
    """One rank does it; both are told. New lists and dicts of the same members are no edit."""
    found = []
    for stage, edit in enumerate(
        (
            lambda groups: groups[1]["params"].append(groups[0]["params"].pop()),
            lambda groups: groups[0].update(params=groups[0]["params"][:-1]),
            lambda groups: groups.pop(),
            lambda groups: groups[0].update(lr=0.5),
        )
    ):
        model = Net()
        head = [*model.a.parameters(), *model.b.parameters()]
        make = torch.optim.SGD([{"params": model.stem.parameters()}, {"params": head}], lr=0.1)
        booster = Booster(LowLevelZeroPlugin(stage, chunk_mb=CHUNK_MB, verbose=False))
        _, optimizer, *_ = booster.boost(model, make)
        for number in range(2):
            booster.backward(model(data(0, world.rank)), optimizer)
            groups = optimizer.param_groups
            if number == 0:
                groups[0] = {**groups[0], "params": list(groups[0]["params"]), "lr": 0.01}
            elif world.rank == 1:
                edit(groups)
            before = [p.data.clone() for p in model.parameters()]
            try:
                optimizer.step()
            except GulliverError as error:
                found.append(str(error))
                after = [p.data for p in model.parameters()]
                assert all(map(torch.equal, before, after))
            optimizer.zero_grad()
    return found


def test_edited_groups_are_refused_on_all_ranks_and_options_that_differ(pool: Pool) -> None:
    for found in pool.run(_edit_groups, 2):
        *moved, differ = found
        assert ["parameters in param_groups changed" in said for said in moved] == [True] * 3
        assert "lr of the optimizer's group 0 is 0.01 on rank 0 and 0.5 on rank 1" in differ


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (_clip_by_torch, "optimizer.clip_grad_by_norm"),
        (_clip_the_groups, "optimizer.clip_grad_by_norm"),
        (_create_graph, "create_graph"),
        (_set_gradient, "setting .grad"),
        (_set_reduced_gradient, "'a.bias' was set"),
        (_scale_reduced_gradient, "'a.bias' was set"),
        (_old_optimizer, "the optimizer that boost returned"),
        (_unfreeze, "unfreeze it before boost"),
        (_assign, "assign=True"),
        (_convert, "converted or reshaped after boost"),
        (_after_clipping, "after clipping"),
        (_clip_nothing, "max_norm must be positive"),
        (_state_dict, "booster.save_optimizer"),
    ],
)
def test_silent_failures_are_rejected(mistake, message: str) -> None:
    with pytest.raises(GulliverError, match=message) as caught:
        mistake(*boosted())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_copying_boosted_optimizer_raises_harmlessly(stage: int) -> None:
    booster, model, optimizer = boosted(stage)
    calls: list[Callable[[], Any]] = [
        lambda: copy.deepcopy(optimizer),
        lambda: copy.copy(optimizer),
        lambda: torch.save(optimizer, io.BytesIO()),
        lambda: pickle.dumps({"model": model, "optimizer": optimizer}),
    ]
    if stage == 3:
        calls.append(lambda: torch.save(model, io.BytesIO()))
    for call in calls:
        with pytest.raises(GulliverError, match=r"booster\.save_(optimizer|model)") as caught:
            call()
        assert "\n" not in str(caught.value)
    twin, twin_optimizer = plain()
    booster.backward(model(data(0)), optimizer)
    twin(data(0)).backward()
    optimizer.step()
    twin_optimizer.step()
    assert_equal_models(copy.deepcopy(model), twin)
    assert_equal_models(model, twin)
    again, other, another = boosted(stage)
    again.backward(other(data(0)), another)
    another.step()


def test_zero_grad_of_the_optimizer_from_before_boost_forgets_too() -> None:
    booster, model, optimizer = boosted()
    booster.backward(model(data(0)), optimizer)
    optimizer.inner.zero_grad()
    assert optimizer.full_gradients() == {}


def test_a_failed_backward_can_be_forgotten() -> None:
    booster, model, optimizer = boosted(2)
    twin, twin_optimizer = plain()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise RuntimeError("on purpose")

    loss = Fails.apply(model.stem(data(0)))
    with pytest.raises(RuntimeError, match="on purpose"):
        booster.backward(model.a(loss).sum(), optimizer)
    optimizer.zero_grad()
    for net, stepper in ((model, optimizer), (twin, twin_optimizer)):
        loss = net(data(1))
        booster.backward(loss, optimizer) if net is model else loss.backward()
        stepper.step()
    assert_equal_models(model, twin)


@pytest.mark.parametrize("before", Phase)
@pytest.mark.parametrize("after", Phase)
class Lamb(torch.optim.Optimizer):
    """Steps each tensor by its own norm, and all of them by one number and a count of calls."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in every]).norm()
        for group in self.param_groups:
            group["calls"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                trust = p.norm() / (p.grad.norm() + 1e-6) / group["calls"] / (1 + total)
                p.sub_(group["lr"] * trust * p.grad + 1e-3 * p.mean(0, keepdim=True))


WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "Lamb": Lamb,
}


def _whole_tensors(world: World) -> None:
    for make in WHOLE.values():
        _, model, optimizer = boosted(0, make)
        twin, twin_optimizer = plain(make)
        for number in range(5):
            if number == 2:
                relayout(optimizer.shards, list(optimizer.names.values())[::-1], 1000)
            branch = "ab"[number % 2]
            optimizer.backward(model(data(number, world.rank), branch))
            ranks = range(world.size)
            sum(twin(data(number, r), branch) / world.size for r in ranks).backward()
            for stepper in (optimizer, twin_optimizer):
                stepper.step()
                stepper.zero_grad()
        assert_equal_models(model, twin)


def test_stage_0_steps_whole_parameters_with_optimizers_of_whole_tensors(pool: Pool) -> None:
    pool.run(_whole_tensors, 2)
