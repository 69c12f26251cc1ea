"""Lightning callbacks: the KL plug-in, monitors, and the files of a run."""

from .checkpoint import RunCheckpoint as RunCheckpoint, StopBetweenSteps as StopBetweenSteps
from .distillation import DistillationMonitor as DistillationMonitor
from .monitors import CompletionTable as CompletionTable, KLMonitor as KLMonitor
from .plug_in import KLEstimatorCallback as KLEstimatorCallback
from .predictions import PredictionWriter as PredictionWriter, RunProgressBar as RunProgressBar
from .recorder import DivergedError as DivergedError, RunRecorder as RunRecorder

# What `help` lists
__all__ = [name for name, value in globals().items() if callable(value) and not name.startswith("_")]
