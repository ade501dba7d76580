# SPDX-License-Identifier: Apache-2.0
"""Steps of a toy as CUDA graphs and without, in this process or as one of several ranks.

    torchrun --nproc_per_node 2 -m tests.pretrain.graph_ranks FOLDER     # on GPUs, of make_toy

Without a GPU a stand-in replays the work as a graph would: with the step's number, the tensors and
all Python values as they were when it was recorded.
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from pretrain import cpu_compat

if __name__ == "__main__":
    cpu_compat.enable()

from pretrain import cuda_graph, recording
from pretrain.config import make_config
from pretrain.data.dataset import open_dataset
from pretrain.data.loader import TrainLoader
from pretrain.engine import build_engine
from pretrain.initialize import initialize, shut_down
from pretrain.train_step import record_steps, train_step
from tests.toy import toy_config

TWO = {"micro_batch_size": 4, "steps": 8}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STEPS = 4


class Standin:
    """Work that is done again as it was recorded."""

    def __init__(self, engine, work, place):
        self.engine, self.work, self.place = engine, work, place
        self.step = engine.precision_state.step
        self.replays = 0

    def replay(self):
        state, now = self.engine.precision_state, self.engine.precision_state.step
        state.step = self.step
        try:
            with recording.leave_random_states():
                self.place.copy_(self.work())
        finally:
            state.step = now
        self.replays += 1


def stand_in(made):
    """What `StepGraph._record_on_device` is without a GPU; stand-ins go to the list `made`."""

    def on_device(self):
        def work():
            return self._with_table(lambda: self.work(self._batches))

        made.append(Standin(self.engine, work, torch.zeros(2, dtype=torch.float64)))
        return made[-1], made[-1].place

    return on_device


@contextmanager
def noted_graphs():
    """The list of what is recorded meanwhile."""
    made = []
    owner, name, value = cuda_graph.StepGraph, "_record_on_device", stand_in(made)
    if torch.cuda.is_available():
        original = cuda_graph.record

        def value(work):
            made.append(original(work))
            return made[-1]

        owner, name = cuda_graph, "record"
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield made
    finally:
        setattr(owner, name, kept)


def run_steps(folder, graph, steps, pattern="*-", **sections):
    """[(loss, gradient norm, tokens) of each step], weights of this rank by name, the engine."""
    config = make_config(toy_config(folder, pattern, **sections))
    world = initialize(config.parallel, seed=config.run.seed)
    data = open_dataset(config.data, config.model.seq_length, seed=7)
    cuda_graph.leave_default_stream()
    engine = build_engine(config, world, data.vocab_size)
    if graph:
        record_steps(engine)
    size = config.train.global_batch_size
    ranks = (world.data_parallel_rank, world.data_parallel_size)
    loader = TrainLoader(data, size, config.train.micro_batch_size, *ranks)
    results = []
    for step in range(1, steps + 1):
        engine.plan.update((step - 1) * size)
        engine.precision_state.set_step(step)
        results.append(train_step(engine, loader.step((step - 1) * size)))
    loader.close()
    weights = {n: p.detach().clone() for n, p in engine.chunks[0].named_parameters()}
    return [(r.loss, r.grad_norm, r.tokens) for r in results], weights, engine


def compare(folder, recipe, communicate, dtype, pattern="*-", launched=None):
    """(whether graphs and launches gave the same bits, how many graphs, losses): two ranks.

    launched: `communicate` of the launches; as the graphs' if None.
    """

    def run(graph, how):
        return run_steps(
            folder, graph, STEPS, pattern, train=TWO | {"dtype": dtype}, parallel=TP2,
            precision={"recipe": recipe, "communicate": how},
        )  # fmt: skip

    plain = run(False, launched or communicate)
    with noted_graphs() as made:
        recorded = run(True, communicate)
    same = plain[0] == recorded[0]
    same &= all(torch.equal(plain[1][n], recorded[1][n]) for n in plain[1])
    return same, len(made), [loss for loss, _, _ in plain[0]]


def main(folder):
    """Prints, on rank 0, a line of JSON with what all ranks say of each recipe."""
    found = {}
    for recipe in ("bf16", "nvfp4", "nvfp4_fast", "nvfp4_pow2"):
        for how in ("bf16", "packed") if recipe != "bf16" else ("bf16",):
            said = [None] * 2
            own = compare(folder, recipe, how, "bf16")
            dist.all_gather_object(said, own)
            found[f"{recipe}, {how}"] = said
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps(found), flush=True)
    shut_down()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
