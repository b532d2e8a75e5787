"""What is trained on: prompts, replies, the drafted vocabulary, batches and hidden states."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny_models
import torch

from foresay import LLM
from foresay.core.errors import ConfigError
from foresay_train import states as states_module
from foresay_train.packing import Batches, pack
from foresay_train.prompts import read_prompts
from foresay_train.replies import Reply, read_replies, reply_line
from foresay_train.states import LAST_HIDDEN, About, Compute, prepare_states
from foresay_train.vocabulary import choose

REPLIES = [
    Reply([5, 6, 7], [8, 9, 8, 10]),
    Reply([3], [4, 4]),
    Reply([11, 12], [13, 14, 15, 16, 17]),
    Reply([1, 2], [3, 4, 5]),
]


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# -- prompts and replies -------------------------------------------------------------------------


def test_a_prompt_may_be_a_text_turns_or_messages(tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
    more = {"role": "user", "content": "More.", "name": "left alone"}
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        lines({"prompt": "Why?"}, {"turns": ["First", "Second"]})
        + "\n  \n"
        + lines({"messages": [user, answer, more, answer]}),
        encoding="utf-8",
    )

    assert [prompt.messages for prompt in read_prompts(file)] == [
        [{"role": "user", "content": "Why?"}],
        [{"role": "user", "content": "First"}],
        [user, answer, {"role": "user", "content": "More."}],
    ]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "is no JSON"),
        ("[1]", "not [1]"),
        ('{"text": "x"}', "it has 'text'"),
        ('{"prompt": " "}', "'prompt' is ' ': expected a text"),
        ('{"prompt": 3}', "'prompt' is 3: expected a text"),
        ('{"prompt": "\\ud800"}', "half of a pair"),
        ('{"turns": []}', "'turns' is []: expected a list of texts"),
        ('{"messages": ["Hi"]}', "expected a list of messages"),
        ('{"messages": [{"role": "user"}]}', "'content' of message 0 is None"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "none of the role 'user'"),
    ],
    ids=lambda value: value[:24],
)
def test_a_bad_row_of_prompts_is_named(row: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n\n' + row + "\n", encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        read_prompts(file)

    assert "line 3" in str(caught.value)
    assert says in str(caught.value)


def test_replies_are_read_as_they_were_written_and_empty_ones_left_out(tmp_path: Path) -> None:
    file = tmp_path / "replies.jsonl"
    text = reply_line(REPLIES[0]) + "\n" + reply_line(Reply([1], [])) + reply_line(REPLIES[1])
    file.write_text(text, encoding="utf-8")

    assert read_replies(file) == REPLIES[:2]


@pytest.mark.parametrize(
    "row",
    [
        "{",
        "[]",
        '{"p": [1]}',
        '{"p": [], "o": [1]}',
        '{"p": [1], "o": [-1]}',
        '{"p": [true], "o": []}',
    ],
)
def test_a_bad_row_of_replies_is_named(row: str, tmp_path: Path) -> None:
    file = tmp_path / "replies.jsonl"
    file.write_text(reply_line(REPLIES[0]) + row + "\n", encoding="utf-8")

    with pytest.raises(ConfigError, match="line 2"):
        read_replies(file)


# -- vocabulary ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "ids", "coverage"),
    [
        (1, [4], 3 / 14),  # 4 is there three times, 8 twice, ten others once
        (2, [4, 8], 5 / 14),
        (4, [3, 4, 5, 8], 7 / 14),  # 3 and 5 once, and in a prompt as well
        # Eleven in the replies; of the prompts' 1, 2, 6, 7, 11 and 12, once each, the lowest.
        (15, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 14, 15, 16, 17], 1.0),
    ],
    ids=["one", "two", "ties", "more than there are"],
)
def test_the_drafted_tokens_are_the_most_frequent(
    size: int, ids: list[int], coverage: float
) -> None:
    found = choose(REPLIES, size, 20)

    assert (found.ids, found.size) == (ids, size)
    assert found.coverage == pytest.approx(coverage)


@pytest.mark.parametrize("size", [None, 20, 99])
def test_all_tokens_are_drafted_without_a_map(size: int | None) -> None:
    found = choose(REPLIES, size, 20)

    assert (found.ids, found.size, found.coverage) == (None, 20, 1.0)


# -- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_every_text_is_in_one_batch_and_batches_hold_no_more_than_they_may(seed: int) -> None:
    lens = [3, 50, 7, 7, 120, 9, 33, 34, 35, 2, 64]

    batches = pack(lens, 100, seed)

    assert sorted(text for batch in batches for text in batch) == list(range(len(lens)))
    assert all(sum(lens[t] for t in batch) <= 100 or len(batch) == 1 for batch in batches)
    # A text and one an eighth shorter may change places, no more.
    ranges = sorted((min(lens[t] for t in b), max(lens[t] for t in b)) for b in batches)
    assert all(high <= low * 1.125 for (_, high), (low, _) in itertools.pairwise(ranges))


def numbered(texts: list[list[int]], layers: tuple[int, ...]) -> list[torch.Tensor]:
    """States that say which token and layer they are of: 10 * token + layer."""
    return [
        (10 * torch.tensor(text)[:, None] + torch.tensor(layers))[..., None].float()
        for text in texts
    ]


def computing(calls: list[list[list[int]]]) -> Compute:
    def compute(texts: list[list[int]], layers: tuple[int, ...]) -> Sequence[torch.Tensor]:
        calls.append(texts)
        return numbered(texts, layers)

    return compute


def about(layers: Sequence[int] = (1, 2, LAST_HIDDEN), model: str = "m") -> About:
    return About.of(model, REPLIES, layers)


def test_a_batch_has_its_texts_rows_and_their_states(tmp_path: Path) -> None:
    found = prepare_states(tmp_path, REPLIES, about(), lambda: computing([]))

    batch = Batches(REPLIES, found, [[1, 3]], aux_layers=[2, 1])[0]

    assert batch.token_ids.tolist() == [3, 4, 4, 1, 2, 3, 4, 5]
    assert batch.starts == (0, 3, 8)
    assert batch.num_prompt_tokens == (1, 2)
    assert batch.hidden_states[:, 0].tolist() == [29, 39, 39, 9, 19, 29, 39, 49]
    assert batch.aux_hidden_states is not None
    assert batch.aux_hidden_states[1:4, :, 0].tolist() == [[42, 41], [42, 41], [12, 11]]


# -- hidden states -------------------------------------------------------------------------------


def test_states_that_are_there_are_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states_module, "_TOKENS_PER_SHARD", 8)
    first: list[list[list[int]]] = []
    prepare_states(tmp_path, REPLIES, about(), lambda: computing(first))
    assert [len(texts) for texts in first] == [1, 1, 1, 1]  # 7, 3, 7 and 5 tokens
    (tmp_path / "states-00002.safetensors").unlink()

    again: list[list[list[int]]] = []
    told: list[tuple[int, int]] = []
    found = prepare_states(
        tmp_path, REPLIES, about(), lambda: computing(again), lambda *done: told.append(done)
    )

    assert again == [[REPLIES[2].token_ids]]
    assert told == [(7, 22), (10, 22), (17, 22), (22, 22)]
    for text, reply in enumerate(REPLIES):
        wanted = numbered([reply.token_ids], (LAST_HIDDEN, 1))[0].bfloat16()
        assert torch.equal(found.read(text, [LAST_HIDDEN, 1]), wanted)


def test_fewer_layers_than_there_are_need_no_model(tmp_path: Path) -> None:
    prepare_states(tmp_path, REPLIES, about(), lambda: computing([]))

    def no_model() -> Compute:
        raise AssertionError("nothing is to be computed")

    found = prepare_states(tmp_path, REPLIES, about([LAST_HIDDEN]), no_model)

    assert found.read(1, [LAST_HIDDEN]).flatten().tolist() == [29, 39, 39]


@pytest.mark.parametrize(
    "other",
    [
        about(model="another"),
        about((1, 3, LAST_HIDDEN)),
        About.of("m", REPLIES[:3], (1, 2, LAST_HIDDEN)),
    ],
    ids=["model", "layers", "texts"],
)
def test_states_of_something_else_are_refused(other: About, tmp_path: Path) -> None:
    prepare_states(tmp_path, REPLIES, about(), lambda: computing([]))

    with pytest.raises(ConfigError, match="holds hidden states of other"):
        prepare_states(tmp_path, REPLIES, other, lambda: computing([]))


def test_stored_states_are_those_of_a_plain_forward_pass(tmp_path: Path) -> None:
    model = tiny_models.llama()
    layers = (1, 3, LAST_HIDDEN)
    with LLM(model, None) as llm:
        found = prepare_states(
            tmp_path, REPLIES, About.of("m", REPLIES, layers), lambda: llm.hidden_states
        )

    for text, reply in enumerate(REPLIES):
        with torch.no_grad():
            inner = model.model(torch.tensor([reply.token_ids]), output_hidden_states=True)
        # transformers lists the stream entering each layer; the last entry is normed already.
        assert torch.allclose(
            found.read(text, [1])[:, 0].float(), inner.hidden_states[1][0], rtol=2**-7, atol=1e-4
        )
        last = found.read(text, [LAST_HIDDEN])[:, 0].float()
        assert torch.allclose(last, inner.last_hidden_state[0], rtol=2**-7, atol=1e-4)
        normed = model.model.norm(found.read(text, [3])[:, 0].float())
        assert torch.allclose(normed, inner.last_hidden_state[0], rtol=2**-5, atol=2e-2)
