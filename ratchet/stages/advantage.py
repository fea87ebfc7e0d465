"""From rewards to advantages: everything that the update needs to know of a rollout beside its tokens.

Trap: the KL controller's coefficient of a step follows from every step before; it is an output of this stage and an
input of the next step's, so that a resumed run goes on with the same one.
"""

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ratchet.config import RunConfig
from ratchet.data.join import aligned
from ratchet.data.parquet import write_table
from ratchet.errors import DataError, NumericsError
from ratchet.stages.base import Context, Input, Result, Stage, optional_inputs, step_inputs
from ratchet.stages.step_rollouts import StepRollouts, read_step
from ratchet.stages.trajectories import importance_weights, set_aside, trajectories
from ratchet.store.artifacts import read_bytes, write_bytes
from ratchet.store.run import Run

if TYPE_CHECKING:
    from torch import Tensor

    from ratchet.algorithms.kl_controller import AdaptiveKLController

KL_CONTROLLER = "kl_controller"
PROBABILITY_DIFFERENCE = "training/rollout_probs_diff"
_STATE_FILE = "state.json"


class Advantage(Stage):
    """Advantages and returns of every completion token, by the estimator that the config names."""

    name = "advantage"
    timing = "adv"
    config_keys = (
        "algorithm",
        "actor_rollout_ref.actor.use_kl_loss",
        "actor_rollout_ref.rollout.calculate_log_probs",
        "code",
    )

    def needs(self, config: RunConfig) -> tuple[str, ...]:
        wanted = {
            "reference_scores": config.reference_is_needed and config.algorithm.use_kl_in_reward,
            "policy_scores": config.policy_scores_are_needed,
            "values": config.critic_is_needed,
        }
        return ("rollout", "reward", *(name for name, is_wanted in wanted.items() if is_wanted))

    def inputs(self, run: Run, config: RunConfig, step: int | None) -> dict[str, Input]:
        assert step is not None
        found = step_inputs(run, self.needs(config), step)
        found |= optional_inputs(run, "reward", step, ("token_rewards", "greedy_rewards"))
        if _is_adaptive(config) and step > 1:
            found[KL_CONTROLLER] = Input(run.require(self.name, step - 1), KL_CONTROLLER)
        return found

    def compute(self, context: Context) -> Result:
        import torch

        config, whole = context.config, read_step(context)
        # What was not graded is in no group, no metric and no loss.
        step = whole.of(whole.is_graded)
        behaviour = _behaviour(step, config)
        metrics, outputs = _penalise(context, step, behaviour)
        weights, loss_mask, corrected = _correction(step, config)
        # An empty completion has no token to carry its reward, but it is a member of its group all the same.
        rewards = torch.where(step.mask.any(1), step.token_rewards.sum(1), step.rewards)
        advantages, returns = _estimate(context, step, rewards, behaviour, weights)
        source = config.behaviour_source
        # The update takes its own: those that are known here are not the ones that it trains against.
        of_update = None if source == "update" else behaviour
        tables = {"trajectories": trajectories(step, rewards, advantages, returns, loss_mask, of_update, source)}
        if weights is not None:
            tables["importance_weights"] = importance_weights(step, weights)
        if not bool(whole.is_graded.all()):
            rest = whole.of(~whole.is_graded)
            unlearnt = set_aside(rest, None if source == "update" else _behaviour(rest, config), source)
            tables = {
                name: aligned(whole.table, pa.concat_tables([own, unlearnt[name]]), name)
                for name, own in tables.items()
            }
        for name, table in tables.items():
            outputs[name] = write_table(context.store, f"{context.folder}/{name}", table)
        metrics |= corrected | {
            **_summary("critic/rewards", rewards),
            **_summary("critic/advantages", advantages[step.mask]),
            **_summary("critic/returns", returns[step.mask]),
            **(_summary("critic/values", step.values[step.mask]) if step.values is not None else {}),
            "critic/constant_groups_ratio": _constant_groups_ratio(tables["trajectories"]),
        }
        policy_version = context.inputs["rollouts"].manifest.policy_version
        return Result(outputs=outputs, policy_version=policy_version, metrics=metrics)


