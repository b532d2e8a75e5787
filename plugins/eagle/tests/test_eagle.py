"""The eagle plugin in whole engines, against heads that are written out plainly (`eagle_heads`).

Every draft step of every published form is compared, logit by logit, with a reference that computes
the whole sequence anew. Targets are tiny and random. Drafts are chains but where it says so; trees
are compared in `test_eagle_trees`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import eagle_heads
import pytest
import tiny_models
import torch
from eagle_heads import Head, reference_logits

from foresay import LLM, SamplingParams
from foresay.core.proposer import Draft, DraftInput
from foresay.core.worker import decoder_layer
from foresay.core.worker.drafter_kv import StepRows
from foresay.core.worker.drafting import draft
from foresay.core.worker.tree_drafting import TreeDrafter

# -- the forms -----------------------------------------------------------------------------------


def norm(size: int, seed: int) -> torch.Tensor:
    return 1 + torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 0.3


def bias(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 0.5


def eagle_of_its_authors() -> Head:
    return eagle_heads.eagle()


def eagle_without_bias() -> Head:
    head = eagle_heads.eagle().without("fc.bias", "embed_tokens.weight").configured(bias=False)
    weight = torch.randn(160, 48, generator=torch.Generator().manual_seed(1))
    return head.with_(lm_head__weight=weight)


def eagle_reduced() -> Head:
    return eagle_heads.reduced(eagle_heads.eagle(), 64)


def eagle_of_speculators() -> Head:
    head = eagle_heads.eagle().without("embed_tokens.weight")
    return head.as_speculators("eagle", fusion_bias=True, layernorms=False)


def eagle_with_biases_and_rope() -> Head:
    head = eagle_heads.eagle(num_key_value_heads=1, head_dim=16)
    head = head.with_(
        layers__0__self_attn__q_proj__bias=bias(64, 1),
        layers__0__self_attn__k_proj__bias=bias(16, 2),
        layers__0__self_attn__v_proj__bias=bias(16, 3),
        layers__0__self_attn__o_proj__bias=bias(48, 4),
        layers__0__mlp__gate_proj__bias=bias(64, 5),
        layers__0__mlp__up_proj__bias=bias(64, 6),
        layers__0__mlp__down_proj__bias=bias(48, 7),
    )
    head = head.configured(
        qkv_bias=True, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0}
    )
    return replace(head, rope_theta=500.0, rope_factor=2.0)


def eagle3_of_its_authors() -> Head:
    return eagle_heads.eagle3()


def eagle3_with_embeddings() -> Head:
    head = eagle_heads.eagle3(taps=(1, 2)).configured(
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=36,  # some give the target's
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2], "use_aux_hidden_state": True},
    )
    weight = torch.randn(160, 48, generator=torch.Generator().manual_seed(1))
    return head.with_(embed_tokens__weight=weight).without("t2d")


def eagle3_of_speculators() -> Head:
    head = eagle_heads.eagle3(taps=(0, 2, 1))
    head = head.as_speculators("eagle3", eagle_aux_hidden_state_layer_ids=[0, 2, 1])
    return replace(head, norm_before_residual=True)


def eagle3_norm_before_residual() -> Head:
    head = eagle_heads.eagle3().configured(norm_before_residual=True)
    return replace(head, norm_before_residual=True)


def eagle3_norm_before_fc() -> Head:
    head = eagle_heads.eagle3().as_speculators(
        "eagle3", norm_before_fc=True, norm_before_residual=False
    )
    return head.with_(input_norm__weight=norm(3 * 48, 1))


def eagle3_normed_streams_and_output() -> Head:
    head = eagle_heads.eagle3().configured(fc_norm=True, norm_output=True)
    head = head.with_(**{f"fc_norm__{i}__weight": norm(48, i) for i in range(3)})
    return replace(head, norm_output=True)


def eagle3_narrower_than_the_target() -> Head:
    head = eagle_heads.eagle3(hidden_size=32, target_size=48)
    weight = torch.randn(160, 32, generator=torch.Generator().manual_seed(1))
    return head.with_(embed_tokens__weight=weight, fc__bias=bias(32, 1), lm_head__bias=bias(64, 2))


def eagle3_of_the_whole_vocabulary() -> Head:
    return (
        eagle_heads.eagle3()
        .without("lm_head.weight", "d2t", "t2d")
        .configured(draft_vocab_size=160)
    )


@dataclass(frozen=True)
class Form:
    """A published form: how it is made, stored, and under which names."""

    make: Callable[[], Head]
    kind: str = "safetensors"
    names: tuple[tuple[str, str], ...] = ()


FORMS = {
    "eagle, pytorch_model.bin, bias": Form(eagle_of_its_authors, "bin"),
    "eagle, no bias, own lm_head": Form(eagle_without_bias),
    "eagle, reduced head": Form(eagle_reduced, "bin"),
    "eagle, speculators": Form(
        eagle_of_speculators, names=(("fc.", "fusion_fc."), ("layers.0.", "transformer."))
    ),
    "eagle, all biases, grouped heads, linear rope": Form(eagle_with_biases_and_rope),
    "eagle3, pytorch_model.bin": Form(eagle3_of_its_authors, "bin"),
    "eagle3, shards, own embeddings, layer ids": Form(eagle3_with_embeddings, "shards"),
    "eagle3, speculators": Form(eagle3_of_speculators, names=(("midlayer.", "layers.0."),)),
    "eagle3, norm_before_residual": Form(eagle3_norm_before_residual),
    "eagle3, speculators, norm_before_fc": Form(
        eagle3_norm_before_fc, names=(("midlayer.", "layers.0."),)
    ),
    "eagle3.1, fc_norm, norm_output, under model.": Form(
        eagle3_normed_streams_and_output,
        names=(("midlayer.", "model.midlayer."), ("fc", "model.fc"), ("norm.", "model.norm.")),
    ),
    "eagle3, narrower, biased": Form(eagle3_narrower_than_the_target),
    "eagle3, whole vocabulary, shared lm_head": Form(eagle3_of_the_whole_vocabulary),
}


# -- what was drafted, and from which logits -----------------------------------------------------


@dataclass
class Record:
    """For each history that was drafted for: the drafts and the logits each was chosen by."""

    drafts: dict[tuple[int, ...], list[tuple[list[int], list[torch.Tensor]]]] = field(
        default_factory=dict
    )

    def run(self, batch: DraftInput, head: Any, **settings: Any) -> Draft:
        found: list[torch.Tensor] = []

        class Spy:
            forward = staticmethod(head.forward)

            @staticmethod
            def logits(hidden: torch.Tensor, step: int) -> torch.Tensor:
                assert step == len(found)
                found.append(head.logits(hidden, step).clone())
                return head.logits(hidden, step)

        drafted = draft(batch, Spy(), **settings)
        rows: list[list[torch.Tensor]] = [[] for _ in batch.requests]
        for step, logits in enumerate(found):
            members = [i for i, request in enumerate(batch.requests) if request.k > step]
            for index, row in zip(members, logits, strict=True):
                rows[index].append(row)
        for request, ids, logits in zip(batch.requests, drafted.token_ids, rows, strict=True):
            if request.k:
                kept = self.drafts.setdefault(tuple(request.token_ids), [])
                kept.append((ids, logits))
        return drafted


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    found = Record()
    monkeypatch.setattr("foresay_eagle.proposer.draft", found.run)
    return found


@functools.cache
def llama() -> Any:
    return tiny_models.llama(eos_token_id=None)


PROMPTS = [[5, 6, 7, 8, 9, 30, 31, 2, 90], [3], [11, 150, 12, 150, 13] * 4]


def params(max_tokens: int = 8) -> list[SamplingParams]:
    temperatures = (0.0, 1.0, 0.0)
    ks = (None, 3, 2)
    return [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=max_tokens, num_speculative_tokens=k
        )
        for i, (temperature, k) in enumerate(zip(temperatures, ks, strict=True))
    ]


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    wanted: list[SamplingParams] | None = None,
    rounds: int = 1,
    tree: bool = False,
    **settings: Any,
) -> tuple[list[list[int]], Any]:
    """Generate; the texts, and the engine's statistics."""
    settings = {"proposer": "eagle", "strict": True, "block_size": 4, **settings}
    if settings["proposer"] == "eagle":
        settings["proposer_settings"] = {"tree": tree, **settings.get("proposer_settings", {})}
    texts = []
    with LLM(model=model, **settings, adaptive=False) as llm:
        for _ in range(rounds):
            outputs = llm.generate([list(p) for p in prompts], wanted or params())
            texts += [output.outputs[0].token_ids for output in outputs]
        return texts, llm.stats


