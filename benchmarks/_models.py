"""The models that benchmarks of training run, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 2048


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and around a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A causal language model with learned positions."""

    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Task:
    """Something to train: a model, its loss on the batch of a seed, and its repeated blocks."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    blocks: Callable[[nn.Module], list[nn.Module]]


def gpt(width: int = 512, depth: int = 8, batch: int = 4, length: int = 128) -> Task:
    """A GPT; with the defaults 27 M parameters."""

    def loss(model: nn.Module, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(VOCABULARY, (batch, length), generator=generator).sort(dim=1)[0]
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return Task(
        f"GPT {width}x{depth}, {batch}x{length} tokens",
        lambda: GPT(width, depth, length),
        loss,
        lambda model: list(model.blocks),  # type: ignore[arg-type]
    )


def llama(
    vocabulary: int, width: int, inner: int, blocks: int, heads: int, kv_heads: int = 0,
    length: int = 2048, **more: Any,
) -> Any:  # fmt: skip
    """A Llama of transformers with random weights; `more` goes to its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner,
        num_hidden_layers=blocks, num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads, max_position_embeddings=length, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def stdit(batch: int = 16, size: str = "tiny") -> Task:
    """The STDiT of the demonstration, on latents of its clips of 13 frames of 32 x 32."""
    from gulliver.models import stdit3

    def model() -> nn.Module:
        # No captions dropped by chance: all contestants must see the same.
        sizes = {"in_channels": 8, "caption_channels": 64, "model_max_length": 8}
        return stdit3(size, **sizes, input_sq_size=32, class_dropout_prob=0.0)

    def loss(net: nn.Module, seed: int) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, 8, 4, 8, 8, generator=g)
        caption = torch.randn(batch, 1, 8, 64, generator=g)
        mask = torch.ones(batch, 8, dtype=torch.long)
        side = torch.full((batch,), 32.0)
        t = 1000 * torch.rand(batch, generator=g)
        out = net(x, t, caption, mask, fps=side, height=side, width=side)
        return (out[:, :8] - x).square().mean()

    return Task(
        f"STDiT3 {size}, {batch} clips",
        model,
        loss,
        lambda net: [*net.spatial_blocks, *net.temporal_blocks],  # type: ignore[list-item]
    )
