"""`python -m ratchet.trainer.main_ppo key=value ...` does what `ratchet train` does."""

import sys

from ratchet import cli


def main() -> None:
    """Hand the command line to `ratchet train`."""
    sys.argv.insert(1, "train")
    cli.main()


if __name__ == "__main__":
    main()
