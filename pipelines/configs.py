"""A run's config on its way into a pipeline's parameter: read and checked here, so that a mistake costs no pod.

Traps: a parameter travels as one argument of a process, which Linux limits to 128 KiB. Argo, which runs the pipeline,
fills in whatever stands in double braces, and so would read a chat template.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.defaults import one_line
from ratchet.config import RunConfig, parse_text, read_config_text
from ratchet.errors import ConfigError, StoreError
from ratchet.grains.placement import stored_text

logger = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 96 * 1024
"""Most that a config may have as a parameter."""


def parameter_text(tree: Mapping[str, Any]) -> str:
    """Return nested mappings as YAML of one line for a parameter; ConfigError where it is too long for one."""
    # Within JSON two braces in a row occur in texts only, where the escape means the same.
    text = one_line(dict(tree)).replace("{{", "{\\u007b")
    if len(text.encode()) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"the config with its code has {len(text.encode())} bytes, and a pipeline's parameter holds "
            f"{MAX_CONFIG_BYTES}: put it as a YAML file into object storage, compile the pipeline without a flow, and "
            "give the parameter config the file's s3:// place"
        )
    return text


def read_config(source: str, overrides: Sequence[str] = ()) -> tuple[str, RunConfig | None]:
    """Return a config as a parameter's value, and parsed: YAML text, the place of a YAML file, or its s3:// place.

    Files that a config names need not be here, but its own Python files must: they travel in the text. An s3:// place
    is sent as it is, and takes no overrides; parsed is None where it cannot be read from here.
    """
    if source.startswith("s3://"):
        if overrides:
            raise ConfigError(
                f"config {source} is read by the pods, and cannot be changed on the way: {overrides[0]!r}"
            )
        return source, _stored(source)
    parsed = read_config_text(source, overrides)
    return parameter_text(parsed.model_dump(mode="json", exclude_unset=True)), parsed


def _stored(place: str) -> RunConfig | None:
    try:
        text = stored_text(place)
    except StoreError as error:
        logger.warning(
            "the config %s cannot be read from here, so that the pods are the first to check it: %s", place, error
        )
        return None
    return parse_text(text, source=place)
