"""Training from kept latents: what a run takes over from them, and what is refused.

What the folder settles (shapes, windows, frame interval, scores, autoencoder, text encoder) need
not be said again; where it is said, it must be what the folder was made with.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from gulliver.errors import GulliverError
from gulliver.video._config import DataConfig, TrainConfig
from gulliver.video._kept_latents import AGAIN, TEXTS, KeptLatents, folder_digest, weights_digest
from gulliver.video._public_autoencoders import load_autoencoder
from gulliver.video._run import Run
from gulliver.video._sources import own_autoencoder
from gulliver.video._text_encoders import KeptTexts

SETTLED = ("frame_interval", "windows", "scores")


def with_encoded(config: TrainConfig) -> TrainConfig:
    """Fills in what kept latents settle; a run without them stays as it is."""
    if config.data.encoded is None:
        return config
    kept = KeptLatents(config.data.encoded)
    model, path = config.model, config.autoencoder.path
    if path is None and not (config.resume and own_autoencoder(Run(config.out)) is not None):
        path = _recorded(kept.content["autoencoder"], "--autoencoder.path")
    if model.weights is not None and model.text_encoder is None and kept.text is not None:
        named = _recorded(kept.text.path, "--model.text-encoder")
        model = replace(model, text_encoder=named)
    return replace(
        config,
        data=_with_data(config.data, kept),
        autoencoder=replace(config.autoencoder, path=path),
        model=model,
    )


def _with_data(data: DataConfig, kept: KeptLatents) -> DataConfig:
    default = DataConfig()
    asked = {
        name: getattr(data, name)
        for name in SETTLED
        if getattr(data, name) != getattr(default, name)
    }
    kept.refuse_differences(asked)
    shapes, buckets = data.shapes, data.buckets
    if shapes == default.shapes and buckets is None:
        shapes, buckets = tuple(kept.content["shapes"]) or shapes, kept.buckets_path
    settings = kept.settings
    return replace(
        data,
        shapes=shapes,
        buckets=buckets,
        frame_interval=settings.frame_interval,
        windows=settings.windows,
        scores=kept.content["scores"],
    )


def _recorded(path: str, option: str) -> Path:
    if not Path(path).exists():
        raise GulliverError(f"{path} is gone, which made the latents: name it with {option}")
    return Path(path)


def refuse_other_autoencoder(config: TrainConfig, run: Run) -> None:
    """Refuses latents of another autoencoder than the run's."""
    if config.data.encoded is None:
        return
    path = config.autoencoder.path
    used = load_autoencoder(path, dtype=torch.float32) if path else own_autoencoder(run)
    asked = weights_digest(used)
    KeptLatents(config.data.encoded).refuse_differences({"autoencoder": asked})


def encoded_texts(
    config: TrainConfig, channels: int, max_length: int, captions: list[str]
) -> KeptTexts | None:
    """Returns the texts that were kept with the latents of a run; None where there are none."""
    folder = config.data.encoded
    text = None if folder is None else KeptLatents(folder).text
    if folder is None or text is None:
        return None
    named = config.model.text_encoder
    assert named is not None, "else words are read"
    if folder_digest(named) != text.files:
        raise GulliverError(
            f"--data.encoded {folder} does not fit: text_encoder is {named} in this run, "
            f"{text.path} of the latents, which has other files"
        )
    if text.channels != channels or text.max_length > max_length:
        raise GulliverError(
            f"--data.encoded {folder} does not fit: its texts have up to {text.max_length} vectors "
            f"of width {text.channels}, the model reads {max_length} of {channels}: {AGAIN} with "
            f"its encoder and --text-length {max_length}"
        )
    kept = KeptTexts.of_folder(folder / TEXTS, text.fingerprint, channels, max_length)
    missing = kept.missing(captions)
    if missing:
        raise GulliverError(
            f"--data.encoded {folder} does not keep what {missing[0][:60]!r} says, nor "
            f"{len(missing) - 1} other captions: {AGAIN}"
        )
    return kept
