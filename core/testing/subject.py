"""The proposer under test: what its author says of it, and how the rules build and run it.

It knows how to make a fresh proposer, show it a target, and run an engine with and without it. The
rules themselves are in the modules beside it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn
from weakref import WeakKeyDictionary

import pytest

from foresay import LLM, SamplingParams
from foresay.core.config import build_settings
from foresay.core.errors import ForesayError, one_line
from foresay.core.messages import SamplingData
from foresay.core.plugins import PluginManager
from foresay.core.proposer import (
    Draft,
    DraftInput,
    Needs,
    Proposer,
    ProposerConfig,
    ProposerSpec,
    TargetView,
)
from foresay.core.stats import RunStats
from foresay.core.testing.driver import SEEDED, Driver, Watched, check, fail
from foresay.core.testing.models import MAX_MODEL_LEN, TINY_MODELS

MOST_DRAFT_TOKENS = 5  # the rules ask for no longer drafts

Prompts = Sequence[Sequence[int]]
Texts = list[list[int]]
Drafts = Mapping[tuple[tuple[int, ...], int], list[list[int]]]  # by history and k, distinct ones


@dataclass(frozen=True, slots=True)
class Run:
    """What an engine did: each request's output, and every draft by history and k."""

    texts: Texts
    drafts: Drafts
    chunk_drafts: list[list[int]]
    stats: RunStats


