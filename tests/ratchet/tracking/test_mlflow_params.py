from ratchet.tracking.mlflow_params import flat_params


def test_a_nested_configuration_becomes_dotted_keys() -> None:
    config = {
        "data": {"train_batch_size": 32, "files": ["a", "b"]},
        "actor": {"lr": 1e-6, "resume": None, "enabled": True, "overrides": {}},
        "name": "gsm8k",
    }
    assert flat_params(config) == {
        "data.train_batch_size": "32",
        "data.files": '["a", "b"]',
        "actor.lr": "1e-06",
        "actor.resume": "null",
        "actor.enabled": "true",
        "actor.overrides": "{}",
        "name": "gsm8k",
    }


def test_keys_and_values_keep_to_the_limits() -> None:
    params = flat_params({"reward(gold)": "x" * 7000, "k" * 300: 1})
    assert params["reward_gold_"] == "x" * 5997 + "..."
    assert sorted(len(key) for key in params) == [12, 250]
