"""Caches of sampling re-use what their rules say, and compute what a twin that stores by hand does.

The twin computes everything, and puts what it has kept in the place of what was computed, by hooks.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.models import MMDiT, STDiT, STDiT2, STDiT3
from gulliver.video import RectifiedFlow, cache_blocks
from gulliver.video.caches import Broadcast, FirstBlock, psnr, read_strategy
from gulliver.video.generation import share
from tests.parallel.test_stdit_parallel import Case, build, inputs_of
from tests.pool import Pool
from tests.video.test_video_models import JOINT, SMALL, _smoke_inputs, drawn, shaken

LEVELS = [1000.0 - 85 * number for number in range(12)]
RULE = Broadcast(2, 3, 5, 4, window=(300.0, 900.0))
Run = Callable[[float, Tensor], Tensor]


def _windows() -> tuple[nn.Module, dict[str, Any]]:
    fields = {"kernel_size": (2, 2, -1), "use_spatial_rope": True, "image_conditioning": True}
    inputs = _smoke_inputs(STDiT3)
    cond = torch.zeros(2, 3, 2, 6, 4).double()
    cond[:, :, 0] = 0.5
    return STDiT3(**{**SMALL, **fields}), {
        **inputs,
        **{"cond": cond, "cond_mask": (cond != 0).double(), "mask_index": [0]},
    }


def _masked(kind: Any) -> tuple[nn.Module, dict[str, Any]]:
    given = torch.tensor([[False, True], [True, True]])
    return kind(**SMALL), {**_smoke_inputs(kind), "x_mask": given}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "first": lambda: (STDiT(**SMALL, input_size=(2, 6, 4)), _smoke_inputs(STDiT)),
    "second": lambda: _masked(STDiT2),
    "third": lambda: _masked(STDiT3),
    "windows": _windows,
    "joint": lambda: (MMDiT(**JOINT), _smoke_inputs(MMDiT)),
    "joint without single blocks": lambda: (
        MMDiT(**{**JOINT, "depth_single_blocks": 0}),
        _smoke_inputs(MMDiT),
    ),
}


def made(name: str) -> tuple[nn.Module, Tensor, Run]:
    """A model in float64, what it begins from, and a call of it at a noise level."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    shaken(model).eval()
    joint = isinstance(model, MMDiT)
    x = inputs.pop("img" if joint else "x")
    inputs.pop("timesteps" if joint else "timestep")

    def run(level: float, x: Tensor) -> Tensor:
        t = torch.full((len(x),), level).double()
        if joint:
            return model(img=x, timesteps=t / 1000, **inputs)
        return model(x, t, **inputs)[:, : x.shape[1]]

    return model, x, run


@torch.no_grad()
def follow(run: Run, x: Tensor) -> list[Tensor]:
    """Outputs along a path on which each depends on those before it."""
    outputs = []
    for level in LEVELS:
        outputs.append(run(level, x))
        x = x + 0.02 * outputs[-1] / outputs[-1].std()
    return outputs


def blocks_of(model: Any) -> list[Any]:
    if isinstance(model, MMDiT):
        return [*model.double_blocks, *model.single_blocks]
    if isinstance(model, STDiT3):
        return [
            b for two in zip(model.spatial_blocks, model.temporal_blocks, strict=True) for b in two
        ]
    return list(model.blocks)


def probes(block: Any) -> dict[nn.Module, str]:
    """Layers that run where an output of a kind is computed."""
    if hasattr(block, "img_attn"):
        return {block.img_attn.norm: "spatial", block.img_mlp[0]: "mlp", block.txt_mlp[0]: "mlp"}
    if hasattr(block, "linear2"):
        return {block.norm: "spatial"}
    own = "temporal" if getattr(block, "temporal", False) else "spatial"
    found = {block.attn.qkv: own, block.cross_attn.q_linear: "cross", block.mlp.fc1: "mlp"}
    return found | ({block.attn_temp.qkv: "temporal"} if hasattr(block, "attn_temp") else {})


