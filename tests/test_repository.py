"""What a newcomer meets: the README's claims about the tree, and words that the project does not use."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_every_link_of_the_readme_and_the_docs_exists() -> None:
    for page in [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("*/*/README.md"),
    ]:
        if ".venv" in page.parts or ".cache" in page.parts:
            continue
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_readme_shows_the_two_commands_and_ci_runs_the_second() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_every_stage_of_the_readme_has_a_component_and_an_image() -> None:
    rows = re.findall(r"^\|[^|]+\| `components/(\w+)`, (\w+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) >= 9
    for component, image in rows:
        text = (ROOT / "components" / component / "component.py").read_text()
        assert f'image("{image}")' in text, component


def test_no_public_name_uses_a_word_that_the_vocabulary_bans() -> None:
    banned = re.compile(r"^\s*(?:def|class) \w*(?:_uid|logps|logprobs|_resp\b|generations)\w*", re.MULTILINE)
    for path in [*ROOT.glob("ratchet/**/*.py"), *ROOT.glob("components/**/*.py")]:
        assert not banned.search(path.read_text()), path


def test_nothing_committed_names_a_machine_or_holds_gsm8k_rows() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not files:
        pytest.skip("not a git checkout")
    # The first words of the first training and the first test row.
    rows = re.compile("Natalia sold " + "clips to 48|Janet" + "\u2019s ducks lay 16")
    for name in files:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".yaml", ".json", ".jsonl", ".txt", ".toml"} and path.is_file():
            text = path.read_text(errors="replace")
            assert str(ROOT) + "/" not in text, name
            assert not rows.search(text), name
