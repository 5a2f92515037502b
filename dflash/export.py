"""Write a drafter in the layout that vLLM, SGLang and z-lab's runtime load.

    python -m dflash.export checkpoint=DIR output=DIR [dtype=bfloat16]

checkpoint is a checkpoint, a run folder (its newest checkpoint) or an earlier export.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import MISSING

from dflash.checkpoints.loading import load_drafter
from dflash.cli import parse_cli, run_cli
from dflash.config import Dtype
from dflash.drafter.served import SERVED_CONFIG, save_served


@dataclass(slots=True)
class ExportConfig:
    checkpoint: str = MISSING
    output: str = MISSING
    dtype: Dtype = Dtype.auto  # auto: as stored, which is float32 in a checkpoint


def export(config: ExportConfig) -> None:
    """Write the export, which is read back and compared; raises ValueError, and then leaves nothing at `output`."""
    source, output = Path(config.checkpoint).expanduser(), Path(config.output).expanduser()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"output: {output} exists already; remove it or name another folder")
    drafter = load_drafter(source)
    if config.dtype is not Dtype.auto:
        dtype = getattr(torch, config.dtype.value)
    else:
        dtype = served_dtype(source) if (source / SERVED_CONFIG).is_file() else torch.float32
    save_served(drafter, output, dtype)
    num_parameters = sum(parameter.numel() for parameter in drafter.parameters())
    print(f"exported {num_parameters:,} parameters in {str(dtype).removeprefix('torch.')} from {source} to {output}")


def served_dtype(folder: Path) -> torch.dtype:
    """Dtype in which an export says that its weights are stored; raises ValueError when it is none of ours."""
    stored = json.loads((folder / SERVED_CONFIG).read_text(encoding="utf-8"))
    name = stored.get("dtype") or stored.get("torch_dtype") or Dtype.float32.value
    if name not in Dtype.__members__:
        raise ValueError(f"checkpoint: {folder} is stored in {name}; set dtype to float32, bfloat16 or float16")
    return getattr(torch, name)


def main() -> None:
    export(parse_cli(ExportConfig, sys.argv[1:], __doc__ or ""))


if __name__ == "__main__":
    run_cli(main)
