"""The stage of a py-spy stack: told from the code's own blocks, of which none may be unknown to the tool."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from pyspy_raw import Frame  # noqa: E402
from pyspy_stages import OTHER, StageMap  # noqa: E402

PACKAGE = ROOT / "dflash"


@pytest.fixture(scope="module")
def stages() -> StageMap:
    return StageMap(PACKAGE)


def independent_stage_names() -> set[str]:
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    return set(re.findall(r"stats\.(?:stage|each)\(\s*\"([^\"]+)\"", text))


def test_all_stages_of_the_code_are_known(stages: StageMap) -> None:
    """Fails when a stage is entered in a way that the tool does not understand."""
    assert stages.unclear == []
    assert stages.names == independent_stage_names()
    assert {"forward", "pack", "send", "blocked", "starved", "receive", "layers", "backward"} <= stages.names


def test_a_stage_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "a.py").write_text(
        "def f(stats, name, stack, host):\n    with stats.stage(name):\n        pass\n"
        "    stack.enter_context(stats.stage('x'))\n    host.stage(name)\n"
    )
    assert [text.split(":")[1] for text in StageMap(package).unclear] == ["2", "4"]


def stage_blocks() -> list[tuple[str, str, int, list[str]]]:
    """(file, function, line, stages) of every statement directly in a `with` block of the code, found anew here."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()

        def visit(node: ast.AST, function: str, names: list[str], file: str = file) -> None:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef):
                    visit(child, child.name, [])
                    continue
                inside = list(names)
                if isinstance(child, ast.With):
                    texts = [ast.unparse(item.context_expr) for item in child.items]
                    inside += [m[1] for text in texts if (m := re.search(r"stats\.stage\('(\w+)'\)$", text))]
                    if inside != names:
                        found.extend((file, function, statement.lineno, inside) for statement in child.body)
                visit(child, function, inside)

        visit(ast.parse(path.read_text()), "<module>", [])
    return found


def test_every_block_is_found_by_its_lines(stages: StageMap) -> None:
    blocks = stage_blocks()
    assert len(blocks) > 15 and {name for *_, names in blocks for name in names} <= stages.names
    for file, function, line, names in blocks:
        for shown in (file, f"/opt/somewhere/dflash/{file}"):
            frames = (
                Frame("<module>", "dflash/train.py", 1),
                Frame(f"X.{function}", shown, line),
                Frame("g", "t.py", 1),
            )
            assert stages.stage_of(frames) == "/".join(names), (file, line)


def test_stages_down_a_stack(tmp_path: Path) -> None:
    """Blocks in other functions nest; the line of `with` is outside; lambdas and comprehensions belong around them."""
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "a.py").write_text(
        "def outer(stats, inner):\n"  # 1
        "    with stats.stage('evaluate'):\n"
        "        inner(lambda: 1)\n"  # 3
        "    inner(2)\n"
        "    for x in stats.each('data', [1]):\n"  # 5
        "        inner(x)\n"
        "class C:\n"
        "    def work(self):\n"  # 8
        "        with self.lock, self.stats.stage('layers'):\n"
        "            return [f(i)\n"
        "                    for i in range(3)]\n"  # 11
    )
    stages = StageMap(package)

    def stage(*frames: tuple[str, int]) -> str:
        return stages.stage_of(tuple(Frame(name, "pkg/a.py", line) for name, line in frames))

    assert stage(("outer", 3)) == "evaluate"
    assert stage(("outer", 3), ("outer.<locals>.<lambda>", 3)) == "evaluate"
    assert stage(("outer", 3), ("C.work", 10)) == "evaluate/layers"
    assert stage(("outer", 4), ("work", 11), ("<listcomp>", 10)) == "layers"
    assert stage(("outer", 2)) == stage(("outer", 4)) == stage(("C.work", 9)) == OTHER
    assert stage(("outer", 5)) == OTHER and stage(("outer", 6), ("g", 1)) == OTHER
    assert stages.stage_of((Frame("outer", "pkg/a.py", 5), Frame("S.each", "s.py", 3))) == "data"
    assert stages.stage_of((Frame("work", "other/a.py", 10),)) == OTHER
    assert stages.num_drifted == 0


def test_lines_of_another_version(tmp_path: Path) -> None:
    """Where lines and names contradict, names decide, and it is told."""
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "a.py").write_text(
        "def one(stats, model):\n"
        "    with stats.stage('forward'):\n"
        "        model.run()\n"
        "    with stats.stage('pack'):\n"
        "        model.shrink()\n"
        "def two():\n"
        "    pass\n"
    )
    stages = StageMap(package)
    for line, callee, stage, num_drifted in (
        (3, "run", "forward", 0),
        (5, "run", "forward", 1),
        (7, "shrink", "pack", 2),
    ):
        frames = (Frame("one", "pkg/a.py", line), Frame(f"Model.{callee}", "m.py", 1))
        assert (stages.stage_of(frames), stages.num_drifted) == (stage, num_drifted)


def test_stages_without_lines(stages: StageMap) -> None:
    """py-spy's --nolineno and --function, and stacks of threads that autograd started."""

    def stage(*frames: tuple[str, str]) -> str:
        return stages.stage_of(tuple(Frame(name, file) for name, file in frames))

    target, trainer = "dflash/roles/target.py", "dflash/roles/trainer.py"
    model = ("Module._wrapped_call_impl", "torch/nn/modules/module.py")
    assert stage(("run_target", target), ("HiddenStateSender.send", "dflash/transport/sender.py")) == "send"
    assert (
        stage(("run_target", target), ("HiddenStateSender.wait_for_buffer", "dflash/transport/sender.py")) == "blocked"
    )
    assert stage(("Producer.produce", target), ("HiddenStatePacker.pack", "dflash/target/packing.py")) == "pack"
    assert stage(("DrafterTrainer.accumulate", trainer), ("Tensor.backward", "torch/_tensor.py")) == "backward"
    assert stage(("DrafterTrainer._sums", trainer), ("draw_anchors", "dflash/drafter/anchors.py"), model) == "anchors"
    assert stage(("objective_sums", "dflash/drafter/objective.py"), model) == "head_and_loss"
    assert stage(("_TiledAttention.backward", "dflash/drafter/attention_tiles.py")) == "backward"
    assert stage(("<module>", "dflash/evaluate.py"), ("objective_sums", "dflash/drafter/objective.py")) == OTHER
    assert stage(("run_target", target)) == stage(("f", "torch/x.py")) == stage() == OTHER
