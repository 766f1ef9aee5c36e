"""One tree of typed settings, its file format, and the errors a user can cause."""

from .errors import USER_ERROR, AgreedError, ConfigError, HexadError, blaming, did_you_mean
from .load import apply_override, dump_config, parse_config, read_tree, setting_names
from .schema import Config

__all__ = [
    "USER_ERROR",
    "AgreedError",
    "Config",
    "ConfigError",
    "HexadError",
    "apply_override",
    "blaming",
    "did_you_mean",
    "dump_config",
    "parse_config",
    "read_tree",
    "setting_names",
]
