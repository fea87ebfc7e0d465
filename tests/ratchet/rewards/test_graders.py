"""Grading by everything that a config names, weighted, with every part kept."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.data.prompt_rows import PromptRow
from ratchet.errors import ConfigError, DataError, NumericsError
from ratchet.rewards.graders import Grader, GradeRow, RewardResult, open_grader


class FakeModel:
    """Scores a conversation by the length of its last message."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.conversations: list[list[dict[str, str]]] = []

    def chat_scores(self, conversations: Sequence[list[dict[str, str]]]) -> list[float]:
        self.conversations += conversations
        return [float(len(conversation[-1]["content"])) for conversation in conversations]


def _config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def _row(completion: str = "#### 72", *, where: str = "rollout 0", num_tokens: int = 3, **fields: Any) -> GradeRow:
    return GradeRow(
        **{
            "where": where,
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "q"}],
            "completion": completion,
            "ground_truth": "72",
            "completion_token_ids": list(range(num_tokens)),
            **fields,
        }
    )


def _custom(folder: Path, source: str, *, weight: float | None = None, name: str = "compute_score") -> RunConfig:
    path = folder / "mine.py"
    path.write_text(source)
    weights = {} if weight is None else {"rule": 1.0, "custom": weight}
    return _config(
        reward_model={"type": "custom", "weights": weights}, custom_reward_function={"path": str(path), "name": name}
    )


def test_without_any_setting_the_rule_of_the_data_source_grades() -> None:
    results = open_grader(_config()).grade([_row(), _row("#### 73"), _row("none")])
    assert results == [
        RewardResult(1.0, {"rule": 1.0}, "72", True),
        RewardResult(0.0, {"rule": 0.0}, "73", True),
        RewardResult(0.0, {"rule": 0.0}, None, False),
    ]
    assert open_grader(_config()).grade([]) == []


def test_the_mode_of_gsm8k_reaches_the_rule() -> None:
    (result,) = open_grader(_config(reward_model={"gsm8k_mode": "strict"})).grade([_row("#### 72.0")])
    assert result.reward == 0.0


def test_parts_are_added_with_their_weights_and_kept_as_they_are() -> None:
    model = FakeModel("")
    config = _config(reward_model={"weights": {"model": 0.5, "rule": 2.0}, "path": "a/model"})
    results = open_grader(config, open_model=lambda path: model).grade([_row(), _row("73")])
    # 2 * 1 + 0.5 * len("#### 72") and 2 * 0 + 0.5 * len("73")
    assert [result.reward for result in results] == [5.5, 1.0]
    assert [result.breakdown for result in results] == [{"rule": 1.0, "model": 7.0}, {"rule": 0.0, "model": 2.0}]
    assert [result.extracted for result in results] == ["72", "73"]
    assert model.conversations[1] == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "73"}]


def test_a_reward_model_is_opened_with_the_first_row_and_stays_open() -> None:
    opened: list[str] = []

    def open_model(path: str) -> FakeModel:
        opened.append(path)
        return FakeModel(path)

    grader = open_grader(_config(reward_model={"type": "model", "path": "a/model"}), open_model=open_model)
    grader.check(["whatever"])
    assert opened == []
    assert grader.grade([_row("abc")])[0].reward == 3.0
    grader.grade([_row("abc")])
    assert opened == ["a/model"]


@pytest.mark.parametrize(
    ("scores", "error", "message"),
    [
        ([1.0], DataError, "a/model: expected 2 scores, got 1"),
        ([1.0, float("nan")], NumericsError, "rollout 1: the reward model a/model: .*nan"),
    ],
)
def test_scores_of_a_model_that_cannot_be_used_are_errors(
    scores: list[float], error: type[Exception], message: str
) -> None:
    model = FakeModel("")
    model.chat_scores = lambda conversations: scores  # type: ignore[method-assign]
    grader = open_grader(_config(reward_model={"type": "model", "path": "a/model"}), open_model=lambda path: model)
    with pytest.raises(error, match=message):
        grader.grade([_row(), _row(where="rollout 1")])


def test_a_function_by_path_and_name_grades(tmp_path: Path) -> None:
    source = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(len(solution_str)), 'is_right': solution_str.endswith(ground_truth)}\n"
    )
    (alone,) = open_grader(_custom(tmp_path, source)).grade([_row()])
    assert alone == RewardResult(7.0, {"custom": 7.0, "is_right": 1.0})
    (mixed,) = open_grader(_custom(tmp_path, source, weight=0.1)).grade([_row()])
    assert mixed.reward == pytest.approx(1.7)
    assert mixed.breakdown == {"rule": 1.0, "custom": 7.0, "is_right": 1.0}


