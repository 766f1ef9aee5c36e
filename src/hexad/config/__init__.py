"""One tree of typed settings; the lowest layer of the house."""

from .errors import USER_ERROR, AgreedError, ConfigError, HexadError, blaming, did_you_mean
from .load import build_config, dump_config, load_config, setting_names
from .schema import Config

__all__ = [
    "USER_ERROR",
    "AgreedError",
    "Config",
    "ConfigError",
    "HexadError",
    "blaming",
    "build_config",
    "did_you_mean",
    "dump_config",
    "load_config",
    "setting_names",
]
