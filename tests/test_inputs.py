"""What a caller gives: prompts, conversations, parameters, settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import ALPHABET, BOS, EOS, VOCAB_SIZE, CharTokenizer, fake_llm, ids, params

from foresay import SamplingParams
from foresay.core.errors import ConfigError, RequestError
from foresay.core.inputs import engine_config
from foresay.core.llm import LLM

# -- what goes in --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("hi", [[BOS, *ids("hi")]]),
        (["hi", "yo"], [[BOS, *ids("hi")], [BOS, *ids("yo")]]),
        ([7, 8, 9], [[7, 8, 9]]),
        ((7, 8), [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
        (["hi", [7, 8]], [[BOS, *ids("hi")], [7, 8]]),
        (SimpleNamespace(tolist=lambda: [7, 8]), [[7, 8]]),
        ([SimpleNamespace(tolist=lambda: [7, 8]), "a"], [[7, 8], [BOS, *ids("a")]]),
        ([torch.tensor([7, 8]), torch.tensor([9])], [[7, 8], [9]]),
        ([torch.tensor([9])], [[9]]),
        (torch.tensor([[7, 8], [9, 10]]), [[7, 8], [9, 10]]),
        ([], []),
    ],
    ids=[
        *("text", "texts", "token-ids", "tuple", "lists", "mixed", "array", "arrays"),
        *("tensors", "tensor-of-one", "matrix", "none"),
    ],
)
def test_a_prompt_is_text_or_token_ids(prompts: Any, expected: list[list[int]]) -> None:
    outputs = fake_llm().generate(prompts, params(1))
    assert [output.prompt_token_ids for output in outputs] == expected


@pytest.mark.parametrize(
    ("prompts", "values", "message"),
    [
        ([[7], []], {}, r"prompt 1 is empty"),
        ([[7], [8] * 200], {}, r"prompt 1 has 200 tokens; with max_model_len=200 at most 199"),
        ([[7], [8, VOCAB_SIZE]], {}, r"prompt 1: token id 300 at index 1 is not in the vocabulary"),
        ([[7], [-1]], {}, r"prompt 1: token id -1 at index 0"),
        (["a", "b\udcff"], {}, r"prompt 1 is no valid text: character 1 is"),
        (["a", 3.5], {}, r"prompt 1=3.5: expected a text or a list of token ids"),
        ({"a": 1}, {}, r"prompts=\{'a': 1\}: expected"),
        (["a"], {"stop_token_ids": [VOCAB_SIZE]}, r"stop_token_ids: token id 300 is not in"),
        (["a"], {"logit_bias": {VOCAB_SIZE: 1.0}}, r"logit_bias: token id 300 is not in"),
        (["a"], {"logit_bias": {-1: 1.0}}, r"logit_bias: token id -1 is not in"),
        (["a"], {"allowed_token_ids": [7, 300]}, r"allowed_token_ids: token id 300 is not in"),
        (["a"], {"bad_words": ["ok", "\u4e2d"]}, r"bad_words: in '\u4e2d': token id 20013 is not"),
        (["a"], {"bad_words": ["ok", ""]}, r"bad_words: '' has no tokens: there is nothing to ban"),
        (["a"], {"bad_words": ["b\udcff"]}, r"bad_words: 'b\\udcff' is no valid text"),
        (["a"], {"stop": ["b", "c\udcff"]}, r"stop: 'c\\udcff' is no valid text"),
        (["a"], {"logprobs": VOCAB_SIZE + 1}, r"logprobs=301: the vocabulary has 300 tokens"),
    ],
    ids=[
        "empty",
        "too-long",
        "id-too-large",
        "negative-id",
        "surrogate",
        "number",
        "dict",
        "stop-id",
        "bias-id",
        "negative-bias-id",
        "allowed-id",
        "bad-word-id",
        "empty-bad-word",
        "bad-word-surrogate",
        "stop-surrogate",
        "logprobs",
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_started(
    prompts: Any, values: dict[str, Any], message: str
) -> None:
    llm = fake_llm()
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params(**values))
    assert llm.stats.num_requests == 0
    assert llm.runner.log == []
    assert llm.generate("x", params())[0].outputs[0].text == "abcdefgh"


@pytest.mark.parametrize(
    ("prompts", "values", "message"),
    [
        (["a"], {}, "prompt 0 is text, and this LLM has no tokenizer"),
        ([7], {"stop": "x"}, "stop strings need a tokenizer"),
        ([7], {"bad_words": "x"}, "bad_words='x': words need a tokenizer"),
    ],
    ids=["text", "stop-string", "bad-words"],
)
def test_text_needs_a_tokenizer(prompts: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        fake_llm(has_tokenizer=False).generate(prompts, params(**values))


def test_each_prompt_may_have_its_own_params() -> None:
    llm = fake_llm()
    outputs = llm.generate(["x", "y"], [params(2), params(stop="e")])
    assert [output.outputs[0].text for output in outputs] == ["ab", "abcd"]
    with pytest.raises(RequestError, match="2 SamplingParams for 1 prompts"):
        llm.generate("x", [params(), params()])
    with pytest.raises(RequestError, match=r"params=\{'max_tokens': 3\}: expected SamplingParams"):
        llm.generate("x", [{"max_tokens": 3}])  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", [3, "greedy", {"max_tokens": 1}, [{"max_tokens": 1}]], ids=repr)
def test_params_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match=r"params=.*: expected SamplingParams"):
        fake_llm().generate("x", wrong)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_token": 3}, r"no setting 'max_token'; did you mean 'max_tokens'\?"),
        ({"top_p": 0}, r"top_p=0: input should be greater than 0"),
        ({"n": 0}, r"n=0: input should be greater than or equal to 1"),
        ({"allowed_token_ids": []}, r"allowed_token_ids=\[\]: .* at least 1 item"),
        ({"logit_bias": {3: float("nan")}}, r"logit_bias: nan for token id 3: expected a number"),
        ({"repetition_penalty": 0}, r"repetition_penalty=0: input should be greater than 0"),
        ({"frequency_penalty": 2.1}, r"frequency_penalty=2.1: input should be less than or equal"),
        ({"min_tokens": 17}, r"min_tokens=17 must not exceed max_tokens=16"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_sampling_params_are_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        SamplingParams(**values)
    assert "\n" not in str(error.value)


def test_params_default_to_sampling_params() -> None:
    (output,) = fake_llm(ALPHABET).generate("x")
    assert len(output.outputs[0].token_ids) == SamplingParams().max_tokens


def test_chat_goes_through_the_template_and_adds_no_second_bos() -> None:
    llm = fake_llm()
    conversation = [{"role": "user", "content": "hi"}]
    rendered = [BOS, *ids("user:hi;assistant:")]
    (output,) = llm.chat(conversation, params(3))
    assert output.prompt_token_ids == rendered
    assert output.outputs[0].text == "abc"
    assert llm.chat_prompt(conversation) == rendered
    outputs = llm.chat([conversation, conversation * 2], [params(1), params(2)])
    assert [output.outputs[0].text for output in outputs] == ["a", "ab"]
    assert outputs[1].prompt_token_ids == [BOS, *ids("user:hi;user:hi;assistant:")]
    assert llm.chat([]) == []


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "assistant", "content": "hi"}], "conversation 0: the chat template refuses it"),
        ("hi", "messages='hi': expected a list of messages"),
        ({"role": "user"}, "expected a list of messages"),
        ([[]], r"conversation 0=\[\]: expected a non-empty list"),
        ([[{"role": "user", "content": "hi"}], "hi"], "conversation 1='hi': expected"),
        (["hi"], "conversation 0='hi': expected a non-empty list"),
    ],
    ids=["template", "text", "one-message", "empty", "mixed", "list-of-text"],
)
def test_a_wrong_conversation_is_refused(messages: Any, message: str) -> None:
    llm = fake_llm()
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, params())
    assert llm.stats.num_requests == 0


def test_chat_needs_a_tokenizer_with_a_template() -> None:
    tokenizer = CharTokenizer()
    tokenizer.chat_template = None
    conversation = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="tokenizer has none: use generate"):
        fake_llm(tokenizer=tokenizer).chat(conversation)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        fake_llm(has_tokenizer=False).chat(conversation)


# -- seeds and what the worker gets --------------------------------------------------------------


def test_unseeded_requests_get_distinct_seeds_that_the_engine_seed_determines() -> None:
    def seeds(engine_seed: int) -> list[int]:
        llm = fake_llm(seed=engine_seed)
        llm.generate(["a", "b", "c"], params(1))
        llm.generate("a", params(1))
        return [llm.runner.sampling[req_id].seed for req_id in sorted(llm.runner.sampling)]

    assert seeds(5) == seeds(5)
    drawn = seeds(5) + seeds(6)
    assert len(set(drawn)) == 8
    assert all(0 <= seed < 2**64 for seed in drawn)
    assert max(drawn) >= 2**56  # all 64 bits are used; fails by chance once in 2**64


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(7, 7), (2**64 + 7, 7), (-1, 2**64 - 1)],
    ids=["small", "large", "negative"],
)
def test_an_explicit_seed_is_taken_modulo_two_to_the_64(seed: int, expected: int) -> None:
    llm = fake_llm()
    (output,) = llm.generate("a", params(1, seed=seed))
    assert llm.runner.sampling[output.request_id].seed == expected


def test_the_worker_gets_resolved_sampling_data() -> None:
    llm = fake_llm()
    given = params(5, temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, min_tokens=2,
                   stop_token_ids=[9, 3])  # fmt: skip
    ignoring = params(5, top_k=VOCAB_SIZE + 1, ignore_eos=True)
    first, second, third = llm.generate(["a", "b", "c"], [given, ignoring, params(5, top_k=40)])
    sampling = llm.runner.sampling[first.request_id]
    assert (sampling.temperature, sampling.top_k) == (0.5, 0)
    assert (sampling.top_p, sampling.min_p, sampling.min_tokens) == (0.9, 0.1, 2)
    assert sampling.stop_token_ids == (EOS, 3, 9)
    assert llm.runner.sampling[second.request_id].stop_token_ids == ()
    assert llm.runner.sampling[second.request_id].top_k == 0
    assert llm.runner.sampling[third.request_id].top_k == 40


def test_the_worker_gets_the_parameters_that_change_logits() -> None:
    llm = fake_llm()
    given = params(5, logit_bias={9: 1.5, 4: -float("inf")}, allowed_token_ids=[120, 99, 99, 0],
                   bad_words=["no"], repetition_penalty=1.2, presence_penalty=0.5,
                   frequency_penalty=-0.25, logprobs=3)  # fmt: skip
    first, second = llm.generate(["a", "b"], [given, params(5)])
    sampling = llm.runner.sampling[first.request_id]
    assert sampling.logit_bias == ((9, 1.5), (4, -float("inf")))
    assert sampling.allowed_token_ids == (0, 99, 120)
    assert sampling.bad_words_token_ids == (tuple(ids("no")), tuple(ids(" no")))
    assert sampling.repetition_penalty == 1.2
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)
    assert sampling.logprobs == 3
    plain = llm.runner.sampling[second.request_id]
    assert (plain.logit_bias, plain.allowed_token_ids, plain.bad_words_token_ids) == ((), None, ())
    assert plain.repetition_penalty == 1.0
    assert (plain.presence_penalty, plain.frequency_penalty, plain.logprobs) == (0.0, 0.0, None)


def test_logprobs_may_be_asked_of_the_whole_vocabulary_and_of_no_other_token() -> None:
    llm = fake_llm()
    outputs = llm.generate(["a", "b"], [params(1, logprobs=VOCAB_SIZE), params(1, logprobs=0)])
    asked = [llm.runner.sampling[output.request_id].logprobs for output in outputs]
    assert asked == [VOCAB_SIZE, 0]


WORD_TOKENS = {"cat": [5], " cat": [6], "dog": [7, 8], " dog": [9], "emu": [4], " emu": [4],
               "\n": [3]}  # fmt: skip


class WordTokenizer(CharTokenizer):
    """Like byte-pair encodings: after a space a word is another token, or other tokens."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [BOS] * add_special_tokens + WORD_TOKENS.get(text, [])}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["cat"], [(5,), (6,)]),
        ([" cat"], [(5,), (6,)]),
        ("cat", [(5,), (6,)]),
        (["dog"], [(7, 8), (9,)]),
        (["emu"], [(4,)]),
        (["dog", "cat", " dog", "emu"], [(7, 8), (9,), (5,), (6,), (4,)]),
        (["\n"], [(3,)]),
        ([], []),
        (None, []),
    ],
    ids=["two-tokens", "with-a-space", "one-text", "other-length", "same", "repeated",
         "white-space", "empty", "none"],
)  # fmt: skip
def test_a_bad_word_is_banned_as_it_begins_a_text_and_after_a_space(
    words: Any, expected: list[tuple[int, ...]]
) -> None:
    llm = fake_llm(tokenizer=WordTokenizer())
    (output,) = llm.generate([[7]], params(1, bad_words=words))
    assert llm.runner.sampling[output.request_id].bad_words_token_ids == tuple(expected)


