"""Weights that no memory holds: parameters that are views of mapped files.

[Note: weights larger than memory] Under a memory limit a model may be larger than memory before it
is boosted. Its parameters are then views of files that are mapped: of the safetensors files
themselves where they have the dtype that is trained, else of a nameless file that they are
converted into first. Pages that were read may be dropped again by the system, and `boost` moves
them chunk by chunk to where they will live. Several ranks take rank 0's values of what is frozen,
which would make private copies of the files' pages, so there each rank has a file of its own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from gulliver.booster import lazy_parameters
from gulliver.checkpoint import open_weights, read_tensors
from gulliver.io import named_errors, require_space

ALIGNMENT = 64
"""Bytes that tensors in the nameless file are aligned to."""


def map_weights(
    build: Callable[[torch.dtype], nn.Module],
    folder: Path,
    dtype: torch.dtype,
    scratch: Path,
    alone: bool,
) -> nn.Module | None:
    """Makes a model whose parameters are views of mapped files.

    Args:
        build: function that makes the model in a dtype.
        folder: Hugging Face folder of its weights.
        dtype: dtype of its parameters.
        scratch: folder for a copy in another dtype, which has no name and goes with the process.
        alone: whether this is the only rank.

    Returns:
        The model; None where the files name its tensors in another way than it does.

    Raises:
        GulliverError: there is no room for a copy.
    """
    with lazy_parameters():
        model = build(dtype)
    with open_weights(folder) as weights:
        infos, files = weights.infos, weights.files
    # A tied parameter has several names, of which a file may have any.
    names = dict[Tensor, list[str]]()
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(value, []).append(name)
    found = {v: next((n for n in known if n in infos), "") for v, known in names.items()}
    if any(not name or infos[name].shape != tuple(v.shape) for v, name in found.items()):
        return None
    tensors = {n: t for file in files for n, t in read_tensors(file).items()}  # views, too
    if not alone or any(infos[n].dtype != p.dtype for p, n in found.items() if p.is_meta):
        tensors |= _copied({name: tensors[name] for name in found.values()}, dtype, scratch)
    made = {p: nn.Parameter(tensors[name]) for p, name in found.items() if p.is_meta}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = made[parameter]
    with torch.no_grad():
        for value, name in found.items():
            if not value.is_meta:
                value.copy_(tensors[name])
    return model


def _copied(tensors: Mapping[str, Tensor], dtype: torch.dtype, scratch: Path) -> dict[str, Tensor]:
    """The same tensors in another dtype, views of a file without a name."""
    kinds = {n: dtype if t.is_floating_point() else t.dtype for n, t in tensors.items()}
    starts, size = dict[str, int](), 0
    for name, tensor in tensors.items():
        starts[name] = size
        size += -(-tensor.numel() * kinds[name].itemsize // ALIGNMENT) * ALIGNMENT
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
    made = dict[str, Tensor]()
    for name, tensor in tensors.items():
        stop = starts[name] + tensor.numel() * kinds[name].itemsize
        made[name] = whole[starts[name] : stop].view(kinds[name]).view(tensor.shape)
        made[name].copy_(tensor)
    return made
