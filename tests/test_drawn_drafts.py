"""Drafts that were drawn from kept probs: `rejection` and `block`, and what may go wrong.

The reference is each rule written out in plain Python, on whole distributions. That the tokens
follow the target's law is for test_distribution.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from laws import make_sampling, random_table
from verifying import (
    EOS,
    INF,
    NAN,
    VOCABULARIES,
    bad_rows,
    drawn_probs,
    emitted,
    make_request,
    mixed_batch,
    one_hot,
    random_request,
)

from foresay.core.worker import sampling as sampling_module
from foresay.core.worker.draft_sampler import DraftProbs
from foresay.core.worker.noise import NoiseKey, Stream, exponential, uniforms, vocabulary_words
from foresay.core.worker.processors import Context
from foresay.core.worker.rejection_sampler import VerifyRequest, VerifyResult, verify
from foresay.core.worker.sampling import Row, target_probs

# --- drafts that were drawn: the rules written out ------------------------------------------------


def race_in_python(weights: list[float], key: NoiseKey) -> int:
    words = vocabulary_words(key, len(weights), torch.device("cpu")).tolist()
    times = {i: exponential(words[i]) / w for i, w in enumerate(weights) if w > 0}
    return min(times, key=lambda i: times[i])


def verify_in_python(rows: torch.Tensor, request: VerifyRequest) -> list[int]:
    """The rules as the papers write them, on whole distributions, with the noise page's keys."""
    sampling, drafts = request.sampling, list(request.draft_token_ids)
    context = Context(sampling, request.token_ids, request.num_prompt_tokens, drafts)
    k, length, size = len(drafts), len(request.token_ids), rows.shape[1]
    assert request.draft_probs is not None
    columns = request.draft_probs.token_ids
    ids = columns.tolist() if columns is not None else range(request.draft_probs.probs.shape[1])
    draft = [dict(zip(ids, row, strict=True)) for row in request.draft_probs.probs.tolist()]

    def target(j: int) -> list[float]:
        return target_probs(Row(rows[j], context, j)).tolist()  # type: ignore[no-any-return]

    def noise(stream: Stream, j: int) -> NoiseKey:
        return NoiseKey(sampling.seed, length + j, stream, j, sampling.sample_index)

    def uniform(j: int) -> float:
        word = int(vocabulary_words(noise(Stream.ACCEPT, j), 1, torch.device("cpu")))
        return (word + 0.5) / 2**32

    def ratio(j: int) -> float:
        is_known = 0 <= drafts[j] < size
        return target(j)[drafts[j]] / draft[j][drafts[j]] if is_known else 0.0

    def residual(j: int, scale: float) -> list[float]:
        return [max(scale * t - draft[j].get(i, 0.0), 0.0) for i, t in enumerate(target(j))]

    num_accepted, scale = 0, 1.0
    if request.draft_probs.rule == "rejection":
        while num_accepted < k and uniform(num_accepted) < ratio(num_accepted):
            num_accepted += 1
    else:
        scales = [1.0]
        for j in range(k):
            scales.append(min(1.0, scales[-1] * ratio(j)))
            if scales[-1] == 0:
                break
        for i in range(1, len(scales)):
            excess = sum(residual(i, scales[i])) if i < k else 0.0
            passes = scales[i]
            if i < k and scales[i] < 1:
                passes = excess / (excess + 1 - scales[i])
            if uniform(i - 1) < passes:
                num_accepted, scale = i, scales[i]
    if num_accepted == k:
        key = NoiseKey(sampling.seed, length + k, sample=sampling.sample_index)
        return [*drafts, race_in_python(target(k), key)]
    weights = residual(num_accepted, scale)
    return [*drafts[:num_accepted], race_in_python(weights, noise(Stream.RECOVER, num_accepted))]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(("size", "num_requests"), [(1, 8), (2, 40), (9, 60), (300, 12), (9000, 2)])
def test_drawn_drafts_come_out_as_the_papers_write_the_rules(
    size: int, num_requests: int, rule: str, vocabulary: str
) -> None:
    rng = random.Random(f"{size} {rule} {vocabulary}")
    pairs = [random_request(rng, size, rule, vocabulary) for _ in range(num_requests)]
    results = verify(torch.cat([rows for rows, _ in pairs]), [request for _, request in pairs])
    depths: Counter[int] = Counter()
    for (rows, request), result in zip(pairs, results, strict=True):
        if request.draft_token_ids:
            expected = verify_in_python(rows, request)
            assert result == emitted(expected)
            depths[len(expected) - 1] += 1
        assert result.error is None
    if size in (2, 9):
        assert len(depths) >= 3, "some drafts accepted to several depths"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rules_mix_in_a_batch_and_each_request_gets_what_it_gets_alone(dtype: torch.dtype) -> None:
    lengths = set()
    for seed in range(4):
        rows, requests = mixed_batch(seed)
        rows = [row.to(dtype) for row in rows]
        together = verify(torch.cat(rows), requests)
        lengths.update(len(request.draft_token_ids) for request in requests)
        for row, request, result in zip(rows, requests, together, strict=True):
            assert verify(row, [request]) == [result]
            assert result.token_ids
            assert not result.faults
    assert lengths == {0, 1, 2, 3, 4}


