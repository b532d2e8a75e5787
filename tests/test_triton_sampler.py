"""The Triton kernels against the torch reference, token for token, in the interpreter or on a GPU.

Fixed seeds: the words of both are equal, their logarithms and sums may differ in the last place,
which changes about one token in a million. Drafts are made so that some are accepted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import HAS_TRITON, inputs_after_verification, interpreted, run_plan
from verifying import emitted

from foresay.core.messages import SamplingData
from foresay.core.worker.draft_sampler import DraftProbs
from foresay.core.worker.noise import NoiseKey, Stream, uniforms
from foresay.core.worker.rejection_sampler import VerifyRequest, VerifyResult, verify

Kernels = Callable[..., list[VerifyResult]]

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="there is no triton")
COMMITTED = [5, 1, 6, 2, 0, 3]
NUM_PROMPT_TOKENS = 4
INF, NAN = float("inf"), float("nan")
PLAIN = SamplingData(
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=11, min_tokens=0, stop_token_ids=()
)
GREEDY = replace(PLAIN, temperature=0.0)
BANNED = "no token is allowed: every logit is -inf, once min_tokens masks the stop ids [2]"
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
}
RULES = ["greedy", "deterministic", "rejection", "block"]


@pytest.fixture(params=["interpreter", "gpu"] if torch.cuda.is_available() else ["interpreter"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The kernels' results for logits, requests and, if given, a tuning."""
    return partial(interpreted, run_plan) if request.param == "interpreter" else _on_gpu


def _on_gpu(
    logits: torch.Tensor, requests: Sequence[VerifyRequest], *rest: Any
) -> list[VerifyResult]:
    moved = [
        replace(
            r,
            draft_probs=r.draft_probs
            and replace(
                r.draft_probs,
                probs=r.draft_probs.probs.cuda(),
                token_ids=None if (ids := r.draft_probs.token_ids) is None else ids.cuda(),
            ),
        )
        for r in requests
    ]
    return run_plan(logits.cuda(), moved, *rest)


def request(
    draft_token_ids: Sequence[int] = (),
    sampling: SamplingData = PLAIN,
    draft_probs: DraftProbs | None = None,
) -> VerifyRequest:
    return VerifyRequest(
        "r", list(draft_token_ids), COMMITTED, NUM_PROMPT_TOKENS, sampling, draft_probs
    )


def drawn(rule: Any, probs: torch.Tensor, token_ids: torch.Tensor | None = None) -> DraftProbs:
    return DraftProbs(rule, len(COMMITTED), probs, token_ids)


# -- batches of every rule -----------------------------------------------------------------------


