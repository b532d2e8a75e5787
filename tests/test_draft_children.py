"""The children of tree nodes: which they are, how likely, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from laws import filtered, make_sampling, random_table

from foresay.core.messages import SamplingData
from foresay.core.proposer import DraftChildren
from foresay.core.worker import race as race_module
from foresay.core.worker.draft_sampler import DrawRequest, StepSampler
from foresay.core.worker.likeliest import likeliest
from foresay.core.worker.noise import NoiseKey, exponential, vocabulary_words
from foresay.core.worker.processors import Context
from foresay.core.worker.race import Race, draw, first
from foresay.core.worker.sampling import Row, sample

INF, NAN = float("inf"), float("nan")
CPU = torch.device("cpu")
GREEDY = {"temperature": 0.0}


def sampler_of(*laws: dict[str, Any], vocab_size: int = 6, k: int = 3) -> StepSampler:
    requests = [
        DrawRequest(f"r{i}", make_sampling(**({"verification": "block"} | law)), 5, k)
        for i, law in enumerate(laws)
    ]
    return StepSampler(requests, vocab_size)


def as_lists(children: DraftChildren) -> list[list[int]]:
    assert children.token_ids.dtype == torch.int64
    assert children.log_probs.dtype == torch.float32
    assert children.token_ids.shape == children.log_probs.shape
    result: list[list[int]] = children.token_ids.tolist()
    return result


def by_perturbed_score(
    probs: list[float], sampling: SamplingData, position: int
) -> list[tuple[int, float]]:
    """The definition, in Python: ids and the log-softmax of log prob + Gumbel noise, best first."""
    key = NoiseKey(sampling.seed, position, sample=sampling.sample_index)
    words = vocabulary_words(key, len(probs), CPU).tolist()
    scores = {i: math.log(p) - math.log(exponential(words[i])) for i, p in enumerate(probs) if p}
    top = max(scores.values())
    rest = top + math.log(sum(math.exp(score - top) for score in scores.values()))
    return sorted(((i, score - rest) for i, score in scores.items()), key=lambda pair: -pair[1])


# --- greedy requests ------------------------------------------------------------------------------


def test_the_children_of_a_greedy_request_are_the_likeliest() -> None:
    logits = random_table(4, 6, seed=1)
    children = sampler_of(GREEDY, GREEDY).children(logits, [0, 1, 1, 2], [0, 1, 0, 0], 3)
    log_probs = logits.log_softmax(-1)
    order = log_probs.sort(dim=-1, descending=True)
    assert as_lists(children) == order.indices[:, :3].tolist()
    torch.testing.assert_close(children.log_probs, order.values[:, :3])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_columns", [5, 64, 100, 4096, 4100])
def test_the_likeliest_are_those_of_a_stable_sort(num_columns: int, dtype: torch.dtype) -> None:
    """Few distinct values, so that there are equals within, at the end of, and beyond the width."""
    generator = torch.Generator().manual_seed(num_columns)
    for spread in (2, 30, 10**6, None):
        if spread is None:  # no two are equal: what is found at once
            logits = torch.randn(6, num_columns, generator=generator).to(dtype)
        else:
            steps = torch.randint(0, spread, (6, num_columns), generator=generator)
            logits = (steps * 12 / spread).to(dtype)
            logits[1, 2:] = -INF
        before = logits.clone()
        columns, log_probs = likeliest(logits, 8)
        assert torch.equal(logits, before)
        expected = logits.float().sort(dim=-1, descending=True, stable=True)
        width = min(8, num_columns)
        own = logits.float().log_softmax(-1).gather(1, expected.indices[:, :width])
        torch.testing.assert_close(log_probs, own)
        found = expected.indices[:, :width].masked_fill(own == -INF, 0)
        assert columns.tolist() == found.tolist()


def test_draft_ids_of_one_target_id_count_together() -> None:
    ids = torch.tensor([4, 1, 4, 3, 9])  # the target has no 9
    logits = torch.tensor([[0.0, 0.5, 0.0, -1.0, 9.0]])
    children = sampler_of(GREEDY).children(logits, [0], [0], 2, ids)
    assert as_lists(children) == [[4, 1]]
    shares = torch.tensor([2.0, math.exp(0.5), math.exp(-1.0)])
    torch.testing.assert_close(children.log_probs[0], (shares / shares.sum()).log()[:2])


def test_what_a_row_lacks_is_id_0_and_not_likely_at_all() -> None:
    logits = torch.tensor([[-INF, 2.0, -INF, 1.0]])
    for law in (GREEDY, {}, {"top_k": 3}):
        children = sampler_of(law).children(logits, [0], [0], 6, torch.tensor([3, 2, 5, 4]))
        (ids,) = as_lists(children)
        assert sorted(ids[:2]) == [2, 4]
        assert ids[2:] == [0] * 4
        assert children.log_probs[0, 2:].tolist() == [-INF] * 4
        assert children.log_probs[0, :2].exp().sum().item() == pytest.approx(1, abs=1e-5)


# --- sampled requests -----------------------------------------------------------------------------

LAWS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature .5": {"temperature": 0.5},
    "top_k 5": {"top_k": 5},
    "top_p .6": {"top_p": 0.6, "temperature": 2.0},
    "min_p .1": {"min_p": 0.1},
    "another sample": {"sample_index": 3, "seed": 2**63 + 1},
}
by_law = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())


@by_law
@pytest.mark.parametrize("rule", ["coupled", "block"])
@pytest.mark.parametrize("size", [6, 700])
def test_children_are_the_best_by_log_prob_and_the_target_s_noise(
    law: dict[str, Any], rule: str, size: int
) -> None:
    logits = random_table(4, size, seed=2)
    law = law | {"verification": rule}
    nodes = [(0, 0), (1, 2), (0, 1), (0, 1)]  # two siblings' children among them
    sampler = sampler_of(law, law | {"seed": 7}, vocab_size=size)
    children = sampler.children(logits, [d for _, d in nodes], [r for r, _ in nodes], 5)
    for i, (row, depth) in enumerate(nodes):
        sampling = make_sampling(**(law | ({"seed": 7} if row else {})))
        probs = filtered(logits[i], sampling).tolist()
        expected = by_perturbed_score(probs, sampling, 5 + depth)[:5]
        ids = children.token_ids[i, : len(expected)].tolist()
        assert ids == [token_id for token_id, _ in expected]
        found = children.log_probs[i, : len(expected)].tolist()
        assert found == pytest.approx([score for _, score in expected], abs=1e-4)
        assert all(value == -INF for value in children.log_probs[i, len(expected) :].tolist())


@by_law
@pytest.mark.parametrize("size", [40, 3000, 20_000])
def test_the_first_child_is_what_the_target_draws_from_the_same_logits(
    law: dict[str, Any], size: int
) -> None:
    logits = random_table(6, size, seed=3, scale=2.0)
    sampler = sampler_of(law, vocab_size=size)
    coupled = sampler_of(law | {"verification": "coupled"}, vocab_size=size, k=6)
    context = Context(make_sampling(**law), [0] * 5, 3, [0] * 5)
    children = sampler.children(logits, range(6), [0] * 6, 2)
    for depth in range(6):
        token_id = int(children.token_ids[depth, 0])
        assert [token_id] == sample([Row(logits[depth], context, depth)])
        assert [token_id] == coupled.draw(logits[depth : depth + 1], depth, [0]).tolist()


def test_through_a_map_as_well() -> None:
    """Reduced vocabularies, of which so many tokens run that their noise is made all at once."""
    size = 9000
    ids = torch.randperm(size, generator=torch.Generator().manual_seed(1))[:5000]
    logits = random_table(2, 5000, seed=4)
    law = {"verification": "coupled"}
    children = sampler_of(law, vocab_size=size).children(logits, [0, 0], [0, 0], 3, ids)
    for i in range(2):
        sampler = sampler_of(law, vocab_size=size)
        assert sampler.draw(logits[i : i + 1], 0, [0], ids).tolist() == [
            int(children.token_ids[i, 0])
        ]
        probs = torch.zeros(size).index_copy_(0, ids, logits[i].softmax(-1)).tolist()
        expected = by_perturbed_score(probs, make_sampling(), 5)
        assert children.token_ids[i].tolist() == [token_id for token_id, _ in expected[:3]]


def test_greedy_and_sampled_requests_in_one_call_do_not_mix() -> None:
    logits = random_table(4, 6, seed=5)
    laws: list[dict[str, Any]] = [{}, GREEDY, {"top_k": 2}, GREEDY]
    together = sampler_of(*laws).children(logits, [1] * 4, [0, 1, 2, 3], 4)
    for i in range(4):
        alone = sampler_of(*laws).children(logits[i : i + 1], [1], [i], 4)
        assert torch.equal(together.token_ids[i], alone.token_ids[0])
        assert torch.equal(together.log_probs[i], alone.log_probs[0])


@pytest.mark.parametrize("num_tokens", [1, 3, 500, 5000])
def test_the_first_of_a_race_are_those_with_the_least_times(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    for seed in range(4):
        weights = torch.rand(num_tokens, generator=generator).pow(8)
        weights[1::3] = 0
        key = NoiseKey(seed, 9)
        words = vocabulary_words(key, num_tokens * 3, CPU)
        for token_ids in (None, torch.arange(num_tokens) * 3):
            race = Race(key, token_ids, weights)
            ids = list(range(num_tokens)) if token_ids is None else token_ids.tolist()
            times = {
                i: exponential(int(words[i])) / w
                for i, w in zip(ids, weights.tolist(), strict=True)
                if w > 0
            }
            expected = sorted(times, key=times.__getitem__)
            for width in (1, 4, 9):
                (arrivals,) = first([race], width)
                assert arrivals.token_ids == expected[:width]
                assert arrivals.token_ids[:1] == draw([race])
                total = math.log(sum(1 / time for time in times.values()))
                shares = [-math.log(times[i]) - total for i in expected[:width]]
                assert arrivals.log_shares == pytest.approx(shares, abs=1e-4)


def test_siblings_share_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[NoiseKey] = []
    right = vocabulary_words

    def counted(key: NoiseKey, *rest: Any) -> torch.Tensor:
        made.append(key)
        return right(key, *rest)

    monkeypatch.setattr(race_module, "vocabulary_words", counted)
    sampler = sampler_of({}, {"seed": 1}, vocab_size=5000)
    sampler.children(random_table(5, 5000, seed=6), [2, 2, 2, 3, 2], [0, 0, 0, 0, 1], 2)
    assert made == [NoiseKey(0, 7), NoiseKey(0, 8), NoiseKey(1, 7)]


# --- what is refused, and what is survived --------------------------------------------------------


@pytest.mark.parametrize("law", [GREEDY, {}, {"top_p": 0.9}], ids=["greedy", "plain", "top_p"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_a_node_whose_logits_are_not_finite_has_no_children(
    bad: float, law: dict[str, Any]
) -> None:
    logits = random_table(3, 6, seed=7)
    logits[1, 3] = bad
    if bad == -INF:
        logits[1] = bad
    sampler = sampler_of(law)
    children = sampler.children(logits, [1, 1, 1], [0, 0, 0], 2)
    assert as_lists(children)[1] == [0, 0]
    assert children.log_probs[1].tolist() == [-INF, -INF]
    assert sampler.faults == {"non_finite_draft": 1}
    good = sampler_of(law).children(logits[[0, 2]], [1, 1], [0, 0], 2)
    assert torch.equal(children.token_ids[[0, 2]], good.token_ids)
    assert sampler.children(logits[2:], [2], [0], 2).log_probs.isfinite().all()  # it goes on


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(6)}, r"logits are \[6\]"),
        ({"logits": torch.zeros(3, 6)}, "for 2 rows they must be"),
        ({"logits": torch.zeros(2, 6, dtype=torch.int64)}, "of floats"),
        ({"rows": [0, 2]}, "row 2 is no index"),
        ({"rows": [0, -1]}, "row -1 is no index"),
        ({"depths": [1]}, "depths"),
        ({"depths": [0, -1]}, "depths"),
        ({"width": 0}, "width is 0"),
        ({"draft_to_target": torch.zeros(5, dtype=torch.int64)}, "draft_to_target"),
    ],
    ids=str,
)
def test_calls_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {
        "logits": torch.zeros(2, 6),
        "depths": [0, 1],
        "rows": [0, 1],
        "width": 2,
    }
    with pytest.raises(ValueError, match=message):
        sampler_of({}, GREEDY).children(**(call | changes))


def test_a_request_is_drawn_for_or_has_children_not_both() -> None:
    logits = torch.zeros(1, 6)
    sampler = sampler_of({}, {})
    sampler.children(logits, [0], [0], 2)
    sampler.draw(logits, 0, [1])
    with pytest.raises(ValueError, match="made of children"):
        sampler.draw(logits, 0, [0])
    with pytest.raises(ValueError, match="has drawn its draft"):
        sampler.children(logits, [1], [1], 2)
    assert sampler.drawn(0) is None
    assert sampler.draft_probs(0) is None
    assert len(sampler.drawn(1) or []) == 1


def test_a_request_that_wants_no_draft_has_no_children() -> None:
    with pytest.raises(ValueError, match="its k is 0"):
        sampler_of({}, k=0).children(torch.zeros(1, 6), [0], [0], 1)


def test_logits_are_only_read() -> None:
    logits = random_table(2, 6, seed=8)
    before = logits.clone()
    sampler_of({}, GREEDY).children(logits, [0, 0], [0, 1], 3)
    assert torch.equal(logits, before)


def test_children_are_for_who_declared_that_it_branches() -> None:
    request = DrawRequest("r", make_sampling(), num_tokens=3, k=2)
    with pytest.raises(ValueError, match=r"who declared Needs\.tree"):
        StepSampler([request], 6, may_branch=False).children(torch.zeros(1, 6), [0], [0], 1)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_with_nan_and_a_tie_has_no_children(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 8, dtype=dtype)
    logits[0, 1], logits[0, 5] = 3, torch.nan
    columns, log_probs = likeliest(logits, 3)
    assert columns.tolist() == [[0, 0, 0], [0, 1, 2]]
    assert log_probs[0].tolist() == [-torch.inf] * 3
    assert log_probs[1].isfinite().all()
