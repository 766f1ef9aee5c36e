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
    """General settings of the run."""

    dir: Name = "runs/demo"
    """Directory for all output of the run: resolved configuration, metrics, logs, checkpoints."""
    seed: Seed = 1234
    """Random seed of the weights and of the order of training data. The order of validation data does not
    depend on it. The same seed gives the same run in every layout."""
    steps: Positive = 200
    """Total number of optimizer steps, counted from the first start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device. ``auto``: ``cuda`` if a GPU is visible, else ``cpu``."""
    timeout: Annotated[PositiveFloat, Field(le=10**9)] = 600.0
    """Seconds that a collective may wait for its peers. After this time the run is stopped."""
    compile: Literal["auto", "none", "pointwise", "full"] = "auto"
    """Functions that ``torch.compile`` compiles. ``pointwise``: norms, rotary positions, activations,
    dropout, the merging of context-parallel blocks, the loss and the update. Each is compiled separately, in
    every layout. ``full``: also every complete transformer block (needs ``parallel.tensor: 1``). ``auto``:
    ``pointwise`` on GPUs, ``none`` on CPUs. The values ``true`` and ``false`` of earlier versions mean
    ``full`` and ``none``."""
    deterministic: bool = False
    """Use deterministic operators only. Repeated runs in the same layout on the same GPUs then agree bit for
    bit. An operator without a deterministic implementation is an error. Runs on a GPU are slower. On a CPU
    repeated runs agree without this setting."""
    cpu_binding: Literal["auto", "none"] = "auto"
    """CPU cores of a rank that uses a GPU. ``auto``: the cores of the GPU's socket, unless the launcher has
    bound the rank already. ``none``: the cores that the launcher allows."""

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
    """Training and validation data, and how samples are made from it."""

    train: DataSource | None = None
    """Training data: a ``.bin/.idx`` prefix, or a blend ``[[weight, prefix], ...]``."""
    validation: DataSource | dict[Name, DataSource] | None = None
    """Validation data: a prefix or a blend, as for ``train``, or several named sets, ``{web: prefix, code:
    prefix}``."""
    split: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] | None = None
    """Proportions of ``train``'s documents for training, validation and testing, like ``--split`` of
    Megatron-LM. The first documents are used for training. The next ones are used for validation if
    ``validation`` is null. In a blend, each data set is split. null: all documents are used for training."""
    tokenizer: Name = "byte"
    """Tokenizer: ``byte``; a directory or file (Hugging Face ``tokenizer.json``, SentencePiece ``.model``, or
    ``.tiktoken``); or ``hf:ORG/NAME``, the tokenizer of a model on the hub."""
    sequence: Width = 512
    """Tokens per sample."""
    bos: Literal["auto", "no"] = "auto"
    """Beginning-of-text token before each document and prompt. ``auto``: as the tokenizer specifies (Hugging
    Face: its post-processor). ``no``: none. Data that is known to be built differently is refused."""
    documents: Literal["join", "isolate"] = "join"
    """Documents of a packed sample. ``join``: attention and positions span all of them. ``isolate``:
    attention and positions are confined to each document."""
    packing: Literal["auto", "cut", "whole"] = "auto"
    """How documents fill samples. ``cut``: documents are joined into one stream, which is cut every
    ``sequence`` tokens. ``whole``: a sample holds complete documents only, isolated from each other, and is
    padded to its end. Padding has no loss. ``auto``: ``whole`` for data with a loss mask (``hexad data
    build`` of conversations, or of prompts and completions), else ``cut``."""
    too_long: Literal["refuse", "truncate", "skip"] = "refuse"
    """Action for documents longer than ``sequence``, if samples hold complete documents. ``refuse``: refuse
    the data. ``truncate``: use the first ``sequence`` tokens. ``skip``: skip the documents. Their number is
    reported."""

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
    """Numbers of sequences in a microbatch and in a step."""

    model_config = ConfigDict(serialize_by_alias=True)

    micro: Width = 2
    """Sequences per microbatch and data rank."""
    global_: Annotated[Integer, Field(ge=1, le=2**24, alias="global")] = 32
    """Sequences per step, summed over all data ranks. The number of microbatches times the number of pipeline
    stages is at most 2^20."""
    ramp: tuple[Width, Width, Positive] | None = None
    """Batch size ramp-up, ``[start, increment, samples]``. The first steps have ``start`` sequences. The size
    grows by ``increment`` at equal distances, and reaches ``global`` after ``samples`` sequences. With a
    ramp, learning rates follow the number of samples: a step of ``lr_schedule`` is a step of ``global``
    sequences."""

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
    """The parallel layout."""

    tensor: Degree = 1
    """Tensor-parallel degree: each layer's matrices are sharded over this many ranks. It must divide
    ``model.heads``. It must also divide ``model.kv_heads`` or be a multiple of it. If it is a multiple,
    several ranks hold each KV head."""
    sequence: bool = True
    """Sequence parallel: activations outside attention and feed-forward are also sharded over the tensor
    ranks. It has an effect only if ``tensor > 1``."""
    tensor_chunks: Degree | Literal["auto"] = "auto"
    """Number of chunks into which the forward pass of a tensor-parallel layer divides its tokens. One chunk
    is communicated while another is multiplied. ``auto``: up to 4 chunks, each at least 32 MiB when gathered.
    The number never exceeds a rank's tokens. Layers in fp8, and layers with adapters, use one chunk."""
    context: Degree = 1
    """Context-parallel degree: the tokens of each microbatch are divided among this many ranks. It must
    divide ``data.sequence``."""
    context_method: Literal["ring", "ulysses", "ulysses_ring", "all_gather"] = "ring"
    """How attention communicates across context ranks. ``ring``: keys and values are sent in rounds to the
    ranks that need them. ``all_gather``: all keys and values are sent to all ranks at once. ``ulysses``:
    heads are exchanged for tokens, so that a rank holds some heads of all tokens. ``ulysses_ring``:
    ``ulysses`` inside groups of neighbouring ranks, and ``ring`` between the groups."""
    context_ulysses: Degree | Literal["auto"] = "auto"
    """Size of a group of ``ulysses_ring``, in ranks. ``auto``: the largest group that can share the heads."""
    context_balance: Literal["auto", "zigzag", "work", "none"] = "auto"
    """Division of tokens over context ranks. ``zigzag``: each rank has two blocks of every sequence, one from
    the front and one from the back. ``work``: blocks with equal attention work per rank, for documents of any
    lengths. ``none``: consecutive blocks. ``auto``: ``none`` with ``ulysses``, otherwise ``work`` with
    isolated documents, otherwise ``zigzag``."""
    pipeline: Degree = 1
    """Pipeline-parallel degree: the layers are divided among this many ranks."""
    virtual_stages: Degree = 1
    """Stages per pipeline rank. ``zb_v`` and ``dualpipe_v`` always have two. If this is 1, ``schedule: auto``
    may choose two."""
    schedule: (
        Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v", "auto"] | ScheduleFile
    ) = "1f1b"
    """Order of forward and backward passes on the pipeline ranks. ``auto`` searches for the fastest schedule
    within ``schedule_memory``. A ``.json`` file holds a custom schedule (``hexad show schedule --save``)."""
    schedule_group: Positive | Literal["auto"] = "auto"
    """Microbatches that ``interleaved`` runs through one stage before it switches to the next. ``auto``: the
    pipeline degree."""
    schedule_memory: PositiveFloat | Literal["auto"] = "auto"
    """Limit of ``schedule: auto`` for the activations on a rank, in microbatches of all the rank's layers.
    ``auto``: the pipeline degree, which is what ``1f1b`` holds."""
    split: Literal["cost", "even"] | list[Count] = "cost"
    """Division of layers among stages: by cost, evenly, or an explicit list of layers per stage."""
    expert: Degree = 1
    """Expert-parallel degree: each layer's experts are divided among this many ranks."""
    expert_tensor: Degree = 1
    """Tensor-parallel degree inside each expert."""
    data: Degree | Literal["auto"] = "auto"
    """Data-parallel degree. ``auto``: ``world / (tensor * context * pipeline)``."""
    zero: Annotated[Integer, Field(ge=0, le=3)] = 0
    """ZeRO level: the state that is sharded over the data and context ranks. 0: none; 1: optimizer state; 2:
    also gradients; 3: also parameters."""
    replicas: Degree = 1
    """Hybrid sharding: the number of replicas of the sharded state. Each replica is sharded over ``data *
    context / replicas`` ranks."""
    order: str = "tensor-context-expert-data-pipeline"
    """Order of the axes in rank numbers, fastest-varying first."""
    bucket_mb: PositiveFloat | Literal["auto"] = "auto"
    """Size of a gradient bucket in MiB. A bucket is the unit of reduction over data and context ranks.
    ``auto``: 25, and at least 4 for each of these ranks, which keeps messages between two ranks large enough
    (the rule of Megatron-LM)."""

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
    """Format of parameters and activations. ``auto``: bf16 if the devices of all ranks compute it in
    hardware, else fp32. Such devices are NVIDIA GPUs of compute capability 8.0 and later, GPUs of ROCm, and
    CPUs with AVX512-BF16, AMX-BF16 or Arm's BF16. ``config.yaml`` and checkpoints hold the result. Commands
    that start no rank assume bf16; with ``run.device: cpu`` they test this host's CPU. ``hexad show memory
    --device`` assumes the format of the GPU that it names. bf16 and fp16 runs keep fp32 master weights and
    optimizer state. fp8 runs are bf16 runs whose layers multiply inputs, weights and output gradients in 8
    bits. fp8 needs a GPU with fp8 units."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are communicated and reduced over data and context ranks. ``bf16`` is
    accepted in bf16 and fp8 runs only."""
    accumulate: Literal["fp32", "bf16"] = "fp32"
    """Format in which a rank accumulates the gradients of microbatches. ``bf16`` is accepted with ``reduce:
    bf16`` only."""
    fp8_weight_gradients: bool = False
    """Compute weight gradients in 8 bits too, in fp8 runs. Weight gradients are the third product of a linear
    layer. Inputs are in e4m3, output gradients in e5m2. The format of accumulation does not change."""
    exact: bool = False
    """Compute the same bits for a sequence in every layout and batch, in the forward pass, in fp32, bf16 and
    fp16. Log-probabilities of training, generation and ``hexad score`` are then equal. Sums do not depend on
    their order: they are computed in float64, which takes several times as long (``docs/exact.md``). Backward
    passes, and attention with dropout, are not exact."""
    loss_scale: Literal["dynamic"] | LossScale = "dynamic"
    """Loss scale in fp16 runs: ``dynamic``, or a fixed number."""
    loss_scale_initial: LossScale = 65536.0
    """Initial dynamic loss scale."""
    loss_scale_window: Positive = 1000
    """The dynamic loss scale doubles after this many consecutive steps with finite gradients."""
    loss_scale_hysteresis: Positive = 2
    """The dynamic loss scale is halved at this many overflows since it last grew. Each further overflow
    before the next growth halves it again."""
    loss_scale_consecutive: bool = False
    """Count only consecutive overflows for ``loss_scale_hysteresis``: a step without an overflow resets the
    count."""
    loss_scale_min: PositiveFloat = 1.0
    """Smallest dynamic loss scale. An overflow at this scale stops the run."""

    @property
    def width(self) -> int:
        """Bytes of an element of a parameter or an activation, of resolved settings."""
        return {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}[self.dtype]


