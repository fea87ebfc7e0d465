"""The configuration of a run: verl's keys, typed; the one place that knows names users bring."""

from ratchet.config.load import load_config, parse_config, parse_text
from ratchet.config.schema import RunConfig
from ratchet.config.semantics import semantic

__all__ = ["RunConfig", "load_config", "parse_config", "parse_text", "semantic"]
