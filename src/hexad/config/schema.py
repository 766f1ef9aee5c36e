"""Every setting of Hexad: its type, default, unit and meaning, declared once, here and for the model in
:mod:`hexad.config.model`. ``docs/configuration.md`` is generated from these files.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from .model import (
    Count,
    Degree,
    Fraction,
    Integer,
    ModelSettings,
    Name,
    NonNegativeFloat,
    Number,
    Positive,
    PositiveFloat,
    ScheduleFile,
    Seed,
    SettingsGroup,
    Width,
)


class RunSettings(SettingsGroup):
    """The run as a whole."""

    dir: Name = "runs/demo"
    """Directory for everything the run writes: resolved configuration, metrics, logs, checkpoints."""
    seed: Seed = 1234
    """Seed of weights and of the order of training data; data for validation have one order. The same seed
    gives the same run in every layout."""
    steps: Positive = 200
    """Optimizer steps in total, counted from the first start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device: ``auto`` is ``cuda`` where a GPU is visible, else ``cpu``."""
    timeout: Annotated[PositiveFloat, Field(le=10**9)] = 600.0
    """Seconds a collective may wait for its peers before the run is stopped."""
    compile: Literal["auto", "none", "pointwise", "full"] = "auto"
    """The functions that ``torch.compile`` compiles. ``pointwise``: norms, rotary positions, activations,
    dropout, the merging of context parallel blocks, the loss and the update, each by itself, in every layout.
    ``full``: besides, every transformer block as a whole (needs ``parallel.tensor: 1``). ``auto``:
    ``pointwise`` on GPUs, ``none`` on CPUs. ``true`` and ``false`` of earlier versions are ``full`` and
    ``none``."""
    deterministic: bool = False
    """Whether repeats in the same layout on the same GPUs agree bit for bit: only deterministic operators, an
    error where one has no such implementation. Slower on a GPU; on a CPU repeats agree anyway."""
    cpu_binding: Literal["auto", "none"] = "auto"
    """The cores of a rank on a GPU. ``auto``: those of the GPU's socket, unless the launcher has bound the
    rank already; ``none``: those that the launcher allows."""

    @field_validator("compile", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


DataSource = Name | list[tuple[PositiveFloat, Name]]
"""A prefix, or a blend."""


def prefixes(source: DataSource | None) -> list[str]:
    """The data sets of a setting: a prefix, or a blend."""
    return [source] if isinstance(source, str) else [prefix for _, prefix in source or ()]


class DataSettings(SettingsGroup):
    """The sources of samples."""

    train: DataSource | None = None
    """A ``.bin/.idx`` prefix, or a blend ``[[weight, prefix], ...]``."""
    validation: DataSource | dict[Name, DataSource] | None = None
    """Like ``train``, for evaluation; or several sets by name, ``{web: prefix, code: prefix}``."""
    split: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] | None = None
    """Proportions of ``train``'s documents for training, validation and testing, as Megatron-LM's
    ``--split``: the first documents are trained on, and where ``validation`` is null, those that follow are
    evaluated. Of a blend each data set is split. null: all are trained on."""
    tokenizer: Name = "byte"
    """``byte``, or a directory or file: Hugging Face ``tokenizer.json``, SentencePiece ``.model``, or
    ``.tiktoken``; or ``hf:ORG/NAME``, that of a model on the hub."""
    sequence: Width = 512
    """Tokens per sample."""
    bos: Literal["auto", "no"] = "auto"
    """Whether a beginning-of-text token stands before each document and prompt. ``auto``: as the tokenizer
    says (Hugging Face: its post-processor). ``no``: none. Data known to be built otherwise is refused."""
    documents: Literal["join", "isolate"] = "join"
    """``isolate`` confines attention and positions to each document of a packed sample."""
    packing: Literal["auto", "cut", "whole"] = "auto"
    """How documents fill samples. ``cut``: joined into one stream, which is cut every ``sequence`` tokens.
    ``whole``: only whole documents share a sample, isolated from each other, and its rest is padding without
    loss. ``auto``: ``whole`` for data with a loss mask (``hexad data build`` of conversations or of prompts
    and completions), else ``cut``."""
    too_long: Literal["refuse", "truncate", "skip"] = "refuse"
    """Action for documents longer than ``sequence`` where they are not cut: ``refuse`` the data, use their
    first ``sequence`` tokens (``truncate``), or ``skip`` them; how many is reported."""

    @field_validator("train", "validation", mode="before")
    @classmethod
    def _not_without_members(cls, value: Any) -> Any:
        if value == []:
            raise ValueError("a prefix or [[weight, prefix], ...], not an empty list")
        return value

    @field_validator("split")
    @classmethod
    def _trains(cls, value: tuple[float, float, float] | None) -> tuple[float, float, float] | None:
        if value is not None and not value[0]:
            raise ValueError("three proportions, the first of them above 0: it is what is trained on")
        return value

    @field_validator("bos", mode="before")
    @classmethod
    def _no(cls, value: Any) -> Any:
        return "no" if value is False else value  # as YAML reads it

    @property
    def validation_sets(self) -> dict[str, DataSource]:
        """Name -> data of every validation set; one without a name is called ``validation``. A part of the
        training data (:meth:`part`) is named like these."""
        if isinstance(self.validation, dict):
            return self.validation
        data = self.validation
        if data is None and self.split is not None and self.split[1]:
            data = self.train
        return {} if data is None else {"validation": data}

    def part(self, training: bool) -> tuple[float, float] | None:
        """The documents of ``train`` (begin, end, as fractions) that are for training, or for validation
        where ``validation`` names no data; None: all of what is named."""
        if self.split is None or (not training and self.validation is not None):
            return None
        total = sum(self.split)
        begin, end = 0.0, self.split[0] / total
        return (begin, end) if training else (end, end + self.split[1] / total)


class BatchSettings(SettingsGroup):
    """How many sequences make a microbatch and a step."""

    model_config = ConfigDict(serialize_by_alias=True)

    micro: Width = 2
    """Sequences per microbatch and data rank."""
    global_: Annotated[Integer, Field(ge=1, le=2**24, alias="global")] = 32
    """Sequences per step, over all data ranks. Microbatches times pipeline stages are at most 2^20."""
    ramp: tuple[Width, Width, Positive] | None = None
    """Smaller steps at the start of the run: ``[start, increment, samples]``. Steps have ``start`` sequences
    at first and grow by ``increment`` at equal distances, to ``global`` after ``samples`` sequences. Learning
    rates then go by samples: steps of ``lr_schedule`` are those of ``global`` sequences."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers that must be multiples of the sequences that all data ranks compute at a time, so that
        every step's size is."""
        return (self.global_, *(self.ramp or ())[:2])

    def size(self, samples: int) -> int:
        """Sequences of the step that begins after so many sequences."""
        if self.ramp is None or samples > self.ramp[2] or self.ramp[0] >= self.global_:
            return self.global_
        start, increment, end = self.ramp
        # Megatron-LM's arithmetic, whose rounding decides about the steps at which the size changes.
        distance = end / ((self.global_ - start) / increment)
        return min(start + int(samples / distance) * increment, self.global_)

    def steps(self, samples: int) -> int:
        """The run's steps with so many sequences; one that begins during the ramp may have some more."""
        steps = consumed = 0
        while self.ramp is not None and consumed <= min(self.ramp[2], samples):
            consumed, steps = consumed + self.size(consumed), steps + 1
        return steps + max(0, samples - consumed) // self.global_

    def samples(self, steps: int) -> int:
        """Sequences of the run's first steps."""
        samples = 0
        while steps and self.ramp is not None and samples <= self.ramp[2]:
            samples, steps = samples + self.size(samples), steps - 1
        return samples + steps * self.global_


