"""What may be taken to a worker in another process, and what is refused, before it is started."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from adversaries import Constant
from fake_engine import observer

from foresay import hookimpl
from foresay.core.border import Failure
from foresay.core.config import EngineConfig, SpeculativeConfig
from foresay.core.errors import ConfigError, EngineError, ModelError, PluginError
from foresay.core.plugins import PluginManager
from foresay.core.proposer import Draft, DraftInput, ProposerConfig, ProposerSpec
from foresay.core.remote import make_order


class Here:
    """A proposer that can be found by its name."""

    def __init__(self, config: ProposerConfig) -> None: ...

    def propose(self, batch: DraftInput) -> Draft:
        return Draft([[] for _ in batch.requests])


def local_class() -> type[Any]:
    class Local(Here):
        pass

    return Local


def main_class(name: str) -> type[Any]:
    return type(name, (Here,), {"__module__": "__main__"})


def registering(**offers: list[Any]) -> PluginManager:
    manager = PluginManager.load()
    hooks = {name: hookimpl(lambda found=found: found) for name, found in offers.items()}  # type: ignore[misc]
    manager.register(SimpleNamespace(**hooks), "mine")
    return manager


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": SimpleNamespace()}, "SimpleNamespace is loaded already; give a folder"),
        ({"proposer_type": local_class()}, "not there; define it at the top level of a module"),
        ({"tokenizer": lambda text: text}, "tokenizer cannot be sent"),
        (
            {
                "config": EngineConfig(
                    speculative=SpeculativeConfig(proposer_settings={"key": lambda: None})
                )
            },
            "proposer_settings cannot be sent",
        ),
        (
            {
                "plugins": registering(
                    foresay_register_proposers=[ProposerSpec("here", ProposerConfig, Here)]
                )
            },
            "does not see what was registered in this program: mine",
        ),
    ],
    ids=["model object", "local class", "tokenizer", "settings", "registered proposer"],
)
def test_what_cannot_be_taken_to_another_process_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    given = {"config": EngineConfig(), "plugins": PluginManager(), **arguments}
    with pytest.raises(ConfigError, match=message) as raised:
        make_order(given.pop("config"), given.pop("plugins"), **given)
    assert "worker='inline'" in str(raised.value)


@pytest.mark.parametrize(
    ("main", "is_refused"),
    [
        (SimpleNamespace(__spec__=None), True),  # typed in, or -c
        (SimpleNamespace(__spec__=None, __file__="<stdin>"), True),
        (SimpleNamespace(__spec__=None, __file__=__file__), False),
        (SimpleNamespace(__spec__=SimpleNamespace(name="package.module")), False),
        (SimpleNamespace(__spec__=SimpleNamespace(name="package.__main__")), True),
    ],
    ids=["interactive", "stdin", "script", "module", "package"],
)
def test_a_class_of_the_main_module_needs_one_that_is_imported_again(
    main: Any, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    main.Mine = main_class("Mine")
    monkeypatch.setitem(sys.modules, "__main__", main)
    if is_refused:
        with pytest.raises(ConfigError, match="define it in a module"):
            make_order(EngineConfig(), PluginManager(), proposer_type=main.Mine)
    else:
        make_order(EngineConfig(), PluginManager(), proposer_type=main.Mine)


def test_an_order_names_the_plugins_in_use_and_observers_stay_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manager = PluginManager.load({"FORESAY_DISABLE_PLUGINS": "smollm2"})
    manager.register(observer(), "observing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("foresay"), "level", logging.ERROR)
    made = make_order(EngineConfig(), manager, proposer_type=Constant)
    assert "ngram" in made.entry_points
    assert not {"smollm2", "observing"} & set(made.entry_points)
    assert Path(made.folder) == tmp_path
    assert made.log_level == logging.ERROR
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301


def test_a_failure_keeps_the_kind_that_foresay_knows() -> None:
    class OwnError(ModelError):
        pass

    error = Failure.of(OwnError("m: no")).error()
    assert (type(error), str(error)) == (ModelError, "m: no")
    assert type(Failure.of(PluginError("x")).error()) is PluginError
    assert type(Failure.of(KeyError("x")).error()) is EngineError


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('from foresay import LLM\nLLM("nowhere", worker="process")\n')
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert "EngineError: worker='process' starts a process that imports your script anew" in last
    assert "put what it does under `if __name__ == '__main__':`" in last
    assert done.stderr.count("Traceback") == 2  # the error and its cause: nothing of the worker's