class Twin:
    """Stores by hand, while everything is computed.

    Attributes:
        computed: numbers of the calls that computed all blocks.
    """

    def __init__(self, model: nn.Module, rule: Broadcast | FirstBlock) -> None:
        self.number, self.calls = -1, defaultdict[Any, int](int)
        self.rule: Any = rule
        self.kept: dict[Any, Any] = {}
        self.computed: list[int] = []
        model.register_forward_pre_hook(self._begin)
        blocks = blocks_of(model)
        if isinstance(rule, Broadcast):
            for block in blocks:
                self._hook(block)
        else:
            blocks[0].register_forward_hook(self._first)
            blocks[-1].register_forward_hook(self._last)

    def _begin(self, *_: Any) -> None:
        self.number += 1
        self.calls.clear()

    def _hook(self, block: Any) -> None:
        if hasattr(block, "img_attn"):
            for proj in (block.img_attn.proj, block.txt_attn.proj):
                self._input(proj, block.img_attn.proj.in_features)
            for mlp in (block.img_mlp, block.txt_mlp):
                self._output(mlp, "mlp")
        elif hasattr(block, "linear2"):
            self._input(block.linear2, block.hidden_size)
        else:
            own = "temporal" if getattr(block, "temporal", False) else "spatial"
            self._output(block.attn, own)
            self._output(block.cross_attn, "cross")
            self._output(block.mlp, "mlp")
            if hasattr(block, "attn_temp"):
                self._output(block.attn_temp, "temporal")

    def _stored(self, module: nn.Module, kind: str, value: Any) -> Any:
        key = module, self.calls[module]
        self.calls[module] += 1
        level = LEVELS[self.number]
        if 300 < level < 900 and self.number % getattr(self.rule, kind) != 0:
            return self.kept[key]
        self.kept[key] = value
        return value

    def _output(self, module: nn.Module, kind: str) -> None:
        module.register_forward_hook(lambda m, _, out: self._stored(m, kind, out))

    def _input(self, module: nn.Module, width: int) -> None:
        def hook(m: nn.Module, args: tuple[Tensor]) -> Tensor:
            mixed, rest = args[0][..., :width], args[0][..., width:]
            return torch.cat([self._stored(m, "spatial", mixed), rest], dim=-1)

        module.register_forward_pre_hook(hook)

    def _first(self, block: Any, args: Any, out: Any) -> None:
        pair = isinstance(out, tuple)
        self.after = torch.cat(out[::-1], dim=1) if pair else out
        added = (out[0] if pair else out) - args[0]
        rows = range(len(added))
        before = self.kept.get("first")
        self.reuse = before is not None and all(
            (added[n] - before[n]).abs().mean() / before[n].abs().mean() < self.rule.threshold
            for n in rows
        )
        if not self.reuse:
            self.kept["first"] = added
            self.computed.append(self.number)

    def _last(self, block: Any, args: Any, out: Any) -> Any:
        pair = isinstance(out, tuple)
        whole = torch.cat(out[::-1], dim=1) if pair else out
        if not self.reuse:
            self.kept["rest"] = whole - self.after
            return out
        whole = self.after + self.kept["rest"]
        words = out[1].shape[1] if pair else 0
        return (whole[:, words:], whole[:, :words]) if pair else whole


