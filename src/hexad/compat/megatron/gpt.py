"""Megatron-LM's ``GPTModel`` over Hexad's transformer."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hexad.config import HexadError
from hexad.engine.workload import ModuleWorkload
from hexad.model.dropout import DropoutKey
from hexad.model.inventory import ModelInventory
from hexad.model.recompute_inventory import Recompute
from hexad.model.transformer import DTYPES, Transformer, make_shard
from hexad.parallel.context.spans import Spans
from hexad.parallel.sharding import declared_parameters, initialise
from hexad.planning import Resolved, resolve

from ..facade.foreign_names import check_arguments
from . import parallel_state
from .arguments import naming_flags
from .core_model import resolved_core_model
from .dist_checkpointing import ShardedTensor, sharded_state_dict
from .enums import AttnMaskType
from .initialize import get_args, get_config, started
from .mappings import gather_from_tensor_model_parallel_region, vocab_parallel_cross_entropy
from .tables import ARGUMENTS
from .transformer import check_agrees, check_config, check_spec, core_transformer_config_from_args


def resolved_model() -> Resolved:
    """The model, layout and stages that the flags describe. Its vocabulary is ``padded_vocab_size``: padding
    is part of the softmax, as in Megatron-LM.

    Raises:
        HexadError: neither a tokenizer nor ``--vocab-size``.
        ConfigError: settings that do not fit each other.
    """
    config, vocab = get_config(), get_args().padded_vocab_size
    if vocab is None:
        raise HexadError("--vocab-size: is missing; GPTModel needs it, or --tokenizer-type")
    model = config.model.model_copy(update={"vocab": vocab})
    with naming_flags():
        return resolve(config.model_copy(update={"model": model}), parallel_state.get_mesh().layout)


def check_tied(one_rank: bool, zero: int) -> None:
    """Refuse layouts in which a tied embedding cannot be shared; ``one_rank`` holds two stages with it."""
    if one_rank or zero == 3:
        what = "the first and the last stage on one rank" if one_rank else "ZeRO 3"
        raise HexadError(
            f"GPTModel: found tied embeddings with {what}, which cannot share them; add "
            "--untie-embeddings-and-output-weights"
        )


def _resolved(config: Any, spec: Any, arguments: dict[str, Any]) -> Resolved:
    """The model of the flags, with which the arguments agree; without flags the one that they describe."""
    if not started():
        return resolved_core_model(config, spec, arguments)
    if config is not None:
        check_config(config)
    check_agrees("GPTModel", arguments, _of_flags())
    return resolved_model()


def _stage_number(
    resolved: Resolved, vp_stage: int | None, pre_process: bool | None, post_process: bool | None
) -> int:
    """The number of this rank's current stage.

    Raises:
        HexadError: a script says that it has the embedding or the head, or has not, against the layout.
    """
    schedule = resolved.plan.schedule
    numbers = schedule.stages_of(parallel_state.get_mesh().pipeline.rank)
    current = parallel_state.get_virtual_pipeline_model_parallel_rank() if vp_stage is None else vp_stage
    number = numbers[current or 0]
    ends = (number == 0, number == schedule.stages - 1)
    said = (
        ends[0] if pre_process is None else pre_process,
        ends[1] if post_process is None else post_process,
    )
    if said != ends:
        raise HexadError(
            f"GPTModel: found pre_process {said[0]} and post_process {said[1]} on stage {number} of "
            f"{schedule.stages}; expected {ends[0]} and {ends[1]}"
        )
    return number


def _without_flags(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are not the values of a fork's flags, which have been checked on the line."""
    known = vars(get_args()) if started() else {}
    return {name: value for name, value in arguments.items() if name not in known or value != known[name]}


def _of_flags() -> dict[str, Any]:
    """The arguments of :class:`GPTModel` that the flags decide."""
    args = get_args()
    return {
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "rope_scaling": args.use_rope_scaling,
        "rope_scaling_factor": args.rope_scaling_factor,
    }


