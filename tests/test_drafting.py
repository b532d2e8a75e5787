"""The draft loop with a drafter made of sums, against the definition, and by hand.

The toy's state at a position is the sum, over all positions up to it, of what it was given there:
the token's id and the features. It keeps its own "KV cache", by request and position, so a row that
is left out, given twice, out of place or fed with a neighbour's state changes every sum behind it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from foresay.core.messages import SamplingData
from foresay.core.proposer import DraftInput, DraftRequest
from foresay.core.worker.draft_sampler import DrawRequest, StepSampler
from foresay.core.worker.drafting import draft

VOCAB_SIZE = 101


@dataclass
class Rows:
    owners: list[str]
    positions: torch.Tensor

    def attend(self, *_arguments: Any, **_settings: Any) -> torch.Tensor:
        raise AssertionError("the toy does not attend")


@dataclass
class View:
    """Lays out rows, and notes which."""

    requests: Sequence[DraftRequest]
    asked: list[tuple[list[str], list[range]]] = field(default_factory=list)

    def rows(self, requests: Sequence[int], positions: Sequence[range]) -> Rows:
        names = [self.requests[index].req_id for index in requests]
        self.asked.append((names, list(positions)))
        owners = [name for name, span in zip(names, positions, strict=True) for _ in span]
        flat = [position for span in positions for position in span]
        return Rows(owners, torch.tensor(flat, dtype=torch.int64))


class Toy:
    """Sums what it is given; drafts the sum."""

    def __init__(self) -> None:
        self.given: dict[tuple[str, int], int] = {}
        self.steps: list[int] = []

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor | None, rows: Rows, step: int
    ) -> torch.Tensor:
        assert token_ids.dtype == torch.int64
        assert len(token_ids) == len(rows.owners) == len(rows.positions)
        assert hidden is None or len(hidden) == len(token_ids)
        self.steps.append(step)
        keys = list(zip(rows.owners, rows.positions.tolist(), strict=True))
        extra = [0] * len(keys) if hidden is None else hidden[:, 0].tolist()
        for key, token_id, feature in zip(keys, token_ids.tolist(), extra, strict=True):
            self.given[key] = token_id + int(feature)
        sums = [sum(self.given[owner, p] for p in range(end + 1)) for owner, end in keys]
        return torch.tensor(sums, dtype=torch.float64)[:, None] % VOCAB_SIZE

    def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        assert step in range(10)
        return torch.nn.functional.one_hot(hidden[:, 0].long(), VOCAB_SIZE).float()


def feature(token_ids: Sequence[int], position: int) -> int:
    """What the target leaves at a position: it depends on the tokens up to it."""
    return (7 * sum(token_ids[: position + 1]) + position) % 50


def expected(token_ids: Sequence[int], k: int, *, shifted: bool) -> list[int]:
    """The drafts by the definition, from the history alone."""
    if shifted:
        last = len(token_ids) - 2
        state = sum(token_ids[1:]) + sum(feature(token_ids, p) for p in range(last + 1))
    else:
        state = sum(token_ids)
    total = state  # of what was given; the state is this, and is given to the next row
    drafts: list[int] = []
    for _ in range(k):
        drafts.append(state % VOCAB_SIZE)
        total += drafts[-1] + (state % VOCAB_SIZE if shifted else 0)
        state = total
    return drafts


@dataclass
class Engine:
    """Hands the rows of several requests to the loop, as the core does."""

    shifted: bool
    toy: Toy = field(default_factory=Toy)
    handed: dict[str, int] = field(default_factory=dict)
    view: View | None = None

    def step(
        self,
        asks: dict[str, tuple[Sequence[int], int]],
        ends: dict[str, int] | None = None,
        **settings: Any,
    ) -> dict[str, list[int]]:
        """`asks`: tokens and k. `ends`: how far the rows go, if not to the last token but one."""
        requests = [
            DraftRequest(name, token_ids, num_new_tokens=1, k=k)
            for name, (token_ids, k) in asks.items()
        ]
        starts, positions, features = [0], [], []
        for name, (token_ids, _) in asks.items():
            first = self.handed.get(name, 0)
            end = (ends or {}).get(name, len(token_ids) - 1)
            positions += range(first, end)
            features += [feature(token_ids, p) for p in range(first, end)]
            starts.append(len(positions))
            self.handed[name] = end
        self.view = View(requests)
        batch = DraftInput(
            requests,
            positions=torch.tensor(positions, dtype=torch.int64),
            row_starts=starts,
            kv=self.view,  # type: ignore[arg-type]
            sampler=settings.pop("sampler", None),
        )
        hidden = None
        if self.shifted:
            hidden = torch.tensor(features, dtype=torch.float64).view(-1, 1)
        settings = {"sample": False, **settings}
        drafts = draft(batch, self.toy, hidden=hidden, shifted=self.shifted, **settings)
        assert drafts.parents is None
        return dict(zip(asks, drafts.token_ids, strict=True))


def test_a_chain_by_hand() -> None:
    engine = Engine(shifted=True)
    # Features of [3, 5, 2] at 0 and 1: 7 * 3 + 0 = 21, 7 * 8 + 1 = 57 - 50 = 7.
    # Rows: 5 + 21, 2 + 7; the state of the last is 35: draft 35.
    # Next row, at position 2: 35 + 35; its state is 35 + 70 = 105 - 101 = 4: draft 4.
    # Next row, at position 3: 4 + 4; its state is 105 + 8 = 113 - 101 = 12: draft 12.
    assert engine.step({"a": ([3, 5, 2], 3)}) == {"a": [35, 4, 12]}
    assert engine.view is not None
    assert engine.view.asked == [
        (["a"], [range(2)]),
        (["a"], [range(2, 3)]),
        (["a"], [range(3, 4)]),
    ]
    assert engine.toy.steps == [0, 1, 2]


def test_a_chain_of_a_drafter_that_takes_its_own_token_by_hand() -> None:
    engine = Engine(shifted=False)
    # All three tokens are given, the last in a row that is added: 10, then 20, then 40.
    assert engine.step({"a": ([3, 5, 2], 3)}) == {"a": [10, 20, 40]}
    assert engine.view is not None
    assert engine.view.asked == [
        (["a"], [range(3)]),
        (["a"], [range(3, 4)]),
        (["a"], [range(4, 5)]),
    ]


@pytest.mark.parametrize("shifted", [True, False], ids=["shifted", "unshifted"])
def test_each_request_has_its_own_k_and_rows(shifted: bool) -> None:
    histories = {"a": [4, 9, 1], "b": [8, 8, 8, 2], "c": [1, 2], "d": [6, 3, 3, 3, 3], "e": [5, 5]}
    ks = {"a": 2, "b": 0, "c": 4, "d": 1, "e": 3}
    engine = Engine(shifted)
    drafts = engine.step({name: (ids, ks[name]) for name, ids in histories.items()})

    for name, ids in histories.items():
        assert drafts[name] == expected(ids, ks[name], shifted=shifted), name
    assert engine.view is not None
    assert [names for names, _ in engine.view.asked[1:]] == [["a", "c", "e"], ["c", "e"], ["c"]]


@pytest.mark.parametrize("shifted", [True, False], ids=["shifted", "unshifted"])
def test_chunks_of_a_prompt_are_stored_and_draft_nothing(shifted: bool) -> None:
    prompt = [7, 2, 9, 4, 1, 8]
    engine = Engine(shifted)
    for end in (2, 3, 5):
        assert engine.step({"a": (prompt, 0)}, {"a": end}) == {"a": []}
    # Position 5 comes with the first draft, after a token is committed.
    history = [*prompt, 40]
    assert engine.step({"a": (history, 3)}) == {"a": expected(history, 3, shifted=shifted)}
    assert engine.toy.steps == [0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize("shifted", [True, False], ids=["shifted", "unshifted"])
def test_a_chunk_and_a_draft_in_one_step(shifted: bool) -> None:
    engine = Engine(shifted)
    prompt, other = [7, 2, 9, 4, 1, 8], [5, 6, 7]
    drafts = engine.step({"p": (prompt, 0), "q": (other, 2)}, {"p": 4})
    assert drafts == {"p": [], "q": expected(other, 2, shifted=shifted)}
    history = [*prompt, 3]
    drafts = engine.step({"q": ([*other, 1], 1), "p": (history, 2)})
    assert drafts == {
        "q": expected([*other, 1], 1, shifted=shifted),
        "p": expected(history, 2, shifted=shifted),
    }


@pytest.mark.parametrize("shifted", [True, False], ids=["shifted", "unshifted"])
def test_requests_without_rows_are_left_alone(shifted: bool) -> None:
    engine = Engine(shifted)
    first, second = [4, 9, 1], [8, 8, 2]
    engine.step({"a": (first, 1), "b": (second, 1)})
    stored = dict(engine.toy.given)
    # b's features are held back: it gets none of a's rows, and none of its own are laid out.
    held_back = {"b": len(second) - 1}
    drafts = engine.step({"b": ([*second, 5], 0), "a": ([*first, 6], 1)}, held_back)
    assert drafts == {"b": [], "a": expected([*first, 6], 1, shifted=shifted)}
    assert engine.view is not None
    assert all("b" not in names for names, _ in engine.view.asked)
    assert {key: value for key, value in engine.toy.given.items() if key[0] == "b"} == {
        key: value for key, value in stored.items() if key[0] == "b"
    }
    # Later they come together.
    drafts = engine.step({"b": ([*second, 5, 3], 2)})
    assert drafts == {"b": expected([*second, 5, 3], 2, shifted=shifted)}


@pytest.mark.parametrize("shifted", [True, False], ids=["shifted", "unshifted"])
def test_a_step_with_nothing_to_do_runs_nothing(shifted: bool) -> None:
    engine = Engine(shifted)
    engine.step({"a": ([1, 2, 3], 0)})
    ran = list(engine.toy.steps)
    assert engine.step({"a": ([1, 2, 3], 0)}) == {"a": []}
    assert engine.toy.steps == ran


def test_an_unshifted_drafter_drafts_again_from_the_last_token_alone() -> None:
    # Everything before it was stored: its row is the only one.
    engine = Engine(shifted=False)
    engine.step({"a": ([1, 2, 3], 2)})
    assert engine.step({"a": ([1, 2, 3], 2)}) == {"a": expected([1, 2, 3], 2, shifted=False)}
    assert engine.view is not None
    assert engine.view.asked[0] == (["a"], [range(2, 3)])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shifted", [True, False], ids=["shifted", "unshifted"])
def test_random_steps_equal_the_definition(shifted: bool, seed: int) -> None:
    """Prompts in chunks, any acceptance, stretches without drafts: what was guessed never stays."""
    rng = random.Random(seed)
    engine = Engine(shifted)
    prompts = {f"r{i}": [rng.randrange(99) for _ in range(rng.randint(1, 9))] for i in range(5)}
    histories = {name: list(prompt) for name, prompt in prompts.items()}
    computed = dict.fromkeys(prompts, 0)
    for _ in range(40):
        asks: dict[str, tuple[Sequence[int], int]] = {}
        ends = {}
        for name in rng.sample(sorted(prompts), rng.randint(1, 5)):
            history = histories[name]
            left = len(history) - computed[name]
            if len(history) == len(prompts[name]) and left > 1 and rng.random() < 0.6:
                computed[name] += rng.randint(1, left - 1)  # a chunk that does not complete it
                asks[name], ends[name] = (tuple(history), 0), computed[name]
                continue
            history += [rng.randrange(99) for _ in range(rng.randint(1, 4))]
            computed[name] = len(history) - 1
            k = rng.choice((0, 1, 2, 5))
            asks[name] = tuple(history), k
            if k == 0 and rng.random() < 0.5:  # held back
                ends[name] = engine.handed.get(name, 0)
        drafts = engine.step(asks, ends)
        for name, (history, k) in asks.items():
            wanted = [] if name in ends else expected(history, k, shifted=shifted)
            assert drafts[name] == wanted, name


def test_draft_ids_are_mapped_to_the_targets() -> None:
    class Reduced(Toy):
        def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
            return super().logits(hidden, step)[:, ::2]  # draft id i is the target's 2 * i

    engine = Engine(shifted=True, toy=Reduced())
    mapping = torch.arange(0, VOCAB_SIZE, 2)
    # The state after [3, 5, 2] is 35, which has no draft id: the lowest of equal logits, 0.
    # The next row: 0 + 35; its state is 70, which is draft id 35: the target's 70.
    # The next row: 70 + 70; its state is 70 + 140 = 210 - 202 = 8: the target's 8.
    drafts = engine.step({"a": ([3, 5, 2], 3)}, draft_to_target=mapping)
    assert drafts == {"a": [0, 70, 8]}


def sampling(temperature: float, seed: int) -> SamplingData:
    return SamplingData(
        temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed, min_tokens=0,
        stop_token_ids=(), verification="block",
    )  # fmt: skip


def sampler_of(asks: dict[str, tuple[list[int], int]], temperature: float) -> StepSampler:
    return StepSampler(
        [
            DrawRequest(name, sampling(temperature, 3), len(ids), k)
            for name, (ids, k) in asks.items()
        ],
        VOCAB_SIZE,
    )


class Quiet:
    """Computes with tensors only, and notes that it was run."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(VOCAB_SIZE, 8, generator=generator).double()

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor | None, rows: Rows, step: int
    ) -> torch.Tensor:
        self.log.append("forward")
        assert hidden is not None
        return self.table[token_ids] + hidden[:, :1]

    def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        return hidden @ self.table.T


