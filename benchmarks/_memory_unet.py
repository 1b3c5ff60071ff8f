"""The peak of training the UNet of Stable Diffusion, scaled down, and what lowered it by how much.

The model is diffusers' `UNet2DConditionModel` with random weights and Stable Diffusion's blocks,
narrower, on noise of the shape of its latents and captions; without diffusers one of the same
layout (`_unet.py`). Announced for it elsewhere are 64.5 GB to 11.6 at batch 16, a ratio of 5.6: the
bar for the peak of the whole process, interpreter and torch included. As there, plain training
keeps the scores of attention. Then each of what lowers the peak is switched off in turn.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._harness import Report, at_least
from benchmarks._memory_jobs import GEMINI, GIB, MIB, PLAIN, Job, Ledger, Outcome, run
from benchmarks._models import Task
from benchmarks._unet import Residual, Transformer, UNet

CAPTION_TOKENS, TIMES = 77, 1000
DISK = 4 * GIB
"""Bytes of the disk that state and activations may use."""
CONSTANT = 640 * MIB
"""What the interpreter, torch and its threads, and diffusers need beside tensors."""
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


SMALL = Scale(64, 48, 4, 896 * MIB, 1)
FULL = Scale(96, 48, 8, GIB, 2)
EXPLICIT = {"attention": "explicit"}


def has_diffusers() -> bool:
    """Whether diffusers is installed, so that its UNet is trained."""
    return importlib.util.find_spec("diffusers") is not None


def unet(job: Job) -> Task:
    """The task of a job: predicting the noise on latents, captions given."""

    def model() -> nn.Module:
        explicit = job.options.get("attention") == "explicit"
        if not has_diffusers():
            return UNet(job.width, explicit)
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
        if explicit:
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
    kinds = ("ResnetBlock2D", "Transformer2DModel", Residual.__name__, Transformer.__name__)
    return [module for module in net.modules() if type(module).__name__ in kinds]


def _processor() -> object:
    """Attention with explicit scores."""
    return importlib.import_module("diffusers.models.attention_processor").AttnProcessor()


def variants(job: Job, plain_peak: int) -> dict[str, Job]:
    """Ours with everything, and with each of its parts switched off, or done another way.

    Those run without a control group's limit, and are told the same one: what a part would have
    saved is the memory that they need beyond it. Without a disk all state stays, so that they are
    told what plain training takes.
    """
    told = {"told": job.limit - job.options["constant"]}

    def but(disk: int = job.disk, **options: Any) -> Job:
        return replace(job, limit=0, disk=disk, options={**job.options, **told, **options})

    return {
        FULL_KNOB: job,
        "blocks recomputed instead": but(activations="recompute"),
        "activations kept": but(activations="keep"),
        "without a disk, blocks recomputed": but(0, told=plain_peak, activations="recompute"),
        "with explicit attention": but(attention="explicit"),
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
    knob = {"constant": CONSTANT, "step_in_backward": True, "activations": "offload"}
    limits = {"limit": scale.limit, "disk": DISK}
    ours = replace(plain, contestant=GEMINI, **limits, options=knob)
    made = Report(
        "memory-unet",
        f"Training a UNet of {scale.width} channels on {scale.batch} latents of {scale.side}²",
        (
            "",
            "ended",
            "peak MiB",
            "above all of it",
            "anonymous MiB",
            "plain / peak",
            "step s",
            "/ plain",
        ),
    )
    base = run(replace(plain, options=EXPLICIT), ledger, say)
    rows = {
        "plain": base,
        "plain, fused attention": run(plain, ledger, say),
        "plain, fused attention, blocks recomputed": run(
            replace(plain, recompute=True), ledger, say
        ),
    }
    rows |= {name: run(job, ledger, say) for name, job in variants(ours, base.peak).items()}
    for name, outcome in rows.items():
        made.rows.append(_row(name, outcome, base, rows[FULL_KNOB]))
        made.figures[name] = {
            "end": outcome.end,
            "peak_bytes": outcome.peak,
            "anonymous_bytes": outcome.anonymous,
            "step_s": outcome.seconds,
        }
    found = rows[FULL_KNOB]
    if found.ran and base.ran:
        times = base.peak / found.peak
        made.bars = [at_least("plain peak / peak under the knob", times, ANNOUNCED)]
        made.figures["price"] = found.seconds / base.seconds
    model = "of diffusers" if has_diffusers() else "of its layout, without diffusers"
    made.notes.append(
        f"The model is {model}. Peaks are those of whole processes, as the kernel charges their "
        "control groups: the interpreter and torch are in all of them. float32, AdamW, random "
        "weights. Plain training keeps the scores of attention, as that which was announced. Under "
        "the knob attention is fused, state lies in chunks that are stepped in backward and leave "
        "for the disk, and so do activations. The rows after it change one of these each, and run "
        "without a group's limit: above all of it is what that part saves."
    )
    return made


def _row(name: str, outcome: Outcome, plain: Outcome, ours: Outcome) -> list[str]:
    if not outcome.ran:
        return [name, f"{outcome.end}: {outcome.told}", f"{outcome.peak / MIB:.0f}", *[""] * 5]
    more = (outcome.peak - ours.peak) / MIB
    return [
        name,
        outcome.end,
        f"{outcome.peak / MIB:.0f}",
        f"{more:+.0f}" if ours.ran and outcome is not ours else "",
        f"{outcome.anonymous / MIB:.0f}",
        f"{plain.peak / outcome.peak:.2f}",
        f"{outcome.seconds:.2f}",
        f"{outcome.seconds / plain.seconds:.2f}" if plain.ran else "",
    ]
