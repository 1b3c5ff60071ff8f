"""Loads Hugging Face folders under the parameter names of a transformers model.

transformers saves many models under other names or with differently split tensors, and converts
them on loading. `model_weights` applies the same conversions, so that all readers see the model's
own tensors; block-scaled FP8 tensors are dequantized.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from gulliver.checkpoint.files import read_json
from gulliver.checkpoint.manifest import Mismatch, match
from gulliver.checkpoint.reader import always_fits, check_representable
from gulliver.checkpoint.regions import PartOffset, copy_bytes, overlap, place_of
from gulliver.checkpoint.tree import Leaf, values_of
from gulliver.checkpoint.weights import (
    BATCH,
    FileWeights,
    ReadBatch,
    TensorInfo,
    Weights,
    identity,
    open_weights,
    rounds,
)
from gulliver.errors import GulliverError
from gulliver.memory.parts import Part, Region, region_of, whole_shape
from gulliver.memory.pending import before_write

SCALED = "_scale_inv"

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
UNUSED = (".input_scale", ".activation_scale")
"""Suffixes of activation scales, which are only needed for FP8 arithmetic."""

_Compute = Callable[[], dict[str, Tensor]]
_Slabs = list[tuple[int, int, str, _Compute]]


# [Note: converted tensors] Renamed tensors are read directly from their file. Experts, which are
# stored one by one, are joined slab by slab, with at most one expert's matrix in memory. Other
# conversions compute the full tensor once, and keep it until another one is read.
def model_weights(
    path: Path | str, model: nn.Module | None, names: Collection[str] | None = None
) -> Weights:
    """Opens weights under the parameter names of a model."""
    weights = open_weights(path)
    try:
        if isinstance(weights, FileWeights):
            known = model.state_dict(keep_vars=True) if names is None and model else names or ()
            config: Any = getattr(model, "config", None)
            if hasattr(config, "model_type") or any(i.dtype in FP8 for i in weights.infos.values()):
                return _converted(weights, model, set(known))
        return weights
    except BaseException:
        weights.close()
        raise


def float_config(folder: Path | str) -> Any:
    """Reads a folder's model configuration without its quantization settings."""
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        stored = stored if isinstance(stored, Mapping) else stored.to_dict()
        if stored.get("quant_method") != "fp8":
            raise GulliverError(
                f"{folder}: weights quantized by {stored.get('quant_method')!r} are not "
                "supported: download the model in bfloat16, float32 or block-scaled FP8"
            )
        del config.quantization_config
    return config


@contextmanager
def lazy_parameters() -> Iterator[None]:
    """Creates parameters on meta inside the block, where they take no memory.

    Buffers are created as usual, because files do not contain their values. Parameters are created
    one at a time and freed, so at most the largest exists at any time.
    """
    # Not torch.device("meta"): it would also create buffers on meta, and lose their values.
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            grad = parameter.requires_grad
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class ModelWeights(Weights):
    """Tensors of files under a model's names, some of them converted."""

    def __init__(
        self,
        base: Weights,
        straight: dict[str, str],
        computed: dict[str, _Slabs],
        infos: dict[str, TensorInfo],
        scaled: dict[str, str],
    ) -> None:
        self.path, self.files, self.infos = base.path, base.files, infos
        self.straight, self._computed, self._base = straight, computed, base
        self._scaled = scaled
        self._last: tuple[_Compute, dict[str, Tensor]] | None = None

    @property
    def sources(self) -> Mapping[str, str]:
        return self.straight | self._scaled

    def add_alias(self, name: str, kept: str) -> None:
        super().add_alias(name, kept)
        for found in (self.straight, self._computed):
            if kept in found:
                found[name] = found[kept]  # pyright: ignore[reportArgumentType]

    def read(self, wanted: Mapping[str, Part]) -> None:
        for name, part in wanted.items():
            if name not in self.straight:
                self._read_computed(name, part)
        straight = ((self.straight[n], p) for n, p in wanted.items() if n in self.straight)
        for one in rounds(straight):
            self._base.read(one)

    def _read_computed(self, name: str, part: Part) -> None:
        info, place = self.infos[name], place_of(part)
        into = part.value.view(-1).view(torch.uint8)
        for start, stop, key, compute in self._computed[name]:
            copies = overlap(PartOffset(info.shape, start, stop), place)
            if not len(copies):
                continue
            if self._last is None or self._last[0] is not compute:
                self._last = None  # freed first, so that only one is in memory at a time
                self._last = compute, compute()
            row = self._last[1][key].contiguous().view(-1).view(torch.uint8)
            copy_bytes(into, row, copies.scaled(info.dtype.itemsize))

    def close(self) -> None:
        self._last = None
        self._base.close()


