"""Loads base models, with weights larger than memory as views of memory-mapped files."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.checkpoint.files import read_json, read_tensors
from gulliver.checkpoint.huggingface import (
    float_config,
    lazy_parameters,
    load_huggingface,
    model_weights,
)
from gulliver.checkpoint.weights import open_weights
from gulliver.errors import GulliverError, missing_extra
from gulliver.io.files import named_errors, require_space
from gulliver.parallel.tensor.apply import materialize

ALIGNMENT = 64  # alignment in bytes of tensors in the temporary file


# [Note: weights larger than memory] Under a memory limit a model may be larger than memory before
# it is boosted. Its parameters are then views of mapped files: of the safetensors files themselves
# if they hold the tensors in the training dtype, else of an unlinked temporary file that they are
# converted into first. The system may drop clean pages at any time, and `boost` moves the
# parameters chunk by chunk to their final tier. With several ranks, frozen values are broadcast
# from rank 0, which would create private copies of the mapped pages, so each rank has its own file
# there.
def map_weights(
    build: Callable[[torch.dtype], nn.Module],
    folder: Path,
    dtype: torch.dtype,
    scratch: Path,
    alone: bool,
) -> nn.Module | None:
    """Creates a model whose parameters are views of memory-mapped files; None if not possible."""
    with lazy_parameters():
        model = build(dtype)
    with model_weights(folder, model) as weights:
        infos, files, sources = weights.infos, weights.files, weights.sources
    # A tied parameter has several names, and a file may use any of them.
    names = dict[Tensor, list[str]]()
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        names.setdefault(value, []).append(name)
    found = {v: next((n for n in known if n in infos), "") for v, known in names.items()}
    if any(not name or infos[name].shape != tuple(v.shape) for v, name in found.items()):
        return None
    tensors = {n: t for file in files for n, t in read_tensors(file).items()}  # views, too
    made = {p: tensors.get(sources.get(name, "")) for p, name in found.items() if p.is_meta}
    views = alone and all(t is not None and t.dtype == p.dtype for p, t in made.items())
    made = made if views else _reserved(made, scratch)
    parameters = {p: nn.Parameter(value) for p, value in made.items() if value is not None}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = parameters[parameter]
    rest = {n: v for n, v in state.items() if not v.is_meta} if views else model
    if rest:
        load_huggingface(rest, folder, strict=False, elsewhere=state, like=model)
    return model


def _reserved(like: Iterable[Tensor], scratch: Path) -> dict[Tensor, Tensor | None]:
    starts, size = dict[Tensor, int](), 0
    for tensor in like:
        starts[tensor] = size
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    require_space(scratch, size)
    with named_errors(scratch, needed=size):
        handle, path = tempfile.mkstemp(prefix=".gulliver-", dir=scratch)
        try:
            # Reserved now: touching a mapped page on a full disk kills the process.
            os.posix_fallocate(handle, 0, size)
            whole = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        finally:
            os.close(handle)
            os.unlink(path)
    return {
        tensor: whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in starts.items()
    }


# The base model: its folder, its fingerprint, and loading.


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOOKED_AT = 1 << 20  # bytes at each end of a weight file that are hashed for the fingerprint


@dataclass(frozen=True)
class Base:
    """Folder of a Hugging Face causal language model."""

    folder: Path

    @cached_property
    def config(self) -> Any:
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
                f"--model {self.folder} is a {found.model_type}, which is not a causal language "
                "model; use one such as Llama, Qwen, Gemma, GPT-2 or OPT"
            )
        found.use_cache = False
        return found

    @cached_property
    def context(self) -> int | None:
        """Maximum sequence length in tokens; None for no limit."""
        longest = getattr(self.config, "max_position_embeddings", None)
        return int(longest) if isinstance(longest, int) and longest > 0 else None

    @cached_property
    def dtype(self) -> torch.dtype:
        """Most common dtype of the weights, ignoring quantized weights with scales."""
        counts = Counter[torch.dtype]()
        with open_weights(self.folder) as weights:
            for info in weights.infos.values():
                if info.dtype.is_floating_point and info.dtype.itemsize > 1:
                    counts[info.dtype] += info.numel
        return counts.most_common(1)[0][0] if counts else torch.float32

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the configuration, and of names, sizes and both ends of the weight files."""
        return fingerprint_of(self.folder)

    def on_meta(self) -> nn.Module:
        with torch.device("meta"), _quiet():
            return self._built(torch.float32)

    def load(
        self, dtype: torch.dtype, device: torch.device, scratch: Path | None, alone: bool
    ) -> nn.Module:
        """Loads the model on this rank."""
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
            raise GulliverError(
                f"--model {self.folder} is incomplete or belongs to another model: {odd}"
            )
        return model

    def _built(self, dtype: torch.dtype) -> nn.Module:
        import transformers

        return transformers.AutoModelForCausalLM.from_config(self.config, dtype=dtype)


def fingerprint_of(folder: Path) -> str:
    """Digest of the configuration, and of the name, size, head and tail of each weight file."""
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
