"""The modules that scripts import from ``nemo``, and the names that Hexad lacks."""

import re

from ..facade.names import read_names

_MODULES = {
    "": "lightning",
    "callbacks": "lightning.pytorch.callbacks lightning.pytorch.callbacks.flops_callback "
    "lightning.pytorch.callbacks.garbage_collection lightning.pytorch.callbacks.jit_transform "
    "lightning.pytorch.callbacks.megatron_comm_overlap "
    "lightning.pytorch.callbacks.megatron_enable_experimental_callback "
    "lightning.pytorch.callbacks.memory_profiler lightning.pytorch.callbacks.model_checkpoint "
    "lightning.pytorch.callbacks.model_transform lightning.pytorch.callbacks.nsys "
    "lightning.pytorch.callbacks.preemption lightning.pytorch.callbacks.progress_bar "
    "lightning.pytorch.callbacks.progress_printer utils.exp_manager",
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
    "overlap": "collections.llm.recipes.tp_overlap_configs.userbuffers",
    "reductions": "lightning.megatron_parallel",
    "sampler": "lightning.pytorch.plugins.data_sampler",
    "strategy": "lightning.pytorch.plugins lightning.pytorch.plugins.mixed_precision "
    "lightning.pytorch.strategies lightning.pytorch.strategies.megatron_strategy",
    "tokenizers": "collections.common.tokenizers collections.common.tokenizers.huggingface "
    "collections.common.tokenizers.huggingface.auto_tokenizer collections.common.tokenizers.null_tokenizer "
    "collections.common.tokenizers.sentencepiece_tokenizer collections.common.tokenizers.tokenizer_spec "
    "collections.nlp.modules.common.tokenizer_utils",
    "utils": "utils utils.get_rank",
}
_OF_RECIPES = {
    "plugins": "lightning.run.plugins",
    "recipes": "collections.llm.recipes.finetune_default collections.llm.recipes.log.default "
    "collections.llm.recipes.optim.adam collections.llm.recipes.precision.mixed_precision "
    "collections.llm.recipes.run.executor",
}
"""The same for modules that NeMo-Run's configurations replace."""

NAMES = {
    **dict.fromkeys(
        (
            "lightning.base.DEFAULT_NEMO_CACHE_HOME",
            "lightning.base.DEFAULT_NEMO_DATASETS_CACHE",
            "lightning.base.DEFAULT_NEMO_MODELS_CACHE",
            "lightning.base.NEMO_CACHE_HOME",
            "lightning.base.NEMO_DATASETS_CACHE",
            "lightning.base.NEMO_MODELS_CACHE",
        ),
        "places",
    ),
    "collections.llm.utils.barrier": "utils",
    "lightning.base.get_vocab_size": "utils",
    "lightning.base.teardown": "utils",
    "utils.import_utils.safe_import": "utils",
    "utils.import_utils.safe_import_from": "utils",
}
"""Name in a module of NeMo -> module of this package that has it."""


def has_nemo_run() -> bool:
    """Whether NeMo-Run, which recipes are made with, can be imported."""
    try:
        import nemo_run  # noqa: F401
    except ImportError:
        return False
    return True


def where() -> dict[str, str]:
    """Module of NeMo -> module of this package; recipes only where NeMo-Run is installed."""
    targets = _MODULES | (_OF_RECIPES if has_nemo_run() else {})
    return dict(sorted((name, target) for target, names in targets.items() for name in names.split()))