def _estimate(
    context: Context, step: StepRollouts, rewards: "Tensor", behaviour: "Tensor | None", weights: "Tensor | None"
) -> "tuple[Tensor, Tensor]":
    """Advantages and returns [B, T] by the estimator that the config names."""
    from ratchet.algorithms.batch import AdvantageBatch
    from ratchet.algorithms.catalog import ADVANTAGES
    from ratchet.algorithms.whitening import masked_whiten

    algorithm = context.config.algorithm
    batch = AdvantageBatch(
        # Copies: a user's estimator may write to what it is given. verl's own arithmetic is that of float32.
        token_rewards=step.token_rewards.float() if algorithm.compat == "verl" else step.token_rewards.clone(),
        mask=step.mask.clone(),
        group_index=step.group_index,
        rewards=rewards,
        values=step.values,
        greedy_rewards=step.greedy_rewards,
        log_probs=behaviour,
        sum_pi_squared=step.sum_pi_squared,
        importance_weights=weights,
        reward_parts=step.reward_parts,
    )
    function = ADVANTAGES.get(algorithm.adv_estimator).function()
    try:
        result = function(batch, _options(context.config))
    except (Exception, SystemExit) as error:  # whatever a user's estimator raises
        name = f"{function.__module__}.{function.__qualname__}"
        raise DataError(f"advantages of step {context.step}, by {name}: {type(error).__name__}: {error}") from error
    advantages, returns = _checked(step, result)
    if algorithm.whiten_advantages:
        advantages = masked_whiten(advantages, step.mask, compat=algorithm.compat) * step.mask
    return advantages, returns


def _behaviour(step: StepRollouts, config: RunConfig) -> "Tensor | None":
    """Log-probs of the policy that sampled, as they are known before the update; None where they are not."""
    if not config.algorithm.rollout_correction.bypass_mode:
        assert step.policy_log_probs is not None
        return step.policy_log_probs
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        return None
    _check_sampled(step, "set algorithm.rollout_correction.bypass_mode=false to score it with the policy")
    return step.sampler_log_probs


def _check_sampled(step: StepRollouts, remedy: str) -> None:
    """Raise DataError for a rollout that its sampler gave no log-probs."""
    for row in (~step.is_sampled).nonzero()[:1]:
        raise DataError(f"{step.name(int(row))} has no sampler_log_probs; {remedy}")


def _is_adaptive(config: RunConfig) -> bool:
    return config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.type == "adaptive"


