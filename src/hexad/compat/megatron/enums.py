"""Megatron-Core's enumerations, with the members of older releases."""

from enum import Enum, StrEnum


class ModelType(Enum):
    """Kinds of models; all but decoders are refused by ``pretrain``."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
    retro_encoder = 3
    retro_decoder = 4


class LayerType(Enum):
    """Kinds of layers."""

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5
    retro_encoder = 6
    retro_decoder = 7
    retro_decoder_with_retriever = 8


class AttnType(Enum):
    """Kinds of attention."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(Enum):
    """Kinds of attention masks; ``GPTModel`` computes causal attention."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6
    prefix = 7
    custom = 8


class AttnBackend(Enum):
    """Implementations of attention; without effect."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5


class CudaGraphScope(Enum):
    """Parts of a model that CUDA graphs capture; without effect."""

    full_iteration = 1
    attn = 2
    mlp = 3
    moe = 4
    moe_router = 5
    moe_preprocess = 6
    mamba = 7
    full_iteration_inference = 8


class PositionEmbeddingType(Enum):
    """Kinds of position embeddings."""

    rotary = 1
    absolute = 2
    alibi = 3


class Fp8Recipe(StrEnum):
    """Ways to scale 8-bit formats."""

    delayed = "delayed"
    tensorwise = "tensorwise"
    mxfp8 = "mxfp8"
    blockwise = "blockwise"
    custom = "custom"


class Fp4Recipe(StrEnum):
    """Ways to scale 4-bit formats."""

    nvfp4 = "nvfp4"
    custom = "custom"
