"""docs/audit.md, executed: every command of the page, after two nights on a real S3 server and a real MLflow."""

import json
import os
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.servers import mlflow_server
from ratchet.data import schemas
from ratchet.store import champions
from ratchet.store.run import Run
from tests import audit_story, screenshots
from tests.audit_story import NAME, PRICE, Story
from tests.command_line import Finished, in_this_process
from tests.conftest import use_s3_server
from tests.mlflow_gateway import Gateway
from tests.pages import ROOT, commands
from tests.runs import manifests, table_rows

PAGE = screenshots.PAGE
LAST = audit_story.NIGHTS["night-2"]
SAMPLE = ("000010/train-0000003", 6)
"""The completion that the page looks at."""
AUDIT = "ratchet audit models:/sums@champion"
AUDIT_BEFORE = "ratchet audit $RATCHET_ROOT/champions/sums/1"
CHAMPIONS = "ratchet champions sums --root $RATCHET_ROOT"
SHOW = "ratchet show $RATCHET_ROOT/night-2"
AUDIT_PRICED = "ratchet audit $RATCHET_ROOT/night-2 --price cpu=0.1"
SHOW_STEP = "ratchet show $RATCHET_ROOT/night-2 --step 10"
SHOW_SAMPLE = "ratchet sample $RATCHET_ROOT/night-2 --step 10 --id 000010/train-0000003/6"
REPLAY = "ratchet replay $RATCHET_ROOT/night-2 --step 10 --stage reward"
VERIFY = "ratchet verify $RATCHET_ROOT/night-2"
SYNC = "ratchet sync $RATCHET_ROOT/night-2"
REPORT = "ratchet report $RATCHET_ROOT/night-2 --to night-2.html"
_VALUE = r"\b(?=[-a-f]*\d)[-0-9a-f]{8,}\b|[-+]?\b\d[-+.:\de]*Z?|\bNone\b"
"""A digest or an id, a number or a time."""


@dataclass(frozen=True)
class Told:
    """Everything that there is after the story, and what each of the page's commands said of it."""

    story: Story
    tracking_uri: str
    refused: int
    """Requests that MLflow did not answer while it was away."""
    said: dict[str, Finished]
    """Command of the page -> how it ended."""
    page: Path
    """What `ratchet report` wrote."""

    @property
    def run(self) -> Run:
        return Run(audit_story.ROOT, "night-2")


@pytest.fixture(scope="module")
def monkeypatched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def told(
    s3_server: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatched: pytest.MonkeyPatch
) -> Iterator[Callable[[pytest.CaptureFixture[str]], Told]]:
    """Tell the story, then type what the page says; done when it is first asked for, since output is a test's own."""
    folder = tmp_path_factory.mktemp("story")
    use_s3_server(s3_server.env(), monkeypatched)
    s3_server.create_bucket(audit_story.BUCKET)
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_WORKSPACE"):
        monkeypatched.delenv(name, raising=False)
    monkeypatched.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatched.setenv("RATCHET_ROOT", audit_story.ROOT)
    monkeypatched.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatched.chdir(folder)
    made: list[Told] = []
    with mlflow_server(folder / "mlflow") as server:
        gateway = Gateway(server.uri)
        gateway.start()
        monkeypatched.setenv("MLFLOW_TRACKING_URI", gateway.uri)

        def tell(capsys: pytest.CaptureFixture[str]) -> Told:
            if not made:
                refused = [0]
                story = audit_story.tell(folder, during_the_second=lambda: _outage(gateway, refused))
                ratchet = in_this_process(monkeypatched, capsys)
                said = {command: ratchet(*_words(command)) for command, _ in commands(PAGE)}
                [page] = folder.glob("*.html")
                made.append(Told(story, server.uri, refused[0], said, page))
            return made[0]

        yield tell
        gateway.close()


def _words(command: str) -> list[str]:
    """A command's arguments, as a shell would pass them on."""
    return [os.path.expandvars(word) for word in command.split()[1:]]


def _outage(gateway: Gateway, refused: list[int]) -> Callable[[], None]:
    """Let MLflow be away until the returned function is called."""
    before, gateway.mode = gateway.requests, "drop"

    def back() -> None:
        refused[0] = gateway.requests - before
        gateway.mode = "ok"

    return back


