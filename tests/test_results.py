"""Pages that carry figures say what the committed results say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("script", ["report.py", "performance.py"])
def test_pages_are_up_to_date(script: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
