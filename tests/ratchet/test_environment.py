import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_programs_let_idle_threads_sleep_unless_told_otherwise(given: dict[str, str], expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
    program = (
        "import sys, os; from ratchet.environment import set_defaults; set_defaults();"
        "assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


@pytest.mark.parametrize("module", ["ratchet.cli", "ratchet.grains.entry"])
def test_a_program_can_set_its_defaults_before_torch_is_loaded(module: str) -> None:
    program = f"import sys, {module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
