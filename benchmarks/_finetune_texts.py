"""Real text, and a task: the installed Python sources, and the arguments of their functions.

A model of random weights first reads sources. Then it learns what no source says: after the head of
a function, the names of its arguments. Of functions that it has not seen it has to name them all,
and then to end; that many it gets exactly right is the measure of the task. A token is a word or
some punctuation, so that a name is one, and minutes of two cores are enough.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SOURCES, TASK = "sources", "arguments.jsonl"
LONGEST = 64
"""Bytes of a head, at most."""
SPECIAL = ("<unknown>", "<padding>", "<end>")
SEEN_BY_ALL = {"self", "cls"}


def texts_of(folder: Path, megabytes: float, rows: int, words: int) -> None:
    """Writes some of the sources, heads of functions with their arguments, and a tokenizer.

    Args:
        folder: folder that gets them; the tokenizer takes the place of that of its model.
        megabytes: size of the sources.
        rows: number of functions.
        words: number of tokens.
    """
    files = sources()
    random.Random(0).shuffle(files)
    (folder / SOURCES).mkdir()
    left = int(megabytes * 1e6)
    for number, path in enumerate(files):
        text = path.read_text(encoding="utf-8")[: max(0, left)]
        if not text:
            break
        (folder / SOURCES / f"{number:04}.txt").write_text(text, encoding="utf-8")
        left -= len(text)
    known = write_tokenizer(folder / "model", files, words)
    found = sorted({row for path in files for row in heads(path.read_text(encoding="utf-8"))})
    found = [(prompt, said) for prompt, said in found if known.issuperset(said.split())]
    random.Random(1).shuffle(found)
    lines = (json.dumps({"prompt": prompt, "completion": said}) for prompt, said in found[:rows])
    (folder / TASK).write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, files: Sequence[Path], words: int) -> set[str]:
    """Writes a tokenizer of the most frequent words; returns them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel(unk_token=SPECIAL[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = (path.read_text(encoding="utf-8") for path in files)
    trainer = trainers.WordLevelTrainer(
        vocab_size=words, special_tokens=list(SPECIAL), show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    unknown, padding, end = SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=unknown, pad_token=padding, eos_token=end
    ).save_pretrained(folder)
    return set(made.get_vocab())


def sources() -> list[Path]:
    """Files of Python's own library, its tests and what is installed beside it left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = list[Path]()
    for path in sorted(root.rglob("*.py")):
        parts = set(path.relative_to(root).parts)
        if parts & {"site-packages", "test", "tests", "lib2to3"}:
            continue
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found.append(path)
    return found


def heads(text: str) -> Iterator[tuple[str, str]]:
    """Heads of functions that stand in one line, and the names of their arguments."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        head = lines[node.lineno - 1].strip()
        taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        names = [one.arg for one in taken if one.arg not in SEEN_BY_ALL]
        if names and head.endswith("):") and head.isascii() and len(head) <= LONGEST:
            yield f"{head}\n# takes", "".join(f" {name}" for name in names)


def exact(folder: Path, examples: Sequence[Any]) -> float:
    """Share of examples whose whole answer a model gives, the likeliest token at each place.

    Args:
        folder: Hugging Face folder of the model.
        examples: `gulliver.finetune.Example` of prompts and completions.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model, right = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), 0
    for one in examples:
        ids = torch.from_numpy(one.ids).long()
        learnt = torch.from_numpy(one.answer)[1:].bool()
        with torch.no_grad():
            likeliest = model(ids[None]).logits[0, :-1].argmax(-1)
        # Where each token is the likeliest behind the right ones, the likeliest text is the answer.
        right += bool((likeliest == ids[1:])[learnt].all())
    return right / len(examples)