RecomputePart = Literal["moe_act", "norms", "mla_up"]


class MemorySettings(SettingsGroup):
    """Settings that reduce memory at a cost in time or precision."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes. ``none``: none, all are kept. ``selective``: those that
    can be recomputed without a matrix product. ``full``: all except each layer's input."""
    recompute_layers: Literal["all"] | Positive = "all"
    """Layers per stage that recompute: ``all``, or a number of layers from the first one on."""
    recompute_parts: tuple[RecomputePart, ...] = ()
    """Additional parts that every layer recomputes. ``norms``: outputs of the norms before attention and
    feed-forward. ``moe_act``: activated values of the experts. ``mla_up``: queries, keys and values that
    multi-head latent attention projects from latent vectors."""
    offload: Literal["none", "optimizer"] = "none"
    """State that is kept in the host's memory."""

    @field_validator("recompute_parts")
    @classmethod
    def _each_once(cls, value: tuple[RecomputePart, ...]) -> tuple[RecomputePart, ...]:
        if len(set(value)) < len(value):
            raise ValueError("each part once, of moe_act, norms and mla_up")
        return value


class OptimizerSettings(SettingsGroup):
    """The optimizer."""

    name: Literal["adamw"] = "adamw"
    """Optimizer: AdamW (Loshchilov & Hutter, arXiv 1711.05101)."""
    lr: PositiveFloat = 3.0e-4
    """Peak learning rate."""
    decoupled_lr: PositiveFloat | None = None
    """Peak learning rate of the embedding and the output head. null: ``lr``."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: PositiveFloat = 1.0e-8
    """Constant added to the denominator of the update."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay. It is not applied to norms and biases."""
    clip: NonNegativeFloat = 1.0
    """Largest global gradient norm. Larger gradients are clipped. 0: no clipping."""


