"""Parameters that change single logits: against transformers, by hand, and row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from foresay.core.messages import SamplingData
from foresay.core.worker.noise import NoiseKey, exponential, vocabulary_words
from foresay.core.worker.processors import Context
from foresay.core.worker.rejection_sampler import VerifyRequest, verify
from foresay.core.worker.sampling import (
    Row,
    RowError,
    processed_logits,
    sample,
    survivors,
    target_probs,
)

INF = float("inf")
VOCAB_SIZE = 12
EOS = 11


def make_sampling(**changes: Any) -> SamplingData:
    values: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "min_tokens": 0,
        "stop_token_ids": (EOS,),
    }
    return SamplingData(**(values | changes))


def make_row(
    logits: torch.Tensor | list[float],
    prompt: Sequence[int],
    output: Sequence[int] = (),
    drafts: Sequence[int] = (),
    **changes: Any,
) -> Row:
    """The row after all of `drafts`."""
    context = Context(make_sampling(**changes), [*prompt, *output], len(prompt), drafts)
    return Row(torch.as_tensor(logits), context, len(drafts))


def logits_of(row: Row) -> torch.Tensor:
    """The row after its processors, whether or not there are any."""
    processed = processed_logits(row)
    return row.logits.float() if processed is None else processed


def random_ids(num: int, seed: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num,), generator=generator).tolist()


def random_logits(seed: int, size: int = VOCAB_SIZE) -> torch.Tensor:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
    logits[seed % size] = -INF  # the model itself may rule tokens out
    return logits


SEQUENCES = ((4,), (7, 2), (2, 7), (3, 3), (1, 5, 9), (9, 1, 5), (0, 0, 0, 6))
PROCESSORS: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": ((2, 1.5), (5, -100.0), (9, 0.25))},
    "logit_bias -inf": {"logit_bias": ((2, -INF), (5, 3.0))},
    "allowed_token_ids": {"allowed_token_ids": (1, 2, 5, 9, EOS)},
    "bad words": {"bad_words_token_ids": SEQUENCES},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": (3, EOS)},
    "repetition_penalty 1.3": {"repetition_penalty": 1.3},
    "repetition_penalty 0.7": {"repetition_penalty": 0.7},
    "presence_penalty": {"presence_penalty": 0.6},
    "frequency_penalty": {"frequency_penalty": 0.3},
    "negative penalties": {"presence_penalty": -1.1, "frequency_penalty": -0.2},
    "all": {
        "logit_bias": ((2, 1.5), (5, -4.0), (9, 0.25)),
        "allowed_token_ids": (0, 1, 2, 3, 5, 6, 7, 9, EOS),
        "bad_words_token_ids": SEQUENCES,
        "min_tokens": 5,
        "stop_token_ids": (3, EOS),
        "repetition_penalty": 1.3,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.3,
    },
}
by_processor = pytest.mark.parametrize("changes", PROCESSORS.values(), ids=PROCESSORS.keys())


# -- each against transformers or a formula ------------------------------------------------------


def penalised_by_hand(row: torch.Tensor, output: list[int], sampling: SamplingData) -> torch.Tensor:
    """OpenAI: mu[j] -> mu[j] - c[j] * frequency_penalty - (c[j] > 0) * presence_penalty."""
    result = row.clone()
    for token_id in range(len(row)):
        count = output.count(token_id)
        result[token_id] -= count * sampling.frequency_penalty
        result[token_id] -= (count > 0) * sampling.presence_penalty
    return result


def reference(
    logits: torch.Tensor, prompt: list[int], output: list[int], sampling: SamplingData
) -> torch.Tensor:
    """Each parameter that is in use as transformers does it, one after the other.

    But where no allowed token has a chance, transformers gives them all one; here none has any.
    """
    chain = LogitsProcessorList()
    if sampling.logit_bias:
        bias = {(token_id,): float(value) for token_id, value in sampling.logit_bias}
        chain.append(SequenceBiasLogitsProcessor(bias))
    if sampling.allowed_token_ids is not None:
        allowed = list(sampling.allowed_token_ids)
        biased = chain(torch.tensor([prompt]), logits.float().unsqueeze(0))[0]
        if biased[allowed].max() == -INF:
            return torch.full_like(biased, -INF)
        chain.append(PrefixConstrainedLogitsProcessor(lambda _batch, _ids: allowed, num_beams=1))
    if sampling.bad_words_token_ids:
        chain.append(NoBadWordsLogitsProcessor([list(w) for w in sampling.bad_words_token_ids]))
    if sampling.min_tokens:
        chain.append(
            MinNewTokensLengthLogitsProcessor(
                len(prompt), sampling.min_tokens, list(sampling.stop_token_ids)
            )
        )
    if sampling.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    row = chain(torch.tensor([[*prompt, *output]]), logits.float().unsqueeze(0))[0]
    return penalised_by_hand(row, output, sampling)


@by_processor
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_row_is_what_transformers_makes_of_it(
    changes: dict[str, Any], dtype: torch.dtype
) -> None:
    num_changed = 0
    for seed in range(12):
        prompt, output = random_ids(6, seed), random_ids(seed % 4, 100 + seed)
        drafts = random_ids(5, 200 + seed)
        context = Context(make_sampling(**changes), prompt + output, len(prompt), drafts)
        for num_drafts in range(len(drafts) + 1):
            logits = random_logits(seed + num_drafts).to(dtype)
            row = Row(logits, context, num_drafts)
            before = output + drafts[:num_drafts]
            expected = reference(logits, prompt, before, row.sampling)
            torch.testing.assert_close(logits_of(row), expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(logits_of(row) == -INF, expected == -INF)
            num_changed += not torch.equal(expected, logits.float())
    assert num_changed >= 20


def test_presence_and_frequency_are_openais_formula_over_output_and_drafts_alone() -> None:
    row = make_row(
        [8.0] * 6, [0, 0, 1], [1, 2, 2], [3, 2], presence_penalty=1.0, frequency_penalty=0.25
    )
    #                              0: prompt only; 1: once; 2: thrice; 3: once, drafted; 4, 5: never
    assert logits_of(row).tolist() == [8.0, 8 - 1.25, 8 - 1.75, 8 - 1.25, 8.0, 8.0]


def test_the_repetition_penalty_counts_prompt_output_and_drafts_once_whatever_the_sign() -> None:
    row = make_row([6.0, -6.0, 6.0, 6.0, 0.0], [0, 1], [1, 0], [2], repetition_penalty=2.0)
    assert logits_of(row).tolist() == [3.0, -12.0, 3.0, 6.0, 0.0]


BAD_WORDS = {
    # bad words, prompt, output, drafts, banned ids
    "a single id is banned everywhere": ([(3,)], [0], [], [], [3]),
    "nothing before it": ([(1, 3)], [2], [], [], []),
    "the prompt's last token begins it": ([(1, 3)], [1], [], [], [3]),
    "an output token begins it": ([(1, 3)], [2], [1], [], [3]),
    "a draft begins it": ([(1, 3)], [2], [2], [1], [3]),
    "prompt, output and draft begin it": ([(1, 2, 4, 3)], [0, 1], [2], [4], [3]),
    "the begin is further back": ([(1, 3)], [1], [0], [], []),
    "only a part of the begin": ([(1, 2, 3)], [2], [2], [], []),
    "longer than what is there": ([(1, 2, 0, 3)], [2], [], [0], []),
    "exactly as long as what is there": ([(2, 0, 3)], [2], [], [0], [3]),
    "several with one end and one with another": (
        [(1, 3), (0, 1, 3), (1, 4), (2, 5)],
        [0],
        [1],
        [],
        [3, 4],
    ),
    "repeated": ([(1, 1)], [1], [], [], [1]),
}


@pytest.mark.parametrize(
    ("words", "prompt", "output", "drafts", "banned"), BAD_WORDS.values(), ids=BAD_WORDS.keys()
)
def test_a_bad_words_last_id_is_banned_where_the_prefix_ends_with_those_before_it(
    words: list[tuple[int, ...]],
    prompt: list[int],
    output: list[int],
    drafts: list[int],
    banned: list[int],
) -> None:
    row = make_row(torch.zeros(6), prompt, output, drafts, bad_words_token_ids=tuple(words))
    assert logits_of(row).isneginf().nonzero().squeeze(1).tolist() == banned


# -- row by row against block --------------------------------------------------------------------


@by_processor
def test_rows_of_a_draft_equal_those_that_committing_its_tokens_one_by_one_gives(
    changes: dict[str, Any],
) -> None:
    for seed in range(8):
        prompt, output, drafts = random_ids(7, seed), random_ids(3, 50 + seed), random_ids(6, seed)
        sampling = make_sampling(seed=seed, **changes)
        block = Context(sampling, prompt + output, len(prompt), drafts)
        table = torch.stack([random_logits(10 * seed + j) for j in range(len(drafts) + 1)])
        for j, logits in enumerate(table):
            in_block = Row(logits, block, j)
            alone = Row(logits, Context(sampling, prompt + output + drafts[:j], len(prompt)))
            assert (in_block.position, in_block.output_index) == (10 + j, 3 + j)
            assert (alone.position, alone.output_index) == (10 + j, 3 + j)
            assert torch.equal(logits_of(in_block), logits_of(alone))
            assert sample([in_block]) == sample([alone])


Target = Callable[[Sequence[int]], torch.Tensor]


def markov(seed: int, vocab_size: int = VOCAB_SIZE) -> Target:
    """A target whose logits depend on the last token, with a taste for repetition."""
    table = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed))
    table += 1.5 * torch.eye(vocab_size)
    return lambda tokens: table[tokens[-1]]


def decode(
    target: Target,
    prompt: list[int],
    num_tokens: int,
    sampling: SamplingData,
    draft: Callable[[list[int]], list[int]] = lambda tokens: [],
) -> tuple[list[int], int]:
    """Decode with the engine's verification; return the output and the number of steps."""
    tokens = list(prompt)
    num_steps = 0
    while len(tokens) < len(prompt) + num_tokens:
        drafts = draft(tokens)[: len(prompt) + num_tokens - len(tokens) - 1]
        logits = torch.stack([target(tokens + drafts[:j]) for j in range(len(drafts) + 1)])
        request = VerifyRequest("r", drafts, tokens, len(prompt), sampling)
        (result,) = verify(logits, [request])
        assert result.error is None
        tokens = tokens + result.token_ids
        num_steps += 1
    return tokens[len(prompt) :], num_steps


