"""The plugin: foresay's whole conformance suite, and what it drafts, by hand."""

from __future__ import annotations

import pytest

from foresay.core.proposer import DraftInput, DraftRequest
from foresay.core.testing import ProposerConformance
from foresay_custom_example import ExampleConfig
from foresay_custom_example.proposer import ExampleProposer


class TestConformance(ProposerConformance):
    """All rules that foresay has for proposers."""

    proposer_name = "custom_example"


@pytest.mark.parametrize(
    ("history", "k", "min_count", "expected"),
    [
        pytest.param("abcab", 3, 1, "cab", id="goes round"),
        pytest.param("abacada", 2, 1, "da", id="the last follower counts"),
        pytest.param("abcd", 3, 1, "", id="nothing came before"),
        pytest.param("abxa", 3, 1, "bxa", id="from follower to follower"),
        pytest.param("abxa", 2, 1, "bx", id="stops at k"),
        pytest.param("abxa", 0, 1, "", id="k is 0"),
        pytest.param("abcabxa", 3, 2, "b", id="followed twice by b, b once by each"),
        pytest.param("abcabxacab", 3, 2, "", id="not the same one twice in a row"),
    ],
)
def test_drafts_by_hand(history: str, k: int, min_count: int, expected: str) -> None:
    proposer = ExampleProposer(ExampleConfig(min_count=min_count))
    request = DraftRequest("a", [ord(c) for c in history], num_new_tokens=1, k=k)
    (draft,) = proposer.propose(DraftInput([request])).token_ids
    assert "".join(map(chr, draft)) == expected
