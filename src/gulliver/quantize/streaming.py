"""Reads a checkpoint into a quantised model, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gulliver.checkpoint.huggingface import load_huggingface, model_weights
from gulliver.checkpoint.weights import Weights
from gulliver.comm.groups import ALONE, RankGroup, rank_group_of
from gulliver.errors import GulliverError
from gulliver.memory.parts import Part, region_of
from gulliver.parallel.tensor.apply import apply_tensor, materialize
from gulliver.parallel.tensor.plan import plan_tensor
from gulliver.parallel.tensor.styles import TensorPlan
from gulliver.precision.int8.layers import QuantizedLayer
from gulliver.precision.int8.replace import replace_module
from gulliver.quantize.files import refuse_quantized


# [Note: what is held] The model is on meta, cut over its ranks there. One layer after the other is
# filled with the slice of the file that this rank holds, quantised and freed; a slice is read
# without the rest of its tensor. So a rank never holds more than its quantised shard, one layer's
# float slice, and what the reader and the rounding take of one mebi-element.
def stream_quantized(
    model: nn.Module,
    path: Path | str,
    mode: str = "int8_dynamic",
    rank_group: RankGroup | dist.ProcessGroup | None = ALONE,
    prefix: str = "",
    exclude: Iterable[str] = (),
    outlier_threshold: float | None = 6.0,
    embeddings: bool = False,
    rules: Mapping[str, str] | None = None,
    errors: bool = False,
) -> nn.Module:
    """Fills a model on meta with a checkpoint's weights, quantised as they are read.

    Every rank of the group calls it, and holds its shard afterwards.

    Args:
        model: model whose parameters are on meta and whose buffers are real, as
            `gulliver.lazy_parameters` makes it.
        path: Hugging Face folder, safetensors file, step or run.
        mode: format as of `replace_module`, as are the arguments not listed here.
        rank_group: ranks that the model is sharded over by tensor parallelism: a rank group, a
            process group of torch, or None for all ranks of the world.
        prefix: text before the model's names in the files.
        exclude: patterns of layers that stay in float.
        outlier_threshold: magnitude of activations that are not quantised.
        embeddings: whether embeddings are quantised.
        rules: rules of `plan_tensor`, where the model's own plan is not wanted.
        errors: whether the report says the error of each weight.

    Returns:
        The model, in evaluation mode.

    Raises:
        GulliverError: a parameter is not on meta, the files lack or have other tensors, or are
            quantised, `rank_group` is none, or its ranks would cut a group of int4.
    """
    rank_group = _rank_group(rank_group)
    refuse_quantized(path)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            raise GulliverError(
                f"{name} is not on meta: build the model under gulliver.lazy_parameters(), or call "
                "gulliver.replace_module on what is loaded"
            )
    if rank_group.size > 1:
        plan: TensorPlan = plan_tensor(model, rank_group.size, rules=rules)
        apply_tensor(model, plan, rank_group)
    names = [prefix + name for name in model.state_dict(keep_vars=True)]
    with model_weights(path, model, names) as weights:
        reading = _Reading(model, weights, prefix)
        replace_module(
            model,
            mode,
            exclude,
            outlier_threshold,
            embeddings,
            load=reading.fill,
            errors=errors,
        )
    materialize(model, "cpu")
    load_huggingface(*_rest(model, path, prefix, reading.names), like=model)
    return model.eval().requires_grad_(False)


def _rank_group(given: Any) -> RankGroup:
    if isinstance(given, RankGroup):
        return given
    if given is None:
        return rank_group_of(None) if dist.is_initialized() else ALONE
    if isinstance(given, dist.ProcessGroup):
        return rank_group_of(given)
    raise GulliverError(
        f"rank_group is a {type(given).__name__}: give a process group, as "
        "torch.distributed.new_group makes it, a gulliver.comm.groups.RankGroup, or None for "
        "all ranks"
    )


class _Reading:
    """Fills layers from files."""

    def __init__(self, model: nn.Module, weights: Weights, prefix: str) -> None:
        self.weights = weights
        self.names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(prefix + name)

    def fill(self, path: str, module: nn.Module) -> None:
        """Reads the weight of a layer on meta; its bias stays there."""
        parameter: Any = module._parameters["weight"]
        names = self.names[id(parameter)]
        name = next((name for name in names if name in self.weights.infos), None)
        if name is None:
            raise GulliverError(f"{self.weights.path} has no {' or '.join(names)}")
        info, region = self.weights.infos[name], region_of(parameter)
        whole = tuple(parameter.shape) if region is None else region.shape
        if info.shape != whole:
            raise GulliverError(
                f"{self.weights.path}: {name} is {list(info.shape)}, the model's {list(whole)}"
            )
        value = torch.empty(parameter.shape, dtype=info.dtype)
        self.weights.read({name: Part(value.view(-1), whole, region=region)})
        module._parameters["weight"] = nn.Parameter(value, requires_grad=False)


def _rest(
    model: nn.Module, path: Path | str, prefix: str, names: Mapping[int, list[str]]
) -> tuple[Any, ...]:
    """Returns arguments of `load_huggingface` for what is not quantised."""
    quantised = {
        f"{at}.{name}": layer
        for at, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, QuantizedLayer)
        for name in ("weight", "weight_scale")
    }
    left: dict[str, Tensor] = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if name not in quantised
    }
    elsewhere = {name for known in names.values() for name in known}
    return left, path, True, prefix, elsewhere
