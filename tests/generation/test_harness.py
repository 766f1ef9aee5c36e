"""The adapter for EleutherAI's harness, against transformers and the harness's own adapter for it."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hexad.config import ConfigError, HexadError
from hexad.dataset.text.tokenizer import ByteTokenizer, load_tokenizer

from ..checkpoint import hugging_face as theirs
from ..checkpoint.test_hugging_face import convert, small_run
from ..dataset.chats import CHATML
from ..dataset.tokenizers import made
from ..pool import Pool
from ..training.command import free_port, rank_variables

pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def adapter() -> Any:
    """``hexad.harness``."""
    import hexad.harness

    return hexad.harness


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run; its export is ``hf`` beside it."""
    run = small_run(tmp_path_factory.mktemp("harness"), "llama")
    assert run.train().status == 0
    convert("export", run.directory, run.directory.with_name("hf"))
    return run.directory


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, argument, 0) for argument in arguments]


PAIRS = [("line 7:", " 49"), ("line", " 8"), ("a b ", "c"), ("x" * 40, "yz")]
UNTIL = {"until": ["9"], "max_gen_toks": 7}


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
    from hexad.harness import HexadLM

    with rank_variables(rank, world, port), HexadLM(source, ["parallel.context=2"]) as model:
        scored = model.loglikelihood(requests("loglikelihood", *PAIRS))
        return scored, model.generate_until(requests("generate_until", ("line", UNTIL), ("1", UNTIL)))


@pytest.mark.slow  # each rank imports the harness
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
        return adapter._sampling(options)

    none = dict.fromkeys(("until", "do_sample", "temperature", "top_k", "top_p", "max_gen_toks", "penalty"))
    assert wanted(**none) == wanted() == wanted(num_beams=1, until=[""])
    assert (wanted().tokens, wanted().temperature) == (256, 0.0)
    assert wanted(max_tokens=9, max_new_tokens=8).tokens == 8
    assert wanted(until="a").stop == wanted(until=["a"]).stop == ("a",)
    temperatures = [wanted(temperature=0.5, do_sample=drawn).temperature for drawn in (None, True, False)]
    assert temperatures == [0.5, 0.5, 0.0]
    assert wanted(do_sample=True).temperature == 1.0
    assert wanted(do_sample=False).temperature == 0.0
    assert (wanted(top_k=4, top_p=0.5).top_k, wanted(top_p=0.5).top_p) == (4, 0.5)
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
            adapter._sampling({name: value})


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
        continued = model.apply_chat_template(messages, add_generation_prompt=False)
        assert continued.endswith("<|im_start|>user\nwhy?") and text.startswith(continued)


WORDS = [
    "hello",
    " hello",
    "world",
    " world",
    "the",
    " lazy",
    "\n",
    " ",
    "  ",
    "é",
    "日本",
    "<|im_end|>",
    "a",
    ".",
]
KINDS = [
    "byte-level",
    "byte-level-prefix",
    "llama",
    "mistral",
    "gemma",
    "byte-level bos",
    "mistral bos",
    "llama bos",
]


def tokenizer_directory(kind: str, directory: Path) -> str:
    """A tokenizer; with ``bos``, one that puts a token before each text."""
    from tokenizers import Tokenizer, processors

    name, _, begins = kind.partition(" ")
    where = made(name, directory)
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    begin, end = (
        ("<s>", "</s>") if backend.token_to_id("<s>") is not None else ("<|im_start|>", "<|endoftext|>")
    )
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, backend.token_to_id(begin))]
        )
        backend.save(str(directory / "tokenizer.json"))
    named = f'"bos_token": "{begin}", ' if begins or name != "gemma" else ""
    settings = f'{{{named}"eos_token": "{end}", "tokenizer_class": "PreTrainedTokenizerFast"}}'
    (directory / "tokenizer_config.json").write_text(settings)
    return where


def both(adapter: Any, directory: str) -> tuple[Any, Any]:
    """The harness's adapter for transformers and ours, which return what they would score."""
    from lm_eval.models.huggingface import HFLM

    kept = {"_loglikelihood_tokens": lambda self, requests, **_: [one[1:] for one in requests]}
    reference = type("Reference", (HFLM,), kept).__new__(type("Reference", (HFLM,), kept))
    reference.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    reference.tokenizer.pad_token = reference.tokenizer.eos_token
    reference.add_bos_token = reference.custom_prefix_token_id = reference.enable_thinking = None
    ours_kind = type("Ours", (adapter.HexadLM,), kept)
    ours = ours_kind.__new__(ours_kind)
    ours._tokenizer = load_tokenizer(directory)
    ours._bos = list(ours._tokenizer.bos)
    ours._prefix = ours._tokenizer.eod if ours._tokenizer.begin is None else ours._tokenizer.begin
    return reference, ours


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_encoded_as_by_the_harness(adapter: Any, kind: str, tmp_path: Path) -> None:
    reference, ours = both(adapter, tokenizer_directory(kind, tmp_path))
    chance = random.Random(7)
    begin = reference.tokenizer.decode([reference.prefix_token_id])
    pairs = [("", "hello"), ("hel", "lo"), ("hello", " world"), ("hello ", "world"), (f"{begin}the", " a")]
    pairs += [("", f"{begin}hello"), ("\n", "a"), ("hello\n\n", "\n a")]
    pairs += [
        tuple("".join(chance.choice(WORDS) for _ in range(chance.randrange(least, 6))) for least in (0, 1))
        for _ in range(50)
    ]
    asked = requests("loglikelihood", *pairs)
    assert ours.prefix_token_id == reference.prefix_token_id
    scored = ours.loglikelihood(asked, disable_tqdm=True)
    assert scored == [tuple(one) for one in reference.loglikelihood(asked, disable_tqdm=True)]
    for text in {text for pair in pairs for text in pair if text}:
        assert ours.tok_encode(text) == reference.tok_encode(text)  # of which windows are made
        batch, _ = reference.tok_batch_encode([text])
        ours._length = 1000
        assert ours._prompt(text, 1) == batch[0].tolist()


def test_a_continuation_without_tokens_is_refused(adapter: Any, trained: Path) -> None:
    with (
        adapter.HexadLM(trained) as model,
        pytest.raises(HexadError, match=r"lm_eval: context and continuation \('hel', 'lo'\): its tokens are"),
    ):
        model._loglikelihood_tokens([(("hel", "lo"), [104, 101, 108, 108], [])])


TRIMMED = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + CHATML


@pytest.mark.parametrize("template", [CHATML, TRIMMED, STRICT])
def test_conversations_are_those_of_the_harness(adapter: Any, template: str, tmp_path: Path) -> None:
    directory = tokenizer_directory("byte-level", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    reference, ours = both(adapter, directory)
    reference.chat_template_args = {}
    from types import SimpleNamespace

    ours._config = SimpleNamespace(data=SimpleNamespace(tokenizer=directory))
    system, user = {"role": "system", "content": "x"}, {"role": "user", "content": "why?"}
    answer = {"role": "assistant", "content": "because "}
    for messages, prompt in (([user], True), ([system, user], True), ([user, answer], False)):
        assert ours.apply_chat_template(messages, prompt) == reference.apply_chat_template(messages, prompt)
