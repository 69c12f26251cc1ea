"""Runs the cells of a plan and publishes one result per cell; can be killed at any time."""

from analysis.sweep.coordinator import (
    Coordinator as Coordinator,
    Ended as Ended,
    State as State,
    survey as survey,
)
from analysis.sweep.eta import Clock as Clock
from analysis.sweep.launchers import Launcher as Launcher
from analysis.sweep.launchers.local import LocalLauncher as LocalLauncher
from analysis.sweep.lock import Locked as Locked, lock as lock
from analysis.sweep.progress import Progress as Progress, duration as duration
from analysis.sweep.store import Store as Store
