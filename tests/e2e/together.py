"""`python -m tests.e2e.together FILE`: a pipeline whose iterations start at once, as the UI's Retry starts failed ones.

Trap: the images of components are read from the environment when their modules are imported, so that it is compiled in
a process of its own.
"""

import subprocess
import sys
from pathlib import Path

from tests.e2e.environment import REPOSITORY, Environment

ITERATIONS = 4


def compile_together(environment: Environment, path: Path) -> Path:
    """Write the pipeline to `path` for the image under test; return the path."""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.e2e.together", str(path)],
        cwd=REPOSITORY,
        env=environment.of_commands(),
        check=True,
        timeout=300,
    )
    return path


def main(path: str) -> None:
    """Compile."""
    from kfp import compiler, dsl

    from components.preflight import preflight
    from components.preprocess import preprocess
    from components.segment import segment
    from pipelines.installation import settle

    job = dsl.PIPELINE_JOB_ID_PLACEHOLDER

    def small(task: dsl.PipelineTask) -> dsl.PipelineTask:
        return settle(task, hours=1).set_cpu_request("250m").set_memory_request("1Gi")

    @dsl.pipeline(name="ratchet-e2e-together")  # type: ignore[untyped-decorator]
    def together(root: str, run_id: str, config: str, total_steps: int, steps_per_segment: int) -> None:
        """Start every step of a run at the same time."""
        claimed = small(
            preflight(
                root=root,
                run_id=run_id,
                submission_id=job,
                config=config,
                total_steps=total_steps,
                steps_per_segment=steps_per_segment,
                grain="segment",
            )
        )
        prepared = small(preprocess(root=root, run_id=run_id, submission_id=job)).after(claimed)
        with dsl.ParallelFor(list(range(1, ITERATIONS + 1)), name="steps") as start:
            small(segment(root=root, run_id=run_id, submission_id=job, start=start)).after(prepared)

    compiler.Compiler().compile(together, path)


if __name__ == "__main__":
    main(sys.argv[1])
