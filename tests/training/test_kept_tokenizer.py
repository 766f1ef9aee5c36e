"""A run keeps its tokenizer and names its files absolutely: it works from any directory, and without the
original."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hexad.checkpoint.kept_tokenizer import same_ids
from hexad.checkpoint.manifest import read_manifest
from hexad.dataset.text.tokenizer import load_tokenizer
from hexad.generation.prompts import PromptEncoder
from hexad.planning.saved_model import find_model, generating_model

from ..dataset.chats import CHATML, CONVERSATIONS, GENERATION, TEXT, chat_tokenizer, write_lines
from .command import RunFile, call, write_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    """One that was started with relative paths in ``here``; the working directory is then ``elsewhere``."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    elsewhere.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    chat_tokenizer(Path("tok"))
    Path("tok/additional_chat_templates").mkdir()
    Path("tok/additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    Path("a.txt").write_text("\n".join(TEXT * 3))
    assert call("data", "build", "--input", "a.txt", "--output", "d", "--tokenizer", "tok").status == 0
    settings = {"run": {"steps": 4, "dir": "run"}, "data": {"tokenizer": "tok"}}
    write_run(Path(), "d", **settings)
    assert call("train", "run.yaml").status == 0
    monkeypatch.chdir(elsewhere)
    return RunFile(here / "run.yaml", here / "run")


PROMPT = ("--prompt", "the sky", "--tokens", "5", "--json")


def test_generate_evaluate_export_and_resume_work_elsewhere_and_without_the_original(run: RunFile) -> None:
    expected = call("generate", str(run.directory), *PROMPT)
    assert (expected.status, expected.err) == (0, "")
    original = load_tokenizer(str(run.path.parent / "tok"))
    shutil.rmtree(run.path.parent / "tok")
    assert call("generate", str(run.directory), *PROMPT).out == expected.out
    assert call("evaluate", str(run.directory), "--data", str(run.path.parent / "d")).status == 0
    result = call("checkpoint", "export", "--from", str(run.directory), "--to", "hf", "--json")
    assert result.status == 0 and json.loads(result.out)["notes"] == []
    theirs = AutoTokenizer.from_pretrained("hf")
    assert theirs.encode("Why is the sky") == original.encode("Why is the sky")
    assert set(theirs.chat_template) == {"default", "tool_use"} and theirs.eos_token_id == original.eod
    resumed = call("train", str(run.directory / "config.yaml"), "run.steps=6")
    assert resumed.status == 0, resumed.err
    assert "changed since" not in resumed.err and "resuming from" in resumed.err
    assert len(run.losses) == 6
    assert list(Path().iterdir()) == [Path("hf")]  # nothing is written into the working directory


def test_the_same_run_yaml_resumes_without_the_original(
    run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.path.parent)
    shutil.move("tok", "moved")
    resumed = call("train", "run.yaml", "run.steps=5")
    assert resumed.status == 0 and "changed since" not in resumed.err, resumed.err
    # Another one that does not exist is a mistake.
    assert "no such file or directory" in call("train", "run.yaml", "data.tokenizer=typo").error
    # Another one that exists takes the place of the copy.
    assert call("train", "run.yaml", "data.tokenizer=moved", "run.steps=6").status == 0
    assert Path("run/tokenizer/.origin").read_text().splitlines()[0] == str(Path("moved").absolute())


NEUTRAL = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}
"""A post-processor that adds nothing, as transformers saves it."""


def test_the_same_ids_in_other_files(tmp_path: Path) -> None:
    one = chat_tokenizer(tmp_path / "one")
    AutoTokenizer.from_pretrained(one).save_pretrained(tmp_path / "two")
    assert same_ids(str(one), str(tmp_path / "two"))
    tree = json.loads(Path(str(one), "tokenizer.json").read_text())
    assert tree["model"]["merges"]
    tree["model"]["merges"] = [" ".join(pair) for pair in tree["model"]["merges"]]  # as older versions wrote
    (tmp_path / "two/tokenizer.json").write_text(json.dumps(tree))
    assert same_ids(str(one), str(tmp_path / "two"))
    tree["model"]["merges"].reverse()
    (tmp_path / "two/tokenizer.json").write_text(json.dumps(tree))
    assert not same_ids(str(one), str(tmp_path / "two"))


