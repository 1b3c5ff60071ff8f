"""What Lightning's Trainer does around a fit under Gulliver's strategies, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision

from gulliver.booster.hybrid_plugin import HybridParallelPlugin
from gulliver.booster.plugins import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.integrations.lightning import GulliverStrategy
from tests.integrations.lightning_models import Autoencoder, Gan, Recording, trainer_of
from tests.patience import patient
from tests.pool import Pool

ROOT = Path(__file__).parents[2]
WIDE, LIMIT = 2**13, "10MiB"
"""Width of an autoencoder whose state takes 8 MiB, and a limit that leaves it some of them."""


def strategy_of(kind: str) -> Any:
    return GulliverStrategy(memory_limit="256MiB") if kind == "gemini" else kind


class Tuned(Autoencoder):
    """Has a learning rate that callbacks may set."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def around(world: World, kind: str, folder: str) -> dict[str, list[float]]:
    """Numbers that come out of a Trainer's other calls, and of callbacks that look into a fit."""
    module, monitor = Tuned(), LearningRateMonitor()
    monitored = {"logger": CSVLogger(f"{folder}/{kind}"), "log_every_n_steps": 1}
    callbacks = [monitor, GradientAccumulationScheduler({1: 2})]
    trainer = trainer_of(world, strategy_of(kind), callbacks=callbacks, **monitored)
    trainer.fit(module)
    found = {"losses": module.losses, "rates": next(iter(monitor.lrs.values()))}
    assert len(monitor.lrs) == 1
    found["validate"] = [*trainer.validate(module, verbose=False)[0].values()]
    found["test"] = [*trainer.test(module, verbose=False)[0].values()]
    predicted: Any = trainer.predict(module)
    assert predicted[0].shape[0] == world.size  # all_gather stacks the ranks'
    found["predict"] = torch.stack(predicted).flatten().tolist()
    path = str(trainer.strategy.broadcast(f"{folder}/{kind}/after.ckpt"))
    trainer.save_checkpoint(path)

    module = Tuned()
    averages = [EMAWeightAveraging(decay=0.5)] if kind != "gemini" else []
    stopping = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    trainer = trainer_of(world, strategy_of(kind), max_epochs=6, callbacks=[stopping, *averages])
    trainer.fit(module, ckpt_path=path)
    found["resumed"] = list(module.losses)
    if not averages:
        return found
    found["averaged"] = [p.detach().double().norm().item() for p in module.parameters()]

    if kind != "gulliver_zero3":
        trainer_of(world, kind, max_epochs=1).fit(module)  # a module may be fitted again
        trainer_of(world, "ddp", max_epochs=1).fit(module)
        found["again"] = module.losses[-8:]
    module = Tuned()
    swapped = [StochasticWeightAveraging(1e-3, swa_epoch_start=1)]
    trainer_of(world, kind, max_epochs=3, callbacks=swapped).fit(module)
    found["swa"] = [*module.losses, *(p.detach().norm().item() for p in module.parameters())]
    return found


def both(world: World, kinds: list[str], folder: str) -> dict[str, dict[str, list[float]]]:
    return {kind: around(world, kind, folder) for kind in kinds}


def test_calls_and_callbacks_match_ddp(pool: Pool, tmp_path: Path) -> None:
    kinds = ["ddp", "gulliver", "gulliver_zero3", "gemini"]
    found = pool.run(both, 2, kinds, str(tmp_path), deadline_s=150)[0]
    expected = found.pop("ddp")
    for kind, values in found.items():
        for name, value in values.items():
            if kind == "gemini" and name == "resumed":
                continue  # nothing averaged
            here, there = torch.tensor(value), torch.tensor(expected[name])
            assert here.shape == there.shape, (kind, name)
            assert torch.allclose(here, there, atol=3e-6), (kind, name)


class Meta(Autoencoder):
    """Made on meta, inside of the fit."""

    def __init__(self, width: int = 16) -> None:
        Recording.__init__(self)
        self.width = width

    def configure_model(self) -> None:
        if not hasattr(self, "encoder"):
            with torch.device("meta"):
                whole = Autoencoder(self.width)
            self.encoder, self.decoder = whole.encoder, whole.decoder


