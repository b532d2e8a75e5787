"""The draft_model proposer with the target's vocabulary, against transformers and plain runs."""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import tiny_models
import torch
import transformers
from tiny_tokenizers import byte_level

from foresay import LLM, SamplingParams, hookimpl
from foresay.core.errors import ConfigError, ForesayError, ModelError, UnknownModelError
from foresay.core.plugins import PluginManager
from foresay.core.proposer import Draft, DraftInput, KVLayer, Needs
from foresay.core.registry import DrafterSpec, ModelAlias
from foresay.core.stats import RunStats
from foresay_draft_model import DraftModelConfig, foresay_register_proposers
from foresay_draft_model.proposer import DraftModelProposer

LONGEST = 96


class Note(NamedTuple):
    """One draft: what it follows, and how many tokens were wanted."""

    history: tuple[int, ...]
    k: int
    draft: list[int]


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Note]:
    """Every draft of the engines of this test."""
    found: list[Note] = []
    original = DraftModelProposer.propose

    def propose(self: DraftModelProposer, batch: DraftInput) -> Draft:
        drafts = original(self, batch)
        for request, ids in zip(batch.requests, drafts.token_ids, strict=True):
            if request.k:
                found.append(Note(tuple(request.token_ids), request.k, list(ids)))
        return drafts

    monkeypatch.setattr(DraftModelProposer, "propose", propose)
    return found


def tiny(family: str = "llama", **changes: Any) -> Any:
    return tiny_models.BUILDERS[family](eos_token_id=None, **changes)


def blurred(model: Any, amount: float = 0.03) -> Any:
    """A copy that is nearly the same model: it agrees with it more often than not."""
    found = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in found.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.std() * amount if parameter.ndim > 1 else 0.0)
    return found


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Write a model, and its tokenizer if it has one, to a folder of its own."""

    def save(model: Any, tokenizer: Any = None) -> str:
        folder = tmp_path_factory.mktemp("drafter")
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return str(folder)

    return save


def prompts(seed: int = 0, count: int = 4, vocab_size: int = tiny_models.VOCAB_SIZE) -> Any:
    """Prompts of many lengths; some begin alike."""
    rng = random.Random(seed)
    common = [rng.randrange(3, vocab_size) for _ in range(24)]
    return [
        common[: rng.choice((0, 8, 24))]
        + [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 20))]
        for _ in range(count)
    ]


def params(count: int, temperature: float = 0.0, **more: Any) -> list[SamplingParams]:
    settings = {"max_tokens": 24, **more}
    return [SamplingParams(temperature=temperature, seed=i, **settings) for i in range(count)]


def run(
    target: Any,
    drafter: str | dict[str, str],
    asked: Sequence[Sequence[int]],
    wanted: Sequence[SamplingParams],
    *,
    rounds: int = 1,
    tokenizer: Any = None,
    **settings: Any,
) -> RunStats:
    """Generate in strict mode; the ids must be those of plain decoding."""
    shared: dict[str, Any] = {"tokenizer": tokenizer, "max_model_len": LONGEST}
    with LLM(target, proposer=None, **shared) as plain:
        expected = [out.outputs[0].token_ids for out in plain.generate(asked, wanted)]
    own = {"proposer": "draft_model", "block_size": 4, "strict": True, **shared, **settings}
    with LLM(target, drafter=drafter, **own, adaptive=False) as llm:
        for _ in range(rounds):
            assert [out.outputs[0].token_ids for out in llm.generate(asked, wanted)] == expected
        assert not llm.stats.faults
        return llm.stats


def acceptance(stats: RunStats) -> float:
    assert stats.num_draft_tokens > 50
    return stats.num_accepted_tokens / stats.num_draft_tokens


def logits_after(model: Any, history: Sequence[int], draft: Sequence[int]) -> torch.Tensor:
    """transformers' logits for each draft token, over the whole text at once."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([[*history, *draft]])).logits[0]
    return logits[len(history) - 1 : -1]


# -- every step of a draft ------------------------------------------------------------------------


