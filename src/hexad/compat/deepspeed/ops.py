"""``deepspeed.ops.adam``: DeepSpeed's Adam optimizers, implemented by PyTorch's."""

import sys

from .optimizers import cpu_adam as DeepSpeedCPUAdam
from .optimizers import fused_adam as FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "adam"]

adam = sys.modules[__name__]