@by_processor
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_output_with_drafts_equals_plain_decoding_under_every_processor(
    changes: dict[str, Any], temperature: float
) -> None:
    for seed in range(3):
        target = markov(seed)
        sampling = make_sampling(temperature=temperature, seed=seed, **changes)
        prompt = random_ids(5, seed)
        plain, num_plain_steps = decode(target, prompt, 30, sampling)
        assert num_plain_steps == 30

        def right_but_for_every_fifth(
            tokens: list[int], prompt: list[int] = prompt, plain: list[int] = plain
        ) -> list[int]:
            start = len(tokens) - len(prompt)
            return [
                (token + (position % 5 == 4)) % VOCAB_SIZE
                for position, token in enumerate(plain[start : start + 4], start)
            ]

        drafted, num_steps = decode(target, prompt, 30, sampling, right_but_for_every_fifth)
        assert drafted == plain
        assert num_steps < 15
        repeated, _ = decode(target, prompt, 30, sampling, lambda tokens: [tokens[-1]] * 4)
        assert repeated == plain


# -- conditions that broke other engines ---------------------------------------------------------


def verified(
    logits: list[list[float]], drafts: list[int], prompt: list[int], **changes: Any
) -> list[int]:
    request = VerifyRequest("r", drafts, prompt, len(prompt), make_sampling(**changes))
    (result,) = verify(torch.tensor(logits), [request])
    assert result.error is None
    return result.token_ids


