"""The loss in pieces, against the same in one piece by torch's own operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foresay.core.worker.distilling import OutputHead, cross_entropy, teacher_probs


def given(num_rows: int, *, bias: bool) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, 16, generator=random, requires_grad=True)
    weight = torch.randn(40, 16, generator=random, requires_grad=True)
    offset = torch.randn(40, generator=random, requires_grad=bias)
    probs = torch.softmax(2 * torch.randn(7, 40, generator=random), dim=-1)
    rows = torch.randint(7, (num_rows,), generator=random)
    weights = torch.rand(num_rows, generator=random)
    return hidden, weight, offset, probs, rows, weights


@pytest.mark.parametrize("num_rows", [1, 255, 256, 257, 700])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_loss_and_gradients_are_those_of_plain_operations(num_rows: int, bias: bool) -> None:
    hidden, weight, offset, probs, rows, weights = given(num_rows, bias=bias)
    head = OutputHead(weight, offset if bias else None)
    loss, best = cross_entropy(hidden, head, probs, rows, weights)
    (3 * loss).backward()
    found = [hidden.grad, weight.grad, offset.grad]
    hidden.grad = weight.grad = offset.grad = None
    logits = F.linear(hidden, weight, offset if bias else None)
    plain = (F.cross_entropy(logits, probs[rows], reduction="none") * weights).sum()
    (3 * plain).backward()
    torch.testing.assert_close(loss, plain)
    assert torch.equal(best, logits.argmax(dim=-1))
    for got, wanted in zip(found, [hidden.grad, weight.grad, offset.grad], strict=True):
        if wanted is None:
            assert got is None
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_head_that_is_not_trained_gets_no_gradient() -> None:
    hidden, weight, _, probs, rows, weights = given(9, bias=False)
    head = OutputHead(weight.detach())
    loss, _ = cross_entropy(hidden, head, probs, rows, weights)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_the_loss_is_the_same_where_nothing_is_learnt() -> None:
    hidden, weight, _, probs, rows, weights = given(300, bias=False)
    with torch.no_grad():
        alone, _ = cross_entropy(hidden, OutputHead(weight), probs, rows, weights)
    loss, _ = cross_entropy(hidden, OutputHead(weight), probs, rows, weights)
    assert not alone.requires_grad
    torch.testing.assert_close(alone, loss.detach())


def test_under_autocast_products_are_rounded_and_sums_are_not() -> None:
    hidden, weight, _, probs, rows, weights = given(300, bias=False)
    exact, _ = cross_entropy(hidden, OutputHead(weight), probs, rows, weights)
    exact.backward()
    wanted, hidden.grad = hidden.grad, None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = cross_entropy(hidden, OutputHead(weight), probs, rows, weights)
    loss.backward()
    assert loss.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=5e-3, atol=0.0)
    assert wanted is not None
    assert torch.nn.functional.cosine_similarity(
        hidden.grad.flatten(), wanted.flatten(), dim=0
    ) > 0.999  # fmt: skip


def test_the_targets_distribution_is_that_within_the_draft_vocabulary() -> None:
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=random) for n in (5, 40))
    ids = torch.tensor([3, 17, 39])
    whole = torch.softmax(hidden @ weight.T, dim=-1)[:, ids]
    found = teacher_probs(hidden, OutputHead(weight[ids]))
    torch.testing.assert_close(found, whole / whole.sum(dim=-1, keepdim=True))


def test_a_share_goes_to_the_likeliest_token() -> None:
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=random) for n in (5, 40))
    plain = teacher_probs(hidden, OutputHead(weight))
    found = teacher_probs(hidden, OutputHead(weight), argmax_share=0.25)
    hard = F.one_hot(plain.argmax(dim=-1), 40)
    torch.testing.assert_close(found, 0.75 * plain + 0.25 * hard)
