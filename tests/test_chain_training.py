"""Where chains begin and how far they reach, by hand."""

from __future__ import annotations

import torch

from foresay.core.training import TrainingBatch
from foresay.core.worker.chain_training import Chains


def chains() -> Chains:
    # Two texts: prompt 2 and reply 4, prompt 1 and reply 2.
    batch = TrainingBatch(torch.arange(9), (0, 6, 9), (2, 1), torch.zeros(9, 1))
    return Chains(batch)


def test_chains_begin_where_a_token_of_the_reply_was_just_committed() -> None:
    found = chains()
    assert found.key_rows.tolist() == [0, 1, 2, 3, 4, 6, 7]
    # Row 1 is the first text's last prompt token: token 2 is committed, token 3 is to be drafted.
    assert found.base_rows.tolist() == [1, 2, 3, 6]
    assert found.base_keys.tolist() == [1, 2, 3, 5]
    assert found.base_positions.tolist() == [1, 2, 3, 0]
    assert found.key_positions.tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_a_chain_reaches_no_further_than_its_text() -> None:
    found = chains()
    assert found.rows_ahead(3).tolist() == [4, 5, 5, 8]
    assert found.reaches(2).tolist() == [True, True, True, True]
    assert found.reaches(3).tolist() == [True, True, False, False]


def test_a_chain_sees_keys_up_to_where_it_begins() -> None:
    found = chains()
    seen = (found.mask == 0).long().tolist()
    assert seen[0] == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    assert seen[1][0] == [1, 0, 0, 0, 0]


def test_padding_and_unpadding_are_each_others_inverse() -> None:
    found = chains()
    rows = torch.arange(4)[:, None]
    padded = found.pad_chains(rows)
    assert padded[..., 0].tolist() == [[0, 1, 2], [3, 3, 3]]
    assert torch.equal(found.unpad_chains(padded), rows)
    assert found.pad_keys(torch.arange(7)).tolist() == [[0, 1, 2, 3, 4], [5, 6, 6, 6, 6]]
