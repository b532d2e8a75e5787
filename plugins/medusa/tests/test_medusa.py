"""The medusa plugin in whole engines, against heads that are written out plainly (`medusa_heads`).

Every draft token of every published form is compared, logit by logit, with a reference that
computes the whole sequence anew. Targets are tiny and random.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import medusa_heads
import pytest
import tiny_models
import torch
from medusa_heads import (
    FORMS,
    Form,
    as_authors,
    as_reduced,
    lm_head_of_the_target,
    of_authors,
    random_heads,
    reduced_and_shared,
    several_blocks,
    view,
)

from foresay import LLM, SamplingParams
from foresay.core.errors import ConfigError, ModelError
from foresay.core.proposer import DraftInput, DraftRequest
from foresay.core.worker.drafting import TokenPicker
from foresay_medusa import MedusaConfig
from foresay_medusa.heads import MedusaHeads
from foresay_medusa.proposer import MedusaProposer

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.llama(eos_token_id=None)


@pytest.fixture(scope="module")
def reference_model() -> Any:
    """The same weights: an engine may leave traces in the model it is given."""
    return tiny_models.llama(eos_token_id=None)


# -- what is drafted -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Pick:
    """One draft token, and what it was chosen by."""

    history: tuple[int, ...]
    step: int
    logits: torch.Tensor  # [draft_vocab]
    ids: torch.Tensor | None  # the target ids of these
    token_id: int


@pytest.fixture
def picks(monkeypatch: pytest.MonkeyPatch) -> list[Pick]:
    """Every draft token of the engines of this test."""
    found: list[Pick] = []

    class Watched(TokenPicker):
        def pick(self, logits: torch.Tensor, step: int, requests: Sequence[int]) -> torch.Tensor:
            ids = super().pick(logits, step, requests)
            for request, row, token_id in zip(requests, logits, ids.tolist(), strict=True):
                history = tuple(self.batch.requests[request].token_ids)
                found.append(Pick(history, step, row.clone(), self.draft_to_target, token_id))
            return ids

    monkeypatch.setattr("foresay_medusa.proposer.TokenPicker", Watched)
    return found


def prompts(count: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return [
        torch.randint(3, 150, (length,), generator=generator).tolist()
        for length in (1, 4, 9, 17, 30, 6, 12)[:count]
    ]


def ids_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


_plain: dict[str, list[list[int]]] = {}


def plain(model: Any, asked: Sequence[Any], params: Any) -> list[list[int]]:
    """What plain decoding makes of prompts; every test has the same model."""
    key = repr((asked, params))
    if key not in _plain:
        with LLM(model=model, proposer=None) as llm:
            _plain[key] = ids_of(llm.generate(asked, params))
    return _plain[key]


def medusa(model: Any, folder: Path, **settings: Any) -> LLM:
    """An engine that drafts chains."""
    own = {"tree": False, **settings.pop("proposer_settings", {})}
    return LLM(
        model=model,
        proposer="medusa",
        drafter=str(folder),
        proposer_settings=own,
        strict=True,
        **settings,
        adaptive=False,
    )


@pytest.mark.parametrize("make", FORMS)
def test_every_draft_token_is_the_references(
    make: Callable[[], Form], model: Any, reference_model: Any, picks: list[Pick], tmp_path: Path
) -> None:
    form = make()
    num_heads = len(form.heads.blocks)
    folder = form.files.save(tmp_path, form.name)
    # The first three may use all heads; the fourth one; the last none, and keeps its features.
    asked, limits = prompts(), [None, None, None, 1, 0]
    params = [GREEDY.model_copy(update={"num_speculative_tokens": limit}) for limit in limits]

    with medusa(model, folder, num_speculative_tokens=num_heads) as llm:
        assert ids_of(llm.generate(asked, params)) == plain(model, asked, params)

    wanted = {}
    for pick in picks:
        if pick.history not in wanted:
            wanted[pick.history] = medusa_heads.reference_logits(
                form.heads, reference_model, pick.history
            )
        expected = wanted[pick.history][pick.step]
        found = torch.full_like(expected, -torch.inf)
        if pick.ids is None:
            found[: len(pick.logits)] = pick.logits
        else:
            found[pick.ids] = pick.logits
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        assert pick.token_id == int(found.argmax())
    assert {pick.step for pick in picks} == set(range(num_heads))
    assert len(picks) > 20
    begins = {tuple(prompt): limit for prompt, limit in zip(asked, limits, strict=True)}
    for prompt, limit in begins.items():
        steps = {p.step for p in picks if p.history[: len(prompt)] == prompt}
        if limit is not None:
            assert steps == set(range(limit))


@pytest.mark.parametrize("build", [tiny_models.llama, tiny_models.gpt2], ids=["llama", "gpt2"])
def test_rows_of_the_targets_lm_head_draft_as_if_they_were_written_into_the_folder(
    build: Callable[..., Any], picks: list[Pick], tmp_path: Path
) -> None:
    target = build(eos_token_id=None)
    heads = random_heads(3, num_rows=40, shared=True)
    weight = build().get_output_embeddings().weight.detach()[heads.ids]
    written = as_reduced(heads).with_({"lm_head.weight": weight})
    seen = []
    for files in (written, written.without("lm_head.weight")):
        folder = files.save(tmp_path / str(len(seen)))
        with medusa(target, folder) as llm:
            texts = ids_of(llm.generate(prompts(), seeded(5)))
        seen.append((texts, [(p.history, p.step, p.token_id) for p in picks], list(picks)))
        picks.clear()
    assert seen[0][:2] == seen[1][:2]
    assert len(seen[0][2]) > 20
    for mine, shared in zip(seen[0][2], seen[1][2], strict=True):
        assert torch.equal(mine.logits, shared.logits)


def test_one_hidden_state_goes_through_one_head_as_it_is_published() -> None:
    # By hand: x = [1, 2], W = [[0, 1], [1, 0]], b = [-2, 0]: Wx + b = [0, 1].
    # SiLU(0) = 0, SiLU(1) = 0.731059; x becomes [1, 2.731059].
    # The matrix [[1, 0], [0, 1], [1, 1]] gives [1, 2.731059, 3.731059].
    from foresay_medusa.vocabulary import Matrix, Vocabulary
    from foresay_medusa.weights import MedusaWeights

    block = Matrix(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([-2.0, 0.0]))
    matrix = Matrix(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), None)
    heads = MedusaHeads(
        MedusaWeights([[block]], Vocabulary([matrix], None)), 1, view(hidden_size=2, vocab_size=3)
    )
    [logits] = heads.logits(torch.tensor([[1.0, 2.0]]), [None])
    torch.testing.assert_close(logits, torch.tensor([[1.0, 2.731059, 3.731059]]))


@pytest.mark.parametrize("make", [of_authors, several_blocks, reduced_and_shared])
def test_only_the_heads_that_are_wanted_run_on_the_rows_that_want_them(
    make: Callable[[], Form], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, int]] = []
    real = MedusaHeads.logits

    def watched(
        self: MedusaHeads, hidden: torch.Tensor, rows: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        found = real(self, hidden, rows)
        shapes.extend((len(hidden), len(logits)) for logits in found)
        return found

    monkeypatch.setattr(MedusaHeads, "logits", watched)
    form = make()
    folder = form.files.save(tmp_path, form.name)
    proposer = MedusaProposer(MedusaConfig(drafter=str(folder), sample=False, tree=False))
    proposer.load(view())
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(12, 48, generator=generator)
    # Rows 0-4 belong to the first request, none to the second (k = 0), 5-8, 9, and 10-11.
    starts, ks = [0, 5, 5, 9, 10, 12], [2, 0, 0, 1, 2]
    drafts = step(proposer, hidden, starts, ks)

    assert [len(ids) for ids in drafts] == ks
    assert shapes == [(3, 3), (3, 2)]
    for i, k in enumerate(ks):
        if k:
            alone = step(
                proposer, hidden[starts[i] : starts[i + 1]], [0, -starts[i] + starts[i + 1]], [k]
            )
            assert alone == [drafts[i]]
    shapes.clear()
    assert step(proposer, hidden, starts, [0] * 5) == [[]] * 5
    assert shapes == []


def step(
    proposer: MedusaProposer, hidden: torch.Tensor, starts: list[int], ks: Sequence[int]
) -> list[list[int]]:
    requests = [DraftRequest(f"r{i}", range(40), num_new_tokens=1, k=k) for i, k in enumerate(ks)]
    draft = proposer.propose(DraftInput(requests, hidden_states=hidden, row_starts=starts))
    return draft.token_ids


def test_low_precision_heads_are_the_high_precision_ones_but_for_rounding(
    reference_model: Any, tmp_path: Path
) -> None:
    heads = random_heads(2, 2, num_rows=40, shared=True, dtype=torch.bfloat16)
    folder = as_reduced(heads).save(tmp_path, "model.safetensors")
    hidden = torch.randn(5, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        proposer = MedusaProposer(MedusaConfig(drafter=str(folder)))
        proposer.load(view(dtype=dtype))
        assert proposer._heads is not None
        logits = proposer._heads.logits(hidden.to(dtype), [None, None])
        assert all(part.dtype == dtype for part in logits)
        found[dtype] = torch.cat(list(logits)).float()
    low, high = found[torch.bfloat16], found[torch.float32]
    assert (low - high).abs().max() < 0.02 * high.abs().max()


# -- heads that know the text --------------------------------------------------------------------


@pytest.fixture(scope="module")
def known(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Heads fitted to what the model says after some prompts, and these prompts."""
    asked = prompts(7)
    texts = plain(model, asked, SamplingParams(temperature=0.0, max_tokens=40))
    target = tiny_models.llama(eos_token_id=None)
    heads = medusa_heads.fitted_heads(target, list(zip(asked, texts, strict=True)), 4)
    return as_authors(heads).save(tmp_path_factory.mktemp("fitted")), asked