@pytest.mark.parametrize("top_k", [0, 1], ids=["greedy", "sampled"])
def test_a_bad_word_that_the_drafter_proposes_is_replaced_where_it_is_completed(
    top_k: int,
) -> None:
    def run(*words: tuple[int, ...]) -> list[int]:
        favours = [[9.0 * (i == want) + 0.1 * i for i in range(6)] for want in (1, 3, 2, 0)]
        temperature = float(top_k)  # sampling with top_k 1 takes the likeliest, too
        return verified(
            favours,
            [1, 3, 2],
            [4],
            temperature=temperature,
            top_k=top_k,
            bad_words_token_ids=words,
        )

    assert run() == [1, 3, 2, 0]
    assert run((1, 3)) == [1, 5]  # the second draft completes it
    assert run((4, 1)) == [5]  # the first one does, after the prompt
    assert run((4, 1, 3, 2)) == [1, 3, 5]
    assert run((3, 1)) == [1, 3, 2, 0]  # not in this order
    assert run((3,)) == [1, 5]


def test_a_drafter_that_repeats_meets_the_repetition_penalty_at_the_second_row() -> None:
    row = [5.0, 4.0, 1.0, 0.5]
    assert verified([row] * 4, [0, 0, 0], [3], temperature=0.0) == [0, 0, 0, 0]
    # 5 / 2 < 4: the first draft is accepted, and penalises the next.
    assert verified([row] * 4, [0, 0, 0], [3], temperature=0.0, repetition_penalty=2.0) == [0, 1]
    # 5 - 0.6, - 1.2, ...: after two of them 1 is better.
    frequency = verified([row] * 4, [0, 0, 0], [3], temperature=0.0, frequency_penalty=0.6)
    assert frequency == [0, 0, 1]
    # The prompt counts for the repetition penalty, and for it alone.
    assert verified([row], [], [0], temperature=0.0, repetition_penalty=2.0) == [1]
    assert verified([row], [], [0], temperature=0.0, presence_penalty=2.0) == [0]


