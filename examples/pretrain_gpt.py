"""Pre-train a small GPT on bytes, with the optimizer's state sharded over the ranks (ZeRO-1).

    python examples/pretrain_gpt.py                            # one process
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py       # two ranks: the same losses

The text is the source of Python's own `argparse`. A plain loop needs four changes: `init_world`
for the device, a plugin, `boost`, and `booster.backward` in place of ``loss.backward()``.
"""

import argparse
import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.booster.booster import Booster
from gulliver.booster.plugins import LowLevelZeroPlugin
from gulliver.comm.world import init_world

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 96, 4, 3, 16
TEXT = torch.tensor(list(inspect.getsource(argparse).encode()))


class Windows(torch.utils.data.Dataset):
    """Each sample: `CONTEXT` bytes to read, and the bytes that follow each of them."""

    def __len__(self) -> int:
        return (len(TEXT) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = TEXT[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


class GPT(nn.Module):
    """Bytes in, scores of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bytes(ids) + self.places.weight[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(x, mask, is_causal=True)))


def main(steps: int = 80) -> list[float]:
    """Trains and lets the model write; returns this rank's losses."""
    world = init_world()
    torch.manual_seed(0)
    model = GPT().to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, max_norm=1.0))
    loader = booster.plugin.prepare_dataloader(Windows(), BATCH // world.size, shuffle=True)
    model, optimizer, *_ = booster.boost(model, optimizer)

    losses: list[float] = []
    while len(losses) < steps:
        for read, following in loader:
            loss = F.cross_entropy(model(read).flatten(0, 1), following.flatten())
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
            if world.is_main and len(losses) % 10 == 0:
                print(f"step {len(losses):3}  loss {losses[-1]:.3f}")
            if len(losses) == steps:
                break
    written = write(model, b"    def ", world.device)  # every rank calls the model, one prints
    if world.is_main:
        print(written)
    return losses


@torch.no_grad()
def write(model: nn.Module, start: bytes, device: torch.device, count: int = 56) -> str:
    """The likeliest continuation, byte by byte."""
    ids = torch.tensor([list(start)], device=device)
    for _ in range(count):
        ids = torch.cat([ids, model(ids[:, -CONTEXT:])[:, -1:].argmax(-1)], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    main()
