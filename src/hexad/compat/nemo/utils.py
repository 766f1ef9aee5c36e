"""``nemo.utils``: what scripts log to."""

import logging as _logging

logging = _logging.getLogger("hexad.nemo")
"""A logger of Python's ``logging``."""
