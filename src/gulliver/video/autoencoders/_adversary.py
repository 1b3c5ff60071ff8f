"""The discriminator of a run: its optimizer, its step, and the term that it adds to the loss.

It is small: every rank has all of it and its optimizer, and gradients are added up over the ranks.
The autoencoder's step comes first, then the discriminator's, on the same decoded clips.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gulliver.comm import World, all_reduce
from gulliver.jobs import derive
from gulliver.video._autoencoder_config import TrainAutoencoderConfig
from gulliver.video.autoencoders._discriminator import PatchDiscriminator
from gulliver.video.autoencoders._losses import (
    Terms,
    adaptive_weight,
    discriminator_loss,
    generator_loss,
)


class Adversary:
    """A discriminator that is trained beside an autoencoder."""

    def __init__(self, config: TrainAutoencoderConfig, last_layer: Tensor, world: World) -> None:
        self.config, self.last_layer, self.world = config.loss, last_layer, world
        self.replicas = config.share_ranks
        torch.manual_seed(derive(config.seed, 9))
        network = PatchDiscriminator(config.loss.discriminator_width)
        self.network = network.to(last_layer.device, last_layer.dtype)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(),
            lr=config.loss.discriminator_rate,
            betas=(0.5, 0.9),
            weight_decay=0.0,
        )

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of it, by entry."""
        return {"discriminator": self.network, "discriminator_optimizer": self.optimizer}

    def term(self, terms: Terms | None, decoded: Tensor | None, share: float) -> Tensor:
        """Computes the weighted adversarial term of this rank's clips; every rank calls it."""
        if terms is None or decoded is None:
            if self.config.adaptive:
                self._gradients(None, None, 0.0)
            return torch.zeros((), device=self.last_layer.device, dtype=self.last_layer.dtype)
        made = generator_loss(self.network.frozen(decoded))
        terms.figures["generator"] = made.detach()
        weight = torch.ones_like(made)
        if self.config.adaptive:
            weight = adaptive_weight(*self._gradients(terms.reconstruction, made, share))
            terms.figures["adaptive_weight"] = weight
        return self.config.adversarial * weight * made

    def _gradients(
        self, reconstruction: Tensor | None, made: Tensor | None, share: float
    ) -> Tensor:
        """Returns gradients of two terms at the last layer, of all ranks' clips, [2, ...]."""
        found = self.last_layer.new_zeros(2, *self.last_layer.shape)
        for row, term in enumerate((reconstruction, made)):
            if term is not None:
                (gradient,) = torch.autograd.grad(term, self.last_layer, retain_graph=True)
                found[row] = gradient * share
        all_reduce(found)
        return found

    def step(self, videos: Tensor | None, decoded: Tensor | None, share: float) -> Tensor:
        """Trains the discriminator on this rank's clips; every rank calls it."""
        self.optimizer.zero_grad()
        loss = self.last_layer.new_zeros(())
        if videos is not None and decoded is not None:
            loss = discriminator_loss(self.network(videos), self.network(decoded.detach()))
            (loss * (share / self.replicas)).backward()
        for parameter in self.network.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.world.size > 1:
                all_reduce(parameter.grad)
        self.optimizer.step()
        return loss.detach()
