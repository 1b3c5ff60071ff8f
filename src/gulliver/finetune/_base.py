"""The model that a run begins with: its folder, its fingerprint, and how it is loaded."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver.booster import lazy_parameters
from gulliver.checkpoint import float_config, load_huggingface, open_weights, read_json
from gulliver.errors import GulliverError, missing_extra
from gulliver.finetune._mapped import map_weights
from gulliver.parallel.tensor import materialize

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOOKED_AT = 1 << 20
"""Bytes of each end of a file of weights that are part of the fingerprint."""


@dataclass(frozen=True)
class Base:
    """A Hugging Face folder of a causal language model."""

    folder: Path

    @cached_property
    def config(self) -> Any:
        """The configuration, as transformers reads it."""
        try:
            import transformers
        except ImportError:
            raise missing_extra("fine-tuning needs transformers", "finetune") from None
        try:
            found = float_config(self.folder)
        except (ValueError, OSError, KeyError) as error:
            raise GulliverError(f"--model {self.folder}: {_line(error)}") from None
        if type(found) not in transformers.AutoModelForCausalLM._model_mapping:
            raise GulliverError(
                f"--model {self.folder} is a {found.model_type}, which does not continue texts: "
                "give a causal language model, such as a Llama, Qwen, Gemma, GPT-2 or OPT"
            )
        found.use_cache = False
        return found

    @cached_property
    def context(self) -> int | None:
        """Longest sequence that the model takes, in tokens; None where it has no limit."""
        longest = getattr(self.config, "max_position_embeddings", None)
        return int(longest) if isinstance(longest, int) and longest > 0 else None

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype that most elements of the weights have, apart from those that have scales."""
        counts = Counter[torch.dtype]()
        with open_weights(self.folder) as weights:
            for info in weights.infos.values():
                if info.dtype.is_floating_point and info.dtype.itemsize > 1:
                    counts[info.dtype] += info.numel
        return counts.most_common(1)[0][0] if counts else torch.float32

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the configuration, and of names, sizes and both ends of the weights."""
        return fingerprint_of(self.folder)

    def on_meta(self) -> nn.Module:
        """The model without memory, for planning."""
        with torch.device("meta"), _quiet():
            return self._built(torch.float32)

    def load(
        self, dtype: torch.dtype, device: torch.device, scratch: Path | None, alone: bool
    ) -> nn.Module:
        """The model with its weights, on this rank."""
        try:
            with _quiet():
                if scratch is not None and device.type == "cpu":
                    mapped = map_weights(self._built, self.folder, dtype, scratch, alone)
                    if mapped is not None:
                        return mapped
                with lazy_parameters():
                    model = self._built(dtype)
        except (OSError, ValueError, RuntimeError) as error:
            raise GulliverError(f"--model {self.folder}: {_line(error)}") from None
        materialize(model, device)
        odd = load_huggingface(model.to(device), self.folder, strict=False)
        if odd.missing:
            raise GulliverError(f"--model {self.folder} is of another model, or not whole: {odd}")
        return model

    def _built(self, dtype: torch.dtype) -> nn.Module:
        import transformers

        return transformers.AutoModelForCausalLM.from_config(self.config, dtype=dtype)


def fingerprint_of(folder: Path) -> str:
    """Digest of a configuration, and of names, sizes and both ends of its weights."""
    digest = hashlib.blake2b(digest_size=16)
    values = read_json(folder / "config.json")
    known = {k: v for k, v in values.items() if k != "transformers_version"}
    digest.update(json.dumps(known, sort_keys=True).encode())
    with open_weights(folder) as weights:
        files = weights.files
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(LOOKED_AT))
            opened.seek(max(0, size - LOOKED_AT))
            digest.update(opened.read())
    return digest.hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers' bars and advice from the terminal."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