class ParallelSettings(SettingsGroup):
    """The layout: how the work is divided among ranks."""

    tensor: Degree = 1
    """Tensor-parallel degree: every layer's matrices are sharded over this many ranks. It divides
    ``model.heads``, and divides ``model.kv_heads`` or is a multiple of it: several ranks then hold each KV
    head."""
    sequence: bool = True
    """Sequence parallel: activations outside attention and feed-forward are sharded over the tensor ranks
    too. Effective where ``tensor > 1``."""
    tensor_chunks: Degree | Literal["auto"] = "auto"
    """Chunks of tokens in which a tensor-parallel layer's forward pass gathers, multiplies and sums: one is
    sent while another is multiplied. ``auto``: up to 4, each of 32 MiB or more when gathered. Never more than
    a rank has tokens; layers in fp8, or with adapters, have one."""
    context: Degree = 1
    """Context-parallel degree: the tokens of every microbatch are divided among this many ranks. It divides
    ``data.sequence``."""
    context_method: Literal["ring", "ulysses", "ulysses_ring", "all_gather"] = "ring"
    """How attention reaches across context ranks. ``ring``: keys and values are sent in rounds to the ranks
    that need them; ``all_gather``: all at once to all; ``ulysses``: heads are exchanged for tokens, so that a
    rank has some heads of all tokens; ``ulysses_ring``: that in groups of neighbouring ranks, and a ring of
    groups."""
    context_ulysses: Degree | Literal["auto"] = "auto"
    """Ranks of a group of ``ulysses_ring``. ``auto``: as many as can share the heads."""
    context_balance: Literal["auto", "zigzag", "work", "none"] = "auto"
    """The division of tokens over context ranks. ``zigzag``: two blocks of every sequence, one from the front
    and one from the back; ``work``: blocks such that each rank has as much attention to compute, whatever the
    documents' lengths; ``none``: in their order. ``auto``: ``work`` with isolated documents, else ``zigzag``;
    ``none`` with ``ulysses``."""
    pipeline: Degree = 1
    """Pipeline-parallel degree: the layers are divided among this many ranks."""
    virtual_stages: Degree = 1
    """Stages per pipeline rank. ``zb_v`` and ``dualpipe_v`` always have two; ``auto`` may choose two where
    this is 1."""
    schedule: (
        Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v", "auto"] | ScheduleFile
    ) = "1f1b"
    """Order of forward and backward passes on the pipeline ranks. ``auto`` searches for the best one within
    ``schedule_memory``; a ``.json`` file holds a custom one (``hexad show schedule --save``)."""
    schedule_group: Positive | Literal["auto"] = "auto"
    """Microbatches that ``interleaved`` runs through one stage before it switches to the next; ``auto``: the
    pipeline degree."""
    schedule_memory: PositiveFloat | Literal["auto"] = "auto"
    """Activations that ``schedule: auto`` may hold on a rank, in microbatches of all the rank's layers.
    ``auto``: the pipeline degree, as many as ``1f1b``."""
    split: Literal["cost", "even"] | list[Count] = "cost"
    """How layers are divided among stages: by cost, evenly, or an explicit list of layers per stage."""
    expert: Degree = 1
    """Expert-parallel degree."""
    expert_tensor: Degree = 1
    """Tensor-parallel degree inside each expert."""
    data: Degree | Literal["auto"] = "auto"
    """Data-parallel degree. ``auto``: ``world / (tensor * context * pipeline)``."""
    zero: Annotated[Integer, Field(ge=0, le=3)] = 0
    """The state that is sharded over the data and context ranks: 0 nothing, 1 optimizer state, 2 gradients
    too, 3 parameters too."""
    replicas: Degree = 1
    """Hybrid sharding: state is sharded inside ``data * context / replicas`` ranks and replicated across."""
    order: str = "tensor-context-expert-data-pipeline"
    """Rank order, fastest-varying axis first."""
    bucket_mb: PositiveFloat | Literal["auto"] = "auto"
    """Size of a gradient bucket in MiB, the unit of reduction over data and context ranks. ``auto``: 25, and
    at least 4 per rank of these, so that messages between two ranks stay large enough (the rule of
    Megatron-LM)."""

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequence parallel is in force."""
        return self.sequence and self.tensor > 1

    @property
    def token_multiple(self) -> int:
        """The number of which the tokens of a microbatch must be a multiple."""
        return self.context * (self.tensor if self.sequence_parallel else 1)

    @property
    def ulysses(self) -> int:
        """Context ranks that exchange heads for tokens, of resolved settings."""
        if self.context == 1:
            return 1
        if self.context_method == "ulysses":
            return self.context
        return int(self.context_ulysses) if self.context_method == "ulysses_ring" else 1


LossScale = Annotated[PositiveFloat, Field(le=2.0**127)]
"""A power of two above is no float32."""


class PrecisionSettings(SettingsGroup):
    """Number formats."""

    dtype: Literal["auto", "fp64", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Format of parameters and activations. ``auto``: bf16 if the devices of all ranks compute it in hardware
    (NVIDIA GPUs of compute capability 8.0 and later, GPUs of ROCm, CPUs with AVX512-BF16, AMX-BF16 or Arm's
    BF16), else fp32; ``config.yaml`` and checkpoints hold the result. Commands that start nothing assume
    bf16, or with ``run.device: cpu`` what this host's CPU has; ``hexad show memory --device`` what the GPU
    that it names has. bf16 and fp16 keep fp32 master weights and optimizer state. fp8 is bf16 whose layers
    multiply inputs, weights and output gradients in 8 bits; it needs a GPU with fp8 units."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are sent and reduced over data and context ranks; ``bf16`` in bf16 and fp8
    runs only."""
    accumulate: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients of microbatches are added up on a rank; ``bf16`` with ``reduce: bf16``
    only."""
    fp8_weight_gradients: bool = False
    """Whether fp8 runs multiply in 8 bits for weight gradients too, the third of a linear layer's products:
    inputs in e4m3, output gradients in e5m2. They are accumulated as otherwise."""
    exact: bool = False
    """Whether the forward pass computes the same bits for a sequence in every layout and batch, in fp32, bf16
    and fp16: log-probabilities of training, generation and ``hexad score`` are then equal. Sums are made
    independent of their order, in float64, which takes several times as long (``docs/exact.md``). Backward
    passes, and attention with dropout, are the usual ones."""
    loss_scale: Literal["dynamic"] | LossScale = "dynamic"
    """Factor of the loss in fp16 runs: ``dynamic``, or a fixed number."""
    loss_scale_initial: LossScale = 65536.0
    """Dynamic loss scale of the first step."""
    loss_scale_window: Positive = 1000
    """Consecutive steps with finite gradients after which the dynamic loss scale doubles."""
    loss_scale_hysteresis: Positive = 2
    """Overflows after which the dynamic loss scale is halved, and again at each further one before it has
    grown again."""
    loss_scale_consecutive: bool = False
    """Whether ``loss_scale_hysteresis`` counts consecutive overflows only: a step without one forgives those
    before it."""
    loss_scale_min: PositiveFloat = 1.0
    """Smallest dynamic loss scale; an overflow there stops the run."""

    @property
    def width(self) -> int:
        """Bytes of an element of a parameter or an activation, of resolved settings."""
        return {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}[self.dtype]


RecomputePart = Literal["moe_act", "norms", "mla_up"]


class MemorySettings(SettingsGroup):
    """Time or precision traded for memory."""

    recompute: Literal["none", "selective", "full"] = "none"
    """The activations that are recomputed in the backward pass instead of kept: ``selective`` those that cost
    no matrix product, ``full`` all but each layer's input."""
    recompute_layers: Literal["all"] | Positive = "all"
    """How many layers per stage recompute: ``all``, or the first ones."""
    recompute_parts: tuple[RecomputePart, ...] = ()
    """Parts that every layer recomputes besides: ``norms``, outputs of the norms before attention and
    feed-forward; ``moe_act``, activated values of the experts; ``mla_up``, what multi-head latent attention
    projects from latent vectors: queries, keys and values."""
    offload: Literal["none", "optimizer"] = "none"
    """The state that is kept in the host's memory."""

    @field_validator("recompute_parts")
    @classmethod
    def _each_once(cls, value: tuple[RecomputePart, ...]) -> tuple[RecomputePart, ...]:
        if len(set(value)) < len(value):
            raise ValueError("each part once, of moe_act, norms and mla_up")
        return value


