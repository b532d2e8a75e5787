"""`foresay check`: right, wrong and half-wrong drafters; whose a drafter is; mistakes; Ctrl-C.

The drafters here are made up: a `config.json` that says which mistake is made. Their proposer asks
a second copy of the target what comes next, so what is accepted is known beforehand.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eagle_heads
import medusa_heads
import mtp_checkpoints
import pytest
import tiny_models
import torch
import transformers
from tiny_chat import save_chat_model
from tiny_tokenizers import byte_level

from foresay import LLM, hookimpl
from foresay.cli import main
from foresay.core.automatic import ask_who_recognises
from foresay.core.commands.comparison import (
    Comparison,
    Difference,
    Sizes,
    VocabularyComparison,
    compare_vocabularies,
)
from foresay.core.commands.verdict import drafting_share, judge
from foresay.core.commands.whose_drafter import find_proposer
from foresay.core.errors import ConfigError, ModelError, PluginError
from foresay.core.plugins import PluginManager
from foresay.core.proposer import Draft, DraftInput, Needs, ProposerConfig, ProposerSpec, TargetView
from foresay.core.registry import DrafterSpec, ModelAlias
from foresay.core.stats import RunStats
from foresay.core.worker import int8_linear

VOCAB_SIZE = 256
DATA = [
    {"id": 1, "task": "copy", "turns": ["abcabcabc"]},
    {"id": 2, "task": "talk", "turns": ["Hello"]},
    {"id": 3, "task": "talk", "turns": ["Never reached"]},
]


# -- a proposer whose drafters make mistakes on purpose ------------------------------------------


class OracleConfig(ProposerConfig):
    """Its drafter says what goes wrong."""

    gap: int = 1


class Oracle:
    """Drafts what the target will say, then spoils it as its drafter says."""

    def __init__(self, config: OracleConfig) -> None:
        self.config = config
        assert config.drafter is not None
        self.drafter = json.loads((Path(config.drafter) / "config.json").read_text("utf-8"))
        self.mistake = self.drafter.get("mistake")
        if self.mistake == "built":
            raise RuntimeError("cannot open shared object")
        self.num_calls = 0

    def load(self, target: TargetView) -> None:
        if self.mistake == "loaded":
            raise ModelError("tensor 'fc.weight' is missing")
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(target.checkpoint)

    def propose(self, batch: DraftInput) -> Draft:
        self.num_calls += 1
        if self.mistake == "raises" or (self.mistake == "raises late" and self.num_calls > 3):
            raise KeyError("midlayer")
        return Draft([self.spoilt(self.next(r.token_ids, r.k)) for r in batch.requests])

    def next(self, token_ids: Sequence[int], k: int) -> list[int]:
        ids = list(token_ids)
        for _ in range(k):
            with torch.no_grad():
                ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(token_ids) :]

    def spoilt(self, draft: list[int]) -> list[int]:
        shifted = [(token_id + self.config.gap) % VOCAB_SIZE for token_id in draft]
        return {
            "shifted": shifted,
            "later": draft[:1] + shifted[1:],
            "silent": [],
            "out of range": [*draft[:-1], VOCAB_SIZE],
        }.get(str(self.mistake), draft)


def drafter_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text("utf-8"))
    return config


def needs(config: OracleConfig, target_config: Any) -> Needs:
    assert config.drafter is not None
    drafter = drafter_config(Path(config.drafter))
    if config.gap > 5:
        raise ConfigError(f"gap={config.gap}: at most 5")
    hidden_size = drafter.get("hidden_size", target_config.hidden_size)
    if hidden_size != target_config.hidden_size:
        raise ModelError(f"a head for hidden states of size {hidden_size}")
    return Needs(aux_layers=tuple(drafter.get("taps", ())))


def recognises(path: Path) -> str | None:
    if not (path / "config.json").is_file():
        return None
    kind = drafter_config(path).get("kind")
    if kind == "damaged":
        raise ModelError("its config.json is damaged")
    return "an oracle" if kind in ("oracle", "twofold") else None


def offering(**hooks: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            f"foresay_register_{name}": hookimpl(lambda offers=offers: offers)
            for name, offers in hooks.items()
        }
    )


def oracle_spec(name: str = "oracle", **changes: Any) -> ProposerSpec:
    fields = {"config_type": OracleConfig, "build": Oracle, "needs": needs}
    return ProposerSpec(name=name, **{**fields, "recognises": recognises, **changes})


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    """What `foresay` finds installed: the oracle only."""
    manager = PluginManager()
    manager.register(offering(proposers=[oracle_spec()]), "foresay-oracle")
    monkeypatch.setattr("foresay.cli.PluginManager.load", lambda: manager)
    return manager


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("target"), max_position_embeddings=256)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in DATA), encoding="utf-8")
    return path


def save_drafter(folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"kind": "oracle", **fields}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def drafter(tmp_path: Path) -> Callable[..., Path]:
    return lambda **fields: save_drafter(tmp_path / "drafter", **fields)


Check = Callable[..., tuple[int, str, str]]  # exit code, stdout, stderr


@pytest.fixture
def check(
    plugins: PluginManager, target: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> Check:
    def call(*arguments: object) -> tuple[int, str, str]:
        words = [str(argument) for argument in arguments]
        model = [] if "--model" in words else ["--model", str(target)]
        few = [] if "--max-tokens" in words else ["--max-tokens", "17"]
        code = main(["check", *words, *model, *few, "--data", str(data)])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def row_of(check: Check, *arguments: object) -> tuple[int, dict[str, Any]]:
    code, out, _ = check(*arguments, "--json")
    row = json.loads(out)
    assert isinstance(row, dict)
    return code, row


# -- verdicts ------------------------------------------------------------------------------------


def test_a_right_drafter_is_good_and_everything_is_accepted(
    check: Check, drafter: Callable[..., Path], target: Path
) -> None:
    folder = drafter()
    code, out, err = check(folder, "-k", "3")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == f"drafter {folder} (an oracle, proposer oracle of foresay-oracle)"
    assert lines[1] == f"for the model {target}"
    # Two prompts, one of each task: 17 tokens are the prompt's and four steps of three and one.
    assert any(line.startswith("34 tokens in ") for line in lines)
    assert "mean acceptance length 4.00 over 8 steps with a draft; tokens per step 3.40" in out
    assert "accepted        1.00  1.00  1.00" in lines
    assert "  if reached    1.00  1.00  1.00" in lines
    assert any(line.endswith("% of the decoding time") for line in lines)
    assert "faults: none" in lines
    (verdict,) = [line for line in lines if line.startswith("verdict: ")]
    assert verdict == (
        "verdict: good: 100% of the first draft tokens are accepted, 3.40 tokens a step where "
        "plain decoding has 1"
    )
    assert "foresay: drafting for 2 prompts, 17 tokens each at most\n" in err


def test_a_drafter_whose_ids_are_shifted_is_bad_and_the_likely_reasons_are_named(
    check: Check, drafter: Callable[..., Path]
) -> None:
    folder = drafter(
        mistake="shifted", taps=[2, 0], draft_vocab_size=64, base_model_name_or_path="acme/large"
    )
    code, out, _ = check(folder)
    assert code == 1
    assert "verdict: bad: next to nothing is accepted (0.0% of the first draft tokens)" in out
    assert "wrong model, one of the same sizes: it names 'acme/large' as its target" in out
    assert "takes the streams entering layers 2, 0; were these the ones" in out
    assert "its vocabulary offsets may be wrong" in out
    assert "(the drafter names acme/large)" in out


def test_a_drafter_that_is_right_once_a_step_is_bad_and_good_where_it_drafts_one_token(
    check: Check, drafter: Callable[..., Path]
) -> None:
    folder = drafter(mistake="later")
    code, row = row_of(check, folder, "--max-tokens", "32")
    assert code == 1
    assert row["run"]["stats"]["conditional_acceptance_per_position"][:2] == [1.0, 0.0]
    assert row["verdict"] == (
        "bad: draft token 2 is accepted 0% of the time it is reached, the one before it 100%"
    )
    assert "compare with -k 1" in row["notes"][0]
    code, row = row_of(check, folder, "-k", "1")
    assert (code, row["good"]) == (0, True)


@pytest.mark.parametrize(
    ("mistake", "verdict", "faults"),
    [
        (
            "raises",
            "bad: the proposer failed and was turned off; the proposer broke its contract "
            "(dropped 1x, raised 3x); nothing was drafted in 34 steps",
            {"raised": 3, "dropped": 1},
        ),
        (
            "raises late",
            "bad: the proposer failed and was turned off; the proposer broke its contract "
            "(dropped 1x, raised 3x)",
            {"raised": 3, "dropped": 1},
        ),
        # Two accepted of three: after the first token five steps of three a prompt, and each time
        # but after the last a bad id.
        ("out of range", "bad: the proposer broke its contract (bad_id 10x)", {"bad_id": 10}),
        ("silent", "bad: nothing was drafted in 34 steps", {}),
    ],
)
def test_faults_are_part_of_the_verdict_however_much_is_accepted(
    check: Check,
    drafter: Callable[..., Path],
    mistake: str,
    verdict: str,
    faults: dict[str, int],
) -> None:
    code, row = row_of(check, drafter(mistake=mistake), "-k", "3")
    assert code == 1
    assert row["verdict"].startswith(verdict)
    assert row["run"]["faults"] == faults
    if mistake.endswith(("late", "range")):
        assert row["run"]["stats"]["acceptance_per_position"][0] == 1.0


@pytest.mark.parametrize(
    ("fields", "reason", "notes"),
    [
        ({"mistake": "loaded"}, "tensor 'fc.weight' is missing", []),
        ({"mistake": "built"}, "cannot be built: RuntimeError: cannot open shared object", []),
        (
            {"hidden_size": 64},
            "a head for hidden states of size 64",
            ["it was made for another model: its hidden size is 64, the target's is 48"],
        ),
        (
            {"taps": [0, 7]},
            "needs the residual stream entering layer 7, and the target model has 3",
            ["it was made for a deeper model: it takes the streams entering layers 0, 7, and the "
             "target has 3 layers"],
        ),
    ],
    ids=["load raises", "build raises", "needs raises", "taps"],
)  # fmt: skip
def test_a_drafter_that_does_not_load_for_the_model_is_bad_and_compared_all_the_same(
    check: Check, drafter: Callable[..., Path], fields: Any, reason: str, notes: list[str]
) -> None:
    code, out, err = check(drafter(**fields))
    lines = out.splitlines()
    assert code == 1
    assert "hidden size" in out
    (verdict,) = [line for line in lines if line.startswith("verdict: ")]
    assert verdict.startswith("verdict: bad: it cannot be used with this model: ")
    assert reason in verdict
    assert [line for line in lines if line.startswith("  - ")] == [f"  - {note}" for note in notes]
    assert "error:" not in err
    code, row = row_of(check, drafter(**fields))
    assert (code, row["good"], row["run"]) == (1, False, None)


def test_what_is_asked_of_a_heads_weights_is_not_asked_of_the_model_alone(
    check: Check, drafter: Callable[..., Path]
) -> None:
    """It is opened alone to see whose fault it is that the head does not load."""
    if not int8_linear.is_available():
        pytest.skip("this torch has no integer products")
    folder = drafter(mistake="loaded", taps=[0, 2])
    code, out, err = check(folder, "--drafter-quantization", "int8")
    assert (code, "error:" in err) == (1, False)
    assert "tensor 'fc.weight' is missing" in out


def test_a_model_that_does_not_load_is_no_fault_of_the_drafter(
    check: Check, drafter: Callable[..., Path], target: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(target, broken)
    (broken / "model.safetensors").write_bytes(b"\0" * 64)
    code, out, err = check(drafter(), "--model", broken)
    assert code == 2
    assert f"error: cannot load the model {str(broken)!r}" in err
    assert "verdict" not in out


# -- figures judged by hand ----------------------------------------------------------------------


def a_run(*steps: tuple[int, int], times: int = 1, **fields: Any) -> RunStats:
    """Steps of (drafts, accepted), each emitting one token more than it accepted."""
    stats = RunStats(**fields)
    for num_drafts, num_accepted in steps * times:
        stats.record_step(num_drafts, num_accepted, num_accepted + 1, "p")
    return stats


NOTHING_KNOWN = Comparison(Sizes(), Sizes(), None)


@pytest.mark.parametrize(
    ("stats", "good", "text"),
    [
        (a_run((1, 1), times=20), True, "good: 100% "),
        (a_run((2, 1), (2, 0), (2, 0), (2, 0), times=4), True, "good but weak: 25% "),
        (a_run((2, 1), *[(2, 0)] * 9, times=4), True, "good but weak: 10% "),
        (a_run((2, 1), *[(2, 0)] * 10, times=4), False, "bad: next to nothing is accepted (9.1%"),
        (a_run((2, 1), *[(2, 2)] * 19), True, "good: 100% "),  # 19 of 20 at the second
        (a_run(*[(2, 1)] * 19, (2, 2)), True, "good: 100% "),  # 1 of 20: at the bound
        (a_run(*[(3, 1)] * 20, (3, 3)), False, "bad: draft token 2 is accepted 5% "),
        (a_run((2, 1), times=19), True, "good: 100% "),  # 0 of 19: too few to tell
        (a_run((3, 2), times=20), False, "bad: draft token 3 is accepted 0% "),
        (a_run((0, 0), times=4), False, "bad: nothing was drafted in 4 steps"),
        (a_run((2, 2), times=20, faults={"zero_residual": 3}), True, "good: "),
        (a_run((2, 2), times=20, faults={"bad_id": 1}), False, "bad: the proposer broke"),
    ],
    ids=["one each", "weak", "at the bound", "below it", "all", "rarely", "collapses", "too few",
         "collapses at the third", "silent", "harmless", "one fault"],
)  # fmt: skip
def test_the_verdict_on_figures(stats: RunStats, good: bool, text: str) -> None:
    verdict = judge(stats, NOTHING_KNOWN)
    assert (verdict.good, verdict.text[: len(text)]) == (good, text)


def test_the_share_of_drafting_leaves_the_passes_over_prompts_out() -> None:
    stats = a_run((2, 2), times=20, schedule_seconds=0.5, execute_seconds=6.0, commit_seconds=0.5,
                  draft_seconds=2.0, num_first_tokens=2, seconds_to_first_tokens=1.0)  # fmt: skip
    assert drafting_share(stats) == pytest.approx(2.0 / (9.0 - 1.0))
    assert drafting_share(RunStats()) is None


def test_drafting_that_costs_more_than_it_saves_is_told_and_no_reason_for_a_bad_verdict() -> None:
    slow = a_run((1, 1), times=20, execute_seconds=1.0, draft_seconds=1.1)  # 2 tokens a step
    quick = a_run((1, 1), times=20, execute_seconds=1.0, draft_seconds=0.9)
    assert judge(slow, NOTHING_KNOWN).good
    assert any("52% of the time, more than it saves" in n for n in judge(slow, NOTHING_KNOWN).notes)
    assert not judge(quick, NOTHING_KNOWN).notes


def test_few_drafts_and_seldom_ones_are_told() -> None:
    comparison = Comparison(Sizes(max_length=64), Sizes(max_length=256), None)
    stats = a_run((1, 1), (0, 0), (0, 0), times=7)
    assert judge(stats, comparison).notes == (
        "it drafted in only 7 of 21 steps: it takes texts of 64 tokens at most",
        "only 7 drafts were verified, too few for a firm verdict: raise --max-tokens or --limit",
    )


# -- vocabularies --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "theirs", "special", "expected"),
    [
        ("abc", "abc", (), VocabularyComparison(3, 0, None, False)),
        ("abc", "abcde", (), VocabularyComparison(3, 0, None, False)),
        ("abcde", "abc", (), VocabularyComparison(3, 0, None, False)),
        ("abxy", "abcd", (), VocabularyComparison(4, 2, Difference(2, "x", "c"), False)),
        ("abxy", "abcd", (2, 3), VocabularyComparison(4, 2, Difference(2, "x", "c"), True)),
        ("abxy", "abcd", (2,), VocabularyComparison(4, 2, Difference(3, "y", "d"), False)),
        ("bcd", "abc", (), VocabularyComparison(3, 3, Difference(0, "b", "a"), False)),
    ],
    ids=["same", "the target's grew", "the drafter's grew", "another", "special only",
         "the first ordinary one", "shifted"],
)  # fmt: skip
def test_vocabularies_are_compared_by_id(
    own: str, theirs: str, special: tuple[int, ...], expected: VocabularyComparison
) -> None:
    own_ids, their_ids = ({c: i for i, c in enumerate(tokens)} for tokens in (own, theirs))
    assert compare_vocabularies(own_ids, their_ids, special) == expected


def test_ids_that_only_one_vocabulary_has_are_no_difference() -> None:
    found = compare_vocabularies({"a": 0, "b": 7}, {"a": 0, "c": 5, "b": 7}, ())
    assert found == VocabularyComparison(2, 0, None, False)


def test_a_drafter_with_another_tokenizer_is_told_with_the_first_id_that_differs(
    check: Check, drafter: Callable[..., Path]
) -> None:
    folder = drafter(mistake="shifted", vocab_size=258)
    byte_level().save_pretrained(folder)  # two special tokens in front shift all bytes
    code, out, _ = check(folder)
    # The bytes in order: the target's ids 0 and 1 are those of "!" and '"'.
    words = "id 2 is '!' in the drafter's and '#' in the target's (256 of 256 ids differ)"
    assert code == 1
    assert f"vocabularies: another tokenizer: {words}\n" in out
    assert out.index("  - its tokenizer is not the target's: ") < out.index("  - it may be of")


def test_a_drafter_with_the_targets_tokenizer_is_told_so(
    check: Check, drafter: Callable[..., Path], target: Path
) -> None:
    folder = drafter()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, folder / name)
    code, row = row_of(check, folder)
    assert code == 0
    assert row["comparison"]["vocabulary"] == {
        "num_compared": 256,
        "num_different": 0,
        "first": None,
        "only_special": False,
    }
    assert "vocabularies: all 256 ids that both have mean the same\n" in check(folder)[1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "nor do its files say how many tokens it knows"),
        ({"vocab_size": 256}, "by size they agree (256 tokens)"),
        ({"model": {"vocab_size": 128}}, "by size they differ (128 tokens, and the target's 256)"),
    ],
    ids=["unknown", "same", "other"],
)
def test_a_drafter_without_a_tokenizer_is_told_so_and_compared_by_size(
    check: Check, drafter: Callable[..., Path], fields: dict[str, Any], words: str
) -> None:
    code, out, _ = check(drafter(**fields))
    assert code == 0
    assert f"vocabularies: the drafter has no tokenizer of its own; {words}\n" in out


def test_a_tokenizer_that_cannot_be_read_is_told_and_no_obstacle(
    check: Check, drafter: Callable[..., Path]
) -> None:
    folder = drafter()
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    code, out, _ = check(folder)
    assert code == 0
    assert "vocabularies: the tokenizer of the drafter cannot be read (cannot load the " in out


# -- sizes ---------------------------------------------------------------------------------------


def test_sizes_stand_side_by_side(check: Check, tmp_path: Path, plugins: PluginManager) -> None:
    head = eagle_heads.eagle3(taps=(0, 3), vocab_size=256, draft_vocab=64).configured(kind="oracle")
    folder = head.configured(taps=[0, 3]).save(tmp_path / "head")
    _, out, _ = check(folder)
    cells = [line.split("  ") for line in out.splitlines()]
    table = {row[0]: [c.strip() for c in row[1:] if c.strip()] for row in cells if len(row) > 1}
    own = sum(t.numel() for name, t in head.tensors.items() if name not in ("d2t", "t2d"))
    model = tiny_models.llama(vocab_size=256)
    theirs = sum(t.numel() for t in model.state_dict().values())
    assert table["hidden size"] == ["48", "48"]
    assert table["layers"] == ["1", "3"]
    assert table["vocabulary"] == ["256", "256"]
    assert table["draft vocabulary"] == ["64"]
    assert table["parameters"] == [f"{own:,}", f"{theirs:,}"]
    assert table["longest text"] == ["256", "256"]
    assert table["layer taps"] == ["0, 3", "0 to 3"]


# -- whose drafter it is -------------------------------------------------------------------------


def test_a_registered_drafter_is_found_by_its_name_with_its_proposer(
    check: Check, drafter: Callable[..., Path], plugins: PluginManager
) -> None:
    folder = drafter(kind="anything")
    spec = DrafterSpec("acme-head", "oracle", "acme/model", lambda: folder, 2.0)
    plugins.register(offering(drafters=[spec]), "foresay-acme")
    code, row = row_of(check, "acme-head")
    assert (code, row["drafter"], row["proposer"]) == (0, "acme-head", "oracle")
    assert row["comparison"]["made_for"] == "acme/model"


def test_a_drafter_inside_the_targets_checkpoint_is_left_to_the_proposer_to_find(
    check: Check, target: Path, plugins: PluginManager
) -> None:
    drafters: list[str | None] = []

    def build(config: ProposerConfig) -> Oracle:
        drafters.append(config.drafter)
        return Oracle(OracleConfig(drafter=str(target)))

    fields = {"config_type": ProposerConfig, "build": build, "needs": lambda config, t: Needs()}
    inside = oracle_spec("inside", **fields, serves=lambda folder: "it is there")
    outside = oracle_spec("outside", **fields)
    plugins.register(offering(proposers=[inside, outside]), "foresay-modules")
    code, out, _ = check(target, "--proposer", "inside")
    assert code == 0
    assert "(inside the model's own checkpoint, proposer inside of foresay-modules)" in out
    assert check(target, "--proposer", "outside")[0] == 0
    assert drafters == [None, str(target)]


def test_a_proposer_that_is_named_is_not_asked(check: Check, drafter: Callable[..., Path]) -> None:
    folder = drafter(kind="something of my own")
    code, out, _ = check(folder, "--proposer", "oracle")
    assert code == 0
    assert out.startswith(f"drafter {folder} (proposer oracle of foresay-oracle)\n")
    code, out, _ = check(folder, "--proposer", "test_cli_check:Plain")
    assert code == 0
    assert "proposer test_cli_check:Plain of given as a class" in out


class Plain(Oracle):
    """The oracle as a bare class."""

    Config = OracleConfig


@pytest.mark.parametrize(
    ("kind", "specs", "message"),
    [
        ("else", [], "no proposer recognises {path!r} (asked: mute, oracle); if one can load it"),
        (
            "twofold",
            [oracle_spec("twin", recognises=lambda path: "a twin")],
            "{path!r} may be for several proposers: oracle (an oracle), twin (a twin); say which "
            "with --proposer",
        ),
        ("damaged", [], "(asked: mute, oracle); oracle cannot be used: its config.json is damaged"),
    ],
    ids=["nobody", "two", "one that cannot"],
)
def test_a_drafter_of_nobodys_or_of_several_is_an_error(
    drafter: Callable[..., Path],
    plugins: PluginManager,
    kind: str,
    specs: list[ProposerSpec],
    message: str,
) -> None:
    mute = oracle_spec("mute", recognises=lambda path: None)
    silent = oracle_spec("unasked", recognises=None)
    plugins.register(offering(proposers=[mute, silent, *specs]), "more")
    path = str(drafter(kind=kind))
    with pytest.raises(ConfigError) as error:
        find_proposer(path, None, plugins)
    assert message.format(path=path) in str(error.value)


def test_a_file_of_a_folder_leads_to_the_folder(
    drafter: Callable[..., Path], plugins: PluginManager
) -> None:
    file = drafter() / "config.json"
    with pytest.raises(ConfigError, match=r"a drafter is a folder with its config.json: '.*'"):
        find_proposer(str(file), None, plugins)


def test_who_raises_or_answers_nonsense_is_logged_and_recognises_nothing(
    plugins: PluginManager, drafter: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    answers: dict[str, Any] = {"number": lambda path: 3, "broken": lambda path: 1 / 0}
    specs = [oracle_spec(name, recognises=answer) for name, answer in answers.items()]
    plugins.register(offering(proposers=specs), "foresay-odd")
    found = ask_who_recognises(plugins.proposers, drafter(), plugins.proposer_owner)
    assert found.by == {"oracle": "an oracle"}
    assert caplog.messages == [
        "recognises() of proposer 'broken', foresay-odd, raised ZeroDivisionError: division by "
        "zero",
        "recognises() of proposer 'number', foresay-odd, returned 3, not a str or None",
    ]


def test_a_recognises_that_is_no_function_fails_its_plugin() -> None:
    with pytest.raises(PluginError, match=r"recognises is 'yes' \(a str\), not a function"):
        PluginManager().register(offering(proposers=[oracle_spec("odd", recognises="yes")]), "odd")


def test_a_models_short_name_goes_to_who_drafts_with_models(plugins: PluginManager) -> None:
    alias = ModelAlias("small", "a small model", lambda: Path("small"))
    plugins.register(offering(models=[alias]), "foresay-small")
    with pytest.raises(ConfigError, match=r"^no drafter 'small': no such file or folder"):
        find_proposer("small", None, plugins)
    whole = oracle_spec("whole", drafter_is_model=True)
    plugins.register(offering(proposers=[whole]), "foresay-whole")
    assert find_proposer("small", None, plugins) == ("whole", "")
    with pytest.raises(ConfigError) as error:
        find_proposer("smal", None, plugins)
    assert str(error.value) == (
        "no drafter 'smal': no such file or folder, and none of that name is registered "
        "(registered: none); did you mean 'small'?; a model of the hub is taken with --proposer "
        "whole"
    )


def save_folder(kind: str, folder: Path) -> Path:
    """A folder as drafters of a kind are published."""
    layout = kind.removeprefix("mtp ")
    if kind.startswith("mtp "):
        config = tiny_models.qwen2().config
        tensors = mtp_checkpoints.module_tensors(layout, config)
        return mtp_checkpoints.save_drafter(folder, tensors, config)
    builders: dict[str, Callable[[], object]] = {
        "eagle": lambda: eagle_heads.eagle().save(folder),
        "eagle .bin": lambda: eagle_heads.eagle().save(folder, "bin"),
        "eagle3": lambda: eagle_heads.eagle3().save(folder),
        "eagle3 speculators": lambda: eagle_heads.eagle3().as_speculators("eagle3").save(folder),
        "medusa": lambda: medusa_heads.as_authors(medusa_heads.random_heads()).save(folder),
        "medusa, vLLM's": lambda: medusa_heads.as_vllm(medusa_heads.random_heads()).save(folder),
        "model": lambda: tiny_models.llama().save_pretrained(folder),
        "gpt2": lambda: tiny_models.gpt2().save_pretrained(folder),
        "model with modules": lambda: mtp_checkpoints.save_target(
            tiny_models.qwen2(),
            folder,
            mtp_checkpoints.module_tensors("mimo", tiny_models.qwen2().config),
        ),
    }
    builders[kind]()
    return folder


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("eagle", {"eagle": "an EAGLE head"}),
        ("eagle .bin", {"eagle": "an EAGLE head"}),
        ("eagle3", {"eagle": "an EAGLE-3 head"}),
        ("eagle3 speculators", {"eagle": "an EAGLE-3 head"}),
        ("medusa", {"medusa": "3 Medusa heads"}),
        ("medusa, vLLM's", {"medusa": "3 Medusa heads"}),
        ("mtp deepseek", {"mtp": "1 MTP module of the DeepSeek-V3 layout"}),
        ("mtp mimo", {"mtp": "1 MTP module of the MiMo layout"}),
        ("mtp qwen3_next", {"mtp": "1 MTP module of the Qwen3-Next layout"}),
        ("model", {"draft_model": "a language model"}),
        ("gpt2", {"draft_model": "a language model"}),
        (
            "model with modules",
            {"draft_model": "a language model", "mtp": "1 MTP module of the MiMo layout"},
        ),
    ],
)
def test_the_proposers_of_this_repository_recognise_their_own(
    kind: str, expected: dict[str, str], tmp_path: Path
) -> None:
    installed = PluginManager.load()
    folder = save_folder(kind, tmp_path / "drafter")
    assert ask_who_recognises(installed.proposers, folder, str).by == expected


# -- output, mistakes, Ctrl-C --------------------------------------------------------------------


def test_json_is_one_object_with_the_documented_keys(
    check: Check, drafter: Callable[..., Path], target: Path
) -> None:
    folder = drafter()
    code, row = row_of(check, folder, "--limit", "2", "--seed", "1", "--temperature", "0.5")
    assert code == 0
    assert list(row) == [
        *("drafter", "proposer", "model", "good", "verdict", "notes", "comparison", "run"),
    ]
    assert (row["drafter"], row["model"], row["good"]) == (str(folder), str(target), True)
    assert list(row["comparison"]) == [
        *("drafter", "target", "layer_taps", "missing_layer_taps", "made_for", "vocabulary"),
    ]
    assert list(row["run"]) == [
        *("prompts", "interrupted", "seconds", "drafting_share", "faults", "stats"),
    ]
    assert row["run"]["prompts"] == 3  # two of "talk", one of "copy"
    assert 0 < row["run"]["drafting_share"] < 1
    assert row["run"]["stats"]["num_output_tokens"] == 3 * 17


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such",), "no drafter 'no/such'"),
        (("{d}", "--model", "no/such"), "no model 'no/such'"),
        (("{d}", "--proposer", "orakle"), "no proposer 'orakle'; installed: oracle"),
        (("{d}", "--proposer", "oracle,oracle"), "expected the one proposer that loads it"),
        (("{d}", "--proposer", "none"), "--proposer 'none': expected the one proposer"),
        (("{d}", "--proposer", "auto"), "--proposer 'auto': expected the one proposer"),
        (("{d}", "-k", "0"), "-k 0: without draft tokens there is nothing to check"),
        (("{d}", "--set", "gap"), "--set 'gap': expected key=value"),
        (("{d}", "--set", "gab=1"), "no setting 'gab'; did you mean 'gap'?"),
        (("{d}", "--set", "gap=6"), "gap=6: at most 5"),
        (("{d}", "--temperature", "-1"), "temperature=-1.0"),
        (("{d}", "--dtype", "float61"), "dtype='float61'"),
        ((), "Missing argument"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(
    check: Check, drafter: Callable[..., Path], arguments: tuple[str, ...], message: str
) -> None:
    folder = str(drafter())
    code, out, err = check(*(argument.format(d=folder) for argument in arguments))
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2
    assert "verdict" not in out
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in err


def test_a_setting_of_the_proposer_reaches_it(check: Check, drafter: Callable[..., Path]) -> None:
    folder = drafter(mistake="shifted")
    assert check(folder, "--set", "gap=1")[0] == 1
    assert check(folder, "--set", "gap=0")[0] == 0


@pytest.mark.parametrize("at", [1, 2], ids=["in the first prompt", "in the second"])
def test_an_interrupt_prints_what_there_is(
    check: Check, drafter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    generate, calls = LLM.generate, []

    def interrupted(self: LLM, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == at:
            raise KeyboardInterrupt
        return generate(self, *arguments)

    monkeypatch.setattr(LLM, "generate", interrupted)
    code, out, err = check(drafter())
    assert code == 130
    assert f"foresay: interrupted: the figures are of {at - 1} of 2 prompts\n" in err
    assert ("verdict: good" in out) == (at == 2)
    assert "faults: none" in out
    assert "Traceback" not in err
