"""The plugin manager, with distributions that are really installed (in a folder on `sys.path`)."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from distributions import OFFER_PROPOSER, write_distribution

from foresay.core.errors import PluginError
from foresay.core.offers import PluginRecord
from foresay.core.plugins import PluginManager

ROOT = Path(__file__).parent.parent


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A site folder; what was imported from it is forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


def load(**environ: str) -> PluginManager:
    importlib.invalidate_caches()  # folders were written within the clock's resolution
    return PluginManager.load(environ)


def record_of(manager: PluginManager, entry_point: str, distribution: str = "") -> PluginRecord:
    (record,) = [
        record
        for record in manager.records
        if record.entry_point == entry_point and record.distribution.startswith(distribution)
    ]
    return record


# -- finding and attributing ---------------------------------------------------------------------


def test_an_installed_plugin_is_found_and_attributed(site: Path) -> None:
    write_distribution(
        site,
        "acme-lookup",
        """
        from pathlib import Path
        from foresay import hookimpl
        from foresay.core.proposer import ProposerConfig, ProposerSpec
        from foresay.core.registry import DrafterSpec, ModelAlias

        @hookimpl
        def foresay_register_proposers():
            yield ProposerSpec("acme_b", ProposerConfig, object)
            yield ProposerSpec("acme_a", ProposerConfig, object)

        @hookimpl
        def foresay_register_models():
            return (ModelAlias("acme_model", "a model", lambda: Path("m")),)

        @hookimpl
        def foresay_register_drafters():
            return [DrafterSpec("acme_head", "acme_a", "acme_model", lambda: Path("d"), 2.5)]
        """,
        version="3.1",
        entry_point="acme",
    )

    manager = load()

    assert record_of(manager, "acme").row() == {
        "distribution": "acme-lookup",
        "version": "3.1",
        "entry_point": "acme",
        "status": "ok",
        "proposers": ["acme_b", "acme_a"],
        "models": ["acme_model"],
        "drafters": ["acme_head"],
        "commands": [],
        "error": None,
    }
    assert manager.proposer("acme_a").name == "acme_a"
    assert manager.proposer_owner("acme_a") == "acme-lookup 3.1"
    assert {"acme_a", "acme_b"} <= set(manager.proposers)
    assert manager.models["acme_model"].description == "a model"
    assert manager.drafters["acme_head"].mean_acceptance_length == 2.5
    assert manager.model("no such model") is None
    assert manager.drafter("no such drafter") is None


def test_the_plugin_of_the_contributing_guide_works_when_installed_by_pip(
    site: Path, tmp_path: Path
) -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^`([\w./]+)`\n\n```\w+\n(.*?)^```", guide, re.M | re.S))
    assert set(files) == {
        "pyproject.toml",
        "foresay_repeat/__init__.py",
        "foresay_repeat/proposer.py",
    }
    project = tmp_path / "project"
    for name, text in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text, encoding="utf-8")
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target"]
    subprocess.run(
        [sys.executable, "-m", "pip", *install, site, project], check=True, capture_output=True
    )

    manager = load()

    assert manager.proposer_owner("repeat") == "foresay-repeat 0.1.0"
    assert "foresay_repeat.proposer" not in sys.modules, "imported before anyone built it"
    spec = manager.resolve_proposer("repeat")
    request = SimpleNamespace(token_ids=[5, 7, 9], k=3)
    draft = spec.build(spec.config_type()).propose(SimpleNamespace(requests=[request]))  # type: ignore[arg-type]
    assert draft.token_ids == [[9, 9, 9]]
    listing = subprocess.run(
        [sys.executable, "-P", "-m", "foresay.cli", "plugins"],
        env={"PYTHONPATH": str(site)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    (shown,) = re.findall(r"^(repeat +foresay-repeat .*\S) *$", listing, re.M)
    (promised,) = re.findall(r"^(repeat +foresay-repeat .*\S) *$", guide, re.M)
    assert shown.split() == promised.split()


# -- plugins that cannot be used -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "error"),
    [
        pytest.param(
            "import absent_module",
            "ModuleNotFoundError: No module named 'absent_module'",
            id="missing dependency",
        ),
        pytest.param("def (", "SyntaxError: invalid syntax", id="syntax error"),
        pytest.param("raise RuntimeError('two\\n  lines')", "RuntimeError: two lines", id="raises"),
        pytest.param("raise SystemExit(3)", "SystemExit: 3", id="exits"),
        pytest.param("raise ValueError", "ValueError", id="raises without words"),
    ],
)
def test_a_plugin_that_fails_to_import_is_listed_and_named_and_stops_nobody(
    site: Path, source: str, error: str
) -> None:
    write_distribution(site, "a-broken", source)
    write_distribution(site, "z-good", OFFER_PROPOSER.format(name="z_good"))

    manager = load()

    record = record_of(manager, "a_broken")
    assert record.status == "failed"
    assert record.error is not None
    assert record.error.startswith(error)
    assert manager.proposer("z_good").name == "z_good"
    with pytest.raises(PluginError, match=r"^no proposer 'oracle'; installed: ") as raised:
        manager.proposer("oracle")
    assert f"; failed to load: a_broken ({error}" in str(raised.value)


def test_an_entry_point_that_names_nothing_is_listed(site: Path) -> None:
    write_distribution(site, "nothing-there", "", value="nothing_there:plugin")

    error = record_of(load(), "nothing_there").error

    assert error == "AttributeError: module 'nothing_there' has no attribute 'plugin'"


_SPEC = "ProposerSpec(name={name!r}, config_type=ProposerConfig, build=object)"
_DRAFTER = "DrafterSpec('d', 'p', 'm', object, {length})"


@pytest.mark.parametrize(
    ("hook", "returned", "error"),
    [
        pytest.param(
            "proposers",
            "None",
            "foresay_register_proposers returned None; it must return a list of ProposerSpec",
            id="forgotten return",
        ),
        pytest.param(
            "proposers",
            "'ngram'",
            "foresay_register_proposers returned 'ngram' (a str); it must return a list of "
            "ProposerSpec",
            id="a string is no list",
        ),
        pytest.param(
            "models",
            "ModelAlias('m', 'd', object)",
            "; it must return a list of ModelAlias",
            id="one alias outside a list",
        ),
        pytest.param(
            "proposers",
            "[" + _SPEC.format(name="fine") + ", 'ngram']",
            "foresay_register_proposers returned 'ngram' (a str) among its ProposerSpec objects",
            id="a wrong item after a right one",
        ),
        pytest.param(
            "proposers",
            "[ModelAlias('m', 'd', object)]",
            "among its ProposerSpec objects",
            id="another kind of offer",
        ),
        pytest.param(
            "proposers",
            f"[{_SPEC.format(name='auto')}]",
            "a proposer cannot be named 'auto'",
            id="a name that means a choice",
        ),
        pytest.param(
            "proposers",
            f"[{_SPEC.format(name='a,b')}]",
            "a proposer cannot be named 'a,b'",
            id="a name that means a chain",
        ),
        pytest.param(
            "proposers",
            f"[{_SPEC.format(name='two words')}]",
            "a ProposerSpec is named 'two words'; a name is a word without spaces",
            id="a name with a space",
        ),
        pytest.param(
            "proposers", f"[{_SPEC.format(name=7)}]", "a ProposerSpec is named 7", id="name 7"
        ),
        pytest.param(
            "proposers",
            "[" + ", ".join([_SPEC.format(name="same")] * 2) + "]",
            "returned two ProposerSpec objects named 'same'",
            id="one name twice",
        ),
        pytest.param(
            "proposers",
            "[ProposerSpec('p', dict, object)]",
            "proposer 'p': config_type is the class dict; it must be ProposerConfig or a subclass",
            id="config_type is no ProposerConfig",
        ),
        pytest.param(
            "proposers",
            "[ProposerSpec('p', ProposerConfig, 'build')]",
            "proposer 'p': build is 'build' (a str), which cannot be called",
            id="build is no function",
        ),
        pytest.param(
            "proposers",
            "[ProposerSpec('p', ProposerConfig, object, needs=Needs())]",
            "proposer 'p': needs is Needs(",
            id="needs is no function",
        ),
        pytest.param(
            "models",
            "[ModelAlias('m', None, object)]",
            "model 'm': description is None, not a str",
            id="no description",
        ),
        pytest.param(
            "models",
            "[ModelAlias('m', 'd', object, locate=None)]",
            "model 'm': locate is None, which cannot be called",
            id="locate is no function",
        ),
        pytest.param(
            "drafters",
            f"[{_DRAFTER.format(length=repr('2.5'))}]",
            "drafter 'd': mean_acceptance_length is '2.5' (a str), not a number",
            id="a length in quotes",
        ),
        pytest.param(
            "drafters",
            f"[{_DRAFTER.format(length='float(chr(110) + chr(97) + chr(110))')}]",
            "drafter 'd': mean_acceptance_length is nan (a float), not a number",
            id="a length of nan",
        ),
        pytest.param(
            "drafters",
            "[DrafterSpec('d', '', 'm', object, 2.0)]",
            "drafter 'd': proposer is '' (a str), not a name",
            id="a drafter of no proposer",
        ),
        pytest.param(
            "drafters",
            "1 / 0",
            "foresay_register_drafters raised ZeroDivisionError: division by zero",
            id="raises",
        ),
        pytest.param(
            "models",
            "(1 / 0 for _ in 'x')",
            "foresay_register_models raised ZeroDivisionError: division by zero",
            id="raises while it yields",
        ),
        pytest.param(
            "models",
            "__import__('sys').exit('bye')",
            "foresay_register_models raised SystemExit: bye",
            id="exits",
        ),
    ],
)
def test_a_hook_that_raises_or_returns_the_wrong_thing_fails_its_plugin_alone(
    site: Path, hook: str, returned: str, error: str
) -> None:
    write_distribution(
        site,
        "a-wrong",
        f"""
        from foresay import hookimpl
        from foresay.core.proposer import Needs, ProposerConfig, ProposerSpec
        from foresay.core.registry import DrafterSpec, ModelAlias

        @hookimpl
        def foresay_register_{hook}():
            return {returned}

        @hookimpl
        def foresay_step_end(stats):
            raise AssertionError("a failed plugin was called")
        """,
    )
    write_distribution(site, "z-good", OFFER_PROPOSER.format(name="z_good"))

    manager = load()

    record = record_of(manager, "a_wrong")
    assert record.status == "failed"
    assert error in (record.error or "")
    assert (record.proposers, record.models, record.drafters) == ([], [], [])
    assert not {"fine", "same", "p"} & set(manager.proposers)
    assert not {"m"} & set(manager.models)
    manager.step_end(None)  # type: ignore[arg-type]
    assert manager.proposer("z_good").name == "z_good"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        pytest.param(
            "@hookimpl\ndef foresay_register_proposer(): return []",
            "no hook 'foresay_register_proposer'; hooks: foresay_register_commands, ",
            id="a hook that does not exist",
        ),
        pytest.param(
            "@hookimpl\ndef foresay_register_proposer(): return []",
            "; did you mean 'foresay_register_proposers'?",
            id="the nearest hook",
        ),
        pytest.param(
            "def foresay_register_proposers(): return []",
            "foresay_register_proposers is not marked with @foresay.hookimpl",
            id="no marker",
        ),
        pytest.param(
            "@hookimpl\ndef foresay_step_end(stats, tokens): pass",
            "foresay_step_end(stats, tokens) asks for arguments that do not exist; "
            "the hook is foresay_step_end(stats)",
            id="an argument that does not exist",
        ),
        pytest.param(
            "@hookimpl(wrapper=True)\ndef foresay_step_end(stats):\n    return (yield)",
            "foresay_step_end is a hook wrapper; foresay calls plain functions only",
            id="a wrapper",
        ),
        pytest.param("x = 1", "it implements no hook; hooks: ", id="no hook at all"),
    ],
)
def test_a_plugin_whose_hooks_do_not_fit_fails_with_a_sentence(
    site: Path, body: str, error: str
) -> None:
    write_distribution(site, "misfit", f"from foresay import hookimpl\n{body}")

    record = record_of(load(), "misfit")

    assert record.status == "failed"
    assert error in (record.error or "")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            "@hookimpl(optionalhook=True)\ndef foresay_of_tomorrow(): pass", id="optional hook"
        ),
        pytest.param("@hookimpl\ndef foresay_step_end(): pass", id="fewer arguments"),
        pytest.param(
            "@hookimpl\ndef foresay_step_end(stats, own=1): pass", id="an argument of its own"
        ),
        pytest.param(
            "@hookimpl(specname='foresay_step_end')\ndef watch(stats): pass", id="another name"
        ),
    ],
)
def test_a_plugin_may_use_the_freedom_that_pluggy_gives(site: Path, body: str) -> None:
    write_distribution(site, "free", f"from foresay import hookimpl\n{body}")

    manager = load()
    manager.step_end(None)  # type: ignore[arg-type]

    assert record_of(manager, "free").error is None


def test_one_module_under_two_entry_points_is_taken_once(site: Path) -> None:
    write_distribution(site, "first", OFFER_PROPOSER.format(name="only"))
    write_distribution(site, "second", "", value="first")

    manager = load()

    assert record_of(manager, "first").status == "ok"
    assert record_of(manager, "second").error == "it is loaded already, as first of first 1.0"
    assert manager.proposer_owner("only") == "first 1.0"


# -- names that clash ----------------------------------------------------------------------------

_TWIN = """
    from foresay import hookimpl
    from foresay.core.proposer import ProposerConfig, ProposerSpec
    from foresay.core.registry import DrafterSpec, ModelAlias

    @hookimpl
    def foresay_register_proposers():
        return [ProposerSpec(n, ProposerConfig, object) for n in ("shared_p", "{own}")]

    @hookimpl
    def foresay_register_models():
        return [ModelAlias("shared_m", "d", object)]

    @hookimpl
    def foresay_register_drafters():
        return [DrafterSpec("shared_d", "p", "m", object, 2.0)]
