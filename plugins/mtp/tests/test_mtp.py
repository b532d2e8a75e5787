"""The mtp proposer in the engine: every draft step against a reference, and texts never changed.

Drafts are chains but where it says so.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from mtp_checkpoints import (
    Reference,
    Tensors,
    module_tensors,
    numbers,
    save_drafter,
    save_target,
)

from foresay import LLM, SamplingParams
from foresay.core.errors import ConfigError
from foresay.core.plugins import PluginManager
from foresay.core.proposer import Draft, DraftInput
from foresay.core.worker.drafter_kv import StepRows
from foresay.core.worker.drafting import TokenPicker
from foresay.core.worker.tree_drafting import TreeDrafter

LAYOUTS = ("deepseek", "mimo", "qwen3_next")
BUILDERS = {"qwen2": tiny_models.qwen2, "qwen3": tiny_models.qwen3}


@functools.cache
def target(kind: str) -> Any:
    return BUILDERS[kind](eos_token_id=None)


def prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 150) for _ in range(length)] for length in lengths]


@dataclass
class Steps:
    """What was picked, by history, token number and the tokens picked before."""

    logits: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = field(
        default_factory=dict
    )

    def check(self, reference: Reference, draft_ids: torch.Tensor | None = None) -> None:
        """Compare all of them with the reference; `draft_ids`: the columns of a reduced head."""
        for (history, drafted), found in self.logits.items():
            expected = reference.logits(history, drafted)
            if draft_ids is not None:
                expected = expected[draft_ids]
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)

    def num_of(self, number: int) -> int:
        return sum(len(drafted) == number for _, drafted in self.logits)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Everything that proposers pick in this test."""
    seen = Steps()
    pick = TokenPicker.pick

    def watched(
        self: TokenPicker, logits: torch.Tensor, step: int, requests: Sequence[int]
    ) -> torch.Tensor:
        for row, index in enumerate(requests):
            history = tuple(self.batch.requests[index].token_ids)
            drafted = tuple(self.token_ids[index])
            assert len(drafted) == step
            seen.logits[history, drafted] = logits[row].clone()
        return pick(self, logits, step, requests)

    monkeypatch.setattr(TokenPicker, "pick", watched)
    return seen


def params(count: int, *, max_tokens: int = 12) -> list[SamplingParams]:
    """Greedy and seeded ones by turns."""
    return [
        SamplingParams(temperature=float(i % 2), seed=i, max_tokens=max_tokens)
        for i in range(count)
    ]


def generate(
    model: Any,
    asked: list[list[int]],
    how: list[SamplingParams],
    tree: bool = False,
    **settings: Any,
) -> Any:
    """Run prompts in a strict engine; return texts and statistics."""
    settings = {"max_model_len": 100, "strict": True, "dtype": "float32", **settings}
    if settings.get("proposer") == "mtp" and not tree:
        settings["proposer_settings"] = {"tree": False}
    if settings.get("proposer") == "ngram,mtp":
        settings["proposer_settings"] = {"mtp": {"tree": False}}
    with LLM(model=model, **settings, adaptive=False) as llm:
        texts = [output.outputs[0].token_ids for output in llm.generate(asked, how)]
        return texts, llm.stats


@functools.cache
def plain_texts(kind: str, seed: int, lengths: tuple[int, ...], max_tokens: int) -> list[list[int]]:
    """What plain decoding makes of `prompts` with `params`."""
    asked = prompts(seed, lengths)
    texts, _ = generate(
        target(kind), asked, params(len(asked), max_tokens=max_tokens), proposer=None
    )
    return texts


def in_target(folder: Path, kind: str, layout: str, count: int) -> tuple[str, Tensors]:
    """A checkpoint with modules inside."""
    model = target(kind)
    tensors = module_tensors(layout, model.config, count)
    fields = {} if layout == "qwen3_next" else {"num_nextn_predict_layers": count}
    return str(save_target(model, folder, tensors, **fields)), tensors


