import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ratchet import __version__
from ratchet.environment import code_revision, set_defaults


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


def test_compiled_kernels_go_to_the_folder_that_is_named_where_it_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "volume" / "vllm"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    set_defaults()
    assert os.environ["VLLM_CACHE_ROOT"] == str(tmp_path / "volume" / "vllm")
    assert (tmp_path / "volume" / "vllm").is_dir()
    assert "TRITON_CACHE_DIR" not in os.environ
    assert not caplog.records


def test_without_a_volume_compiled_kernels_go_to_the_temporary_folder_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A file in the way refuses the administrator as well, as a file system mounted read-only does.
    (tmp_path / "ratchet").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "ratchet" / "triton") + "/")
    set_defaults()
    assert os.environ["TRITON_CACHE_DIR"] == str(Path(tempfile.gettempdir()) / "triton")
    assert [f"{tmp_path}/ratchet/triton/ cannot be written" in record.message for record in caplog.records] == [True]


def test_the_code_is_known_by_its_images_revision_or_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RATCHET_REVISION", raising=False)
    assert code_revision() == __version__
    monkeypatch.setenv("RATCHET_REVISION", "0f1e2d")
    assert code_revision() == "0f1e2d"


def test_the_tracking_server_of_the_installation_is_used_unless_the_platform_names_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = {"RATCHET_MLFLOW_TRACKING_URI": "http://ours:5000", "RATCHET_MLFLOW_TRACKING_PASSWORD": "ours"}
    monkeypatch.setattr(os, "environ", dict(ours))
    set_defaults()
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://ours:5000"
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "ours"
    # Our password is nothing for the server of somebody else.
    monkeypatch.setattr(os, "environ", ours | {"MLFLOW_TRACKING_URI": "http://theirs:5000"})
    set_defaults()
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://theirs:5000"
    assert "MLFLOW_TRACKING_PASSWORD" not in os.environ
