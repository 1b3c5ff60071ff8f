"""``gulliver data caption`` and ``show``: sentences of commands and models, a page of its own."""

from __future__ import annotations

import base64
import io
import sys
from fractions import Fraction
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("av")
pytest.importorskip("pyarrow")

from gulliver.cli.dispatch import main
from gulliver.video.preparation import Table
from gulliver.video.preparation.captions import caption
from gulliver.video.preparation.table import read_broken, write_broken
from tests.video.messy_clips import H264, footage, write_film

COUNTING = """
import sys
from pathlib import Path
path = Path(sys.argv[1])
with open(path.parent / "calls.txt", "a") as calls:
    calls.write(path.name + "\\n")
if path.stem == "b":
    print("no idea", file=sys.stderr)
    sys.exit(3)
if path.stem != "c":
    print("a street,\\n  seen from", path.stem, *sys.argv[2:])
"""


@pytest.fixture
def table(tmp_path: Path) -> Table:
    for name in "abcd":
        write_film(tmp_path / f"{name}.mp4", footage("bikes")[:6, :64, :96], Fraction(10), H264)
    rows = [{"path": f"{name}.mp4", "text": "known" if name == "d" else None} for name in "abcd"]
    return Table.of_rows(rows, tmp_path / "t.csv", ("path", "text")).write()


@pytest.fixture
def command(tmp_path: Path) -> str:
    (tmp_path / "say.py").write_text(COUNTING)
    return f"{sys.executable} '{tmp_path / 'say.py'}'"


def calls(table: Table) -> list[str]:
    return sorted((table.path.parent / "calls.txt").read_text().split())


def test_command_captions_uncaptioned_clips(table: Table, command: str) -> None:
    found = caption(table, command=command + " {path} 'and so on'")
    assert calls(table) == ["a.mp4", "b.mp4", "c.mp4"]
    assert Table.read(table.path).column("text") == [
        "a street, seen from a and so on",
        None,
        None,
        "known",
    ]
    reasons = dict(found.broken)
    assert "exited with code 3: no idea" in reasons["b.mp4"]
    assert "printed nothing" in reasons["c.mp4"]
    assert {(name, step) for name, step, _ in read_broken(table.path)} == {
        ("b.mp4", "caption"),
        ("c.mp4", "caption"),
    }
    (table.path.parent / "calls.txt").unlink()
    caption(Table.read(table.path), command=command, again=True)
    assert calls(table) == [f"{name}.mp4" for name in "abcd"]
    assert Table.read(table.path).column("text")[3] == "a street, seen from d"


@pytest.fixture
def blip(tmp_path: Path) -> Path:
    """A tiny BLIP with random weights and the words of a few letters."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "blip"
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "[DEC]",
        "a",
        "cat",
        "dog",
        "street",
        "red",
    ]
    words += [f"word{n}" for n in range(21)]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
    pictures = transformers.BlipImageProcessor(size={"height": 32, "width": 32})
    transformers.BlipProcessor(pictures, tokenizer).save_pretrained(folder)
    text = {"vocab_size": len(words), "hidden_size": 16, "encoder_hidden_size": 16}
    text |= {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"bos_token_id": 5, "eos_token_id": 3, "sep_token_id": 3, "pad_token_id": 0}
    seen = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    seen |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 16}
    torch.manual_seed(0)
    config = transformers.BlipConfig(text_config=text, vision_config=seen, projection_dim=16)
    config.architectures = ["BlipForConditionalGeneration"]
    transformers.BlipForConditionalGeneration(config).save_pretrained(folder)
    return folder


def test_model_captions_the_middle_frame(table: Table, blip: Path) -> None:
    transformers = pytest.importorskip("transformers")
    Image = pytest.importorskip("PIL.Image")
    av = pytest.importorskip("av")
    caption(table, model=blip, tokens=6)
    texts = Table.read(table.path).column("text")
    assert texts[3] == "known"
    with av.open(str(table.path.parent / "a.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    model = transformers.BlipForConditionalGeneration.from_pretrained(blip).eval()
    processor = transformers.BlipProcessor.from_pretrained(blip)
    # Of six frames the fourth is shown at half the time.
    inputs = processor(Image.fromarray(frames[3]), return_tensors="pt")
    with torch.inference_mode():
        made = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0]
    assert texts[0] == " ".join(processor.decode(made, skip_special_tokens=True).split())


# --- show ----------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """What is in a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_has_every_clip_and_a_histogram_of_every_number(
    table: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    Image = pytest.importorskip("PIL.Image")
    evil = '<script>alert(1)</script> & "more"'
    table.with_columns({"text": [evil, "b", "c", "d"], "fps": [10.0, 10.0, None, 30.0]}).write()
    write_broken(table.path, "scan", [("lost.mp4", "is empty")])
    out = table.path.with_name("sheet.html")
    with pytest.raises(SystemExit) as ended:
        main(["data", "show", str(table.path), "--out", str(out)])
    assert ended.value.code == 0
    assert "sheet.html: 4 of 4 clips" in capsys.readouterr().out
    page = _Page(out.read_text())
    tags = [tag for tag, _ in page.tags]
    assert "script" not in tags
    assert "link" not in tags
    assert tags.count("svg") == 1
    bars = [int(text) for text in page.texts if text.isdigit()]
    assert sorted(bars) == [1, 2], "counts of fps 30 and 10"
    shown = [attributes["src"] or "" for tag, attributes in page.tags if tag == "img"]
    assert len(shown) == 4
    for source in shown:
        kind, _, content = source.partition(",")
        assert kind == "data:image/jpeg;base64"
        picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
        assert picture.shape == (64, 3 * 96, 3), "three frames side by side"
    assert evil in page.texts
    assert "lost.mp4 " in page.texts
    assert "scan: is empty" in page.texts
