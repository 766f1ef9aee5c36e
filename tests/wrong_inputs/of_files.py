"""Names, odd YAML and JSON, and damaged files: see :mod:`.cases`."""

LONG = "a" * 260
FILES = (
    # YAML
    (
        "config check run.yaml 'run.steps=!!int x'",
        "override run.steps: not valid YAML: invalid literal for int",
    ),
    ("config check run.yaml 'run.dir=!!timestamp 2024-13-45'", "not valid YAML: month must be in 1..12"),
    (f"config check run.yaml run.steps={'9' * 500}", "999, expected less than or equal to 1000000000"),
    (
        f"config check run.yaml run.steps={'9' * 5000}",
        "override run.steps: not valid YAML: Exceeds the limit",
    ),
    ("config check hex.yaml", "hex.yaml: not valid YAML: Exceeds the limit of 20,000 characters of a number"),
    ("config check binary.yaml", "binary.yaml: not valid YAML: Exceeds the limit (4300 digits) for integer"),
    ("config check base-60.yaml", "not valid YAML: Exceeds the limit of 20,000 characters of a number"),
    ("config check long.yaml", ", expected an integer"),
    ("config check large.yaml", "large.yaml: cannot be read: larger than 4,194,304 bytes"),
    (
        "config check laughs.yaml",
        "not valid YAML: its aliases stand for more than 200,000 values",
    ),
    (
        "config check merges.yaml",
        "not valid YAML: its aliases stand for more than 200,000 values",
    ),
    (
        "config check run.yaml 'run.steps=[&a [1, 1], &b [*a, *a], &c [*b, *b], *c]'",
        "[[[1, 1], [1, 1]], [[1, 1], [1, 1]]]], expected an integer",
    ),
    (f"config check run.yaml run.steps=0x{'f' * 30_000}", "override run.steps: not valid YAML: Exceeds the"),
    (f"config check run.yaml run.{'x' * 90_000}=1", "xxx: unknown key; known here: dir, seed"),
    ("config check deep.yaml", "deep.yaml: not valid YAML: nested too deeply"),
    ("config check self.yaml", "run.steps: found {'steps': {'steps': {...}}}, expected an integer"),
    ("config check switch.yaml", "on: unknown key; known here: run, model"),
    ("config check merge.yaml", "base: unknown key; known here: run"),
    ("config check control.yaml", "control.yaml: not valid YAML: unacceptable character #x0001"),
    ("config check run.yaml run.steps=1:30", "run.steps: found '1:30', expected an integer"),
    ("config check run.yaml run..steps=3", "found 'run..steps=3', expected a setting name=value"),
    ("config check run.yaml .=3", "found '.=3', expected a setting name=value"),
    ("config check run.yaml 'run.steps=!!binary aGk='", "run.steps: found b'hi', expected an integer"),
    ("config check run.yaml run.steps=no", "run.steps: found False, expected a number, not true or false"),
    (
        "config check run.yaml run.timeout=1e300",
        "run.timeout: found '1e300', expected less than or equal to 1",
    ),
    (
        "config check run.yaml precision.dtype=fp16 precision.loss_scale=1e39",
        "precision.loss_scale: found '1e39', expected ",
    ),
    # names
    ("train run.yaml 'run.dir=\"a\\0b\"'", "run.dir: found 'a\\x00b', expected a name without NUL"),
    (
        "train run.yaml 'run.dir=~/run'",
        "run.dir: found '~/run', expected a name without '~', which only a shell",
    ),
    (
        f"config check run.yaml run.dir={LONG}",
        "expected a name without NUL, with at most 255 bytes between two",
    ),
    (f"config check run.yaml data.train={LONG}", "with at most 255 bytes between two '/'"),
    (f"config check run.yaml data.tokenizer={LONG}", "with at most 255 bytes between two '/'"),
    (f"config check run.yaml model.load=hf:{LONG}", "with at most 255 bytes between two '/'"),
    ("config check run.yaml model.load='\"hf:\"'", "model.load: found hf: without a name; write hf:DIR or"),
    (f"config check {LONG}.yaml", "cannot be read: File name too long"),
    (f"generate {LONG} --prompt a", "neither a checkpoint nor a run directory with a complete checkpoint"),
    (f"data build --input {LONG} --output out --tokenizer byte", "no such file or directory"),
    (
        f"data build --input words.txt --output out --tokenizer {LONG}",
        "no such file or directory; expected 'b",
    ),
    (f"data inspect {LONG}", ".idx: no such file; expected both"),
    # devices and pipes
    ("config check /dev/zero", "/dev/zero: cannot be read: found a device, pipe or socket, expected a file"),
    ("config check pipe", "pipe: cannot be read: found a device, pipe or socket, expected a file"),
    ("config check loop", "loop: cannot be read: Too many levels of symbolic links"),
    ("train run.yaml parallel.schedule=pipe.json", "pipe.json: cannot be read as a schedule: found a device"),
    (
        "data build --input chat.jsonl --output out --tokenizer byte --chat-template pipe",
        "pipe: cannot be read: found a device, pipe or socket, expected a file",
    ),
    ("generate trained --prompts pipe", "--prompts: pipe: cannot be read: found a device, pipe or socket"),
    ("config from-deepspeed pipe", "pipe: cannot be read: found a device, pipe or socket, expected a file"),
    # records
    ("data build --input nan.jsonl --output out --tokenizer byte", "'text' is a number (nan), expected text"),
    (
        "data build --input deep.jsonl --output out --tokenizer byte",
        "deep.jsonl:1: not valid JSON: maximum rec",
    ),
    ("data build --input utf16.jsonl --output out --tokenizer byte", "utf16.jsonl:1: byte 0xff is not UTF-8"),
    ("data build --input object.json --output out --tokenizer byte", "found an object, expected an array of"),
    (
        "data build --input nul.txt --output out --tokenizer byte",
        "nul.txt: binary, byte 1 is NUL; expected tex",
    ),
    (
        "data build --input null-instruction.jsonl --output out --tokenizer byte --chat-template t.jinja",
        "null-instruction.jsonl:1: 'instruction' is null, expected text",
    ),
    (
        "data build --input weight.jsonl --output out --tokenizer byte --chat-template t.jinja",
        "weight.jsonl:1: messages[1]: its 'weight' is 0, but every answer is trained with weight 1; remove",
    ),
    (
        "data build --input words.txt --output out --tokenizer byte --json-key body",
        "--json-key: found 'body', but no input is .jsonl, .ndjson, .json or .parquet; leave it out",
    ),
    (
        "data build --input words.txt --output out --tokenizer byte --chat-template t.jinja",
        "--chat-template: found 't.jinja', but no input is .jsonl",
    ),
    (
        "tokenizer train --input words.txt --vocab 300 --output new-tok --json-key body",
        "--json-key: found 'body', but no input is .jsonl",
    ),
    (
        "data build --input data.bin --output data --tokenizer byte",
        "--output: found 'data', whose files would replace the input data.bin",
    ),
    # datasets
    ("train run.yaml data.train=folder-mask", "data.train: folder-mask.mask: cannot be read: Is a directory"),
    # options
    (
        "tokenizer train --input words.txt --vocab 300 --output new-tok --min-frequency 99999999999999999999",
        "Invalid value for '--min-frequency': 99999999999999999999 is not in the range 0<=x<=4294967296",
    ),
    (
        "generate trained --prompt a --samples 100000000000 --temperature 1",
        "Invalid value for '--samples': 100000000000 is not in the range 1<=x<=1048576",
    ),
    ("generate trained --prompt a --stop \udcff", "--stop: found '\\udcff', which is not Unicode text"),
    ("evaluate trained --data =data", "--data: found '=data', expected PREFIX or NAME=PREFIX"),
    (
        "show schedule --save schedule.yaml",
        "--save: found 'schedule.yaml', expected a name that ends in .json",
    ),
    ("data info data", "No such command 'info'; known: build, inspect, verify (see 'hexad data --help')"),
    ("checkpoint list trained", "No such command 'list'; known: inspect, verify, import, export"),
    (
        "demo run.dir=elsewhere --dir new-demo",
        "run.dir: found elsewhere, but everything is written to --dir new",
    ),
    (
        "evaluate trained --data data --batches 99999999999999999999",
        "Invalid value for '--batches': 99999999999999999999 is not in the range 1<=x<=1000000000",
    ),
    # published models
    (
        "checkpoint import --from hf-deep --to out",
        "hf-deep/config.json: cannot be read: maximum recursion depth",
    ),
    (
        "checkpoint import --from hf-digits --to out",
        "hf-digits/config.json: cannot be read: Exceeds the limit (4300 digits) for integer",
    ),
    # tokenizers
    (
        "data build --input words.txt --output out --tokenizer panic-tokenizer",
        "tokenizer.json: not a Hugging Face tokenizer.json: its library failed: chunk size must be non-zero",
    ),
    (
        "data build --input words.txt --output out --tokenizer huge-tokenizer",
        "tokenizer.json: found the id 2147483648 in its vocabulary, expected at most 16777215",
    ),
    # DeepSpeed's files
    ("config from-deepspeed ds-digits.json", "not valid JSON: Exceeds the limit (4300 digits) for integer"),
    ("config from-deepspeed ds-digits.hjson", "ds-digits.hjson, line 1, column 2: not valid JSON: Expecting"),
    (f"config from-deepspeed ds.json train_batch_size={'9' * 5000}", "not valid JSON: Exceeds the limit"),
    (f"config from-deepspeed ds.json train_batch_size={'[' * 50_000}", "not valid JSON: maximum recursion d"),
    ("config from-deepspeed deep.json", "deep.json: not valid JSON: maximum recursion depth exceeded"),
    (
        "config from-deepspeed ds.json train_batch_size=true",
        "train_batch_size: found true, expected a number",
    ),
    (
        "config from-deepspeed ds.json gradient_clipping=true",
        "gradient_clipping: found true, expected a number",
    ),
    # run directories
    ("train blocked.yaml", "run.dir: cannot write to blocked: blocked/checkpoints is a file"),
    ("config check blocked.yaml", "run.dir: cannot write to blocked: blocked/checkpoints is a file"),
)
