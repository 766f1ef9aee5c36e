"""Flags of Megatron-LM's forks in terms of its own. No torch."""

from argparse import Namespace

from hexad.config import ConfigError

_CONTEXT = {"ulysses_cp_algo": "a2a", "kvallgather_cp_algo": "allgather", "hybrid_cp_algo": "a2a+p2p"}
"""``--context-parallel-algo`` -> ``--cp-comm-type``."""
_SPEC = "mindspeed_llm.tasks.models.spec.qwen3_spec"
"""Megatron-LM's own layers, with the norms of ``--qk-layernorm`` if that is given."""
_DEFAULT_TIMEOUT = 600.0
"""Default of ``--distributed-timeout``, in seconds."""


def as_megatron(arguments: Namespace) -> None:
    """Set in place the attributes of Megatron-LM's flags that flags of forks stand for.

    Raises:
        ConfigError: flags that exclude each other or need another one.
    """
    if arguments.spec is not None and not arguments.spec[0].endswith(_SPEC):
        problem = f"found {' '.join(arguments.spec)}, but there are GPT-2's and Llama's layers only"
        raise ConfigError("--spec", f"{problem}; leave it out")
    if arguments.glu_activation:
        if arguments.ffn_hidden_size is None:  # that of both halves, as without it
            arguments.ffn_hidden_size = 4 * arguments.hidden_size
        arguments.swiglu = True
    if arguments.activations_checkpoint_method:
        arguments.recompute_granularity = "full"
        arguments.recompute_method = arguments.activations_checkpoint_method
        arguments.recompute_num_layers = arguments.activations_checkpoint_num_layers
    if arguments.attention_head_type == "multiquery":
        arguments.group_query_attention, arguments.num_query_groups = True, 1
    if arguments.partial_rotary_factor:
        arguments.rotary_percent *= arguments.partial_rotary_factor
    if arguments.distributed_timeout != _DEFAULT_TIMEOUT:
        arguments.distributed_timeout_minutes = arguments.distributed_timeout / 60
    if arguments.patch_tokenizer_type and arguments.tokenizer_type is None:
        arguments.tokenizer_type = "HuggingFaceTokenizer"
        arguments.tokenizer_model = arguments.tokenizer_model or arguments.load
    _context(arguments)


def _context(arguments: Namespace) -> None:
    """MindSpeed-LLM's choice of context parallelism."""
    kind, ulysses = _CONTEXT.get(arguments.context_parallel_algo), arguments.ulysses_degree_in_cp
    if kind is None or arguments.context_parallel_size == 1:
        return
    arguments.cp_comm_type = [kind]
    if kind == "a2a+p2p":
        if not ulysses or arguments.context_parallel_size % ulysses:
            raise ConfigError(
                "--ulysses-degree-in-cp",
                f"found {ulysses}, expected a divisor of --context-parallel-size "
                f"{arguments.context_parallel_size} with hybrid_cp_algo; give one",
            )
        arguments.hierarchical_context_parallel_sizes = [ulysses, arguments.context_parallel_size // ulysses]