class LrScheduleSettings(SettingsGroup):
    """The learning rate schedule. Step ``n``, counted from 1, has the schedule's value at ``n``."""

    kind: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    """Shape of the schedule after warm-up."""
    warmup: Count = 100
    """Steps of linear warm-up from 0."""
    decay_steps: Positive | Literal["auto"] = "auto"
    """Step at which the rate reaches ``min_lr``. With ``wsd``: length of the final decay, in steps. ``auto``:
    ``run.steps``; with ``wsd`` a fifth of it."""
    min_lr: NonNegativeFloat = 3.0e-5
    """Learning rate at the end of the decay."""
    decoupled_min_lr: NonNegativeFloat | None = None
    """Learning rate of the embedding and the output head at the end of the decay, with
    ``optimizer.decoupled_lr``. null: ``min_lr``."""


class CheckpointSettings(SettingsGroup):
    """Checkpoints and resuming."""

    every: Count = 100
    """Steps between checkpoints. 0: save only at the end."""
    keep: Positive = 3
    """Number of newest checkpoints to keep."""
    keep_best: Count = 0
    """Number of checkpoints with the lowest validation loss to keep, in addition to the newest. If the loss
    of an evaluation (``validate.every``) is among this many lowest ones, a checkpoint is written.
    ``checkpoints/best`` names the best one."""
    asynchronous: bool = True
    """Write checkpoints in the background. Training waits only for the copy to memory."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Start of the run. ``auto``: resume from the newest complete checkpoint of ``run.dir`` if there is one.
    ``must``: fail if there is none. ``never``: start from the beginning; refused if the directory already
    holds checkpoints."""
    load: Name | None = None
    """Checkpoint to start from if ``run.dir`` has none: weights, optimizer state and data position are
    loaded."""
    verify: bool = True
    """Verify the checksum of every value while loading. File sizes and the manifest's own checksum are always
    verified."""
    damaged: Literal["stop", "previous"] = "stop"
    """Action if the newest checkpoint of ``run.dir`` is damaged. ``stop``: stop the run. ``previous``: rename
    the damaged checkpoint and resume from the previous one."""
    on_failure: Literal["stop", "continue"] = "stop"
    """Action if a checkpoint cannot be written (full disk, missing permission). ``stop``: stop the run.
    ``continue``: report the failure and train until the next checkpoint. A failure of the last checkpoint
    always stops the run."""


