"""What the entry points say to who calls them: arguments of the form key=value, and errors on one line."""

import difflib
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from dflash.config import TrainConfig

T = TypeVar("T")


def parse_cli(schema: type[T], argv: list[str], doc: str) -> T:
    """Read `key=value` arguments into a dataclass; `--help` prints its fields.

    A field with the default MISSING must be given. Errors end the program with one line that names the key.
    """
    if any(argument in ("-h", "--help") for argument in argv):
        print(f"{doc}\n\n{OmegaConf.to_yaml(OmegaConf.structured(schema))}", end="")
        raise SystemExit(0)
    try:
        for argument in argv:
            if "=" not in argument:
                keys = ", ".join(f.name for f in fields(schema))
                raise ValueError(f"{argument}: expected key=value, keys are {keys}")
        merged = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.from_cli(argv))
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ValueError(f"{missing[0]}: must be given, as {missing[0]}=VALUE")
        return OmegaConf.to_object(merged)
    except (ValueError, OmegaConfBaseException) as error:
        print(f"error: {one_line(error, schema)}", file=sys.stderr)
        raise SystemExit(2) from None


def run_cli(main: Callable[[], None]) -> None:
    """Run an entry point, ending it with one line and exit code 1 on an error that is the user's to mend."""
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(1) from None


def one_line(error: BaseException, schema: type = TrainConfig) -> str:
    """Message of an error on one line, for configuration errors with the key and what is allowed."""
    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        key = str(cause.full_key)
        if isinstance(cause, ConfigKeyError | ConfigAttributeError):
            return f"{key}: no such key; {_allowed_keys(key, schema)}"
        return f"{key}: {str(cause.msg or cause).splitlines()[0]}"
    text = str(error).split("Config search path:")[0]
    return " ".join(text.split()) or type(error).__name__


def _allowed_keys(key: str, schema: type) -> str:
    """What may stand where `key` stood: the nearest name first, then all of its level."""
    *parents, name = key.split(".")
    node: Any = schema
    for parent in parents:
        types = {f.name: f.type for f in fields(node)} if is_dataclass(node) else {}
        node = types.get(parent)
    if node is None or not is_dataclass(node):
        return f"{'.'.join(parents)} has no keys below it"
    names = [f.name for f in fields(node)]
    near = difflib.get_close_matches(name, names, n=1)
    prefix = ".".join(parents) + "." if parents else ""
    guess = f"did you mean {prefix}{near[0]}? " if near else ""
    return f"{guess}allowed here: {', '.join(names)}"
