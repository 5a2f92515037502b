"""The export command: checkpoints, runs and earlier exports become folders that serving engines load."""

import json
from pathlib import Path

import helpers_decoding as helpers
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config

from dflash.checkpoints.loading import load_drafter, training_state
from dflash.checkpoints.meta import CheckpointMeta
from dflash.checkpoints.saving import CheckpointSaver
from dflash.cli import run_cli
from dflash.config import Dtype
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.served import load_served
from dflash.export import ExportConfig, export, main

SERVED = Path(__file__).parent / "fixtures" / "served_pair" / "draft"


def save_run(folder: Path, steps: tuple[int, ...]) -> dict[int, DFlashDrafter]:
    """A run folder with a checkpoint per step, each of another drafter."""
    target = helpers.random_target("full")
    drafters = {step: helpers.random_drafter(target, 4, seed=step).requires_grad_(True) for step in steps}
    saver = CheckpointSaver(folder, None, keep=len(steps))
    for step, drafter in drafters.items():
        optimizer = torch.optim.AdamW(drafter.parameters())
        meta = CheckpointMeta(
            step=step,
            owes_evaluation=False,
            next_index=0,
            num_micro_batches=0,
            fingerprint="f",
            eval_fingerprint=None,
            shape=drafter.shape,
            config={},
        )
        saver.start(meta, training_state(drafter, optimizer, torch.zeros(1, dtype=torch.float64)))
        saver.finish()
    return drafters


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name


def test_an_export_of_another_program_comes_back_the_same(tmp_path: Path) -> None:
    export(ExportConfig(checkpoint=str(SERVED), output=str(tmp_path / "out")))
    assert_same_tensors(load_file(tmp_path / "out" / "model.safetensors"), load_file(SERVED / "model.safetensors"))
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", SERVED))
    assert {key: ours[key] for key in theirs if key in ours} == {key: theirs[key] for key in theirs if key in ours}
    assert theirs.keys() - ours.keys() <= {"rope_scaling"}, "null in theirs, and rope_parameters says it"
    assert ours["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert "partial_rotary_factor" not in json.dumps(ours)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "nothing else is left"


def test_transformers_reads_the_config(tmp_path: Path) -> None:
    export(ExportConfig(checkpoint=str(SERVED), output=str(tmp_path / "out")))
    config = Qwen3Config.from_pretrained(tmp_path / "out")
    assert (config.sliding_window, config.layer_types[0]) == (12, "sliding_attention")
    assert config.rope_parameters["rope_theta"] == 10000.0


def test_checkpoint_and_run(tmp_path: Path) -> None:
    drafters = save_run(tmp_path / "run", steps=(2, 10))
    for source, step in (("run", 10), ("run/checkpoints/step-000002", 2)):
        output = tmp_path / f"out{step}" / "draft"
        export(ExportConfig(checkpoint=str(tmp_path / source), output=str(output)))
        assert_same_tensors(load_file(output / "model.safetensors"), dict(drafters[step].state_dict()))
        assert load_served(output).shape == drafters[step].shape
        assert_same_tensors(load_drafter(tmp_path / source).state_dict(), dict(drafters[step].state_dict()))


def test_dtype_is_kept_unless_another_is_asked_for(tmp_path: Path) -> None:
    export(ExportConfig(checkpoint=str(SERVED), output=str(tmp_path / "half"), dtype=Dtype.bfloat16))
    half = load_file(tmp_path / "half" / "model.safetensors")
    expected = {name: tensor.bfloat16() for name, tensor in load_file(SERVED / "model.safetensors").items()}
    assert_same_tensors(half, expected)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    export(ExportConfig(checkpoint=str(tmp_path / "half"), output=str(tmp_path / "again")))
    assert_same_tensors(load_file(tmp_path / "again" / "model.safetensors"), expected)


def test_existing_output_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    export(ExportConfig(checkpoint=str(SERVED), output=str(output)))
    before = {path: path.read_bytes() for path in output.iterdir()}
    with pytest.raises(ValueError, match="exists already"):
        export(ExportConfig(checkpoint=str(SERVED), output=str(output)))
    assert {path: path.read_bytes() for path in output.iterdir()} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        export(ExportConfig(checkpoint=str(SERVED), output=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("content", ({}, {"config.json": "{}"}, {"config.json": "{", "model.safetensors": ""}))
def test_damaged_source(tmp_path: Path, content: dict[str, str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, text in content.items():
        (source / name).write_text(text)
    with pytest.raises(ValueError, match="source"):
        export(ExportConfig(checkpoint=str(source), output=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["export", f"checkpoint={SERVED}", f"output={tmp_path / 'out'}"])
    run_cli(main)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert capsys.readouterr().out.startswith("exported ")
    monkeypatch.setattr("sys.argv", ["export", "checkpoint=absent", f"output={tmp_path / 'other'}"])
    with pytest.raises(SystemExit) as ended:
        run_cli(main)
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: drafter absent: no such folder")
