"""The walk through a draft tree: against plain decoding, by hand, and in Triton."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import HAS_TRITON, interpreted, run_plan
from trees import SHAPES, in_a_tree, random_tree, walked_plainly, way_to
from verifying import INF, KINDS, NAN, drawn_probs, make_request, mixed_batch, one_hot

from foresay.core.worker.processors import Context
from foresay.core.worker.rejection_sampler import VerifyRequest, VerifyResult, verify
from foresay.core.worker.sampling import Row, processed_logits

PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "penalties": {
        "repetition_penalty": 1.7,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.6,
    },
    "bans": {
        "min_tokens": 3,  # one output token is committed: it may come from depth 2 on
        "stop_token_ids": (2,),
        "bad_words_token_ids": ((3, 1), (0, 0, 2), (1, 1, 3)),
    },
    "bias": {"logit_bias": ((0, 1.5), (3, -1.0)), "allowed_token_ids": (0, 1, 2, 3)},
}
LAWS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}} | KINDS


def a_batch(
    seed: int, size: int, num_nodes: int, processors: str, scale: float = 2.0
) -> tuple[list[torch.Tensor], list[VerifyRequest]]:
    """Requests of every law with trees of every shape, each with its rows."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows: list[torch.Tensor] = []
    requests: list[VerifyRequest] = []
    for shape in SHAPES.values():
        for law in LAWS.values():
            changes = {"seed": rng.randrange(2**40)} | PROCESSORS[processors] | law
            tree = shape(rng, min(size, 4), rng.randrange(num_nodes // 2, num_nodes + 1))
            # The committed ones count for penalties, as do the drafts on the way.
            request = make_request(num_committed=4 + rng.randrange(3), num_output=1, **changes)
            request = in_a_tree(replace(request, req_id=f"r{len(requests)}"), tree)
            logits = torch.randn(request.num_rows, size, generator=generator) * scale
            for token_id, parent in zip(*tree, strict=True):  # drafts are often right
                logits[parent + 1, token_id] += (4 + 1.5 * math.log(size)) * rng.random()
            rows.append(logits)
            requests.append(request)
    return rows, requests


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize(("size", "num_nodes"), [(4, 20), (40, 32)], ids=str)
def test_a_walk_gives_what_plain_decoding_gives(size: int, num_nodes: int, processors: str) -> None:
    lengths: Counter[int] = Counter()
    for seed in range(3):
        rows, requests = a_batch(seed, size, num_nodes, processors)
        results = verify(torch.cat(rows), requests, backend="torch")
        expected = [walked_plainly(*each) for each in zip(rows, requests, strict=True)]
        assert results == expected
        lengths.update(len(result.accepted) for result in results)
        for request, result in zip(requests, results, strict=True):
            assert request.parents is not None
            last = result.accepted[-1] if result.accepted else -1
            assert result.accepted == way_to(request.parents, last)
            assert [request.draft_token_ids[i] for i in result.accepted] == result.token_ids[:-1]
    assert lengths[0]
    assert max(lengths) >= 3


def greedy_walk(logits: torch.Tensor, token_ids: list[int], parents: list[int]) -> list[int]:
    """The definition: from a node to its child that is the row's argmax, the lowest on ties."""
    emitted: list[int] = []
    node = -1
    while True:
        values = logits[node + 1].tolist()
        emitted.append(values.index(max(values)))
        below = [i for i, parent in enumerate(parents) if parent == node]
        right = [i for i in below if token_ids[i] == emitted[-1]]
        if not right:
            return emitted
        node = right[0]


def test_greedy_walks_are_those_of_the_definition() -> None:
    rng = random.Random(1)
    lengths: Counter[int] = Counter()
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        tree = list(SHAPES.values())[seed % 4](rng, 3, 20)
        logits = torch.randint(0, 4, (1 + len(tree[0]), 3), generator=generator).float()  # ties
        (result,) = verify(logits, [in_a_tree(make_request(), tree)])
        assert result.token_ids == greedy_walk(logits, *tree)
        lengths[len(result.token_ids)] += 1
    assert len(lengths) >= 4


def test_a_chain_written_as_a_tree_is_the_chain() -> None:
    rows, requests = mixed_batch(3, size=3)
    requests = [replace(request, draft_probs=None) for request in requests]
    as_trees = [
        replace(r, parents=[j - 1 for j in range(len(r.draft_token_ids))]) for r in requests
    ]
    expected = verify(torch.cat(rows), requests)
    assert verify(torch.cat(rows), as_trees) == expected
    assert any(len(result.accepted) > 1 for result in expected)


# --- by hand --------------------------------------------------------------------------------------

#   root: 3 -+- 1 (node 0) --- 4 (node 2)
#            +- 3 (node 1) -+- 1 (node 3) --- 2 (node 5)
#                           +- 5 (node 4)
TREE = [1, 3, 4, 1, 5, 2], [-1, -1, 0, 1, 1, 3]
ROWS = one_hot(3, 0, 5, 0, 2, 0, 4)  # the root's, then the nodes'
by_temperature = pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])


