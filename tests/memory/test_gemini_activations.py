"""Activations under a memory limit: kept, recomputed, off-loaded, or chosen; beside plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from gulliver.hardware import described
from gulliver.memory.activations import ActivationOffload
from gulliver.memory.buffers import ACTIVATIONS
from gulliver.memory.symbolic import StorageCounter
from gulliver.parallel.zero.checkpoint import relayout
from gulliver.plan.checks import check_plan
from gulliver.plan.plan import Plan
from gulliver.plan.tree import BlockWork, Work
from gulliver.planner.model import blocks_of, recomputable_blocks
from tests.pool import Pool

STEPS, WIDTH, BATCH = 3, 64, 256


class Block(nn.Module):
    """Attention-free block with a parameter of its own, dropout, and a checkpointed part."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop, self.nested = nn.Dropout(0.1), nested

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, x, use_reentrant=False) if self.nested else self.inner(x)
        return x + self.drop(self.scale * y)


def stack(depth: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(nested=number % 3 == 1) for number in range(depth)))


def flow(compiled: bool = False) -> nn.Module:
    """Blocks in a list of a model with layers around them, compiled one by one."""
    torch.manual_seed(0)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(Block(nested=False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.enter(x))
            for block in self.blocks:
                x = block(x)
            return self.leave(x)

    model = Flow()
    for block in model.blocks if compiled else ():
        block.compile(backend="aot_eager")
    return model


def batch(step: int, rows: int = BATCH) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def plain(make: Callable[[], nn.Module]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses, the gradient of an input among them, and values after some steps: by torch alone."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = list[Tensor]()
    for step in range(STEPS):
        torch.manual_seed(step)
        x = batch(step).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        assert x.grad is not None
        found += [loss.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
    return found, dict(model.state_dict())


def trained(booster: Booster, make: Callable[[], nn.Module]) -> tuple[Any, ...]:
    model = make()
    with patch.object(_limited, "Footprint", side_effect=OSError):
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    found = list[Tensor]()
    for step in range(STEPS):
        model.eval()
        # What is made first under inference_mode must be fit for training all the same.
        with torch.no_grad() if step % 2 else torch.inference_mode():
            model(batch(step))
        model.train()
        torch.manual_seed(step)
        x = batch(step).requires_grad_()
        loss = model(x).square().mean()
        booster.backward(loss, optimizer)
        assert x.grad is not None
        found += [loss.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return found, values, model, optimizer


def same(found: Any, wanted: Any) -> bool:
    losses = all(torch.equal(a, b) for a, b in zip(found[0], wanted[0], strict=True))
    return losses and all(torch.equal(found[1][name], value) for name, value in wanted[1].items())


def _modes(world: World, folder: str) -> dict[str, tuple[bool, int]]:
    """Whether values are those of torch, and most bytes of activations that a manager held."""
    found = dict[str, tuple[bool, int]]()
    options: dict[str, Any] = {"disk": f"{folder}:64MiB", "chunk_mb": 0.05, "verbose": False}
    for name, make, more in (
        ("keep", stack, {}),
        ("recompute", stack, {"activations": "recompute"}),
        ("offload", stack, {"activations": "offload"}),
        ("least", stack, {"activations": "offload"}),
        ("early", stack, {"activations": "offload", "step_in_backward": True}),
        ("least, early", stack, {"step_in_backward": True}),
        ("least, again", stack, {"activations": "recompute", "step_in_backward": True}),
        ("compiled", lambda: flow(compiled=True), {"activations": "offload"}),
    ):
        limit: str | int = "3MiB"
        if name.startswith("least"):
            roomy = GeminiPlugin("1GiB", **options, **more)
            plan = roomy.make_plan(model := make(), torch.optim.AdamW(model.parameters()))
            limit = plan.predicted.moved.minimum + 8192 * ("offload" in more.values())
        booster = Booster(plugin=GeminiPlugin(limit, **options, **more))
        got = trained(booster, make)
        found[name] = same(got, plain(flow if name == "compiled" else make)), held(got)
        if name in ("recompute", "offload"):
            average = copy.deepcopy(got[2]).eval()  # its calls are its own
            for parameter in average.parameters():
                parameter.data.zero_()
            found[f"copy of {name}"] = torch.equal(average(batch(0)), batch(0)), 0
    model, work = stack(), Work(samples=BATCH, peak=1 << 20, peak_mixed=1 << 20)
    plan = GeminiPlugin("8MiB", activations="keep", **options).make_plan(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), work=work
    )
    edits = {
        'activations: "keep"': 'activations: "mixed"',
        "offloaded: []": 'offloaded: ["0", "2"]',
        "recompute: []": 'recompute: ["1", "3"]',
    }
    text = plan.to_yaml()
    for old, new in edits.items():
        assert old in text, old
        text = text.replace(old, new, 1)
    got = trained(Booster(plan=Plan.from_yaml(text), verbose=False), stack)
    found["mixed"] = same(got, plain(stack)), held(got)
    return found


def held(got: tuple[Any, ...]) -> int:
    return got[3].shards.manager.counter.peak.get(ACTIVATIONS, 0)


def test_activation_policy_does_not_change_results(pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(_modes, 1, str(tmp_path))
    assert [name for name, (equal, _) in found.items() if not equal] == []
    moved = {name for name, (_, most) in found.items() if most}
    assert moved == {"offload", "least", "early", "compiled", "mixed"}


def _recut(world: World, folder: str) -> tuple[bool, list[str]]:
    """Whether values stay those of torch when chunks are cut anew, and who makes room then."""
    options: dict[str, Any] = {"disk": f"{folder}:64MiB", "chunk_mb": 0.05, "verbose": False}
    booster, asked = Booster(plugin=GeminiPlugin("3MiB", activations="offload", **options)), []
    boost = booster.boost

    def recut(*arguments: Any) -> Any:
        model, optimizer, *rest = boost(*arguments)
        assert relayout(optimizer.shards, [name for name, _ in model.named_parameters()], 1 << 17)
        return model, optimizer, *rest

    with patch.object(booster, "boost", recut):
        got = trained(booster, stack)
    shards = got[3].shards
    with (
        patch.object(ActivationOffload, "sweep", lambda self: asked.append("activations")),
        patch.object(shards.gatherer, "release_idle", lambda: asked.append("parameters")),
        patch.object(shards.reducer, "release_idle", lambda: asked.append("gradients")),
    ):
        shards.manager.release_idle()
    return same(got, plain(stack)), asked


def test_activations_are_evicted_after_rechunking(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_recut, 1, str(tmp_path)) == [
        (True, ["activations", "parameters", "gradients"])
    ]


def _ranks(world: World, folder: str) -> tuple[bool, int]:
    """Whether two ranks have the values of two that keep their activations."""
    options: dict[str, Any] = {"memory_limit": "4MiB", "disk": f"{folder}:64MiB"}
    kept, moved = (
        trained(
            Booster(plugin=LowLevelZeroPlugin(3, 0.05, verbose=False, activations=a, **options)),
            stack,
        )
        for a in ("keep", "offload")
    )
    return same(moved, kept), held(moved)


def test_two_ranks_off_load_what_they_have(pool: Pool, tmp_path: Path) -> None:
    assert all(equal and most > 0 for equal, most in pool.run(_ranks, 2, str(tmp_path)))


def _large(world: World, folder: str) -> tuple[str, int, int, int]:
    """What keeping is refused with; bytes of a step kept, its limit, most when off-loaded."""
    limit, sample = 48 << 20, batch(0, 4096)
    options: dict[str, Any] = {"disk": f"{folder}:256MiB", "verbose": False}
    model = stack(16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    refused = ""
    try:
        GeminiPlugin(limit, **options).make_plan(model, optimizer, sample=sample)
    except GulliverError as error:
        refused = str(error)
    plugin = GeminiPlugin(limit, activations="offload", **options)
    plan = plugin.make_plan(model, optimizer, sample=sample)
    with patch.object(_limited, "Footprint", side_effect=OSError):
        booster = Booster(plan=plan, verbose=False)
        model, boosted, *_ = booster.boost(model, optimizer)
    with StorageCounter() as counter:  # of whatever is made in a step, by whomever
        booster.backward(model(sample).square().mean(), boosted)
        boosted.step()
    return refused, plan.work.peak, limit, counter.peak


def test_a_step_whose_activations_exceed_the_limit_keeps_to_it(pool: Pool, tmp_path: Path) -> None:
    ((refused, kept, limit, most),) = pool.run(_large, 1, str(tmp_path))
    assert "for activations in a step; the smallest limit that works" in refused
    assert kept > 2 * limit
    assert most <= limit


# What is chosen


def _work(forward_s: float, unfollowed: str = "") -> Work:
    """A step of twelve equal blocks: 8 MiB each, and one more for the pass of one."""
    size = 8 << 20
    blocks = [BlockWork(str(n), forward_s, size, 1 << 14, 1 << 20, size, size) for n in range(12)]
    rest = BlockWork("", 0.0, 0, 0, 1 << 20)
    peak = 12 * (size + (1 << 14)) + (1 << 20)
    sums: dict[str, Any] = {"forward_s": 12 * forward_s, "backward_s": 24 * forward_s}
    peaks: dict[str, Any] = {"peak": peak, "peak_recomputed": 10 << 20, "peak_offloaded": 2 << 20}
    if unfollowed:
        return Work(samples=8, **sums, activations=peak, unfollowed=unfollowed)
    return Work(samples=8, **sums, **peaks, blocks=(*blocks, rest))


@pytest.mark.parametrize(
    ("limit", "work", "mode", "told"),
    [
        ("512MiB", _work(0.01), "keep", "12 keep of 12 blocks"),
        # 96 MiB of activations in 64: a block takes a tenth of the disk's time for it, or ten.
        ("64MiB", _work(1e-4), ("mixed", "recompute"), "recompute of 12 blocks"),
        ("64MiB", _work(1.0), ("mixed", "offload"), "offload of 12 blocks"),
        ("512MiB", _work(0.01, "DataDependent: no"), "keep", "DataDependent: no"),
        ("128MiB", _work(0.01, "DataDependent: no"), "recompute", "DataDependent: no"),
        ("512MiB", Work(), "keep", "no sample was given"),
    ],
)
def test_activations_are_chosen_for_by_block(
    limit: str, work: Work, mode: str | tuple[str, ...], told: str
) -> None:
    with torch.device("meta"):
        block = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU())  # noqa: E731
        model = nn.Sequential(*(block() for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters())
    plugin = GeminiPlugin(limit, disk="/tmp:1GiB", activations="auto", verbose=False)
    cluster = described("cpu-loopback").resized(1)
    plan = plugin.make_plan(model, optimizer, cluster, work=work)
    assert plan.zero is not None
    assert plan.zero.tiers is not None
    tiers = plan.zero.tiers
    assert tiers.activations in mode
    assert told in plan.reasons["zero.tiers.activations"]
    assert f"zero.tiers.activations: {tiers.activations}: " in plan.summary()
    if "recompute" in told:
        assert len(plan.recompute) > len(tiers.offloaded)
    if "offload" in told:
        assert len(tiers.offloaded) > len(plan.recompute) or tiers.activations == "offload"
    assert Plan.from_yaml(plan.to_yaml()) == plan
    if work.blocks and limit == "64MiB":
        assert plan.predicted.moved is not None
        assert (plan.predicted.moved.written > 0) == tiers.takes_activations


# Blocks


def _lists() -> nn.Module:
    """Lists in lists, as of a UNet, and a block of their class beside them."""
    down = nn.ModuleList(nn.ModuleList(Block(False) for _ in range(2)) for _ in range(2))
    parts = {
        "down": down,
        "middle": Block(False),
        "time": nn.Sequential(nn.Linear(2, 2), nn.SiLU()),
    }
    return nn.ModuleDict(parts)


def _normed() -> nn.Module:
    parts = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    return nn.Sequential(*parts, *(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)))


@pytest.mark.parametrize(
    ("make", "blocks", "again"),
    [
        (lambda: stack(2), ["0", "1"], ["0", "1"]),
        (_lists, ["down.0.0", "down.0.1", "down.1.0", "down.1.1", "middle"], None),
        (_normed, ["0", "1", "2", "3"], ["2", "3"]),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), [], []),
        (lambda: nn.Linear(2, 2), [], []),
    ],
)
def test_blocks_are_found_by_form(
    make: Callable[[], nn.Module], blocks: list[str], again: list[str] | None
) -> None:
    model = make()
    assert list(blocks_of(model)) == blocks
    assert list(recomputable_blocks(model)) == (blocks if again is None else again)


@pytest.mark.parametrize(
    ("make", "plugin", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
            lambda: GeminiPlugin("64MiB", activations="recompute"),
            "no blocks",
        ),
        (
            lambda: flow(compiled=True),
            lambda: GeminiPlugin("64MiB", activations="recompute"),
            "block 'blocks.0' is compiled",
        ),
        (
            stack,
            lambda: GeminiPlugin("64MiB", activations="offload"),
            "activations='offload' needs a slower tier",
        ),
        (
            stack,
            lambda: LowLevelZeroPlugin(3, activations="offload"),
            "activations='offload' needs a memory_limit",
        ),
    ],
)
def test_unsupported_activation_policies_are_rejected(
    make: Callable[[], nn.Module], plugin: Callable[[], Any], message: str
) -> None:
    with pytest.raises(GulliverError, match=message) as caught:
        Booster(plugin=plugin()).boost(model := make(), torch.optim.AdamW(model.parameters()))
    assert "\n" not in str(caught.value)


def test_paths_that_a_plan_names_are_checked() -> None:
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters())
    plugin = GeminiPlugin("64MiB", disk="/tmp:64MiB", verbose=False)
    text = plugin.make_plan(model, optimizer).to_yaml().replace("offloaded: []", "offloaded: ['9']")
    with pytest.raises(GulliverError, match="blocks need activations: mixed"):
        check_plan(Plan.from_yaml(text), 1)
    text = text.replace('activations: "keep"', 'activations: "mixed"')
    with pytest.raises(GulliverError, match=r"zero.tiers.offloaded names '9', which the model"):
        Booster(plan=Plan.from_yaml(text)).boost(model, optimizer)