@pytest.mark.parametrize("top_k", [0, 1], ids=["greedy", "sampled"])
def test_eos_drafted_before_min_tokens_is_masked_and_at_min_tokens_it_is_not(top_k: int) -> None:
    favours_eos = [1.0, 2.0, 0.0, 9.0]
    wants: dict[int, list[float]] = {1: [0.0, 5.0, 0.0, 0.0], 2: [0.0, 0.0, 5.0, 0.0]}
    rows = [wants[2], wants[2], favours_eos, wants[1], favours_eos]

    def run(drafts: list[int], min_tokens: int) -> list[int]:
        return verified(
            rows[: len(drafts) + 1],
            drafts,
            [0],
            temperature=float(top_k),
            top_k=top_k,
            min_tokens=min_tokens,
            stop_token_ids=(3,),
        )

    assert run([2, 2, 3, 1], min_tokens=4) == [2, 2, 1]  # output position 2: masked
    assert run([2, 2, 1, 1], min_tokens=4) == [2, 2, 1, 1, 3]  # output position 4: allowed
    assert run([2, 2, 1, 1], min_tokens=5) == [2, 2, 1, 1, 1]
    assert run([2, 2, 3, 1], min_tokens=2) == [2, 2, 3, 1, 3]


def test_a_draft_id_that_the_target_lacks_does_no_harm_to_the_rows_before_it() -> None:
    changes = PROCESSORS["all"]
    for bad in (VOCAB_SIZE, 10**12, -1):
        context = Context(make_sampling(**changes), [1, 2], 2, [5, bad, 5])
        for num_drafts in range(4):  # those after it are never used, but may be computed
            assert processed_logits(Row(random_logits(3), context, num_drafts)) is not None
        expected = make_row(random_logits(3), [1, 2], [], [5], **changes)
        found = Row(random_logits(3), context, 1)
        assert torch.equal(logits_of(found), logits_of(expected))


# -- order ---------------------------------------------------------------------------------------

