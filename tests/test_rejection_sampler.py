"""Verification by the greedy and the deterministic rule, and what all rules share.

The references: tokens worked out by hand, and one-by-one decoding. Drafts that were drawn are for
test_drawn_drafts, the law of the tokens for test_distribution.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import make_sampling
from verifying import EOS, INF, NAN, bad_rows, emitted, make_request, mixed_batch, one_hot

from foresay.core.messages import SamplingData
from foresay.core.worker import sampling as sampling_module
from foresay.core.worker.rejection_sampler import VerifyRequest, VerifyResult, verify
from foresay.core.worker.sampling import Row

# --- which drafts are accepted, worked out by hand ------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 9e-6, 1e-3, 1.0], ids="temperature {}".format)
@pytest.mark.parametrize(
    ("drafts", "tokens"),
    [
        ([], [3]),
        ([3], [3, 1]),
        ([3, 1], [3, 1, 4]),
        ([3, 1, 4], [3, 1, 4, 0]),
        ([5], [3]),
        ([5, 1, 4], [3]),
        ([3, 5, 4], [3, 1]),
        ([3, 1, 5], [3, 1, 4]),
        ([-1, 6, 7], [3]),
    ],
    ids=str,
)
def test_drafts_are_accepted_up_to_the_first_that_differs_and_one_token_follows(
    drafts: list[int], tokens: list[int], temperature: float
) -> None:
    logits = one_hot(3, 1, 4, 0)[: 1 + len(drafts)]
    request = make_request(drafts, temperature=temperature, top_k=1)
    assert verify(logits, [request]) == [emitted(tokens)]


def test_requests_of_all_kinds_share_a_step_and_keep_their_order() -> None:
    logits = one_hot(1, 2, 3, 4, 5, 0, 1)
    requests = [
        make_request([1]),
        make_request([], temperature=1.0, top_k=1),
        make_request([0, 5], temperature=0.0),
        make_request([], temperature=1.0, top_p=1e-6),
    ]
    results = verify(logits, requests)
    assert [r.token_ids for r in results] == [[1, 2], [3], [4], [1]]
    assert verify(logits[:0], []) == []


@pytest.mark.parametrize("num_rows", [0, 2, 4])
def test_a_number_of_rows_that_does_not_fit_the_drafts_is_refused(num_rows: int) -> None:
    with pytest.raises(ValueError, match=f"{num_rows} rows of logits, but the 2 requests need 3"):
        verify(torch.zeros(num_rows, 6), [make_request([1]), make_request()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [5, 64, 1000])
def test_greedy_takes_the_lowest_id_among_equal_logits(dtype: torch.dtype, size: int) -> None:
    logits = torch.zeros(3, size, dtype=dtype)
    logits[1, size // 2 :] = 1
    logits[2] = -INF
    logits[2, [size - 1, size - 2]] = -3
    results = verify(logits, [make_request(), make_request(), make_request()])
    assert [r.token_ids for r in results] == [[0], [size // 2], [size - 2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_are_masked_on_each_row_by_its_own_output_index(temperature: float) -> None:
    logits = one_hot(EOS, EOS, EOS, EOS, EOS)
    logits[:, 4] = 5  # the second best
    settings_ = {"min_tokens": 4, "stop_token_ids": (EOS, 5, 999), "temperature": temperature}
    settings_ |= {"top_k": 1}
    # Output indices 1 2 3 4 5: the first three rows must not stop.
    request = make_request([4, 4, 4, EOS], num_output=1, **settings_)
    assert verify(logits, [request])[0].token_ids == [4, 4, 4, EOS, EOS]
    # The proposer drafts EOS at output index 2.
    request = make_request([4, EOS, 4, 4], num_output=1, **settings_)
    assert verify(logits, [request])[0].token_ids == [4, 4]


def test_logits_are_only_read() -> None:
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(1))
    logits[::3, 7] = 20
    before = logits.clone()
    for kind in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}):
        request = make_request([7] * 3, min_tokens=2, stop_token_ids=(7,), **kind)
        verify(logits, [request] * 10)
        assert torch.equal(logits, before)


# --- failures -------------------------------------------------------------------------------------


by_fault = pytest.mark.parametrize(("bad", "reason"), bad_rows().values(), ids=bad_rows().keys())
by_rule = pytest.mark.parametrize(
    "rule", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}], ids=["greedy", "sampled"]
)


@by_rule
@by_fault
def test_a_bad_row_that_is_used_ends_that_request_alone_and_invents_no_token(
    bad: torch.Tensor, reason: str, rule: dict[str, Any]
) -> None:
    rule = rule | {"min_tokens": 99, "stop_token_ids": (EOS,)}
    logits = torch.cat((one_hot(3, 4), one_hot(3), bad.unsqueeze(0), one_hot(5, 0, 4)))
    requests = [
        make_request([3], **rule),
        make_request([3], num_committed=11, **rule),
        make_request([5], **rule),
        make_request([], **rule),
    ]
    results = verify(logits, requests)
    assert results[1] == VerifyResult([], f"at position 12, {reason}")
    assert [r.token_ids for r in results] == [[3, 4], [], [5, 0], [4]]
    assert [r.error for r in results if r is not results[1]] == [None] * 3


@by_rule
@by_fault
def test_a_bad_row_after_a_mismatch_does_no_harm(
    bad: torch.Tensor, reason: str, rule: dict[str, Any]
) -> None:
    rule = rule | {"min_tokens": 99, "stop_token_ids": (EOS,)}
    logits = torch.cat((one_hot(3, 1), torch.stack((bad, bad))))
    assert verify(logits, [make_request([3, 5, 1], **rule)]) == [emitted([3, 1])]


@by_rule
def test_a_row_that_allows_some_tokens_only_is_legal(rule: dict[str, Any]) -> None:
    logits = torch.full((1, 6), -INF)
    logits[0, 4] = -1e30
    assert verify(logits, [make_request(**rule)]) == [VerifyResult([4])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [NAN, INF], ids=["NaN", "+inf"])
def test_greedy_finds_a_bad_value_wherever_it_stands(value: float, dtype: torch.dtype) -> None:
    for size in (1, 8, 67):
        logits = torch.zeros(size, size, dtype=dtype)
        logits.fill_diagonal_(value)  # row i is bad at i
        logits[:, 0] += 1000  # and has a larger finite logit
        assert all(r.error for r in verify(logits, [make_request()] * size))


def test_a_row_that_is_not_used_is_not_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    worked_on = []
    original = sampling_module.survivors

    def counting(row: Row) -> Any:
        worked_on.append(row.position)
        return original(row)

    monkeypatch.setattr(sampling_module, "survivors", counting)
    request = make_request([3, 5, 1, 1], num_committed=20, temperature=1.0, top_k=1)
    assert verify(one_hot(3, 1, 1, 1, 1), [request])[0].token_ids == [3, 1]
    assert worked_on == [20, 21]


# --- drafts do not change tokens ------------------------------------------------------------------

Table = Callable[[tuple[int, ...]], torch.Tensor]
VOCAB = 8


def table_of(seed: int, scale: float) -> Table:
    """Logits as a function of the whole prefix, as a language model's are."""

    def logits(prefix: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**62)
        return (torch.randn(VOCAB, generator=generator) * scale).to(torch.bfloat16)

    return logits


