"""DreamBooth on diffusers pipelines: the base model, and results in diffusers' formats.

``pytorch_lora_weights.safetensors`` for ``pipe.load_lora_weights``, ``learned_embeds.safetensors``
for ``pipe.load_textual_inversion`` (``learned_embeds_2.safetensors`` for the second text encoder),
or a complete folder for ``from_pretrained``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gulliver.checkpoint.files import read_json, read_metadata, read_tensors, write_tensors
from gulliver.checkpoint.reader import fitted
from gulliver.dreambooth.base import Picture, TokenHandle, TrainedParts
from gulliver.dreambooth.noise import KINDS, T5_LENGTH, Conditions, Noise
from gulliver.dreambooth.pictures import cropped
from gulliver.dreambooth.words import add_token
from gulliver.errors import GulliverError, missing_extra, nearest
from gulliver.finetune.adapters import adapter_name
from gulliver.finetune.base import fingerprint_of, map_weights
from gulliver.io.files import named_errors, write_text

LORA, EMBEDDINGS = "pytorch_lora_weights.safetensors", "learned_embeds{}.safetensors"
METADATA = "lora_adapter_metadata"
"""Metadata key of PEFT's configurations in diffusers' files."""
WEIGHTS = "diffusion_pytorch_model.safetensors"
ROWS = ".rows"


def lora_name(network: str, name: str) -> str:
    side, _, rest = adapter_name(name).partition(".")
    return f"{network}.{rest}" if side == "trained" else rest


def read_lora(
    base: DiffusersBase, path: Path
) -> tuple[dict[str, Tensor], dict[str, Mapping[str, object]]]:
    file = path / LORA if path.is_dir() else path
    if not file.is_file():
        raise GulliverError(f"--adapter {path} is not a diffusers adapter: it has no {LORA}")
    network, found = base.kind.network, dict[str, Tensor]()
    for name, tensor in read_tensors(file).items():
        part, _, rest = name.partition(".")
        found[f"trained.{rest}" if part == network else f"text.{name}"] = tensor
    about = json.loads(read_metadata(file).get(METADATA, "{}"))
    sides = {"trained": f"{network}.", "text": f"{base.kind.encoders[0]}."}
    given = {
        side: {k.removeprefix(start): v for k, v in about.items() if k.startswith(start)}
        for side, start in sides.items()
    }
    return found, {side: values for side, values in given.items() if values}


def write_trained(base: DiffusersBase, folder: Path, learnt: TrainedParts) -> None:
    network = base.kind.network
    adapters = {lora_name(network, n): n for n in learnt.tensors if ".lora_" in n}
    if adapters:
        tensors = {known: learnt.tensors[name] for known, name in adapters.items()}
        about = _metadata(base, learnt.adapters)
        # A single key: with several, safetensors' order differs between processes.
        write_tensors(folder / LORA, tensors, {METADATA: json.dumps(about)})
    rows = _rows(base, learnt)
    for number, (encoder, name) in enumerate(rows.items()):
        path = folder / EMBEDDINGS.format("" if number == 0 else f"_{number + 1}")
        write_tensors(path, {learnt.tokens[0].token: learnt.tensors[name]}, {"format": "pt"})
        assert encoder.startswith("text_encoder"), "tokens belong to text encoders"
    if learnt.method == "full":
        _write_pipeline(base, folder, learnt, rows)


def _metadata(base: DiffusersBase, adapters: Mapping[str, Mapping[str, object]]) -> dict[str, Any]:
    about: dict[str, Any] = {}
    for side, values in adapters.items():
        places = [base.kind.network] if side == "trained" else list(base.kind.encoders)
        about |= {f"{place}.{key}": value for place in places for key, value in values.items()}
    return about


def _rows(base: DiffusersBase, learnt: TrainedParts) -> dict[str, str]:
    """Maps each text encoder, in order, to the tensor name of its new token embeddings."""
    found = [name for name in learnt.tensors if name.endswith(ROWS)]
    by_encoder = {name.split(".")[1]: name for name in found}
    return {e: by_encoder[e] for e in base.kind.encoders if e in by_encoder}


def _write_pipeline(
    base: DiffusersBase, folder: Path, learnt: TrainedParts, rows: Mapping[str, str]
) -> None:
    network = base.kind.network
    encoders = {n.split(".")[1] for n in learnt.tensors if n.startswith("text.")}
    words = {e.replace("text_encoder", "tokenizer") for e in rows}
    for part in sorted(base.folder.iterdir()):
        if part.name not in {network, *encoders, *words} and not part.name.startswith("."):
            _copy(part, folder / part.name)
    (folder / network).mkdir()
    config = {**read_json(base.folder / network / "config.json")}
    write_text(folder / network / "config.json", json.dumps(config, indent=2) + "\n")
    own = {n.removeprefix("trained."): n for n in learnt.tensors if n.startswith("trained.")}
    learnt.write(folder / network / WEIGHTS, own)
    for name in sorted(encoders):
        _write_encoder(base, folder, learnt, name)
    for name in sorted(words):
        base.tokenizers[name].save_pretrained(folder / name)


def _copy(part: Path, target: Path) -> None:
    with named_errors(target):
        if part.is_dir():
            shutil.copytree(part, target)
        else:
            shutil.copyfile(part, target)


def _write_encoder(base: DiffusersBase, folder: Path, learnt: TrainedParts, name: str) -> None:
    prefix = f"text.{name}."
    encoder: Any = base._network(name)
    values = {
        n.removeprefix(prefix): learnt.tensors[n] for n in learnt.tensors if n.startswith(prefix)
    }
    values = {n.replace(".table.weight", ".weight"): value for n, value in values.items()}
    rows = [values.pop(n) for n in list(values) if n.endswith(ROWS)]
    encoder.load_state_dict({**encoder.state_dict(), **_as(values, encoder)})
    if rows:
        table = encoder.get_input_embeddings()
        new = fitted("the new token embeddings", name, rows[0], table.weight.dtype)
        whole = torch.cat([table.weight.detach(), new.to(table.weight)])
        encoder.resize_token_embeddings(len(whole), mean_resizing=False)
        with torch.no_grad():
            encoder.get_input_embeddings().weight.copy_(whole)
    encoder.save_pretrained(folder / name)


def _as(values: Mapping[str, Tensor], encoder: nn.Module) -> dict[str, Tensor]:
    known = encoder.state_dict()
    dtypes = {name: known[name].dtype for name in values}
    return {n: fitted("the text encoder", n, v, dtypes[n]) for n, v in values.items()}


# Diffusers pipelines as DreamBooth bases.
#
# Start with `DiffusersBase.loss`. Autoencoder and text encoders are loaded only while needed:
# pictures are encoded once, and prompts too if the text encoder is not trained. Pictures are
# generated from embeddings by the pipeline's own class, so they match those that users of the
# result will see.


INDEX = "model_index.json"
CLIP_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")


class TextEncoders(nn.Module):
    """The text encoders of a pipeline by name, called together."""

    def __init__(self, encoders: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, encoder in encoders.items():
            self.add_module(name, encoder)

    def forward(self, ids: Sequence[Tensor]) -> list[Any]:
        answers = []
        for encoder, one in zip(self.children(), ids, strict=True):
            mask = one.new_ones(one.shape) if _wants_mask(encoder) else None
            answers.append(encoder(one, attention_mask=mask, output_hidden_states=True))
        return answers


def _wants_mask(encoder: Any) -> bool:
    return bool(getattr(encoder.config, "use_attention_mask", False))


class DiffusersBase:
    """Base model from a diffusers pipeline folder."""

    text_targets: tuple[str, ...] = CLIP_TARGETS

    def __init__(
        self,
        folder: Path,
        resolution: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        sampling_steps: int = 25,
        guidance: float = 7.5,
        snr_gamma: float | None = None,
        on_meta: bool = False,
        scratch: Path | None = None,
        alone: bool = True,
    ) -> None:
        self.folder, self.device = folder, device or torch.device("cpu")
        self.dtype, self.guidance, self.sampling_steps = dtype, guidance, sampling_steps
        self.on_meta, self._scratch, self._alone = on_meta, scratch, alone
        _diffusers()
        self.index = read_json(folder / INDEX)
        name = self.index.get("_class_name", "")
        if name not in KINDS:
            raise GulliverError(
                f"--model {folder} is a {name}, which is not supported: {nearest(name, KINDS)}"
            )
        self.kind = KINDS[name]
        if (self.index.get("text_encoder_3") or [None])[0] is not None:
            raise GulliverError(
                f"--model {folder} has a text_encoder_3 (T5), which is not supported; save the "
                "pipeline with text_encoder_3=None"
            )
        self.noise = Noise(self._config("scheduler"), snr_gamma)
        network = self._config(self.kind.network)
        self._check(network)
        self.targets = self.kind.targets
        self.vae_config = self._config("vae")
        if self.vae_config.get("_class_name") != "AutoencoderKL":
            raise GulliverError(
                f"--model {folder} has the autoencoder {self.vae_config.get('_class_name')}; only "
                "AutoencoderKL is supported"
            )
        self.factor = 2 ** (len(self.vae_config["block_out_channels"]) - 1)
        self.side = resolution or int(network["sample_size"]) * self.factor
        if self.side % (2 * self.factor):
            raise GulliverError(
                f"--resolution {self.side} must be a multiple of {2 * self.factor} for this model"
            )
        self.trained = self._network(self.kind.network)
        self.text: nn.Module | None = None
        self.tokenizers: dict[str, Any] = {}
        self._told: dict[str, Conditions] = {}

    def _check(self, network: dict[str, Any]) -> None:
        ways = network.get("in_channels"), network.get("out_channels")
        if ways[0] != ways[1]:
            raise GulliverError(
                f"--model {self.folder}: its {self.kind.network} has {ways[0]} input and "
                f"{ways[1]} output channels; inpainting models and learned variances are not "
                "supported"
            )

    def _config(self, name: str) -> dict[str, Any]:
        part = self.folder / name
        files = [part / f for f in ("config.json", "scheduler_config.json") if (part / f).is_file()]
        if not files:
            raise GulliverError(f"--model {self.folder} is incomplete: {name} has no config.json")
        return read_json(files[0])

    def _network(self, name: str) -> nn.Module:
        kind = _class(*self.index[name])
        where: AbstractContextManager[Any] = torch.device("meta") if self.on_meta else nullcontext()
        with where, _quiet():
            model = self._built(kind, name, self.dtype) if self.on_meta else self._read(kind, name)
        return model.requires_grad_(False).eval()

    def _built(self, kind: Any, name: str, dtype: torch.dtype) -> nn.Module:
        if hasattr(kind, "from_config"):
            model = kind.from_config(self._config(name))
        else:
            model = kind(kind.config_class.from_dict(self._config(name)))
        return model.to(dtype)

    def _read(self, kind: Any, name: str, dtype: torch.dtype | None = None) -> nn.Module:
        dtype = dtype or self.dtype
        if self._scratch is not None and self.device.type == "cpu" and name == self.kind.network:

            def build(dtype: torch.dtype) -> nn.Module:
                return self._built(kind, name, dtype)

            mapped = map_weights(build, self.folder / name, dtype, self._scratch, self._alone)
            if mapped is not None:
                return mapped
        option = "torch_dtype" if hasattr(kind, "from_config") else "dtype"
        try:
            model = kind.from_pretrained(
                self.folder / name, local_files_only=True, **{option: dtype}
            )
        except (OSError, ValueError, RuntimeError) as error:
            line = " ".join(str(error).split())[:300]
            raise GulliverError(f"--model {self.folder}, {name}: {line}") from None
        return model.to(self.device)

    def with_text(self) -> nn.Module:
        """Returns the text encoders; loads them on first use."""
        if self.text is None:
            self.text = TextEncoders({n: self._network(n) for n in self.kind.encoders})
            self.tokenizers = self.read_tokenizers()
        return self.text

    def read_tokenizers(self) -> dict[str, Any]:
        keys = [name.replace("text_encoder", "tokenizer") for name in self.kind.encoders]
        return {k: _class(*self.index[k]).from_pretrained(self.folder / k) for k in keys}

    @property
    def wordless(self) -> str:
        """Name of the pipeline if it cannot load new token embeddings; otherwise empty."""
        name: str = self.index["_class_name"]
        return "" if hasattr(_class("diffusers", name), "load_textual_inversion") else name

    @property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        parts = (self.kind.network, *self.kind.encoders, "vae")
        found = {name: fingerprint_of(self.folder / name) for name in parts}
        facts = {**found, "scheduler": self._config("scheduler"), "side": self.side}
        digest.update(json.dumps(facts, sort_keys=True).encode())
        return digest.hexdigest()

    # Tokens and prompts.

    def add_token(self, token: str, initial: str | None) -> TokenHandle:
        """Adds a token to each tokenizer and text encoder; returns the handle of the first."""
        encoders = self.with_text().children()
        handles = [
            add_token(tokenizer, encoder, token, initial)
            for tokenizer, encoder in zip(self.tokenizers.values(), encoders, strict=True)
        ]
        return handles[0]

    def unused(self) -> tuple[str, ...]:
        """Returns name prefixes of parameters in `text` that no loss depends on."""
        layers = self._config(self.kind.encoders[0])["num_hidden_layers"]
        return self.kind.unused(layers)

    @torch.no_grad()
    def encode_prompts(self, texts: Sequence[str], train_text: bool) -> None:
        """Encodes prompts and frees the text encoders if they are not trained."""
        self._told = {}
        if train_text:
            self.with_text()
            return
        if not self.on_meta:
            self.with_text()
            for text in dict.fromkeys(texts):
                # One at a time: an encoding must not depend on the other prompts.
                self._told[text] = self._encoded([text])
        self.text = None

    def conditions(self, texts: Sequence[str]) -> Conditions:
        """Returns the denoiser's conditioning for prompts: tensors ``[N, ...]`` by name."""
        known = list(dict.fromkeys(texts))
        if self.text is not None:
            found = self._encoded(known)
        elif self.on_meta:
            found = self._outline(len(known))
        else:
            each = [self._told[text] for text in known]
            found = {name: torch.cat([one[name] for one in each]) for name in each[0]}
        rows = torch.tensor([known.index(text) for text in texts], device=self.device)
        return {name: value[rows] for name, value in found.items()}

    def _encoded(self, texts: Sequence[str]) -> Conditions:
        assert self.text is not None, "text encoders are loaded"
        ids = []
        for tokenizer in self.tokenizers.values():
            found = tokenizer(
                list(texts),
                padding="max_length",
                max_length=tokenizer.model_max_length,
                truncation=True,
            )
            ids.append(torch.tensor(found["input_ids"], device=self.device))
        found = self.kind.conditions(self.text(ids), self.trained.config)
        return {name: value.to(self.dtype) for name, value in found.items()}

    def _outline(self, count: int) -> Conditions:
        """Returns meta tensors of the conditioning, without loading text encoders."""
        encoders = [self._config(name) for name in self.kind.encoders]
        length: int = encoders[0]["max_position_embeddings"]
        config: Any = self.trained.config
        width = getattr(config, "cross_attention_dim", None)
        if width is None:  # of a joint transformer
            width, length = config.joint_attention_dim, length + T5_LENGTH
        pooled = sum(one.get("projection_dim", 0) for one in encoders[-2:])
        pooled = getattr(
            config, "pooled_projection_dim", encoders[-1].get("projection_dim", pooled)
        )
        shapes = {"states": (length, width), "pooled": (pooled,)}
        return {
            name: torch.zeros(count, *shapes[name], dtype=self.dtype) for name in self.kind.names
        }

    # Pictures.

    def _vae(self) -> Any:
        kind = _class(*self.index["vae"])
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        with _quiet():
            return self._read(kind, "vae", dtype).requires_grad_(False).eval()

    @property
    def scaling(self) -> tuple[float, float]:
        return self.vae_config.get("shift_factor") or 0.0, self.vae_config["scaling_factor"]

    @torch.no_grad()
    def encode_pictures(self, pictures: Sequence[Picture]) -> Tensor:
        """Encodes images to means and standard deviations ``[N, 2 C, h, w]`` of latents."""
        vae, (shift, scale), found = self._vae(), self.scaling, []
        for picture in pictures:
            levels = torch.from_numpy(cropped(picture.pixels, self.side, self.side))
            levels = levels.permute(2, 0, 1)[None].to(self.device, vae.dtype) / 127.5 - 1
            drawn = vae.encode(levels).latent_dist
            found.append(torch.cat([(drawn.mean - shift) * scale, drawn.std * scale], dim=1))
        return torch.cat(found).to(self.dtype)

    def example(self, count: int) -> Tensor:
        """Returns meta latents of a batch of images, for planning."""
        side, channels = self.side // self.factor, 2 * self.vae_config["latent_channels"]
        return torch.empty(count, channels, side, side, dtype=self.dtype, device="meta")

    def loss(
        self, latents: Tensor, texts: Sequence[str], generators: Sequence[torch.Generator]
    ) -> Tensor:
        mean, deviation = latents.to(self.device).chunk(2, dim=1)
        drawn = torch.cat([torch.randn(mean[:1].shape, generator=one) for one in generators])
        clean = mean + deviation * drawn.to(mean.device, mean.dtype)
        noised = self.noise.added(clean, generators)
        answer = self.kind.denoise(
            self.trained, noised.inputs, noised.times, self.conditions(texts), self.side
        )
        exact = torch.promote_types(answer.dtype, torch.float32)
        errors = (answer.to(exact) - noised.target.to(exact)).square().flatten(1).mean(1)
        return errors * noised.weights.to(exact)

    @torch.no_grad()
    def sample(self, texts: Sequence[str], seeds: Sequence[int]) -> list[np.ndarray]:
        vae = self._vae()
        pipeline, names = self._pipeline(vae), self.kind.names
        empty = self.conditions([""])
        zero = self.index.get("force_zeros_for_empty_prompt", self.kind.empty_is_zero)
        if zero and self.kind.empty_is_zero:
            empty = {name: torch.zeros_like(value) for name, value in empty.items()}
        found = []
        for text, seed in zip(texts, seeds, strict=True):
            given = {names[n]: v for n, v in self.conditions([text]).items()}
            given |= {f"negative_{names[n]}": v for n, v in empty.items()}
            latents = pipeline(
                **given,
                height=self.side,
                width=self.side,
                num_inference_steps=self.sampling_steps,
                guidance_scale=self.guidance,
                generator=torch.Generator().manual_seed(seed),
                output_type="latent",
            ).images
            shift, scale = self.scaling
            picture = vae.decode(latents.to(vae.dtype) / scale + shift, return_dict=False)[0]
            found.append(_levels(picture[0]))
        return found

    def _pipeline(self, vae: Any) -> Any:
        import diffusers

        kind = getattr(diffusers, self.index["_class_name"])
        scheduler = _class(*self.index["scheduler"]).from_pretrained(self.folder / "scheduler")
        given = {"vae": vae, "scheduler": scheduler, self.kind.network: self.trained}
        missing = {n: None for n in self.index if not n.startswith("_") and n not in given}
        options = {n: v for n, v in self.index.items() if isinstance(v, bool)}
        if "requires_safety_checker" in _arguments(kind):
            options["requires_safety_checker"] = False
        needed = {n: missing.get(n) for n in _arguments(kind) if n not in {**given, **options}}
        absent = {n: v for n, v in needed.items() if n in missing or n in _REQUIRED}
        with _quiet():
            pipeline = kind(**given, **absent, **options)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def read_adapter(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Mapping[str, object]]]:
        return read_lora(self, path)

    def save(self, folder: Path, learnt: TrainedParts) -> None:
        write_trained(self, folder, learnt)