ORDER: dict[str, tuple[list[float], dict[str, Any], list[float]]] = {
    # Logits after prompt [0] and output [1]; parameters; what is left. Ids 2 and 3 are new.
    "the bias comes before the repetition penalty": (
        [1.0, 8.0, 0.0, 0.0],
        {"logit_bias": ((0, -3.0),), "repetition_penalty": 2.0},
        [-4.0, 4.0, 0.0, 0.0],
    ),
    "the repetition penalty comes before presence and frequency": (
        [8.0, 8.0, 0.0, 0.0],
        {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        [4.0, 2.5, 0.0, 0.0],
    ),
    "the repetition penalty goes by the sign before presence": (
        [0.0, 1.0, 0.0, 0.0],
        {"repetition_penalty": 2.0, "presence_penalty": 2.0},
        [0.0, -1.5, 0.0, 0.0],
    ),
    "no bias lifts what is not allowed": (
        [1.0, 1.0, 1.0, 1.0],
        {"logit_bias": ((2, 100.0), (3, 1.0)), "allowed_token_ids": (1, 3)},
        [-INF, 1.0, -INF, 2.0],
    ),
    "no bias lifts a bad word nor a masked stop id": (
        [1.0, 1.0, 1.0, 1.0],
        {
            "logit_bias": ((2, 100.0), (3, 100.0)),
            "bad_words_token_ids": ((1, 2),),
            "min_tokens": 2,
            "stop_token_ids": (3,),
        },
        [1.0, 1.0, -INF, -INF],
    ),
    "what is banned stays banned under any penalty": (
        [4.0, 4.0, 4.0, 4.0],
        {
            "bad_words_token_ids": ((0,), (1,)),
            "repetition_penalty": 0.5,
            "presence_penalty": -2.0,
            "frequency_penalty": -2.0,
        },
        [-INF, -INF, 4.0, 4.0],
    ),
}


@pytest.mark.parametrize(("logits", "changes", "expected"), ORDER.values(), ids=ORDER.keys())
def test_processors_are_applied_in_the_documented_order(
    logits: list[float], changes: dict[str, Any], expected: list[float]
) -> None:
    assert logits_of(make_row(logits, [0], [1], **changes)).tolist() == expected


def test_bias_and_penalties_come_before_the_temperature() -> None:
    row = make_row([0.0, 0.0], [1], logit_bias=((0, math.log(16)),), temperature=2.0)
    torch.testing.assert_close(target_probs(row), torch.tensor([4 / 5, 1 / 5]))
    row = make_row([2.0, 0.0], [1], [0], presence_penalty=2.0 - math.log(4), temperature=0.5)
    torch.testing.assert_close(target_probs(row), torch.tensor([16 / 17, 1 / 17]))


def test_filters_see_the_processed_logits() -> None:
    logits = [20.0, math.log(4), math.log(2), 0.0, 0.0]
    banned: dict[str, Any] = {"bad_words_token_ids": ((1, 0),)}
    assert target_probs(make_row(logits, [1], top_k=1, **banned)).tolist() == [0, 1, 0, 0, 0]
    expected = torch.tensor([0, 2 / 3, 1 / 3, 0, 0])
    torch.testing.assert_close(target_probs(make_row(logits, [1], top_p=0.7, **banned)), expected)
    torch.testing.assert_close(target_probs(make_row(logits, [1], min_p=0.3, **banned)), expected)
    lifted = make_row(logits, [1], top_k=1, logit_bias=((4, 30.0),))
    assert target_probs(lifted).tolist() == [0, 0, 0, 0, 1]


def test_greedy_takes_the_likeliest_processed_token_and_the_lowest_of_equals() -> None:
    row = [4.0, 3.0, 2.0, 2.0]
    assert verified([row], [], [1], temperature=0.0, logit_bias=((3, 2.0),)) == [0]
    assert verified([row], [], [1], temperature=0.0, logit_bias=((3, 2.5),)) == [3]
    assert verified([row], [], [1], temperature=0.0, allowed_token_ids=(2, 3)) == [2]
    assert verified([row], [], [1], temperature=0.0, bad_words_token_ids=((0,), (1,))) == [2]
    assert verified([row], [], [0], temperature=0.0, repetition_penalty=2.0) == [1]


# -- batches -------------------------------------------------------------------------------------


def mixed_rows(table: torch.Tensor) -> list[Row]:
    """Rows of every processor and of none, with and without filters."""
    filters: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.5}]
    kinds = [{}, *PROCESSORS.values()]
    return [
        make_row(
            logits,
            random_ids(5, i, 40),
            random_ids(i % 7, i, 40),
            random_ids(i % 4, i, 40),
            seed=i,
            **kinds[i % len(kinds)],
            **filters[i % len(filters)],
        )
        for i, logits in enumerate(table)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_settings_in_one_batch_give_what_each_gives_alone(dtype: torch.dtype) -> None:
    # An odd vocabulary, so that rows of the batch lie at every alignment.
    table = torch.stack([random_logits(seed, 5001) for seed in range(48)]).to(dtype)
    before = table.clone()
    rows = mixed_rows(table)
    together = sample(rows)
    assert [sample([row])[0] for row in rows] == together
    assert sample(rows[::-1]) == together[::-1]
    for row in rows:
        copy = Row(row.logits.clone(), row.context, row.index)
        assert torch.equal(logits_of(copy), logits_of(row))
    assert torch.equal(table, before)
    assert len({token for token in together if isinstance(token, int)}) > 12


def test_a_verified_batch_of_mixed_settings_gives_what_each_request_gives_alone() -> None:
    kinds = [
        {**changes, "temperature": temperature}
        for temperature in (0.0, 0.9)
        for changes in ({}, *PROCESSORS.values())
    ]
    requests, blocks = [], []
    for i, changes in enumerate(kinds):
        drafts, prompt = random_ids(i % 5, i), random_ids(4, 30 + i)
        sampling = make_sampling(seed=i, **changes)
        requests.append(VerifyRequest(f"r{i}", drafts, prompt, len(prompt), sampling))
        blocks.append(torch.stack([random_logits(100 * i + j) for j in range(len(drafts) + 1)]))
    together = verify(torch.cat(blocks), requests)
    for request, block, result in zip(requests, blocks, together, strict=True):
        (alone,) = verify(block, [request])
        assert (alone.token_ids, alone.error) == (result.token_ids, result.error)


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    ids = st.integers(0, VOCAB_SIZE - 1)
    penalty = st.sampled_from([0.0, 0.0, 0.5, 1.7, -0.3])
    return {
        "temperature": draw(st.sampled_from([0.3, 1.0, 1.7])),
        "top_k": draw(st.sampled_from([0, -1, 1, 3, 8, VOCAB_SIZE, 2 * VOCAB_SIZE])),
        "top_p": draw(st.sampled_from([0.05, 0.5, 0.9, 1.0])),
        "min_p": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "min_tokens": draw(st.integers(0, 8)),
        "logit_bias": tuple(
            draw(st.dictionaries(ids, st.sampled_from([-INF, -5.0, 0.5, 40.0]), max_size=4)).items()
        ),
        "allowed_token_ids": draw(
            st.none() | st.sets(ids, min_size=1).map(lambda chosen: tuple(sorted(chosen)))
        ),
        "bad_words_token_ids": tuple(
            draw(st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=6))
        ),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 1.4, 0.6])),
        "presence_penalty": draw(penalty),
        "frequency_penalty": draw(penalty),
    }