def mixed_batch(
    vocab_size: int, dtype: torch.dtype, num_drafts: Sequence[int], seed: int, turn: int = 0
) -> tuple[torch.Tensor, list[VerifyRequest]]:
    """Requests with drafts of these lengths; rules, filters, temperatures and maps in turn."""
    generator = torch.Generator().manual_seed(seed)
    logits: list[torch.Tensor] = []
    requests: list[VerifyRequest] = []
    shared_ids = torch.randperm(vocab_size, generator=generator)[: max(vocab_size // 2, 1)]
    shared_ids = shared_ids.sort().values
    filters = list(FILTERS.values())
    for i, k in enumerate(num_drafts, start=turn):
        rule = RULES[i % 4]
        sampling = replace(
            PLAIN,
            temperature=0.0 if rule == "greedy" else (1.0, 0.5, 2.0)[i % 3],
            seed=2**64 - 1 - i * 0x123456789ABCDEF,
            sample_index=i % 2,
            **filters[(i + 2 * (i // 4)) % len(filters)],  # each rule meets all, in 20 turns
        )
        rows = (torch.randn(k + 1, vocab_size, generator=generator) * 3).to(dtype)
        if rule in ("rejection", "block"):
            maps = (None, shared_ids, torch.arange(max(vocab_size - 1, 1)))
            made = _drawn_draft(rows[:k].float(), rule, sampling, maps[i // 4 % 3], generator)
        else:
            made = _partly_right_draft(rows, sampling, generator), None
        logits.append(rows)
        requests.append(request(made[0], sampling, made[1]))
    return torch.cat(logits), requests


def _drawn_draft(
    rows: torch.Tensor,
    rule: str,
    sampling: SamplingData,
    token_ids: torch.Tensor | None,
    generator: torch.Generator,
) -> tuple[list[int], DraftProbs]:
    scores = rows / sampling.temperature
    scores = scores + torch.randn(scores.shape, generator=generator) * 0.5
    probs = (scores if token_ids is None else scores[:, token_ids]).softmax(dim=-1)
    if token_ids is not None and token_ids.shape[0] == rows.shape[1] - 1:
        token_ids = None  # narrower than the target's vocabulary, and not mapped
    draft: list[int] = []
    if len(rows):
        columns = probs.multinomial(1, generator=generator).squeeze(1)
        draft = (columns if token_ids is None else token_ids[columns]).tolist()
    return draft, drawn(rule, probs, token_ids)


def _partly_right_draft(
    rows: torch.Tensor, sampling: SamplingData, generator: torch.Generator
) -> list[int]:
    """What the target emits row by row, with one wrong token in two drafts of three."""
    draft: list[int] = []
    for row in rows[:-1]:
        single = replace(request(sampling=sampling), token_ids=[*COMMITTED, *draft])
        draft += verify(row.unsqueeze(0), [single], backend="torch")[0].token_ids
    wrong = int(torch.randint(len(draft) * 3 // 2 + 1, (1,), generator=generator))
    if wrong < len(draft):
        draft[wrong] = (draft[wrong] + 1) % rows.shape[1]
    return draft


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = [(vocab_size, turn) for vocab_size in (1, 7, 128, 129) for turn in range(len(DTYPES))]


@needs_triton
@pytest.mark.parametrize(("vocab_size", "turn"), SMALL, ids=str)
def test_a_mixed_batch_gives_the_tokens_of_the_reference(
    vocab_size: int, turn: int, kernels: Kernels
) -> None:
    lengths = [3, 1, 2, 4, 0, 2, 3, 0]
    logits, requests = mixed_batch(vocab_size, DTYPES[turn], lengths, vocab_size, turn * 8)
    expected = verify(logits, requests, backend="torch")
    assert kernels(logits, requests) == expected
    assert len({len(result.token_ids) for result in expected}) >= 3  # some drafts are accepted


@needs_triton
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(50257, torch.bfloat16), (50257, torch.float16), (151936, torch.bfloat16)],
    ids=["50257-bfloat16", "50257-float16", "151936-bfloat16"],
)
def test_a_large_vocabulary_gives_the_tokens_of_the_reference(
    vocab_size: int, dtype: torch.dtype, kernels: Kernels
) -> None:
    logits, requests = mixed_batch(vocab_size, dtype, [1, 2, 2, 3, 2, 0, 1, 2], seed=3)
    assert kernels(logits, requests) == verify(logits, requests, backend="torch")


@needs_triton
@pytest.mark.parametrize("tuning", [(16, 2), (64, 1), (32, 9)], ids=str)
def test_tokens_do_not_depend_on_how_rows_are_shared_out(
    tuning: tuple[int, int], kernels: Kernels
) -> None:
    logits, requests = mixed_batch(129, torch.float32, [2, 1, 2, 3, 0, 2, 3, 2], seed=5)
    assert kernels(logits, requests, tuning) == verify(logits, requests, backend="torch")


@needs_triton
def test_a_plan_can_be_launched_again(kernels: Kernels) -> None:
    logits, requests = mixed_batch(7, torch.float32, [2, 3, 2, 3], seed=6)
    assert kernels(logits, requests, None, 2) == verify(logits, requests, backend="torch")


@needs_triton
def test_no_requests_give_no_results() -> None:
    assert interpreted(partial(verify, backend="triton"), torch.zeros(0, 7), []) == []


@needs_triton
def test_logits_and_draft_probs_are_only_read() -> None:
    logits, requests = mixed_batch(7, torch.float32, [2, 2, 2, 2], seed=7)
    requests = [replace(r, sampling=replace(r.sampling, logit_bias=((1, 0.5),))) for r in requests]
    before = [logits.clone(), *(r.draft_probs.probs.clone() for r in requests[2:])]  # type: ignore[union-attr]
    after = interpreted(inputs_after_verification, logits, requests)
    assert all(map(torch.equal, after, before))


# -- greedy rows ---------------------------------------------------------------------------------


@needs_triton
def test_greedy_takes_the_lowest_id_among_equals(kernels: Kernels) -> None:
    logits = torch.zeros(3, 129)
    logits[0, [40, 17, 128]] = 2.0  # in different tiles and splits
    logits[1, :] = -1.5  # all equal
    logits[2, [128]] = 0.25  # the last id, alone in its tile
    (result,) = kernels(logits, [request([17, 0], GREEDY)], (16, 2))
    assert result == emitted([17, 0, 128])


# -- rows that can't be used ---------------------------------------------------------------------

BAD_ROWS = {
    "NaN": (NAN, "the target model's logits contain NaN"),
    "+inf": (INF, "the target model's logits contain +inf"),
    "nothing": (-INF, "no token is allowed: every logit is -inf"),
}


def certain(rule: str, token_ids: Sequence[int], drafted: Sequence[int]) -> Any:
    """Rows that give `token_ids` for certain (all others are -inf), and a draft drawn so, too."""
    rows = torch.full((len(token_ids), 7), -INF)
    rows[range(len(token_ids)), list(token_ids)] = 1.5
    draft_probs = None
    if rule in ("rejection", "block"):
        draft_probs = drawn(rule, torch.eye(7)[list(drafted)])
    return rows, request(drafted, GREEDY if rule == "greedy" else PLAIN, draft_probs)


@needs_triton
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_row_that_cannot_be_used_ends_its_own_request_if_it_is_used(
    rule: str, kind: str, kernels: Kernels
) -> None:
    value, reason = BAD_ROWS[kind]
    made = [certain(rule, [4, 2, 6], [4, 2]) for _ in range(3)]  # accepted as far as one can tell
    made += [certain(rule, [4, 2, 6], [5, 2]), certain(rule, [4, 2, 6], [4, 2])]
    for index, (rows, _) in enumerate(made[:3]):
        rows[index, :] = value if kind == "nothing" else rows[index]
        rows[index, 6] = value
    made[3][0][1:] = value  # beyond the first mismatch
    results = kernels(torch.cat([rows for rows, _ in made]), [r for _, r in made])
    assert results == [
        VerifyResult(error=f"at position 6, {reason}"),
        VerifyResult(error=f"at position 7, {reason}"),
        VerifyResult(error=f"at position 8, {reason}"),
        VerifyResult([4]),
        emitted([4, 2, 6]),
    ]


@needs_triton
@pytest.mark.parametrize("token_id", [0, 63, 128], ids=str)
def test_a_single_nan_is_found_in_any_tile(token_id: int, kernels: Kernels) -> None:
    logits = torch.randn(2, 129, generator=torch.Generator().manual_seed(1))
    logits[0, token_id] = NAN
    spoilt, sound = kernels(logits, [request(sampling=GREEDY), request(sampling=GREEDY)], (16, 2))
    assert spoilt.error == "at position 6, the target model's logits contain NaN"
    assert sound.token_ids == [int(logits[1].argmax())]


@needs_triton
def test_block_takes_a_row_that_cannot_be_used_for_the_end_of_the_draft(kernels: Kernels) -> None:
    """Without it the draft is one token long, and kept iff u < p: so it is, or row 0 recovers."""
    target, draft = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    rows = torch.stack((target.log(), torch.full((4,), NAN), target.log()))
    requests = [
        request([0, 3], replace(PLAIN, seed=seed), drawn("block", draft.repeat(2, 1)))
        for seed in range(8)
    ]
    results = kernels(rows.repeat(8, 1), requests)
    assert results == verify(rows.repeat(8, 1), requests, backend="torch")
    errors = {result.error for result in results}
    assert errors == {None, "at position 7, the target model's logits contain NaN"}


@needs_triton
def test_a_temperature_may_be_too_low_for_a_logit(kernels: Kernels) -> None:
    logits = torch.tensor([[1.0, 3e38]])
    (result,) = kernels(logits, [request(sampling=replace(PLAIN, temperature=1e-4))])
    assert result.error is not None
    assert result.error.endswith("over the temperature 0.0001 exceeds float32")


# -- processors ----------------------------------------------------------------------------------


@needs_triton
def test_rows_are_processed_each_with_its_prefix_beside_rows_that_are_not(kernels: Kernels) -> None:
    short = {"min_tokens": 4, "stop_token_ids": (4, 2)}  # 2 output tokens are committed
    made = [
        certain("greedy", [4, 2, 4], []),
        certain("greedy", [1, 4], [1]),
        certain("deterministic", [1, 2, 4], [1, 2]),
        certain("greedy", [3, 3], [3]),
    ]
    made[0] = made[0][0][:1], made[0][1]
    for rows, _ in made:
        rows[rows == -INF] = -60.0
    samplings: list[dict[str, Any]] = [
        {},
        {**short, "logit_bias": ((6, 0.5),)},
        short,
        {"bad_words_token_ids": ((3, 3),)},
    ]
    requests = [
        replace(r, sampling=replace(r.sampling, **changes))
        for (_, r), changes in zip(made, samplings, strict=True)
    ]
    logits = torch.cat([rows for rows, _ in made])
    logits[2, 5] = 0.0  # the runner-up once 4 is masked
    results = kernels(logits, requests)
    assert results == verify(logits, requests, backend="torch")
    assert [result.token_ids for result in results[:2]] == [[4], [1, 5]]
    assert results[2].token_ids[0] == 1
    assert len(results[2].token_ids) == 2  # 2 is masked at output index 3, and may come after it
    assert results[3].token_ids == [0]  # the last committed token is a 3 already


@needs_triton
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([0.0, 1.0, NAN], "the target model's logits contain NaN"),
        ([0.0, INF, -INF], "the target model's logits contain +inf"),
        (
            [-INF, -INF, 0.0],
            BANNED,
        ),
    ],
    ids=["NaN", "+inf", "all banned"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_ban_does_not_hide_that_a_row_cannot_be_used(
    row: list[float], reason: str, temperature: float, kernels: Kernels
) -> None:
    sampling = replace(PLAIN, temperature=temperature, min_tokens=9, stop_token_ids=(2,))
    (result,) = kernels(torch.tensor([row]), [request(sampling=sampling)])
    assert result.error == f"at position 6, {reason}"


# -- drawn drafts --------------------------------------------------------------------------------

FLAT = torch.full((1, 4), 0.25)
UNUSABLE = {
    "NaN": drawn("rejection", torch.tensor([[0.5, 0.5, NAN, 0.0]])),
    "+inf": drawn("block", torch.tensor([[INF, 0.5, 0.5, 0.0]])),
    "sum above": drawn("rejection", FLAT * 1.002),
    "sum below": drawn("block", FLAT * 0.998),
    "negative": drawn("rejection", torch.tensor([[0.5, 0.8, -0.3, 0.0]])),
    "impossible token": drawn("block", torch.tensor([[0.5, 0.0, 0.5, 0.0]])),
    "unmapped token": drawn("block", torch.full((1, 2), 0.5), torch.tensor([0, 2])),
    "another draft's": drawn("rejection", FLAT.repeat(2, 1)),
    "another length's": replace(drawn("block", FLAT), num_tokens=5),
}


@needs_triton
def test_probs_that_a_draft_cannot_be_drawn_from_give_the_deterministic_rule(
    kernels: Kernels,
) -> None:
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(2))
    usable = drawn("rejection", FLAT * 1.0005)
    requests = [request([1], draft_probs=probs) for probs in [*UNUSABLE.values(), usable]]
    results = kernels(logits.repeat(len(requests), 1), requests)
    (plain,) = verify(logits, [request([1])], backend="torch")
    expected = replace(plain, faults={"bad_draft_probs": 1})
    assert dict(zip(UNUSABLE, results, strict=False)) == dict.fromkeys(UNUSABLE, expected)
    assert results[-1].faults == {}


@needs_triton
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_residual_of_zero_is_counted_and_the_targets_probs_are_drawn_from(
    rule: str, kernels: Kernels
) -> None:
    """Draft probs a little above the target's everywhere: a uniform near 1 rejects."""
    seeds = range(20_000)
    keys = [NoiseKey(seed, len(COMMITTED), Stream.ACCEPT) for seed in seeds]
    rejecting = [seed for seed, u in zip(seeds, uniforms(keys), strict=True) if u > 0.9995][:6]
    requests = [
        request([1], replace(PLAIN, seed=seed), drawn(rule, torch.full((1, 2), 0.5004)))
        for seed in rejecting
    ]
    logits = torch.zeros(2 * len(requests), 2)
    results = kernels(logits, requests)
    assert results == verify(logits, requests, backend="torch")
    assert all(result.faults == {"zero_residual": 1} for result in results)
    assert {result.token_ids[0] for result in results} == {0, 1}


@needs_triton
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("token_id", [4, -1, 2**40], ids=str)
def test_a_drawn_id_that_the_target_lacks_is_rejected(
    rule: str, token_id: int, kernels: Kernels
) -> None:
    """And the residual is what the draft left of the target: here token 0 alone."""
    target, draft = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.0, 0.3, 0.2, 0.1, 0.4])
    logits = target.log().repeat(3, 1)
    with_it = request([token_id, 1], draft_probs=drawn(rule, draft.repeat(2, 1)))
    assert kernels(logits, [with_it]) == [VerifyResult([0])]


@needs_triton
def test_requests_may_have_draft_vocabularies_of_their_own(kernels: Kernels) -> None:
    """Four maps and widths in one batch, one of them with ids beyond the target's."""
    generator = torch.Generator().manual_seed(9)
    maps = [torch.tensor([0, 3, 8]), torch.arange(9), None, torch.tensor([1, 3, 4, 9, 12])]
    logits = torch.randn(12, 9, generator=generator)
    requests = []
    for i, token_ids in enumerate(maps):
        probs = torch.rand(2, 4 if token_ids is None else len(token_ids), generator=generator)
        probs[:, 3:] = 0 if i == 3 else probs[:, 3:]
        probs /= probs.sum(dim=1, keepdim=True)
        rule = ("block", "rejection")[i % 2]
        requests.append(request([3, 3], PLAIN, drawn(rule, probs, token_ids)))
    assert kernels(logits, requests) == verify(logits, requests, backend="torch")


@needs_triton
@pytest.mark.parametrize(
    ("rule", "num_requests", "vocab_size"),
    [("block", 24, 4), ("block", 8, 40), ("rejection", 8, 40)],
    ids=["block", "block-splits", "rejection-splits"],
)
def test_many_draws_from_distributions_that_differ(
    rule: str, num_requests: int, vocab_size: int, kernels: Kernels
) -> None:
    """So that prefixes pass for less than 1; and sums come from splits with maxima of their own."""
    generator = torch.Generator().manual_seed(4)
    target = torch.tensor([0.719, 0.054, 0.046, 0.181]).log()
    draft = torch.tensor([0.541, 0.249, 0.2, 0.01]).log()
    if vocab_size == 40:
        target = torch.arange(40) % 16 / 5 - torch.arange(40) // 16 * 1.5
        draft = target + torch.randn(40, generator=generator) * 0.7
    probs = draft.softmax(dim=0).repeat(3, 1)
    requests = []
    for seed in range(num_requests):
        tokens = probs.multinomial(1, generator=generator).squeeze(1).tolist()
        requests.append(request(tokens, replace(PLAIN, seed=seed), drawn(rule, probs)))
    logits = target.repeat(4 * num_requests, 1)
    assert kernels(logits, requests, (16, 1)) == verify(logits, requests, backend="torch")


@needs_triton
def test_the_last_of_a_nucleus_is_chosen_among_equals_by_its_id(kernels: Kernels) -> None:
    """Weights 1, and six of e^-1, 3.21 in all: 0.4 of it keeps the first and one of the six."""
    requests = [request(sampling=replace(PLAIN, top_p=0.4, seed=seed)) for seed in range(16)]
    row = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    results = kernels(row.repeat(len(requests), 1), requests)
    assert {result.token_ids[0] for result in results} == {0, 3}


# -- where there is no interpreter, no GPU, no triton --------------------------------------------


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="triton compiles on Linux")
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter accepts what the compiler does not: a variable of two types, say."""
    code = "import interpreted; print(interpreted.compile_all())"
    assert int(run_python(code, TRITON_CACHE_DIR=str(tmp_path))) == 13


@needs_triton
def test_on_a_cpu_without_the_interpreter_the_kernels_say_what_they_need() -> None:
    code = """
import torch
from foresay.core.worker.triton_sampler import VerifyPlan
try:
    VerifyPlan(torch.zeros(1, 7), [])
except ValueError as error:
    print(error)
"""
    assert "TRITON_INTERPRET=1" in run_python(code)


def test_the_worker_needs_no_triton() -> None:
    code = """
import importlib, pkgutil, sys
sys.modules["triton"] = None
from foresay.core import worker
for module in pkgutil.iter_modules(worker.__path__):
    if module.name != "kernels" and not module.name.startswith("triton_"):
        importlib.import_module(f"foresay.core.worker.{module.name}")
import torch
from test_triton_sampler import GREEDY, request, verify
print(verify(torch.eye(7)[[3]], [request(sampling=GREEDY)])[0].token_ids)
"""
    assert run_python(code).strip() == "[3]"
