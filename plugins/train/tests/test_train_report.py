"""What a training leaves for people: the card and the picture of the curve."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foresay.core.proposer import ProposerConfig, ProposerSpec
from foresay.core.training import TrainingConfig
from foresay_train import card
from foresay_train.curves import draw, ticks
from foresay_train.job import Data, Job, Outcome
from foresay_train.measuring import Measured
from foresay_train.training import CurvePoint, Recipe, Trained, _Curve, _point
from foresay_train.vocabulary import DraftVocabulary

SVG = "{http://www.w3.org/2000/svg}"


def unused(*_arguments: object) -> object:
    raise AssertionError


def points(count: int) -> list[CurvePoint]:
    return [
        CurvePoint(10 * i, 1000 * i, 2.0 - 0.1 * i, [0.02 * i, 0.01 * i], 1 + 0.02 * i)
        for i in range(count)
    ]


def outcome(num_points: int = 3, **changes: object) -> Outcome:
    job = Job(
        spec=ProposerSpec("eagle", ProposerConfig, unused),  # type: ignore[arg-type]
        config=TrainingConfig(draft_vocab_size=30),
        model="smollm2",
        out=Path("/home/somebody/head"),
        prompts=Path("/home/somebody/asked.jsonl"),
        replies=None,
        recipe=Recipe(epochs=2.5, learning_rate=5e-4),
        num_held_out=64,
        max_tokens=192,
        temperature=0.0,
        states=None,
        begin=None,
        layers_also=(),
        num_measured=32,
        dtype="auto",
        device="auto",
    )
    data = Data("asked.jsonl", "0123abcd", 500, 64, 54321, 2, 1)
    measured = Measured(32, 4096, 2.347, 2.25, [0.7, 0.42], [0.7, 0.6], 0)
    vocabulary = DraftVocabulary(list(range(30)), 30, 0.987)
    trained = Trained(812.3, 135802, 260, points(num_points))
    made = Outcome(job, data, vocabulary, 9876543, trained, measured)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_card_says_what_it_is_made_of_and_names_no_folder() -> None:
    text = card.write(outcome())

    for said in (
        "# eagle for smollm2",
        "--model smollm2 --proposer eagle --drafter DIR",
        "| parameters trained | 9,876,543 |",
        "| drafts | 30 tokens, the most frequent: 98.7% of the replies' |",
        "`asked.jsonl`: the model's own answers to these prompts (greedy, at most 192 tokens)",
        "| texts | 500, of which 64 held out; left out: 2 of fewer than two reply tokens, 1 too",
        "54,321 in a pass; digest `0123abcd`",
        "135,802 reply tokens in 260 steps",
        "2.5 epochs, batches of 2,048 tokens, learning rate 0.0005",
        "`draft_vocab_size=30`",
        "foresay 0.1.",
        "mean acceptance length **2.35**, tokens per step 2.25",
        "| accepted | 0.70 | 0.42 |",
        "| if reached | 0.70 | 0.60 |",
        "| 20 | 2,000 | 1.800 | 1.04 | 0.04 | 0.02 |",
    ):
        assert said in text
    assert "somebody" not in text


def test_a_long_curve_is_thinned_out_to_its_first_and_last_points() -> None:
    rows = [line.split() for line in card.write(outcome(100)).splitlines() if line[:2] == "| "]
    numbers = [int(row[1]) for row in rows if row[1].isdigit()]

    assert (numbers[0], numbers[-1], len(numbers)) == (0, 990, 12)


def test_a_drafter_that_was_not_measured_says_so() -> None:
    assert "Not measured." in card.write(outcome(measured=None))


def test_the_report_says_speed_figures_and_how_to_use_it() -> None:
    report = "\n".join(outcome().lines())

    assert "260 steps, 135,802 reply tokens (812 a second)" in report
    assert "accepted        0.70  0.42" in report
    assert "--model smollm2 --proposer eagle --drafter /home/somebody/head" in report


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1.0, 2.31, [1.0, 1.5, 2.0, 2.5]),
        (0.0, 583000.0, [0.0, 200000.0, 400000.0, 600000.0]),
        (1.0, 1.0, [1.0, 1.2]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(
    low: float, high: float, wanted: list[float]
) -> None:
    found = ticks(low, high)

    assert found[0] <= low
    assert found[-1] >= high
    if low < high:
        assert found == wanted


def test_the_picture_has_a_line_for_each_training_and_each_step() -> None:
    picture = ET.fromstring(draw({"eagle": points(5), "a < b & c": points(3)}))  # noqa: S314  # ours

    lines = picture.findall(f"{SVG}polyline")
    texts = [element.text for element in picture.iter(f"{SVG}text")]
    assert [len(line.get("points", "").split()) for line in lines] == [5, 3, 5, 5, 3, 3]
    assert {"eagle", "a < b & c", "mean acceptance length", "reply tokens seen"} <= set(texts)
    assert {"1k", "4k", "1.02", "0.08"} <= set(texts)


def test_points_lie_where_the_axes_say() -> None:
    picture = ET.fromstring(draw({"x": points(5)}))  # noqa: S314  # ours
    ends = picture.findall(f"{SVG}polyline")[0].get("points", "").split()

    # 0 to 4,000 tokens over a panel of 380 from 56; lengths 1 to 1.08 over 240 upwards from 276.
    assert (ends[0], ends[-1]) == ("56,276", "436,36")


@pytest.mark.parametrize("curves", [{}, {"none": []}], ids=["no curve", "no points"])
def test_an_empty_picture_is_one(curves: dict[str, list[CurvePoint]]) -> None:
    assert ET.fromstring(draw(curves)).findall(f"{SVG}polyline") == []  # noqa: S314  # ours


def test_a_point_of_the_curve_counts_the_chains_that_an_engine_would_begin(tmp_path: Path) -> None:
    # Two texts, of five chains and of two, each of two steps.
    right = torch.tensor([[1, 0], [1, 1], [0, 1], [1, 1], [1, 0], [0, 1], [1, 0]], dtype=torch.bool)
    point = _point(3, _Curve(tmp_path / "curve.jsonl", 10.0), 1.5, right, [5, 2])
    # Chain 0 has one right, so chain 2 is next, which has none; chain 3 has both, and ends the
    # text. In the second text each of the two begins, and the last can only draft one token.
    assert point.mean_acceptance_length == pytest.approx((2 + 1 + 2 + 1 + 1) / 5)
    assert point.acceptance == [pytest.approx(3 / 5), pytest.approx(1 / 2)]
    assert (point.step, point.reply_tokens, point.loss) == (3, 30, 1.5)
