"""Proposers that break one rule each, and which rules of the conformance suite must say so.

`Sound` is right; every wrong one is `Sound` but for one mistake that authors make. None of them can
change a text: the engine survives them all, which is why it takes a suite to find them.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from pydantic import ConfigDict, Field

from foresay import hookimpl
from foresay.core.plugins import PluginManager
from foresay.core.proposer import (
    Draft,
    DraftInput,
    DraftRequest,
    Needs,
    ProposerConfig,
    ProposerSpec,
    TargetView,
)
from foresay.core.testing import tiny_gpt2

# Rules that run an engine, which is strict: it stops at the first fault.
ENGINE = {
    "greedy_texts_are_plain_decodings",
    "seeded_texts_are_plain_decodings",
    "unseeded_requests_are_served",
    "prompt_chunks_change_nothing",
    "a_prefix_hit_changes_nothing",
    "preemption_changes_nothing",
    "a_mixed_batch_changes_nothing",
    "texts_go_to_the_last_position",
}
# Of them, those whose requests run in two different batches.
BATCHES = {
    "prompt_chunks_change_nothing",
    "preemption_changes_nothing",
    "a_mixed_batch_changes_nothing",
}
# Of them, those with requests at a temperature.
SAMPLED = ENGINE - {"greedy_texts_are_plain_decodings", "texts_go_to_the_last_position"}
# Rules that compare what one request is drafted in two courses of events.
OF_ONE_REQUEST = {
    "a_batch_changes_no_draft",
    "rows_may_change_their_order",
    "steps_may_be_missed",
    "a_preempted_request_starts_anew",
    "a_released_id_may_be_used_again",
    "a_second_request_finds_nothing_of_the_first",
}
# Rules that ask for a draft, without an engine, whatever the proposer needs.
DRAFTING = OF_ONE_REQUEST | {
    "there_is_one_list_per_request",
    "something_is_drafted",
    "draft_ids_are_tokens_of_the_target",
    "k_is_honoured",
    "the_same_history_gets_the_same_draft",
    "an_incomplete_prompt_gets_no_draft",
    "the_shortest_history_is_drafted_for",
    "the_longest_history_is_drafted_for",
    "the_input_is_only_read",
    "the_batch_is_not_kept",
    "a_session_again_gets_the_same_drafts",
    "any_request_may_be_released",
    "released_requests_leave_nothing_behind",
    "two_proposers_share_nothing",
    "the_target_is_only_looked_at",
    "nothing_global_is_changed",
}


@dataclass(frozen=True)
class Case:
    """A proposer, the rules that must catch it, and what its author's test class says besides."""

    proposer: type[Any]
    caught_by: frozenset[str]
    suite: Mapping[str, Any]


RIGHT: list[Case] = []
WRONG: list[Case] = []

Class = TypeVar("Class", bound=type[Any])


def right(**suite: Any) -> Callable[[Class], Class]:
    """Mark a proposer that no rule may blame."""

    def mark(proposer: Class) -> Class:
        RIGHT.append(Case(proposer, frozenset(), suite))
        return proposer

    return mark


def caught_by(*rules: str, **suite: Any) -> Callable[[Class], Class]:
    """Mark a proposer that these rules, and no others, must blame."""

    def mark(proposer: Class) -> Class:
        WRONG.append(Case(proposer, frozenset(rules), suite))
        return proposer

    return mark


@dataclass
class Pairs:
    """Which token followed each token the last time, in one history."""

    followers: dict[int, int] = field(default_factory=dict)
    num_read: int = 0
    last: int = -1

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.last >= 0:
                self.followers[self.last] = token
            self.last = token
        self.num_read += len(tokens)

    def walk(self, k: int) -> list[int]:
        draft: list[int] = []
        token = self.last
        while len(draft) < k and token in self.followers:
            token = self.followers[token]
            draft.append(token)
        return draft


