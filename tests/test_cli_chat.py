"""`foresay chat`: history, commands, input of several lines, a full context, Ctrl-C, a terminal."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tiny_chat import save_chat_model

from foresay import LLM, SamplingParams
from foresay.cli import main
from foresay.core.commands import chat as chat_module
from foresay.core.commands import options
from foresay.core.commands.history import Conversation, Messages
from foresay.core.commands.reading import Message, Reader
from foresay.core.errors import PromptTooLongError

MAX_TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Iterator[LLM]:
    with LLM(model=str(folder), proposer=None) as llm:
        yield llm


Chat = Callable[..., tuple[int, str, list[str]]]  # exit code, stdout, lines of stderr


@pytest.fixture
def chat(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    def call(typed: str, *arguments: str) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        common = ["--model", str(folder), "--max-tokens", str(MAX_TOKENS), "--proposer", "none"]
        code = main(["chat", *common, *arguments])
        out, err = capfd.readouterr()
        return code, out, [line for line in err.splitlines() if not line.startswith("foresay: ")]

    return call


def answers(llm: LLM, *questions: str, system: str | None = None) -> list[str]:
    """What the model answers, one question after the other."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    messages = [] if system is None else [{"role": "system", "content": system}]
    texts = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        texts.append(llm.chat(messages, params)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": texts[-1]})
    return texts


def printed(*texts: str) -> str:
    return "".join(text if text.endswith("\n") else text + "\n" for text in texts)


# -- the conversation ----------------------------------------------------------------------------


def test_each_answer_continues_the_conversation_and_is_alone_on_stdout(
    chat: Chat, reference: LLM
) -> None:
    code, out, err = chat("Hello\nAnd then?\n\n/quit\nnever read\n")
    assert code == 0
    assert out == printed(*answers(reference, "Hello", "And then?"))
    assert answers(reference, "Hello", "And then?")[1] != answers(reference, "And then?")[0]
    figures = [line for line in err if line.startswith("[")]
    assert len(figures) == 2
    assert figures[0].startswith("[20 tokens, ")
    assert "first token after 0." in figures[0]
    assert ">" not in "".join(err)  # no prompt in a pipe


def test_the_end_of_the_input_ends_the_session_after_a_line_without_an_end(
    chat: Chat, reference: LLM
) -> None:
    assert chat("Hello", "--no-stats")[:2] == (0, printed(*answers(reference, "Hello")))
    assert chat("") == (0, "", [])


def test_reset_forgets_the_turns_but_not_the_system_prompt(chat: Chat, reference: LLM) -> None:
    _, out, err = chat("Hello\n/reset\nHello\n", "--system", "Be brief.", "--no-stats")
    (once,) = answers(reference, "Hello", system="Be brief.")
    assert out == printed(once, once)
    assert once != answers(reference, "Hello")[0]
    assert "(the conversation is forgotten)" in err


def test_the_system_prompt_can_be_shown_and_replaced(chat: Chat, reference: LLM) -> None:
    _, out, err = chat("/system\n/system Be  loud.\n/system\nHello\n", "--no-stats")
    assert out == printed(*answers(reference, "Hello", system="Be  loud."))
    assert err[:3] == [
        "system prompt: the chat template's own, if it has one",
        "the system prompt was replaced",
        "system prompt: Be  loud.",
    ]


def test_sampling_options_reach_the_answers(chat: Chat, reference: LLM) -> None:
    _, out, _ = chat("Hello\n", "--temperature", "1.2", "--seed", "3", "--top-k", "9")
    params = SamplingParams(temperature=1.2, seed=3, top_k=9, max_tokens=MAX_TOKENS)
    expected = reference.chat([{"role": "user", "content": "Hello"}], params)
    assert out == printed(expected[0].outputs[0].text)
    assert out != printed(*answers(reference, "Hello"))


def test_a_later_turn_takes_what_it_shares_with_earlier_ones_from_the_cache(chat: Chat) -> None:
    def cached(*arguments: str) -> list[tuple[int, int]]:
        _, _, err = chat("Hello\nMore\nMore\n", *arguments)
        found = [re.search(r"(\d+) of (\d+) prompt tokens cached", line) for line in err]
        return [(int(match[1]), int(match[2])) for match in found if match]

    # "<user>Hello<assistant>" has 22 tokens, an answer 20, "<user>More<assistant>" 21. Where the
    # answer's bytes are no text, it is written as other tokens, so they do not count here.
    (none, first), (own, second), (all_before, third) = cached()
    assert (none, first) == (0, 22)
    assert own >= 16
    assert all_before >= 48
    assert second >= first + 21
    assert third >= second + 21
    assert [num_cached for num_cached, _ in cached("--no-prefix-caching")] == [0, 0, 0]


# -- commands ------------------------------------------------------------------------------------


def test_a_new_proposer_goes_on_with_the_conversation(chat: Chat, reference: LLM) -> None:
    _, out, err = chat("Hello\n/proposer ngram\nAnd then?\n/proposer\n/proposer ngram\n/stats\n")
    assert out == printed(*answers(reference, "Hello", "And then?"))
    assert "proposer: ngram" in err
    assert "(the proposer is ngram already)" in err
    assert any(line.startswith("proposer ngram; conversation of 2 turns, ") for line in err)


def test_the_settings_stay_with_the_proposer_they_were_given_for(
    chat: Chat, reference: LLM
) -> None:
    code, out, err = chat(
        "/proposer adversaries:Random\nHello\n/proposer ngram\nHello\n",
        *("--proposer", "ngram", "--set", "prompt_lookup_min=2", "-k", "2", "--no-stats"),
    )
    assert (code, err) == (0, ["(cut off after 20 tokens)"] * 2)
    assert out == printed(*answers(reference, "Hello", "Hello"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ngrm", "error: no proposer 'ngrm'"),
        ("ngram,none", "error: proposer 'ngram,none': 'none' cannot be part of a chain"),
    ],
)
def test_a_bad_proposer_leaves_the_old_one(
    chat: Chat, reference: LLM, name: str, message: str
) -> None:
    code, out, err = chat(f"Hello\n/proposer {name}\nAnd then?\n/proposer\n", "--no-stats")
    assert code == 0
    assert out == printed(*answers(reference, "Hello", "And then?"))
    assert any(line.startswith(message) for line in err)
    assert err[-1] == "proposer: none"


@pytest.mark.parametrize("failure", [RuntimeError("CUDA out of memory"), KeyboardInterrupt()])
def test_an_engine_that_does_not_come_up_leaves_the_old_one(
    chat: Chat, reference: LLM, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    open_llm = options.open_llm

    def fail(model: str, *, proposer: str, **others: object) -> LLM:
        if proposer == "ngram":
            raise failure
        return open_llm(model, proposer=proposer, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(options, "open_llm", fail)
    code, out, err = chat("Hello\n/proposer ngram\nAnd then?\n", "--no-stats")
    assert code == 0
    assert out == printed(*answers(reference, "Hello", "And then?"))
    assert any("RuntimeError: CUDA out of memory" in line or line == "(stopped)" for line in err)


def test_stats_are_those_of_all_answers(chat: Chat) -> None:
    _, _, err = chat("/stats\nabcabc\nabcabc\n/stats\n", "--proposer", "ngram", "--no-stats")
    first = "proposer ngram; conversation of 0 turns, 0 of 4096 tokens"
    assert err[:2] == [first, "nothing was answered yet"]
    block = err[err.index("(cut off after 20 tokens)") + 2 :]
    assert block[0].startswith("proposer ngram; conversation of 2 turns, ")
    assert block[1].startswith("40 tokens in ")
    assert block[1].endswith(" s on average")
    assert re.fullmatch(
        r"prompts: \d+ tokens, (16|32|48) of them from the prefix cache", block[-1]
    ), block[-1]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("/rest", "error: no command '/rest'; did you mean '/reset'? (commands: /reset, "),
        ("/srv/notes", "a message that starts with / is written with //)"),
        ("/reset all", "error: /reset takes nothing after it, not 'all'"),
        ("/stats x", "error: /stats takes nothing after it, not 'x'"),
        ("a\udcffb", "error: the message is no valid text: character 1 is '\\udcff'"),
        ("y" * 5000, "error: the message is too long, even alone: "),
        ("/system " + "y" * 5000, "error: the system prompt is too long: "),
    ],
    ids=lambda value: value[:12].encode("ascii", "replace").decode(),
)
def test_a_mistake_is_told_and_changes_nothing(
    chat: Chat, reference: LLM, typed: str, message: str
) -> None:
    code, out, err = chat(f"Hello\n{typed}\nAnd then?\n", "--no-stats")
    assert code == 0
    assert out == printed(*answers(reference, "Hello", "And then?"))
    assert any(message in line for line in err)


def test_help_names_every_command(chat: Chat) -> None:
    _, out, err = chat("/help\n")
    assert out == ""
    for name in ("/reset", "/system", "/proposer", "/stats", "/help", "/quit", "//", "Ctrl-C"):
        assert any(line.startswith(name) for line in err), name


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("//etc is a folder", "/etc is a folder"),
        ("one\\\ntwo\\\nthree", "one\ntwo\nthree"),
        ('"""\n/reset\n\n  indented\\\n"""', "/reset\n\n  indented\\"),
        ("a path: C:\\\\", "a path: C:\\\\"),
    ],
    ids=["slash", "backslashes", "quotes", "two backslashes"],
)
def test_a_message_may_have_several_lines_or_begin_with_a_slash(
    chat: Chat, reference: LLM, typed: str, message: str
) -> None:
    assert chat(typed + "\n")[1] == printed(*answers(reference, message))


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("a\nb", [("a", False), ("b", False)]),
        ('"""\na\n"""  \nb\n', [("a", True), ("b", False)]),
        ('"""\na\n\n', [("a\n", True)]),  # the input ends
        ("a\\\n", [("a", False)]),
        ("a\\\n\nb", [("a\n", False), ("b", False)]),
        ('  """\n', [('  """', False)]),  # a docstring is no quotation
        ('"""\nx = 1\n    """\n"""\n', [('x = 1\n    """', True)]),
        ("\r\n", [("\r", False)]),
    ],
    ids=repr,
)
def test_lines_become_messages(
    monkeypatch: pytest.MonkeyPatch, typed: str, messages: list[tuple[str, bool]]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    reader = Reader()
    assert list(iter(reader.read, None)) == [Message(*each) for each in messages]


# -- a context that gets full --------------------------------------------------------------------


def count(messages: Messages) -> list[int]:
    """A token a character, and one more a message; 100 tokens at most."""
    token_ids = [0] * sum(len(message["content"]) + 1 for message in messages)
    if len(token_ids) >= 100:
        raise PromptTooLongError("too long")
    return token_ids


@pytest.mark.parametrize(
    ("lengths", "system", "max_tokens", "num_dropped", "num_tokens"),
    [
        # A turn of n costs n + 2 tokens, the system prompt n + 1, the question of 9 costs 10.
        ([], None, 50, 0, 10),
        ([28, 28], None, 30, 0, 70),  # exactly the 30 that the answer may take, of which 25 matter
        ([28, 33], None, 30, 0, 75),
        ([28, 34], None, 30, 1, 46),  # 76: a quarter would not be left
        ([28, 34], None, 20, 0, 76),  # a short answer fits
        ([28, 49], None, 20, 1, 61),  # 91: 20 are not left
        ([8, 8, 8, 40], None, 5, 0, 82),
        ([8, 8, 8, 54], None, 5, 3, 66),  # 96: 5 are not left, so a quarter is made free
        ([28, 29], "x" * 39, 20, 2, 50),  # 111 does not fit at all, 81 leaves no quarter
        ([98], None, 20, 1, 10),
    ],
    ids=str,
)
def test_the_oldest_turns_are_dropped_until_a_quarter_is_free(
    lengths: Sequence[int],
    system: str | None,
    max_tokens: int,
    num_dropped: int,
    num_tokens: int,
) -> None:
    turns = [("q" * (length // 2), "a" * (length - length // 2)) for length in lengths]
    conversation = Conversation(system, list(turns))
    token_ids, dropped = conversation.fit("q" * 9, count, max_model_len=100, max_tokens=max_tokens)
    assert (dropped, len(token_ids)) == (num_dropped, num_tokens)
    assert conversation.turns == turns[num_dropped:]
    assert conversation.system == system


def test_a_question_that_does_not_fit_alone_drops_nothing() -> None:
    conversation = Conversation(None, [("a", "b")])
    with pytest.raises(PromptTooLongError):
        conversation.fit("q" * 99, count, max_model_len=100, max_tokens=5)
    assert conversation.turns == [("a", "b")]


def test_a_question_that_leaves_little_room_is_answered_without_the_turns() -> None:
    conversation = Conversation(None, [("a", "b")])
    token_ids, dropped = conversation.fit("q" * 97, count, max_model_len=100, max_tokens=5)
    assert (len(token_ids), dropped, conversation.turns) == (98, 1, [])


def test_a_long_chat_goes_on_without_its_oldest_turns(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_chat_model(tmp_path, max_position_embeddings=160)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello there\n" * 8))
    code = main(["chat", "--model", str(model), "--max-tokens", "20", "--proposer", "ngram",
                 "--system", "Be brief."])  # fmt: skip
    out, err = capfd.readouterr()
    assert code == 0
    assert err.count("[20 tokens, ") == 8
    assert "dropped: the model takes 160 tokens)" in err
    assert "error" not in err
    assert out


# -- models that cannot chat ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "arguments", "message"),
    [
        (None, (), "error: foresay chat needs a model with a chat template"),
        (
            "{{ raise_exception('no system, please') if messages[0].role == 'system' }}x",
            ("--system", "Be brief."),
            "the chat template refuses it: TemplateError: no system, please",
        ),
    ],
    ids=["no template", "no system prompt"],
)
def test_what_the_model_cannot_do_is_an_error_at_the_start(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    template: str | None,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    model = save_chat_model(tmp_path, template=template)
    code = main(["chat", "--model", str(model), "--proposer", "none", *arguments])
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


# -- Ctrl-C, and a terminal ----------------------------------------------------------------------

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and terminals")


def command(folder: Path, max_tokens: int) -> list[str]:
    return [sys.executable, "-m", "foresay.cli", "chat", "--model", str(folder),
            "--max-tokens", str(max_tokens), "--proposer", "none"]  # fmt: skip


class Script:
    """A person who types lines, and presses Ctrl-C where there is None."""

    interactive = True

    def __init__(self, *lines: str | None) -> None:
        self.lines = list(lines)
        self.num_lines = 0

    def read(self) -> Message | None:
        line = self.lines.pop(0)
        if line is None:
            raise KeyboardInterrupt
        self.num_lines += 1
        return Message(line)


@pytest.mark.parametrize(
    ("lines", "num_left"),
    [
        ((None, None, "/help"), 1),
        ((None, "/help", None, None, "/help"), 1),
        ((None, "", None, "/quit", "/help"), 1),
    ],
    ids=["twice", "a line between", "then quit"],
)
def test_ctrl_c_twice_with_no_line_between_ends_the_session(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lines: tuple[str | None, ...], num_left: int
) -> None:
    script = Script(*lines)
    monkeypatch.setattr(chat_module, "Reader", lambda: script)
    code = main(["chat", "--model", str(folder), "--proposer", "none"])
    assert code == (0 if "/quit" in lines else 130)
    assert len(script.lines) == num_left


@posix
def test_ctrl_c_stops_the_answer_and_not_the_session(folder: Path) -> None:
    process = subprocess.Popen(
        command(folder, 3000),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # see test_cli_plugins
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for question in (b"Hello\n", b"Go on\n"):
        process.stdin.write(question)
        process.stdin.flush()
        assert process.stdout.read1(64)  # it answers
        process.send_signal(signal.SIGINT)
        assert read_until(process.stderr, b"prompt tokens cached]\n").count(b"is kept)") == 1
        drain(process.stdout)
    process.stdin.write(b"/stats\n")
    process.stdin.flush()
    assert b"conversation of 2 turns" in read_until(process.stderr, b"from the prefix cache\n")
    for _ in range(10):  # now it waits for a message, or is about to
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
            break
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


@posix
def test_in_a_terminal_lines_are_edited_pasted_stopped_and_cleared(folder: Path) -> None:
    with terminal(command(folder, 3000)) as (say, expect, wait):
        expect("Ctrl-D ends")
        expect("> ")
        say("Hello\n")
        expect("\n")  # echoed
        time.sleep(0.2)
        say("\x03")
        expect("(stopped; what came is kept)")
        expect("> ")
        time.sleep(0.5)  # a Ctrl-C before the line is being read goes with what was typed so far
        say("half a line\x03")
        expect("(Ctrl-C once more ends the chat)")
        say('"""\n')
        expect(". ")
        time.sleep(0.5)
        say("/reset\x03")
        expect("(Ctrl-C once more ends the chat)")
        say("/stats\n")
        expect("conversation of 1 turn,")
        expect("> ")
        say("/sta\x1b[200~ts\n\x1b[201~")  # pasted with a line's end: nothing is sent yet
        say("\x7f\n")
        expect("conversation of 1 turn,")
        expect("> ")  # until the line is being read, the terminal itself would take the Ctrl-D
        say("\x04")
        assert wait() == 0


Say, Expect, Wait = Callable[[str], None], Callable[[str], None], Callable[[], int]


@contextmanager
def terminal(arguments: list[str]) -> Iterator[tuple[Say, Expect, Wait]]:
    """Run a command in a terminal of its own; say something to it, expect what it shows."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()

    def control() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        arguments,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=control,
        env={**os.environ, "TERM": "xterm", "INPUTRC": os.devnull},
    )
    os.close(theirs)
    seen = ""

    def say(text: str) -> None:
        os.write(ours, text.encode())

    def expect(text: str) -> None:
        nonlocal seen
        end = time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < end, f"no {text!r} in {seen!r}"
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096).decode(errors="replace")
        seen = seen[seen.index(text) + len(text) :]

    try:
        yield say, expect, lambda: process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(stream: object, text: bytes) -> bytes:
    """Return what a pipe brings up to `text`."""
    read1 = getattr(stream, "read1")  # noqa: B009
    seen = b""
    while text not in seen:
        more = read1(4096)
        assert more, f"no {text!r} in {seen!r}"
        seen += more
    return seen


def drain(stream: object) -> None:
    """Take what is in a pipe."""
    while select.select([stream], [], [], 0)[0]:
        getattr(stream, "read1")(65536)  # noqa: B009


# -- the real model ------------------------------------------------------------------------------


def test_a_real_model_remembers_what_was_said(
    smollm2_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Name a bird.\nAnother one.\n"))
    code = main(["chat", "--model", str(smollm2_dir), "--max-tokens", "8", "--proposer", "ngram"])
    out, err = capfd.readouterr()
    assert code == 0
    assert out.strip()
    cached = [int(number) for number in re.findall(r"(\d+) of \d+ prompt tokens cached", err)]
    assert cached[0] == 0
    assert cached[1] >= 32