# -- every draft step against the reference ------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_draft_step_is_the_references_and_texts_are_plain_decodings(
    tmp_path: Path, steps: Steps, layout: str, kind: str, count: int
) -> None:
    folder, tensors = in_target(tmp_path, kind, layout, count)
    asked, how = prompts(1, (5, 17)), params(2, max_tokens=9)

    found, stats = generate(
        folder, asked, how, proposer="mtp", chunked_prefill_size=7, num_speculative_tokens=4
    )

    assert found == plain_texts(kind, 1, (5, 17), 9)
    assert not stats.faults
    assert all(steps.num_of(number) >= 5 for number in range(4))
    steps.check(Reference(target(kind), layout, tensors, count))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_long_prompts_a_single_module_only_stores_keys_and_values(
    tmp_path: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch, layout: str, count: int
) -> None:
    """And drafts what the reference does: prompts of several lengths, one in chunks."""
    stored: list[int] = []
    store = StepRows.store

    def noted(self: StepRows, *arguments: Any) -> None:
        stored.append(len(self.positions))
        store(self, *arguments)

    monkeypatch.setattr(StepRows, "store", noted)
    folder, tensors = in_target(tmp_path, "qwen3", layout, count)
    lengths = (45, 2, 85)
    asked, how = prompts(5, lengths), params(3, max_tokens=6)

    generate(folder, asked, how, proposer="mtp", chunked_prefill_size=50)

    # 45, 2 and 50; then what is left of the last, beside a row or more of each of the others.
    assert (len(stored), stored[:1]) == ((2, [97]) if count == 1 else (0, []))
    assert all(steps.num_of(number) >= 3 for number in range(4))
    steps.check(Reference(target("qwen3"), layout, tensors, count))


@pytest.mark.parametrize("count", [1, 3])
def test_requests_that_want_few_tokens_or_none_are_in_step(
    tmp_path: Path, steps: Steps, count: int
) -> None:
    folder, tensors = in_target(tmp_path, "qwen3", "mimo", count)
    lengths = (6, 12, 3, 20, 8)
    how = [
        one.model_copy(update={"num_speculative_tokens": k})
        for one, k in zip(params(5, max_tokens=8), (1, 5, 0, 2, None), strict=True)
    ]

    found, _ = generate(folder, prompts(7, lengths), how, proposer="mtp", num_speculative_tokens=5)

    assert found == plain_texts("qwen3", 7, lengths, 8)
    assert steps.num_of(4)
    steps.check(Reference(target("qwen3"), "mimo", tensors, count))


def test_drafts_that_were_wrong_leave_no_trace_in_later_modules(
    tmp_path: Path, steps: Steps
) -> None:
    # Another proposer goes first, so that positions gather; k varies with what is left to write.
    folder, tensors = in_target(tmp_path, "qwen2", "deepseek", 3)
    asked, how = [[5, 6, 7, 8] * 5, *prompts(3, (11,))], params(2, max_tokens=16)

    found, _ = generate(folder, asked, how, proposer="ngram,mtp")

    plain, _ = generate(target("qwen2"), asked, how, proposer=None)
    assert found == plain
    assert steps.num_of(2)
    steps.check(Reference(target("qwen2"), "deepseek", tensors, 3))


def test_norms_of_a_qwen3_next_drafter_are_zero_centred(tmp_path: Path, steps: Steps) -> None:
    model = target("qwen3")
    tensors = module_tensors("qwen3_next", model.config)
    tensors = {n: t - 1.0 if "norm" in n else t for n, t in tensors.items()}
    drafter = save_drafter(tmp_path, tensors, model.config, model_type="qwen3_next")

    generate(model, prompts(2, (8, 5)), params(2), proposer="mtp", drafter=str(drafter))

    assert steps.num_of(1)
    steps.check(Reference(model, "qwen3_next", tensors, zero_centred=True))


# -- embeddings and heads ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reduced_head_drafts_its_own_ids_only(
    tmp_path: Path, steps: Steps, layout: str, count: int
) -> None:
    model = target("qwen3")
    tensors = module_tensors(layout, model.config, count)
    ids = torch.tensor(sorted(random.Random(1).sample(range(model.config.vocab_size), 60)))
    t2d = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    head = {
        "lm_head.weight": model.lm_head.weight[ids].clone(),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": t2d,
    }
    drafter = save_drafter(tmp_path, {**tensors, **head}, model.config)
    asked, how = prompts(4, (7, 13)), params(2, max_tokens=8)

    found, _ = generate(model, asked, how, proposer="mtp", drafter=str(drafter))

    assert found == plain_texts("qwen3", 4, (7, 13), 8)
    assert steps.num_of(2)
    assert {token_id for _, drafted in steps.logits for token_id in drafted} <= set(ids.tolist())
    steps.check(Reference(model, layout, tensors, count), ids)