@right()
class Sound:
    """Right in every respect."""

    def __init__(self, config: ProposerConfig) -> None:
        self.states: dict[str, Pairs] = {}
        self.vocab_size = 0

    def load(self, target: TargetView) -> None:
        self.vocab_size = target.vocab_size

    def propose(self, batch: DraftInput) -> Draft:
        return Draft([self.draft(request) for request in batch.requests])

    def release(self, req_id: str) -> None:
        self.states.pop(req_id, None)

    def state(self, request: DraftRequest) -> Pairs:
        """The request's state, which has read all its tokens."""
        state = self.states.setdefault(request.req_id, Pairs())
        state.read(request.token_ids[state.num_read :])
        return state

    def draft(self, request: DraftRequest) -> list[int]:
        return self.state(request).walk(request.k)


# -- others that are right ----------------------------------------------------------------------


@right()
class Stateless:
    """Reads the whole history every time; has `propose` and nothing else."""

    def __init__(self, config: ProposerConfig) -> None:
        pass

    def propose(self, batch: DraftInput) -> Draft:
        drafts = []
        for request in batch.requests:
            pairs = Pairs()
            pairs.read(request.token_ids)
            drafts.append(pairs.walk(request.k))
        return Draft(drafts)


@right()
class Tensors(Sound):
    """Returns tensors where others return lists."""

    def draft(self, request: DraftRequest) -> Any:
        return torch.tensor(super().draft(request), dtype=torch.int64)


@right()
class Limited(Sound):
    """At most two tokens a step, and only up to 40 of context."""

    needs = Needs(max_draft_tokens=2, max_context=40)

    def draft(self, request: DraftRequest) -> list[int]:
        assert request.k <= 2
        assert len(request.token_ids) + request.k <= 40
        return super().draft(request)


@right(learns_from_steps=True)
class Cautious(Sound):
    """Drafts less after a draft that was not accepted: it learns from its steps."""

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.expected: dict[str, tuple[int, list[int]]] = {}

    def release(self, req_id: str) -> None:
        super().release(req_id)
        self.expected.pop(req_id, None)

    def draft(self, request: DraftRequest) -> list[int]:
        start, last = self.expected.get(request.req_id, (0, []))
        was_right = request.token_ids[start : start + len(last)] == last
        draft = self.state(request).walk(request.k if was_right else min(1, request.k))
        self.expected[request.req_id] = len(request.token_ids), draft
        return draft


@right(remembers_requests=True)
class Remembering(Sound):
    """Goes on as one of the last three requests did, where the request itself has no answer."""

    most_remembered = 3

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.ended: list[Pairs] = []

    def release(self, req_id: str) -> None:
        state = self.states.pop(req_id, None)
        if state is not None:
            self.ended = [*self.ended, state][-self.most_remembered :]

    def draft(self, request: DraftRequest) -> list[int]:
        state = self.state(request)
        sources = [state, *(Pairs(pairs.followers, 0, state.last) for pairs in self.ended)]
        return next(filter(None, (source.walk(request.k) for source in sources)), [])


@right()
class Predicting(Sound):
    """Goes on where the history's last token stands in the prediction; else as `Sound`."""

    needs = Needs(prediction=True)

    def draft(self, request: DraftRequest) -> list[int]:
        return self.predicted(request, request.prediction_ids) or super().draft(request)

    def predicted(self, request: DraftRequest, prediction: Sequence[int]) -> list[int]:
        ids = list(prediction)
        last = request.token_ids[-1]
        return ids[ids.index(last) + 1 :][: request.k] if last in ids else []


@right()
class Sampling(Sound):
    """Draws each token from a distribution that prefers what followed the last time."""

    needs = Needs(sampled=True)

    def propose(self, batch: DraftInput) -> Draft:
        assert batch.sampler is not None
        states = [self.state(request) for request in batch.requests]
        drafts: list[list[int]] = [[] for _ in states]
        last = [state.last for state in states]
        for step in range(max(request.k for request in batch.requests)):
            rows = [row for row, request in enumerate(batch.requests) if request.k > step]
            logits = torch.zeros(len(rows), self.vocab_size)
            for i, row in enumerate(rows):
                logits[i, states[row].followers.get(last[row], 0)] = 3.0
            drawn = batch.sampler.draw(logits, step, rows)
            for i, row in enumerate(rows):
                last[row] = int(drawn[i])
                drafts[row].append(self.returned(int(drawn[i]), logits[i]))
        return Draft(drafts)

    def returned(self, drawn: int, logits: torch.Tensor) -> int:
        return drawn


