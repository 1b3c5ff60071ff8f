"""Sharded linear layers with quantized weights, for inference (`replace_module`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gulliver.comm.collectives import all_reduce
from gulliver.comm.groups import RankGroup
from gulliver.errors import GulliverError
from gulliver.layout.even import split_evenly
from gulliver.parallel.tensor.collectives import gather, split
from gulliver.parallel.tensor.layers import ColumnLinear, OnLine, RowLinear
from gulliver.precision.int8.formats import GROUP
from gulliver.precision.int8.layers import QuantizedLinear
from gulliver.precision.int8.products import largest_in_rows
from gulliver.precision.int8.replace import GROUPED, REPLACED, QuantizeArguments, matrix_of


# [Note: as one rank] The outputs of a column layer equal those of a single rank, because each row
# of a weight is rounded separately. In a row layer each rank has some of the inputs, and would
# compute different scales. So the largest magnitudes are taken over all ranks: of the weight's rows
# once, of the activations' rows in each product (one number per row, all-reduced before the
# product). Then only the rounding order of the sum over ranks differs. The int4 groups are also
# those of the full layer; if a rank's inputs begin or end within one, the layer is rejected.
class _Sharded(QuantizedLinear):
    rank_group: RankGroup

    # A process group cannot be copied: a copy of the module shares it.
    __deepcopy__ = OnLine.__deepcopy__


class QuantizedColumn(_Sharded):
    """A quantized `ColumnLinear`."""

    total: int
    gather_output: bool

    def run(self, x: Tensor) -> Tensor:
        y = self.multiply(x, self.bias)
        if not self.gather_output:
            return y
        return gather(
            y, y.dim() - 1, split_evenly(self.total, self.rank_group.size), self.rank_group
        )


class QuantizedRow(_Sharded):
    """A quantized `RowLinear`."""

    total: int
    split_input: bool

    def run(self, x: Tensor) -> Tensor:
        group = self.rank_group
        if self.split_input and group.size > 1:
            x = split(x, x.dim() - 1, split_evenly(self.total, group.size), group)
        largest = None
        if self.mode != "int8":
            largest = _joined(largest_in_rows(x.reshape(-1, self.inputs), self.threshold), group)
        y = self.multiply(x, None, largest).contiguous()
        if group.size > 1:
            all_reduce(y, group=group.process_group, any_order=True)
        return y if self.bias is None else y.add_(self.bias)


def _joined(largest: Tensor, group: RankGroup) -> Tensor:
    if group.size > 1:
        all_reduce(largest, "max", group=group.process_group)
    return largest


def _column(layer: Any, ways: QuantizeArguments) -> nn.Module:
    made = _made(QuantizedColumn, layer, ways, *ways.quantised(matrix_of(layer), ways.mode))
    made.total, made.gather_output = layer.total, layer.gather_output
    return made


def _row(layer: Any, ways: QuantizeArguments) -> nn.Module:
    group: RankGroup = layer.rank_group

    def joined(largest: Tensor) -> Tensor:
        return largest if largest.is_meta else _joined(largest, group)

    quantised = ways.quantised(matrix_of(layer), ways.mode, joined)
    made = _made(QuantizedRow, layer, ways, *quantised)
    made.total, made.split_input = layer.total, layer.split_input
    return made


def _grouped(layer: Any, path: str) -> bool:
    total = layer.total or layer.in_features
    if total % GROUP:
        return False
    cut = next((border for border in layer.borders if border % GROUP), None)
    if cut is None:
        return True
    raise GulliverError(
        f"{path} has {total} inputs, which {layer.rank_group.size} ranks would split at {cut}, "
        f"inside an int4 group of {GROUP}; use fewer ranks, mode='int8_dynamic', or "
        f"exclude=[{path!r}]"
    )


def _made(kind: Any, layer: Any, ways: QuantizeArguments, values: Tensor, scales: Tensor) -> Any:
    if layer.shared is not None:
        raise GulliverError(
            f"{ways.path} has a sharded sequence, which quantized layers do not support: disable "
            "sequence parallelism"
        )
    inputs = matrix_of(layer).shape[1]
    made = kind(ways.path, ways.mode, values, scales, inputs, layer.bias, ways.threshold)
    made.rank_group = layer.rank_group
    return made


REPLACED[ColumnLinear] = _column
REPLACED[RowLinear] = _row
GROUPED[RowLinear] = _grouped
