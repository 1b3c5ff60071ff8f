"""Writes to weights at any point of a loop are those of plain PyTorch, on all ranks.

Random programs: weights are read and written through ``optimizer.param_groups`` and through the
model, before, between and after the calls of a step, in its hooks, and inside of recomputed blocks.
The twin is a plain model in the same process that sees the data of all ranks.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver.booster import Booster, GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin
from gulliver.checkpoint import AsyncCheckpointer
from gulliver.checkpoint.collect import guarded_storages
from gulliver.comm import World, all_reduce
from gulliver.errors import GulliverError
from gulliver.memory.pending import storage_of
from tests.pool import Pool

WIDTH, DEPTH = 8, 4
CHUNK_MB = 0.0003
"""A few hundred bytes: several chunks."""


class Assigning(torch.optim.Optimizer):
    """SGD with momentum that assigns ``p.data`` and its state anew in each step."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["momentum"] = 0.9 * state.get("momentum", 0) + p.grad
                    p.data = p.data - group["lr"] * state["momentum"]


KINDS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 1e-2},
    "Adadelta": {"lr": 0.5},
    "Adafactor": {"lr": 1e-2},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.1},
    "Adam": {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2, "eps": 1e-6},
    "Adamax": {"lr": 1e-2},
    "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-2, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 1e-2},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
}
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
OPTIMIZERS = [
    *((name, {}) for name in KINDS),
    *((name, {"foreach": True}) for name in KINDS),
    *((name, {"fused": True}) for name in FUSED),
    ("Assigning", {}),
]
"""Every optimizer of torch that is sharded: plain, foreach and, where a CPU has it, fused."""


def optimizer_of(name: str, options: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 3e-3},
    ]
    kind = Assigning if name == "Assigning" else getattr(torch.optim, name)
    return kind(groups, **KINDS.get(name, {}), **options)


class Block(nn.Module):
    """A layer that may be recomputed, and may read the weight of a later one."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.layer, self.recomputed = nn.Linear(WIDTH, WIDTH), recomputed
        self.reads: list[nn.Module] = []  # a list, so that it is no child

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputed:
            return checkpoint(self._inner, x, use_reentrant=False)
        return self._inner(x)

    def _inner(self, x: Tensor) -> Tensor:
        for other in self.reads:
            x = x + 0.1 * x @ other.layer.weight.detach()  # type: ignore[union-attr,operator]
        return x + torch.tanh(self.layer(x))


class Net(nn.Module):
    """Blocks with tied ends."""

    def __init__(self, recomputed: Iterable[int], reads: dict[int, int]) -> None:
        super().__init__()
        again = set(recomputed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(n in again) for n in range(DEPTH))
        for reader, other in reads.items():
            self.blocks[reader].reads.append(self.blocks[other])  # type: ignore[union-attr,operator]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (x @ self.first.weight.T).square().mean()


WRITES: dict[str, Callable[[list[Tensor], float], Any]] = {
    "clamp_": lambda ps, v: [p.clamp_(-v, v) for p in ps],
    "mul_": lambda ps, v: [p.mul_(1 - v / 10) for p in ps],
    "copy_": lambda ps, v: [p.copy_(p.detach() * 0.9 + v / 100) for p in ps],
    "lerp_": lambda ps, v: [p.lerp_(torch.full_like(p, v), 0.1) for p in ps],
    "data.mul_": lambda ps, v: [p.data.mul_(1 - v / 10) for p in ps],
    "data.clamp_": lambda ps, v: [p.data.clamp_(-v, v) for p in ps],
    "data row": lambda ps, v: [p.data[0].fill_(v / 10) for p in ps],
    "view": lambda ps, v: [p.detach()[-1:].add_(v / 10) for p in ps],
    "foreach": lambda ps, v: torch._foreach_mul_(ps, 1 - v / 10),
    "init": lambda ps, v: [nn.init.constant_(p, v / 10) for p in ps if p.ndim < 2],
}
ONLY_DATA = ("data.mul_", "data.clamp_", "data row")
"""Writes that autograd does not see: in plain PyTorch others fail between forward and backward."""
POINTS = (
    "before forward",
    "before backward",
    "before step",
    "pre hook",
    "post hook",
    "after step",
    "after zero_grad",
)
STEPS = 3


@dataclass
class Event:
    """A write or a read at a point of a step."""

    point: str
    write: str
    through_groups: bool
    members: list[int]
    value: float

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Writes the parameters, or returns copies of them."""
        if self.through_groups:
            every = [p for group in optimizer.param_groups for p in group["params"]]
        else:
            every = sorted(model.parameters(), key=lambda p: p.ndim < 2)
        chosen = [every[n] for n in self.members]
        with torch.no_grad():
            if self.write == "read":
                return [p.detach().clone() for p in chosen]
            WRITES[self.write](chosen, self.value)  # type: ignore[arg-type]
        return []