class Half(Autoencoder):
    """Computes a mean of 16 bits as plain torch does."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def mastered(module: Half, batches: list[torch.Tensor]) -> list[float]:
    """Plain torch: parameters of bfloat16, trained through float32 copies."""
    module.bfloat16()
    masters = [p.detach().float().requires_grad_() for p in module.parameters()]
    optimizer, found = torch.optim.SGD(masters, lr=0.1, momentum=0.9), []
    for x in batches:
        loss = module.loss([x.bfloat16()])
        found.append(loss.item())
        module.zero_grad()
        loss.backward()
        for master, parameter in zip(masters, module.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, module.parameters(), strict=True):
                parameter.copy_(master)
    return found


def alone(world: World, folder: str) -> None:
    """What one rank does: modules on meta, 16 bits, a rate that is found, and refusals."""
    trainer = trainer_of(world, "ddp", max_epochs=1)
    trainer.fit(Autoencoder())
    trainer.save_checkpoint(f"{folder}/plain.ckpt")
    trainer = trainer_of(world, GulliverStrategy(checkpoint="folder"), max_epochs=1)
    trainer.fit(Autoencoder())
    trainer.save_checkpoint(f"{folder}/ours")
    module = Autoencoder()
    trainer_of(world, "ddp").fit(module, ckpt_path=f"{folder}/plain.ckpt")
    for kind in ("gulliver_zero3", "gemini"):
        for start in ("plain.ckpt", "ours"):
            meta = Meta()
            trainer_of(world, strategy_of(kind)).fit(meta, ckpt_path=f"{folder}/{start}")
            assert torch.allclose(torch.tensor(meta.losses), torch.tensor(module.losses))
        meta = Meta()  # without a checkpoint its layers initialise themselves
        trainer_of(world, strategy_of(kind)).fit(meta)
        assert 2 > meta.losses[0] > meta.losses[-1]

    limited(world, folder)
    half, kept = Half(), list[torch.Tensor]()
    half.on_train_batch_start = lambda batch, _: kept.append(batch[0].float())  # type: ignore
    trainer_of(world, "gulliver", precision="bf16-true").fit(half)
    assert half.losses == mastered(Half(), kept)
    for options in ({"precision": "bf16"}, {"precision": "bf16", "stage": 3}):
        again = Half()
        trainer_of(world, GulliverStrategy(**options)).fit(again)
        assert again.losses == half.losses

    rates = []
    for strategy in ("ddp", GulliverStrategy(checkpoint="folder")):
        finder, module = (
            LearningRateFinder(num_training_steps=6, early_stop_threshold=None),
            Tuned(),
        )
        options = {"default_root_dir": folder, "max_epochs": 1, "enable_checkpointing": True}
        trainer_of(world, strategy, callbacks=[finder], **options).fit(module)
        rates.append([module.lr, *module.losses])
    assert torch.allclose(*(torch.tensor(found) for found in rates))
    options = {"callbacks": [LearningRateFinder(num_training_steps=6)]}
    with pytest.raises(GulliverError, match="only load folders"):
        trainer_of(world, "gulliver", default_root_dir=folder, **options).fit(Tuned())
    refusals(world, folder)


def limited(world: World, folder: str) -> None:
    """Weights of a file into a module on meta, under a limit that sends most of it to the disk."""
    whole, disk, file = Autoencoder(WIDE), f"{folder}:100MiB", f"{folder}/weights.safetensors"
    save_file(whole.state_dict(), file)
    trainer_of(world, "ddp", max_epochs=1).fit(whole)
    for options in ({}, {"weights": file}):
        module = Meta(WIDE) if options else Autoencoder(WIDE)
        strategy = GulliverStrategy(memory_limit=LIMIT, disk=disk, chunk_mb=0.5, **options)
        trainer_of(world, strategy, max_epochs=1).fit(module)
        assert torch.allclose(torch.tensor(module.losses), torch.tensor(whole.losses), atol=1e-6)
        read, written = strategy._booster.moved  # type: ignore[union-attr]
        assert min(read, written) > 2**20


def refusals(world: World, folder: str) -> None:
    def fit(strategy: Any, module: Any = None, **options: Any) -> None:
        start = options.pop("ckpt_path", None)
        trainer_of(world, strategy, **options).fit(module or Autoencoder(), ckpt_path=start)

    class Moved(Autoencoder):
        def on_train_start(self) -> None:
            self.cpu()

    class Doubled(Autoencoder):
        def on_train_epoch_start(self) -> None:
            self.encoder.double()

    class Exchanged(Autoencoder):
        def on_train_start(self) -> None:
            for parameter in self.parameters():
                parameter.data = parameter.data * 2

    class Grown(Autoencoder):
        def on_train_start(self) -> None:
            self.optimizers().add_param_group({"params": []})  # type: ignore[union-attr]

    class Lbfgs(Autoencoder):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    filed, plain = GulliverStrategy(precision="bf16", checkpoint="file"), f"{folder}/plain.ckpt"
    scaled = {"plugins": [MixedPrecision("16-mixed", "cpu")]}
    for match, strategy, module, options in (
        (r"Moved is moved .* a memory limit", strategy_of("gemini"), Moved(), {}),
        (r"Sequential \(encoder\) is moved .* stage 3", "gulliver_zero3", Doubled(), {}),
        ("'encoder.* given other memory .*copy_, mul_", "gulliver", Exchanged(), {}),
        ("'encoder.* given other memory .*copy_, mul_", "gulliver_zero3", Exchanged(), {}),
        ("added during a fit", "gulliver", Grown(), {}),
        ("LBFGS", "gulliver", Lbfgs(), {}),
        ("parameter .* is on meta", "gulliver", Meta(), {}),
        ("stage 3 has sharded all", "gulliver_zero3", Gan(), {}),
        ("16-mixed.*precision='fp16'", "gulliver", None, scaled),
        ("cannot be combined", GulliverStrategy(precision="bf16"), None, {"precision": "64-true"}),
        ("'file' is not supported", filed, None, {}),
        ("float32", GulliverStrategy(precision="bf16"), None, {"ckpt_path": plain}),
        ("has 1 optimizers", "gulliver", Gan(), {"ckpt_path": f"{folder}/ours"}),
    ):
        with pytest.raises(GulliverError, match=match):
            fit(strategy, module, **options)
    module = Autoencoder()
    fit("gulliver_zero3", module)
    for strategy in ("gulliver_zero3", "ddp"):
        with pytest.raises(GulliverError, match=r"stage 3.*new module"):
            fit(strategy, module)
    plugin = TorchDDPPlugin(verbose=False)  # which has whole gradients to scale
    fit(GulliverStrategy(plugin=plugin), **scaled)


def test_meta_16_bits_and_refusals(pool: Pool, tmp_path: Path) -> None:
    pool.run(alone, 1, str(tmp_path), deadline_s=120)


def test_registered_names_select_the_plugin() -> None:
    def plugin(**options: Any) -> Any:
        return GulliverStrategy(**options)._plugin

    assert plugin().stage == 1
    assert plugin(stage=3).stage == 3
    assert isinstance(plugin(memory_limit="1GiB", disk="/tmp:1GiB"), GeminiPlugin)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"disk": "/tmp:1GiB"}, "disk=.*memory_limit"),
        ({"stage": 1, "memory_limit": "1GiB"}, "stage"),
        ({"find_unused_parameters": True}, "no argument 'find_unused_parameters'"),
        ({"plugin": LowLevelZeroPlugin(), "stage": 2}, "plugin= and stage="),
        ({"plugin": HybridParallelPlugin(tp_size=1)}, "plugin="),
        ({"plugin": "zero"}, "plugin="),
        ({"checkpoint": "files"}, "'file' or 'folder'"),
        ({"checkpoint": "file", "use_async": True}, "use_async"),
    ],
)
def test_arguments_without_a_counterpart_are_refused(options: Any, match: str) -> None:
    with pytest.raises(GulliverError, match=match):
        GulliverStrategy(**options)


SCRIPT = """
import sys, torch, lightning.pytorch as pl
import {package}
from tests.integrations.lightning_models import Autoencoder
from gulliver.integrations.lightning import GulliverStrategy

if __name__ == "__main__":
    strategy = sys.argv[1]
    strategy = GulliverStrategy(start_method="spawn") if strategy == "spawn" else strategy
    quiet = dict(logger=False, enable_progress_bar=False, enable_checkpointing=False)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **quiet)
    module = Autoencoder()
    trainer.fit(module)
    norm = sum(p.detach().double().norm().item() for p in module.parameters())
    if trainer.is_global_zero:
        print("NORM", norm)
"""


@pytest.mark.full
@pytest.mark.deadline(400)
def test_lightning_launches_the_ranks_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(package="gulliver.integrations.lightning"))
    found = {}
    for strategy in ("ddp", "gulliver", "gulliver_zero3", "gulliver_gemini", "spawn"):
        done = subprocess.run(
            [sys.executable, str(script), strategy],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=patient(100),
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("NORM")]
        found[strategy] = float(line.split()[1])
    assert all(abs(value - found["ddp"]) < 1e-5 for value in found.values()), found
