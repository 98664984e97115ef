"""Real training with SOAP's bases refreshed at every step: as with the usual period, and what was bounded is told."""

from canzona_cli.training.assemble import assemble, join
from canzona_cli.training.data import Batch, BatchStream
from canzona_cli.training.step import train_step
from tests.dist import jobs
from tests.dist.ranks import run_ranks
from tests.dist.samples import RandomTokens

STEPS, DISTINCT = 16, 8
FIXED = (
    *jobs.SMALL,
    "gpus=1",
    "parallel.tp=1",
    "parallel.pp=1",
    "train.precision=fp32",
    "train.batch_tokens=256",
    f"train.steps={STEPS}",
    "optimizer=soap",
    "optimizer.lr=3e-3",
    "schedule.decay=constant",
    "schedule.warmup_steps=0",
)


class Few(RandomTokens):
    """The same samples again and again, which a model of this size learns by heart."""

    def __getitem__(self, index: int) -> Batch:
        return super().__getitem__(index % DISTINCT)


def test_refreshed_at_every_step_it_learns_as_it_does_otherwise() -> None:
    """Unbounded: a loss of 5.5 after these steps, where the usual period has 4.1."""
    runs = {period: jobs.resolve(*FIXED, f"optimizer.precondition_frequency={period}") for period in (1, 10)}

    def rank() -> dict[int, tuple[float, float, int]]:
        found, world = {}, join(*runs[10])
        for period, (config, layout) in runs.items():
            trainee = assemble(config, world, jobs.planned(config, layout))
            samples = Few(
                samples=STEPS * layout.global_batch_size,
                seq_length=config.train.seq_length,
                vocab_size=config.model.vocab_size,
            )
            batches = BatchStream(samples, world)
            steps = [train_step(trainee, batches) for _ in range(STEPS)]
            weights = [
                param for name, param in trainee.chunks[0].named_parameters() if param.dim() == 2 and "layers" in name
            ]
            largest = max(float(weight.detach().abs().max()) for weight in weights)
            found[period] = steps[-1].loss, largest, sum(step.fallbacks for step in steps)
        return found

    [found] = run_ranks(1, rank)
    (loss, largest, bounded), (usual_loss, usual_largest, none) = found[1], found[10]
    assert loss < usual_loss + 0.2
    assert largest < 1.5 * usual_largest
    assert bounded > 0
    assert none == 0
