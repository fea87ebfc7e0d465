"""The configuration of a run: verl's keys, typed; the one place that knows names users bring."""

from ratchet.config.checks import config_warnings
from ratchet.config.load import load_config, parse_config, parse_text, read_config_text
from ratchet.config.schema import RunConfig
from ratchet.config.semantics import semantic

__all__ = [
    "RunConfig",
    "config_warnings",
    "load_config",
    "parse_config",
    "parse_text",
    "read_config_text",
    "semantic",
]
