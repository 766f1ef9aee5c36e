"""Wrong inputs of the other commands: see :mod:`.cases`."""

DATA = (
    ("data biuld", "No such command 'biuld'"),
    ("data build --output out --tokenizer byte", "--input"),
    ("data build --input words.txt --tokenizer byte", "--output"),
    ("data build --input words.txt --output out", "--tokenizer"),
    ("data build --input --output out --tokenizer byte", "'--input' requires an argument"),
    ("data build --input no.txt --output out --tokenizer byte", "no.txt: no such file or directory"),
    ("data build --input folder --output out --tokenizer byte", "folder: no files found"),
    ("data build --input empty.txt --output out --tokenizer byte", "empty.txt: no text found"),
    ("data build --input latin.txt --output out --tokenizer byte", "latin.txt:1: byte 0xf6 is not UTF-8"),
    ("data build --input words.txt --output out --tokenizer nope", "tokenizer 'nope': no such file"),
    (
        "data build --input words.txt --output out --tokenizer bad-tokenizer",
        "bad-tokenizer/tokenizer.json: not a Hugging Face tokenizer.json: EOF",
    ),
    (
        "data build --input words.txt --output out --tokenizer odd-tokenizer",
        "odd-tokenizer/tokenizer.json: not a Hugging Face tokenizer.json: Model missing",
    ),
    (
        "data build --input words.txt --output out --tokenizer bad.model",
        "bad.model: not a SentencePiece model: INTERNAL: could not parse ModelProto from bad.model",
    ),
    (
        "data build --input words.txt --output out --tokenizer bad.tiktoken",
        "bad.tiktoken: not a tiktoken file: expected lines of a base64 token and its rank",
    ),
    (
        "data build --input words.txt --output out --tokenizer folder",
        "tokenizer 'folder': the directory has no tokenizer.json",
    ),
    (
        "data build --input words.txt --output out --tokenizer byte --workers 0",
        "Invalid value for '--workers': 0 is not in the range x>=1",
    ),
    (
        "data build --input words.txt --output 'a file/out' --tokenizer byte",
        "a file/out.bin: cannot be written: File exists",
    ),
    (
        "data build --input words.txt --output /proc/out --tokenizer byte",
        "/proc/out.bin: cannot be written: No such file or directory",
    ),
    (
        "data build --input words.txt --output '' --tokenizer byte",
        "--output: found '', expected a prefix such as data/train",
    ),
    (
        "data build --input words.txt --output out.bin --tokenizer byte",
        "--output: found 'out.bin', expected a prefix; leave out the '.bin': out",
    ),
    (
        "data build --input /dev/zero --output out --tokenizer byte",
        "/dev/zero: found a device, pipe or socket, expected a file or directory",
    ),
    (
        "data build --input words.txt --output folder/ --tokenizer byte",
        "--output: found 'folder/', expected a prefix such as data/train",
    ),
    (
        "data build --input words.txt --output out --tokenizer byte --include '*.md'",
        "words.txt: --include and --exclude leave out all there is, 1 file",
    ),
    ("data build --input not-json.jsonl --output out --tokenizer byte", "not-json.jsonl:2: not valid JSON"),
    ("data build --input number.jsonl --output out --tokenizer byte", "number.jsonl:1: 'text' is a number"),
    ("data build --input no-key.jsonl --output out --tokenizer byte", "no-key.jsonl:1: none of 'text'"),
    (
        "data build --input no-key.jsonl --output out --tokenizer byte --json-key boby",
        "no-key.jsonl:1: no key 'boby' (--json-key); keys found: 'body'",
    ),
    (
        "data build --input list.jsonl --output out --tokenizer byte",
        "list.jsonl:1: found a list, expected an object",
    ),
    ("data build --input two-kinds.jsonl --output out --tokenizer byte", "two-kinds.jsonl:1: has"),
    ("data build --input prompt-only.jsonl --output out --tokenizer byte", "without 'completion'"),
    ("data build --input completion-only.jsonl --output out --tokenizer byte", "without 'prompt'"),
    (
        "data build --input empty-completion.jsonl --output out --tokenizer byte",
        "'completion' is empty: nothing to train on",
    ),
    ("data build --input surrogate.jsonl --output out --tokenizer byte", "lone surrogate"),
    (
        "data build --input cut.txt.gz --output out --tokenizer byte",
        "cut.txt.gz: damaged or not a .gz file: Compressed file ended before the end-of-stream marker was",
    ),
    (
        "data build --input plain.txt.gz --output out --tokenizer byte",
        "plain.txt.gz: damaged or not a .gz file: Not a gzipped file (b'no')",
    ),
    (
        "data build --input fake.parquet --output out --tokenizer byte",
        "fake.parquet: not a readable .parquet file: Parquet magic bytes not found in footer",
    ),
    (
        "data build --input archive.zip --output out --tokenizer byte",
        "archive.zip: an archive of files; extract it",
    ),
    (
        "data build --input chat.jsonl --output out --tokenizer byte",
        "chat.jsonl:1: conversations need a chat template",
    ),
    (
        "data build --input chat.jsonl --output out --tokenizer byte --chat-template no.jinja",
        "no.jinja: cannot be read: No such file or directory",
    ),
    (
        "data build --input chat.jsonl --output out --tokenizer byte --chat-template open.jinja",
        "open.jinja:1: not a chat template: unexpected end of template",
    ),
    (
        "data build --input empty-chat.jsonl --output out --tokenizer byte --chat-template t.jinja",
        "'messages' is empty",
    ),
    (
        "data build --input text-chat.jsonl --output out --tokenizer byte --chat-template t.jinja",
        "'messages' is ",
    ),
    (
        "data build --input no-role.jsonl --output out --tokenizer byte --chat-template t.jinja",
        "messages[0]",
    ),
    (
        "data build --input no-answer.jsonl --output out --tokenizer byte --chat-template t.jinja",
        "no message with role 'assistant'",
    ),
    (
        "data build --input number-content.jsonl --output out --tokenizer byte --chat-template t.jinja",
        "messages[0]",
    ),
    (
        "data build --input tools.jsonl --output out --tokenizer byte --chat-template t.jinja",
        "'tools' is a number (3), expected a list of function schemas",
    ),
    ("data inspect", "Missing argument 'PREFIX'"),
    ("data inspect no/such", "no/such.idx: no such file"),
    ("data inspect cut-idx", "cut-idx.idx: 31 bytes, truncated inside the header"),
    ("data inspect cut-bin", "cut-bin.bin: truncated:"),
    ("data inspect bad-idx", "bad-idx.idx: starts with b'no indexn'"),
    ("data inspect bad-mask", "bad-mask.mask: not a loss mask: expected b'HEXMASK\\x00' and a header"),
    (
        "data inspect data --sequence 0",
        "Invalid value for '--sequence': 0 is not in the range 1<=x<=16777216",
    ),
    (
        "data inspect data --sequence 99999999999999999999",
        "Invalid value for '--sequence': 99999999999999999999 is not in the range 1<=x<=16777216",
    ),
    ("data inspect data --first -1", "Invalid value for '--first': -1 is not in the range x>=0"),
    ("data inspect data --tokenizer nope", "tokenizer 'nope': no such file or directory"),
    ("tokenizer trian", "No such command 'trian'"),
    ("tokenizer train --input words.txt --output new-tok", "--vocab"),
    (
        "tokenizer train --input words.txt --vocab 0 --output new-tok",
        "Invalid value for '--vocab': 0 is not in the range 1<=x<=16777216",
    ),
    (
        "tokenizer train --input words.txt --vocab 100 --output new-tok",
        "vocabulary size 100: expected at least 257",
    ),
    (
        "tokenizer train --input words.txt --vocab 99999999999 --output new-tok",
        "Invalid value for '--vocab': 99999999999 is not in the range 1<=x<=16777216",
    ),
    (
        "tokenizer train --input words.txt --vocab 32k --output new-tok",
        "Invalid value for '--vocab': '32k' is not a valid integer range",
    ),
    ("tokenizer train --input no.txt --vocab 300 --output new-tok", "no.txt: no such file"),
    (
        "tokenizer train --input empty.txt --vocab 300 --output new-tok",
        "empty.txt: no text to learn from in 1 files",
    ),
    ("tokenizer train --input words.txt --vocab 300 --output tok", "tok exists and is not empty"),
    (
        "tokenizer train --input words.txt --vocab 300 --output 'a file/tok'",
        "cannot be written: Not a directory",
    ),
    (
        "tokenizer train --input words.txt --vocab 300 --output new-tok --chat-template open.jinja",
        "open.jinja:1: not a chat template: unexpected end of template",
    ),
    (
        "tokenizer train --input words.txt --vocab 300 --output new-tok --special-token ''",
        "--special-token: found an empty text",
    ),
    ("tokenizer show nope", "tokenizer 'nope': no such file or directory"),
    ("tokenizer show bad-tokenizer", "bad-tokenizer/tokenizer.json: not a Hugging Face tokenizer.json: EOF"),
    ("tokenizer show folder", "tokenizer 'folder': the directory has no tokenizer.json"),
)

