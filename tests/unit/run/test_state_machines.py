"""Random histories with crashes: the buffer of trajectories and the checkpoint store, each against a plain model."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dagrl.machine import DEV_SHM  # memory: each save waits for the disk several times
from dagrl.rl.rollout.experience import TrajectoryBuffer
from dagrl.run.checkpoint_store import MANIFEST, CheckpointStore, TrainState
from tests.unit.run.test_checkpoints import saving

HISTORIES = settings(deadline=None, max_examples=15, stateful_step_count=30)


class Trajectories(RuleBasedStateMachine):
    """No group is trained twice, too old, or forgotten, whatever finishes in which order and whenever the run restarts."""

    @initialize(size=st.integers(1, 4), age=st.integers(0, 3))
    def begin(self, size: int, age: int) -> None:
        self.size, self.age = size, age
        self.buffer: TrajectoryBuffer[int] = TrajectoryBuffer(size, age)
        self.begun: dict[int, int] = {}  # number -> version it was started with
        self.running: set[int] = set()
        self.done: set[int] = set()
        self.training: set[int] = set()
        self.trained: set[int] = set()
        self.dropped: set[int] = set()

    @precondition(lambda self: self.buffer.room() > 0)
    @rule()
    def start(self) -> None:
        number = self.buffer.start()
        assert number not in self.begun
        self.begun[number] = self.buffer.version
        self.running.add(number)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        self.buffer.finish(number, number)
        self.running.remove(number)
        self.done.add(number)

    @precondition(lambda self: self.running | self.done)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running | self.done)))
        self.buffer.drop(number, "zero_variance")
        self.running.discard(number)
        self.done.discard(number)
        self.dropped.add(number)

    @precondition(lambda self: not self.training)
    @rule()
    def take(self) -> None:
        groups = self.buffer.take()
        if groups is None:
            assert self.running or len(self.done) < self.size, "all that was started is finished, and enough for a step"
            return
        assert len(groups) == self.size
        for group in groups:
            assert group.payload == group.number and group.number in self.done
            assert group.version == self.begun[group.number]
            assert self.buffer.version - group.version <= self.age
        self.training = {group.number for group in groups}
        self.done -= self.training

    @precondition(lambda self: self.training)
    @rule()
    def advance(self) -> None:
        self.buffer.advance(self.buffer.version + 1)
        assert not self.trained & self.training
        self.trained |= self.training
        self.training = set()

    @rule()
    def crash_and_resume(self) -> None:
        """Starts the untrained groups again in a new process."""
        old = self.buffer
        self.running |= self.done | self.training
        self.done, self.training = set(), set()
        self.buffer = TrajectoryBuffer(self.size, self.age, version=old.version)
        self.buffer.next_number = old.next_number
        for number in self.running:
            self.buffer.start(number)
            self.begun[number] = old.version

    @invariant()
    def every_group_is_somewhere(self) -> None:
        places = [self.running, self.done, self.training, self.trained, self.dropped]
        assert sorted(number for place in places for number in place) == sorted(self.begun)
        assert self.buffer.outstanding == len(self.running) + len(self.done) + len(self.training)
        assert self.buffer.dropped.total() == self.buffer.dropped["zero_variance"]

    def teardown(self) -> None:
        """Checks that the buffer never blocks for good: from any state, batch after batch is trained."""
        if not hasattr(self, "buffer"):
            return
        for _ in range(self.age + 3):
            while self.buffer.room():
                self.start()
            for number in sorted(self.running):
                self.buffer.finish(number, number)
            self.done |= self.running
            self.running = set()
            if not self.training:
                self.take()
            assert self.training
            self.advance()
            self.every_group_is_somewhere()


class Checkpoints(RuleBasedStateMachine):
    """After any crash the newest published checkpoint is whole, and only what may go is gone."""

    @initialize(last=st.integers(1, 3), best=st.none() | st.integers(0, 2))
    def begin(self, last: int, best: int | None) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="dagrl-states-", dir=DEV_SHM))
        self.last, self.best = last, best
        self.metrics: dict[int, float] = {}  # of the steps published, and of those left after a crash
        self.step = 0
        self.store = self.opened()

    def opened(self) -> CheckpointStore:
        store = CheckpointStore(self.root, keep_top_k=self.best, keep_last_k=self.last)
        store.recover()
        return store

    def state(self, metric: float) -> TrainState:
        self.step += 1
        return TrainState(self.step, {"position": self.step}, metric)

    @rule(metric=st.floats(-9, 9))
    def save(self, metric: float) -> None:
        state = self.state(metric)
        with saving(self.store, state) as directory:
            (directory / "part").write_text(str(state.step))
        self.metrics[state.step] = metric

    @rule(metric=st.floats(-9, 9), error=st.sampled_from([OSError, KeyboardInterrupt]))
    def fail_to_save(self, metric: float, error: type[BaseException]) -> None:
        try:
            with saving(self.store, self.state(metric)) as directory:
                (directory / "part").write_text("half")
                raise error
        except error:
            self.step -= 1

    @rule(metric=st.floats(-9, 9), whole=st.booleans())
    def crash_while_saving(self, metric: float, whole: bool) -> None:
        """Crashes with all files written but not named, or before the manifest. The next process cleans up."""
        state = self.state(metric)
        other = CheckpointStore(self.root / "elsewhere")
        with saving(other, state) as directory:
            (directory / "part").write_text(str(state.step))
        written = other.root / f"step_{state.step:08d}"
        if not whole:
            (written / MANIFEST).unlink()
        written.rename(self.root / f"{written.name}.tmp")
        shutil.rmtree(other.root)
        self.store = self.opened()
        if whole:
            self.metrics[state.step] = metric
        else:
            self.step -= 1

    @precondition(lambda self: self.metrics)
    @rule()
    def crash_while_removing(self) -> None:
        """Crashes after a checkpoint that is not the newest was renamed, before its files were gone."""
        older = [each for each in self.store.all() if each.state.step != max(self.metrics)]
        if older:
            older[0].directory.rename(older[0].directory.with_suffix(".old"))
        self.store = self.opened()
        self.metrics = {each.state.step: self.metrics[each.state.step] for each in self.store.all()}

    @invariant()
    def what_is_needed_is_there(self) -> None:
        if not self.metrics:
            return
        found: dict[int, Any] = {each.state.step: each for each in self.store.all()}
        newest = sorted(self.metrics)[-self.last :]
        latest = self.store.latest()
        assert latest is not None and latest.state.step == max(self.metrics)
        assert (latest.directory / "part").read_text() == str(latest.state.step)
        assert set(newest) <= set(found) <= set(self.metrics)
        if self.best:
            top = max(self.metrics, key=lambda step: (self.metrics[step], step))
            assert top in found, "the best one ever published is kept"
        assert not [path for path in self.root.iterdir() if path.suffix], "nothing half-done is left"

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)


Trajectories.TestCase.settings = settings(HISTORIES, max_examples=25, stateful_step_count=50)
Checkpoints.TestCase.settings = settings(HISTORIES, max_examples=8, stateful_step_count=12)
TestTrajectories = Trajectories.TestCase
TestCheckpoints = Checkpoints.TestCase
