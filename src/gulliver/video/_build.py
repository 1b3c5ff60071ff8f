"""What a run trains: a named size, a public model, or public weights to go on from; and its texts.

Weights are read once, when the run begins; ``model.json`` in the run's folder then says what they
were, so a resumed run and whoever generates need them no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gulliver import models
from gulliver.checkpoint import load_huggingface, read_json, write_json
from gulliver.comm import World, broadcast_object
from gulliver.data import ClipTable
from gulliver.errors import GulliverError, nearest
from gulliver.jobs import Display, derive
from gulliver.models import CONFIGURATIONS, STDIT3_SIZES, Autoencoder, STDiT2
from gulliver.video._batches import OF_NO_SAMPLE
from gulliver.video._config import TrainConfig
from gulliver.video._encoded import encoded_texts
from gulliver.video._fitting import check_latents, text_size
from gulliver.video._iddpm import IDDPM
from gulliver.video._public_models import fields_of_files, outline_model
from gulliver.video._rectified_flow import RectifiedFlow
from gulliver.video._releases import GUIDED, Flow
from gulliver.video._run import Run
from gulliver.video._text_encoders import (
    KeptTexts,
    TextEncoder,
    load_text_encoder,
    look_at_encoder,
)
from gulliver.video._words import WordEncoder

TRAINED = ("STDiT2", "STDiT3")
"""Classes that the training loop knows."""


def check_start(config: TrainConfig) -> None:
    """Refuses a start that no run could have, before anything else is loaded."""
    model = config.model
    if model.weights is None:
        sizes = [*STDIT3_SIZES, *CONFIGURATIONS]
        if model.size not in sizes:
            raise GulliverError(f"unknown model size {model.size!r}: {nearest(model.size, sizes)}")
        kind = CONFIGURATIONS[model.size].kind if model.size in CONFIGURATIONS else "STDiT3"
    else:
        if config.autoencoder.path is None or model.text_encoder is None:
            raise GulliverError(
                f"--model.weights {model.weights} need --autoencoder.path and "
                "--model.text-encoder: name what they were trained with"
            )
        begun = Run(config.out).model_path
        resumed = config.resume and begun.is_file()
        kind = read_json(begun)["kind"] if resumed else fields_of_files(model.weights)[0]
    if kind not in TRAINED:
        raise GulliverError(
            f"{model.weights or model.size} is of the class {kind}, which this loop does not "
            f"train: take one of {' or '.join(TRAINED)}"
        )
    if kind != "STDiT3" and config.ranks_of_a_model > 1:
        raise GulliverError(
            f"--tp-size, --sp-size and --pp-size share an STDiT3 alone, not an {kind}: leave them "
            "out, data ranks share its optimizer"
        )
    mode, degree = config.sequence_parallelism_mode, config.planner.degree
    if kind != "STDiT3" and (mode is not None or degree not in (None, 1)):
        option = "--planner.degree" if mode is None else "--sequence-parallelism-mode"
        raise GulliverError(
            f"{option} is for ranks that share a clip, which those of an {kind} do not: leave it "
            "out"
        )
    if model.weights is not None and model.text_encoder is not None:
        width, read = look_at_encoder(model.text_encoder).channels, text_size(outline_of(config))[0]
        if width != read:
            raise GulliverError(
                f"--model.text-encoder {model.text_encoder} gives vectors {width} wide, the model "
                f"of --model.weights reads {read}: take the encoder that it was trained with"
            )


def outline_of(config: TrainConfig) -> Any:
    """Builds the transformer of a run with weights on meta, of headers or the run that is resumed.

    Raises:
        GulliverError: as of `gulliver.video.load_model`.
    """
    begun = Run(config.out).model_path
    if not (config.resume and begun.is_file()):
        assert config.model.weights is not None, "of a run with weights"
        return outline_model(config.model.weights, torch.float32)
    found = read_json(begun)
    with torch.device("meta"):
        return getattr(models, found["kind"])(**found["fields"])


def describe_start(config: TrainConfig, run: Run) -> None:
    """Writes down what the weights of a run were; one rank calls it."""
    if config.model.weights is None:
        return
    kind, fields = fields_of_files(config.model.weights)
    write_json(run.model_path, {"kind": kind, "fields": fields})


def build_model(
    config: TrainConfig, autoencoder: Autoencoder, run: Run | None = None, begin: bool = False
) -> Any:
    """Builds the transformer of `config`."""
    torch.manual_seed(derive(config.seed, 0))
    if config.model.weights is not None:
        assert run is not None, "a run with weights has a folder"
        found = read_json(run.model_path)
        # The batch says which captions are hidden.
        fields = {**found["fields"], "class_dropout_prob": 0.0}
        model = getattr(models, found["kind"])(**fields)
        check_latents(model, autoencoder)
        if begin:
            load_huggingface(model, config.model.weights)
        return _frozen(model)
    named = config.model.size in CONFIGURATIONS
    kind = CONFIGURATIONS[config.model.size].kind if named else "STDiT3"
    known = CONFIGURATIONS[config.model.size].fields if named else STDIT3_SIZES[config.model.size]
    fields = {
        **known,
        "in_channels": autoencoder.latent_channels,
        "caption_channels": _width(config),
        "class_dropout_prob": 0.0,
        "model_max_length": config.model.text_length,
        "input_sq_size": 32 if config.data.made else 512,
    }
    if kind == "STDiT3":
        fields["zero_init_temporal"] = config.model.zero_init_temporal
        fields["temporal_positions"] = config.model.temporal_positions
    return _frozen(getattr(models, kind)(**fields))


def _width(config: TrainConfig) -> int:
    folder = config.model.text_encoder
    return config.model.text_channels if folder is None else look_at_encoder(folder).channels


def _frozen(model: nn.Module) -> nn.Module:
    """Freezes what training does not reach: given frames are shown among the latents."""
    for name in ("x_embedder_cond", "x_embedder_cond_mask"):
        embedder = getattr(model, name, None)
        if embedder is not None:
            embedder.requires_grad_(False)
    return model


def flow_of(model: nn.Module, otherwise: RectifiedFlow) -> Flow:
    """Returns the diffusion that a model is trained with: for most of them the run's own."""
    return IDDPM(guided_channels=GUIDED) if isinstance(model, STDiT2) else otherwise


