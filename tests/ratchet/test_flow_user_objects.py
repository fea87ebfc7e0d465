"""Rewards, advantages and losses of the user's own in a flow: what travels, what stays here, and what is said then."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ratchet import (
    CustomAdvantage,
    DataProto,
    FSDPPolicyUpdate,
    HFRollout,
    NaiveRewardManager,
    RLDataFlow,
    WeightedReward,
    register_advantage,
    register_policy_loss,
)
from ratchet.config.user_code import LIVE, load_object
from ratchet.errors import ConfigError

HERE = "tests/ratchet/test_flow_user_objects.py"


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, bonus: float = 0.0) -> float:
    return bonus


@dataclass
class Length:
    target: int
    weights: tuple[float, ...] = (1.0,)

    def __call__(self, data: DataProto) -> list[float]:
        return [0.0] * len(data)


class Keeps:
    class Nested:
        def __call__(self, data: DataProto) -> list[float]:
            return [0.0] * len(data)

    def __init__(self, a: int, b: str = "b") -> None:
        self.a, self._b = a, b

    def __call__(self, data: DataProto) -> list[float]:
        return [0.0] * len(data)


class Forgets(Keeps):
    def __init__(self, secret: int) -> None:
        super().__init__(secret)


class Holds(Keeps):
    def __init__(self, a: Any) -> None:
        self.a = a


class Model(torch.nn.Module):
    def __call__(self, data: DataProto) -> list[float]:
        return [0.0] * len(data)


@register_advantage("flow_test_mean")
def mean_advantage(batch: Any, options: Any) -> Any:
    return batch.token_rewards, batch.token_rewards


@register_policy_loss("flow_test_loss")
def plain_loss(batch: Any, options: Any) -> Any:
    return -batch.log_probs, {}


def _flow(reward: Any = None, **parts: Any) -> RLDataFlow:
    return RLDataFlow(rollout=HFRollout("m"), reward=reward, **parts)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("reward", "name", "arguments"),
    [
        (score, "score", {}),
        (functools.partial(score, bonus=0.5), "score", {"bonus": 0.5}),
        (Length(7), "Length", {"target": 7, "weights": [1.0]}),
        (Keeps(1, b="c"), "Keeps", {"a": 1, "b": "c"}),
        (Keeps.Nested(), "Keeps.Nested", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_object_is_written_down_as_its_file_its_name_and_its_arguments(
    reward: Any, name: str, arguments: dict[str, Any]
) -> None:
    flow = _flow(reward)
    assert flow.reward is reward is flow.live_reward
    written = flow.to_dict()
    assert written["custom_reward_function"] == {"path": HERE, "name": name, "reward_kwargs": arguments}
    assert written["reward_model"]["type"] == "custom"
    assert [(entry["path"], entry["source"]) for entry in written["code"]] == [(HERE, Path(HERE).read_text())]
    assert RLDataFlow.from_dict(written) == flow
    # The file is imported already, so that the very same class is found.
    found = load_object(written["code"], HERE, name)
    assert found is (score if name == "score" else type(reward))


def _local() -> Any:
    bound = 3

    def closure(data: DataProto) -> list[float]:
        return [float(bound)] * len(data)

    return closure


def _changed() -> Any:
    found = Keeps.Nested()
    found.late = 1  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (lambda data: [0.0] * len(data), "a lambda has no name to find it by: write it as a function"),
        (_local(), "is defined inside a function and may close over its variables: move it to the top level"),
        (functools.partial(score, "a"), "a partial of positional arguments: give them by name"),
        (functools.partial(score, bonus=torch.ones(1)), "the argument bonus of score is a Tensor, which JSON does not"),
        (Keeps(1).__call__, "is a method of a live object: pass the object"),
        (Forgets(1), "what Forgets was given as secret is not known: keep it as self.secret"),
        (Holds(object()), "the argument a of Holds is a object, which JSON does not hold"),
        (Holds(float("nan")), "the argument a of Holds is a float"),
        (_changed(), "Keeps.Nested was given late from outside: make them arguments"),
        (Model(), "Model is a live model: save it to a folder and pass RewardModel"),
        (eval("lambda data: 0", {}), "a lambda"),
    ],
)
def test_what_cannot_be_written_down_trains_here_and_is_refused_elsewhere(
    reward: Any, reason: str, tmp_path: Path
) -> None:
    flow = _flow(reward)
    assert flow.live_reward is reward
    assert flow.config().custom_reward_function.path == LIVE
    for attempt in (flow.to_dict, lambda: flow.compile(tmp_path / "flow.yaml"), lambda: flow.submit(host="http://h")):
        with pytest.raises(ConfigError, match=f"the reward cannot leave this process. .*{reason}"):
            attempt()
    again = RLDataFlow.from_config(flow.config())
    assert again.live_reward is None
    with pytest.raises(ConfigError, match="was a live object in the process that made this config"):
        again.to_dict()


def test_a_file_that_imports_what_lies_beside_it_does_not_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper_beside.py").write_text("value = 1\n")
    (tmp_path / "uses_helper.py").write_text(
        "import json\nfrom helper_beside import value\ndef score(data): return value\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import uses_helper  # type: ignore[import-not-found]

    with pytest.raises(ConfigError, match=r"uses_helper\.py, line 2 imports helper_beside\.py beside it, and one file"):
        _flow(uses_helper.score).to_dict()


def test_something_typed_at_a_prompt_does_not_travel() -> None:
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile("def typed(data): return [0.0] * len(data)", "<stdin>", "exec"), names)
    with pytest.raises(ConfigError, match="does not hold this typed under its name"):
        _flow(names["typed"]).to_dict()


def test_a_registered_advantage_is_passed_as_its_function_or_by_name() -> None:
    flow = _flow(advantage=mean_advantage)
    assert flow.advantage.name == "flow_test_mean"
    assert flow == _flow(advantage=CustomAdvantage("flow_test_mean"))
    config = flow.config()
    assert config.algorithm.adv_estimator == "flow_test_mean"
    assert [entry.path for entry in config.code] == [HERE]
    assert RLDataFlow.from_dict(flow.to_dict()) == flow
    tuned = _flow(advantage=CustomAdvantage(mean_advantage, gamma=0.5, kl_coef=0.25))
    assert (tuned.config().algorithm.gamma, tuned.config().actor_rollout_ref.actor.kl_loss_coef) == (0.5, 0.25)
    assert RLDataFlow.from_dict(tuned.to_dict()) == tuned


def test_a_registered_policy_loss_is_passed_as_its_function_or_by_name() -> None:
    flow = _flow(policy_update=FSDPPolicyUpdate(policy_loss=plain_loss))
    assert flow == _flow(policy_update=FSDPPolicyUpdate(policy_loss="flow_test_loss"))
    assert flow.config().actor_rollout_ref.actor.policy_loss.loss_mode == "flow_test_loss"
    assert RLDataFlow.from_dict(flow.to_dict()) == flow


def test_an_unregistered_function_or_name_says_how_to_register() -> None:
    with pytest.raises(ConfigError, match=r"score is not registered: write @register_advantage\(name\) above it"):
        _flow(advantage=score)
    with pytest.raises(ConfigError, match=r"is not registered: write @register_policy_loss\(name\)"):
        FSDPPolicyUpdate(policy_loss=score)
    with pytest.raises(ConfigError, match="no advantage estimator 'groop'; the nearest is"):
        CustomAdvantage("groop")


def test_an_advantage_that_was_registered_inside_a_function_stays_here(tmp_path: Path) -> None:
    @register_advantage("flow_test_local")
    def local(batch: Any, options: Any) -> Any:
        return batch.token_rewards, batch.token_rewards

    flow = _flow(advantage=local)
    assert flow.config().algorithm.adv_estimator == "flow_test_local"
    with pytest.raises(ConfigError, match="compile: the advantage cannot leave this process"):
        flow.compile(tmp_path / "flow.yaml")


def test_an_object_may_be_one_of_several_rewards() -> None:
    reward = Length(3)
    flow = _flow(WeightedReward([(reward, 0.25), (NaiveRewardManager(), 1.0)]))
    config = flow.config()
    assert config.reward_model.weights == {"custom": 0.25, "rule": 1.0}
    assert config.custom_reward_function.name == "Length"
    assert flow.live_reward is reward
    assert RLDataFlow.from_dict(flow.to_dict()) == flow


def test_the_naive_reward_manager_is_declared_by_keys() -> None:
    flow = _flow(NaiveRewardManager(tokenizer=object(), num_examine=2))
    assert flow.live_reward is None
    assert (flow.config().reward_model.type, flow.config().reward_model.num_examine) == ("rule", 2)
    own = _flow(NaiveRewardManager(tokenizer=object(), num_examine=1, compute_score=score))
    assert own.live_reward is score
    assert own.to_dict()["reward_model"] == {"type": "custom", "num_examine": 1}
    assert RLDataFlow.from_dict(own.to_dict()) == own


def test_files_named_by_a_flow_travel_with_it(tmp_path: Path) -> None:
    file = tmp_path / "extra.py"
    file.write_text("value = 1\n")
    flow = _flow(code=[str(file)])
    file.write_text("value = 2\n")
    assert flow.to_dict()["code"][0]["source"] == "value = 1\n", "what was there when the flow was made"
    assert RLDataFlow.from_dict(flow.to_dict()) == flow != _flow()
