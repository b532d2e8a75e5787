"""The target's hidden states over all texts, on disk: made once, in shards, by the engine.

A shard is written under another name and renamed, so what is there is whole, and a run that was
killed goes on with the first shard that is missing. Knows no drafters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from foresay.core.errors import ConfigError
from foresay_train.replies import Reply, digest

LAST_HIDDEN = -1  # in place of a layer: the last hidden state, after the final norm
_TOKENS_PER_SHARD = 16384
_ABOUT = "about.json"

# From texts and layers to states [num_tokens, num_layers, hidden_size], text by text.
Compute = Callable[[list[list[int]], tuple[int, ...]], Sequence[torch.Tensor]]
Progress = Callable[[int, int], None]  # tokens done, and in all


@dataclass(frozen=True, slots=True)
class About:
    """What states were made of. They serve whoever has the same model and texts, and no more."""

    model: str  # what the target is called
    texts: str  # a digest of their ids
    layers: tuple[int, ...]  # as `LLM.hidden_states` takes them

    @staticmethod
    def of(model: str, replies: Sequence[Reply], layers: Sequence[int]) -> About:
        """Describe states of these texts."""
        return About(model, digest(reply.token_ids for reply in replies), tuple(layers))

    def serves(self, wanted: About) -> bool:
        """Whether everything wanted is among what is described."""
        same = (self.model, self.texts) == (wanted.model, wanted.texts)
        return same and set(wanted.layers) <= set(self.layers)


class HiddenStates:
    """States of all texts, in bfloat16, read as they are needed."""

    def __init__(self, folder: Path, about: About, lens: Sequence[int]) -> None:
        self._folder = folder
        self._about = about
        self._shards = _shards(lens)
        self._place = {
            text: (shard, at)
            for shard, texts in enumerate(self._shards)
            for at, text in enumerate(texts)
        }
        self._starts = [_running_sums([lens[text] for text in texts]) for texts in self._shards]
        self._open: dict[int, torch.Tensor] = {}

    def read(self, text: int, layers: Sequence[int]) -> torch.Tensor:
        """Return the states of a text, [num_tokens, len(layers), hidden_size] bfloat16."""
        shard, at = self._place[text]
        if shard not in self._open:
            with safe_open(str(_path(self._folder, shard)), framework="pt") as file:
                self._open[shard] = file.get_tensor("states")
        starts = self._starts[shard]
        rows = self._open[shard][starts[at] : starts[at + 1]]
        places = [self._about.layers.index(layer) for layer in layers]
        if places == list(range(places[0], places[0] + len(places))):
            return rows[:, places[0] : places[0] + len(places)]
        return rows[:, places]


def prepare_states(
    folder: Path,
    replies: Sequence[Reply],
    about: About,
    compute: Callable[[], Compute],
    progress: Progress = lambda _done, _total: None,
) -> HiddenStates:
    """Return the states of all replies' texts, computing the shards that `folder` lacks.

    `compute()` is called only if something is to be computed: it loads the model. Raises
    `ConfigError` if the folder holds states of other texts, another model, or fewer layers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = _read_about(folder)
    if found is None:
        _write(folder / _ABOUT, asdict(about))
        found = about
    elif not found.serves(about):
        raise ConfigError(
            f"{str(folder)!r} holds hidden states of other texts, another model or other layers "
            f"({found}, wanted: {about}); give another folder with --states, or delete it"
        )
    lens = [len(reply) for reply in replies]
    shards = _shards(lens)
    total, done = sum(lens), 0
    run: Compute | None = None
    for shard, texts in enumerate(shards):
        path = _path(folder, shard)
        if not path.exists():
            run = run or compute()
            states = run([replies[text].token_ids for text in texts], found.layers)
            stored = torch.cat([one.to("cpu", torch.bfloat16) for one in states]).contiguous()
            part = path.with_suffix(f".{os.getpid()}.part")
            save_file({"states": stored}, str(part))
            part.replace(path)
        done += sum(lens[text] for text in texts)
        progress(done, total)
    return HiddenStates(folder, found, lens)


def _shards(lens: Sequence[int]) -> list[list[int]]:
    """Share texts out to shards, in order, so many tokens each or a single longer text."""
    shards: list[list[int]] = [[]]
    num_tokens = 0
    for text, length in enumerate(lens):
        if shards[-1] and num_tokens + length > _TOKENS_PER_SHARD:
            shards.append([])
            num_tokens = 0
        shards[-1].append(text)
        num_tokens += length
    return shards


def _running_sums(lens: Sequence[int]) -> list[int]:
    sums = [0]
    for length in lens:
        sums.append(sums[-1] + length)
    return sums


def _path(folder: Path, shard: int) -> Path:
    return folder / f"states-{shard:05d}.safetensors"


def _read_about(folder: Path) -> About | None:
    path = folder / _ABOUT
    if not path.exists():
        return None
    try:
        fields: Any = json.loads(path.read_text(encoding="utf-8"))
        return About(fields["model"], fields["texts"], tuple(fields["layers"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read: {error}; delete {str(folder)!r}"
        ) from error


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(fields) + "\n", encoding="utf-8")
    part.replace(path)