# -- the form of a draft ------------------------------------------------------------------------


@caught_by(*DRAFTING, *ENGINE)
class NoDraft(Sound):
    """Returns a list of lists where a `Draft` is asked for."""

    def propose(self, batch: DraftInput) -> Any:
        return super().propose(batch).token_ids


@caught_by(
    "there_is_one_list_per_request",
    "k_is_honoured",
    "a_batch_changes_no_draft",
    "an_incomplete_prompt_gets_no_draft",
    "the_shortest_history_is_drafted_for",
)
class SkipsRows(Sound):
    """Returns no list for requests that want no draft."""

    def propose(self, batch: DraftInput) -> Draft:
        return Draft([self.draft(request) for request in batch.requests if request.k])


@caught_by("draft_ids_are_tokens_of_the_target", *ENGINE)
class PadsWithMinusOne(Sound):
    """Fills short drafts up with -1."""

    def draft(self, request: DraftRequest) -> list[int]:
        draft = super().draft(request)
        return draft + [-1] * (request.k - len(draft))


@caught_by("a_batch_changes_no_draft", *BATCHES)
class PadsToTheLongest(Sound):
    """Fills all drafts up to the longest of the batch, as a tensor of drafts must be."""

    def propose(self, batch: DraftInput) -> Draft:
        drafts = [self.draft(request) for request in batch.requests]
        length = max(map(len, drafts))
        return Draft(
            [
                (draft + [0] * (length - len(draft)))[: request.k]
                for draft, request in zip(drafts, batch.requests, strict=True)
            ]
        )


@caught_by("draft_ids_are_tokens_of_the_target", *ENGINE)
class AddsUp(Sound):
    """Drafts the sum of the last two ids, which may lie past the end of the vocabulary."""

    def draft(self, request: DraftRequest) -> list[int]:
        return [request.token_ids[-1] + request.token_ids[-2]][: request.k]


@caught_by("k_is_honoured", "an_incomplete_prompt_gets_no_draft", *ENGINE)
class OneTooMany(Sound):
    """Counts the token that the target adds: drafts k + 1."""

    def draft(self, request: DraftRequest) -> list[int]:
        return self.state(request).walk(request.k + 1)


@caught_by("k_is_honoured", "an_incomplete_prompt_gets_no_draft")
class AtLeastOne(Sound):
    """Drafts one token where none is wanted."""

    def draft(self, request: DraftRequest) -> list[int]:
        return self.state(request).walk(max(1, request.k))


@caught_by("k_is_honoured", "a_batch_changes_no_draft", "unseeded_requests_are_served", *BATCHES)
class LargestK(Sound):
    """Takes the first request's k for all."""

    def propose(self, batch: DraftInput) -> Draft:
        return Draft([self.state(r).walk(batch.requests[0].k) for r in batch.requests])


@caught_by("something_is_drafted")
class NeverDrafts(Sound):
    """Swallows an error of its own in every step."""

    def draft(self, request: DraftRequest) -> list[int]:
        return []


# -- what a draft depends on --------------------------------------------------------------------


@caught_by(
    "the_same_history_gets_the_same_draft",
    "a_session_again_gets_the_same_drafts",
    "an_incomplete_prompt_gets_no_draft",
    "two_proposers_share_nothing",
    "a_prefix_hit_changes_nothing",
    *OF_ONE_REQUEST,
    *BATCHES,
)
class Unseeded(Sound):
    """Draws from a generator that every proposer of the process draws from."""

    numbers = random.Random(0)

    def draft(self, request: DraftRequest) -> list[int]:
        return self.numbers.choices(request.token_ids, k=request.k)


