"""The rules of the house: who may import whom, what is shipped, what stays light, what is told.

The import rules are read from the source, so that a forbidden import is found in the file that has
it; that nothing heavy is imported is measured in fresh interpreters as well.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from foresay import hookspecs
from foresay.core.worker import cpu_kernels

ROOT = Path(__file__).parent.parent
PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))
ROOT_MODULES = ["__init__.py", "cli.py", "hookspecs.py"]
HOOKS = sorted(name for name in vars(hookspecs) if name.startswith("foresay_"))
HEAVY = {"torch", "transformers", "triton"}


def toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def source_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and _is_source(path)]


def _is_source(path: Path) -> bool:
    if path.suffix == ".so":
        return False  # built by an editable install
    return "__pycache__" not in path.parts and not any(p.endswith(".egg-info") for p in path.parts)


def modules() -> dict[str, Path]:
    """Every module that is shipped, foresay's and the plugins', by its full name."""
    files = [(ROOT / name, Path("foresay") / name) for name in ROOT_MODULES]
    files += [(path, Path("foresay") / path.relative_to(ROOT)) for path in _python(ROOT / "core")]
    for plugin in PLUGINS:
        files += [(path, path.relative_to(plugin / "src")) for path in _python(plugin / "src")]
    found = {}
    for path, shown in files:
        parts = shown.with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _python(folder: Path) -> list[Path]:
    return [path for path in source_files(folder) if path.suffix == ".py"]


MODULES = modules()


# -- who may import whom -------------------------------------------------------------------------

CORE = "foresay.core"
SCHEDULING = "foresay.core.scheduling"
WORKER = "foresay.core.worker"
KNOWN_TO_SCHEDULING = [SCHEDULING, *(f"{CORE}.{name}" for name in ("messages", "config", "errors"))]
KERNELS = f"{WORKER}.kernels"
TESTING = f"{CORE}.testing"
FORBIDDEN_TO_WORKER = [SCHEDULING, *(f"{CORE}.{name}" for name in ("engine", "llm", "commands"))]
KNOWN_TO_PLUGINS = [
    "foresay",
    *(f"{CORE}.{name}" for name in ("proposer", "registry", "errors", "testing", "training")),
    *(f"{WORKER}.{name}" for name in ("drafting", "decoder", "attention", "target", "checkpoint")),
    *(f"{WORKER}.{name}" for name in ("drafter_kv", "chain_training", "distilling")),
    *(
        f"{WORKER}.{name}"
        for name in (
            "layer_shape",
            "linear",
            "drafter_linear",
            "draft_tree",
            "draft_trie",
            "tree_drafting",
        )
    ),
]
# A plugin with commands of its own reads options, finds plugins and builds settings as ours do.
KNOWN_TO_COMMANDS_OF = {
    "foresay_train": [f"{CORE}.{name}" for name in ("commands.options", "config", "plugins")],
}
LIGHT = [
    SCHEDULING,
    "foresay.hookspecs",
    "foresay.cli",
    *(f"{CORE}.{name}" for name in ("config", "errors", "messages", "proposer", "registry")),
    f"{CORE}.training",
    *(f"{CORE}.{name}" for name in ("plugins", "plugin_commands", "offers", "proposer_class")),
    *(f"{CORE}.{name}" for name in ("runner", "remote", "channel", "border")),
    f"{WORKER}.serve",
]


@dataclass(frozen=True)
class Import:
    target: str  # the module imported from or imported, as precisely as it is known
    for_types: bool  # under `if TYPE_CHECKING`
    at_top: bool  # runs when the module is imported
    relative: bool


def imports_of(tree: ast.AST, *, for_types: bool = False, at_top: bool = True) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, for_types, at_top, relative=False)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                target = f"{node.module}.{alias.name}"
                if target not in MODULES:  # an attribute of the module, not a module in it
                    target = str(node.module)
                yield Import(target, for_types, at_top, relative=node.level > 0)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                wrapped = ast.Module([child], [])
                yield from imports_of(wrapped, for_types=True, at_top=at_top)
            for child in node.orelse:
                wrapped = ast.Module([child], [])
                yield from imports_of(wrapped, for_types=for_types, at_top=at_top)
        else:
            inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports_of(node, for_types=for_types, at_top=at_top and not inner)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def violations(name: str, source: str) -> list[str]:
    """The import rules that a module of this name would break with this source."""
    found = list(imports_of(ast.parse(source)))
    broken = []
    for item in found:
        target, package = item.target, item.target.partition(".")[0]
        ours = package == "foresay"
        own_package = name.partition(".")[0]
        rules = {
            "absolute imports only": not item.relative,
            "core imports no plugin": not (within(name, CORE) and package.startswith("foresay_")),
            "core's testing is for tests": not (
                within(name, CORE) and not within(name, TESTING) and within(target, TESTING)
            ),
            "core does not import cli": not (within(name, CORE) and within(target, "foresay.cli")),
            "scheduling knows messages, config and errors only": (
                not within(name, SCHEDULING) or not ours or within(target, *KNOWN_TO_SCHEDULING)
            ),
            "the worker knows neither scheduling nor engine nor commands": (
                not within(name, WORKER) or not within(target, *FORBIDDEN_TO_WORKER)
            ),
            "kernels import nothing of ours": not (
                within(name, KERNELS) and ours and not within(target, KERNELS)
            ),
            "errors imports nothing of ours": not (name == f"{CORE}.errors" and ours),
            "hookspecs imports ours for types only": (
                name != "foresay.hookspecs" or not ours or item.for_types
            ),
            "imports no torch at run time": (
                not within(name, *LIGHT) or package not in HEAVY or item.for_types
            ),
            "a plugin's __init__ imports no torch": (
                not (own_package.startswith("foresay_") and name == own_package)
                or package not in HEAVY
                or item.for_types
            ),
            "a plugin imports no other plugin": (
                not own_package.startswith("foresay_")
                or not package.startswith("foresay_")
                or package == own_package
            ),
            "a plugin imports what is meant for plugins": (
                not own_package.startswith("foresay_")
                or not ours
                or target in KNOWN_TO_PLUGINS
                or target in KNOWN_TO_COMMANDS_OF.get(own_package, ())
            ),
        }
        broken += [f"{rule}: {target}" for rule, kept in rules.items() if not kept]
    wings = [any(within(item.target, wing) for item in found) for wing in (SCHEDULING, WORKER)]
    if all(wings) and name != f"{CORE}.engine":
        broken.append("only engine joins the wings")
    return broken


@pytest.mark.parametrize("name", MODULES)
def test_imports_keep_the_rules(name: str) -> None:
    assert violations(name, MODULES[name].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("name", "source", "rules"),
    [
        ("foresay.core.x", "from . import errors", ["absolute imports only"]),
        ("foresay.core.x", "import foresay_ngram", ["core imports no plugin"]),
        (
            "foresay.core.x",
            "def f():\n  from foresay.cli import main",
            ["core does not import cli"],
        ),
        ("foresay.core.x", "from foresay import cli", ["core does not import cli"]),
        (
            "foresay.core.scheduling.x",
            "from foresay.core.plugins import PluginManager",
            ["scheduling knows messages, config and errors only"],
        ),
        (
            "foresay.core.scheduling.x",
            "from foresay.core import config, worker",
            ["scheduling knows messages, config and errors only"],
        ),
        (
            "foresay.core.scheduling.x",
            "def f():\n  import torch.nn",
            ["imports no torch at run time"],
        ),
        (
            "foresay.core.worker.x",
            "from foresay.core.scheduling.request import Request",
            ["the worker knows neither scheduling nor engine nor commands"],
        ),
        (
            "foresay.core.commands.x",
            "import foresay.core.scheduling.request\nfrom foresay.core.worker import attention",
            ["only engine joins the wings"],
        ),
        (
            "foresay.core.x",
            "from foresay.core.testing import tiny_llama",
            ["core's testing is for tests"],
        ),
        (
            "foresay.core.worker.kernels.x",
            "from foresay.core.worker import noise",
            ["kernels import nothing of ours"],
        ),
        ("foresay.core.errors", "import foresay", ["errors imports nothing of ours"]),
        (
            "foresay.hookspecs",
            "if TYPE_CHECKING:\n  import torch\nelse:\n  from foresay.core import errors",
            ["hookspecs imports ours for types only"],
        ),
        ("foresay_x", "import transformers", ["a plugin's __init__ imports no torch"]),
        ("foresay_x.proposer", "import foresay_y", ["a plugin imports no other plugin"]),
        (
            "foresay_x.proposer",
            "from foresay.core.plugins import PluginManager",
            ["a plugin imports what is meant for plugins"],
        ),
        (
            "foresay_x.proposer",
            "from foresay import core",
            ["a plugin imports what is meant for plugins"],
        ),
    ],
)
def test_a_forbidden_import_is_found(name: str, source: str, rules: list[str]) -> None:
    assert [found.partition(": ")[0] for found in violations(name, source)] == rules


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("foresay.core.engine", "import foresay.core.scheduling\nimport foresay.core.worker"),
        ("foresay.core.proposer", "if TYPE_CHECKING:\n  import torch"),
        ("foresay.core.worker.x", "import torch\nfrom foresay.core.messages import NewRequest"),
        ("foresay_x.proposer", "import torch\nimport foresay_x.index\nfrom foresay import LLM"),
        ("foresay_x", "from foresay.core.proposer import Draft"),
        ("foresay_x.training", "from foresay.core.training import TrainingBatch"),
        ("foresay_train.command", "from foresay.core.commands import options"),
    ],
)
def test_a_permitted_import_is_let_pass(name: str, source: str) -> None:
    assert violations(name, source) == []


# -- what stays light ----------------------------------------------------------------------------


def heavy_imports(*arguments: str) -> set[str]:
    """The heavy packages that an interpreter imports; installed plugins are loaded as well."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(p / "src") for p in PLUGINS)},
        check=True,
        capture_output=True,
        text=True,
    )
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.M))
    assert "foresay.hookspecs" in imported, "nothing was measured"
    return {name.partition(".")[0] for name in imported} & HEAVY


