"""Defines layouts of values along mesh axes, and how calls can be sharded.

A layout describes a value and its gradient along one axis:

    R   replicated, as is its gradient
    T   replicated; its gradient is partial (a sum over ranks)
    P   partial; its gradient is replicated
    Sd  sharded along dim d, as is its gradient

`T` is the layout of the input of a matrix product with a sharded output: each rank has a term of
its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gulliver.operators.trace import OperatorCall, Ref

WHOLE, SUMMED, TERMS = "R", "T", "P"
Layout = tuple[str, ...]  # layout along each mesh axis


def cut(dim: int) -> str:
    return f"S{dim}"


def cut_dim(layout: str) -> int | None:
    return int(layout[1:]) if layout[0] == "S" else None


def placements(layout: Layout) -> tuple[Placement, ...]:
    return tuple(_placement(one, TERMS) for one in layout)


def gradient_placements(layout: Layout) -> tuple[Placement, ...]:
    return tuple(_placement(one, SUMMED) for one in layout)


def _placement(layout: str, terms: str) -> Placement:
    dim = cut_dim(layout)
    if dim is not None:
        return Shard(dim)
    return Partial() if layout == terms else Replicate()


def local_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    found = list(shape)
    for one, size in zip(layout, sizes, strict=True):
        dim = cut_dim(one)
        if dim is not None:
            found[dim] //= size
    return tuple(found)


def divides(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> bool:
    parts: dict[int, int] = {}
    for one, size in zip(layout, sizes, strict=True):
        dim = cut_dim(one)
        if dim is not None:
            parts[dim] = parts.get(dim, 1) * size
    return all(shape[dim] % count == 0 for dim, count in parts.items())


def first_index(
    dim: int, length: int, layout: Layout, sizes: Sequence[int], here: Sequence[int]
) -> int:
    first = 0
    for one, size, at in zip(layout, sizes, here, strict=True):
        if cut_dim(one) == dim:
            length //= size
            first += at * length
    return first


# Sharding rules of torch functions along one axis of a mesh.
#
# `shardings(call)` lists them, each with a name and the layouts of inputs and outputs. Every rank
# calls the same function on its shards and gets its shard, or its term, of the outputs. A function
# without a rule is replicated, which is correct unless it draws random numbers.


class CallSharding(NamedTuple):
    """A sharding of a call along one axis."""

    # Name of the sharding in plans.
    word: str
    # Layout of each input tensor.
    takes: tuple[str, ...]
    # Layout of each output tensor.
    gives: tuple[str, ...]


def shardings(call: OperatorCall) -> Iterator[CallSharding]:
    yield CallSharding("whole", (WHOLE,) * len(call.takes), (WHOLE,) * len(call.gives))
    rule = _RULES.get(call.name)
    if rule is not None:
        yield from rule(call)


def _element_wise(call: OperatorCall) -> Iterator[CallSharding]:
    (shape,) = call.shapes_given
    for dim, size in enumerate(shape):
        if size > 1:
            takes = tuple(_along(given, shape, dim) for given in call.shapes_taken)
            yield CallSharding(f"dim {dim}", takes, (cut(dim),))


def _along(shape: Sequence[int], output: Sequence[int], dim: int) -> str:
    own = dim - len(output) + len(shape)
    return cut(own) if own >= 0 and shape[own] == output[dim] else SUMMED


def _leading(
    count: Callable[[OperatorCall], int],
) -> Callable[[OperatorCall], Iterator[CallSharding]]:
    """Rule that shards only the first tensor, along any but its last `count` dims."""

    def rule(call: OperatorCall) -> Iterator[CallSharding]:
        shape = call.shapes_taken[0]
        for dim in range(len(shape) - count(call)):
            rest = (SUMMED,) * (len(call.takes) - 1)
            yield CallSharding(f"dim {dim}", (cut(dim), *rest), (cut(dim),))

    return rule


def _softmax(call: OperatorCall) -> Iterator[CallSharding]:
    (shape,) = call.shapes_given
    own = call.argument(1, "dim", None)
    if isinstance(own, int):
        for dim in range(len(shape)):
            if dim != own % len(shape):
                yield CallSharding(f"dim {dim}", (cut(dim),), (cut(dim),))


def _reduced(call: OperatorCall) -> Iterator[CallSharding]:
    shape, dims = call.shapes_taken[0], call.argument(1, "dim", None)
    if dims is None or len(call.gives) != 1:
        return
    gone = {d % len(shape) for d in ([dims] if isinstance(dims, int) else dims)}
    keeps = len(call.shapes_given[0]) == len(shape)
    for dim in range(len(shape)):
        if dim not in gone:
            given = dim if keeps else dim - sum(1 for d in gone if d < dim)
            yield CallSharding(f"dim {dim}", (cut(dim),), (cut(given),))


def _linear(call: OperatorCall) -> Iterator[CallSharding]:
    last = len(call.shapes_taken[0]) - 1
    bias = len(call.takes) > 2
    rest = (SUMMED,) * (2 if bias else 1)
    if last:
        yield CallSharding("dim 0", (cut(0), *rest), (cut(0),))
    yield CallSharding("columns", (SUMMED, cut(0), *([cut(0)] if bias else [])), (cut(last),))
    yield CallSharding("rows", (cut(last), cut(1), *([TERMS] if bias else [])), (TERMS,))


def _addmm(call: OperatorCall) -> Iterator[CallSharding]:
    if call.constants_besides():
        return
    bias = len(call.shapes_taken[0])
    yield CallSharding("dim 0", (SUMMED, cut(0), SUMMED), (cut(0),))
    yield CallSharding("columns", (cut(bias - 1), SUMMED, cut(1)), (cut(1),))
    yield CallSharding("rows", (TERMS, cut(1), cut(0)), (TERMS,))


def _matmul(call: OperatorCall) -> Iterator[CallSharding]:
    one, other = call.shapes_taken
    if len(one) < 2 or len(other) < 2:
        return
    (shape,) = call.shapes_given
    last = len(shape) - 1
    for dim in range(last - 1):
        yield CallSharding(
            f"dim {dim}", (_along(one, shape, dim), _along(other, shape, dim)), (cut(dim),)
        )
    inner = len(one) - 1
    yield CallSharding(f"dim {last - 1}", (cut(inner - 1), SUMMED), (cut(last - 1),))
    yield CallSharding("columns", (SUMMED, cut(len(other) - 1)), (cut(last),))
    yield CallSharding("rows", (cut(inner), cut(len(other) - 2)), (TERMS,))


def _attention(call: OperatorCall) -> Iterator[CallSharding]:
    query, key, value = (call.argument(n, k, None) for n, k in enumerate(("query", "key", "value")))
    mask = call.argument(3, "attn_mask", None)
    shape = call.shapes_taken[query.index]
    for dim in range(len(shape) - 2):
        takes = [WHOLE] * len(call.takes)
        for one in (query, key, value):
            takes[one.index] = cut(dim)
        if isinstance(mask, Ref):
            takes[mask.index] = _along(call.shapes_taken[mask.index], shape, dim)
        yield CallSharding(
            "heads" if dim == len(shape) - 3 and dim else f"dim {dim}", tuple(takes), (cut(dim),)
        )


def _embedding(call: OperatorCall) -> Iterator[CallSharding]:
    shape = call.shapes_taken[0]
    for dim in range(len(shape)):
        yield CallSharding(f"dim {dim}", (cut(dim), SUMMED), (cut(dim),))
    yield CallSharding("columns", (WHOLE, cut(1)), (cut(len(shape)),))


def _cross_entropy(call: OperatorCall) -> Iterator[CallSharding]:
    logits, target = call.shapes_taken[:2]
    plain = len(call.takes) == 2 and len(logits) == 2 and len(target) == 1
    mean = call.argument(6, "reduction", "mean") == "mean"
    if plain and mean and not call.argument(7, "label_smoothing", 0.0):
        yield CallSharding("dim 0", (cut(0), WHOLE), (TERMS,))


def _viewed(call: OperatorCall) -> Iterator[CallSharding]:
    """Rule for views that preserve dims, or the outermost of merged dims."""
    given, found = call.shapes_taken[0], call.shapes_given[0]
    for dim, other in _kept_dims(given, found):
        yield CallSharding(f"dim {dim}", (cut(dim),), (cut(other),))
    yield CallSharding("terms", (TERMS,), (TERMS,))


def _kept_dims(one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int]]:
    a = b = 0
    while a < len(one) and b < len(other):
        first, second, sizes = a, b, [one[a], other[b]]
        a, b = a + 1, b + 1
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                sizes[0] *= one[a]
                a += 1
            else:
                sizes[1] *= other[b]
                b += 1
        # Dims of size 1 cannot be sharded.
        while first < a - 1 and one[first] == 1:
            first += 1
        while second < b - 1 and other[second] == 1:
            second += 1
        if one[first] > 1 and other[second] > 1:
            yield first, second


def _permuted(
    order: Callable[[OperatorCall], Sequence[int]],
) -> Callable[[OperatorCall], Iterator[CallSharding]]:
    def rule(call: OperatorCall) -> Iterator[CallSharding]:
        for given, dim in enumerate(order(call)):
            yield CallSharding(f"dim {dim}", (cut(dim),), (cut(given),))
        yield CallSharding("terms", (TERMS,), (TERMS,))

    return rule


def _transposed(call: OperatorCall) -> list[int]:
    count = len(call.shapes_taken[0])
    order = list(range(count))
    one, other = (
        (0, 1) if call.name == "t" else (call.argument(1, "dim0", 0), call.argument(2, "dim1", 1))
    )
    if count > 1:
        order[one], order[other] = order[other], order[one]
    return order


def _order(call: OperatorCall) -> list[int]:
    dims = call.argument(1, "dims", ())
    given = [dims, *call.args[2:]] if isinstance(dims, int) else list(dims)
    return [d % len(given) for d in given]


def _apart(call: OperatorCall) -> Iterator[CallSharding]:
    """Rule for concatenation along a dim that is not sharded."""
    shape = call.shapes_taken[0]
    own = call.argument(2, "dim", 0) % len(shape)
    many = len(call.gives)
    for dim in range(len(shape)):
        if dim != own:
            yield CallSharding(f"dim {dim}", (cut(dim),), (cut(dim),) * many)
    yield CallSharding("terms", (TERMS,), (TERMS,) * many)


def _unbound(call: OperatorCall) -> Iterator[CallSharding]:
    shape, many = call.shapes_taken[0], len(call.gives)
    own = call.argument(1, "dim", 0) % len(shape)
    for dim in range(len(shape)):
        if dim != own:
            yield CallSharding(f"dim {dim}", (cut(dim),), (cut(dim - (dim > own)),) * many)
    yield CallSharding("terms", (TERMS,), (TERMS,) * many)


def _joined(call: OperatorCall) -> Iterator[CallSharding]:
    shape = call.shapes_taken[0]
    own = call.argument(1, "dim", 0) % len(shape)
    for dim in range(len(shape)):
        if dim != own:
            yield CallSharding(f"dim {dim}", (cut(dim),) * len(call.takes), (cut(dim),))


def _indexed(call: OperatorCall) -> Iterator[CallSharding]:
    index = call.args[1]
    parts = list(index) if isinstance(index, tuple) else [index]
    count = len(call.shapes_taken[0])
    if any(not (p is None or p is ... or isinstance(p, int | slice)) for p in parts):
        return
    used = sum(1 for p in parts if isinstance(p, int | slice))
    if ... not in parts:
        parts.append(...)
    at = parts.index(...)
    parts[at : at + 1] = [slice(None)] * (count - used)
    dim = given = 0
    for part in parts:
        if isinstance(part, slice) and part == slice(None):
            yield CallSharding(f"dim {dim}", (cut(dim),), (cut(given),))
        dim += part is not None
        given += not isinstance(part, int)
    yield CallSharding("terms", (TERMS,), (TERMS,))


def _expanded(call: OperatorCall) -> Iterator[CallSharding]:
    given, found = call.shapes_taken[0], call.shapes_given[0]
    more = len(found) - len(given)
    for dim, size in enumerate(given):
        if size == found[dim + more] and size > 1:
            yield CallSharding(f"dim {dim}", (cut(dim),), (cut(dim + more),))


def _passed(call: OperatorCall) -> Iterator[CallSharding]:
    """Rule for forks; see `with_forks`."""
    for dim in range(len(call.shapes_taken[0])):
        yield CallSharding(f"dim {dim}", (cut(dim),), (cut(dim),))
    yield CallSharding("summed", (SUMMED,), (SUMMED,))


ELEMENT_WISE = frozenset(
    (
        *("abs", "add", "bfloat16", "clamp", "clone", "contiguous", "cos", "detach", "div"),
        *("double", "dropout", "elu", "eq", "erf", "exp", "float", "ge", "gelu", "gt", "half"),
        *("leaky_relu", "le", "log", "logical_not", "lt", "masked_fill", "maximum", "minimum"),
        *("mish", "mul", "ne", "neg", "pow", "reciprocal", "relu", "relu6", "rsqrt", "rsub"),
        *("sigmoid", "silu", "sin", "softplus", "sqrt", "square", "sub", "tanh", "to"),
        *("true_divide", "truediv", "type", "type_as", "where"),
    )
)
SHAPED = frozenset(("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"))
"""Functions whose arguments include sizes of the full tensor, which are replaced by local ones."""
STRETCHED = frozenset(("expand", "expand_as"))
FORK = "fork"
HARD = frozenset(
    (
        *("linear", "addmm", "matmul", "bmm", "mm", "scaled_dot_product_attention"),
        *("embedding", "cross_entropy", FORK),
    )
)
"""Functions that start a separate operator."""
_RULES: dict[str, Callable[[OperatorCall], Iterator[CallSharding]]] = {
    **dict.fromkeys(ELEMENT_WISE, _element_wise),
    **dict.fromkeys(SHAPED, _viewed),
    **dict.fromkeys(STRETCHED, _expanded),
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
    **dict.fromkeys(("mean", "sum", "var", "amax", "amin"), _reduced),
    **dict.fromkeys(("chunk", "split", "tensor_split"), _apart),
    **dict.fromkeys(("transpose", "t", "swapaxes"), _permuted(_transposed)),
    "permute": _permuted(_order),
    "unbind": _unbound,
    "cat": _joined,
    "getitem": _indexed,
    "linear": _linear,
    "addmm": _addmm,
    "layer_norm": _leading(lambda call: len(call.argument(1, "normalized_shape", ()))),
    "rms_norm": _leading(lambda call: len(call.argument(1, "normalized_shape", ()))),
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    FORK: _passed,
}


def run_local(
    call: OperatorCall,
    tensors: Sequence[Any],
    layouts: Sequence[tuple[str, ...]],
    shapes: Sequence[Sequence[int]],
    first: int = 0,
) -> Any:
    if call.name in SHAPED:
        return tensors[0].reshape(shapes[0])
    if call.name in STRETCHED:
        return tensors[0].expand(shapes[0])
    cut_rows = call.name == "cross_entropy" and any(cut_dim(one) == 0 for one in layouts[0])
    if cut_rows:
        logits, target = tensors
        ignored = call.argument(4, "ignore_index", -100)
        count = (target != ignored).sum()
        rows = target[first : first + logits.shape[0]]
        sum_ = call.func(logits, rows, ignore_index=ignored, reduction="sum")
        return sum_ / count
    args, kwargs = call.filled(tensors)
    return call.func(*args, **kwargs)