@pytest.fixture
def walk(told: Callable[[pytest.CaptureFixture[str]], Told], capsys: pytest.CaptureFixture[str]) -> Told:
    return told(capsys)


@pytest.fixture
def audited(walk: Told) -> str:
    return walk.said[AUDIT].out


def _short(digest: str) -> str:
    return digest[:12]


def test_every_command_of_the_page_says_what_the_page_shows(walk: Told) -> None:
    # One that no test looks at answers nothing.
    assert set(walk.said) == {
        *(AUDIT, AUDIT_BEFORE, CHAMPIONS, SHOW, AUDIT_PRICED, SHOW_STEP),
        *(SHOW_SAMPLE, REPLAY, VERIFY, SYNC, REPORT),
    }
    for command, shown in commands(PAGE):
        finished = walk.said[command]
        assert finished.code == 0, (command, finished.err)
        assert shown, command
        wanted = [_shape(line, command) for line in shown if line.strip(" |") != "..."]
        found = [_shape(line, command) for line in finished.lines]
        missing = [shape for shape in wanted if not any(_fits(one, shape) for one in found)]
        assert not missing, (command, missing, finished.out)


def _shape(line: str, command: str) -> str:
    """A line without its values; what a model wrote, and what depends on it, is a value too."""
    if command.split()[1] in ("sample", "show") and line.startswith("  "):
        return "  (text)"
    line = re.sub(r"'[^']*'|\"[^\"]*\"|\bno answer was read\b", "S", " ".join(line.split()))
    line = re.sub(_VALUE, "N", line)
    return re.sub(r"N(?:[-:,. ]+N)*", "N", line)


def _fits(found: str, wanted: str) -> bool:
    return found.startswith(wanted.removesuffix("...").rstrip()) if wanted.endswith("...") else found == wanted


def test_why_the_model_exists_is_one_chain_from_mlflow_to_the_base_model(walk: Told, audited: str) -> None:
    from mlflow import MlflowClient

    run, (first, second) = walk.run, champions.decisions(audit_story.ROOT, NAME)
    version = MlflowClient(tracking_uri=walk.tracking_uri).get_model_version_by_alias(NAME, "champion")
    export = run.require("checkpoint_export", LAST)
    assert second.export.digest == export.content.outputs["export"] == version.tags["ratchet.export_digest"]
    assert version.tags["ratchet.manifest"] == export.sha256
    assert version.source == second.export.uri
    assert audited.startswith(f"models:/{NAME}/{version.version} @challenger @champion\n")
    assert f"MLflow run {version.run_id}" in audited
    # Every stage of the last step, the export and the data: each manifest's own digest is in the tree.
    shown = [export, *run.step_manifests(LAST), run.require("preprocess/train", None), run.require("policy_update", 0)]
    assert all(_short(one.sha256) in audited for one in shown)
    assert audited.rstrip().endswith("every manifest is the one that was read; ratchet verify hashes the files, too")
    # The base model is the export that was promoted the night before, and that one's is nobody's export.
    assert f"version 0 from {first.export.uri}\n" in audited
    assert run.require("policy_update", 0).content.inputs["base_model"] == first.export.digest
    before = walk.said[AUDIT_BEFORE].out
    assert f"{NAME} decision 1: promoted" in before
    assert f"version 0 from s3://{audit_story.BUCKET}/models/tiny-adder\n" in before


def test_what_it_was_trained_on_is_named_by_digest_everywhere(walk: Told, audited: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=walk.tracking_uri)
    tracked = client.get_run(client.get_model_version_by_alias(NAME, "champion").run_id)
    inputs = {one.dataset.name: one for one in tracked.inputs.dataset_inputs}
    for split, file in (("train", "train.jsonl"), ("val", "held-out.jsonl")):
        prompts = walk.run.require(f"preprocess/{split}", None)
        digest = prompts.content.outputs["prompts"]
        assert f"made from the rows of s3://{audit_story.BUCKET}/data/{file}, digest " in audited
        assert _short(prompts.content.inputs["source"]) in audited
        assert f"writes prompts {_short(digest)}: 50 rows" in audited
        assert {tag.key: tag.value for tag in inputs[f"data/{split}"].tags}["ratchet.sha256"] == digest
    report = walk.story.shown["night-2/checkpoint_export/report"].text
    digest = walk.run.require("preprocess/train", None).content.outputs["prompts"]
    assert f"| Training prompts | 50, {_short(digest)} |" in report


