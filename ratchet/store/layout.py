"""Where everything of a run lies; the only module that knows. Pure functions on strings, keys relative to the run.

run.json                                    semantic config, create-only
submissions/0001.json                       what may change between submissions, create-only
owner/0001.json                             who may commit, create-only
data/<split>/manifest.json                  prompts
step-000012/<stage>/manifest.json           the commit point of a stage
step-000012/<stage>/<attempt>/...           what that attempt wrote
retired/step-000012/<stage>/<role>.json     that something was deleted on purpose, and why; create-only
index/000050.jsonl.gz                       the manifests of the 50 steps that end here, once more; replaced freely
status/<submission>/<task>.json             what a pod last said of itself: no part of the chain, replaced freely
preflight/<probe>                           what preflight wrote to see whether it can, and deletes

Beside the runs, relative to the root:

champions/<name>/0001.json                  decisions on what serves under a name, create-only
prepared/<key>.json                         where prompts were prepared before, create-only
"""

import re

from ratchet.errors import ConfigError

RUN = "run.json"
DATA_SPLITS = ("train", "val", "sft")
"""Folders below `data/`: what is trained on, what is held out, and the examples that a hybrid run imitates beside."""
CHAMPIONS = "champions"
PREPARED = "prepared"
INDEX = "index"

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_OWNER = re.compile(r"owner/(\d{4,})\.json")
_CHAMPION = re.compile(r"(\d{4,})\.json")
_STEP_FOLDER = re.compile(r"step-(\d{6,})")
_MANIFEST = re.compile(r"((?:step-\d{6,}|data)/[^/]+)/manifest\.json")
_IN_ATTEMPT = re.compile(r"(?:step-\d{6,}|data)/[^/]+/((\d{4,})-[0-9a-f]+)/.+")
_CODE = re.compile(r"code/([0-9a-f]{64})/[^/]+")
_INDEX = re.compile(r"index/(\d{6,})\.jsonl\.gz")
_RETIRED = re.compile(r"retired/(step-\d{6,}/[^/]+)/([^/]+)\.json")
_BESIDE_THE_CHAIN = re.compile(
    r"run\.json|(?:submissions|owner)/\d{4,}\.json|(?:status|preflight)/.+|" + _INDEX.pattern + "|" + _RETIRED.pattern
)


def check_run_id(run_id: str) -> str:
    """Return `run_id` if it can be a folder's name everywhere; ConfigError otherwise."""
    if run_id in (CHAMPIONS, PREPARED):
        raise ConfigError(f"run id {run_id!r}: this folder of the root holds something else; take another name")
    if _RUN_ID.fullmatch(run_id):
        return run_id
    raise ConfigError(
        f"run id {run_id!r}: expected 1 to 128 letters, digits, '.', '_' or '-', the first a letter or a digit"
    )


def check_champion_name(name: str) -> str:
    """Return `name` if decisions can be kept under it; ConfigError otherwise."""
    if _RUN_ID.fullmatch(name):
        return name
    raise ConfigError(
        f"champion {name!r}: expected 1 to 128 letters, digits, '.', '_' or '-', the first a letter or a digit"
    )


def champion(name: str, number: int) -> str:
    """Key, relative to the root, of the decision `number` (from 1) on what serves under `name`."""
    return f"{CHAMPIONS}/{name}/{number:04d}.json"


def parse_champion(key: str) -> int | None:
    """Return the number of a decision's file name, or None if it is another object."""
    match = _CHAMPION.fullmatch(key)
    return int(match[1]) if match else None


def prepared(key: str) -> str:
    """Key, relative to the root, of what says where the prompts of this digest lie."""
    return f"{PREPARED}/{key}.json"


def status(submission_id: str, task: str, step: int | None) -> str:
    """Key of what a task of a submission last said of itself."""
    return f"status/{submission_id}/{task}{'' if step is None else f'-{step:06d}'}.json"


def submission(epoch: int) -> str:
    """Key of the submission that claimed `epoch`."""
    return f"submissions/{epoch:04d}.json"


def owner(epoch: int) -> str:
    """Key of the claim of `epoch`."""
    return f"owner/{epoch:04d}.json"


def parse_owner(key: str) -> int | None:
    """Return the epoch that `key` claims, or None if it is another object."""
    match = _OWNER.fullmatch(key)
    return int(match[1]) if match else None


def retired(stage: str, step: int, role: str) -> str:
    """Key of the record that one artifact of a stage, or its trainer's state, was deleted on purpose."""
    return f"retired/{stage_folder(stage, step)}/{role}.json"


def parse_retired(key: str) -> tuple[str, str] | None:
    """Return the stage's folder and the role that a record is about, or None if it is another object."""
    match = _RETIRED.fullmatch(key)
    return (match[1], match[2]) if match else None


def index(last: int) -> str:
    """Key of the index of the steps that end with step `last`."""
    return f"{INDEX}/{last:06d}.jsonl.gz"


def parse_index(key: str) -> int | None:
    """Return the last step of the index that `key` is, or None if it is another object."""
    match = _INDEX.fullmatch(key)
    return int(match[1]) if match else None


def code(sha256: str, name: str) -> str:
    """Key of a user's Python file, for those who read the run; `name` is the file's own, without folders."""
    return f"code/{sha256}/{name}"


def parse_code(key: str) -> str | None:
    """Return the sha256 that the bytes of a user's Python file must have, or None if it is another object."""
    match = _CODE.fullmatch(key)
    return match[1] if match else None


def is_beside_the_chain(key: str) -> bool:
    """Whether the object is one that no manifest names though it belongs to the run: identity, claims, statuses."""
    return bool(_BESIDE_THE_CHAIN.fullmatch(key))


def is_probe(key: str) -> bool:
    """Whether the object is one that preflight writes and deletes at once."""
    return key.startswith("preflight/")


def step_folder(step: int) -> str:
    """Folder of everything that belongs to `step`; step 0 is what precedes training."""
    return f"step-{step:06d}"


def parse_step_folder(name: str) -> int | None:
    """Return the step of a folder's name, or None if it is another folder."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def stage_folder(stage: str, step: int | None) -> str:
    """Folder of a stage: in its step, or `data/<split>` for the stage `preprocess/<split>`, which has no step."""
    if step is not None:
        return f"{step_folder(step)}/{stage}"
    return f"data/{stage.removeprefix('preprocess/')}"


def manifest(stage: str, step: int | None) -> str:
    """Key of a stage's manifest."""
    return f"{stage_folder(stage, step)}/manifest.json"


def parse_manifest(key: str) -> str | None:
    """Return the folder of the stage whose manifest `key` is, or None if it is another object."""
    match = _MANIFEST.fullmatch(key)
    return match[1] if match else None


def parse_attempt(key: str) -> tuple[str, int] | None:
    """Return the folder and the epoch of the attempt that an object lies in, or None if it lies in none."""
    match = _IN_ATTEMPT.fullmatch(key)
    return (key[: match.end(1)], int(match[2])) if match else None


def attempt_folder(stage: str, step: int | None, attempt: str) -> str:
    """Folder of what one attempt at a stage writes."""
    return f"{stage_folder(stage, step)}/{attempt}"