@caught_by("a_prefix_hit_changes_nothing", *OF_ONE_REQUEST, *BATCHES)
class SeededOnce(Sound):
    """Draws from one generator for all requests: drafts depend on who came before."""

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.numbers = random.Random(0)

    def draft(self, request: DraftRequest) -> list[int]:
        return self.numbers.choices(request.token_ids, k=request.k)


@caught_by(
    "a_batch_changes_no_draft",
    "rows_may_change_their_order",
    "a_released_id_may_be_used_again",
    "a_second_request_finds_nothing_of_the_first",
    *BATCHES,
)
class KeyedByRow(Sound):
    """Keeps its state by the row's index."""

    def propose(self, batch: DraftInput) -> Draft:
        drafts = []
        for row, request in enumerate(batch.requests):
            state = self.states.setdefault(str(row), Pairs())
            state.read(request.token_ids[state.num_read :])
            drafts.append(state.walk(request.k))
        return Draft(drafts)


@caught_by("a_second_request_finds_nothing_of_the_first", "a_prefix_hit_changes_nothing")
class KeyedByPrompt(Sound):
    """Keeps its state by how the text begins, so that equal prompts share it."""

    def state(self, request: DraftRequest) -> Pairs:
        state = self.states.setdefault(str(request.token_ids[:4]), Pairs())
        state.read(request.token_ids[state.num_read :])
        return state


@caught_by(
    "a_batch_changes_no_draft",
    "a_second_request_finds_nothing_of_the_first",
    "a_prefix_hit_changes_nothing",
    *BATCHES,
)
class SharedTable(Sound):
    """Has one table for all requests: what one text taught is drafted in another."""

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.followers: dict[int, int] = {}

    def state(self, request: DraftRequest) -> Pairs:
        state = self.states.setdefault(request.req_id, Pairs(self.followers))
        state.read(request.token_ids[state.num_read :])
        return state


@caught_by("a_batch_changes_no_draft")
class ExpectsItsBatch(Sound):
    """Takes a request that is not in a batch to have ended."""

    def propose(self, batch: DraftInput) -> Draft:
        present = {request.req_id for request in batch.requests}
        for req_id in self.states.keys() - present:
            self.states[req_id].followers.clear()
        return super().propose(batch)


@caught_by("steps_may_be_missed")
class TrustsNewTokens(Sound):
    """Takes the last `num_new_tokens` for all that it has not read."""

    def state(self, request: DraftRequest) -> Pairs:
        state = self.states.get(request.req_id)
        if state is None:
            state = self.states[request.req_id] = Pairs()
            state.read(request.token_ids[:])
        else:
            state.read(request.token_ids[-request.num_new_tokens :])
        return state


@caught_by("the_shortest_history_is_drafted_for", "the_longest_history_is_drafted_for")
class LooksThreeBack(Sound):
    """Takes it for granted that there are three tokens to look at."""

    def draft(self, request: DraftRequest) -> list[int]:
        if request.token_ids[-1] == request.token_ids[-3]:
            return [request.token_ids[-2]][: request.k]
        return super().draft(request)


@caught_by("the_longest_history_is_drafted_for", "texts_go_to_the_last_position")
class SixtyFourPositions(Sound):
    """Has room for 64 positions."""

    def draft(self, request: DraftRequest) -> list[int]:
        positions = [0] * 64
        positions[len(request.token_ids) - 1] = 1
        return super().draft(request)


@caught_by("a_preempted_request_starts_anew", "preemption_changes_nothing")
class TakesAllForNew(Sound):
    """Asserts that a new request has one output token: not true of one that was preempted."""

    def draft(self, request: DraftRequest) -> list[int]:
        num_output = len(request.token_ids) - request.num_prompt_tokens
        assert request.req_id in self.states or num_output <= 1
        return super().draft(request)


# -- what is remembered -------------------------------------------------------------------------


@caught_by("a_released_id_may_be_used_again", "released_requests_leave_nothing_behind")
class NoRelease(Sound):
    """Never forgets a request."""

    release = None  # type: ignore[assignment]


@caught_by("released_requests_leave_nothing_behind")
class RemembersIds(Sound):
    """Notes every id that it ever released."""

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.released: set[str] = set()

    def release(self, req_id: str) -> None:
        super().release(req_id)
        self.released.add(req_id)


