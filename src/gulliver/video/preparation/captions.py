"""Captions clips with a command that prints a sentence, or with a local model."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gulliver.checkpoint.files import read_json
from gulliver.errors import GulliverError, missing_extra, nearest
from gulliver.video.preparation.packets import take_samples
from gulliver.video.preparation.table import Table, check_suffix, write_broken
from gulliver.video.preparation.work import fill_columns

PLACE = "{path}"
"""Placeholder for the clip's path in a command; by default the path is appended."""
Captioner = Callable[[Path], dict[str, Any]]


@dataclass(frozen=True)
class Captioned:
    """A table with captions."""

    table: Table
    # Name and reason of each clip without a caption.
    broken: list[tuple[str, str]]
    fresh: int


def caption(
    table: Table,
    out: Path | None = None,
    command: str | None = None,
    model: Path | None = None,
    prompt: str = "",
    tokens: int = 64,
    seconds: float = 300,
    again: bool = False,
    workers: int = 0,
) -> Captioned:
    if (command is None) == (model is None):
        raise GulliverError(
            "neither or both of --command and --model are set; set exactly one of them"
        )
    out = Path(out or table.path)
    check_suffix(out)
    if model is not None:
        work, workers = model_captioner(model, prompt, tokens), 1
    else:
        work = command_captioner(command or "", seconds)
    texts = table.column("text") if "text" in table.names else [None] * len(table)
    left = [row for row, text in enumerate(texts) if again or not (text or "").strip()]
    settings = json.dumps([command, str(model), prompt, tokens])
    columns = {"text": texts}
    with fill_columns(table, left, work, out, "caption", columns, settings, workers) as broken:
        captioned = table.with_columns(columns).write(out)
        write_broken(out, "caption", broken)
    return Captioned(captioned, broken, len(left))


def command_captioner(command: str, seconds: float) -> Captioner:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise GulliverError(f"--command {command!r} is invalid: {error}") from None
    if not words:
        raise GulliverError("--command is empty; set it to a program that prints a sentence")
    if not any(PLACE in word for word in words):
        words.append(PLACE)

    def captioned(path: Path) -> dict[str, Any]:
        called = [word.replace(PLACE, str(path)) for word in words]
        try:
            ended = subprocess.run(
                called, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL, check=False
            )
        except subprocess.TimeoutExpired:
            raise GulliverError(f"{words[0]} took more than {seconds:g} s") from None
        except OSError as error:
            raise GulliverError(f"{words[0]} cannot be run: {error.strerror}") from None
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").strip().splitlines() or [""]
            raise GulliverError(f"{words[0]} exited with code {ended.returncode}: {said[-1][:200]}")
        try:
            return _sentence(words[0], ended.stdout.decode())
        except UnicodeDecodeError:
            raise GulliverError(f"{words[0]} printed invalid UTF-8") from None

    return captioned


def _sentence(who: str, text: str) -> dict[str, Any]:
    line = " ".join(text.split())
    if not any(letter.isalnum() for letter in line):
        raise GulliverError(f"{who} printed nothing")
    return {"text": line}


def model_captioner(folder: Path, prompt: str, tokens: int) -> Captioner:
    model, processor = _loaded(folder)

    @torch.inference_mode()
    def captioned(path: Path) -> dict[str, Any]:
        from PIL import Image

        samples = take_samples(path, moments=1)
        picture = Image.fromarray(samples.pictures[0])
        inputs = processor(picture, prompt).to(model.device)
        made = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0]
        asked = inputs.get("input_ids")
        # Decoder-only models repeat the prompt; encoder-decoder models do not.
        if asked is not None and torch.equal(made[: asked.shape[1]], asked[0]):
            made = made[asked.shape[1] :] if processor.is_chat else made
        return _sentence(folder.name, processor.tokenizer.decode(made, skip_special_tokens=True))

    return captioned


class _Processor:
    """Converts a picture and a prompt to a model's inputs."""

    def __init__(self, folder: Path) -> None:
        import transformers

        try:
            whole: Any = transformers.AutoProcessor.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError):
            whole = None
        # Encoder-decoder models have two parts.
        self.whole = whole if hasattr(whole, "image_processor") else None
        if self.whole is None:
            self.pictures: Any = transformers.AutoImageProcessor.from_pretrained(
                folder, local_files_only=True
            )
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True
            )
        else:
            self.tokenizer = self.whole.tokenizer
        self.is_chat = bool(getattr(self.whole, "chat_template", None))

    def __call__(self, picture: Any, prompt: str) -> Any:
        if self.whole is None:
            return self.pictures(images=picture, return_tensors="pt")
        if self.is_chat:
            parts = [{"type": "image"}, {"type": "text", "text": prompt or "Describe the picture."}]
            turn = [{"role": "user", "content": parts}]
            prompt = self.whole.apply_chat_template(turn, add_generation_prompt=True)
        words = {"text": prompt} if prompt else {}
        return self.whole(images=picture, return_tensors="pt", **words)


def _loaded(folder: Path) -> tuple[Any, _Processor]:
    try:
        import transformers
    except ImportError:
        raise missing_extra("--model needs transformers", "transformers") from None
    if not (folder / "config.json").is_file():
        raise GulliverError(f"--model {folder} is not a folder with a config.json")
    names = read_json(folder / "config.json").get("architectures") or ["none"]
    kind = getattr(transformers, names[0], None)
    if kind is None or not hasattr(kind, "generate"):
        known = ("BlipForConditionalGeneration", "VisionEncoderDecoderModel", "GitForCausalLM")
        raise GulliverError(
            f"--model {folder} holds a {names[0]}, which does not generate text: "
            f"{nearest(names[0], known)}"
        )
    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = kind.from_pretrained(folder, local_files_only=True).eval().to(device)
        return model, _Processor(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        told = " ".join(str(error).split())[:200]
        raise GulliverError(f"--model {folder} cannot be loaded: {told}") from error
