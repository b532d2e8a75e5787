"""The example plugin's README: its commands work as they stand, and its code is the plugin's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "plugins" / "custom_example"
README = (EXAMPLE / "README.md").read_text(encoding="utf-8")
SOURCES = {
    "python": "\n".join(path.read_text(encoding="utf-8") for path in EXAMPLE.rglob("src/*/*.py")),
    "toml": (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"),
}
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.M | re.S)


@pytest.mark.parametrize(
    ("language", "code"),
    [pytest.param(*block, id=block[1].split("\n")[0]) for block in BLOCKS if block[0] != "sh"],
)
def test_the_code_that_the_readme_explains_is_the_plugins(language: str, code: str) -> None:
    assert code.strip("\n") in SOURCES[language]


@pytest.fixture
def author(tmp_path: Path) -> dict[str, str]:
    """An author's machine: a clone, and an environment where pip installs without an index."""
    repository = tmp_path / "clone"
    left_out = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(EXAMPLE, repository / "plugins" / "custom_example", ignore=left_out)
    (repository / "plugins" / "custom_example" / "src" / "foresay_old.egg-info").mkdir()
    target, commands = tmp_path / "site", tmp_path / "bin"
    target.mkdir()
    commands.mkdir()
    # Editable installs are found through .pth files, which count in site folders only.
    (target / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(target)!r})\n")
    for command, module in {"pip": "pip", "foresay": "foresay.cli", "pytest": "pytest"}.items():
        (commands / command).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (commands / command).chmod(0o755)
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(commands), os.environ["PATH"]]),
        "PYTHONPATH": str(target),
        "PYTHONWARNINGS": "ignore",
        "PIP_TARGET": str(target),
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # which means: without isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PWD": str(repository),
        "COLUMNS": "200",
    }


def test_the_readmes_commands_make_a_plugin_that_is_listed_and_conforms(
    author: dict[str, str],
) -> None:
    commands = next(code for language, code in BLOCKS if language == "sh")
    assert commands.splitlines()[-3:] == ["pip install -e .", "foresay plugins", "pytest tests"]

    done = subprocess.run(
        ["/bin/sh", "-e", "-c", commands],
        cwd=author["PWD"],
        env=author,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"my_idea +foresay-my_idea +0\.1\.0 +ok +proposer my_idea", done.stdout)
    assert re.search(r"[4-9]\d passed", done.stdout), done.stdout
    assert not re.search("failed|error", done.stdout), done.stdout
    copied = Path(author["PWD"]) / "my_idea"
    left = [path for path in copied.rglob("*.py") if "custom_example" in path.read_text()]
    assert left == []