_ONLY_TEXT = "Hexad trains language models of text"
_EVALUATION = "evaluate with hexad evaluate, or by lm_eval with hexad.harness"
_COMPRESSION = "quantization, pruning and distillation are not supported; export with hexad checkpoint export"
_SERVING = "serve a checkpoint with hexad serve"
_EXPORT = "export with hexad checkpoint export; other formats are made of that"
_CHECKPOINTS = "a checkpoint has weights and settings; convert others with hexad checkpoint import"
_LINES = "write training.jsonl and use llm.FineTuningDataModule"
_TRANSFORMERS = "use hexad.parallelize with transformers' model"
_NO_FAMILY = f"it is not one of Hexad's families; {_TRANSFORMERS}"
_RECIPES = "use a recipe of a model of Hexad's families" if has_nemo_run() else "install NeMo-Run, nemo_run"
_INSTEAD = {
    "": "Hexad has no counterpart; remove it",
    "automodel": _TRANSFORMERS,
    "collections.avlm": _ONLY_TEXT,
    "collections.common.tokenizers": "use AutoTokenizer, SentencePieceTokenizer or get_nmt_tokenizer",
    "collections.diffusion": _ONLY_TEXT,
    "collections.llm": "use llm.pretrain or llm.finetune with a model of Hexad's families",
    "collections.llm.deploy": _SERVING,
    "collections.llm.distillation": _COMPRESSION,
    "collections.llm.distill": _COMPRESSION,
    "collections.llm.evaluate": _EVALUATION,
    "collections.llm.evaluation": _EVALUATION,
    "collections.llm.AlpacaDataModule": _LINES,
    "collections.llm.DollyDataModule": _LINES,
    "collections.llm.SquadDataModule": _LINES,
    "collections.llm.dolly": _LINES,
    "collections.llm.squad": _LINES,
    "collections.llm.gpt.data": "use llm.PreTrainingDataModule, FineTuningDataModule or ChatDataModule",
    "collections.llm.gpt.data.alpaca": _LINES,
    "collections.llm.gpt.data.dolly": _LINES,
    "collections.llm.gpt.data.hf_dataset": _LINES,
    "collections.llm.gpt.data.mlperf_govreport": _LINES,
    "collections.llm.gpt.data.squad": _LINES,
    "collections.llm.gpt.data.AlpacaDataModule": _LINES,
    "collections.llm.gpt.data.DollyDataModule": _LINES,
    "collections.llm.gpt.data.MLPerfGovReportDataModule": _LINES,
    "collections.llm.gpt.data.SquadDataModule": _LINES,
    "collections.llm.gpt.model": _NO_FAMILY,
    "collections.llm.inference": "use llm.generate, hexad generate or hexad serve",
    "collections.llm.modelopt": _COMPRESSION,
    "collections.llm.peft": "use llm.peft.LoRA",
    "collections.llm.prune": _COMPRESSION,
    "collections.llm.ptq": _COMPRESSION,
    "collections.llm.Quantizer": _COMPRESSION,
    "collections.llm.quantization": _COMPRESSION,
    "collections.llm.recipes": _RECIPES,
    "collections.llm.recipes.optim": "use distributed_fused_adam_with_cosine_annealing",
    "collections.llm.tools.auto_configurator": "hexad plan and parallel.schedule: auto find a layout",
    "collections.multimodal": _ONLY_TEXT,
    "collections.nlp": "NeMo 1 is not supported; use nemo.collections.llm",
    "collections.vlm": _ONLY_TEXT,
    "core": "NeMo 1 is not supported; use nemo.collections.llm",
    "deploy": _SERVING,
    "export": _EXPORT,
    "lightning.FSDPStrategy": "use HexadStrategy(zero=3)",
    "lightning.FSDP2Strategy": "use HexadStrategy(zero=3)",
    "lightning.fabric": "use lightning's Trainer with MegatronStrategy",
    "lightning.io": _CHECKPOINTS,
    "lightning.ckpt_utils": _CHECKPOINTS,
    "lightning.megatron_parallel": "MegatronStrategy runs the layout's schedule",
    "lightning.pytorch.callbacks": "Hexad has no counterpart; leave out the callback",
    "lightning.pytorch.optim": "use MegatronOptimizerModule",
    "lightning.pytorch.strategies": "use MegatronStrategy, or HexadStrategy(zero=3)",
    "lightning.run": "install NeMo-Run, nemo_run",
}
"""Name or module below ``nemo`` -> what to do instead of using it, or a name in it."""

_EXPERTS = "experts are not supported yet outside a run.yaml (model.moe)"
_MODELS = {
    _EXPERTS: "deepep deepseek gptoss gpt_oss llama4 megatrontokendrop mixtral moe_token_drop qwen3_235b "
    "qwen3_30b",
    "layers without attention are not supported": "basemamba evo2 hyena mamba nemotron_nano nemotronh "
    "nemotronnano nvidiamamba ssm",
    _NO_FAMILY: "baichuan bert chatglm codegemma customre customretrieval e5_ gemma huggingfacebert "
    "llama31_nemotron_ultra llama31nemotronultra llama32embedding llama32reranker llama33nemotron "
    "llama33_nemotron llama_embedding llama_reranker llamaembedding megatronbert nemotron reranker specter "
    "starcoder t5",
    _TRANSFORMERS: "hf_auto hfauto",
}
"""Why a model, its recipe or what belongs to it is refused -> how its names begin, in lower case."""


def _reason(name: str, why: str) -> str:
    """Why a name is refused: that of a model, wherever the name is; otherwise the module's."""
    if name.startswith(("collections.llm", "lightning.pytorch.callbacks")):
        parts = name.lower().split(".")[2:]
        for reason, begins in _MODELS.items():
            if any(part.startswith(tuple(begins.split())) for part in parts):
                return reason
    return why


_TABLE = read_names(__package__, _INSTEAD)
MODULES, CONSTANTS = _TABLE.modules, _TABLE.constants
"""NeMo's modules; names of constants -> their values."""
UNSUPPORTED = {name: _reason(name, why) for name, why in _TABLE.unsupported.items()}
"""Names below ``nemo`` that can be imported -> what to do instead of using them, where this package lacks
them."""
_OF_LLM = {
    name.split(".")[3]: name.removesuffix(".model")
    for name in UNSUPPORTED
    if re.fullmatch(r"collections\.llm\.recipes\.\w+\.model", name)
}
OF_LLM = {**_OF_LLM, **{name: f"collections.llm.recipes.optim.{name}" for name in ("adam", "sgd")}}
"""Names of ``nemo.collections.llm`` -> the modules that they are."""