LONG = SamplingParams(temperature=0.0, max_tokens=40)


def test_heads_that_know_the_text_are_accepted(
    model: Any, known: tuple[Path, list[list[int]]]
) -> None:
    folder, asked = known
    with medusa(model, folder) as llm:
        assert ids_of(llm.generate(asked, LONG)) == plain(model, asked, LONG)
        stats = llm.stats
    # Were a head's offset wrong by one, its tokens would fit by chance only.
    assert stats.acceptance_rate is not None
    assert stats.acceptance_rate > 0.6, stats
    assert len(stats.acceptance_per_position) == 4
    assert all(rate is not None and rate > 0.4 for rate in stats.acceptance_per_position)


def accepted(model: Any, known: tuple[Path, list[list[int]]], rounds: int, **settings: Any) -> Any:
    folder, asked = known
    with medusa(model, folder, **settings) as llm:
        found = [ids_of(llm.generate(asked, LONG)) for _ in range(rounds)]
        assert all(ids == plain(model, asked, LONG) for ids in found)
        stats = llm.stats
    return stats.num_draft_tokens / rounds, stats.num_accepted_tokens / rounds, stats


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunks_of_a_prompt_change_no_draft(
    model: Any, known: tuple[Path, list[list[int]]], chunk: int
) -> None:
    whole = accepted(model, known, 1)
    chunked = accepted(model, known, 1, chunked_prefill_size=chunk)
    assert whole[:2] == chunked[:2]


