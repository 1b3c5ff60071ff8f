"""Values of small tensors, computed alongside their fake tensors.

Many models read positions, masks and token counts: an empty mask is dropped, a caption's length
is read. Such tensors are small and computed from the batch and constants, so their real values are
computed too and returned if the model reads them. Values that depend on parameters are never known.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.backends import mkldnn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gulliver._compat import fake_kind, without_modes
from gulliver.errors import check_known

ASKED = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
}
"""Operators that return a number instead of a tensor."""
MOST, MOST_FLOATS = 1 << 18, 1 << 10
"""Maximum elements of a tensor whose values are computed: integer tensors, and others."""
KEPT = "_gulliver_known"


class Known:
    """Computes the values of small tensors alongside their fake tensors."""

    def __init__(self) -> None:
        self._lost = dict[int, Any]()  # storages, so that no other gets the address

    def learn(self, fake: Tensor, real: Tensor) -> None:
        """Stores the value of a batch tensor if it is small."""
        if _is_small(real) and not real.is_meta and isinstance(fake, fake_kind()):
            with without_modes():
                vars(fake)[KEPT] = real.detach().cpu().clone()

    def of(self, tensor: Any) -> Tensor | None:
        """Returns a tensor's value; None if unknown."""
        if not isinstance(tensor, fake_kind()):
            return tensor if _is_small(tensor) and not tensor.is_meta else None
        found = vars(tensor).get(KEPT)
        return None if found is None or found.untyped_storage()._cdata in self._lost else found

    def number(self, tensor: Any) -> Any:
        value = self.of(tensor)
        if value is None:
            return None
        with without_modes():
            return value.item()

    def ran(self, func: Any, call: tuple[Any, Any, Any], taken: Sequence[Tensor]) -> None:
        """Computes the outputs of an operator if all its inputs are known."""
        args, kwargs, output = call
        values = [self.of(tensor) for tensor in taken]
        changed = func._schema.is_mutable
        given = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        if any(value is None for value in values):
            if changed:
                lost = (value.untyped_storage() for value in values if value is not None)
                self._lost |= {storage._cdata: storage for storage in lost}
            return
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        if drawn or not given or not all(_is_small(tensor) for tensor in given):
            return
        with without_modes(), torch.no_grad():
            real = pytree.tree_map_only(Tensor, self.of, (args, kwargs))
            options = {**real[1], **({"device": "cpu"} if "device" in real[1] else {})}
            found = func(*real[0], **options)
        for fake, value in zip(given, pytree.tree_leaves(found), strict=True):
            vars(fake)[KEPT] = value

    @contextmanager
    def readable_values(self) -> Iterator[None]:
        """Lets transformers read known values, as it does when not tracing."""
        module = sys.modules.get("transformers.utils.import_utils")
        if module is None or not hasattr(module, "is_fake_tensor"):
            yield
            return
        is_fake = module.is_fake_tensor
        with patch.object(module, "is_fake_tensor", lambda x: is_fake(x) and self.of(x) is None):
            yield


def _is_small(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor):
        return False
    plain = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.numel() <= (MOST if plain else MOST_FLOATS) and not tensor.requires_grad


# Selects CUDA kernels while a step is traced without a GPU, because kernels determine what is
# saved.
#
# Fake CUDA tensors cannot run backward in a torch without CUDA, so the step is traced as on a CPU,
# except for functions that choose by device: attention and dropout call the operator that they
# would choose on CUDA (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.11 to 2.13,
# devices since Ampere, default settings). Recurrent layers are traced token by token, because the
# size of cuDNN's reserve space is only known on a GPU.


KERNELS = ("cpu", "cuda")
aten = torch.ops.aten
ATTENTION = F.scaled_dot_product_attention
HALF = (torch.float16, torch.bfloat16)
WIDEST = 256
ALIGNED = 16
"""Alignment of the rows of a bias in memory-efficient attention."""


def kernels_of(name: str) -> AbstractContextManager[Any]:
    check_known("kernels", name, KERNELS)
    return _on_cuda() if name == "cuda" else nullcontext()


@contextmanager
def _on_cuda() -> Iterator[None]:
    # A mode does not see the inner calls of functions that it has intercepted.
    lstm = patch.object(nn.LSTM, "forward", _in_steps(nn.LSTM.forward))
    with lstm, patch.object(F, "scaled_dot_product_attention", _attention), _CudaKernels():
        yield


def _in_steps(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an LSTM forward that runs token by token, without the fused CPU kernel."""

    def run(*args: Any, **kwargs: Any) -> Any:
        was = mkldnn.enabled
        mkldnn.enabled = False
        try:
            return forward(*args, **kwargs)
        finally:
            mkldnn.enabled = was

    return run


class _CudaKernels(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is ATTENTION:
            return _attention(*args, **kwargs)
        if func in (F.dropout, torch.dropout):
            return _dropout(func, *args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    same = query.shape[-1] == key.shape[-1] == value.shape[-1]
    square = not is_causal or query.shape[-2] == key.shape[-2]
    four = query.ndim == key.ndim == value.ndim == 4
    heads = enable_gqa or query.shape[-3:-2] == key.shape[-3:-2]
    fits = same and query.shape[-1] <= WIDEST and query.dtype in HALF
    if attn_mask is None and four and square and heads and fits:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if four and square and not enable_gqa and query.dtype in (*HALF, torch.float32):
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        saves = torch.is_grad_enabled() and any(
            t.requires_grad for t in (query, key, value, attn_mask) if t is not None
        )
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, saves, dropout_p, is_causal, scale=scale
        )[0]
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, **options
    )[0]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        zeros = torch.zeros_like(mask, dtype=query.dtype)
        mask = zeros.masked_fill_(mask.logical_not(), float("-inf"))
    rest = -mask.shape[-1] % ALIGNED
    if rest:
        mask = F.pad(mask, (0, rest))[..., : mask.shape[-1]]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _dropout(
    func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, True)[0]
    return func(input, p, training, *((inplace,) if func is F.dropout else ()))