def decode(
    table: Table,
    data: SamplingData,
    num_tokens: int,
    draft: Callable[[tuple[int, ...]], Sequence[int]],
) -> list[int]:
    prompt = (1, 2, 3)
    tokens = prompt
    while len(tokens) < len(prompt) + num_tokens:
        drafts = draft(tokens)
        rows = [table(tokens + tuple(drafts[:j])) for j in range(1 + len(drafts))]
        request = VerifyRequest("r", drafts, tokens, len(prompt), data)
        (result,) = verify(torch.stack(rows), [request])
        assert result.error is None
        assert 1 <= len(result.token_ids) <= 1 + len(drafts)
        tokens += tuple(result.token_ids)
    return list(tokens[len(prompt) :][:num_tokens])


sampling_data = st.builds(
    make_sampling,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 1.6]),
    top_k=st.sampled_from([0, 1, 3, 8]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.sampled_from([0, 4]),
    stop_token_ids=st.sampled_from([(), (EOS,), (0, 1, EOS)]),
)


@settings(deadline=None, max_examples=60)
@given(data=sampling_data, table_seed=st.integers(0, 10**9), source=st.data())
def test_any_drafts_leave_the_tokens_that_one_by_one_decoding_gives(
    data: SamplingData, table_seed: int, source: st.DataObject
) -> None:
    table = table_of(table_seed, scale=2.0)
    plain = decode(table, data, 9, lambda _: [])

    def drafts(tokens: tuple[int, ...]) -> list[int]:
        # Right ones mixed with wrong ones, so that drafts are accepted to every depth.
        done = len(tokens) - 3
        length = source.draw(st.integers(0, 4))
        right = plain[done : done + length]
        wrong = source.draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))
        return right[: source.draw(st.integers(0, length))] + wrong

    assert decode(table, data, 9, drafts) == plain


