"""Small models of every family that parallelism knows, with batches and losses for them.

`build(family, dtype)` gives the same weights in every process; `batch(family, size, seed)` the same
data. Dropout is 0. Sizes are chosen to be awkward: vocabularies and feed-forward widths divide by
nothing, heads divide by 2 and 4 and not by 3; some embeddings are tied and some are not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCABULARY, HIDDEN, HEADS, KV_HEADS, WIDE = 67, 32, 8, 4, 53
FIRST = ("llama", "mistral", "qwen2", "gpt2", "bloom", "opt")
LATER = ("qwen3", "gemma2", "gemma3", "mixtral", "llama, 2 KV heads", "llama, 1 KV head")
"""Families whose norms, scores or routers go through float32, so that they run under `Precise`."""
DECODERS = (*FIRST, *LATER)
FAMILIES = (*FIRST, "t5", "bert", "vit", "whisper", "stdit3")
IMAGE, FRAMES_OF_SOUND = 12, 40


def build(family: str, dtype: torch.dtype = torch.float64, layers: int = 2) -> Any:
    """A model in training mode; `layers` blocks in each stack."""
    torch.manual_seed(1234)
    model: nn.Module = MODELS[family](layers)
    with torch.no_grad():
        # What begins as zeros or ones would hide that it is added twice, or not at all.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype).train()


class Precise(TorchFunctionMode):
    """Keeps float64 where transformers would go through float32: in norms, softmax and losses."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls `func` with float32 replaced, where its first tensor is float64."""
        kwargs = kwargs or {}
        first = next((a for a in args if isinstance(a, Tensor)), None)
        if first is None:
            first = kwargs.get("input")
        if first is None or first.dtype != torch.float64:
            return func(*args, **kwargs)
        if func is Tensor.float:
            return first
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {n: torch.float64 if a is torch.float32 else a for n, a in kwargs.items()}
        return func(*args, **kwargs)