@settings(deadline=None, max_examples=200)
@given(
    changes=parameters(),
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6),
    output=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),
    drafts=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5),
    logits=st.lists(
        st.integers(-6, 6).map(float) | st.floats(-40, 40, width=16) | st.just(-INF),
        min_size=VOCAB_SIZE,
        max_size=VOCAB_SIZE,
    ).filter(lambda values: max(values) > -INF),
)
def test_any_combination_is_the_reference_row_filtered_and_raced(
    changes: dict[str, Any],
    prompt: list[int],
    output: list[int],
    drafts: list[int],
    logits: list[float],
) -> None:
    row = make_row(logits, prompt, output, drafts, **changes)
    expected = reference(row.logits, prompt, output + drafts, row.sampling)
    torch.testing.assert_close(logits_of(row), expected, rtol=1e-6, atol=1e-5)
    if expected.max() == -INF:
        with pytest.raises(RowError, match="no token is allowed"):
            target_probs(row)
        assert isinstance(sample([row])[0], RowError)
        return
    probs = target_probs(row)
    left = survivors(row)
    weights = torch.zeros(VOCAB_SIZE)
    weights[torch.arange(VOCAB_SIZE) if left.token_ids is None else left.token_ids] = left.weights
    likely = probs / probs.max() >= 2.0**-38
    assert torch.equal(weights > 0, likely)
    torch.testing.assert_close(weights, (probs / probs.max()).where(likely, 0), rtol=1e-5, atol=0)

    key = NoiseKey(row.sampling.seed, len(prompt) + len(output) + len(drafts))
    words = vocabulary_words(key, VOCAB_SIZE, probs.device).tolist()
    times = {
        i: exponential(words[i]) / probs[i].item() for i in likely.nonzero().squeeze(1).tolist()
    }
    (token_id,) = sample([row])
    assert isinstance(token_id, int)
    assert times[token_id] <= min(times.values()) * (1 + 1e-5)


# -- what can't be used, and what is not paid for ------------------------------------------------

