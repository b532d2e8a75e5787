"""The suffix proposer: each request's own tokens, and the session's outputs. Knows no model."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from foresay.core.proposer import Draft, DraftInput, DraftRequest
from foresay.core.worker.draft_trie import NOTHING, Merged, merge
from foresay.core.worker.draft_trie import Continuation as Branch
from foresay_suffix import SuffixConfig
from foresay_suffix.contexts import LONGEST, MOST_PLACES, Contexts
from foresay_suffix.expansion import Continuation, Place, expand
from foresay_suffix.memory import Memory

_OWN = 0  # the number of a request's text among its contexts
_LEAST_IN_CHAIN = 0.2  # probability of a draft token
_LEAST_IN_TREE = 0.05
# So much of the chain that is drafted without trees is in a tree with more nodes than that.
_CHAIN_LENGTH = 5
# In a tree, so many times likelier than the unseen is what followed in one place where m match;
# and place number n, from the latest, counts (n + 1) ** -0.74 of the first.
_ODDS = [float(length) for length in range(LONGEST + 1)]
_RECENCY = [(number + 1) ** -0.74 for number in range(MOST_PLACES)]


class _State:
    """One request's tokens and their contexts."""

    __slots__ = ("contexts", "num_indexed", "num_prompt", "tokens")

    def __init__(self, request: DraftRequest) -> None:
        self.tokens = array("I", request.token_ids[:])
        self.num_prompt = request.num_prompt_tokens
        self.contexts = Contexts()
        self.contexts.texts[_OWN] = self.tokens
        self.num_indexed = 1  # a place has a token before it

    def index(self) -> None:
        """Bring the contexts up to date; a request that wants no drafts needs none."""
        for end in range(self.num_indexed, len(self.tokens)):
            self.contexts.add(_OWN, end)
        self.num_indexed = max(1, len(self.tokens))


class _Match(NamedTuple):
    """The longest match of a request's last tokens in some texts, the latest places first."""

    length: int
    numbers: list[int]  # of the places, among the contexts
    places: list[Place]
    is_own: bool  # the texts are the request's own


class SuffixProposer:
    """Drafts what most often followed the last few tokens, in the request or in earlier outputs.

    After SuffixDecoding (Oliaro et al., 2024, arXiv 2411.04975). Of the request's own tokens and of
    the session's outputs, whichever promises more accepted tokens is followed; a tree has both.
    Deterministic: a function of the request's tokens and of what the session's requests were
    before, in their order.

    A request's output is remembered when it is released. That may be a preemption; when the request
    is there again, what was remembered of it is taken back.
    """

    def __init__(self, config: SuffixConfig) -> None:
        self._config = config
        self._states: dict[str, _State] = {}
        self.memory = Memory(config.max_remembered_tokens)

    def propose(self, batch: DraftInput) -> Draft:
        """Return up to `request.k` tokens for each request, none where nothing is likely."""
        if not self._config.tree:
            return Draft([self._chain(request) for request in batch.requests])
        trees = [self._tree(request) for request in batch.requests]
        return Draft([tree.token_ids for tree in trees], [tree.parents for tree in trees])

    def release(self, req_id: str) -> None:
        """Forget a request; its output goes into the memory."""
        state = self._states.pop(req_id, None)
        if state is not None:
            self.memory.remember(req_id, state.tokens, state.num_prompt)

    def _chain(self, request: DraftRequest) -> list[int]:
        state = self._caught_up(request)
        if request.k == 0:
            return []
        return self._likeliest(self._matches(state), request.k)

    def _tree(self, request: DraftRequest) -> Merged:
        state = self._caught_up(request)
        k = request.k
        if k == 0:
            return NOTHING
        matches = self._matches(state)
        chain = self._likeliest(matches, _CHAIN_LENGTH)
        branches = [
            Branch(place.text, place.end, match.length, place.times * weight, match.is_own)
            for match in matches
            for place, weight in zip(match.places, _RECENCY, strict=False)
        ]
        least = self._config.min_probability
        return merge(
            branches,
            _ODDS,
            k,
            max_depth=min(k, request.max_depth, self._config.max_depth or k),
            min_probability=max(request.min_confidence, _LEAST_IN_TREE if least is None else least),
            chain=chain if k > _CHAIN_LENGTH else (),
        )

    def _caught_up(self, request: DraftRequest) -> _State:
        """Return a request's state with its newest tokens."""
        state = self._states.get(request.req_id)
        if state is None:
            state = self._states[request.req_id] = _State(request)
            self.memory.take_back(request.req_id, state.tokens, state.num_prompt)
        else:
            state.tokens.extend(request.token_ids[len(state.tokens) :])
        return state

    def _matches(self, state: _State) -> tuple[_Match, _Match]:
        """Return where a request's last tokens occur in its own text, and in the memory."""
        state.index()
        return self._match(state, state.contexts), self._match(state, self.memory.contexts)

    def _match(self, state: _State, contexts: Contexts) -> _Match:
        is_own = contexts is state.contexts
        length, numbers = contexts.find(state.tokens, self._config.min_match)
        places = [
            Place(*contexts.at(number), 1 if is_own else self.memory.count(number))
            for number in numbers
        ]
        return _Match(length, numbers, places, is_own)

    def _likeliest(self, matches: tuple[_Match, _Match], k: int) -> list[int]:
        """Return the one continuation that promises most, of up to `k` tokens."""
        own, remembered = (self._continuation(match, k) for match in matches)
        if remembered.score <= own.score:
            return own.tokens
        self.memory.use(matches[1].numbers[i] for i in remembered.followed)
        return remembered.tokens

    def _continuation(self, match: _Match, k: int) -> Continuation:
        config = self._config
        least = _LEAST_IN_CHAIN if config.min_probability is None else config.min_probability
        most = min(k, int(config.max_draft_factor * match.length))
        return expand(match.places, match.length, most, least, growing=match.is_own)