class OptimizerSettings(SettingsGroup):
    """The update rule."""

    name: Literal["adamw"] = "adamw"
    """Update rule: AdamW (Loshchilov & Hutter, arXiv 1711.05101)."""
    lr: PositiveFloat = 3.0e-4
    """Peak learning rate."""
    decoupled_lr: PositiveFloat | None = None
    """Peak learning rate of the embedding and the output head; null: ``lr``."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1.0e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay; norms and biases are excluded."""
    clip: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""


class LrScheduleSettings(SettingsGroup):
    """The learning rate over the run. The rate of step ``n`` (counted from 1) is the schedule at ``n``."""

    kind: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    """Shape after warm-up."""
    warmup: Count = 100
    """Steps of linear warm-up from 0."""
    decay_steps: Positive | Literal["auto"] = "auto"
    """Step at which ``min_lr`` is reached (``wsd``: length of the final decay). ``auto``: ``run.steps``
    (``wsd``: a fifth of it)."""
    min_lr: NonNegativeFloat = 3.0e-5
    """Learning rate at the end of the decay."""
    decoupled_min_lr: NonNegativeFloat | None = None
    """Least learning rate of the embedding and the output head, with ``optimizer.decoupled_lr``; null:
    ``min_lr``."""


class CheckpointSettings(SettingsGroup):
    """Saving and resuming."""

    every: Count = 100
    """Steps between checkpoints; 0 saves only at the end."""
    keep: Positive = 3
    """Newest checkpoints to keep."""
    keep_best: Count = 0
    """Checkpoints with the lowest validation loss to keep besides. An evaluation (``validate.every``) among
    the best so many is followed by a checkpoint; ``checkpoints/best`` names the best one."""
    asynchronous: bool = True
    """Write in the background; training waits only for the copy to memory."""
    resume: Literal["auto", "never", "must"] = "auto"
    """``auto``: resume from the newest complete checkpoint of ``run.dir`` if there is one. ``must``: fail
    without one. ``never``: start from the beginning, refused if the directory already holds checkpoints."""
    load: Name | None = None
    """Checkpoint to start from (weights, optimizer and data position) when ``run.dir`` has none."""
    verify: bool = True
    """Verify every value's checksum while loading. Sizes and the manifest's own checksum always are."""
    damaged: Literal["stop", "previous"] = "stop"
    """Action if the newest checkpoint of ``run.dir`` is damaged: ``stop``, or rename it and resume from the
    ``previous`` one."""
    on_failure: Literal["stop", "continue"] = "stop"
    """Action if a checkpoint cannot be written (full disk, missing permission): ``stop``, or report it and
    ``continue`` until the next one. The last one of a run must succeed."""


