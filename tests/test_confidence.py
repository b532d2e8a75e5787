"""Drafts that end by their confidence: where they end, what that costs, and that it is exact.

Where: by hand on a small table, and in whole engines with tiny random drafters of every kind, by
a plain softmax of the drafter's own logits. Exactness: chi-square of many games against the
enumerated law (`laws`); seeds are fixed, and with others a right engine would fail each check once
in 10 000 times. The same checks see a draft that is cut for what was drawn.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import eagle_heads
import medusa_heads
import mtp_checkpoints
import pytest
import tiny_models
import torch
from laws import (
    PAIR_DRAFT,
    PAIR_TARGET,
    Drafted,
    Games,
    Text,
    chi_square,
    filtered,
    joint_law,
    make_sampling,
    play,
    random_table,
)
from torch.overrides import TorchFunctionMode

from foresay import LLM, SamplingParams
from foresay.core.messages import DraftPlan, SamplingData
from foresay.core.proposer import DraftInput, DraftRequest
from foresay.core.worker import chain
from foresay.core.worker.chain import Drafted as ChainDraft
from foresay.core.worker.chain import ProposerChain
from foresay.core.worker.draft_sampler import DraftProbs, DrawRequest, StepSampler
from foresay.core.worker.drafting import TokenPicker, go_on

NAN, INF = float("nan"), float("inf")
NUM_GAMES = 1000

# -- the loop, with a drafter that is a table ------------------------------------------------------


@dataclass
class Table:
    """What follows a token depends on it alone: logits [num_states, vocab_size]. Notes its rows."""

    logits_after: torch.Tensor
    asked: list[list[int]] = field(default_factory=list)  # requests, pass by pass

    def rows(self, requests: Sequence[int], positions: Sequence[range]) -> None:
        assert all(len(span) == 1 for span in positions)
        self.asked.append(list(requests))

    def forward(self, token_ids: torch.Tensor, *_rest: Any) -> torch.Tensor:
        return token_ids[:, None]

    def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        return self.logits_after[hidden[:, 0] % len(self.logits_after)]


def drafts_of(
    table: Table,
    requests: Sequence[DraftRequest],
    sampler: StepSampler | None = None,
) -> list[list[int]]:
    batch = DraftInput(requests, sampler=sampler, kv=table)  # type: ignore[arg-type]
    picker = TokenPicker(batch, sampler is not None)
    drafting = [i for i, request in enumerate(requests) if request.k]
    last = [[requests[i].token_ids[-1]] for i in drafting]
    states = torch.tensor(last, dtype=torch.int64).view(-1, 1)
    go_on(batch, table, picker, drafting, states, step=0, offset=-1, feeds_back=False)
    return picker.token_ids


def ask(least: float, k: int = 5, last: int = 0) -> DraftRequest:
    return DraftRequest(f"{least}", [last], num_new_tokens=1, k=k, min_confidence=least)


# The likeliest path from 0 is 1, 2, 0, 1, 2 with .8, .6, .5, .8, .6.
# So the confidences are .8, .48, .24, .192, .1152.
BY_HAND = torch.tensor([[0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.5, 0.25, 0.25]]).log()


def test_a_draft_ends_before_the_token_at_which_its_confidence_is_too_small() -> None:
    table = Table(BY_HAND)
    requests = [
        *map(ask, (0.0, 1.0, 0.81, 0.79, 0.5, 0.47, 0.2, 0.15, 0.1)),
        ask(0.2, k=2),
        ask(0.2, k=0),
        ask(0.59, last=1),  # .6, .3
    ]
    path = [1, 2, 0, 1, 2]
    lengths = [5, 0, 0, 1, 1, 2, 3, 4, 5, 2, 0]
    assert drafts_of(table, requests) == [*(path[:n] for n in lengths), [2]]
    # Each token but the first takes a pass to be known; that a draft ends there shows after it.
    assert table.asked == [
        [0, 3, 4, 5, 6, 7, 8, 9, 11],
        [0, 5, 6, 7, 8],
        [0, 6, 7, 8],
        [0, 7, 8],
    ]


def test_a_draft_that_is_certain_goes_on_even_if_nothing_less_is_enough() -> None:
    table = Table(torch.eye(3).roll(1, dims=1) * 500)
    assert drafts_of(table, [ask(1.0, k=4)]) == [[1, 2, 0, 1]]


class Reductions(TorchFunctionMode):
    """Notes the sizes of what is exponentiated and summed."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("logsumexp", "softmax", "log_softmax"):
            self.sizes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_only_for_requests_that_ask_and_still_draft_is_anything_computed() -> None:
    with Reductions() as seen:
        drafts_of(Table(BY_HAND), [ask(0.0), ask(0.0, k=2)])
    assert seen.sizes == []
    with Reductions() as seen:
        drafts_of(Table(BY_HAND), [ask(0.0), ask(0.79), ask(0.2), ask(0.1, k=2), ask(0.9, k=0)])
    assert seen.sizes == [(3, 3), (3, 3), (1, 3), (1, 3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    # One of 4,097 tokens has half of all: in a narrow sum the many small ones would be lost.
    logits = torch.zeros(1, 4097, dtype=dtype)
    logits[0, 0] = 8.3125
    exact = float(logits.double().softmax(-1)[0, 0])
    assert drafts_of(Table(logits), [ask(exact * 0.9999, k=1), ask(exact * 1.0001, k=1)]) == [
        [0],
        [],
    ]


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("drawn", [False, True], ids=["likeliest", "drawn"])
def test_a_row_without_number_ends_no_other_draft(bad: float, drawn: bool) -> None:
    logits = torch.cat([BY_HAND, torch.zeros(1, 3)])
    logits[3] = bad
    requests = [ask(0.4, last=3), ask(0.47), ask(0.2), ask(0.9)]
    sampler = None
    if drawn:
        data = make_sampling(temperature=0.0)
        sampler = StepSampler([DrawRequest("", data, 1, 5) for _ in requests], 3)
    found = drafts_of(Table(logits), requests, sampler)
    assert found[1:] == [[1, 2], [1, 2, 0], []]
    if sampler is not None:
        assert [sampler.drawn(row) for row in range(4)] == [[], [1, 2], [1, 2, 0], None]
        assert sampler.faults == {"non_finite_draft": 1}


def test_tokens_that_a_drafter_excludes_are_no_fault() -> None:
    logits = BY_HAND.clone()
    logits[0, 2] = -INF  # .8 becomes .8 / .9
    assert drafts_of(Table(logits), [ask(0.85), ask(0.9)]) == [[1], []]


# -- the law of what is emitted --------------------------------------------------------------------


@dataclass(frozen=True)
class Stopping:
    """Draws from a table, and ends drafts by their confidence, through the drafters' own loop."""

    table: torch.Tensor
    k: int
    least: float
    lengths: Counter[int] = field(default_factory=Counter)

    def __call__(
        self, texts: Sequence[Text], sampling: Sequence[SamplingData], vocab_size: int
    ) -> list[Drafted]:
        requests = [
            DraftRequest(str(i), t, 1, self.k, (), 1, self.least) for i, t in enumerate(texts)
        ]
        sampler = StepSampler(
            [
                DrawRequest(r.req_id, data, len(r.token_ids), r.k)
                for r, data in zip(requests, sampling, strict=True)
            ],
            vocab_size,
        )
        drafts = drafts_of(Table(self.table), requests, sampler)
        self.lengths.update(map(len, drafts))
        for row, draft in enumerate(drafts):
            assert (sampler.drawn(row) or []) == draft
        return [(draft, sampler.draft_probs(row)) for row, draft in enumerate(drafts)]


# Target and drafter; and what is asked for, so that drafts of many lengths come about.
MODELS: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {
    "unlike": (random_table(3, 3, seed=1), random_table(3, 3, seed=2), 0.25),
    "alike": (
        random_table(3, 3, seed=1),
        random_table(3, 3, seed=1) * 0.6 + random_table(3, 3, seed=7, scale=0.9),
        0.25,
    ),
    "the pair": (
        torch.tensor([PAIR_TARGET]).log(),
        torch.tensor([PAIR_DRAFT, [0.1, 0.7, 0.1, 0.1]]).log(),
        0.2,
    ),
}


def games_of(name: str, rule: str, drafter: Any, **changes: Any) -> Games:
    target = MODELS[name][0]
    return play(target, drafter, make_sampling(verification=rule), NUM_GAMES, 4, **changes)


@functools.cache
def law(name: str) -> dict[Text, float]:
    return joint_law(MODELS[name][0], make_sampling(), 0, 4)


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("name", MODELS)
def test_texts_follow_the_target_s_law_where_drafts_end_by_confidence(name: str, rule: str) -> None:
    _, table, least = MODELS[name]
    drafter = Stopping(table, 4, least)
    games = games_of(name, rule, drafter, first_seed=30_000)
    found = chi_square(games.firsts(4), law(name))
    assert found.holds, found
    assert not games.faults
    # Texts took several drafts, of many lengths: what was drawn decided where they ended.
    assert len(games.num_accepted) > 1.5 * NUM_GAMES
    assert len(drafter.lengths) >= 3
    assert max(drafter.lengths.values()) < sum(drafter.lengths.values()) / 2, drafter.lengths


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", MODELS)
def test_a_draft_that_is_cut_for_what_was_drawn_would_show(name: str, rule: str) -> None:
    """As tempting as it is wrong: drop a token, once drawn, that is unlikely itself."""

    def meddle(_text: Text, drafts: list[int], draft_probs: DraftProbs | None) -> Drafted:
        if draft_probs is None:
            return drafts, None
        for j, token_id in enumerate(drafts):
            if draft_probs.probs[j, token_id] < 0.35:
                return drafts[:j], draft_probs.cut(j) if j else None
        return drafts, draft_probs

    table = MODELS[name][1]
    games = games_of(name, rule, Stopping(table, 4, 0.0), first_seed=30_000, meddle=meddle)
    assert not chi_square(games.firsts(4), law(name)).holds


def test_the_law_is_that_of_the_table_itself() -> None:
    # `law` against the first token's probabilities by a plain softmax.
    firsts = torch.zeros(3, dtype=torch.float64)
    for text, mass in law("unlike").items():
        firsts[text[0]] += mass
    table = MODELS["unlike"][0]
    torch.testing.assert_close(firsts, table[0].double().softmax(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(firsts, filtered(table[0], make_sampling()), rtol=1e-6, atol=1e-6)


def test_a_text_of_one_seed_is_the_same_wherever_drafts_end_under_the_coupled_rule() -> None:
    table = MODELS["unlike"][1]
    drafters = [Stopping(table, 4, least) for least in (0.0, 0.25, 0.5, 1.0)]
    texts = []
    for drafter in drafters:
        games = play(MODELS["unlike"][0], drafter, make_sampling(), 80, 8)
        texts.append([text[:8] for text in games.texts])
    assert all(text == texts[0] for text in texts)
    assert len({tuple(sorted(drafter.lengths.items())) for drafter in drafters}) == 4


# -- whole engines ---------------------------------------------------------------------------------

Key = tuple[tuple[int, ...], tuple[int, ...]]  # what is committed, and the draft so far


@dataclass(frozen=True)
class Ended:
    """A draft, and what was asked for."""

    k: int
    least: float
    token_ids: list[int]


@dataclass
class Run:
    """What a run of the engine drafted, from which logits, and its texts."""

    logits: dict[Key, torch.Tensor] = field(default_factory=dict)  # also where a draft ended
    drafts: dict[tuple[int, ...], Ended] = field(default_factory=dict)
    texts: list[list[int]] = field(default_factory=list)
    faults: Mapping[str, int] = field(default_factory=dict)
    num_needless: int = 0  # rows of logits of drafts that had ended

    def confidences(self, history: tuple[int, ...]) -> list[float]:
        """The confidence of a draft, token by token, also of the one that it ended before."""
        found = [1.0]
        ids = self.drafts[history].token_ids
        for n in range(len(ids) + 1):
            row = self.logits.get((history, tuple(ids[:n])))
            if row is None:
                break
            found.append(found[-1] * float(row.double().softmax(-1).max()))
        return found[1:]


PROMPTS = [[5, 6, 7, 8, 9, 30, 31, 2, 90], [3], [11, 150, 12, 150, 13] * 4, [40, 41], [77] * 6]
KS = [4, 3, 4, 4, 2]
PARAMS = [
    SamplingParams(temperature=float(i % 2), seed=i, max_tokens=14, num_speculative_tokens=k)
    for i, k in enumerate(KS)
]


def run(
    monkeypatch: pytest.MonkeyPatch, leasts: Sequence[float], settings: Mapping[str, Any]
) -> Run:
    """Generate from the prompts, each with its own least confidence."""
    found = Run()
    pick, propose = TokenPicker.pick, ProposerChain.propose

    def watched_pick(
        self: TokenPicker, logits: torch.Tensor, step: int, requests: Sequence[int]
    ) -> torch.Tensor:
        for row, index in enumerate(requests):
            if not self.wants(index, step):
                found.num_needless += 1
                continue
            history = tuple(self.batch.requests[index].token_ids)
            found.logits[history, tuple(self.token_ids[index])] = logits[row].clone()
        return pick(self, logits, step, requests)

    def planned(
        self: ProposerChain, requests: Sequence[DraftRequest], sampling: Any, slots: Any, _: Any
    ) -> dict[str, ChainDraft]:
        plans = {}
        for request in requests:
            text = list(request.token_ids)
            which = next(i for i, p in enumerate(PROMPTS) if text[: len(p)] == p)
            plans[request.req_id] = DraftPlan((10,), (leasts[which],))
        drafted = propose(self, requests, sampling, slots, plans)
        for request in requests:
            draft = drafted.get(request.req_id)
            found.drafts[tuple(request.token_ids)] = Ended(
                min(request.k, request.max_depth),
                plans[request.req_id].confidence_of(0),
                draft.token_ids if draft else [],
            )
        return drafted

    with monkeypatch.context() as patches:
        patches.setattr(TokenPicker, "pick", watched_pick)
        patches.setattr(ProposerChain, "propose", planned)
        # The engine has greedy requests' chains end so; it would be exact for sampled ones, too.
        patches.setattr(chain, "is_greedy", lambda _sampling: True)
        settings = {"strict": True, "block_size": 4, "adaptive": False, **settings}
        with LLM(model=target(), num_speculative_tokens=4, **settings) as llm:
            outputs = llm.generate(PROMPTS, PARAMS)
            found.texts = [output.outputs[0].token_ids for output in outputs]
            found.faults = llm.stats.faults
    return found


@functools.cache
def target() -> Any:
    return tiny_models.llama(eos_token_id=None)


@functools.cache
def plain_texts() -> list[list[int]]:
    with LLM(model=target(), proposer=None) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


def mtp(folder: Path, layout: str, count: int) -> Path:
    config = target().config
    tensors = mtp_checkpoints.module_tensors(layout, config, count)
    return mtp_checkpoints.save_drafter(folder, tensors, config)


def draft_model(folder: Path) -> Path:
    tiny_models.llama(eos_token_id=None, num_hidden_layers=1).save_pretrained(folder)
    return folder


DRAFTERS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "eagle": ("eagle", lambda folder: eagle_heads.eagle().save(folder)),
    "eagle3, reduced": ("eagle", lambda folder: eagle_heads.eagle3().save(folder)),
    "medusa": (
        "medusa",
        lambda folder: medusa_heads.as_authors(medusa_heads.random_heads(4)).save(folder),
    ),
    "mtp": ("mtp", lambda folder: mtp(folder, "mimo", 1)),
    "mtp, three": ("mtp", lambda folder: mtp(folder, "deepseek", 3)),
    "draft_model": ("draft_model", draft_model),
}


@pytest.mark.parametrize("verification", ["auto", "block"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_end_their_drafts_where_their_own_logits_say(
    name: str, verification: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer, save = DRAFTERS[name]
    settings = {
        "proposer": proposer, "drafter": str(save(tmp_path)), "verification": verification,
        "proposer_settings": {} if proposer == "draft_model" else {"tree": False},
    }  # fmt: skip
    whole = run(monkeypatch, [0.0] * len(PROMPTS), settings)
    assert all(len(draft.token_ids) == draft.k for draft in whole.drafts.values())
    # What ends about every second draft before token 0, 1, and 2; equal to no confidence.
    middles = []
    for n in range(3):
        reached = sorted(c[n] for h in whole.drafts if len(c := whole.confidences(h)) > n)
        below, above = reached[len(reached) // 2 - 1 :][:2]
        middles.append((below + above) / 2)

    cut = run(monkeypatch, [middles[1], middles[0], middles[2], 0.0, 1.0], settings)

    assert not cut.faults
    assert cut.num_needless == 0 or proposer == "medusa"  # whose heads run all at once
    if verification == "auto":  # the sampled ones are coupled: they have seeds
        assert cut.texts == whole.texts == plain_texts()
    lengths: Counter[int] = Counter()
    for history, draft in cut.drafts.items():
        enough = [c >= draft.least for c in cut.confidences(history)]
        assert all(enough[: len(draft.token_ids)]), history
        if len(draft.token_ids) < draft.k:
            assert enough[len(draft.token_ids) :] == [False], history
        lengths[len(draft.token_ids)] += draft.least not in (0.0, 1.0)
    assert sum(n > 2 for n in lengths.values()) >= 3, lengths
    # Neighbours that ended are no different from neighbours that draft on.
    shared = cut.logits.keys() & whole.logits.keys()
    assert len(shared) > 40
    for key in shared:
        torch.testing.assert_close(cut.logits[key], whole.logits[key], rtol=1e-4, atol=1e-4)
    for history in cut.drafts.keys() & whole.drafts.keys():
        ids = cut.drafts[history].token_ids
        assert ids == whole.drafts[history].token_ids[: len(ids)]
