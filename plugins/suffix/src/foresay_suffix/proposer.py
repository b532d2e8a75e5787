"""The suffix proposer: each request's own tokens, and the session's outputs. Knows no model."""

from __future__ import annotations

from array import array

from foresay.core.proposer import Draft, DraftInput, DraftRequest
from foresay_suffix import SuffixConfig
from foresay_suffix.contexts import Contexts
from foresay_suffix.expansion import Continuation, Place, expand
from foresay_suffix.memory import Memory

_OWN = 0  # the number of a request's text among its contexts


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


class SuffixProposer:
    """Drafts what most often followed the last few tokens, in the request or in earlier outputs.

    After SuffixDecoding (Oliaro et al., 2024, arXiv 2411.04975). Of the request's own tokens and of
    the session's outputs, whichever promises more accepted tokens is followed. Deterministic: a
    function of the request's tokens and of what the session's requests were before, in their order.

    A request's output is remembered when it is released. That may be a preemption; when the request
    is there again, what was remembered of it is taken back.
    """

    def __init__(self, config: SuffixConfig) -> None:
        self._config = config
        self._states: dict[str, _State] = {}
        self.memory = Memory(config.max_remembered_tokens)

    def propose(self, batch: DraftInput) -> Draft:
        """Return up to `request.k` tokens for each request, none where nothing is likely."""
        return Draft([self._draft(request) for request in batch.requests])

    def release(self, req_id: str) -> None:
        """Forget a request; its output goes into the memory."""
        state = self._states.pop(req_id, None)
        if state is not None:
            self.memory.remember(req_id, state.tokens, state.num_prompt)

    def _draft(self, request: DraftRequest) -> list[int]:
        state = self._states.get(request.req_id)
        if state is None:
            state = self._states[request.req_id] = _State(request)
            self.memory.take_back(request.req_id, state.tokens, state.num_prompt)
        else:
            state.tokens.extend(request.token_ids[len(state.tokens) :])
        if request.k == 0:
            return []
        state.index()
        own, _ = self._continuation(state, state.contexts, request.k)
        remembered, places = self._continuation(state, self.memory.contexts, request.k)
        if remembered.score <= own.score:
            return own.tokens
        self.memory.use(places[i] for i in remembered.followed)
        return remembered.tokens

    def _continuation(
        self, state: _State, contexts: Contexts, k: int
    ) -> tuple[Continuation, list[int]]:
        """Return how the request goes on by some contexts, and the places that were looked at."""
        config = self._config
        growing = contexts is state.contexts
        length, places = contexts.find(state.tokens, config.min_match)
        known = [
            Place(*contexts.at(place), 1 if growing else self.memory.count(place))
            for place in places
        ]
        most = min(k, int(config.max_draft_factor * length))
        return expand(known, length, most, config.min_probability, growing=growing), places
