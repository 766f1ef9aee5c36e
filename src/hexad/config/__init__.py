"""One tree of typed settings, its file format, and the errors a user can cause."""

from .errors import (
    USER_ERROR,
    AgreedError,
    ConfigError,
    HexadError,
    alternatives,
    blaming,
    counted,
    did_you_mean,
    divisors,
    one_line,
    shown,
    worded,
    wording,
)
from .load import (
    Wording,
    apply_overrides,
    dump_config,
    key_names,
    listed_overrides,
    parse_config,
    parse_tree,
    read_tree,
    setting_names,
)
from .numbers import NOT_FINITE, json_text
from .schema import Config
