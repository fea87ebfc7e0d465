"""One completion with its numbers, which are worked by hand, and the ways to ask for it."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest

from ratchet.data import schemas
from ratchet.errors import ConfigError, DamagedError, NotCommittedError
from ratchet.grains import loop
from ratchet.grains.audit import Sample, find_sample
from ratchet.grains.audit.sample_screen import sample_lines
from ratchet.stages.advantage import Advantage
from ratchet.stages.reward import Reward
from ratchet.stages.rollout import Rollout
from ratchet.store.run import POLICY_UPDATE, Run
from tests.runs import CUT, RIGHT, WRONG, one_step_config, prepared, table_rows, write_problems

GROUP = "000001/train-0000000"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Run:
    """One step of one group: a right answer, a wrong one, and one that was cut."""
    folder = tmp_path_factory.mktemp("sample")
    config = one_step_config(
        tiny_model, write_problems(folder / "problems.jsonl", 1), **{"actor_rollout_ref.rollout.n": 3}
    )
    with prepared(folder, config, RIGHT, WRONG, CUT) as session:
        loop.run_step(session, 1)
        return session.store_run


def test_a_completion_is_shown_with_all_that_was_said_of_it(run: Run) -> None:
    found = find_sample(run, 1, f"{GROUP}/0")
    # Rewards 1, 0, 0: mean 1/3, standard deviation (of a sample) sqrt(1/3); the first is 2/3 above the mean.
    advantage = (2 / 3) / (math.sqrt(1 / 3) + 1e-6)
    assert (found.group_id, found.sample_index, found.group_rewards) == (GROUP, 0, (1.0, 0.0, 0.0))
    assert found.reward is not None
    assert (found.reward["reward"], found.reward["extracted"], found.reward["error"]) == (1.0, "1", None)
    assert found.reward["reward_breakdown"] == {"rule": 1.0}
    assert (found.completion, found.finish_reason, found.policy_version) == (RIGHT.text, "stop", 0)
    assert found.tokens["token_ids"] == RIGHT.token_ids
    assert found.tokens["sampler_log_probs"] == pytest.approx(RIGHT.log_probs)
    assert found.tokens["behaviour_log_probs"] == pytest.approx(RIGHT.log_probs)
    assert found.tokens["advantages"] == pytest.approx([advantage] * 3, abs=1e-5)
    assert found.tokens["token_rewards"] == [0.0, 0.0, 1.0]
    assert found.tokens["loss_mask"] == [True] * 3
    assert len(found.tokens["texts"]) == 3
    assert found.group["group_size"] == 3
    assert found.group["group_reward_mean"] == pytest.approx(1 / 3)
    assert found.prompt["prompt"][0]["content"].startswith("Ann has 0 pears")
    assert json.loads(found.prompt["extra_info"])["index"] == 0
    update = run.require(POLICY_UPDATE, 1)
    assert found.update is not None
    assert (found.update.manifest_sha256, found.update.policy_version) == (update.sha256, 1)
    assert found.update_metrics == update.metrics
    assert sorted(one.place for one in found.stages) == [
        "data/train",
        "step-000001/advantage",
        "step-000001/reward",
        "step-000001/rollout",
    ]
    assert found.faults == ()
    assert json.loads(json.dumps(dataclasses.asdict(found)))["seed"] == found.seed


@pytest.mark.parametrize(
    ("asked", "index"),
    [(GROUP, 0), ("train-0000000", 0), (f"{GROUP}/2", 2), ("train-0000000/1", 1), ("1/train-0000000/1", 1)],
)
def test_a_group_a_prompt_and_an_index_name_a_completion(run: Run, asked: str, index: int) -> None:
    found = find_sample(run, 1, asked)
    assert (found.group_id, found.sample_index) == (GROUP, index)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (f"{GROUP}/3", "has the samples 0, 1, 2, and no sample 3"),
        ("train-0000009", f"no completion of 'train-0000009'; its 1 groups are {GROUP}"),
        ("000002/train-0000000", "of step 1: 000001/train-0000007/0"),
        ("a/b/c", "expected GROUP, GROUP/INDEX or PROMPT_ID"),
    ],
)
def test_what_the_step_has_not_is_refused_with_what_it_has(run: Run, asked: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        find_sample(run, 1, asked)


def test_a_step_without_rollouts_has_no_completion(run: Run) -> None:
    with pytest.raises(NotCommittedError, match="no committed rollouts of step 2"):
        find_sample(run, 2, GROUP)


def test_the_text_has_a_line_for_each_token(run: Run) -> None:
    lines = list(sample_lines(find_sample(run, 1, f"{GROUP}/1")))
    assert lines[0] == f"{GROUP} sample 1 of 3, in {run.uri}"
    assert "reward 0 (rule 0): answer '8', ground truth '1'" in lines
    assert any(
        line.startswith("group of 3: rewards 1, 0, 0; mean 0.333333, standard deviation 0.57735") for line in lines
    )
    head = next(number for number, line in enumerate(lines) if line.split()[:1] == ["token"])
    assert lines[head].split() == [
        "token",
        "text",
        "sampler",
        "behaviour",
        "advantage",
        "return",
        "reward",
        "in",
        "loss",
    ]
    # 0 is 1/3 below the mean: -1/3 over sqrt(1/3).
    for line, (token, log_prob) in zip(
        lines[head + 1 :], zip(WRONG.token_ids, WRONG.log_probs, strict=True), strict=False
    ):
        fields = line.split()
        assert (fields[0], fields[-1]) == (str(token), "yes")
        assert fields[-6:-1] == [f"{log_prob:.4f}"] * 2 + ["-0.5773"] * 2 + ["0.0000"]
    assert any(line.startswith("fed the update to policy version 1, ") for line in lines)


def test_a_completion_that_was_not_graded_says_why_and_is_in_no_group(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from ratchet.errors import EngineError\n"
        "def compute_score(solution_str, ground_truth):\n"
        f"    if solution_str == {CUT.text!r}:\n"
        "        raise EngineError('the judge is down')\n"
        "    return float(solution_str == '#### 1')\n"
    )
    own = {"custom_reward_function.path": str(tmp_path / "mine.py"), "reward_model.on_failure": "exclude"}
    problems = write_problems(tmp_path / "problems.jsonl", 1)
    config = one_step_config(tiny_model, problems, **own, **{"actor_rollout_ref.rollout.n": 3})
    with prepared(tmp_path, config, RIGHT, CUT, WRONG) as session:
        loop.run_step(session, 1)
        lines = list(sample_lines(find_sample(session.store_run, 1, f"{GROUP}/1")))
    assert "reward none: no answer was read, ground truth '1'" in lines
    assert f"  error: custom: rollout {GROUP}, sample 1: the judge is down" in lines
    assert "left out of its group, whose rewards are 1, none, 0" in lines


@pytest.mark.parametrize("place", ["step-000001/rollout", "data/train"])
def test_what_a_step_was_not_made_from_is_no_source(run: Run, tmp_path: Path, place: str) -> None:
    shutil.copytree(run.uri, tmp_path / "run")
    path = tmp_path / "run" / place / "manifest.json"
    path.write_text(path.read_text().replace('"epoch":1', '"epoch":7'))
    with pytest.raises(DamagedError, match=rf"{place}/manifest.json: expected sha256 .*; found sha256"):
        find_sample(Run(str(tmp_path), "run"), 1, GROUP)


def test_terminal_commands_in_a_completion_do_nothing(run: Run) -> None:
    found = dataclasses.replace(find_sample(run, 1, GROUP), completion="a\x1b[2Jb\nc\x07d")
    assert not any("\x1b" in line or "\x07" in line for line in sample_lines(found))


def test_a_step_under_way_shows_what_is_there(tmp_path: Path, tiny_model: Path) -> None:
    config = one_step_config(tiny_model, write_problems(tmp_path / "problems.jsonl", 1))
    told: list[Sample] = []
    with prepared(tmp_path, config, RIGHT, WRONG) as session:
        for stage in (Rollout(), Reward(), Advantage()):
            session.run(stage, 1)
            told.append(find_sample(session.store_run, 1, GROUP))
    sampled, graded, scored = told
    assert (sampled.reward, sampled.group_rewards, sampled.update) == (None, (None, None), None)
    assert "not graded yet" in list(sample_lines(sampled))
    assert graded.reward is not None
    assert "advantages" not in graded.tokens
    assert "advantages" in scored.tokens
    assert "the update of step 1 is not committed yet" in list(sample_lines(scored))


def test_scores_of_other_models_and_the_critics_values_are_shown(tmp_path: Path, tiny_model: Path) -> None:
    config = one_step_config(
        tiny_model,
        write_problems(tmp_path / "problems.jsonl", 1),
        **{
            "algorithm.adv_estimator": "gae",
            "algorithm.use_kl_in_reward": True,
            "algorithm.rollout_correction.bypass_mode": False,
            "algorithm.rollout_correction.rollout_is": "token",
        },
    )
    with prepared(tmp_path, config, RIGHT, WRONG) as session:
        loop.run_step(session, 1)
        run = session.store_run
    found = find_sample(run, 1, GROUP)
    rows = table_rows(run, "values", "values", schemas.VALUES)
    assert found.tokens["values"] == next(row["values"] for row in rows if row["sample_index"] == 0)
    assert found.tokens["policy_log_probs"] == found.tokens["behaviour_log_probs"]
    assert {"reference_log_probs", "importance_weights"} <= found.tokens.keys()
    assert "step-000001/critic_update" in {one.place for one in found.stages}
    head = next(line for line in sample_lines(found) if "reference" in line)
    assert head.split()[:7] == ["token", "text", "sampler", "behaviour", "policy", "reference", "advantage"]