"""


def test_two_plugins_with_one_name_are_an_error_naming_both_distributions(site: Path) -> None:
    write_distribution(site, "twin-a", _TWIN.format(own="own_a"), version="1.5")
    write_distribution(site, "twin-b", _TWIN.format(own="own_b"), version="2.0rc1")
    write_distribution(site, "z-good", OFFER_PROPOSER.format(name="z_good"))

    manager = load()

    both = (
        "proposer 'shared_p' is offered by twin-a 1.5 and twin-b 2.0rc1; uninstall all but one of "
        "them, or turn one off: FORESAY_DISABLE_PLUGINS=twin_a or twin_b"
    )
    asked: list[Callable[[str], object]] = [manager.proposer, manager.resolve_proposer]
    for ask in asked:
        with pytest.raises(PluginError) as raised:
            ask("shared_p")
        assert str(raised.value) == both
    with pytest.raises(PluginError, match=r"^model 'shared_m' is offered by twin-a 1\.5 and twin"):
        manager.model("shared_m")
    with pytest.raises(PluginError, match=r"^drafter 'shared_d' is offered by twin-a 1\.5 and"):
        manager.drafter("shared_d")
    for entry_point in ("twin_a", "twin_b"):
        record = record_of(manager, entry_point)
        assert record.status == "failed"
        assert (record.error or "").startswith(both + "; model 'shared_m' is offered by ")
        assert "shared_p" in record.proposers
    # What only one of them offers, and who offers something else, is not touched.
    assert manager.proposer_owner("own_a") == "twin-a 1.5"
    assert manager.proposer_owner("own_b") == "twin-b 2.0rc1"
    assert record_of(manager, "z_good").status == "ok"
    assert "shared_p" not in manager.proposers
    assert "shared_m" not in manager.models


def test_turning_one_twin_off_ends_the_clash(site: Path) -> None:
    write_distribution(site, "twin-a", _TWIN.format(own="own_a"))
    write_distribution(site, "twin-b", _TWIN.format(own="own_b"))

    manager = load(FORESAY_DISABLE_PLUGINS="twin_b")

    assert manager.proposer_owner("shared_p") == "twin-a 1.0"
    assert record_of(manager, "twin_a").error is None


def test_three_plugins_with_one_name_are_all_named_once(site: Path) -> None:
    for name in ("twin-a", "twin-b", "twin-c"):
        write_distribution(site, name, OFFER_PROPOSER.format(name="shared_p"))

    manager = load()

    for entry_point in ("twin_a", "twin_b", "twin_c"):
        error = record_of(manager, entry_point).error or ""
        assert error.startswith(
            "proposer 'shared_p' is offered by twin-a 1.0 and twin-b 1.0 and twin-c 1.0; "
        )
        assert error.count("is offered by") == 1


def test_twins_with_one_entry_point_name_are_not_told_to_disable_it(site: Path) -> None:
    for name in ("twin-a", "twin-b"):
        write_distribution(site, name, OFFER_PROPOSER.format(name="shared_p"), entry_point="twin")

    manager = load()

    assert record_of(manager, "twin", "twin-a").error == (
        "proposer 'shared_p' is offered by twin-a 1.0 and twin-b 1.0; uninstall all but one of them"
    )


# -- turning plugins off -------------------------------------------------------------------------


def test_a_disabled_plugin_is_listed_but_not_imported(site: Path) -> None:
    write_distribution(site, "loud", "raise AssertionError('imported')")
    write_distribution(site, "quiet", OFFER_PROPOSER.format(name="quiet_p"))

    manager = load(FORESAY_DISABLE_PLUGINS=" loud, quiet,")

    for name in ("loud", "quiet"):
        record = record_of(manager, name)
        assert (record.status, record.error, record.proposers) == ("disabled", None, [])
        assert name not in sys.modules
    with pytest.raises(PluginError, match=r"; disabled by FORESAY_DISABLE_PLUGINS: loud, quiet$"):
        manager.proposer("quiet_p")


def test_disabling_an_unknown_plugin_warns_with_the_nearest_name(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_distribution(site, "lookup-tree", OFFER_PROPOSER.format(name="tree"))

    manager = load(FORESAY_DISABLE_PLUGINS="lookup-tree")

    assert record_of(manager, "lookup_tree").status == "ok"
    (warning,) = caplog.messages
    assert warning.startswith("FORESAY_DISABLE_PLUGINS: no plugin 'lookup-tree'; installed: ")
    assert warning.endswith("; did you mean 'lookup_tree'?")
