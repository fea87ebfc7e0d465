"""PPOTrainer: runs a flow here."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.errors import ConfigError
from ratchet.flow.base import DataFlow
from ratchet.flow.runners import find_runner
from ratchet.flow.tree import stop_if_loading

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratchet.config import RunConfig


class PPOTrainer:
    """Runs a flow in this process; the algorithm is the flow's parts: PPO, another one, or an
    objective without rollouts.

    Example: PPOTrainer(data_flow=flow, config={"data": {"train_files": "train.parquet"}}).fit(). `config` holds the
    keys that no part sets: nested mappings, the path of a YAML file, or a RunConfig.
    """

    def __init__(
        self, *, data_flow: DataFlow, config: "Mapping[str, Any] | str | Path | RunConfig | None" = None
    ) -> None:
        if not isinstance(data_flow, DataFlow):
            raise ConfigError(f"data_flow is {data_flow!r}: expected RLDataFlow(...) or HybridDataFlow(...)")
        self.data_flow = data_flow
        self._extra = config
        self.config = data_flow.config(config)

    def fit(self, *, root: str | None = None, run_id: str | None = None) -> Any:
        """Train to the end, or go on where the run of that id stopped.

        `root` and `run_id` are trainer.default_local_dir and trainer.experiment_name where they are not given. Returns
        a FitResult: where the run lies, its steps, the last step's metrics, and the exported model's folder.
        """
        stop_if_loading()
        return find_runner("local").fit(self.data_flow, self._extra, root=root, run_id=run_id)