class FaultSettings(SettingsGroup):
    """Handling of failures."""

    restarts: Count = 0
    """How many times the ranks are restarted after one of them died or hung. The run resumes from its newest
    checkpoint. Only ranks that ``hexad train`` has started itself are restarted. The setting has no effect
    under torchrun, which has ``--max-restarts``, and under ``srun``."""
    idle_ranks: bool = False
    """Allow idle ranks if the world does not fit the layout. The largest data degree that fits is used, and
    the remaining ranks wait for the next restart. If this is false, such a world is refused."""
    not_finite: Literal["stop", "skip", "roll_back"] = "stop"
    """Action after a step whose gradient is not finite. ``stop``: stop the run. ``skip``: skip the update.
    ``roll_back``: return to the newest checkpoint and skip the data read since. In fp16 runs the loss scale
    is lowered first."""
    spike: Annotated[Number, Field(gt=1, allow_inf_nan=False)] | None = None
    """Threshold of spike detection: a loss above this many times the median of the last ``spike_window``
    losses is a spike. Losses of skipped steps are not counted. Detection starts when the window is full.
    null: no detection."""
    spike_window: Positive = 50
    """Number of losses in the median."""
    on_spike: Literal["stop", "skip", "roll_back"] = "skip"
    """Action after a spike, as for ``not_finite``. The update of a step with a spike is never applied."""
    most: Positive = 10
    """Number of consecutive faults that are skipped or rolled back. One more stops the run. The count returns
    to 0 when an update is applied beyond the step that failed last."""


