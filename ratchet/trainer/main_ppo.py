"""`python -m ratchet.trainer.main_ppo key=value ...` does what `ratchet train` does, and so does `torchrun -m`.

Trap: torchrun starts a process for each GPU, and one run has one owner. The first process trains, and starts the
others' work where it is due; it is told how many there are, and the rest end at once.
"""

import os
import sys

from ratchet import cli

_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def main() -> None:
    """Hand the command line to `ratchet train`."""
    launched = {name: os.environ.pop(name) for name in _LAUNCHED if name in os.environ}
    if int(launched.get("RANK", 0)) > 0:
        return
    processes, local = int(launched.get("WORLD_SIZE", 1)), int(launched.get("LOCAL_WORLD_SIZE", 1))
    found = ["--num_gpus", str(local)] if processes > 1 else []
    found += [f"trainer.nnodes={processes // local}"] if processes > local else []
    sys.argv[1:1] = ["train", *found]
    cli.main()


if __name__ == "__main__":
    main()