@functools.cache
def plain_texts() -> list[list[int]]:
    """What plain decoding makes of the usual prompts with the usual model."""
    return generate(llama(), proposer=None)[0]


def check_against_reference(record: Record, head: Head, model: Any, every: int = 1) -> int:
    """Compare the recorded logits with the reference's; return how many draft steps were."""
    num_compared = 0
    for history, kept in list(record.drafts.items())[::every]:
        for ids, logits in kept:
            expected = reference_logits(head, model, history, ids)
            assert len(logits) == len(ids) > 0
            for step, (found, wanted) in enumerate(zip(logits, expected, strict=True)):
                error = float((found - wanted).abs().max() / wanted.abs().max())
                assert error < 1e-4, f"step {step} after {history}"
                num_compared += 1
    return num_compared


@pytest.mark.parametrize("name", FORMS)
def test_every_draft_step_equals_the_reference(name: str, tmp_path: Path, record: Record) -> None:
    form = FORMS[name]
    head = form.make()
    folder = head.renamed(*form.names).save(tmp_path / "head", form.kind)
    texts, _ = generate(
        llama(), drafter=str(folder), chunked_prefill_size=7, num_speculative_tokens=4
    )
    assert texts == plain_texts()
    assert check_against_reference(record, head, llama()) > 30
    # What was drafted is the likeliest, by the head's own map to the target's ids.
    offsets = head.tensors.get("d2t", torch.zeros(160, dtype=torch.int64))
    prompt = tuple(PROMPTS[0])
    for history, kept in record.drafts.items():
        if history[: len(prompt)] == prompt:  # the greedy request
            for ids, logits in kept:
                best = [int(row.argmax()) for row in logits]
                assert ids == [i + int(offsets[i]) for i in best]


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows were stored, each time that this alone was done with them."""
    found: list[int] = []
    store = StepRows.store

    def noted(self: StepRows, *arguments: Any) -> None:
        found.append(len(self.positions))
        store(self, *arguments)

    monkeypatch.setattr(StepRows, "store", noted)
    return found


LONG_PROMPTS = [[(7 * i + j) % 160 for i in range(length)] for j, length in enumerate((45, 2, 85))]


@pytest.mark.parametrize("name", FORMS)
def test_drafts_are_those_of_a_layer_that_all_rows_went_through(
    name: str, tmp_path: Path, record: Record, stored: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMS[name]
    head = form.make()
    folder = str(head.renamed(*form.names).save(tmp_path / "head", form.kind))
    drafts = []
    for few in (1, 1000):
        stored.clear()
        record.drafts.clear()
        monkeypatch.setattr(decoder_layer, "_FEW_OTHERS", few)
        generate(llama(), LONG_PROMPTS, params(3), drafter=folder, chunked_prefill_size=50)
        assert bool(stored) == (few == 1)
        drafts.append(dict(record.drafts))
    assert drafts[0].keys() == drafts[1].keys()
    for history, kept in drafts[0].items():
        for (ids, logits), (wanted_ids, wanted) in zip(kept, drafts[1][history], strict=True):
            assert ids == wanted_ids
            torch.testing.assert_close(torch.stack(logits), torch.stack(wanted))


@pytest.mark.parametrize("make", [eagle_of_its_authors, eagle3_of_its_authors], ids=["1", "3"])
def test_of_long_prompts_only_keys_and_values_are_stored_and_drafts_equal_the_reference(
    make: Callable[[], Head], tmp_path: Path, record: Record, stored: list[int]
) -> None:
    head = make()
    folder = str(head.save(tmp_path))
    texts, _ = generate(llama(), LONG_PROMPTS, drafter=folder, chunked_prefill_size=50)
    # 45, 2 and 50; then what is left of the last, beside a row or more of each of the others.
    assert (len(stored), stored[0]) == (2, 97)
    assert check_against_reference(record, head, llama(), every=2) > 15
    assert texts == generate(llama(), LONG_PROMPTS, proposer=None)[0]


def test_a_target_that_transformers_runs(tmp_path: Path, record: Record) -> None:
    model = tiny_models.gpt2(eos_token_id=None, tie_word_embeddings=False)
    head = eagle_heads.eagle3()
    texts, _ = generate(model, drafter=str(head.save(tmp_path)))
    assert texts == generate(model, proposer=None)[0]
    assert check_against_reference(record, head, model) > 30


@pytest.mark.parametrize("declared", [64, None], ids=["in config.json, too", "d2t alone"])
@pytest.mark.parametrize("make", [eagle_reduced, eagle3_of_its_authors], ids=["1", "3"])
@pytest.mark.parametrize("build", [tiny_models.llama, tiny_models.gpt2], ids=["llama", "gpt2"])
def test_rows_of_the_targets_lm_head_draft_as_if_they_were_written_into_the_folder(
    build: Callable[..., Any],
    make: Callable[[], Head],
    declared: int | None,
    tmp_path: Path,
    record: Record,
) -> None:
    model = build(eos_token_id=None)
    head = make().configured(draft_vocab_size=declared)
    ids = head.tensors["d2t"] + torch.arange(64)
    written = head.with_(lm_head__weight=build().get_output_embeddings().weight.detach()[ids])
    expected, expected_stats = generate(model, drafter=str(written.save(tmp_path / "written")))
    drafts = dict(record.drafts)
    record.drafts.clear()

    folder = head.without("lm_head.weight").save(tmp_path / "shared")
    found, stats = generate(model, drafter=str(folder))

    assert found == expected
    assert stats.num_accepted_tokens == expected_stats.num_accepted_tokens
    assert record.drafts.keys() == drafts.keys()
    assert len(drafts) > 10
    for history, kept in record.drafts.items():
        for (token_ids, logits), (wanted_ids, wanted) in zip(kept, drafts[history], strict=True):
            assert token_ids == wanted_ids
            assert torch.equal(torch.stack(logits), torch.stack(wanted))
    assert check_against_reference(record, written, build(), every=4) > 5


@pytest.mark.parametrize("make", [eagle_of_its_authors, eagle3_of_its_authors], ids=["1", "3"])
def test_in_bfloat16_drafts_are_nearly_those_of_float32(
    make: Callable[[], Head], tmp_path: Path, record: Record
) -> None:
    model = tiny_models.llama(eos_token_id=None).to(torch.bfloat16)
    head = make()
    generate(model, drafter=str(head.save(tmp_path)), strict=False)
    reference = tiny_models.llama(eos_token_id=None).to(torch.bfloat16).float()
    errors = []
    for history, kept in record.drafts.items():
        for ids, logits in kept:
            expected = reference_logits(head, reference, history, ids)
            errors += [
                float((found.float() - wanted).norm() / wanted.norm())
                for found, wanted in zip(logits, expected, strict=True)
            ]
    assert len(errors) > 30
    assert sum(errors) / len(errors) < 0.1


# -- a head that is often right ------------------------------------------------------------------


def agreeing(noise: float = 0.0, *, max_positions: int = 256) -> tuple[Any, Head]:
    """A target that is nearly a bigram model, and a head that knows its bigrams.

    The target's layers add little, so that the next token depends on the last one mostly; the head
    passes the last token's embedding on to the target's lm_head.
    """
    model = tiny_models.llama(eos_token_id=None)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.005
            layer.mlp.down_proj.weight *= 0.005
        model.model.norm.weight.fill_(1.0)
    head = eagle_heads.eagle(max_position_embeddings=max_positions)
    head = head.without("embed_tokens.weight", "fc.bias").configured(bias=False)
    random = torch.randn(48, 96, generator=torch.Generator().manual_seed(3)) * noise
    passing = torch.cat([torch.eye(48), torch.zeros(48, 48)], dim=1)
    layer = {name: t * 0.02 for name, t in head.tensors.items() if "o_proj" in name}
    layer["layers.0.mlp.down_proj.weight"] = head.tensors["layers.0.mlp.down_proj.weight"] * 0.02
    head = replace(head, tensors={**head.tensors, **layer, "fc.weight": passing + random})
    return model, head


def test_what_was_guessed_is_overwritten_by_the_targets_features(
    tmp_path: Path, record: Record
) -> None:
    """Drafts accepted in part, again and again: all logits are those of a fresh prefill."""
    model, head = agreeing(0.01)
    wanted = [p.model_copy(update={"temperature": 0.0, "max_tokens": 24}) for p in params()]
    texts, stats = generate(model, wanted=wanted, drafter=str(head.save(tmp_path)))
    assert texts == generate(model, wanted=wanted, proposer=None)[0]
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95
    assert check_against_reference(record, head, model) > 40


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
@pytest.mark.parametrize("sample", [True, False], ids=["drawn", "likeliest"])
@pytest.mark.parametrize("tree", [True, False], ids=["trees", "chains"])
def test_texts_are_plain_decodings(
    tree: bool, sample: bool, temperature: float, tmp_path: Path
) -> None:
    model, head = agreeing(0.01)
    wanted = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=24) for i in range(len(PROMPTS))
    ]
    texts, stats = generate(
        model,
        wanted=wanted,
        tree=tree,
        drafter=str(head.save(tmp_path)),
        proposer_settings={"sample": sample},
    )
    assert texts == generate(model, wanted=wanted, proposer=None)[0]
    assert stats.num_accepted_tokens > 0


def test_drawn_drafts_are_accepted_more_often_than_likeliest_ones(tmp_path: Path) -> None:
    """At temperature 1 with flat distributions: a head that draws agrees more often."""
    model, head = agreeing(0.0)
    with torch.no_grad():
        model.lm_head.weight *= 0.35
    folder = str(head.save(tmp_path))
    accepted = {}
    for sample in (True, False):
        _, stats = generate(
            model,
            prompts=[[i, i + 1] for i in range(8)],
            wanted=[SamplingParams(temperature=1.0, max_tokens=40)] * 8,
            drafter=folder,
            proposer_settings={"sample": sample},
            num_speculative_tokens=1,
        )
        accepted[sample] = stats.num_accepted_tokens / stats.num_draft_tokens
    assert accepted[True] > 1.3 * accepted[False]


def histories(record: Record) -> dict[tuple[tuple[int, ...], int], list[int]]:
    return {(history, len(ids)): ids for history, kept in record.drafts.items() for ids, _ in kept}


@pytest.mark.parametrize("length", [21, 540], ids=["short", "more than waits at most"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_chunks_of_a_prompt_change_no_draft(
    kind: str, length: int, tmp_path: Path, record: Record
) -> None:
    model, head = agreeing(0.01, max_positions=1024)
    if length > 256:
        model = tiny_models.llama(eos_token_id=None, max_position_embeddings=1024)
    if kind == "eagle3":
        head = eagle_heads.eagle3(max_position_embeddings=1024)
    folder = str(head.save(tmp_path))
    prompts = [[(7 * i + j) % 160 for i in range(length)] for j in range(2)]
    wanted = [SamplingParams(temperature=0.0, max_tokens=10)] * 2
    found = []
    for chunk in (None, max(7, length // 3)):
        record.drafts.clear()
        _, stats = generate(
            model,
            prompts,
            wanted,
            drafter=folder,
            chunked_prefill_size=chunk,
            max_model_len=600 if length > 256 else None,
        )
        found.append((histories(record), stats.num_accepted_tokens, stats.num_draft_tokens))
    assert found[0] == found[1]
    assert found[0][2] > 10


@pytest.mark.parametrize("length", [32, 35], ids=["multiple of the block size", "other length"])
@pytest.mark.parametrize("make", [eagle_of_its_authors, eagle3_of_its_authors], ids=["1", "3"])
def test_a_prefix_hit_is_used_and_changes_no_draft(
    make: Callable[[], Head], length: int, tmp_path: Path, record: Record
) -> None:
    head = make()
    prompt = [(11 * i) % 160 for i in range(length)]
    wanted = [SamplingParams(temperature=0.0, max_tokens=10)]
    texts, stats = generate(llama(), [prompt], wanted, rounds=2, drafter=str(head.save(tmp_path)))
    assert texts[0] == texts[1]
    assert stats.num_cached_tokens >= length - 8
    for kept in record.drafts.values():
        assert len(kept) == 2
        assert kept[0][0] == kept[1][0]
    assert check_against_reference(record, head, llama(), every=3) > 10


def test_a_request_beyond_the_heads_limit_is_skipped_and_others_are_not(tmp_path: Path) -> None:
    model = tiny_models.llama(eos_token_id=None, max_position_embeddings=64)
    head = eagle_heads.eagle3(max_position_embeddings=32)
    wanted = [SamplingParams(temperature=0.0, max_tokens=12)] * 2
    prompts = [list(range(40)), list(range(15))]
    plain, _ = generate(model, prompts, wanted, proposer=None)
    drafter = str(head.save(tmp_path))
    with LLM(model=model, proposer="eagle", drafter=drafter, strict=True, adaptive=False) as llm:
        long, short = llm.generate(prompts, wanted)
        assert [long.outputs[0].token_ids, short.outputs[0].token_ids] == plain
        assert long.stats.num_draft_tokens == 0
        assert short.stats.num_draft_tokens > 0
        # And up to the last position.
        [end] = llm.generate([prompts[1]], SamplingParams(temperature=0.0, max_tokens=64))
        assert len(end.outputs[0].token_ids) == 64 - 15


def test_a_smaller_vocabulary_of_the_head_drafts_only_ids_that_the_target_has(
    tmp_path: Path, record: Record
) -> None:
    prompts = [[155, 159, 3, 151], [1, 2]]
    wanted = [SamplingParams(temperature=1.0, seed=i, max_tokens=12) for i in range(2)]
    plain, _ = generate(llama(), prompts, wanted, proposer=None)
    for vocab in (150, 170):  # of the head; the target's is 160
        record.drafts.clear()
        head = eagle_heads.eagle(vocab_size=vocab)
        weight = torch.randn(vocab, 48, generator=torch.Generator().manual_seed(2))
        folder = head.with_(lm_head__weight=weight).save(tmp_path / str(vocab))
        for sample in (True, False):
            texts, _ = generate(
                llama(),
                prompts,
                wanted,
                drafter=str(folder),
                proposer_settings={"sample": sample},
            )
            assert texts == plain
        ids = [i for kept in record.drafts.values() for drafts, _ in kept for i in drafts]
        assert max(ids) < min(vocab, 160)


@pytest.mark.parametrize("tree", [True, False], ids=["trees", "chains"])
def test_a_head_with_weights_that_are_no_numbers_changes_no_text(
    tree: bool, tmp_path: Path
) -> None:
    head = eagle_heads.eagle()
    broken = head.with_(fc__bias=torch.full((48,), float("nan")))
    texts, stats = generate(llama(), tree=tree, drafter=str(broken.save(tmp_path)), strict=False)
    assert texts == plain_texts()
    assert stats.num_accepted_tokens == 0


def test_memory_is_given_back(tmp_path: Path) -> None:
    head = eagle_heads.eagle3()
    settings = {"proposer": "eagle", "drafter": str(head.save(tmp_path)), "num_blocks": 70}
    with LLM(model=llama(), strict=True, block_size=4, **settings, adaptive=False) as llm:
        for i in range(25):
            llm.generate([[i, 3, 4], [i, 5]], SamplingParams(temperature=0.0, max_tokens=4))
        scheduler = llm._engine._scheduler  # type: ignore[union-attr]
        scheduler.check_integrity()
        assert scheduler.blocks.num_free_blocks == 70
        [member] = llm._engine._runner.proposers.members  # type: ignore[union-attr]
        assert (member.queue._pending, member.num_stored) == ({}, {})


# -- trees ---------------------------------------------------------------------------------------


@dataclass
class Trees:
    """By history: each node that was gone on from, as its path, and its children's log probs."""

    grown: list[tuple[list[int], dict[tuple[int, ...], dict[int, float]]]] = field(
        default_factory=list
    )

    def check(self, head: Head, model: Any, every: int = 1) -> int:
        """Compare with the reference, along the last paths; return how many children were."""
        num_compared = 0
        for history, grown in self.grown[::every]:
            for path, children in [*grown.items()][-3:]:
                logits = reference_logits(head, model, history, [*path, 0])[-1]
                log_probs = logits.log_softmax(-1)
                offsets = head.tensors.get("d2t", torch.zeros(len(logits), dtype=torch.int64))
                draft_ids = {int(i + offset): i for i, offset in enumerate(offsets.tolist())}
                for token_id, log_prob in children.items():
                    wanted = float(log_probs[draft_ids[token_id]])
                    assert log_prob == pytest.approx(wanted, abs=2e-3), f"{path} after {history}"
                    num_compared += 1
        return num_compared


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> Trees:
    found = Trees()

    class Spy(TreeDrafter):
        def draft(self, batch: DraftInput, *arguments: Any, **settings: Any) -> Draft:
            drafted = super().draft(batch, *arguments, **settings)
            for request in batch.requests:
                if not request.k:
                    continue
                growth = self._last[request.req_id]
                tree = growth.tree
                paths: list[tuple[int, ...]] = []
                for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
                    paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
                children = {
                    paths[node] if node >= 0 else (): {
                        tree.token_ids[n]: growth.drafter_log_probs[n] for n in numbers
                    }
                    for node, numbers in growth.children.items()
                    if numbers
                }
                found.grown.append((list(request.token_ids), children))
            return drafted

    monkeypatch.setattr("foresay_eagle.proposer.TreeDrafter", Spy)
    return found


