"""Gives a model back to its user: parameters of its own, in place of those that lie in chunks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.utils.hooks import RemovableHandle

from gulliver.parallel.zero._shards import ShardedState


def give_back(shards: ShardedState, model: nn.Module, hooks: Iterable[RemovableHandle]) -> None:
    """Replaces a model's parameters by whole copies; every rank calls it."""
    # They are new tensors, not the old ones with other memory: nothing that the run has hooked to
    # those can go on, and a second boost finds the model as if it had never been boosted.
    shards.gatherer.release_all()
    shards.publish_exact()
    members = {p for sharded in shards.all_chunks for p in sharded.chunk.members}
    fresh = dict[nn.Parameter, nn.Parameter]()
    for module in model.modules():
        for key, held in module._parameters.items():
            if held is None or held not in members:
                continue
            if held not in fresh:  # tied ones stay tied
                value = held.detach().clone()
                fresh[held] = nn.Parameter(value, requires_grad=held.requires_grad)
            module._parameters[key] = fresh[held]
    for hook in hooks:
        hook.remove()
    shards.reducer.take(())