def test_bad_words_are_those_of_each_request() -> None:
    llm = fake_llm(tokenizer=WordTokenizer())
    given = [params(1, bad_words=words) for words in (["cat"], [], ["emu"], ["cat"], ["cat"])]
    outputs = llm.generate([[7]] * 5, given)
    found = [llm.runner.sampling[output.request_id].bad_words_token_ids for output in outputs]
    assert found == [((5,), (6,)), (), ((4,),), ((5,), (6,)), ((5,), (6,))]
    with pytest.raises(RequestError, match="'eel' has no tokens"):
        llm.generate([[7]], params(1, bad_words=["eel"]))
    with pytest.raises(RequestError, match="'eel' has no tokens"):  # not remembered as good
        llm.generate([[7]], params(1, bad_words=["eel"]))


@pytest.mark.parametrize(
    ("verification", "unseeded", "seeded"),
    [
        ("auto", "block", "coupled"),
        ("coupled", "coupled", "coupled"),
        ("rejection", "rejection", "rejection"),
        ("block", "block", "block"),
    ],
)
def test_a_seed_chooses_the_rule_unless_the_engine_has_one(
    verification: str, unseeded: str, seeded: str
) -> None:
    llm = fake_llm(verification=verification)
    outputs = llm.generate(["a", "b"], [params(1), params(1, seed=0)])
    rules = [llm.runner.sampling[output.request_id].verification for output in outputs]
    assert rules == [unseeded, seeded]


