"""For scripts that use DeepSpeed and Megatron-LM together, as Megatron-DeepSpeed's do: launch lines with
``--deepspeed_config``, and ``deepspeed.initialize`` of a ``GPTModel``.

The two interfaces do not know each other; they find this one by :mod:`hexad.compat.facade.extensions`.
"""


def install(*ignore: str) -> None:
    """Let ``import megatron`` and ``import deepspeed`` find Hexad's interfaces.

    Args:
        ignore: flags of Megatron-LM to ignore.
    """
    from .. import deepspeed, megatron

    megatron.install(ignore)
    deepspeed.install()
