"""Values of small tensors, computed alongside their fake tensors.

Positions, masks and token counts steer many models: an empty mask is dropped, a caption's length is
read. Such tensors are small and computed from the batch and constants, so their real values are
computed as well and returned when the model asks. What depends on parameters is never known.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gulliver._compat import fake_kind, without_modes

ASKED = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
}
"""Operators that give a number instead of a tensor."""
MOST, MOST_FLOATS = 1 << 18, 1 << 10
"""Elements of the largest tensor whose values are computed: of whole numbers, and of others."""
KEPT = "_gulliver_known"


class Known:
    """Computes the values of small tensors alongside their fakes."""

    def __init__(self) -> None:
        self._lost = dict[int, Any]()  # storages, so that no other gets the address

    def learn(self, fake: Tensor, real: Tensor) -> None:
        """Keeps the value of a batch tensor if it is small."""
        if _is_small(real) and not real.is_meta and isinstance(fake, fake_kind()):
            with without_modes():
                vars(fake)[KEPT] = real.detach().cpu().clone()

    def of(self, tensor: Any) -> Tensor | None:
        """The value of a tensor; None if it is not known."""
        if not isinstance(tensor, fake_kind()):
            return tensor if _is_small(tensor) and not tensor.is_meta else None
        found = vars(tensor).get(KEPT)
        return None if found is None or found.untyped_storage()._cdata in self._lost else found

    def number(self, tensor: Any) -> Any:
        """The only element of a tensor; None if it is not known."""
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
    def answering(self) -> Iterator[None]:
        """Lets transformers read known values, as it does outside of a trace."""
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
