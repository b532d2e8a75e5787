"""KV that is a drafter's own altogether; and a whole model run over a proposer's KV layers."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch

from foresay.core.proposer import DraftRequest, KVLayer
from foresay.core.worker.drafter_kv import PrivateKV
from foresay.core.worker.target import load_target, outline

LAYER = KVLayer(1, 4)


def private_kv(num_tokens: int) -> PrivateKV:
    return PrivateKV([LAYER], num_tokens, torch.float32, torch.device("cpu"))


def request(name: str, length: int, k: int = 1) -> DraftRequest:
    return DraftRequest(name, range(length), 1, k)


def store(kv: PrivateKV, asked: DraftRequest, span: range, value: float) -> torch.Tensor:
    """Store one value at the positions of `span`; return the mean over all up to each."""
    rows = kv.view([asked]).rows([0], [span])
    zeros = torch.zeros(len(span), 1, 4)
    found = rows.attend(0, zeros, zeros, torch.full((len(span), 1, 4), value), scale=1.0)
    return found[:, 0, 0]


def test_the_pool_gives_room_by_blocks_and_takes_it_back() -> None:
    kv = private_kv(40)  # three blocks of 16
    assert kv.num_free_tokens == 48
    assert kv.hold("a", 17)
    assert kv.num_free_tokens == 16
    assert kv.hold("a", 32)  # it had room for that
    assert not kv.hold("b", 17)
    assert kv.num_free_tokens == 16  # refused: nothing changed
    assert kv.hold("b", 16)
    assert not kv.hold("a", 33)
    kv.release("a")
    kv.release("a")
    kv.release("never seen")
    assert kv.num_free_tokens == 32
    assert kv.hold("b", 48)


def test_each_request_attends_to_its_own_positions() -> None:
    kv = private_kv(96)
    for name in "ab":
        kv.hold(name, 20)
    for name, value in (("a", 1.0), ("b", 5.0), ("a", 1.0)):
        asked = request(name, 20)
        means = store(kv, asked, range(18), value)
        torch.testing.assert_close(means, torch.full((18,), value))
    # A block that follows later, of others in between.
    kv.hold("a", 36)
    means = store(kv, request("a", 36), range(18, 36), 3.0)
    expected = [(18 + 3 * n) / (18 + n) for n in range(1, 19)]
    torch.testing.assert_close(means, torch.tensor(expected))


def test_what_another_request_left_cannot_poison() -> None:
    kv = private_kv(16)
    kv.hold("a", 16)
    store(kv, request("a", 16), range(16), float("nan"))
    kv.release("a")
    kv.hold("b", 16)
    found = store(kv, request("b", 4), range(3), 2.0)
    torch.testing.assert_close(found, torch.full((3,), 2.0))


def test_positions_that_are_not_a_requests_are_an_error() -> None:
    kv = private_kv(64)
    kv.hold("a", 8)
    with pytest.raises(ValueError, match=r"expected consecutive positions, one at least, in range"):
        store(kv, request("a", 8, k=1), range(7, 9), 1.0)


def tree_rows(view: Any, *trees: tuple[int, int, list[int], int]) -> Any:
    """Lay out (request, first position, parents, number of new nodes) of each tree."""
    return view.tree_rows(*(list(column) for column in zip(*trees, strict=True)))


def test_a_node_attends_to_the_text_the_nodes_above_it_and_itself() -> None:
    """By powers of two, under equal weights: the sum of a row's values says what it saw."""
    kv = private_kv(64)
    asked = [request("a", 5, k=7), request("b", 4, k=7)]
    for one in asked:
        kv.hold(one.req_id, 16)
    view = kv.view(asked)
    seen = []

    def attend(rows: Any, values: list[float]) -> list[float]:
        zeros = torch.zeros(len(values), 1, 4)
        given = torch.tensor(values).view(-1, 1, 1).expand(-1, 1, 4).contiguous()
        found = rows.attend(0, zeros, zeros, given, scale=1.0)[:, 0, 0].tolist()
        return list(found)

    attend(view.rows([0, 1], [range(4), range(3)]), [1.0] + [0.0] * 6)
    # Of "a" the nodes 0 (root's child), 1 (root's child), 2 (below 0); of "b" one node.
    rows = tree_rows(view, (0, 4, [-1, -1, 0], 3), (1, 3, [-1], 1))
    assert rows.positions.tolist() == [4, 4, 5, 3]
    assert rows.last_rows.tolist() == [2, 3]
    seen += attend(rows, [2.0, 4.0, 8.0, 16.0])
    # Then two more, below 1 and below 2: those before are not computed again.
    rows = tree_rows(view, (0, 4, [-1, -1, 0, 1, 2], 2))
    assert rows.positions.tolist() == [5, 6]
    assert rows.last_rows.tolist() == [1]
    seen += attend(rows, [32.0, 64.0])
    sums = [value * n for value, n in zip(seen, [5, 5, 6, 4, 6, 7], strict=True)]
    assert sums == pytest.approx([1 + 2, 1 + 4, 1 + 2 + 8, 16, 1 + 4 + 32, 1 + 2 + 8 + 64])
    # What nodes store is no feature: only the positions of `rows` were stored.
    assert view.missing([range(4), range(3)]) is None
    assert "did not store position 4 of request 'a'" in (view.missing([range(5), range(3)]) or "")
    # The next features overwrite nodes, which no position ahead of them is read from.
    assert attend(view.rows([0], [range(4, 5)]), [8.0]) == pytest.approx([9 / 5])


