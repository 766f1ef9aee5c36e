"""Wrong inputs of ``hexad train`` and ``hexad config``: see :mod:`.cases`."""

TRAIN = (
    # commands, options, files
    ("trian run.yaml", "no such command 'trian' (did you mean 'train'?)"),
    ("fit run.yaml", "no such command 'fit'; known: demo, train"),
    ("train", "Missing argument 'run.yaml'"),
    ("train run.yaml --steps 3", "No such option '--steps'"),
    ("train run.yaml --nproc 0", "Invalid value for '--nproc': 0 is not in the range x>=1"),
    ("train run.yaml --nproc two", "'two' is not a valid integer"),
    ("train run.yaml --nproc", "Option '--nproc' requires an argument."),
    ("train run.yaml steps", "found 'steps', expected a setting name=value"),
    ("train run.yaml =3", "found '=3', expected a setting name=value"),
    ("train run.yaml other.yaml", "found 'other.yaml', expected a setting"),
    ("train no.yaml", "no.yaml: no such configuration file"),
    ("train folder", "folder: cannot be read: "),
    ("train latin.yaml", "latin.yaml: cannot be read: 'utf-8' codec"),
    ("train list.yaml", "list.yaml: found a list, expected a mapping"),
    ("train word.yaml", "word.yaml: found a str, expected a mapping"),
    ("train tab.yaml", "tab.yaml, line 2, column 1: not valid YAML"),
    ("train twice.yaml", "key 'run' is given twice"),
    ("train open.yaml", "open.yaml, line "),
    ("train tag.yaml", "tag.yaml, line 1"),
    ("train alias.yaml", "alias.yaml, line 1"),
    ("train two.yaml", "two.yaml, line 2, column 1: not valid YAML: but found another document"),
    ("train dotted.yaml", "run.steps: unknown key; names with dots are for the command line"),
    ("train null-group.yaml", "run: found None, expected settings such as"),
    ("train number-group.yaml", "model: found 3, expected settings such as"),
    ("train number-key.yaml", "3: unknown key; known here: run, model"),
    ("train empty.yaml", "data.train: found null"),
    ("train text.txt", "text.txt: found a str"),
    ("train run.yaml 'run.steps=[3'", "override run.steps"),
    ("train run.yaml run.steps.more=3", "run.steps.more: 'steps' is a value"),
    # keys
    ("train run.yaml modle.layers=2", "modle: unknown key (did you mean 'model'?)"),
    ("train run.yaml model.layer=2", "model.layer: unknown key (did you mean 'model.layers'?)"),
    ("train run.yaml model.lr=2", "did you mean 'optimizer.lr'?"),
    ("train run.yaml lr=2", "did you mean 'optimizer.lr'?"),
    ("train run.yaml parallel.tp=2", "parallel.tp: unknown key"),
    ("train run.yaml model.lora.r=2", "model.lora.r: unknown key"),
    ("train run.yaml log.profile.step=2", "log.profile.step: unknown key"),
    # types and ranges
    ("train run.yaml run.steps=0", "run.steps: found 0, expected greater than or equal to 1"),
    ("train run.yaml run.steps=-5", "run.steps: found -5, expected greater than or equal to 1"),
    ("train run.yaml run.steps=1.5", "run.steps: found 1.5, expected an integer"),
    ("train run.yaml run.steps=1e23", "run.steps: found '1e23', expected an integer"),
    ("train run.yaml run.steps=true", "run.steps: found True, expected a number"),
    ("train run.yaml run.steps=many", "run.steps: found 'many', expected an integer"),
    ("train run.yaml run.steps=null", "run.steps: found None"),
    ("train run.yaml run.seed=-1", "run.seed: found -1, expected greater than or equal to 0"),
    (
        "train run.yaml run.seed=99999999999999999999",
        "run.seed: found 99999999999999999999, expected less than 9223372036854776000",
    ),
    ("train run.yaml 'run.dir='", "run.dir: found None"),
    ("train run.yaml \"run.dir=''\"", "run.dir: found '', expected a name"),
    ("train run.yaml run.dir=3", "run.dir: found 3, expected a string"),
    ("train run.yaml run.device=gpu", "run.device: found 'gpu', expected 'auto', 'cpu' or 'cuda'"),
    ("train run.yaml run.device=cuda", "run.device: found cuda, but no GPU is visible"),
    ("train run.yaml run.timeout=0", "run.timeout: found 0, expected greater than 0"),
    ("train run.yaml run.timeout=.nan", "run.timeout: found nan, expected greater than 0"),
    ("train run.yaml run.compile=fast", "run.compile: found 'fast', expected 'auto'"),
    ("train run.yaml run.deterministic=maybe", "run.deterministic: found 'maybe', expected a boolean"),
    ("train run.yaml model.layers=0", "model.layers: found 0, expected greater than or equal to 1"),
    (
        "train run.yaml model.layers=1000000000000",
        "model.layers: found 1000000000000, expected less than or equal to 1024",
    ),
    ("train run.yaml model.hidden=1e99", "model.hidden: found '1e99', expected an integer"),
    ("train run.yaml model.hidden=15 model.heads=4", "model.hidden: 15 is not divisible by model.heads 4"),
    ("train run.yaml model.heads=0", "model.heads: found 0, expected greater than or equal to 1"),
    ("train run.yaml model.kv_heads=3", "model.kv_heads: found 3, which does not divide model.heads 4"),
    ("train run.yaml model.head_dim=3", "model.head_dim: found 3, expected an even number"),
    ("train run.yaml model.mla.kv_rank=8", "but llama has no latent attention; remove it, or use"),
    ("train run.yaml model.mla.kv_rnk=8", "model.mla.kv_rnk: unknown key (did you mean"),
    ("train run.yaml model.family=deepseek_v3", "model.mla: found null, but deepseek_v3 has latent"),
    *(
        (f"train run.yaml model.family=deepseek_v3 model.kv_heads=4 model.mla={{}} {setting}", says)
        for setting, says in (
            ("model.kv_heads=2", "model.kv_heads: found 2, expected 4 with model.mla"),
            ("model.head_dim=64", "model.head_dim: found 64, expected 192 with model.mla"),
            ("model.rotary_fraction=0.5", "model.rotary_fraction: found 0.5, expected 1.0 with model.mla"),
            ("model.qk_norm=true", "model.qk_norm: found True, expected False with model.mla"),
            ("model.out_bias=true", "model.out_bias: found True, expected False with model.mla"),
            ("model.mla.rope_dim=3", "model.mla.rope_dim: found 3, expected an even number"),
            ("model.mla.q_rank=0", "model.mla.q_rank: found 0, expected greater than or equal to 1"),
        )
    ),
    ("train run.yaml model.family=lama", "model.family: found 'lama', expected 'llama'"),
    (
        "train run.yaml model.family=mixtral",
        "model.moe: found null, but mixtral has experts; set {experts, top_k, ffn_hidden, ...}",
    ),
    (
        "train run.yaml model.family=gpt2 model.qk_norm=true",
        "model.qk_norm: gpt2 has no rotary positions and no query/key norm",
    ),
    ("train run.yaml model.preset=llama", "model.preset: unknown preset 'llama' (did you mean 'llama3-8b'?)"),
    ("train run.yaml model.vocab=100", "model.vocab: found 100, less than the tokenizer's 257"),
    ("train run.yaml model.vocab=big", "model.vocab: found 'big', expected an integer"),
    ("train run.yaml model.max_positions=8", "data.sequence: found 16, more than the model's 8 positions"),
    (
        "train run.yaml model.rotary_fraction=0.1",
        "model.rotary_fraction: found 0.1, which makes 0 of a head's 4 elements",
    ),
    (
        "train run.yaml model.rotary_fraction=2",
        "model.rotary_fraction: found 2, expected less than or equal to 1",
    ),
    ("train run.yaml model.dropout=1", "model.dropout: found 1, expected less than 1"),
    ("train run.yaml model.norm_eps=0", "model.norm_eps: found 0, expected greater than 0"),
    ("train run.yaml model.init_std=-1", "model.init_std: found -1, expected greater than 0"),
    ("train run.yaml model.moe.expert=8", "model.moe.expert: unknown key"),
    ("train run.yaml model.moe.experts=0", "model.moe.experts: found 0, expected greater than or equal"),
    (
        "train run.yaml 'model.moe={experts: 4, top_k: 5}'",
        "model.moe.top_k: found 5, more than the 4 experts; use at most 4",
    ),
    (
        "train run.yaml 'model.moe={experts: 8, groups: 4, top_groups: 2, top_k: 5}'",
        "model.moe.top_k: found 5, more than the 4 experts of 2 of 4 groups; use at most 4",
    ),
    (
        "train run.yaml 'model.moe={experts: 8, groups: 3}'",
        "model.moe.groups: found 3, which does not divide model.moe.experts 8; use 1, 2, 4 or 8",
    ),
    (
        "train run.yaml 'model.moe={experts: 8, first_dense: 9}'",
        "model.moe.first_dense: found 9 with every 1: none of the 1 layers has experts",
    ),
    (
        "train run.yaml 'model.moe={layers: [0, 4]}'",
        "model.moe.layers: found 4; expected numbers from 0 to 0",
    ),
    ("train run.yaml 'model.moe={layers: []}'", "model.moe.layers: found [], no layer; use numbers"),
    (
        "train run.yaml 'model.moe={score: sigmoid}' 'model.train=[router.bias]'",
        "model.train: found 'router.bias', which matches layers.0.ffn.router.bias, changed by "
        "model.moe.bias_rate, not trained",
    ),
    (
        "train run.yaml 'model.moe={bias_rate: 0.1}'",
        "model.moe.bias_rate: found 0.1 with score softmax_topk; it needs score: sigmoid, or 0",
    ),
    (
        "train run.yaml 'model.moe={capacity_factor: 2}' precision.exact=true precision.dtype=fp32",
        "model.moe.capacity_factor: found 2.0 with precision.exact",
    ),
    (
        "train run.yaml 'model.moe={dispatcher: all_gather}' precision.exact=true precision.dtype=fp32",
        "model.moe.dispatcher: found all_gather with precision.exact",
    ),
    (
        "train run.yaml 'model.moe={dispatcher: deepep}' precision.exact=true precision.dtype=fp32",
        "model.moe.dispatcher: found deepep with precision.exact: it adds results rank by rank; use auto or",
    ),
    (
        "train run.yaml 'model.moe={dispatcher: nvshmem}' parallel.expert=2 --nproc 2",
        "model.moe.dispatcher: found nvshmem, which needs a CUDA device, not run.device cpu; use auto, ",
    ),
    (
        "train run.yaml 'model.moe={dispatcher: deepep}' parallel.expert=2 run.device=auto "
        "precision.dtype=bf16 --nproc 2",
        "model.moe.dispatcher: found deepep, which needs a CUDA device on this machine; use auto",
    ),
    ("train run.yaml 'model.moe={experts: 8}' run.compile=full", "run.compile: found full with model.moe"),
    (
        "train run.yaml 'model.moe={experts: 5}' parallel.expert=2 --nproc 2",
        "parallel.expert: found 2, which does not divide model.moe.experts 5; use 1 or 5",
    ),
    (
        "train run.yaml 'model.moe={experts: 4}' parallel.expert=4 --nproc 2",
        "parallel.expert: found 4, but world 2 is not divisible by",
    ),
    (
        "train run.yaml model.rope_scaling.factor=0",
        "model.rope_scaling.factor: found 0, expected greater than 0",
    ),
    (
        "train run.yaml model.rope_scaling.type=yarn model.rope_scaling.low_freq_factor=2",
        "model.rope_scaling.low_freq_factor: found 2.0, which type yarn does not use; remove it",
    ),
    (
        "train run.yaml model.rope_scaling.type=yarn model.rope_scaling.beta_fast=0.9",
        "model.rope_scaling.beta_fast: found 0.9, expected at least beta_slow 1.0",
    ),
    (
        "train run.yaml model.rope_scaling.type=longrope model.rope_scaling.short_factors=[1]",
        "model.rope_scaling.short_factors: found 1 number, expected ",
    ),
    (
        "train run.yaml model.rope_scaling.type=ntk",
        "model.rope_scaling.type: found 'ntk', expected 'llama3', 'yarn', 'longrope', 'linear' or 'dynamic'",
    ),
    (
        "train run.yaml model.rope_scaling.high_freq_factor=0.5",
        "model.rope_scaling.high_freq_factor: found 0.5, expected more than low_freq_factor 1.0",
    ),
    ("train run.yaml model.vocab=1000000000 model.hidden=16777216", "memory: a rank cannot allocate", True),
    (
        "train run.yaml model.sliding_window=0",
        "model.sliding_window: found 0, expected greater than or equal to 1",
    ),
    ("train run.yaml optimizer.lr=fast", "optimizer.lr: found 'fast', expected a number"),
    ("train run.yaml optimizer.lr=-1", "optimizer.lr: found -1, expected greater than 0"),
    ("train run.yaml optimizer.lr=.inf", "optimizer.lr: found inf, expected a finite number"),
    (
        "train run.yaml optimizer.name=adam",
        "optimizer.name: found 'adam', expected 'adamw' (did you mean 'adamw'?)",
    ),
    ("train run.yaml optimizer.betas=0.9", "optimizer.betas: found 0.9, expected [beta1, beta2]"),
    ("train run.yaml 'optimizer.betas=[0.9]'", "optimizer.betas: found [0.9], expected [beta1, beta2]"),
    ("train run.yaml 'optimizer.betas=[0.9, 1.5]'", "optimizer.betas[1]: found 1.5, expected less than 1"),
    (
        "train run.yaml optimizer.weight_decay=-1",
        "optimizer.weight_decay: found -1, expected greater than or equal to 0",
    ),
    ("train run.yaml lr_schedule.kind=cosin", "lr_schedule.kind: found 'cosin', expected 'constant'"),
    ("train run.yaml lr_schedule.min_lr=1", "lr_schedule.min_lr: found 1.0, more than optimizer.lr"),
    ("train run.yaml optimizer.decoupled_lr=0", "optimizer.decoupled_lr: found 0, expected greater than 0"),
    (
        "train run.yaml optimizer.decoupled_lr=1e-3 lr_schedule.decoupled_min_lr=1",
        "lr_schedule.decoupled_min_lr: found 1.0, more than optimizer.decoupled_lr 0.001",
    ),
    (
        "train run.yaml lr_schedule.decoupled_min_lr=1e-4",
        "lr_schedule.decoupled_min_lr: found 0.0001 without optimizer.decoupled_lr; set that, or remove it",
    ),
    (
        "train run.yaml optimizer.decoupled_lr=1e-3 'model.lora={rank: 2}'",
        "optimizer.decoupled_lr: found 0.001, but neither embedding nor output head is trained; remove it",
    ),
    ("train run.yaml lr_schedule.decay_steps=1", "lr_schedule.decay_steps: found 1, expected more than"),
    (
        "train run.yaml lr_schedule.warmup=-1",
        "lr_schedule.warmup: found -1, expected greater than or equal to 0",
    ),
    ("train run.yaml precision.dtype=bf61", "precision.dtype: found 'bf61', expected 'auto'"),
    (
        "train run.yaml precision.dtype=fp8",
        "precision.dtype: found fp8, but this device (cpu) has no fp8 matrix units",
    ),
    ("train run.yaml precision.reduce=bf16", "precision.reduce: found bf16 with precision.dtype fp64"),
    (
        "train run.yaml precision.fp8_weight_gradients=true",
        "precision.fp8_weight_gradients: found true with precision.dtype fp64; it needs dtype fp8: remove it",
    ),
    (
        "train run.yaml precision.accumulate=bf16",
        "precision.accumulate: found bf16 with precision.reduce fp32; it needs reduce: bf16, or use fp32",
    ),
    (
        "train run.yaml precision.loss_scale=8",
        "precision.loss_scale: found 8.0 with precision.dtype fp64; only fp16 scales its loss",
    ),
    ("train run.yaml memory.recompute=some", "memory.recompute: found 'some', expected 'none'"),
    (
        "train run.yaml memory.recompute_layers=2",
        "memory.recompute_layers: found 2 with memory.recompute none; remove it, or set recompute: selective",
    ),
    ("train run.yaml memory.offload=disk", "memory.offload: found 'disk', expected 'none' or 'optimizer'"),
    ("train run.yaml log.every=0", "log.every: found 0, expected greater than or equal to 1"),
    ("train run.yaml log.wandb=project", "log.wandb: needs"),
    ("train run.yaml faults.spike=1", "faults.spike: found 1, expected greater than 1"),
    ("train run.yaml faults.spike_window=9", "faults.spike_window: found 9 with faults.spike null"),
    ("train run.yaml faults.not_finite=ignore", "faults.not_finite: found 'ignore', expected 'stop'"),
    # batch and layout
    ("train run.yaml batch.micro=3", "batch.global: found 4"),
    ("train run.yaml batch.micro=0", "batch.micro: found 0, expected greater than or equal to 1"),
    ("train run.yaml batch.global=0", "batch.global: found 0, expected greater than or equal to 1"),
    (
        "train run.yaml batch.global=100000000000",
        "batch.global: found 100000000000, expected less than or equal to 16777216",
    ),
    ("train run.yaml batch.size=4", "batch.size: unknown key"),
    (
        "train run.yaml parallel.tensor=3",
        "parallel.tensor: found 3, which does not divide model.heads 4 (each rank takes whole heads)",
    ),
    ("train run.yaml parallel.tensor=0", "parallel.tensor: found 0, expected greater than or equal to 1"),
    ("train run.yaml parallel.tensor=2 --nproc 3", "parallel.tensor: found 2, but world 3"),
    ("train run.yaml parallel.data=4 --nproc 2", "parallel.data: found 4, but world 2"),
    ("train run.yaml parallel.data=3", "batch.global: found 4"),
    (
        "train run.yaml batch.ramp=[4,2,9]",
        "batch.ramp: found [4, 2, 9], whose start is not below batch.global 4",
    ),
    ("train run.yaml batch.ramp=[1,2,9]", "batch.ramp: found [1, 2, 9], whose increment 2 does not divide 3"),
    (
        "train --dry-run run.yaml batch.ramp=[2,1,9] parallel.data=2",
        "batch.ramp: found [2, 1, 9], expected a start and an increment that are multiples of batch.micro",
    ),
    (
        "train run.yaml batch.ramp=[1,1]",
        "batch.ramp: found [1, 1], expected [start, increment, samples] or null",
    ),
    (
        "train run.yaml parallel.tensor=2 data.sequence=15",
        "parallel.sequence: batch.micro * data.sequence = 15 tokens do not divide by parallel.tensor 2",
    ),
    ("train run.yaml parallel.context=2 --nproc 1", "parallel.context: found 2, but world 1"),
    ("train run.yaml parallel.context=3 --nproc 3", "data.sequence: found 16, which does not divide"),
    ("train run.yaml parallel.context=0", "parallel.context: found 0, expected greater than or equal to 1"),
    ("train run.yaml parallel.context=4 --nproc 2", "parallel.context: found 4, but world 2"),
    (
        "train run.yaml parallel.context=2 parallel.context_ulysses=2 --nproc 2",
        "parallel.context_ulysses: found 2 with parallel.context_method ring",
    ),
    (
        "train run.yaml parallel.context=8 parallel.context_method=ulysses --nproc 8",
        "parallel.context: found 8 with parallel.context_method ulysses",
    ),
    (
        "train run.yaml parallel.context=4 parallel.context_method=ulysses_ring parallel.context_ulysses=3 "
        "--nproc 4",
        "parallel.context_ulysses: found 3, which does not divide parallel.context 4",
    ),
    (
        "train run.yaml parallel.context=2 parallel.context_method=ulysses parallel.context_balance=work "
        "--nproc 2",
        "parallel.context_balance: found work with parallel.context_method ulysses",
    ),
    (
        "train run.yaml parallel.context_balance=even",
        "parallel.context_balance: found 'even', expected 'auto'",
    ),
    (
        "train run.yaml parallel.context=2 run.compile=full --nproc 2",
        "run.compile: found full with parallel.c",
    ),
    (
        "train run.yaml parallel.context=2 parallel.tensor=2 data.sequence=6 batch.micro=1 --nproc 4",
        "parallel.sequence: batch.micro * data.sequence / parallel.context = 3 tokens",
    ),
    (
        "train run.yaml parallel.context=2 parallel.zero=1 parallel.replicas=3 --nproc 2",
        "data x context degree",
    ),
    (
        "config check run.yaml parallel.context=2 precision.dtype=fp8 model.hidden=64 model.heads=2 "
        "model.kv_heads=2 model.ffn_hidden=64 batch.micro=1 --elsewhere",
        "batch.micro: found 1 (it x data.sequence 16 / parallel.context 2 = 8)",
    ),
    ("config check run.yaml parallel.context=3", "data.sequence: found 16"),
    ("show memory run.yaml parallel.context=3", "data.sequence: found 16"),
    (
        "train run.yaml parallel.context_method=ulises",
        "parallel.context_method: found 'ulises', expected 'ring'",
    ),
    ("train run.yaml parallel.expert=2", "2, but the model has no experts; set model.moe, or 1"),
    ("train run.yaml parallel.expert=2 --nproc 2", "parallel.expert: found 2, but the model has no experts"),
    (
        "train run.yaml parallel.expert_tensor=2",
        "parallel.expert_tensor: found 2, but the model has no experts",
    ),
    ("config check run.yaml parallel.expert=2", "parallel.expert: found 2, but the model has no experts"),
    ("config init new.yaml parallel.expert=2", "parallel.expert: found 2, but the model has no experts"),
    (
        "show memory run.yaml parallel.expert=2 --world 4",
        "parallel.expert: found 2, but the model has no experts",
    ),
    ("show schedule run.yaml parallel.expert=2", "parallel.expert: found 2, but the model has no experts"),
    ("train run.yaml parallel.pipeline=4", "parallel.pipeline: found 4 stages"),
    (
        "train run.yaml parallel.pipeline=2 'parallel.split=[1, 1]'",
        "parallel.split: found [1, 1]: its sum is 2",
    ),
    (
        "train run.yaml parallel.pipeline=2 'parallel.split=[a, b]'",
        "parallel.split[0]: found 'a', expected an integer",
    ),
    ("train run.yaml parallel.split=equal", "parallel.split: found 'equal', expected 'cost'"),
    ("train run.yaml parallel.schedule=zbv", "parallel.schedule: found 'zbv', expected 'gpipe'"),
    ("train run.yaml parallel.schedule=no.json", "parallel.schedule: no.json: cannot be read"),
    (
        "train run.yaml parallel.schedule=broken.json",
        "parallel.schedule: broken.json: cannot be read as a schedule",
    ),
    (
        "train run.yaml parallel.schedule=schedule.json",
        "parallel.schedule: schedule.json: expected an object with 'ranks': a list of actions for each",
    ),
    ("train run.yaml parallel.virtual_stages=2", "parallel.virtual_stages: 1f1b has one stage per rank"),
    (
        "train run.yaml parallel.schedule_group=2",
        "parallel.schedule_group: found 2 with parallel.schedule 1f1b; only interleaved uses it: remove it",
    ),
    (
        "train run.yaml parallel.schedule_memory=2",
        "parallel.schedule_memory: found 2.0 with parallel.schedule 1f1b; only auto uses it: remove it",
    ),
    ("train run.yaml parallel.zero=4", "parallel.zero: found 4, expected less than or equal to 3"),
    ("train run.yaml parallel.replicas=2", "parallel.replicas: found 2 with parallel.zero 0"),
    (
        "train run.yaml parallel.zero=1 parallel.data=4 parallel.replicas=3",
        "parallel.replicas: found 3, which does not divide the data degree 4",
    ),
    (
        "train run.yaml parallel.order=tensor-dta",
        "parallel.order: found 'tensor-dta' with unknown axis 'dta' (did you mean 'data'?)",
    ),
    ("train run.yaml parallel.bucket_mb=0", "parallel.bucket_mb: found 0, expected greater than 0"),
    ("train run.yaml run.compile=full parallel.tensor=2", "run.compile: found full with parallel.tensor 2"),
    (
        "train run.yaml run.compile=full memory.recompute=full",
        "run.compile: found full with memory.recompute",
    ),
    (
        "train run.yaml run.compile=full 'memory.recompute_parts=[norms, mla_up]'",
        "run.compile: found full with memory.recompute_parts norms mla_up",
    ),
    (
        "train run.yaml 'memory.recompute_parts=[norms, norms]'",
        "memory.recompute_parts: found ['norms', 'norms'], expected each part once",
    ),
    ("train run.yaml run.compile=full data.documents=isolate", "run.compile: found full with isolated"),
    # data
    ("train run.yaml data.train=null", "data.train: found null, expected a .bin/.idx prefix or [[weight"),
    ("train run.yaml data.train=no/such", "data.train: no/such.idx: no such file"),
    ("train run.yaml data.train=data.bin", "data.train: data.bin: expected a prefix"),
    ("train run.yaml data.train=words.txt", "data.train: words.txt.idx: no such file"),
    ("train run.yaml \"data.train=''\"", "data.train: found '', expected a name"),
    ("train run.yaml 'data.train=[]'", "data.train: found [], expected a prefix or [[weight"),
    ("train run.yaml 'data.train=[[data, 1]]'", "data.train[0][0]: found 'data', expected a number"),
    ("train run.yaml 'data.train=[[0, data]]'", "data.train[0][0]: found 0, expected greater than 0"),
    ("train run.yaml 'data.train=[[1, no/such]]'", "data.train: no/such.idx"),
    ("train run.yaml data.train=3", "data.train: found 3, expected a prefix or [[weight"),
    ("train run.yaml data.train=cut-bin", "data.train: cut-bin.bin: truncated:"),
    ("train run.yaml data.train=cut-idx", "data.train: cut-idx.idx: 31 bytes, truncated inside the header"),
    ("train run.yaml data.train=no-bin", "data.train: no-bin.bin: no such file"),
    ("train run.yaml data.train=no-idx", "data.train: no-idx.idx: no such file"),
    ("train run.yaml data.train=bad-idx", "data.train: bad-idx.idx: starts with b'no indexn'"),
    (
        "train run.yaml data.train=empty-idx",
        "data.train: empty-idx.idx: starts with b'', expected b'MMIDIDX\\x00\\x00'",
    ),
    ("train run.yaml data.train=cut-mask", "data.train: cut-mask.mask: truncated:"),
    (
        "train run.yaml data.train=bad-mask",
        "data.train: bad-mask.mask: not a loss mask: expected b'HEXMASK\\x00' and a header",
    ),
    (
        "train run.yaml data.train=other-mask",
        "data.train: other-mask.mask: the loss mask of other data than other-mask.bin",
    ),
    (
        "train run.yaml data.train=chats",
        "data.train: chats: 9 of 9 documents are longer than data.sequence 16",
    ),
    (
        "train run.yaml 'data.train=[[1, chats], [1, other-chats]]' data.sequence=64",
        "data.train: found chats and other-chats",
    ),
    ("train run.yaml data.sequence=1000000", "data.train: data: holds 2654 tokens"),
    ("train run.yaml data.sequence=0", "data.sequence: found 0, expected greater than or equal to 1"),
    ("train run.yaml data.packing=pack", "data.packing: found 'pack', expected 'auto'"),
    ("train run.yaml data.too_long=cut", "data.too_long: found 'cut', expected 'refuse'"),
    (
        "train run.yaml data.documents=separate",
        "data.documents: found 'separate', expected 'join' or 'isolate' (did you mean 'isolate'?)",
    ),
    ("train run.yaml data.tokenizer=nope", "data.tokenizer: tokenizer 'nope': no such file"),
    (
        "train run.yaml data.tokenizer=folder",
        "data.tokenizer: tokenizer 'folder': the directory has no tokenizer.json",
    ),
    (
        "train run.yaml data.tokenizer=bad-tokenizer",
        "data.tokenizer: bad-tokenizer/tokenizer.json: not a Hugging Face tokenizer.json: EOF",
    ),
    (
        "train run.yaml data.tokenizer=words.txt",
        "data.tokenizer: tokenizer 'words.txt': unknown kind of file 'words.txt'",
    ),
    ("train run.yaml data.tokenizer=tok", "data.train: data was built with tokenizer byte"),
    ("train run.yaml validate.every=2", "data.validation: found no data"),
    ("train run.yaml validate.every=2 data.validation=no/such", "data.validation: no/such.idx: no such file"),
    (
        "train run.yaml validate.every=2 'data.validation={web: data, code: no/such}'",
        "data.validation.code: no/such.idx",
    ),
    (
        "train run.yaml validate.every=2 'data.validation={}'",
        "data.validation: found no data, but validate.every 2 turns evaluation on",
    ),
    ("train run.yaml 'data.validation={web: 3}'", "data.validation: found {'web': 3}, expected a prefix"),
    (
        "train run.yaml validate.every=2 data.validation=cut-idx",
        "data.validation: cut-idx.idx: 31 bytes, truncated inside the header",
    ),
    ("train run.yaml validate.every=-1", "validate.every: found -1, expected greater than or equal to 0"),
    ("train run.yaml validate.batches=0", "validate.batches: found 0, expected greater than or equal to 1"),
    # what is trained
    ("train run.yaml model.train=heads", "model.train: found 'heads', expected 'all' or [pattern"),
    ("train run.yaml 'model.train=[]'", "model.train: found [], which trains nothing"),
    ("train run.yaml 'model.train=[nothing]'", "model.train: found 'nothing', which matches no name"),
    ("train run.yaml 'model.train=[3]'", "model.train[0]: found 3, expected a string"),
    (
        "train run.yaml \"model.train=['layers.9']\"",
        "model.train: found 'layers.9', which matches no name (did you mean 'layers'?)",
    ),
    ("train run.yaml model.lora=8", "model.lora: found 8, expected settings such as rank"),
    ("train run.yaml model.lora.rank=0", "model.lora.rank: found 0, expected greater than or equal to 1"),
    ("train run.yaml model.lora.dropout=2", "model.lora.dropout: found 2, expected less than 1"),
    ("train run.yaml model.lora.alpha=-1", "model.lora.alpha: found -1, expected greater than 0"),
    (
        "train run.yaml model.lora.targets=q_proj",
        "model.lora.targets: found 'q_proj', expected 'all' or [pattern",
    ),
    (
        "train run.yaml 'model.lora.targets=[q_prj]'",
        "model.lora.targets: found 'q_prj', which matches no name (did you mean 'q_proj'?)",
    ),
    (
        "train run.yaml 'model.moe={experts: 4}' 'model.lora.targets=[router]'",
        "model.lora.targets: found 'router', which matches no name of a layer that can have adapters, only",
    ),
    (
        "train run.yaml model.family=mixtral 'model.moe={experts: 4}' 'model.train=[w1]'",
        "model.train: selects a part of layers.0.ffn.experts.gate_up, but not "
        "model.layers.0.block_sparse_moe.experts.0.w3.weight: the matrices of all experts",
    ),
    (
        "train run.yaml model.family=mixtral 'model.moe={experts: 4}' 'model.train=[experts.2]'",
        "model.train: selects a part of layers.0.ffn.experts.gate_up, but not "
        "model.layers.0.block_sparse_moe.experts.0.w1.weight: the matrices of all experts",
    ),
    ("train run.yaml 'model.lora.targets=[norm]'", "model.lora.targets: found 'norm', which matches no name"),
    ("train run.yaml 'model.lora.targets=[]'", "model.lora.targets: found [], which adapts nothing"),
    # where a run comes from and where it goes
    (
        "train run.yaml model.load=no/such",
        "model.load: no/such: neither a run nor a checkpoint: config.yaml is missing (a Hugging Face model",
    ),
    (
        "train run.yaml model.load=hf:no-such",
        "model.load: no-such: no such directory; expected a Hugging Face model with config.json",
    ),
    (
        "train run.yaml model.load=hf",
        "model.load: hf: neither a run nor a checkpoint: config.yaml is missing (a Hugging Face model is",
    ),
    (
        "train run.yaml model.load=hf:hf-no-config",
        "model.load: hf-no-config: not a Hugging Face model: config.json is missing",
    ),
    ("train run.yaml model.load=hf:hf-unknown", 'model.load: hf-unknown/config.json: model_type: found "t5"'),
    (
        "train run.yaml model.load=no-manifest",
        "model.load: no-manifest: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    (
        "train run.yaml model.load=folder",
        "model.load: folder: neither a run nor a checkpoint: config.yaml is missing (a Hugging Face model is",
    ),
    (
        "train run.yaml model.load=good model.hidden=32",
        "model.hidden: found 32, but good (model.load) has 16",
    ),
    (
        "train run.yaml checkpoint.load=no/such",
        "checkpoint.load: no/such: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    (
        "train run.yaml checkpoint.load=cut-tensors",
        "checkpoint cut-tensors: damaged: rank-00000.safetensors has",
    ),
    (
        "train run.yaml checkpoint.load=good model.hidden=32",
        "model.hidden: found 32, but checkpoint good has 16",
    ),
    (
        "train run.yaml checkpoint.load=hf:hf",
        "checkpoint.load: hf:hf: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    (
        "train run.yaml checkpoint.resume=must",
        "checkpoint.resume: found must, but new/checkpoints holds no complete checkpoint",
    ),
    ("train run.yaml checkpoint.resume=yes", "checkpoint.resume: found True"),
    (
        "train changed.yaml checkpoint.resume=never",
        "checkpoint.resume: found never, but changed/checkpoints holds step-00000002",
    ),
    (
        "train changed.yaml model.hidden=32",
        "changed/checkpoints/step-00000002 has 16; another run needs another run.dir",
    ),
    (
        "train damaged.yaml",
        "checkpoint damaged/checkpoints/step-00000002: damaged: rank-00000.safetensors has",
    ),
    ("train run.yaml checkpoint.every=-1", "checkpoint.every: found -1, expected greater than or equal to 0"),
    ("train run.yaml checkpoint.keep=0", "checkpoint.keep: found 0, expected greater than or equal to 1"),
    ("train run.yaml 'run.dir=a file'", "run.dir: cannot write to "),
    ("train run.yaml 'run.dir=a file/run'", "run.dir: cannot write to "),
    ("train run.yaml run.dir=/proc/run", "run.dir: cannot write to /proc/run"),
    # --dry-run
    ("train --dry-run no.yaml", "no.yaml: no such configuration file"),
    (
        "train --dry-run run.yaml parallel.tensor=3",
        "parallel.tensor: found 3, which does not divide model.heads 4 (each rank takes whole heads)",
    ),
    (
        "train --dry-run run.yaml data.train=cut-idx",
        "data.train: cut-idx.idx: 31 bytes, truncated inside the header",
    ),
    (
        "train --dry-run run.yaml data.tokenizer=bad-tokenizer",
        "data.tokenizer: bad-tokenizer/tokenizer.json: not a Hugging Face tokenizer.json: EOF",
    ),
    (
        "train --dry-run run.yaml model.vocab=100",
        "model.vocab: found 100, less than the tokenizer's 257 (byte)",
    ),
    ("train --dry-run run.yaml --nproc 3 parallel.tensor=2", "world 3"),
    ("train --dry-run --json run.yaml model.layer=2", "model.layer: unknown key"),
    (
        "train --dry-run run.yaml batch.global=16777216 parallel.pipeline=2",
        "batch.global: found 16777216, which makes 16777216 microbatches in a step on 2 stages",
    ),
)

