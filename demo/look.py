"""`python -m demo.look RUN_ID [--step K]`: start the demo's S3 server again and show a run that it holds."""

import os
import sys

from demo.run import FOLDER, ROOT
from demo.servers import seaweedfs


def main() -> None:
    """Hand everything to `ratchet show`."""
    from ratchet import cli

    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m demo.look RUN_ID [--step K] [--json]")
    run_id, *options = sys.argv[1:]
    with seaweedfs(FOLDER / "s3") as server:
        os.environ.update(server.env())
        sys.argv = ["ratchet", "show", f"{ROOT}/{run_id}", *options]
        cli.main()


if __name__ == "__main__":
    main()