class ProfileSettings(SettingsGroup):
    """Steps to profile."""

    start: Positive = 10
    """First step, counted from 1."""
    steps: Positive = 3
    """Number of consecutive steps."""


class LogSettings(SettingsGroup):
    """Metrics, logs and traces."""

    every: Positive = 1
    """Steps between two lines of ``metrics.jsonl``."""
    tensorboard: bool = False
    """Write TensorBoard scalars to ``run.dir/tensorboard`` (``pip install hexad[tensorboard]``)."""
    wandb: Name | None = None
    """Weights & Biases project for the metrics (``pip install hexad[wandb]``)."""
    profile: ProfileSettings | None = None
    """Steps to profile. Every rank writes a trace of torch's profiler, and on a GPU a snapshot of its memory,
    to ``run.dir/profile`` (``hexad show trace``). null: none."""
    check_replicas: Count = 100
    """Steps between checks of replicated weights. The ranks that hold the same weights compare hashes. A
    difference stops the run, and the error names rank and tensor. 0: no checks."""
    timeline: Count = 0
    """Step whose pipeline actions are timed. The times are written to ``run.dir/timeline.json``. 0: none."""


class ValidateSettings(SettingsGroup):
    """Evaluation during training."""

    every: Count = 0
    """Steps between evaluations. 0: no evaluations."""
    batches: Positive = 10
    """Global batches per evaluation."""
    patience: Count = 0
    """Early stopping: the run ends, with a checkpoint, after this many consecutive evaluations without a
    lower validation loss. 0: never."""


class InferenceSettings(SettingsGroup):
    """Generation: the key/value cache, batching, and the limits of ``hexad serve``. These settings do not
    change the generated tokens."""

    cache_tokens: Positive | Literal["auto"] = "auto"
    """Capacity of the key/value cache of a model replica, in tokens. ``auto``: as many as fit into
    ``inference.memory_part``. If the cache is full, a sequence is removed from it and recomputed later."""
    memory_part: Annotated[Number, Field(gt=0, le=1)] = 0.8
    """Part of the free memory that the cache may take, measured after the weights are loaded. On a GPU this
    is the GPU's memory. On a CPU it is the host's memory, divided among its ranks."""
    block: Positive | Literal["auto"] = "auto"
    """Size of a block of the cache, in tokens. ``auto``: 256 on GPUs, 32 on CPUs. Prompts with a common
    beginning share complete blocks."""
    batch_tokens: Positive = 2048
    """Maximum number of tokens in a forward pass: one for each running sequence, and parts of prompts."""
    sequences: Positive = 256
    """Maximum number of sequences that run at the same time. Further sequences wait."""
    queue: Count = 1024
    """Maximum number of requests that wait in ``hexad serve``. Further requests are refused with status
    429."""
    grace: NonNegativeFloat = 30.0
    """Seconds that ``hexad serve`` gives running requests to finish after it was asked to stop."""
    body_mib: Positive = 8
    """Maximum size of a request to ``hexad serve``, in MiB. While the server reads 8 MiB, other requests wait
    for about 0.1 s."""
    requests_mib: Positive = 1024
    """Maximum memory of ``hexad serve`` for unfinished requests, in MiB: received bodies, ids and
    log-probabilities. Further requests are refused with status 429."""
    connections: Positive | Literal["auto"] = "auto"
    """Maximum number of open connections of ``hexad serve``. ``auto``: as many as open files are allowed.
    Beyond the maximum, the connections that have waited longest for their clients are closed."""
    client_timeout: PositiveFloat = 30.0
    """Seconds that a client of ``hexad serve`` may take to send a request, to begin another one, or to accept
    a part of its answer."""
    kernels: Positive = 128
    """Maximum number of oneDNN kernels for matrix products that are cached on CPUs. There is one kernel per
    shape. A kernel takes about 0.2 MB in fp32."""


class Config(SettingsGroup):
    """The complete configuration: one tree, one YAML file."""

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
