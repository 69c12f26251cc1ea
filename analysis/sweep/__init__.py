"""Runs the cells of a plan and publishes one result per cell; can be killed at any time."""

from analysis.sweep.coordinator import STORAGE as STORAGE, Coordinator as Coordinator
from analysis.sweep.lock import lock as lock
from analysis.sweep.progress import Clock as Clock, Progress as Progress, duration as duration
from analysis.sweep.states import Ended as Ended, State as State, survey as survey
from analysis.sweep.store import Store as Store