FAMILIES = ["llama", "qwen2_sliding", "gpt2", "gemma2", "deepseek_v3", "gpt_oss"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_draft_token_is_the_models_likeliest(
    family: str, saved: Callable[..., str], notes: list[Note]
) -> None:
    drafter = tiny(family)
    run(blurred(drafter), saved(drafter), prompts(), params(4), chunked_prefill_size=7)
    assert len(notes) > 15
    for note in notes[::2]:
        assert len(note.draft) == note.k
        logits = logits_after(drafter, note.history, note.draft)
        chosen = logits[range(note.k), note.draft]
        torch.testing.assert_close(chosen, logits.amax(dim=-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_seeded_draft_is_what_the_model_itself_would_say(
    family: str, saved: Callable[..., str], notes: list[Note]
) -> None:
    """The noise is that of seed and position: the drafter as a target draws the same tokens."""
    drafter = tiny(family)
    settings = {"top_k": 20, "num_speculative_tokens": 3, "max_tokens": 20}
    own = params(1, 1.0, **settings)
    run(blurred(drafter, 0.1), saved(drafter), prompts(count=1), own)
    with LLM(drafter, proposer=None, max_model_len=LONGEST) as llm:
        outputs = llm.generate(
            [list(note.history) for note in notes],
            [own[0].model_copy(update={"max_tokens": note.k}) for note in notes],
        )
    assert len(notes) > 5
    assert [note.draft for note in notes] == [out.outputs[0].token_ids for out in outputs]


def test_without_sampling_a_seeded_draft_is_the_likeliest(
    saved: Callable[..., str], notes: list[Note]
) -> None:
    drafter = tiny()
    run(
        tiny("gpt2"),
        saved(drafter),
        prompts(),
        params(4, 1.0),
        proposer_settings={"sample": False},
    )
    for note in notes[::5]:
        expected = logits_after(drafter, note.history, note.draft).argmax(dim=-1)
        assert note.draft == expected.tolist()


# -- how much is accepted -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "coupled"])
def test_a_drafter_equal_to_the_target_is_accepted(
    family: str, temperature: float, saved: Callable[..., str]
) -> None:
    target = tiny(family)
    wanted = params(4, temperature)
    assert acceptance(run(target, saved(target), prompts(), wanted)) >= 0.98


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_its_draws_are_accepted_by_every_rule(verification: str, saved: Callable[..., str]) -> None:
    target = tiny()
    settings = {"drafter": saved(target), "verification": verification, "strict": True}
    with LLM(target, proposer="draft_model", **settings, adaptive=False) as llm:
        llm.generate(prompts(), [SamplingParams(temperature=0.8, top_p=0.9, max_tokens=24)] * 4)
        assert acceptance(llm.stats) >= 0.98


def test_chunks_of_a_prompt_change_no_acceptance(saved: Callable[..., str]) -> None:
    target = tiny()
    drafter = saved(blurred(target))
    asked = prompts(count=6)
    found = {
        chunk: run(target, drafter, asked, params(6), chunked_prefill_size=chunk)
        for chunk in (None, 3, 16)
    }
    numbers = {(s.num_draft_tokens, s.num_accepted_tokens) for s in found.values()}
    assert len(numbers) == 1
    assert 0.2 < acceptance(found[None]) < 0.95


def test_a_prefix_hit_keeps_the_acceptance(saved: Callable[..., str]) -> None:
    target = tiny()
    drafter = saved(blurred(target))
    asked = [prompt * 2 for prompt in prompts(7, 24)]
    wanted = params(24, max_tokens=12)
    with LLM(
        target, proposer="draft_model", drafter=drafter, strict=True, block_size=4, adaptive=False
    ) as llm:
        llm.generate(asked, wanted)
        first = llm.stats
        llm.generate(asked, wanted)
        both = llm.stats
    assert both.num_cached_tokens - first.num_cached_tokens > sum(map(len, asked)) / 2
    again = both.num_accepted_tokens - first.num_accepted_tokens
    of = both.num_draft_tokens - first.num_draft_tokens
    assert again / of == pytest.approx(acceptance(first), abs=0.02)
    assert 0.2 < acceptance(first) < 0.95


def test_preemptions_keep_the_acceptance(saved: Callable[..., str]) -> None:
    target = tiny()
    stats = run(
        target, saved(target), prompts(3, 8), params(8), num_blocks=27, max_num_seqs=6, rounds=2
    )
    assert stats.num_preemptions > 0
    assert acceptance(stats) >= 0.98


def test_blocks_are_back_after_many_requests(saved: Callable[..., str]) -> None:
    target = tiny()
    settings = {"drafter": saved(target), "block_size": 4, "num_blocks": 60, "strict": True}
    with LLM(target, proposer="draft_model", **settings, adaptive=False) as llm:
        for seed in range(5):
            llm.generate(prompts(seed), params(4, max_tokens=6))
            scheduler = llm._engine._scheduler  # type: ignore[union-attr]
            scheduler.check_integrity()
            assert scheduler.blocks.num_free_blocks == 60


def test_the_drafter_of_a_chain_catches_up(saved: Callable[..., str]) -> None:
    target = tiny()
    asked = [[5, 6, 7, 8] * 6, [9, 10] * 9, *prompts(3)]
    drafter = {"draft_model": saved(target)}
    stats = run(target, drafter, asked, params(6), proposer="ngram,draft_model")
    own = stats.by_proposer["draft_model"]
    assert own.num_accepted_tokens == own.num_draft_tokens > 20


# -- vocabularies of other sizes ------------------------------------------------------------------


@functools.cache
def halves(vocab_size: int) -> Any:
    """A model whose weights of the first ids do not depend on how many there are."""
    model = tiny(vocab_size=160)
    with torch.no_grad():
        changed = tiny(vocab_size=vocab_size)
        state = model.state_dict()
        for name, parameter in changed.state_dict().items():
            parameter.copy_(state[name][: parameter.shape[0]])
    return changed


def test_a_smaller_vocabulary_is_the_beginning_of_the_targets(
    saved: Callable[..., str], notes: list[Note]
) -> None:
    drafter = halves(120)
    asked = prompts(vocab_size=160)
    stats = run(tiny(), saved(drafter), asked, params(4))
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    seen = [token for note in notes for token in note.history]
    assert max(seen) >= 120 > max(token for note in notes for token in note.draft)
    for note in notes[::3]:  # tokens that it does not have are shown to it as token 0
        history = [token if token < 120 else 0 for token in note.history]
        logits = logits_after(drafter, history, note.draft)
        assert note.draft == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("sample", [True, False])
def test_of_a_larger_vocabulary_only_the_targets_ids_are_drafted(
    sample: bool, saved: Callable[..., str], notes: list[Note]
) -> None:
    drafter = halves(160)
    target = halves(120)
    stats = run(
        target,
        saved(drafter),
        prompts(vocab_size=120),
        params(4),
        proposer_settings={"sample": sample},
    )
    assert acceptance(stats) >= 0.98
    for note in notes[::3]:
        logits = logits_after(drafter, note.history, note.draft)[:, :120]
        assert note.draft == logits.argmax(dim=-1).tolist()


def test_equal_tokenizers_share_the_beginning(
    saved: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One more token in the target, for control: the KV lies in the core's blocks all the same."""
    short, longer = byte_level(["the"]), byte_level(["the"], last="<|user|>")
    target = tiny(vocab_size=len(longer))
    drafter = saved(tiny(vocab_size=len(short)), short)
    run(target, drafter, [*prompts(vocab_size=260), [260, 5, 6]], params(5), tokenizer=longer)
    assert (
        "foresay's own decoder); its 260 tokens and the target's 261 are the same up to 260\n"
        in capsys.readouterr().err
    )


# -- limits and memory ----------------------------------------------------------------------------


def test_a_drafter_drafts_up_to_its_own_limit(saved: Callable[..., str], notes: list[Note]) -> None:
    drafter = saved(tiny("gpt2", max_position_embeddings=32))
    asked = [list(range(3, 43)), [5, 6, 7]]
    run(tiny(), drafter, asked, params(2, max_tokens=40))
    assert {note.history[:3] for note in notes} == {(5, 6, 7)}
    assert max(len(note.history) + len(note.draft) for note in notes) == 32


def test_a_drafter_runs_in_the_targets_dtype(saved: Callable[..., str]) -> None:
    target = tiny().to(torch.bfloat16)
    settings = {"drafter": saved(tiny()), "strict": True}
    with LLM(target, proposer="draft_model", **settings, adaptive=False) as llm:
        runner: Any = llm._engine._runner  # type: ignore[union-attr]
        [member] = runner.proposers.members
        assert member.proposer._proposer._loop_model.model.dtype == torch.bfloat16
        assert [layer.slots.dtype for layer in member.layers] == [torch.bfloat16] * 3
        llm.generate(prompts(), params(4))
        assert acceptance(llm.stats) > 0.8


def test_its_kv_layers_are_known_from_its_config_alone(tmp_path: Path) -> None:
    [spec] = foresay_register_proposers()
    tiny_models.llama().config.save_pretrained(tmp_path)
    config = DraftModelConfig(drafter=str(tmp_path))
    assert spec.needs(config, None) == Needs(
        kv_layers=(KVLayer(2, 12),) * 3, sampled=True, draft_slots=1, max_context=256
    )
    config = DraftModelConfig(drafter=str(tmp_path), sample=False)
    assert not spec.needs(config, None).sampled


def test_latent_attention_stores_what_the_loaded_model_says(saved: Callable[..., str]) -> None:
    """By its config a DeepSeek has four heads of 12; what it attends with is 16 and 8 wide."""
    drafter = saved(tiny("deepseek_v3"))
    with LLM(tiny(), proposer="draft_model", drafter=drafter, strict=True, adaptive=False) as llm:
        runner: Any = llm._engine._runner  # type: ignore[union-attr]
        [member] = runner.proposers.members
        assert member.needs.kv_layers == (KVLayer(4, 16, 8),) * 3


# -- which drafter ------------------------------------------------------------------------------


@pytest.fixture
def manager(saved: Callable[..., str]) -> PluginManager:
    """What is installed, an alias "small", and a drafter "trained" for the model "any"."""
    found = PluginManager.load()
    folder = Path(saved(tiny()))
    alias = ModelAlias("small", "a tiny model", lambda: folder)
    drafter = DrafterSpec("trained", "draft_model", "any", lambda: folder, 2.0)
    plugin = SimpleNamespace(
        foresay_register_models=hookimpl(lambda: [alias]),
        foresay_register_drafters=hookimpl(lambda: [drafter]),
    )
    found.register(plugin, "foresay-small")
    return found


@pytest.mark.parametrize("drafter", ["small", "trained", "draft_model=small"])
def test_a_drafter_may_be_an_alias_or_a_registered_name(
    drafter: str, manager: PluginManager
) -> None:
    settings = {"drafter": drafter, "plugins": manager, "strict": True}
    with LLM(tiny(), proposer="draft_model", **settings, adaptive=False) as llm:
        llm.generate(prompts(), params(4))
        assert acceptance(llm.stats) >= 0.98


def error_of(kind: type[ForesayError], **settings: Any) -> str:
    with pytest.raises(kind) as error:
        LLM(tiny(), proposer="draft_model", **settings, adaptive=False)
    assert type(error.value) is kind
    return str(error.value)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return


def test_a_drafter_must_be_named() -> None:
    assert error_of(ConfigError) == (
        "proposer 'draft_model': no drafter: draft_model drafts with a language model, smaller "
        "than the target, that --drafter M (or drafter=M) names as --model names the target"
    )


@pytest.mark.usefixtures("offline")
def test_a_drafter_that_is_nowhere_is_an_error(manager: PluginManager) -> None:
    error = error_of(UnknownModelError, drafter="smal", plugins=manager)
    assert error.startswith("drafter: no model 'smal': no such alias (installed: small, smollm2)")
    assert "did you mean 'small'?" in error


def test_what_is_no_language_model_is_refused_before_the_target_is_loaded(
    tmp_path: Path,
) -> None:
    target = tmp_path / "target"  # without weights
    tiny_models.llama().config.save_pretrained(target)
    for name, config, reason in (
        (
            "mamba",
            transformers.MambaConfig().to_dict(),
            "layers of type 'linear_attention' keep a recurrent state",
        ),
        (
            "head",
            {**tiny_models.llama().config.to_dict(), "eagle_config": {}},
            "is a drafter, not a target model: its config has 'eagle_config'",
        ),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError) as error:
            LLM(str(target), proposer="draft_model", drafter=str(tmp_path / name), adaptive=False)
        assert "proposer 'draft_model' drafts with a whole language model: " in str(error.value)
        assert reason in str(error.value)


def test_another_tokenizer_is_an_error_if_asked_for(saved: Callable[..., str]) -> None:
    tokenizer, other = byte_level([" ab"]), byte_level([" ac"])
    drafter = saved(tiny(vocab_size=len(other)), other)
    with pytest.raises(ModelError) as error:
        LLM(
            tiny(vocab_size=len(tokenizer)),
            tokenizer=tokenizer,
            proposer="draft_model",
            drafter=drafter,
            proposer_settings={"vocabulary": "same"},
            adaptive=False,
        )
    assert str(error.value) == (
        f"the draft model {drafter!r} has another tokenizer than the target: token 259 is 'Ġac' "
        "there, and 'Ġab' in the target; take one of the target's family, or leave the setting "
        "'vocabulary' at 'auto'"
    )


def test_without_tokenizers_the_vocabulary_is_taken_on_trust(
    saved: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = saved(tiny())
    LLM(tiny(), proposer="draft_model", drafter=drafter, adaptive=False).close()
    line = "; the target's vocabulary, which is taken on trust: the draft model has no tokenizer\n"
    assert (
        f"foresay: draft model {drafter} (llama, float32 on cpu, foresay's own decoder){line}"
        in (capsys.readouterr().err)
    )
