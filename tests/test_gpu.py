"""What must hold on a GPU; skips by itself without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gulliver.comm import World
from gulliver.data import Bucket
from gulliver.models import VideoAutoencoder, stdit3
from gulliver.video.digits import MovingDigits
from tests import parity
from tests.parity import CELLS, Cell, largest_error

pytestmark = pytest.mark.gpu


def _inputs(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    floats = {
        "x": torch.randn(2, 4, 3, 5, 6, generator=draw).to(dtype),
        "timestep": torch.tensor([100.0, 700.0]),
        "y": torch.randn(2, 1, 6, 32, generator=draw).to(dtype),
        "fps": torch.tensor([8.0, 24.0]),
        "height": torch.full((2,), 40.0),
        "width": torch.full((2,), 48.0),
    }
    masks = {
        "mask": torch.arange(6)[None] < torch.tensor([[3], [6]]),
        "x_mask": torch.tensor([[False, True, True], [True, True, True]]),
    }
    return {name: value.to(device) for name, value in {**floats, **masks}.items()}


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_stdit_on_a_gpu_equals_float64_on_the_host(dtype: torch.dtype, error: float) -> None:
    torch.manual_seed(0)
    model = stdit3("tiny", caption_channels=32, model_max_length=6, zero_init_temporal=False).eval()
    expected = model.double()(**_inputs("cpu", torch.float64))
    found = model.to("cuda", dtype)(**_inputs("cuda", dtype)).cpu().double()
    assert (found - expected).abs().max() <= error * expected.abs().max()


@pytest.mark.parametrize("cell", [CELLS[0], CELLS[8]], ids=["plain", "all"])
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_on_one_gpu_equals_a_plain_loop(
    cell: Cell, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters, gradients = parity.reference(cell, torch.float64)
    build, batch = parity.build, parity.batch

    def build_there(cell: Cell, dtype: torch.dtype):
        model, _ = build(cell, dtype)
        model = model.cuda()
        groups = build(cell, dtype)[1].param_groups
        trained = iter([p for p in model.parameters() if p.requires_grad])
        there = [{**group, "params": [next(trained) for _ in group["params"]]} for group in groups]
        return model, torch.optim.AdamW(there, eps=1e-6)

    monkeypatch.setattr(parity, "build", build_there)
    monkeypatch.setattr(parity, "batch", lambda s, c: tuple(t.cuda() for t in batch(s, c)))
    world = World(0, 1, 0, torch.device("cuda", 0))
    found, first = parity.boosted(world, cell, torch.float64, stage)
    assert largest_error({n: t.cpu() for n, t in first.items()}, gradients) <= 1e-10
    assert largest_error({n: t.cpu() for n, t in found.items()}, parameters) <= 1e-9


def test_the_autoencoder_on_a_gpu_equals_the_host() -> None:
    torch.manual_seed(0)
    model = VideoAutoencoder(width=16)
    clip = MovingDigits("heldout", 1, shapes={Bucket(5, 32, 32): 1.0})[0].video[None]
    expected = model.decode(model.encode(clip))
    model = model.cuda()
    found = model.decode(model.encode(clip.cuda())).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("mode", ["shadow", "ring"])
def test_a_checkpoint_is_the_step_although_the_device_goes_on(tmp_path: Path, mode: str) -> None:
    from gulliver.checkpoint import AsyncCheckpointer, load

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)

    def step() -> None:
        model(torch.ones(8, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with AsyncCheckpointer(tmp_path, mode=mode) as checkpointer:  # type: ignore[arg-type]
        for number in range(3):
            step()
            # Queued behind the step that is still running, and before the steps that follow.
            before = {name: value.detach().clone() for name, value in model.state_dict().items()}
            checkpointer.save(number, {"model": model, "optimizer": optimizer})
            step()
            step()
            checkpointer.wait()
            saved = load(tmp_path, step=number).values["model"]
            for name, value in before.items():
                assert torch.equal(saved[name], value.cpu()), name
    twin = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12))).cuda()
    other = torch.optim.AdamW(twin.parameters(), 1e-2, fused=True)
    load(tmp_path, {"model": twin, "optimizer": other})
    for name, value in twin.state_dict().items():
        assert torch.equal(value, before[name]), name