def test_a_draft_is_verified_by_the_rule_it_brings_and_one_that_brings_none_deterministically() -> (
    None
):
    rows, request = random_request(random.Random(3), 9, "block", "the target's")
    drafts = list(request.draft_token_ids)
    assert drafts
    for rule in ("coupled", "rejection", "block"):
        request.sampling = replace(request.sampling, verification=rule)  # type: ignore[arg-type]
        assert verify(rows, [request])[0].token_ids == verify_in_python(rows, request)
        alone = replace(request, draft_probs=None)
        context = Context(request.sampling, request.token_ids, request.num_prompt_tokens, drafts)
        plain = []
        for j, row in enumerate(rows):
            sampling, position = request.sampling, request.num_committed + j
            key = NoiseKey(sampling.seed, position, sample=sampling.sample_index)
            plain.append(race_in_python(target_probs(Row(row, context, j)).tolist(), key))
        (result,) = verify(rows, [alone])
        assert result.token_ids == plain[: len(result.token_ids)]
        assert result.token_ids[:-1] == drafts[: len(result.token_ids) - 1]
        greedy = replace(request, sampling=replace(request.sampling, temperature=0.0))
        (result,) = verify(rows, [greedy])
        assert result.token_ids == rows.argmax(dim=-1).tolist()[: len(result.token_ids)]


# --- drafts that were drawn: failures -------------------------------------------------------------


def bad_probs() -> dict[str, Callable[[DraftProbs], DraftProbs]]:
    def changed(change: Callable[[torch.Tensor], Any]) -> Callable[[DraftProbs], DraftProbs]:
        def apply(good: DraftProbs) -> DraftProbs:
            probs = good.probs.clone()
            outcome = change(probs)
            return replace(good, probs=probs if outcome is None else outcome)

        return apply

    def set_at(row: int, column: int, value: float) -> Callable[[DraftProbs], DraftProbs]:
        return changed(lambda probs: probs[row].__setitem__(column, value))

    return {
        "of another committed length": lambda good: replace(good, num_tokens=4),
        "a row too few": lambda good: good.cut(2),
        "a row too many": changed(lambda probs: torch.cat((probs, probs[:1]))),
        "one dimension": changed(lambda probs: probs[0]),
        "no columns": changed(lambda probs: probs[:, :0]),
        "NaN": set_at(2, 5, NAN),
        "+inf": set_at(0, 5, INF),
        "-inf": set_at(0, 5, -INF),
        "a negative prob": changed(
            lambda probs: probs[1].add_(torch.tensor([0.5, -0.5, 0, 0, 0, 0]))
        ),
        "a sum of 1.002": changed(lambda probs: probs[2].mul_(1.002)),
        "a sum of 0.998": changed(lambda probs: probs[2].mul_(0.998)),
        "all 0": changed(lambda probs: probs.zero_()),
        "a drawn token of prob 0": changed(
            lambda probs: probs[1].copy_(torch.eye(6)[0]),
        ),
        "ids of another number": lambda good: replace(good, token_ids=torch.arange(5)),
        "a drawn token that has no column": lambda good: replace(
            good, token_ids=torch.tensor([0, 1, 2, 4, 5, 6])
        ),
        "a drawn token beyond the columns": changed(
            lambda probs: probs[:, :3] / probs[:, :3].sum(dim=-1, keepdim=True)
        ),
    }


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("spoil", bad_probs().values(), ids=bad_probs().keys())
def test_probs_a_draft_cannot_come_from_are_counted_and_the_deterministic_rule_serves(
    spoil: Callable[[DraftProbs], DraftProbs], rule: str
) -> None:
    rows = random_table(4, 6, seed=21)
    good = drawn_probs(random_table(3, 6, seed=22), rule)
    for seed in range(5):
        request = make_request([1, 3, 2], draft_probs=good, temperature=1.0, seed=seed)
        assert verify(rows, [request])[0].faults == {}
        (plain,) = verify(rows, [replace(request, draft_probs=None)])
        (result,) = verify(rows, [replace(request, draft_probs=spoil(good))])
        assert result == replace(plain, faults={"bad_draft_probs": 1})
        # Where no drawn draft is verified, its probs are of no account.
        cases = [
            replace(request, sampling=make_sampling(temperature=0.0)),
            replace(request, draft_token_ids=[]),
        ]
        for case in cases:
            count = case.num_rows
            (result,) = verify(rows[:count], [replace(case, draft_probs=spoil(good))])
            assert result.faults == {}


