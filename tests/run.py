"""Run the test suite and say how long it took; what ``make test`` calls."""

from __future__ import annotations

import sys
import time

import pytest

if __name__ == "__main__":
    started = time.perf_counter()
    status = pytest.main(sys.argv[1:])
    seconds = time.perf_counter() - started
    print(f"make test took {seconds // 60:.0f} min {seconds % 60:.0f} s (limit: 15 min)")
    sys.exit(status)
