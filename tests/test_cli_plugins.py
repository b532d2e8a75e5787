"""The command line around the engine: listings, plugins' commands, and how mistakes end.

Each test runs `foresay` in a process of its own, with the plugins it wrote installed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from distributions import OFFER_PROPOSER, write_distribution

import foresay
from foresay import cli

Foresay = Callable[..., "subprocess.CompletedProcess[str]"]

COMMANDS = """
    import typer
    from foresay import hookimpl

    @hookimpl
    def foresay_register_commands(app):
        {body}
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


def environment(site: Path, **variables: str) -> dict[str, str]:
    """The variables of a run; stdout is buffered, whatever the tests themselves run under."""
    fixed = {"PYTHONPATH": str(site), "PYTHONUNBUFFERED": "", "COLUMNS": "100"}
    return {**os.environ, **fixed, **variables}


@pytest.fixture
def run(site: Path, tmp_path: Path) -> Foresay:
    """Runs the command line in an empty folder; -P keeps that folder off the import path."""
    here = tmp_path / "here"
    here.mkdir()

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "foresay.cli", *arguments],
            cwd=here,
            env=environment(site, **variables),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    return run


# -- listings ------------------------------------------------------------------------------------


def test_plugins_json_has_one_row_a_plugin_with_the_stable_keys(site: Path, run: Foresay) -> None:
    write_distribution(site, "t-good", OFFER_PROPOSER.format(name="good_p"), version="2.5")
    write_distribution(site, "t-broken", "import absent_module", entry_point="t_brk")
    write_distribution(site, "t-off", OFFER_PROPOSER.format(name="off_p"))
    write_distribution(
        site, "t-command", COMMANDS.format(body="app.command('greet')(lambda: print('hello'))")
    )

    done = run("plugins", "--json", FORESAY_DISABLE_PLUGINS="t_off")

    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    assert [row for row in rows if row["distribution"].startswith("t-")] == [
        {
            "distribution": "t-broken",
            "version": "1.0",
            "entry_point": "t_brk",
            "status": "failed",
            "proposers": [],
            "models": [],
            "drafters": [],
            "commands": [],
            "error": "ModuleNotFoundError: No module named 'absent_module'",
        },
        {
            "distribution": "t-command",
            "version": "1.0",
            "entry_point": "t_command",
            "status": "ok",
            "proposers": [],
            "models": [],
            "drafters": [],
            "commands": ["greet"],
            "error": None,
        },
        {
            "distribution": "t-good",
            "version": "2.5",
            "entry_point": "t_good",
            "status": "ok",
            "proposers": ["good_p"],
            "models": [],
            "drafters": [],
            "commands": [],
            "error": None,
        },
        {
            "distribution": "t-off",
            "version": "1.0",
            "entry_point": "t_off",
            "status": "disabled",
            "proposers": [],
            "models": [],
            "drafters": [],
            "commands": [],
            "error": None,
        },
    ]


def test_plugins_in_a_pipe_are_one_line_each_and_errors_follow(site: Path, run: Foresay) -> None:
    many = ", ".join(f"ProposerSpec('p{i:02}', ProposerConfig, object)" for i in range(30))
    source = OFFER_PROPOSER.replace('ProposerSpec(name="{name}"', f"{many}, ProposerSpec(name='x'")
    write_distribution(site, "t-many", source)
    write_distribution(site, "t-broken", "raise RuntimeError('[bold] is no markup')")

    done = run("plugins")

    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["plugin", "distribution", "version", "status", "offers"]
    offers = " ".join(f"proposer p{i:02}," for i in range(30)) + " proposer x"
    assert ["t_many", "t-many", "1.0", "ok", *offers.split()] in lines
    assert ["t_broken", "t-broken", "1.0", "failed"] in lines
    assert "t_broken: RuntimeError: [bold] is no markup" in done.stdout.splitlines()


def test_models_are_listed_with_their_folder_or_none(site: Path, run: Foresay) -> None:
    write_distribution(
        site,
        "t-models",
        """
        from pathlib import Path
        from foresay import hookimpl
        from foresay.core.registry import ModelAlias

        def work():
            raise AssertionError("listing did work")

        @hookimpl
        def foresay_register_models():
            return [
                ModelAlias("t_here", "fetched [before]", work, locate=lambda: Path("/srv/t_here")),
                ModelAlias("t_away", "not fetched", work),
                ModelAlias("t_lost", "cannot say", work, locate=lambda: 1 / 0),
            ]
        """,
    )

    as_json, as_table = run("models", "--json"), run("models")

    assert [row for row in json.loads(as_json.stdout) if row["name"].startswith("t_")] == [
        {"name": "t_away", "description": "not fetched", "path": None},
        {"name": "t_here", "description": "fetched [before]", "path": "/srv/t_here"},
        {"name": "t_lost", "description": "cannot say", "path": None},
    ]
    rows = [line.split() for line in as_table.stdout.splitlines()]
    assert ["t_here", "fetched", "[before]", "/srv/t_here"] in rows
    assert ["t_away", "not", "fetched", "(fetched", "when", "first", "used)"] in rows
    for done in (as_json, as_table):
        assert done.returncode == 0
        assert done.stderr == (
            "warning: locate() of model 't_lost', t-models 1.0, raised ZeroDivisionError: "
            "division by zero\n"
        )


