"""``gulliver plan MODEL``: what is printed is what a search of one's own finds."""

from __future__ import annotations

import gc
import json
import re
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from benchmarks._live_bytes import LiveBytes
from benchmarks._planning_page import written

from gulliver.cli.dispatch import main
from gulliver.cli.plan_models import PUBLIC, adapt, built
from gulliver.errors import GulliverError
from gulliver.hardware.cluster import changed_cluster
from gulliver.hardware.probe import named_cluster
from gulliver.options import byte_size, size_text
from gulliver.planner.search.grids import least_bytes, search_grids
from gulliver.planner.tiers import OffloadTiers

VALUES = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
ASKED = ("--cluster", "h100x4", "--batch", "4", "--seq", "128")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "config.json"
    path.write_text(json.dumps(VALUES))
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *map(str, arguments)])
    shown = capsys.readouterr()
    assert ended.value.code in ({code, 2} if code else {0}), shown.err
    return shown.err if code else shown.out


def test_answer_is_that_of_a_search(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Best grids, what is enough, and the changed cluster, against independent searches."""
    told = json.loads(
        printed(capsys, file, *ASKED, "--memory", "2MiB", "--what-if", "inner=x0.0001", "--json")
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**VALUES, use_cache=False))
    ids = torch.zeros(1, 128, dtype=torch.long, device="meta")
    optimizer, batch = torch.optim.AdamW(model.parameters()), {"input_ids": ids, "labels": ids}
    cluster = named_cluster("h100x4")

    def search(memory: int | str, cluster: Any = cluster) -> Any:
        return search_grids(model, optimizer, batch, cluster, 4, memory)

    found = search("2MiB")
    assert [b["text"] for b in told["best"]] == [str(s.grid) for s in found.best]
    steps = [b["seconds"]["step"] for b in told["best"]]
    assert steps == pytest.approx([s.seconds.step for s in found.best], rel=1e-9)
    assert all(b["bytes"]["all"] <= 2**21 for b in told["best"])
    least, _ = least_bytes(found.facts, cluster, 4)
    assert told["enough"]["bytes"] == least < 2**21
    assert not search(least - 1).best
    changed = search("2MiB", changed_cluster(cluster, ["inner=x0.0001"]))
    assert told["what_if"][0]["text"] == str(changed.best[0].grid)
    assert told["what_if"][0]["seconds"]["step"] > steps[0]


def test_text_report_is_complete(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = "model.layers.1.mlp.down_proj"
    out = printed(
        capsys, "search", file, *ASKED, "--why", module, "--memory", "2MiB",
        "--weak-scaling",
    )  # fmt: skip
    for part in (
        "LlamaForCausalLM",
        "data-sheet rates: a floor",
        "best: ",
        "fullest rank",
        "not c",
    ):
        assert part in out, part
    for part in ("least memory", "2 ranks: ", "4 ranks: ", f"why {module}: Lin"):
        assert part in out, part
    assert "row" in out, "the down projection is cut by its inputs"
    bars = [line for line in out.splitlines() if line.count("|") == 2 and "%" in line]
    shares = [float(line.rpartition(",")[2].split("%")[0]) for line in bars]
    assert len(bars) == 5
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_other_models(tmp_path: Path, capsys: pytest.CaptureFixture[str], file: Path) -> None:
    """A function's model, training, adapters and inference."""
    options = ("--cluster", "h100", "--batch", "2", "--json")
    out = json.loads(printed(capsys, f"{__name__}:small", *options))
    assert out["parameters"] == 8 * 8 + 8
    assert out["enough"]["ranks"] == 1
    held = {}
    for use in ((), ("--lora", "16"), ("--inference",)):
        out = json.loads(printed(capsys, file, "--seq", "32", *options, *use))
        held[use] = out["best"][0]["bytes"]
    training, lora, inference = (bytes_["all"] for bytes_ in held.values())
    assert inference < lora < training
    assert held["--inference",]["gradients"] == 0 == out["trained"]


@pytest.mark.full
@pytest.mark.deadline(900)
def test_the_page_has_the_answers_of_the_commands() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    assert written(page) == page, "run python -m benchmarks._planning_page docs/planning.md"


def test_a_page_is_written_with_what_a_command_prints(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = " ".join(map(str, ("plan", file, *ASKED)))
    page = f"before\n```text\n$ gulliver {asked}\nstale answer\n```\nafter\n"
    told = written(page)
    assert told.startswith(f"before\n```text\n$ gulliver {asked}\nconfig.json: LlamaForCausalLM")
    assert "stale answer" not in told
    assert len(re.findall(r"^  \d  ", told, re.MULTILINE)) == 3
    assert written(told) == told, "nothing of it changes from run to run"
    best = next(line for line in told.splitlines() if line.startswith("best: "))
    assert best in printed(capsys, file, *ASKED)


def test_inference_keeps_keys_and_values(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many bytes as a real model keeps, and its peak; LoRA's peak is that of a run, too."""
    torch.manual_seed(0)
    ids = torch.zeros(8, 128, dtype=torch.long)
    options = ("--cluster", "cpux1", "--batch", "8", "--seq", "128", "--precision", "fp32")
    told = json.loads(printed(capsys, file, *options, "--inference", "--json"))
    with LiveBytes() as counter:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**VALUES)).eval()
        gc.collect()
        counter.peak = counter.live
        with torch.no_grad():
            found = model(input_ids=ids.clone(), use_cache=True)
    kept = sum(t.nbytes for one in found.past_key_values.layers for t in (one.keys, one.values))
    assert 8 * told["cached_of_a_sample"] == kept
    assert whole_of(told)["bytes"]["all"] == pytest.approx(counter.peak, rel=0.05)


def test_lora_memory_matches_report(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--cluster", "cpux1", "--batch", "8", "--seq", "128", "--precision", "fp32")
    told = json.loads(printed(capsys, file, *options, "--lora", "4", "--json"))
    ids = torch.zeros(8, 128, dtype=torch.long)
    with LiveBytes() as counter:
        config = transformers.LlamaConfig(**VALUES, use_cache=False)
        model = transformers.LlamaForCausalLM(config).train()
        adapt(model, 4)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        for _ in range(2):
            gc.collect()
            counter.peak = counter.live
            # A loop holds the outputs, logits among them, while their loss goes backward.
            outputs = model(input_ids=ids, labels=ids)
            outputs.loss.backward()
            del outputs
            optimizer.step()
            optimizer.zero_grad()
    assert told["trained"] == sum(p.numel() for p in trained)
    assert whole_of(told)["bytes"]["all"] == pytest.approx(counter.peak, rel=0.05)


def whole_of(told: dict[str, Any]) -> dict[str, Any]:
    """The grid of one rank that runs all samples at once."""
    (found,) = told["best"]
    assert found["grid"]["micro_batches"] == 1
    return found


def small() -> tuple[torch.nn.Module, torch.Tensor]:
    return torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.empty(1, 8, dtype=torch.bfloat16)


class Chooses(torch.nn.Module):
    """Keeps the rows that are positive: how many depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(rows[rows[:, 0] > 0][: int(rows.sum().item())])


def chooses() -> tuple[torch.nn.Module, torch.Tensor]:
    return Chooses(), torch.empty(2, 8)


def frozen() -> tuple[torch.nn.Module, torch.Tensor]:
    return torch.nn.Linear(8, 8).requires_grad_(False), torch.empty(2, 8)


def test_refusals(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors come in one line that says what would be right."""

    def says(*arguments: Any) -> str:
        line = printed(capsys, *arguments, code=1)
        assert line.count("\n") == 1
        return line

    assert "llama-3-8b" in says("llama-3-8c", *ASKED)
    assert "link" in says(file, *ASKED, "--what-if", "lnk=400Gb")
    assert "it depends on its data" in says(f"{__name__}:chooses", "--cluster", "h100")
    assert "--inference" in says(f"{__name__}:frozen", "--cluster", "h100")
    for wrong in ([1], {**VALUES, "hidden_size": "big"}):
        odd = tmp_path / "odd.json"
        odd.write_text(json.dumps(wrong))
        assert "odd.json" in says(odd, *ASKED)
    assert "omit one" in says(file, *ASKED, "--lora", "2", "--inference")
    nodes = yaml.safe_load(named_cluster("h100x16").to_yaml())
    for change, said in (
        (lambda c: c["axes"][0]["link"].update(bandwidth=400), "axes[0].link.bandwidth=400"),
        (lambda c: c["device"]["matmul"].update(bfloat16=989), "989 TFLOP/s are"),
    ):
        changed = deepcopy(nodes)
        change(changed)
        (tmp_path / "slip.yaml").write_text(yaml.safe_dump(changed))
        assert said in says(file, "--cluster", tmp_path / "slip.yaml", "--batch", 8, "--seq", 64)
    assert "config.json" in says(tmp_path, *ASKED)
    assert "nothing fits" in printed(capsys, file, *ASKED, "--memory", "64KiB", code=1)
    out = printed(capsys, file, "--cluster", "h100x3", "--batch", "3", "--seq", "128")
    assert "refused: tp 3" in out
    assert "divide" in out


def test_changed_clusters() -> None:
    """Each change alters its figure alone."""
    cluster = named_cluster("h100x16")
    fast = changed_cluster(cluster, ["link=400Gb", "inner=900GB", "memory=141GiB", "flops=x1.5"])
    assert fast.axes[0].link.bandwidth == 50e9
    assert fast.axes[1].link.bandwidth == 900e9
    assert fast.device.memory_bytes == byte_size("", "141GiB")
    assert fast.device.matmul["bfloat16"] == 1.5 * cluster.device.matmul["bfloat16"]
    assert fast.device.memory_rate == cluster.device.memory_rate
    assert changed_cluster(cluster, ["flops=990T"]).device.matmul["float16"] == 990e12
    for wrong in ("flops=2Gb", "link=x0", "inner=1.2.3Gb", "memory=much", "link"):
        with pytest.raises(GulliverError):
            changed_cluster(cluster, [wrong])
    with pytest.raises(GulliverError, match="no links"):
        changed_cluster(named_cluster("h100"), ["link=400Gb"])


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("bloom-176b", 176_247_271_424),
    ],
)
def test_public_configurations(name: str, count: int) -> None:
    """They have as many parameters as the published weights."""
    model = built(PUBLIC[name])
    assert model is not None
    assert sum(p.numel() for p in model.parameters()) == count


