"""The drafters that the package brings along: how they are offered, shipped, and what they are.

The first part needs no weights. The rest is of those in the package, and fails where they are not
there; who loads them is installed by `make install`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import foresay_smollm2
from foresay import LLM, SamplingParams
from foresay.core.errors import ModelError, PluginError
from foresay.core.plugins import PluginManager
from foresay.core.worker.target import read_config

SHIPPED = {"smollm2-eagle": "eagle", "smollm2-medusa": "medusa", "smollm2-mtp": "mtp"}
FILES = {"README.md", "config.json", "curve.svg", "model.safetensors"}
MORE_FILES = {"smollm2-medusa": {"accuracies.json"}}
MOST_BYTES = 40_000_000  # of all together: a wheel that is quickly fetched
VOCAB_SIZE = 49152  # of the target
SHIP = Path(__file__).parent.parent / "tools" / "ship_drafters.py"

CONVERSATIONS = [
    [{"role": "user", "content": text}]
    for text in (
        "Name the planets of the solar system and say a word about each.",
        "Tom has 5 apples and buys 7 more, then eats 3. How many are left? Explain.",
        "Why do leaves change colour in autumn?",
    )
]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24)


def files_of(name: str) -> set[str]:
    return FILES | MORE_FILES.get(name, set())


# --- the hook


@pytest.fixture
def drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of drafters with an index of one, which is not there."""
    index = {"smollm2-head": {"proposer": "eagle", "mean_acceptance_length": 2.25}}
    (tmp_path / "index.json").write_text(json.dumps(index), encoding="utf-8")
    monkeypatch.setattr(foresay_smollm2, "DRAFTERS", tmp_path)
    return tmp_path


def test_what_the_index_names_is_offered_for_the_model(drafters: Path) -> None:
    (drafters / "smollm2-head").mkdir()
    (offered,) = foresay_smollm2.foresay_register_drafters()
    assert (offered.name, offered.proposer, offered.model) == ("smollm2-head", "eagle", "smollm2")
    assert offered.mean_acceptance_length == 2.25
    assert offered.path() == drafters / "smollm2-head"


def test_a_folder_that_is_not_there_harms_nobody_until_it_is_asked_for(drafters: Path) -> None:
    manager = PluginManager()
    record = manager.register(foresay_smollm2, "foresay-smollm2")
    assert (record.drafters, record.models, record.error) == (["smollm2-head"], ["smollm2"], None)
    with pytest.raises(ModelError) as error:
        manager.drafters["smollm2-head"].path()
    assert str(error.value) == (
        "drafter 'smollm2-head' is part of foresay-smollm2, and its folder "
        f"{str(drafters / 'smollm2-head')!r} is not there: install foresay-smollm2 again"
    )


def test_a_damaged_index_is_an_error_of_the_plugins(drafters: Path) -> None:
    (drafters / "index.json").write_text("{", encoding="utf-8")
    with pytest.raises(PluginError, match="foresay_register_drafters raised JSONDecodeError"):
        PluginManager().register(foresay_smollm2, "foresay-smollm2")