class FaultSettings(SettingsGroup):
    """How failures are handled."""

    restarts: Count = 0
    """How often ranks that ``hexad train`` has started itself are restarted after one of them died or hung;
    the run resumes from its newest checkpoint. No effect under torchrun, which has ``--max-restarts``, and
    under ``srun``."""
    idle_ranks: bool = False
    """Whether ranks may be idle if the world does not fit the layout: the largest data degree that fits is
    used, and the remaining ranks wait for the next restart. Otherwise such a world is refused."""
    not_finite: Literal["stop", "skip", "roll_back"] = "stop"
    """After a step whose gradient is not finite: ``stop`` the run, ``skip`` the update, or ``roll_back`` to
    the newest checkpoint and skip the data read since. In fp16 runs the loss scale is lowered first."""
    spike: Annotated[Number, Field(gt=1, allow_inf_nan=False)] | None = None
    """A loss above this many times the median of the last ``spike_window`` losses is a spike; null turns
    detection off. Losses of skipped steps do not count; there is no detection until the window is full."""
    spike_window: Positive = 50
    """Number of losses whose median a loss is compared with."""
    on_spike: Literal["stop", "skip", "roll_back"] = "skip"
    """Action after a spike: as for ``not_finite``. The update of such a step is never applied."""
    most: Positive = 10
    """Consecutive faults that are skipped or rolled back; one more stops the run. A streak ends with an
    update beyond the step that failed last."""


