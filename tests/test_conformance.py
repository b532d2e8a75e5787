"""The conformance suite finds each mistake by the rules that it breaks, and blames nobody else.

Each wrong proposer of `wrong_proposers` says which rules must catch it. Run as a script, this
prints the table: `python tests/test_conformance.py`.
"""

from __future__ import annotations

import array
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import wrong_proposers
from wrong_proposers import RIGHT, WRONG, Case, Sound

import foresay_ngram
from foresay.core.proposer import DraftInput, Needs
from foresay.core.testing import ProposerConformance, tiny_gpt2, tiny_llama
from foresay.core.testing.memory import Reachable
from foresay.core.worker import attention_rules, build

RULES = [
    name.removeprefix("test_")
    for base in reversed(ProposerConformance.__mro__)
    for name in vars(base)
    if name.startswith("test_")
]


@pytest.fixture(autouse=True, scope="module")
def _probe_the_machine_once() -> Iterator[None]:
    """Some 500 engines are built here, and each would ask the machine's kernels the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            attention_rules, "_safe_key_lens", functools.cache(attention_rules._safe_key_lens)
        )
        patch.setattr(build, "rows_are_invariant", lambda target, max_model_len: True)
        yield


def suite_of(proposer: Any, **settings: Any) -> type[ProposerConformance]:
    """The suite as the proposer's author would write it, on one model and with shorter texts."""
    small = {"models": lambda self: {"llama": tiny_llama}, "num_output_tokens": 8}
    return type("TestIt", (ProposerConformance,), {"proposer_name": proposer, **small, **settings})


def failures(case: Case) -> dict[str, str]:
    """Run every rule on a proposer; return what the broken ones say."""
    suite = suite_of(case.proposer, **case.suite)
    found = {}
    for rule in RULES:
        try:
            getattr(suite(), f"test_{rule}")()
        except pytest.skip.Exception:
            continue
        except AssertionError as error:
            found[rule] = str(error)
        finally:
            torch.set_default_dtype(torch.float32)  # one of them changes it
    return found


def named(case: Case) -> str:
    return case.proposer.__name__


@pytest.mark.parametrize("case", RIGHT, ids=named)
def test_no_rule_blames_a_right_proposer(case: Case) -> None:
    assert failures(case) == {}


@pytest.mark.parametrize("case", WRONG, ids=named)
def test_a_wrong_proposer_is_caught_by_the_rules_it_breaks_and_no_others(case: Case) -> None:
    found = failures(case)
    assert sorted(found) == sorted(case.caught_by), found


def test_a_proposer_that_learns_from_its_steps_has_to_say_so() -> None:
    with pytest.raises(AssertionError, match="a request missed some steps"):
        suite_of(wrong_proposers.Cautious)().test_steps_may_be_missed()


def test_every_rule_catches_somebody_and_says_what_it_is() -> None:
    assert len(RULES) == len(set(RULES)) >= 30
    assert set().union(*(case.caught_by for case in WRONG)) == set(RULES)
    assert all(getattr(ProposerConformance, f"test_{rule}").__doc__ for rule in RULES)