def greedy(max_tokens: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=0.0, max_tokens=max_tokens) for _ in PROMPTS]


@pytest.mark.parametrize("make", [eagle_of_its_authors, eagle3_of_its_authors], ids=["1", "3"])
def test_trees_behind_long_prompts_have_the_probabilities_of_their_paths(
    make: Callable[[], Head], tmp_path: Path, trees: Trees, stored: list[int]
) -> None:
    head = make()
    generate(
        llama(), LONG_PROMPTS, greedy(6), tree=True, drafter=str(head.save(tmp_path)),
        chunked_prefill_size=50, num_speculative_tokens=24,
    )  # fmt: skip
    assert (len(stored), stored[0]) == (2, 97)
    assert trees.check(head, llama(), every=3) > 15


@pytest.mark.parametrize("name", FORMS)
def test_every_node_of_a_tree_has_the_probability_of_its_path(
    name: str, tmp_path: Path, trees: Trees
) -> None:
    form = FORMS[name]
    head = form.make()
    folder = head.renamed(*form.names).save(tmp_path / "head", form.kind)
    generate(
        llama(), wanted=greedy(6), tree=True, drafter=str(folder), chunked_prefill_size=7,
        num_speculative_tokens=24,
    )  # fmt: skip
    assert trees.check(head, llama(), every=3) > 15
    assert any(len(path) >= 1 for _, grown in trees.grown for path in grown)


