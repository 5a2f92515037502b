"""Write demo prompts made from documented functions of Python's standard library.

    python tools/demo_prompts.py OUTPUT.jsonl [--limit N]

About two thirds ask for code in the form of HumanEval (a signature and its docstring, bare or as "Write a Python
function"), the rest ask for an explanation. The same Python version gives the same file.
"""

import argparse
import importlib
import inspect
import json
import re
import types
import zlib
from collections.abc import Iterator
from pathlib import Path

# All of them import without side effects. The order is the order of the prompts before spacing.
MODULES = """
    builtins abc argparse array ast asyncio base64 binascii bisect bz2 calendar cmath cmd code codecs collections
    collections.abc colorsys concurrent.futures configparser contextlib contextvars copy copyreg csv dataclasses
    datetime decimal difflib dis doctest email email.header email.message email.mime.text email.utils enum fileinput
    filecmp fnmatch fractions ftplib functools gettext getpass glob graphlib gzip hashlib heapq hmac html
    html.parser http http.client http.cookies http.server imaplib importlib importlib.metadata importlib.resources
    importlib.util inspect io ipaddress itertools json json.decoder json.encoder keyword linecache locale logging
    logging.handlers lzma mailbox math mimetypes modulefinder multiprocessing.pool multiprocessing.shared_memory
    netrc numbers operator optparse os os.path pathlib pdb pickle pickletools pkgutil platform plistlib poplib
    posixpath pprint profile pstats py_compile pyclbr pydoc queue quopri random re reprlib runpy sched secrets
    select selectors shelve shlex shutil signal site smtplib socket socketserver sqlite3 ssl stat statistics string
    stringprep struct subprocess symtable sysconfig tabnanny tarfile tempfile textwrap threading time timeit token
    tokenize trace traceback tracemalloc types typing unicodedata unittest unittest.case unittest.mock urllib.error
    urllib.parse urllib.request urllib.robotparser uuid warnings wave weakref xml.dom.minidom xml.etree.ElementTree
    xml.sax.saxutils xmlrpc.client zipapp zipfile zipimport zlib zoneinfo
""".split()  # noqa: SIM905 - a list of 150 quoted words is harder to read

MAX_PROMPT_TOKENS = 110
MIN_DOC_CHARS = 40
# A rough tokenizer: words and their long tails, single digits, punctuation, line ends.
TOKEN = re.compile(r"[A-Za-z]{1,7}|\d|[^\w\s]|_|\n")
HASH_BUCKETS = 12


def documented_functions() -> Iterator[tuple[str, str, str, bool]]:
    """Yield (qualified name, signature, first paragraph of the docstring, is a method) of each public function."""
    seen: set[int] = set()
    for module_name in MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # Some modules are absent on some platforms and builds.
            continue
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or not belongs(value, module):
                continue
            if inspect.isclass(value):
                for method_name, method in sorted(vars(value).items()):
                    if not method_name.startswith("_"):
                        yield from describe(f"{module_name}.{name}.{method_name}", method, seen, is_method=True)
            else:
                yield from describe(f"{module_name}.{name}", value, seen, is_method=False)


def belongs(value: object, module: types.ModuleType) -> bool:
    """Say whether a function or class was defined for this module rather than imported into it."""
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        return False
    origin = (getattr(value, "__module__", None) or "").lstrip("_").split(".")[0]
    return origin in (module.__name__.split(".")[0], "posix", "posixpath", "functools", "operator")


def describe(name: str, function: object, seen: set[int], *, is_method: bool) -> Iterator[tuple[str, str, str, bool]]:
    """Yield at most one entry for `function`, where it has a docstring and a signature that can be printed."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isroutine(function) or id(function) in seen:
        return
    seen.add(id(function))
    doc = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0].strip()
    try:
        signature = str(inspect.signature(function))
    except (ValueError, TypeError):
        return
    # "<object at 0x…>" as a default is no Python, and differs from run to run.
    if "<" in signature or len(doc) < MIN_DOC_CHARS or '"""' in doc or re.search(r"\b0x[0-9a-f]{6,}", doc):
        return
    yield name, signature, doc, is_method


def prompt_of(name: str, signature: str, doc: str, *, is_method: bool) -> str:
    """Phrase the prompt; the kind hangs on the name alone, so that adding a module changes no other prompt."""
    short_name = name.split(".")[-1]
    class_name = name.split(".")[-2]
    call = name.removeprefix("builtins.")
    bucket = zlib.crc32(name.encode()) % HASH_BUCKETS
    body = '    """' + doc.replace("\n", "\n    ") + '\n    """\n'
    if bucket < 6:
        return f"def {short_name}{signature}:\n{body}"
    if bucket < 8:
        kind = f"method `{short_name}` of a class `{class_name}`" if is_method else f"function `{short_name}`"
        return f"Write a Python {kind}:\n\ndef {short_name}{signature}:\n{body}"
    if bucket < 10:
        return f"Explain what `{call}{signature}` does in Python. Its documentation says: {' '.join(doc.split())}"
    if bucket < 11:
        return f"When would I use `{call}` in Python? Show a short example."
    return f"Give a short Python example that uses `{call}{signature}` and explain it."


def demo_prompts() -> list[str]:
    """Return all prompts, each once, in the order of the modules."""
    prompts = (
        prompt_of(name, signature, doc, is_method=is_method)
        for name, signature, doc, is_method in documented_functions()
    )
    return list(dict.fromkeys(prompt for prompt in prompts if len(TOKEN.findall(prompt)) <= MAX_PROMPT_TOKENS))


def evenly_spaced(rows: list[str], limit: int | None) -> list[str]:
    """Return at most `limit` rows, evenly spaced, in order."""
    if limit is None or limit >= len(rows):
        return rows
    return [rows[i * len(rows) // limit] for i in range(limit)]


def write_prompts(prompts: list[str], output: Path) -> None:
    """Write one user message a row."""
    rows = ({"messages": [{"role": "user", "content": prompt}]} for prompt in prompts)
    output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="OUTPUT.jsonl")
    parser.add_argument("--limit", type=int, help="at most so many prompts, evenly spaced")
    arguments = parser.parse_args()
    prompts = evenly_spaced(demo_prompts(), arguments.limit)
    write_prompts(prompts, arguments.output)
    print(f"{len(prompts)} prompts in {arguments.output}")


if __name__ == "__main__":
    main()
