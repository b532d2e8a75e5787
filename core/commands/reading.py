"""What a person types, or a pipe brings, as messages of one line or of several.

A line that ends with a backslash goes on in the next; lines between two lines of three double
quotes are one message, taken as it is. Text pasted into a terminal stays one message where the
readline library tells pasted lines from typed ones (GNU readline does). Knows no model.
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass

_QUOTES = '"""'
_PROMPT, _CONTINUED = "> ", ". "


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `is_quoted`: it stood between quotes, so it is never a command."""

    text: str
    is_quoted: bool = False


class Reader:
    """Reads messages from stdin; shows a prompt if a person types them."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self.num_lines = 0  # read so far, of messages that were interrupted too
        if isinstance(sys.stdin, io.TextIOWrapper):
            # Bytes that are no text become what `check_text` finds, message by message.
            sys.stdin.reconfigure(errors="surrogateescape")
        # With a prompt on stdout in a file, the answers would not be alone there.
        self._edits = self.interactive and sys.stdout.isatty()
        if self._edits:
            _enable_line_editing()

    def read(self) -> Message | None:
        """Return the next message; None at the end of the input.

        Raises `KeyboardInterrupt`; what was read of the message until then is gone.
        """
        line = self._line(_PROMPT)
        if line is None:
            return None
        if line.rstrip() == _QUOTES:
            return Message(self._quoted(), is_quoted=True)
        lines = []
        while line is not None and _continues(line):
            lines.append(line[:-1])
            line = self._line(_CONTINUED)
        if line is not None:
            lines.append(line)
        return Message("\n".join(lines))

    def _quoted(self) -> str:
        """Return the lines up to the closing quotes, or to the end of the input."""
        lines = []
        line = self._line(_CONTINUED)
        while line is not None and line.rstrip() != _QUOTES:
            lines.append(line)
            line = self._line(_CONTINUED)
        return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        line = self._edited(prompt) if self._edits else self._plain(prompt)
        self.num_lines += line is not None
        return line

    def _edited(self, prompt: str) -> str | None:
        try:
            return input(prompt)
        except EOFError:
            print(flush=True)
            return None

    def _plain(self, prompt: str) -> str | None:
        if self.interactive:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None


def _continues(line: str) -> bool:
    """Whether the line ends with a backslash that is not itself behind one, nor pasted text."""
    num_backslashes = len(line) - len(line.rstrip("\\"))
    return num_backslashes % 2 == 1 and "\n" not in line


def _enable_line_editing() -> None:
    """Let `input` edit lines and remember them for this session, where there is readline."""
    try:
        import readline
    except ImportError:
        return
    if "libedit" not in (readline.__doc__ or ""):
        # Python turns it off for its own prompt, which could not take several lines at once.
        readline.parse_and_bind("set enable-bracketed-paste on")