@pytest.mark.parametrize("arguments", [["--help"], ["plugins"], ["models", "--json"]], ids=str)
def test_the_command_line_imports_no_torch(arguments: list[str]) -> None:
    assert heavy_imports("-m", "foresay.cli", *arguments) == set()


def test_light_modules_import_no_torch_through_others() -> None:
    light = [name for name in MODULES if within(name, "foresay.cli", *LIGHT)]
    light += [name for name in MODULES if within(name, f"{CORE}.commands")]
    light += [name for name in MODULES if "." not in name]  # foresay and the plugins' __init__
    assert {"foresay", f"{SCHEDULING}.request", f"{CORE}.commands.models"} <= set(light)

    assert heavy_imports("-c", "\n".join(f"import {name}" for name in light)) == set()


def test_a_heavy_import_is_noticed() -> None:
    assert heavy_imports("-c", "import foresay.hookspecs, torch.version") == {"torch"}


# -- what is shipped -----------------------------------------------------------------------------


def test_only_the_three_modules_lie_in_the_root() -> None:
    assert sorted(path.name for path in ROOT.glob("*.py")) == ROOT_MODULES


def test_the_packages_listed_by_hand_are_those_of_the_tree() -> None:
    listed = toml(ROOT / "pyproject.toml")["tool"]["setuptools"]["packages"]
    folders = {path.parent for path in _python(ROOT / "core")}

    assert sorted(listed) == sorted(
        ["foresay", *("foresay." + ".".join(f.relative_to(ROOT).parts) for f in folders)]
    )
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_the_wheels_hold_every_file_of_the_source_and_nothing_else(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    skipped = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.so")
    shutil.copytree(ROOT, copy, ignore=skipped)
    projects = [copy, *(copy / "plugins" / plugin.name for plugin in PLUGINS)]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, tmp_path / "wheels", *projects],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )

    expected = {
        "foresay": {
            *(f"foresay/{name}" for name in (*ROOT_MODULES, "py.typed")),
            *(
                f"foresay/{path.relative_to(ROOT)}"
                for path in source_files(ROOT / "core")
                if path.suffix not in (".c", ".h")  # what is built of them is there instead
            ),
        }
    }
    if cpu_kernels._built is not None:
        expected["foresay"].add("foresay/core/worker/kernels/_cpu.abi3.so")
    for plugin in PLUGINS:
        files = source_files(plugin / "src")
        expected[f"foresay_{plugin.name}"] = {str(p.relative_to(plugin / "src")) for p in files}
    shipped = {}
    for wheel in (tmp_path / "wheels").glob("*.whl"):
        names = set(zipfile.ZipFile(wheel).namelist())
        shipped[wheel.name.partition("-")[0]] = {n for n in names if ".dist-info/" not in n}
        assert any(name.endswith(".dist-info/entry_points.txt") for name in names)
    assert shipped == expected


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_a_plugin_is_laid_out_as_a_distribution_of_its_own(plugin: Path) -> None:
    project = toml(plugin / "pyproject.toml")["project"]
    module = f"foresay_{plugin.name}"

    assert project["name"].replace("-", "_") == module
    assert project["entry-points"]["foresay"] == {plugin.name: module}
    pins = [re.sub(r"\[[\w,]+\]", "", item) for item in project["dependencies"]]
    assert "foresay>=0.1,<0.2" in pins
    for name in ("README.md", f"src/{module}/py.typed", f"tests/test_{plugin.name}.py"):
        assert (plugin / name).is_file(), name


