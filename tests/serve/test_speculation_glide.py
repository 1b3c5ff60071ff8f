"""Drafts that look at the target's keys and values: layers, training, folders and answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gulliver.errors import GulliverError
from gulliver.jobs.run_folder import RunFolder
from gulliver.serve import Engine, EngineOptions, LocalRunner, SamplingParams
from gulliver.serve.speculative import SpeculationOptions, Speculator, TrainDraftConfig
from gulliver.serve.speculative.glide import (
    Glide,
    GlideConfig,
    GlideDraft,
    load_draft,
    rotate,
    save_draft,
    seen_keys,
)
from gulliver.serve.speculative.train import (
    DraftTrainer,
    glimpses_of,
    lesson_of,
    rows_of,
    target_frequencies,
    train_draft,
)
from tests.serve.serving_models import VOCABULARY, one_by_one, prompts, tiny

COUNT = 16


def glide(kind: str, layers: int = 1, looking: bool = True, drafted: int = 0) -> Glide:
    """A random draft of a tiny target, whose attention to the target counts."""
    model = tiny(kind)
    last = model.config.num_hidden_layers - 1
    places = tuple([last] * layers) if looking else ()
    token = torch.zeros(1, 1, dtype=torch.int64)
    keys, _, heads = glimpses_of(model, token, (last,))
    config = GlideConfig(
        *(VOCABULARY, 32, 2, 48, layers, places, heads, keys[0].shape[-1], 5, drafted),
    )
    torch.manual_seed(5)
    draft = Glide(config, target_frequencies(model) if looking else ())
    for name, weight in draft.named_parameters():
        if weight.dim() == 2 and "embedding" not in name:
            torch.nn.init.normal_(weight, std=0.3)
        if "gain" in name:
            torch.nn.init.normal_(weight, 1.0, std=0.3)
    draft.drafted.copy_(torch.randperm(VOCABULARY)[:drafted])
    return draft.eval()


def naive_guesses(draft: Glide, model: Any, tokens: list[int], depth: int) -> list[int]:
    """Greedy guesses by whole forwards, each token seeing the target's keys that it may."""
    cached, text = len(tokens) - 1, list(tokens)
    layers = draft.config.glimpses
    keys, values, _ = glimpses_of(model, torch.tensor([tokens]), layers)
    for _ in range(depth):
        positions = torch.arange(len(text))[None]
        # A verified token sees the keys before it, a guess all that are cached.
        seen = positions[0].clamp(max=cached)

        def attend(number: int, query: Any, key: Any, value: Any) -> Any:
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True
            )
            return out.transpose(1, 2)

        def glimpse(number: int, query: Any, seen: Any = seen) -> Any:
            out = torch.zeros(query.transpose(1, 2).shape)
            for place, count in enumerate(seen.tolist()):
                for head in range(query.shape[1]):
                    group = query.shape[1] // keys[number].shape[1]
                    key, value = (kept[number][0, head // group, :count] for kept in (keys, values))
                    scores = key @ query[0, head, place] * query.shape[-1] ** -0.5
                    out[0, place, head] = scores.softmax(0) @ value
            return out

        x = draft.hidden(torch.tensor([text]), positions, attend, glimpse)
        scores = x[0, -1] @ draft.head.weight.T
        best = int(scores.argmax())
        text.append(int(draft.drafted[best]) if len(draft.drafted) else best)
    return text[len(tokens) :]


@pytest.mark.parametrize(
    ("kind", "layers", "drafted"),
    [("llama", 1, 0), ("llama", 2, 0), ("llama", 1, 20), ("gpt2", 1, 0), ("bloom", 1, 0)],
)
@torch.no_grad()
def test_guesses_are_those_of_whole_forwards(kind: str, layers: int, drafted: int) -> None:
    model, draft = tiny(kind), glide(kind, layers, drafted=drafted)
    texts = prompts((3, 22, 9))
    want = {}
    for number, text in enumerate(texts):
        answer, _ = one_by_one(model, text, 6)
        want[number] = [naive_guesses(draft, model, text + answer[:size], 3) for size in (1, 4, 5)]
    # The engine runs on its own; its drafter is asked at the lengths that are compared.
    proposer = GlideDraft(draft, beside=2)
    got: dict[int, list[list[int]]] = {number: [] for number in want}

    class Watching(Speculator):
        def draft(self, wanted: Any, budget: int) -> Any:
            some = [w for w in wanted if len(w.tokens) - w.prompt in (1, 4, 5)]
            for number, proposal in self.proposer.propose(some, 3).items():
                got[number].append(list(proposal.tokens[:3]))
                assert len(proposal.tokens) == 9
            return {}

    runner = LocalRunner(model, cache_tokens=256, block_size=4)
    engine = Engine(runner, options=EngineOptions(64, 8), drafter=Watching(proposer))
    for text in texts:
        engine.add(text, SamplingParams(max_tokens=16, temperature=0))
    while engine.busy:
        engine.step()
    runner.close()
    assert got == want


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "mixtral"])
def test_greedy_answers_are_those_of_transformers_one_by_one(kind: str) -> None:
    model, texts = tiny(kind), prompts((3, 22, 1, 9), shared=16)
    want = [one_by_one(model, text, COUNT)[0] for text in texts]
    options = SpeculationOptions(depth=3, nodes=8, fixed=True)
    spec = Speculator(GlideDraft(glide(kind), beside=2), options)
    runner = LocalRunner(model, cache_tokens=60, block_size=4)
    engine = Engine(runner, options=EngineOptions(24, 4), drafter=spec)
    asked = SamplingParams(max_tokens=COUNT, temperature=0)
    made: dict[int, list[int]] = {engine.add(text, asked): [] for text in texts}
    while engine.busy:
        for event in engine.step():
            made[event.request] += [token.id for token in event.tokens]
    runner.close()
    assert list(made.values()) == want
    counts = engine.counts()
    assert counts["preemptions"] > 0
    assert counts["drafted_tokens"] > 0