def test_a_number_that_is_called_like_a_part_is_refused(tmp_path: Path) -> None:
    source = "def compute_score(solution_str):\n    return {'score': 1.0, 'rule': 2.0}\n"
    grader = open_grader(_custom(tmp_path, source, weight=1.0))
    with pytest.raises(DataError, match="rollout 0: the custom reward returned 'rule'"):
        grader.grade([_row()])


def test_token_rewards_are_mixed_by_token_and_other_parts_reward_the_last_one(tmp_path: Path) -> None:
    source = "def compute_score(data):\n    return [[0.5] * len(item.completion_token_ids) for item in data]\n"
    rows = [_row(num_tokens=3), _row("#### 73", num_tokens=2), _row(num_tokens=0)]
    results = open_grader(_custom(tmp_path, source, weight=2.0)).grade(rows)
    assert [result.token_rewards for result in results] == [[1.0, 1.0, 2.0], [1.0, 1.0], []]
    assert [result.reward for result in results] == [4.0, 2.0, 1.0]
    assert results[0].breakdown == {"rule": 1.0, "custom": 1.5}


def test_results_that_a_function_makes_itself_are_checked_too() -> None:
    def too_long(solution_str: str) -> RewardResult:
        return RewardResult(1.0, token_rewards=[1.0])

    def not_finite(solution_str: str) -> RewardResult:
        return RewardResult(1.0, {"length": float("nan")})

    with pytest.raises(DataError, match="rollout 0: the custom reward has 1 token rewards, the completion 3 tokens"):
        open_grader(_config(), custom=too_long).grade([_row()])
    with pytest.raises(NumericsError, match="rollout 0: the custom reward, length: "):
        open_grader(_config(), custom=not_finite).grade([_row()])


def test_an_object_that_exists_grades_as_it_is() -> None:
    grader = open_grader(_config(), custom=lambda data: [float(len(item.completion)) for item in data])
    assert grader.grade([_row("abc")]) == [RewardResult(3.0, {"custom": 3.0})]


def test_files_of_the_config_register_rewards(tmp_path: Path) -> None:
    path = tmp_path / "rules.py"
    path.write_text(
        "from ratchet.rewards.registry import register_reward\n\n"
        "@register_reward('tests/from-a-file')\n"
        "def grade(solution_str, ground_truth):\n    return 2.0 * (solution_str == ground_truth)\n"
    )
    config = _config(code=[{"path": str(path)}])
    for _ in range(2):
        grader = open_grader(config)
    grader.check(["tests/from-a-file"])
    rows = [_row("72", data_source="tests/from-a-file"), _row()]
    assert [result.reward for result in grader.grade(rows)] == [2.0, 1.0]


def test_what_a_registered_function_raises_names_row_and_function(tmp_path: Path) -> None:
    path = tmp_path / "rules.py"
    path.write_text(
        "from ratchet.rewards.registry import register_reward\n\n"
        "@register_reward('tests/broken')\n"
        "def grade_it(solution_str):\n    return 1 / len(solution_str)\n"
    )
    grader = open_grader(_config(code=[{"path": str(path)}]))
    with pytest.raises(DataError, match="rollout 5: the reward grade_it raised ZeroDivisionError"):
        grader.grade([_row("x", data_source="tests/broken"), _row("", where="rollout 5", data_source="tests/broken")])


def test_the_overlong_penalty_is_a_part_of_its_own_which_evaluations_leave_out() -> None:
    config = _config(
        data={"max_response_length": 100},
        reward_model={
            "reward_manager": "dapo",
            "overlong_buffer": {"enable": True, "len": 20, "penalty_factor": 2.0},
        },
    )
    rows = [_row(num_tokens=length) for length in (80, 85, 100)]
    results = open_grader(config).grade(rows)
    # The penalty falls from 0 at 80 tokens to -2 at 100.
    assert [result.breakdown["overlong"] for result in results] == [0.0, -0.5, -2.0]
    assert [result.reward for result in results] == [1.0, 0.5, -1.0]
    assert [result.reward for result in open_grader(config).grade(rows, shaping=False)] == [1.0, 1.0, 1.0]
    by_token = open_grader(config, custom=lambda data: [[0.01] * len(item.completion_token_ids) for item in data])
    (result,) = by_token.grade([_row(num_tokens=85)])
    assert result.token_rewards == [*[0.01] * 84, 0.01 - 0.5]
    assert result.reward == pytest.approx(0.85 - 0.5)


