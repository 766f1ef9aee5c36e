"""The modules that scripts import from ``nemo``, and the names that Hexad lacks."""

_MODULES = {
    "": "lightning",
    "callbacks": "lightning.pytorch.callbacks lightning.pytorch.callbacks.garbage_collection "
    "lightning.pytorch.callbacks.megatron_comm_overlap lightning.pytorch.callbacks.model_checkpoint "
    "utils.exp_manager",
    "data": "collections.llm.gpt.data collections.llm.gpt.data.chat collections.llm.gpt.data.fine_tuning "
    "collections.llm.gpt.data.mock collections.llm.gpt.data.packed_sequence "
    "collections.llm.gpt.data.pre_training",
    "experiment": "lightning.nemo_logger lightning.pytorch.strategies.utils lightning.pytorch.trainer "
    "lightning.resume",
    "io": "lightning.io lightning.io.mixin",
    "llm": "collections.llm collections.llm.api",
    "models": "collections.llm.gpt.model collections.llm.gpt.model.base collections.llm.gpt.model.llama "
    "collections.llm.gpt.model.mistral collections.llm.gpt.model.phi3mini "
    "collections.llm.gpt.model.qwen2 collections.llm.gpt.model.qwen3 "
    "collections.llm.peft collections.llm.peft.lora",
    "optim": "lightning.pytorch.optim lightning.pytorch.optim.base lightning.pytorch.optim.lr_scheduler "
    "lightning.pytorch.optim.megatron",
    "recipes": "collections.llm.recipes.finetune_default collections.llm.recipes.log.default "
    "collections.llm.recipes.optim.adam "
    "collections.llm.recipes.precision.mixed_precision",
    "reductions": "lightning.megatron_parallel",
    "sampler": "lightning.pytorch.plugins.data_sampler",
    "strategy": "lightning.pytorch.plugins lightning.pytorch.plugins.mixed_precision "
    "lightning.pytorch.strategies lightning.pytorch.strategies.megatron_strategy",
    "tokenizers": "collections.common.tokenizers collections.common.tokenizers.tokenizer_spec "
    "collections.common.tokenizers.huggingface.auto_tokenizer "
    "collections.nlp.modules.common.tokenizer_utils",
    "utils": "utils",
}


def where() -> dict[str, str]:
    """Module of NeMo -> module of this package; recipes only where NeMo-Run is installed."""
    targets = dict(_MODULES)
    try:
        import nemo_run  # noqa: F401
    except ImportError:
        del targets["recipes"]
    return dict(sorted((name, target) for target, names in targets.items() for name in names.split()))


_NAMES = {
    "experts are not supported yet": (
        "collections.llm.gpt.model.mixtral.MixtralModel",
        "collections.llm.MixtralModel",
        "collections.llm.MixtralConfig8x7B",
        "collections.llm.DeepSeekV3Config",
    ),
    "write training.jsonl and use llm.FineTuningDataModule": (
        "collections.llm.SquadDataModule",
        "collections.llm.DollyDataModule",
        "collections.llm.AlpacaDataModule",
        "collections.llm.gpt.data.squad.SquadDataModule",
    ),
    "it is not one of Hexad's families; use hexad.parallelize with transformers' model": (
        "collections.llm.BertModel",
        "collections.llm.GemmaModel",
        "collections.llm.Gemma2Model",
        "collections.llm.Starcoder2Model",
        "collections.llm.T5Model",
    ),
    "use llm.peft.LoRA": ("collections.llm.peft.DoRA", "collections.llm.peft.canonical_lora.CanonicalLoRA"),
    "use HexadStrategy(zero=3)": ("lightning.FSDPStrategy", "lightning.FSDP2Strategy"),
    "use hexad.parallelize with transformers' model": ("collections.llm.HFAutoModelForCausalLM",),
}

UNSUPPORTED = {name: why for why, names in _NAMES.items() for name in names}
"""Names below ``nemo`` that can be imported -> what to do instead of using them."""
