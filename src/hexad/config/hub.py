"""Published models by their names, downloaded by ``huggingface_hub`` into its cache."""

import os
import re
from functools import cache

from .errors import HexadError, one_line

PREFIX = "hf:"
"""Prefix of names of published models, and of directories in their format."""

_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_SMALL = ("*.json", "*.jinja", "*.model", "*.tiktoken")
_WEIGHTS = "*.safetensors"
_UNUSED = ("consolidated*", "original/*", "onnx/*")
"""Copies of the weights in other formats."""


def local(source: str, weights: bool = True) -> str:
    """``hf:DIR`` for ``hf:ORG/NAME`` or ``hf:ORG/NAME@REVISION``, whose files (``weights``: with those) are
    downloaded unless the cache has them; anything else, and what is a directory here, as it is.

    Cache and token are those of ``huggingface_hub``: ``HF_HOME``, ``HF_TOKEN`` or ``hf auth login``.

    Raises:
        HexadError: there is no name, no network, no such model, or no access to it.
    """
    name = source.removeprefix(PREFIX)
    if not name:
        raise HexadError(f"found {source} without a name; write hf:DIR or hf:ORG/NAME")
    if not source.startswith(PREFIX) or os.path.exists(name) or not _NAME.fullmatch(name):
        return source
    return PREFIX + _downloaded(name, weights)


@cache
def _downloaded(name: str, weights: bool) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, _, revision = name.partition("@")
    files = [*_SMALL, _WEIGHTS] if weights else [*_SMALL]
    try:
        return snapshot_download(
            repository, revision=revision or None, allow_patterns=files, ignore_patterns=[*_UNUSED]
        )
    except GatedRepoError:
        problem = "its owner gives access to accounts; ask for it on its page, then set HF_TOKEN"
    except RepositoryNotFoundError:
        problem = "the hub has no such model, or a private one: set HF_TOKEN"
    except RevisionNotFoundError:
        problem = f"the model has no revision {revision}"
    except LocalEntryNotFoundError:
        problem = "it is not in the cache (HF_HOME), and the hub cannot be reached"
    except Exception as error:  # of the network, the disk, or what the hub answers
        problem = one_line(error)
    raise HexadError(f"{name}: no such directory, and no model to download: {problem}")


def local_tokenizer(source: str) -> str:
    """The directory of a model's tokenizer, found as by :func:`local`, but without downloading weights."""
    return local(source, weights=False).removeprefix(PREFIX)