USE = (
    ("generate", "Missing argument"),
    ("generate trained", "--prompt: found none"),
    (
        "generate no/such --prompt a",
        "no/such: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    (
        "generate folder --prompt a",
        "folder: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    (
        "generate run.yaml --prompt a",
        "run.yaml: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    ("generate hf --prompt a", "a directory of a Hugging Face model is named hf:hf"),
    ("generate hf:no-such --prompt a", "no-such: no such directory"),
    (
        "generate hf:hf-no-config --prompt a",
        "model.load: hf-no-config: not a Hugging Face model: config.json is missing",
    ),
    ("generate hf:hf-bad-config --prompt a", "hf-bad-config/config.json: cannot be read"),
    (
        "generate hf:hf-bad-weights --prompt a --tokens 4 data.tokenizer=byte",
        "hf-bad-weights/model-00001-of-00004.safetensors: cannot be read: Error while deserializing header",
    ),
    (
        "generate hf:hf-no-weights --prompt a --tokens 4 data.tokenizer=byte",
        "model.load: hf-no-weights: neither model.safetensors nor model.safetensors.index.json exists",
    ),
    ("generate hf:hf-unknown --prompt a", 'model_type: found "t5", not supported'),
    ("generate hf:hf --prompt a", "tokenizer"),
    (
        "generate no-manifest --prompt a",
        "no-manifest: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    (
        "generate bad-manifest --prompt a",
        "checkpoint bad-manifest: damaged: manifest.json: its checksum does not match its content",
    ),
    (
        "generate cut-tensors --prompt a --tokens 4",
        "checkpoint cut-tensors: damaged: rank-00000.safetensors has",
    ),
    (
        "generate trained --prompt a --tokens 0",
        "Invalid value for '--tokens': 0 is not in the range 1<=x<=1048576",
    ),
    (
        "generate trained --prompt a --samples 0",
        "Invalid value for '--samples': 0 is not in the range 1<=x<=1048576",
    ),
    (
        "generate trained --prompt a --top-logprobs 21",
        "Invalid value for '--top-logprobs': 21 is not in the range 0<=x<=20",
    ),
    ("generate trained --prompt a --temperature -1", "--temperature: found -1.0, expected a number from 0"),
    ("generate trained --prompt a --temperature nan", "--temperature: found nan, expected a number from 0"),
    (
        "generate trained --prompt a --temperature hot",
        "Invalid value for '--temperature': 'hot' is not a valid float",
    ),
    ("generate trained --prompt a --top-k 5", "--top-k: found 5 with --temperature 0, which takes"),
    ("generate trained --prompt a --top-p 0.5", "--top-p: found 0.5 with --temperature 0, which takes"),
    ("generate trained --prompt \udcff", "--prompt: prompt 1 is not Unicode text"),
    ("generate trained --prompt a --top-k -1", "--top-k: found -1, expected 0 (all) or more"),
    ("generate trained --prompt a --top-p 0", "--top-p: found 0.0, expected a number above 0"),
    ("generate trained --prompt a --top-p 1.5", "--top-p: found 1.5, expected a number above 0"),
    (
        "generate trained --prompt a --samples 2",
        "--samples: found 2 with --temperature 0, where all are the same",
    ),
    ("generate trained --prompt a --seed -1", "--seed: found -1, expected 0 to 2^63 - 1"),
    ("generate trained --prompt a --temperature inf", "--temperature: found inf, expected a number from 0"),
    (
        "generate trained --prompt a --seed 99999999999999999999",
        "--seed: found 99999999999999999999, expected 0 to 2^63 - 1",
    ),
    ("generate trained --prompt a --stop ''", "--stop: found an empty text"),
    ("generate trained --prompt a --nproc 3", "parallel.tensor: found 3"),
    ("generate trained --prompts no.jsonl", "--prompts: no.jsonl: cannot be read"),
    ("generate trained --prompts folder", "--prompts: folder: cannot be read"),
    ("generate trained --prompts words.jsonl", "--prompts: words.jsonl:1: not JSON"),
    ("generate trained --prompts prompts.jsonl", "--prompts: prompts.jsonl:2: found {'prompt': 3}, expected"),
    (
        "generate trained --prompts both.jsonl",
        "--prompts: both.jsonl:1: found {'prompt': 'a', 'messages': []}, expected an object",
    ),
    (
        "generate trained --prompts no-prompts.jsonl",
        "--prompts: no-prompts.jsonl: found no lines with prompts",
    ),
    ("generate trained --prompts empty-chat.jsonl", "--prompts: prompt 1: 'messages' is empty"),
    ("generate trained --prompts odd-role.jsonl", "role 'usr' is unknown (did you mean 'user'?)"),
    ("generate trained --prompt a --prompts no-role.jsonl", "--prompts: prompt 2: messages[0] has no 'role'"),
    ("generate trained --prompts number-content.jsonl", "messages[0]: its content is a number"),
    ("generate trained --prompts chat-prompts.jsonl", "chat template"),
    ("generate trained --prompt a model.layer=2", "model.layer: unknown key"),
    (
        "generate trained --prompt a model.hidden=32",
        "model.hidden: found 32, but checkpoint trained/checkpoints/step-00000002 has 16",
    ),
    (
        "generate trained --prompt a data.tokenizer=nope",
        "data.tokenizer: tokenizer 'nope': no such file or directory",
    ),
    ("generate trained --prompt a precision.dtype=fp7", "precision.dtype: found 'fp7', expected 'auto'"),
    (
        "generate trained --prompt a parallel.pipeline=2",
        "--nproc: found 1, expected parallel.tensor 1 x parallel.context 1 x parallel.pipeline 2 x "
        "parallel.data 1 = 2",
    ),
    ("serve trained --port 70000", "Invalid value for '--port': 70000 is not in the range 0<=x<=65535"),
    ("serve trained --host nowhere.invalid", "--host nowhere.invalid --port 8000: cannot be used: "),
    ("serve trained --api-key ''", "--api-key: found one with spaces or other characters than ASCII"),
    ("serve nowhere", "nowhere: neither a checkpoint nor a run directory"),
    ("serve trained inference.sequences=0", "inference.sequences: found 0, expected"),
    ("serve trained inference.quue=3", "inference.quue: unknown key (did you mean 'inference.queue'?)"),
    (
        "serve trained --nproc 2 parallel.tensor=1 parallel.data=3",
        "--nproc: found 2, expected parallel.tensor 1",
    ),
    ("WORLD_SIZE=2 RANK=7 generate trained --prompt a", "RANK: found 7, expected 0 to 1 (WORLD_SIZE 2)"),
    ("evaluate", "Missing argument"),
    ("evaluate trained", "data.validation"),
    (
        "evaluate no/such --data data",
        "no/such: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    ("evaluate trained --data", "'--data' requires an argument"),
    ("evaluate trained --data no/such", "no/such.idx: no such file"),
    ("evaluate trained --data cut-idx", "--data: cut-idx.idx: 31 bytes, truncated inside the header"),
    ("evaluate trained --data cut-bin", "--data: cut-bin.bin: truncated:"),
    ("evaluate trained --data data data", "--data: data is given twice"),
    ("evaluate trained --data a=data a=chats", "--data: a is given twice"),
    ("evaluate trained --data data precison.dtype=fp32", "did you mean the setting 'precision.dtype'?"),
    ("evaluate trained --data web=", "--data: found 'web=', expected PREFIX or NAME=PREFIX"),
    (
        "evaluate trained --data data --batches 0",
        "Invalid value for '--batches': 0 is not in the range 1<=x<=1000000000",
    ),
    ("evaluate trained --data data --nproc 0", "Invalid value for '--nproc': 0 is not in the range x>=1"),
    (
        "evaluate trained --data data data.sequence=1000000",
        "data.validation.data: data: holds 2654 tokens, expected at least data.sequence + 1 = 1000001",
    ),
    (
        "evaluate trained --data data parallel.zero=9",
        "parallel.zero: found 9, expected less than or equal to 3",
    ),
    ("evaluate hf:no-such --data data", "model.load: no-such: no such directory"),
    ("evaluate hf:hf --data data", "tokenizer"),
    ("evaluate cut-tensors --data data", "checkpoint cut-tensors: damaged: rank-00000.safetensors has"),
    (
        "evaluate run.yaml --data data",
        "run.yaml: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    ("checkpoint inspct good", "No such command 'inspct'"),
    ("checkpoint inspect", "Missing argument"),
    (
        "checkpoint inspect no/such",
        "no/such: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    (
        "checkpoint inspect folder",
        "folder: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    (
        "checkpoint inspect 'a file'",
        "a file: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    (
        "checkpoint inspect no-manifest",
        "no-manifest: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    (
        "checkpoint inspect bad-manifest",
        "checkpoint bad-manifest: damaged: manifest.json: its checksum does not match its content",
    ),
    (
        "checkpoint verify no/such",
        "no/such: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    ("checkpoint verify bad-manifest", "checkpoint verify: damaged: bad-manifest", True),
    ("checkpoint verify no-tensors", "checkpoint verify: damaged: no-tensors", True),
    ("checkpoint verify cut-tensors", "checkpoint verify: damaged: cut-tensors", True),
    ("checkpoint verify changed-tensors", "checkpoint verify: damaged: changed-tensors", True),
    ("checkpoint import --to out", "--from"),
    ("checkpoint import --from hf", "Missing option '--to'"),
    (
        "checkpoint import --from no/such --to out",
        "no/such: no such directory; expected a Hugging Face model with config.json",
    ),
    ("checkpoint import --from folder --to out", "folder: not a Hugging Face model: config.json is missing"),
    ("checkpoint import --from good --to out", "good: not a Hugging Face model: config.json is missing"),
    ("checkpoint import --from hf-bad-config --to out", "hf-bad-config/config.json"),
    (
        "checkpoint import --from hf-bad-weights --to out",
        "hf-bad-weights/model-00001-of-00004.safetensors: cannot be read: Error while deserializing header",
    ),
    (
        "checkpoint import --from hf-no-weights --to out",
        "hf-no-weights: neither model.safetensors nor model.safetensors.index.json exists",
    ),
    ("checkpoint import --from hf-unknown --to out", 'model_type: found "t5", not supported'),
    (
        "checkpoint import --from hf-wrong --to out",
        "hf-wrong: tensor model.embed_tokens.weight has shape (307",
    ),
    ("checkpoint import --from hf --to good", "exists and is not empty"),
    ("checkpoint import --from hf --to 'a file/out'", "cannot be written: Not a directory"),
    ("checkpoint export --from trained", "Missing option '--to'"),
    (
        "checkpoint export --from no/such --to out",
        "no/such: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    ("checkpoint export --from trained --to good", "exists and is not empty"),
    ("checkpoint export --from trained --to 'a file/out'", "cannot be written: Not a directory"),
    (
        "checkpoint export --from trained --to out --dtype int8",
        "Invalid value for '--dtype': 'int8' is not one of 'auto'",
    ),
    (
        "checkpoint export --from trained --to out --shard-size big",
        "--shard-size: found 'big', expected a size such as 5GB",
    ),
    (
        "checkpoint export --from trained --to out --shard-size 0GB",
        "--shard-size: found '0GB', expected a size such as 5GB",
    ),
    (
        "checkpoint export --from trained --to out --adapter",
        "--adapter: checkpoint trained/checkpoints/step-00000002 has no adapters (model.lora)",
    ),
    (
        "checkpoint export --from trained --to out --base hf:hf",
        "--base: checkpoint trained/checkpoints/step-00000002 has no adapters (model.lora)",
    ),
    (
        "checkpoint export --from lora --to out --base hf:no-such",
        "--base: no-such: neither model.safetensors nor model.safetensors.index.json exists",
    ),
    (
        "checkpoint export --from lora --to out --base hf:hf",
        "--base: hf: found tensor model.layers.1.input_layernorm.weight",
    ),
    (
        "checkpoint export --from lora --to out --adapter --base trained",
        "--base: found it with --adapter, which writes the adapters alone",
    ),
    (
        "checkpoint export --from cut-tensors --to out",
        "checkpoint cut-tensors: damaged: rank-00000.safetensors has",
    ),
    (
        "checkpoint export --from hf:hf --to out",
        "hf:hf: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
)

SHOW = (
    ("show layot", "No such command 'layot'"),
    ("show layout --world 0", "world: found 0, expected ranks to start: an integer of at least 1"),
    (
        "show layout --world 6 --tensor 4",
        "parallel.tensor: found 4, but world 6 is not divisible by tensor 4 x context 1 x pipeline 1 = 4",
    ),
    ("show layout --tensor two", "parallel.tensor: found 'two'"),
    ("show layout --tensor 0", "parallel.tensor: found 0"),
    ("show layout --tensor 2 --order data", "parallel.order: "),
    ("show layout --world 100000000000", "world: found 100000000000 ranks, expected at most 4194304"),
    ("show layout no.yaml", "no.yaml: no such configuration file"),
    ("show layout run.yaml empty.yaml", "found several paths"),
    ("show layout --output ''", "--output: found '', expected a name that ends in .png"),
    (
        "show schedule --pipeline 100000 --microbatches 1",
        "Invalid value for '--pipeline': 100000 is not in the range 1<=x<=1024",
    ),
    ("demo --dir ''", "--dir: found an empty name"),
    (
        "generate trained --prompt a --tokens 100000000000",
        "Invalid value for '--tokens': 100000000000 is not in the range 1<=x<=1048576",
    ),
    (
        "checkpoint export --from lora --to out --base ''",
        "--base: .: neither a checkpoint nor a run directory with a complete checkpoint",
    ),
    ("show layout --output layout.gif", "--output: found 'layout.gif', expected a name that ends in .png"),
    (
        "show layout --output no/such/layout.png",
        "--output: 'no/such/layout.png' cannot be written: No such file or directory",
    ),
    ("show schedule --schedule zbv", "--schedule: unknown schedule 'zbv' (did you mean 'zb_v'?)"),
    ("show schedule --costs 1,1,1", "--costs: found '1,1,1', expected F,B,W,P2P"),
    (
        "show schedule --costs 1,1,a,1",
        "--costs: found '1,1,a,1', expected F,B,W,P2P such as 1,1,1,0.1: times from 0",
    ),
    (
        "show schedule --costs 1,1,-1,1",
        "--costs: found '1,1,-1,1', expected F,B,W,P2P such as 1,1,1,0.1: times from 0",
    ),
    ("show schedule --pipeline 0", "Invalid value for '--pipeline': 0 is not in the range 1<=x<=1024"),
    ("show schedule --microbatches 0", "Invalid value for '--microbatches': 0 is not in the range x>=1"),
    (
        "show schedule --pipeline 64 --microbatches 100000000",
        "--schedule: found 100000000 microbatches on 64 stages, expected at most 1048576 pairs of them",
    ),
    ("show schedule --schedule 1f1b --virtual-stages 2", "--schedule: 1f1b has one stage per rank"),
    ("show schedule --memory 2", "--memory: found 2; it applies only to --schedule auto"),
    ("show schedule --group 2", "groups of 2; interleaved alone"),
    ("show schedule --file no.json", "no.json: cannot be read"),
    ("show schedule --file broken.json", "broken.json: cannot be read as a schedule"),
    (
        "show schedule --file schedule.json",
        "schedule.json: expected an object with 'ranks': a list of actions for each pipeline rank",
    ),
    (
        "show schedule --file schedule.json --pipeline 2",
        "--pipeline: found 2, but --file schedule.json determines the schedule",
    ),
    ("show schedule run.yaml --pipeline 2", "--pipeline: found 2, but run.yaml determines the schedule"),
    ("show schedule folder", "folder: found neither timeline.json nor config.yaml"),
    ("show schedule bad-timeline", "bad-timeline/timeline.json"),
    (
        "show schedule --save no/such/schedule.json",
        "no/such/schedule.json: cannot be written: No such file or directory",
    ),
    ("show memory", "show memory: found no configuration file"),
    ("show memory run.yaml --device", "Option '--device' requires an argument."),
    (
        "show memory run.yaml --device h1000",
        "--device: found 'h1000', expected a GPU or a size such as 80GB (did you mean 'h100'?)",
    ),
    (
        "show memory run.yaml --device 80",
        "--device: found '80', expected a GPU or a size such as 80GB (did you mean 'h800'?)",
    ),
    ("show memory run.yaml --device 80XB", "--device: found '80XB', expected a size such as 5GB"),
    ("show memory run.yaml --rank 5", "--rank: found 5, expected 0 to 0"),
    (
        "show memory run.yaml --world 3 parallel.tensor=2",
        "parallel.tensor: found 2, but world 3 is not divisible by tensor 2 x context 1 x pipeline 1 = 2",
    ),
    ("show memory run.yaml --world 0", "world: found 0, expected ranks to start: an integer of at least 1"),
    ("show memory run.yaml model.layer=2", "model.layer: unknown key"),
    ("show context", "show context: found no configuration file"),
    ("show context run.yaml", "parallel.context: found 1"),
    ("show context run.yaml parallel.context=3", "data.sequence: found 16"),
    ("show context run.yaml parallel.context=2 --lengths 4", "--lengths: found 4 with data.documents join"),
    (
        "show context run.yaml parallel.context=2 data.documents=isolate data.train=null",
        "data.train: found null with data.documents isolate; set it, or give the lengths of documents:",
    ),
    (
        "show context run.yaml parallel.context=2 data.documents=isolate --lengths a",
        "--lengths: found 'a', expected numbers of tokens from 1 such as 300,1200,700",
    ),
    ("show context run.yaml parallel.context=2 data.documents=isolate --lengths 99", "found 99 tokens"),
    (
        "show context run.yaml parallel.context=2 --microbatch -1",
        "Invalid value for '--microbatch': -1 is not in the range 0<=x<=2147483648",
    ),
    ("show run", "Missing argument 'DIR'"),
    ("show run no/such", "no/such/metrics.jsonl: cannot be read"),
    ("show run folder", "folder/metrics.jsonl: cannot be read"),
    ("show run run.yaml", "run.yaml/metrics.jsonl: cannot be read"),
    ("show run bad-metrics", "bad-metrics/metrics.jsonl"),
    ("show run empty-metrics", "empty-metrics/metrics.jsonl"),
    (
        "show run trained --reference 7",
        "--reference: found '7', expected NAME=NATS such as 'unigram entropy=7.1'",
    ),
    (
        "show run trained --reference entropy",
        "--reference: found 'entropy', expected NAME=NATS such as 'unigram entropy=7.1'",
    ),
    (
        "show run trained --reference entropy=nan",
        "--reference: found 'entropy=nan', expected NAME=NATS such as 'unigram entropy=7.1'",
    ),
    ("show run trained --output run.pdf", "--output: found 'run.pdf', expected a name that ends in .png"),
    (
        "show run trained --output 'a file/run.png'",
        "--output: 'a file/run.png' cannot be written: Not a directory",
    ),
    ("show trace trained", "trained: no traces in profile/"),
    ("show trace no/such", "no/such: no traces in profile/"),
    ("demo --dir", "Option '--dir' requires an argument."),
    ("demo model.layer=2 --dir new-demo", "model.layer: unknown key"),
    ("demo steps --dir new-demo", "found 'steps', expected a setting name=value"),
    ("demo --dir 'a file'", "a file/data/tokenizer: cannot be written", True),
    ("demo --nproc 2", "No such option '--nproc'"),
)
