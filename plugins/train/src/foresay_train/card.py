"""A drafter's card, README.md in its folder: what it is, of what it was made, how good it is."""

from __future__ import annotations

from collections.abc import Sequence

from foresay import __version__
from foresay_train.job import Outcome
from foresay_train.measuring import MAX_TOKENS, Measured, show
from foresay_train.training import CurvePoint

_MOST_POINTS = 12  # of the curve in the table


def write(outcome: Outcome) -> str:
    """Return the card, in Markdown. It names no folder of this machine."""
    job, data, trained = outcome.job, outcome.data, outcome.trained
    name, recipe = job.spec.name, job.recipe
    vocabulary = outcome.vocabulary
    drafted = "all tokens"
    if vocabulary.ids is not None:
        drafted = (
            f"{vocabulary.size:,} tokens, the most frequent: {vocabulary.coverage:.1%} of the "
            "replies'"
        )
    made = "answers that existed (token ids)"
    if job.prompts is not None:
        how = "greedy" if job.temperature == 0 else f"temperature {job.temperature:g}"
        made = f"the model's own answers to these prompts ({how}, at most {job.max_tokens} tokens)"
    left_out = [
        f"{number:,} {why}"
        for number, why in (
            (data.num_too_short, "of fewer than two reply tokens"),
            (data.num_too_long, "too long for the model"),
        )
        if number
    ]
    settings = ", ".join(f"`{key}={value}`" for key, value in job.config.model_dump().items())
    length = f"{recipe.max_steps} steps" if recipe.max_steps > 0 else f"{recipe.epochs:g} epochs"
    if job.begin is not None:
        length += f", from the weights of `{job.begin.name}`"
    rows = [
        ("proposer", f"`{name}`"),
        ("target", f"`{job.model_name}`"),
        ("parameters trained", f"{outcome.num_parameters:,}"),
        ("drafts", drafted),
        ("data", f"`{data.name}`: {made}"),
        (
            "texts",
            f"{data.num_texts:,}, of which {data.num_held_out:,} held out"
            + (f"; left out: {', '.join(left_out)}" if left_out else ""),
        ),
        ("reply tokens", f"{data.num_reply_tokens:,} in a pass; digest `{data.digest}`"),
        ("seen", f"{trained.num_reply_tokens:,} reply tokens in {trained.num_steps:,} steps"),
        (
            "recipe",
            f"{length}, batches of {recipe.max_tokens_per_batch:,} tokens, learning rate "
            f"{recipe.learning_rate:g} (warm-up {recipe.warmup:g}, cosine), weight decay "
            f"{recipe.weight_decay:g}, seed {recipe.seed}",
        ),
        ("settings", settings),
        ("made with", f"foresay {__version__}"),
    ]
    parts = [
        f"# {name} for {job.model_name}\n",
        "A drafter for lossless speculative decoding with foresay: it drafts tokens, "
        f"`{job.model_name}` verifies\nthem, and the text is the model's own.\n",
        f'```\nforesay run "..." --model {job.model_name} --proposer {name} --drafter DIR\n```\n',
        "`DIR` is this folder (`config.json` and `model.safetensors`).\n",
        _table(("", ""), rows),
        "## Acceptance\n",
        _measured(outcome.measured),
        "## Curve\n",
        "What an engine would accept while it gives the replies held out, with as many drafts as "
        "there are\ncolumns #1, #2, ...; `curve.svg` draws it.\n",
        _curve(trained.curve),
    ]
    return "\n".join(parts)


def _measured(measured: Measured | None) -> str:
    if measured is None:
        return "Not measured.\n"
    positions = [str(number) for number in range(1, len(measured.acceptance) + 1)]
    table = _table(
        ("draft position", *positions),
        [
            ("accepted", *map(show, measured.acceptance)),
            ("if reached", *map(show, measured.conditional_acceptance)),
        ],
    )
    return (
        f"Measured by the engine on {measured.num_prompts} prompts held out, greedy, at most "
        f"{MAX_TOKENS} tokens each\n({measured.num_tokens:,} in all): mean acceptance length "
        f"**{show(measured.mean_acceptance_length)}**, tokens per step "
        f"{show(measured.tokens_per_step)}.\n\n{table}"
    )


def _curve(points: Sequence[CurvePoint]) -> str:
    shown = list(points)
    if len(shown) > _MOST_POINTS:  # evenly, the first and the last among them
        last = len(shown) - 1
        shown = [shown[round(i * last / (_MOST_POINTS - 1))] for i in range(_MOST_POINTS)]
    num_steps = max((len(point.acceptance) for point in shown), default=0)
    headings = ("step", "reply tokens", "loss", "length", *(f"#{n + 1}" for n in range(num_steps)))
    rows = [
        (
            f"{point.step:,}",
            f"{point.reply_tokens:,}",
            f"{point.loss:.3f}",
            f"{point.mean_acceptance_length:.2f}",
            *(f"{rate:.2f}" for rate in point.acceptance),
        )
        for point in shown
    ]
    return _table(headings, rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
