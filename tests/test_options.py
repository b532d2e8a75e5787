"""Options that several commands share, as they are read."""

from __future__ import annotations

import pytest

from foresay.core.commands.options import parse_by_batch
from foresay.core.errors import ConfigError


def test_draft_tokens_by_batch() -> None:
    assert parse_by_batch(None) is None
    assert parse_by_batch("1:5,4:3, 16:0") == {1: 5, 4: 3, 16: 0}


@pytest.mark.parametrize("text", ["", "5", "1:5,", "1:a", "1:2:3", "1:5,1:3"])
def test_draft_tokens_by_batch_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="--draft-tokens-by-batch"):
        parse_by_batch(text)
