"""What proposers draw: from which distribution, with which noise, and what is kept of it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from laws import chi_square, filtered, make_sampling, random_table

from foresay.core.worker.draft_sampler import DraftProbs, DrawRequest, StepSampler
from foresay.core.worker.noise import NoiseKey, Stream, exponential, vocabulary_words
from foresay.core.worker.processors import Context
from foresay.core.worker.sampling import Row, sample

INF, NAN = float("inf"), float("nan")
CPU = torch.device("cpu")


def make_draw(req_id: str = "r", num_tokens: int = 5, k: int = 3, **changes: Any) -> DrawRequest:
    return DrawRequest(
        req_id, make_sampling(**({"verification": "block"} | changes)), num_tokens, k
    )


def sampler_of(*requests: DrawRequest, vocab_size: int = 6) -> StepSampler:
    return StepSampler(requests, vocab_size)


def kept(sampler: StepSampler, row: int = 0) -> DraftProbs:
    draft_probs = sampler.draft_probs(row)
    assert draft_probs is not None
    return draft_probs


def race_in_python(weights: list[float], ids: list[int], key: NoiseKey) -> int:
    words = vocabulary_words(key, max(ids) + 1, CPU).tolist()
    times = {i: exponential(words[i]) / w for i, w in zip(ids, weights, strict=True) if w > 0}
    return min(times, key=lambda i: times[i])


# --- what is drawn from ---------------------------------------------------------------------------

FILTERS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature .5": {"temperature": 0.5},
    "top_k 2": {"top_k": 2},
    "top_p .6": {"top_p": 0.6, "temperature": 2.0},
    "min_p .3": {"min_p": 0.3},
    "all": {"temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
}
by_filter = pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())


@by_filter
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_kept_probs_are_the_drafter_s_distribution_after_temperature_and_filters(
    rule: str, filters: dict[str, Any]
) -> None:
    logits = random_table(3, 6, seed=1)
    sampler = sampler_of(make_draw(verification=rule, **filters))
    drawn = [int(sampler.draw(logits[j : j + 1], j, [0])) for j in range(3)]
    draft_probs = kept(sampler)
    assert (draft_probs.rule, draft_probs.num_tokens, draft_probs.token_ids) == (rule, 5, None)
    assert draft_probs.probs.dtype == torch.float32
    expected = torch.stack([filtered(row, make_sampling(**filters)) for row in logits])
    torch.testing.assert_close(draft_probs.probs.double(), expected, atol=1e-6, rtol=1e-5)
    assert sampler.drawn(0) == drawn
    assert all(draft_probs.probs[j, token_id] > 0 for j, token_id in enumerate(drawn))


@by_filter
def test_draws_follow_the_kept_probs(filters: dict[str, Any]) -> None:
    """A right sampler fails this for one choice of seeds in 10 000; the seeds are fixed."""
    num_requests = 600
    logits = random_table(1, 6, seed=2)
    sampler = sampler_of(*(make_draw(seed=seed, **filters) for seed in range(num_requests)))
    drawn = sampler.draw(logits.expand(num_requests, -1), 0, range(num_requests))
    law = dict(enumerate(kept(sampler).probs[0].double().tolist()))
    assert chi_square(Counter(drawn.tolist()), law).holds


@pytest.mark.parametrize("seed", range(5))
def test_a_draw_is_the_race_of_the_draft_s_own_noise_at_its_position_and_offset(seed: int) -> None:
    logits = random_table(3, 6, seed=3)
    sampler = sampler_of(make_draw(num_tokens=40, seed=seed, sample_index=2))
    for j in range(3):
        token_id = int(sampler.draw(logits[j : j + 1], j, [0]))
        key = NoiseKey(seed, 40 + j, Stream.DRAFT, offset=j, sample=2)
        assert token_id == race_in_python(logits[j].exp().tolist(), list(range(6)), key)


@pytest.mark.parametrize("seed", range(5))
@by_filter
def test_a_coupled_draw_is_the_target_s_own_from_the_same_logits(
    seed: int, filters: dict[str, Any]
) -> None:
    logits = random_table(3, 700, seed=4)
    request = make_draw(num_tokens=40, seed=seed, sample_index=1, verification="coupled", **filters)
    sampler = sampler_of(request, vocab_size=700)
    context = Context(request.sampling, [0] * 40, 3, [0] * 3)
    for j in range(3):
        assert sampler.draw(logits[j : j + 1], j, [0]).tolist() == sample(
            [Row(logits[j], context, j)]
        )
    assert sampler.draft_probs(0) is None
    assert sampler.drawn(0) is not None


def test_parameters_of_single_logits_are_left_to_the_target() -> None:
    logits = random_table(1, 6, seed=5)
    plain, changed = (
        sampler_of(make_draw(**changes))
        for changes in (
            {},
            {
                "min_tokens": 9,
                "stop_token_ids": (0, 1),
                "logit_bias": ((2, 50.0),),
                "allowed_token_ids": (3,),
                "bad_words_token_ids": ((4,),),
                "repetition_penalty": 2.0,
                "presence_penalty": 1.0,
                "frequency_penalty": 1.0,
            },
        )
    )
    assert plain.draw(logits, 0, [0]).tolist() == changed.draw(logits, 0, [0]).tolist()
    assert torch.equal(kept(plain).probs, kept(changed).probs)


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_a_greedy_request_gets_the_likeliest_id_the_lowest_on_ties(temperature: float) -> None:
    logits = torch.tensor([[0.0, 2, 1, 2, -INF, 0]])
    sampler = sampler_of(make_draw(temperature=temperature))
    assert sampler.draw(logits, 0, [0]).tolist() == [1]
    # By target id: draft ids 3 and 1 are target ids 0 and 5.
    ids = torch.tensor([4, 5, 3, 0, 1, 2])
    assert sampler.draft_probs(0) is None
    mapped = sampler_of(make_draw(temperature=temperature))
    assert mapped.draw(logits, 0, [0], ids).tolist() == [0]
    assert mapped.drawn(0) == [0]


# --- vocabularies ---------------------------------------------------------------------------------


def test_draft_ids_of_one_target_id_are_summed_before_the_filters() -> None:
    # Target id 4 has .2 + .25, more than id 1 with .3; alone, neither would pass top_k 1.
    logits = torch.tensor([[0.2, 0.3, 0.25, 0.25]]).log()
    ids = torch.tensor([4, 1, 4, 2])
    one = sampler_of(make_draw(top_k=1))
    assert one.draw(logits, 0, [0], ids).tolist() == [4]
    two = sampler_of(make_draw(top_k=2))
    two.draw(logits, 0, [0], ids)
    draft_probs = kept(two)
    assert draft_probs.token_ids is not None
    assert draft_probs.token_ids.tolist() == [1, 2, 4]
    torch.testing.assert_close(draft_probs.probs, torch.tensor([[0.4, 0, 0.6]]))
    greedy = sampler_of(make_draw(temperature=0.0))
    assert greedy.draw(logits, 0, [0], ids).tolist() == [4]
    # Temperature, too, is of the sum: .45 ** 2 : .3 ** 2 : .25 ** 2.
    half = sampler_of(make_draw(temperature=0.5))
    half.draw(logits, 0, [0], ids)
    squares = torch.tensor([[0.3, 0.25, 0.45]]) ** 2
    torch.testing.assert_close(kept(half).probs, squares / squares.sum())


@pytest.mark.parametrize("ids", [[5, 3, 0], [0, 3, 5], [3, 3, 5]], ids=str)
@pytest.mark.parametrize("rule", ["coupled", "block"])
def test_the_noise_is_the_target_id_s(ids: list[int], rule: str) -> None:
    logits = random_table(1, 3, seed=6)
    for seed in range(8):
        sampler = sampler_of(make_draw(num_tokens=9, seed=seed, verification=rule))
        (token_id,) = sampler.draw(logits, 0, [0], torch.tensor(ids)).tolist()
        weights = Counter[int]()
        for i, weight in zip(ids, logits[0].exp().tolist(), strict=True):
            weights[i] += weight  # type: ignore[assignment]
        stream = Stream.TARGET if rule == "coupled" else Stream.DRAFT
        key = NoiseKey(seed, 9, stream)
        assert token_id == race_in_python(list(weights.values()), list(weights), key)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["coupled", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_the_target_lacks_are_never_drawn(temperature: float, rule: str) -> None:
    rows = list(range(30))
    requests = [make_draw(seed=i, temperature=temperature, verification=rule) for i in rows]
    logits = torch.zeros(30, 8)
    logits[:, 6:] = 20
    unmapped, mapped = sampler_of(*requests), sampler_of(*requests)
    assert set(unmapped.draw(logits, 0, rows).tolist()) <= set(range(6))
    ids = torch.tensor([3, 4, 1, 5, 0, 2, 6, -1])
    assert set(mapped.draw(logits, 0, rows, ids).tolist()) <= set(range(6))
    if rule == "block" and temperature:
        torch.testing.assert_close(kept(unmapped).probs, torch.full((1, 6), 1 / 6))
        torch.testing.assert_close(kept(mapped).probs, torch.full((1, 6), 1 / 6))


def test_a_draft_vocabulary_narrower_than_the_target_s_keeps_its_width() -> None:
    sampler = sampler_of(make_draw(), vocab_size=100)
    sampler.draw(torch.zeros(1, 4), 0, [0])
    assert kept(sampler).probs.tolist() == [[0.25] * 4]


@pytest.mark.parametrize("size", [3000, 20_000])
def test_large_vocabularies_draw_by_the_same_race(size: int) -> None:
    logits = random_table(1, size, seed=7) * 2
    ids = torch.arange(size) * 2
    for seed, (mapping, top_p) in enumerate([(None, 1.0), (ids, 1.0), (ids // 4, 1.0), (ids, 0.8)]):
        sampler = sampler_of(make_draw(seed=seed, top_p=top_p), vocab_size=2 * size)
        (token_id,) = sampler.draw(logits, 0, [0], mapping).tolist()
        draft_probs = kept(sampler)
        columns = draft_probs.token_ids
        names = list(range(size)) if columns is None else columns.tolist()
        key = NoiseKey(seed, 5, Stream.DRAFT)
        assert token_id == race_in_python(draft_probs.probs[0].tolist(), names, key)
        assert draft_probs.probs.sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_float_dtype_are_only_read(dtype: torch.dtype) -> None:
    logits = random_table(2, 6, seed=8).to(dtype)
    before = logits.clone()
    sampler = sampler_of(make_draw(temperature=0.7, top_k=3), make_draw(temperature=0.0))
    drawn = sampler.draw(logits, 0, [0, 1], torch.tensor([0, 1, 2, 2, 4, 5]))
    assert (drawn.dtype, drawn.shape) == (torch.int64, (2,))
    assert torch.equal(logits, before)
    assert kept(sampler).probs.dtype == torch.float32


def test_a_request_draws_the_same_alone_and_in_any_batch() -> None:
    kinds = [{"temperature": 0.0}, {"verification": "coupled"}, {"top_p": 0.8}, {"top_k": 3}]
    requests = [make_draw(str(i), 5 + i, seed=i % 3, **kinds[i % 4]) for i in range(12)]
    logits = random_table(24, 50, seed=9)
    together = sampler_of(*requests, vocab_size=50)
    rows = [7, 0, 3, 11, 2, 5, 1, 4, 10, 9, 8, 6]
    for step in range(2):
        together.draw(torch.stack([logits[2 * row + step] for row in rows]), step, rows)
    for row, request in enumerate(requests):
        alone = sampler_of(request, vocab_size=50)
        for step in range(2):
            alone.draw(logits[2 * row + step].unsqueeze(0), step, [0])
        assert alone.drawn(0) == together.drawn(row)
        one, other = alone.draft_probs(0), together.draft_probs(row)
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one.probs, other.probs)


# --- drafts of several tokens ---------------------------------------------------------------------


def test_a_draft_may_stop_after_any_token_and_its_probs_can_be_cut() -> None:
    logits = random_table(3, 6, seed=10)
    sampler = sampler_of(make_draw("a"), make_draw("b"), make_draw("c"))
    assert [sampler.drawn(row) for row in range(3)] == [None] * 3
    sampler.draw(logits, 0, [0, 1, 2])
    sampler.draw(logits[:1], 1, [2])
    assert [len(sampler.drawn(row) or []) for row in range(3)] == [1, 1, 2]
    draft_probs = kept(sampler, 2)
    assert [len(kept(sampler, row).probs) for row in range(3)] == [1, 1, 2]
    shorter = draft_probs.cut(1)
    assert torch.equal(shorter.probs, draft_probs.probs[:1])
    assert replace(shorter, probs=draft_probs.probs) == replace(draft_probs)
    assert len(draft_probs.probs) == 2


def test_a_row_that_is_not_finite_ends_the_draft_before_it() -> None:
    bad = [[NAN] * 6, [0, NAN, 0, 0, 0, 0], [0, 0, INF, 0, 0, 0], [-INF] * 6]
    for temperature in (0.0, 1.0):
        for ids in (None, torch.tensor([5, 1, 1, 2, 3, 4])):
            kinds = [make_draw(str(i), temperature=temperature) for i in range(5)]
            sampler = sampler_of(*kinds)
            rows = list(range(5))
            first = sampler.draw(torch.zeros(5, 6), 0, rows, ids).tolist()
            second = sampler.draw(torch.tensor([*bad, [0.0] * 6]), 1, rows, ids).tolist()
            third = sampler.draw(torch.zeros(5, 6), 2, rows, ids).tolist()
            legal = set(range(6)) if ids is None else set(ids.tolist())
            assert set(second + third) <= legal
            assert [sampler.drawn(row) for row in range(4)] == [[token] for token in first[:4]]
            assert sampler.drawn(4) == [first[4], second[4], third[4]]
            assert [sampler.ended(row) for row in rows] == [True] * 4 + [False]
            assert sampler.faults == {"non_finite_draft": 4}
            if temperature:
                assert [len(kept(sampler, row).probs) for row in rows] == [1, 1, 1, 1, 3]


def test_greedy_draws_before_those_of_others_in_one_step_are_kept() -> None:
    """The drafts of greedy requests are read late: after a draw of a request that is not."""
    sampler = sampler_of(make_draw("a"), make_draw("b"), make_draw("c", temperature=1.0))
    sampler.draw(torch.tensor([[0, 0, 9, 0, 0, 0], [NAN] * 6]), 0, [0, 1])
    one_hot = torch.full((3, 6), -INF)
    one_hot[:, 4] = 0.0
    sampler.draw(one_hot[2:], 0, [2])
    sampler.draw(one_hot, 1, [0, 1, 2])
    sampler.draw(one_hot[:2], 2, [0, 1])
    assert [sampler.drawn(row) for row in range(3)] == [[2, 4, 4], [], [4, 4]]
    assert [sampler.ended(row) for row in range(3)] == [False, True, False]
    assert sampler.faults == {"non_finite_draft": 1}
    with pytest.raises(ValueError, match="drawn already"):
        sampler.draw(one_hot[:1], 1, [0])


def test_a_draft_that_ends_at_once_is_empty_and_has_no_probs() -> None:
    sampler = sampler_of(make_draw())
    sampler.draw(torch.full((1, 6), NAN), 0, [0])
    assert sampler.drawn(0) == []
    assert sampler.draft_probs(0) is None
    overflowing = sampler_of(make_draw(temperature=1e-4))
    overflowing.draw(torch.tensor([[1e38, 0, 0]]), 0, [0])
    assert overflowing.faults == {"non_finite_draft": 1}


def test_a_bad_value_that_stands_for_no_id_of_the_target_does_no_harm() -> None:
    sampler = sampler_of(make_draw())
    assert sampler.draw(
        torch.tensor([[0.0, -INF, -INF, -INF, -INF, -INF, NAN]]), 0, [0]
    ).tolist() == [0]
    mapped = sampler_of(make_draw())
    assert mapped.draw(torch.tensor([[0.0, NAN]]), 0, [0], torch.tensor([4, 77])).tolist() == [4]
    assert not sampler.faults
    assert not mapped.faults


# --- wrong calls ----------------------------------------------------------------------------------

ROW = torch.zeros(1, 6)
WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "drawn twice": ((ROW, 0, [0]), "draft token 0 of request 'a' is drawn already"),
    "skipped": (
        (ROW, 2, [0]),
        "draft token 2 of request 'a' comes too early: the next to draw is 1",
    ),
    "beyond k": ((ROW, 3, [0]), "draft token 3 of request 'a' is beyond its k: at most 3 are"),
    "no drafts wanted": ((ROW, 0, [1]), "draft token 0 of request 'b' is beyond its k: at most 0"),
    "another's turn": ((ROW.expand(2, 6), 1, [0, 2]), "token 1 of request 'c' comes too early"),
    "no such row": ((ROW, 1, [3]), "row 3 is no index of this step's 3 requests"),
    "a row from the end": ((ROW, 1, [-1]), "row -1 is no index of this step's 3 requests"),
    "a row twice": ((ROW.expand(2, 6), 1, [0, 0]), r"rows \[0, 0\] name a request twice"),
    "too few logits": (
        (ROW, 1, [0, 2]),
        r"logits are \[1, 6\] .* for 2 rows they must be \[2, d",
    ),
    "one dimension": ((ROW[0], 1, [0]), r"logits are \[6\]"),
    "integers": ((ROW.long(), 1, [0]), "of torch.int64; .* of floats"),
    "no vocabulary": ((ROW[:, :0], 1, [0]), "the draft vocabulary is empty"),
    "a map too short": (
        (ROW, 1, [0], torch.arange(5)),
        r"draft_to_target is \[5\] .* be \[6\]",
    ),
    "a map of floats": ((ROW, 1, [0], torch.zeros(6)), "of torch.float32; .* of torch.int64"),
    "a map to nowhere": ((ROW, 1, [0], torch.full((6,), 9)), r"names no id .* in range\(6\)"),
    "another map": ((ROW, 1, [0], torch.arange(6)), "vocabulary of request 'a' changed within its"),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_call_is_an_error_that_says_what_is_wrong(
    call: tuple[Any, ...], message: str
) -> None:
    sampler = sampler_of(make_draw("a"), make_draw("b", k=0), make_draw("c"))
    sampler.draw(ROW, 0, [0])
    with pytest.raises(ValueError, match=message):
        sampler.draw(*call)
    assert len(sampler.drawn(0) or []) == 1
    assert len(kept(sampler).probs) == 1


def test_drawing_for_nobody_draws_nothing() -> None:
    sampler = sampler_of(make_draw())
    assert sampler.draw(torch.zeros(0, 6), 0, []).tolist() == []
    assert sampler.drawn(0) is None


def test_the_same_map_in_another_tensor_goes_on_with_the_draft() -> None:
    sampler = sampler_of(make_draw())
    for step in range(3):
        sampler.draw(ROW, step, [0], torch.tensor([1, 1, 2, 3, 4, 5]))
    assert len(kept(sampler).probs) == 3
    assert math.isclose(kept(sampler).probs[0, 0].item(), 1 / 3, rel_tol=1e-6)


def test_a_map_is_worked_out_once_for_all_steps_and_few_are_kept() -> None:
    logits = random_table(1, 3, seed=2)
    known: list[Any] = []
    maps = [torch.tensor([i, 5, 1]) for i in (0, 2, 3, 4)]
    for draft_to_target in [*maps, *maps]:
        sampler = StepSampler([make_draw()], 6, known)
        again = StepSampler([make_draw()], 6)
        drawn = [s.draw(logits, 0, [0], draft_to_target).tolist() for s in (sampler, again)]
        assert drawn[0] == drawn[1]
        ids = [kept(s).token_ids for s in (sampler, again)]
        assert [part.tolist() for part in ids if part is not None] == [
            sorted(draft_to_target.tolist())
        ] * 2
    assert len(known) == 4
    kept_before = list(known)
    for number in range(9):  # a drafter with a new map in every step
        sampler = StepSampler([make_draw()], 6, known)
        sampler.draw(logits, 0, [0], torch.tensor([5, number % 5, 0]))
    assert len(known) <= 5
    assert not set(map(id, kept_before)) & set(map(id, known))


def test_many_maps_in_one_step_are_all_kept_to_its_end() -> None:
    logits = random_table(2, 3, seed=2)
    requests = [make_draw(f"r{i}", k=2) for i in range(6)]
    sampler = StepSampler(requests, 6, [])
    for step in range(2):
        for row in range(6):
            sampler.draw(logits[step : step + 1], step, [row], torch.tensor([row, 5, 4]))
    assert [len(sampler.drawn(row) or []) for row in range(6)] == [2] * 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_order_of_a_map_changes_no_draw(temperature: float) -> None:
    logits = random_table(3, 4, seed=3)
    ascending = torch.tensor([0, 2, 3, 5])
    order = torch.tensor([2, 0, 3, 1])
    found = []
    for row, draft_to_target in ((logits, ascending), (logits[:, order], ascending[order])):
        before = row.clone()
        sampler = sampler_of(make_draw(temperature=temperature))
        drawn = [int(sampler.draw(row[j : j + 1], j, [0], draft_to_target)) for j in range(3)]
        probs = None if temperature == 0 else kept(sampler).probs.tolist()
        found.append((drawn, probs))
        assert torch.equal(row, before)
    assert found[0] == found[1]
    if temperature == 0:
        assert found[0][0] == ascending[logits.argmax(dim=-1)].tolist()