def test_the_block_mask_is_what_guesses_see_in_use() -> None:
    # Blocks of 3 that begin at 1, 4, 7: the first token of a block sees all before it.
    assert seen_keys(9, 3, 2).tolist() == [0, 1, 1, 1, 4, 4, 4, 7, 7]
    assert seen_keys(4, 1, 0).tolist() == [0, 1, 2, 3]
    draft, model = glide("llama"), tiny("llama")
    tokens = torch.tensor(prompts((12,)))
    keys, values, _ = glimpses_of(model, tokens, draft.config.glimpses)
    seen = seen_keys(12, 3, 0)
    labels = tokens.clone()
    labels[:, :8] = -100
    labels[:, 9:] = -100  # only what position 7 says of token 8, which sees 6 keys
    want = draft(tokens, labels, seen, keys, values)
    for kept in (*keys, *values):
        kept[:, :, 6:] = 99.0
    assert torch.equal(draft(tokens, labels, seen, keys, values), want)
    for kept in (*keys, *values):
        kept[:, :, 5] = 9.0
    assert not torch.allclose(draft(tokens, labels, seen, keys, values), want)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.no_grad()
def test_what_training_sees_of_guesses_is_what_they_see_in_use(kind: str) -> None:
    """Losses under the block mask are those of the logits that guesses were drawn from."""
    model, draft, block = tiny(kind), glide(kind), 4
    seen: list[tuple[list[int], list[torch.Tensor], list[int]]] = []

    class Watched(GlideDraft):
        def propose(self, wanted: Any, depth: int) -> Any:
            seen.append((list(wanted[0].tokens), [], []))
            found = super().propose(wanted, depth)
            seen[-1][2].extend(found[wanted[0].sequence].tokens[:depth])
            return found

        def _run(self, news: Any, rows: bool) -> torch.Tensor:
            logits = super()._run(news, rows)
            seen[-1][1].extend(logits[:1].clone())
            return logits

    options = SpeculationOptions(depth=block, nodes=block, fixed=True)
    runner = LocalRunner(model, cache_tokens=128, block_size=4)
    engine = Engine(runner, drafter=Speculator(Watched(draft, 0), options))
    seen.clear()  # what was measured at the start
    engine.add(prompts((9,))[0], SamplingParams(max_tokens=24, temperature=0))
    while engine.busy:
        engine.step()
    runner.close()
    compared = 0
    for text, logits, guesses in seen:
        tokens = torch.tensor([[*text, *guesses]])
        begin = len(text) - 1
        # A block begins at the text's last token: the keys of all before it are there.
        keys, values, _ = glimpses_of(model, tokens, draft.config.glimpses)
        mask = seen_keys(tokens.shape[1], block, -begin % block)
        assert mask[begin : begin + len(guesses)].tolist() == [begin] * len(guesses)
        for depth, row in enumerate(logits[: len(guesses)]):
            labels = torch.full_like(tokens, -100)
            labels[0, begin + depth + 1] = guesses[depth]
            want = torch.nn.functional.cross_entropy(row[None], labels[0, begin + depth + 1][None])
            got = draft(tokens, labels, mask, keys, values)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("looking", [True, False])
