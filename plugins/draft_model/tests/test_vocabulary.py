"""What two tokenizers have in common, on tokens whose texts are written out here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tiny_tokenizers import byte_level, with_byte_fallback

from foresay_draft_model.vocabulary import Intersection, Vocabulary, added_bos


def vocabulary(tokenizer: Any, size: int | None = None) -> Vocabulary:
    found = Vocabulary.of(tokenizer, len(tokenizer) if size is None else size)
    assert found is not None
    return found


def texts(tokenizer: Any, *names: str) -> list[bytes | None]:
    found = vocabulary(tokenizer)
    return [found.texts[tokenizer.convert_tokens_to_ids(name)] for name in names]


def test_tokens_are_the_bytes_that_they_stand_for() -> None:
    names = ("Ġthe", "Ċ", "â", "Ã", "a", "<s>")
    found = texts(byte_level([" the"]), *names)
    assert found == [b" the", b"\n", b"\xe2", b"\xc3", b"a", b"<s>"]
    found = texts(with_byte_fallback([" the"]), "▁the", "<0x0A>", "<0xE2>", "a", "</s>")
    assert found == [b" the", b"\n", b"\xe2", b"a", b"</s>"]


def test_other_tokens_are_taken_as_they_are_written() -> None:
    names = {"<pad>": 0, "hello": 1, "##ing": 2, "日": 3}
    tokenizer = SimpleNamespace(get_vocab=lambda: names)
    assert vocabulary(tokenizer, 5).texts == [b"<pad>", b"hello", b"##ing", "日".encode(), None]
    assert Vocabulary.of(None, 5) is None


@pytest.mark.parametrize(
    ("own", "target", "difference"),
    [
        pytest.param(byte_level(["ab"]), byte_level(["ab"]), None, id="equal"),
        pytest.param(
            byte_level(["ab"]), byte_level(["ab"], last="<|x|>"), None, id="one for control"
        ),
        pytest.param(
            byte_level(["ab"]),
            byte_level(["ab", "cd"]),
            "token 259 is missing there, and 'cd' in the target",
            id="more words",
        ),
        pytest.param(byte_level(["ab", "cd"]), byte_level(["ab"]), None, id="longer"),
        pytest.param(
            byte_level(["ab", " c"]),
            byte_level(["ab", " d"]),
            "token 259 is 'Ġc' there, and 'Ġd' in the target",
            id="one token",
        ),
        pytest.param(
            byte_level(specials=["<s>", "<end>"]),
            byte_level(specials=["<s>", "<eos>"]),
            "token 1 is '<end>' there, and '<eos>' in the target",
            id="a special token",
        ),
    ],
)
def test_the_first_difference_is_named(own: Any, target: Any, difference: str | None) -> None:
    assert vocabulary(own).first_difference(vocabulary(target)) == difference


def test_ids_without_a_token_are_no_difference() -> None:
    padded = vocabulary(byte_level(["ab"]), 300)
    assert padded.texts[259:] == [None] * 41
    assert padded.first_difference(vocabulary(byte_level(["ab"]), 280)) is None


def test_tokens_of_one_text_are_mapped_to_each_other() -> None:
    own, target = byte_level(["the", " a"], shuffled=3), byte_level(["then", " b"])
    shared = Intersection(vocabulary(own), vocabulary(target))
    mapped = dict(zip(shared.draft_ids, shared.target_ids, strict=True))
    expected = {
        own.convert_tokens_to_ids(name): target.convert_tokens_to_ids(name)
        for name in set(own.get_vocab()) & set(target.get_vocab())
    }
    assert mapped == expected
    assert {"th", "the", "Ġ", "z", "<s>"} <= set(own.convert_ids_to_tokens(list(mapped)))
    assert shared.draft_ids == sorted(shared.draft_ids)
    # 256 bytes, 2 special tokens, "th" and "the"; of its own there is "Ġa", there "then" and "Ġb".
    assert shared.coverage == (
        "260 of its 261 tokens (100%) are tokens of the target, 99% of the target's 262"
    )


def test_kinds_of_tokenizers_are_mapped_by_the_bytes() -> None:
    own, target = with_byte_fallback([" the"]), byte_level([" the", "\n\n"])
    shared = Intersection(vocabulary(own), vocabulary(target))
    mapped = dict(zip(shared.draft_ids, shared.target_ids, strict=True))
    for name, target_name in (("▁the", "Ġthe"), ("▁", "Ġ"), ("<0xE2>", "â"), ("<0x0A>", "Ċ")):
        assert mapped[own.convert_tokens_to_ids(name)] == target.convert_tokens_to_ids(target_name)
    # "a" is a token, and a byte: both stand for the target's, which stands for the token.
    a = target.convert_tokens_to_ids("a")
    assert [own.convert_ids_to_tokens(d) for d, t in mapped.items() if t == a] == ["<0x61>", "a"]
    assert shared.in_draft_tokens(a) == (own.convert_tokens_to_ids("a"),)
    # Two line ends are no token of its own: two bytes.
    line_end = own.convert_tokens_to_ids("<0x0A>")
    assert shared.in_draft_tokens(target.convert_tokens_to_ids("ĊĊ")) == (line_end, line_end)


@pytest.mark.parametrize(
    ("token", "spelt"),
    [
        pytest.param("Ġthe", ["Ġthe"], id="one of its own"),
        pytest.param("Ġthem", ["Ġthe", "m"], id="the longest token first"),
        pytest.param("then", ["t", "hen"], id="what begins within"),
        pytest.param("zz", ["z", "z"], id="single bytes"),
        pytest.param("</s>", ["</s>"], id="a special token"),
        pytest.param("<|x|>", ["<", "|", "x", "|", ">"], id="a special token it does not have"),
    ],
)
def test_a_token_it_does_not_have_is_spelt_out(token: str, spelt: list[str]) -> None:
    own = byte_level([" the", "hen"])
    target = byte_level([" them", "then", "zz"], specials=("<s>", "</s>", "<|x|>"))
    shared = Intersection(vocabulary(own), vocabulary(target))
    ids = shared.in_draft_tokens(target.convert_tokens_to_ids(token))
    assert own.convert_ids_to_tokens(list(ids)) == spelt


def test_the_ends_of_a_text_correspond_whatever_they_are_called() -> None:
    own, target = byte_level(specials=("<a>", "<b>")), byte_level(specials=("<c>", "<d>"))
    shared = Intersection(vocabulary(own), vocabulary(target))
    assert dict(zip(shared.draft_ids, shared.target_ids, strict=True))[1] == 1
    assert (shared.in_draft_tokens(0), shared.in_draft_tokens(1)) == ((0,), (1,))


def test_a_plain_token_is_no_special_one_of_that_name() -> None:
    target = byte_level(["<s>"], specials=("<bos>", "</s>"))
    shared = Intersection(vocabulary(byte_level()), vocabulary(target))
    plain = target.convert_tokens_to_ids("<s>")
    assert plain not in shared.target_ids
    assert len(shared.in_draft_tokens(plain)) == 3


def test_a_byte_that_it_has_no_token_for_is_left_out() -> None:
    own = SimpleNamespace(get_vocab=lambda: {"a": 0, "日": 1})
    target = byte_level(["ab"])
    shared = Intersection(vocabulary(own, 2), vocabulary(target))
    assert shared.in_draft_tokens(target.convert_tokens_to_ids("ab")) == (0,)
    assert shared.in_draft_tokens(target.convert_tokens_to_ids("b")) == ()


@pytest.mark.parametrize(("ids", "found"), [([1, 5], 1), ([5], None), ([], None)], ids=str)
def test_what_a_tokenizer_puts_before_a_text_is_found(ids: list[int], found: int | None) -> None:
    class Fake:
        bos_token_id = 1

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": ids}

    assert added_bos(Fake()) == found
    Fake.bos_token_id = None  # type: ignore[assignment]
    assert added_bos(Fake()) is None