@caught_by("released_requests_leave_nothing_behind", remembers_requests=True)
class RemembersAll(Remembering):
    """Remembers requests without a bound."""

    most_remembered = 10**6


@caught_by(
    "a_second_request_finds_nothing_of_the_first",
    "preemption_changes_nothing",
    "a_prefix_hit_changes_nothing",
    "a_mixed_batch_changes_nothing",
)
class RemembersUnasked(Remembering):
    """Remembers requests, within a bound, but its author did not say so."""


@caught_by("released_requests_leave_nothing_behind")
class CachesHistories(Sound):
    """Puts a cache without a limit on a pure function, in the class."""

    @staticmethod
    @functools.cache
    def cached(history: tuple[int, ...], req_id: str, k: int) -> list[int]:
        pairs = Pairs()
        pairs.read(history)
        return pairs.walk(k)

    def draft(self, request: DraftRequest) -> list[int]:
        return self.cached(tuple(request.token_ids), request.req_id, request.k)


@caught_by(
    "a_preempted_request_starts_anew",
    "a_released_id_may_be_used_again",
    "released_requests_leave_nothing_behind",
    "preemption_changes_nothing",
)
class ForgetsHalf(Sound):
    """Drops a request's table, not the note of how much of it was read."""

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.num_read: dict[str, int] = {}

    def state(self, request: DraftRequest) -> Pairs:
        state = self.states.setdefault(request.req_id, Pairs())
        state.read(request.token_ids[self.num_read.get(request.req_id, 0) :])
        self.num_read[request.req_id] = len(request.token_ids)
        return state


@caught_by("any_request_may_be_released", "a_mixed_batch_changes_nothing")
class ForgetsOnlyWhatItKnows(Sound):
    """Raises when it is told to forget a request that it never drafted for."""

    def release(self, req_id: str) -> None:
        del self.states[req_id]


@caught_by("two_proposers_share_nothing")
class StateInTheClass(Sound):
    """Has its table in the class body: every engine of the process shares it."""

    states: dict[str, Pairs] = {}  # noqa: RUF012 - that is the mistake

    def __init__(self, config: ProposerConfig) -> None:
        self.vocab_size = 0


@caught_by("the_batch_is_not_kept")
class KeepsTheBatch(Sound):
    """Keeps the last batch, to compare it with the next one."""

    last: DraftInput | None = None

    def propose(self, batch: DraftInput) -> Draft:
        self.last = batch
        return super().propose(batch)


@caught_by("the_batch_is_not_kept")
class KeepsTheView(Sound):
    """Keeps each request's tokens by reference."""

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.views: dict[str, Sequence[int]] = {}

    def release(self, req_id: str) -> None:
        super().release(req_id)
        self.views.pop(req_id, None)

    def draft(self, request: DraftRequest) -> list[int]:
        self.views[request.req_id] = request.token_ids
        return super().draft(request)


@caught_by("the_input_is_only_read")
class SortsRequests(Sound):
    """Sorts the requests where they are, if it can."""

    def propose(self, batch: DraftInput) -> Draft:
        requests = batch.requests if isinstance(batch.requests, list) else list(batch.requests)
        order = {request.req_id: row for row, request in enumerate(requests)}
        requests.sort(key=lambda request: request.req_id)
        drafts = {request.req_id: self.draft(request) for request in requests}
        return Draft([drafts[req_id] for req_id in order])


@caught_by(*DRAFTING, *ENGINE)
class AppendsItsDraft(Sound):
    """Lengthens the tokens themselves by its draft."""

    def draft(self, request: DraftRequest) -> list[int]:
        draft = super().draft(request)
        tokens: Any = request.token_ids
        tokens += draft
        return draft


@caught_by("the_target_is_only_looked_at")
class RewritesTheConfig(Sound):
    """Makes a smaller model's config of the target's, without a copy."""

    def load(self, target: TargetView) -> None:
        super().load(target)
        target.config.num_hidden_layers = 1


