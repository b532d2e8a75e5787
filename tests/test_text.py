"""Incremental text against decoding everything at once: characters, stop strings, streaming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from foresay.core.text import OutputText, TokenDecoder

SLOW_OK = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")  # noqa: S106


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    """One token a byte: every character beyond ASCII is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap(tokenizer)


@pytest.fixture(scope="module")
def sentencepiece() -> PreTrainedTokenizerFast:
    """Llama's kind: a leading space is stripped, unknown characters fall back to bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁sea", "s", "▁a", "▁▁", "."]
    tokenizer = Tokenizer(
        models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return wrap(tokenizer)


@pytest.fixture(scope="module")
def wordpiece() -> PreTrainedTokenizerFast:
    pieces = ["[UNK]", "sail", "##or", "##s", "sea", "the", ".", "##ing"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))  # noqa: S106
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return wrap(tokenizer)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(smollm2_dir)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def pieces_of(
    tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int], prompt: Sequence[int] = ()
) -> list[str]:
    """Feed tokens one by one; return what was released with each, and at the end."""
    output = OutputText(TokenDecoder(tokenizer), prompt)
    pieces = []
    for token_id in token_ids:
        assert output.append(token_id, may_stop=True) is None
        pieces.append(output.take())
    output.finish()
    pieces.append(output.take())
    assert "".join(pieces) == output.text
    return pieces


def decoded(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text


def test_a_character_is_released_with_its_last_byte(byte_level: PreTrainedTokenizerFast) -> None:
    pieces = pieces_of(byte_level, encode(byte_level, "a😀好!"))
    assert pieces == ["a", "", "", "", "😀", "", "", "好", "!", ""]


def test_an_unfinished_character_is_flushed_as_the_tokenizer_decodes_it(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    ids = encode(byte_level, "ok 😀")[:-1]
    assert pieces_of(byte_level, ids) == ["o", "k", " ", "", "", "", "\ufffd"]
    assert decoded(byte_level, ids) == "ok \ufffd"


def test_a_run_of_invalid_bytes_is_released_while_it_goes_on(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    (invalid,) = byte_level.convert_tokens_to_ids(["ÿ"])  # byte 0xFF in the byte-level alphabet
    pieces = pieces_of(byte_level, [invalid] * 100)
    assert pieces[:5] == ["", "", "", "\ufffd", "\ufffd"]  # at most three are held back
    assert "".join(pieces) == "\ufffd" * 100


def test_special_tokens_have_no_text_even_within_a_character(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    end = byte_level.eos_token_id
    first, second = encode(byte_level, "é")
    assert pieces_of(byte_level, [end, first, end, end, end, end, second, end]) == (
        ["", "", "", "", "", "", "é", "", ""]
    )


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=SLOW_OK)
def test_byte_tokens_in_any_order_give_the_text_of_decoding_at_once(
    byte_level: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    some_bytes = [0x41, 0x20, 0xC3, 0xA9, 0xE5, 0xA5, 0xBD, 0xF0, 0x9F, 0x98, 0x80, 0xFF]
    pool = [
        encode(byte_level, "é")[0],
        *(byte_level.convert_tokens_to_ids([byte_name(b)])[0] for b in some_bytes),
        byte_level.eos_token_id,
    ]
    ids = data.draw(st.lists(st.sampled_from(pool), max_size=60))
    assert "".join(pieces_of(byte_level, ids)) == decoded(byte_level, ids)


def byte_name(byte: int) -> str:
    """Name a byte as the byte-level alphabet does (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


@given(text=st.text(max_size=40), split=st.integers(0, 40))
@settings(max_examples=100, deadline=None, suppress_health_check=SLOW_OK)
def test_a_split_text_is_continued_exactly(
    byte_level: PreTrainedTokenizerFast, text: str, split: int
) -> None:
    prompt, rest = text[:split], text[split:]
    pieces = pieces_of(byte_level, encode(byte_level, rest), encode(byte_level, prompt))
    assert "".join(pieces) == rest


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=SLOW_OK)
def test_random_tokens_of_the_real_tokenizer_give_the_text_of_decoding_at_once(
    smollm2: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, len(smollm2) - 1), max_size=60))
    prompt = data.draw(st.sampled_from(["", "Hello, ", "你好", "<|im_start|>user\n"]))
    pieces = pieces_of(smollm2, ids, encode(smollm2, prompt))
    assert "".join(pieces) == decoded(smollm2, ids)