def test_probs_within_rounding_of_1_in_sum_are_probs() -> None:
    rows = random_table(4, 6, seed=21)
    good = drawn_probs(random_table(3, 6, seed=22), "rejection")
    for factor in (0.9992, 1.0008):
        probs = replace(good, probs=good.probs * factor)
        request = make_request([1, 3, 2], draft_probs=probs, temperature=1.0)
        assert verify(rows, [request])[0].faults == {}


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_residual_of_zero_is_drawn_from_the_target_and_counted(rule: str) -> None:
    """Target .5 .5, draft .5004 twice: within rounding of 1, and nowhere below the target."""
    draft_probs = DraftProbs(rule, 5, torch.tensor([[0.5004, 0.5004]]))  # type: ignore[arg-type]
    seeds = [
        seed
        for seed, uniform in enumerate(
            uniforms([NoiseKey(seed, 5, Stream.ACCEPT) for seed in range(8000)])
        )
        if uniform > 0.5 / 0.5004
    ]
    assert len(seeds) >= 3
    requests = [
        make_request([1], draft_probs=draft_probs, temperature=1.0, seed=seed) for seed in seeds
    ]
    for request, result in zip(
        requests, verify(torch.zeros(2 * len(seeds), 2), requests), strict=True
    ):
        token_id = race_in_python([0.5, 0.5], NoiseKey(request.sampling.seed, 5, Stream.RECOVER))
        assert result == VerifyResult([token_id], faults={"zero_residual": 1})


