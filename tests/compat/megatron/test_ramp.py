"""``--rampup-batch-size`` against megatron-core's own calculator."""

import pytest

from hexad.compat.megatron.translate import translate
from hexad.config.schema import BatchSettings

from .test_translate import SMALL, problem, without

CASES = [
    (12, 4, 4, 30),
    (1536, 16, 16, 5_859_375),
    (2048, 192, 16, 9_765_625),
    (100, 10, 30, 7),
    (7, 1, 1, 1000),
    (60, 20, 40, 1),
    (50, 1, 1, 3),
    (8, 1, 1, 9),  # after 9 samples the quotient of floats is 6.999...
]
"""Batch size, start, increment, samples."""


@pytest.mark.parametrize(("size", "start", "increment", "samples"), CASES)
def test_sizes_are_megatrons(size: int, start: int, increment: int, samples: int) -> None:
    module = pytest.importorskip("megatron.core.num_microbatches_calculator")
    calculator = module.RampupBatchsizeNumMicroBatchesCalculator(
        size, 1, 1, False, rank=1, start_global_batch_size=start, batch_size_increment=increment,
        ramup_samples=samples,
    )  # fmt: skip

    def wanted(consumed: int) -> int:
        calculator.update(consumed, consistency_check=True)
        return int(calculator.get_current_global_batch_size())

    batch = BatchSettings.model_validate({"micro": 1, "global": size, "ramp": [start, increment, samples]})
    steps = consumed = 0
    while batch.size(consumed) < size:
        assert batch.size(consumed) == wanted(consumed)
        steps, consumed = steps + 1, consumed + wanted(consumed)
    assert wanted(consumed) == size and batch.samples(steps) == consumed
    changes = [
        samples * number * increment // (size - start) for number in range((size - start) // increment)
    ]
    for near in (*changes, samples):
        for samples_so_far in (near, near + 1):
            assert batch.size(samples_so_far) == wanted(samples_so_far)


def test_the_flag_is_translated() -> None:
    """Iterations are counted as Megatron-LM does: of the ramp each that begins in it, then complete ones."""
    line = [*without(SMALL, "--train-iters", "--global-batch-size"), "--global-batch-size", "12"]
    line += ["--train-samples", "100", "--lr-warmup-samples", "24", "--rampup-batch-size", "4", "4", "30"]
    tree = translate(line).tree
    assert tree["batch"] == {"micro": 1, "global": 12, "ramp": [4, 4, 30]}
    # 32 samples in six iterations of the ramp; of the 68 left, 60 in five more.
    assert tree["run"]["steps"] == 11
    assert tree["lr_schedule"]["warmup"] == 2
    assert problem(*line[:-1]).field == "--rampup-batch-size"
    refused = problem(*SMALL, "--rampup-batch-size", "1", "1", "9")
    assert "with --train-iters; use --train-samples" in str(refused)