def _penalise(
    context: Context, step: StepRollouts, behaviour: "Tensor | None"
) -> tuple[dict[str, float], dict[str, Any]]:
    """Subtract the KL penalty from the token rewards where it is in the reward; metrics, and the controller's state."""
    algorithm = context.config.algorithm
    if step.reference_log_probs is None:
        return {}, {}
    assert behaviour is not None
    from ratchet.algorithms.kl import kl_estimate

    controller = _controller(context) if _is_adaptive(context.config) else None
    coefficient = controller.value if controller else algorithm.kl_ctrl.kl_coef
    kl = kl_estimate(behaviour.double(), step.reference_log_probs.double(), algorithm.kl_penalty) * step.mask
    step.token_rewards -= coefficient * kl
    lengths = step.mask.sum(1)
    current = float((kl.sum(1) / lengths.clamp(min=1))[lengths > 0].mean()) if bool(lengths.any()) else 0.0
    metrics = {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": coefficient}
    if controller is None:
        return metrics, {}
    controller.update(current, len(lengths))
    state = json.dumps(controller.state(), sort_keys=True).encode()
    folder = f"{context.folder}/{KL_CONTROLLER}"
    return metrics, {KL_CONTROLLER: write_bytes(context.store, folder, {_STATE_FILE: state})}


def _controller(context: Context) -> "AdaptiveKLController":
    from ratchet.algorithms.kl_controller import AdaptiveKLController

    options = context.config.algorithm.kl_ctrl
    controller = AdaptiveKLController(
        options.kl_coef, options.target_kl, options.horizon, compat=context.config.algorithm.compat
    )
    if KL_CONTROLLER in context.inputs:
        (state,) = read_bytes(context.run.store, context.inputs[KL_CONTROLLER].artifact)
        controller.load_state(json.loads(state))
    return controller


def _correction(step: StepRollouts, config: RunConfig) -> "tuple[Tensor | None, Tensor, dict[str, float]]":
    """Rollout correction: importance weights (None where there are none), the loss mask, and metrics."""
    import torch

    from ratchet.algorithms import rollout_correction as correction
    from ratchet.algorithms.rollout_correction_metrics import off_policy_metrics

    options, loss_mask = config.algorithm.rollout_correction, step.mask
    if config.algorithm.mask_truncated_completions:
        is_cut = torch.tensor([reason == "length" for reason in step.table["finish_reason"].to_pylist()])
        loss_mask = loss_mask & ~is_cut[:, None]
    if options.bypass_mode or step.sampler_log_probs is None or step.policy_log_probs is None:
        return None, loss_mask, {}
    if options.rollout_is is not None or options.rollout_rs is not None:
        _check_sampled(step, "algorithm.rollout_correction.rollout_is and rollout_rs compare with them")
    # Without rollout.calculate_log_probs these are a share of the rows.
    policy, sampler, mask = (one[step.is_sampled] for one in (step.policy_log_probs, step.sampler_log_probs, step.mask))
    log_ratio = policy - sampler
    compat = config.algorithm.compat
    metrics = off_policy_metrics(policy, sampler, mask, compat=compat)
    weights = None
    if options.rollout_is is not None:
        weights, found = correction.importance_weights(
            log_ratio,
            mask,
            options.rollout_is,
            options.rollout_is_threshold,
            batch_normalize=options.rollout_is_batch_normalize,
            compat=compat,
        )
        metrics |= found
    if options.rollout_rs is not None:
        kept, found = correction.rejection_mask(
            log_ratio, mask, options.rollout_rs, options.rollout_rs_threshold, compat=compat
        )
        loss_mask, metrics = loss_mask & kept.bool(), metrics | found
    difference = (policy.exp() - sampler.exp()).abs()[mask].double()
    found = {f"rollout_corr/{name}": value for name, value in metrics.items()}
    if len(difference) > 1:
        found |= {
            f"{PROBABILITY_DIFFERENCE}_{name}": float(getattr(difference, name)()) for name in ("mean", "max", "std")
        }
    return weights, loss_mask, found


def _options(config: RunConfig) -> Any:
    from ratchet.algorithms.batch import AdvantageOptions

    algorithm = config.algorithm
    keys = algorithm.gdpo_reward_keys
    # Without keys, what grades; a breakdown also holds what a part is made of, which would count twice.
    weights = dict(zip(keys, algorithm.gdpo_reward_weights or [1.0] * len(keys), strict=True)) or config.reward_weights
    return AdvantageOptions(
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        part_weights=weights,
        compat=algorithm.compat,
    )


def _checked(step: StepRollouts, result: Any) -> "tuple[Tensor, Tensor]":
    """Advantages and returns as an estimator returned them; a user's may return anything."""
    import torch

    if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(one, torch.Tensor) for one in result)):
        raise DataError(
            f"expected a tuple of two tensors, advantages and returns, from the estimator, got {result!r:.80}"
        )
    for name, values in zip(("advantages", "returns"), result, strict=True):
        if values.shape != step.mask.shape:
            raise DataError(f"expected {name} of shape {list(step.mask.shape)}, got {list(values.shape)}")
        bad = (~torch.isfinite(values) & step.mask).any(1).nonzero()
        if len(bad):
            raise NumericsError(f"{step.name(int(bad[0]))}: its {name} are not finite")
    return result


def _summary(prefix: str, values: "Tensor") -> dict[str, float]:
    if not values.numel():
        return {}
    numbers = values.double()
    return {f"{prefix}/{name}": float(getattr(numbers, name)()) for name in ("mean", "max", "min")}


def _constant_groups_ratio(trajectories: pa.Table) -> float:
    """Share of the groups whose rewards are all equal, of those that have any."""
    group_ids, spreads = (trajectories[name].to_pylist() for name in ("group_id", "group_reward_std"))
    pairs = zip(group_ids, spreads, strict=True)
    of_group: dict[str, float] = {group_id: spread for group_id, spread in pairs if spread is not None}
    return sum(spread == 0 for spread in of_group.values()) / len(of_group)