@pytest.mark.parametrize("bad_id", [-1, 6, 10**9])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_an_id_the_target_lacks_is_rejected_and_recovered_from_the_residual(
    rule: str, bad_id: int
) -> None:
    # The first draft is certain, and so accepted; then everything is left to the residual.
    rows = torch.stack(
        (torch.tensor([-INF, -INF, -INF, 0, -INF, -INF]), *random_table(2, 6, seed=23))
    )
    probs = torch.zeros(2, 7)
    probs[0, 3] = 1
    probs[1] = random_table(1, 7, seed=24)[0].softmax(dim=-1)
    draft_probs = DraftProbs(rule, 5, probs)  # type: ignore[arg-type]
    # Penalties look at the drafts before a row.
    for kind in (
        {},
        {"presence_penalty": 0.5, "repetition_penalty": 1.3},
        {"bad_words_token_ids": ((3, 4),)},
    ):
        for seed in range(10):
            request = make_request(
                [3, bad_id], 5, 2, draft_probs, temperature=1.0, seed=seed, **kind
            )
            (result,) = verify(rows, [request])
            assert result == emitted(verify_in_python(rows, request))
            assert len(result.token_ids) == 2


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_masked_stop_id_that_was_drawn_is_rejected(rule: str) -> None:
    rows = one_hot(EOS, EOS)
    draft_probs = drawn_probs(one_hot(EOS), rule)
    settings_ = {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": (EOS,)}
    for seed in range(5):
        (result,) = verify(
            rows, [make_request([EOS], draft_probs=draft_probs, seed=seed, **settings_)]
        )
        assert len(result.token_ids) == 1
        assert result.token_ids[0] != EOS


@pytest.mark.parametrize(("bad", "reason"), bad_rows().values(), ids=bad_rows().keys())
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("bad_row", range(4))
def test_a_bad_row_ends_a_drawn_draft_before_it(
    bad_row: int, rule: str, bad: torch.Tensor, reason: str
) -> None:
    """What comes out is what the draft, cut there, gives; its error if all before is accepted."""
    good = random_table(4, 6, seed=25)
    draft_probs = drawn_probs(good[:3] * 0.5, rule)
    rows = good.clone()
    rows[bad_row] = bad
    outcomes = Counter()
    for seed in range(30):
        request = make_request(
            [4, 1, 0],
            draft_probs=draft_probs,
            temperature=1.0,
            seed=seed,
            min_tokens=99,
            stop_token_ids=(EOS,),
        )
        shorter = replace(
            request, draft_token_ids=[4, 1, 0][:bad_row], draft_probs=draft_probs.cut(bad_row)
        )
        (result,) = verify(rows, [request])
        (expected,) = verify(good[: bad_row + 1], [shorter])
        if len(expected.token_ids) == bad_row + 1:
            expected = VerifyResult([], f"at position {5 + bad_row}, {reason}")
        assert result == expected
        outcomes[result.error is None] += 1
    assert outcomes[False]
    assert outcomes[True] or bad_row == 0


def test_a_drawn_draft_s_rows_are_worked_on_only_up_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No token after one of target prob 0 can be accepted, by either rule."""
    worked_on = []
    original = sampling_module.survivors

    def counting(row: Row) -> Any:
        worked_on.append(row.position)
        return original(row)

    monkeypatch.setattr("foresay.core.worker.drawn_drafts.survivors", counting)
    rows = one_hot(3, 1, 1, 1)
    for rule in ("rejection", "block"):
        draft_probs = drawn_probs(torch.stack((one_hot(3)[0], *torch.zeros(2, 6))), rule, 20)
        request = make_request([3, 5, 1], 20, draft_probs=draft_probs, temperature=1.0, top_k=1)
        assert verify(rows, [request])[0].token_ids == [3, 1]
        assert set(worked_on) == {20, 21}
        assert len(worked_on) == 2
        worked_on.clear()


def test_nothing_that_is_handed_over_is_written() -> None:
    rows, requests = mixed_batch(5)
    logits = torch.cat(rows)
    before = logits.clone()
    kept = [
        (list(r.draft_token_ids), list(r.token_ids), r.draft_probs and r.draft_probs.probs.clone())
        for r in requests
    ]
    requests = [replace(r, sampling=replace(r.sampling, logprobs=2)) for r in requests]
    verify(logits, requests)
    assert torch.equal(logits, before)
    for request, (drafts, token_ids, probs) in zip(requests, kept, strict=True):
        assert list(request.draft_token_ids) == drafts
        assert list(request.token_ids) == token_ids
        if request.draft_probs is not None:
            assert torch.equal(request.draft_probs.probs, probs)


def test_a_thousand_failures_leave_the_other_requests_tokens_as_they_are() -> None:
    rng = random.Random(8)
    num_failures = 0
    while num_failures < 1000:
        rows, requests = mixed_batch(rng.randrange(10**9), size=6)
        alone = verify(torch.cat(rows), requests)
        entries = list(zip(rows, requests, alone, strict=True))
        for kind in rng.choices(["row", "probs", "residual", "id"], k=24):
            entries.insert(rng.randrange(len(entries) + 1), failing(kind, rng))
            num_failures += 1
        results = verify(
            torch.cat([row for row, _, _ in entries]), [request for _, request, _ in entries]
        )
        for (_, _, expected), result in zip(entries, results, strict=True):
            if isinstance(expected, VerifyResult):
                assert result == expected
            else:
                assert expected(result)


def failing(
    kind: str, rng: random.Random
) -> tuple[torch.Tensor, VerifyRequest, Callable[[VerifyResult], bool]]:
    """A request that meets a failure, and what must be true of its result."""
    rule = rng.choice(["rejection", "block"])
    rows = random_table(3, 6, seed=rng.randrange(10**9))
    draft_probs = drawn_probs(rows[:2] * 0.5, rule)
    seed = rng.randrange(10**9)
    request = make_request([1, 4], draft_probs=draft_probs, temperature=1.0, seed=seed)
    if kind == "row":
        rows[0] = rng.choice([bad for bad, _ in list(bad_rows().values())[:4]])
        if rng.random() < 0.5:
            request.draft_probs = None
        if rng.random() < 0.5:
            request.sampling = replace(request.sampling, temperature=0.0)
        return rows, request, lambda result: not result.token_ids and bool(result.error)
    if kind == "probs":
        spoil = bad_probs()[
            rng.choice(["of another committed length", "+inf", "all 0", "no columns"])
        ]
        request.draft_probs = spoil(draft_probs)
        return rows, request, lambda result: result.faults == {"bad_draft_probs": 1}
    if kind == "residual":
        # The token's target prob is 0, and the draft covers the rest: nothing is left.
        rows[:, 1] = -INF
        target = rows[0].softmax(dim=-1)
        probs = torch.stack((target * 1.0001, target))
        probs[0, 1] = 1e-6
        request.draft_probs = DraftProbs(rule, 5, probs)  # type: ignore[arg-type]
        request.draft_token_ids = [1, 0]
        return rows, request, lambda result: result.faults == {"zero_residual": 1}
    bad_id = rng.choice([-1, 6, 7, 2**31])
    request.draft_token_ids = [bad_id, 1]
    return (
        rows,
        request,
        lambda r: len(r.token_ids) == 1 and 0 <= r.token_ids[0] < 6 and not r.faults,
    )
