"""Your own phase in your own loop, on Ray actors that you made: python examples/embed_phase.py."""

import numpy as np
import ray

from dagrl import Batch, Bucket, Field, Input, ParallelLayout, Scheduler, Shard, Value, WorkerGroup, phase


@ray.remote(num_cpus=0)
class Regression:  # any class with the methods that phases name
    def gradient(self, batch: Batch) -> float:
        error = batch["x"] * batch.scalars["slope"] - batch["y"]
        return float((2 * error * batch["x"]).sum())

    def add(self, parts: list[float]) -> float:
        return sum(parts)


@phase(inputs={"x": Field("float32", "row"), "y": Field("float32", "row"), "lengths": Field("int64", "row")})
def gradient(workers: Shard, batch: Input) -> Value:
    return workers.reduce("add", workers.map("gradient", batch))


def main() -> None:
    ray.init("local", num_cpus=2)
    group = WorkerGroup.from_actors([Regression.remote() for _ in range(2)], ParallelLayout(dp=2), "workers")
    with Scheduler([group]) as scheduler:
        scheduler.add(gradient, buckets=[Bucket(8, 1)], scalars={"slope": 0.0})
        scheduler.compile()
        scheduler.warmup()
        x, slope = np.random.default_rng(0).normal(size=16).astype(np.float32), 0.0
        rows = Batch({"x": x, "y": 3 * x, "lengths": np.ones(16, np.int64)})
        for _ in range(20):  # `replay` splits the rows over both shards; the result has a value of each
            slope -= 0.02 * sum(scheduler.replay(gradient, rows.with_scalars(slope=slope)).result())
        print(f"slope {slope:.3f}")


if __name__ == "__main__":
    main()
