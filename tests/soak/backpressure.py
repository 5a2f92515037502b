"""Backpressure under many random settings: `python tests/soak/backpressure.py [number] [first seed]`.

Each plays one exchange between real processes and holds it against a witness; prints what fails and exits with 1.
"""

import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent
if str(TESTS) not in sys.path:
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from helpers_backpressure import check_random  # noqa: E402

NUM_SETTINGS = 150
FIRST_SEED = 1000  # the ordinary suite plays the first dozen


def main() -> int:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_SETTINGS
    first_seed = int(sys.argv[2]) if len(sys.argv) > 2 else FIRST_SEED
    started_s, num_failed, slowest_s = time.monotonic(), 0, 0.0
    for seed in range(first_seed, first_seed + number):
        seed_started_s = time.monotonic()
        try:
            check_random(seed)
        except AssertionError as error:
            num_failed += 1
            print(error, flush=True)
        slowest_s = max(slowest_s, time.monotonic() - seed_started_s)
    seconds = time.monotonic() - started_s
    print(f"{number} random settings, {num_failed} failed, in {seconds:.0f} s; the slowest took {slowest_s:.1f} s")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
