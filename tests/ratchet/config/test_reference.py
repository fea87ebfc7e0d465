from pathlib import Path

import pytest

from ratchet.config.keys import fields, section_of_field
from ratchet.config.reference import main, reference
from ratchet.config.section import Section
from ratchet.config.spelling import PREFIXES, SPELLINGS
from ratchet.config.verl_keys import RULES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_page_says_what_the_schema_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "docs/configuration.md is old: run make config-reference"


def test_every_key_and_section_is_described() -> None:
    for name, _, field in fields():
        section = section_of_field(field)
        about = field.description if section is None else section.__doc__
        assert about, name
        assert about != Section.__doc__, name
        assert about.rstrip().endswith("."), name


def test_every_key_spelling_and_rule_is_on_the_page() -> None:
    text = reference()
    for name, _, field in fields():
        section, _, key = name.rpartition(".")
        if section_of_field(field) is None and section:
            table = text.split(f"## `{section}`\n")[1].split("\n## ")[0]
            assert f"\n| `{key}` | " in table, name
    assert all(f"| `{name}` |" in text for name in SPELLINGS)
    assert all(f"| `{name}.*` | `{full}.*` |" in text for name, full in PREFIXES.items())
    assert all(rule.reason in text for rule in RULES if rule.names != ("*._target_",))


def test_every_row_of_a_table_has_a_type_and_as_many_cells_as_its_head() -> None:
    width = 0
    for line in reference().splitlines():
        cells = line.replace("\\|", "").split("|")
        if line.startswith("| ---"):
            width = len(cells)
        elif line.startswith("|") and width:
            assert len(cells) == width, line
            assert width != 6 or cells[2].strip(), line
        elif not line:
            width = 0


def test_the_page_is_written_where_one_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["reference", str(tmp_path / "page.md")])
    main()
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == reference()
