"""Weights that no memory holds: parameters that are views of mapped files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from gulliver.booster import lazy_parameters
from gulliver.checkpoint import load_huggingface, model_weights, read_tensors
from gulliver.io import named_errors, require_space

ALIGNMENT = 64
"""Bytes that tensors in the nameless file are aligned to."""


# [Note: weights larger than memory] Under a memory limit a model may be larger than memory before
# it is boosted. Its parameters are then views of files that are mapped: of the safetensors files
# themselves where they hold the tensors as they are trained, else of a nameless file that they are
# converted into first. Pages that were read may be dropped again by the system, and `boost` moves
# them chunk by chunk to where they will live. Several ranks take rank 0's values of what is frozen,
# which would make private copies of the files' pages, so there each rank has a file of its own.
def map_weights(
    build: Callable[[torch.dtype], nn.Module],
    folder: Path,
    dtype: torch.dtype,
    scratch: Path,
    alone: bool,
) -> nn.Module | None:
    """Makes a model whose parameters are views of mapped files."""
    with lazy_parameters():
        model = build(dtype)
    with model_weights(folder, model) as weights:
        infos, files, sources = weights.infos, weights.files, weights.sources
    # A tied parameter has several names, of which a file may have any.
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
    """Memory for tensors, in views of a file without a name."""
    starts, size = dict[Tensor, int](), 0
    for tensor in like:
        starts[tensor] = size
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    require_space(scratch, size)
    with named_errors(scratch, needed=size):
        handle, path = tempfile.mkstemp(prefix=".gulliver-", dir=scratch)
        try:
            # Reserved now: a mapped page that finds no room ends the process.
            os.posix_fallocate(handle, 0, size)
            whole = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        finally:
            os.close(handle)
            os.unlink(path)
    return {
        tensor: whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in starts.items()
    }