def test_public_unet() -> None:
    """That of Stable Diffusion XL has the published number of parameters, too."""
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        model = diffusers.UNet2DConditionModel.from_config(PUBLIC["sdxl-unet"])
    assert sum(p.numel() for p in model.parameters()) == 2_567_463_684


def test_offload_report_matches_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {**VALUES, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    asked = (file, "--cluster", "h100x1", "--batch", "2", "--seq", "128", "--host", "64MiB")
    few = printed(capsys, *asked, "--memory", "100KiB", code=1)
    least = re.search(r"off-load to the host needs at least (\S+)", few)
    assert least is not None, few
    limit = byte_size("least", least[1]) * 21 // 20
    told = json.loads(printed(capsys, *asked, "--memory", str(limit), "--json"))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values, use_cache=False))
    ids = torch.zeros(1, 128, dtype=torch.long, device="meta")
    optimizer, batch = torch.optim.AdamW(model.parameters()), {"input_ids": ids, "labels": ids}
    cluster, behind = named_cluster("h100x1"), OffloadTiers(host=64 << 20)
    found = search_grids(model, optimizer, batch, cluster, 2, limit, behind=behind)
    moved = found.best[0].moved
    assert moved is not None
    assert told["best"][0]["moved"] == asdict(moved)
    assert told["enough"]["offloaded"]["bytes"] <= limit
    text = printed(capsys, *asked, "--memory", str(limit))
    assert "behind it" in text
    assert f"a step reads {size_text(moved.read)} and writes {size_text(moved.written)}" in text
    assert "least memory with offloading" in text
    refused = printed(capsys, *asked, "--inference", code=1)
    assert "--disk" in refused
