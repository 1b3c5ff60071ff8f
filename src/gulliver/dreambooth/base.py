"""What the recipe needs of a model that is to be taught a subject, whatever kind of model it is.

The recipe (`trainer.py`) knows pictures, texts, weights of samples, ranks and files; a `Base`
knows its networks: how a picture becomes latents, what the loss of a sample is, and how it samples.
`diffusers_base.py` has those of diffusers' pipelines, `video_base.py` those of Gulliver's video
models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gulliver.checkpoint.files import read_json
from gulliver.errors import GulliverError

FACTS = "gulliver.json"
"""The file of a result that says what base it is of."""
Method = Literal["lora", "full", "token"]
"""What learns in addition to the new tokens: adapters of low rank, all weights, or nothing."""


@dataclass(frozen=True)
class Picture:
    """A picture that the model learns from, upright and without transparency."""

    # File that it was read from.
    path: Path
    # Colours ``[H, W, 3]``, or of a prior clip ``[T, H, W, 3]``, uint8.
    pixels: np.ndarray
    # Caption of its own; None takes the prompt of the run.
    text: str | None = None


@dataclass(frozen=True)
class TokenHandle:
    """A new word of a text encoder."""

    # Word as it is written in prompts.
    token: str
    # Ids that the word is replaced by, in order.
    ids: tuple[int, ...]
    # Embeddings of the word ``[len(ids), width]``: a parameter of its own inside of `Base.text`, so
    # that no other row can change.
    rows: nn.Parameter


@dataclass(frozen=True)
class TrainedParts:
    """What a run has taught a model.

    Attributes:
        method: what learnt in addition to the tokens.
        tensors: whole tensors of what was trained on the CPU, each read when it is asked for; by
            their names in the networks, with ``trained.`` or ``text.`` before them.
        tokens: new words, whose rows are among the tensors.
        adapters: PEFT's configuration of the adapters, by network: ``trained`` and ``text``.
        write: function that writes tensors to a safetensors file, by their names there and here,
            without having all of them in memory.
    """

    method: Method
    tensors: Mapping[str, Tensor]
    tokens: tuple[TokenHandle, ...] = ()
    adapters: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    write: Callable[[Path, Mapping[str, str]], None] = lambda path, names: None


class Base(Protocol):
    """A model with what it needs to learn a subject."""

    # The recipe puts `trained` and `text` into one module whose forward calls `loss`; adapters go
    # into them in place, so a base calls ``self.trained(...)`` and ``self.text(...)`` as ever and
    # knows nothing of adapters, ranks or memory limits.

    # Denoiser: a UNet or transformer, which adapters go into or whose weights learn.
    trained: nn.Module
    # Text encoder, or a module that holds several; None if there is none to train.
    text: nn.Module | None
    # Names of the layers of `trained` that adapters go into, their last parts or more; those of
    # PEFT's ``target_modules``.
    targets: tuple[str, ...]
    # The same of `text`; empty where it cannot learn.
    text_targets: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Digest of the weights and of all settings that its samples and latents depend on."""
        ...

    def add_token(self, token: str, initial: str | None) -> TokenHandle:
        """Adds a word to the tokenizer, with rows of its own in the text encoder."""
        ...

    def encode_prompts(self, texts: Sequence[str], train_text: bool) -> None:
        """Takes notice of all prompts of the run, before `loss` or `sample` is called."""
        # Where `text` does not learn, a base may encode them now and free it; `text` is None then.
        ...

    def encode_pictures(self, pictures: Sequence[Picture]) -> Tensor:
        """Encodes pictures ``[N, ...]``, once for the whole run."""
        # Where the autoencoder draws, what it draws from (mean and deviation) is encoded.
        ...

    def loss(
        self, latents: Tensor, texts: Sequence[str], generators: Sequence[torch.Generator]
    ) -> Tensor:
        """The loss ``[N]`` of each sample at one random time of its own, in float32 at least."""
        ...

    def sample(self, texts: Sequence[str], seeds: Sequence[int]) -> list[np.ndarray]:
        """Makes a picture ``[H, W, 3]`` or a clip ``[T, H, W, 3]`` of each prompt, uint8."""
        ...

    def read_adapter(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Mapping[str, object]]]:
        """Reads what `save` wrote of adapters."""
        ...

    def save(self, folder: Path, learnt: TrainedParts) -> None:
        """Writes what was learnt, as those who use such models read it; rank 0 calls it."""
        ...


def check_adapter(path: Path, fingerprint: str) -> None:
    """Refuses an adapter that says of itself that it is of another base."""
    file = (path if path.is_dir() else path.parent) / FACTS
    if file.is_file() and (known := read_json(file).get("base")) != fingerprint:
        raise GulliverError(
            f"--adapter {path} is of another base: it was trained with {known}, --model is "
            f"{fingerprint}"
        )