class ProfileSettings(SettingsGroup):
    """The steps that are profiled."""

    start: Positive = 10
    """First step, counted from 1."""
    steps: Positive = 3
    """How many steps, one after another."""


class LogSettings(SettingsGroup):
    """The records of a run."""

    every: Positive = 1
    """Steps between lines of ``metrics.jsonl``."""
    tensorboard: bool = False
    """Write TensorBoard scalars to ``run.dir/tensorboard`` (``pip install hexad[tensorboard]``)."""
    wandb: Name | None = None
    """Weights & Biases project to log to (``pip install hexad[wandb]``)."""
    profile: ProfileSettings | None = None
    """Steps of which every rank writes a trace of torch's profiler, and on a GPU a snapshot of its memory, to
    ``run.dir/profile`` (``hexad show trace``); null for none."""
    check_replicas: Count = 100
    """Steps between comparisons of replicated weights over the ranks that hold them, by a hash; a difference
    stops the run, naming rank and tensor. 0 turns them off."""
    timeline: Count = 0
    """The step whose pipeline actions are timed and written to ``run.dir/timeline.json``; 0 for none."""


class ValidateSettings(SettingsGroup):
    """Evaluation during training."""

    every: Count = 0
    """Steps between evaluations; 0 turns them off."""
    batches: Positive = 10
    """Global batches per evaluation."""
    patience: Count = 0
    """End the run, with a checkpoint, when so many evaluations in a row have not lowered the validation loss
    (early stopping); 0: never."""