def walked(logits: torch.Tensor, tree: tuple[list[int], list[int]], **changes: Any) -> VerifyResult:
    (result,) = verify(logits, [in_a_tree(make_request(top_k=1, **changes), tree)])
    return result


@by_temperature
@pytest.mark.parametrize(
    ("tops", "token_ids", "accepted"),
    [
        ((3, 0, 5, 0, 2, 0, 4), [3, 5, 0], [1, 4]),
        ((3, 0, 1, 0, 2, 0, 4), [3, 1, 2, 4], [1, 3, 5]),
        ((3, 0, 4, 0, 2, 0, 4), [3, 4], [1]),  # 4 is below its sibling only
        ((1, 4, 5, 0, 2, 0, 4), [1, 4, 0], [0, 2]),
        ((5, 4, 5, 0, 2, 0, 4), [5], []),  # a token of the second level
    ],
    ids=str,
)
def test_the_walk_goes_to_the_child_that_is_right(
    tops: tuple[int, ...], token_ids: list[int], accepted: list[int], temperature: float
) -> None:
    result = walked(one_hot(*tops), TREE, temperature=temperature)
    assert result == VerifyResult(token_ids, accepted=accepted)


@by_temperature
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_rows_off_the_path_are_not_looked_at(bad: float, temperature: float) -> None:
    logits = ROWS.clone()
    logits[[1, 3, 4, 6]] = bad
    result = walked(logits, TREE, temperature=temperature)
    assert result == VerifyResult([3, 5, 0], accepted=[1, 4])


@by_temperature
@pytest.mark.parametrize(("row", "position"), [(0, 5), (2, 6), (5, 7)])
def test_a_bad_row_on_the_path_is_an_error_at_its_position(
    row: int, position: int, temperature: float
) -> None:
    logits = ROWS.clone()
    logits[row, 1] = NAN
    result = walked(logits, TREE, temperature=temperature)
    why = f"at position {position}, the target model's logits contain NaN"
    assert result == VerifyResult(error=why)


@by_temperature
def test_of_equal_siblings_the_first_is_taken(temperature: float) -> None:
    tree = [3, 3, 1, 2], [-1, -1, 1, 0]
    logits = one_hot(3, 2, 1, 0, 4)
    logits[[2, 3]] = NAN
    result = walked(logits, tree, temperature=temperature)
    assert result == VerifyResult([3, 2, 4], accepted=[0, 3])


@by_temperature
def test_ids_that_the_target_lacks_are_never_right(temperature: float) -> None:
    tree = [-1, 6, 2**40, 3], [-1, -1, -1, -1]
    result = walked(one_hot(3, 0, 0, 0, 4), tree, temperature=temperature, presence_penalty=0.1)
    assert result == VerifyResult([3, 4], accepted=[3])


@by_temperature
def test_logprobs_are_those_of_the_path_s_rows(temperature: float) -> None:
    logits = ROWS + torch.randn(ROWS.shape, generator=torch.Generator().manual_seed(1))
    result = walked(logits, TREE, temperature=temperature, logprobs=0)
    assert (result.token_ids, result.accepted) == ([3, 5, 0], [1, 4])
    own = logits.log_softmax(-1)
    assert result.logprobs == [
        {3: own[0, 3].item()},
        {5: own[2, 5].item()},
        {0: own[5, 0].item()},
    ]