ENVIRONMENT = (
    ("WORLD_SIZE=1 RANK=5 train run.yaml", "RANK: found 5, expected 0 to 0 (WORLD_SIZE 1)"),
    ("WORLD_SIZE=two RANK=0 train run.yaml", "WORLD_SIZE: found 'two', expected a number"),
    ("WORLD_SIZE=2 RANK=-1 train run.yaml", "RANK: found -1, expected 0 to 1 (WORLD_SIZE 2)"),
    ("WORLD_SIZE= RANK=0 train run.yaml", "WORLD_SIZE: found '', expected a number set by the launcher"),
    ("WORLD_SIZE=0 RANK=0 train run.yaml", "WORLD_SIZE: found 0, expected 1 or more"),
    ("WORLD_SIZE=4 RANK=0 train run.yaml --nproc 2", "--nproc: cannot be given under torchrun or SLURM"),
    ("WORLD_SIZE=3 RANK=0 train run.yaml parallel.tensor=2", "parallel.tensor: found 2, but world 3"),
    ("TORCHELASTIC_RUN_ID=x train run.yaml", "RANK: found None"),
    (
        "WORLD_SIZE=2 RANK=0 LOCAL_RANK=x train run.yaml",
        "LOCAL_RANK: found 'x', expected a number set by the launcher",
    ),
    (
        "WORLD_SIZE=2 RANK=0 MASTER_PORT=x train run.yaml parallel.data=2",
        "MASTER_PORT: found 'x', expected a number set by the launcher",
    ),
    (
        "WORLD_SIZE=2 RANK=0 MASTER_PORT=99999 train run.yaml parallel.data=2",
        "MASTER_PORT: found 99999, expected 1 to 65535",
    ),
    (
        "SLURM_PROCID=0 SLURM_NTASKS=many train run.yaml",
        "SLURM_NTASKS: found 'many', expected a number set by the launcher",
    ),
    ("SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_NODEID=0 train run.yaml", "SLURM_LOCALID: found None"),
    (
        "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_TASKS_PER_NODE=x train run.yaml",
        "SLURM_TASKS_PER_NODE: found 'x', expected a form such as 4(x2),3",
    ),
    (
        "WORLD_SIZE=2 RANK=0 MASTER_PORT=21739 train run.yaml run.timeout=0.5",
        "1 of 2 ranks have joined",
        True,
    ),
    ("WORLD_SIZE=2 RANK=1 MASTER_PORT=21741 train run.yaml run.timeout=0.5", "rendezvous at "),
    (
        "WORLD_SIZE=2 RANK=1 MASTER_ADDR=no.invalid train run.yaml run.timeout=0.5",
        "rendezvous at no.invalid:29500 failed (0 s): Name or service not known",
    ),
)