# --- the tool that ships them


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Folders as `foresay train` leaves them, and the rows of a bench."""
    for proposer in ("eagle", "medusa", "mtp"):
        folder = tmp_path / proposer
        (folder / "work").mkdir(parents=True)
        (folder / "README.md").write_text(f"# {proposer} for smollm2\n\nA card.\n")
        (folder / "model.safetensors").write_bytes(b"weights of " + proposer.encode())
        (folder / "model.safetensors").chmod(0o600)
        (folder / "config.json").write_text("{}\n")
        (folder / "curve.svg").write_text("<svg/>\n")
        for file in MORE_FILES.get(f"smollm2-{proposer}", ()):
            (folder / file).write_text("{}\n")
    rows = [
        {
            "proposer": proposer,
            "task": task,
            "prompts": prompts,
            "mean_acceptance_length": length,
            "tokens_per_step": 1.75,
            "speedup": 1.5,
        }
        for task, prompts, more in (("qa", 40, 0.5), ("ALL", 240, 0.0))
        for proposer, length in (
            ("none", None),
            ("eagle", 2.1236 + more),
            ("medusa", 1.5 + more),
            ("mtp", 1.75 + more),
        )
    ]
    (tmp_path / "bench.json").write_text(json.dumps(rows))
    return tmp_path


def ship(trained: Path, *order: str) -> subprocess.CompletedProcess[str]:
    folders = [trained / name for name in order or ("eagle", "medusa", "mtp")]
    options: list[str | Path] = [
        "--bench",
        trained / "bench.json",
        "--conditions",
        "k = 5",
        "--to",
        trained / "to",
    ]
    return subprocess.run(
        [sys.executable, SHIP, *folders, *options], capture_output=True, text=True, check=False
    )


def test_shipping_copies_what_loading_needs_and_a_card_with_the_figures(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trained / "to" / "smollm2-mtp").mkdir(parents=True)
    (trained / "to" / "smollm2-mtp" / "stale").touch()
    for _ in range(2):  # the second time it replaces
        done = ship(trained)
        assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2] == "| `smollm2-eagle` | 0.0 | 2.12 | 1.75 | 1.50x |"
    monkeypatch.setattr(foresay_smollm2, "DRAFTERS", trained / "to")
    offered = {spec.name: spec for spec in foresay_smollm2.foresay_register_drafters()}
    assert {name: spec.proposer for name, spec in offered.items()} == SHIPPED
    assert offered["smollm2-eagle"].mean_acceptance_length == 2.124  # over ALL, not of a task
    for name, spec in offered.items():
        assert {path.name for path in spec.path().iterdir()} == files_of(name)
        weights = spec.path() / "model.safetensors"
        assert weights.read_bytes() == b"weights of " + SHIPPED[name].encode()
        config = spec.path() / "config.json"
        assert weights.stat().st_mode == config.stat().st_mode  # all may read both
    card = (trained / "to" / "smollm2-medusa" / "README.md").read_text()
    assert card.startswith("# medusa for smollm2\n\nA card.\n\n## Measured on the Spec-Bench dev")
    assert "`foresay bench`, k = 5." in card
    assert card.count("| qa | 40 | 2.00 | 1.75 | 1.50x |\n| ALL | 240 | 1.50 | 1.75 | 1.50x |") == 1


def test_shipping_changes_nothing_if_anything_is_wrong(trained: Path) -> None:
    assert ship(trained, "mtp", "medusa", "eagle").stderr == (
        f"error: the card in {str(trained / 'mtp')!r} begins '# mtp for smollm2'; expected "
        "'# eagle for smollm2'\n"
    )
    (trained / "mtp" / "README.md").unlink()
    done = ship(trained)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {str(trained / 'mtp')!r} has no README.md: did the training end?\n"
    )
    rows = json.loads((trained / "bench.json").read_text())
    (trained / "bench.json").write_text(json.dumps(rows[:-1]))
    assert "bench.json' has no row of 'mtp' over ALL" in ship(trained).stderr
    rows[-1]["speedup"] = None
    (trained / "bench.json").write_text(json.dumps(rows))
    assert "'mtp' has no speedup in ALL: was it measured beside 'none'?" in ship(trained).stderr
    assert not (trained / "to").exists()


# --- those in the package


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager.load()


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """The ids of plain decoding."""
    with LLM("smollm2", proposer=None, dtype="float32", max_model_len=256) as llm:
        return [out.outputs[0].token_ids for out in llm.chat(CONVERSATIONS, PARAMS)]


@pytest.fixture(params=SHIPPED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(name: str, plugins: PluginManager) -> Path:
    assert name in plugins.drafters, "the package has no such drafter"
    return plugins.drafters[name].path()


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for tensor in file.keys():  # noqa: SIM118  # no mapping
            yield tensor, file.get_tensor(tensor)


def test_each_is_offered_once_for_its_proposer(plugins: PluginManager) -> None:
    offered = {spec.name: spec for spec in foresay_smollm2.foresay_register_drafters()}
    assert {name: spec.proposer for name, spec in offered.items()} == SHIPPED
    assert {spec.model for spec in offered.values()} == {"smollm2"}
    for spec in offered.values():
        # Plain decoding's is 1, and the most that 5 drafts can give is 6.
        assert 1.1 < spec.mean_acceptance_length < 6
    assert offered.keys() <= plugins.drafters.keys()


def test_all_that_lies_in_the_package_is_theirs_and_small() -> None:
    found = [path for path in foresay_smollm2.DRAFTERS.rglob("*") if path.is_file()]
    expected = {f"{name}/{file}" for name in SHIPPED for file in files_of(name)} | {"index.json"}
    assert {str(path.relative_to(foresay_smollm2.DRAFTERS)) for path in found} == expected
    assert sum(path.stat().st_size for path in found) <= MOST_BYTES


def test_it_is_for_this_target(name: str, folder: Path, plugins: PluginManager) -> None:
    spec = plugins.proposer(SHIPPED[name])
    target_config = read_config("smollm2", plugins.models)
    needs = spec.needs(spec.config_type(drafter=str(folder)), target_config)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["hidden_size"] == target_config.hidden_size
    assert config["vocab_size"] == target_config.vocab_size == VOCAB_SIZE
    assert needs.hidden_state or needs.aux_layers
    if name == "smollm2-eagle":
        taps = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        assert list(needs.aux_layers) == taps
    if name == "smollm2-medusa":
        assert needs.tree
        chain = spec.needs(spec.config_type(drafter=str(folder), tree=False), target_config)
        assert chain.max_draft_tokens == config["medusa_num_heads"]
    assert spec.recognises is not None
    assert spec.recognises(folder)


def test_its_weights_are_finite_and_in_bfloat16(folder: Path) -> None:
    number = 0
    for tensor, values in tensors_of(folder):
        if values.is_floating_point():
            assert values.dtype == torch.bfloat16, tensor
            assert torch.isfinite(values).all(), tensor
            number += 1
        else:
            assert tensor == "d2t"
    assert number > 0


def test_its_draft_vocabulary_is_part_of_the_targets(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = dict(tensors_of(folder))
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))  # stored as offsets
    assert 1000 < len(ids) <= VOCAB_SIZE
    assert config.get("draft_vocab_size", len(ids)) == len(ids)
    if "lm_head.weight" in tensors:
        assert tensors["lm_head.weight"].shape == (len(ids), config["hidden_size"])
    assert ids[0] >= 0
    assert ids[-1] < VOCAB_SIZE
    assert (ids.diff() > 0).all()
    assert 2 in ids  # the end of a reply


def test_its_card_says_what_it_is_and_names_nobodys_folders(name: str, folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith(f"# {SHIPPED[name]} for smollm2\n")
    assert "\n## Measured on the Spec-Bench dev split\n" in card
    assert "| ALL |" in card
    assert not re.search(r"(^|[\s`'\"])/\w+/", card), "an absolute path"


@pytest.mark.parametrize("proposer", SHIPPED.values())
def test_a_proposer_takes_its_own_and_gives_the_ids_of_plain_decoding(
    proposer: str, plain: list[list[int]]
) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "strict": True}
    settings["adaptive"] = False  # it is to draft in every step
    with LLM("smollm2", proposer=proposer, **settings) as llm:
        assert f"proposer: {proposer} (drafter 'smollm2-{proposer}')" in llm.summary
        found = [out.outputs[0].token_ids for out in llm.chat(CONVERSATIONS, PARAMS)]
        stats = llm.stats
    assert found == plain
    assert stats.num_draft_tokens > 0
    # A head that is broken, or fed with what it was not trained on, has 1.0 to 1.1.
    assert stats.mean_acceptance_length is not None
    assert stats.mean_acceptance_length > (1.15 if proposer == "medusa" else 1.3)


def test_the_automatic_choice_is_the_one_that_accepts_most(plugins: PluginManager) -> None:
    index = json.loads((foresay_smollm2.DRAFTERS / "index.json").read_text(encoding="utf-8"))
    best = max(SHIPPED, key=lambda name: float(index[name]["mean_acceptance_length"]))
    chosen = plugins.automatic_proposer("smollm2")
    assert chosen is not None
    assert (chosen.proposer, chosen.drafter) == (SHIPPED[best], best)
