"""Reinforcement learning with GRPO (Shao et al., arXiv 2402.03300): a small model that adds two digits,
``7+5=`` -> ``12``, not well after a short training on right answers, learns it from the marks of its own.

    python examples/grpo.py
    torchrun --nproc-per-node 2 examples/grpo.py --generate data=2 parallel.tensor=2
    torchrun --nproc-per-node 4 examples/grpo.py --generate tensor=2,data=2 parallel.context=2

One engine trains and one generator writes, in the same processes, each in its own layout; after every step
the generator takes the engine's weights. With ``precision.exact`` the engine computes the very
log-probabilities that the generator sampled with: before the first update of a batch the importance ratio is
exactly 1, in any pair of layouts. ``precision.exact=false`` shows how far it is from 1 otherwise.
"""

import argparse
import random
from collections.abc import Sequence

import torch
from torch import Tensor

import hexad
from hexad.comm import merged
from hexad.engine.losses import Outputs

SETTINGS = {
    "model": {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "vocab": 257},
    "data": {"sequence": 64},
    "batch": {"micro": 1, "global": 8},
    "optimizer": {"lr": 7e-4, "weight_decay": 0.0, "clip": 1.0},
    "lr_schedule": {"kind": "constant", "warmup": 0},
    "precision": {"dtype": "fp32", "exact": True},
    "inference": {"cache_tokens": 16384, "block": 8, "sequences": 512},
}
PROMPTS, SAMPLES = 32, 8
"""Of a step: prompts, and answers to each."""
UPDATES = 2
"""With the answers of a step."""
CLIP = 0.2
"""By how much a ratio may differ from 1 before it has no gradient."""


def right_answer(prompt: str) -> str:
    """The sum, in two digits."""
    return f"{int(prompt[0]) + int(prompt[2]):02d}"


def mark(prompt: str, answer: str) -> float:
    """1 for the right answer, else 0."""
    return float(answer == right_answer(prompt))


def advantages(marks: Sequence[float]) -> list[float]:
    """How much better each answer of a group is than their mean, in standard deviations."""
    values = torch.tensor(marks, dtype=torch.float64)
    return ((values - values.mean()) / (values.std(correction=0) + 1e-4)).tolist()


class Objective:
    """GRPO's clipped objective, as a loss of the engine; of sequences without advantages the usual loss.

    Attributes:
        distance: the largest distance of a ratio from 1 since it was set to 0.
    """

    def __init__(self) -> None:
        self.distance = 0.0

    def __call__(self, outputs: Outputs, microbatch: hexad.Microbatch) -> Tensor:
        """This rank's part of the sum over tokens."""
        if not microbatch.extras:
            return -outputs.log_probabilities().sum()
        old, advantage = (microbatch.extras[name].flatten() for name in ("old", "advantage"))
        wanted = microbatch.labels.flatten() >= 0
        ratio = (outputs.log_probabilities() - old).where(wanted, 0.0).exp()
        self.distance = max(self.distance, float((ratio.detach() - 1).abs().max()))
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        return -torch.minimum(ratio * advantage, clipped * advantage).where(wanted, 0.0).sum()


def degrees(text: str) -> dict[str, int]:
    """A layout: ``tensor=2,data=2``."""
    return {name: int(ranks) for name, _, ranks in (pair.partition("=") for pair in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--warm", type=int, default=120, help="steps on right answers before")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--generate", type=degrees, default={}, metavar="AXIS=RANKS,...", help="the generator's layout"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of training")
    arguments = parser.parse_args()
    layout = arguments.generate
    config = hexad.load_config(SETTINGS, arguments.overrides)
    with hexad.launch(config) as run:
        objective = Objective()
        engine = hexad.Engine(run.resolved, run.mesh, loss=objective)
        chance = random.Random(0)
        warm_up(engine, chance, arguments.warm)
        with hexad.Generator(engine, **layout) as generator:
            learn(engine, generator, objective, chance, arguments.steps)


def prompts_of(chance: random.Random, count: int) -> list[str]:
    """Random prompts, the same on all ranks."""
    return [f"{chance.randrange(10)}+{chance.randrange(10)}=" for _ in range(count)]


def warm_up(engine: hexad.Engine, chance: random.Random, steps: int) -> None:
    """Train on right answers."""
    for _ in range(steps):
        texts = [prompt + right_answer(prompt) for prompt in prompts_of(chance, 64)]
        mine = [[*text.encode()] for text in texts[engine.mesh.data.rank :: engine.mesh.data.size]]
        multiple, given = engine.config.parallel.token_multiple, [4] * len(mine)
        engine.train_step([hexad.Microbatch.of_sequences(mine, multiple, given)])


def learn(
    engine: hexad.Engine,
    generator: hexad.Generator,
    objective: Objective,
    chance: random.Random,
    steps: int,
) -> None:
    """Train; the first rank prints a line for each step."""
    data, multiple = engine.mesh.data, engine.config.parallel.token_multiple
    for step in range(steps):
        prompts = prompts_of(chance, PROMPTS)
        # Tokens in, tokens out: the ids and log-probabilities that were sampled are those that are trained.
        asked = [{"prompt": list(prompt.encode())} for prompt in prompts]
        answers = generator.generate(asked, tokens=2, temperature=1.0, samples=SAMPLES, seed=step, logprobs=0)
        marks = [mark(prompts[answer.number], answer.text) for answer in answers]
        groups = (advantages(marks[first : first + SAMPLES]) for first in range(0, len(marks), SAMPLES))
        advantage = [value for group in groups for value in group]
        mine = range(data.rank, len(answers), data.size)
        batch = hexad.Microbatch.of_sequences(
            [[*prompts[answers[n].number].encode(), *answers[n].tokens] for n in mine],
            multiple,
            given=[4] * len(mine),
            extras={
                "old": [[logprob.value for logprob in answers[n].logprobs or ()] for n in mine],
                "advantage": [[advantage[n]] * len(answers[n].tokens) for n in mine],
            },
        )
        distances = []
        for _ in range(UPDATES):
            objective.distance = 0.0
            engine.train_step([batch])
            distances.append(merged(objective.distance, engine.mesh.world, max))
        generator.update(engine)
        if generator.first:
            ratios = ", ".join(f"{distance:.2g}" for distance in distances)
            print(
                f"step {step + 1:3d}  right {sum(marks) / len(marks):6.1%}  "
                f"largest |ratio - 1| in each update: {ratios}",
                flush=True,
            )


if __name__ == "__main__":
    main()