def test_what_a_function_says_about_a_completion_is_kept(tmp_path: Path) -> None:
    source = (
        "def compute_score(solution_str):\n"
        "    return {'score': -1.0, 'extracted': None, 'is_parseable': False, 'error': 'no answer'}\n"
    )
    (alone,) = open_grader(_custom(tmp_path, source)).grade([_row()])
    assert alone == RewardResult(-1.0, {"custom": -1.0}, None, False, "no answer")
    (mixed,) = open_grader(_custom(tmp_path, source, weight=0.5)).grade([_row()])
    assert mixed == RewardResult(0.5, {"rule": 1.0, "custom": -1.0}, "72", False, "no answer")


def test_unknown_data_sources_and_missing_ground_truths_matter_to_rules_alone() -> None:
    rule = open_grader(_config())
    assert rule.needs_ground_truth("openai/gsm8k")
    with pytest.raises(DataError, match="'gsm8k'; known: openai/gsm8k, "):
        rule.check(["openai/gsm8k", "gsm8k"])
    with pytest.raises(DataError, match=r"rollout 0: no reward function for data_source 'gsm8k'"):
        rule.grade([_row(data_source="gsm8k")])
    with pytest.raises(
        DataError, match=r"rollout 0: no ground truth, .*Add a column answer .*reward_model\.type=model"
    ):
        rule.grade([_row(ground_truth=None)])
    model = open_grader(_config(reward_model={"type": "model", "path": "m"}), open_model=FakeModel)
    model.check(["anything"])
    assert not model.needs_ground_truth("anything")
    assert model.grade([_row("ab", data_source="anything", ground_truth=None)])[0].reward == 2.0


def _prompt(data_source: str = "openai/gsm8k", **reward_model: str) -> PromptRow:
    prompt = [{"role": "user", "content": "q"}]
    return PromptRow(data_source, prompt, "math", {"style": "rule", **reward_model}, where="a.jsonl, line 3")


def test_prompts_that_a_rule_could_not_grade_are_refused_with_their_line_and_the_fix() -> None:
    rule: Grader = open_grader(_config())
    rule.check_prompts([_prompt(ground_truth="72"), _prompt(ground_truth="so she sold 72 clips")])
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: no ground truth, which the rule reward .*offline"):
        rule.check_prompts([_prompt(ground_truth="72"), _prompt()])
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: .*single number, got 'Paris'.*column answer or ground_tr"):
        rule.check_prompts([_prompt(ground_truth="Paris")])
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: no reward function for data_source 'mine'"):
        rule.check_prompts([_prompt("mine", ground_truth="72")])
    custom = open_grader(_config(), custom=lambda data: [0.0] * len(data))
    custom.check_prompts([_prompt("mine"), _prompt("mine", ground_truth="Paris")])


def test_examined_completions_are_shown_for_each_data_source(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [_row(), _row("#### 73"), _row("#### 74"), _row("5", data_source="ratchet/word-problems")]
    open_grader(_config(reward_model={"num_examine": 2})).grade(rows)
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("[completion]")] == [
        "[completion] #### 72",
        "[completion] #### 73",
        "[completion] 5",
    ]
    assert "[data_source] ratchet/word-problems\n[prompt] q\n[completion] 5\n[ground_truth] 72\n[reward] 0.0\n" in shown


def test_errors_of_the_rule_name_the_row() -> None:
    with pytest.raises(DataError, match=r"rollout 7: .*expected a single number, got 'many'"):
        open_grader(_config()).grade([_row(), _row(where="rollout 7", ground_truth="many")])


def test_a_file_or_name_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.py"):
        open_grader(
            _config(reward_model={"type": "custom"}, custom_reward_function={"path": str(tmp_path / "none.py")})
        )
    with pytest.raises(ConfigError, match=r"mine\.py has no 'score'; it defines compute_score"):
        open_grader(_custom(tmp_path, "def compute_score(solution_str):\n    return 1.0\n", name="score"))


def test_an_endpoint_grades(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util
    import threading

    path = Path(__file__).parents[3] / "examples" / "reward_server.py"
    spec = importlib.util.spec_from_file_location("reward_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "AUTHORIZATION", "Bearer x")
    monkeypatch.setenv("REWARD_TOKEN", "Bearer x")
    with module.RewardServer(("127.0.0.1", 0), module.RewardHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            section = {"type": "api", "url": f"http://127.0.0.1:{server.server_port}/score", "timeout": 5}
            grader = open_grader(_config(reward_model={**section, "auth_env": "REWARD_TOKEN"}))
            results = grader.grade([_row("#### 72"), _row("#### 73")])
            grader.close()
            refused = open_grader(_config(reward_model=section))
            with pytest.raises(Exception, match=r"got 401 .*reward_model\.auth_env"):
                refused.grade([_row()])
            refused.close()
        finally:
            server.shutdown()
            thread.join()
    assert results == [RewardResult(1.0, {"api": 1.0}), RewardResult(0.0, {"api": 0.0})]
    assert json.dumps(results[0].breakdown)
