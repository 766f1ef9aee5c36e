"""The tokenizer that a run and its checkpoints keep, so that both work without the original. No torch.

``run.dir/tokenizer`` holds a copy of the files of ``data.tokenizer``, and so does every checkpoint, which its
manifest covers. Its chat template is that of the training data. ``tokenizer/model`` has what a published
model that the run started from says beside its weights, for its export. What a run saves of its configuration
names the run's copy, and every other path absolutely.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hexad.config import Config, ConfigError, HexadError, blaming
from hexad.config.files import read_json
from hexad.config.load import anchored
from hexad.config.schema import prefixes
from hexad.dataset.files import sync_directory, write_durably
from hexad.dataset.sidecar import chat_templates
from hexad.dataset.text.chat import load_chat_template, template_files
from hexad.dataset.text.special_tokens import TOKEN_FILES
from hexad.dataset.text.tokenizer import (
    HuggingFaceTokenizer,
    Tokenizer,
    byte_backend,
    load_tokenizer,
    vocabulary_file,
)
from hexad.model.hugging_face import CONFIG_FILE
from hexad.model.pretrained import hugging_face_directory

from .directory import find_checkpoint
from .hugging_face.files import GENERATION_FILE, byte_tokenizer_files, has_tokenizer, tokenizer_files
from .index import FileRecord

log = logging.getLogger("hexad")

FOLDER = "tokenizer"
"""Directory of the tokenizer's copy, in a run directory and in a checkpoint."""
MODEL = "model"
"""Directory, inside :data:`FOLDER`, of files of the model that a run started from."""
_ORIGIN = ".origin"
"""Beside the run's copy: the paths it stands for."""
_NAMING = (*TOKEN_FILES, "chat_template.jinja")
"""Files beside a tokenizer's that name its special tokens and render conversations."""
_TEMPLATES = "additional_chat_templates/*.jinja"
_REPLACED = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja")
"""Templates of a tokenizer that those of the training data take the place of."""


def copied_files(tokenizer: str) -> dict[str, bytes]:
    """The files of a tokenizer by the names under which a directory with them is one.

    Raises:
        OSError: one cannot be read.
    """
    path = Path(tokenizer)
    if tokenizer == "byte":
        return byte_tokenizer_files()
    if path.is_dir():
        # config.json has the ids of the tokens that begin and end a text.
        files = [*tokenizer_files(path), *sorted(path.glob(_TEMPLATES)), path / CONFIG_FILE]
        return {str(file.relative_to(path)): file.read_bytes() for file in files if file.is_file()}
    beside = {name: path.parent / name for name in (*_NAMING, CONFIG_FILE)}
    files_beside = {name: file.read_bytes() for name, file in beside.items() if file.is_file()}
    name = {".json": "tokenizer.json", ".model": "tokenizer.model"}.get(path.suffix, path.name)
    return {name: path.read_bytes(), **files_beside} if path.is_file() else {}


def keep_tokenizer(config: Config) -> None:
    """Copy the tokenizer into ``run.dir``, with the chat template of the training data, unless it is there.

    Raises:
        ConfigError: the training data have several chat templates.
        OSError: the copy cannot be written.
    """
    folder = Path(config.run.dir) / FOLDER
    templates = training_templates(config)
    model = _of_model(config.model.load) or {
        name: content for name, content in _content(folder).items() if name.startswith(f"{MODEL}/")
    }
    plain = config.data.tokenizer == "byte" and templates is None
    if plain and not model:
        return
    files = model if plain else {**_kept_files(config.data.tokenizer, templates, folder), **model}
    if _content(folder) != files:
        _replace(folder, files)


def training_templates(config: Config) -> Mapping[str, str] | None:
    """The chat templates of the conversations in ``data.train``, by name; None where it has none.

    Raises:
        ConfigError: data sets have different ones.
    """
    with blaming("data.train"):
        return chat_templates(prefixes(config.data.train))