@pytest.mark.parametrize(
    "text",
    [
        "Ship ahoy! 😀👩‍👩‍👧 are here",
        "北京的天气很好今天去哪儿。",
        "naïve façade — “quoted”",
        "\n\n  a\t b ",
    ],
    ids=["emoji", "chinese", "accents", "spaces"],
)
def test_real_text_survives_the_real_tokenizer(smollm2: PreTrainedTokenizerFast, text: str) -> None:
    ids = encode(smollm2, text)
    pieces = pieces_of(smollm2, ids, encode(smollm2, "Say it: "))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_prompt_that_ends_within_a_character_is_completed(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    ids = encode(byte_level, "x😀y")
    assert "".join(pieces_of(byte_level, ids[3:], prompt=ids[:3])) == "😀y"


def test_a_prompt_that_ends_with_a_replacement_character_does_not_leak_it(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    prompt = encode(byte_level, "what is \ufffd")
    assert "".join(pieces_of(byte_level, encode(byte_level, " this"), prompt)) == " this"


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        ([], ["▁the", "▁sea", "s"], "the seas"),
        (["▁a"], ["▁the", "▁sea"], " the sea"),
        (["▁a", "<end>"], ["▁the", "▁sea"], " the sea"),
        (["<end>"], ["▁the", "▁sea"], "the sea"),
        (["▁a"], ["s", "▁", "▁", "s", "▁▁", "▁the"], "s  s   the"),
        ([], ["▁", "s"], "s"),
        (["▁a"], ["<0xE5>", "<0xA5>", "<0xBD>", "."], "好."),
        (["▁a"], ["<0xE5>", "<0xA5>", "<0xBD>", "<0xC3>", "<0xA9>"] * 6, "好é" * 6),
        (["<0xE5>", "<0xA5>", "<0xBD>"] * 5, ["<0xC3>", "<0xA9>", "s"], "és"),
    ],
    ids=[
        "start",
        "space",
        "end-token",
        "only-end-token",
        "spaces",
        "lone-space",
        "bytes",
        "many-bytes",
        "after-many-bytes",
    ],
)
def test_sentencepiece_text_is_what_it_adds_to_the_prompt(
    sentencepiece: PreTrainedTokenizerFast, prompt: list[str], output: list[str], text: str
) -> None:
    prompt_ids = sentencepiece.convert_tokens_to_ids(prompt)
    ids = sentencepiece.convert_tokens_to_ids(output)
    assert "".join(pieces_of(sentencepiece, ids, prompt_ids)) == text


def test_a_long_sentencepiece_text_keeps_its_spaces(
    sentencepiece: PreTrainedTokenizerFast,
) -> None:
    ids = sentencepiece.convert_tokens_to_ids(["▁the", "▁sea", "s", "▁", "▁▁", "."] * 40)
    assert "".join(pieces_of(sentencepiece, ids)) == decoded(sentencepiece, ids)


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        (["the"], ["sail", "##or", "##s", "sea", "."], " sailors sea."),
        (["sail"], ["##ing", "the", "sea"] * 10, "ing the sea" + "ing the sea" * 9),
        ([], ["sail", "##ing", "the"], "sailing the"),
    ],
    ids=["words", "long", "start"],
)
def test_wordpiece_joins_its_pieces(
    wordpiece: PreTrainedTokenizerFast, prompt: list[str], output: list[str], text: str
) -> None:
    ids = wordpiece.convert_tokens_to_ids(output)
    prompt_ids = wordpiece.convert_tokens_to_ids(prompt)
    assert "".join(pieces_of(wordpiece, ids, prompt_ids)) == text


