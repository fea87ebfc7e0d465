from pathlib import Path

import pytest

from ratchet.config import load_config
from ratchet.errors import ConfigError, NotCommittedError
from ratchet.grains import distributed, loop
from ratchet.grains.session import open_session, submit
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE, Run
from tests.runs import manifests, tiny_config, train_tiny, write_problems

TWO = {"trainer.grain": "stage", "trainer.n_gpus_per_node": 2, "trainer.total_training_steps": 2}


@pytest.mark.slow
def test_two_processes_publish_one_policy_and_a_state_that_the_next_ones_load(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    problems = write_problems(tmp_path / "problems.jsonl")
    run = train_tiny(tmp_path, "two", tiny_config(tiny_model, problems, **TWO))
    one = train_tiny(tmp_path, "one", tiny_config(tiny_model, problems, **{**TWO, "trainer.n_gpus_per_node": 1}))
    found, alone = manifests(run), manifests(one)
    assert found.keys() == alone.keys()
    for step in (1, 2):
        update = found[f"{step}/policy_update"]
        assert update.provenance.epoch == 1
        assert update.provenance.trainer_state is not None
        names = [entry.path for entry in update.provenance.trainer_state.files]
        assert {name.split("_")[2] for name in names if name.startswith("__")} == {"0", "1"}, "a file of each rank"
    # The sum over ranks is that of one process up to rounding.
    metrics = [manifest["1/policy_update"].provenance.metrics for manifest in (found, alone)]
    assert metrics[0]["actor/grad_norm"] == pytest.approx(metrics[1]["actor/grad_norm"], rel=1e-4)
    assert metrics[0]["actor/entropy"] == pytest.approx(metrics[1]["actor/entropy"], rel=1e-4)


@pytest.mark.slow
def test_two_processes_train_a_critic_as_one_does(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(solution_str):\n    return len(solution_str) / 10\n")
    options = {
        **TWO,
        "trainer.total_training_steps": 1,
        "algorithm.adv_estimator": "gae",
        "critic.fsdp_config.dtype": "float32",
        "custom_reward_function.path": str(reward),
    }
    problems = write_problems(tmp_path / "problems.jsonl")
    metrics = []
    for count in (2, 1):
        config = tiny_config(tiny_model, problems, **{**options, "trainer.n_gpus_per_node": count})
        run = train_tiny(tmp_path, f"run-{count}", config)
        metrics.append(run.require(CRITIC_UPDATE, 1).provenance.metrics)
    for name in ("critic/vf_loss", "critic/grad_norm"):
        assert metrics[0][name] > 0
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-4)


@pytest.mark.slow
def test_processes_that_fail_are_an_error_of_the_causes_kind_that_names_the_step(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = tiny_config(tiny_model, write_problems(tmp_path / "problems.jsonl"), **TWO)
    with open_session(submit(str(tmp_path), "run", config), config) as session:
        loop.prepare(session)
        # Nothing of the step is committed: every process stops at the fence.
        cause = "policy_update of step 1 on 2 processes: .*step-000001/rollout is not committed"
        with pytest.raises(NotCommittedError, match=cause):
            distributed.launch(session.store_run, POLICY_UPDATE, 1, 2)
    assert Run(str(tmp_path), "run").manifest(POLICY_UPDATE, 1) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.n_gpus_per_node=2"], "is 2, and trainer.grain is segment"),
        (["trainer.nnodes=2", "trainer.grain=stage"], "trains on one node"),
    ],
)
def test_a_number_of_processes_that_cannot_be_had_is_refused(overrides: list[str], message: str) -> None:
    assert distributed.processes(load_config()) == 1
    assert distributed.processes(load_config(overrides=["trainer.n_gpus_per_node=4", "trainer.grain=stage"])) == 4
    with pytest.raises(ConfigError, match=message):
        distributed.processes(load_config(overrides=overrides))
