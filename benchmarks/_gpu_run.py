"""What the parts of `benchmarks.gpu` share: the device, a world of one rank, clocks, figures."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gulliver.comm import World
from gulliver.comm.world import adopt_world


class PartSkipped(Exception):
    """A part that cannot run here, with the reason."""


@dataclass
class GpuRun:
    """A part that is running, in a world of one rank with a process group."""

    device: torch.device  # that it runs on
    dry: bool  # whether sizes are tiny, on the CPU
    state: dict[str, Any]  # figures and checks so far
    save: Callable[[], object]  # writes the state down
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> GpuRun:
        self.folder = Path(tempfile.mkdtemp(prefix="gulliver-gpu-"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        backend = "gloo" if self.dry else "cpu:gloo,cuda:nccl"
        store = dist.FileStore(str(self.folder / "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        self._stack.callback(dist.destroy_process_group)
        adopt_world(World(0, 1, 0, self.device))
        self._stack.callback(adopt_world, None)
        torch.manual_seed(0)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def figure(self, name: str, value: Any) -> None:
        """Writes a figure down."""
        self.state["figures"][name] = round(value, 9) if isinstance(value, float) else value
        self.save()

    def check(self, name: str, value: float, limit: float) -> None:
        """Writes a figure down that must not exceed a limit; NaN does."""
        self.state["checks"][name] = {"limit": limit, "holds": value <= limit}
        self.figure(name, value)

    def sized(self, on_gpu: int, dry: int) -> int:
        """Returns the size on a GPU, or that of a dry run."""
        return dry if self.dry else on_gpu

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of a call, the device's work included."""
        self.wait()
        begun = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - begun

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Most bytes on the device during a call; 0 on a CPU."""
        if self.device.type != "cuda":
            call()
            return 0
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def empty_cache(self) -> None:
        """Gives cached memory back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def blocks(count: int, width: int, device: torch.device) -> nn.Sequential:
    """Returns linear layers with GELU, always with the same weights."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count))
    return nn.Sequential(*layers).to(device)


def apart(found: Tensor, wanted: Tensor) -> float:
    """Returns the largest difference, as a share of the largest wanted magnitude."""
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
