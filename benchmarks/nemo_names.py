"""Names below ``nemo`` that Python files use: does Hexad's interface have all of a file's?

    git clone https://github.com/NVIDIA/NeMo
    python benchmarks/nemo_names.py NeMo/scripts/llm NeMo/scripts/performance --output nemo_names.json

Read are the imports of every file that imports ``nemo``, ``nemo_run``, ``megatron`` or ``lightning``, and
attributes of what they bind; a checkout's own ``nemo`` package is left out. A file is complete if all its
names can be imported, with Hexad's interface in place of ``nemo`` and ``megatron``. Needs NeMo-Run.

``--table src/hexad/compat/nemo/names.txt PACKAGE ...`` writes the names of ``nemo`` packages, such as a
checkout's. Their text is read; they are not imported: they need a GPU's packages.
"""

from argparse import SUPPRESS

from foreign_names import UsedNames, answer, count, parser, print_counts, table

SYSTEM = "nemo"

HEAD = """\
# The modules of nemo packages and their names: MODULE: NAME NAME CONSTANT=VALUE
# Values are JSON without blanks. Of NeMo's main at 8cfedd7203 (2.6.0rc0), and of v2.5.0rc0, v2.4.0, v2.3.0,
# v2.2.0, v2.1.0 and v2.0.0, without speech and NeMo 1's models. Written by benchmarks/nemo_names.py --table.
"""

LEFT_OUT = """
agents collections.asr collections.audio collections.common.tokenizers.text_to_speech
collections.multimodal.data collections.multimodal.models collections.multimodal.modules
collections.multimodal_autoregressive collections.nlp.data collections.nlp.losses collections.nlp.metrics
collections.nlp.models collections.nlp.parts collections.nlp.modules.common.chat_css
collections.nlp.modules.common.chatbot_component collections.nlp.modules.common.chatglm
collections.nlp.modules.common.hyena collections.nlp.modules.common.megatron
collections.nlp.modules.common.transformer collections.speechlm collections.speechlm2 collections.tts
collections.vision core.config.templates core.neural_types core.utils.numba_utils core.utils.k2_utils
""".split()
"""Packages of other subjects, and of NeMo 1."""


def main() -> None:
    """Count the names of checkouts, or write the table."""
    options_of = parser(__doc__)
    options_of.add_argument("--resolve", action="store_true", help=SUPPRESS)
    options = options_of.parse_args()
    if options.table:
        lines = (line + "\n" for line in table(options.sources, SYSTEM, LEFT_OUT))
        options.table.write_text(HEAD + "".join(lines), encoding="utf-8")
        return
    from hexad.compat import nemo

    if options.resolve:
        nemo.install()
        answer()
        return
    from hexad.compat.nemo.installed import CONSTANTS, MODULES, UNSUPPORTED

    used = UsedNames([SYSTEM, "nemo_run", "megatron", "lightning"])
    of_releases = (*CONSTANTS, *MODULES, *UNSUPPORTED)
    print_counts(count(options.sources, SYSTEM, used, of_releases), options.output)


if __name__ == "__main__":
    main()
