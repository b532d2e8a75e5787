"""The ngram plugin's lookup in Triton against all rules for proposers, in the interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import ngram_lookups
import pytest
from interpreted import HAS_TRITON


@pytest.mark.skipif(not HAS_TRITON, reason="there is no triton")
def test_the_rules_for_proposers_are_kept_in_triton() -> None:
    """Release, preemption, missed steps, changed rows, ids used again, and all the others."""
    code = (
        "import sys, interpreted, ngram_lookups; interpreted._start(); "
        "sys.exit(ngram_lookups.check_conformance())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(ngram_lookups.__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 30
