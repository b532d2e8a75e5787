"""The command line: `foresay COMMAND ...`. Registers the commands and words the errors.

It knows no engine: each command imports what it needs when it runs, so that `foresay --help` stays
quick. Text that was asked for goes to stdout; errors and warnings go to stderr, one line each.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from foresay import __version__
from foresay.core.commands import bench, chat, check, doctor, models, plugins, run, showcase
from foresay.core.commands.streams import prepare_streams
from foresay.core.errors import ForesayError
from foresay.core.plugins import PluginManager

USER_ERROR = 2
INTERRUPTED = 130


def build_app(manager: PluginManager) -> typer.Typer:
    """Return the app with foresay's commands and the plugins'; commands find `manager` as `obj`."""
    app = typer.Typer(
        name="foresay",
        add_completion=False,
        pretty_exceptions_enable=False,  # an unexpected error is a bug: a plain traceback
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_foresay)
    app.command("run")(run.run)
    app.command("chat")(chat.chat)
    app.command("bench")(bench.bench)
    app.command("check")(check.check)
    app.command("doctor")(doctor.doctor)
    app.command("showcase")(showcase.showcase)
    app.command("plugins")(plugins.plugins)
    app.command("models")(models.models)
    manager.register_commands(app)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done. 2: the user's mistake, with `error: ...` on stderr. 130: interrupted. A command may
    have further codes of its own, by `typer.Exit`.
    """
    prepare_streams()
    warnings = logging.StreamHandler()
    warnings.setFormatter(_OneLine())
    logger = logging.getLogger("foresay")
    logger.addHandler(warnings)
    manager = PluginManager()
    try:
        manager = PluginManager.load()
        app = build_app(manager)
        # After the plugins were found: `--proposer my_module:MyProposer` may name a module beside
        # the user, but what merely lies there is no installed plugin. Last: it shadows nothing.
        if "" not in sys.path:
            sys.path.append("")
        code = app(args=arguments, prog_name="foresay", standalone_mode=False, obj=manager)
        sys.stdout.flush()
    except ForesayError as error:
        return _user_error(str(error))
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        if context is None:
            return _user_error(error.format_message())
        # An unknown command may be one that a plugin would have brought.
        missing = manager.unavailable() if context.parent is None else ""
        text = error.format_message() + missing
        return _user_error(f"{text} (see '{context.command_path} --help')")
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # as above
        return _user_error(f"cannot write: {error.strerror}")
    finally:
        logger.removeHandler(warnings)
    return code if isinstance(code, int) else 0


def _foresay(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Lossless speculative decoding for language models, every proposer a plugin."""
    if version:
        print(f"foresay {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(USER_ERROR)


def _user_error(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return USER_ERROR


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {record.getMessage()}"


if __name__ == "__main__":
    sys.exit(main())
