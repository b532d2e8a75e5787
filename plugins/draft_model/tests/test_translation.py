"""A draft model with another tokenizer: what it reads, what it drafts, and what it keeps."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from tiny_tokenizers import byte_level, with_byte_fallback
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from foresay import LLM, SamplingParams
from foresay.core.errors import ModelError
from foresay.core.proposer import Draft, DraftInput, Needs
from foresay.core.stats import RunStats
from foresay_draft_model.drafter import LoopModel
from foresay_draft_model.proposer import DraftModelProposer

WORDS = [" the", " then", "and", "ing"]
LONGEST = 96
TARGET = byte_level(WORDS)
SAME_TOKENS = byte_level(WORDS, shuffled=5)  # under other ids
FEWER_TOKENS = byte_level([" the", "ng"], shuffled=6)  # so that " then", "and", "ing" are spelt out
OF_CHARACTERS = with_byte_fallback([" the", "an"])


def names(tokenizer: Any) -> list[str]:
    found: list[str] = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return found


@functools.cache
def target() -> Any:
    """A model that knows `TARGET`'s tokens; its logits are sharp enough to be imitated."""
    return tiny_models.llama(vocab_size=len(TARGET), eos_token_id=None)


def renumbered(tokenizer: Any) -> Any:
    """The same model for a tokenizer of the same tokens under other ids."""
    model = tiny_models.llama(vocab_size=len(tokenizer), eos_token_id=None)
    order = [TARGET.convert_tokens_to_ids(name) for name in names(tokenizer)]
    with torch.no_grad():
        model.load_state_dict(target().state_dict())
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight.copy_(weight[order].clone())
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any, Any], str]:
    @functools.cache
    def save(tokenizer: Any, kind: str) -> str:
        path = tmp_path_factory.mktemp("drafter")
        if kind == "equal":
            model = renumbered(tokenizer)
        else:
            model = tiny_models.BUILDERS[kind](vocab_size=len(tokenizer), eos_token_id=None)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        return str(path)

    return save


def prompts(seed: int = 0, count: int = 4) -> list[list[int]]:
    """Prompts of letters and words, also such that a drafter does not have."""
    rng = random.Random(seed)
    plain = [TARGET.convert_tokens_to_ids(name) for name in "abcdefghij"]
    long = [TARGET.convert_tokens_to_ids(n) for n in ("Ġthe", "Ġthen", "and", "ing", "Ġt")]
    return [
        [rng.choice(plain if rng.random() < 0.6 else long) for _ in range(rng.randint(3, 30))]
        for _ in range(count)
    ]


def params(count: int, temperature: float = 0.0, **more: Any) -> list[SamplingParams]:
    settings = {"max_tokens": 20, **more}
    return [SamplingParams(temperature=temperature, seed=i, **settings) for i in range(count)]


def run(
    drafter: str,
    asked: Sequence[Sequence[int]],
    wanted: Sequence[SamplingParams],
    *,
    rounds: int = 1,
    **settings: Any,
) -> RunStats:
    """Generate in strict mode; the ids must be those of plain decoding."""
    shared: dict[str, Any] = {"tokenizer": TARGET, "max_model_len": LONGEST}
    with LLM(target(), proposer=None, **shared) as plain:
        expected = [out.outputs[0].token_ids for out in plain.generate(asked, wanted)]
    own = {"drafter": drafter, "block_size": 4, "strict": True, **shared, **settings}
    with LLM(target(), proposer="draft_model", **own, adaptive=False) as llm:
        for _ in range(rounds):
            assert [out.outputs[0].token_ids for out in llm.generate(asked, wanted)] == expected
        assert not llm.stats.faults
        return llm.stats


