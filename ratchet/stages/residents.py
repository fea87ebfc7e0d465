"""Engines that outlive a stage: the sampler, the trainers, the scorers and the grader of one process.

Trap: an engine's weights are known by the place of the policy they came from; whatever is asked for another one loads
it first, and the sampler must show that it holds and uses the new weights: a stale engine can never be used.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.config import RunConfig
from ratchet.data import schemas
from ratchet.stages.base import Context, Input
from ratchet.stages.handshake import check_same_weights, compare_log_probs
from ratchet.stages.held import Held, accelerators, num_held
from ratchet.stages.publishing import Publisher
from ratchet.stages.run_tables import run_table
from ratchet.store.manifest import Artifact
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE, Run
from ratchet.store.weights import read_weights

if TYPE_CHECKING:
    import torch

    from ratchet.engines.critic import ValueScorer
    from ratchet.engines.reward_model import RewardModel
    from ratchet.engines.sampler import Sampler
    from ratchet.engines.scorer import Scorer
    from ratchet.rewards.graders import Grader

logger = logging.getLogger(__name__)

Place = tuple[str, int | None, str]
"""Stage, step and role of a model, as `Input.place`."""

_PROBE_TOKENS = 128
_WEIGHTS = ".safetensors"
_INDEX = "model.safetensors.index.json"


class Residents:
    """Holds engines, opens them on first use, and brings them to the policy that is asked for."""

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        *,
        shared_folder: Path | None = None,
        live_reward: Any = None,
        mesh: Any = None,
    ) -> None:
        """`live_reward` is a reward object of this process and `mesh` its device mesh, for runs that stay in it."""
        self.run = run
        self.config = config
        self.mesh = mesh
        self.trainers: dict[str, Any] = {}
        """Role ("policy", "critic") -> its trainer."""
        self.replay_seconds: dict[str, float] = {}
        """Role -> what replaying committed steps through its trainer took, until the update that needed it tells."""
        self.proven_states: set[str] = set()
        """Folders of the trainer states that this process has read back from storage, every digest compared."""
        self.shared_folder = shared_folder
        """A local folder that every rank of this node sees, where there are several."""
        self._live_reward = live_reward
        self._sampler: Sampler | None = None
        self._scorers: dict[str, Scorer | ValueScorer | RewardModel] = {}
        self._grader: Grader | None = None
        self._held: dict[str, Place] = {}
        self._publishers: dict[str, Publisher] = {}
        self._fresh: dict[Place, dict[str, torch.Tensor]] = {}
        """The weights published last, where the trainer left them: as many versions as a sampler may be behind."""
        self._probe: list[int] | None = None
        self.drift: float | None = None
        """Mean difference, in nats, of sampler and trainer on the fixed prompt, when the sampler was last updated."""
        self._folder: Path | None = None
        self._tokenizer: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, or alone; the others compute with it and write nothing."""
        return os.environ.get("RANK", "0") == "0"

    @property
    def held(self) -> Held:
        """What the engines that are open hold."""
        is_grading = self._grader is not None and "model" in self.config.reward_weights
        count = num_held(
            self.config,
            is_training=bool(self.trainers),
            is_scoring=bool(self._scorers) or is_grading,
            is_sampling=self._sampler is not None,
        )
        return accelerators(self.torch_device(), count) if count else Held("cpu", 0)

    def torch_device(self) -> str:
        """Return the device that the config asks for, "auto" resolved."""
        from ratchet.engines.model import torch_device

        return torch_device(self.config.trainer.device).type

    def sampler(self, policy: Input) -> "Sampler":
        """Return the sampler with the weights of `policy`.

        After every change of weights it must hold exactly those that it was given, and answer as the trainer does.
        """
        if self._sampler is None:
            from ratchet.engines.open_sampler import open_sampler
            from ratchet.stages.settings import sampler_settings

            settings = sampler_settings(self.config, self.torch_device())
            self._sampler = open_sampler(
                self.config.actor_rollout_ref.rollout.name, self.model_folder(policy), **settings
            )
        elif self._held.get("sampler") == policy.place:
            return self._sampler
        else:
            weights = dict(self.weights(policy))
            # Until all of it is done, it holds nobody's weights.
            self._held.pop("sampler", None)
            self._sampler.load_weights(weights.items())
            if policy.manifest.step != 0:
                # Version 0 comes as its files are, in their own dtype.
                check_same_weights(self._sampler, weights.values(), policy.place)
        self.drift = self._drift(policy)
        self._held["sampler"] = policy.place
        return self._sampler

    def rest_sampler(self) -> None:
        """Let the sampler give its memory to the update, where the config says so and it does not sample meanwhile."""
        rollout = self.config.actor_rollout_ref.rollout
        is_shared = not (self.config.trainer.async_level or rollout.dedicated_gpus)
        if self._sampler is None or not rollout.free_cache_engine or not is_shared:
            return
        self._sampler.sleep()
        if rollout.sleep_level == 2:
            # Its weights are gone: whatever it is asked next, it is given them first.
            self._held.pop("sampler", None)

    def _drift(self, policy: Input) -> float | None:
        """Compare sampler and trainer on the fixed prompt, where the trainer is at this version."""
        trainer = self.trainers.get("policy")
        if self._sampler is None or trainer is None or trainer.policy_version != policy.manifest.step:
            return None
        limit = self.config.actor_rollout_ref.rollout.max_log_prob_drift
        return compare_log_probs(self._sampler, trainer, self._probe_tokens(), limit=limit, place=policy.place)

    def _probe_tokens(self) -> list[int]:
        if self._probe is None:
            from ratchet.engines.model import chat_prompt_ids

            prompts = self.run.require("preprocess/train", None).output("prompts")
            first = run_table(self.run.store, prompts, schemas.PROMPTS)["prompt"][0].as_py()
            self._probe = chat_prompt_ids(self.tokenizer(), first)[:_PROBE_TOKENS]
        return self._probe

    def scorer(self, role: str, policy: Input) -> "Scorer":
        """Return the scorer of `role` ("policy" or "reference") with the weights of `policy`."""
        from ratchet.engines.scorer import Scorer
        from ratchet.stages.settings import scorer_settings

        scorer = self._scorer(role, policy, Scorer.from_folder, scorer_settings)
        assert isinstance(scorer, Scorer)
        return scorer

    def value_scorer(self, critic: Input) -> "ValueScorer":
        """Return the critic's scorer with the weights of `critic`."""
        from ratchet.engines.critic import ValueScorer
        from ratchet.stages.settings import value_scorer_settings

        scorer = self._scorer("critic", critic, ValueScorer.from_folder, value_scorer_settings)
        assert isinstance(scorer, ValueScorer)
        return scorer

    def judge(self, policy: Input) -> "RewardModel":
        """Return the scorer of a run that trains a reward model, with the weights of `policy`."""
        from ratchet.engines.reward_model import RewardModel
        from ratchet.stages.settings import judge_settings

        scorer = self._scorer("judge", policy, RewardModel.from_folder, judge_settings)
        assert isinstance(scorer, RewardModel)
        return scorer

    def _scorer(self, role: str, weights: Input, open_: Any, settings: Any) -> "Scorer | ValueScorer | RewardModel":
        if role not in self._scorers:
            self._scorers[role] = open_(self.model_folder(weights), **settings(self.config, self.torch_device()))
        elif self._held.get(role) != weights.place:
            self._held.pop(role, None)
            self._scorers[role].load_weights(dict(self.weights(weights)))
        self._held[role] = weights.place
        return self._scorers[role]

    def grader(self) -> "Grader":
        """Return what grades completions."""
        if self._grader is None:
            from ratchet.rewards.graders import open_grader
            from ratchet.rewards.model_files import open_reward_model

            self._grader = open_grader(self.config, open_model=open_reward_model(self.config), custom=self._live_reward)
        return self._grader

    def tokenizer(self) -> Any:
        """Return the tokenizer of policy version 0, which is every version's."""
        if self._tokenizer is None:
            from ratchet.engines.model import load_tokenizer

            self._tokenizer = load_tokenizer(self.base_folder())
        return self._tokenizer

    def publish(self, place: Place, context: Context, weights: "dict[str, torch.Tensor]") -> "Future[Artifact]":
        """Publish the weights of a step, and keep them so that engines need not read them back."""
        _, step, role = place
        assert step is not None
        if role not in self._publishers:
            self._publishers[role] = Publisher(role, self.config.trainer.full_weights_freq)
        kept = [one for one in self._fresh if one[2] == role]
        for old in kept[: len(kept) - self.config.trainer.async_level]:
            del self._fresh[old]
        self._fresh[place] = weights
        return self._publishers[role].publish(context, step, weights)

    def weights(self, model: Input) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield the weights of a policy or critic under their names, from memory where they are there."""
        fresh = self._fresh.get(model.place)
        if fresh is not None:
            yield from fresh.items()
            return
        from safetensors import safe_open

        from ratchet.engines.model import weight_files

        for path in weight_files(self.model_folder(model)):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                    yield name, file.get_tensor(name)

    def model_folder(self, model: Input) -> Path:
        """Return a local Hugging Face folder with the weights of `model`; config and tokenizer are version 0's."""
        role = model.role
        target = self._cache() / f"{role}-{model.digest}"
        if target.is_dir():
            return target
        partial = target.with_suffix(".partial")
        if model.manifest.step == 0:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            base = self.base_folder(role)
            self._evict(role, keep=base)
            partial.mkdir(parents=True)
            for path in base.iterdir():
                if path.suffix != _WEIGHTS and path.name != _INDEX:
                    shutil.copyfile(path, partial / path.name)
        read_weights(self.run, model.manifest.committed(), role, partial)
        partial.replace(target)
        return target

    def keep_folder(self, role: str, digest: str, folder: Path) -> None:
        """Take over the local folder of a model that was just stored, so that it need not be read back."""
        target = self._cache() / f"{role}-{digest}"
        if not target.exists():
            shutil.move(folder, target)

    def base_folder(self, role: str = "policy") -> Path:
        """Return a local Hugging Face folder of version 0 of the policy or the critic."""
        stage = POLICY_UPDATE if role == "policy" else CRITIC_UPDATE
        return self.model_folder(Input(self.run.require(stage, 0), role))

    def drop(self) -> None:
        """Close every engine and forget everything held in memory; the next use starts from what is committed."""
        # The sampler last: where vLLM made the process group that the trainer joined, closing it ends the group.
        for engine in (*self.trainers.values(), *self._scorers.values(), self._grader, self._sampler):
            if engine is not None:
                engine.close()
        self._sampler, self._grader = None, None
        for held in (self.trainers, self._scorers, self._fresh, self._held, self._publishers):
            held.clear()

    def close(self) -> None:
        """Drop everything and delete the local copies."""
        self.drop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _cache(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ratchet-models-", dir=os.environ.get("RATCHET_SCRATCH")))
        return self._folder

    def _evict(self, role: str, keep: Path) -> None:
        for path in self._cache().glob(f"{role}-*"):
            if path != keep:
                shutil.rmtree(path)
