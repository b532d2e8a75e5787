"""What the plugin manager answers: proposers by name or class, the automatic choice, observers."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from foresay import hookimpl
from foresay.core.errors import ForesayError, PluginError
from foresay.core.plugins import PluginManager
from foresay.core.proposer import Draft, DraftInput, Needs, ProposerConfig, ProposerSpec
from foresay.core.registry import DrafterSpec, ModelAlias


def offering(*specs: Any, hook: str = "foresay_register_proposers") -> SimpleNamespace:
    """A plugin object that offers these."""
    return SimpleNamespace(**{hook: hookimpl(lambda: list(specs))})


def proposer_spec(name: str) -> ProposerSpec:
    return ProposerSpec(name=name, config_type=ProposerConfig, build=lambda config: Drafts(config))


class Drafts:
    """A proposer as a bare class."""

    def __init__(self, config: ProposerConfig) -> None:
        self.config = config

    def propose(self, batch: DraftInput) -> Draft:
        return Draft([[] for _ in batch.requests])


# -- asking for a proposer -----------------------------------------------------------------------


def test_an_unknown_proposer_is_answered_with_what_is_installed_and_the_nearest_name() -> None:
    manager = PluginManager()
    manager.register(offering(proposer_spec("ngram"), proposer_spec("repeat")), name="two")

    with pytest.raises(PluginError) as raised:
        manager.proposer("ngrm")

    assert str(raised.value) == (
        "no proposer 'ngrm'; installed: ngram, repeat; did you mean 'ngram'?"
    )


def test_without_any_proposer_the_answer_says_so() -> None:
    with pytest.raises(PluginError, match=r"^no proposer 'ngram'; installed: none$"):
        PluginManager().proposer("ngram")


def test_an_object_can_be_registered_and_is_refused_loudly() -> None:
    manager = PluginManager()
    spec = proposer_spec("mine")
    record = manager.register(offering(spec), name="tests")

    assert manager.proposer("mine") is spec
    assert manager.proposer_owner("mine") == "tests"
    assert (record.status, record.proposers) == ("ok", ["mine"])
    with pytest.raises(PluginError, match=r"^plugin 'empty': it implements no hook; hooks: "):
        manager.register(SimpleNamespace(), name="empty")
    with pytest.raises(PluginError, match=r"^plugin 'again': proposer 'mine' is offered by tests"):
        manager.register(offering(proposer_spec("mine")), name="again")
    with pytest.raises(PluginError, match=r"^plugin 'tests': a plugin is loaded already as tests"):
        manager.register(offering(proposer_spec("other")), name="tests")


class NoPropose:
    """Has no method `propose`."""


class WithConfig(Drafts):
    """Has settings and needs of its own."""

    class Config(ProposerConfig):
        """One setting."""

        width: int = 3

    needs: ClassVar[Needs] = Needs(max_draft_tokens=4)


class WrongConfig(Drafts):
    """Its `Config` is none."""

    Config = dict


class WrongNeeds(Drafts):
    """Its `needs` is none."""

    needs = (1, 2)


def test_a_class_is_a_proposer_that_is_built_with_its_config() -> None:
    spec = PluginManager().resolve_proposer(Drafts)

    assert spec.name.endswith("test_plugin_lookup:Drafts")
    assert spec.config_type is ProposerConfig
    assert spec.needs(spec.config_type(), None) == Needs()
    config = spec.config_type(num_speculative_tokens=2)
    built = spec.build(config)
    assert isinstance(built, Drafts)
    assert built.config is config


def test_a_class_may_have_settings_and_needs_of_its_own() -> None:
    spec = PluginManager().resolve_proposer(WithConfig)

    assert spec.config_type is WithConfig.Config
    assert spec.config_type().width == 3  # type: ignore[attr-defined]
    assert spec.needs(spec.config_type(), None) == Needs(max_draft_tokens=4)


def test_a_module_and_class_name_find_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "drafting.py").write_text(
        "class Outer:\n    class Repeat:\n        def __init__(self, config): pass\n"
        "        def propose(self, batch): return None\n",
        encoding="utf-8",
    )
    importlib.invalidate_caches()
    manager = PluginManager()

    spec = manager.resolve_proposer("drafting:Outer.Repeat")

    assert spec.name == "drafting:Outer.Repeat"
    assert type(spec.build(ProposerConfig())).__name__ == "Repeat"
    assert manager.proposer_owner(spec.name) == "drafting:Outer.Repeat"


@pytest.mark.parametrize(
    ("proposer", "kind", "message"),
    [
        pytest.param(
            "absent_module:Repeat",
            PluginError,
            "proposer 'absent_module:Repeat': module 'absent_module' cannot be imported "
            "(ModuleNotFoundError: No module named 'absent_module')",
            id="no such module",
        ),
        pytest.param(
            "exits:Repeat",
            PluginError,
            "proposer 'exits:Repeat': module 'exits' cannot be imported (SystemExit: 1)",
            id="a module that exits",
        ),
        pytest.param(
            "mine:Repaet",
            PluginError,
            "proposer 'mine:Repaet': 'mine' has no 'Repaet'; did you mean 'Repeat'?",
            id="no such class",
        ),
        pytest.param(
            "mine:",
            PluginError,
            "proposer 'mine:': expected 'module:Class', e.g. 'my_module:MyProposer'",
            id="no class named",
        ),
        pytest.param(
            "mine:function",
            PluginError,
            "proposer 'mine:function' is <function function at ",
            id="a function",
        ),
        pytest.param(
            "mine:Repeat",
            PluginError,
            "proposer 'mine:Repeat': class Repeat has no method propose(self, batch)",
            id="no propose",
        ),
        pytest.param(
            NoPropose, PluginError, ": class NoPropose has no method propose(", id="class, too"
        ),
        pytest.param(
            Drafts(ProposerConfig()),
            PluginError,
            " (a Drafts), not a class; pass its class",
            id="an instance",
        ),
        pytest.param(
            WrongConfig,
            PluginError,
            "WrongConfig.Config is the class dict; it must be a subclass of "
            "foresay.core.proposer.ProposerConfig",
            id="wrong Config",
        ),
        pytest.param(
            WrongNeeds,
            PluginError,
            "WrongNeeds.needs is (1, 2) (a tuple); it must be a foresay.core.proposer.Needs",
            id="wrong needs",
        ),
    ],
)
def test_what_is_no_proposer_is_refused_with_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    proposer: Any,
    kind: type[ForesayError],
    message: str,
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(
        "class Repeat: pass\ndef function(): pass\n", encoding="utf-8"
    )
    (tmp_path / "exits.py").write_text("raise SystemExit(1)\n", encoding="utf-8")
    importlib.invalidate_caches()

    with pytest.raises(kind) as raised:
        PluginManager().resolve_proposer(proposer)

    assert message in str(raised.value)


# -- the automatic choice ------------------------------------------------------------------------


def drafter(name: str, proposer: str, model: str, length: float) -> DrafterSpec:
    return DrafterSpec(name, proposer, model, lambda: Path("weights"), length)


def test_a_chain_in_the_spelling_of_bench_is_corrected() -> None:
    manager = manager_with_drafters()
    with pytest.raises(PluginError, match=r"a chain is written 'ngram,eagle'$"):
        manager.resolve_proposer("ngram+eagle")


def manager_with_drafters(*drafters: DrafterSpec, proposers: str = "ngram eagle") -> PluginManager:
    manager = PluginManager()
    manager.register(offering(*map(proposer_spec, proposers.split())), name="proposers")
    manager.register(offering(*drafters, hook="foresay_register_drafters"), name="drafters")
    return manager


@pytest.mark.parametrize(
    ("drafters", "proposers", "expected"),
    [
        pytest.param(
            [drafter("weak", "eagle", "small", 2.0), drafter("strong", "eagle", "small", 3.0)],
            "ngram eagle",
            ("eagle", "strong"),
            id="the highest mean acceptance length",
        ),
        pytest.param(
            [drafter("other", "eagle", "large", 3.0)],
            "ngram eagle",
            ("ngram", None),
            id="a drafter for another model",
        ),
        pytest.param(
            [drafter("head", "medusa", "small", 9.0), drafter("weak", "eagle", "small", 1.5)],
            "ngram eagle",
            ("eagle", "weak"),
            id="its proposer is not installed",
        ),
        pytest.param([], "eagle ngram", ("ngram", None), id="no drafter"),
        pytest.param([], "eagle", None, id="nothing suitable"),
        pytest.param(
            [drafter("x", "custom_example", "small", 9.0)],
            "custom_example ngram",
            ("ngram", None),
            id="never the example",
        ),
    ],
)
def test_the_automatic_proposer(
    drafters: list[DrafterSpec], proposers: str, expected: tuple[str, str | None] | None
) -> None:
    choice = manager_with_drafters(*drafters, proposers=proposers).automatic_proposer("small")

    assert (choice and (choice.proposer, choice.drafter)) == expected


def test_the_automatic_choice_says_why() -> None:
    manager = manager_with_drafters(drafter("head", "eagle", "small", 2.5))

    made, none_made = manager.automatic_proposer("small"), manager.automatic_proposer("large")

    assert made is not None
    assert made.reason == (
        "drafter 'head' of drafters was made for 'small' (mean acceptance length 2.50)"
    )
    assert none_made is not None
    assert none_made.reason == "no drafter is registered for 'large'"


def test_a_drafter_for_an_alias_serves_the_same_model_given_as_a_folder(tmp_path: Path) -> None:
    manager = manager_with_drafters(drafter("head", "eagle", "small", 2.5))
    here = tmp_path / "small"
    alias = ModelAlias("small", "a model", resolve=lambda: here, locate=lambda: here)
    manager.register(offering(alias, hook="foresay_register_models"), name="models")

    same = manager.automatic_proposer("./some/../small", tmp_path / "x" / ".." / "small")
    other = manager.automatic_proposer("./large", tmp_path / "large")

    assert same is not None
    assert same.drafter == "head"
    assert other is not None
    assert other.drafter is None


def serving(name: str, serves: Callable[[Path], Any]) -> ProposerSpec:
    return ProposerSpec(name=name, config_type=ProposerConfig, build=Drafts, serves=serves)


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        pytest.param(
            [serving("inside", lambda folder: f"{folder.name} holds it"), proposer_spec("ngram")],
            ("inside", "large holds it"),
            id="its weights are in the checkpoint",
        ),
        pytest.param(
            [serving("inside", lambda _folder: None), proposer_spec("ngram")],
            ("ngram", "no drafter is registered for './large'"),
            id="nothing is in the checkpoint",
        ),
        pytest.param(
            [serving("b", lambda _folder: "second"), serving("a", lambda _folder: "first")],
            ("a", "first"),
            id="the first by name",
        ),
        pytest.param(
            [serving("custom_example", lambda _folder: "yes"), proposer_spec("ngram")],
            ("ngram", "no drafter is registered for './large'"),
            id="never the example",
        ),
        pytest.param([serving("inside", lambda _folder: None)], None, id="nothing at all"),
    ],
)
def test_a_proposer_may_find_its_weights_in_the_checkpoint(
    specs: list[ProposerSpec], expected: tuple[str, str] | None
) -> None:
    manager = PluginManager()
    manager.register(offering(*specs), name="proposers")

    choice = manager.automatic_proposer("./large", Path("models/large"))

    assert (choice and (choice.proposer, choice.reason)) == expected
    assert choice is None or choice.drafter is None


def test_a_registered_drafter_goes_before_what_is_in_the_checkpoint() -> None:
    manager = manager_with_drafters(drafter("head", "eagle", "large", 2.5))
    manager.register(offering(serving("inside", lambda _folder: "yes")), name="inside")

    large, small = (manager.automatic_proposer(name, Path(name)) for name in ("large", "small"))

    assert large is not None
    assert small is not None
    assert (large.proposer, small.proposer) == ("eagle", "inside")


def test_weights_that_cannot_be_used_are_part_of_the_reason() -> None:
    def refuse(_folder: Path) -> str:
        raise PluginError("they are of another kind")

    manager = PluginManager()
    manager.register(offering(serving("inside", refuse), proposer_spec("ngram")), name="both")

    choice = manager.automatic_proposer("large", Path("large"))

    assert choice is not None
    assert choice.reason == (
        "no drafter is registered for 'large'; inside cannot be used: they are of another kind"
    )


@pytest.mark.parametrize(
    ("serves", "fault"),
    [
        (lambda _folder: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda _folder: True, "returned True, not a str or None"),
    ],
    ids=["raises", "no text"],
)
def test_a_proposer_that_fails_to_say_whom_it_serves_is_logged_and_passed_over(
    serves: Callable[[Path], Any], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = PluginManager()
    manager.register(offering(serving("inside", serves), proposer_spec("ngram")), name="both")

    choice = manager.automatic_proposer("large", Path("large"))

    assert choice is not None
    assert choice.proposer == "ngram"
    assert caplog.messages == [f"serves() of proposer 'inside', both, {fault}"]


def test_serves_must_be_a_function() -> None:
    spec = serving("inside", "all")  # type: ignore[arg-type]

    with pytest.raises(PluginError, match=r"'inside': serves is 'all' \(a str\), not a function"):
        PluginManager().register(offering(spec), name="inside")


@pytest.mark.parametrize(
    ("locate", "message"),
    [
        pytest.param(
            lambda: 1 / 0,
            "locate() of model 'lost', models, raised ZeroDivisionError: division by zero",
            id="raises",
        ),
        pytest.param(
            lambda: "a string",
            "locate() of model 'lost', models, returned 'a string', not a Path or None",
            id="no path",
        ),
    ],
)
def test_a_model_that_cannot_be_located_is_not_there_and_the_reason_is_logged(
    locate: Callable[[], Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = PluginManager()
    alias = ModelAlias("lost", "a model", resolve=Path, locate=locate)
    manager.register(offering(alias, hook="foresay_register_models"), name="models")

    assert manager.locate_model("lost") is None
    assert caplog.messages == [message]
    assert manager.locate_model("unknown") is None


# -- observers -----------------------------------------------------------------------------------


def test_observers_see_every_step_and_every_request() -> None:
    seen: list[object] = []
    manager = PluginManager()
    assert not manager.has_observers
    watcher = SimpleNamespace(
        foresay_step_end=hookimpl(lambda stats: seen.append(("step", stats))),
        foresay_request_end=hookimpl(lambda output: seen.append(("request", output))),
    )
    manager.register(watcher, name="watcher")

    manager.step_end("s1")  # type: ignore[arg-type]
    manager.request_end("r1")  # type: ignore[arg-type]
    manager.step_end("s2")  # type: ignore[arg-type]

    assert manager.has_observers
    assert seen == [("step", "s1"), ("request", "r1"), ("step", "s2")]


def test_an_observer_that_raises_is_logged_once_and_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    calls: list[str] = []

    def raising(stats: object) -> None:
        calls.append("raising")
        raise ValueError("no disk")

    manager = PluginManager()
    manager.register(SimpleNamespace(foresay_step_end=hookimpl(raising)), name="a-raising")
    manager.register(
        SimpleNamespace(foresay_step_end=hookimpl(lambda stats: calls.append("steady"))),
        name="b-steady",
    )

    for _ in range(3):
        manager.step_end(None)  # type: ignore[arg-type]

    assert calls == ["raising", "steady", "steady", "steady"]
    assert caplog.messages == [
        "foresay_step_end of plugin a-raising raised ValueError: no disk; it is not called again"
    ]


def test_an_observer_that_is_interrupted_is_not_dropped() -> None:
    def interrupted(output: object) -> None:
        raise KeyboardInterrupt

    manager = PluginManager()
    manager.register(SimpleNamespace(foresay_request_end=hookimpl(interrupted)), name="watcher")

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            manager.request_end(None)  # type: ignore[arg-type]