def acceptance(stats: RunStats) -> float:
    assert stats.num_draft_tokens > 50
    return stats.num_accepted_tokens / stats.num_draft_tokens


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Every draft of the engines of this test, after its history."""
    found: list[tuple[list[int], list[int]]] = []
    original = DraftModelProposer.propose

    def propose(self: DraftModelProposer, batch: DraftInput) -> Draft:
        drafts = original(self, batch)
        pairs = zip(batch.requests, drafts.token_ids, strict=True)
        found.extend((list(request.token_ids), ids) for request, ids in pairs if ids)
        return drafts

    monkeypatch.setattr(DraftModelProposer, "propose", propose)
    return found


# -- what it drafts -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "coupled"])
def test_the_same_model_under_other_ids_is_accepted(
    temperature: float, folder: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    stats = run(folder(SAME_TOKENS, "equal"), prompts(), params(4, temperature))
    assert acceptance(stats) >= 0.98
    first, other = names(SAME_TOKENS)[0], names(TARGET)[0]
    assert (
        f"another tokenizer (token 0 is {first!r} there, and {other!r} in the target): 266 of its "
        "266 tokens (100%) are tokens of the target, 100% of the target's 266\n"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_its_draws_are_accepted_by_every_rule(rule: str, folder: Callable[..., str]) -> None:
    settings: dict[str, Any] = {"drafter": folder(SAME_TOKENS, "equal"), "verification": rule}
    with LLM(
        target(), proposer="draft_model", tokenizer=TARGET, strict=True, **settings, adaptive=False
    ) as llm:
        llm.generate(prompts(), [SamplingParams(temperature=0.8, top_p=0.9, max_tokens=24)] * 4)
        assert acceptance(llm.stats) >= 0.98


def spelt(name: str, own: Sequence[str]) -> list[str]:
    """A token of the target in the drafter's: itself, else the longest ones from the left."""
    if name in own:
        return [name]
    longest = next(n for n in range(len(name), 0, -1) if name[:n] in own)
    return [name[:longest], *(spelt(name[longest:], own) if name[longest:] else [])]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("sample", [True, False])
def test_every_draft_token_is_the_models_likeliest_that_the_target_has(
    kind: str, sample: bool, folder: Callable[..., str], notes: list[tuple[list[int], list[int]]]
) -> None:
    drafter = folder(FEWER_TOKENS, kind)
    run(drafter, prompts(), params(4), proposer_settings={"sample": sample})
    model = tiny_models.BUILDERS[kind](vocab_size=len(FEWER_TOKENS), eos_token_id=None)
    own, theirs = names(FEWER_TOKENS), names(TARGET)
    shared = [own.index(name) for name in own if name in theirs]
    num_longer = 0
    assert len(notes) > 20
    for history, draft in notes[::3]:
        text = [piece for token in history for piece in spelt(theirs[token], own)]
        num_longer += len(text) > len(history)
        ids = [own.index(name) for name in text]
        for token in draft:
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, -1]
            best = shared[int(logits[shared].argmax())]
            assert theirs[token] == own[best]
            ids.append(best)
    assert num_longer > 5


@pytest.mark.parametrize("tokenizer", [FEWER_TOKENS, OF_CHARACTERS], ids=["bytes", "characters"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "coupled"])
def test_texts_are_those_of_plain_decoding_with_any_tokenizer(
    tokenizer: Any, temperature: float, folder: Callable[..., str]
) -> None:
    stats = run(
        folder(tokenizer, "llama"),
        prompts(1, 6),
        params(6, temperature),
        chunked_prefill_size=5,
        rounds=2,
    )
    assert stats.num_draft_tokens > 100


def test_preemptions_keep_the_acceptance(folder: Callable[..., str]) -> None:
    drafter = folder(SAME_TOKENS, "equal")
    stats = run(drafter, prompts(3, 8), params(8), num_blocks=27, max_num_seqs=6)
    assert stats.num_preemptions > 0
    assert acceptance(stats) >= 0.98


