"""What was learnt, as diffusers reads it.

``pytorch_lora_weights.safetensors`` for ``pipe.load_lora_weights``, ``learned_embeds.safetensors``
for ``pipe.load_textual_inversion`` (of the second text encoder ``learned_embeds_2.safetensors``),
or a whole folder for ``from_pretrained``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gulliver.checkpoint import fitted, read_json, read_metadata, read_tensors, write_tensors
from gulliver.dreambooth._base import Learnt
from gulliver.dreambooth._kinds import PipelineKind
from gulliver.errors import GulliverError
from gulliver.finetune import adapter_name
from gulliver.io import named_errors, write_text

LORA, EMBEDDINGS = "pytorch_lora_weights.safetensors", "learned_embeds{}.safetensors"
METADATA = "lora_adapter_metadata"
"""Key of diffusers for PEFT's configurations in the file of the tensors."""
WEIGHTS = "diffusion_pytorch_model.safetensors"
ROWS = ".rows"


class PipelineFolder(Protocol):
    """What is asked of a base, so that its files can be read and written."""

    # Folder of the pipeline that it was read from.
    folder: Path
    # Networks of the pipeline.
    kind: PipelineKind
    # Tokenizers by their names in the pipeline, with the words that were added.
    tokenizers: dict[str, Any]

    def read_encoder(self, name: str) -> Any:
        """Reads a text encoder as the folder has it."""
        ...


def lora_name(network: str, name: str) -> str:
    """The name of an adapter's tensor in diffusers' file."""
    side, _, rest = adapter_name(name).partition(".")
    return f"{network}.{rest}" if side == "trained" else rest


def read_lora(
    base: PipelineFolder, path: Path
) -> tuple[dict[str, Tensor], dict[str, Mapping[str, object]]]:
    """Reads LoRA weights of diffusers' form, and PEFT's configurations with them."""
    file = path / LORA if path.is_dir() else path
    if not file.is_file():
        raise GulliverError(f"--adapter {path} is none of diffusers: it has no {LORA}")
    network, found = base.kind.network, dict[str, Tensor]()
    for name, tensor in read_tensors(file).items():
        part, _, rest = name.partition(".")
        found[f"trained.{rest}" if part == network else f"text.{name}"] = tensor
    about = json.loads(read_metadata(file).get(METADATA, "{}"))
    sides = {"trained": f"{network}.", "text": f"{base.kind.encoders[0]}."}
    given = {
        side: {k.removeprefix(start): v for k, v in about.items() if k.startswith(start)}
        for side, start in sides.items()
    }
    return found, {side: values for side, values in given.items() if values}


def write_learnt(base: PipelineFolder, folder: Path, learnt: Learnt) -> None:
    """Writes what a base has learnt into a folder."""
    network = base.kind.network
    adapters = {lora_name(network, n): n for n in learnt.tensors if ".lora_" in n}
    if adapters:
        tensors = {known: learnt.tensors[name] for known, name in adapters.items()}
        about = _metadata(base, learnt.adapters)
        # One key alone: of several, safetensors writes another order in every process.
        write_tensors(folder / LORA, tensors, {METADATA: json.dumps(about)})
    rows = _rows(base, learnt)
    for number, (encoder, name) in enumerate(rows.items()):
        path = folder / EMBEDDINGS.format("" if number == 0 else f"_{number + 1}")
        write_tensors(path, {learnt.tokens[0].token: learnt.tensors[name]}, {"format": "pt"})
        assert encoder.startswith("text_encoder"), "words are of text encoders"
    if learnt.method == "full":
        _write_pipeline(base, folder, learnt, rows)


def _metadata(base: PipelineFolder, adapters: Mapping[str, Mapping[str, object]]) -> dict[str, Any]:
    """PEFT's configurations by the names of the networks that they are of."""
    about: dict[str, Any] = {}
    for side, values in adapters.items():
        places = [base.kind.network] if side == "trained" else list(base.kind.encoders)
        about |= {f"{place}.{key}": value for place in places for key, value in values.items()}
    return about


def _rows(base: PipelineFolder, learnt: Learnt) -> dict[str, str]:
    """Names of the new words' rows among the tensors, by text encoder in order."""
    found = [name for name in learnt.tensors if name.endswith(ROWS)]
    by_encoder = {name.split(".")[1]: name for name in found}
    return {e: by_encoder[e] for e in base.kind.encoders if e in by_encoder}


def _write_pipeline(
    base: PipelineFolder, folder: Path, learnt: Learnt, rows: Mapping[str, str]
) -> None:
    """Writes the whole pipeline: what has learnt, and all else as it was."""
    network = base.kind.network
    encoders = {n.split(".")[1] for n in learnt.tensors if n.startswith("text.")}
    words = {e.replace("text_encoder", "tokenizer") for e in rows}
    for part in sorted(base.folder.iterdir()):
        if part.name not in {network, *encoders, *words} and not part.name.startswith("."):
            _copy(part, folder / part.name)
    (folder / network).mkdir()
    config = {**read_json(base.folder / network / "config.json")}
    write_text(folder / network / "config.json", json.dumps(config, indent=2) + "\n")
    own = {n.removeprefix("trained."): n for n in learnt.tensors if n.startswith("trained.")}
    learnt.write(folder / network / WEIGHTS, own)
    for name in sorted(encoders):
        _write_encoder(base, folder, learnt, name)
    for name in sorted(words):
        base.tokenizers[name].save_pretrained(folder / name)


def _copy(part: Path, target: Path) -> None:
    with named_errors(target):
        if part.is_dir():
            shutil.copytree(part, target)
        else:
            shutil.copyfile(part, target)


def _write_encoder(base: PipelineFolder, folder: Path, learnt: Learnt, name: str) -> None:
    """Writes a text encoder, with new words among its embeddings."""
    prefix, encoder = f"text.{name}.", base.read_encoder(name)
    values = {
        n.removeprefix(prefix): learnt.tensors[n] for n in learnt.tensors if n.startswith(prefix)
    }
    values = {n.replace(".table.weight", ".weight"): value for n, value in values.items()}
    rows = [values.pop(n) for n in list(values) if n.endswith(ROWS)]
    encoder.load_state_dict({**encoder.state_dict(), **_as(values, encoder)})
    if rows:
        table = encoder.get_input_embeddings()
        new = fitted("the new words", name, rows[0], table.weight.dtype)
        whole = torch.cat([table.weight.detach(), new.to(table.weight)])
        encoder.resize_token_embeddings(len(whole), mean_resizing=False)
        with torch.no_grad():
            encoder.get_input_embeddings().weight.copy_(whole)
    encoder.save_pretrained(folder / name)


def _as(values: Mapping[str, Tensor], encoder: nn.Module) -> dict[str, Tensor]:
    known = encoder.state_dict()
    dtypes = {name: known[name].dtype for name in values}
    return {n: fitted("the text encoder", n, v, dtypes[n]) for n, v in values.items()}
