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