def make_text(config: TrainConfig, model: nn.Module) -> TextEncoder:
    """Makes the text encoder of a run: the words, or that of a folder, which is filled."""
    folder = config.model.text_encoder
    if folder is None:
        return WordEncoder(config.model.text_channels, config.model.text_length)
    return load_text_encoder(folder, text_size(model)[1])


def ready_texts(
    config: TrainConfig, run: Run, model: nn.Module, datasets: Sequence[Any], world: World
) -> TextEncoder:
    """Returns the texts of a run; one rank encodes the captions of tables, and all read them."""
    if config.model.text_encoder is None:
        return make_text(config, model)
    folder, captions = run.folder / "texts", _captions(datasets)
    ready = encoded_texts(config, *text_size(model), captions)
    if ready is not None:
        return ready
    kept: KeptTexts | None = None
    if world.is_main:
        kept = KeptTexts(make_text(config, model), folder)
        with Display("encoding captions", len(captions)) as display:
            for caption in captions:
                kept.encode([caption])
                display.advance()
        kept.encoder = None
    fingerprint = broadcast_object(kept.fingerprint if kept else None)
    return kept or KeptTexts.of_folder(folder, fingerprint, *text_size(model))


def _captions(datasets: Sequence[Any]) -> list[str]:
    datasets = [dataset for dataset in datasets if dataset is not None]
    if any(not isinstance(dataset, ClipTable) for dataset in datasets):
        raise GulliverError(
            "--model.text-encoder reads the captions of a --data.table: name one, for the moving "
            "digits words will do"
        )
    return sorted({row.text for dataset in datasets for row in dataset.rows} | {OF_NO_SAMPLE})
