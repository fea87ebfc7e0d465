import subprocess
import sys
import time

import pytest

import ratchet

HEAVY = ("torch", "transformers", "vllm", "kfp", "mlflow", "datasets", "pyarrow", "boto3")
PROGRAM = """
import runpy, sys
{what}
print("loaded:", sorted(set({heavy!r}) & set(sys.modules)))
"""


def _heavy_modules_after(what: str) -> str:
    program = PROGRAM.format(what=what, heavy=HEAVY)
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return finished.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "what",
    [
        "import ratchet",
        "import ratchet; [getattr(ratchet, name) for name in ratchet.__all__]",
        "import ratchet.store.run, ratchet.store.manifest",
        "from ratchet import RLDataFlow, HFRollout; RLDataFlow(rollout=HFRollout(model='m')).config()",
    ],
)
def test_a_light_import_loads_no_engine_and_no_server_client(what: str) -> None:
    assert _heavy_modules_after(what) == "loaded: []"


def test_help_loads_nothing_heavy_and_comes_at_once() -> None:
    what = (
        "sys.argv = ['ratchet', '--help']\n"
        "try:\n    runpy.run_module('ratchet.cli', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code"
    )
    started = time.perf_counter()
    assert _heavy_modules_after(what) == "loaded: []"
    # 0.3 s on an idle machine; the bound is for one that runs other tests as well.
    assert time.perf_counter() - started < 2


def test_public_names_resolve_and_others_are_refused() -> None:
    for name in ratchet.__all__:
        assert getattr(ratchet, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = ratchet.Trainer
