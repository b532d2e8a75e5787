"""What the heads' config.json says, in the forms that are published. Reads no weights.

Two forms: the Medusa authors', with "medusa_num_heads" and "medusa_num_layers", and vLLM's, with
"num_heads" and "num_hidden_layers" under the model type "medusa".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foresay.core.errors import ConfigError, ModelError
from foresay.core.worker.checkpoint import read_config

# Vocabularies of one tokenizer differ by padding and by tokens added later: by so much at most.
_MOST_ADDED_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class MedusaLayout:
    """The heads' architecture."""

    folder: str
    num_heads: int  # that are used
    num_layers: int  # residual blocks of each head
    hidden_size: int | None  # None: config.json does not say
    vocab_size: int | None  # of the target; None: likewise
    # Of a reduced vocabulary, by `d2t` or by `token_map`; None: likewise.
    draft_vocab_size: int | None
    truncated_vocab_size: int | None
    has_block_bias: bool | None  # None: config.json does not say
    shares_first_matrix: bool  # the first head's output matrix serves all

    def check_target(self, text_config: Any) -> None:
        """Raise `ModelError` if config.json says that the heads were made for another target."""
        if self.hidden_size is not None:
            self.check_hidden_size(self.hidden_size, int(text_config.hidden_size))
        if self.vocab_size is not None:
            vocab_size = int(text_config.vocab_size)
            if not is_same_vocabulary(self.vocab_size, vocab_size):
                raise ModelError(
                    f"{self.folder!r} holds heads for a vocabulary of {self.vocab_size} tokens, "
                    f"and the target model's has {vocab_size}: they were made for another tokenizer"
                )

    def check_hidden_size(self, own: int, target: int) -> None:
        """Raise `ModelError` unless the heads take hidden states of the target's size."""
        if own != target:
            raise ModelError(
                f"{self.folder!r} holds heads for hidden states of size {own}, and the target "
                f"model's have {target}: they were made for another model"
            )


def is_same_vocabulary(own: int, target: int) -> bool:
    """Whether vocabularies of these sizes may be one tokenizer's: the smaller is a prefix."""
    return abs(own - target) <= target * _MOST_ADDED_SHARE


def read_layout(folder: str | None, num_heads: int | None = None) -> MedusaLayout:
    """Read the heads' config.json; `num_heads`: use so many, None: as many as it says.

    Raises `ConfigError` or `ModelError`, with the reason.
    """
    if folder is None:
        raise ConfigError(
            "proposer 'medusa' needs heads: give their folder, e.g. drafter='medusa-vicuna-7b-v1.3'"
        )
    config = read_config(folder)
    fields = _Fields(folder, config)
    count, layers = "medusa_num_heads", "medusa_num_layers"
    if config.get("model_type") == "medusa" and count not in config:
        count, layers = "num_heads", "num_hidden_layers"
    if count not in config:
        raise ModelError(f"{folder!r} holds no Medusa heads: {_what_it_is(config)}")
    scale = config.get("logit_scale")
    if scale not in (None, 1, 1.0):
        raise ModelError(
            f"{folder!r}: config.json has 'logit_scale': {scale!r}; the proposer 'medusa' runs "
            "heads without one only"
        )
    own = fields.number(count, at_least=1)
    return MedusaLayout(
        folder=folder,
        num_heads=num_heads or own,
        num_layers=fields.number(layers, at_least=0, default=1),
        hidden_size=fields.number_or_none("hidden_size"),
        vocab_size=fields.number_or_none("vocab_size"),
        draft_vocab_size=fields.number_or_none("draft_vocab_size"),
        truncated_vocab_size=fields.number_or_none("truncated_vocab_size"),
        has_block_bias=fields.flag("medusa_fc_bias"),
        shares_first_matrix=bool(fields.flag("original_lm_head")),
    )


def recognise(path: Path) -> str | None:
    """Say how many heads a folder holds by its config.json; None: none."""
    if not (path / "config.json").is_file():
        return None
    config = read_config(path)
    if config.get("model_type") != "medusa" and "medusa_num_heads" not in config:
        return None
    return f"{config.get('medusa_num_heads', config.get('num_heads', '?'))} Medusa heads"


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a config.json, each checked as it is read."""

    folder: str
    config: Mapping[str, Any]

    def number(self, name: str, *, at_least: int, default: int | None = None) -> int:
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < at_least:
            raise ModelError(
                f"{self.folder!r}: config.json has {name!r}: {value!r}; expected a whole number, "
                f"at least {at_least}"
            )
        return value

    def number_or_none(self, name: str) -> int | None:
        return None if self.config.get(name) is None else self.number(name, at_least=1)

    def flag(self, name: str) -> bool | None:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            raise ModelError(
                f"{self.folder!r}: config.json has {name!r}: {value!r}; expected true or false"
            )
        return value


def _what_it_is(config: Mapping[str, Any]) -> str:
    """Say what a folder without heads seems to hold instead, and what to do with it."""
    architectures = " ".join(map(str, config.get("architectures") or ()))
    if "speculators_model_type" in config or "eagle" in architectures.lower():
        kind = config.get("speculators_model_type") or architectures
        return f"its config.json is that of a drafter of another kind ({kind})"
    if "CausalLM" in architectures or "LMHead" in architectures:
        return (
            f"it is a whole language model ({architectures}); run one as drafter with --proposer "
            "draft_model"
        )
    return "its config.json has no 'medusa_num_heads'"
