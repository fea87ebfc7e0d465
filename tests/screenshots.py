"""`python -m tests.screenshots [FOLDER]`: take the pictures of docs/audit.md, and print what its commands say.

The story of `tests.audit_story` is told to a real S3 server and a real MLflow, whose pages are looked at in Chromium.
What is printed is for whoever writes the page: every command in full.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from demo.servers import mlflow_server, seaweedfs
from tests import audit_story
from tests.browser import Page, open_page
from tests.pages import ROOT, commands

PAGE = "docs/audit.md"
MODE = "workflowType=machine_learning"
"""Of two kinds of pages that MLflow has, those of training."""
MAX_BYTES = 250_000
REPORTS = {"desktop": (1280, 1300), "phone": (390, 1100)}
"""Screen of a report -> its width and height."""


def main(folder: Path) -> None:
    """Tell the story, run the page's commands and take every picture."""
    with TemporaryDirectory() as scratch, _servers(Path(scratch)) as uri:
        audit_story.tell(Path(scratch), during_the_second=_outage)
        with open_page() as tab:
            _mlflow(tab, uri, folder)
        for command, _ in commands(PAGE):
            sys.stdout.write(f"$ {command}\n{_said(command, Path(scratch))}\n")
        [report] = Path(scratch).glob("*.html")
        with open_page() as tab:
            _reports(tab, report, folder)


@contextmanager
def _servers(folder: Path) -> Iterator[str]:
    """Start both servers, which this process's variables name then; MLflow's address is yielded."""
    with seaweedfs(folder / "s3") as s3:
        s3.create_bucket(audit_story.BUCKET)
        os.environ.update({**s3.env(), "RATCHET_ROOT": audit_story.ROOT})
        with mlflow_server(folder / "mlflow") as mlflow:
            os.environ.update(mlflow.env())
            yield mlflow.uri


def _outage() -> Callable[[], None]:
    """Name an MLflow that does not answer, until the returned function is called."""
    name = "MLFLOW_TRACKING_URI"
    before, os.environ[name] = os.environ[name], "http://127.0.0.1:9"
    return lambda: os.environ.update({name: before})


def _said(command: str, folder: Path) -> str:
    words = [os.path.expandvars(word) for word in command.split()]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "ratchet.cli", *words[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def _reports(tab: Page, page: Path, folder: Path) -> None:
    for screen, (width, height) in REPORTS.items():
        for scheme in ("light", "dark"):
            tab.look(width=width, height=height, scheme=scheme)
            tab.open(page.as_uri())
            tab.wait("document.documentElement?.dataset.complete > 0")
            _take(tab, folder / f"report-{screen}-{scheme}.png")


def _mlflow(tab: Page, uri: str, folder: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    version = client.get_model_version_by_alias(audit_story.NAME, "champion")
    experiment = client.get_run(version.run_id).info.experiment_id
    run = f"{uri}/#/experiments/{experiment}/runs/{version.run_id}"
    last = audit_story.NIGHTS["night-2"]
    tab.look(width=1280, height=1080)
    _go(tab, f"{uri}/#/models/{audit_story.NAME}/versions/{version.version}?{MODE}")
    _shows(tab, "champion", "ratchet.decided_by", "Inputs (")
    # An assistant, which stays away then.
    tab.run("document.querySelector('[aria-label=Close]')?.click()")
    tab.run(f"{_found('ratchet.data')}.scrollIntoView()")
    _click(tab, "Outputs (")
    _click(tab, "Inputs (")
    _take(tab, folder / "mlflow-model.png")
    tab.look(width=1280, height=800)
    _go(tab, f"{run}?{MODE}")
    _shows(tab, "Datasets", "ratchet.root", "Finished")
    _take(tab, folder / "mlflow-run.png")
    _click(tab, "data/train (")
    _shows(tab, "Digest")
    tab.look(width=1280, height=420)
    _take(tab, folder / "mlflow-datasets.png")
    tab.look(width=1280, height=1010)
    _go(tab, f"{run}/model-metrics?{MODE}")
    _shows(tab, "entropy")
    _search(tab, "Search metric charts", "cost|critic/score")
    _shows(tab, "night-2 (cost/money)", "night-2 (critic/score/mean)")
    _take(tab, folder / "mlflow-metrics.png")
    _go(tab, f"{run}/artifacts/completions/train/step-{last:06d}.json?{MODE}")
    _shows(tab, "View as table", "ground_truth")
    _take(tab, folder / "mlflow-completions.png")


def _go(tab: Page, url: str) -> None:
    # Of two addresses that differ behind the # alone, the browser would stay on the first.
    tab.open("about:blank")
    tab.open(url)


def _shows(tab: Page, *texts: str) -> None:
    for text in texts:
        tab.wait(f"document.body?.innerText.includes({text!r})")


def _click(tab: Page, text: str) -> None:
    """Click on the innermost element that begins with `text`."""
    found = _found(text)
    tab.wait(f"Boolean({found})")
    x, y = tab.run(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({found}.getBoundingClientRect())")
    for kind in ("mousePressed", "mouseReleased"):
        tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


def _found(text: str) -> str:
    return f"[...document.querySelectorAll('*')].filter((one) => one.textContent.trim().startsWith({text!r})).at(-1)"


def _search(tab: Page, placeholder: str, text: str) -> None:
    tab.run(f"document.querySelector('input[placeholder=\"{placeholder}\"]').focus()")
    tab.call("Input.insertText", text=text)


def _take(tab: Page, path: Path) -> None:
    """Save what is seen with few colours; MLflow's charts and drawers move for a moment."""
    from PIL import Image

    time.sleep(2.5)
    tab.screenshot(path)
    with Image.open(path) as image:
        few = image.convert("RGB").quantize(128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    assert path.stat().st_size < MAX_BYTES, (path, path.stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