EXHAUSTED: dict[str, tuple[dict[str, Any], str]] = {
    "allowed ids that the model rules out": (
        {"allowed_token_ids": (3,)},
        "allowed_token_ids bans all others$",
    ),
    "bad words": (
        {"bad_words_token_ids": ((0,), (1,), (2,))},
        "bad_words bans tokens$",
    ),
    "logit_bias": (
        {"logit_bias": ((0, -INF), (1, -INF), (2, -INF))},
        "logit_bias bans tokens$",
    ),
    "all together": (
        {
            "logit_bias": ((0, -INF),),
            "allowed_token_ids": (0, 1, 2),
            "bad_words_token_ids": ((9, 1),),
            "min_tokens": 1,
            "stop_token_ids": (2,),
        },
        r"logit_bias bans tokens and allowed_token_ids bans all others and bad_words bans tokens "
        r"and min_tokens masks the stop ids \[2\]$",
    ),
}


@pytest.mark.parametrize(("changes", "message"), EXHAUSTED.values(), ids=EXHAUSTED.keys())
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_bans_that_leave_no_token_end_that_request_alone(
    changes: dict[str, Any], message: str, temperature: float
) -> None:
    logits = torch.tensor([1.0, 2.0, 3.0, -INF])
    good = VerifyRequest("good", [], [9], 1, make_sampling(temperature=temperature, top_k=1))
    bad = VerifyRequest("bad", [], [9], 1, make_sampling(temperature=temperature, **changes))
    first, failed, last = verify(logits.repeat(3, 1), [good, bad, good])
    assert (first.token_ids, last.token_ids) == ([2], [2])
    assert failed.token_ids == []
    expected = "no token is allowed: every logit is -inf, once " + message
    with pytest.raises(RowError, match=expected):
        raise RowError(failed.error or "no error")


def test_a_row_that_is_not_finite_is_an_error_even_where_that_logit_is_banned() -> None:
    for value in (INF, float("nan")):
        row = make_row([0.0, value, 1.0], [0], bad_words_token_ids=((1,),))
        assert isinstance(sample([row])[0], RowError)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_bias_beyond_float32_is_an_error_of_that_request(temperature: float) -> None:
    sampling = make_sampling(temperature=temperature, logit_bias=((0, 3e38), (1, 1.0)))
    request = VerifyRequest("r", [], [9], 1, sampling)
    (result,) = verify(torch.tensor([[3e38, 0.0]]), [request])
    assert result.token_ids == []
    assert result.error is not None
    assert "after bias and penalties, inf, exceeds float32" in result.error


class Unread(Sequence[int]):
    """Tokens of which only the number may be asked."""

    def __len__(self) -> int:
        return 8000

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("the tokens were read")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "temperature": 0.7},
        {"min_tokens": 8000},
        {"min_tokens": 9000, "stop_token_ids": ()},
    ],
    ids=["plain", "filters", "enough tokens", "no stop ids"],
)
def test_a_row_without_processors_keeps_its_logits_and_costs_no_look_at_the_prefix(
    changes: dict[str, Any],
) -> None:
    context = Context(make_sampling(**changes), Unread(), 0, Unread())
    row = Row(random_logits(1), context, 3)
    assert processed_logits(row) is None
    assert isinstance(sample([row])[0], int)


def test_masks_alone_do_not_count_the_prefix() -> None:
    changes = {"min_tokens": 9000, "logit_bias": ((1, 2.0),), "allowed_token_ids": (1, EOS)}
    row = Row(random_logits(2), Context(make_sampling(**changes), Unread(), 0, Unread()), 3)
    assert sample([row]) == [1]


class Counted(Sequence[int]):
    """Tokens that count how often they are read from end to end."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            self.num_reads += index == 0
        return self.tokens[index]


def test_the_committed_tokens_are_read_once_for_all_rows_of_a_step() -> None:
    tokens = Counted(random_ids(500, 1))
    context = Context(make_sampling(**PROCESSORS["all"]), tokens, 100, random_ids(5, 2))
    processed_logits(Row(random_logits(0), context, 0))
    num_reads = tokens.num_reads
    assert num_reads > 0
    for num_drafts in range(1, 6):
        processed_logits(Row(random_logits(num_drafts), context, num_drafts))
    assert tokens.num_reads == num_reads
