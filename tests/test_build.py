"""Building the worker: which proposer, with which settings, refused when, and told what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import tiny_models
import torch
from pydantic import Field

from foresay import hookimpl
from foresay.core.config import EngineConfig, SpeculativeConfig
from foresay.core.errors import ConfigError, ForesayError, ModelError, PluginError, ProposerError
from foresay.core.messages import NewRequest, SamplingData, SchedulerOutput
from foresay.core.plugins import PluginManager
from foresay.core.proposer import (
    Draft,
    DraftInput,
    Needs,
    ProposerConfig,
    ProposerSpec,
    TargetView,
)
from foresay.core.registry import DrafterSpec, ModelAlias
from foresay.core.worker.build import build_runner
from foresay.core.worker.model_runner import ModelRunner

CPU = torch.device("cpu")


class Settings(ProposerConfig):
    reach: int = Field(default=3, ge=1, description="Made up.")


class Fake:
    """A proposer that keeps what it is given."""

    built: ClassVar[list[Fake]] = []

    def __init__(self, config: ProposerConfig) -> None:
        self.config = config
        self.views: list[TargetView] = []
        self.built.append(self)

    def load(self, target: TargetView) -> None:
        self.views.append(target)

    def propose(self, batch: DraftInput) -> Draft:
        return Draft([[] for _ in batch.requests])


class Bare(Fake):
    """Given as a class."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.llama()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    return path