# -- what it says to an author --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rule", "words"),
    [
        ("NoDraft", "something_is_drafted", ["must return a Draft", "return Draft(["]),
        ("SkipsRows", "there_is_one_list_per_request", ["1 lists for 2 requests", "an empty one"]),
        ("PadsWithMinusOne", "draft_ids_are_tokens_of_the_target", ["-1", "no padding ids"]),
        ("OneTooMany", "k_is_honoured", ["it drafted 1 tokens where k=0", "`request.k`"]),
        ("KeyedByRow", "rows_may_change_their_order", ["a, b, c", "`request.req_id`"]),
        ("NoRelease", "released_requests_leave_nothing_behind", ["bytes", "release(self, req_id)"]),
        (
            "ForgetsOnlyWhatItKnows",
            "any_request_may_be_released",
            ["KeyError", "never seen", ".pop(req_id, None)"],
        ),
        ("KeepsTheView", "the_batch_is_not_kept", ["a request's token_ids", "dict > History"]),
        ("KeepsTheBatch", "the_batch_is_not_kept", ["holds the batch", "copy what you need"]),
        ("AppendsItsDraft", "k_is_honoured", ["propose() raised TypeError", "(k="]),
        ("StateInTheClass", "two_proposers_share_nothing", ["class body", "`__init__`"]),
        ("RewritesTheConfig", "the_target_is_only_looked_at", ["copy.deepcopy(target.config)"]),
        ("ScalesTheEmbeddings", "greedy_texts_are_plain_decodings", ["plain decoding gives"]),
        ("OneTooMany", "greedy_texts_are_plain_decodings", ["more drafts than", "strict"]),
        ("SaysNothing", "every_setting_is_described", ["window", "description="]),
        ("ImportsTorch", "importing_the_plugin_imports_no_torch", ["tiny_models imports torch"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "words",
)
def test_a_failure_says_what_is_wrong_and_what_to_do(
    name: str, rule: str, words: list[str]
) -> None:
    (case,) = (case for case in WRONG if named(case) == name)
    with pytest.raises(AssertionError) as caught:
        getattr(suite_of(case.proposer, **case.suite)(), f"test_{rule}")()
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("proposer", "settings", "words"),
    [
        ("", {}, "TestIt names no proposer: set `proposer_name`"),
        ("ngramm", {}, "did you mean 'ngram'?. Is the plugin installed"),
        ("ngram", {"settings": {"prompt_lookup_mix": 1}}, "correct `settings`"),
        ("ngram", {"drafter": "weights"}, "loads no drafter"),
    ],
    ids=["no name", "an unknown name", "an unknown setting", "a drafter it does not take"],
)
def test_a_suite_that_is_set_up_wrongly_says_so(
    proposer: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        suite_of(proposer, **settings)().test_the_spec_is_sound()
    assert words in str(caught.value)


def test_settings_reach_the_proposer_alone_and_in_an_engine() -> None:
    suite = suite_of("ngram", settings={"prompt_lookup_min": 3, "prompt_lookup_max": 4})()
    assert suite.config == foresay_ngram.NgramConfig(prompt_lookup_min=3, prompt_lookup_max=4)
    seen = []
    with suite.engine("llama", lambda config: seen.append(config) or suite.fresh()):
        assert seen == [suite.config]


def test_needs_that_nobody_can_meet_are_reported_as_the_engine_words_them() -> None:
    class Greedy(Sound):
        needs = Needs(draft_slots=10**6)

    with pytest.raises(AssertionError, match="no engine can be built with the proposer: "):
        suite_of(Greedy)().test_something_is_drafted()


# -- what the suite stands on ---------------------------------------------------------------------


@pytest.mark.parametrize("model", [tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_on_the_tiny_models_drafts_are_accepted_and_rejected(model: Any, kind: str) -> None:
    suite = suite_of(Sound, models=lambda self: {"it": model}, num_output_tokens=16)()
    prompts = suite.prompts()
    run = suite.run("it", prompts, getattr(suite, kind)(len(prompts)))
    assert run.stats.num_accepted_tokens >= 5
    assert run.stats.num_draft_tokens - run.stats.num_accepted_tokens >= 5


def test_plain_texts_are_compared_with_not_those_of_the_proposer() -> None:
    suite = suite_of(Sound)()
    prompts, params = suite.prompts(), suite.greedy(4)
    plain = suite.plain("llama", prompts, params, max_model_len=96)
    with suite.engine("llama", None) as llm:
        outputs = llm.generate([list(prompt) for prompt in prompts], params)
        assert [output.outputs[0].token_ids for output in outputs] == plain
        assert llm.stats.num_draft_tokens == 0


def test_the_module_of_a_plugin_is_found_by_its_proposers_name() -> None:
    assert suite_of("ngram")().plugin_module() == "foresay_ngram"
    assert suite_of(Sound)().plugin_module() is None


class Holder:
    """What a proposer might be."""

    def __init__(self, held: object) -> None:
        self.held = held


def _closure(item: object) -> Callable[[], object]:
    return lambda: item


@pytest.mark.parametrize(
    "hold",
    [
        lambda item: item,
        lambda item: {"a": [(item,)]},
        _closure,
        lambda item: Holder(item).__getattribute__,
        lambda item: type("Local", (), {"table": [item]})(),
        lambda item: iter([item]),
    ],
    ids=["attribute", "containers", "closure", "bound method", "class attribute", "iterator"],
)
def test_what_a_proposer_holds_is_reached_however_it_is_held(hold: Callable[[Any], Any]) -> None:
    class Item:
        pass

    item = Item()
    assert Reachable(Holder(hold(item))).first_of([object(), item]) is item
    assert Reachable(Holder(None)).first_of([item]) is None


def test_other_packages_are_not_entered() -> None:
    reachable = Reachable(Holder([torch, pytest.skip, DraftInput, sys.modules[__name__]]))
    assert reachable.first_of([vars(torch), vars(pytest), vars(sys)]) is None
    assert reachable.first_of([RULES]) is RULES


@pytest.mark.parametrize(
    ("make", "num_bytes"),
    [
        (lambda: bytearray(100_000), 100_000),
        (lambda: array.array("q", range(10_000)), 80_000),
        (lambda: torch.zeros(10_000), 40_000),
        (lambda: [torch.zeros(10_000)[:10]] * 3, 40_000),
    ],
    ids=["bytes", "array", "tensor", "views of one tensor"],
)
def test_sizes_count_what_arrays_and_tensors_hold_once(
    make: Callable[[], object], num_bytes: int
) -> None:
    empty = Reachable(Holder(None)).footprint().num_bytes
    full = Reachable(Holder(make())).footprint().num_bytes
    assert num_bytes <= full - empty < num_bytes + 3000


def table() -> str:
    """The wrong proposers, and the rules that caught each, as found now."""
    lines = ["| wrong proposer | its mistake | caught by |", "|---|---|---|"]
    for case in WRONG:
        caught = set(failures(case))
        wide = {"every rule that drafts": wrong_proposers.DRAFTING}
        wide["every rule with an engine"] = wrong_proposers.ENGINE
        words = []
        for name, rules in wide.items():
            if rules <= caught:
                words.append(f"*{name}*")
                caught -= rules
        words += [f"`{rule}`" for rule in RULES if rule in caught]
        lines.append(f"| {named(case)} | {case.proposer.__doc__} | {', '.join(words)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
