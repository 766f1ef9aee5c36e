"""The adapter for EleutherAI's harness, against transformers, and against the harness's own for transformers.

Where the harness is not installed, the adapter is tested with the few names that it imports from it."""

import importlib
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from hexad.config import ConfigError
from hexad.dataset.text.tokenizer import ByteTokenizer

from ..checkpoint import hugging_face as theirs
from ..checkpoint.test_hugging_face import convert, small_run
from ..dataset.chats import CHATML
from ..pool import Pool
from ..training.command import free_port, rank_variables

INSTALLED = find_spec("lm_eval") is not None


def stand_in() -> dict[str, ModuleType]:
    """The modules that the adapter imports from; windows for texts that one window holds."""

    def windows(
        ids: list[int], prefix: int, max_seq_len: int, context_len: int
    ) -> Iterator[tuple[list[int], list[int]]]:
        assert context_len == 1 and len(ids) <= max_seq_len
        yield [prefix, *ids[:-1]], ids

    base = type("LM", (), {"__init__": lambda self: None})
    contents: dict[str, dict[str, Any]] = {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.instance": {"Instance": object},
        "lm_eval.api.model": {"LM": base},
        "lm_eval.utils": {
            "get_rolling_token_windows": windows,
            "make_disjoint_window": lambda pair: (pair[0][: len(pair[0]) - len(pair[1]) + 1], pair[1]),
        },
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name])
    return modules


