"""Parameters that travel packed: ranks compute with the same ones, shards and files stay exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gulliver.booster import Booster, GeminiPlugin, LowLevelZeroPlugin
from gulliver.comm import World, barrier
from gulliver.precision.wire import error_bound, wire_format
from tests.pool import Pool

LR, STEPS = 0.05, 4
PLUGINS: dict[str, tuple[Any, dict[str, Any]]] = {
    "stage 1": (LowLevelZeroPlugin, {"stage": 1, "chunk_mb": 0.05}),
    "stage 2": (LowLevelZeroPlugin, {"stage": 2, "chunk_mb": 0.05}),
    "stage 3": (LowLevelZeroPlugin, {"stage": 3, "chunk_mb": 0.05}),
    "torus": (
        LowLevelZeroPlugin,
        {"stage": 2, "chunk_mb": 0.05, "axes": {"node": 2, "local": 2}},
    ),
    "gemini": (GeminiPlugin, {"memory_limit": "64MiB"}),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.LayerNorm(64))


def _trained(
    world: World, name: str, wire: str, folder: str, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Steps with packed parameters, and a twin of the shards made of the gradients as they were."""
    plugin, options = PLUGINS[name]
    packed = {"communication_dtype": {"gather": wire}, "force_communication_dtype": True}
    booster = Booster(plugin=plugin(**options, **packed, verbose=False))
    model = _model().to(dtype)
    twin = {n: p.detach().float().clone() for n, p in model.named_parameters()}
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=LR))
    used: dict[str, Tensor] = {}
    shards: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}
    for step in range(STEPS):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + world.rank))
        hooks = [
            module.register_forward_hook(
                lambda m, i, o, path=path: used.update(
                    (f"{path}.{n}", p.detach().clone()) for n, p in m.named_parameters()
                )
            )
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear)
        ]
        loss = (model(x.to(dtype)).float() - x.sin()).square().mean()
        for hook in hooks:
            hook.remove()
        shards = {n: t.clone() for n, t in twin.items()}
        booster.backward(loss, optimizer)
        for key, gradient in optimizer.full_gradients().items():
            last[key] = LR * gradient.float()
            twin[key].add_(gradient.float(), alpha=-LR)
        optimizer.step()
        optimizer.zero_grad()
    read = {n: p.detach().clone() for n, p in model.named_parameters()}
    booster.save_model(model, folder)
    barrier()
    return {"used": used, "shards": shards, "twin": twin, "read": read, "last": last}


@pytest.mark.parametrize("name", PLUGINS)
def test_ranks_compute_with_the_same_values_and_files_have_the_exact_ones(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    ranks = 4 if name == "torus" else 2
    path = tmp_path / "model.safetensors"
    found = pool.run(_trained, ranks, name, "fp8", str(path))
    saved = load_file(path)
    bound = error_bound(wire_format("fp8"))
    whole = name in ("stage 3", "gemini")  # values travel, and not changes of them
    for key, value in found[0]["twin"].items():
        torch.testing.assert_close(saved[key], value, rtol=0, atol=1e-6)
        for other in found[1:]:
            assert torch.equal(other["read"][key], found[0]["read"][key])
        off = (found[0]["read"][key] - value).abs()
        most = sum(found[0]["last"][key].abs().max() for _ in range(2))
        assert float(off.max()) <= (1e-6 if whole else float(bound.relative * most))
    for key, value in found[0]["used"].items():
        exact = found[0]["shards"][key]
        assert all(torch.equal(other["used"][key], value) for other in found[1:])
        assert not torch.equal(value, exact)
        most = float(exact.abs().max()) if whole else 2 * float(found[0]["last"][key].abs().max())
        assert float((value - exact).abs().max()) <= (bound.relative + bound.of_largest) * most


def test_sixteen_bits_are_rounded_from_exact_copies(pool: Pool, tmp_path: Path) -> None:
    for name in ("stage 2", "stage 3"):
        path = tmp_path / name / "model.safetensors"
        path.parent.mkdir()
        found = pool.run(_trained, 2, name, "int8", str(path), torch.bfloat16)
        for key, value in found[0]["twin"].items():
            read = found[0]["read"][key]
            assert torch.equal(read, found[1]["read"][key])
            torch.testing.assert_close(read.float(), value, rtol=2**-7, atol=2e-4)


def _written(world: World, stage: int, folder: str) -> dict[str, Tensor]:
    """Parameters after a write by the user, a step, and a load of what was saved before it."""
    packed = {"communication_dtype": {"gather": "int4"}, "force_communication_dtype": True}
    plugin = LowLevelZeroPlugin(stage, 0.05, **packed, verbose=False)
    booster, model = Booster(plugin=plugin), _model()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=LR))
    first = next(iter(model.parameters()))

    def step() -> None:
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(world.rank))
        booster.backward((model(x) - x.sin()).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = first.detach().clone()
    with torch.no_grad():
        first.mul_(0.5)
    after = first.detach().clone()
    booster.save_model(model, folder)
    barrier()
    step()
    stepped = first.detach().clone()
    booster.load_model(model, folder)
    loaded = first.detach().clone()
    return {"before": before, "after": after, "stepped": stepped, "loaded": loaded}


@pytest.mark.parametrize("stage", [2, 3])
def test_writes_reach_the_shards_and_loaded_values_are_exact(
    pool: Pool, tmp_path: Path, stage: int
) -> None:
    path = tmp_path / "model.safetensors"
    found = pool.run(_written, 2, stage, str(path))
    saved = load_file(path)["0.weight"]
    for answer in found:
        assert torch.equal(answer["after"], answer["before"] / 2)
        assert torch.equal(answer["loaded"], saved)
        # What the user wrote is in the shards; changes that travel in four bits lose more.
        torch.testing.assert_close(saved, answer["after"], rtol=0, atol=0)
        assert not torch.equal(answer["stepped"], answer["loaded"])
        assert torch.equal(answer["stepped"], found[0]["stepped"])
