"""`QuantizedExperts`: a mixture of experts with quantised weights.

transformers keeps the weights of a layer's experts in one tensor, which `replace_module` leaves as
it is. Here each expert gets quantised linear layers of its own, and the layer multiplies by those
of the experts that its tokens go to. Over tensor ranks each expert is cut by inner features: as in
`gulliver.parallel.tensor.QuantizedRow`, scales are those of one rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gulliver._compat import share_forward_hooks
from gulliver.comm import ALONE, RankGroup, all_reduce
from gulliver.precision.int8 import (
    GROUP,
    QuantizedLinear,
    largest_in_rows,
    largest_of,
    to_int4,
    to_int8,
)

THRESHOLD = 6.0
"""Magnitude of activations that are not quantised, as of `gulliver.replace_module`."""
JOINED = ("gate_up_proj", "down_proj")


class QuantizedExperts(nn.Module):
    """Experts of one layer; `into` and `out` have a layer for each."""

    def __init__(self, like: Any, path: str, mode: str, rank_group: RankGroup = ALONE) -> None:
        super().__init__()
        self.mode, self._rank_group, self._like = mode, [rank_group], [like]
        self.num_experts = like.num_experts
        self.into, self.out = (
            nn.ModuleList(
                _on_meta(like._parameters[name], f"{path}.{name}.{expert}", mode)
                for expert in range(self.num_experts)
            )
            for name in JOINED
        )

    def fill(self, name: str, expert: int, weight: Tensor) -> None:
        """Rounds one expert's weight."""
        layer: Any = (self.into if name == JOINED[0] else self.out)[expert]
        if layer.mode == "int4":
            values, scales = to_int4(weight)
        else:
            largest = largest_of(weight, layer.path)
            values, scales = to_int8(weight, self._joined(largest, name))
        layer.weight.copy_(values)
        layer.weight_scale.copy_(scales)

    def _joined(self, largest: Tensor, name: str) -> Tensor:
        group = self._rank_group[0]
        if name == JOINED[1] and group.size > 1:
            all_reduce(largest, "max", group=group.process_group)
        return largest

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sums what each token's experts give, times the router's weights."""
        total = torch.zeros_like(hidden_states)
        like = self._like[0]
        # The experts in their order: ranks that share them join scales in each.
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:
                continue
            tokens, place = torch.where(top_k_index == expert)
            into: Any = self.into[expert]
            out: Any = self.out[expert]
            inner = like._apply_gate(into(hidden_states[tokens]))
            largest = None
            if out.mode != "int8" and self._rank_group[0].size > 1:
                largest = self._joined(largest_in_rows(inner, out.threshold), JOINED[1])
            found = out.multiply(inner, None, largest) * top_k_weights[tokens, place, None]
            total.index_add_(0, tokens, found.to(total.dtype))
        return total


def quantize_experts(model: nn.Module, mode: str, rank_group: RankGroup = ALONE) -> list[str]:
    """Replaces the experts of a model on meta by quantised ones, which are filled afterwards."""
    found = {path: module for path, module in model.named_modules() if is_experts(module)}
    for path, module in found.items():
        made = QuantizedExperts(module, path, mode, rank_group)
        share_forward_hooks(module, made)
        model.set_submodule(path, made)
    return list(found)


def settle_experts(model: Any) -> None:
    """Runs experts of odd sizes one by one."""
    # torch's grouped product takes rows of whole 16 bytes only.
    for module in model.modules():
        if is_experts(module):
            weights = [module._parameters[name] for name in JOINED]
            if any(w.shape[dim] * w.element_size() % 16 for w in weights for dim in (1, 2)):
                module.config._experts_implementation = "eager"


def is_experts(module: Any) -> bool:
    """Whether a module has experts in joined tensors of the layout that is understood here."""
    held = {name for name, p in module._parameters.items() if p is not None}
    return (
        held == set(JOINED)
        and hasattr(module, "_apply_gate")
        and not getattr(module, "is_transposed", True)
        and bool(getattr(module, "has_gate", False))
        and not getattr(module, "has_bias", True)
        and not getattr(module, "has_post_expert_norm", True)
    )


def _on_meta(weight: Any, path: str, mode: str) -> QuantizedLinear:
    """A layer of one expert, its values on meta."""
    outputs, inputs = weight.shape[1:]
    if mode == "int4" and inputs % GROUP:
        mode = "int8"
    matrix = torch.empty(outputs, inputs, device="meta")
    if mode == "int4":
        values, scales = to_int4(matrix)
    else:
        values, scales = to_int8(matrix, torch.empty(outputs, device="meta"))
    return QuantizedLinear(path, mode, values, scales, inputs, None, THRESHOLD)
