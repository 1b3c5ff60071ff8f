"""What loops and models do under a memory limit, beside plain torch: the same bits on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver.booster import limited as _limited
from gulliver.booster.booster import Booster
from gulliver.booster.plugins import GeminiPlugin, LowLevelZeroPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from tests.pool import Pool

WIDTH, DEPTH, STEPS = 256, 12, 4
LIMIT = "21MiB"
"""Of which states, that take 13 MiB, may have 3."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks that may be skipped, recomputed or called twice."""

    def __init__(self, reuse: bool = False, recompute: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH // 2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.reuse, self.recompute = reuse, recompute

    def forward(self, x: Tensor, skipped: frozenset[int] = frozenset()) -> Tensor:
        for _ in range(2 if self.reuse else 1):
            for number, block in enumerate(self.blocks):
                if number in skipped:
                    continue
                if self.recompute is None:
                    x = block(x)
                else:
                    x = checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(x)


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int, *arguments: Any) -> Tensor:
    return (model(batch(step), *arguments) - 1).square().mean()


class Loop:
    """A loop's calls: those of plain torch, or those of a booster under a limit.

    Args:
        folder: folder of the disk; None for plain torch.
        early: whether chunks are stepped in backward.
    """

    def __init__(self, folder: str | None, early: bool = False) -> None:
        self.folder, self.early = folder, early
        self.booster: Booster | None = None
        self.moved, self.limited, self.limit = 0, True, LIMIT
        self.precision: str | None = None

    def boost(self, model: nn.Module, lr: float = 1e-2) -> tuple[nn.Module, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        if self.folder is None:
            return model, optimizer
        plugin: Any = GeminiPlugin(
            self.limit,
            disk=f"{self.folder}:64MiB",
            chunk_mb=0.3,
            verbose=False,
            step_in_backward=self.early,
            precision=self.precision,
        )
        if not self.limited:
            options: Any = {"precision": self.precision, "step_in_backward": self.early}
            plugin = LowLevelZeroPlugin(3, verbose=False, **options)
        self.booster = Booster(plugin=plugin)
        # What else a process of tests holds, and gives back, is no business of this model.
        with patch.object(_limited, "Footprint", side_effect=OSError):
            model, optimizer, *_ = self.booster.boost(model, optimizer)
        optimizer.options = replace(optimizer.options, step_in_backward=self.early)
        return model, optimizer

    def backward(self, loss: Tensor, optimizer: Any, **options: Any) -> None:
        if self.booster is None or options:
            loss.backward(**options)
        else:
            self.booster.backward(loss, optimizer)

    def step(self, loss: Tensor, optimizer: Any) -> None:
        self.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    def end(self, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        if self.booster is not None:
            manager = optimizer.shards.manager
            self.moved = 0 if manager is None else manager.stats()["loads"]
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def skips(loop: Loop) -> dict[str, Tensor]:
    """Other blocks have no part in every step, and in every forward of a step."""
    model, optimizer = loop.boost(net())
    draw = torch.Generator().manual_seed(7)
    for step in range(STEPS + 2):
        mask = torch.rand(DEPTH // 2, generator=draw) < 0.4
        skipped = frozenset(mask.nonzero().flatten().tolist())
        loop.step(loss_of(model, step, skipped), optimizer)
    return loop.end(model, optimizer)


def reuses(loop: Loop) -> dict[str, Tensor]:
    model, optimizer = loop.boost(net(reuse=True))
    for step in range(STEPS):
        loop.step(loss_of(model, step), optimizer)
    return loop.end(model, optimizer)


def recomputes(loop: Loop) -> dict[str, Tensor]:
    found = {}
    for reentrant in (False, True):
        model, optimizer = loop.boost(net(reuse=True, recompute=reentrant))
        for step in range(STEPS):
            x = batch(step).requires_grad_()
            loop.step((model(x) - 1).square().mean(), optimizer)
        found |= {f"{n} {reentrant}": v for n, v in loop.end(model, optimizer).items()}
    return found


def two_losses(loop: Loop) -> dict[str, Tensor]:
    """Two backwards of one graph."""
    model, optimizer = loop.boost(net())
    for step in range(STEPS):
        out = model(batch(step))
        loop.backward(out.square().mean(), optimizer, retain_graph=True)
        loop.backward((out - 1).abs().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return loop.end(model, optimizer)


def two_models(loop: Loop) -> dict[str, Tensor]:
    """One is trained through the other, which is stepped for itself too."""
    (maker, first), (judge, second) = loop.boost(net()), loop.boost(net(), 1e-3)
    for step in range(STEPS):
        made = maker(batch(step))
        loop.step(judge(made.detach()).square().mean(), second)
        loop.backward((judge(made) - 1).square().mean(), first)
        first.step()
        first.zero_grad()
        second.zero_grad()
    found = loop.end(maker, first)
    return found | {f"judge {name}": v for name, v in loop.end(judge, second).items()}


def interrupted(loop: Loop) -> dict[str, Tensor]:
    """A forward and a backward fail, and evaluation comes between all calls of a step."""
    model, optimizer = loop.boost(net())
    found = {}

    def evaluated(what: str) -> None:
        model.eval()
        with torch.no_grad():
            found[what] = model(batch(99)).clone()
        model.train()

    evaluated("before")
    for step in range(STEPS):
        fails = model.blocks[3].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(batch(step))
        fails.remove()
        loss = loss_of(model, step)
        loss.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.backward(loss, optimizer)
        optimizer.zero_grad()
        loop.backward(loss_of(model, step), optimizer)
        optimizer.step()
        evaluated(f"stepped {step}")
        optimizer.zero_grad()
    return found | loop.end(model, optimizer)


def outside(loop: Loop) -> dict[str, Tensor]:
    """Reads and writes between passes, by the ways that loops have."""
    model, optimizer = loop.boost(net())
    mean = {name: value.detach().clone() for name, value in model.state_dict().items()}
    found = {}
    for step in range(STEPS):
        loop.step(loss_of(model, step), optimizer)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                mean[name].lerp_(parameter, 0.1)
            model.blocks[1].up.weight.mul_(0.99)
        model.blocks[2].up.weight.data.clamp_(-0.05, 0.05)
        model.blocks[4].down.bias.data[3] = 0.5
        model.blocks[3].down.bias.detach().mul_(0.75)
        with torch.no_grad():
            model.blocks[5].up.weight[2].zero_()
            model.head.weight.view(-1)[::2].add_(0.01)
        found[f"norm {step}"] = torch.stack([p.norm() for p in model.parameters()])
        found[f"sum {step}"] = sum(p.detach().sum() for p in model.parameters())
    with torch.no_grad():
        model.load_state_dict(
            {name: (v + mean[name]) / 2 for name, v in model.state_dict().items()}
        )
    loop.step(loss_of(model, STEPS), optimizer)
    found |= {f"mean {name}": value for name, value in mean.items()}
    return found | {k: v.detach().clone() for k, v in found.items()} | loop.end(model, optimizer)


def adapters(loop: Loop) -> dict[str, Tensor]:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["up", "down"], modules_to_save=["head"])
    torch.manual_seed(0)
    model, optimizer = loop.boost(peft.get_peft_model(Net(), config))
    found = {}
    for step in range(STEPS):
        loop.step(loss_of(model, step), optimizer)
        if step == 1:
            with torch.no_grad(), model.disable_adapter():
                found["base"] = model(batch(9)).clone()
    return found | loop.end(model, optimizer)


def unfreezes(loop: Loop) -> dict[str, Tensor]:
    """Layers are unfrozen one after the other, between all calls of a step, and frozen again."""
    model = net()
    model.blocks.requires_grad_(False)
    model, optimizer = loop.boost(model)
    for step in range(STEPS + 3):
        if step in (1, 2, 4):
            model.blocks[step].requires_grad_(True)
        loop.backward(loss_of(model, step), optimizer)
        if step == 2:
            model.blocks[0].up.weight.requires_grad_(True)  # for the next forward
        optimizer.step()
        if step == 3:
            model.blocks[2].requires_grad_(False)
            with torch.no_grad():
                model.blocks[3].down.weight.requires_grad_(True)
                model(batch(99))
        optimizer.zero_grad()
        if step == 5:
            model.blocks[2].requires_grad_(True)
            model.head.requires_grad_(False)
    return loop.end(model, optimizer)


def _compiled(loop: Loop, whole: bool) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = net()
    for part in [model] if whole else model.blocks:
        part.compile(backend="aot_eager")
    model, optimizer = loop.boost(model)
    for step in range(3):
        loop.step(loss_of(model, step), optimizer)
    return loop.end(model, optimizer)


def compiled_blocks(loop: Loop) -> dict[str, Tensor]:
    return _compiled(loop, whole=False)


def compiled_whole(loop: Loop) -> dict[str, Tensor]:
    return _compiled(loop, whole=True)


LOOPS: tuple[Callable[[Loop], dict[str, Tensor]], ...] = (
    skips,
    reuses,
    recomputes,
    two_losses,
    two_models,
    interrupted,
    outside,
    adapters,
    unfreezes,
    compiled_blocks,
    compiled_whole,
)


NUMBERS = [
    pytest.param(n, marks=[pytest.mark.full] if run is compiled_whole else [])
    for n, run in enumerate(LOOPS)
]
LATE = recomputes, two_losses, outside, compiled_blocks, compiled_whole
"""Accumulate, which `step_in_backward` refuses, or are the same with it."""


def _compared(world: World, folder: str, number: int) -> list[str]:
    """Names of what differs from plain torch, with updates in the step and in backward."""
    run, found = LOOPS[number], []
    expected = run(Loop(None))
    for early in (False, True):
        if early and run in LATE:
            continue
        loop = Loop(folder, early)
        values = run(loop)
        assert values.keys() == expected.keys()
        found += [f"{n} {early}" for n, v in expected.items() if not torch.equal(values[n], v)]
        if not loop.moved:
            found.append("nothing was read")
    return found


@pytest.mark.parametrize("number", NUMBERS, ids=[run.__name__ for run in LOOPS])
def test_a_loop_has_the_bits_of_torch(pool: Pool, tmp_path: Path, number: int) -> None:
    (found,) = pool.run(_compared, 1, str(tmp_path), number)
    assert not found, "\n".join(found)


def _frozen_net() -> Net:
    model = net()
    model.blocks.requires_grad_(False)
    return model


def _unfrozen(world: World, folder: str, limited: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Values of plain torch, of layers that were unfrozen on the way, and of a run resumed then."""

    def train(loop: Loop, model: nn.Module, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            if step == 1:
                model.blocks[2].requires_grad_(True)  # type: ignore[index]
            x = batch(step).double()  # AdamW makes much of small differences
            x = x if loop.folder is None else x[world.rank :: world.size]
            loop.step((model(x) - 1).square().mean(), optimizer)

    loops = Loop(None), Loop(folder), Loop(folder)
    values = []
    for loop in loops:
        loop.limited, loop.limit = limited, "32MiB"
        model, optimizer = loop.boost(_frozen_net().double())
        if loop is not loops[2]:
            train(loop, model, optimizer, 0, 3)
        else:
            assert loop.booster is not None
            model.blocks[2].requires_grad_(True)
            loop.booster.load(f"{folder}/run", model, optimizer)
        if loop is loops[1]:
            assert loop.booster is not None
            loop.booster.save(f"{folder}/run", 2, model, optimizer, use_async=False)
        train(loop, model, optimizer, 3, 5)
        values.append([v.detach().clone() for v in model.state_dict().values()])
    return list(zip(*values, strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_may_be_unfrozen_after_boost(pool: Pool, tmp_path: Path, ranks: int) -> None:
    for limited in (True, False):
        folder = tmp_path / str(limited)
        folder.mkdir()
        for plain, found, resumed in pool.run(_unfrozen, ranks, str(folder), limited)[0]:
            torch.testing.assert_close(found, plain, rtol=0, atol=0 if ranks == 1 else 1e-6)
            assert torch.equal(resumed, found)


def _halves(world: World, folder: str, precision: str) -> list[str]:
    """Names of what differs under a limit, of two models in 16 bits and what was unfrozen."""
    values = []
    for limited in (False, True):
        loop = Loop(folder)
        loop.limited, loop.precision, loop.limit = limited, precision, "25MiB"
        values.append(two_models(loop) | {f"unfrozen {n}": v for n, v in unfreezes(loop).items()})
    plain, found = values
    return [name for name, value in plain.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_have_the_bits_of_a_run_without_a_limit(
    pool: Pool, tmp_path: Path, precision: str
) -> None:
    assert pool.run(_halves, 1, str(tmp_path), precision) == [[]]


def _write_late(loop: Loop) -> None:
    """Writes a view of memory that is not looked at any more."""
    model, optimizer = loop.boost(net())
    taken: list[Tensor] = []
    hook = model.blocks[1].up.register_forward_hook(lambda m, *_: taken.append(m.weight.detach()))
    loop.backward(loss_of(model, 0), optimizer)
    hook.remove()
    taken[0].mul_(2)
    optimizer.step()


def _assign(loop: Loop) -> None:
    model, optimizer = loop.boost(net())
    model.head.bias.data = torch.ones(WIDTH)
    loop.step(loss_of(model, 0), optimizer)


def _share_reentrant(loop: Loop) -> None:
    model, optimizer = loop.boost(net(reuse=True, recompute=True))
    loop.step(model(batch(0).requires_grad_()).square().mean(), optimizer)


def _refusals(world: World, folder: str) -> list[tuple[str, str]]:
    """What is said under a limit, and without one, of the same loops."""
    found = []
    late = (_share_reentrant, True)
    for run, early in ((_write_late, False), (_assign, False), late):
        said = []
        for loop in (Loop(folder, early), Loop(folder, early)):
            loop.limited = not said
            with pytest.raises(GulliverError) as caught:
                run(loop)
            said.append(str(caught.value))
        found.append((said[0], said[1]))
    return found


def test_errors_are_the_same_without_limit(pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(_refusals, 1, str(tmp_path))
    parts = "for each write", "before boost", "step_in_backward"
    for (limited, plain), part in zip(found, parts, strict=True):
        assert part in limited
        assert part in plain
        assert "\n" not in limited


def test_parameter_metadata_is_right_in_every_tier(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters())
    plugin = GeminiPlugin("8MiB", disk=f"{tmp_path}:64MiB", chunk_mb=0.3, verbose=False)
    model, *_ = Booster(plugin=plugin).boost(model, optimizer)
    assert all(p.is_contiguous() for p in model.parameters())