@pytest.fixture(scope="module")
def adapter() -> Iterator[Any]:
    """``hexad.harness``."""
    with pytest.MonkeyPatch.context() as patch:
        if not INSTALLED:
            for name, module in stand_in().items():
                patch.setitem(sys.modules, name, module)
        yield importlib.import_module("hexad.harness")
    if not INSTALLED:
        del sys.modules["hexad.harness"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run; its export is ``hf`` beside it."""
    run = small_run(tmp_path_factory.mktemp("harness"), "llama")
    assert run.train().status == 0
    convert("export", run.directory, run.directory.with_name("hf"))
    return run.directory


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Any]:
    if not INSTALLED:
        return [SimpleNamespace(args=argument) for argument in arguments]
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, argument, 0) for argument in arguments]


PAIRS = [("line 7:", " 49"), ("line", " 8"), ("a b ", "c"), ("x" * 40, "yz")]
UNTIL = {"until": ["9"], "max_gen_toks": 7}


@pytest.mark.skipif(not INSTALLED, reason="lm_eval is not installed")
def test_it_gives_what_the_harness_computes_with_transformers(adapter: Any, trained: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    others = {"max_new_tokens": 3, "until": [], "top_k": None, "num_beams": 1, "temperature": 0}
    asked = [("line", UNTIL), ("1: 1", UNTIL), ("line", others), ("2", {**others, "do_sample": False})]
    with theirs.exact_functions():
        reference = HFLM(str(trained.with_name("hf")), device="cpu", dtype="float64", max_length=16)
        scored = reference.loglikelihood(requests("loglikelihood", *PAIRS), disable_tqdm=True)
        texts = [("line 9: 81 " * 6,), ("short",)]
        rolled = reference.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), disable_tqdm=True)
        written = reference.generate_until(requests("generate_until", *asked), disable_tqdm=True)
    with adapter.HexadLM(trained) as model:
        ours = model.loglikelihood(requests("loglikelihood", *PAIRS))
        assert [likelihood[0] for likelihood in ours] == pytest.approx(
            [likelihood[0] for likelihood in scored], rel=1e-6
        )
        assert [likelihood[1] for likelihood in ours] == [likelihood[1] for likelihood in scored]
        assert model.loglikelihood_rolling(requests("loglikelihood_rolling", *texts)) == pytest.approx(
            rolled, rel=1e-6
        )
        assert model.generate_until(requests("generate_until", *asked)) == written


def test_likelihoods_are_those_of_transformers(adapter: Any, trained: Path) -> None:
    """Of the continuation, its leading space included, and of a whole text after the end of a document."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        trained.with_name("hf"), dtype=torch.float64
    )
    encode = ByteTokenizer().encode

    def expected(before: list[int], after: list[int]) -> tuple[float, bool]:
        with torch.no_grad(), theirs.exact_functions():
            logits = reference(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
        ids = torch.tensor(after)
        total = logits.log_softmax(-1).gather(1, ids[:, None]).sum()
        return float(total), bool((logits.argmax(-1) == ids).all())

    with adapter.HexadLM(trained) as model:
        ours = model.loglikelihood(requests("loglikelihood", *PAIRS))
        rolled = model.loglikelihood_rolling(requests("loglikelihood_rolling", ("short",)))
    # The model was made for 16 tokens: a context that is too long loses its beginning.
    scored = [expected(encode("x" * 15), encode("yz"))]
    scored = [expected(encode(a.rstrip()), encode(a[len(a.rstrip()) :] + b)) for a, b in PAIRS[:3]] + scored
    assert [likelihood[0] for likelihood in ours] == pytest.approx(
        [likelihood[0] for likelihood in scored], rel=1e-6
    )
    assert [likelihood[1] for likelihood in ours] == [likelihood[1] for likelihood in scored]
    assert rolled == pytest.approx([expected([256], encode("short"))[0]], rel=1e-6)


def found_by(rank: int, world: int, source: Path, port: int) -> tuple[list[Any], list[str]]:
    """What one rank of a world finds, two of which divide the contexts."""
    with pytest.MonkeyPatch.context() as patch, rank_variables(rank, world, port):
        for name, module in ({} if INSTALLED else stand_in()).items():
            patch.setitem(sys.modules, name, module)
        adapter = importlib.import_module("hexad.harness")
        with adapter.HexadLM(source, ["parallel.context=2"]) as model:
            scored = model.loglikelihood(requests("loglikelihood", *PAIRS))
            return scored, model.generate_until(requests("generate_until", ("line", UNTIL), ("1", UNTIL)))


def test_context_ranks_find_the_same(adapter: Any, trained: Path, pool: Pool) -> None:
    with adapter.HexadLM(trained) as model:
        scored = model.loglikelihood(requests("loglikelihood", *PAIRS))
        written = model.generate_until(requests("generate_until", ("line", UNTIL), ("1", UNTIL)))
    for likelihoods, texts in pool.apart(2, found_by, trained, free_port()):
        assert [likelihood[0] for likelihood in likelihoods] == pytest.approx(
            [likelihood[0] for likelihood in scored], rel=1e-9
        )
        assert [likelihood[1] for likelihood in likelihoods] == [likelihood[1] for likelihood in scored]
        assert texts == written


def test_prompts_of_one_token_leave_nothing_behind(adapter: Any, trained: Path) -> None:
    """More of them than a replica accepts at once: each is complete without a step."""
    with adapter.HexadLM(trained, ["inference.sequences=2"]) as model:
        generator = model._generator
        texts = generator.score([[token % 250] for token in range(20)])
        assert [text.prompt_logprobs for text in texts] == [()] * 20
        assert generator.front.unfinished == 0 and generator.front._counts == [0]
        assert len(generator.generate("line", tokens=3)[0].tokens) == 3


def test_requests_with_other_options_are_written_together(adapter: Any, trained: Path) -> None:
    """Equal to one by one, and in the order of the requests."""
    sampled = {"until": "9", "max_gen_toks": 5, "temperature": 2.0, "do_sample": True, "top_k": 9}
    asked = [("line", UNTIL), ("1: 1", sampled), ("a", {**UNTIL}), ("line", sampled), ("x" * 40, UNTIL)]
    with adapter.HexadLM(trained) as model:
        together = model.generate_until(requests("generate_until", *asked))
        alone = [model.generate_until(requests("generate_until", request))[0] for request in asked]
        assert model.generate_until([]) == []
    assert together == alone
    assert len(set(together)) > 2 and all("9" not in text for text in together)


def test_generation_options_are_read_as_by_the_harness(adapter: Any) -> None:
    def wanted(**options: Any) -> Any:
        return adapter._wanted(options)

    none = dict.fromkeys(("until", "do_sample", "temperature", "top_k", "top_p", "max_gen_toks", "penalty"))
    assert wanted(**none) == wanted() == wanted(num_beams=1, until=[""])
    assert (wanted().tokens, wanted().sampling.temperature) == (256, 0.0)
    assert wanted(max_tokens=9, max_new_tokens=8).tokens == 8
    assert wanted(until="a").stop == wanted(until=["a"]).stop == ("a",)
    temperatures = [
        wanted(temperature=0.5, do_sample=drawn).sampling.temperature for drawn in (None, True, False)
    ]
    assert temperatures == [0.5, 0.5, 0.0]
    assert wanted(do_sample=True).sampling.temperature == 1.0
    assert wanted(do_sample=False).sampling.temperature == 0.0
    assert (wanted(top_k=4, top_p=0.5).sampling.top_k, wanted(top_p=0.5).sampling.top_p) == (4, 0.5)
    with pytest.raises(
        ConfigError, match=r"generation_kwargs: found num_beams: 4, penalty: 2; remove .* until, "
    ):
        wanted(num_beams=4, penalty=2)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("temperature", ["hot", -1, float("nan"), float("inf"), 10**400, True, "0.5"], "a number from 0"),
        ("max_gen_toks", ["x", 0, -1, 2.5, True], "an integer from 1"),
        ("max_tokens", ["x", 0], "an integer from 1"),
        ("top_k", [float("inf"), "x", -1, 2.5], r"an integer from 0 \(all\)"),
        ("top_p", ["x", 0, 1.5, -1, float("nan")], "a number above 0, at most 1"),
        ("until", [5, [5], [["a"]], {"a": 1}], "a text or a list of texts"),
        ("do_sample", ["false", 1, 0], "true or false"),
    ],
)
def test_wrong_generation_options_are_named(
    adapter: Any, name: str, values: list[Any], expected: str
) -> None:
    for value in values:
        message = rf"^generation_kwargs\.{name}: found {re.escape(repr(value))}, expected {expected}; "
        with pytest.raises(ConfigError, match=message):
            adapter._wanted({name: value})


def test_conversations_are_rendered(adapter: Any, trained: Path) -> None:
    messages = [{"role": "user", "content": "why?"}]
    with adapter.HexadLM(trained) as model:
        with pytest.raises(ConfigError, match=r"data\.tokenizer: .* has no chat template"):
            model.apply_chat_template(messages)
        assert "/" not in model.tokenizer_name
    (trained.with_name("hf") / "chat_template.jinja").write_text(CHATML)
    with adapter.HexadLM(f"hf:{trained.with_name('hf')}", ["precision.dtype=fp64"]) as model:
        text = model.apply_chat_template(messages)
        assert text.endswith("<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n")
        assert text.startswith(model.apply_chat_template(messages, add_generation_prompt=False))