class GPTModel(Transformer):
    """The model of ``get_args()``, or without flags that of a ``TransformerConfig``; in a pipeline this
    rank's current stage of it.

    Initial values are Hexad's: the same in every layout.

    Args:
        config, transformer_layer_spec: of Megatron-LM; with flags they agree with these.
        vocab_size, max_sequence_length, share_embeddings_and_output_weights, position_embedding_type,
            rotary_percent, rotary_base, rope_scaling, rope_scaling_factor: with flags those of the flags.
        pre_process: this stage has the embedding; None: as the layout has it.
        post_process: this stage has the output head; None: as the layout has it.
        fp16_lm_cross_entropy: False.
        parallel_output: return this rank's columns of the logits; otherwise all.
        vp_stage: which of this rank's stages; None: the current one of ``parallel_state``.
        others: Megatron-LM's, with their defaults or without effect.

    Attributes:
        config: as given, or of the flags.
        settings: Hexad's.
        passes: training passes so far, which dropout is keyed by.
        returns_expert_losses: return an empty list of experts' losses too, as Megatron-DeepSpeed does.

    Raises:
        HexadError: without flags settings that Hexad lacks, or stages that are not those of the layout.
        ConfigError: flags that do not fit each other.
    """

    def __init__(
        self,
        config: Any = None,
        transformer_layer_spec: Any = None,
        vocab_size: int | None = None,
        max_sequence_length: int | None = None,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool | None = None,
        position_embedding_type: str | None = None,
        rotary_percent: float | None = None,
        rotary_base: int | None = None,
        rope_scaling: bool | None = None,
        rope_scaling_factor: float | None = None,
        vp_stage: int | None = None,
        **others: Any,
    ) -> None:
        check_arguments("GPTModel", _without_flags(others), ARGUMENTS["GPTModel"])
        check_spec(transformer_layer_spec)
        arguments = {
            "vocab_size": vocab_size,
            "max_sequence_length": max_sequence_length,
            "share_embeddings_and_output_weights": share_embeddings_and_output_weights,
            "position_embedding_type": position_embedding_type,
            "rotary_percent": rotary_percent,
            "rotary_base": rotary_base,
            "rope_scaling": rope_scaling,
            "rope_scaling_factor": rope_scaling_factor,
        }
        if fp16_lm_cross_entropy:
            raise HexadError("GPTModel: found fp16_lm_cross_entropy; it is not supported: leave it out")
        resolved = _resolved(config, transformer_layer_spec, arguments)
        mesh, settings, plan = parallel_state.get_mesh(), resolved.config, resolved.plan
        if mesh.context.size > 1:
            raise HexadError(
                "GPTModel: context parallel is for 'hexad megatron': use --context-parallel-size 1"
            )
        placement = plan.schedule.placement
        number = _stage_number(resolved, vp_stage, pre_process, post_process)
        if settings.model.tied_embeddings:
            check_tied(len(placement) > 1 and placement[0] == placement[-1], settings.parallel.zero)
        shard = make_shard(settings.parallel, mesh, DTYPES[settings.precision.dtype])
        whole = ModelInventory(settings.model, shard.sequence, shard.tensor.size, vocab_multiple=1)
        stage = whole.stages(plan.layers, placement, mesh.pipeline.rank)[number]
        super().__init__(stage, shard, Recompute.from_settings(settings.memory))
        self.config = core_transformer_config_from_args(get_args()) if config is None else config
        self.settings, self.vocab_size = settings, int(settings.model.vocab)
        self.share_embeddings_and_output_weights = bool(settings.model.tied_embeddings)
        self._head_is_a_layer()
        initialise(declared_parameters(self), settings.run.seed)
        self.pre_process, self.post_process = number == 0, number == len(placement) - 1
        self.parallel_output = parallel_output
        self.passes, self.seed = 0, settings.run.seed
        self._isolated, self._data_rank = settings.data.documents == "isolate", mesh.data.rank
        self._checked = False
        self._input: Tensor | None = None
        self.returns_expert_losses = False

    def _head_is_a_layer(self) -> None:
        """The backward pass of the logits needs the head's weight, as that of a layer. Hexad's own loss
        computes its gradients in the forward pass, and does not."""
        if self.head is not None and "weight" in self.head.declarations:
            declaration = self.head.declarations["weight"]
            weights = tuple(
                replace(weight, outside_layers=bool(declaration.tied)) for weight in declaration.weights
            )
            self.head.declarations["weight"] = replace(declaration, weights=weights)

    def sharded_state_dict(self, prefix: str = "", *_: Any, **__: Any) -> dict[str, ShardedTensor]:
        """This stage's parameters for ``dist_checkpointing``, by their names in ``state_dict`` after a
        prefix."""
        return sharded_state_dict(self, prefix, self.settings)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """This rank's ``state_dict``."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The weight of the embedding on the first stage, of the head on the last one; None on others."""
        table = self.embedding if self.embedding is not None else self.head
        return None if table is None else table.weight

    def set_input_tensor(self, input_tensor: Any) -> None:
        """The previous stage's result, ``[tokens (/ size), hidden]``, or a list of that; None on the first
        stage."""
        self._input = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(  # type: ignore[override]  # Megatron-LM's signature
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: None = None,
        labels: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **others: Any,
    ) -> Any:
        """Losses, logits or hidden states.

        Args:
            input_ids: int64 ``[b, s]``, on every stage.
            position_ids: int64 ``[b, s]``; None for 0, 1, ... With ``--reset-position-ids`` they say where
                documents begin, and are needed.
            attention_mask: bool, true where attention is masked, causal; None for the same. Documents are
                isolated by ``position_ids``.
            labels: int64 ``[b, s]``; -100 for no loss.
            runtime_gather_output: return all columns of the logits; None: unless ``parallel_output``.
            decoder_input, others: Megatron-LM's, None or without effect.

        Returns:
            On the last stage with ``labels``: the losses of all tokens, ``[b, s]``, in at least float32.
            Without: logits, ``[b, s, padded vocab / size]``, or of all columns.
            On other stages: hidden states for the next one.
            With ``returns_expert_losses`` that and an empty list.

        Raises:
            HexadError: sequences of another shape, or longer than the learned positions; positions or a mask
                that Hexad does not compute, which is checked in the first pass only.
        """
        arguments = {"decoder_input": decoder_input, **others}
        check_arguments("GPTModel", arguments, ARGUMENTS["GPTModel.forward"])
        tokens = input_ids.contiguous()
        self._check(tokens, position_ids, attention_mask)
        result = self._result(tokens, position_ids, labels, runtime_gather_output)
        return (result, []) if self.returns_expert_losses else result

    def _result(
        self, tokens: Tensor, position_ids: Tensor | None, labels: Tensor | None, gather: bool | None
    ) -> Tensor:
        hidden = super().forward(
            tokens, self._spans(tokens, position_ids), inputs=self._input, key=self._key(tokens)
        )
        if self.head is None:
            return hidden
        logits = self.logits(hidden).unflatten(0, tuple(tokens.shape))
        if labels is not None:
            return vocab_parallel_cross_entropy(logits, labels)
        whole = not self.parallel_output if gather is None else gather
        return gather_from_tensor_model_parallel_region(logits) if whole else logits

    def _spans(self, tokens: Tensor, position_ids: Tensor | None) -> Spans | None:
        """The documents of ``[batch, sequence]``; None: one in each row."""
        if not self._isolated or position_ids is None:
            return None
        starts = (position_ids.flatten() == 0).nonzero().flatten().tolist()
        return Spans(tokens.numel(), len(tokens), (*starts, tokens.numel()))

    def _key(self, tokens: Tensor) -> DropoutKey | None:
        if not self.training or not torch.is_grad_enabled():
            return None
        self.passes += 1
        return DropoutKey(self.seed, self.passes, self._data_rank * len(tokens))

    def check_tokens(self, count: int) -> None:
        """Refuse a microbatch of a number of tokens that sequence parallel cannot shard.

        Raises:
            HexadError: it does not divide by the tensor ranks.
        """
        ranks = self.shard.tensor.size
        if self.shard.sequence and count % ranks:
            raise HexadError(
                f"TransformerConfig.sequence_parallel: found microbatches of {count} tokens, which do not "
                f"divide by {ranks} tensor ranks; change the sequence length or the micro batch size"
            )

    def _check(self, tokens: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> None:
        if tokens.dim() != 2:
            raise HexadError(f"input_ids: found shape {list(tokens.shape)}, expected [batch, sequence]")
        most = self.settings.model.max_positions
        if not self.inventory.rotary and tokens.shape[1] > int(most):
            raise HexadError(
                f"input_ids: found sequences of {tokens.shape[1]} tokens, but max_sequence_length is {most}; "
                "make it larger, or the sequences shorter"
            )
        self.check_tokens(tokens.numel())
        if self._checked:
            return
        self._checked = True
        places = torch.arange(tokens.shape[1], device=tokens.device)
        if self._isolated and position_ids is None:
            raise HexadError("position_ids: found None with --reset-position-ids; pass them")
        masks = mask is not None and mask.numel() > 1 and not self._isolated
        if mask is not None and masks and not bool((mask.bool() == (places > places[:, None])).all()):
            raise HexadError("attention_mask: found one that is not causal; pass None")
        if not self._isolated and position_ids is not None and not bool((position_ids == places).all()):
            raise HexadError("position_ids: found others than 0, 1, ...; add --reset-position-ids")


class GPTModelPipe(GPTModel):
    """Megatron-DeepSpeed's model of a pipeline, whose script says how a batch is read: see :meth:`step`.

    Raises:
        HexadError: as :class:`GPTModel`.
    """

    _megatron_batch_fn: Callable[[Any], Any] | None = None

    def __init__(self, *inputs: Any, attn_mask_type: Any = None, **named: Any) -> None:
        if attn_mask_type not in (None, AttnMaskType.causal):
            raise HexadError(f"GPTModelPipe: found {attn_mask_type}; use AttnMaskType.causal")
        super().__init__(*inputs, **named)

    def step(self, iterator: Iterator[Any]) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """This stage's result of the next microbatch, and the loss function of the last one's: the mean over
        the tokens of the mask.

        Raises:
            HexadError: the script has not set ``_megatron_batch_fn``.
        """
        if self._megatron_batch_fn is None:
            raise HexadError("GPTModelPipe: _megatron_batch_fn is missing; set it, as pretrain_gpt.py does")
        (tokens, positions, mask), (labels, loss_mask) = self._megatron_batch_fn(next(iterator))

        def loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            weights = loss_mask.view(-1).to(losses.dtype)
            mean = (losses.view(-1) * weights).sum() / weights.sum()
            return mean, {"lm loss": mean.detach()}

        return self(tokens, positions, mask, labels=labels), loss


class GPTWorkload(ModuleWorkload):
    """Stages with a :class:`GPTModel`, whose dropout continues after resuming."""

    def progress(self) -> dict[str, Any]:
        """The number of passes, equal on all stages."""
        return {"passes": max((model.passes for model in self._models()), default=0)}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Continue counting passes."""
        for model in self._models():
            model.passes = progress.get("passes", 0)

    def _models(self) -> Iterator[GPTModel]:
        for stage in self.stages(training=True).values():
            yield from (module for module in stage.modules() if isinstance(module, GPTModel))