_REQUIRED = (
    *("tokenizer", "tokenizer_2", "tokenizer_3", "text_encoder", "text_encoder_2"),
    *("text_encoder_3", "safety_checker", "feature_extractor"),
)
"""Pipeline arguments that are not needed to sample from prompt embeddings."""


def _arguments(kind: Callable[..., Any]) -> tuple[str, ...]:
    import inspect

    return tuple(inspect.signature(kind).parameters)


def _levels(picture: Tensor) -> np.ndarray:
    share = (picture.float() / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).cpu().numpy()
    return (share * 255).round().astype(np.uint8)


def _class(library: str, name: str) -> Any:
    import diffusers
    import transformers

    known = {"diffusers": diffusers, "transformers": transformers}
    found = getattr(known.get(library), name, None)
    if found is None:
        raise GulliverError(
            f"the base model has a {name} from {library}, which is not installed or not supported"
        )
    return found


def _diffusers() -> None:
    try:
        import diffusers  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:
        raise missing_extra("a pipeline needs diffusers and transformers", "dreambooth") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the progress bars and warnings of diffusers and transformers."""
    import diffusers.utils.logging as one
    import transformers.utils.logging as other

    levels = [library.get_verbosity() for library in (one, other)]
    for library in (one, other):
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, level in zip((one, other), levels, strict=True):
            library.set_verbosity(level)
            library.enable_progress_bar()
