"""Scheduling of cells and handling of their exits. Several coordinators can share a directory."""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from analysis.design.resources import gpus_of, processes_of
from analysis.results import Cell, Plan, layout
from analysis.sweep.job import BUSY, MISPLACED, STOPPED, USAGE, Job, software
from analysis.sweep.launchers import Exit, Launcher
from analysis.sweep.lock import lock_choice
from analysis.sweep.progress import Clock, Progress, duration
from analysis.sweep.states import SETTLED, Ended, State, States, survey
from analysis.sweep.store import Store, trim
from lit_klrb.errors import OUTAGE
from lit_klrb.redaction import environment_names

# Attempts without a result are repeated, as disks fill up and processes get killed. Divergence is a result.
ATTEMPTS = 3
# Seconds before another attempt at a cell that lacks what it finds outside, such as a served teacher or a
# scheduler that answers: ten minutes in all. Such an attempt says nothing about the cell or its arm. One that
# has saved a newer checkpoint starts the count anew.
PATIENCE = (5, 10, 20, 40, 80, 160, 320)
# Seconds between removals of working files, each of which looks at every published cell.
TRIM_SECONDS = 60.0
POLL_SECONDS = 0.3
GB = 10**9
# GB that the folders of finished cells may have in all; those of the oldest results are removed.
STORAGE = 10.0