def ran(model: nn.Module, modules: list[nn.Module]) -> dict[nn.Module, set[int]]:
    """Numbers of the calls of a model in which modules run, filled as it is called."""
    calls, found = [-1], {module: set[int]() for module in modules}

    def count(*_: Any) -> None:
        calls[0] += 1

    model.register_forward_pre_hook(count)
    for module in modules:
        module.register_forward_hook(lambda m, *_: found[m].add(calls[0]))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_attention_is_broadcast_by_the_rule_and_equals_the_twin(name: str) -> None:
    twin, x, run = made(name)
    Twin(twin, RULE)
    expected = follow(run, x)
    model, x, run = made(name)
    layers = {layer: kind for block in blocks_of(model) for layer, kind in probes(block).items()}
    computed = ran(model, list(layers))
    with cache_blocks(model, RULE) as cache:
        found = follow(run, x)
    for output, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
    for layer, kind in layers.items():
        n = {"spatial": 2, "temporal": 3, "cross": 5, "mlp": 4}[kind]
        assert computed[layer] == {
            number
            for number, level in enumerate(LEVELS)
            if not 300 < level < 900 or number % n == 0
        }, kind
    parts = [kind for kind in layers.values() if kind == "mlp"]
    assert cache.counts.ran["mlp"] + cache.counts.reused["mlp"] == len(LEVELS) * len(parts)
    assert cache.counts.nbytes > 0
    plain = follow(run, x)
    assert not torch.allclose(found[-1], plain[-1], rtol=1e-6)
    assert torch.equal(plain[0], found[0])


