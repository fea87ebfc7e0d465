"""Under which name MLflow has each metric of a run, kept with the run there, so that anybody finds the way back.

Trap: a name is decided by those that came before it, and a process that goes on with a run has not seen them. What is
decided is therefore read from the MLflow run: `mean@1` and `mean_at_1` keep their own curves through every resume.
"""

import json
from collections.abc import Iterable, Mapping

from ratchet.tracking.metrics import mlflow_names

NAMES_TAG = "ratchet.metric_names"
"""MLflow's name -> the metric's, as JSON, of those that differ; from `ratchet.metric_names.2` on what has no room."""

_MAX_TAG = 8000
"""Characters of a tag's value that MLflow stores."""


class MetricNames:
    """The names of one MLflow run's metrics."""

    def __init__(self, tags: Mapping[str, str], stored: Iterable[str]) -> None:
        """`tags` are the MLflow run's, `stored` the names under which it has metrics."""
        self._tags: dict[str, str] = {}
        self._originals: dict[str, str] = {}
        self._known: dict[str, str] = {}
        self.learn(tags)
        # What is there under its own name keeps it. Of a run without the tag nothing says which names are their own.
        self._known |= {name: name for name in stored if self._tags and name not in self._originals}

    def learn(self, tags: Mapping[str, str]) -> None:
        """Take over what another process has decided: `tags` are the MLflow run's as they are now."""
        self._tags |= _own(tags)
        self._originals = originals(tags) | self._originals
        self._known = {name: there for there, name in originals(tags).items()} | self._known

    def stored(self, names: Iterable[str]) -> dict[str, str]:
        """Return name -> the name under which MLflow stores it, no two alike, and always the same for one run."""
        found = mlflow_names(names, self._known)
        self._known |= found
        self._originals |= {there: name for name, there in found.items() if there != name}
        return found

    def new_tags(self) -> dict[str, str]:
        """Return the tags that the MLflow run lacks, to be there before its metrics; empty after `learn`."""
        wanted = _as_tags(self._originals)
        return {key: value for key, value in wanted.items() if self._tags.get(key) != value}


def originals(tags: Mapping[str, str]) -> dict[str, str]:
    """Return MLflow's name -> the metric's, of those that differ, as the MLflow run with these tags says."""
    found: dict[str, str] = {}
    for key in sorted(_own(tags), key=_number):
        try:
            part = json.loads(tags[key])
        except ValueError:
            continue  # somebody's own; the names are decided anew
        if isinstance(part, dict):
            found |= {str(there): str(name) for there, name in part.items()}
    return found


def _as_tags(found: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that hold them. Names are only ever added at the end, so that full tags stay as they are."""
    parts: list[dict[str, str]] = [{}]
    length = 2
    for there, name in found.items():
        # What stands around them, too: `, ` for one, and braces that are counted twice.
        more = len(json.dumps({there: name}))
        if length + more > _MAX_TAG:
            parts.append({})
            length = 2
        parts[-1][there] = name
        length += more
    keys = [NAMES_TAG, *(f"{NAMES_TAG}.{number}" for number in range(2, len(parts) + 1))]
    return {key: json.dumps(part) for key, part in zip(keys, parts, strict=True)}


def _own(tags: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in tags.items() if _number(key)}


def _number(key: str) -> int:
    """Return which of the tags it is, from 1; 0 for any other tag."""
    number = key.removeprefix(f"{NAMES_TAG}.")
    return 1 if key == NAMES_TAG else int(number) if number != key and number.isdecimal() else 0
