"""The suffix proposer by hand, its settings, its state over a session, and in engines."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

import foresay_suffix
from foresay import LLM, SamplingParams
from foresay.core.config import build_settings
from foresay.core.errors import ConfigError
from foresay.core.proposer import DraftInput, DraftRequest
from foresay.core.testing import ProposerConformance, tiny_llama
from foresay_suffix import SuffixConfig
from foresay_suffix.contexts import LENGTHS
from foresay_suffix.proposer import SuffixProposer


class TestConformanceFromTheRequestAlone(ProposerConformance):
    """All rules that foresay has for proposers."""

    proposer_name = "suffix"
    settings: ClassVar = {"max_remembered_tokens": 0}


class TestConformanceWithMemory(ProposerConformance):
    """All rules for those that remember requests, with a memory of some twenty requests."""

    proposer_name = "suffix"
    settings: ClassVar = {"max_remembered_tokens": 300}
    remembers_requests = True


class TestConformanceOfChainsWithMemory(TestConformanceWithMemory):
    """The same, drafting chains."""

    settings: ClassVar = {"max_remembered_tokens": 300, "tree": False}


def proposer(**config: Any) -> SuffixProposer:
    """A proposer of chains."""
    return SuffixProposer(SuffixConfig(tree=False, **config))


def request(
    token_ids: Sequence[int], k: int = 5, req_id: str = "a", num_prompt: int = 1
) -> DraftRequest:
    return DraftRequest(req_id, token_ids, num_new_tokens=1, k=k, num_prompt_tokens=num_prompt)


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def draft(by: SuffixProposer, text: str, k: int = 5, req_id: str = "a", prompt: str = "") -> str:
    """What is drafted after a prompt and the text so far."""
    asked = request(ids(prompt + text), k, req_id, len(prompt))
    return "".join(map(chr, by.propose(DraftInput([asked])).token_ids[0]))


def serve(by: SuffixProposer, req_id: str, prompt: str, output: str) -> None:
    """Let a request come, write its output, and end."""
    draft(by, output[:1], 0, req_id, prompt)
    draft(by, output, 0, req_id, prompt)
    by.release(req_id)


# --- from the request


@pytest.mark.parametrize(
    ("text", "k", "expected"),
    [
        pytest.param("abcdefabcd", 6, "efabcd", id="4 tokens match: 6 may be drafted"),
        pytest.param("abcdefab", 6, "cde", id="2 match: 3 may be drafted"),
        pytest.param("abcda", 6, "b", id="1 matches: 1 may be drafted"),
        pytest.param("abcdefabcd", 2, "ef", id="no more than k"),
        pytest.param("abababab", 8, "abababab", id="runs off the end into its own draft"),
        pytest.param("abcdef", 5, "", id="nothing repeats"),
        pytest.param("a", 5, "", id="one token"),
        pytest.param("abcdabcd", 0, "", id="k is 0"),
    ],
)
def test_drafts_from_the_request_by_hand(text: str, k: int, expected: str) -> None:
    assert draft(proposer(), text, k) == expected


def test_the_most_frequent_continuation_is_followed_not_the_most_recent() -> None:
    assert draft(proposer(), "pxyaqxyarxybsxy", 1) == "a"


def test_of_equally_frequent_continuations_the_most_recent_is_followed() -> None:
    assert draft(proposer(), "pxyaqxybrxy", 1) == "b"


def test_a_longer_match_beats_a_more_frequent_continuation() -> None:
    assert draft(proposer(), "vwxya.xyb.xyb.vwxy", 1) == "a"


@pytest.mark.parametrize(("least", "expected"), [(0.2, "Qc"), (0.3, "Q"), (0.6, "")], ids=str)
def test_a_draft_ends_where_its_tokens_are_not_likely(least: float, expected: str) -> None:
    # xy was followed by Q, R and Q: 2 / (3 + 1/2) = 0.57. Q was followed by a and c, and now three
    # tokens match: 0.57 / (2 + 1/3) = 0.24. Only the last place is left: 0.24 / (1 + 1/4) = 0.196.
    assert draft(proposer(min_probability=least), "pxyQaqxyRbrxyQcsxy") == expected


def test_a_match_shorter_than_min_match_drafts_nothing() -> None:
    assert draft(proposer(min_match=3), "abcdeab") == ""
    assert draft(proposer(min_match=3), "abcdeabc") == "deab"


def test_a_factor_bounds_the_draft_by_the_match() -> None:
    text = "abcdefghijabc"
    lengths = [len(draft(proposer(max_draft_factor=f), text, 16)) for f in (0.3, 1.0, 2.0)]
    assert lengths == [0, 3, 6]


# --- from earlier outputs


def test_a_prompt_that_comes_again_gets_its_whole_output_drafted() -> None:
    by = proposer()
    serve(by, "a", "What is it?", "It is a lighthouse")
    assert draft(by, "I", 16, "b", "What is it?") == "t is a lighthous"


def test_only_outputs_are_remembered() -> None:
    by = proposer()
    serve(by, "a", "lighthouse keeper. ", "Yes")
    assert draft(by, "ligh", 5, "b", ">") == ""


def test_a_request_that_is_still_there_tells_nobody() -> None:
    by = proposer()
    draft(by, "It is a lighthouse", 5, "a", "?")
    assert draft(by, "It is a", 5, "b", "!") == ""
    by.release("a")
    assert draft(by, "It is a ", 5, "b", "!") == "light"


def test_equal_outputs_are_counted_but_kept_once() -> None:
    by = proposer()
    for i in range(3):
        serve(by, f"a{i}", "?", "It is red.")
    held = by.memory.num_tokens
    serve(by, "b", "?", "It is blue")
    assert held == len("?It is red.")
    assert draft(by, "It is ", 3, "c", "!") == "red"


def test_the_end_of_an_output_is_not_lost_when_the_next_pass_does_not_show_it() -> None:
    # A request's last step is shown to nobody: the second time that step is a long one.
    by = proposer()
    serve(by, "a", "?", "It is a lighthouse")
    serve(by, "b", "?", "It is")
    assert draft(by, "I", 17, "c", "?")[:2] == "t "
    assert draft(by, "It is a ", 10, "c", "?") == "lighthouse"
    assert len(by.memory) == 1


def test_an_output_that_goes_on_replaces_its_beginning() -> None:
    by = proposer()
    serve(by, "a", "?", "It is")
    serve(by, "b", "?", "It is a lighthouse")
    assert len(by.memory) == 1
    assert by.memory.num_tokens == len("?It is a lighthouse")
    assert [output.count for output in by.memory._outputs.values()] == [2]
    assert draft(by, "It is a ", 5, "c", "!") == "light"


def test_the_source_that_promises_more_is_followed() -> None:
    by = proposer(max_draft_factor=4.0)
    serve(by, "a", "?", "the cat sat")
    # Memory matches 8 tokens, the request itself 1; then the other way round.
    assert draft(by, "cow. the cat s", 2, "b", "!") == "at"
    assert draft(by, "He sang. Then he s", 2, "c", "!") == "an"


# --- what is forgotten


def test_the_least_recently_used_output_goes_first() -> None:
    by = proposer(max_remembered_tokens=33)
    for name, output in (("a", "aAbBcCdDeE"), ("b", "fFgGhHiIjJ"), ("c", "kKlLmMnNoO")):
        serve(by, name, "?", output)  # 11 tokens each, with the prompt
    assert draft(by, "aAbB", 2, "x", "!") == "cC"  # now it is the most recent one
    serve(by, "d", "?", "pPqQrRsStT")
    found = {text: draft(by, text, 2, text, "!") for text in ("aAbB", "fFgG", "kKlL", "pPqQ")}
    assert found == {"aAbB": "cC", "fFgG": "", "kKlL": "mM", "pPqQ": "rR"}


def test_what_is_dropped_leaves_no_entry_behind() -> None:
    by = proposer(max_remembered_tokens=40)
    for i in range(200):
        output = "".join(random.Random(i).choices("abc", k=1 + i % 30))
        serve(by, str(i), "?>", output)
        assert by.memory.num_tokens <= 40
        assert len(by.memory.contexts.texts) == len(by.memory) <= 40 // 3
    serve(by, "last", "?>", "x" * 38)  # all else must go
    assert (len(by.memory), by.memory.num_tokens) == (1, 40)
    assert draft(by, "ab", 5, "b", "?>") == ""
    assert len(by.memory.contexts) <= 40 * len(LENGTHS)


def test_an_output_longer_than_the_memory_is_kept_from_its_end() -> None:
    by = proposer(max_remembered_tokens=10)
    serve(by, "a", "?", "abcdefghijklmnopqrstuvwxyz")
    assert by.memory.num_tokens == 10
    assert draft(by, "stu", 3, "b", "!") == "vwx"
    assert draft(by, "abc", 3, "b2", "!") == ""


def test_with_no_memory_nothing_is_kept() -> None:
    by = proposer(max_remembered_tokens=0)
    serve(by, "a", "?", "It is a lighthouse")
    assert by.memory.num_tokens == 0
    assert draft(by, "ligh", 5, "b", "!") == ""


# --- preemption and ids


def test_a_preempted_request_is_not_counted_twice_and_finds_nothing_of_itself() -> None:
    by = proposer()
    draft(by, "It is r", 0, "a", "?")
    by.release("a")
    assert len(by.memory) == 1
    draft(by, "It is re", 0, "a", "?")  # it is there again
    assert len(by.memory) == 0
    draft(by, "It is red.", 0, "a", "?")
    by.release("a")
    for name in "bc":
        serve(by, name, "?", "It is blue.")
    # Two said blue; one, released twice, said red.
    assert draft(by, "It is ", 4, "d", "!") == "blue"


def test_a_preempted_request_leaves_what_others_said_alone() -> None:
    by = proposer()
    serve(by, "a", "?", "It is red.")
    draft(by, "It is", 0, "b", "?")
    by.release("b")
    draft(by, "It is", 0, "b", "?")
    assert [output.count for output in by.memory._outputs.values()] == [1]
    by.release("b")
    assert [output.count for output in by.memory._outputs.values()] == [2]


def test_an_id_may_be_used_again_for_another_request() -> None:
    by = proposer()
    serve(by, "a", "?", "It is red.")
    serve(by, "a", "!", "They are blue.")
    assert len(by.memory) == 2
    assert draft(by, "It is ", 3, "a", ">") == "red"


def test_a_request_without_output_is_not_remembered() -> None:
    by = proposer()
    by.propose(DraftInput([DraftRequest("a", ids("What?"), 0, 0, num_prompt_tokens=5)]))
    by.release("a")
    by.release("never seen")
    assert len(by.memory) == 0


def test_requests_that_want_no_drafts_are_remembered_but_not_indexed() -> None:
    by = proposer()
    draft(by, "It is a lighthouse", 0, "a", "?")
    assert len(by._states["a"].contexts) == 0
    by.release("a")
    assert draft(by, "It is a ", 5, "b", "!") == "light"


def test_a_step_reads_only_the_new_tokens_of_a_long_history() -> None:
    read: list[int] = []

    class Watched(list[int]):
        def __getitem__(self, key: Any) -> Any:
            assert isinstance(key, slice)
            read.extend(range(*key.indices(len(self))))
            return super().__getitem__(key)

        def __iter__(self) -> Any:
            raise AssertionError("the whole history was read")

    by = proposer()
    history = Watched(i % 50 for i in range(5000))
    by.propose(DraftInput([request(history, 3)]))
    read.clear()
    history.append(0)
    history.append(1)
    assert by.propose(DraftInput([request(history, 3)])).token_ids == [[2, 3, 4]]
    assert read == [5000, 5001]


# --- in an engine


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "seeded"])
def test_a_second_pass_gives_the_same_texts_in_far_fewer_steps(temperature: float) -> None:
    model = tiny_llama()
    numbers = random.Random(5)
    prompts = [numbers.choices(range(60), k=12) for _ in range(4)]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True)
        for i in range(4)
    ]

    def texts(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    common: dict[str, Any] = {"max_model_len": 64, "block_size": 4, "strict": True}
    with LLM(model, proposer=None, **common) as llm:
        plain = texts(llm)
    with LLM(model, proposer="suffix", num_speculative_tokens=16, **common, adaptive=False) as llm:
        first = texts(llm)
        one = llm.stats
        second = texts(llm)
        both = llm.stats
    assert first == second == plain
    steps = one.num_steps, both.num_steps - one.num_steps
    assert steps[1] * 3 < steps[0]


# --- the plugin's face


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"min_match": 33},
            "suffix: min_match=33: input should be less than or equal to 32",
        ),
        (
            {"max_draft_factor": 0},
            "suffix: max_draft_factor=0: input should be greater than 0",
        ),
        (
            {"max_remembered_tokens": -1},
            "suffix: max_remembered_tokens=-1: input should be greater than or equal to 0",
        ),
        (
            {"drafter": "some/folder"},
            "suffix: drafter='some/folder': suffix drafts from texts that were there before and "
            "loads no drafter",
        ),
    ],
    ids=["min too long", "factor 0", "less than nothing", "a drafter"],
)
def test_wrong_settings_are_refused_in_a_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_settings(SuffixConfig, values, "suffix")
    assert str(caught.value) == message


def test_the_hook_offers_suffix_and_builds_it() -> None:
    (spec,) = foresay_suffix.foresay_register_proposers()
    assert spec.name == "suffix"
    built = spec.build(spec.config_type(min_match=2, tree=False))
    assert built.propose(DraftInput([request([1, 2, 1])])).token_ids == [[]]
    assert built.propose(DraftInput([request([1, 2, 1, 2])])).token_ids == [[1, 2, 1]]


def test_the_plugin_imports_no_torch_and_not_its_proposer() -> None:
    code = (
        "import sys, foresay_suffix; foresay_suffix.foresay_register_proposers(); "
        "print({'torch', 'transformers', 'foresay_suffix.proposer'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
