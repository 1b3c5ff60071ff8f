"""`FileTokenizer`: a ``tokenizer.json`` and a chat template, without transformers.

It supports the calls of transformers' tokenizers that serving needs, with the same results. Folders
that transformers would read differently are left to transformers (`read_tokenizer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from gulliver.checkpoint.files import read_json

PLAIN = ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")
"""Values of ``tokenizer_class`` for which the file is used unchanged."""
SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Names of special tokens that templates can use."""


class FileTokenizer:
    """Tokenizes texts and conversations."""

    def __init__(self, backend: Any, template: str | None, special: Mapping[str, str]) -> None:
        """Wraps a tokenizer of the tokenizers library; `special` has keys like ``eos_token``."""
        backend.no_truncation()
        backend.no_padding()
        self._backend, self.chat_template, self._special = backend, template, dict(special)
        end = special.get("eos_token")
        self.eos_token_id = None if end is None else backend.token_to_id(end)

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Encodes a text, with the special tokens at its beginning and end."""
        return {"input_ids": self._backend.encode(text).ids}

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False, **_: Any
    ) -> dict[str, list[int]]:
        known = {"tools": None, "documents": None, **self._special}
        text = self._template.render(
            messages=messages, add_generation_prompt=add_generation_prompt, **known
        )
        return {"input_ids": self._backend.encode(text, add_special_tokens=False).ids}

    @cached_property
    def _template(self) -> Any:
        assert self.chat_template is not None
        return _environment().from_string(self.chat_template)


def _environment() -> Any:
    """Returns the jinja2 environment of transformers: sandboxed, as templates are not trusted."""
    import json
    from datetime import datetime

    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    class Namespace(jinja2.utils.Namespace):
        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a template may not set {name}")
            super().__setitem__(name, value)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *given, **named: dict(*given, **named),
        "namespace": Namespace,
    }
    return made


def is_plain(template: Any) -> bool:
    """Whether a template is a single one without `generation` tags, a transformers extension."""
    if not isinstance(template, str | None):
        return False
    return "generation %}" not in (template or "").replace("-%}", " %}")


def read_tokenizer(folder: Path) -> FileTokenizer | None:
    """Reads a folder's tokenizer; None if only transformers can read it."""
    file, more = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not file.is_file() or not more.is_file():
        return None
    config = read_json(more)
    if config.get("tokenizer_class") not in PLAIN or config.get("add_bos_token"):
        return None
    template = config.get("chat_template")
    if "extra_special_tokens" in config or "model_specific_special_tokens" in config:
        return None
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if not is_plain(template):
        return None
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(file))
    except Exception:  # tokenizers has no error class; transformers reports the problem
        return None
    special = {
        name: token["content"] if isinstance(token, dict) else token
        for name in SPECIAL
        if (token := config.get(name)) is not None
    }
    added = backend.get_added_tokens_decoder()
    named = {token.content for token in added.values() if token.special}
    more = {int(n): t["content"] for n, t in config.get("added_tokens_decoder", {}).items()}
    known = all(n in added and added[n].content == token for n, token in more.items())
    if not known or not named >= set(special.values()):
        return None
    return FileTokenizer(backend, template, special)