@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_the_targets_lm_head_draft_as_if_they_were_written_into_the_folder(
    count: int, tmp_path: Path, steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    model = target("qwen3")
    tensors = module_tensors("deepseek", model.config, count)
    ids = torch.tensor(sorted(random.Random(2).sample(range(model.config.vocab_size), 50)))
    tensors["d2t"] = ids - torch.arange(50)
    written = tensors | {"lm_head.weight": model.lm_head.weight[ids].clone()}
    asked, how = prompts(4, (7, 13)), params(2, max_tokens=8)
    drafter = save_drafter(tmp_path / "written", written, model.config)
    expected, _ = generate(model, asked, how, proposer="mtp", drafter=str(drafter))
    logits = dict(steps.logits)
    steps.logits.clear()

    drafter = save_drafter(tmp_path / "shared", tensors, model.config)
    with caplog.at_level("INFO", logger="foresay"):
        found, _ = generate(model, asked, how, proposer="mtp", drafter=str(drafter))

    assert found == expected
    assert "shares the target's lm_head, over 50 of its 160 tokens" in caplog.text
    assert steps.num_of(2)
    assert steps.logits.keys() == logits.keys()
    assert all(torch.equal(row, logits[key]) for key, row in steps.logits.items())
    steps.check(Reference(model, "deepseek", tensors, count), ids)


def test_a_drafter_may_have_embeddings_and_a_whole_head(tmp_path: Path, steps: Steps) -> None:
    model = target("qwen2")
    tensors = module_tensors("mimo", model.config)
    generator = torch.Generator().manual_seed(5)
    own = {
        name: torch.randn(
            model.config.vocab_size + 8, model.config.hidden_size, generator=generator
        )
        for name in ("embed_tokens.weight", "lm_head.weight")
    }
    drafter = save_drafter(tmp_path, {**tensors, **own}, model.config)

    generate(model, prompts(1, (8, 5)), params(2), proposer="mtp", drafter=str(drafter))

    reference = Reference(model, "mimo", tensors)
    reference.embeddings = [own["embed_tokens.weight"]]
    reference.heads = [own["lm_head.weight"][: model.config.vocab_size]]
    assert steps.num_of(4)
    steps.check(reference)


@pytest.mark.parametrize("is_copy", [True, False], ids=["copies", "their own"])
def test_deepseek_modules_bring_embeddings_and_heads(
    tmp_path: Path, steps: Steps, is_copy: bool
) -> None:
    model = target("qwen3")
    tensors = module_tensors("deepseek", model.config, 2)
    generator = torch.Generator().manual_seed(5)
    embeddings, heads = [], []
    for number in numbers("deepseek", model.config, 2):
        for kept, name, shared in (
            (embeddings, "embed_tokens", model.model.embed_tokens.weight),
            (heads, "shared_head.head", model.lm_head.weight),
        ):
            own = shared.detach().clone()
            if not is_copy:
                own += torch.randn(own.shape, generator=generator)
            tensors[f"model.layers.{number}.{name}.weight"] = own
            kept.append(own)
    folder = save_target(model, tmp_path, tensors, num_nextn_predict_layers=2)

    generate(str(folder), prompts(1, (8, 5)), params(2), proposer="mtp")

    reference = Reference(model, "deepseek", tensors, 2)
    reference.embeddings, reference.heads = embeddings, heads
    assert steps.num_of(4)
    steps.check(reference)


# -- chunks, prefix hits, preemption -------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_prompts_in_chunks_are_drafted_for_alike(tmp_path: Path, count: int) -> None:
    folder, _ = in_target(tmp_path, "qwen3", "mimo", count)
    asked, how = prompts(9, (40, 23)), params(2, max_tokens=16)

    found = [
        generate(folder, asked, how, proposer="mtp", chunked_prefill_size=chunk)[1]
        for chunk in (None, 3)
    ]

    assert found[0].num_draft_tokens > 40
    assert len({(one.num_draft_tokens, one.num_accepted_tokens) for one in found}) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_a_prefix_hit_is_used_and_drafts_stay_the_same(
    tmp_path: Path, steps: Steps, count: int
) -> None:
    folder, tensors = in_target(tmp_path, "qwen3", "mimo", count)
    asked, how = prompts(9, (33, 20)), params(2, max_tokens=9)
    settings = {"max_model_len": 100, "strict": True, "block_size": 4, "proposer": "mtp"}
    settings["proposer_settings"] = {"tree": False}

    with LLM(model=folder, **settings, adaptive=False) as llm:
        for _ in range(2):
            llm.generate(asked, how)
        # Further on in the same texts, where what was guessed lay in the blocks once.
        longer = [llm.generate([prompt], [one])[0] for prompt, one in zip(asked, how, strict=True)]
        asked = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in longer]
        llm.generate(asked, how)
        cached = llm.stats.num_cached_tokens

    # Three modules need three tokens behind a block to know it by: 33 - 3 makes 28.
    assert cached >= 2 * ((32 if count == 1 else 28) + 16) + 36 + 20
    steps.check(Reference(target("qwen3"), "mimo", tensors, count))


