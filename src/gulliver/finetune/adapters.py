"""LoRA adapters, created by PEFT: target layers, and compatibility checks.

By default, all linear layers of the blocks are adapted: on datasets of typical size this matches
full fine-tuning, while adapting only attention does worse (https://thinkingmachines.ai/blog/lora/).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.checkpoint.files import read_json, read_tensors
from gulliver.errors import GulliverError, missing_extra, nearest
from gulliver.families.lookup import family_of, type_of
from gulliver.finetune.config import FinetuneConfig
from gulliver.jobs.log import derive

_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"), _QKVO + _MLP),
    # The experts of a layer share one tensor, which PEFT does not adapt as linear layers; routers
    # stay frozen.
    "mixtral": _QKVO,
    "deepseek_v3": (
        *("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        *_MLP,
    ),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "bloom": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
}
"""Names of the target layers, as suffixes, by model family."""
ANY = "all-linear"  # PEFT's value for every linear layer except the head, for other families
CONFIG, WEIGHTS, FACTS = "adapter_config.json", "adapter_model.safetensors", "gulliver.json"


def adapt(model: nn.Module, config: FinetuneConfig) -> nn.Module:
    """Adds new adapters, or those of ``--adapter``, to a model, and freezes everything else."""
    try:
        import peft
    except ImportError:
        raise missing_extra("--method lora needs PEFT", "finetune") from None
    wanted = _wanted(model, config)
    _check_targets(model, wanted.target_modules)
    torch.manual_seed(derive(config.seed, 0))
    with next(model.parameters()).device:
        adapted = peft.get_peft_model(model, wanted, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    if config.adapter is not None:
        saved = read_tensors(config.adapter / WEIGHTS)
        fill_adapters(adapter_parameters(adapted), saved, config.adapter)
    return adapted


def _wanted(model: nn.Module, config: FinetuneConfig) -> Any:
    import peft

    if config.adapter is not None:
        given = _read(config.adapter)
        found = peft.PeftConfig.from_pretrained(str(config.adapter))
        if given.get("peft_type") != "LORA":
            raise GulliverError(
                f"--adapter {config.adapter} is of type {given.get('peft_type')}; only LORA is "
                "supported"
            )
        found.inference_mode = False
        _check_own(config, config.adapter, given)
        return found
    targets = config.lora_targets or TARGETS.get(family_of(model).name) or ANY
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or 2 * config.lora_rank,  # type: ignore[arg-type]
        lora_dropout=config.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )


OWN = {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_targets": "target_modules"}
"""Options that an existing adapter determines, with their names in its configuration."""


def _check_own(config: FinetuneConfig, folder: Path, given: Mapping[str, Any]) -> None:
    """Rejects options that contradict the adapter being continued."""
    for name, key in OWN.items():
        asked, own = getattr(config, name), given.get(key)
        same = set(asked) == set(own or ()) if isinstance(asked, tuple) else asked == own
        if asked != getattr(FinetuneConfig(), name) and not same:
            raise GulliverError(
                f"--{name.replace('_', '-')} is {asked}, but --adapter {folder} has {own}; omit "
                "one of them"
            )


def _check_targets(model: nn.Module, targets: Any) -> None:
    """Rejects unknown layer names; PEFT only does so if none of them exists."""
    if isinstance(targets, str):
        return
    known = {name.rpartition(".")[2] for name, m in model.named_modules() if _is_linear(m)}
    family = TARGETS.get(family_of(model).name, ())
    for target in targets:
        # A model may have only some of its family's layers: DeepSeek's queries are one layer or
        # two.
        if target.rpartition(".")[2] not in known and target not in family:
            raise GulliverError(
                f"--lora-targets {target}: {type_of(model)} has no linear layer of that name; "
                f"{nearest(target, known)}"
            )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _read(folder: Path) -> Mapping[str, Any]:
    if not (folder / CONFIG).is_file():
        raise GulliverError(f"--adapter {folder} is not a PEFT adapter: it has no {CONFIG}")
    return read_json(folder / CONFIG)


def check_adapter(folder: Path, fingerprint: str) -> None:
    _read(folder)
    if (folder / FACTS).is_file():
        base = read_json(folder / FACTS).get("base")
        if base != fingerprint:
            raise GulliverError(
                f"--adapter {folder} was trained on another model, {base}; --model is {fingerprint}"
            )


def fill_adapters(
    own: Mapping[str, nn.Parameter], saved: Mapping[str, Tensor], folder: Path
) -> None:
    for name in dict.fromkeys((*own, *saved)):
        ours = tuple(own[name].shape) if name in own else None
        theirs = tuple(saved[name].shape) if name in saved else None
        if ours != theirs:
            raise GulliverError(
                f"--adapter {folder} does not match --model: {name} is {theirs or 'missing'} in "
                f"the adapter and {ours or 'missing'} in the model"
            )
    with torch.no_grad():
        for name, parameter in own.items():
            if not parameter.is_meta:
                parameter.copy_(saved[name])


def adapter_parameters(adapted: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters, by their names in PEFT's files."""
    found = adapted.named_parameters()
    return {adapter_name(name): p for name, p in found if p.requires_grad}


def adapter_name(name: str) -> str:
    """A parameter's name in PEFT's files, without the adapter's name."""
    return name.replace(".default.", ".")


def adapter_config(adapted: Any, folder: Path) -> str:
    values = dict(adapted.peft_config["default"].to_dict())
    values |= {"base_model_name_or_path": str(folder), "inference_mode": True}
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in values.items()}
    return json.dumps(plain, indent=2, default=str)


def deltas(adapted: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Updates that adapters add to the model's weights, by weight name."""
    found: dict[str, Any] = {}
    for path, module in adapted.named_modules():
        scale = getattr(module, "scaling", None)
        if not isinstance(scale, dict) or "default" not in scale:
            continue
        a, b = tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"]
        name = path.removeprefix("base_model.model.") + ".weight"
        found[name] = _Delta(a, b, scale["default"], bool(module.fan_in_fan_out))
    return found


class _Delta:
    """The product of two low-rank matrices, computed on access."""

    def __init__(self, a: Tensor, b: Tensor, scale: float, turned: bool) -> None:
        self.a, self.b, self.scale, self.turned = a, b, scale, turned

    def __call__(self) -> Tensor:
        product = (self.b.float() @ self.a.float()) * self.scale
        return product.T.contiguous() if self.turned else product
