"""What a caller gives, checked and made plain: settings, prompts, conversations, parameters.

Knows the tokenizer, the vocabulary and the length limit. Does not know the scheduler or the worker.
Everything here raises `ConfigError` or `RequestError` before anything is started.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from foresay.core.config import (
    MAX_SEED,
    EngineConfig,
    SamplingParams,
    SpeculativeConfig,
    build_settings,
)
from foresay.core.errors import ConfigError, PromptTooLongError, RequestError, nearest
from foresay.core.messages import SamplingData, VerificationRule

Prompt = str | Sequence[int]  # text, or token ids
Message = Mapping[str, Any]  # {"role": ..., "content": ...}, as chat templates take it

_SHOWN = 60  # characters of a wrong value in a message


def engine_config(
    model: Any, proposer: str | type[Any] | None, settings: Mapping[str, Any]
) -> EngineConfig:
    """Build the settings of an `LLM` from its arguments.

    Settings are flat: those of `EngineConfig` and of `SpeculativeConfig` side by side. A model or a
    proposer given as an object goes by its name here. Raises `ConfigError`.
    """
    speculative = [name for name in SpeculativeConfig.model_fields if name != "proposer"]
    known = [name for name in EngineConfig.model_fields if name not in ("model", "speculative")]
    known += speculative
    for name in settings:
        if name not in known:
            every = ["model", "proposer", "tokenizer", *known]
            raise ConfigError(
                f"LLM: no setting {name!r}{nearest(name, every)} (known: {', '.join(every)})"
            )
    if not isinstance(model, (str, Path)):
        if not hasattr(model, "config"):
            raise ConfigError(
                f"model={_show(model)}: expected an alias, a folder, a GGUF file, a hub id, or a "
                "loaded transformers model"
            )
        model = getattr(model, "name_or_path", "") or type(model).__name__
    if isinstance(proposer, type):
        proposer = f"{proposer.__module__}:{proposer.__qualname__}"
    elif proposer is not None and not isinstance(proposer, str):
        raise ConfigError(
            f"proposer={_show(proposer)}: expected a name, a chain 'a,b', 'module:Class', a class "
            "(not an instance of one), or None"
        )
    own = {name: value for name, value in settings.items() if name in speculative}
    rest = {name: value for name, value in settings.items() if name not in speculative}
    return build_settings(
        EngineConfig,
        {
            "model": model,
            "speculative": build_settings(SpeculativeConfig, {"proposer": proposer, **own}, "LLM"),
            **rest,
        },
        "LLM",
    )


class InputProcessor:
    """Checks and converts the inputs of one engine."""

    def __init__(
        self,
        *,
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        seed: int,
        verification: VerificationRule | Literal["auto"] = "auto",
        proposer_name: str | None = None,
        takes_prediction: bool = False,
    ) -> None:
        """`tokenizer` None: token ids in, ids out. `seed` seeds requests without their own.

        `verification` is the engine's setting; `takes_prediction`: whether its proposer drafts from
        a prediction.
        """
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self._seed = seed
        self._num_seeds = 0
        self._verification = verification
        self._proposer_name = proposer_name
        self._takes_prediction = takes_prediction
        self._bad_words: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]] = ((), ())  # the last

    def prompts(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of one prompt or of several, in order, each checked.

        Text is tokenized as transformers does it, with the tokenizer's own special tokens.
        """
        given = _to_lists(prompts)
        if isinstance(given, str) or _are_ids(given):
            given = [given]
        if not isinstance(given, Sequence):
            raise RequestError(
                f"prompts={_show(prompts)}: expected a text, a list of token ids, or a list of "
                "these"
            )
        return [
            self._check(self._tokenize(prompt, f"prompt {index}"), f"prompt {index}")
            for index, prompt in enumerate(given)
        ]

    def texts(self, token_ids: Any) -> tuple[list[list[int]], bool]:
        """Return whole texts given as token ids, and whether it was a list of texts.

        Unlike a prompt, a text may fill the model to its limit.
        """
        given = _to_lists(token_ids)
        is_one = _are_ids(given)
        texts = [given] if is_one else given
        if not isinstance(texts, Sequence) or not all(map(_are_ids, texts)):
            raise RequestError(
                f"token_ids={_show(token_ids)}: expected a list of token ids, or a list of these"
            )
        return [
            self._check(list(map(operator.index, text)), f"text {index}", room=0)
            for index, text in enumerate(texts)
        ], not is_one

    def layers(self, layers: Any) -> list[int]:
        """Return numbers of layers; whether the model has them, its worker knows."""
        given: Any = _to_list(layers)
        if not _are_ids(given) or any(isinstance(layer, bool) for layer in given):
            raise RequestError(
                f"layers={_show(layers)}: expected a list of numbers, at least one of them"
            )
        return list(map(operator.index, given))

    def conversations(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]]
    ) -> list[list[int]]:
        """Return the token ids of one conversation or of several, ready for the next answer.

        The chat template brings its own special tokens; no others are added.
        """
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
            raise RequestError(
                f"messages={_show(messages)}: expected a list of messages such as "
                "{'role': 'user', 'content': 'Hi'}, or a list of such lists"
            )
        is_one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        return [
            self._check(
                self._render(conversation, f"conversation {index}"), f"conversation {index}"
            )
            for index, conversation in enumerate(conversations)
        ]

    def params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        """Return one checked `SamplingParams` per prompt."""
        if params is None:
            params = SamplingParams()
        if not isinstance(params, SamplingParams | Sequence) or isinstance(params, str):
            raise RequestError(f"params={_show(params)}: expected SamplingParams(...), or a list")
        each = [params] * num_prompts if isinstance(params, SamplingParams) else list(params)
        for one in each:
            if not isinstance(one, SamplingParams):
                raise RequestError(f"params={_show(one)}: expected SamplingParams(...)")
            self._check_params(one)
            self._check_prediction(one)
        if len(each) != num_prompts:
            raise RequestError(
                f"{len(each)} SamplingParams for {num_prompts} prompts: give one for all, "
                "or one each"
            )
        return each

    def sampling_data(self, params: SamplingParams) -> SamplingData:
        """Resolve what the worker and the stop rules need. Draws a seed if there is none."""
        stop_token_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= self.eos_token_ids
        return SamplingData(
            temperature=params.temperature,
            top_k=params.top_k if 0 < params.top_k < self.vocab_size else 0,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self._next_seed() if params.seed is None else params.seed % MAX_SEED,
            min_tokens=params.min_tokens,
            stop_token_ids=tuple(sorted(stop_token_ids)),
            logit_bias=tuple(params.logit_bias.items()),
            allowed_token_ids=_distinct(params.allowed_token_ids),
            bad_words_token_ids=self._bad_words_token_ids(params.bad_words),
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logprobs=params.logprobs,
            verification=self._rule(params),
        )

    def _rule(self, params: SamplingParams) -> VerificationRule:
        # With `coupled` the text depends on the seed alone, which is what a given seed asks for.
        if self._verification == "auto":
            return "block" if params.seed is None else "coupled"
        return self._verification

    def _bad_words_token_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the distinct ways to write each word: as a text begins, and after a space.

        The words of all requests of one call are mostly the same: the last result is kept.
        """
        if words != self._bad_words[0]:
            sequences: dict[tuple[int, ...], None] = {}
            for word in words:
                sequences |= dict.fromkeys(self._spellings(word))
            self._bad_words = (words, tuple(sequences))
        return self._bad_words[1]

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        if self.tokenizer is None:
            raise RequestError(
                f"bad_words={_show(word)}: words need a tokenizer, and this LLM has none; use "
                "logit_bias"
            )
        check_text(word, f"bad_words: {word!r}")
        # Of a word that is nothing but white space (a line break) only that itself is meant.
        bare = word.lstrip()
        texts = [bare, " " + bare] if bare else [word]
        tokenized = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        if not all(tokenized):
            raise RequestError(f"bad_words: {word!r} has no tokens: there is nothing to ban")
        for token_ids in tokenized:
            self._check_ids(f"bad_words: in {word!r}", token_ids)
        return [tuple(token_ids) for token_ids in tokenized]

    def prediction_ids(self, params: SamplingParams) -> list[int]:
        """Return the checked `params.prediction` as token ids: a text without special tokens."""
        if isinstance(params.prediction, str):
            if not params.prediction:
                return []
            return list(self.tokenizer(params.prediction, add_special_tokens=False)["input_ids"])
        return list(params.prediction or ())

    def _next_seed(self) -> int:
        """Hash the engine's seed and a counter: distinct, and the same in every run."""
        self._num_seeds += 1
        text = f"{self._seed}:{self._num_seeds}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def _tokenize(self, prompt: Any, where: str) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    f"{where} is text, and this LLM has no tokenizer: give token ids, "
                    "or LLM(..., tokenizer=...)"
                )
            check_text(prompt, where)
            return list(self.tokenizer(prompt)["input_ids"])
        if isinstance(prompt, Sequence) and (not prompt or _are_ids(prompt)):
            return [operator.index(token_id) for token_id in prompt]
        raise RequestError(f"{where}={_show(prompt)}: expected a text or a list of token ids")

    def _render(self, conversation: Any, where: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(
                "chat() needs a tokenizer, and this LLM has none: LLM(tokenizer=...)"
            )
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise RequestError(
                "chat() needs a chat template, and this model's tokenizer has none: "
                "use generate(), or set llm.tokenizer.chat_template"
            )
        if not (
            isinstance(conversation, Sequence)
            and conversation
            and all(isinstance(message, Mapping) for message in conversation)
        ):
            raise RequestError(
                f"{where}={_show(conversation)}: expected a non-empty list of messages such as "
                "{'role': 'user', 'content': 'Hi'}"
            )
        try:
            token_ids = self.tokenizer.apply_chat_template(
                [dict(message) for message in conversation],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:
            # Templates raise whatever Jinja raises: roles that don't alternate, a missing key, ...
            raise RequestError(
                f"{where}: the chat template refuses it: {type(error).__name__}: {error}"
            ) from error
        return list(token_ids)

    def _check(self, token_ids: list[int], where: str, room: int = 1) -> list[int]:
        """Return checked ids that leave `room` tokens for an output."""
        if not token_ids:
            raise RequestError(f"{where} is empty: a model needs at least one token to go on from")
        if len(token_ids) > self.max_model_len - room:
            raise PromptTooLongError(
                f"{where} has {len(token_ids)} tokens; with max_model_len={self.max_model_len} at "
                f"most {self.max_model_len - room} "
                + ("leave room for an output" if room else "fit the model")
            )
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"{where}: token id {token_id} at index {index} is not in the vocabulary, "
                    f"range({self.vocab_size})"
                )
        return token_ids

    def _check_params(self, params: SamplingParams) -> None:
        if params.stop and self.tokenizer is None:
            raise RequestError(
                f"stop={params.stop!r}: stop strings need a tokenizer, and this LLM has none; "
                "use stop_token_ids"
            )
        for string in params.stop:  # no output could ever hold half a pair
            check_text(string, f"stop: {string!r}")
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._bad_words_token_ids(params.bad_words)
        if params.logprobs is not None and params.logprobs > self.vocab_size:
            raise RequestError(
                f"logprobs={params.logprobs}: the vocabulary has {self.vocab_size} tokens"
            )

    def _check_ids(self, where: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"{where}: token id {token_id} is not in the vocabulary, "
                    f"range({self.vocab_size})"
                )

    def _check_prediction(self, params: SamplingParams) -> None:
        prediction = params.prediction
        if not prediction:  # an empty one predicts nothing
            return
        if not self._takes_prediction:
            who = f"proposer {self._proposer_name!r} takes none"
            if self._proposer_name is None:
                who = "there is no proposer"
            raise RequestError(
                f"prediction={_show(prediction)} would have no effect: {who}; leave it out, or use "
                "a proposer that drafts from it (one with Needs(prediction=True), such as 'ngram')"
            )
        if isinstance(prediction, str):
            if self.tokenizer is None:
                raise RequestError(
                    f"prediction={_show(prediction)} is text, and this LLM has no tokenizer: give "
                    "token ids, or LLM(..., tokenizer=...)"
                )
            check_text(prediction, "prediction")
            return
        for index, token_id in enumerate(prediction):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"prediction: token id {token_id} at index {index} is not in the vocabulary, "
                    f"range({self.vocab_size})"
                )


def check_text(text: str, where: str) -> None:
    """Raise `RequestError` for what is no Unicode text: bytes that were not UTF-8 come as such."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} is no valid text: character {error.start} is {text[error.start]!r}, half of "
            "a pair; was it read as UTF-8?"
        ) from None


def _distinct(token_ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if token_ids is None else tuple(sorted(set(token_ids)))


def _to_lists(value: Any) -> Any:
    """Return a value, and what it holds, as lists where they can be."""
    value = _to_list(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_to_list(item) for item in value]
    return value


def _to_list(value: Any) -> Any:
    """Turn an array or a tensor into lists; leave anything else alone."""
    return value.tolist() if hasattr(value, "tolist") else value


def _are_ids(value: Any) -> bool:
    """Whether `value` is a non-empty list of integers, of any integer type."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, (str, bytes))
        and len(value) > 0
        and all(hasattr(item, "__index__") for item in value)
    )


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