@pytest.mark.parametrize("sample", [False, True], ids=["likeliest", "sampler"])
def test_between_the_steps_of_greedy_drafts_nothing_is_read_from_the_device(
    sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each reading would wait for all that was launched before."""
    log: list[str] = []
    for name in ("tolist", "item", "cpu", "nonzero", "__int__", "__float__", "__bool__"):
        plain = getattr(torch.Tensor, name)

        def logged(self: torch.Tensor, *rest: Any, plain: Any = plain) -> Any:
            log.append("read")
            return plain(self, *rest)

        monkeypatch.setattr(torch.Tensor, name, logged)
    asks = {"a": ([4, 9, 1], 2), "c": ([1, 2], 4)}
    sampler = sampler_of(asks, 0.0)
    drafts = Engine(shifted=True, toy=Quiet(log)).step(asks, sample=sample, sampler=sampler)  # type: ignore[arg-type]
    first, last = log.index("forward"), len(log) - log[::-1].index("forward")
    assert log[first:last] == ["forward"] * 4  # the features, then a row for each token but one
    assert "read" in log[last:]
    assert [len(ids) for ids in drafts.values()] == [2, 4]


@pytest.mark.parametrize("temperature", [0.0, 5.0], ids=["greedy", "hot"])
def test_drafts_are_what_the_sampler_drew_and_go_into_the_next_row(temperature: float) -> None:
    asks = {"a": ([4, 9, 1], 2), "b": ([8, 8, 2], 0), "c": ([1, 2], 4)}
    engine = Engine(shifted=True)
    sampler = sampler_of(asks, temperature)
    drafts = engine.step(asks, sample=True, sampler=sampler)

    assert [len(ids) for ids in drafts.values()] == [2, 0, 4]
    for row, (name, (history, k)) in enumerate(asks.items()):
        assert (sampler.drawn(row) or []) == drafts[name]
        if temperature == 0.0:
            assert drafts[name] == expected(history, k, shifted=True)
        # Guessed rows begin behind the features: at the last token but one, plus one.
        for j, token_id in enumerate(drafts[name][:-1]):
            position = len(history) - 1 + j
            state = sum(engine.toy.given[name, p] for p in range(position)) % VOCAB_SIZE
            assert engine.toy.given[name, position] == token_id + state


def test_a_draft_that_ends_at_a_row_without_number_leaves_the_others_alone() -> None:
    class Broken(Toy):
        def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
            logits = super().logits(hidden, step)
            if step == 1:
                logits[0] = float("nan")
            return logits

    asks = {"a": ([4, 9, 1], 3), "c": ([1, 2], 3)}
    sampler = sampler_of(asks, 0.0)
    Engine(shifted=True, toy=Broken()).step(asks, sample=True, sampler=sampler)
    assert sampler.drawn(0) == expected([4, 9, 1], 1, shifted=True)
    assert sampler.drawn(1) == expected([1, 2], 3, shifted=True)
    assert sampler.faults == {"non_finite_draft": 1}