def test_requests_give_the_same_tokens_alone_and_together() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(60, 301, generator=generator)
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}]
    requests = [
        make_request([5, 6], num_committed=i, seed=7 + i % 2, **kinds[i % 3]) for i in range(20)
    ]
    together = verify(logits, requests)
    for i, request in enumerate(requests):
        assert verify(logits[3 * i : 3 * i + 3], [request]) == [together[i]]


# --- logprobs, backends ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 3])
def test_each_token_has_the_logprobs_of_its_own_raw_row(n: int) -> None:
    rows, requests = mixed_batch(6)
    asking = [
        replace(r, sampling=replace(r.sampling, logprobs=n if i % 2 else None))
        for i, r in enumerate(requests)
    ]
    results = verify(torch.cat(rows), asking)
    plain = verify(torch.cat(rows), requests)
    for i, (logits, result) in enumerate(zip(rows, results, strict=True)):
        assert replace(result, logprobs=None) == plain[i]
        if i % 2 == 0:
            assert result.logprobs is None
            continue
        assert result.logprobs is not None
        assert len(result.logprobs) == len(result.token_ids)
        for row, token_id, logprobs in zip(logits, result.token_ids, result.logprobs, strict=False):
            exact = row.double() - math.log(sum(math.exp(x) for x in row.tolist()))
            likeliest = sorted(range(len(row)), key=lambda i: -exact[i])[:n]
            assert list(logprobs) == [token_id, *(x for x in likeliest if x != token_id)]
            for x, logprob in logprobs.items():
                assert logprob == pytest.approx(exact[x].item(), abs=1e-5)


def test_a_request_that_fails_has_no_logprobs() -> None:
    (result,) = verify(torch.full((1, 6), NAN), [make_request(logprobs=2)])
    assert result.logprobs is None


def test_the_triton_backend_is_imported_when_it_is_asked_for_and_gets_logprobs_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    class Twin:
        @staticmethod
        def verify(logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
            asked.append((logits.shape, len(requests)))
            return [VerifyResult([3]) for _ in requests]

    monkeypatch.setitem(sys.modules, "foresay.core.worker.triton_sampler", Twin)  # type: ignore[arg-type]
    request = make_request(logprobs=0)
    assert verify(one_hot(1), [request])[0].token_ids == [1]
    assert verify(one_hot(1), [request], backend="torch")[0].token_ids == [1]
    assert not asked, "auto, on a CPU, is torch"
    (result,) = verify(one_hot(1), [request], backend="triton")
    assert asked == [((1, 6), 1)]
    assert result.token_ids == [3]
    assert [list(x) for x in result.logprobs or []] == [[3]]
