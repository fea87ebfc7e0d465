import hashlib
import sys
import traceback
from pathlib import Path

import pytest

from ratchet.config import load_config, parse_config, user_code
from ratchet.config.user_code import embed, load_all, load_module, load_object
from ratchet.errors import ConfigError

ADVANTAGE = """
from ratchet import register_advantage

@register_advantage("{name}")
def {name}(batch, options):
    return batch.token_rewards, batch.token_rewards
"""


def _entry(source: str, path: str = "mine.py") -> dict[str, str]:
    return {"path": path, "sha256": hashlib.sha256(source.encode()).hexdigest(), "source": source}


def test_a_tree_without_code_stays_as_it_is() -> None:
    tree = {"data": {"train_files": "t"}}
    assert embed(tree) == tree
    assert embed({**tree, "code": []}) == tree
    assert embed({"custom_reward_function": {"path": ""}}) == {"custom_reward_function": {"path": ""}}


def test_files_are_embedded_by_path_relative_to_here_or_to_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "a.py").write_bytes(b"a = 1\r\n")
    (tmp_path / "there" / "b.py").write_text("b = 2\n")
    monkeypatch.chdir(tmp_path / "here")
    tree = {"code": ["a.py", {"path": "b.py"}], "custom_reward_function": {"path": "a.py"}}
    found = embed(tree, folder=tmp_path / "there")["code"]
    assert found == [_entry("a = 1\r\n", "a.py"), _entry("b = 2\n", "b.py")]
    assert tree["code"] == ["a.py", {"path": "b.py"}]
    assert embed({"code": found})["code"] == found, "a second time changes nothing"
    assert embed({"custom_reward_function": {"path": "a.py"}})["code"] == found[:1]
    with pytest.raises(ConfigError, match=r"cannot read the Python file b\.py"):
        embed({"code": ["b.py"]})


def test_source_and_digest_must_agree_and_either_is_enough() -> None:
    entry = _entry("a = 1\n")
    assert embed({"code": [{"path": "mine.py", "source": "a = 1\n"}]})["code"] == [entry]
    with pytest.raises(ConfigError, match=r"mine\.py: its sha256 is [0-9a-f]{64}, and the config says abc"):
        embed({"code": [{**entry, "sha256": "abc"}]})


def test_a_digest_alone_is_checked_against_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("a = 1\n")
    assert (
        embed({"code": [{"path": str(path), "sha256": _entry("a = 1\n")["sha256"]}]})["code"][0]["source"] == "a = 1\n"
    )
    with pytest.raises(ConfigError, match="and the config says"):
        embed({"code": [{"path": str(path), "sha256": _entry("a = 2\n")["sha256"]}]})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (3, "code is 3: expected a list"),
        ([3], "code: 3 is no Python file"),
        ([{"path": "a.py", "text": "x"}], "code: 'text' is no key of a file"),
        ([{"source": "a = 1"}], "a file has no path"),
        ([{"path": "a.py", "source": 3}], "source is 3, not text"),
        ([_entry("a = 1"), _entry("a = 2")], r"two different files are called mine\.py"),
    ],
)
def test_what_is_no_list_of_files_is_refused(code: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        embed({"code": code})


def test_a_file_that_is_too_large_or_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.py"
    path.write_bytes(b"#" * (user_code.MAX_BYTES + 1))
    with pytest.raises(ConfigError, match=r"big\.py has 1048577 bytes, and a config carries files of at most 1048576"):
        embed({"code": [str(path)]})
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        embed({"code": [str(path)]})


def test_a_text_is_executed_once_a_process_whatever_its_path() -> None:
    source = "import itertools\ncount = itertools.count()\nfirst = next(count)\n"
    entry = _entry(source)
    one, other = load_all({"code": [entry, {**entry, "path": "elsewhere.py"}]})
    assert one is other is sys.modules[f"ratchet_user_{entry['sha256']}"]
    assert load_module(source + "\n", "0" * 64, "mine.py") is not one


def test_an_imported_file_is_not_executed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_once.py").write_text("import itertools\nmark = object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import imported_once  # type: ignore[import-not-found]

    entry = embed({"code": [str(tmp_path / "imported_once.py")]})["code"][0]
    assert load_module(entry["source"], entry["sha256"], "another/folder/imported_once.py") is imported_once


def test_names_are_looked_up_with_dots_and_a_missing_one_lists_what_there_is() -> None:
    entries = [_entry("class Outer:\n    class Inner:\n        mark = 7\n")]
    assert load_object(entries, "mine.py", "Outer.Inner").mark == 7
    with pytest.raises(ConfigError, match=r"mine\.py has no 'Other'; it defines Outer"):
        load_object(entries, "mine.py", "Other")
    with pytest.raises(ConfigError, match=r"does not hold 'other\.py'; it holds mine\.py"):
        load_object(entries, "other.py", "Outer")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a = 1\nb = (\n", r"mine\.py>?, line 2: "),
        ("a = 1\n\nraise KeyError('lost')\n", r"mine\.py>?, line 3: KeyError: 'lost'"),
        ("import no_such_module\n", r"line 1: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_fault_in_a_file_names_its_line_and_leaves_no_module(source: str, message: str) -> None:
    entry = _entry(source)
    with pytest.raises(ConfigError, match=message):
        load_all({"code": [entry]})
    assert f"ratchet_user_{entry['sha256']}" not in sys.modules


def test_tracebacks_show_the_lines_of_a_file_that_is_not_on_this_machine() -> None:
    module = load_module(
        *[_entry("def divide(x):\n    return 1 / x  # here\n")[key] for key in ("source", "sha256")], "m.py"
    )
    with pytest.raises(ZeroDivisionError) as caught:
        module.divide(0)
    assert "return 1 / x  # here" in "".join(traceback.format_exception(caught.value))


def test_a_byte_order_mark_and_a_coding_line_are_read_as_python_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "marked.py"
    path.write_bytes(b"\xef\xbb\xbf# -*- coding: utf-8 -*-\nname = '\xc3\xa9'\n")
    assert load_all(embed({"code": [str(path)]}))[0].name == "\xe9"


def test_loading_ends_where_the_main_program_would_start_a_run() -> None:
    source = (
        "from ratchet import HFRollout, PPOTrainer, RLDataFlow\n"
        "def score(data): return [0.0] * len(data)\n"
        "flow = RLDataFlow(rollout=HFRollout('m'), reward=score)\n"
        "try:\n    PPOTrainer(data_flow=flow, config={}).fit()\nexcept Exception:\n    pass\n"
        "raise RuntimeError('never reached')\n"
    )
    module = load_all({"code": [_entry(source, "unguarded.py")]})[0]
    assert callable(module.score)
    assert not hasattr(module, "never")
    user_code.stop_if_loading()  # outside of loading it does nothing


def test_an_advantage_in_a_file_works_by_name_from_yaml(tmp_path: Path) -> None:
    (tmp_path / "algorithm.py").write_text(ADVANTAGE.format(name="from_yaml"))
    (tmp_path / "run.yaml").write_text("code: [algorithm.py]\nalgorithm: {adv_estimator: from_yaml}\n")
    config = load_config(tmp_path / "run.yaml")
    assert config.algorithm.adv_estimator == "from_yaml"
    assert config.code[0].source == ADVANTAGE.format(name="from_yaml")
    (tmp_path / "algorithm.py").unlink()
    assert parse_config(config.model_dump(mode="json")) == config


def test_a_live_object_is_in_no_file() -> None:
    with pytest.raises(ConfigError, match="score was a live object of the process that made this config"):
        load_object([], user_code.LIVE, "score")
