"""`LLM.hidden_states` against a plain forward of transformers, and against what proposers see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from fake_engine import fake_llm
from remote_llm import worker_pids
from tracker import Tracker

from foresay import LLM, SamplingParams
from foresay.core.errors import EngineError, PromptTooLongError, RequestError
from foresay.core.worker.decoder import FastDecoder

LAYERS = [2, -1, 0, 3, 2]  # of three: in the middle, the last of all, the first, before the norm
TEXTS = [
    np.random.default_rng(seed).integers(3, 150, size).tolist()
    for seed, size in enumerate((5, 30, 1, 9, 7))
]


def expected(model: Any, text: Sequence[int]) -> torch.Tensor:
    """The states of `LAYERS`, [num_tokens, 5, hidden_size]."""
    entering: list[torch.Tensor] = []
    decoder = model.get_decoder()
    norm = getattr(decoder, "norm", None) or decoder.ln_f
    handle = norm.register_forward_pre_hook(lambda _module, inputs: entering.append(inputs[0][0]))
    with torch.inference_mode():
        out = model(torch.tensor([list(text)]), output_hidden_states=True)
    handle.remove()
    by_layer = {layer: out.hidden_states[layer][0] for layer in (0, 2, -1)} | {3: entering[0]}
    return torch.stack([by_layer[layer] for layer in LAYERS], dim=1)


def plain(model: Any, **settings: Any) -> LLM:
    return LLM(model=model, proposer=None, **settings)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny_models.llama,
    "llama, tied": lambda: tiny_models.llama(tie_word_embeddings=True),
    "qwen2, sliding windows": tiny_models.qwen2_sliding,
    "gpt2, tied": tiny_models.gpt2,
    "gpt2, untied": lambda: tiny_models.gpt2(tie_word_embeddings=False),
    "gemma2": tiny_models.gemma2,
}


@pytest.mark.parametrize("name", MODELS)
def test_states_are_those_of_a_plain_forward(name: str) -> None:
    reference = MODELS[name]()
    with plain(MODELS[name]()) as llm:
        several = llm.hidden_states(TEXTS, LAYERS)
        one = llm.hidden_states(TEXTS[1], LAYERS)
    assert isinstance(several, list)
    for text, states in zip(TEXTS, several, strict=True):
        assert states.shape == (len(text), 5, 48)
        torch.testing.assert_close(states, expected(reference, text), rtol=1e-4, atol=1e-4)
    assert isinstance(one, torch.Tensor)
    torch.testing.assert_close(one, several[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1, 3, -1])
def test_a_layer_may_be_asked_for_alone(layer: int) -> None:
    for build in (tiny_models.llama, tiny_models.gpt2):
        with plain(build()) as llm:
            all_of_them = llm.hidden_states(TEXTS[0], [0, 1, 2, 3, -1])
            alone = llm.hidden_states(TEXTS[0], [layer])
        assert torch.equal(alone[:, 0], all_of_them[:, layer])  # type: ignore[call-overload]


def test_texts_in_one_pass_and_alone_have_the_same_bits() -> None:
    with plain(tiny_models.llama()) as llm:
        together = llm.hidden_states(TEXTS, LAYERS)
        for text, states in zip(TEXTS, together, strict=True):
            assert torch.equal(states, llm.hidden_states(text, LAYERS))  # type: ignore[arg-type]


def test_a_pass_has_so_many_tokens_or_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    forward = FastDecoder.forward

    def watched(self: FastDecoder, input_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.append(len(input_ids))
        return forward(self, input_ids, *others)

    reference = tiny_models.llama()
    with plain(tiny_models.llama(), max_num_batched_tokens=16, max_num_seqs=4) as llm:
        monkeypatch.setattr(FastDecoder, "forward", watched)
        found = llm.hidden_states(TEXTS, LAYERS)
    assert sizes == [1 + 5 + 7, 9, 30]  # the shortest first; 13 and 9 are more than 16
    for text, states in zip(TEXTS, found, strict=True):
        torch.testing.assert_close(states, expected(reference, text), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", [tiny_models.llama, tiny_models.gpt2], ids=["llama", "gpt2"])
def test_a_text_may_fill_the_model_to_its_limit(build: Callable[[], Any]) -> None:
    text = [3 + i % 100 for i in range(64)]
    with plain(build(), max_model_len=64) as llm:
        states = llm.hidden_states(text, LAYERS)
        with pytest.raises(PromptTooLongError, match=r"has 65 tokens.* at most 64 fit the model"):
            llm.hidden_states([*text, 3], LAYERS)
    assert isinstance(states, torch.Tensor)
    torch.testing.assert_close(states, expected(build(), text), rtol=1e-4, atol=1e-4)


def test_states_are_in_the_models_dtype() -> None:
    model = tiny_models.llama().to(torch.bfloat16)
    with plain(model) as llm:
        states = llm.hidden_states(TEXTS[1], LAYERS)
    assert isinstance(states, torch.Tensor)
    assert states.dtype == torch.bfloat16
    wanted = expected(tiny_models.llama().to(torch.bfloat16).float(), TEXTS[1])
    assert float((states.float() - wanted).norm() / wanted.norm()) < 0.05


def test_each_texts_states_can_be_kept_alone_and_trained_on() -> None:
    with plain(tiny_models.llama()) as llm:
        for states in llm.hidden_states(TEXTS, [0, -1]):
            assert states.untyped_storage().nbytes() == states.numel() * 4
            weight = torch.ones(48, requires_grad=True)
            (states * weight).sum().backward()
            torch.testing.assert_close(weight.grad, states.sum((0, 1)))


# -- what may be asked ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_ids", "is_one"),
    [
        ([3, 4, 5], True),
        ((3, 4, 5), True),
        (torch.tensor([3, 4, 5]), True),
        (list(torch.tensor([3, 4, 5])), True),
        ([[3, 4, 5], [6]], False),
        ([np.array([3, 4, 5]), (6,)], False),
        ([torch.tensor([3, 4, 5]), torch.tensor([6])], False),
    ],
)
@pytest.mark.parametrize("layers", [[0, 1], range(2), torch.tensor([0, 1]), np.array([0, 1])])
def test_ids_and_layers_may_be_of_any_integer_type(
    token_ids: Any, is_one: bool, layers: Any
) -> None:
    llm = fake_llm(max_num_batched_tokens=77)
    first, second = ([3, 4, 5], (0, 1), 77), ([6], (0, 1), 77)
    assert llm.hidden_states(token_ids, layers) == (first if is_one else [first, second])


def test_of_no_texts_there_are_no_states() -> None:
    with plain(tiny_models.llama()) as llm:
        assert llm.hidden_states([], [0]) == []


@pytest.mark.parametrize(
    ("token_ids", "layers", "message"),
    [
        ([[5], []], [0], r"expected a list of token ids, or a list of these"),
        ("a text", [0], r"token_ids='a text': expected a list of token ids"),
        (["a text"], [0], r"expected a list of token ids"),
        (5, [0], r"token_ids=5: expected a list of token ids"),
        ([5, 2.5], [0], r"expected a list of token ids"),
        ([[5], [6, 160]], [0], r"160"),
        ([-1], [0], r"-1"),
        ([5], [], r"layers=\[\]: expected a list of numbers, at least one"),
        ([5], 3, r"layers=3: expected a list of numbers"),
        ([5], None, r"layers=None: expected a list of numbers"),
        ([5], "12", r"layers='12': expected a list of numbers"),
        ([5], [True], r"layers=\[True\]: expected a list of numbers"),
        ([5], [1.0], r"layers=\[1.0\]: expected a list of numbers"),
        ([5], [0, 4], r"layers=\[0, 4\]: expected at least one number from 0 to 3"),
        ([5], [-2], r"layers=\[-2\]: expected at least one number from 0 to 3"),
    ],
)
def test_what_cannot_be_answered_is_refused(token_ids: Any, layers: Any, message: str) -> None:
    with plain(tiny_models.llama()) as llm:
        with pytest.raises(RequestError, match=message):
            llm.hidden_states(token_ids, layers)
        assert len(llm.hidden_states([5, 6], [0])) == 2  # it goes on


def test_a_closed_llm_is_an_error() -> None:
    llm = plain(tiny_models.llama())
    llm.close()
    with pytest.raises(EngineError, match="this LLM is closed"):
        llm.hidden_states([5], [0])


# -- beside requests, and as proposers see them --------------------------------------------------

PROMPTS = [[5, 6, 7, 8] * 3, [9, 10, 90], [11, 150] * 10]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(seed=1, max_tokens=20),
    SamplingParams(temperature=0.0, max_tokens=12),
]


@pytest.mark.parametrize("proposer", [None, Tracker], ids=["plain", "with drafts"])
def test_an_open_stream_is_not_disturbed(proposer: type[Tracker] | None) -> None:
    model = tiny_models.llama(eos_token_id=None)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    with plain(model) as llm:
        [undisturbed] = llm.generate([PROMPTS[0]], params)
    # No block of the pool is free for anybody else.
    with LLM(
        model=model, proposer=proposer, strict=True, block_size=4, num_blocks=16, max_model_len=60
    ) as llm:
        before = llm.hidden_states(TEXTS, LAYERS)
        stream = llm.stream(PROMPTS[0], params)
        found: list[int] = []
        for chunk in stream:
            found += chunk.token_ids
            during = llm.hidden_states(TEXTS, LAYERS)
            assert all(map(torch.equal, during, before))
    assert found == undisturbed.outputs[0].token_ids


@pytest.mark.parametrize("build", [tiny_models.llama, tiny_models.gpt2], ids=["llama", "gpt2"])
def test_they_are_what_proposers_are_handed(build: Callable[..., Any]) -> None:
    with LLM(
        model=build(eos_token_id=None),
        proposer=Tracker,
        num_speculative_tokens=3,
        strict=True,
        chunked_prefill_size=7,
        adaptive=False,
    ) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert "rows invariant: yes" in llm._engine._runner.summary  # type: ignore[union-attr]
        seen = Tracker.made[-1].seen
        texts = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
        found = llm.hidden_states(texts, [-1, *Tracker.needs.aux_layers])
    num_compared = 0
    for text, states in zip(texts, found, strict=True):
        for position in range(len(text)):
            if tuple(text[: position + 1]) in seen:
                hidden, aux = seen[tuple(text[: position + 1])]
                assert torch.equal(states[position, 0], hidden)
                assert torch.equal(states[position, 1:], aux)
                num_compared += 1
    assert num_compared >= sum(map(len, PROMPTS)) + 30


def test_a_worker_in_another_process_gives_the_same(tmp_path: Path) -> None:
    tiny_models.llama().save_pretrained(tmp_path)
    with plain(tmp_path) as llm:
        expected_states = llm.hidden_states(TEXTS, LAYERS)
    with plain(tmp_path, worker="process") as llm:
        found = llm.hidden_states(TEXTS, LAYERS)
        with pytest.raises(RequestError, match=r"layers=\[9\]: expected at least one number"):
            llm.hidden_states(TEXTS, [9])
        one = llm.hidden_states(TEXTS[0], LAYERS)
    assert worker_pids() == []
    assert len(found) == len(TEXTS)
    assert all(map(torch.equal, found, expected_states))
    assert torch.equal(one, expected_states[0])  # type: ignore[arg-type]
