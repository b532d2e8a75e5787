"""Verification: same tokens as plain decoding, the target's distribution, and what may go wrong.

The chi-square tests run on fixed seeds. With other seeds, a right sampler would fail each of them
once in 10 000 times.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from foresay.core.messages import SamplingData
from foresay.core.worker import sampling as sampling_module
from foresay.core.worker.rejection_sampler import VerifyRequest, VerifyResult, verify
from foresay.core.worker.sampling import Row, target_probs

INF, NAN = float("inf"), float("nan")
ODDS = 1e-4
EOS = 2


def make_sampling(**changes: Any) -> SamplingData:
    values: dict[str, Any] = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "min_tokens": 0,
        "stop_token_ids": (),
    }
    return SamplingData(**(values | changes))


def make_request(
    drafts: Sequence[int] = (), num_committed: int = 5, num_output: int = 0, **changes: Any
) -> VerifyRequest:
    return VerifyRequest("r", drafts, num_committed, num_output, make_sampling(**changes))


def one_hot(*tops: int, size: int = 6) -> torch.Tensor:
    """Rows of logits whose argmax are `tops`."""
    return torch.nn.functional.one_hot(torch.tensor(tops), size).float() * 9


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
    assert verify(logits, [request]) == [VerifyResult(tokens)]


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


def bad_rows() -> dict[str, tuple[torch.Tensor, str]]:
    good = one_hot(1)[0]
    partly = good.clone()
    partly[4] = NAN
    masked = torch.full_like(good, -INF)
    masked[EOS] = 1.0
    infinite = good.clone()
    infinite[5] = INF
    return {
        "all NaN": (torch.full_like(good, NAN), "the target model's logits contain NaN"),
        "partly NaN": (partly, "the target model's logits contain NaN"),
        "+inf": (infinite, "the target model's logits contain +inf"),
        "all -inf": (torch.full_like(good, -INF), "no token is allowed: every logit is -inf"),
        "only EOS, masked": (
            masked,
            "no token is allowed: every logit is -inf, once min_tokens masks the stop ids [2]",
        ),
    }


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
    assert verify(logits, [make_request([3, 5, 1], **rule)]) == [VerifyResult([3, 1])]


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
        num_output = len(tokens) - len(prompt)
        request = VerifyRequest("r", drafts, len(tokens), num_output, data)
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


# --- the distribution -----------------------------------------------------------------------------


def p_value(observed: Counter[Any], expected: dict[Any, float], num_draws: int) -> float:
    """Chi-square of counts against probabilities; rare outcomes are pooled to 5 expected."""
    assert all(expected.get(outcome, 0) > 0 for outcome in observed), "an impossible outcome"
    bins: list[tuple[float, float]] = []
    rest_observed, rest_expected = 0.0, 0.0
    for outcome, probability in sorted(expected.items(), key=lambda item: item[1]):
        rest_observed += observed[outcome]
        rest_expected += probability * num_draws
        if rest_expected >= 5:
            bins.append((rest_observed, rest_expected))
            rest_observed, rest_expected = 0.0, 0.0
    last_observed, last_expected = bins.pop()
    bins.append((last_observed + rest_observed, last_expected + rest_expected))
    statistic = sum((o - e) ** 2 / e for o, e in bins)
    return float(stats.chi2.sf(statistic, len(bins) - 1)) if len(bins) > 1 else 1.0


def probabilities(logits: torch.Tensor, data: SamplingData) -> dict[int, float]:
    probs = target_probs(Row(logits, data, 0, 0)).double()
    return dict(enumerate((probs / probs.sum()).tolist()))


DRAFTS: dict[str, Callable[[torch.Tensor, int], int]] = {
    "the likeliest": lambda logits, _: int(logits.argmax()),
    "the least likely": lambda logits, _: int(logits.argmin()),
    "random": lambda logits, i: (i * 2654435761 >> 7) % len(logits),
}
LAWS: dict[str, dict[str, Any]] = {
    "temperature .5": {"temperature": 0.5},
    "temperature 1": {"temperature": 1.0},
    "temperature 2": {"temperature": 2.0},
    "temperature .5, top_p .95": {"temperature": 0.5, "top_p": 0.95},
    "temperature 1, top_k 5": {"temperature": 1.0, "top_k": 5},
    "temperature 2, all filters": {"temperature": 2.0, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
}
by_law = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())


@by_law
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS.keys())
def test_first_and_later_tokens_follow_the_target_whatever_is_drafted(
    draft: Callable[[torch.Tensor, int], int], law: dict[str, Any]
) -> None:
    num_requests = 1000
    rows = torch.randn(3, 8, generator=torch.Generator().manual_seed(5)) * 1.3
    requests = [
        make_request([draft(rows[0], i), draft(rows[1], i + 1)], seed=i, **law)
        for i in range(num_requests)
    ]
    results = verify(rows.repeat(num_requests, 1), requests)
    # A row is used iff earlier, independent ones agreed with the draft: its own law is unchanged.
    for j, logits in enumerate(rows):
        tokens = [r.token_ids[j] for r in results if len(r.token_ids) > j]
        if len(tokens) >= 40:
            expected = probabilities(logits, requests[0].sampling)
            assert p_value(Counter(tokens), expected, len(tokens)) > ODDS
    assert sum(len(r.token_ids) for r in results) >= num_requests


@pytest.mark.parametrize(
    "law",
    [
        {"temperature": 0.5},
        {"temperature": 1.0},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 2.0, "top_k": 300, "top_p": 0.95},
        {"temperature": 1.0, "min_p": 0.02},
    ],
    ids=str,
)
def test_tokens_of_a_large_vocabulary_follow_the_target(law: dict[str, Any]) -> None:
    num_requests = 1000
    logits = torch.randn(4096, generator=torch.Generator().manual_seed(6)) * 2.5
    draft = int(logits.argmax())
    requests = [make_request([draft], seed=10**6 + i, **law) for i in range(num_requests)]
    results = verify(logits.expand(2 * num_requests, -1), requests)
    expected = probabilities(logits, requests[0].sampling)
    for j in range(2):
        tokens = [r.token_ids[j] for r in results if len(r.token_ids) > j]
        if len(tokens) >= 40:
            assert p_value(Counter(tokens), expected, len(tokens)) > ODDS


def test_positions_of_one_seed_are_as_independent_as_seeds_are() -> None:
    logits = torch.randn(8, generator=torch.Generator().manual_seed(7))
    requests = [make_request(num_committed=i, seed=12345, temperature=1.0) for i in range(2000)]
    results = verify(logits.expand(2000, -1), requests)
    tokens = [r.token_ids[0] for r in results]
    expected = probabilities(logits, requests[0].sampling)
    assert p_value(Counter(tokens), expected, 2000) > ODDS
    pairs = {(a, b): expected[a] * expected[b] for a, b in itertools.product(range(8), repeat=2)}
    observed = Counter(zip(tokens[0::2], tokens[1::2], strict=True))
    assert p_value(observed, pairs, 1000) > ODDS


def test_the_chi_square_sees_a_temperature_that_is_off_by_a_fifth() -> None:
    logits = torch.randn(8, generator=torch.Generator().manual_seed(5)) * 1.3
    requests = [make_request(seed=i, temperature=1.0) for i in range(3000)]
    results = verify(logits.expand(3000, -1), requests)
    observed = Counter(r.token_ids[0] for r in results)
    assert p_value(observed, probabilities(logits, requests[0].sampling), 3000) > ODDS
    wrong = probabilities(logits, make_sampling(temperature=1.2))
    assert p_value(observed, wrong, 3000) < ODDS


CHAIN_DRAFTS: dict[str, Callable[[torch.Tensor, tuple[int, ...], int], list[int]]] = {
    "none": lambda chain, tokens, i: [],
    "the likeliest path": lambda chain, tokens, i: follow(chain, tokens[-1], "argmax"),
    "the least likely path": lambda chain, tokens, i: follow(chain, tokens[-1], "argmin"),
    "ragged": lambda chain, tokens, i: [(i + j) % 4 for j in range(i % 4)],
}


def follow(chain: torch.Tensor, state: int, choice: str) -> list[int]:
    path = []
    for _ in range(2):
        state = int(getattr(chain[state], choice)())
        path.append(state)
    return path


@pytest.mark.parametrize("draft", CHAIN_DRAFTS.values(), ids=CHAIN_DRAFTS.keys())
def test_three_tokens_of_a_markov_chain_follow_their_joint_law(
    draft: Callable[[torch.Tensor, tuple[int, ...], int], list[int]],
) -> None:
    num_requests = 1200
    law = {"temperature": 0.8}
    chain = torch.randn(4, 4, generator=torch.Generator().manual_seed(8))  # [last token, next]
    steps = [probabilities(chain[state], make_sampling(**law)) for state in range(4)]
    expected = {
        (a, b, c): steps[0][a] * steps[a][b] * steps[b][c]
        for a, b, c in itertools.product(range(4), repeat=3)
    }
    texts: list[tuple[int, ...]] = [(0,)] * num_requests
    while unfinished := [i for i, text in enumerate(texts) if len(text) < 4]:
        requests, rows = [], []
        for i in unfinished:
            drafts = draft(chain, texts[i], i)
            requests.append(make_request(drafts, num_committed=len(texts[i]), seed=i, **law))
            rows += [texts[i][-1], *drafts]
        for i, result in zip(unfinished, verify(chain[rows], requests), strict=True):
            texts[i] += tuple(result.token_ids)
    observed = Counter((a, b, c) for _, a, b, c, *_ in texts)
    assert p_value(observed, expected, num_requests) > ODDS