def test_who_let_it_through_and_by_which_numbers(walk: Told) -> None:
    from mlflow import MlflowClient

    history = walk.said[CHAMPIONS].out
    first, second = champions.decisions(audit_story.ROOT, NAME)
    accuracies = []
    for run_id, step in audit_story.NIGHTS.items():
        rows = table_rows(Run(audit_story.ROOT, run_id), "evaluate", "evaluations", schemas.EVALUATIONS, step)
        accuracies.append(statistics.mean(row["reward"] for row in rows))
    assert [one.evaluation.accuracy for one in (first, second)] == pytest.approx(accuracies)
    assert second.improvement is not None
    assert second.improvement.mean == pytest.approx(accuracies[1] - accuracies[0])
    assert f"accuracy {accuracies[1]:.4f} " in history
    assert f"{accuracies[1] - accuracies[0]:+.4f} " in history
    assert history.count("* ") == 1
    assert "* 2: promoted | night-2 step 10" in history
    assert "by ratchet-night-2-promote, submission b2d9e413" in history
    report = walk.story.shown["night-2/promote/report"].text
    assert f"### {NAME}: decision 2, promoted" in report
    assert "| champion before | decision 1 |" in report
    version = MlflowClient(tracking_uri=walk.tracking_uri).get_model_version_by_alias(NAME, "champion")
    assert version.tags["ratchet.decided_by"] == "ratchet-night-2-promote"
    assert float(version.tags["ratchet.improvement"]) == pytest.approx(second.improvement.mean)


def test_what_it_cost_is_seconds_times_the_price(walk: Told, audited: str) -> None:
    from mlflow import MlflowClient

    took: dict[str, float] = {}
    for place, one in manifests(walk.run).items():
        stage = "version 0" if place == "0/policy_update" else one.content.stage
        took[stage] = took.get(stage, 0.0) + one.provenance.ended - one.provenance.started
    money = sum(took.values()) / 3600 * PRICE
    assert f"0 GPU-seconds, cost {money:.3g}\n" in audited
    table = {row[0]: row for row in (re.split(r" {2,}", line) for line in walk.said[SHOW].lines)}
    assert float(table["total"][-1]) == pytest.approx(money, rel=5e-3)
    for stage, seconds in took.items():
        assert float(table[stage][-1]) == pytest.approx(seconds / 3600 * PRICE, rel=5e-3), stage
    # Of every step in MLflow, once: the last one's stages by hand.
    client = MlflowClient(tracking_uri=walk.tracking_uri)
    version = client.get_model_version_by_alias(NAME, "champion")
    logged = client.get_metric_history(version.run_id, "cost/money")
    assert [point.step for point in logged] == list(range(1, LAST + 1))
    stages = ("rollout", "reward", "advantage", "policy_update")
    last = [walk.run.require(stage, LAST).provenance for stage in stages]
    by_hand = sum(one.ended - one.started for one in last) / 3600 * PRICE
    assert logged[-1].value == pytest.approx(by_hand, rel=0.05)
    assert "| total | " in walk.story.shown["night-2/checkpoint_export/report"].text
    dearer = walk.said[AUDIT_PRICED].out
    assert f"cost {2 * money:.3g}\n" in dearer


