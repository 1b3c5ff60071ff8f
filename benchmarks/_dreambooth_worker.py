"""The processes of `benchmarks.dreambooth`: ours, and the loop of diffusers' DreamBooth script.

The peer is that script's loop written anew, as its documentation tells it: whole UNet trained, text
and pictures encoded in every step, subject and prior in one batch, their mean losses added. It has
the samples and the noise of ours, so that the losses can be laid beside one another.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gulliver.dreambooth import DreamboothConfig
from gulliver.dreambooth.trainer import dreambooth

RATE = 5e-6


def config_of(folder: Path, name: str, **options: Any) -> DreamboothConfig:
    """Options of a run on the base and the subject of a folder."""
    values = {
        "class_word": "dog",
        "prior_pictures": 2,
        "sampling_steps": 2,
        "validation_pictures": 0,
        "precision": "fp32",
        "method": "full",
        "learning_rate": RATE,
        "save_every": 10**6,
        "activations": "keep",
        **options,
    }
    return DreamboothConfig(
        model=folder / "base",
        subject=folder / "subject",
        out=folder / name,
        prior_folder=folder / "prior",
        **values,
    )


def ours(config: DreamboothConfig) -> dict[str, Any]:
    """Seconds and losses of the steps of a run."""
    dreambooth(config)
    log = [json.loads(line) for line in (config.out / "log.jsonl").read_text().splitlines()]
    ends = [0.0, *(line["seconds"] for line in log)]
    seconds = [after - before for before, after in pairwise(ends)]
    return {"seconds": seconds, "losses": [line["loss"] for line in log]}


def peer(config: DreamboothConfig) -> dict[str, Any]:
    """The same of a plain script."""
    from diffusers import (
        AutoencoderKL,
        DDPMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from PIL import Image
    from transformers import CLIPTextModel, CLIPTokenizer

    from gulliver.dreambooth.student import SampleOrder

    assert config.model is not None
    assert config.subject is not None
    tokenizer = CLIPTokenizer.from_pretrained(config.model / "tokenizer")
    text_encoder: Any = CLIPTextModel.from_pretrained(config.model / "text_encoder")
    vae: Any = AutoencoderKL.from_pretrained(config.model / "vae")
    unet: Any = UNet2DConditionModel.from_pretrained(config.model / "unet")
    scheduler: Any = DDPMScheduler.from_pretrained(config.model / "scheduler")
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    unet.train()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=RATE, weight_decay=1e-2)
    assert config.prior_folder is not None
    subject = sorted(config.subject.glob("*.png"))
    files = [*subject, *sorted(config.prior_folder.glob("*.png"))]
    order = SampleOrder(config, len(subject), config.priors)
    seconds, losses = [], []
    for step in range(config.steps):
        started = time.monotonic()
        samples = order.samples(step)
        generators = [torch.Generator().manual_seed(sample.seed) for sample in samples]
        pixels = np.stack([np.asarray(Image.open(files[sample.number])) for sample in samples])
        pictures = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
        drawn = vae.encode(pictures).latent_dist
        spread = torch.cat([torch.randn(drawn.mean[:1].shape, generator=g) for g in generators])
        latents = (drawn.mean + drawn.std * spread) * vae.config.scaling_factor
        times = torch.cat([torch.randint(1000, (1,), generator=g) for g in generators])
        noise = torch.cat([torch.randn(latents[:1].shape, generator=g) for g in generators])
        prompts = ["a photo of sks dog"] * config.batch_size + [
            "a photo of dog"
        ] * config.batch_size
        ids = tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt")
        states = text_encoder(ids["input_ids"])[0]
        found = unet(scheduler.add_noise(latents, noise, times), times, states).sample
        instance, prior = found.chunk(2)
        wanted, wanted_prior = noise.chunk(2)
        loss = F.mse_loss(instance.float(), wanted.float())
        loss = loss + config.prior_weight * F.mse_loss(prior.float(), wanted_prior.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        seconds.append(time.monotonic() - started)
    # What the script leaves behind, as ours does: a checkpoint to go on from, and the pipeline.
    config.out.mkdir(parents=True, exist_ok=True)
    state = {"unet": unet.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, config.out / "checkpoint.pt")
    StableDiffusionPipeline.from_pretrained(
        config.model, unet=unet, text_encoder=text_encoder, vae=vae
    ).save_pretrained(config.out / "result")
    return {"seconds": seconds, "losses": losses}


def main() -> None:
    who, folder, name, options = sys.argv[1:5]
    torch.set_num_threads(1)
    config = config_of(Path(folder), name, **json.loads(options))
    found = {"ours": ours, "peer": peer}[who](config)
    # Not of getrusage, which goes on counting from the process that has started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    print(json.dumps({**found, "peak": peak}), flush=True)


if __name__ == "__main__":
    main()
