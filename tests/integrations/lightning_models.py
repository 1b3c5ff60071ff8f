"""LightningModules of the tests, as Lightning's examples have them, and Trainers in a pool."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.transformer import Transformer
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gulliver.comm import World


class PoolEnvironment(ClusterEnvironment):
    """Ranks that the pool has started."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    creates_processes_externally = True  # type: ignore[assignment]
    main_address, main_port = "127.0.0.1", 0  # type: ignore[assignment]

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return self._world.size

    def set_world_size(self, size: int) -> None:
        assert size == self._world.size

    def global_rank(self) -> int:
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        assert rank == self._world.rank

    def local_rank(self) -> int:
        return self._world.rank

    def node_rank(self) -> int:
        return 0


def trainer_of(world: World, strategy: str | Strategy, **options: Any) -> pl.Trainer:
    """A Trainer without noise whose ranks are those of a pool."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    if strategy == "ddp":
        strategy = DDPStrategy(find_unused_parameters=True)  # a GAN's steps leave out one half
    return pl.Trainer(
        accelerator="cpu",
        devices=world.size,
        strategy=strategy,
        plugins=[PoolEnvironment(world), *options.pop("plugins", [])],
        **{**dict.fromkeys(quiet, False), "max_epochs": 2, **options},
    )


class Recording(pl.LightningModule):
    """Remembers the losses of its steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.losses: list[float] = []

    def note(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.item())
        return loss

    def data(self) -> Dataset:
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(16, 28, generator=generator))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data(), batch_size=2, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.data(), batch_size=4)

    test_dataloader = predict_dataloader = val_dataloader


class Autoencoder(Recording):
    """The autoencoder of Lightning's first page, on noise; with a schedule, and all logged."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(28, width), nn.ReLU(), nn.Linear(width, 3))
        self.decoder = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 28))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def loss(self, batch: Any) -> Tensor:
        (x,) = batch
        return functional.mse_loss(self.decoder(self.encoder(x)), x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.note(self.loss(batch))
        self.log("train_loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.all_gather(self(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Gan(Recording):
    """The GAN of Lightning's examples: two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(5, 12), nn.LeakyReLU(0.2), nn.Linear(12, 28))
        self.discriminator = nn.Sequential(nn.Linear(28, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        opt_g, opt_d = self.optimizers()  # type: ignore[misc]
        z = torch.randn(len(real), 5, generator=torch.Generator().manual_seed(batch_idx))
        valid, fake = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        self.toggle_optimizer(opt_g)
        g_loss = functional.binary_cross_entropy_with_logits(self.discriminator(self(z)), valid)
        self.manual_backward(self.note(g_loss))
        opt_g.step()
        opt_g.zero_grad()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        real_loss = functional.binary_cross_entropy_with_logits(self.discriminator(real), valid)
        made = self.discriminator(self(z).detach())
        d_loss = (real_loss + functional.binary_cross_entropy_with_logits(made, fake)) / 2
        self.manual_backward(self.note(d_loss))
        self.clip_gradients(opt_d, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        opt_d.step()
        opt_d.zero_grad()
        self.untoggle_optimizer(opt_d)

    def configure_optimizers(self) -> Any:
        halves = (self.generator, self.discriminator)
        return [torch.optim.Adam(half.parameters(), lr=1e-2, betas=(0.5, 0.999)) for half in halves]


class Gpt(Recording):
    """The language model of Lightning's demonstrations, tiny; its dropout draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=19, ninp=8, nhead=2, nhid=16, nlayers=2)

    def data(self) -> Dataset:
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randint(0, 19, (16, 6), generator=generator))

    def on_train_start(self) -> None:
        torch.manual_seed(2 + self.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        found = self.model(tokens[:, :-1], tokens[:, 1:])
        return self.note(functional.nll_loss(found, tokens[:, 1:].flatten()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
