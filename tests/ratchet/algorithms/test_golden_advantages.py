"""Every recorded call of verl's advantage functions, replayed with `compat="verl"`; and where the default agrees."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ratchet.algorithms.batch import AdvantageBatch, AdvantageOptions
from ratchet.algorithms.catalog import ADVANTAGES
from ratchet.algorithms.whitening import masked_whiten
from ratchet.engines import log_probs
from tests.golden import Case, golden_case, golden_cases

NAMES = {"compute_gae_advantage_return": "gae"}
WHITENED = ("gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
ESTIMATORS = [
    "compute_gae_advantage_return",
    "grpo",
    "gdpo",
    "rloo",
    "reinforce_plus_plus",
    "remax",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
]


def estimate(case: Case, compat: Any) -> tuple[Tensor, Tensor]:
    """Call the estimator of a case."""
    arguments, options = case.arguments, case.options
    rewards = arguments["token_level_rewards"]
    index = np.asarray(arguments.get("index", np.arange(len(rewards))))
    totals = rewards.sum(-1)
    batch = AdvantageBatch(
        token_rewards=rewards,
        mask=arguments["response_mask"].bool(),
        group_index=torch.from_numpy(np.unique(index, return_inverse=True)[1]),
        rewards=totals.double(),
        values=arguments.get("values"),
        greedy_rewards=arguments.get("reward_baselines"),
        log_probs=arguments.get("old_log_probs"),
        sum_pi_squared=arguments.get("sum_pi_squared"),
        importance_weights=arguments.get("rollout_is_weights"),
        reward_parts={"reward": totals},
    )
    norm = options.get("norm_adv_by_std_in_grpo")
    found = AdvantageOptions(
        gamma=options.get("gamma", 1.0),
        lam=options.get("lam", 1.0),
        norm_by_std=True if norm is None else norm,
        compat=compat,
    )
    name = NAMES.get(case.function, case.function)
    result: tuple[Tensor, Tensor] = ADVANTAGES.get(name).function()(batch, found)
    return result


def close(ours: Tensor, golden: Tensor) -> None:
    """Agree to a few units in the last place of the largest number, NaN where NaN is."""
    assert ours.shape == golden.shape
    finite = golden[torch.isfinite(golden)].abs()
    largest = max(1.0, float(finite.max())) if len(finite) else 1.0
    torch.testing.assert_close(ours, golden, atol=2e-6 * largest, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", golden_cases(*ESTIMATORS))
def test_golden_advantages_and_returns_are_verls(name: str) -> None:
    case = golden_case(name)
    advantages, returns = estimate(case, "verl")
    close(advantages, case.outputs[0])
    close(returns, case.outputs[1])


@pytest.mark.parametrize("name", golden_cases("masked_whiten"))
def test_golden_whitening_is_verls(name: str) -> None:
    case = golden_case(name)
    values, mask = case.arguments["values"], case.arguments["mask"].bool()
    close(masked_whiten(values, mask, **case.options, compat="verl"), case.outputs[0])


@pytest.mark.parametrize("name", golden_cases(*ESTIMATORS))
def test_golden_advantages_are_also_the_defaults_where_no_accident_happened(name: str) -> None:
    case = golden_case(name)
    scores, mask = case.arguments["token_level_rewards"], case.arguments["response_mask"].bool()
    if not torch.isfinite(scores[mask]).all() or int(mask.sum()) < 2:
        pytest.skip("an accident in verl")
    ours, _ = estimate(case, "ratchet")
    golden = case.outputs[0]
    function = NAMES.get(case.function, case.function)
    if function == "gae":
        golden_whitened = masked_whiten(ours, mask)
        torch.testing.assert_close(golden_whitened[mask], golden[mask], atol=1e-5, rtol=1e-4)
        return
    has_holes = bool((mask[:, 1:] & ~mask[:, :-1]).any())
    if function == "optimal_token_baseline" and has_holes:
        pytest.skip("verl drops the baseline of the longest row at a place counted without holes")
    kept = mask & _is_ordinary(case)[:, None]
    if function in WHITENED and not bool(_is_ordinary(case).all()):
        pytest.skip("one accident moves the whole batch's mean")
    if function == "gpg":
        # Up to alpha, which verl takes from the rewards that are not 0.
        ours, golden = _direction(ours, kept), _direction(golden, kept)
    torch.testing.assert_close(ours[kept], golden[kept], atol=2e-5, rtol=1e-4)


def _is_ordinary(case: Case) -> Tensor:
    """Rows of groups of at least two, whose scores are all equal in the plainest way or truly differ."""
    if "index" not in case.arguments:
        return torch.ones(len(case.arguments["token_level_rewards"]), dtype=torch.bool)
    scores = case.arguments["token_level_rewards"].sum(-1).double()
    group = torch.from_numpy(np.unique(np.asarray(case.arguments["index"]), return_inverse=True)[1])
    kept = torch.zeros(len(scores), dtype=torch.bool)
    for wanted in group.unique():
        members = scores[group == wanted]
        is_plain = bool((members == members[0]).all()) and float(members[0]).is_integer()
        kept[group == wanted] = len(members) > 1 and (is_plain or float(members.std()) > 1e-3)
    return kept


def _direction(values: Tensor, kept: Tensor) -> Tensor:
    largest = values[kept].abs().max() if bool(kept.any()) else torch.ones(())
    return values / largest.clamp(min=1e-12)


class Identity(nn.Module):
    """A model whose hidden states are given and whose output layer is the identity: its logits are its input."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden
        self.config = SimpleNamespace(_attn_implementation="")
        self.head = nn.Linear(hidden.shape[1], hidden.shape[1], bias=False)
        nn.init.eye_(self.head.weight)

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def base_model(self, **arguments: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.hidden[None])


@pytest.mark.parametrize("name", golden_cases("logprobs_from_logits"))
def test_golden_log_probs_and_entropies_come_from_hidden_states_in_chunks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = golden_case(name)
    logits, labels = case.arguments["logits"], case.arguments["labels"].reshape(-1)
    hidden = logits.reshape(len(labels), -1).float()
    monkeypatch.setattr(log_probs, "CHUNK_ELEMENTS", 5 * hidden.shape[1])
    places = torch.arange(len(labels))
    packed = log_probs.PackedTokens(
        input_ids=labels[None],
        position_ids=places[None],
        sequence_lengths=[len(labels)],
        predictors=places,
        targets=labels,
    )
    model: Any = Identity(hidden)
    scores = log_probs.PackedLogProbs(model, temperature=1.0)(packed, with_entropy=True)
    close(scores.log_probs.detach().reshape(case.outputs[0].shape), case.outputs[0])
    close(scores.entropy.detach().reshape(case.outputs[1].shape), case.outputs[1])