def test_what_branches_guessed_is_overwritten_by_the_targets_features(
    tmp_path: Path, trees: Trees
) -> None:
    """Paths accepted that are not the first ones: probabilities are those of a fresh prefill."""
    model, head = agreeing(0.03)
    texts, stats = generate(
        model, wanted=greedy(24), tree=True, drafter=str(head.save(tmp_path)),
        num_speculative_tokens=8,
    )  # fmt: skip
    assert texts == generate(model, wanted=greedy(24), proposer=None)[0]
    assert stats.num_accepted_tokens > 10
    assert trees.check(head, model, every=2) > 60


def test_trees_take_fewer_steps_than_chains(tmp_path: Path) -> None:
    model, head = agreeing(0.06)
    folder = str(head.save(tmp_path))
    prompts = [[i, i + 1] for i in range(6)]
    steps = []
    for tree, k in ((True, 16), (False, 5)):
        wanted = [SamplingParams(temperature=0.0, max_tokens=40)] * 6
        _, stats = generate(
            model, prompts, wanted, tree=tree, drafter=folder, num_speculative_tokens=k
        )
        steps.append(240 - stats.num_accepted_tokens)
    assert steps[0] < 0.9 * steps[1]


def test_no_path_is_longer_than_the_depth_that_was_set(tmp_path: Path, trees: Trees) -> None:
    model, head = agreeing(0.03)
    generate(
        model, wanted=greedy(8), tree=True, drafter=str(head.save(tmp_path)),
        proposer_settings={"max_depth": 2}, num_speculative_tokens=16,
    )  # fmt: skip
    assert {len(path) for _, grown in trees.grown for path in grown} == {0, 1}