def test_a_prefix_hit_is_used_to_its_last_block_and_changes_no_draft(
    model: Any, known: tuple[Path, list[list[int]]]
) -> None:
    _, asked = known
    once = accepted(model, known, 1, block_size=4)
    twice = accepted(model, known, 2, block_size=4)
    assert once[:2] == twice[:2]
    hit = sum((len(prompt) - 1) // 4 * 4 for prompt in asked)
    assert twice[2].num_cached_tokens - once[2].num_cached_tokens >= hit


def test_a_small_pool_changes_no_text(model: Any, known: tuple[Path, list[list[int]]]) -> None:
    stats = accepted(model, known, 1, block_size=4, num_blocks=30, max_model_len=100)[2]
    assert stats.num_preemptions > 0


def test_in_a_chain_it_drafts_where_the_first_has_nothing(
    model: Any, known: tuple[Path, list[list[int]]]
) -> None:
    folder, asked = known
    asked = [[5, 6, 7, 8] * 6, *asked]
    with LLM(
        model=model,
        proposer="ngram,medusa",
        drafter={"medusa": str(folder)},
        proposer_settings={"ngram": {"tree": False}, "medusa": {"tree": False}},
        strict=True,
        adaptive=False,
    ) as llm:
        assert ids_of(llm.generate(asked, LONG)) == plain(model, asked, LONG)
        assert set(llm.stats.by_proposer) == {"ngram", "medusa"}


# -- sampling ------------------------------------------------------------------------------------


def seeded(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=(1.0, 0.7, 1.3)[i % 3], top_k=(0, 20)[i % 2], seed=i, max_tokens=12
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("sample", [False, True], ids=["argmax", "sampled"])
@pytest.mark.parametrize("make", [of_authors, reduced_and_shared, lm_head_of_the_target])
def test_a_seed_gives_the_text_of_plain_decoding(
    make: Callable[[], Form], sample: bool, model: Any, tmp_path: Path
) -> None:
    form = make()
    folder = form.files.save(tmp_path, form.name)
    asked, params = prompts(), seeded(5)
    with medusa(model, folder, proposer_settings={"sample": sample}) as llm:
        assert ids_of(llm.generate(asked, params)) == plain(model, asked, params)
        assert llm.stats.num_draft_tokens > 0


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_what_is_drawn_is_the_draft_under_every_rule(
    verification: str, model: Any, picks: list[Pick], tmp_path: Path
) -> None:
    form = reduced_and_shared()
    folder = form.files.save(tmp_path, form.name)
    params = SamplingParams(temperature=1.0, max_tokens=12)
    settings = {"proposer_settings": {"sample": True}, "verification": verification}
    with medusa(model, folder, **settings) as llm:
        outputs = llm.generate(prompts(), params)
        assert all(len(ids) == 12 for ids in ids_of(outputs))
        assert not llm.stats.faults
    assert any(pick.token_id != likeliest(pick) for pick in picks)
    assert {pick.token_id for pick in picks} <= set(form.heads.ids.tolist())  # type: ignore[union-attr]


def test_without_sampling_the_likeliest_are_drafted(
    model: Any, picks: list[Pick], tmp_path: Path
) -> None:
    form = reduced_and_shared()
    folder = form.files.save(tmp_path, form.name)
    with medusa(model, folder, proposer_settings={"sample": False}) as llm:
        llm.generate(prompts(), SamplingParams(temperature=1.0, max_tokens=12))
    assert picks
    assert all(pick.token_id == likeliest(pick) for pick in picks)


def likeliest(pick: Pick) -> int:
    best = int(pick.logits.argmax())
    return best if pick.ids is None else int(pick.ids[best])


# -- how many ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_heads", "asked", "steps"), [(2, None, 2), (6, None, 5), (6, 6, 6), (4, 1, 1)]
)
def test_k_is_the_number_of_heads_at_most_five_unless_it_is_set(
    num_heads: int, asked: int | None, steps: int, model: Any, picks: list[Pick], tmp_path: Path
) -> None:
    folder = as_authors(random_heads(num_heads)).save(tmp_path)
    with medusa(model, folder, num_speculative_tokens=asked) as llm:
        llm.generate(prompts(1), GREEDY)
    assert {pick.step for pick in picks} == set(range(steps))


def test_more_drafts_than_heads_are_refused(model: Any, tmp_path: Path) -> None:
    folder = as_authors(random_heads(3)).save(tmp_path)
    with pytest.raises(ConfigError, match=r"'medusa' drafts at most 3 tokens a step"):
        medusa(model, folder, num_speculative_tokens=4)


def test_a_folder_with_more_heads_than_it_says_runs_those_it_says_or_those_asked_for(
    model: Any, picks: list[Pick], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # medusa-vicuna-7b-v1.3 says 2 and holds 5.
    folder = as_authors(random_heads(5)).configured(medusa_num_heads=2).save(tmp_path)
    for settings, num_steps in (({}, 2), ({"num_heads": 4}, 4), ({"num_heads": 5}, 5)):
        picks.clear()
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING),
            medusa(model, folder, proposer_settings=settings) as llm,
        ):
            llm.generate(prompts(1), GREEDY)
        assert {pick.step for pick in picks} == set(range(num_steps))
        assert ("num_heads=5" in caplog.text) == (num_steps < 5)
    with pytest.raises(ModelError, match=r"no tensor '5\.0\.linear\.weight'"):
        medusa(model, folder, proposer_settings={"num_heads": 6})
