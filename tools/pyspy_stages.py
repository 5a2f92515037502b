"""Tells the pipeline stage of a stack from the code: `with stats.stage("...")` and `for x in stats.each("...", xs)`.

A frame whose line lies in such a block is in that stage; blocks in blocks, in one function or down the stack, give
`outer/inner`, as in ProfileStats. Where a stack has no usable lines (py-spy's --function or --nolineno, or the code has
changed since), functions decide: what a function calls in one stage only, or what is called from one stage only.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from pyspy_raw import Frame

ENTRY_POINT = "train.py"  # what its imports do not reach is another program, which has no stages
OTHER = "other"  # as in ProfileStats: the time in no stage
_Call = tuple[str, ast.Call]  # the stage path of the block around a call, "" outside of blocks
_Key = TypeVar("_Key")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class _Block:
    """Lines that run in a stage; with a `callee`, only what that calls does."""

    first_line: int
    last_line: int
    stage: str
    callee: str = ""

    def holds(self, line: int, callee: str) -> bool:
        return self.first_line <= line <= self.last_line and self.callee in ("", callee)


@dataclass(slots=True)
class _Scope:
    """One function of the code and its stage blocks, outer before inner."""

    name: str  # qualified: Producer.produce
    first_line: int  # of the decorators, which is what py-spy shows for the function as a whole
    def_line: int
    last_line: int
    blocks: list[_Block] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)


@dataclass(slots=True)
class _Module:
    """One file: its functions, and what its names stand for, as far as its own text tells."""

    file: str  # dflash/roles/target.py
    scopes: list[_Scope] = field(default_factory=list)
    imports: dict[str, str] = field(default_factory=dict)  # name -> file it comes from
    methods: dict[str, set[str]] = field(default_factory=dict)  # class -> its methods
    functions: set[str] = field(default_factory=set)
    has_autograd_function: bool = False
    classes_of: dict[str, str] = field(default_factory=dict)  # variable or field -> class

    def scope_at(self, line: int) -> _Scope | None:
        """The innermost function around a line."""
        around = [scope for scope in self.scopes if scope.first_line <= line <= scope.last_line]
        return min(around, key=lambda scope: scope.last_line - scope.first_line, default=None)

    def defines(self, frame: Frame) -> bool:
        """Whether a function of a frame's name is anywhere in this file."""
        return any(_last(scope.name) == _last(frame.name) for scope in self.scopes if scope.last_line)

    def has(self, frame: Frame) -> bool:
        """Whether a frame's function is in this file, and at the frame's line, where it has one."""
        names = {_last(scope.name) for scope in self.scopes if frame.line is None or scope is self.scope_at(frame.line)}
        return _last(frame.name) in names

    def scope_of(self, frame: Frame) -> str | None:
        """Qualified name of a frame's function; None where its name fits none or several."""
        if "." in frame.name:
            return frame.name
        names = {scope.name for scope in self.scopes if _last(scope.name) == frame.name}
        scope = self.scope_at(frame.line or 0)
        if scope is not None and scope.name in names:
            return scope.name
        return names.pop() if len(names) == 1 else None