def _converted(weights: FileWeights, model: Any, names: set[str]) -> Weights:
    """Applies transformers' conversions in the same order as transformers."""
    every = weights.infos
    scales = {w: n for n in every if (w := _scaled(n)) in every and every[w].dtype in FP8}
    unused = UNUSED if scales else ()
    spent = {*scales.values(), *(name for name in every if name.endswith(unused))}
    kept = [name for name in every if name not in spent]
    if not scales and set(kept) <= names:
        return weights  # stored under the model's own names
    block = _block(weights.path)
    straight: dict[str, str] = {}
    computed: dict[str, _Slabs] = {}
    infos: dict[str, TensorInfo] = {}
    scaled: dict[str, str] = {}

    def info_of(source: str) -> TensorInfo:
        known = weights.infos[source]
        return TensorInfo(torch.float32, known.shape) if source in scales else known

    def tensor(source: str) -> Tensor:
        value = _read_whole(weights, source)
        return (
            _dequantized(value, _read_whole(weights, scales[source]), block, source)
            if (source in scales)
            else value
        )

    def add(name: str, source: str) -> None:
        infos[name] = info_of(source)
        if source in scales:
            scaled[name] = source
            computed[name] = [(0, infos[name].numel, name, lambda: {name: tensor(source)})]
        else:
            straight[name] = source

    converters: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name, source, pattern, converter in _renamed(kept, model, names):
        if converter is None:
            add(name, source)
        else:
            _, sources = converters.setdefault(name, (converter, {}))
            sources.setdefault(pattern, []).append(source)
    for first, (converter, sources) in converters.items():
        shapes = {
            p: [torch.empty(info_of(s).shape, dtype=info_of(s).dtype, device="meta") for s in found]
            for p, found in sources.items()
        }
        try:
            made = _convert(converter, first, model, shapes)
        except AttributeError:  # a parameter of another stage, whose shape is not known here
            continue
        slabs = _slabs(converter, sources, info_of, tensor) if len(made) == 1 else None

        def compute(c: Any = converter, f: str = first, s: Any = sources) -> dict[str, Tensor]:
            return _convert(c, f, model, {p: [tensor(n) for n in found] for p, found in s.items()})

        for name, value in made.items():
            infos[name] = TensorInfo(value.dtype, tuple(value.shape))
            computed[name] = slabs or [(0, value.numel(), name, compute)]
    return ModelWeights(weights, straight, computed, infos, scaled)