@pytest.mark.parametrize("rule", ["block", "rejection", "coupled"])
def test_a_tree_has_one_rule_and_its_probs_are_not_looked_at(rule: str) -> None:
    probs = drawn_probs(torch.full((6, 6), NAN), rule)
    request = in_a_tree(make_request(temperature=1.0, verification=rule, draft_probs=probs), TREE)
    plain = replace(request, draft_probs=None, sampling=replace(request.sampling))
    logits = torch.randn(7, 6, generator=torch.Generator().manual_seed(2))
    (result,) = verify(logits, [request])
    assert [result] == verify(logits, [plain])
    assert not result.faults


def test_processors_see_the_tokens_of_the_way_and_no_others() -> None:
    rng = random.Random(3)
    token_ids, parents = random_tree(rng, 5, 14)
    committed = [4, 1, 1, 0]
    for name, changes in PROCESSORS.items():
        sampling = make_request(temperature=1.0, **changes).sampling
        whole = Context(sampling, committed, 2, token_ids, parents)
        for node in range(-1, len(token_ids)):
            way = way_to(parents, node)
            assert list(whole.drafts_before(node + 1)) == way
            alone = Context(sampling, [*committed, *(token_ids[i] for i in way)], 2)
            logits = torch.randn(5, generator=torch.Generator().manual_seed(node + 1))
            row, expected = Row(logits, whole, node + 1), Row(logits, alone)
            assert (row.position, row.output_index) == (expected.position, expected.output_index)
            processed, other = processed_logits(row), processed_logits(expected)
            assert (processed is None) == (other is None), name
            if processed is not None and other is not None:
                assert torch.equal(processed, other), name


# --- in Triton ------------------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="there is no triton")


@needs_triton
@pytest.mark.parametrize(
    ("size", "processors"),
    [(1, "none"), (7, "none"), (7, "penalties"), (128, "bans"), (129, "bias"), (50257, "none")],
    ids=str,
)
def test_the_kernels_walk_as_the_reference_does(size: int, processors: str) -> None:
    """Chains of every rule in between, each request with its own number of drafts."""
    rows, requests = a_batch(size, size, 8 if size > 999 else 6, processors)
    rows, requests = rows[size % 2 :: 2], requests[size % 2 :: 2]
    if 1 < size < 999:
        chains = mixed_batch(size, size=size)
        rows, requests = [*rows, *chains[0][:6]], [*requests, *chains[1][:6]]
    order = random.Random(size).sample(range(len(rows)), len(rows))
    logits = torch.cat([rows[i] for i in order])
    requests = [requests[i] for i in order]
    expected = verify(logits, requests, backend="torch")
    assert interpreted(run_plan, logits, requests) == expected
    assert max(len(result.accepted) for result in expected) >= 2
    assert len({len(result.accepted) for result in expected}) >= 2


@needs_triton
def test_the_kernels_take_the_path_s_rows_only_and_the_first_of_equals() -> None:
    requests, logits = [], []
    spoilt = ROWS.clone()
    spoilt[[1, 3, 4, 6]] = NAN
    failing = ROWS.clone()
    failing[5, 2] = NAN
    twins = one_hot(3, 2, 1, 0, 4)
    twins[[2, 3]] = NAN
    for temperature in (0.0, 1.0):
        request = make_request(temperature=temperature, top_k=1)
        tree = in_a_tree(request, TREE)
        requests += [tree, tree, in_a_tree(request, ([3, 3, 1, 2], [-1, -1, 1, 0]))]
        logits += [spoilt, failing, twins]
    expected = [
        VerifyResult([3, 5, 0], accepted=[1, 4]),
        VerifyResult(error="at position 7, the target model's logits contain NaN"),
        VerifyResult([3, 2, 4], accepted=[0, 3]),
    ]
    assert interpreted(run_plan, torch.cat(logits), requests) == expected * 2