@pytest.mark.parametrize("count", [1, 3])
def test_preempted_requests_go_on_where_they_were(tmp_path: Path, steps: Steps, count: int) -> None:
    folder, tensors = in_target(tmp_path, "qwen3", "qwen3_next", count)
    lengths = (20, 22, 18)
    asked, how = prompts(9, lengths), params(3, max_tokens=14)

    found, stats = generate(
        folder, asked, how, proposer="mtp", block_size=4, num_blocks=19, max_model_len=60
    )

    assert stats.num_preemptions > 0
    assert found == plain_texts("qwen3", 9, lengths, 14)
    steps.check(Reference(target("qwen3"), "qwen3_next", tensors, count))


# -- trees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [True, False], ids=["drawn", "likeliest"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nodes_of_trees_have_the_probabilities_of_their_paths_and_texts_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, sample: bool
) -> None:
    folder, tensors = in_target(tmp_path, "qwen3", layout, 1)
    lengths, how = (5, 17), params(2, max_tokens=9)
    grown: list[tuple[list[int], Any]] = []

    class Spy(TreeDrafter):
        def draft(self, batch: DraftInput, *arguments: Any, **settings: Any) -> Draft:
            found = super().draft(batch, *arguments, **settings)
            for request in batch.requests:
                if request.k:
                    grown.append((list(request.token_ids), self._last[request.req_id]))
            return found

    monkeypatch.setattr("foresay_mtp.proposer.TreeDrafter", Spy)
    found, stats = generate(
        folder, prompts(1, lengths), how, tree=True, proposer="mtp", chunked_prefill_size=7,
        num_speculative_tokens=12, proposer_settings={"sample": sample, "max_depth": 3},
    )  # fmt: skip

    assert found == plain_texts("qwen3", 1, lengths, 9)
    assert not stats.faults
    assert stats.num_draft_positions < stats.num_draft_tokens  # they branch
    reference = Reference(target("qwen3"), layout, tensors)
    num_compared = 0
    for history, growth in grown:
        if sample and history[: lengths[1]] == prompts(1, lengths)[1]:
            continue  # its log probs have noise in them
        tree, paths = growth.tree, []
        for number, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            above = paths[parent] if parent >= 0 else []
            paths.append([*above, token_id])
            if number % 3 == 0:
                wanted = reference.logits(history, above).log_softmax(-1)[token_id]
                assert growth.drafter_log_probs[number] == pytest.approx(float(wanted), abs=1e-2)
                num_compared += 1
    assert num_compared > 15


def test_several_modules_draft_chains_and_no_tree_is_to_be_had_of_them(tmp_path: Path) -> None:
    folder, _ = in_target(tmp_path, "qwen3", "mimo", 2)
    asked, how = prompts(1, (6,)), params(1)
    _, stats = generate(folder, asked, how, tree=True, proposer="mtp")
    assert stats.num_draft_positions == stats.num_draft_tokens > 0
    with pytest.raises(ConfigError, match="with a single MTP module, and there are 2"):
        generate(folder, asked, how, tree=True, proposer="mtp", proposer_settings={"tree": True})


# -- the automatic choice ------------------------------------------------------------------------


def test_auto_takes_the_modules_in_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = in_target(tmp_path, "qwen3", "mimo", 2)

    _, stats = generate(folder, prompts(1, (6,)), params(1), proposer="auto")

    assert set(stats.by_proposer) == {"mtp"}
    assert (
        "proposer: mtp (auto: its checkpoint holds 2 MTP modules of the MiMo layout)"
        in capsys.readouterr().err
    )


def test_auto_goes_on_without_modules_that_cannot_be_run(tmp_path: Path) -> None:
    model = target("qwen3")
    tensors = module_tensors("deepseek", model.config)
    tensors["model.layers.3.mlp.experts.0.gate_proj.weight"] = torch.zeros(4, 4)
    folder = save_target(model, tmp_path / "experts", tensors, num_nextn_predict_layers=1)
    without = save_target(model, tmp_path / "without", {}, num_nextn_predict_layers=1)
    manager = PluginManager.load()

    choices = [manager.automatic_proposer("m", path) for path in (folder, without, tmp_path)]

    assert [choice and choice.proposer for choice in choices] == ["ngram"] * 3
    assert choices[0] is not None
    assert "mtp cannot be used: the MTP modules in" in choices[0].reason
    assert "blocks with experts ('model.layers.3.mlp.experts.0" in choices[0].reason
    assert choices[1] is not None
    assert choices[1].reason == "no drafter is registered for 'm'"
