"""Features and KV layers of a proposer's own, through the whole engine, on random schedules."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny_models
import torch
from tracker import Tracker, expected_features

from foresay import LLM, SamplingParams


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.llama(eos_token_id=None)


def prompts(seed: int, count: int = 8) -> list[list[int]]:
    """Prompts of many lengths; most begin as others do."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 150) for _ in range(40)]
    found = []
    for _ in range(count):
        shared = common[: rng.choice((0, 3, 8, 16, 31, 40))]
        found.append(shared + [rng.randrange(3, 150) for _ in range(rng.randint(1, 24))])
    return found


def run(model: Any, asked: list[list[int]], *, rounds: int = 1, **settings: Any) -> Tracker:
    """Generate with a tracker in strict mode; the ids must be those of plain decoding."""
    rng = random.Random(1)
    params = [
        SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            seed=i,
            max_tokens=rng.randint(1, 12),
            num_speculative_tokens=rng.choice((None, None, None, 1, 0)),
        )
        for i in range(len(asked))
    ]
    with LLM(model=model, proposer=None, max_model_len=100) as plain:
        expected = [output.outputs[0].token_ids for output in plain.generate(asked, params)]
    Tracker.made.clear()
    settings = {"proposer": Tracker, "strict": True, "max_model_len": 100, **settings}
    with LLM(model=model, **settings, adaptive=False) as llm:
        for _ in range(rounds):
            found = llm.generate(asked, params)
            assert [output.outputs[0].token_ids for output in found] == expected
        stats = llm.stats
    [tracker] = Tracker.made
    assert tracker.next == {}, "a request that ended was not released"
    assert tracker.num_checked
    tracker.stats = stats  # type: ignore[attr-defined]
    return tracker


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 5])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [None, 7])
def test_each_position_is_handed_over_once_and_its_kv_is_kept(
    model: Any, num_speculative_tokens: int, block_size: int, chunk: int | None
) -> None:
    run(
        model,
        prompts(block_size),
        rounds=2,
        num_speculative_tokens=num_speculative_tokens,
        block_size=block_size,
        chunked_prefill_size=chunk,
    )


def test_a_shared_block_is_a_hit_only_before_the_token_it_was_stored_before(model: Any) -> None:
    common = list(range(3, 35))
    params = SamplingParams(temperature=0.0, max_tokens=2)
    with LLM(model=model, proposer=Tracker, strict=True, block_size=4, adaptive=False) as llm:
        cached = []
        for after in ([90, 91, 92, 93, 94, 95], [80, 81, 82, 83, 84], [80, 81, 82, 83, 84, 85]):
            llm.generate(common + after, params)
            cached.append(llm.stats.num_cached_tokens)
    # The second hits all but the last common block, which was stored before 90; the third finds
    # the second's copy of it, and that one's next block.
    assert cached == [0, 28, 28 + 36]


def test_features_are_the_targets_hidden_states(model: Any) -> None:
    reference = tiny_models.llama(eos_token_id=None)  # to look into it leaves traces in it
    tracker = run(model, prompts(5), rounds=2, block_size=4, chunked_prefill_size=5)
    assert len(tracker.seen) > 100
    for ids, features in list(tracker.seen.items())[::7]:
        for found, expected in zip(features, expected_features(reference, ids), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_a_small_pool_preempts_and_resumes(model: Any, seed: int) -> None:
    tracker = run(model, prompts(seed), rounds=2, block_size=4, num_blocks=27, max_num_seqs=6)
    assert tracker.stats.num_preemptions > 0  # type: ignore[attr-defined]


def test_a_prefix_hit_is_used_to_its_last_block(model: Any) -> None:
    prompt = prompts(0)[0] + list(range(3, 40))
    params = SamplingParams(temperature=0.0, max_tokens=4)
    Tracker.made.clear()
    with LLM(model=model, proposer=Tracker, strict=True, block_size=4, adaptive=False) as llm:
        llm.generate(prompt, params)
        assert llm.stats.num_cached_tokens == 0
        llm.generate(prompt, params)
        hit = (len(prompt) - 1) // 4 * 4
        assert llm.stats.num_cached_tokens == hit
        # Without drafts nobody is handed anything.
        rows = Tracker.made[0].num_rows
        llm.generate(prompt, params.model_copy(update={"num_speculative_tokens": 0}))
        assert llm.stats.num_cached_tokens == 2 * hit
        assert Tracker.made[0].num_rows == rows


def test_what_a_request_without_drafts_left_in_the_cache_is_no_hit_for_one_with(model: Any) -> None:
    prompt = list(range(3, 60))
    params = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM(model=model, proposer=Tracker, strict=True, block_size=4, adaptive=False) as llm:
        llm.generate(prompt, params.model_copy(update={"num_speculative_tokens": 0}))
        llm.generate(prompt, params)
        assert llm.stats.num_cached_tokens == 0


def test_in_a_chain_features_wait_for_the_next_draft(model: Any) -> None:
    repeating = [[5, 6, 7, 8] * 12, [9, 10] * 20, *prompts(3, 4)]
    tracker = run(model, repeating, proposer="ngram,tracker:Tracker", block_size=4, rounds=2)
    assert {"ngram", "tracker:Tracker"} == set(tracker.stats.by_proposer)  # type: ignore[attr-defined]


def test_features_of_a_stretch_without_drafts_come_in_time(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foresay.core.worker.chain.MOST_PENDING", 6)
    asked = prompts(3, 4)
    tracker = run(model, asked, proposer="adversaries:Constant,tracker:Tracker", block_size=4)
    assert tracker.num_idle_calls > 1


def test_blocks_and_state_are_back_after_many_requests(model: Any) -> None:
    Tracker.made.clear()
    with LLM(
        model=model, proposer=Tracker, strict=True, block_size=4, num_blocks=60, adaptive=False
    ) as llm:
        for seed in range(10):
            llm.generate(prompts(seed), SamplingParams(temperature=0.0, max_tokens=6))
            scheduler = llm._engine._scheduler  # type: ignore[union-attr]
            scheduler.check_integrity()
            assert scheduler.blocks.num_free_blocks == 60
            member = llm._engine._runner.proposers.members[0]  # type: ignore[union-attr,attr-defined]
            assert (member.queue._pending, member.num_stored) == ({}, {})