def test_a_token_costs_the_same_at_any_length(byte_level: PreTrainedTokenizerFast) -> None:
    lengths: list[int] = []

    class Counting(TokenDecoder):
        def decode(self, token_ids: Sequence[int]) -> str:
            lengths.append(len(token_ids))
            return super().decode(token_ids)

    for text in ("a" * 2000, "好" * 700):
        output = OutputText(Counting(byte_level), encode(byte_level, "prompt " * 500))
        for token_id in encode(byte_level, text):
            output.append(token_id, may_stop=True)
    (invalid,) = byte_level.convert_tokens_to_ids(["ÿ"])
    for _ in range(2000):
        output.append(invalid, may_stop=True)
    assert max(lengths) <= 24
    assert len(lengths) <= 2.5 * (2000 + 2100 + 2000)


# Stop strings


def run_until_stop(
    tokenizer: PreTrainedTokenizerFast,
    token_ids: Sequence[int],
    stop: Sequence[str],
    may_stop: Callable[[int], bool] = lambda index: True,
) -> tuple[str, int, str | None, str]:
    """Feed tokens until a stop; return text, tokens used, the stop string, text shown before."""
    output = OutputText(TokenDecoder(tokenizer), (), stop)
    shown = ""
    for index, token_id in enumerate(token_ids):
        reason = output.append(token_id, may_stop=may_stop(index))
        before = shown
        shown += output.take()
        if reason is not None:
            output.finish()
            assert output.take() == ""
            assert output.text == shown
            return output.text, index + 1, reason, before
    output.finish()
    assert shown + output.take() == output.text
    return output.text, len(token_ids), None, shown


@pytest.mark.parametrize(
    ("text", "stop", "expected", "num_tokens", "reason"),
    [
        ("one two three", ["two"], "one ", 7, "two"),
        ("one two three", ["four"], "one two three", 13, None),
        ("aaab", ["aab"], "a", 4, "aab"),
        ("xabcx", ["b", "abc"], "xa", 3, "b"),
        ("xabcx", ["abc", "bc"], "x", 4, "abc"),
        ("xabcx", ["bc", "abc"], "x", 4, "abc"),
        ("a😀b😀😀", ["😀😀"], "a😀b", 14, "😀😀"),
        ("好好学习", ["学"], "好好", 9, "学"),
        ("ab", ["abc"], "ab", 2, None),
        ("\n\nUser:", ["\nUser:", "\n\n"], "", 2, "\n\n"),
    ],
    ids=[
        "found",
        "absent",
        "overlapping-start",
        "first-complete",
        "longer-of-two",
        "longer-of-two-reversed",
        "emoji",
        "chinese",
        "unfinished",
        "newlines",
    ],
)
def test_text_is_cut_before_the_stop_string_that_is_complete_first(
    byte_level: PreTrainedTokenizerFast,
    text: str,
    stop: list[str],
    expected: str,
    num_tokens: int,
    reason: str | None,
) -> None:
    got = run_until_stop(byte_level, encode(byte_level, text), stop)
    assert got[:3] == (expected, num_tokens, reason)