CONFIG = (
    ("config chek run.yaml", "No such command 'chek'"),
    ("config check", "Missing argument 'run.yaml'"),
    ("config check no.yaml", "no.yaml: no such configuration file"),
    ("config check dotted.yaml", "run.steps: unknown key"),
    ("config check null-group.yaml", "run: found None"),
    ("config check run.yaml 'run.dir=a file'", "run.dir: cannot write to a file: a file is a file"),
    ("config check run.yaml 'run.dir=a file/run'", "run.dir: cannot write to a file/run: a file is a file"),
    ("config check changed.yaml model.hidden=32", "model.hidden: found 32, but checkpoint"),
    ("config check run.yaml run.dir=new checkpoint.load=no/such", "checkpoint.load: no/such: neither a"),
    ("config check run.yaml run.dir=new checkpoint.resume=must", "checkpoint.resume: found must, but"),
    ("config check run.yaml --world 0", "Invalid value for '--world': 0 is not in the range x>=1"),
    (
        "config check run.yaml --world 3 parallel.tensor=2",
        "parallel.tensor: found 2, but world 3 is not divisible by tensor 2 x context 1 x pipeline 1 = 2",
    ),
    ("config check run.yaml run.device=cuda", "run.device: found cuda, but no GPU is visible"),
    ("config check run.yaml \"data.train=''\"", "data.train: found '', expected a name"),
    ("config check run.yaml log.wandb=project", "log.wandb: needs"),
    ("config check run.yaml model.preset=gpt2 model.family=llama", "model.family: found 'llama', but"),
    ("config check run.yaml data.train=no/such", "data.train: no/such.idx: no such file"),
    (
        "config check run.yaml data.train=cut-idx",
        "data.train: cut-idx.idx: 31 bytes, truncated inside the header",
    ),
    (
        "config check run.yaml data.tokenizer=nope",
        "data.tokenizer: tokenizer 'nope': no such file or directory",
    ),
    ("config check run.yaml validate.every=2", "data.validation: found no data"),
    ("config check run.yaml run.steps=1e23", "run.steps: found '1e23', expected an integer"),
    (
        "config check run.yaml model.layers=1000000000000",
        "model.layers: found 1000000000000, expected less than or equal to 1024",
    ),
    (
        "config check run.yaml 'model.moe={dispatcher: deepep}' parallel.expert=2 model.hidden=32 "
        "run.device=auto precision.dtype=bf16",
        "model.moe.dispatcher: found deepep, which needs a CUDA device on this machine",
    ),
    ("config check run.yaml 'model.train=[nothing]'", "model.train: found 'nothing', which matches no name"),
    (
        "config check run.yaml 'model.lora.targets=[q_prj]'",
        "model.lora.targets: found 'q_prj', which matches no name (did you mean 'q_proj'?)",
    ),
    (
        "config check run.yaml model.load=hf:no-such",
        "model.load: no-such: no such directory; expected a Hugging Face model with config.json",
    ),
    ("config show no.yaml", "no.yaml: no such configuration file"),
    ("config show run.yaml modle.layers=2", "modle: unknown key"),
    ("config show run.yaml model.preset=gpt5", "model.preset: unknown preset 'gpt5'"),
    ("config show tab.yaml", "tab.yaml, line 2"),
    ("config init run.yaml", "run.yaml exists"),
    ("config init new.yaml --preset gpt5", "unknown preset 'gpt5'"),
    ("config init new.yaml --nproc 0", "Invalid value for '--nproc': 0 is not in the range x>=1"),
    ("config init new.yaml --nproc 3 parallel.tensor=2", "parallel.tensor: found 2, but world 3"),
    ("config init 'a file/new.yaml'", "a file/new.yaml cannot be written"),
    ("config init new.yaml model.layer=2", "model.layer: unknown key"),
    ("config init new.yaml --data ''", "data.train: found ''"),
    ("config presets llama", "Got unexpected extra argument (llama) (see 'hexad config presets --help')"),
)