def test_without_a_token_in_common_it_is_refused(tmp_path: Path) -> None:
    other = byte_level()
    words = Tokenizer(models.WordLevel({"日本": 0, "中国": 1, "<pad>": 2}))
    config = tiny_models.llama(vocab_size=3, bos_token_id=None, eos_token_id=None, pad_token_id=2)
    config.save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as error:
        LLM(
            tiny_models.llama(vocab_size=len(other)),
            proposer="draft_model",
            drafter=str(tmp_path),
            tokenizer=other,
            adaptive=False,
        )
    assert str(error.value).endswith(
        "token 0 is '日本' there, and '<s>' in the target; they have no token in common"
    )


# -- what it keeps --------------------------------------------------------------------------------


def pool(llm: LLM) -> tuple[int, int]:
    """Free blocks of the drafter's own KV, and how many texts it holds."""
    runner: Any = llm._engine._runner  # type: ignore[union-attr]
    [member] = runner.proposers.members
    assert member.needs == Needs(sampled=True)
    translator = member.proposer._proposer._translator
    return translator._kv.num_free_tokens // 16, len(translator._texts)


def test_nothing_is_kept_of_requests_that_ended(folder: Callable[..., str]) -> None:
    settings: dict[str, Any] = {"drafter": folder(FEWER_TOKENS, "llama"), "strict": True}
    with LLM(target(), proposer="draft_model", tokenizer=TARGET, **settings, adaptive=False) as llm:
        before = pool(llm)
        assert before == (32768 // 16, 0)
        for seed in range(4):
            llm.generate(prompts(seed), params(4, max_tokens=6))
            assert pool(llm) == before


def test_who_finds_no_room_is_not_drafted_for_and_others_are(
    folder: Callable[..., str], notes: list[tuple[list[int], list[int]]]
) -> None:
    asked = [[10] * 40, [11] * 5, [12] * 70]
    stats = run(
        folder(SAME_TOKENS, "equal"),
        asked,
        params(3, max_tokens=16),
        proposer_settings={"kv_tokens": 80},
    )
    drafted = [history[0] for history, _ in notes]
    assert set(drafted[:3]) == {10, 11}
    if 12 in drafted:  # there was room when the others had ended
        assert 10 not in drafted[drafted.index(12) :]
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_a_text_too_long_for_the_drafter_is_not_drafted_for(
    tmp_path: Path, notes: list[tuple[list[int], list[int]]]
) -> None:
    """Its limit counts its own tokens: the text is one token long for each letter."""
    own = byte_level(shuffled=2)
    tiny_models.gpt2(vocab_size=len(own), max_position_embeddings=24).save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    then = TARGET.convert_tokens_to_ids("Ġthen")
    run(str(tmp_path), [[then] * 4, [then] * 8], params(2, max_tokens=30))
    names_of = names(TARGET)
    lengths = [len("".join(names_of[t] for t in h)) + len(d) for h, d in notes if len(d) > 0]
    assert {len(history) for history, _ in notes}
    assert all(history[:4] == [then] * 4 and history[4] != then for history, _ in notes)
    assert 20 < max(lengths) <= 24


def test_each_token_of_a_text_is_computed_once_and_each_guess(
    folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows = 0
    original = LoopModel.forward

    def forward(self: LoopModel, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        nonlocal num_rows
        num_rows += len(ids)
        return original(self, ids, *rest)

    monkeypatch.setattr(LoopModel, "forward", forward)
    asked = prompts(5, 1)
    stats = run(folder(SAME_TOKENS, "equal"), asked, params(1, max_tokens=25))
    # Of k guesses the last is not computed. Of the text, nothing after the last draft.
    num_guesses = stats.num_draft_tokens - stats.num_verify_steps
    num_tokens = len(asked[0]) + 25
    assert num_tokens + num_guesses - 8 < num_rows <= num_tokens + num_guesses


def test_a_long_text_is_computed_in_pieces(
    folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foresay_draft_model.translation._MOST_ROWS", 8)
    asked = [prompt * 2 for prompt in prompts(4, 4)]
    assert acceptance(run(folder(SAME_TOKENS, "equal"), asked, params(4))) >= 0.98
