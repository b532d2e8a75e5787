"""A drafter's files: every tensor accounted for, every mistake named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foresay.core.errors import ModelError
from foresay.core.worker.checkpoint import Checkpoint, read_config

TENSORS = {
    "fc.weight": torch.arange(8.0).view(2, 4),
    "layers.0.norm.weight": torch.ones(2),
    "d2t": torch.tensor([0, 3, 3]),
}


def folder(path: Path, kind: str) -> Path:
    if kind == "safetensors":
        save_file(TENSORS, path / "model.safetensors")
    elif kind == "shards":
        names = list(TENSORS)
        for number, part in enumerate((names[:1], names[1:])):
            save_file({n: TENSORS[n] for n in part}, path / f"model-0000{number}.safetensors")
    else:
        torch.save(TENSORS, path / f"pytorch_model.{kind}")
    return path


@pytest.mark.parametrize("kind", ["safetensors", "shards", "bin", "pt"])
def test_tensors_are_read_from_any_kind_of_file(tmp_path: Path, kind: str) -> None:
    checkpoint = Checkpoint.open(folder(tmp_path, kind))
    assert checkpoint.names == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.take(name, [None] * tensor.dim()), tensor)
    checkpoint.finish()


def test_a_single_file_is_opened_too(tmp_path: Path) -> None:
    file = folder(tmp_path, "pt") / "pytorch_model.pt"
    assert "d2t" in Checkpoint.open(file)


def test_a_missing_tensor_is_named_with_the_nearest(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(folder(tmp_path, "bin"))
    with pytest.raises(ModelError, match=r"no tensor 'fc.weigth'; did you mean 'fc.weight'\?"):
        checkpoint.take("fc.weigth", [2, 4])
    assert checkpoint.take_if_there("fc.bias", [2]) is None


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(folder(tmp_path, "bin"))
    with pytest.raises(ModelError, match=r"tensor 'fc.weight' is \[2, 4\], expected \[any, 8\]"):
        checkpoint.take("fc.weight", [None, 8])
    with pytest.raises(ModelError, match=r"tensor 'd2t' is \[3\], expected \[3, 1\]"):
        checkpoint.take_if_there("d2t", [3, 1])


def test_a_tensor_that_nobody_took_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(folder(tmp_path, "bin"))
    checkpoint.take("fc.weight", [2, 4])
    checkpoint.ignore(["d2t"])
    with pytest.raises(ModelError, match=r"does not know: layers.0.norm.weight"):
        checkpoint.finish()


def test_names_may_be_cut_and_changed(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(folder(tmp_path, "bin"))
    assert checkpoint.under("layers.0.").names == ["norm.weight"]
    assert "x.d2t" in checkpoint.renamed(lambda name: f"x.{name}")
    with pytest.raises(ModelError, match="holds 'same' twice"):
        checkpoint.renamed(lambda _name: "same")


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no weights"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no file of torch's")
    with pytest.raises(ModelError, match=r"pytorch_model.bin' cannot be read"):
        Checkpoint.open(tmp_path)
    torch.save({"weights": [1, 2]}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no mapping of names to tensors"):
        Checkpoint.open(tmp_path)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "boom",))  # type: ignore[return-value]

    torch.save({"x": Bomb()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be read"):
        Checkpoint.open(tmp_path)
    assert not (tmp_path / "boom").exists()


def test_a_config_is_a_json_object(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config.json: is it a drafter's folder\?"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json' cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="holds no JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    assert read_config(tmp_path) == {"hidden_size": 8}