class StageMap:
    """Stages of the package in a folder, by line and by function.

    `names` are all stages, `unclear` the places where a stage is entered in a way that this module cannot read, and
    `num_drifted` counts the stacks asked for whose lines do not fit the code: it was another version that ran.
    """

    def __init__(self, package: Path) -> None:
        self.names: set[str] = set()
        self.unclear: list[str] = []
        self.num_drifted = 0
        self._modules: dict[str, _Module] = {}
        self._shortened: dict[str, set[str]] = defaultdict(set)  # py-spy's names of files
        for path in sorted(package.rglob("*.py")):
            file = path.relative_to(package.parent).as_posix()
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, OSError):
                self.unclear.append(f"{file}: cannot be read")
                continue
            self._modules[file] = self._read(file, tree)
            self._shortened[_shortened(path)].add(file)
        self._trained = self._imported_by(f"{package.name}/{ENTRY_POINT}")
        self._by_callee = self._stages_by_callee()
        self.by_function = self._stages_by_function()
        self._files: dict[str, str | None] = {}

    def stage_of(self, frames: tuple[Frame, ...]) -> str:
        """Stage of a stack, root frame first: a name, `outer/inner` for stages in stages, or `other`."""
        path, is_sure, is_drifted = self._by_line(frames)
        self.num_drifted += is_drifted
        if is_drifted or not (path or is_sure):
            path = self._by_name(frames) or path
        return path or OTHER

    def own_line(self, frames: tuple[Frame, ...]) -> str | None:
        """The package's innermost line in a stack, `file:line function`; None where the package is not in it."""
        for frame in reversed(frames):
            module = self._module(frame)
            if module is not None:
                line = "" if frame.line is None else f":{frame.line}"
                return f"{module.file}{line} {frame.name}"
        return None

    def _by_line(self, frames: tuple[Frame, ...]) -> tuple[str, bool, bool]:
        """Path by lines, whether there is no stage where it is empty, and whether lines and names contradict."""
        path: list[str] = []
        is_sure = is_drifted = False
        for frame, callee in zip_longest(frames, frames[1:], fillvalue=Frame("")):
            module = self._module(frame)
            if module is None or frame.line is None:
                continue
            scope = module.scope_at(frame.line)
            if scope is None or _last(scope.name) != _last(frame.name):
                is_drifted |= module.defines(frame)
            elif not self._is_whole_function(frame, scope):
                stages = [block.stage for block in scope.blocks if block.holds(frame.line, _last(callee.name))]
                named = self._by_callee.get((module.file, scope.name, ("", _last(callee.name))))
                is_drifted |= named is not None and named != "/".join(stages)
                path += stages
                is_sure |= any(scope.blocks for scope in module.scopes)
        return "/".join(path), is_sure, is_drifted

    def _by_name(self, frames: tuple[Frame, ...]) -> str | None:
        """Stage by functions, the outermost first."""
        own = [(i, module.file) for i, frame in enumerate(frames) if (module := self._module(frame))]
        if not all(file in self._trained for _, file in own):
            return None
        for place, (i, file) in enumerate(own):
            callees = [("", _last(frame.name)) for frame in frames[i + 1 : i + 2]]
            callees += [(below, self._modules[below].scope_of(frames[j])) for j, below in own[place + 1 : place + 2]]
            name = self._modules[file].scope_of(frames[i])
            found = [self._by_callee.get((file, name, callee)) for callee in callees]
            stage = next(filter(None, [*found, self.by_function.get((file, name))]), None)
            if stage:
                return stage
        return None

    @staticmethod
    def _is_whole_function(frame: Frame, scope: _Scope) -> bool:
        """Whether the line is the function's first one, which `--function` shows and no statement has."""
        return frame.line in (scope.first_line, scope.def_line) and not any(
            block.first_line <= scope.def_line <= block.last_line for block in scope.blocks
        )

    def _module(self, frame: Frame) -> _Module | None:
        """The file of the package that a frame names, shortened or in full."""
        if frame.file is None:
            return None
        if frame.file not in self._files:
            parts = frame.file.replace("\\", "/").split("/")
            tails = ("/".join(parts[i:]) for i in range(len(parts)))
            self._files[frame.file] = next((tail for tail in tails if tail in self._modules), None)
        file = self._files[frame.file]
        if file is not None:
            return self._modules[file]
        # The names of some are so short that files of other packages may have them, too.
        candidates = [self._modules[name] for name in self._shortened.get(frame.file, ())]
        return candidates[0] if len(candidates) == 1 and candidates[0].has(frame) else None

    def _read(self, file: str, tree: ast.Module) -> _Module:
        module = _Module(file)
        for node in ast.walk(tree):
            _note_names(module, node)
        top = _Scope("<module>", 0, 0, 0)
        module.scopes.append(top)
        self._walk(module, tree.body, top, (), "")
        return module

    def _walk(
        self, module: _Module, nodes: Sequence[ast.AST], scope: _Scope, path: tuple[str, ...], prefix: str
    ) -> None:
        """Collect functions, blocks and calls below `nodes`, which lie in `scope` and in the stages `path`.

        `prefix` is what Python puts before the names of functions defined there.
        """
        for node in nodes:
            if isinstance(node, _Function):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                inner = _Scope(f"{prefix}{node.name}", first, node.lineno, node.end_lineno or node.lineno)
                module.scopes.append(inner)
                self._walk(module, node.body, inner, (), f"{inner.name}.<locals>.")
            elif isinstance(node, ast.ClassDef):
                self._walk(module, node.body, scope, path, f"{prefix}{node.name}.")
            elif isinstance(node, ast.For) and (name := self._entered(module, node.iter, "each")) is not None:
                scope.blocks.append(_Block(node.iter.lineno, node.iter.end_lineno or node.lineno, name, "each"))
                scope.calls.append(("/".join((*path, name)), node.iter))
                self._walk(module, node.iter.args, scope, (*path, name), prefix)
                self._walk(module, [node.target, *node.body, *node.orelse], scope, path, prefix)
            elif isinstance(node, ast.With | ast.AsyncWith):
                names = [self._entered(module, item.context_expr, "stage") for item in node.items]
                stages = tuple(name for name in names if name)
                others = [i.context_expr for i, name in zip(node.items, names, strict=True) if name is None]
                self._walk(module, others, scope, path, prefix)
                last = node.end_lineno or node.lineno
                scope.blocks += [_Block(node.body[0].lineno, last, stage) for stage in stages]
                self._walk(module, node.body, scope, path + stages, prefix)
            else:
                if isinstance(node, ast.Call):
                    if _is_stage_call(node, "stage") or _is_stage_call(node, "each"):
                        self.unclear.append(f"{module.file}:{node.lineno}: a stage entered other than by with or for")
                    scope.calls.append(("/".join(path), node))
                self._walk(module, list(ast.iter_child_nodes(node)), scope, path, prefix)

    def _entered(self, module: _Module, expression: ast.expr, method: str) -> str | None:
        """The stage that an expression enters; "" where its name is not written there, None for anything else."""
        if not isinstance(expression, ast.Call) or not _is_stage_call(expression, method):
            return None
        name = expression.args[0] if expression.args else None
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value:
            self.names.add(name.value)
            return name.value
        self.unclear.append(f"{module.file}:{expression.lineno}: a stage whose name is not written there")
        return ""

    def _imported_by(self, file: str) -> set[str]:
        """Files that a file imports, itself included, and those that these import."""
        reached, waiting = set(), [file]
        while waiting:
            module = self._modules.get(waiting.pop())
            if module is not None and module.file not in reached:
                reached.add(module.file)
                waiting += module.imports.values()
        return reached or set(self._modules)

    def _stages_by_callee(self) -> dict[tuple[str, str, tuple[str, str]], str]:
        """(file, function, what it calls) -> stage, where it calls that in one stage only.

        What it calls is ("", name as written there) or (file, function).
        """
        found: dict[tuple[str, str, tuple[str, str]], set[str]] = defaultdict(set)
        for module, scope, stage, call in self._calls():
            if scope.blocks:
                for callee in {("", _last_name(call.func)), *self._resolve(module, call)}:
                    found[module.file, scope.name, callee].add(stage)
        return _only(found)

    def _stages_by_function(self) -> dict[tuple[str, str], str]:
        """(file, function) -> stage, where the function is called in one stage only and from nowhere else."""
        found: dict[tuple[str, str], set[str]] = defaultdict(set)
        backward = set()
        for module, scope, stage, call in self._calls():
            if _last_name(call.func) == "backward" and stage:
                backward.add(stage)
            for target in self._resolve(module, call):
                if target != (module.file, scope.name):
                    found[target].add(stage)
        # On CUDA autograd calls them on a thread of its own, whose stack does not show who asked for it.
        for module in self._modules.values():
            if module.has_autograd_function:
                for scope in module.scopes:
                    if scope.name.endswith(".backward"):
                        found[module.file, scope.name] |= backward
        return _only(found)

    def _calls(self) -> Iterator[tuple[_Module, _Scope, str, ast.Call]]:
        for file in sorted(self._trained):
            module = self._modules[file]
            for scope in module.scopes:
                for stage, call in scope.calls:
                    yield module, scope, stage, call

    def _resolve(self, module: _Module, call: ast.Call) -> Iterator[tuple[str, str]]:
        """(file, function) that a call runs, where names and annotations of its own file tell."""
        function = call.func
        if isinstance(function, ast.Name):
            home = self._home(module, function.id)
            if home is not None and function.id in home.functions:
                yield home.file, function.id
            return
        if not isinstance(function, ast.Attribute):
            return
        receiver = _last_name(function.value)
        for variable, method in ((receiver, function.attr), (function.attr, "forward")):
            owner = module.classes_of.get(variable) or module.classes_of.get(variable.lstrip("_")) or variable
            home = self._home(module, owner)
            if home is not None and method in home.methods.get(owner, ()):
                yield home.file, f"{owner}.{method}"

    def _home(self, module: _Module, name: str) -> _Module | None:
        if name in module.methods or name in module.functions:
            return module
        return self._modules.get(module.imports.get(name, ""))


