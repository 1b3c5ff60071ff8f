"""Fine-tune a Hugging Face model in bfloat16 (ZeRO-2), and write it back as a Hugging Face folder.

    python examples/finetune_huggingface.py
    torchrun --nproc-per-node 2 examples/finetune_huggingface.py

So that nothing is downloaded, a tiny Llama is written to a folder first; with a folder or a name of
your own, begin at `from_pretrained`. The task: to go on counting in steps of a given size.
"""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gulliver.booster.booster import Booster
from gulliver.booster.plugins import LowLevelZeroPlugin
from gulliver.comm import barrier
from gulliver.comm.world import World, init_world

VOCABULARY, LENGTH, BATCH = 64, 16, 32


def write_pretrained(folder: Path) -> None:
    """Stands for the model that you have already."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def counting(step: int, world: World) -> torch.Tensor:
    """This rank's share of a step's samples: rows ``start, start + by, start + 2 by, ...``."""
    draw = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=draw)
    by = torch.randint(1, 4, (BATCH, 1), generator=draw)
    rows = (start + by * torch.arange(LENGTH)) % VOCABULARY
    return rows[world.rank :: world.size].to(world.device)


def main(steps: int = 150, folder: Path | str = "out/finetune") -> list[float]:
    """Trains, saves, loads what was saved with transformers alone; returns this rank's losses."""
    world, folder = init_world(), Path(folder)
    if world.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        write_pretrained(folder / "pretrained")
    barrier()  # the other ranks wait for the folder

    model = AutoModelForCausalLM.from_pretrained(folder / "pretrained").to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="bf16", max_norm=1.0))
    model, optimizer, *_ = booster.boost(model, optimizer)

    losses = []
    for step in range(steps):
        ids = counting(step, world)
        loss = model(input_ids=ids, labels=ids).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if world.is_main and step % 25 == 0:
            print(f"step {step:3}  loss {losses[-1]:.3f}")

    booster.save_huggingface(model, folder / "tuned")  # every rank calls it, rank 0 writes
    if world.is_main:
        tuned = AutoModelForCausalLM.from_pretrained(folder / "tuned", dtype=torch.float32)
        prompt = torch.tensor([[5, 8, 11, 14, 17, 20]])
        told = tuned.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        print("from_pretrained, after 5 8 11 14 17 20:", *told[0, 6:].tolist())
    return losses


if __name__ == "__main__":
    main()
