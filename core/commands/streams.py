"""The process's own streams, fit for whatever a command reads and prints. Knows no command."""

from __future__ import annotations

import io
import os
import sys


def prepare_streams() -> None:
    """Open what was closed at the start; let no character or byte end a command in a traceback."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # Python's sign for a closed one, as in `foresay run x >&-`
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - as long as we run
            setattr(sys, name, stream)
    # Bytes that are no text become what `check_text` finds, and words.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    # A model's text may have any character; a terminal or a locale need not.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