def events_of(draw: random.Random, in_backward: bool) -> list[list[Event]]:
    found = []
    for _ in range(STEPS):
        step = []
        for _ in range(draw.randint(1, 3)):
            # Updates in backward come before the hooks and whatever stands in front of step.
            late = ("before step", "pre hook")
            point = draw.choice([p for p in POINTS if not (in_backward and p in late)])
            names = ONLY_DATA if point == "before backward" else list(WRITES)
            write = "read" if draw.random() < 0.3 else draw.choice(names)
            members = sorted(draw.sample(range(2 * DEPTH + 2), draw.choice([1, 3, 2 * DEPTH + 2])))
            step.append(Event(point, write, draw.random() < 0.6, members, draw.uniform(0.1, 0.4)))
        found.append(step)
    return found


def plugin_of(draw: random.Random, where: str, name: str, in_backward: bool) -> tuple[Any, bool]:
    """The plugin, and whether it recomputes the blocks itself."""
    options: dict[str, Any] = {"chunk_mb": CHUNK_MB, "verbose": False}
    options |= {"assume_elementwise": name == "Assigning"}
    if where == "gemini":
        activations = draw.choice(["keep", "recompute"])
        plugin = GeminiPlugin(
            "64 MiB", activations=activations, step_in_backward=in_backward, **options
        )
        return plugin, activations == "recompute"
    if where == "hybrid":
        return HybridParallelPlugin(zero_stage=1, **options), False
    stage = int(where)
    return LowLevelZeroPlugin(stage=stage, step_in_backward=in_backward, **options), False