class Coordinator:
    """Runs the cells of a plan until each has a result, has failed, or is blocked by one it needs.

    Args:
        plan: The plan.
        cells: Its cells, each after those it needs.
        store: The sweep's directory.
        launcher: Runs the cells.
        progress: Reports the progress.
        storage: GB that the folders of finished cells may have in all.

    Raises:
        DamagedFileError: If a published result was changed.
    """

    def __init__(
        self,
        plan: Plan,
        cells: Sequence[Cell],
        store: Store,
        launcher: Launcher,
        progress: Progress,
        storage: float = STORAGE,
    ) -> None:
        self._plan, self._store, self._storage = plan, store, storage
        self._launcher, self._progress = launcher, progress
        self._cells = {cell.id: cell for cell in cells}
        self._gpus = {cell.id: gpus_of(plan, cell) for cell in cells}
        found = survey(cells, store)
        self._states = States({cell.id: found[cell.id] for cell in cells})
        self._trials = [cell for cell in cells if cell.trial is not None]
        self._required = {need for cell in self._in(State.TODO) for need in cell.needs}
        self._rates: Mapping[str, float] | None = None
        self._attempts = dict.fromkeys(self._cells, 0)
        self._clock = Clock(cells, store)
        self._reasons: dict[str, str] = {}
        self._ran = 0
        self._stopped = False
        self._outages: Counter[str] = Counter()
        self._saved: dict[str, int] = {}  # cell -> when its checkpoint was written, before it was started
        self._not_before: dict[str, float] = {}
        # What a machine lacks -> cells that it was given
        self._misplaced: defaultdict[str, set[str]] = defaultdict(set)
        self._trimmed = time.monotonic()
        self._token = store.token(create=True)

    def run(self, asked_to_stop: Callable[[], bool] = lambda: False) -> Ended:
        """Run the missing cells. Published results remain valid, however this call ends.

        Args:
            asked_to_stop: Called several times per second. Once it returns true, no more cells start; running
                cells are asked to save a checkpoint and exit, and are waited for.
        """
        self._progress.counted(len(self._in(*SETTLED)), len(self._cells))
        try:
            while (not self._stops(asked_to_stop) and self._submit()) or self._in(State.RUNNING):
                ended = self._launcher.wait(POLL_SECONDS)
                # The signal to this process may have reached the cells as well
                self._stops(asked_to_stop)
                for exit in ended:
                    self._ended(self._cells[exit.cell_id], exit)
        finally:
            self._launcher.stop()
        if not self._stopped:
            tuned = [cell for cell in self._in(State.TODO) if cell.tuned_by]
            if any(self._states[trial.id] not in SETTLED for trial in self._trials):
                self._block(tuned, "a cell of the tuning stage has no result")
            elif self._rates is not None:
                self._block(tuned, "its arm diverged at every rate of the tuning stage")
            self._block(self._in(State.TODO), "a cell it starts from has no checkpoint")
        self._trim()
        self._store.tidy()
        refused = layout.result_paths(self._store.directory, layout.REFUSED)
        refused = [path for path in refused if path.stem in self._cells]
        stopped = self._stopped and bool(self._in(State.TODO))
        return Ended(self._states, self._reasons, self._ran, refused, stopped)

    def _in(self, *states: State) -> list[Cell]:
        return [self._cells[cell] for cell in self._states.of(*states)]

    def _submit(self) -> bool:
        """Fill the free slots; return whether a cell is run by another coordinator, or waits for its time."""
        elsewhere, running = False, self._in(State.RUNNING)
        free, gpus = self._launcher.slots - len(running), self._launcher.gpus
        if not free:
            return False
        taken = sum(self._gpus[cell.id] for cell in running)
        for cell in self._in(State.TODO):
            if gpus is not None and taken + self._gpus[cell.id] > gpus:
                continue
            if not all(self._states[need] is State.DONE for need in cell.needs):
                continue
            if cell.tuned_by and self._rate(cell) is None:
                continue
            if self._store.is_settled(cell.id, cell.id in self._required):
                self._settle(cell)
            elif self._not_before.get(cell.id, 0.0) > time.monotonic() or self._store.is_claimed(cell.id):
                elsewhere = True
            else:
                started = self._start(cell)
                free -= started
                taken += started * self._gpus[cell.id]
                elsewhere |= not started
                if not free:
                    break
        return elsewhere

    def _start(self, cell: Cell) -> bool:
        rate, required = self._rate(cell) if cell.tuned_by else None, cell.id in self._required
        where, module, threads = self._store.directory, self._plan.module, self._plan.threads_of(cell.stage)
        # Where cells run on other machines, those are compared with this one
        versions = software(module, threads) if self._launcher.remote else {}
        job = Job(
            cell,
            where,
            module,
            required,
            rate,
            threads,
            processes_of(cell),
            self._gpus[cell.id],
            token=self._token,
            software=versions,
            environment={name: os.environ.get(name) for name in environment_names(cell.config)},
        )
        self._saved[cell.id] = self._store.saved(cell.id)
        try:
            self._launcher.submit(job)
        except OSError as error:
            if not self._put_off(cell, reason := f"not started: {error}"):
                self._failed(cell, reason, 1)
            return False
        self._states[cell.id] = State.RUNNING
        return True

    def _rate(self, cell: Cell) -> float | None:
        """The rate chosen for the arm of a cell; None before the tuning stage is complete, or without one."""
        if self._rates is None and all(self._states[trial.id] in SETTLED for trial in self._trials):
            self._rates = lock_choice(self._store.directory)
        return (self._rates or {}).get(cell.arm or "")

    def _stops(self, asked_to_stop: Callable[[], bool]) -> bool:
        if not self._stopped and asked_to_stop():
            self._stopped = True
            self._launcher.ask_to_stop()
        return self._stopped

    def _ended(self, cell: Cell, exit: Exit) -> None:
        code = exit.code
        if self._store.is_settled(cell.id, cell.id in self._required):
            self._ran += 1
            self._settle(cell)
        elif code == BUSY or self._stopped:
            self._states[cell.id] = State.TODO
        elif code == MISPLACED and cell.id not in self._misplaced[exit.reason]:
            # It says nothing about the cell, which counts only if the launcher gives it to that machine again
            if not self._misplaced[exit.reason]:
                self._progress.line(f"{exit.reason}; its cells run elsewhere")
            self._misplaced[exit.reason].add(cell.id)
            self._states[cell.id] = State.TODO
        else:
            reason = exit.reason or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")
            log = "" if exit.reason else f"\n{self._store.log_tail(cell.id)}"
            outage = code == OUTAGE or code in STOPPED
            # What took the process away says nothing about the cell, however often it does
            if (outage or code < 0 or exit.reason) and self._store.saved(cell.id) > self._saved[cell.id]:
                self._outages[cell.id] = self._attempts[cell.id] = 0
                self._states[cell.id] = State.TODO
                self._progress.line(f"{cell}: {reason}; goes on from its newer checkpoint")
                return
            if outage and self._put_off(cell, "; ".join([reason, *log.rstrip().splitlines()[-1:]])):
                return
            # Wrong usage would fail again, and patience is at its end
            self._failed(cell, f"{reason}{log}", 1 if outage or code == USAGE else ATTEMPTS)
            if code == USAGE:
                self._stop_kind(cell)

    def _put_off(self, cell: Cell, reason: str) -> bool:
        """Try a cell again later, whatever else runs meanwhile; False if patience is at its end."""
        if self._outages[cell.id] == len(PATIENCE):
            return False
        seconds = PATIENCE[self._outages[cell.id]]
        self._outages[cell.id] += 1
        self._not_before[cell.id] = time.monotonic() + seconds
        self._states[cell.id] = State.TODO
        self._progress.line(f"{cell}: {reason}; tried again in {duration(seconds)}")
        return True

    def _stop_kind(self, failed: Cell) -> None:
        """Block all cells of a kind if its first one failed with wrong usage, as all of them would.

        Cells of the same stage and arm differ only in beta and seed.
        """
        alike = [one for one in self._cells.values() if (one.stage, one.arm) == (failed.stage, failed.arm)]
        if not any(self._states[cell.id] in SETTLED for cell in alike):
            waiting = [cell for cell in alike if self._states[cell.id] is State.TODO]
            self._block(waiting, f"it would fail like {failed}, with exit code {USAGE}")

    def _block(self, cells: Sequence[Cell], reason: str) -> None:
        for cell in cells:
            self._states[cell.id] = State.BLOCKED
            self._reasons[cell.id] = reason

    def _settle(self, cell: Cell) -> None:
        result = self._store.result(cell.id)
        assert result is not None
        self._states[cell.id] = State(result["state"])
        self._clock.add(cell)
        left = self._clock.left(self._in(State.TODO, State.RUNNING), self._launcher.slots)
        self._progress.settled(cell, result, left)
        if time.monotonic() - self._trimmed >= TRIM_SECONDS:
            self._trim()

    def _trim(self) -> None:
        cells, size = trim(self._store.directory, self._storage * GB)
        self._trimmed = time.monotonic()
        if cells:
            self._progress.line(
                f"removed checkpoints, metrics and studies of {cells} finished cells, {size / GB:.3g} GB, as "
                f"finished cells had more than {self._storage:g} GB; --storage sets another limit"
            )

    def _failed(self, cell: Cell, error: str, attempts: int) -> None:
        self._store.record_failure(cell.id, cell.record(), error)
        self._attempts[cell.id] += 1
        given_up = self._attempts[cell.id] >= attempts
        self._states[cell.id] = State.FAILED if given_up else State.TODO
        self._progress.failed(cell, error, given_up)
