"""Whether there is anything new to learn: training data and config against the decisions on a champion.

Trap: data are known by the digest of the table that a run would commit, never by their place; a place can hold other
rows tomorrow, and the same rows may lie at another one.
"""

from ratchet.config import RunConfig, semantic
from ratchet.stages.base_models import BasePolicy
from ratchet.stages.graph import data_stages
from ratchet.store import champions
from ratchet.store.decision import Decision
from ratchet.store.manifest import digest_of


def data_digest(root: str, config: RunConfig) -> str:
    """Return the digest of the training data that a run below `root` would commit under this config now.

    It is the digest of what such a run's stage preprocess/train puts out. What a run below `root` has prepared is not
    prepared again.
    """
    from ratchet.engines.model import load_tokenizer, resolve_tokenizer_folder

    tokenizer = load_tokenizer(resolve_tokenizer_folder(BasePolicy().path(config)))
    return data_stages(config)[0].digest(root, config, tokenizer)


def unchanged(root: str, name: str, config: RunConfig) -> Decision | None:
    """Return the newest decision on `name` that a run under this config would repeat; None where there is news.

    Such a decision promoted or refused a policy that was trained on the same prompts, under the same semantic config
    (`digest_of(semantic(config))`, which says nothing of places, resources or the number of steps), and the model that
    this config starts from is the one it started from, or came of an earlier decision on `name`: to start from a
    newer champion is nothing new, to start from another base is.
    """
    history = champions.decisions(root, name)
    config_digest, path = digest_of(semantic(config)), BasePolicy().path(config).rstrip("/")
    exports = {decision.export.uri for decision in history}
    alike = [
        decision
        for decision in reversed(history)
        if decision.verdict != "rolled_back"
        and decision.config_digest == config_digest
        and path in (exports | {decision.base.path.rstrip("/")})
    ]
    # Reading the data comes last: it may be the dearest of all.
    found = data_digest(root, config) if alike else None
    return next((decision for decision in alike if decision.data.train == found), None)
