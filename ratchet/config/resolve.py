"""Values that follow from other keys where they are not given, so that a config holds what it means.

Trap: what is resolved here stands in the RunConfig and in every submission; reading that again changes nothing, since
there each key is given.
"""

from ratchet.algorithms.catalog import ADVANTAGES
from ratchet.config.algorithm import OFFLINE
from ratchet.config.reading import Reading
from ratchet.config.spelling import INHERITED

ESTIMATOR, KIND, OBJECTIVE = "algorithm.adv_estimator", "reward_model.type", "algorithm.objective"
BYPASS = "algorithm.rollout_correction.bypass_mode"
PROMPT, COMPLETION = "data.max_prompt_length", "data.max_response_length"
PLACES = {
    "reward_model.path": "model",
    "reward_model.url": "api",
    "reward_model.judge.url": "judge",
    "custom_reward_function.path": "custom",
}


def resolve(reading: Reading) -> None:
    """Fill in what follows, and take out the names that are no keys."""
    _resolve_lengths(reading)
    _resolve_estimator(reading)
    _resolve_reward(reading)
    _resolve_behaviour(reading)
    for key, other in INHERITED.items():
        if key not in reading.values and other in reading.values:
            reading.values[key] = reading.values[other]
            reading.inherited.add(key)


def _resolve_lengths(reading: Reading) -> None:
    total = reading.values.pop("data.seq_length", None)
    if total is None:
        return
    typed, values = reading.label("data.seq_length"), reading.values
    if not isinstance(total, int) or isinstance(total, bool) or total < 2:
        reading.faults.append(f"{typed}: expected at least 2 tokens, but it is {total!r}")
        return
    given = {key: values[key] for key in (PROMPT, COMPLETION) if key in values}
    if any(not isinstance(length, int) for length in given.values()):
        return
    if not given:
        values[PROMPT] = total // 2
        values[COMPLETION] = total - total // 2
    elif len(given) == 1:
        (key, length), other = next(iter(given.items())), COMPLETION if PROMPT in given else PROMPT
        if length >= total:
            reading.faults.append(f"{typed} is {total}, and {reading.label(key)} alone is {length}")
        else:
            values[other] = total - length
    elif sum(given.values()) != total:
        said = " and ".join(f"{reading.label(key)} is {length}" for key, length in given.items())
        reading.faults.append(f"{typed} is {total}, and {said}: they must add up")


def _resolve_estimator(reading: Reading) -> None:
    values = reading.values
    is_enabled = values.pop("critic.enable", None)
    if values.get(OBJECTIVE) in OFFLINE and not is_enabled:
        # A critic that a config has for other objectives is without effect.
        return
    has_critic = is_enabled or (is_enabled is None and any(key.startswith("critic.") for key in values))
    name = values.setdefault(ESTIMATOR, "gae" if has_critic else "grpo")
    if is_enabled is None or not isinstance(name, str):
        return
    if not isinstance(is_enabled, bool):
        reading.faults.append(f"critic.enable: expected true or false, but it is {is_enabled!r}")
    elif name in ADVANTAGES.names() and is_enabled != ("values" in ADVANTAGES.get(name).needs):
        uses = "uses no critic" if is_enabled else "needs the critic"
        said = str(is_enabled).lower()
        reading.faults.append(f"critic.enable is {said}, and {reading.label(ESTIMATOR)}={name} {uses}")


def _resolve_reward(reading: Reading) -> None:
    values = reading.values
    if KIND in values or any(key.startswith("reward_model.weights") for key in values):
        return
    given = [key for key in PLACES if values.get(key)]
    if len(given) > 1:
        said = ", ".join(reading.label(key) for key in given)
        reading.faults.append(f"{said} are given: say which grades with {KIND}, or all with reward_model.weights")
    elif given:
        values[KIND] = PLACES[given[0]]


def _resolve_behaviour(reading: Reading) -> None:
    """Who truncates the sampler's distribution has log-probs of another one, so that the policy scores the rollouts."""
    top_p, top_k = (reading.values.get(f"actor_rollout_ref.rollout.{name}") for name in ("top_p", "top_k"))
    numbers = (int, float)
    if (isinstance(top_p, numbers) and top_p < 1) or (isinstance(top_k, numbers) and top_k > 0):
        reading.values.setdefault(BYPASS, False)
