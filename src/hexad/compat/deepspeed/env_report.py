"""``deepspeed.env_report``: versions of what is installed."""

import sys

import torch

from . import __version__


def main(*_: object, **__: object) -> None:
    """Print the versions of Python, PyTorch and the interface, and the number of GPUs."""
    print(f"Python {sys.version.split()[0]}, PyTorch {torch.__version__}, DeepSpeed {__version__} over Hexad")
    print(f"GPUs: {torch.cuda.device_count()}")


cli_main = main