def test_resuming_with_a_tokenizer_of_other_ids_is_refused(
    run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the original was replaced under its old path."""
    monkeypatch.chdir(run.path.parent)
    kept = run.newest / "tokenizer"
    file, naming = Path("tok/tokenizer.json"), Path("tok/tokenizer_config.json")
    vocabulary, names = json.loads(file.read_text()), json.loads(naming.read_text())
    # As other programs save it, with another template: the same ids.
    joined = dict.fromkeys(("truncation", "padding"), None) | {"post_processor": NEUTRAL}
    file.write_text(json.dumps({**vocabulary, **joined}, indent=4))
    Path("tok/chat_template.jinja").write_text("{{ messages }}")
    assert call("train", "run.yaml", "run.steps=5").status == 0
    assert (run.directory / "tokenizer/chat_template.jinja").read_text() == "{{ messages }}"
    tokens = vocabulary["model"]["vocab"]
    tokens["a"], tokens["b"] = tokens["b"], tokens["a"]
    file.write_text(json.dumps(vocabulary))
    other = call("train", "run.yaml", "run.steps=6")
    newest = "run/checkpoints/step-00000005"
    wanted = f"data.tokenizer: found tok, whose ids may differ from those of {newest}/tokenizer, with which "
    assert other.status == 2 and other.error.startswith(wanted) and f"model.load={newest}" in other.error
    assert call("config", "check", "run.yaml").error == other.error
    for setting in ("byte", str(kept)):
        result = call("train", "run.yaml", f"data.tokenizer={setting}", "run.steps=6", "data.train=d")
        assert (result.status == 0) == (setting != "byte"), result.err
    # The same vocabulary with another end of documents; what the data was built with is not known.
    file.write_text((kept / "tokenizer.json").read_text())
    naming.write_text(json.dumps({**names, "eos_token": "<|im_end|>"}))
    Path("d.hexad.json").unlink()
    assert "whose ids may differ" in call("train", "run.yaml", "run.steps=7").error


def test_a_checkpoint_is_complete_by_itself(run: RunFile, tmp_path: Path) -> None:
    expected = call("generate", str(run.directory), *PROMPT).out
    shutil.copytree(run.newest, tmp_path / "alone")
    shutil.rmtree(run.path.parent)
    assert call("generate", str(tmp_path / "alone"), *PROMPT).out == expected
    assert call("checkpoint", "verify", str(tmp_path / "alone")).status == 0
    names = {name for name in read_manifest(tmp_path / "alone").files if name.startswith("tokenizer/")}
    expected_names = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    expected_names |= {"additional_chat_templates/tool_use.jinja"}
    assert names == {f"tokenizer/{name}" for name in expected_names}
    damaged = tmp_path / "alone" / "tokenizer" / "tokenizer.json"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b" ")
    assert "tokenizer/tokenizer.json" in call("checkpoint", "verify", str(tmp_path / "alone")).out


def test_saved_paths_are_absolute(run: RunFile) -> None:
    for path in (run.directory / "config.yaml", run.newest / "config.yaml"):
        saved = yaml.safe_load(path.read_text())
        assert saved["run"]["dir"] == str(run.directory)
        assert saved["data"]["train"] == str(run.path.parent / "d")
        assert saved["data"]["tokenizer"] == str(run.directory / "tokenizer")


@pytest.mark.parametrize("kind", [pytest.param("byte", marks=pytest.mark.slow), "file"])
def test_tokenizers_without_a_directory(run: RunFile, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A file is kept under the name that a directory with it needs; ``byte`` has no files."""
    here = run.path.parent
    monkeypatch.chdir(here)
    (here / "tok" / "tokenizer.json").rename(here / "tok" / "other.json")
    spec = "byte" if kind == "byte" else "tok/other.json"
    options = (f"data.tokenizer={spec}", "run.dir=second", "data.train=e", "run.steps=1")
    assert call("data", "build", "--input", "a.txt", "--output", "e", "--tokenizer", spec).status == 0
    assert call("train", "run.yaml", *options).status == 0
    kept = here / "second" / "tokenizer"
    assert kept.exists() == (kind == "file")
    if kind == "file":
        names = {path.name for path in kept.iterdir()} - {".origin"}
        assert names == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
        assert load_tokenizer(str(kept)).eod == 0
    assert call("generate", "second", *PROMPT).status == 0


OTHER = CHATML.replace("You help.", "You are brief.")
ASK = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}


def conversations(directory: Path, name: str, tokenizer: str, template: str | None) -> None:
    """``directory/name``, conversations rendered by a template given as a file, or by the tokenizer's own."""
    write_lines(directory / "chat.jsonl", [{"messages": CONVERSATIONS[0]}] * 4)
    given: tuple[str, ...] = ()
    if template is not None:
        (directory / f"{name}.jinja").write_text(template)
        given = ("--chat-template", str(directory / f"{name}.jinja"))
    build = ("data", "build", "--input", str(directory / "chat.jsonl"), "--workers", "1")
    result = call(*build, "--output", str(directory / name), "--tokenizer", tokenizer, *given)
    assert result.status == 0, result.err