def data(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(97 * step + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def run_program(world: World, seed: int) -> str:
    """Runs a random program on a boosted model and on its twin, and returns what differs."""
    draw = random.Random(seed)
    where = ("0", "1", "2", "3", "gemini", "hybrid")[seed % 6]
    name, options = OPTIMIZERS[(seed // 6) % len(OPTIMIZERS)]
    if name == "Assigning" and where == "gemini":
        where = "3"
    in_backward = where != "hybrid" and name != "Assigning" and draw.random() < 0.4
    recomputed = [n for n in range(DEPTH) if draw.random() < 0.4]
    reads = {} if in_backward else {n: n + 1 for n in range(DEPTH - 1) if draw.random() < 0.3}
    plugin, again = plugin_of(draw, where, name, in_backward)
    label = f"{seed}: {where} {name} {options} {in_backward=} {recomputed=} {reads=} {again=}"

    def made(recomputed: Iterable[int]) -> Net:
        torch.manual_seed(seed)
        return Net(recomputed, reads).double()

    twin = made(range(DEPTH) if again else recomputed)
    model = made([] if again else recomputed)
    theirs, ours = optimizer_of(name, options, twin), optimizer_of(name, options, model)
    program = events_of(draw, in_backward)
    label += f" {program}"
    now: dict[str, list[Event]] = {}
    copies: dict[bool, list[Tensor]] = {False: [], True: []}

    def hook(point: str, plain: bool) -> Callable[..., None]:
        net = twin if plain else model
        return lambda optimizer, *_: happen(point, net, optimizer, plain)

    def happen(point: str, net: nn.Module, optimizer: Any, plain: bool) -> None:
        for event in now.get(point, []):
            copies[plain] += event.run(net, optimizer)

    for optimizer, plain in ((theirs, True), (ours, False)):
        optimizer.register_step_pre_hook(hook("pre hook", plain))
        optimizer.register_step_post_hook(hook("post hook", plain))
    booster = Booster(plugin)
    model, boosted, *_ = booster.boost(model, ours)
    for number, events in enumerate(program):
        now = {point: [e for e in events if e.point == point] for point in POINTS}
        for plain in (True, False):
            net, optimizer = (twin, theirs) if plain else (model, boosted)
            happen("before forward", net, optimizer, plain)
            ranks = range(world.size) if plain else [world.rank]
            loss = sum(net(data(number, rank)) for rank in ranks) / len(ranks)
            happen("before backward", net, optimizer, plain)
            loss.backward() if plain else booster.backward(loss, optimizer)  # type: ignore[union-attr]
            happen("before step", net, optimizer, plain)
            optimizer.step()
            happen("after step", net, optimizer, plain)
            optimizer.zero_grad()
            happen("after zero_grad", net, optimizer, plain)
    pairs = [*zip(copies[False], copies[True], strict=True)]
    pairs += [
        (p.detach().clone(), q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    ]
    for found, expected in pairs:
        if not torch.allclose(found, expected, rtol=1e-8, atol=1e-10):
            return f"{label}: off by {(found - expected).abs().max():.1e}"
    return ""


def run_programs(world: World, seeds: Iterable[int]) -> list[str]:
    found = []
    for seed in seeds:
        try:
            found.append(run_program(world, seed))
        except Exception as error:
            raise AssertionError(f"program {seed}: {error}") from error
    return [wrong for wrong in found if wrong]


@pytest.mark.parametrize("size", [1, 2])
def test_writes_at_any_point_are_those_of_plain_torch(pool: Pool, size: int, full: bool) -> None:
    seeds = range(600) if full else [*range(11), 33]  # one that reads in a hook of the step
    assert pool.run(run_programs, size, seeds) == [[]] * size


def _recomputed_reads(world: World, stage: int) -> str:
    booster = Booster(
        LowLevelZeroPlugin(stage=stage, step_in_backward=True, chunk_mb=CHUNK_MB, verbose=False)
    )
    torch.manual_seed(0)
    net = Net(range(DEPTH), {0: DEPTH - 1}).double()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(GulliverError) as caught:
        booster.backward(model(data(0, world.rank)), optimizer)
    return str(caught.value)


@pytest.mark.parametrize("stage", range(4))
def test_recomputed_blocks_read_no_updated_weights(pool: Pool, stage: int) -> None:
    assert all("step_in_backward" in said for said in pool.run(_recomputed_reads, 1, stage))


def _small(stage: int) -> tuple[Any, nn.Module, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    plugin = LowLevelZeroPlugin(stage=stage, chunk_mb=CHUNK_MB, verbose=False)
    booster = Booster(plugin)
    net, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return booster, net, optimizer


def _what_models_do(world: World) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    for stage in range(4):
        booster, model, optimizer = _small(stage)
        copies = {name: p.detach().clone() for name, p in model.named_parameters()}
        plain.load_state_dict(copies)
        found = torch.func.grad(lambda y, net=model: net(y).sum())(x)
        torch.testing.assert_close(found, torch.func.grad(lambda y: plain(y).sum())(x))
        ones = torch.ones_like(x)
        found, expected = (torch.func.jvp(net, (x,), (ones,))[1] for net in (model, plain))
        torch.testing.assert_close(found, expected)
        booster.backward(model(x).sum(), optimizer)
        plain.zero_grad()
        plain(x).sum().backward()
        largest = max(p.grad.abs().max() for p in plain.parameters())  # type: ignore[union-attr]
        found = optimizer.clip_grad_by_norm(0.1, norm_type=float("inf"))
        torch.testing.assert_close(found, largest.double())
        optimizer.step()
        optimizer.zero_grad()
        if stage < 3:
            again = pickle.loads(pickle.dumps(model))
            assert all(map(torch.equal, again.parameters(), model.parameters()))


def test_transforms_norms_and_pickles_are_those_of_plain_torch(pool: Pool) -> None:
    pool.run(_what_models_do, 2)


@pytest.mark.parametrize("made", [nn.LazyLinear(8), torch.jit.script(nn.Linear(6, 8))])
def test_modules_that_cannot_be_sharded_are_refused_at_boost(made: nn.Module) -> None:
    model = nn.Sequential(made, nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GulliverError, match=r"batch|TorchScript"):
        Booster(LowLevelZeroPlugin(stage=1, verbose=False)).boost(model, optimizer)


def _logged_state(world: World) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for stage in range(4):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        twin = copy.deepcopy(net)
        theirs = torch.optim.AdamW(twin.parameters(), lr=0.1)
        given = torch.optim.AdamW(net.parameters(), lr=0.1)
        booster = Booster(LowLevelZeroPlugin(stage=stage, chunk_mb=CHUNK_MB, verbose=False))
        net, optimizer, *_ = booster.boost(net, given)
        for _ in range(2):
            booster.backward(net(x).square().mean(), optimizer)
            twin(x).square().mean().backward()
            for either in (optimizer, theirs):
                either.step()
                either.zero_grad()
        storages = guarded_storages()  # a save asks on each rank for itself: nothing is gathered
        for sharded in optimizer.chunks:
            assert storage_of(sharded.chunk.master_shard) in storages
        pairs = zip(optimizer.param_groups[0]["params"], twin.parameters(), strict=True)
        found = [(optimizer.state[p].get("exp_avg"), theirs.state[q]["exp_avg"]) for p, q in pairs]
        mine = sum(e.square().sum() for e, _ in found if e is not None)
        total = torch.as_tensor(mine, dtype=torch.float32).reshape(())
        if stage and world.size > 1:
            all_reduce(total, "sum")
        torch.testing.assert_close(total, sum(e.square().sum() for _, e in found))
        for refused in (given.state_dict, lambda: given.load_state_dict(theirs.state_dict())):  # noqa: B023
            with pytest.raises(GulliverError, match="save_optimizer"):
                refused()


@pytest.mark.parametrize("size", [1, 2])
def test_state_of_parameters_is_that_of_their_pieces(pool: Pool, size: int) -> None:
    pool.run(_logged_state, size)


class _Odd(nn.Linear):
    """A layer with state that no file of a boosted model can hold."""

    def get_extra_state(self) -> Any:
        return 1


def test_extra_state_is_warned_of_at_boost() -> None:
    net = nn.Sequential(_Odd(6, 1))
    with pytest.warns(UserWarning, match="get_extra_state"):
        Booster(LowLevelZeroPlugin(stage=1, verbose=False)).boost(
            net, torch.optim.SGD(net.parameters(), lr=0.1)
        )


def test_a_complex_tensor_that_no_file_holds_is_named(tmp_path: Path) -> None:
    checkpointer = AsyncCheckpointer(tmp_path)
    with pytest.raises(GulliverError, match=r"phase.*complex128"):
        checkpointer.save(1, {"phase": torch.ones(2, dtype=torch.complex128)})
    checkpointer.close()
