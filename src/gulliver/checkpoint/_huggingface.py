"""Fills a model from Hugging Face's files, whatever kind of memory its tensors have.

Read `load_huggingface`, then `_fill`: a tensor is read straight into its memory where the bytes of
the file are those that it holds, else through a batch's, converted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from gulliver.checkpoint._fits import always_fits, refuse_misfit
from gulliver.checkpoint._matching import Mismatch, match
from gulliver.checkpoint._transformers import model_weights
from gulliver.checkpoint._tree import Leaf
from gulliver.checkpoint._weights import BATCH, ReadBatch, TensorInfo, Weights, identity
from gulliver.errors import GulliverError
from gulliver.memory import Part, Region, before_write, region_of


@torch.no_grad()
def load_huggingface(
    model: nn.Module | Mapping[str, Leaf],
    path: Path | str,
    strict: bool = True,
    prefix: str = "",
    elsewhere: Collection[str] = (),
    aliases: Mapping[str, str] | None = None,
    checked: bool = False,
    like: nn.Module | None = None,
) -> Mismatch:
    """Fills a model in place from a Hugging Face folder or a safetensors file.

    Every rank calls it, and reads what it needs: for a `Part`, and for a parameter that holds a
    region of a whole (`gulliver.memory.set_region`), only its elements. Values are
    converted to the model's dtypes, where they fit. Names that share their memory with one that is
    loaded (tied weights) need not be in the files. Boosted models can be loaded, too.

    Args:
        model: model to fill, or tensors and parts of tensors by name.
        path: a folder with ``model.safetensors`` or an index, or a safetensors file; also a step's
            or a run's, of which the entry ``model`` is taken.
        strict: whether to refuse what does not match, before anything is changed; else it is
            reported.
        prefix: text before the model's names in the files: ``"model."`` loads the weights of a
            causal language model into its backbone.
        elsewhere: names that may be in the files and not in this model, as those of the other
            stages of a pipeline are.
        aliases: names of this model, and the names whose values they have where the files lack
            them: tied weights of which one lies in another stage.
        checked: whether `match_huggingface` has looked at the values already.
        like: model of transformers whose names these are, where `model` is none.

    Returns:
        What did not match; empty if all did.

    Raises:
        GulliverError: the files are missing or broken; something does not match. Other shapes never
            do, and something must match. A value does not fit the dtype that it is converted to:
            nothing is changed then.
    """
    targets = _targets(model)
    with _opened(path, model, like, targets, prefix, elsewhere) as weights:
        odd = _matched(weights, targets, strict, prefix, elsewhere, aliases)
        sources = _sources(weights, targets, prefix)
        if not checked:
            _check_fits(weights, sources, {})
        # A checkpoint may still be copying these tensors.
        before_write(_value(leaf) for leaf in sources.values() if _is_plain(leaf))
        _fill(weights, sources)
    return odd


def match_huggingface(
    model: nn.Module | Mapping[str, Leaf],
    path: Path | str,
    strict: bool = True,
    prefix: str = "",
    elsewhere: Collection[str] = (),
    aliases: Mapping[str, str] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    like: nn.Module | None = None,
) -> Mismatch:
    """Returns what `load_huggingface` would of these arguments; changes nothing."""
    # The model may be on meta.
    #
    # Headers are read, and values that are to go to a narrower dtype: that of the tensor, or the
    # one that `dtypes` has under its name, in which it will be computed with.
    targets = _targets(model, filled=False)
    with _opened(path, model, like, targets, prefix, elsewhere) as weights:
        odd = _matched(weights, targets, strict, prefix, elsewhere, aliases)
        narrow = {prefix + name: dtype for name, dtype in (dtypes or {}).items()}
        _check_fits(weights, _sources(weights, targets, prefix), narrow)
    return odd


def read_weights(
    path: Path | str, model: nn.Module, strict: bool = True
) -> tuple[dict[str, Tensor], Mismatch]:
    """Reads all tensors into new host memory, checked as `load_huggingface` checks them."""
    wanted = model.state_dict()
    with model_weights(path, model, wanted) as weights:
        odd = _matched(weights, wanted, strict, "", (), None)
        found = {name: torch.empty(i.shape, dtype=i.dtype) for name, i in weights.infos.items()}
        weights.read({n: Part(v.view(-1), tuple(v.shape)) for n, v in found.items() if v.numel()})
        for name in wanted.keys() & found.keys():
            refuse_misfit(str(weights.path), name, found[name], wanted[name].dtype)
    return found, odd


def _opened(
    path: Path | str,
    model: nn.Module | Mapping[str, Leaf],
    like: nn.Module | None,
    targets: Mapping[str, Leaf],
    prefix: str,
    elsewhere: Collection[str],
) -> Weights:
    names = {prefix + name for name in targets} | set(elsewhere)
    return model_weights(path, model if isinstance(model, nn.Module) else like, names)


def _sources(weights: Weights, targets: Mapping[str, Leaf], prefix: str) -> dict[str, Leaf]:
    """Returns what is filled, by the names in the files."""
    return {prefix + n: leaf for n, leaf in targets.items() if prefix + n in weights.infos}


def _check_fits(
    weights: Weights, sources: Mapping[str, Leaf], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Refuses values that do not fit; they are read again to be kept, for they may be many."""
    batch = ReadBatch()
    for source, leaf in sources.items():
        target = dtypes.get(source, _value(leaf).dtype)
        if not always_fits(weights.infos[source].dtype, target):
            for _, values in _pieces(weights, source, leaf, batch):
                refuse_misfit(str(weights.path), source, values, target)


