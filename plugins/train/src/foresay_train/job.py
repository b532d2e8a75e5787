"""What a training is asked for, and what comes of it. Plain data, for the stages to share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foresay.core.errors import ConfigError
from foresay.core.proposer import ProposerSpec
from foresay.core.training import TrainingConfig
from foresay_train.measuring import Measured
from foresay_train.training import Recipe, Trained
from foresay_train.vocabulary import DraftVocabulary

WORK = "work"  # within the output folder: all that loading the drafter does not need
_RECORD = "job.json"


@dataclass(frozen=True, slots=True)
class Job:
    """What `foresay train` was asked for."""

    spec: ProposerSpec  # has a training
    config: TrainingConfig  # of the spec's own type
    model: str  # as the user names it
    out: Path
    prompts: Path | None  # either these
    replies: Path | None  # or these
    recipe: Recipe
    num_held_out: int
    max_tokens: int
    temperature: float
    states: Path | None
    begin: Path | None  # the output folder of another training, to begin with its weights
    layers_also: tuple[int, ...]
    num_measured: int
    dtype: str
    device: str

    @property
    def work(self) -> Path:
        """The folder for replies, states, checkpoints and the curve."""
        return self.out / WORK

    @property
    def begin_work(self) -> Path | None:
        """The other training's work folder."""
        return None if self.begin is None else self.begin / WORK

    @property
    def states_folder(self) -> Path:
        """The folder of the target's hidden states."""
        return self.states or self.work / "states"

    @property
    def data_name(self) -> str:
        """The data's file, without the way to it."""
        path = self.prompts or self.replies
        assert path is not None, "one of them is given"
        return path.name

    @property
    def model_name(self) -> str:
        """The model as others know it: an alias, a hub id, or a folder's or file's own name."""
        path = Path(self.model).expanduser()
        return path.resolve().name if path.exists() else self.model


@dataclass(frozen=True, slots=True)
class Data:
    """What was trained on, in numbers."""

    name: str
    digest: str
    num_texts: int
    num_held_out: int
    num_reply_tokens: int  # of all texts but those held out
    num_too_short: int  # left out: fewer than two reply tokens
    num_too_long: int  # left out: more tokens than the model takes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job."""

    job: Job
    data: Data
    vocabulary: DraftVocabulary
    num_parameters: int
    trained: Trained
    measured: Measured | None

    def lines(self) -> list[str]:
        """Return the report."""
        trained = self.trained
        speed = trained.reply_tokens_per_second
        found = [
            f"{self.job.spec.name} for {self.job.model_name}: {self.num_parameters:,} parameters "
            f"trained for {trained.num_steps} steps, {trained.num_reply_tokens:,} reply tokens"
            + (f" ({speed:.0f} a second)" if speed else "")
        ]
        if self.measured is not None:
            found += self.measured.lines()
        return [
            *found,
            f"the drafter is in {str(self.job.out)!r}; use it:",
            f'  foresay run "..." --model {self.job.model} --proposer {self.job.spec.name} '
            f"--drafter {self.job.out}",
        ]


def prepare_folder(job: Job) -> None:
    """Make the output folder. Raises `ConfigError` if it is there and was not made by this."""
    if job.out.exists() and not job.out.is_dir():
        raise ConfigError(f"--out {str(job.out)!r} is no folder")
    if job.out.is_dir() and any(job.out.iterdir()) and not job.work.is_dir():
        raise ConfigError(
            f"--out {str(job.out)!r} is not empty, and no training began there: its files might be "
            "overwritten; give another folder"
        )
    job.work.mkdir(parents=True, exist_ok=True)


def claim(job: Job, model: str, data: Data) -> None:
    """Note what is trained in the folder, or check that it is the same as before.

    `model`: what tells the model from others. How often to save and measure may change.
    """
    recipe = asdict(job.recipe)
    del recipe["save_steps"], recipe["eval_steps"]
    record = {
        "proposer": job.spec.name,
        "model": model,
        "data": data.digest,
        "held_out": data.num_held_out,
        **({} if job.begin is None else {"begin": job.begin.name}),
        **recipe,
        **{f"--set {name}": value for name, value in _plain(job.config.model_dump()).items()},
    }
    path = job.work / _RECORD
    if not path.exists():
        part = path.with_suffix(".part")
        part.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        part.replace(path)
        return
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        before = {name: known.get(name) for name in [*record, *known]}
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}; delete it") from error
    changed = [
        f"{name} {value!r}, now {record.get(name)!r}"
        for name, value in before.items()
        if value != record.get(name)
    ]
    if changed:
        raise ConfigError(
            f"another training began in {str(job.out)!r} ({'; '.join(changed)}): give another "
            "--out, or delete it"
        )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON has them: tuples are lists."""
    return dict(json.loads(json.dumps(values, default=str)))