def _note_names(module: _Module, node: ast.AST) -> None:
    """Note what a statement or parameter says of the names in its file."""
    if isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            module.imports[alias.asname or alias.name] = node.module.replace(".", "/") + ".py"
    elif isinstance(node, ast.Module):
        module.functions |= {child.name for child in node.body if isinstance(child, _Function)}
    elif isinstance(node, ast.ClassDef):
        module.has_autograd_function |= any(ast.unparse(base).endswith("autograd.Function") for base in node.bases)
        module.methods[node.name] = {child.name for child in node.body if isinstance(child, _Function)}
    elif isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Name):
        module.classes_of[_last_name(node.target)] = node.annotation.id
    elif isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name):
        module.classes_of.setdefault(node.arg, node.annotation.id)
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        maker = node.value.func
        owner = maker.value if isinstance(maker, ast.Attribute) else maker  # Class(...) or Class.load(...)
        if isinstance(owner, ast.Name) and owner.id[:1].isupper():
            for target in node.targets:
                module.classes_of.setdefault(_last_name(target), owner.id)


def _shortened(path: Path) -> str:
    """A file's name as py-spy shows it: from the outermost of the folders around it that all have an `__init__.py`."""
    folder = path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return path.relative_to(folder).as_posix()


def _is_stage_call(call: ast.Call, method: str) -> bool:
    """Whether a call is `<...stats>.<method>(...)`; other objects have methods of that name, too."""
    function = call.func
    return isinstance(function, ast.Attribute) and function.attr == method and "stats" in _last_name(function.value)


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _last(name: str) -> str:
    """A function's own name, without its classes: py-spy shows qualified names from Python 3.11 on."""
    return name.rsplit(".", 1)[-1]


def _only(found: dict[_Key, set[str]]) -> dict[_Key, str]:
    return {key: next(iter(stages)) for key, stages in found.items() if len(stages) == 1 and "" not in stages}
