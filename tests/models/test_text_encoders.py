"""Text encoders say what transformers says, once; public models load by name, strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gulliver.checkpoint import save_huggingface
from gulliver.checkpoint.files import write_tensors
from gulliver.errors import GulliverError
from gulliver.models import MMDiT, STDiT, STDiT2, STDiT3
from gulliver.video import CachedTextEncoder, TextPair, load_model, load_text_encoder
from gulliver.video.text_encoders import ClipTextEncoder, T5TextEncoder, WordEncoder, check_encoder

WORDS = ["<pad>", "</s>", "<unk>", "<s>", "a", "cat", "on", "the", "roof", "runs"]
CAPTIONS = ["a cat", "the cat runs on the roof", "a dog"]


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of a word each, which ends captions as T5 and CLIP do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(ids, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def save_t5(folder: Path, width: int = 16, seed: int = 0) -> Any:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=10, d_model=width, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = T5EncoderModel(config).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_clip(folder: Path) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(1)
    config = CLIPTextConfig(
        vocab_size=10, hidden_size=12, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=8, pad_token_id=0, bos_token_id=3,
        eos_token_id=1,
    )  # fmt: skip
    model = CLIPTextModel(config).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def test_t5_and_clip_equal_transformers_per_caption(tmp_path: Path) -> None:
    t5, clip = save_t5(tmp_path / "t5"), save_clip(tmp_path / "clip")
    first, second = (load_text_encoder(tmp_path / name) for name in ("t5", "clip"))
    assert isinstance(first, T5TextEncoder)
    assert isinstance(second, ClipTextEncoder)
    assert (first.channels, first.max_length, second.max_length) == (16, 512, 8)
    both = TextPair(first, second).encode(CAPTIONS)
    assert both.embeddings.shape == (3, 1, 7, 16)
    assert both.vector is not None
    for row, caption in enumerate(CAPTIONS):
        words = [WORDS.index(w) if w in WORDS else 2 for w in caption.split()]
        ids = torch.tensor([[*words, 1]])
        count = ids.shape[1]
        with torch.no_grad():
            expected = t5(input_ids=ids).last_hidden_state[0]
            vector = clip(input_ids=ids).pooler_output[0]
        assert both.mask[row].tolist() == [n < count for n in range(7)]
        torch.testing.assert_close(both.embeddings[row, 0, :count], expected, rtol=1e-5, atol=1e-5)
        assert not both.embeddings[row, 0, count:].any()
        torch.testing.assert_close(both.vector[row], vector, rtol=1e-5, atol=1e-5)
    padded = T5TextEncoder(tmp_path / "t5", 9, whole=True).encode(["a cat"])
    assert padded.mask.shape == (1, 9)
    assert padded.mask.all()
    with torch.no_grad():
        expected = t5(input_ids=torch.tensor([[4, 5, 1, 0, 0, 0, 0, 0, 0]])).last_hidden_state
    torch.testing.assert_close(padded.embeddings[:, 0], expected, rtol=1e-5, atol=1e-5)


def test_captions_are_encoded_once_and_kept_by_fingerprint(tmp_path: Path) -> None:
    save_t5(tmp_path / "t5")
    encoder = load_text_encoder(tmp_path / "t5")
    asked: list[str] = []

    class Counted:
        channels, max_length, fingerprint = 16, 512, encoder.fingerprint

        def encode(self, captions: list[str]) -> Any:
            asked.extend(captions)
            return encoder.encode(captions)

    whole = encoder.encode(CAPTIONS)
    for _ in range(2):
        kept = CachedTextEncoder(Counted(), tmp_path / "kept").encode([*CAPTIONS, CAPTIONS[0]])
        torch.testing.assert_close(kept.embeddings[:3], whole.embeddings, rtol=1e-5, atol=1e-5)
        assert torch.equal(kept.mask[:3], whole.mask)
        assert torch.equal(kept.embeddings[3], kept.embeddings[0])
    assert asked == CAPTIONS
    assert T5TextEncoder(tmp_path / "t5", 7).fingerprint != encoder.fingerprint
    words = CachedTextEncoder(WordEncoder(16, 8), tmp_path / "kept")
    y, mask = words.encode(["a cat"])
    assert torch.equal(y, WordEncoder(16, 8).encode(["a cat"])[0])
    assert mask.tolist() == [[True, True]]
    assert asked == CAPTIONS
    for file in (tmp_path / "kept").iterdir():
        file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(GulliverError, match="delete this file"):
        words.encode(["a cat"])


def test_mismatched_encoders_are_rejected(tmp_path: Path) -> None:
    save_t5(tmp_path / "t5")
    encoder = T5TextEncoder(tmp_path / "t5", 4)
    with pytest.raises(GulliverError, match=r"7 tokens exceed this model's limit of 4"):
        encoder.encode(CAPTIONS)
    assert T5TextEncoder(tmp_path / "t5", 4, cut=True).encode(CAPTIONS).mask.shape == (3, 4)
    with pytest.raises(GulliverError, match="width 16, but the model needs 4096"):
        check_encoder(encoder, 4096, 300)
    with pytest.raises(GulliverError, match="pass max_length=3"):
        check_encoder(encoder, 16, 3)
    save_clip(tmp_path / "clip")
    with pytest.raises(GulliverError, match="max_length=9 exceeds this CLIP's limit of 8 tokens"):
        load_text_encoder(tmp_path / "clip", 9)
    clip = load_text_encoder(tmp_path / "clip")
    assert clip.max_length == 8
    with pytest.raises(GulliverError, match=r"no config\.json"):
        load_text_encoder(tmp_path / "none")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(GulliverError, match="holds a bert model"):
        load_text_encoder(tmp_path / "other")


FIELDS: dict[str, Any] = {
    "hidden_size": 24, "depth": 1, "num_heads": 2, "in_channels": 3, "caption_channels": 10,
    "model_max_length": 7,
}  # fmt: skip
JOINT: dict[str, Any] = {
    "in_channels": 12, "vec_in_dim": 6, "context_in_dim": 10, "hidden_size": 32, "num_heads": 2,
    "depth": 1, "depth_single_blocks": 1, "axes_dim": (2, 6, 8),
}  # fmt: skip


def saved(model: nn.Module, path: Path, shards: bool = False) -> Path:
    if path.suffix == ".safetensors":
        write_tensors(path, model.state_dict())
    else:
        save_huggingface(model.state_dict(), path, max_shard_bytes=1e4 if shards else 5e9)
    return path


def same(found: nn.Module, expected: nn.Module) -> None:
    assert type(found) is type(expected)
    mine, theirs = found.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_public_models_load_from_folders_shards_and_single_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    second = STDiT2(**FIELDS)
    same(load_model(saved(second, tmp_path / "second.safetensors")), second)
    windows = {"kernel_size": (4, 4, -1), "use_spatial_rope": True, "image_conditioning": True}
    third = STDiT3(**FIELDS, **windows)
    folder = saved(third, tmp_path / "third", shards=True)
    assert len(list(folder.glob("*.safetensors"))) > 2
    written = {
        "architectures": ["STDiT3"], "model_type": "STDiT3", "transformers_version": "4.36",
        "return_dict": True, "kernel_size": [4, 4, -1], "use_spatial_rope": True,
        "enable_flash_attn": False, "input_sq_size": 256,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(written))
    found = load_model(folder)
    same(found, third)
    assert isinstance(found, STDiT3)
    assert (found.window, found.input_sq_size, found.training) == ((-1, 4, 4), 256, False)
    joint = MMDiT(**JOINT, fused_qkv=False, use_liger_rope=True, cond_embed=True)
    path = saved(joint, tmp_path / "joint.safetensors")
    found = load_model(path, axes_dim=(2, 6, 8))
    same(found, joint)
    assert isinstance(found, MMDiT)
    assert found.double_blocks[0].halves
    first = STDiT(**FIELDS, input_size=(2, 4, 6))
    path = saved(first, tmp_path / "first.safetensors")
    same(load_model(path, num_heads=2, input_size=(2, 4, 6)), first)
    half = load_model(path, dtype=torch.bfloat16, num_heads=2, input_size=(2, 4, 6))
    assert half.get_parameter("t_block.1.weight").dtype == torch.bfloat16
    with pytest.raises(GulliverError, match="positions for 2 frames of 6 tokens"):
        load_model(path, num_heads=2)


def test_files_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    state = STDiT3(**FIELDS).state_dict()
    del state["spatial_blocks.0.attn.proj.bias"]
    write_tensors(tmp_path / "part.safetensors", state)
    with pytest.raises(GulliverError, match=r"spatial_blocks\.0\.attn\.proj\.bias"):
        load_model(tmp_path / "part.safetensors")
    folder = saved(STDiT3(**FIELDS), tmp_path / "folder")
    (folder / "config.json").write_text('{"hiden_size": 24}')
    with pytest.raises(GulliverError, match="has no field 'hiden_size'"):
        load_model(folder)
    (folder / "config.json").write_text('{"model_type": "STDiT2"}')
    with pytest.raises(GulliverError, match=r"has model_type 'STDiT2', .* an STDiT3"):
        load_model(folder)
    (folder / "config.json").write_text('{"depth": "two"}')
    with pytest.raises(GulliverError, match=r"folder: .*depth is 'two'"):
        load_model(folder)
    save_t5(tmp_path / "t5")
    with pytest.raises(GulliverError, match="looks like a T5 text encoder"):
        load_model(tmp_path / "t5")


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    state = STDiT3(**FIELDS).state_dict()
    name = "t_block.1.weight"
    path = tmp_path / "x.safetensors"
    write_tensors(path, {**state, name: state[name].to(torch.int8)})
    for dtype in (None, torch.float32):
        with pytest.raises(GulliverError, match=r"'t_block\.1\.weight' is int8; expected floating"):
            load_model(path, dtype=dtype)
    low = state[name].to(torch.float8_e4m3fn)
    write_tensors(path, {**state, name: low})
    with pytest.raises(GulliverError, match=r"is float8_e4m3fn, .* pass dtype=torch\.bfloat16"):
        load_model(path)
    found = load_model(path, dtype=torch.bfloat16).state_dict()[name]
    assert torch.equal(found, low.to(torch.bfloat16))