def test_what_could_begin_a_stop_string_is_held_back_and_released_when_it_does_not(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    output = OutputText(TokenDecoder(byte_level), (), ["END.", "ND!"])
    pieces = []
    for token_id in encode(byte_level, "xENEND?E"):
        output.append(token_id, may_stop=True)
        pieces.append(output.take())
    output.finish()
    assert [*pieces, output.take()] == ["x", "", "", "EN", "", "", "END?", "", "E"]


def test_a_stop_string_counts_only_where_stops_count(byte_level: PreTrainedTokenizerFast) -> None:
    ids = encode(byte_level, "b ab abx b")
    # The first two tokens may not stop: the first "b" is text, as in `min_tokens`.
    text, used, reason, _ = run_until_stop(byte_level, ids, ["b"], lambda index: index >= 2)
    assert (text, used, reason) == ("b a", 4, "b")
    # A stop string that was passed over is not found again within held-back text.
    text, used, reason, _ = run_until_stop(
        byte_level, ids, ["b", "b abz"], lambda index: index >= 6
    )
    assert (text, used, reason) == ("b ab a", 7, "b")


def test_a_stop_string_that_did_not_count_is_released_at_once(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    output = OutputText(TokenDecoder(byte_level), (), ["b", "xyz"])
    for token_id in encode(byte_level, "ab"):
        assert output.append(token_id, may_stop=False) is None
    assert output.take() == "ab"


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["the", "h"], "a t", "h"),
        (["e", "the"], "a ", "the"),
        (["a", "a the s"], "", "a the s"),
        (["sea", "e s"], "a th", "e s"),
    ],
    ids=["first-complete", "longer-of-two", "earlier-start", "across-tokens"],
)
def test_within_one_token_the_stop_string_that_is_complete_first_wins(
    sentencepiece: PreTrainedTokenizerFast, stop: list[str], text: str, reason: str
) -> None:
    ids = sentencepiece.convert_tokens_to_ids(["▁a", "▁the", "▁sea"])
    got = run_until_stop(sentencepiece, ids, stop, lambda index: index >= 1)
    assert (got[0], got[2]) == (text, reason)


def test_a_stop_string_that_began_before_stops_count_is_found(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    ids = encode(byte_level, "stop here")
    text, used, reason, _ = run_until_stop(byte_level, ids, ["op"], lambda index: index >= 3)
    assert (text, used, reason) == ("st", 4, "op")


def test_a_stop_string_across_real_tokens_is_cut_out(smollm2: PreTrainedTokenizerFast) -> None:
    ids = encode(smollm2, "The answer is 42. Next question: why?")
    text, used, reason, _ = run_until_stop(smollm2, ids, ["2. Nex", "why"])
    assert (text, reason) == ("The answer is 4", "2. Nex")
    assert decoded(smollm2, ids[:used]).startswith("The answer is 42. Nex")
    assert "2. Nex" not in decoded(smollm2, ids[: used - 1])


@given(
    text=st.text(alphabet="ab😀好 ", max_size=30),
    stop=st.lists(st.text(alphabet="ab😀好 ", min_size=1, max_size=4), min_size=1, max_size=3),
    first=st.integers(0, 20),
)
@settings(max_examples=300, deadline=None, suppress_health_check=SLOW_OK)
def test_stops_agree_with_a_search_of_the_whole_text_after_every_token(
    byte_level: PreTrainedTokenizerFast, text: str, stop: list[str], first: int
) -> None:
    ids = encode(byte_level, text)
    expected: tuple[str, int, str | None] = (text, len(ids), None)
    for used in range(first + 1, len(ids) + 1):
        before, so_far = decoded(byte_level, ids[: used - 1]), decoded(byte_level, ids[:used])
        if so_far.endswith("\ufffd"):
            continue
        before = before.rstrip("\ufffd")
        ends = [
            (end, end - len(string), string)
            for string in stop
            for end in range(len(before) + 1, len(so_far) + 1)
            if so_far[:end].endswith(string)
        ]
        if ends:
            _, start, string = min(ends)
            expected = (so_far[:start], used, string)
            break
    got = run_until_stop(byte_level, ids, stop, lambda index: index >= first)
    assert got[:3] == expected


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=SLOW_OK)
def test_streamed_text_never_contains_what_is_cut(
    smollm2: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    text = data.draw(st.text(alphabet="the sea 😀.\n", min_size=1, max_size=30))
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 5))]
    got, _, reason, shown_before = run_until_stop(smollm2, encode(smollm2, text), [stop])
    assert reason == stop
    assert got == text[: text.index(stop)]
    assert got.startswith(shown_before)