def test_last_rows_attend_to_rows_that_are_stored_alone() -> None:
    """By powers of two, under equal weights: of two texts, then of two trees behind them."""
    kv = private_kv(64)
    asked = [request("a", 5, k=7), request("b", 4, k=7)]
    for one in asked:
        kv.hold(one.req_id, 16)
    view = kv.view(asked)

    def last_ones(rows: Any, values: list[float]) -> list[float]:
        given = torch.tensor(values).view(-1, 1, 1).expand(-1, 1, 4).contiguous()
        rows.store(0, torch.zeros_like(given), given)
        last = rows.last()
        assert last.positions.tolist() == rows.positions[rows.last_rows].tolist()
        assert last.last_rows.tolist() == list(range(len(rows.last_rows)))
        given = given[rows.last_rows]
        zeros = torch.zeros_like(given)
        return list(last.attend(0, zeros, zeros, given, scale=1.0)[:, 0, 0].tolist())

    found = last_ones(view.rows([0, 1], [range(4), range(3)]), [1.0, 2, 4, 8, 16, 32, 64])
    assert found == pytest.approx([15 / 4, 112 / 3])
    assert view.missing([range(4), range(3)]) is None
    # Of "a" the nodes 0 (root's child), 1 (root's child), 2 (below 0); of "b" a chain of two.
    trees = tree_rows(view, (0, 4, [-1, -1, 0], 3), (1, 3, [-1, 0], 2))
    found = last_ones(trees, [128.0, 256, 512, 1024, 2048])
    assert found == pytest.approx([(15 + 128 + 512) / 6, (112 + 1024 + 2048) / 5])


def test_rows_that_are_only_stored_are_there_and_those_of_no_layer_are_an_error() -> None:
    kv = private_kv(16)
    kv.hold("a", 8)
    view = kv.view([request("a", 8)])
    rows = view.rows([0], [range(3)])
    zeros = torch.zeros(3, 1, 4)
    with pytest.raises(ValueError, match="layer 1: the proposer declared 1 KV layers"):
        rows.store(1, zeros, zeros)
    assert "did not store position 0" in (view.missing([range(3)]) or "")
    rows.store(0, zeros, zeros)
    assert view.missing([range(3)]) is None


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ((0, 7, [-1] * 4, 4), None),  # the last one at position 10: 8 + 4 - 3 + 1 draft slot
        ((0, 7, [-1] * 5, 1), r"5 nodes from position 7 for request 'a': .* in range\(7, 11\)"),
        ((0, 6, [-1], 1), r"1 nodes from position 6 .* in range\(7, 11\)"),
        ((0, 7, [-1, 1], 1), "node 1 of request 'a' has the parent 1"),
        ((0, 7, [-2], 1), "node 0 of request 'a' has the parent -2"),
        ((0, 7, [-1], 2), "2 rows of 1 nodes"),
        ((0, 7, [-1], 0), "0 rows of 1 nodes"),
        ((1, 7, [-1], 1), r"1 nodes from position 7 for request 'b': .* in range\(7, 7\)"),
    ],
)
def test_what_is_no_tree_or_has_no_room_is_an_error(tree: Any, message: str | None) -> None:
    kv = private_kv(64)
    for name in "ab":
        kv.hold(name, 16)
    view = kv.view([request("a", 8, k=4), request("b", 8, k=0)])
    if message is None:
        assert len(tree_rows(view, tree).positions) == 4
    else:
        with pytest.raises(ValueError, match=message):
            tree_rows(view, tree)


def test_trees_need_one_of_everything() -> None:
    kv = private_kv(64)
    kv.hold("a", 16)
    view = kv.view([request("a", 8, k=4)])
    for arguments in (([], [], [], []), ([0], [7, 7], [[-1]], [1]), ([0], [7], [[-1]], [])):
        with pytest.raises(ValueError, match="give one of each, and one request at least"):
            view.tree_rows(*arguments)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "deepseek_v3", "gpt_oss"])
def test_a_model_over_rows_is_the_model_itself(family: str) -> None:
    """Chunks of two texts, one after the other, against transformers on each whole text."""
    model: Any = tiny_models.BUILDERS[family]()
    target = load_target(model, row_invariant=False)
    kv = PrivateKV(target.kv_layers, 64, target.dtype, target.device)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 150, (length,), generator=generator) for length in (13, 21)]
    asked = [request(name, len(text) + 1) for name, text in zip("ab", texts, strict=True)]
    for one in asked:
        kv.hold(one.req_id, 32)
    found: list[list[torch.Tensor]] = [[], []]
    for spans in ([range(5), range(12)], [range(5, 6), range(12, 21)], [range(6, 13)]):
        rows = kv.view(asked).rows([0, 1][: len(spans)], spans)
        assert rows.last_rows.tolist() == [
            sum(map(len, spans[: i + 1])) - 1 for i in range(len(spans))
        ]
        ids = torch.cat([text[s.start : s.stop] for text, s in zip(texts, spans, strict=False)])
        with torch.inference_mode():
            logits = target.forward_rows(ids, rows.last_rows, rows)
        for i, row in enumerate(logits):
            found[i].append(row)
    ends = [[4, 5, 12], [11, 20]]
    for text, of_text, at in zip(texts, found, ends, strict=True):
        with torch.inference_mode():
            expected = model(text[None]).logits[0, at]
        torch.testing.assert_close(torch.stack(of_text), expected, rtol=1e-3, atol=1e-3)


def test_an_outline_tells_the_kv_layers_before_weights_are_read(tmp_path: Any) -> None:
    tiny_models.qwen3().config.save_pretrained(tmp_path)  # heads of 16, not of 48 / 4
    found = outline(str(tmp_path))
    assert found.kv_layers == (KVLayer(2, 16),) * 3
    assert found.max_model_len == tiny_models.MAX_POSITIONS
    assert load_target(tiny_models.qwen3()).kv_layers == (KVLayer(2, 16, 16),) * 3
