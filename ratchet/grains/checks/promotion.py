"""Whether the policy could become champion at all, which otherwise shows once everything is trained.

Trap: the decisions are made after training, against whoever serves then. What the champion of today says is a hint.
"""

from collections.abc import Iterator

from ratchet.config import RunConfig
from ratchet.errors import ConfigError, StoreError, StoreUnavailableError
from ratchet.grains.checks.finding import Finding, PipelineFacts
from ratchet.store import champions, layout


def promotion_findings(config: RunConfig, root: str, facts: PipelineFacts) -> Iterator[Finding]:
    """The name, the held-out prompts, and what would leave nothing to compare; nothing where no name is set.

    In a pod, storage that does not answer raises StoreUnavailableError.
    """
    name = config.promotion.name
    if not name:
        return
    found = list(_asked(config, root, facts))
    yield from found or [Finding("promotion", "ok", f"{name}: the last policy can be decided on")]


def _asked(config: RunConfig, root: str, facts: PipelineFacts) -> Iterator[Finding]:
    name = config.promotion.name
    if not config.data.val_files:
        yield Finding(
            "promotion",
            "error",
            f"promotion.name is {name}, and data.val_files is not set: without held-out prompts nothing could be "
            "decided once the run is trained; name some, or leave the name (the parameter champion) out",
        )
    if config.is_offline and not config.needs_pairs:
        yield Finding(
            "promotion",
            "error",
            f"promotion.name is {name}, and algorithm.objective={config.algorithm.objective} measures a loss on what "
            "is held out, which is no accuracy that a champion could be compared by; leave the name (the parameter "
            "champion) out",
        )
    if not config.is_offline and (leaving := _leaves_shares(config)):
        yield Finding(
            "promotion",
            "warning",
            f"{leaving}: a held-out reward outside [0, 1] is no accuracy, and where there is one nothing is promoted",
        )
    try:
        layout.check_champion_name(name)
    except ConfigError as error:
        yield Finding("promotion", "error", str(error))
        return
    try:
        champion = champions.champion(root, name)
    except StoreUnavailableError as error:
        if facts.in_pod:
            raise
        yield Finding("promotion", "unknown", f"the decisions on {name} cannot be read from here: {error}")
        return
    except StoreError as error:
        yield Finding("promotion", "error", f"the decisions on {name} cannot be read: {error}")
        return
    starts = champion is not None and config.actor_rollout_ref.model.path.rstrip("/") == champion.export.uri.rstrip("/")
    if champion is not None and starts and config.data.val_files and not config.trainer.val_before_train:
        yield Finding(
            "promotion",
            "warning",
            f"the run starts from champion {champion.number}, and trainer.val_before_train is false: the two can only "
            "be compared if the champion was measured on the same held-out prompts, sampled and graded the same way; "
            "trainer.val_before_train=true measures it here",
        )


def _leaves_shares(config: RunConfig) -> str:
    """Return why a reward can leave [0, 1] whatever the completions are, as far as the config says it."""
    weights = {kind: weight for kind, weight in config.reward_weights.items() if weight}
    if "model" in weights:
        return "a reward model grades, whose head gives any number"
    if any(weight < 0 for weight in weights.values()):
        return "reward_model.weights has a negative weight"
    if (most := sum(weights.values())) > 1:
        return f"reward_model.weights add up to {most:g}"
    return ""