def test_a_misspelt_plugin_to_disable_is_warned_of_on_stderr(site: Path, run: Foresay) -> None:
    write_distribution(site, "t-good", OFFER_PROPOSER.format(name="good_p"))

    done = run("plugins", "--json", FORESAY_DISABLE_PLUGINS="t_goud")

    assert json.loads(done.stdout)
    assert done.stderr.startswith("warning: FORESAY_DISABLE_PLUGINS: no plugin 't_goud'; installed")
    assert done.stderr.endswith("; did you mean 't_good'?\n")


# -- commands of plugins -------------------------------------------------------------------------


def record(done: subprocess.CompletedProcess[str], entry_point: str) -> dict[str, object]:
    (row,) = [row for row in json.loads(done.stdout) if row["entry_point"] == entry_point]
    assert isinstance(row, dict)
    return row


def test_a_plugin_adds_commands_and_groups_of_commands(site: Path, run: Foresay) -> None:
    write_distribution(
        site,
        "t-tools",
        """
        import typer
        from foresay import hookimpl

        @hookimpl
        def foresay_register_commands(app):
            group = typer.Typer()

            @app.command()
            def say_twice(word: str):
                "Say a word twice."
                print(word, word)

            @group.command()
            def up(): print("up")

            @group.command()
            def down(): raise typer.Exit(7)

            app.add_typer(group, name="move")
        """,
    )

    assert run("say-twice", "hello").stdout == "hello hello\n"
    assert run("move", "up").stdout == "up\n"
    assert run("move", "down").returncode == 7
    assert "Say a word twice." in run("--help").stdout
    assert record(run("plugins", "--json"), "t_tools")["commands"] == ["say-twice", "move"]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        pytest.param(
            "app.command('models')(lambda: print('mine'))",
            "command 'models' exists already in foresay itself",
            id="a command of foresay's",
        ),
        pytest.param(
            "raise OSError('no disk')",
            "foresay_register_commands raised OSError: no disk",
            id="raises",
        ),
        pytest.param(
            "app.command('odd')(odd_command)",
            "foresay_register_commands raised ",
            id="what typer cannot build",
        ),
        pytest.param(
            "app.callback()(lambda: print('before everything'))",
            "foresay_register_commands raised ValueError: a plugin can add commands to the app, "
            "not a callback",
            id="a callback",
        ),
    ],
)
def test_a_command_that_cannot_be_added_fails_its_plugin_and_nothing_else(
    site: Path, run: Foresay, body: str, error: str
) -> None:
    source = COMMANDS.format(body=body) + "\n    def odd_command(x: complex | bytes): pass\n"
    write_distribution(site, "a-bad", source)
    write_distribution(
        site, "z-good", COMMANDS.format(body="app.command('greet')(lambda: print('hello'))")
    )

    listing = run("plugins", "--json")

    row = record(listing, "a_bad")
    assert row["status"] == "failed"
    assert str(row["error"]).startswith(error)
    assert run("greet").stdout == "hello\n"
    assert isinstance(json.loads(run("models", "--json").stdout), list)


def test_a_nameless_group_cannot_slip_in_a_name_that_is_taken(site: Path, run: Foresay) -> None:
    body = "[app.add_typer(group_of(*names)) for names in (('models', 'fine'), ('calm', 'quiet'))]"
    source = COMMANDS.format(body=body) + (
        "\n    def group_of(*names):\n"
        "        group = typer.Typer()\n"
        "        for name in names: group.command(name)(lambda: print('mine'))\n"
        "        return group\n"
    )
    write_distribution(site, "t-nameless", source)
    write_distribution(
        site, "t-twin", COMMANDS.format(body="app.command('calm')(lambda: print('twin'))")
    )

    row = record(run("plugins", "--json"), "t_nameless")

    assert row["commands"] == ["models", "fine", "calm", "quiet"]
    assert str(row["error"]).startswith(
        "command 'models' exists already in foresay itself; "
        "command 'calm' is offered by t-nameless 1.0 and t-twin 1.0"
    )
    assert "mine" not in run("models").stdout
    assert "is offered by t-nameless 1.0 and t-twin 1.0" in run("calm").stderr
    assert "No such command 'fine'" in run("fine").stderr


