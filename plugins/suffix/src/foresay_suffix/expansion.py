"""How some places go on: the likeliest continuation, token by token. Knows token ids only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """A place in a text whose tokens before `end` match, and how often that text was seen."""

    text: array[int]
    end: int
    times: int = 1


class Continuation(NamedTuple):
    """A draft, what it is worth, and which of the places go on like this to its end."""

    tokens: list[int]
    score: float  # the sum of the tokens' estimated probabilities: how many should be accepted
    followed: list[int]  # indices into the places


NOTHING = Continuation([], 0.0, [])


def expand(
    places: Sequence[Place], match_length: int, k: int, min_probability: float, *, growing: bool
) -> Continuation:
    """Return how places of one match most probably go on, up to `k` tokens.

    After each token the most frequent next one is taken, of equally frequent ones that of the
    earliest place in `places`; the places that went on otherwise drop out (SuffixDecoding, arXiv
    2411.04975, section 4.2). A token's probability is that of the one before it, times c / (n + 1 /
    m): c of the n that are left go on with it, and m tokens match so far, drafted ones included. 1
    / m is for what was never seen: a single place where a single token matches is worth 1/2. The
    draft ends before the first token whose probability is below `min_probability`.

    `growing`: the places' text is the one to be continued, so where they run off its end they go on
    with the draft: after `a b a b` comes `a b a ...`. Otherwise a place at the end of its text says
    nothing.
    """
    tokens: list[int] = []
    score, probability = 0.0, 1.0
    live = list(range(len(places)))
    while len(tokens) < k:
        offset = len(tokens)
        nexts: list[tuple[int, int]] = []  # place and what comes next there
        counts: dict[int, int] = {}
        total = 0
        for i in live:
            text, end, times = places[i]
            at = end + offset
            if at < len(text):
                token = text[at]
            elif growing:
                token = tokens[at - len(text)]
            else:
                continue
            nexts.append((i, token))
            counts[token] = counts.get(token, 0) + times
            total += times
        if not nexts:
            break
        best = max(counts, key=counts.__getitem__)  # the first of several
        probability *= counts[best] / (total + 1 / (match_length + offset))
        if probability < min_probability:
            break
        tokens.append(best)
        score += probability
        live = [i for i, token in nexts if token == best]
    return Continuation(tokens, score, live) if tokens else NOTHING
