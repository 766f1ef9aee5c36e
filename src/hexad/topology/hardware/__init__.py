"""Kinds of hardware: one YAML file each, with published facts and the constants of the time models.

No torch. :func:`load_hardware` reads a file of this package by name, or a user's own by path.
"""

from .constants import (
    AttentionConstants,
    CollectiveConstants,
    Constants,
    HostConstants,
    MemoryConstants,
    NetworkConstants,
    OverlapConstants,
    ProductConstants,
)
from .files import hardware_named, hardware_names, load_hardware, read_hardware, write_hardware
from .kind import Hardware, MeasuredRates
