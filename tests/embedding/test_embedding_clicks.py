"""Click logs, and the recommender that is trained on one."""

from __future__ import annotations

import gzip
import runpy
from pathlib import Path
from typing import Any

import torch

from criteo import Clicks, CriteoFile

ROOT = Path(__file__).resolve().parents[2]
ROWS = [50, 7, *[20] * 24]


def test_a_line_is_read_by_the_format_s_rules(tmp_path: Path) -> None:
    numbers = ["3", "", "-2", *["0"] * 10]
    line = "\t".join(["1", *numbers, "0000003a", "", *["ff"] * 24])
    path = tmp_path / "day.gz"
    path.write_bytes(gzip.compress((line + "\n" + line + "\n").encode()))
    (clicks,) = CriteoFile(path, ROWS, 2)
    assert clicks.labels.tolist() == [1.0, 1.0]
    assert torch.allclose(clicks.numbers[0, :3], torch.tensor([4.0, 1.0, 1.0]).log())
    assert clicks.ids[0, :3].tolist() == [0x3A % 49 + 1, 0, 0xFF % 19 + 1]


def test_a_recommender_learns_the_same_with_a_small_cache_and_with_torch_s_table(
    tmp_path: Path,
) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "dlrm.py"))
    found = [example["main"](cache, tmp_path / "log.tsv", steps=40) for cache in (0.01, 1.0)]
    assert found[0] == found[1]
    assert found[0][-1] > 0.65, "the area under the curve"
    assert found[0] == _with_torch(example, tmp_path / "log.tsv")


def _with_torch(example: dict[str, Any], log: Path) -> list[float]:
    """Trains the same model with torch's EmbeddingBag."""
    rows, size = example["ROWS"], example["BATCH"]
    model, (_, dense) = example["make"](0.01)
    values = model.tables.state_dict()["weight"].clone()
    table = torch.nn.EmbeddingBag(*values.shape, mode="sum", sparse=True, _weight=values)
    firsts = torch.tensor([0, *rows]).cumsum(0)[:-1]
    adagrad = torch.optim.Adagrad(table.parameters(), lr=0.05)
    model.tables = _Tables(table, firsts)
    losses, scores, labels = list[float](), [], []
    batches: list[Clicks] = list(CriteoFile(log, rows, size))
    for number, batch in enumerate(batches[: 40 + example["HELD_OUT"]]):
        logits = model(batch.numbers, batch.ids)
        if number >= 40:
            scores.append(logits.detach())
            labels.append(batch.labels)
            continue
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        for optimizer in (adagrad, dense):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (adagrad, dense):
            optimizer.step()
        losses.append(loss.item())
    return [*losses, example["auc"](torch.cat(scores), torch.cat(labels))]


class _Tables(torch.nn.Module):
    def __init__(self, table: torch.nn.EmbeddingBag, firsts: torch.Tensor) -> None:
        super().__init__()
        self.table, self.firsts = table, firsts

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table((ids + self.firsts).view(-1, 1)).view(*ids.shape, -1)