def _matched(
    weights: Weights,
    targets: Mapping[str, Leaf],
    strict: bool,
    prefix: str,
    elsewhere: Collection[str],
    aliases: Mapping[str, str] | None,
) -> Mismatch:
    _add_aliases(weights, targets, prefix, aliases or {})
    odd = match(weights.infos, targets, prefix, elsewhere)
    # Of names that share their memory (tied weights) one is enough.
    there = (leaf for name, leaf in targets.items() if prefix + name in weights.infos)
    loaded = {_same_memory(leaf) for leaf in there} - {None}
    odd.missing = [name for name in odd.missing if _same_memory(targets[name]) not in loaded]
    odd.refuse(str(weights.path), len(targets), strict)
    return odd


def _add_aliases(
    weights: Weights,
    targets: Mapping[str, Leaf],
    prefix: str,
    aliases: Mapping[str, str],
) -> None:
    """Makes tensors known under the names that this model has for them, too."""
    for name, kept in aliases.items():
        there = prefix + kept in weights.infos and prefix + name not in weights.infos
        if name in targets and there:
            weights.add_alias(prefix + name, prefix + kept)


def _targets(model: nn.Module | Mapping[str, Leaf], filled: bool = True) -> dict[str, Leaf]:
    # The parameters themselves: what ZeRO shards is only written through these.
    state: Mapping[str, Any] = (
        model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    )
    targets: dict[str, Leaf] = {n: v for n, v in state.items() if isinstance(v, Tensor | Part)}
    for name, leaf in targets.items():
        if filled and _value(leaf).is_meta:
            raise GulliverError(f"{name} is on the meta device: call to_empty() on the model first")
        if hasattr(leaf, "device_mesh"):
            raise GulliverError(f"{name} is a DTensor: load the model before it is distributed")
    return targets


def _value(leaf: Leaf) -> Tensor:
    return leaf.value if isinstance(leaf, Part) else leaf


def _is_plain(leaf: Leaf) -> bool:
    """Whether a leaf's memory is its own: other kinds only take what is copied to them."""
    return type(_value(leaf)) in (Tensor, nn.Parameter)


def _same_memory(leaf: Leaf) -> Any:
    return identity(_value(leaf)) if _is_plain(leaf) and not _value(leaf).is_meta else id(leaf)


def _fill(weights: Weights, targets: Mapping[str, Leaf]) -> None:
    """Reads into tensors and parts: straight into their memory, or through a batch's."""
    straight: dict[str, Part] = {}
    staged: dict[str, Leaf] = {}
    for source, leaf in targets.items():
        if _fits(leaf, weights.infos[source]):
            start, region = _origin(leaf)
            flat = _value(leaf).detach().reshape(-1)
            straight[source] = Part(flat, weights.infos[source].shape, start, region=region)
        else:
            staged[source] = leaf
    weights.read({source: part for source, part in straight.items() if part.value.numel()})
    # Whoever watches tensors by their versions (autograd, ZeRO's copies) saw nothing of that.
    increment_version([_value(targets[source]) for source in straight])
    batch = ReadBatch()
    for source, leaf in staged.items():
        info = weights.infos[source]
        if _is_plain(leaf) and _value(leaf).is_contiguous():
            _fill_staged(weights, source, leaf, batch)
            continue
        start, region = _origin(leaf)
        held = torch.empty(_value(leaf).shape, dtype=info.dtype)
        part = Part(held.reshape(-1), info.shape, start, region=region)
        weights.read({source: part} if held.numel() else {})
        _value(leaf).copy_(held)


def _origin(leaf: Leaf) -> tuple[int, Region | None]:
    """The first element of a leaf, and the region that it is counted in."""
    return (leaf.start, leaf.region) if isinstance(leaf, Part) else (0, region_of(leaf))


def _fits(leaf: Leaf, info: TensorInfo) -> bool:
    """Whether the bytes of a file are those of a leaf."""
    if not _is_plain(leaf):
        return False
    value = _value(leaf)
    usual = value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg()
    return usual and value.dtype == info.dtype


def _fill_staged(weights: Weights, source: str, leaf: Leaf, batch: ReadBatch) -> None:
    value = _value(leaf).view(-1)
    for start, values in _pieces(weights, source, leaf, batch):
        value[start : start + values.numel()].copy_(values)


def _pieces(
    weights: Weights, source: str, leaf: Leaf, batch: ReadBatch
) -> Iterator[tuple[int, Tensor]]:
    """Reads what a leaf is filled from, batch by batch; each is good until the next."""
    count = _value(leaf).numel()
    (first, region), step = _origin(leaf), BATCH // weights.infos[source].dtype.itemsize
    for start in range(0, count, step):
        runs = [(source, first + start, first + min(count, start + step))]
        yield start, batch.read(weights, runs, {source: region})[source].value
