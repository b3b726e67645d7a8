"""Try hostile files and requests for so many minutes, new ones every round: `make fuzz MINUTES=60`.

Ends with exit code 1 at the first that is neither read nor refused in words; hypothesis prints the smallest such input.
Write it into tests/fuzz/corpus, where every later test run tries it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

EXAMPLES_OF_A_ROUND = 1000  # of each reader


def main(minutes: float) -> int:
    deadline, num_rounds = time.monotonic() + 60 * minutes, 0
    environment = {**os.environ, "FUZZ_EXAMPLES": str(EXAMPLES_OF_A_ROUND)}
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=0", "tests/fuzz/test_fuzz.py"]
    while time.monotonic() < deadline:
        done = subprocess.run(command, env=environment)
        if done.returncode != 0:
            return 1
        num_rounds += 1
        print(f"{num_rounds} rounds of {EXAMPLES_OF_A_ROUND} inputs for each reader", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