def _kept_files(tokenizer: str, templates: Mapping[str, str] | None, folder: Path) -> dict[str, bytes]:
    """The content of the run's copy of a tokenizer, by file name."""
    if Path(tokenizer).resolve() == folder.resolve():
        files = _content(folder)
    else:
        files = copied_files(tokenizer)
        files[_ORIGIN] = "".join(f"{path}\n" for path in (_absolute(tokenizer), folder.resolve())).encode()
    template = load_chat_template(tokenizer)
    if templates is None or (template is not None and template.named == templates):
        return files
    if template is not None:
        log.info("%s: has the chat template of data.train, which is not that of data.tokenizer", folder)
    others = {name: content for name, content in files.items() if name not in _REPLACED}
    return others | template_files(templates)


def _of_model(load: str | None) -> dict[str, bytes]:
    """The files beside the weights of the model that a run starts from; none where they do not exist, or no
    longer."""
    if load is None:
        return {}
    folder = hugging_face_directory(load)
    if folder is None:
        with suppress(HexadError):
            source = find_checkpoint(load)
            folder = model_files(str(source), str(source / FOLDER))
    files = [folder / name for name in (CONFIG_FILE, GENERATION_FILE)] if folder is not None else []
    return {f"{MODEL}/{file.name}": file.read_bytes() for file in files if file.is_file()}


def model_files(source: str, tokenizer: str) -> Path | None:
    """The directory with what a published model says beside its weights: ``hf:DIR``, what a checkpoint keeps
    of the model that its run started from, or the tokenizer's own; None: there is none."""
    folder = hugging_face_directory(source) or Path(source) / FOLDER / MODEL
    if folder.is_dir():
        return folder
    if tokenizer == "byte":
        return None
    return Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent


def ending_ids(source: str, spec: str) -> list[int]:
    """The ids that end what a model writes: those of its ``generation_config.json``, the end of a document,
    and of a model that is not a published one, the token with which its chat template ends an answer. Its
    export states them.

    Args:
        source: ``hf:DIR`` or a checkpoint.
        spec: of its tokenizer.

    Raises:
        HexadError: the tokenizer or its template cannot be used.
    """
    folder, tokenizer = model_files(source, spec), load_tokenizer(spec)
    ends = generation_ends(folder) if folder is not None else []
    if tokenizer.eod is not None:
        ends.append(tokenizer.eod)
    if hugging_face_directory(source) is None and (template := load_chat_template(spec)) is not None:
        token = template.answer_end(tokenizer.specials)
        ends += [] if token is None else [tokenizer.specials[token]]
    return list(dict.fromkeys(ends))


def generation_ends(folder: Path) -> list[int]:
    """The ids of ``eos_token_id`` in a directory's ``generation_config.json``; none where it has none."""
    try:
        tree = read_json(folder / GENERATION_FILE)
        ends = tree.get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return []
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