def test_draft_learns_pairs_from_target_cache(looking: bool) -> None:
    """Pairs that come again in another order: one layer alone cannot find what followed a token.

    Keys made here stand for the tokens before their own, and values for their own, as those of a
    target that has learnt to repeat: a glimpse finds the second of a pair by the first.
    """
    count, heads, dim, pairs, rows = 24, 2, 24, 6, 16
    torch.manual_seed(0)
    frequencies = (10_000.0 ** (-torch.arange(0, dim, 2) / dim)).tolist()
    stands = torch.randn(count, heads * dim)
    sizes = GlideConfig(count, 48, 1, 64, 1, (0,) if looking else (), heads, dim)
    draft = Glide(sizes, frequencies if looking else ())
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3, weight_decay=0.0)
    positions, losses = torch.arange(4 * pairs)[None].expand(rows, -1), []

    def some(of: int) -> torch.Tensor:
        return torch.stack([torch.randperm(of)[:pairs] for _ in range(rows)])

    def heads_of(tokens: torch.Tensor) -> torch.Tensor:
        return stands[tokens].unflatten(-1, (heads, dim)).transpose(1, 2)

    for _ in range(80):
        first = torch.stack([some(12), 12 + some(12)], -1)
        again = first.gather(1, some(pairs)[..., None].expand_as(first))
        tokens = torch.cat([first.flatten(1), again.flatten(1)], 1)
        labels = torch.full_like(tokens, -100)
        labels[:, 2 * pairs + 1 :: 2] = tokens[:, 2 * pairs + 1 :: 2]
        key = rotate(heads_of(tokens.roll(1, 1)), positions, torch.tensor(frequencies))
        seen = seen_keys(4 * pairs, 1, 0)
        loss = draft(tokens, labels, seen, [key], [heads_of(tokens)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    found = sum(losses[-20:]) / 20
    # One layer can tell which six tokens there are, and which have come again: 1.10 on average.
    assert found < 0.3 if looking else found > 0.9


def test_gradients_are_those_of_differences() -> None:
    draft, tokens = glide("llama").double(), torch.tensor(prompts((7, 7)))
    keys, values, _ = glimpses_of(tiny("llama"), tokens, draft.config.glimpses)
    keys, values = [k.double() for k in keys], [v.double() for v in values]
    teacher = torch.randn(2, 7, VOCABULARY, dtype=torch.float64)
    seen, labels = seen_keys(7, 3, 1), tokens.clone()
    labels[1, 4:] = -100

    def loss() -> torch.Tensor:
        return draft(tokens, labels, seen, keys, values, teacher)

    for name, weight in draft.named_parameters():
        (slope,) = torch.autograd.grad(loss(), weight)
        way = torch.randn_like(weight)
        with torch.no_grad():
            weight += 1e-4 * way
            above = loss()
            weight -= 2e-4 * way
            below = loss()
            weight += 1e-4 * way
        # The loss itself is in float32.
        want = (above.double() - below.double()) / 2e-4
        torch.testing.assert_close((slope * way).sum(), want, rtol=2e-2, atol=5e-3, msg=name)


@pytest.mark.parametrize("distill", [True, False])
def test_loss_is_over_the_drafted_tokens(distill: bool) -> None:
    draft, tokens = glide("llama", drafted=20), torch.tensor(prompts((9, 9)))
    keys, values, _ = glimpses_of(tiny("llama"), tokens, draft.config.glimpses)
    teacher = torch.randn(2, 9, 20)
    states: list[torch.Tensor] = []
    draft.norm.register_forward_hook(lambda *given: states.append(given[2]))
    more = (teacher,) if distill else ()
    loss = draft(tokens, tokens, seen_keys(9, 3, 1), keys, values, *more)
    known = draft.drafted.tolist()
    wanted, places = [], tokens[:, 1:].flatten().tolist()
    scores = (states[0][:, :-1] @ draft.head.weight.T).flatten(0, 1).log_softmax(-1)
    for place, row in enumerate(scores):
        if distill:
            likely = teacher[:, :-1].flatten(0, 1)[place].softmax(-1)
            wanted.append(-(likely * row).sum())
        elif places[place] in known:
            wanted.append(-row[known.index(places[place])])
    assert 0 < len(wanted) < len(places) + distill
    torch.testing.assert_close(loss, torch.stack(wanted).mean())


@pytest.mark.parametrize("width", [48, 32])
def test_vectors_start_from_the_largest_directions_of_the_targets(width: int) -> None:
    scales = torch.linspace(1, 3, 48)
    embedding, head = (torch.randn(VOCABULARY, 48) * scales for _ in range(2))
    draft = Glide(GlideConfig(VOCABULARY, width, 1, 64, 1, (), 2, 24, 5, 20))
    draft.start_from(embedding, head, torch.arange(3, 23))
    for rows, got in ((head[3:23], draft.head.weight), (embedding, draft.embedding.weight)):
        left, sizes, _ = torch.linalg.svd(rows, full_matrices=False)
        want = left[:, :width] * sizes[:width]
        want, got = want @ want.T, (got @ got.T).detach()
        torch.testing.assert_close(got / got.norm(), want / want.norm(), rtol=1e-3, atol=1e-4)


def test_logits_of_the_drafted_tokens_are_the_targets() -> None:
    model, tokens = tiny("llama"), torch.tensor(prompts((9, 9)))
    rows = torch.tensor([3, 1, 30])
    *_, whole = lesson_of(model, tokens, (0,))
    *_, part = lesson_of(model, tokens, (0,), rows_of(model.get_output_embeddings(), rows))
    torch.testing.assert_close(part, whole[..., rows])
    torch.testing.assert_close(lesson_of(model, tokens, (0,))[2], whole)


def test_keys_are_those_that_serving_caches() -> None:
    model, text = tiny("llama"), prompts((13,))[0]
    runner = LocalRunner(model, cache_tokens=64, block_size=4)
    engine = Engine(runner)
    engine.add(text, SamplingParams(max_tokens=1, temperature=0))
    engine.step()
    # The blocks are still as they were; the first were taken first.
    last = model.config.num_hidden_layers - 1
    got = runner.pages.keys[last][:4].transpose(0, 1).flatten(1, 2)[:, :13]
    runner.close()
    keys, _, _ = glimpses_of(model, torch.tensor([text, text]), (last,))
    torch.testing.assert_close(keys[0][1], got)


def small_target(folder: Path) -> tuple[Any, Any]:
    """The tiny Llama with a tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {chr(number + 40): number for number in range(VOCABULARY)}
    inner = Tokenizer(models.WordLevel(names, unk_token="("))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    return tiny("llama"), PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="(")


def test_a_draft_learns_is_written_and_drafts(tmp_path: Path) -> None:
    model, tokenizer = small_target(tmp_path)
    rows = [{"text": "abcdefgh" * 6} for _ in range(40)]
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TrainDraftConfig(
        data=(data,),
        held_out=data,
        length=48,
        target=tmp_path,
        out=tmp_path / "draft",
        hidden=32,
        drafted=8,
        steps=30,
        batch_tokens=384,
        learning_rate=1e-2,
        warmup=2,
        distill=False,  # the target is random, and says nothing of these texts
    )
    config_of_texts = {**config.__dict__, "held_out": 0.1}
    lines: list[str] = []
    trained = train_draft(TrainDraftConfig(**config_of_texts), (model, tokenizer), say=lines.append)
    assert trained.steps == 30
    assert any("looking at layer(s)" in line for line in lines)
    draft = load_draft(tmp_path / "draft")
    assert {*draft.drafted.tolist()} == {*tokenizer("abcdefgh")["input_ids"]}
    assert sum(p.numel() for p in draft.parameters()) == trained.parameters
    # What it has learnt: the text goes on.
    tokens = tokenizer("abcdefgh" * 4)["input_ids"]
    keys, values, _ = glimpses_of(model, torch.tensor([tokens]), draft.config.glimpses)
    whole = torch.tensor([tokens])
    with torch.no_grad():
        loss = draft(whole, whole, seen_keys(len(tokens), 5, 0), keys, values)
    assert float(loss) < 2.0  # of 4.2 at the start
    with pytest.raises(GulliverError, match="already has a draft or a model"):
        train_draft(config, (model, tokenizer))


@pytest.mark.parametrize(("distill", "stage"), [(True, 0), (False, 1)])
def test_a_killed_training_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distill: bool, stage: Any
) -> None:
    target = small_target(tmp_path)
    data = tmp_path / "texts.jsonl"
    texts = ["abcdefgh" * 3 + chr(97 + n % 7) * (n % 19) for n in range(30)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = TrainDraftConfig(
        data=(data,),
        length=40,
        target=tmp_path,
        out=tmp_path / "whole",
        hidden=32,
        steps=14,
        batch_tokens=200,
        warmup=2,
        save_every=4,
        distill=distill,
        stage=stage,
    )
    lines: list[str] = []
    whole = train_draft(config, target, say=lines.append)
    assert not (tmp_path / "whole" / "training" / "checkpoints").exists()
    step = DraftTrainer._step

    def killed(self: Any, *arguments: Any) -> bool:
        if self.step_number == 9:
            raise KeyboardInterrupt
        return step(self, *arguments)

    broken = replace(config, out=tmp_path / "broken")
    monkeypatch.setattr(DraftTrainer, "_step", killed)
    with pytest.raises(KeyboardInterrupt):
        train_draft(broken, target, say=lines.append)
    monkeypatch.setattr(DraftTrainer, "_step", step)
    assert not (tmp_path / "broken" / "config.json").exists()
    with pytest.raises(GulliverError, match="--resume"):
        train_draft(broken, target, say=lines.append)
    with pytest.raises(GulliverError, match=r"learning_rate.*0\.001.*0\.01"):
        train_draft(replace(broken, resume=True, learning_rate=0.01), target, say=lines.append)
    again = train_draft(replace(broken, resume=True), target, say=lines.append)
    assert again == whole
    one, other = (load_draft(tmp_path / name).state_dict() for name in ("whole", "broken"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    logs = [RunFolder(tmp_path / n / "training").log.read() for n in ("whole", "broken")]
    assert [line | {"seconds": 0} for line in logs[0]] == [
        line | {"seconds": 0} for line in logs[1]
    ]


def test_drafts_of_other_targets_are_refused(tmp_path: Path) -> None:
    draft = glide("llama")
    save_draft(tmp_path / "draft", draft.config, dict(draft.state_dict()), {})
    known = json.loads((tmp_path / "draft" / "config.json").read_text())
    facts = known | {"target_type": "llama"}  # written by earlier versions
    (tmp_path / "draft" / "config.json").write_text(json.dumps(facts))
    again = load_draft(tmp_path / "draft")
    for mine, theirs in zip(draft.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    old = {k: v for k, v in known.items() if k != "block"}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(old))
    with pytest.raises(GulliverError, match="lacks block: train the draft again"):
        load_draft(tmp_path / "draft")
    runner = LocalRunner(tiny("gpt2"), cache_tokens=64)
    wrong = GlideConfig(**{**draft.config.__dict__, "glimpses": (7,)})
    with pytest.raises(GulliverError, match="attends to layer 7, with heads of 16, and this model"):
        Engine(runner, drafter=Speculator(GlideDraft(Glide(wrong))))
    wrong = GlideConfig(**{**draft.config.__dict__, "vocabulary": 66})
    with pytest.raises(GulliverError, match="vocabulary of 66 tokens and the model one of 67"):
        Engine(runner, drafter=Speculator(GlideDraft(Glide(wrong))))
    runner.close()
    with pytest.raises(GulliverError, match="keys of a glm model"):
        target_frequencies(tiny("glm"))
    with pytest.raises(GulliverError, match="has no draft"):
        load_draft(tmp_path)
