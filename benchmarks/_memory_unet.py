"""The peak of training the UNet of Stable Diffusion, scaled down, and what lowered it by how much.

The model is diffusers' `UNet2DConditionModel` with random weights and Stable Diffusion's blocks,
narrower, on noise of the shape of its latents and captions. Announced for it elsewhere are 64.5 GB
to 11.6 at batch 16, a ratio of 5.6: the bar for the peak of the whole process, interpreter and
torch included. Then each of what lowers the peak is switched off in turn.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._harness import Report, at_least
from benchmarks._memory_jobs import GEMINI, GIB, MIB, PLAIN, Job, Ledger, Outcome, run
from benchmarks._models import Task

CAPTION_TOKENS, TIMES = 77, 1000
CONSTANT = 640 * MIB
"""What the interpreter, torch and diffusers need beside tensors."""
ANNOUNCED = 5.6
"""Announced peak of plain training over that under the knob."""
FULL_KNOB = "all of it"


@dataclass(frozen=True)
class Scale:
    """Sizes of a run.

    Attributes:
        width: channels of the outermost blocks; 320 in Stable Diffusion.
        side: pixels of a latent image's side; 64 there.
        batch: images of a step.
        limit: bytes of the control group under the knob.
        steps: timed steps.
    """

    width: int
    side: int
    batch: int
    limit: int
    steps: int


SMALL = Scale(64, 32, 16, GIB, 1)
FULL = Scale(96, 48, 16, 2 * GIB, 2)


def missing() -> str | None:
    """Name of a package to install first; None where nothing is missing."""
    if importlib.util.find_spec("diffusers") is None:
        return "the package diffusers is not installed: pip install diffusers"
    return None


def unet(job: Job) -> Task:
    """The task of a job: predicting the noise on latents, captions given."""

    def model() -> nn.Module:
        # By name, for it is optional: type checking has to pass where it is not installed.
        diffusers = importlib.import_module("diffusers")
        width = job.width
        net = diffusers.UNet2DConditionModel(
            sample_size=job.length,
            block_out_channels=(width, 2 * width, 4 * width, 4 * width),
            cross_attention_dim=4 * width,
            attention_head_dim=8,
            layers_per_block=2,
        )
        if job.options.get("attention") == "explicit":
            net.set_attn_processor(_processor())
        return net

    def loss(net: nn.Module, seed: int) -> Tensor:
        device = next(net.parameters()).device
        generator = torch.Generator().manual_seed(seed)
        shape = (job.batch, 4, job.length, job.length)
        noise, latents = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
        captions = torch.randn(job.batch, CAPTION_TOKENS, 4 * job.width, generator=generator)
        times = torch.randint(TIMES, (job.batch,), generator=generator).to(device)
        kept = (1 - times / TIMES).view(-1, 1, 1, 1)
        noisy = kept.sqrt() * latents + (1 - kept).sqrt() * noise
        return F.mse_loss(net(noisy, times, captions.to(device)).sample, noise)

    return Task(f"UNet {job.width}, {job.batch} x {job.length}²", model, loss, unet_blocks)


def unet_blocks(net: nn.Module) -> list[nn.Module]:
    """Residual and transformer blocks, the repeated parts of a UNet."""
    kinds = ("ResnetBlock2D", "Transformer2DModel")
    return [module for module in net.modules() if type(module).__name__ in kinds]


def _processor() -> object:
    """Attention with explicit scores."""
    return importlib.import_module("diffusers.models.attention_processor").AttnProcessor()


def variants(job: Job) -> dict[str, Job]:
    """Ours with everything, and with each of its parts switched off."""
    own = dict(job.options)

    def but(**options: object) -> Job:
        return replace(job, options={**own, **options})

    return {
        FULL_KNOB: job,
        "without off-load to disk": replace(job, disk=0, limit=0, options=own),
        "without recomputing": replace(but(activations="keep"), limit=0),
        "without stepping in backward": replace(but(step_in_backward=False), limit=0),
        "with explicit attention": replace(but(attention="explicit"), limit=0),
    }


def report(scale: Scale, folder: Path, ledger: Ledger, say: Callable[[str], None]) -> Report:
    """Peaks and seconds of plain training, of ours, and of ours without each part."""
    plain = Job(
        PLAIN,
        model="unet",
        width=scale.width,
        length=scale.side,
        batch=scale.batch,
        steps=scale.steps,
        warm_up=1,
        folder=str(folder),
    )
    knob = {"constant": CONSTANT, "step_in_backward": True, "activations": "auto"}
    ours = replace(plain, contestant=GEMINI, limit=scale.limit, disk=8 * GIB, options=knob)
    made = Report(
        "memory-unet",
        f"Training a UNet of {scale.width} channels on {scale.batch} latents of {scale.side}²",
        ("", "ended", "peak MiB", "anonymous MiB", "plain / peak", "step s", "/ plain"),
    )
    if absent := missing():
        made.notes.append(f"Not run: {absent}.")
        return made
    base = run(plain, ledger, say)
    rows = {
        "plain": base,
        "plain, explicit attention": run(
            replace(plain, options={"attention": "explicit"}), ledger, say
        ),
        "plain, every block recomputed": run(replace(plain, recompute=True), ledger, say),
    }
    rows |= {name: run(job, ledger, say) for name, job in variants(ours).items()}
    for name, outcome in rows.items():
        made.rows.append(_row(name, outcome, base))
        made.figures[name] = {
            "end": outcome.end,
            "peak_bytes": outcome.peak,
            "step_s": outcome.seconds,
        }
    knob = rows[FULL_KNOB]
    if knob.ran:
        made.bars = [at_least("plain peak / peak under the knob", base.peak / knob.peak, ANNOUNCED)]
    made.notes.append(
        "Peaks are those of whole processes, as the kernel charges their control groups: the "
        "interpreter, torch and diffusers are in all of them. float32, AdamW, random weights."
    )
    return made


def _row(name: str, outcome: Outcome, plain: Outcome) -> list[str]:
    if not outcome.ran:
        return [name, f"{outcome.end}: {outcome.told}", f"{outcome.peak / MIB:.0f}", *[""] * 4]
    return [
        name,
        outcome.end,
        f"{outcome.peak / MIB:.0f}",
        f"{outcome.anonymous / MIB:.0f}",
        f"{plain.peak / outcome.peak:.2f}",
        f"{outcome.seconds:.2f}",
        f"{outcome.seconds / plain.seconds:.2f}",
    ]