@pytest.mark.parametrize("kind", ["without", "another", "inside", "byte"])
def test_the_template_of_the_data_is_kept(tmp_path: Path, kind: str) -> None:
    """That of ``--chat-template FILE``, where the tokenizer has none or another, in a file of its own or in
    ``tokenizer_config.json``: for generation, and for transformers after the export."""
    spec = "byte"
    if kind != "byte":
        own = None if kind == "without" else GENERATION
        spec = chat_tokenizer(tmp_path / "tok", own, inside=kind == "inside")
    conversations(tmp_path, "d", spec, OTHER)
    run = write_run(
        tmp_path, str(tmp_path / "d"), run={"steps": 1}, data={"tokenizer": spec, "sequence": 192}
    )
    result = run.train()
    assert result.status == 0, result.err
    said = "has the chat template of data.train, which is not that of data.tokenizer"
    assert (said in result.err) == (kind in ("another", "inside"))
    resumed = run.train("run.steps=2")
    assert resumed.status == 0 and "resuming from" in resumed.err, resumed.err
    expected = load_tokenizer(spec).encode(rendered := _oracle(OTHER, ASK["messages"]))
    assert "You are brief." in rendered
    write_lines(tmp_path / "ask.jsonl", [ASK])
    for source in (run.directory, run.newest):
        saved = generating_model(find_model(str(source)), (), 1)
        assert PromptEncoder(saved, saved.tokenizer()).ids(ASK, "prompt 1") == tuple(expected)
        asked = call("generate", str(source), "--prompts", str(tmp_path / "ask.jsonl"), "--tokens", "2")
        assert asked.status == 0, asked.err
    assert call("checkpoint", "verify", str(run.directory)).status == 0
    exported = call(
        "checkpoint", "export", "--from", str(run.directory), "--to", str(tmp_path / "hf"), "--json"
    )
    assert json.loads(exported.out)["notes"] == []
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = theirs.apply_chat_template(ASK["messages"], add_generation_prompt=True, return_dict=False)
    assert ids == expected


def _oracle(template: str, messages: list[dict[str, str]]) -> str:
    """A conversation as transformers renders it by a template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE()))
    return str(
        tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    )


def test_a_resumed_run_keeps_the_template(tmp_path: Path) -> None:
    """From its own configuration, whose tokenizer is the copy; data of another template replace it."""
    spec = chat_tokenizer(tmp_path / "tok")
    (tmp_path / "tok" / "additional_chat_templates").mkdir()
    (tmp_path / "tok" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    conversations(tmp_path, "d", spec, OTHER)
    conversations(tmp_path, "own", spec, None)
    run = write_run(
        tmp_path, str(tmp_path / "d"), run={"steps": 1}, data={"tokenizer": spec, "sequence": 192}
    )
    assert run.train().status == 0
    shutil.rmtree(tmp_path / "tok")
    kept = run.directory / "tokenizer"
    again = ("train", str(run.directory / "config.yaml"))
    for step, (options, expected) in enumerate(
        [((), OTHER), ((f"data.train={tmp_path / 'own'}",), CHATML)], 2
    ):
        result = call(*again, f"run.steps={step}", *options)
        assert result.status == 0, result.err
        assert (kept / "chat_template.jinja").read_text() == expected
        # One given as a file renders conversations with tools too.
        assert (kept / "additional_chat_templates" / "tool_use.jinja").exists() == (expected == CHATML)
        assert (kept / ".origin").read_text().splitlines()[0] == str(tmp_path / "tok")


def test_data_of_different_templates_are_refused(tmp_path: Path) -> None:
    """Also where one is the tokenizer's own; text beside conversations has none."""
    spec = chat_tokenizer(tmp_path / "tok")
    for name, template in (("a", OTHER), ("b", None), ("c", CHATML)):
        conversations(tmp_path, name, spec, template)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "\n".join(TEXT * 2)}))
    build = ("data", "build", "--input", str(tmp_path / "text.jsonl"), "--output", str(tmp_path / "text"))
    assert call(*build, "--tokenizer", spec, "--chat-template", str(tmp_path / "a.jinja")).status == 0
    run = write_run(tmp_path, "", run={"steps": 1}, data={"tokenizer": spec, "sequence": 192})

    def blend(*names: str) -> str:
        return "data.train=[" + ", ".join(f"[1, {tmp_path / name}]" for name in names) + "]"

    for names in (("a", "b"), ("text", "c", "a")):
        error = run.train(blend(*names)).error
        assert error.startswith(
            f"data.train: found {tmp_path / names[-2]} and {tmp_path / names[-1]}, whose "
        )
    assert not run.directory.exists()
    result = run.train(blend("b", "c", "text"))
    assert result.status == 0, result.err
