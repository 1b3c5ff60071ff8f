"""Mixture-of-experts layers over tensor ranks: each rank has some inner features of every expert.

transformers keeps the weights of all experts of a layer together, ``[experts, out, in]`` (or the
last two dims in turn), and an experts module loops over them, or multiplies them in one grouped
product. Cut by inner features, it stays the module that it is: it computes a part of the sum that
the experts' outputs are. What goes in is copied (the gradients of hidden states and of the routers'
weights are summed over the ranks), what comes out is summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.comm import RankGroup
from gulliver.errors import GulliverError
from gulliver.parallel.tensor._collectives import copy, reduce

INTO = ("gate_up_proj", "gate_proj", "up_proj")
OUT = "down_proj"
ADDED = "down_proj_bias"
"""Names of the parameters: those into the experts' features, out of them, and the last bias."""


# [Note: features, not experts] Giving whole experts to ranks (expert parallelism) would need an
# all-to-all of tokens, and ranks would wait for the one with the popular experts. Cut by features,
# every rank has the same work whatever the router says, at the price of narrower products.
#
# Latent attention is here, too: of what its first projection of keys and values returns, the rotary
# part goes to each head as it is, so its gradient is summed.
@dataclass(frozen=True)
class ParameterCut:
    """The sharding of one parameter."""

    dim: int  # Dimension that is sharded
    total: int  # Features along it
    units: int  # Indivisible units in each block of features
    blocks: int = 1  # Number of blocks that lie one after the other, each dealt alike


def parts_of_experts(path: str, module: Any, size: int) -> dict[str, ParameterCut]:
    """Returns how the parameters of an experts module are sharded, by name."""
    held = {n: p for n, p in module._parameters.items() if p is not None}
    into = [n for n in INTO if n in held]
    known = {*into, *(f"{n}_bias" for n in into), OUT, ADDED}
    plain = (
        hasattr(module, "is_transposed")
        and not getattr(module, "has_post_expert_norm", False)
        # An expert that returns its input would be counted on every rank.
        and not hasattr(module, "identity_expert")
        and len(list(module.parameters())) == len(held)
    )
    if not plain or not into or OUT not in held or set(held) - known:
        raise GulliverError(
            f"{path} is a {type(module).__name__} with parameters {', '.join(held) or 'inside'}: "
            "experts of this kind cannot be cut; give it the rule 'replicate'"
        )
    # Dim of a weight's inputs; 3 - inputs is that of its outputs.
    inputs = 1 if module.is_transposed else 2
    features = held[OUT].shape[inputs]
    if features < size:
        raise GulliverError(
            f"{path} has experts of {features} features, fewer than {size} tensor ranks: "
            f"tp_size from 1 to {features} would do"
        )
    found = {OUT: ParameterCut(inputs, features, features)}
    for name in into:
        # Gate and up in one: as [gate; up], or in turn, feature by feature.
        fused = held[name].shape[3 - inputs] // features
        blocks = fused if fused > 1 and module.is_concatenated else 1
        found[name] = ParameterCut(3 - inputs, fused * features, features, blocks)
        if f"{name}_bias" in held:
            found[f"{name}_bias"] = ParameterCut(1, fused * features, features, blocks)
    return found


def share_experts(module: nn.Module, rank_group: RankGroup) -> None:
    """Adds hooks with which a module of sharded experts takes whole tensors and returns them."""

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        added = module._parameters.get(ADDED)
        if added is not None:
            # Every rank adds the output's bias before the sum, so each adds its share of it. As an
            # attribute it is found before the parameter of this name, while the module runs.
            vars(module)[ADDED] = copy(added, rank_group) / rank_group.size
        given = {name: _copied(value, rank_group) for name, value in kwargs.items()}
        return tuple(_copied(value, rank_group) for value in args), given

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        vars(module).pop(ADDED, None)
        return None if output is None else reduce(output, rank_group)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)


def share_rotary(module: nn.Module, width: int, rank_group: RankGroup) -> None:
    """Sums the gradient of the last `width` features of a module's output over the ranks."""
    # All heads read these features as they are, and each rank has some of the heads: the gradient
    # on a rank is partial. The others go through a column layer, which sums theirs.

    def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        latent, rotary = output.split([output.shape[-1] - width, width], -1)
        return torch.cat([latent, copy(rotary, rank_group)], -1)

    module.register_forward_hook(after)


def _copied(value: Any, rank_group: RankGroup) -> Any:
    return (
        copy(value, rank_group)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
    )