def test_one_completion_is_shown_as_it_was_sampled_graded_and_learned_from(
    walk: Told, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group_id, index = SAMPLE
    text = walk.said[SHOW_SAMPLE].out
    found = json.loads(in_this_process(monkeypatch, capsys)(*_words(SHOW_SAMPLE), "--json").out)
    tables = {
        role: table_rows(walk.run, stage, role, schema, LAST)
        for stage, role, schema in (
            ("rollout", "rollouts", schemas.ROLLOUTS),
            ("reward", "rewards", schemas.REWARDS),
            ("advantage", "trajectories", schemas.TRAJECTORIES),
        )
    }
    group = {role: [row for row in rows if row["group_id"] == group_id] for role, rows in tables.items()}
    rollout, graded, learned = (
        next(row for row in group[role] if row["sample_index"] == index)
        for role in ("rollouts", "rewards", "trajectories")
    )
    ids = rollout["completion_token_ids"]
    assert (found["group_id"], found["sample_index"], found["completion"]) == (*SAMPLE, rollout["completion"])
    assert all(f"  {line}" in text for line in rollout["completion"].splitlines() if line.isprintable())
    assert (found["tokens"]["token_ids"], len(ids)) == (ids, len(found["tokens"]["sampler_log_probs"]))
    assert found["tokens"]["sampler_log_probs"] == pytest.approx(rollout["sampler_log_probs"])
    assert f"reward {graded['reward']:g} (rule {graded['reward']:g})" in text
    # GRPO: the reward against its group, in units of the group's standard deviation.
    rewards = [row["reward"] for row in sorted(group["rewards"], key=lambda row: row["sample_index"])]
    assert found["group_rewards"] == rewards
    by_hand = (rewards[index] - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)
    assert found["tokens"]["advantages"] == pytest.approx([by_hand] * len(ids), abs=1e-4)
    assert learned["advantages"] == pytest.approx([by_hand] * len(ids), abs=1e-4)
    update = walk.run.require("policy_update", LAST)
    assert f"fed the update to policy version {LAST}, {_short(update.content.outputs['policy'])} " in text
    assert _short(update.sha256) in text
    best = walk.said[SHOW_STEP].out
    assert best.startswith("best: ")
    assert "equal (committed " in walk.said[REPLAY].out


def test_mlflow_was_away_and_has_everything_once(walk: Told) -> None:
    from mlflow import MlflowClient

    assert walk.refused > 0
    assert ": 0 stages brought, the others were there" in walk.said[SYNC].out
    client = MlflowClient(tracking_uri=walk.tracking_uri)
    tracked = client.get_run(client.get_model_version_by_alias(NAME, "champion").run_id)
    scores = client.get_metric_history(tracked.info.run_id, "critic/score/mean")
    committed = [walk.run.require("reward", step).provenance.metrics for step in range(1, LAST + 1)]
    assert [(one.step, one.value) for one in scores] == [
        (step, pytest.approx(metrics["critic/score/mean"])) for step, metrics in enumerate(committed, start=1)
    ]
    files = {one.path for one in client.list_artifacts(tracked.info.run_id, "completions/train")}
    assert f"completions/train/step-{LAST:06d}.json" in files
    assert {one.path for one in client.list_artifacts(tracked.info.run_id)} >= {"config.yaml", "reports"}


def test_nothing_was_changed_and_the_pages_are_there(walk: Told) -> None:
    assert f"{walk.run.uri}: 0 faults" in walk.said[VERIFY].out
    assert walk.said[REPORT].out.startswith("night-2.html: ")
    assert "<title>night-2</title>" in walk.page.read_text(encoding="utf-8")
    for task, title in (("segment", "night-2, steps 1 to 10"), ("checkpoint_export", "night-2")):
        assert f"<title>{title}</title>" in walk.story.shown[f"night-2/{task}/page"].text
    model = walk.story.shown["night-2/checkpoint_export/model"].metadata
    assert model["manifest_sha256"] == walk.run.require("checkpoint_export", LAST).sha256


def test_pictures_are_small_and_each_is_on_a_page() -> None:
    shown = set(re.findall(r"\]\(images/([\w-]+\.png)\)", (ROOT / PAGE).read_text(encoding="utf-8")))
    there = {path.name: path.stat().st_size for path in (ROOT / "docs" / "images").glob("*.png")}
    assert shown == set(there)
    assert {f"report-{screen}-{scheme}.png" for screen in screenshots.REPORTS for scheme in ("light", "dark")} <= shown
    assert all(size < screenshots.MAX_BYTES for size in there.values()), there