def usual_change(model: nn.Module, run: Run, x: Tensor) -> float:
    """The median change of what the first block adds from call to call, and a bit."""
    added: list[Tensor] = []

    def note(block: Any, args: Any, out: Any) -> None:
        added.append((out[0] if isinstance(out, tuple) else out) - args[0])

    handle = blocks_of(model)[0].register_forward_hook(note)
    follow(run, x)
    handle.remove()
    pairs = [(a.flatten(1), b.flatten(1)) for a, b in pairwise(added)]
    changes = [float(((b - a).abs().mean(1) / a.abs().mean(1)).max()) for a, b in pairs]
    return 1.01 * sorted(changes)[len(changes) // 2]


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_skipped_while_the_first_hardly_changes_and_equal_the_twin(name: str) -> None:
    twin, x, run = made(name)
    change = usual_change(twin, run, x)
    stored = Twin(twin, FirstBlock(change))
    expected = follow(run, x)
    assert 1 < len(stored.computed) < 10, "the test must see both"
    model, x, run = made(name)
    computed = ran(model, [layer for block in blocks_of(model)[1:] for layer in probes(block)])
    with cache_blocks(model, f"first-block:{change}") as cache:
        found = follow(run, x)
    for output, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
    assert all(numbers == set(stored.computed) for numbers in computed.values())
    others = len(blocks_of(model)) - 1
    assert cache.counts.ran["blocks"] == others * len(stored.computed)
    assert cache.counts.reused["blocks"] == others * (len(LEVELS) - len(stored.computed))


@pytest.mark.parametrize("name", MODELS)
def test_without_reuse_every_bit_is_the_same(name: str) -> None:
    model, x, run = made(name)
    plain = follow(run, x)
    for strategy in ("broadcast:1,1,1", "broadcast:2,2,2,2@0-1", "first-block:0", "none"):
        with cache_blocks(model, strategy):
            found = follow(run, x)
        assert all(map(torch.equal, found, plain)), strategy
    assert all("forward" not in vars(m) and "attend" not in vars(m) for m in model.modules())


def test_a_level_that_does_not_fall_begins_another_sampling() -> None:
    model, x, run = made("third")
    for strategy in (RULE, FirstBlock(0.6)):
        with cache_blocks(model, strategy):
            first, again = follow(run, x), follow(run, x)
        assert all(map(torch.equal, first, again))


def test_inputs_of_another_shape_have_a_memory_of_their_own() -> None:
    model, x, _ = made("third")
    smaller = x[:1]
    inputs = {key: value for key, value in _masked(STDiT3)[1].items() if key not in ("x",)}

    @torch.no_grad()
    def alternately(models: list[nn.Module]) -> list[Tensor]:
        outputs = []
        for number, level in enumerate(LEVELS):
            each = x if number % 2 else smaller
            given = {name: value[: len(each)] for name, value in inputs.items()}
            given["timestep"] = torch.full((len(each),), level).double()
            outputs.append(models[number % 2](each, **given))
        return outputs

    other = copy.deepcopy(model)
    with cache_blocks(model, FirstBlock(0.6)) as one, cache_blocks(other, FirstBlock(0.6)) as two:
        expected = alternately([model, other])
    with cache_blocks(model, FirstBlock(0.6)) as both:
        found = alternately([model, model])
    assert all(map(torch.equal, found, expected))
    assert both.counts.reused.total() == (one.counts.reused + two.counts.reused).total() > 0


def _sampled(model: Any, case: Case, strategy: str, cached: nn.Module, whole: Any) -> Any:
    """A clip in float64 made with guidance, and what its cache has saved."""
    inputs = inputs_of(case)
    noise, null = inputs.pop("x").detach(), torch.zeros_like(inputs["y"])
    mask = inputs.pop("x_mask")
    del inputs["timestep"]
    inputs["y"] = inputs["y"].detach()
    with cache_blocks(cached, strategy, whole) as cache:
        made = RectifiedFlow(shift=3.0).sample(
            model, noise, inputs, null_inputs={"y": null}, steps=10, cfg_scale=2.5,
            given=None if mask is None else noise.cos(), mask=mask,
        )  # fmt: skip
    return made, str(cache.counts)


def _shared(world: World, sequence: int, guidance_ranks: int) -> list[tuple[float, str, str]]:
    alone = build().eval()
    own = copy.deepcopy(alone)
    shared = share(own, sequence, guidance_ranks)
    found = []
    for case in (Case(4, 6, 6), Case(5, 4, 6, given=True)):
        for strategy in ("broadcast:2,3,4,2@100-990", "first-block:0.8"):
            expected, saved = _sampled(alone, case, strategy, alone, None)
            clip, counts = _sampled(shared.model, case, strategy, own, shared.whole)
            error = float((clip - expected).abs().max() / expected.abs().max())
            found.append((error, counts.partition(";")[0], saved.partition(";")[0]))
    return found


@pytest.mark.parametrize(("sequence", "guidance_ranks"), [(1, 2), (2, 1), (2, 2)])
def test_ranks_that_make_a_clip_together_decide_as_one(
    pool: Pool, sequence: int, guidance_ranks: int
) -> None:
    for found in pool.run(_shared, sequence * guidance_ranks, sequence, guidance_ranks):
        for error, counts, saved in found:
            assert error <= 1e-11
            assert counts == saved
            assert "blocks 0" not in saved, "the test must see blocks skipped"


def test_training_and_invalid_cache_options_are_rejected() -> None:
    model, x, run = made("third")
    with cache_blocks(model, "first-block"):
        with pytest.raises(GulliverError, match=r"is for sampling; call model\.eval\(\)"):
            run(500.0, x)
        model.train()
        with torch.no_grad(), pytest.raises(GulliverError, match="is for sampling"):
            run(500.0, x)
        with pytest.raises(GulliverError, match="already has a cache"):
            cache_blocks(model, "broadcast").__enter__()
    with pytest.raises(GulliverError, match="a Linear does not support caching"):
        cache_blocks(nn.Linear(1, 1), "broadcast")
    one = STDiT(**{**SMALL, "depth": 1}, input_size=(2, 6, 4))
    with pytest.raises(GulliverError, match="at least two blocks"):
        cache_blocks(one, "first-block")


def test_strategies_are_read_as_they_are_written() -> None:
    assert read_strategy("none") is None
    assert read_strategy("broadcast:2,4,6,3@100-800") == Broadcast(2, 4, 6, 3, (100.0, 800.0))
    for strategy in (Broadcast(), RULE, FirstBlock(), FirstBlock(0.25)):
        assert read_strategy(str(strategy)) == strategy


def test_the_ratio_is_of_the_peak_to_the_mean_square_error() -> None:
    clip = drawn(3, 2, 4, 4).clamp(-1, 1)
    error = 0.01 * drawn(3, 2, 4, 4, seed=1)
    assert psnr(clip, clip) == math.inf
    expected = 20 * math.log10(2 / float(error.square().mean().sqrt()))
    assert math.isclose(psnr(clip + error, clip), expected, rel_tol=1e-9)
