"""Every command that the documentation shows is one that its program takes."""

import argparse
import importlib
import importlib.util
import re
import runpy
import shlex
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser as hydra_parser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from test_config import composed
from torch.distributed.run import get_args_parser as torchrun_parser

from dflash.cli import parse_cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCHEMAS = {
    "dflash.evaluate": "EvaluateConfig",
    "dflash.export": "ExportConfig",
    "dflash.regenerate": "RegenerateConfig",
}
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:python3?|torchrun) .*(?:dflash\.\w+|tools/\w+\.py)")


def commands_of(text: str) -> list[list[str]]:
    """Words of each command in an indented or fenced block or between backticks, without variables before it."""
    joined = re.sub(r"\\\n\s*", " ", text)
    # Prose may break a command between backticks over two lines.
    inline = [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", joined)]
    blocks = [line.strip().removeprefix("$ ") for line in joined.splitlines() if "`" not in line]
    found = [shlex.split(line, comments=True) for line in (*blocks, *inline) if COMMAND.match(line)]
    return [words[next(i for i, word in enumerate(words) if "=" not in word) :] for words in found]


SHOWN = [(page.name, words) for page in PAGES for words in commands_of(page.read_text(encoding="utf-8"))]


class ParsedError(Exception):
    """The program's own parser took the command line."""


def assert_taken(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program of a command read its arguments, and nothing more; SystemExit or ValueError where it refuses."""
    program, *rest = words
    if program == "torchrun":
        launched = torchrun_parser().parse_args(rest)
        assert launched.module, "torchrun starts a module"
        name, arguments = launched.training_script, launched.training_script_args
    elif rest[0] == "-m":
        name, arguments = rest[1], rest[2:]
    else:
        name, arguments = rest[0], rest[1:]
    if name == "dflash.train":
        composed(*hydra_parser().parse_args(arguments).overrides)
    elif name in SCHEMAS:
        parse_cli(getattr(importlib.import_module(name), SCHEMAS[name]), arguments, "")
    elif name.startswith("tools/"):
        parse_tool(ROOT / name, arguments, monkeypatch)
    else:
        assert importlib.util.find_spec(name), f"{name}: no such module"


def parse_tool(script: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *given: object) -> None:
        genuine(self, *given)
        raise ParsedError

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patch.setattr("sys.argv", [str(script), *arguments])
        patch.syspath_prepend(script.parent)
        with pytest.raises(ParsedError):
            runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize(("page", "words"), SHOWN, ids=[f"{page}: {' '.join(words)}"[:70] for page, words in SHOWN])
def test_a_shown_command_is_taken(page: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_taken(words, monkeypatch)


def test_all_entry_points_are_shown() -> None:
    shown = {word for _, words in SHOWN for word in words}
    assert {"dflash.train", *SCHEMAS} <= shown
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "train.py" in text and all(f"{name.split('.')[1]}.py" in text for name in SCHEMAS)


def test_commands_are_found_wherever_they_stand() -> None:
    text = (
        "Call `python -m\ndflash.export a=1` or\n\n    torchrun --nproc_per_node 2 -m dflash.train \\\n"
        "        optim.lr=1 run_dir='a b'  # why\n    python -m pytest\n```\nX=1 python tools/a.py OUT\n```\n"
    )
    assert sorted(commands_of(text)) == [
        ["python", "-m", "dflash.export", "a=1"],
        ["python", "tools/a.py", "OUT"],
        ["torchrun", "--nproc_per_node", "2", "-m", "dflash.train", "optim.lr=1", "run_dir=a b"],
    ]


TRAIN = "torchrun --nproc_per_node 2 -m dflash.train"
EVALUATE = "python -m dflash.evaluate drafter=a target=b prompts=c output=d"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (f"{TRAIN} optim.lr=1e-3", f"{TRAIN} optim.rate=1e-3"),
        (f"{TRAIN} optim.lr=1e-3", f"{TRAIN} optim.lr=fast"),
        (f"{TRAIN} --cfg job", f"{TRAIN} --config job"),
        (TRAIN, TRAIN.replace("--nproc", "--num")),
        (f"{EVALUATE} limit=3", f"{EVALUATE} number=3"),
        (EVALUATE, EVALUATE.removesuffix(" output=d")),
        ("python tools/demo_prompts.py OUT --limit 3", "python tools/demo_prompts.py OUT --limit few"),
        ("python tools/heldout_prompts.py OUT", "python tools/heldout_prompts.py"),
        ("python tools/check_fixture.py FILE", "python tools/check_fixture.py"),
        ("python tools/demo_target.py OUT --wheel-dir D", "python tools/demo_target.py OUT --wheels D"),
    ],
)
def test_a_wrong_command_would_be_noticed(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_taken(shlex.split(right), monkeypatch)
    with pytest.raises((SystemExit, ValueError, OmegaConfBaseException, HydraException)):
        assert_taken(shlex.split(wrong), monkeypatch)
