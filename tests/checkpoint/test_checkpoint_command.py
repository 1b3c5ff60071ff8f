"""``gulliver checkpoint``: what it prints, and with which code it ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gulliver.checkpoint import AsyncCheckpointer
from gulliver.checkpoint.files import read_json, write_json
from gulliver.cli.dispatch import main
from gulliver.comm import World
from gulliver.comm.world import adopt_world

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "200")
    adopt_world(World(0, 1, 0, torch.device("cpu")))
    yield
    adopt_world(None)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs it; exit code, output and errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(["checkpoint", *map(str, arguments)])
        captured = capsys.readouterr()
        code = caught.value.code
        assert isinstance(code, int)
        return code, captured.out, captured.err

    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (10, 20):
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()
        state = {"model": model, "optimizer": optimizer, "epoch": step}
        with AsyncCheckpointer(tmp_path / "run", about={"plan": {"stage": 2}}) as checkpointer:
            checkpointer.save(step, state)
    return tmp_path / "run"


def row(text: str, first: str) -> str:
    """The line of a table that begins with a cell."""
    (found,) = [line for line in text.splitlines() if line.replace("│", " ").split()[:1] == [first]]
    return found


def test_ls_lists_the_steps_of_a_run(run: Path, command: Command) -> None:
    (run / "step-00000030.partial").mkdir()
    code, out, _ = command("ls", run)
    assert code == 0
    assert "complete, latest" in row(out, "20")
    assert "model, optimizer" in row(out, "20")
    assert "KiB" in row(out, "20")
    assert "complete" in row(out, "10")
    assert "latest" not in row(out, "10")
    assert "step-00000030.partial: being written, or left over" in out

    (run / "step-00000020" / "model.safetensors").unlink()
    manifest = read_json(run / "step-00000010" / "manifest.json")
    del manifest["crc32"]
    write_json(run / "step-00000010" / "manifest.json", {**manifest, "format": 99})
    _, out, _ = command("ls", run)
    assert "INCOMPLETE" in row(out, "20")
    assert "newer version" in row(out, "10")


def test_ls_shows_a_step_and_its_tensors(run: Path, command: Command) -> None:
    code, out, _ = command("ls", run, "--step", 10)
    assert code == 0
    assert "step 10, saved by 1 rank" in out
    assert f"torch: {torch.__version__}" in out
    assert "plan: {'stage': 2}" in out
    assert "without tensors: epoch" in out
    assert all(text in row(out, "model") for text in ("4", "float32", "model.safetensors"))
    assert "0.weight" not in out
    _, out, _ = command("ls", run / "step-00000010", "--tensors")
    assert "model: 0.weight  [40, 30]  float32  4.7 KiB" in out
    _, out, _ = command("ls", run / "step-00000010" / "model.safetensors", "--tensors")
    assert "4 tensors, 5.2 KiB, float32, in model.safetensors" in out
    assert "1.bias  [2]  float32  8 B" in out


def test_verify_accepts_good_run_and_names_damage(run: Path, command: Command) -> None:
    code, out, _ = command("verify", run, "--all")
    assert code == 0
    assert out.count("all bytes match their checksums") == 2
    assert "/s" in out
    path = run / "step-00000010" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert command("verify", run)[0] == 0
    for arguments in ((run, "--step", 10), (path.parent,), (run, "--all")):
        code, out, _ = command("verify", *arguments)
        assert code == 1
        assert f"{path}: bytes 0 to {len(content)}: they are corrupted" in out
        assert "model: 1.bias" in out
    (path.parent / "manifest.json").write_text("{")
    code, out, _ = command("verify", run, "--all")
    assert code == 1
    assert "manifest.json is truncated" in out
    assert out.count("all bytes match their checksums") == 1


def test_diff_reports_differences_by_location(run: Path, command: Command) -> None:
    one, two = run / "step-00000010", run / "step-00000020"
    code, out, _ = command("diff", one, one)
    assert (code, out) == (0, "4 tensors compared, 0 differ: no difference\n")
    code, out, _ = command("diff", one, two)
    assert code == 1
    assert "1,200" in row(out, "0.weight")
    assert out.endswith("4 tensors compared, 4 differ: DIFFERENT\n")
    assert command("diff", one, two, "--tolerance", 0.1)[0] == 0
    assert command("diff", run, run, "--step-a", 10, "--relative", 3)[0] == 0
    code, out, _ = command("diff", one, run, "--entry", "all", "--show", 1)
    assert code == 1
    assert "different non-tensor values in (1):\n  epoch" in out
    assert "and 15 more (--show 0 lists all)" in out
    save_file({"0.weight": torch.ones(40), "x": torch.ones(1)}, run / "x.safetensors")
    code, out, _ = command("diff", one, run / "x.safetensors")
    assert code == 1
    assert "only in the first (3):" in out
    assert "only in the second (1):\n  x" in out
    assert "0.weight: [40, 30] and [40]" in out


def test_convert_makes_a_folder_and_a_file(run: Path, tmp_path: Path, command: Command) -> None:
    write_json(tmp_path / "c.json", {"model_type": "tiny"})
    arguments = ("--max-shard-gb", 1e-6, "--model-config", tmp_path / "c.json")
    code, out, _ = command("convert", run, tmp_path / "hf", *arguments)
    assert (code, out) == (0, f"{tmp_path / 'hf'}\n")
    assert len(list((tmp_path / "hf").glob("model-0000?-of-00002.safetensors"))) == 2
    assert read_json(tmp_path / "hf" / "config.json") == {"model_type": "tiny"}
    assert command("diff", run, tmp_path / "hf")[0] == 0
    target = tmp_path / "x.safetensors"
    assert command("convert", run, target, "--dtype", "bfloat16", "--step", 10)[0] == 0
    assert {tensor.dtype for tensor in load_file(target).values()} == {torch.bfloat16}
    step = run / "step-00000010"
    assert command("diff", step, target, "--relative", 0.01)[0] == 1
    assert command("diff", step, target, "--relative", 0.01, "--any-dtype")[0] == 0
    code, out, _ = command("verify", target)
    assert code == 0
    assert "no checksums" in out


def test_convert_reshards_a_folder(run: Path, tmp_path: Path, command: Command) -> None:
    command("convert", run, tmp_path / "hf")
    arguments = ("--max-shard-gb", 1e-6, "--prefix", "0.")
    assert command("convert", tmp_path / "hf", tmp_path / "cut", *arguments)[0] == 0
    _, out, _ = command("ls", tmp_path / "cut")
    assert "2 tensors" in out
    assert "model-00002-of-00002.safetensors" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "nowhere"), "nowhere does not exist"),
        (("ls", "run", "--step", 5), "has no complete step 5: it has [10, 20]"),
        (("verify", "run", "--step", 10, "--all"), "--step and --all cannot be combined"),
        (("verify", "run/step-00000010", "--step", 20), "step-00000010 is step 10, not step 20"),
        (("diff", "run/step-00000010", "run", "--step-a", 20), "is step 10, not step 20"),
        (("diff", "run", "run", "--entry", "modle"), "entry 'modle'"),
        (("convert", "run", "run"), "run exists already: choose another name"),
        (("convert", "run", "new", "--prefix", "9."), "'9.'"),
        (("convert", "run/latest", "new"), "run/latest is truncated"),
    ],
)
def test_a_mistake_is_one_line(
    run: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[object, ...],
    message: str,
) -> None:
    monkeypatch.chdir(run.parent)
    code, out, err = command(*arguments)
    usage = arguments[0] == "diff" or "--all" in arguments
    assert (code, out) == (2 if usage else 1, "")
    assert message in err
    assert err.startswith("gulliver: ")
    assert err.count("\n") == 1
    assert [path.name for path in run.parent.iterdir()] == ["run"]


def test_names_are_printed_as_they_are(run: Path, tmp_path: Path, command: Command) -> None:
    """Square brackets are markup to rich, colons pictures, braces fields of a bar."""
    for name in ("run[/v2]", "x:smile:{x}"):
        odd = run.parent / name
        shutil.copytree(run, odd)
        tensors = {f"{name}.w": torch.ones(2)}
        with AsyncCheckpointer(odd, about={"plan": name}) as checkpointer:
            checkpointer.save(30, {"model": tensors, name.replace("/", ""): 3})
        (odd / f"step-00000040{name.replace('/', '')}.partial").mkdir()
        code, out, _ = command("ls", odd)
        assert code == 0
        assert str(odd) in out
        assert f"step-00000040{name.replace('/', '')}.partial: being written" in out
        code, out, _ = command("ls", odd, "--step", 30, "--tensors")
        assert code == 0
        for wanted in (f"{odd}/step-00000030: step 30", f"plan: {name}", f"model: {name}.w  [2]"):
            assert wanted in out
        assert f"without tensors: {name.replace('/', '')}" in out
        code, out, _ = command("verify", odd)
        assert code == 0
        assert f"{odd}/step-00000030: all bytes match" in out
        code, out, _ = command("diff", odd, run, "--entry", "all")
        assert code == 1
        assert f"model: {name}.w" in out
    _, out, err = command("ls", tmp_path / "not[/there]")
    assert f"{tmp_path}/not[/there] does not exist" in err