@pytest.fixture
def no_weights(folder: Path, tmp_path: Path) -> Path:
    """A model's folder with a config.json only: to load it is an error."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((folder / "config.json").read_text())
    return tmp_path / "bare"


@pytest.fixture(autouse=True)
def none_built() -> None:
    Fake.built.clear()


def spec(
    name: str = "fake",
    needs: Needs | Callable[[Any, Any], Any] | None = None,
    build: Callable[[Any], Any] = Fake,
    config_type: type[ProposerConfig] = Settings,
) -> ProposerSpec:
    found = needs if callable(needs) else lambda config, target: needs or Needs()
    return ProposerSpec(name=name, config_type=config_type, build=build, needs=found)


def plugins(
    *proposers: ProposerSpec,
    drafters: list[DrafterSpec] | None = None,
    models: list[ModelAlias] | None = None,
) -> PluginManager:
    manager = PluginManager()
    hooks = {
        "foresay_register_proposers": list(proposers),
        "foresay_register_drafters": drafters or [],
        "foresay_register_models": models or [],
    }
    plugin = SimpleNamespace(**{h: hookimpl(lambda o=offers: o) for h, offers in hooks.items()})  # type: ignore[misc]
    manager.register(plugin, "foresay-fake")
    return manager


def build(
    manager: PluginManager,
    model: Any,
    *,
    proposer: str | type[Any] | None = "fake",
    speculative: dict[str, Any] | None = None,
    **settings: Any,
) -> ModelRunner:
    """Build a worker for a folder or a model object; a pool of 64 blocks unless told."""
    is_path = isinstance(model, Path)
    is_class = isinstance(proposer, type)
    config = EngineConfig(
        model=str(model) if is_path else "tiny",
        speculative=SpeculativeConfig(
            proposer="given:Class" if is_class else proposer, **(speculative or {})
        ),
        **{"num_blocks": 64, **settings},
    )
    return build_runner(
        config,
        manager,
        model=None if is_path else model,
        proposer_type=proposer if is_class else None,
    )


def error_of(kind: type[ForesayError], *arguments: Any, **settings: Any) -> str:
    with pytest.raises(kind) as error:
        build(*arguments, **settings)
    assert type(error.value) is kind
    return str(error.value)


# -- what a proposer needs -----------------------------------------------------------------------


@pytest.mark.parametrize("layer", [-1, 4])
def test_a_layer_that_the_target_does_not_have_is_refused_before_any_weight_is_loaded(
    layer: int, no_weights: Path
) -> None:
    assert error_of(ModelError, plugins(spec()), no_weights)  # there is nothing to load
    needs = Needs(aux_layers=(0, layer))
    assert error_of(ConfigError, plugins(spec(needs=needs)), no_weights) == (
        f"proposer 'fake' (foresay-fake) needs the residual stream entering layer {layer}, and the "
        "target model has 3: was its drafter made for another model?"
    )
    assert Fake.built == []


def test_needs_are_asked_with_the_proposers_settings_and_the_targets_config(
    no_weights: Path,
) -> None:
    asked: list[tuple[Any, Any]] = []

    def needs(config: Any, target_config: Any) -> Needs:
        asked.append((config, target_config))
        return Needs(aux_layers=(99,))

    error_of(
        ConfigError,
        plugins(spec(needs=needs)),
        no_weights,
        speculative={"proposer_settings": {"reach": 7}},
    )
    [(config, target_config)] = asked
    assert config == Settings(reach=7)
    assert (target_config.model_type, target_config.hidden_size) == ("llama", 48)


def test_needs_that_raise_or_are_none_are_the_plugins_error(no_weights: Path) -> None:
    def raising(config: Any, target_config: Any) -> Needs:
        raise KeyError("layers")

    def refusing(config: Any, target_config: Any) -> Needs:
        raise ConfigError("the drafter was made for another model")

    where = "proposer 'fake' (foresay-fake): needs"
    assert error_of(PluginError, plugins(spec(needs=raising)), no_weights) == (
        f"{where}: KeyError: 'layers'"
    )
    wrong = plugins(spec(needs=lambda config, target_config: {"hidden_state": True}))
    assert error_of(PluginError, wrong, no_weights) == (
        f"{where} returned {{'hidden_state': True}} (a dict), not a Needs"
    )
    assert error_of(ConfigError, plugins(spec(needs=refusing)), no_weights) == (
        "the drafter was made for another model"
    )


def test_a_bare_classs_needs_are_checked_too(no_weights: Path) -> None:
    class Hungry(Bare):
        needs = Needs(aux_layers=(7,))

    words = error_of(ConfigError, plugins(), no_weights, proposer=Hungry)
    assert "(given as a class) needs the residual stream entering layer 7" in words


# -- how many tokens it drafts -------------------------------------------------------------------


class Modest(ProposerConfig):
    num_speculative_tokens: int | None = 2


class Bold(ProposerConfig):
    num_speculative_tokens: int | None = 9


@pytest.mark.parametrize(
    ("config_type", "asked", "max_draft_tokens", "expected"),
    [
        pytest.param(ProposerConfig, None, None, 5, id="nobody says anything"),
        pytest.param(Modest, None, None, 2, id="the proposer's own best"),
        pytest.param(Bold, None, None, 5, id="the proposer's own best, at most 5"),
        pytest.param(ProposerConfig, None, 3, 3, id="what the proposer can at most"),
        pytest.param(Modest, None, 3, 2, id="its best below its most"),
        pytest.param(ProposerConfig, None, 8, 5, id="its most above 5"),
        pytest.param(ProposerConfig, 12, None, 12, id="asked for"),
        pytest.param(Modest, 1, None, 1, id="asked for less than its best"),
        pytest.param(Bold, 7, 8, 7, id="asked for within its most"),
        pytest.param(ProposerConfig, 8, 8, 8, id="asked for its most"),
    ],
)
def test_the_number_of_draft_tokens(
    model: Any,
    config_type: type[ProposerConfig],
    asked: int | None,
    max_draft_tokens: int | None,
    expected: int,
) -> None:
    manager = plugins(spec(needs=Needs(max_draft_tokens=max_draft_tokens), config_type=config_type))
    runner = build(manager, model, speculative={"num_speculative_tokens": asked})
    assert runner.num_speculative_tokens == expected
    assert runner.summary.endswith(f"; proposer: fake, {expected} tokens a step at most")


@pytest.mark.parametrize(
    ("max_num_seqs", "draft_slots", "expected"),
    [(8, 0, 16), (128, 0, 15), (128, 1, 14), (300, 0, 5)],
)
def test_a_tree_has_16_nodes_or_what_the_rows_of_a_step_allow(
    model: Any, max_num_seqs: int, draft_slots: int, expected: int
) -> None:
    manager = plugins(spec(needs=Needs(tree=True, draft_slots=draft_slots)))
    runner = build(manager, model, max_num_seqs=max_num_seqs)
    assert runner.num_speculative_tokens == expected
    assert runner.tree_members == ("fake",)


def test_it_may_be_asked_for_among_the_proposers_settings(model: Any) -> None:
    settings = {"proposer_settings": {"num_speculative_tokens": 8}}
    runner = build(plugins(spec()), model, speculative=settings)
    assert runner.num_speculative_tokens == 8
    [fake] = Fake.built
    assert fake.config.num_speculative_tokens == 8
    both = {**settings, "num_speculative_tokens": 8}
    assert build(plugins(spec()), model, speculative=both).num_speculative_tokens == 8


def test_more_than_the_proposer_can_is_refused_before_any_weight_is_loaded(
    no_weights: Path,
) -> None:
    manager = plugins(spec(needs=Needs(max_draft_tokens=3)))
    for speculative in (
        {"num_speculative_tokens": 4},
        {"proposer_settings": {"num_speculative_tokens": 4}},
    ):
        assert error_of(ConfigError, manager, no_weights, speculative=speculative) == (
            "num_speculative_tokens=4: proposer 'fake' drafts at most 3 tokens a step"
        )


def test_a_proposers_longest_context_is_known_to_the_engine(model: Any) -> None:
    assert build(plugins(spec(needs=Needs(max_context=77))), model).max_context == 77
    assert build(plugins(spec()), model).max_context is None


# -- its settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speculative", "words"),
    [
        pytest.param(
            {"num_speculative_tokens": 4, "proposer_settings": {"num_speculative_tokens": 5}},
            "proposer 'fake': num_speculative_tokens is given twice, as 4 and, in its settings, "
            "as 5",
            id="k given twice",
        ),
        pytest.param(
            {"drafter": "a", "proposer_settings": {"drafter": "b"}},
            "proposer 'fake': drafter is given twice, as 'a' and, in its settings, as 'b'",
            id="drafter given twice",
        ),
        pytest.param(
            {"proposer_settings": {"raech": 5}},
            "proposer 'fake': no setting 'raech'; did you mean 'reach'? (known: "
            "num_speculative_tokens, drafter, reach)",
            id="unknown",
        ),
        pytest.param(
            {"proposer_settings": {"reach": 0}},
            "proposer 'fake': reach=0: input should be greater than or equal to 1",
            id="wrong",
        ),
    ],
)
def test_wrong_settings_are_refused(
    no_weights: Path, speculative: dict[str, Any], words: str
) -> None:
    assert error_of(ConfigError, plugins(spec()), no_weights, speculative=speculative) == words


@pytest.mark.parametrize(
    ("speculative", "listed"),
    [
        ({"num_speculative_tokens": 3}, "num_speculative_tokens"),
        ({"proposer_settings": {"reach": 3}}, "proposer_settings"),
        ({"drafter": "x", "num_speculative_tokens": 3}, "num_speculative_tokens, drafter"),
        ({"draft_tokens_by_batch": {1: 2}}, "draft_tokens_by_batch"),
    ],
)
@pytest.mark.parametrize("proposer", [None, "auto"])
def test_settings_without_a_proposer_are_refused(
    no_weights: Path, proposer: str | None, speculative: dict[str, Any], listed: str
) -> None:
    words = error_of(ConfigError, plugins(), no_weights, proposer=proposer, speculative=speculative)
    assert words == (f"{listed} would have no effect: there is no proposer (proposer={proposer!r})")


# -- its drafter ---------------------------------------------------------------------------------


def drafter(
    name: str = "head", proposer: str = "fake", path: Callable[[], Any] = Path
) -> DrafterSpec:
    return DrafterSpec(name, proposer, "small", path, 2.5)


@pytest.mark.parametrize("setting", ["the engine's", "the proposer's", "both"])
def test_a_registered_drafter_is_given_as_its_folder(
    model: Any, tmp_path: Path, setting: str
) -> None:
    speculative: dict[str, Any] = {}
    if setting != "the proposer's":
        speculative["drafter"] = "head"
    if setting != "the engine's":
        speculative["proposer_settings"] = {"drafter": "head"}
    manager = plugins(spec(), drafters=[drafter(path=lambda: tmp_path)])
    build(manager, model, speculative=speculative)
    [fake] = Fake.built
    assert fake.config.drafter == str(tmp_path)


@pytest.mark.parametrize("made_for", ["small", "other"])
def test_a_proposer_by_its_name_takes_the_best_drafter_made_for_the_model(
    folder: Path, tmp_path: Path, made_for: str
) -> None:
    for name in ("worse", "better", "others"):
        (tmp_path / name).mkdir()
    offered = [
        DrafterSpec("worse", "fake", made_for, lambda: tmp_path / "worse", 1.5),
        DrafterSpec("better", "fake", made_for, lambda: tmp_path / "better", 2.5),
        DrafterSpec("others", "another", made_for, lambda: tmp_path / "others", 3.5),
    ]
    alias = ModelAlias("small", "a test", lambda: folder, lambda: folder)
    manager = plugins(spec(), spec("another"), drafters=offered, models=[alias])
    found = str(tmp_path / "better") if made_for == "small" else None
    runner = build(manager, folder, proposer="fake")
    assert Fake.built[-1].config.drafter == found
    assert ("proposer: fake (drafter 'better')" in runner.summary) == (found is not None)
    build(manager, folder, proposer="fake,another")
    assert Fake.built[-2].config.drafter == found
    build(manager, folder, proposer="fake", speculative={"drafter": str(tmp_path / "worse")})
    assert Fake.built[-1].config.drafter == str(tmp_path / "worse")
    own = {"drafter": "others"} if made_for == "small" else {"drafter": str(tmp_path)}
    settings = {"another": own}
    build(manager, folder, proposer="another,fake", speculative={"proposer_settings": settings})
    assert Fake.built[-1].config.drafter == found


def test_a_folder_is_a_drafter(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "head").mkdir()
    for given in (str(tmp_path / "head"), "~/head"):
        build(plugins(spec()), model, speculative={"drafter": given})
        assert Fake.built[-1].config.drafter == str(tmp_path / "head")


def test_a_drafter_that_is_nowhere_is_an_error(no_weights: Path) -> None:
    manager = plugins(spec(), drafters=[drafter("small-head"), drafter("big-head")])
    assert error_of(ConfigError, manager, no_weights, speculative={"drafter": "smal-head"}) == (
        "no drafter 'smal-head': no such folder, and none of that name is registered (registered: "
        "big-head, small-head); did you mean 'small-head'?"
    )
    assert error_of(ConfigError, plugins(spec()), no_weights, speculative={"drafter": "./x"}) == (
        "no drafter './x': no such folder, and none of that name is registered (registered: none)"
    )


def test_another_proposers_drafter_is_refused(no_weights: Path) -> None:
    manager = plugins(spec(), drafters=[drafter(proposer="other")])
    assert error_of(ConfigError, manager, no_weights, speculative={"drafter": "head"}) == (
        "drafter 'head' is for the proposer 'other', not 'fake'"
    )


def test_a_drafter_that_cannot_be_had_is_the_plugins_error(no_weights: Path) -> None:
    def path() -> Path:
        raise OSError("no\nspace left")

    manager = plugins(spec(), drafters=[drafter(path=path)])
    assert error_of(PluginError, manager, no_weights, speculative={"drafter": "head"}) == (
        "drafter 'head': path: OSError: no space left"
    )


# -- the automatic choice ------------------------------------------------------------------------


def test_the_automatic_choice_is_a_drafter_made_for_the_model(model: Any, tmp_path: Path) -> None:
    made = DrafterSpec("head", "fake", "tiny", lambda: tmp_path, 2.5)
    runner = build(plugins(spec(), drafters=[made]), model, proposer="auto")
    assert runner.proposer_name == "fake"
    assert runner.summary.endswith(
        "; proposer: fake (auto: drafter 'head' of foresay-fake was made for 'tiny' "
        "(mean acceptance length 2.50)), 5 tokens a step at most"
    )
    [fake] = Fake.built
    assert fake.config.drafter == str(tmp_path)


def test_the_automatic_choice_looks_up_first(model: Any, tmp_path: Path) -> None:
    made = DrafterSpec("head", "fake", "tiny", lambda: tmp_path, 2.5)
    manager = plugins(spec(), spec("ngram"), drafters=[made])
    runner = build(manager, model, proposer="auto")
    assert runner.proposer_name == "ngram,fake"
    assert runner.summary.endswith(
        "; proposer: ngram (auto), 5 tokens a step at most; else fake (auto: drafter 'head' of "
        "foresay-fake was made for 'tiny' (mean acceptance length 2.50)), 5 tokens a step at most"
    )
    assert [built.config.drafter for built in Fake.built] == [None, str(tmp_path)]
    given = build(manager, model, proposer="auto", speculative={"drafter": str(tmp_path)})
    assert given.proposer_name == "fake"


def test_a_drafter_for_an_alias_is_chosen_for_the_aliass_folder_too(
    folder: Path, tmp_path: Path
) -> None:
    alias = ModelAlias("small", "a test", lambda: folder, lambda: folder)
    manager = plugins(
        spec(), spec("ngram"), drafters=[drafter(path=lambda: tmp_path)], models=[alias]
    )
    assert build(manager, folder, proposer="auto").proposer_name == "ngram,fake"
    assert (
        build(manager, tmp_path.parent / folder.name, proposer="auto").proposer_name == "ngram,fake"
    )


def test_without_a_drafter_the_automatic_choice_is_ngram_if_it_is_there(model: Any) -> None:
    runner = build(plugins(spec(), spec("ngram")), model, proposer="auto")
    assert runner.proposer_name == "ngram"
    assert runner.summary.endswith(
        "; proposer: ngram (auto: no drafter is registered for 'tiny'), 5 tokens a step at most"
    )
    nobody = build(plugins(spec()), model, proposer="auto")
    assert (nobody.proposers, nobody.proposer_name, nobody.num_speculative_tokens) == (
        None,
        None,
        0,
    )
    assert nobody.summary.endswith("; proposer: none (none is installed)")


# -- building it ---------------------------------------------------------------------------------


def test_load_is_called_once_and_shows_the_target(folder: Path) -> None:
    build(
        plugins(spec()), folder, max_model_len=60, speculative={"proposer_settings": {"reach": 4}}
    )
    [fake] = Fake.built
    assert fake.config == Settings(reach=4)
    [view] = fake.views
    assert view.config.model_type == "llama"
    assert (view.vocab_size, view.hidden_size, view.num_layers) == (160, 48, 3)
    assert (view.dtype, view.device, view.max_model_len) == (torch.float32, CPU, 60)
    assert (view.checkpoint, view.tokenizer) == (folder, None)


def test_a_class_may_be_given(model: Any) -> None:
    runner = build(plugins(), model, proposer=Bare)
    [bare] = Fake.built
    assert type(bare) is Bare
    assert bare.config == ProposerConfig()
    assert bare.views[0].checkpoint is None
    assert runner.proposer_name == f"{__name__}:Bare"


def test_plain_decoding_has_no_proposer(model: Any) -> None:
    runner = build(plugins(spec()), model, proposer=None)
    assert (runner.proposers, runner.proposer_name, runner.num_speculative_tokens) == (
        None,
        None,
        0,
    )
    assert runner.summary.endswith("; proposer: none")
    assert Fake.built == []


@pytest.mark.parametrize(
    ("proposer", "speculative", "said"),
    [
        ("none", {}, "none"),
        ("fake", {"num_speculative_tokens": 0}, "none (num_speculative_tokens is 0)"),
    ],
    ids=["none", "k-0"],
)
def test_other_words_for_plain_decoding(
    model: Any, proposer: str, speculative: dict[str, Any], said: str
) -> None:
    runner = build(plugins(spec()), model, proposer=proposer, speculative=speculative)
    assert (runner.proposers, runner.num_speculative_tokens) == (None, 0)
    assert runner.summary.endswith(f"; proposer: {said}")
    assert Fake.built == []


def test_a_pool_that_no_memory_holds_is_an_error(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_blocks=1000000000000: a KV cache of .* GiB"):
        build(plugins(spec()), model, num_blocks=10**12)


class Unloadable(Fake):
    def load(self, target: TargetView) -> None:
        raise ValueError("a drafter for\n32000 tokens")


class Speechless:
    """Has no `propose`; `load` would show that it was called."""

    def proposal(self) -> None: ...

    def load(self, target: TargetView) -> None:
        raise AssertionError

    def __repr__(self) -> str:
        return "Speechless()"


def raising(error: Exception) -> Callable[[Any], Any]:
    def build(config: Any) -> Any:
        raise error

    return build


@pytest.mark.parametrize(
    ("builder", "kind", "words"),
    [
        pytest.param(
            raising(OSError("no weights")), PluginError,
            "proposer 'fake' (foresay-fake) cannot be built: OSError: no weights", id="build",
        ),
        pytest.param(
            raising(ConfigError("reach=3 is too far")), ConfigError,
            "reach=3 is too far", id="build, in its own words",
        ),
        pytest.param(
            Unloadable, PluginError,
            "proposer 'fake' (foresay-fake) cannot be built: ValueError: a drafter for 32000 "
            "tokens", id="load",
        ),
        pytest.param(
            lambda config: Speechless(), PluginError,
            "proposer 'fake' (foresay-fake) built Speechless() (a Speechless), which has no method "
            "propose(self, batch); did you mean 'proposal'?", id="no propose",
        ),
        pytest.param(
            lambda config: None, PluginError,
            "proposer 'fake' (foresay-fake) built None, which has no method propose(self, batch)",
            id="nothing",
        ),
    ],
)  # fmt: skip
def test_a_proposer_that_cannot_be_built_is_an_error(
    model: Any, builder: Callable[[Any], Any], kind: type[ForesayError], words: str
) -> None:
    assert error_of(kind, plugins(spec(build=builder)), model) == words


@pytest.mark.parametrize("strict", [False, True])
def test_strict_mode_reaches_the_proposer(model: Any, strict: bool) -> None:
    class Failing(Fake):
        def propose(self, batch: DraftInput) -> Draft:
            raise RuntimeError("no")

    runner = build(plugins(spec(build=Failing)), model, strict=strict)
    sampling = SamplingData(0.0, 0, 1.0, 0.0, 0, 0, ())
    runner.execute(
        SchedulerOutput(0, {"r": 3}, {}, {"r": 1}, {"r": 2},
                        [NewRequest("r", [5, 6, 7], 3, 0, [0], sampling)])
    )  # fmt: skip
    if strict:
        with pytest.raises(ProposerError, match="RuntimeError: no"):
            runner.draft([])
    else:
        drafts = runner.draft([])
        assert drafts is not None
        assert (drafts.draft_token_ids, drafts.faults) == ({}, {"raised": 1})


# -- chains ------------------------------------------------------------------------------------


def test_a_chain_has_each_members_settings_and_the_longest_draft(model: Any) -> None:
    runner = build(
        plugins(spec(), spec("other", config_type=Modest)),
        model,
        proposer="other, fake",
        speculative={"proposer_settings": {"fake": {"reach": 7, "num_speculative_tokens": 4}}},
    )
    assert (runner.proposer_name, runner.num_speculative_tokens) == ("other,fake", 4)
    assert [proposer.config for proposer in Fake.built] == [
        Modest(),
        Settings(reach=7, num_speculative_tokens=4),
    ]
    assert runner.summary.endswith(
        "; proposer: other, 2 tokens a step at most; else fake, 4 tokens a step at most"
    )


def test_k_for_a_chain_is_each_members(model: Any, no_weights: Path) -> None:
    modest = spec("modest", needs=Needs(max_draft_tokens=3))
    speculative = {"num_speculative_tokens": 2}
    runner = build(plugins(spec(), modest), model, proposer="fake,modest", speculative=speculative)
    assert [member.num_speculative_tokens for member in runner.proposers.members] == [2, 2]  # type: ignore[union-attr]
    assert build(plugins(spec(), modest), model, proposer="modest,fake").num_speculative_tokens == 5

    words = error_of(
        ConfigError,
        plugins(spec(), modest),
        no_weights,
        proposer="fake,modest",
        speculative={"num_speculative_tokens": 4},
    )
    assert words == "num_speculative_tokens=4: proposer 'modest' drafts at most 3 tokens a step"


def test_a_request_is_too_long_for_a_chain_when_it_is_for_all_of_it(model: Any) -> None:
    short, longer = (spec(n, needs=Needs(max_context=c)) for n, c in (("short", 20), ("long", 50)))
    manager = plugins(spec(), short, longer)
    assert build(manager, model, proposer="short,long").max_context == 50
    assert build(manager, model, proposer="short,fake").max_context is None


@pytest.mark.parametrize(
    ("proposer", "speculative", "words"),
    [
        ("fake,", {}, "proposer 'fake,': a chain is names with commas between, 'a,b'"),
        ("auto,fake", {}, "proposer 'auto,fake': 'auto' cannot be part of a chain"),
        ("fake,none", {}, "proposer 'fake,none': 'none' cannot be part of a chain"),
        ("fake,fake", {}, "proposer 'fake,fake': 'fake' is in the chain twice"),
        (
            "fake,other",
            {"proposer_settings": {"reach": 3}},
            "proposer_settings['reach']: the settings of a chain are by proposer, e.g. "
            "{'fake': {'reach': ...}} (the chain: fake, other)",
        ),
        (
            "fake,other",
            {"proposer_settings": {"other": 3}},
            "proposer_settings['other']=3: expected the settings of 'other' by name",
        ),
        (
            "fake,other",
            {"drafter": "folder"},
            "drafter='folder': say which proposer of the chain it is for, e.g. 'fake=folder'",
        ),
        (
            "fake,other",
            {"drafter": {"othr": "folder"}},
            "drafter: 'othr' is not in the chain fake, other; did you mean 'other'?",
        ),
    ],
)
def test_a_chain_that_makes_no_sense_is_refused(
    no_weights: Path, proposer: str, speculative: dict[str, Any], words: str
) -> None:
    manager = plugins(spec(), spec("other"))
    found = error_of(ConfigError, manager, no_weights, proposer=proposer, speculative=speculative)
    assert found == words


def test_a_chains_unknown_member_is_named(no_weights: Path) -> None:
    words = error_of(PluginError, plugins(spec()), no_weights, proposer="fake,fuke")
    assert words == "no proposer 'fuke'; installed: fake; did you mean 'fake'?"


def test_members_of_a_chain_have_drafters_of_their_own(model: Any, tmp_path: Path) -> None:
    manager = plugins(spec(), spec("other"))
    folder = str(tmp_path)
    for given in (f"other={folder}", {"other": folder}):
        Fake.built.clear()
        build(manager, model, proposer="fake,other", speculative={"drafter": given})
        assert [proposer.config.drafter for proposer in Fake.built] == [None, folder]


# -- the rest of the worker ----------------------------------------------------------------------


def test_the_summary_says_what_was_loaded_and_chosen(folder: Path) -> None:
    runner = build(plugins(), folder, proposer=None, block_size=8, num_blocks=100, max_model_len=50)
    # 100 blocks x 8 tokens x 3 layers x (2 heads x 12 x 2) numbers x 4 bytes = 460800: 0.44 MiB
    assert runner.summary == (
        f"foresay: {folder} (llama, float32 on cpu, foresay's own decoder); KV cache 100 blocks of "
        "8 (0 MiB), max_model_len 50; rows invariant: yes; proposer: none"
    )
    assert (runner.num_blocks, runner.cache.block_size, runner.max_model_len) == (100, 8, 50)
    assert (runner.vocab_size, runner.eos_token_ids) == (160, {2})
    assert runner.row_invariant


def test_row_invariance_can_be_given_up(model: Any) -> None:
    runner = build(plugins(), model, proposer=None, row_invariant=False)
    assert not runner.row_invariant
    assert "; rows invariant: no; " in runner.summary


def test_the_pool_is_what_the_requests_need_if_memory_allows(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foresay.core.worker import build as build_module

    settings = {"proposer": None, "num_blocks": None, "max_num_seqs": 4, "max_model_len": 100}
    assert build(plugins(), model, **settings).num_blocks == 28  # 4 requests of 7 blocks
    # A block has 16 x 3 x 48 x 4 bytes; a quarter of the free memory is the pool's.
    monkeypatch.setattr(build_module, "free_memory", lambda device: 4 * 10 * 9216 + 100)
    assert build(plugins(), model, **settings).num_blocks == 10
    assert error_of(ConfigError, plugins(), model, **{**settings, "max_model_len": 200}) == (
        "max_model_len=200 needs 13 KV blocks of 16 tokens, and there is room for 10: lower "
        "max_model_len, or raise num_blocks if memory allows"
    )


@pytest.mark.parametrize("max_model_len", [2, 10, 40])
def test_a_short_limit_can_be_asked_for(model: Any, max_model_len: int) -> None:
    runner = build(plugins(spec()), model, max_model_len=max_model_len, num_blocks=None)
    assert runner.max_model_len == max_model_len
    assert runner.row_invariant
