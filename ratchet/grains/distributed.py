"""The updates of policy and critic on several processes of one node, under torchrun.

Rank 0 runs the stage to its commit; every other rank computes the same stage with it, since the trainer's calls are
collective, and writes nothing.
"""

import argparse
import json
import logging
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from ratchet import errors
from ratchet.config import RunConfig, parse_config
from ratchet.environment import set_defaults, set_log_level
from ratchet.errors import ConfigError, EngineError, RatchetError
from ratchet.stages.base import Context, Stage, run_stage
from ratchet.stages.graph import step_stage
from ratchet.stages.residents import Residents
from ratchet.store.artifacts import scratch
from ratchet.store.run import CRITIC_UPDATE, POLICY_UPDATE, Run

logger = logging.getLogger(__name__)

_FAILURE = "failure.json"
_UPDATES = (POLICY_UPDATE, CRITIC_UPDATE)


def processes(config: RunConfig) -> int:
    """Return the trainer's processes; more than one needs stage grain, where each update has processes of its own."""
    count = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if count > 1 and config.trainer.grain != "stage":
        raise ConfigError(
            f"trainer.n_gpus_per_node x trainer.nnodes is {count}, and trainer.grain is {config.trainer.grain}: "
            "training on several processes needs trainer.grain=stage in this version"
        )
    if config.trainer.nnodes > 1:
        raise ConfigError(f"trainer.nnodes is {config.trainer.nnodes}: this version trains on one node")
    return count


def launch(run: Run, stage: str, step: int, count: int) -> None:
    """Run an update of `step` on `count` processes, under the epoch that this process holds."""
    owner = run.check_ownership()
    arguments = ["--root", run.root, "--run-id", run.run_id, "--epoch", str(owner.epoch)]
    arguments += ["--stage", stage, "--step", str(step)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    with scratch() as shared:
        program = ["-m", "ratchet.grains.distributed", *arguments, "--shared-folder", str(shared)]
        finished = subprocess.run([*torchrun, *program], check=False)
        failure = _read_failure(shared)
    run.forget()
    if failure is not None:
        # Of its own kind, which says whether trying again can help.
        raise type(failure)(f"{stage} of step {step} on {count} processes: {failure}")
    if finished.returncode != 0:
        raise EngineError(f"{stage} of step {step} on {count} processes ended with code {finished.returncode}")


def _write_failure(folder: Path, error: RatchetError) -> None:
    """Hand the cause to the process that launched this one; the first to fail is the one that counts."""
    text = json.dumps({"kind": type(error).__name__, "message": str(error)})
    with suppress(FileExistsError), (folder / _FAILURE).open("x", encoding="utf-8") as file:
        file.write(text)


def _read_failure(folder: Path) -> RatchetError | None:
    path = folder / _FAILURE
    if not path.is_file():
        return None
    told = json.loads(path.read_text(encoding="utf-8"))
    kind = getattr(errors, told["kind"], EngineError)
    error: RatchetError = kind(told["message"])
    return error


def _stage(name: str, config: RunConfig) -> Stage:
    stage = step_stage(name, config)
    if stage is None:
        raise ConfigError(f"a step under this config does without {name}")
    return stage


def main() -> None:
    """Run as one of torchrun's processes."""
    set_defaults()
    set_log_level()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--root", required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--stage", choices=_UPDATES, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--shared-folder", type=Path, required=True)
    arguments = parser.parse_args()

    run = Run(arguments.root, arguments.run_id)
    submission = run.adopt(arguments.epoch)
    config = parse_config(run.config_of(submission), source=f"submission {arguments.epoch}", is_stored=True)
    residents, stage = Residents(run, config, shared_folder=arguments.shared_folder), _stage(arguments.stage, config)
    try:
        if residents.is_main:
            run_stage(stage, run, config, arguments.step, residents)
        elif run.manifest(stage.name, arguments.step) is None:
            inputs = stage.inputs(run, config, arguments.step)
            stage.compute(
                Context(
                    run=run,
                    config=config,
                    step=arguments.step,
                    inputs=inputs,
                    store=run.store,
                    folder="",
                    residents=residents,
                    keep_trainer_state=True,
                )
            )
    except RatchetError as error:
        _write_failure(arguments.shared_folder, error)
        raise
    finally:
        residents.close()


if __name__ == "__main__":
    main()
