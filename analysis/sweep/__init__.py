"""Runs the cells of a plan, each to one published result, whatever is killed on the way."""

from analysis.sweep.coordinator import (
    Coordinator as Coordinator,
    Outcome as Outcome,
    State as State,
    survey as survey,
)
from analysis.sweep.eta import Clock as Clock
from analysis.sweep.launchers import Launcher as Launcher
from analysis.sweep.launchers.local import LocalLauncher as LocalLauncher
from analysis.sweep.lock import Locked as Locked, lock as lock
from analysis.sweep.progress import Progress as Progress, duration as duration
from analysis.sweep.store import Store as Store
