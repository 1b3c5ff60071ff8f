"""GPTQ: quantizes each linear layer based on its inputs during calibration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.precision.int8.formats import (
    check_int4,
    from_int4,
    from_int8,
    largest_of,
    round_calibrated,
)
from gulliver.precision.int8.replace import Rounded, linear_modes, matrix_of, replace_module

Model = TypeVar("Model", bound=nn.Module)
Within = Callable[[int], AbstractContextManager[object]]
"""The context in which a batch, by its number, runs."""


# [Note: in order] Layers are quantized block by block, in the order in which the model calls them,
# and the inputs of a block include the error of the quantized blocks before it. If each block only
# reads the output of the one before, that output is kept, and all finished blocks return it instead
# of running: a pass runs two blocks. Otherwise it runs all blocks up to the current one. Extra
# memory: these outputs, and the input products of one block.
@torch.no_grad()
def replace_calibrated(
    model: Model,
    batches: Sequence[Any],
    mode: str = "int4",
    exclude: Iterable[str] = (),
    outlier_threshold: float | None = 6.0,
    embeddings: bool = False,
    convolutions: bool = True,
    told: Callable[[str], Any] = lambda line: None,
) -> Model:
    """Quantizes a model's weights as `replace_module` does, with GPTQ on calibration data.

    GPTQ applies to linear layers that the data reaches. Convolutions, embeddings, layers with
    shared weights, and layers that are never called are rounded to nearest. The model must be
    unsharded, and is in evaluation mode afterwards.

    Args:
        model: model with its weights.
        batches: inputs of the model, each a tensor or a mapping of keyword arguments.
        mode: mode, as in `replace_module`.
        exclude: patterns of layers that stay in floating point.
        outlier_threshold: magnitude above which activations are not quantized.
        embeddings: whether to quantize embeddings.
        convolutions: whether to quantize convolutions.
        told: called with a progress line after each block.

    Returns:
        The model.

    Raises:
        GulliverError: there are no batches, none reaches a linear layer, or inputs or weights are
            not finite or too large. The model is unchanged then.
    """
    exclude = list(exclude)
    model.eval()
    modules = dict(model.named_modules())
    modes = {p: m for p, m in linear_modes(model, mode, exclude).items() if p in modules}
    for path in modes:
        weight = matrix_of(modules[path])
        largest = largest_of(weight, path)
        if modes[path] == "int4":
            check_int4(largest, path)
    blocks = _called(model, modules, modes, batches)
    sequence = _SequentialBlocks(
        model, [modules[name] for name in blocks if name not in modes], batches
    )
    rounded: dict[str, Rounded] = {}
    for number, (name, calls) in enumerate(blocks.items(), 1):
        told(f"block {number} of {len(blocks)}, {name}: {len(calls)} layers")
        products = _products(model, modules, calls, batches, sequence.up_to(modules[name]))
        for path, found in products.items():
            rounded[path] = _rounded(modules[path], found, modes[path])
    given = exclude, outlier_threshold, embeddings, convolutions
    return replace_module(model, mode, *given, errors=True, rounded=rounded)


@dataclass
class _Counts:
    """Counts the calls of layers by path, ordered by their last call."""

    calls: dict[str, int] = field(default_factory=dict)
    bad: str = ""

    def note(self, path: str, x: Tensor) -> None:
        self.calls[path] = self.calls.pop(path, 0) + 1
        if not self.bad and not bool(x.isfinite().all()):
            self.bad = path


class _Enough(Exception):
    """Raised to end a forward pass early."""


def _called(
    model: nn.Module, modules: Mapping[str, nn.Module], paths: Iterable[str], batches: Sequence[Any]
) -> dict[str, dict[str, int]]:
    """Counts the calls of each layer; groups layers by block, in the order of the forward pass."""
    if not len(batches):
        raise GulliverError("calibration needs data; pass batches typical of the model's use")
    counts = _Counts()
    _watched(model, modules, paths, batches, counts.note)
    if counts.bad:
        raise GulliverError(
            f"the inputs of {counts.bad} are not finite; check the calibration data and the weights"
        )
    if not counts.calls:
        raise GulliverError("the calibration data does not reach any linear layer to quantize")
    blocks: dict[str, dict[str, int]] = {}
    for path, calls in counts.calls.items():
        found = re.match(r"(.*?\.\d+)\.", path)
        blocks.setdefault(found[1] if found else path, {})[path] = calls
    return blocks


def _products(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    calls: Mapping[str, int],
    batches: Sequence[Any],
    within: Within,
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def note(path: str, x: Tensor) -> None:
        rows = x.flatten(0, -2)
        rows = rows if rows.dtype is torch.float64 else rows.float()
        if path in found:
            found[path].addmm_(rows.t(), rows)
        else:
            found[path] = rows.t() @ rows

    # The first pass counted the calls over all batches.
    most = max(1, sum(calls.values()) // len(batches))
    _watched(model, modules, calls, batches, note, most, within)
    return found


def _watched(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    paths: Iterable[str],
    batches: Sequence[Any],
    note: Callable[[str, Tensor], None],
    most: int | None = None,
    within: Within = nullcontext,
) -> None:
    """Runs batches and records layer inputs; stops each batch after `most` calls."""
    left = [0]

    def hook(path: str) -> Callable[..., None]:
        def seen(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            note(path, args[0])
            left[0] -= 1
            if left[0] == 0:
                raise _Enough

        return seen

    handles = [modules[path].register_forward_hook(hook(path)) for path in paths]
    try:
        for number, batch in enumerate(batches):
            left[0] = -1 if most is None else most
            with within(number), suppress(_Enough):
                _run(model, batch)
    finally:
        for handle in handles:
            handle.remove()


def _run(model: nn.Module, batch: Any) -> None:
    model(**batch) if isinstance(batch, Mapping) else model(batch)


class _SequentialBlocks:
    """The blocks of a model that read only the output of the block before.

    Whether they do is tried with the first batch: each block must give the same output when all
    blocks before it return the output of the last of them.
    """

    def __init__(
        self, model: nn.Module, modules: Sequence[nn.Module], batches: Sequence[Any]
    ) -> None:
        found: dict[nn.Module, list[Any]] = {m: [] for m in modules if "forward" not in vars(m)}
        with _recording(found):
            _run(model, batches[0])
        once = all(len(outputs) == 1 for outputs in found.values())
        self.blocks = [*found] if once and self._is_sequential(model, batches[0], found) else []
        # The output of the second to last finished block, by batch.
        self.kept: list[Any] = [None] * len(batches)

    @staticmethod
    def _is_sequential(model: nn.Module, batch: Any, found: dict[nn.Module, list[Any]]) -> bool:
        blocks = list(found)
        for number, block in enumerate(blocks[1:], 1):
            again: dict[nn.Module, list[Any]] = {block: []}
            # Any error without the blocks before, as for a missing cache, means they are needed.
            with (
                suppress(Exception),
                _returning(blocks[:number], found[blocks[number - 1]][0]),
                _recording(again, stop=True),
            ):
                _run(model, batch)
            if not again[block] or not _equal(again[block][0], found[block][0]):
                return False
        return True

    def up_to(self, block: nn.Module) -> Within:
        """Returns the context of passes up to a block, by batch."""

        @contextmanager
        def within(number: int) -> Iterator[None]:
            place = self.blocks.index(block) if block in self.blocks else 0
            if not place:
                yield
                return
            *done, last = self.blocks[:place]
            found: dict[nn.Module, list[Any]] = {last: []}
            with _returning(done, self.kept[number]), _recording(found):
                yield
            self.kept[number] = found[last][0]

        return within


@contextmanager
def _recording(found: dict[nn.Module, list[Any]], stop: bool = False) -> Iterator[None]:
    """Records outputs of modules."""

    def note(module: nn.Module, _: Any, out: Any) -> None:
        found[module].append(out)
        if stop:
            raise _Enough

    handles = [module.register_forward_hook(note) for module in found]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _returning(blocks: Sequence[nn.Module], output: Any) -> Iterator[None]:
    """Lets blocks return an output instead of running."""
    for block in blocks:
        vars(block)["forward"] = lambda *args, **kwargs: output
    try:
        yield
    finally:
        for block in blocks:
            del vars(block)["forward"]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple | list) and type(one) is type(other) and len(one) == len(other):
        return all(map(_equal, one, other))
    return one is None and other is None


def _rounded(module: nn.Module, products: Tensor, mode: str) -> Rounded:
    """Quantizes a layer; later layers then see the dequantized weight."""
    weight = matrix_of(module)
    values, scales = round_calibrated(weight, products, mode)
    back = (from_int4 if mode == "int4" else from_int8)(values, scales, weight.dtype)
    error = float((back - weight).norm() / weight.norm().clamp(min=1e-30))
    weight.copy_(back)
    return Rounded(values, scales, error)