def test_there_are_plugins_and_foresay_is_in_the_range_they_pin() -> None:
    assert {"custom_example", "ngram", "smollm2"} <= {plugin.name for plugin in PLUGINS}
    assert toml(ROOT / "pyproject.toml")["project"]["version"].startswith("0.1.")


def test_every_dependency_has_a_tested_version() -> None:
    pinned = set(
        re.findall(r"^([\w-]+)==", (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8"), re.M)
    )
    needed: set[str] = set()
    for path in [ROOT / "pyproject.toml", *(plugin / "pyproject.toml" for plugin in PLUGINS)]:
        project = toml(path)["project"]
        groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
        needed |= {re.split(r"[^\w-]", item)[0] for group in groups for item in group}

    assert {name for name in needed if not name.startswith("foresay")} - pinned == set()


# -- what is told --------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_and_tested(hook: str) -> None:
    function = getattr(hookspecs, hook)
    arguments = ", ".join(inspect.signature(function).parameters)
    tests = [path for path in (ROOT / "tests").glob("test_*.py") if path != Path(__file__)]

    assert inspect.getdoc(function), "it has no contract"
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"| `{hook}({arguments})` |" in guide
    assert any(re.search(rf"\b{hook}\b", path.read_text(encoding="utf-8")) for path in tests)


def test_there_are_six_hooks() -> None:
    assert len(HOOKS) == 6