@caught_by(
    "the_target_is_only_looked_at",
    *(ENGINE - {"unseeded_requests_are_served"}),
    model=lambda self, name: tiny_gpt2.__wrapped__(),
)
class ScalesTheEmbeddings(Sound):
    """Scales the target's embeddings where they are."""

    needs = Needs(embeddings=True)

    def load(self, target: TargetView) -> None:
        super().load(target)
        assert target.embeddings is not None
        target.embeddings.mul_(2.0)


@caught_by("nothing_global_is_changed")
class SetsTheDefaultDtype(Sound):
    """Makes its tensors in float64 by making that torch's default."""

    def load(self, target: TargetView) -> None:
        super().load(target)
        torch.set_default_dtype(torch.float64)


# -- settings, needs, the plugin ----------------------------------------------------------------

_numbers = itertools.count(3)


def _registered(needs: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """The suite of a proposer that a plugin registers, with what it says it needs."""
    spec = ProposerSpec("registered", ProposerConfig, Sound, needs)

    class Plugin:
        @hookimpl
        def foresay_register_proposers(self) -> Iterable[ProposerSpec]:
            return [spec]

    plugins = PluginManager()
    plugins.register(Plugin(), "wrong")
    return {"proposer_name": "registered", "plugins": lambda self: plugins}


@caught_by("a_misspelt_setting_is_refused")
class AcceptsAnything(Sound):
    """Ignores settings that it does not know."""

    class Config(ProposerConfig):
        model_config = ConfigDict(extra="ignore", frozen=True)


@caught_by("a_misspelt_setting_is_refused")
class CanBeChanged(Sound):
    """Lets its settings be changed after they were checked."""

    class Config(ProposerConfig):
        model_config = ConfigDict(extra="forbid", frozen=False)


@caught_by("every_setting_is_described")
class SaysNothing(Sound):
    """Does not say what its setting means."""

    class Config(ProposerConfig):
        window: int = Field(default=3, ge=1)


@caught_by("predictions_belong_to_their_requests")
class PredictsForTheFirst(Predicting):
    """Drafts every request from the first one's prediction."""

    def propose(self, batch: DraftInput) -> Draft:
        first = batch.requests[0].prediction_ids
        return Draft([self.predicted(r, first) or Sound.draft(self, r) for r in batch.requests])


@caught_by("predictions_belong_to_their_requests")
class IgnoresPredictions(Sound):
    """Declares that it reads predictions, and does not."""

    needs = Needs(prediction=True)


@caught_by("predictions_belong_to_their_requests", "a_prediction_changes_no_text")
class PredictsTooMuch(Predicting):
    """Drafts the whole rest of the prediction."""

    def predicted(self, request: DraftRequest, prediction: Sequence[int]) -> list[int]:
        ids = list(prediction)
        last = request.token_ids[-1]
        return ids[ids.index(last) + 1 :] if last in ids else []


@caught_by("sampled_drafts_are_what_was_drawn", *SAMPLED)
class ReturnsTheLikeliest(Sampling):
    """Draws, and returns the argmax."""

    def returned(self, drawn: int, logits: torch.Tensor) -> int:
        return int(logits.argmax())


@caught_by("sampled_drafts_are_what_was_drawn")
class NeverDraws(Sound):
    """Declares that it samples its drafts, and does not."""

    needs = Needs(sampled=True)


@caught_by(
    "the_spec_is_sound",
    "a_prediction_changes_no_text",
    "predictions_belong_to_their_requests",
    "sampled_drafts_are_what_was_drawn",
    *DRAFTING,
    *ENGINE,
    **_registered(lambda config, target_config: {"sampled": True}),
)
class DeclaresADict(Sound):
    """Answers what it needs with a dict."""


@caught_by(
    "the_spec_is_sound",
    **_registered(lambda config, target_config: Needs(max_draft_tokens=next(_numbers))),
)
class ChangesItsMind(Sound):
    """Declares other needs every time it is asked."""


@caught_by("importing_the_plugin_imports_no_torch", plugin_module=lambda self: "tiny_models")
class ImportsTorch(Sound):
    """Comes in a plugin whose module imports torch."""
