"""STDiT3 in time: the demonstration's model, and one pair of XL/2 blocks.

Beside each, in turns: the same module with attention computed by its definition (torch's math
kernel), the peer that shows what the fused kernel is worth on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._harness import Report, alternate, at_most, finish
from gulliver.models import STDiT3, stdit3

NOTHING_LOST = 1.05
"""The fused kernel may not be slower than the definition, up to what clocks show."""


@dataclass(frozen=True)
class Options:
    """What to measure."""

    rounds: int = 7
    """Turns of each contestant."""
    threads: int = 0
    """Threads of torch; 0: as it finds them."""
    keep: bool = False
    """Write the result file."""


@dataclass(frozen=True)
class Case:
    """A model, the batch and latent that it is fed, and how that is called."""

    name: str
    model: STDiT3
    batch: int
    latent: tuple[int, int, int]
    words: int


def cases(device: torch.device) -> list[Case]:
    """The demonstration's training step, and a clip of 16 x 16 x 16 tokens through XL/2."""
    tiny = stdit3("tiny", in_channels=8, caption_channels=64, model_max_length=8)
    pair = stdit3("XL/2", depth=1, caption_channels=4096)
    return [
        Case("tiny, 32 clips of 64 tokens", tiny.to(device), 32, (4, 8, 8), 5),
        Case(
            "one XL/2 pair of blocks, 1 clip of 16 x 256 tokens",
            pair.to(device),
            1,
            (16, 32, 32),
            120,
        ),
    ]


def step(case: Case, device: torch.device) -> Callable[[], Tensor]:
    """A forward and backward of a case."""
    draw = torch.Generator().manual_seed(0)
    model, batch = case.model, case.batch
    channels = model.y_embedder.y_embedding.shape[1]
    inputs = {
        "x": torch.randn(batch, model.in_channels, *case.latent, generator=draw),
        "timestep": torch.rand(batch, generator=draw) * 1000,
        "y": torch.randn(batch, 1, case.words, channels, generator=draw),
        "fps": torch.full((batch,), 8.0),
        "height": torch.full((batch,), 32.0),
        "width": torch.full((batch,), 32.0),
    }
    inputs = {name: value.to(device) for name, value in inputs.items()}

    def run() -> Tensor:
        model.zero_grad()
        loss = model(**inputs).square().mean()
        loss.backward()
        return loss.detach()

    return run


def timed(run: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def by_definition(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The same with attention written out."""

    def written_out() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return run()

    return written_out


def main() -> None:
    """Measures every case."""
    options = tyro.cli(Options, description=__doc__)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = Report(
        "stdit",
        f"STDiT3 forward + backward, float32, {device.type}",
        ("", "ms", "quartiles", "attention by definition, ms", "ratio"),
    )
    for case in cases(device):
        fused = step(case, device)
        contestants = {"fused": fused, "definition": by_definition(fused)}
        losses = [float(run()) for run in contestants.values()]
        assert abs(losses[0] / losses[1] - 1) < 1e-4, losses
        times = alternate(
            {name: lambda run=run: timed(run, device) for name, run in contestants.items()},
            options.rounds,
        )
        own, peer = times["fused"], times["definition"]
        ratio = own.median / peer.median
        report.rows.append(
            (
                case.name,
                f"{1e3 * own.median:.1f}",
                f"{1e3 * own.low:.1f} to {1e3 * own.high:.1f}",
                f"{1e3 * peer.median:.1f}",
                f"{ratio:.2f}",
            )
        )
        key = case.name.split(",")[0].replace(" ", "_")
        report.figures[key] = {"step_s": own.median, "definition_s": peer.median}
        report.bars.append(at_most(f"{case.name}: to attention by definition", ratio, NOTHING_LOST))
    report.notes = [f"{torch.get_num_threads()} threads; medians of {options.rounds} turns."]
    finish(report, options.keep)


if __name__ == "__main__":
    main()