def test_two_plugins_with_one_command_name_get_it_neither(site: Path, run: Foresay) -> None:
    for name in ("twin-a", "twin-b"):
        body = f"app.command('shared')(lambda: 0); app.command('{name}')(lambda: print('{name}'))"
        write_distribution(site, name, COMMANDS.format(body=body))

    listing = run("plugins", "--json")

    for entry_point in ("twin_a", "twin_b"):
        row = record(listing, entry_point)
        assert row["status"] == "failed"
        assert "command 'shared' is offered by twin-a 1.0 and twin-b 1.0; " in str(row["error"])
    asked = run("shared", "--with", "arguments")
    assert (asked.returncode, asked.stdout) == (2, "")
    assert asked.stderr.startswith(
        "error: command 'shared' is offered by twin-a 1.0 and twin-b 1.0"
    )
    assert "shared" not in run("--help").stdout
    assert run("twin-a").stdout == "twin-a\n"


# -- how a run ends ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param(["modles"], "No such command 'modles'", id="unknown command"),
        pytest.param(["plugins", "--jsn"], "No such option: --jsn", id="unknown option"),
        pytest.param(["plugins", "extra"], "unexpected extra argument", id="extra argument"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line_and_exit_code_2(
    run: Foresay, arguments: list[str], error: str
) -> None:
    done = run(*arguments)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert error in done.stderr
    assert done.stderr.count("\n") == 1
    assert " --help')" in done.stderr


def test_an_unknown_command_is_answered_with_the_plugins_that_failed(
    site: Path, run: Foresay
) -> None:
    write_distribution(site, "t-broken", "import absent_module")

    done = run("evaluate")

    assert done.returncode == 2
    assert "No such command 'evaluate'" in done.stderr
    assert "t_broken (ModuleNotFoundError: No module named 'absent_module')" in done.stderr


def test_an_error_of_foresay_is_one_line_and_exit_code_2(site: Path, run: Foresay) -> None:
    body = "app.command('fail')(fail)"
    source = COMMANDS.format(body=body) + (
        "\n    def fail():\n"
        "        from foresay.core.errors import ModelError\n"
        "        raise ModelError(\"no model 'x'\")\n"
    )
    write_distribution(site, "t-fails", source)

    done = run("fail")

    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: no model 'x'\n")


def test_without_a_command_the_help_is_shown_and_the_exit_code_is_2(run: Foresay) -> None:
    bare, asked = run(), run("--help")

    assert (bare.returncode, asked.returncode) == (2, 0)
    assert bare.stdout.split() == asked.stdout.split()
    for name in ("plugins", "models", "--version"):
        assert name in asked.stdout


def test_version_is_that_of_the_distribution(run: Foresay) -> None:
    assert run("--version").stdout == f"foresay {foresay.__version__}\n"


def heed_interrupts() -> None:
    """A background job of a shell is started with Ctrl-C ignored, and so would its children be."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupt_ends_with_130_and_no_traceback(site: Path) -> None:
    source = COMMANDS.format(body="app.command('wait')(wait)") + (
        "\n    def wait():\n"
        "        import time\n"
        "        print('waiting', flush=True)\n"
        "        time.sleep(60)\n"
    )
    write_distribution(site, "t-waits", source)
    process = subprocess.Popen(
        [sys.executable, "-m", "foresay.cli", "wait"],
        env=environment(site),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stderr.read() == ""


@pytest.mark.parametrize("lines", [10, 100_000], ids=["at the last flush", "while it writes"])
def test_a_reader_that_goes_away_ends_the_run_quietly(site: Path, lines: int) -> None:
    body = f"app.command('many')(lambda: [print('line', i) for i in range({lines})] and None)"
    write_distribution(site, "t-many", COMMANDS.format(body=body))
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "foresay.cli", "many"],
        env=environment(site),
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)

    assert (process.returncode, process.stderr) == (1, "")


def test_a_module_beside_the_user_can_be_imported_but_is_no_installed_plugin(
    site: Path, run: Foresay, tmp_path: Path
) -> None:
    body = "app.command('fetch')(fetch)"
    source = COMMANDS.format(body=body) + (
        "\n    def fetch():\n"
        "        import beside, mailbox\n"
        "        print(beside.VALUE, mailbox.__name__)\n"
    )
    write_distribution(site, "t-imports", source)
    here = tmp_path / "here"
    (here / "beside.py").write_text("VALUE = 'found'\n", encoding="utf-8")
    (here / "mailbox.py").write_text("raise AssertionError('shadows')\n", encoding="utf-8")
    write_distribution(here, "stray", OFFER_PROPOSER.format(name="stray_p"))

    assert run("fetch").stdout == "found mailbox\n"
    assert "stray" not in run("plugins", "--json").stdout


def test_main_returns_the_exit_code_and_leaves_no_log_handler_behind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    monkeypatch.setattr(sys, "path", list(sys.path))
    before = list(logging.getLogger("foresay").handlers)

    codes = [cli.main(["--version"]), cli.main(["nonsense"])]

    assert codes == [0, 2]
    assert capsys.readouterr().out == f"foresay {foresay.__version__}\n"
    assert logging.getLogger("foresay").handlers == before