class Subject:
    """What a test class says of its proposer; see `ProposerConformance`."""

    proposer_name: ClassVar[str | type[Any]] = ""
    settings: ClassVar[Mapping[str, Any]] = {}
    drafter: ClassVar[str | None] = None
    learns_from_steps: ClassVar[bool] = False
    remembers_requests: ClassVar[bool] = False
    num_output_tokens: ClassVar[int] = 16

    def models(self) -> Mapping[str, Callable[[], Any]]:
        """Return how to build the target models to test with, by name; each is built once.

        The first one is also what the proposer is shown in tests without an engine.
        """
        return TINY_MODELS

    def plugins(self) -> PluginManager:
        """Return where `proposer_name` and `drafter` are looked up: what is installed."""
        return _installed_plugins()

    # -- the proposer alone ----------------------------------------------------------------------

    @functools.cached_property
    def spec(self) -> ProposerSpec:
        """The proposer's spec, found by its name."""
        if not self.proposer_name:
            fail(
                f"{type(self).__name__} names no proposer: set `proposer_name` to the name that "
                "your plugin registers, to 'module:Class', or to the class"
            )
        try:
            return self.plugins().resolve_proposer(self.proposer_name)
        except ForesayError as error:
            fail(f"{error}. Is the plugin installed (`pip install -e .`)?", error)

    @functools.cached_property
    def config(self) -> ProposerConfig:
        """The proposer's settings, `settings` and `drafter` among them."""
        values = dict(self.settings)
        if self.drafter is not None:
            registered = self.plugins().drafter(self.drafter)
            values["drafter"] = self.drafter if registered is None else str(registered.path())
        try:
            return build_settings(self.spec.config_type, values, f"proposer {self.spec.name!r}")
        except ForesayError as error:
            fail(f"{error}; correct `settings` or `drafter` of {type(self).__name__}", error)

    @functools.cached_property
    def target(self) -> TargetView:
        """The first model as the proposer is shown it: one test's own copy."""
        return _copy(self._target)

    @property
    def _target(self) -> TargetView:
        view: TargetView = self._kept("target", self._catch_target)
        return view

    def _catch_target(self) -> TargetView:
        """Start an engine, and catch its target on the way to the proposer."""
        caught: list[TargetView] = []

        class Shown:
            def load(self, target: TargetView) -> None:
                caught.append(target)

            def propose(self, batch: DraftInput) -> Draft:
                return Draft([[] for _ in batch.requests])

        try:
            with self.engine(self.first_model, lambda _config: Shown()):
                return _copy(caught[0])
        except ForesayError as error:
            fail(f"no engine can be built with the proposer: {error}", error)

    @functools.cached_property
    def needs(self) -> Needs:
        """What the proposer declares to need of the first model."""
        try:
            config = self.model(self.first_model).config
            needs: object = self.spec.needs(self.config, config)
        except Exception as error:  # noqa: BLE001  # whatever a plugin raises
            fail(f"needs(config, target_config) raised {one_line(error)}", error)
        if not isinstance(needs, Needs):
            fail(
                f"needs(config, target_config) returned {needs!r}; it must return a Needs, e.g. "
                "`Needs(max_draft_tokens=3)`"
            )
        return needs

    def fresh(self) -> Proposer:
        """Build a new proposer."""
        try:
            return self.spec.build(self.config)
        except Exception as error:  # noqa: BLE001  # whatever a plugin raises
            fail(f"build(config) raised {one_line(error)} for config {self.config!r}", error)

    def driver(self, *, same_ids: bool = False, sampling: SamplingData = SEEDED) -> Driver:
        """Return a new proposer, loaded, with no requests yet."""
        return Driver(self.fresh(), self.target, self.needs, same_ids=same_ids, sampling=sampling)

    @property
    def most(self) -> int:
        """The largest k to ask for."""
        limit = self.needs.max_draft_tokens or MOST_DRAFT_TOKENS
        return min(MOST_DRAFT_TOKENS, limit, self.longest - 2)

    @property
    def longest(self) -> int:
        """The most tokens of a history and its draft together."""
        limits = (self._target.max_model_len, self.needs.max_context)
        return min(limit for limit in limits if limit is not None)

    def text(self, seed: int, length: int = 24) -> list[int]:
        """Return a history that repeats itself, so that there is something to draft from."""
        numbers = random.Random(seed)
        vocab_size = self._target.vocab_size
        tokens = numbers.sample(range(vocab_size), min(6, vocab_size))
        phrases = [numbers.choices(tokens, k=numbers.randint(2, 5)) for _ in range(3)]
        text: list[int] = []
        while len(text) < length:
            text += numbers.choice(phrases)
        return text[: max(2, min(length, self.longest - self.most))]

    # -- the proposer in an engine ---------------------------------------------------------------

    @property
    def first_model(self) -> str:
        """The name of the model that tests take which need only one."""
        return next(iter(self.models()))

    def model(self, name: str) -> Any:
        """Return a target model."""
        return self._kept(f"model {name}", self.models()[name])

    def _kept(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what `make` made for this class's first test that asked: each has its instance."""
        kept = _kept_by_class.setdefault(type(self), {})
        if key not in kept:
            kept[key] = make()
        return kept[key]

    def engine(self, model: str, build: Callable[[Any], Any] | None, **settings: Any) -> LLM:
        """Return an engine on a model; `build` makes its proposer, None: plain decoding."""
        proposer: dict[str, Any] = {"proposer": None}
        plugins = self.plugins()
        if build is not None:
            plugins = _Substitute(plugins, self.spec, build)
            proposer = {
                "proposer": self.proposer_name,
                "proposer_settings": dict(self.settings),
                "drafter": self.drafter,
            }
        defaults = {"block_size": 4, "max_num_seqs": 8, "max_model_len": MAX_MODEL_LEN}
        defaults["adaptive"] = False  # it is to draft in every step
        with contextlib.redirect_stderr(io.StringIO()):  # the line that says what was loaded
            return LLM(
                self.model(model),
                plugins=plugins,
                strict=True,
                **proposer,
                **{**defaults, **settings},
            )

    def run(
        self,
        model: str,
        prompts: Prompts,
        params: Sequence[SamplingParams],
        *,
        rounds: int = 1,
        one_by_one: bool = False,
        **settings: Any,
    ) -> Run:
        """Run the prompts, together or one by one, `rounds` times in one engine with the proposer.

        An error of the engine, which is strict, fails the test.
        """
        batches = [(prompts, params)]
        if one_by_one:
            batches = [([prompt], [one]) for prompt, one in zip(prompts, params, strict=True)]
        watched: list[Watched] = []

        def build(config: Any) -> Watched:
            watched.append(Watched(self.spec.build(config)))
            return watched[-1]

        texts: Texts = []
        try:
            with self.engine(model, build, **settings) as llm:
                for batch in batches * rounds:
                    texts += _texts(llm, *batch)
                stats = llm.stats
        except Exception as error:  # noqa: BLE001  # whatever the proposer has done to it
            fail(
                f"the engine stopped ({model}): {one_line(error)}. It is strict here; a user's "
                "would go on without this step's drafts, and be slower",
                error,
            )
        check(not stats.faults, f"the engine counted faults: {dict(stats.faults)}")
        return Run(texts, watched[0].drafts, watched[0].chunk_drafts, stats)

    def plain(
        self,
        model: str,
        prompts: Prompts,
        params: Sequence[SamplingParams],
        **settings: Any,
    ) -> Texts:
        """Return what plain decoding makes of the prompts; computed once for all proposers."""
        known = _plain_texts.setdefault(self.model(model), {})
        key = repr((prompts, params, settings))
        if key not in known:
            with self.engine(model, None, **settings) as llm:
                known[key] = _texts(llm, prompts, params)
        return known[key]


_kept_by_class: WeakKeyDictionary[type, dict[str, Any]] = WeakKeyDictionary()
_plain_texts: WeakKeyDictionary[Any, dict[str, Texts]] = WeakKeyDictionary()


def not_applicable(reason: str) -> NoReturn:
    """Leave out a rule that does not concern this proposer."""
    pytest.skip(reason)


def _copy(target: TargetView) -> TargetView:
    """Return a target with a config and weights of its own, for a proposer that changes them."""
    embeddings = None if target.embeddings is None else target.embeddings.clone()
    return replace(target, config=copy.deepcopy(target.config), embeddings=embeddings)


@functools.cache
def _installed_plugins() -> PluginManager:
    return PluginManager.load()


def _texts(llm: LLM, prompts: Prompts, params: Sequence[SamplingParams]) -> Texts:
    outputs = llm.generate([list(prompt) for prompt in prompts], list(params))
    for output in outputs:
        reason = output.outputs[0].finish_reason
        check(
            reason in ("stop", "length"),
            f"a request ended with {reason!r}: {output.outputs[0].stop_reason}",
        )
    return [output.outputs[0].token_ids for output in outputs]


class _Substitute(PluginManager):
    """The same plugins, but the proposer is built by somebody else, under the same name."""

    def __init__(
        self, plugins: PluginManager, spec: ProposerSpec, build: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        self.__dict__.update(plugins.__dict__)  # its finds and observers are shared
        self._substitute = replace(spec, build=build)

    def resolve_proposer(self, proposer: str | type[Any]) -> ProposerSpec:
        """Return the substitute for its original."""
        original = super().resolve_proposer(proposer)
        return self._substitute if original.name == self._substitute.name else original