def _renamed(kept: list[str], model: Any, names: set[str]) -> list[tuple[str, str, str, Any]]:
    """Lists model names, file names, and the converters and patterns between them."""
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:  # versions before 5 did not convert names
        return [(name, name, "", None) for name in kept]
    if not isinstance(model, PreTrainedModel):
        return [(name, name, "", None) for name in kept]
    table = get_model_conversion_mapping(model)
    renamings = [one for one in table if isinstance(one, WeightRenaming)]
    converters = [one for one in table if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    ignored = [re.compile(one) for one in model._keys_to_ignore_on_load_unexpected or ()]
    base, known = model.base_model_prefix, dict.fromkeys(names, True)
    found: list[tuple[str, str, str, Any]] = []
    for source in sorted(kept, key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, base, known)
        if name not in names and source in names:
            name, pattern = rename_source_key(source, [], [], base, known)
        if name not in names:
            # The model's class ignores some names; all others are kept, and are unexpected.
            if not any(one.search(name) for one in ignored):
                found.append((source, source, "", None))
            continue
        found.append((name, source, pattern or "", by_pattern[pattern] if pattern else None))
    return found


def _convert(
    converter: Any, first: str, model: Any, tensors: dict[str, list[Tensor]]
) -> dict[str, Tensor]:
    one = deepcopy(converter)
    one.collected_tensors.update(tensors)
    made = one.convert(first, model=_WholeShapes(model), config=model.config)
    return {n: value[0] if isinstance(value, list) else value for n, value in made.items()}


class _WholeShapes:
    """Wraps a model so that conversions see the full shapes of its sharded parameters."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(whole_shape(self._model.get_parameter(name)), device="meta")


def _slabs(
    converter: Any,
    sources: Mapping[str, list[str]],
    info_of: Callable[[str], TensorInfo],
    tensor: Callable[[str], Tensor],
) -> _Slabs | None:
    """Lists the sources of a concatenated tensor; None if it has to be computed."""
    kinds = [(type(op).__name__, op.dim) for op in converter.operations if hasattr(op, "dim")]
    stacked = kinds in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
    if not stacked or len(kinds) != len(converter.operations):
        return None
    columns = [sources[pattern] for pattern in converter.source_patterns if pattern in sources]
    found: _Slabs = []
    for row in zip(*columns, strict=True):
        for source in row:
            start = found[-1][1] if found else 0
            stop = start + info_of(source).numel
            found.append((start, stop, source, lambda source=source: {source: tensor(source)}))
    return found


def _scaled(name: str) -> str:
    """Returns the name of the weight that a tensor holds scales of; empty for other tensors."""
    for ending in (".qscale_weight", ".scale"):
        if name.endswith(ending):
            return f"{name.removesuffix(ending)}.weight"
    return name.removesuffix(SCALED) if name.endswith(SCALED) else ""


def _read_whole(weights: Weights, name: str) -> Tensor:
    info = weights.infos[name]
    value = torch.empty(info.shape, dtype=info.dtype)
    if value.numel():
        weights.read({name: Part(value.view(-1), info.shape)})
    return value


def _block(path: Path) -> tuple[int, int] | None:
    """Returns the rows and columns that share a scale; None without block scaling."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    values = read_json(file) if file.is_file() else {}
    size = (values.get("quantization_config") or {}).get("weight_block_size")
    return (int(size[0]), int(size[1])) if size else None


def _dequantized(value: Tensor, scales: Tensor, block: tuple[int, int] | None, name: str) -> Tensor:
    """Multiplies values by the scales of their blocks; edge blocks may be smaller."""
    if scales.dtype == torch.uint8:  # exponents
        scales = (scales.float() - 127.0).exp2()
    scales, (rows, columns) = scales.float(), value.shape[-2:]
    if scales.numel() == 1:
        return value.float() * scales
    high, wide = block or (
        math.ceil(rows / scales.shape[-2]),
        math.ceil(columns / scales.shape[-1]),
    )
    if (-(-rows // high), -(-columns // wide)) != tuple(scales.shape[-2:]):
        raise GulliverError(
            f"{name}: {list(scales.shape)} scales do not fit {list(value.shape)} values in blocks "
            f"of {high} x {wide}: the weight_block_size in config.json does not match"
        )
    spread = scales.repeat_interleave(high, -2)[..., :rows, :]
    return value.float() * spread.repeat_interleave(wide, -1)[..., :columns]


# Fills a model from Hugging Face files, in any kind of memory.
#
# Read `load_huggingface`, then `_fill`: a tensor is read directly into its memory if the file has
# the same bytes; otherwise it is converted through the memory of a batch.


@torch.no_grad()
def load_huggingface(
    model: nn.Module | Mapping[str, Leaf],
    path: Path | str,
    strict: bool = True,
    prefix: str = "",
    elsewhere: Collection[str] = (),
    aliases: Mapping[str, str] | None = None,
    like: nn.Module | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    check: bool = True,
    fill: bool = True,
) -> Mismatch:
    """Fills a model in place from a Hugging Face folder or a safetensors file.

    Must be called on all ranks. Each rank reads only the elements it holds: its elements of a
    `Part` or of a parameter that holds a region (`gulliver.memory.parts.set_region`). Values are
    converted to the model's dtypes if they fit. Tied weights need to be in the files only once.
    Boosted models can be loaded too.

    Args:
        model: model to fill, or tensors and parts of tensors by name.
        path: a folder with ``model.safetensors`` or an index, a safetensors file, or a step or run
            with the entry ``model``.
        strict: raise on mismatches before anything is changed; otherwise report them.
        prefix: prefix of the model's names in the files: ``"model."`` loads the weights of a causal
            language model into its backbone.
        elsewhere: names that may be in the files but not in this model, such as names of other
            pipeline stages.
        aliases: alternative name, by name of this model, to use if the files lack the name: tied
            weights whose other copy is on another stage.
        like: transformers model that the names belong to, if `model` is a mapping.
        dtypes: narrower compute dtypes by name that the values also have to fit.
        check: whether to verify that values converted to a narrower dtype fit.
        fill: False only matches and checks; the model may be on meta.

    Returns:
        Names and shapes that did not match; empty if all did.

    Raises:
        GulliverError: files are missing or broken; something does not match (other shapes are never
            accepted, and at least one name must match); or a value does not fit its new dtype, in
            which case nothing is changed.
    """
    targets = _targets(model, fill)
    module = model if isinstance(model, nn.Module) else like
    with model_weights(path, module, {prefix + n for n in targets} | {*elsewhere}) as weights:
        odd = _matched(weights, targets, strict, prefix, elsewhere, aliases)
        # Tensors to fill, by their names in the files.
        found = ((prefix + name, leaf) for name, leaf in targets.items())
        sources = {name: leaf for name, leaf in found if name in weights.infos}
        if check:
            _check_fits(weights, sources, {prefix + n: kind for n, kind in (dtypes or {}).items()})
        if not fill:
            return odd
        # A checkpoint may still be copying these tensors.
        before_write(values_of(leaf) for leaf in sources.values() if _is_plain(leaf))
        _fill(weights, sources)
    return odd


def _check_fits(
    weights: Weights, sources: Mapping[str, Leaf], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Rejects values that do not fit their new dtype, before they are read again for loading."""
    batch = ReadBatch()
    for source, leaf in sources.items():
        target = dtypes.get(source, values_of(leaf).dtype)
        if not always_fits(weights.infos[source].dtype, target):
            for _, values in _pieces(weights, source, leaf, batch):
                check_representable(str(weights.path), source, values, target)


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
    # For tensors that share memory (tied weights), one name is enough.
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
    for name, kept in aliases.items():
        there = prefix + kept in weights.infos and prefix + name not in weights.infos
        if name in targets and there:
            weights.add_alias(prefix + name, prefix + kept)


def _targets(model: nn.Module | Mapping[str, Leaf], filled: bool) -> dict[str, Leaf]:
    # The parameters themselves, because sharded parameters can only be written through these.
    state: Mapping[str, Any] = (
        model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    )
    targets: dict[str, Leaf] = {n: v for n, v in state.items() if isinstance(v, Tensor | Part)}
    for name, leaf in targets.items():
        if filled and values_of(leaf).is_meta:
            raise GulliverError(f"{name} is on the meta device: call to_empty() on the model first")
        if hasattr(leaf, "device_mesh"):
            raise GulliverError(f"{name} is a DTensor: load the model before it is distributed")
    return targets


def _is_plain(leaf: Leaf) -> bool:
    """Whether a leaf can be read into directly; other leaves only accept copies."""
    return type(values_of(leaf)) in (Tensor, nn.Parameter)


def _same_memory(leaf: Leaf) -> Any:
    value = values_of(leaf)
    return identity(value) if _is_plain(leaf) and not value.is_meta else id(leaf)


def _fill(weights: Weights, targets: Mapping[str, Leaf]) -> None:
    straight: dict[str, Part] = {}
    staged: dict[str, Leaf] = {}
    for source, leaf in targets.items():
        if _fits(leaf, weights.infos[source]):
            start, region = _origin(leaf)
            flat = values_of(leaf).detach().reshape(-1)
            straight[source] = Part(flat, weights.infos[source].shape, start, region=region)
        else:
            staged[source] = leaf
    weights.read({source: part for source, part in straight.items() if part.value.numel()})
    # The reads bypass version counters, which autograd and ZeRO's copies rely on.
    increment_version([values_of(targets[source]) for source in straight])
    batch = ReadBatch()
    for source, leaf in staged.items():
        info = weights.infos[source]
        if _is_plain(leaf) and values_of(leaf).is_contiguous():
            _fill_staged(weights, source, leaf, batch)
            continue
        start, region = _origin(leaf)
        held = torch.empty(values_of(leaf).shape, dtype=info.dtype)
        part = Part(held.reshape(-1), info.shape, start, region=region)
        weights.read({source: part} if held.numel() else {})
        values_of(leaf).copy_(held)


def _origin(leaf: Leaf) -> tuple[int, Region | None]:
    """Returns the index of a leaf's first element, and the region that indices refer to."""
    return (leaf.start, leaf.region) if isinstance(leaf, Part) else (0, region_of(leaf))


def _fits(leaf: Leaf, info: TensorInfo) -> bool:
    """Whether a leaf can hold the file's bytes as they are, so that no conversion is needed."""
    if not _is_plain(leaf):
        return False
    value = values_of(leaf)
    usual = value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg()
    return usual and value.dtype == info.dtype


def _fill_staged(weights: Weights, source: str, leaf: Leaf, batch: ReadBatch) -> None:
    value = values_of(leaf).view(-1)
    for start, values in _pieces(weights, source, leaf, batch):
        value[start : start + values.numel()].copy_(values)


def _pieces(
    weights: Weights, source: str, leaf: Leaf, batch: ReadBatch
) -> Iterator[tuple[int, Tensor]]:
    """Yields a leaf's values batch by batch; a batch is valid until the next one."""
    count = values_of(leaf).numel()
    (first, region), step = _origin(leaf), BATCH // weights.infos[source].dtype.itemsize
    for start in range(0, count, step):
        runs = [(source, first + start, first + min(count, start + step))]
        yield start, batch.read(weights, runs, {source: region})[source].value