def _replace(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder that takes the place of one by a rename."""
    partial, old = folder.with_name(f".{FOLDER}.partial"), folder.with_name(f".{FOLDER}.old")
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir()
    write_files(files, partial)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    sync_directory(folder.parent)


def copy_into(checkpoint: Path, run_dir: str) -> dict[str, FileRecord]:
    """Copy the run's tokenizer into a checkpoint that is being written; returns the files' records.

    Raises:
        OSError: they cannot be written.
    """
    kept = Path(run_dir) / FOLDER
    files = _content(kept)
    if not files:
        return {}
    files.pop(_ORIGIN, None)
    return keep_files(checkpoint, files)


def keep_files(checkpoint: Path, files: Mapping[str, bytes]) -> dict[str, FileRecord]:
    """Write a tokenizer's files into a checkpoint that is being written; returns their records.

    Raises:
        OSError: they cannot be written.
    """
    folder = checkpoint / FOLDER
    folder.mkdir()
    write_files(files, folder)
    return {f"{FOLDER}/{name}": FileRecord.of(content) for name, content in files.items()}


def tokenizer_files_of(checkpoint: Path, tokenizer: str) -> dict[str, bytes]:
    """The files of a checkpoint's tokenizer by their paths: those that it keeps, or, of one that keeps none,
    those of ``tokenizer``; empty for ``byte``."""
    files = _content(checkpoint / FOLDER)
    return files or ({} if tokenizer == "byte" else copied_files(tokenizer))


def _content(folder: Path) -> dict[str, bytes]:
    """The content of all files in a folder, by their paths in it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files into a folder and flush them to disk."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_durably(folder / name, content)
    for directory in {(folder / name).parent for name in files}:
        sync_directory(directory)


def tokenizer_of_run(config: Config) -> str:
    """``data.tokenizer``, or the copy that the run keeps of it where the original is gone."""
    tokenizer, kept = config.data.tokenizer, Path(config.run.dir) / FOLDER
    if tokenizer == "byte" or Path(tokenizer).exists() or not has_tokenizer(kept):
        return tokenizer
    try:
        origins = (kept / _ORIGIN).read_text(encoding="utf-8").splitlines()
    except OSError:
        return tokenizer
    return str(kept) if _absolute(tokenizer) in origins else tokenizer


def tokenizer_of_checkpoint(checkpoint: Path, tree: Mapping[str, Any]) -> str:
    """The tokenizer of a checkpoint's model: its own copy, or what its configuration names."""
    copy = checkpoint / FOLDER
    return str(copy) if has_tokenizer(copy) else str(tree.get("data", {}).get("tokenizer", "byte"))


def check_same_tokenizer(checkpoint: Path, tree: Mapping[str, Any], tokenizer: str) -> None:
    """Refuse to resume from a checkpoint with a tokenizer whose ids may be others: the weights of its
    embedding belong to ids. Where the checkpoint names none that can be read (it is gone, or a model was
    imported without one), nothing is compared.

    Raises:
        ConfigError: naming the tokenizer that the checkpoint was trained with.
    """
    trained = tokenizer_of_checkpoint(checkpoint, tree)
    readable = trained == "byte" or Path(trained).is_file() or has_tokenizer(Path(trained))
    if not readable or same_ids(tokenizer, trained):
        return
    fix = "use that one"
    if not tree.get("model", {}).get("lora"):  # adapters alone are no weights to begin with
        fix += f", or begin a new run (another run.dir, model.load={checkpoint})"
    raise ConfigError(
        "data.tokenizer",
        f"found {tokenizer}, whose ids may differ from those of {trained}, with which {checkpoint} was "
        f"trained; {fix}",
    )


def saved_form(config: Config) -> Config:
    """A configuration as a run saves it, which works from any working directory: every path is absolute, and
    ``data.tokenizer`` names the run's copy."""
    kept = Path(config.run.dir) / FOLDER
    absolute = anchored(config)
    if config.data.tokenizer == "byte" or not has_tokenizer(kept):
        return absolute
    data = absolute.data.model_copy(update={"tokenizer": str(kept.resolve())})
    return absolute.model_copy(update={"data": data})


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


def same_ids(tokenizer: str, other: str) -> bool:
    """Whether two tokenizers certainly give every text the same ids, and begin and end documents with the
    same ones. Chat templates, and how texts are truncated, padded and joined, have no part in it.

    Raises:
        HexadError: as for :func:`load_tokenizer`.
    """
    first, second = load_tokenizer(tokenizer), load_tokenizer(other)
    if (first.eod, first.bos) != (second.eod, second.bos):
        return False
    return _encoded(first, tokenizer) == _encoded(second, other)


def _encoded(tokenizer: Tokenizer, spec: str) -> Any:
    """The content of a tokenizer's file that determines ids, independent of its formatting."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return json.loads(tokenizer.backend.to_str())
    path = vocabulary_file(spec)
    return json.loads(byte_backend().to_str()) if path is None else path.read_bytes()
