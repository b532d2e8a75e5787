"""Put trained drafters into the package foresay-smollm2, with what was measured of them.

usage: foresay bench --proposers none,eagle,medusa,mtp --drafter eagle=OUT_EAGLE
           --drafter medusa=OUT_MEDUSA --drafter mtp=OUT_MTP
           --data spec_bench_dev.jsonl --json bench.json
       python plugins/smollm2/tools/ship_drafters.py OUT_EAGLE OUT_MEDUSA OUT_MTP
           --bench bench.json --conditions "k = 5, greedy, ..., two cores of ..."

OUT_*: output folders of `foresay train` for the model smollm2. What loading does not need stays
there. Each card gets a section about the bench; what the package had before is replaced.

The index's mean acceptance length is the bench's over ALL: drafters are ranked by it, so it is of
the same prompts for all of them, none of which they were trained on. (What the training measured
on replies held out is in the cards, for people; no file of a training has it for programs.)

A table of all drafters, for the plugin's README, goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MODEL = "smollm2"
PROPOSERS = ("eagle", "medusa", "mtp")
PACKAGE = Path(__file__).parent.parent / "src" / "foresay_smollm2" / "drafters"
CARD = "README.md"
WEIGHTS = "model.safetensors"
FILES = ("config.json", WEIGHTS, CARD, "curve.svg")
MORE_FILES = {"medusa": ("accuracies.json",)}  # of some kinds: what trees are chosen by
ALL = "ALL"

Row = Mapping[str, Any]  # of `foresay bench --json`


def main() -> None:
    """Check everything, then copy."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    for proposer in PROPOSERS:
        parser.add_argument(proposer, type=Path, help=f"output folder of foresay train {proposer}")
    parser.add_argument("--bench", type=Path, required=True, help="rows of foresay bench --json")
    parser.add_argument(
        "--conditions", required=True, help="how and on what it was measured: for the cards"
    )
    parser.add_argument("--to", type=Path, default=PACKAGE, help="default: the package's folder")
    given = parser.parse_args()
    folders: dict[str, Path] = {proposer: getattr(given, proposer) for proposer in PROPOSERS}
    try:
        rows = {name: rows_of(name, given.bench) for name in PROPOSERS}
        for proposer, folder in folders.items():
            check_folder(proposer, folder)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    for proposer, folder in folders.items():
        to = given.to / name_of(proposer)
        ship(folder, to, files_of(proposer), section(proposer, rows[proposer], given))
    index = {
        name_of(proposer): {
            "proposer": proposer,
            "mean_acceptance_length": round(rows[proposer][-1]["mean_acceptance_length"], 3),
        }
        for proposer in PROPOSERS
    }
    (given.to / "index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    print(summary(rows, given.to), end="")


def name_of(proposer: str) -> str:
    """Return the name that a drafter is registered by."""
    return f"{MODEL}-{proposer}"


def files_of(proposer: str) -> tuple[str, ...]:
    """Return the files that a drafter is made of."""
    return FILES + MORE_FILES.get(proposer, ())


def rows_of(proposer: str, bench: Path) -> list[Row]:
    """Return a proposer's rows, the one over ALL last. Raises `ValueError` if it lacks figures."""
    rows = [row for row in json.loads(bench.read_text("utf-8")) if row["proposer"] == proposer]
    if not rows or rows[-1]["task"] != ALL:
        raise ValueError(f"{str(bench)!r} has no row of {proposer!r} over {ALL}")
    for row in rows:
        for figure in ("mean_acceptance_length", "tokens_per_step", "speedup"):
            if row[figure] is None:
                raise ValueError(
                    f"{str(bench)!r}: {proposer!r} has no {figure} in {row['task']}: was it "
                    "measured beside 'none'?"
                )
    return rows


def check_folder(proposer: str, folder: Path) -> None:
    """Raise `ValueError` unless it is what a training of this proposer for the model left."""
    missing = [name for name in files_of(proposer) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{str(folder)!r} has no {', '.join(missing)}: did the training end?")
    title = (folder / CARD).read_text(encoding="utf-8").partition("\n")[0]
    expected = f"# {proposer} for {MODEL}"
    if title != expected:
        raise ValueError(f"the card in {str(folder)!r} begins {title!r}; expected {expected!r}")


def section(proposer: str, rows: Sequence[Row], given: argparse.Namespace) -> str:
    """Return what is added to a card."""
    lines = [
        "",
        "## Measured on the Spec-Bench dev split",
        "",
        f"`foresay bench`, {given.conditions}. It was not trained on these prompts.",
        "",
        "| task | prompts | mean acceptance length | tokens per step | speedup over plain |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {row['task']} | {row['prompts']} | {row['mean_acceptance_length']:.2f} "
            f"| {row['tokens_per_step']:.2f} | {row['speedup']:.2f}x |"
            for row in rows
        ),
        "",
        "## Shipped",
        "",
        f"foresay-smollm2 brings it along as `{name_of(proposer)}` and says in its README what the "
        "prompts were. Licence: Apache-2.0.",
        "",
    ]
    return "\n".join(lines)


def ship(folder: Path, to: Path, files: Sequence[str], added: str) -> None:
    """Copy a drafter, in place of what was there."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    for name in files:
        shutil.copyfile(folder / name, to / name)  # not the mode: nobody else may read weights
    with (to / CARD).open("a", encoding="utf-8") as card:
        card.write(added)


def summary(rows: Mapping[str, Sequence[Row]], folder: Path) -> str:
    """Return a table of all drafters over ALL."""
    lines = [
        "| drafter | MB | mean acceptance length | tokens per step | speedup |",
        "|---|---|---|---|---|",
    ]
    for proposer, own in rows.items():
        size = (folder / name_of(proposer) / WEIGHTS).stat().st_size / 1e6
        lines.append(
            f"| `{name_of(proposer)}` | {size:.1f} | {own[-1]['mean_acceptance_length']:.2f} "
            f"| {own[-1]['tokens_per_step']:.2f} | {own[-1]['speedup']:.2f}x |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
