"""Where interfaces that do not know each other are joined, for scripts that use two of them.

An interface asks for an extension by its name here, when a script needs it. No torch.
"""

from pkgutil import resolve_name
from typing import Any

_EXTENSIONS = {
    "flags, with --deepspeed_config": "hexad.compat.hybrid.config_file:merge_file",
    "deepspeed, with GPTModel": "hexad.compat.hybrid.engine:engine_of",
    "megatron, with deepspeed": "hexad.compat.hybrid:install",
}


def extension(name: str) -> Any:
    """The function of an extension."""
    return resolve_name(_EXTENSIONS[name])