# -- settings, and the end -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_sequences": 3}, r"'max_num_sequences'; did you mean 'max_num_seqs'\?"),
        ({"tokeniser": None}, r"no setting 'tokeniser'; did you mean 'tokenizer'\?"),
        ({"num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        ({"speculative": {}}, "no setting 'speculative'"),
        ({"block_size": 0}, "block_size=0: input should be greater than or equal to 1"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1: input should be greater"),
        ({"verification": "typical"}, "verification='typical': input should be 'auto', 'coupled'"),
        ({"worker": "thread"}, "worker='thread': input should be 'inline' or 'process'"),
        ({"dtype": "int4"}, "dtype='int4'"),
        ({"modell": "x"}, r"no setting 'modell'; did you mean 'model'\?"),
        ({"propser": "x"}, r"no setting 'propser'; did you mean 'proposer'\?"),
        ({"drafter": 5}, "drafter=5: expected a folder or a registered name"),
        ({"plugins": 5}, "plugins=5: expected a PluginManager"),
        ({"tokenizer": 5}, "tokenizer=5: expected a transformers tokenizer"),
    ],
    ids=["typo", "tokenizer", "speculative-typo", "nested", "block-size", "k", "rule", "worker",
         "dtype", "model-typo", "proposer-typo", "drafter", "plugins", "no-tokenizer"],
)  # fmt: skip
def test_a_wrong_setting_is_a_clear_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("some-model", None, **settings)


@pytest.mark.parametrize("proposer", [3, ["ngram"], SimpleNamespace(propose=None)], ids=str)
def test_a_proposer_is_no_instance(proposer: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected a name, a chain .* a class \(not an inst"):
        engine_config("some-model", proposer, {})


def test_settings_are_flat_and_objects_go_by_their_names() -> None:
    class Drafting:
        pass

    model = SimpleNamespace(config=object(), name_or_path="")
    settings = {"num_speculative_tokens": 3, "proposer_settings": {"a": 1}, "seed": 4}
    config = engine_config(model, Drafting, {**settings, "worker": "inline"})
    assert config.model == "SimpleNamespace"
    assert config.speculative.proposer == f"{__name__}:{Drafting.__qualname__}"
    assert config.speculative.num_speculative_tokens == 3
    assert config.speculative.proposer_settings == {"a": 1}
    assert config.seed == 4
    with pytest.raises(ConfigError, match=r"model=3: expected an alias, a folder"):
        engine_config(3, None, {})
    with pytest.raises(ConfigError, match=r"proposer=3: expected a name, a chain"):
        engine_config("m", 3, {})  # type: ignore[arg-type]