def exact_norms(model: nn.Module) -> None:
    """Lets norms compute in the model's own dtype: transformers' go through float32.

    There a difference in the last place of float64 becomes one of float32, now and then.
    """
    for module in model.modules():
        # The STDiT has norms of such a name, too, which do so by themselves.
        is_one = type(module).__name__.endswith(("RMSNorm", "T5LayerNorm"))
        if is_one and hasattr(module, "variance_epsilon"):
            module.forward = partial(_rms_norm, module)  # type: ignore[method-assign]


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * x * (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()


def batch(
    family: str,
    size: int = 2,
    seed: int = 0,
    length: int = 12,
    dtype: torch.dtype = torch.float64,
    padded: bool = False,
) -> dict[str, Tensor]:
    """Keyword arguments of a model's forward, with labels where it takes them.

    Args:
        family: of `FAMILIES`.
        size: samples.
        seed: of the data.
        length: tokens of each sample, where the family has tokens; frames of a clip for STDiT3.
        dtype: of pictures, sounds and clips.
        padded: the first sample of a text lacks its last three tokens.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def tokens(count: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (size, count), generator=generator)

    if family == "vit":
        labels = torch.randint(0, 5, (size,), generator=generator)
        return {"pixel_values": noise(size, 3, IMAGE, IMAGE), "labels": labels}
    if family == "stdit3":
        return {
            "x": noise(size, 4, length // 3, 4, 6),
            "timestep": torch.rand(size, generator=generator) * 1000,
            "y": noise(size, 1, 5, 16),
            "fps": torch.full((size,), 24.0),
            "height": torch.full((size,), 32.0),
            "width": torch.full((size,), 48.0),
        }
    if family == "whisper":
        return {
            "input_features": noise(size, 8, FRAMES_OF_SOUND),
            "decoder_input_ids": tokens(length),
            "labels": tokens(length),
        }
    found = {"input_ids": tokens(length)}
    if padded:
        found["attention_mask"] = torch.ones(size, length, dtype=torch.int64)
        found["attention_mask"][0, -3:] = 0
    found["labels"] = tokens(length - 3) if family == "t5" else found["input_ids"].clone()
    if padded:
        found["labels"][0, -3:] = -100
    return found


def outputs(model: nn.Module, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits (or the prediction) and the model's own loss, of any family."""
    out = model(**data)
    if isinstance(out, Tensor):
        target = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        return out, (out - target).square().mean()
    return out.logits, out.loss


def precise_loss(family: str, logits: Tensor, data: dict[str, Tensor]) -> Tensor:
    """The same loss in the dtype of the logits; Hugging Face takes its own in float32."""
    if family == "stdit3":
        target = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
        return (logits - target).square().mean()
    labels = data["labels"]
    if family in DECODERS:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _hugging_face(name: str, config: str, **fields: Any) -> Any:
    import transformers

    settings = getattr(transformers, config)(**fields)
    return getattr(transformers, name)(settings)


def _llama_like(kind: str, config: str = "", **fields: Any) -> Any:
    def make(layers: int) -> Any:
        sizes = {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": WIDE,
            "num_hidden_layers": layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": 64,
            "use_cache": False,
        }
        own = {name: v(layers) if callable(v) else v for name, v in fields.items()}
        return _hugging_face(f"{kind}ForCausalLM", config or f"{kind}Config", **sizes | own)

    return make


def _in_turns(layers: int) -> list[str]:
    return ["sliding_attention", "full_attention"] * (layers // 2)


def _gpt2(layers: int) -> Any:
    return _hugging_face(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=layers,
        n_head=HEADS,
        n_inner=WIDE,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=1,
        use_cache=False,
    )


def _bloom(layers: int) -> Any:
    return _hugging_face(
        "BloomForCausalLM",
        "BloomConfig",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        n_layer=layers,
        n_head=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    )


def _opt(layers: int) -> Any:
    return _hugging_face(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN,
        num_hidden_layers=layers,
        ffn_dim=WIDE,
        num_attention_heads=HEADS,
        max_position_embeddings=64,
        dropout=0.0,
        use_cache=False,
    )


def _t5(layers: int) -> Any:
    return _hugging_face(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=6,
        d_ff=WIDE,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=HEADS,
        relative_attention_num_buckets=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )


def _bert(layers: int) -> Any:
    return _hugging_face(
        "BertForMaskedLM",
        "BertConfig",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=WIDE,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def _vit(layers: int) -> Any:
    return _hugging_face(
        "ViTForImageClassification",
        "ViTConfig",
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=WIDE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=IMAGE,
        patch_size=4,
        num_labels=5,
    )


def _whisper(layers: int) -> Any:
    return _hugging_face(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=HIDDEN,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=WIDE,
        decoder_ffn_dim=WIDE,
        max_source_positions=FRAMES_OF_SOUND // 2,
        max_target_positions=32,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=2,
        use_cache=False,
    )


def _stdit3(layers: int) -> nn.Module:
    from gulliver.models import STDiT3

    return STDiT3(
        hidden_size=HIDDEN,
        depth=layers,
        num_heads=HEADS,
        mlp_ratio=1.7,
        caption_channels=16,
        model_max_length=8,
        class_dropout_prob=0.0,
        zero_init_temporal=False,
    )


_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "llama": _llama_like("Llama"),
    "mistral": _llama_like("Mistral", sliding_window=5),
    # Its first layer sees everything, those after it a window.
    "qwen2": _llama_like(
        "Qwen2",
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
    ),
    "qwen3": _llama_like("Qwen3", head_dim=6),
    # Scores and logits are capped, and every second layer has a window.
    "gemma2": _llama_like("Gemma2", head_dim=6, sliding_window=5, **_TOKENS),
    "gemma3": _llama_like(
        "Gemma3",
        "Gemma3TextConfig",
        head_dim=6,
        sliding_window=5,
        layer_types=_in_turns,
        final_logit_softcapping=3.0,
        **_TOKENS,
    ),
    # The grouped products know no float64.
    "mixtral": _llama_like(
        "Mixtral",
        num_local_experts=4,
        sliding_window=6,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        experts_implementation="eager",
    ),
    "llama, 2 KV heads": _llama_like("Llama", num_key_value_heads=2, attention_bias=True),
    "llama, 1 KV head": _llama_like("Llama", num_key_value_heads=1),
    "gpt2": _gpt2,
    "bloom": _bloom,
    "opt": _opt,
    "t5": _t5,
    "bert": _bert,
    "vit": _vit,
    "whisper": _whisper,
    "stdit3": _stdit3,
}