class InferenceSettings(SettingsGroup):
    """Generation: the key/value cache, and how sequences share a forward pass. Nothing here changes what is
    generated."""

    cache_tokens: Positive | Literal["auto"] = "auto"
    """Tokens of the key/value cache of a model replica; ``auto``: what fits into ``inference.memory_part``. A
    sequence that does not fit beside the others is computed again later."""
    memory_part: Annotated[Number, Field(gt=0, le=1)] = 0.8
    """Part of the memory that is free after the weights are loaded which the cache may take: of a GPU's, or
    of the host's, shared among its ranks."""
    block: Positive | Literal["auto"] = "auto"
    """Tokens of a block of the cache; ``auto``: 256 on GPUs, 32 on CPUs. Prompts that begin alike share
    complete blocks."""
    batch_tokens: Positive = 2048
    """Tokens of a forward pass at most: one of each running sequence, and parts of prompts."""
    sequences: Positive = 256
    """Sequences that run at once; others wait."""
    queue: Count = 1024
    """Requests that wait in ``hexad serve``; more are refused with status 429."""
    grace: NonNegativeFloat = 30.0
    """Seconds that ``hexad serve`` has for running requests after it was asked to stop."""
    body_mib: Positive = 8
    """MiB of a request to ``hexad serve`` at most. Reading 8 MiB keeps others waiting for about 0.1 s."""
    requests_mib: Positive = 1024
    """MiB that ``hexad serve`` keeps of requests under way: what has arrived of them, ids, and
    log-probabilities; more are refused with status 429."""
    connections: Positive | Literal["auto"] = "auto"
    """Connections of ``hexad serve`` that are open at once; ``auto``: as many as the process may have files.
    Where there are more, those that have waited longest for their clients are closed."""
    client_timeout: PositiveFloat = 30.0
    """Seconds that a client of ``hexad serve`` may take to send a request, to begin another one, or to accept
    a part of its answer."""
    kernels: Positive = 128
    """Kernels for products on CPUs that oneDNN keeps, one for each shape; about 0.2 MB each in fp32."""


class Config(SettingsGroup):
    """The whole configuration: one tree, one YAML file."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    batch: BatchSettings = BatchSettings()
    parallel: ParallelSettings = ParallelSettings()
    precision: PrecisionSettings = PrecisionSettings()
    memory: MemorySettings = MemorySettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    lr_schedule: LrScheduleSettings = LrScheduleSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    faults: FaultSettings = FaultSettings()
    log: LogSettings = LogSettings()
    validate_: Annotated[ValidateSettings, Field(alias="validate")] = ValidateSettings()
    inference: InferenceSettings = InferenceSettings()

    model_config = ConfigDict(serialize_by_alias=True)

    @property
    def complete_steps(self) -> float:
        """The run's length in steps of ``batch.global`` sequences, in which learning rates are scheduled."""
        return self.batch.samples(self.run.steps) / self.batch.global_
