"""The layout holds: imports go down the list, the four rooms meet only in batch.py, profiling stands alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dflash"
ENTRY_POINTS = ("train", "evaluate", "export", "regenerate", "doctor")
ORDER = (
    "roles",
    "checkpoints",
    "decoding",
    "target",
    "transport",
    "drafter",
    "data",
    "batch",
    "groups",
    "cli",
    "config",
    "bounds",
)
ROOMS = {"data", "target", "transport", "drafter"}


def imported_rooms(path: Path) -> set[str]:
    """Rooms of dflash that a file imports, wherever in the file, its own left out."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    rooms = {name.split(".")[1] for name in names if name.startswith("dflash.")} - {"__version__"}
    return rooms - {room_of(path)}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    room, imported = room_of(path), imported_rooms(path)
    if room == "__init__":
        assert not imported
    elif room == "profiling":
        assert not imported, "profiling imports nothing else of dflash"
    elif room in ENTRY_POINTS:
        assert not imported & set(ENTRY_POINTS), "entry points do not import one another"
    else:
        allowed = set(ORDER[ORDER.index(room) + 1 :]) | {"profiling"}
        if room in ROOMS:
            allowed -= ROOMS
        assert imported <= allowed, f"{path.name} may not import {sorted(imported - allowed)}"


def test_tools_are_never_imported() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert "import tools" not in path.read_text() and "from tools" not in path.read_text(), path


def test_importing_does_nothing() -> None:
    """No import of any module prints, starts a thread, joins a group or touches a device."""
    modules = sorted(
        "dflash." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    )
    script = (
        "import importlib, threading, torch\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
